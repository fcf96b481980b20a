"""A tiny random model with a tokenizer that knows the think markers, for quick runs: it says nothing about real speed."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<think>", "</think>"]
WORDS = ["wait", "Wait", "but", "But", "Alternatively"]


def build(folder: Path) -> Path:
    """Save a Llama of two layers, 64 wide, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = SPECIAL + WORDS
    pieces += [f"w{i}" for i in range(VOCABULARY - len(pieces))]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
