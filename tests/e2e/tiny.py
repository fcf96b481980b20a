"""Tiny random models with a tokenizer that knows think markers, as Hugging Face folders that vLLM's CPU build can run."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
ARCHITECTURES = ("llama", "qwen2", "gemma", "gpt2")
FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3"),
    *("gpt2", "gpt_neox", "olmo2", "cohere", "mixtral"),
)
"""Architectures whose decoder layers differ in what they return."""
WORDS = ("wait", "Wait", "but", "But", "Alternatively", "Hmm", "so", "the", "is", "a", "one", "two", "three", "four")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<think>", "</think>", "\n\n")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant <think>{% endif %}"
)

_SCALES = (
    ("embed_tokens", 20.0),
    ("wte", 20.0),
    ("wpe", 20.0),
    ("o_proj", 100.0),
    ("down_proj", 100.0),
    ("c_proj", 100.0),
    ("attention.dense", 100.0),
    ("dense_4h_to_h", 100.0),
    ("w2", 100.0),
    ("experts.down", 100.0),
    ("", 8.0),
)
"""What random weights are multiplied with, by part of their name: logits spread, so that near-ties do not decide a token,
and what the layers write outweighs the embedding, or tied embeddings would have the model repeat its last token."""


POST_NORM = {"gemma2": 10.0, "gemma3_text": 10.0, "olmo2": 10.0}
"""Weights of the norms behind attention and MLP, where there are some: they say how much a layer writes."""


def tokenizer():
    """Word-level: 512 pieces, so that every id the model can emit decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *WORDS]
    pieces += [f"w{i}" for i in range(VOCABULARY - len(pieces))]
    inner = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.add_tokens(["<think>", "</think>"], special_tokens=False)
    fast.chat_template = TEMPLATE
    return fast


def scale(name: str) -> float:
    """What a random weight is multiplied with."""
    return next(factor for part, factor in _SCALES if part in name)


def build(architecture: str, folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """Save a model of 2 layers, d = 64, head size 32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    if architecture == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "gpt_neox":
        del sizes["num_key_value_heads"], sizes["head_dim"]
    if architecture == "gpt2":
        sizes = {"n_embd": 64, "n_layer": layers, "n_head": 2, "n_positions": 1024}
    config = AutoConfig.for_model(architecture, **common, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(scale(name))
            elif "post_" in name and architecture in POST_NORM:
                weight.fill_(POST_NORM[architecture])
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
