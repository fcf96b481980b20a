"""The batched plugin against slow oracles: one row at a time, and the released code's rules."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.reflection_cycle import ReflectionCycle, ReflectionCycleParams

from core_oracles import CPU, Ids, code_form, long, offset, one_of
from core_tokenizers import byte_level
from llm_steer import SteerError, spec
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime, replay
from llm_steer.spec import Steer
from llm_steer.tokens import Vocabulary

THINK, END, VOCAB = 1, 2, 24
MARKERS = Markers(((THINK,),), ((END,),))
OPENS, CLOSES = one_of([[THINK]]), one_of([[END]])

ID = st.integers(0, VOCAB - 1) | st.sampled_from([THINK, END, 3, 3, 3])
"""Ids among which markers are frequent."""


@st.composite
def parameters(draw: st.DrawFn) -> ReflectionCycleParams:
    """Resolved parameters of every sort."""
    schedule = draw(st.sampled_from(["triangular", "constant", "linear_decay", "cosine", "silver", "piecewise", "shuffled"]))
    fields = {
        "schedule": schedule,
        "origin": draw(st.sampled_from(["think", "output"])),
        "after_end": draw(st.sampled_from(["off", "restart", "continue"])),
        "token_ids": draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)),  # repeated ones too
        "start_position": draw(st.sampled_from([0, 0, 3, 1000])),
    }
    if schedule == "piecewise":
        times = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True))
        fields["points"] = [[float(t), draw(st.floats(-100, 100))] for t in sorted(times)]
    else:
        fields["amplitude"] = draw(st.floats(-100, 100))
    if schedule in ("triangular", "linear_decay", "cosine"):
        fields |= {"period": draw(st.sampled_from([0.7, 7.0, 11.3, 1200.0])), "phase": draw(st.floats(-1, 1))}
    if schedule == "shuffled":
        fields |= {"period": draw(st.sampled_from([1.0, 7.0, 30.0])), "phase": draw(st.floats(-1, 1))}
        fields["shuffle_seed"] = draw(st.none() | st.integers(0, 3))
    if draw(st.booleans()):
        edges = st.tuples(st.integers(0, 20), st.integers(1, 20))
        fields["window"] = [[a, a + b] for a, b in draw(st.lists(edges, min_size=1, max_size=3))]
    return ReflectionCycleParams(**fields)


def steer(params: ReflectionCycleParams) -> tuple[Steer]:
    return (Steer(ReflectionCycle, params),)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal only if every bit is: -0.0 is not 0.0."""
    return tensor.view(torch.int32)


def make_logits(rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 10
    logits[logits > 12] = -torch.inf
    logits[(logits > 0) & (logits < 2)] = -0.0
    return logits


REQUEST = st.tuples(st.none() | parameters(), st.lists(ID, max_size=8), st.lists(ID, max_size=25))


@given(requests=st.lists(REQUEST, min_size=1, max_size=6), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_mixed_batch_equals_one_row_at_a_time(requests, data):
    """Slots in any order, rows in any order, requests that do not steer and rows that are thrown away among them."""
    runtime = Runtime(Context(num_slots=len(requests) + 2, device=CPU, vocab_size=VOCAB), MARKERS)
    nobody = runtime.context.nobody
    slots = data.draw(st.permutations(range(len(requests) + 1)))[: len(requests)]
    fed, rows = [], []
    for slot, (params, prompt, output) in zip(slots, requests, strict=True):
        ids = prompt + output
        if params is None:
            if data.draw(st.booleans()):  # the slot's previous owner steered
                runtime.admit(slot, steer(data.draw(parameters())), long(*prompt))
                runtime.release(slot)
            rows.append((nobody, len(ids) - 1, None, ids, len(prompt)))
            continue
        runtime.admit(slot, steer(params), long(*prompt))
        fed += [(token, slot, len(prompt) + n) for n, token in enumerate(output)]
        rows.append((slot, len(ids) - 1, params, ids, len(prompt)))
        if len(prompt) > 1:  # a chunk of the prompt, whose sample is thrown away
            rows.append((slot, len(prompt) - 2, None, ids, len(prompt)))
    if fed:
        runtime.forward(*(long(*column) for column in zip(*fed, strict=True)))
    rows = data.draw(st.permutations(rows))
    before = make_logits(len(rows), data.draw(st.integers(0, 99)))
    after = before.clone()
    runtime.logits(after, long(*(row[0] for row in rows)), long(*(row[1] for row in rows)))

    for n, (_, _, params, ids, prompt_len) in enumerate(rows):
        delta = None if params is None else offset(params, ids, prompt_len, OPENS, CLOSES)
        if delta is None:
            assert torch.equal(bits(after[n]), bits(before[n]))
            continue
        moved = sorted(set(params.token_ids))
        kept = [i for i in range(VOCAB) if i not in moved]
        assert torch.equal(bits(after[n, kept]), bits(before[n, kept]))
        expected = before[n, moved].double() + delta
        assert torch.allclose(after[n, moved].double(), expected, rtol=1e-6, atol=2e-5)
        assert torch.equal(after[n].isneginf(), before[n].isneginf())


@given(params=parameters(), prompt=st.lists(ID, max_size=5), output=st.lists(ID, max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_offset_is_exact_at_every_position(params, prompt, output):
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(0, steer(params), long(*prompt))
    plugin = runtime.plugin(ReflectionCycle)
    ids = list(prompt)
    for token in [*output, None]:
        delta, acts = plugin.offsets(runtime.tracker.rows(long(0), long(len(ids) - 1)))
        expected = offset(params, ids, len(prompt), OPENS, CLOSES)
        assert acts.item() == (expected is not None)
        assert delta.item() == pytest.approx(expected or 0.0, abs=1e-6)
        if token is not None:
            runtime.forward(long(token), long(0), long(len(ids)))
            ids.append(token)


@given(
    requests=st.lists(st.tuples(parameters(), st.lists(ID, max_size=6), st.lists(ID, max_size=40)), min_size=1, max_size=4),
    other=parameters(),
)
@settings(max_examples=60, deadline=None)
def test_the_trace_counts_what_was_done(requests, other):
    """From the request's own slot in a running batch, and replayed from its ids: the same, but for the mark."""
    runtime = Runtime(Context(num_slots=len(requests) + 1, device=CPU, vocab_size=VOCAB), MARKERS)
    for slot, (params, prompt, output) in enumerate(requests):
        runtime.admit(slot, steer(other), long(7))
        runtime.admit(slot, steer(params), long(*prompt))
        for n, token in enumerate(output):
            runtime.forward(long(token), long(slot), long(len(prompt) + n), single=True)
    for slot, (params, prompt, output) in enumerate(requests):
        deltas = [offset(params, prompt + output[:n], len(prompt), OPENS, CLOSES) for n in range(len(output))]
        where = [n for n, token in enumerate(output) if token in params.token_ids]
        trace = runtime.trace(slot, long(*output))
        (part,) = trace["plugins"]
        assert part["steered_steps"] == sum(1 for d in deltas if d and abs(d) > 1e-9)
        assert part["reflection_tokens"] == len(where)
        assert part["positions"] == where
        assert part["deltas"] == pytest.approx([deltas[n] or 0.0 for n in where], abs=2e-6)
        assert trace["tokens"] == len(output)
        replayed = replay(steer(params), MARKERS, VOCAB, prompt, output)
        assert replayed == {**trace, "replayed": True}


@pytest.mark.parametrize("lengths", [(5, 2, 1), (1, 2, 5), (2, 5, 1)])
def test_lists_of_different_length_in_one_batch(lengths):
    """Points, windows and ids of one request are not those of its neighbours, whoever comes first."""
    runtime = Runtime(Context(num_slots=4, device=CPU, vocab_size=VOCAB), MARKERS)
    requests = []
    for slot, count in enumerate(lengths):
        params = ReflectionCycleParams(
            schedule="piecewise",
            points=[[3.0 * n, (-2.0) ** n * (slot + 1)] for n in range(count)],
            window=[[4 * n, 4 * n + 3] for n in range(count + 1)],
            token_ids=list(range(3, 3 + count)),
            origin="output",
        )
        runtime.admit(slot, steer(params), long(9))
        requests.append(params)
    ids = [9]
    for n in range(20):
        logits = torch.zeros(3, VOCAB)
        runtime.logits(logits, long(0, 1, 2), long(n, n, n))
        for slot, params in enumerate(requests):
            expected = torch.zeros(VOCAB)
            expected[params.token_ids] = offset(params, ids, 1, OPENS, CLOSES) or 0.0
            assert torch.allclose(logits[slot], expected, atol=1e-6)
        runtime.forward(long(9, 9, 9), long(0, 1, 2), long(n + 1, n + 1, n + 1))
        ids.append(9)


# -- the released code ---------------------------------------------------------------------------------------------------


def reference_offsets(tokenizer, output: Ids, amplitude: float, period: float) -> dict[int, float]:
    """The released processor's rules: what it adds to which ids, given the output's ids."""
    table = tokenizer.get_vocab()
    if table.get("</think>") in output:
        return {}
    t = len(output)
    if not 0 <= t < 8192:
        return {}
    ids = [table.get(word) for word in ("wait", "Wait", "but", "But", "Alternatively")]
    return {i: code_form(t, amplitude, period, 0.0) for i in ids if i is not None}


@pytest.mark.parametrize("added", [("<think>", "</think>"), ()], ids=["reasoning", "no-markers"])
@given(
    prompt=st.lists(st.integers(0, 390) | st.sampled_from(["<think>", "</think>"]), min_size=1, max_size=5),
    output=st.lists(st.integers(0, 390) | st.sampled_from(["<think>", "</think>", "wait"]), max_size=30),
    repeat=st.sampled_from([1, 1, 40]),
    amplitude=st.floats(-10, 10),
    period=st.floats(5, 2000),
)
@settings(max_examples=60, deadline=None)
def test_the_reference_preset_does_what_the_released_code_does(added, prompt, output, repeat, amplitude, period):
    tokenizer = byte_level(*added)
    (resolved,) = spec.resolve(
        spec.parse("reflection_cycle", {"preset": "reference", "amplitude": amplitude, "period": period}),
        Vocabulary(tokenizer, len(tokenizer) + 10),
    )
    table = tokenizer.get_vocab()
    prompt, output = ([table.get(i, 9) if isinstance(i, str) else i for i in ids] for ids in (prompt, output))
    output = output * repeat
    runtime = Runtime(
        Context(num_slots=2, device=CPU, vocab_size=len(tokenizer) + 10), Vocabulary(tokenizer, len(tokenizer)).markers()
    )
    runtime.admit(0, (resolved,), long(*prompt))
    if output:
        runtime.forward(long(*output), long(*[0] * len(output)), len(prompt) + torch.arange(len(output)))
    logits = torch.randn(1, len(tokenizer) + 10)
    expected = logits[0].double()
    for i, delta in reference_offsets(tokenizer, output, amplitude, period).items():
        expected[i] += delta
    runtime.logits(logits, long(0), long(len(prompt) + len(output) - 1))
    assert torch.allclose(logits[0].double(), expected, rtol=0, atol=1e-6)
    if not reference_offsets(tokenizer, output, amplitude, period):
        assert torch.equal(logits[0].double(), expected)


@pytest.mark.parametrize("generated", [0, 1, 8190, 8191, 8192, 8193, 12_000])
def test_the_reference_preset_stops_at_8192_tokens(generated):
    tokenizer = byte_level("<think>", "</think>")
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    fields = {"preset": "reference", "amplitude": 5.0, "period": 777.7}
    (resolved,) = spec.resolve(spec.parse("reflection_cycle", fields), vocabulary)
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=len(tokenizer)), vocabulary.markers())
    runtime.admit(0, (resolved,), long(3, 4))
    output = torch.full((generated,), 9)
    runtime.forward(output, torch.zeros_like(output), 2 + torch.arange(generated))
    delta, acts = runtime.plugin(ReflectionCycle).offsets(runtime.tracker.rows(long(0), long(1 + generated)))
    assert acts.item() == (generated < 8192)
    assert delta.item() == pytest.approx(code_form(generated, 5.0, 777.7, 0.0) if generated < 8192 else 0.0, abs=1e-9)


# -- step-wise search ----------------------------------------------------------------------------------------------------


@given(params=parameters(), prompt=st.lists(ID, max_size=4), output=st.lists(ID, min_size=1, max_size=40), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_search_in_pieces_equals_one_long_run(params, prompt, output, data):
    """Each piece is a request of its own, whose prompt ends with what earlier ones generated."""
    prompt = [*prompt, THINK]
    output = [token for token in output if token not in (THINK, END)] + data.draw(st.sampled_from([[], [END, 5, 6]]))
    if params.origin == "output" or params.after_end != "off":  # what ended in an earlier request is not seen
        output = [token for token in output if token != END]
    params = params.model_copy(update={"start_position": 0})
    whole = [offset(params, prompt + output[:n], len(prompt), OPENS, CLOSES) for n in range(len(output))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=3)))
    for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True):
        runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=VOCAB), MARKERS)
        ids = prompt + output[:start]
        runtime.admit(0, steer(params.model_copy(update={"start_position": start})), long(*ids))
        for n in range(start, end):
            delta, acts = runtime.plugin(ReflectionCycle).offsets(runtime.tracker.rows(long(0), long(len(prompt) + n - 1)))
            assert acts.item() == (whole[n] is not None)
            assert delta.item() == pytest.approx(whole[n] or 0.0, abs=1e-6)
            runtime.forward(long(output[n]), long(0), long(len(prompt) + n))


# -- admission -----------------------------------------------------------------------------------------------------------


def test_a_slot_forgets_its_previous_owner():
    """Every field: the new owner's offsets are those of a fresh plugin."""
    context = Context(num_slots=2, device=CPU, vocab_size=VOCAB)
    rng = random.Random(0)
    used = Runtime(context, MARKERS)
    rich = ReflectionCycleParams(
        schedule="piecewise", points=[[0.0, 9.0], [1.0, 7.0], [5.0, 1.0]], window=[[0, 3], [9, 99]], origin="output",
        after_end="continue", token_ids=[3, 4, 5, 6], start_position=7,
    )  # fmt: skip
    plain = ReflectionCycleParams(token_ids=[8], origin="think", period=10.0)
    for _ in range(3):
        for params in (rich, plain):
            used.admit(0, steer(params), long(THINK))
            fresh = Runtime(context, MARKERS)
            fresh.admit(0, steer(params), long(THINK))
            output = [rng.randrange(3, VOCAB) for _ in range(9)]
            logits = torch.randn(1, VOCAB)
            results = []
            for runtime in (used, fresh):
                runtime.forward(long(*output), long(*[0] * 9), 1 + torch.arange(9))
                results.append(logits.clone())
                runtime.logits(results[-1], long(0), long(9))
            assert torch.equal(*results)
            assert not torch.equal(results[0], logits)


def test_unresolved_parameters_never_reach_a_batch():
    plugin = ReflectionCycle(Context(num_slots=2, device=CPU, vocab_size=VOCAB))
    for params in (ReflectionCycleParams(), ReflectionCycleParams(token_ids=[3])):
        with pytest.raises(ValueError, match="not resolved"):
            plugin.admit(0, params, long())


def test_an_id_beyond_the_logits_is_refused_and_the_slot_stays_free():
    runtime = Runtime(Context(num_slots=3, device=CPU, vocab_size=VOCAB), MARKERS)
    runtime.admit(1, steer(ReflectionCycleParams(token_ids=[3], origin="output")), long(5))
    bad = ReflectionCycleParams(token_ids=[3, VOCAB], origin="output")
    for slot in (0, 1):
        with pytest.raises(SteerError, match=rf"^token_ids: got {VOCAB}; must be below {VOCAB}, the width of the logits"):
            runtime.admit(slot, steer(bad), long(5))
    assert not runtime.steering
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    runtime.logits(logits, long(0, 1), long(0, 0))
    assert torch.equal(bits(logits), bits(before))


def test_the_preview_is_the_wave():
    params = ReflectionCycleParams(amplitude=5.0, period=600.0)
    curve = ReflectionCycle.preview(params)
    assert curve["t"] == list(range(1201))
    assert curve["delta"] == pytest.approx([code_form(t, 5.0, 600.0, 0.0) for t in curve["t"]], abs=1e-9)
    cut = ReflectionCycle.preview(ReflectionCycleParams(window=[[10, 20]], schedule="constant", start_position=5), length=30)
    assert [t for t, d in zip(cut["t"], cut["delta"], strict=True) if d] == list(range(10, 20))
