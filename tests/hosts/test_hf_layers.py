"""Finding decoder layers, and ``residual`` behind them."""

from __future__ import annotations

import accelerate
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    LogitsProcessor,
)

from llm_steer import Params, Plugin, SteerError, UnsupportedError, steer, unsteer
from llm_steer.hosts.hf_layers import find_layers
from support.vocabulary import PAD, THINK

WIDTH = 32


class PushParams(Params):
    strength: float = 3.0


class Push(Plugin[PushParams]):
    """Adds a vector to the hidden states of generated tokens inside a think span, behind some layers."""

    name, Params, at = "push", PushParams, (0,)

    def __init__(self, context):
        super().__init__(context)
        self.strength = torch.zeros(context.num_slots)

    def admit(self, slot, params, prompt_ids):
        self.strength[slot] = params.strength if params else 0.0

    def layers(self):
        return self.at

    def residual(self, layer, hidden, tokens):
        acts = tokens.thinking & ~tokens.is_prompt
        strength = torch.where(acts, self.strength.to(hidden.device)[tokens.slot], 0.0)
        return (strength[:, None] * vector(layer, hidden.shape[1])).to(hidden.dtype)


class PushBehind(Push):
    """Something else behind the last layer, to see whether the order of layers is kept."""

    name, at = "push_behind", (0, 1)


def vector(layer: int, width: int) -> torch.Tensor:
    return torch.linspace(-1, 1, width).roll(5 * layer)


@pytest.fixture(autouse=True)
def plugins(register):
    register(Push)
    register(PushBehind)


@pytest.fixture
def model(tiny_model, tiny_tokenizer):
    return steer(tiny_model(), "push", tokenizer=tiny_tokenizer)


PROMPTS = torch.tensor([[PAD, PAD, 1, THINK, 50], [1, 30, 40, THINK, 51], [PAD, 1, 70, 71, 72]])
INPUTS = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def reference(model, prompt: list[int], count: int, at=(0,), strength: float = 3.0, find=find_layers) -> list[int]:
    """One row, no cache, greedy: the vector is added to generated columns by plain hooks."""

    def hook(layer):
        def push(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden[:, len(prompt) :] += strength * vector(layer, hidden.shape[-1])

        return push

    handles = [find(model)[layer].register_forward_hook(hook(layer)) for layer in at]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    for handle in handles:
        handle.remove()
    return ids[len(prompt) :]


def rows_of(result: torch.Tensor) -> list[list[int]]:
    return result[:, PROMPTS.shape[1] :].tolist()


def expected_rows(model, **options) -> list[list[int]]:
    prompts = [[t for t in row if t != PAD] for row in PROMPTS.tolist()]
    first_two = [reference(model, prompt, 10, **options) for prompt in prompts[:2]]
    return [*first_two, reference(model, prompts[2], 10, at=())]  # the third never thinks


@pytest.mark.parametrize("name", ["push", "push_behind"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_generated_tokens_are_pushed(architecture, name, tiny_model, tiny_tokenizer):
    model = tiny_model(architecture)
    at = {"push": (0,), "push_behind": (0, 1)}[name]
    expected = expected_rows(model, at=at)
    assert expected != expected_rows(model, at=())
    steer(model, name, tokenizer=tiny_tokenizer)
    assert rows_of(model.generate(**INPUTS, **GREEDY)) == expected


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"prefill_chunk_size": 2}, {"cache_implementation": "static"}], ids=str
)
def test_caches_and_prefill_change_nothing(options, model, tiny_model):
    assert rows_of(model.generate(**INPUTS, **GREEDY, **options)) == expected_rows(tiny_model())


def test_layers_that_return_tuples(tiny_tokenizer):
    torch.manual_seed(0)
    config = AutoConfig.for_model("bloom", vocab_size=512, hidden_size=WIDTH, n_layer=2, n_head=2, pad_token_id=PAD)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.dim() > 1 else 1.0)
    seen = []
    handle = find_layers(model)[0].register_forward_hook(lambda module, args, output: seen.append(type(output)))
    expected = expected_rows(model)
    handle.remove()
    assert set(seen) == {tuple}
    assert rows_of(steer(model, "push", tokenizer=tiny_tokenizer).generate(**INPUTS, **GREEDY)) == expected
    assert expected != expected_rows(unsteer(model), at=())


def test_mixed_rows(model, tiny_model):
    """Unsteered rows are bit-identical, others have their own strength."""
    options = GREEDY | {"return_dict_in_generate": True, "output_scores": True}
    plain = tiny_model().generate(**INPUTS, **options)
    mixed = model.generate(**INPUTS, **options, steer=[{"strength": 6}, None, True])
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(plain.scores, mixed.scores, strict=True))
    assert rows_of(mixed.sequences)[0] == reference(tiny_model(), [1, THINK, 50], 10, strength=6.0)
    assert rows_of(mixed.sequences)[0] != rows_of(plain.sequences)[0]


def test_beams_and_drafts(model, tiny_model, tiny_tokenizer):
    prompt = [1, THINK, *[60, 61, 62, 7] * 3]
    ids, options = torch.tensor([prompt]), GREEDY | {"max_new_tokens": 30}
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), greedy)
    assert torch.equal(model.generate(ids, **options, assistant_model=tiny_model("llama", 1)), greedy)
    assert greedy[0, len(prompt) :].tolist() == reference(tiny_model(), prompt, 30)
    # beams with the cache equal beams without: the same vectors for the same tokens, however rows are re-ordered
    cached = model.generate(**INPUTS, **GREEDY, num_beams=4)
    assert torch.equal(cached, model.generate(**INPUTS, **GREEDY, num_beams=4, use_cache=False))
    assert not torch.equal(cached, model.generate(**INPUTS, **GREEDY, num_beams=4, steer="off"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_recorded_hidden_states_show_the_steering(when, tiny_model, tiny_tokenizer):
    """Whether transformers installed its hooks, which record them, before or after ours."""
    model, options = tiny_model(), GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True}
    plain = [model.generate(**INPUTS, **options)] if when == "before" else []
    steer(model, "push", tokenizer=tiny_tokenizer)
    result = model.generate(**INPUTS, **options, steer=[True, None, None])
    plain = plain or [model.generate(**INPUTS, **options, steer="off")]
    # The first generated token is fed in the second pass; the rows before have seen the same ids.
    difference = result.hidden_states[1][1] - plain[0].hidden_states[1][1]
    assert torch.allclose(difference[0, 0], 3.0 * vector(0, WIDTH), atol=1e-4)
    assert torch.equal(difference[1:], torch.zeros_like(difference[1:]))
    assert torch.equal(result.hidden_states[0][1], plain[0].hidden_states[0][1])  # prompts are not pushed


def test_forward_passes_that_generate_did_not_prepare_are_not_steered(model, tiny_model):
    plain, ids = tiny_model(), torch.tensor([[1, THINK, 50]])
    assert torch.equal(model(ids).logits, plain(ids).logits)
    inside = []

    class CallsTheModel(LogitsProcessor):
        def __call__(self, input_ids, scores):
            inside.append(torch.equal(model(input_ids[:, -1:]).logits, plain(input_ids[:, -1:]).logits))
            return scores

    model.generate(ids, **GREEDY, logits_processor=[CallsTheModel()])
    assert inside == [True] * 10


def test_layers_that_are_not_reached_are_an_error(model):
    """Never silently unsteered: a loop that prepares nothing, a layer that is not called as a module."""

    def without_preparation(model, input_ids, logits_processor, **kwargs):
        return logits_processor(input_ids, model(input_ids).logits[:, -1])

    with pytest.raises(UnsupportedError, match=r"layers \[0\] were not steered"):
        model.generate(**INPUTS, custom_generate=without_preparation)
    layer = find_layers(model)[0]
    model.model.layers[0] = Detour(layer)
    with pytest.raises(UnsupportedError, match=r"layers \[0\] were not steered"):
        model.generate(**INPUTS, **GREEDY)


class Detour(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer.forward(*args, **kwargs)


def test_compiled_forward_passes_are_steered(model, tiny_model):
    """A static cache makes generate compile the forward pass on accelerators; here it is asked to."""
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compiled, "do_sample": False, "max_new_tokens": 4}
    prompt = [1, THINK, 50]
    pushed, more = (reference(tiny_model(), prompt, 4, strength=strength) for strength in (3.0, 6.0))
    assert pushed != more
    assert model.generate(torch.tensor([prompt]), **options)[0, 3:].tolist() == pushed
    # what was traced for one call does not go on into the next
    assert model.generate(torch.tensor([prompt]), **options, steer={"strength": 6})[0, 3:].tolist() == more


def test_hooks_are_there_while_they_are_needed(tiny_model, tiny_tokenizer):
    model = tiny_model()

    def hooks() -> list[int]:
        return [len(layer._forward_hooks) for layer in find_layers(model)]

    before = hooks()
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer)
    model.generate(**INPUTS, **GREEDY)
    assert hooks() == before == [0, 0]
    for _ in range(2):
        model.generate(**INPUTS, **GREEDY, steer="push")
        assert hooks() == [1, 0]
    model.generate(**INPUTS, **GREEDY, steer=["push_behind", None, "push"])
    assert hooks() == [1, 1]
    steer(model, "push", tokenizer=tiny_tokenizer)
    model.generate(**INPUTS, **GREEDY)
    assert hooks() == [1, 0]
    unsteer(model)
    assert hooks() == [0, 0]


def test_layers_that_are_not_there(tiny_model, tiny_tokenizer, register):
    class TooDeep(Push):
        name, at = "too_deep", (1, 2)

    register(TooDeep)
    model = tiny_model()
    for method in ("too_deep", ["push", "too_deep"]):
        with pytest.raises(UnsupportedError, match=r"layer 2 is to be steered, but the model has layers 0 to 1"):
            steer(model, method, tokenizer=tiny_tokenizer)
    assert not hasattr(model, "steering")
    steer(model, "push", tokenizer=tiny_tokenizer)
    with pytest.raises(UnsupportedError, match="layer 2"):
        model.generate(**INPUTS, **GREEDY, steer="too_deep")


def test_models_that_accelerate_keeps_elsewhere(tiny_model, tiny_tokenizer, tmp_path):
    """Weights on the meta device between uses: nothing here may look at them or at their device."""
    expected, both = expected_rows(tiny_model()), ["push", {"name": "reflection_cycle", "amplitude": 6, "period": 5}]
    wave_too = steer(tiny_model(), both, tokenizer=tiny_tokenizer).generate(**INPUTS, **GREEDY)
    for offload in (
        lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
        lambda model: accelerate.disk_offload(model, str(tmp_path), execution_device="cpu"),
    ):
        model = offload(tiny_model())
        assert model.lm_head.weight.device.type == "meta"
        steer(model, "push", tokenizer=tiny_tokenizer)
        assert rows_of(model.generate(**INPUTS, **GREEDY)) == expected
        assert torch.equal(model.generate(**INPUTS, **GREEDY, steer=[both] * 3), wave_too)


# -- finding layers ------------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("architecture", "sizes", "path"),
    [
        ("llama", TINY, "model.layers"),
        ("qwen2", TINY, "model.layers"),
        ("qwen3", TINY, "model.layers"),
        ("mistral", TINY, "model.layers"),
        ("gemma3_text", TINY, "model.layers"),
        ("phi3", {**TINY, "pad_token_id": 0}, "model.layers"),
        ("gpt2", {"n_layer": 3, "n_embd": 32, "n_head": 2}, "transformer.h"),
        ("gpt_neox", TINY, "gpt_neox.layers"),
        ("gpt_neo", {"num_layers": 4, "attention_types": [[["global"], 4]], "hidden_size": 32}, "transformer.h"),
        ("bloom", {"n_layer": 3, "hidden_size": 32, "n_head": 2}, "transformer.h"),
        ("falcon", TINY, "transformer.h"),
        ("mpt", {"n_layers": 3, "d_model": 32, "n_heads": 2}, "transformer.blocks"),
        ("opt", {**TINY, "ffn_dim": 32, "word_embed_proj_dim": 32}, "model.decoder.layers"),
        ("mamba", {"num_hidden_layers": 3, "hidden_size": 32}, "backbone.layers"),
    ],
)
def test_find_layers(architecture, sizes, path):
    config = AutoConfig.for_model(architecture, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert find_layers(model) is model.get_submodule(path)
    assert find_layers(model, path) is model.get_submodule(path)


@pytest.mark.parametrize(
    ("auto", "architecture", "path"),
    [
        (AutoModelForSeq2SeqLM, "bart", "model.decoder.layers"),
        (AutoModelForSeq2SeqLM, "t5", "decoder.block"),
        (AutoModelForImageTextToText, "llava", "model.language_model.layers"),
        (AutoModelForImageTextToText, "qwen2_vl", "model.language_model.layers"),
        (AutoModelForImageTextToText, "blip-2", "language_model.model.decoder.layers"),
        (AutoModelForImageTextToText, "florence2", "model.language_model.decoder.layers"),
    ],
)
def test_find_layers_of_models_with_other_layers_too(auto, architecture, path):
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(architecture))
    assert find_layers(model) is model.get_submodule(path)


def test_layers_path(tiny_model, tiny_tokenizer):
    model = tiny_model()
    model.model.others = torch.nn.ModuleList([type(model.model.layers[0])(model.config, i) for i in range(2)])
    with pytest.raises(UnsupportedError, match=r'2 decoder layers of LlamaForCausalLM.*layers_path="model.layers"'):
        steer(model, "push", tokenizer=tiny_tokenizer)
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer)  # needs no layers
    for wrong, message in (("model.layer", "has no attribute `layer`"), ("model", "of a ModuleList, not of a LlamaModel")):
        with pytest.raises(SteerError, match=f"layers_path: got '{wrong}'.*{message}"):
            steer(model, "push", tokenizer=tiny_tokenizer, layers_path=wrong)
    steer(model, "push", tokenizer=tiny_tokenizer, layers_path="model.layers")
    assert rows_of(model.generate(**INPUTS, **GREEDY)) == expected_rows(tiny_model())
