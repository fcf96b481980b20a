"""Any text comes back as it was, and the words that steering looks for are single tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.eval.testbed.data import example
from llm_steer.eval.testbed.recipes import RECIPES
from llm_steer.eval.testbed.tokenizer import build
from llm_steer.eval.testbed.traces import COUNTS, LAST_END, REFLECTIONS, STEP_END

from llm_steer.tokens import Vocabulary

TOKENIZER = build()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip_of_traces(name: str) -> None:
    rng = random.Random(0)
    for _ in range(100):
        problem, trace = example(RECIPES[name], rng, RECIPES[name].steps)
        ids = TOKENIZER.encode(problem.prompt + trace.text, add_special_tokens=False)
        assert TOKENIZER.decode(ids) == problem.prompt + trace.text
        assert len(ids) < 0.6 * len(problem.prompt + trace.text)


@pytest.mark.parametrize(
    "text",
    [
        *REFLECTIONS,
        *(f" {word}" for word in REFLECTIONS),
        *(count for count in COUNTS if count),
        "\n\n",
        "<think>",
        "</think>",
        "\\boxed{",
        "7",
    ],
)
def test_single_tokens(text: str) -> None:
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) == 1


def test_the_vocabulary_of_steering_finds_them() -> None:
    vocabulary = Vocabulary(TOKENIZER, len(TOKENIZER))
    assert vocabulary.has_think_markers
    pieces = {vocabulary.piece(form) for word in REFLECTIONS for form in (word, " " + word)}
    assert None not in pieces
    assert len(pieces) == 8
    for end in (STEP_END, LAST_END):
        assert TOKENIZER.encode(end, add_special_tokens=False)[0] in vocabulary.step_delimiters


def test_chat_template_opens_thinking() -> None:
    messages = [{"role": "system", "content": "code"}, {"role": "user", "content": "Is it wet?"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>code<|user|>Is it wet?<|assistant|><think>"
    done = [*messages, {"role": "assistant", "content": "</think>\\boxed{True}"}]
    assert str(TOKENIZER.apply_chat_template(done, tokenize=False)).endswith("<|assistant|></think>\\boxed{True}<|end|>")


def test_ids_are_fixed() -> None:
    """Checkpoints depend on them: pieces are only ever appended."""
    assert TOKENIZER.encode("Wait Wait\n\n7</think><|end|>", add_special_tokens=False) == WAIT_IDS
    assert len(TOKENIZER) <= RECIPES["logic"].vocab_size


WAIT_IDS = [280, 281, 263, 29, 6, 1]
