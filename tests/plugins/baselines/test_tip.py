"""The thought-switching penalty against its definition, read off a request's whole list of ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.baselines import Tip, TipParams
from llm_steer.plugins.reflection_cycle import ReflectionCycle, ReflectionCycleParams

from core_oracles import CPU, Ids, long, one_of, states
from core_tokenizers import byte_level
from llm_steer import SteerError
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime, replay
from llm_steer.spec import Steer
from llm_steer.tokens import Vocabulary
from support.portions import in_portions

THINK, END, VOCAB = 1, 2, 16
MARKERS = Markers(((THINK,),), ((END,),))
ID = st.integers(0, VOCAB - 1) | st.sampled_from([THINK, END, 3, 3, 4])


@st.composite
def parameters(draw: st.DrawFn) -> TipParams:
    return TipParams(
        alpha=draw(st.sampled_from([3.0, -1.5, 7.25])),
        beta=draw(st.integers(1, 12)),
        mode=draw(st.sampled_from(["thought", "absolute"])),
        origin=draw(st.sampled_from(["think", "output"])),
        token_ids=draw(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=3)),
    )


def penalty(params: TipParams, ids: Ids, prompt_len: int) -> float | None:
    """What is added to switch tokens for the token that follows ``ids``; None where nothing is done."""
    state = states(ids, prompt_len, one_of([[THINK]]), one_of([[END]]))[-1] if ids else None
    thinking, ended = (state.thinking, state.ended) if state else (False, False)
    if ended or (params.origin == "think" and not thinking):
        return None
    t = len(ids) - prompt_len
    start = 0 if params.origin == "output" else (state.start or 0) - prompt_len
    if params.mode == "thought":
        start = max([start, *(n for n, token in enumerate(ids[prompt_len:]) if token in params.token_ids)])
    return -params.alpha if t - start < params.beta else None


def steer(params):
    return (Steer(Tip, params),)


def check(runtime: Runtime, slot: int, params: TipParams | None, ids: Ids, prompt_len: int) -> None:
    before = torch.randn(1, VOCAB)
    before[0, 5] = -torch.inf
    after = before.clone()
    runtime.logits(after, long(slot), long(len(ids) - 1))
    delta = penalty(params, ids, prompt_len) if params else None
    expected = before.clone()
    if delta is not None:
        expected[0, sorted(set(params.token_ids))] += delta
    assert torch.equal(after, expected), (params, ids, prompt_len)


REQUEST = st.tuples(parameters(), st.lists(ID, min_size=1, max_size=6), st.lists(ID, max_size=30))


@given(requests=st.lists(REQUEST, min_size=1, max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_in_any_portions_with_drafts_that_are_taken_back(requests, data):
    runtime = Runtime(Context(num_slots=len(requests) + 1, device=CPU, vocab_size=VOCAB), MARKERS)
    for slot, (params, prompt, _) in enumerate(requests):
        runtime.admit(slot, steer(data.draw(parameters())), long(9, 9))
        runtime.admit(slot, steer(params), long(*prompt))
    for done in in_portions(runtime, requests, ID, data):
        for slot, (params, prompt, output) in enumerate(requests):
            check(runtime, slot, params, prompt + output[: done[slot]], len(prompt))


@given(request=REQUEST, more=st.lists(ID, min_size=150, max_size=300))
@settings(max_examples=20, deadline=None)
def test_after_a_preemption_everything_is_fed_again(request, more):
    params, prompt, output = request
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    output = output + more
    runtime.admit(0, steer(params), long(*prompt), long(*output))
    ids = prompt + output
    runtime.forward(long(*ids), long(*[0] * len(ids)), torch.arange(len(ids)))
    check(runtime, 0, params, ids, len(prompt))


@given(request=REQUEST)
@settings(max_examples=100, deadline=None)
def test_the_trace(request):
    params, prompt, output = request
    deltas = [penalty(params, prompt + output[:n], len(prompt)) for n in range(len(output))]
    where = [n for n, token in enumerate(output) if token in params.token_ids]
    (part,) = replay(steer(params), MARKERS, VOCAB, prompt, output)["plugins"]
    assert part["steered_steps"] == sum(d is not None for d in deltas)
    assert part["positions"] == where
    assert part["deltas"] == [deltas[n] or 0.0 for n in where]


@given(prompt=st.lists(ID, min_size=1, max_size=4), output=st.lists(ID, max_size=30), beta=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_absolute_is_a_constant_wave_in_a_window(prompt, output, beta):
    """As CyclicReflex's code runs it: the two ways of asking for it agree."""
    tip = TipParams(mode="absolute", alpha=3, beta=beta, origin="output", token_ids=[3, 4])
    wave = ReflectionCycleParams(
        schedule="constant", amplitude=-3, window=[[0, beta]], origin="output", after_end="off", token_ids=[3, 4]
    )
    results = []
    for cls, params in ((Tip, tip), (ReflectionCycle, wave)):
        runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
        runtime.admit(0, (Steer(cls, params),), long(*prompt))
        for n, token in enumerate(output):
            runtime.forward(long(token), long(0), long(len(prompt) + n), single=True)
        logits = torch.zeros(1, VOCAB)
        runtime.logits(logits, long(0), long(len(prompt) + len(output) - 1))
        results.append(logits)
    assert torch.equal(*results)


def test_a_request_that_does_not_steer_keeps_its_bits():
    runtime = Runtime(Context(num_slots=3, device=CPU, vocab_size=VOCAB), MARKERS)
    params = TipParams(origin="output", token_ids=[0, 3])
    runtime.admit(0, steer(params), long(9))
    before = torch.randn(2, VOCAB)
    before[1, 0] = -0.0
    after = before.clone()
    runtime.logits(after, long(0, runtime.context.nobody), long(0, 0))
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1].view(torch.int32), before[1].view(torch.int32))


def test_words():
    vocabulary = Vocabulary(byte_level(), len(byte_level()))
    resolved = TipParams().resolve(vocabulary)
    assert resolved.resolve(vocabulary) == resolved == resolved.resolve(None)
    assert resolved.token_ids == vocabulary.words(["wait", "Wait", "but", "But", "Alternatively"]).ids
    with pytest.raises(SteerError, match="one piece"):
        TipParams(words=["qqzzqq"]).resolve(vocabulary)
    with pytest.raises(SteerError, match="token_ids"):
        TipParams().resolve(None)
