"""Every family of decoders: its layers are found, and what is added to its stream is what transformers records."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5OmniForConditionalGeneration,
)

from llm_steer import Params, Plugin, UnsupportedError, steer
from llm_steer.hosts.hf_layers import find_layers

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}

FAMILIES = "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 cohere cohere2 granite stablelm "
FAMILIES += "starcoder2 smollm3 glm glm4 nemotron exaone4 ernie4_5 seed_oss ministral3 arcee apertus helium bitnet "
FAMILIES += "hunyuan_v1_dense gpt_neox gptj gpt2 opt bloom falcon mpt gpt_neo"
EXPERTS = "mixtral qwen3_moe olmoe minimax gpt_oss"
PATHS = {
    **dict.fromkeys(["gpt2", "gptj", "gpt_neo", "bloom", "falcon"], "transformer.h"),
    "mpt": "transformer.blocks",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
}
OWN = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global"], 3]], "num_heads": 2, "hidden_size": 32},
    "bloom": {"n_layer": 3, "hidden_size": 32, "n_head": 2},
    "falcon": {name: value for name, value in SIZES.items() if name != "head_dim"},
    "mpt": {"n_layers": 3, "d_model": 32, "n_heads": 2, "max_seq_len": 64},
    "opt": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32},
    **{name: {**SIZES, **MOE} for name in EXPERTS.split()},
    "minimax": {**SIZES, **MOE, "layer_types": ["full_attention"] * 3},
}


def build(architecture: str):
    sizes = OWN.get(architecture, {**SIZES, **(MOE if architecture in ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"] else {})})
    config = AutoConfig.for_model(architecture, **{"vocab_size": 512, "pad_token_id": 0, **sizes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class Add(Plugin[Params]):
    """Adds a vector behind the middle layer to everything that is generated."""

    name = "add"
    vector = torch.linspace(-1, 1, 32)

    def __init__(self, context):
        super().__init__(context)
        self.on = torch.zeros(context.num_slots)

    def admit(self, slot, params, prompt_ids):
        self.on[slot] = params is not None

    def layers(self):
        return [1]

    def residual(self, layer, hidden, tokens):
        return ((self.on[tokens.slot] * ~tokens.is_prompt)[:, None] * self.vector).to(hidden.dtype)


@pytest.mark.parametrize("architecture", [*FAMILIES.split(), *EXPERTS.split()])
def test_the_recorded_stream_is_the_steered_one(architecture, tiny_tokenizer, register):
    register(Add)
    model = build(architecture)
    assert find_layers(model) is model.get_submodule(PATHS.get(architecture, "model.layers"))
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    options |= {"output_hidden_states": True, "output_logits": True}
    plain = model.generate(**inputs, **options)
    result = steer(model, "add", tokenizer=tiny_tokenizer).generate(**inputs, **options, steer=[True, None])
    assert torch.equal(plain.hidden_states[0][2], result.hidden_states[0][2])  # the prompts
    difference = result.hidden_states[1][2] - plain.hidden_states[1][2]
    assert torch.allclose(difference[0, -1], Add.vector, atol=1e-5)  # mpt has no cache by default: the last column
    assert not torch.equal(plain.logits[1][0], result.logits[1][0])
    # The row that is not steered. Experts multiply the tokens of all rows that chose them together: it rounds differently.
    tolerance = 1e-5 if architecture in EXPERTS.split() else 0.0
    for name in ("logits", "hidden_states"):
        for a, b in zip(getattr(plain, name), getattr(result, name), strict=True):
            for x, y in [(a, b)] if name == "logits" else zip(a, b, strict=True):
                assert torch.allclose(x[1], y[1], atol=tolerance, rtol=0)


LATER = "qwen3_next qwen3_5_text deepseek_v2 deepseek_v3 glm4_moe lfm2 jamba falcon_h1 llama4_text gemma4_text mamba "
LATER += "minimax_m2 dots1 phi4_multimodal"
LACKING = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 1}}
"""What a default configuration lacks."""


@pytest.mark.parametrize("architecture", LATER.split())
def test_layers_of_larger_families(architecture):
    config = AutoConfig.for_model(architecture, **LACKING.get(architecture, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = find_layers(model)
    assert len(layers) == config.num_hidden_layers
    assert layers is model.get_submodule("backbone.layers" if architecture == "mamba" else "model.layers")


WRAPPERS = {
    **dict.fromkeys(["llava", "qwen2_vl", "qwen3_vl", "gemma3", "mllama", "internvl"], "model.language_model.layers"),
    "llama4": "language_model.model.layers",
    "kosmos-2": "text_model.model.layers",
}


@pytest.mark.parametrize(("architecture", "path"), list(WRAPPERS.items()))
def test_layers_of_wrappers(architecture, path):
    try:
        config = AutoConfig.for_model(architecture)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
    except ValueError:
        pytest.skip("this version of transformers has no such model for images and text")
    assert find_layers(model) is model.get_submodule(path)


def test_a_model_of_two_stacks_takes_the_path():
    """A thinker and a talker of as many layers: which is meant, nobody but the user can say."""
    config = AutoConfig.for_model("qwen2_5_omni")
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    with pytest.raises(UnsupportedError, match="layers_path"):
        find_layers(model)
    # model.thinker.model.layers in transformers 5.19, model.thinker.model.language_model.layers in 5.24
    (path,) = (
        name
        for name, module in model.thinker.named_modules(prefix="thinker")
        if isinstance(module, torch.nn.ModuleList) and "DecoderLayer" in type(module[0]).__name__
    )
    assert find_layers(model, path) is model.get_submodule(path)
