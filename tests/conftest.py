"""Tiny random models and a tokenizer with think markers, for every test folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from llm_steer import Plugin, registry
from support.vocabulary import BOS, EOS, PAD, SPECIAL, VOCABULARY, WORDS


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    pieces = SPECIAL + WORDS
    pieces += [f"w{i}" for i in range(VOCABULARY - len(pieces))]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}<think>"
    return tokenizer


@cache
def _model(architecture: str, seed: int) -> PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    if architecture == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024}
    config = AutoConfig.for_model(
        architecture, vocab_size=VOCABULARY, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **sizes
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # logits spread over some units, and what the layers write matters
                weight.mul_(20.0 if "embed" in name or "wte" in name or "wpe" in name else 8.0)
        head = model.get_output_embeddings().weight
        model.get_output_embeddings().weight = torch.nn.Parameter(head * (0.2 if head.std() > 0.3 else 1.0))
    return model


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, 512 pieces, with pieces for the think markers and the five reflection words; pads on the left."""
    return _tokenizer()


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model("llama")``: a fresh copy of a random model of 2 layers; also ``"qwen2"``, ``"gpt2"``, ``"gemma"``."""

    def build(architecture: str = "llama", seed: int = 0) -> PreTrainedModel:
        return copy.deepcopy(_model(architecture, seed))

    return build


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Plugin]], type[Plugin]]]:
    """``register(MyPlugin)``: as if a package that ships this plugin were installed."""

    def add(plugin: type[Plugin]) -> type[Plugin]:
        monkeypatch.setitem(registry._entry_points(), plugin.name, SimpleNamespace(value=plugin.name, load=lambda: plugin))
        registry.get.cache_clear()
        return plugin

    yield add
    registry.get.cache_clear()
