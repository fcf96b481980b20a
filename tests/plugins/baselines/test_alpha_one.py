"""AlphaOne against its rules, read off a request's whole list of ids, and against what replacing drawn words comes to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.baselines import AlphaOne, AlphaOneParams

from core_oracles import CPU, Ids, State, long, one_of, states
from core_tokenizers import byte_level
from llm_steer import SteerError
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime, replay
from llm_steer.spec import Steer
from llm_steer.tokens import Vocabulary
from support.portions import in_portions

THINK, END, WAIT, SPACED, BLANK, LINE, VOCAB = 1, 2, 3, 4, 5, 6, 12
ID = st.integers(0, VOCAB - 1) | st.sampled_from([THINK, END, BLANK, BLANK, LINE])
WORDS = {"word_id": WAIT, "slow_ids": [WAIT, SPACED], "end_id": END}


def flags(*ids: int) -> torch.Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, long(*ids), True)


MARKERS = Markers(((THINK,),), ((END,),), flags(BLANK), flags(LINE), flags(LINE))


def params(**fields) -> AlphaOneParams:
    return AlphaOneParams(**WORDS, **fields)


parameters = st.builds(
    params,
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    think_tokens=st.sampled_from([4.0, 10.0, 40.0]),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.6, 1.0, 2.0]),
)
REQUEST = st.tuples(parameters, st.lists(ID, min_size=1, max_size=6), st.lists(ID, max_size=30))


def mix(x: int) -> int:
    """SplitMix64's finalizer on a signed number of 64 bits, whose shifts keep the sign."""

    def signed(n: int) -> int:
        return (n + 2**63) % 2**64 - 2**63

    x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
    x = signed((x ^ (x >> 27)) * 0x94D049BB133111EB)
    return x ^ (x >> 31)


def draw(seed: int, output: Ids) -> float:
    """In [0, 1): a function of the seed and of every token so far."""
    state = sum(mix(mix(n) + token) for n, token in enumerate(output)) % 2**62
    return mix((state + mix(seed) + 2**63) % 2**64 - 2**63) % 2**53 / 2**53


def decide(p: AlphaOneParams, ids: Ids, prompt_len: int) -> str | None:
    """What is done to the token behind ``ids``: ``"wait"``, ``"end"`` or nothing."""
    state = states(ids, prompt_len, one_of([[THINK]]), one_of([[END]]))[-1] if ids else State()
    if not state.thinking:
        return None
    t = len(ids) - (state.start or 0)
    moment = p.alpha * p.think_tokens
    if t >= moment:
        return "end"
    blank = ids[-1] == BLANK or list(ids[-2:]) == [LINE, LINE]
    output = ids[prompt_len:]
    return "wait" if output and blank and draw(p.seed, output) < 1 - t / moment else None


def expected(p: AlphaOneParams | None, logits: torch.Tensor, ids: Ids, prompt_len: int) -> torch.Tensor:
    """The distribution at the request's temperature, as drawing first and replacing then has it."""
    heat = p.temperature if p else 1.0
    probability = (logits.double() / heat).softmax(0)
    what = decide(p, ids, prompt_len) if p else None
    if what == "wait":
        return torch.zeros(VOCAB, dtype=torch.float64).index_fill_(0, long(WAIT), 1.0)
    if what == "end":
        probability[END] += probability[WAIT] + probability[SPACED]
        probability[[WAIT, SPACED]] = 0
    return probability


def check(runtime: Runtime, slot: int, p: AlphaOneParams, ids: Ids, prompt_len: int) -> None:
    before = torch.randn(1, VOCAB)
    after = before.clone()
    runtime.logits(after, long(slot), long(len(ids) - 1))
    got = (after[0].double() / p.temperature).softmax(0)
    assert torch.allclose(got, expected(p, before[0], ids, prompt_len), atol=1e-6), (p, ids, prompt_len)
    if decide(p, ids, prompt_len) is None:
        assert torch.equal(after, before)


def steer(p):
    return (Steer(AlphaOne, p),)


@given(requests=st.lists(REQUEST, min_size=1, max_size=4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_in_any_portions_with_drafts_that_are_taken_back(requests, data):
    runtime = Runtime(Context(num_slots=len(requests) + 1, device=CPU, vocab_size=VOCAB), MARKERS)
    for slot, (p, prompt, _) in enumerate(requests):
        runtime.admit(slot, steer(data.draw(parameters)), long(9, 9))
        runtime.admit(slot, steer(p), long(*prompt))
    for done in in_portions(runtime, requests, ID, data):
        for slot, (p, prompt, output) in enumerate(requests):
            check(runtime, slot, p, prompt + output[: done[slot]], len(prompt))


@given(request=REQUEST, more=st.lists(ID, min_size=150, max_size=300))
@settings(max_examples=20, deadline=None)
def test_after_a_preemption_everything_is_fed_again(request, more):
    p, prompt, output = request
    ids = prompt + output + more
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(p), long(*prompt), long(*ids[len(prompt) :]))
    runtime.forward(long(*ids), long(*[0] * len(ids)), torch.arange(len(ids)))
    check(runtime, 0, p, ids, len(prompt))


@given(request=REQUEST)
@settings(max_examples=100, deadline=None)
def test_the_trace(request):
    p, prompt, output = request
    done = [decide(p, prompt + output[:n], len(prompt)) for n in range(len(output))]
    (part,) = replay(steer(p), MARKERS, VOCAB, prompt, output)["plugins"]
    assert part["positions"] == [n for n, what in enumerate(done) if what == "wait"]
    assert part["forced"] == done.count("wait")
    assert part["ending_steps"] == done.count("end")
    assert part["steered_steps"] == len(done) - done.count(None)


@pytest.mark.parametrize(("t", "rate"), [(1, 0.95), (5, 0.75), (15, 0.25), (19, 0.05)])
def test_the_word_is_said_as_often_as_the_schedule_says(t, rate):
    """Outputs that differ in their first tokens: the draws of seed 0 are those of a fair die."""
    outputs = [[7 + (k >> n & 1) for n in range(min(t - 1, 11))] + [7] * max(0, t - 12) + [BLANK] for k in range(2048)]
    if t <= 11:  # too short to be told apart: the seed tells
        said = [decide(params(alpha=2.0, think_tokens=10.0, seed=k), [THINK, *outputs[0]], 1) == "wait" for k in range(2048)]
    else:
        said = [decide(params(alpha=2.0, think_tokens=10.0), [THINK, *output], 1) == "wait" for output in outputs]
    assert sum(said) / 2048 == pytest.approx(rate, abs=4 * (rate * (1 - rate) / 2048) ** 0.5)


def test_greedy_decoding_ends_where_it_would_have_waited_and_only_there():
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(params(alpha=0.0, temperature=0.01)), long(THINK))
    for wish in range(VOCAB):
        logits = torch.zeros(1, VOCAB)
        logits[0, wish] = 1.0
        runtime.logits(logits, long(0), long(0))
        assert int(logits.argmax()) == (END if wish in (WAIT, SPACED) else wish)


def test_what_a_grammar_masked_stays_masked_and_others_keep_their_bits():
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(params(alpha=0.0)), long(THINK))
    logits = torch.randn(2, VOCAB)
    logits[0, END], logits[1, WAIT] = -torch.inf, -0.0
    before = logits.clone()
    runtime.logits(logits, long(0, runtime.context.nobody), long(0, 0))
    assert logits[0, [END, WAIT, SPACED]].isneginf().all()
    assert torch.equal(logits[1].view(torch.int32), before[1].view(torch.int32))


def test_words():
    vocabulary = Vocabulary(byte_level(), len(byte_level()))
    resolved = AlphaOneParams(end_id=9).resolve(vocabulary)
    assert resolved.resolve(vocabulary) == resolved == resolved.resolve(None)
    assert (resolved.word_id, resolved.end_id) == (vocabulary.piece("Wait"), 9)
    assert resolved.slow_ids == vocabulary.words(["Wait"], leading_space=True).ids
    with pytest.raises(SteerError, match=r"end_id.*</think> is several pieces"):
        AlphaOneParams().resolve(vocabulary)
    with pytest.raises(SteerError, match="one piece"):
        AlphaOneParams(word="no such piece").resolve(vocabulary)
    with pytest.raises(SteerError, match="word_id"):
        AlphaOneParams().resolve(None)
