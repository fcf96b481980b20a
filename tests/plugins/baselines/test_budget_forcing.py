"""Ends of thinking that become another word, as often as was asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.baselines import BudgetForcing, BudgetForcingParams

from core_oracles import CPU, long
from core_tokenizers import byte_level
from llm_steer import SteerError
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime
from llm_steer.spec import Steer
from llm_steer.tokens import Vocabulary

THINK, END, WAIT, VOCAB = 1, 2, 3, 8
MARKERS = Markers(((THINK,),), ((END,),))


def steer(ignore):
    return (Steer(BudgetForcing, BudgetForcingParams(ignore=ignore, word_id=WAIT, end_id=END)),)


@given(
    wishes=st.lists(st.sampled_from([END, 4, 5, THINK]), min_size=1, max_size=14),
    ignore=st.integers(0, 4),
    again=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_a_greedy_model_that_wants_these_tokens(wishes, ignore, again):
    """Each step is computed several times: only where it stands counts."""
    runtime = Runtime(Context(num_slots=3, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(1, steer(ignore), long(7, THINK))
    thinking, forced, expected, said = True, 0, [], []
    for n, wish in enumerate(wishes):
        logits = torch.full((1, VOCAB), -1.0)
        logits[0, wish] = 5.0
        if thinking and forced < ignore:
            want = WAIT if wish == END else wish
            forced += wish == END
        else:
            want = wish
        expected.append(want)
        for _ in range(again):
            after = logits.clone()
            runtime.logits(after, long(1), long(n + 1))
        assert bool(after[0, END].isneginf()) is (thinking and forced - (want == WAIT) < ignore)
        said.append(int(after.argmax()))
        thinking = (thinking and want != END) or want == THINK
        runtime.forward(long(want), long(1), long(n + 2), single=True)
    assert said == expected
    (part,) = runtime.trace(1, long(*said))["plugins"]
    assert part["forced"] == forced
    assert part["positions"] == [n for n, token in enumerate(said) if token == WAIT]


def test_a_forced_word_leaves_no_other_a_chance():
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(1), long(THINK))
    logits = torch.zeros(1, VOCAB)
    logits[0, END] = 9.0
    runtime.logits(logits, long(0), long(0))
    assert logits.softmax(1)[0, WAIT] == 1.0


def test_a_masked_word_stays_masked_and_others_keep_their_bits():
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(1), long(THINK))
    logits = torch.randn(2, VOCAB)
    logits[0, END], logits[0, WAIT] = 9.0, -torch.inf
    before = logits.clone()
    runtime.logits(logits, long(0, runtime.context.nobody), long(0, 0))
    assert logits[0, WAIT].isneginf()
    assert torch.equal(logits[1].view(torch.int32), before[1].view(torch.int32))


def test_the_next_owner_of_a_slot_starts_anew():
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    for _ in range(2):
        runtime.admit(0, steer(1), long(THINK))
        logits = torch.zeros(1, VOCAB)
        logits[0, END] = 9.0
        runtime.logits(logits, long(0), long(0))
        assert logits.argmax() == WAIT


def test_parameters():
    vocabulary = Vocabulary(byte_level(), len(byte_level()))
    with pytest.raises(SteerError, match="one piece"):
        BudgetForcingParams(word="no such piece").resolve(vocabulary)
    with pytest.raises(SteerError, match="end_id"):
        BudgetForcingParams(word_id=1).resolve(None)
    resolved = BudgetForcingParams(word_id=1, end_id=2).resolve(vocabulary)
    assert resolved.resolve(None) == resolved
