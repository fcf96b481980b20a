"""A tokenizer of some five hundred pieces: every byte, the words of the tasks, and the markers of a reasoning model.

It spells like GPT-2 (``Ġ`` for a leading space), so any text comes back as it was, and words that the tasks do not use
fall into bytes. Digits stand alone. Every word has a piece with and one without a leading space.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llm_steer.eval.testbed import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)
"""Pieces that decoding may skip."""
MARKERS = ("<think>", "</think>")
"""Pieces that decoding keeps, as R1's and Qwen3's tokenizers do."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)

_BYTE, _PIECE = -4.0, -1.0
# Scores of a unigram model: the split with the fewest, longest pieces wins.


def build(pieces: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Make the tokenizer.

    Args:
        pieces: texts that are one token each; the vocabulary of all tasks when left out.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The pre-tokenizer's alphabet comes as a set: sorted, so that ids are the same in every process.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = ["".join(part for part, _ in level.pre_tokenize_str(piece)) for piece in pieces or vocabulary.pieces()]
    words = [piece for piece in dict.fromkeys(spelled) if len(piece) > 1]
    scored = [*((marker, 0.0) for marker in (*SPECIAL, *MARKERS)), *((byte, _BYTE) for byte in alphabet)]
    tokenizer = Tokenizer(models.Unigram([*scored, *((word, _PIECE) for word in words)]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
