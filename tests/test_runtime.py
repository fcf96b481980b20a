"""What hosts share: slots that come and go, plugins in each request's order, traces."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.reflection_cycle import ReflectionCycle, ReflectionCycleParams

from core_oracles import CPU, Ids, long, offset, one_of
from llm_steer import Params, Plugin, SteerError
from llm_steer.markers import Markers
from llm_steer.plugin import Context, Rows, Tokens
from llm_steer.runtime import Runtime, replay
from llm_steer.slots import SlotTable
from llm_steer.spec import Spec, Steer

THINK, END, VOCAB = 1, 2, 16
MARKERS = Markers(((THINK,),), ((END,),))
OPENS, CLOSES = one_of([[THINK]]), one_of([[END]])


class Amount(Params):
    by: float = 0.0


class _Arithmetic(Plugin[Amount]):
    """Changes every logit and hidden state of its slots; what two of them do depends on their order."""

    Params: ClassVar = Amount
    neutral: ClassVar[float]

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.table = SlotTable(("by",), context.num_slots, context.device, torch.float32)
        for slot in range(context.num_slots):
            self.table.write(slot, by=self.neutral)
        self.stepped: list[int] = []

    def admit(self, slot: int, params: Amount | None, prompt_ids: torch.Tensor) -> None:
        self.table.write(slot, by=params.by if params else self.neutral)

    def step(self, tokens: Tokens) -> None:
        self.stepped += tokens.ids.tolist()

    def layers(self) -> range:
        return range(self.context.num_layers)

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        changed = hidden.clone()
        self.change(changed, self.table["by"][tokens.slot][:, None])
        return changed - hidden

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        self.change(logits, torch.where(rows.live, self.table["by"][rows.slot], self.neutral)[:, None])

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        return {"by": self.table["by"][slot].item()}

    def change(self, values: torch.Tensor, by: torch.Tensor) -> None:
        raise NotImplementedError


class Add(_Arithmetic):
    name = "add"
    neutral = 0.0

    def change(self, values: torch.Tensor, by: torch.Tensor) -> None:
        values.copy_(torch.where(by == self.neutral, values, values + by))


class Scale(_Arithmetic):
    name = "scale"
    neutral = 1.0

    def change(self, values: torch.Tensor, by: torch.Tensor) -> None:
        values.mul_(by)


class Feedback(Add):
    name = "feedback"
    feedback = True


def add(by: float) -> Steer:
    return Steer(Add, Amount(by=by))


def scale(by: float) -> Steer:
    return Steer(Scale, Amount(by=by))


def runtime_of(num_slots: int = 5, **sizes: int) -> Runtime:
    return Runtime(Context(num_slots=num_slots, device=CPU, vocab_size=VOCAB, **sizes), MARKERS)


def applied(spec: Spec, values: torch.Tensor) -> torch.Tensor:
    """The plugins of one request in their order, one after another."""
    for steer in spec:
        by = torch.tensor(steer.params.by, dtype=torch.float32)
        values = values + by if steer.plugin is Add else values * by
    return values


ORDERS = st.lists(
    st.one_of(
        st.floats(-3, 3, width=32).map(add).map(lambda s: (s,)),
        st.floats(-3, 3, width=32).map(scale).map(lambda s: (s,)),
        st.tuples(st.floats(-3, 3, width=32).map(add), st.floats(-3, 3, width=32).map(scale)),
        st.tuples(st.floats(-3, 3, width=32).map(scale), st.floats(-3, 3, width=32).map(add)),
        st.just(()),
    ),
    min_size=1,
    max_size=4,
)


@given(specs=ORDERS, left=st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_plugins_act_in_the_order_that_each_request_gave(specs, left):
    """Also where two requests of a batch want them the other way round; and once such a request has left."""
    runtime = runtime_of(num_layers=2, hidden_size=4)
    for slot, spec in enumerate(specs):
        runtime.admit(slot, spec, long(3))
    if left < len(specs):
        runtime.release(left)
        specs = [() if slot == left else spec for slot, spec in enumerate(specs)]
    slots = long(*range(len(specs)), runtime.context.nobody)
    tokens = runtime.forward(slots + 5, slots, torch.ones_like(slots))
    before = torch.randn(len(slots), VOCAB)
    logits = before.clone()
    runtime.logits(logits, slots, torch.ones_like(slots))
    hidden = before[:, :4].clone()
    if any(specs):
        assert runtime.layers == [0, 1]
        for layer in runtime.layers:
            runtime.residual(layer, hidden, tokens)
    for slot, spec in enumerate([*specs, ()]):
        assert torch.equal(logits[slot], applied(spec, before[slot]))
        changed = applied(spec, applied(spec, before[slot, :4]))  # twice, up to the rounding of a sum
        torch.testing.assert_close(hidden[slot], changed if spec else before[slot, :4], rtol=1e-5, atol=1e-5 if spec else 0)
    for plugin in runtime.plugins:
        assert plugin.stepped == (slots + 5).tolist()


def test_a_plugin_that_comes_later_leaves_other_slots_alone():
    runtime = runtime_of()
    runtime.admit(0, (add(1.0),), long(3))
    runtime.admit(1, (scale(5.0), add(2.0)), long(3))
    logits = torch.ones(2, VOCAB)
    runtime.logits(logits, long(0, 1), long(0, 0))
    assert logits[:, 0].tolist() == [2.0, 7.0]
    assert {plugin.name for plugin in runtime.plugins} == {"add", "scale"}


def test_what_is_in_use():
    runtime = runtime_of()
    assert not runtime.steering
    assert not runtime.feedback
    runtime.admit(2, (add(1.0), Steer(Feedback, Amount())), long(3))
    assert runtime.steering
    assert runtime.feedback
    assert runtime.steers_any([1, 2])
    assert not runtime.steers_any([0, 1])
    assert not runtime.steers_any([])
    runtime.admit(2, (), long(3))  # an empty spec frees the slot
    assert not runtime.steering
    assert not runtime.feedback
    runtime.release(2)
    runtime.release(3)  # of a request that never steered


class Everywhere(Add):
    """Acts on every row that is live, whoever's it is."""

    name = "everywhere"

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        logits.add_(rows.live[:, None].to(logits.dtype))


def test_rows_of_a_slot_that_was_left_are_not_live():
    runtime = runtime_of()
    for slot in (0, 1):
        runtime.admit(slot, (Steer(Everywhere, Amount()),), long(3))
        runtime.forward(long(4), long(slot), long(1))
    runtime.release(0)
    logits = torch.zeros(4, VOCAB)
    runtime.logits(logits, long(0, 0, 1, 1), long(0, 1, 0, 1))
    assert logits[:, 0].tolist() == [0, 0, 1, 1]


def test_a_plugin_sees_each_row_once():
    """One call for the whole batch where one order serves all; and only their own rows where it does not."""
    every = Steer(Everywhere, Amount())
    runtime = runtime_of()
    for slot, spec in enumerate([(every,), (add(1.0), every), (scale(2.0), add(1.0)), (scale(3.0), every)]):
        runtime.admit(slot, spec, long(3))
    logits = torch.zeros(4, VOCAB)
    runtime.logits(logits, long(0, 1, 2, 3), long(0, 0, 0, 0))
    assert runtime.plugin(Everywhere).calls == 1
    runtime.admit(0, (every, scale(2.0)), long(3))
    logits = torch.ones(4, VOCAB)
    runtime.logits(logits, long(0, 1, 2, 3), long(0, 0, 0, 0))
    assert logits[:, 0].tolist() == [4, 3, 3, 4]


class Picky(Add):
    name = "picky"

    def admit(self, slot: int, params: Amount | None, prompt_ids: torch.Tensor) -> None:
        if params and params.by > 5:
            raise SteerError("by", params.by, "at most 5")
        super().admit(slot, params, prompt_ids)


def test_a_request_that_a_plugin_refuses_leaves_the_slot_free():
    runtime = runtime_of()
    runtime.admit(0, (add(1.0), Steer(Picky, Amount(by=1.0))), long(3))
    with pytest.raises(SteerError, match="by: got 6"):
        runtime.admit(0, (add(2.0), Steer(Picky, Amount(by=6.0))), long(3))
    assert not runtime.steering
    logits = torch.zeros(1, VOCAB)
    runtime.logits(logits, long(0), long(0))
    assert not logits.any()
    runtime.admit(0, (add(3.0),), long(3))
    runtime.logits(logits, long(0), long(0))
    assert logits[0, 0].item() == 3


# -- a small engine ------------------------------------------------------------------------------------------------------


def wave(data: Any) -> ReflectionCycleParams:
    return ReflectionCycleParams(
        amplitude=data.draw(st.sampled_from([5.0, -40.0])),
        period=data.draw(st.sampled_from([7.0, 33.3])),
        origin=data.draw(st.sampled_from(["think", "output"])),
        after_end=data.draw(st.sampled_from(["off", "restart", "continue"])),
        token_ids=data.draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=3)),
    )


def model(ids: Ids) -> torch.Tensor:
    """Logits that depend on all ids before, with the markers among the likely."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)) * 3
    logits[[THINK, END]] += 2
    return logits


def alone(params: ReflectionCycleParams | None, prompt: list[int], length: int) -> list[int]:
    """Greedy decoding of one request by a slow, plain loop."""
    ids = list(prompt)
    for _ in range(length):
        logits = model(ids).double()
        delta = None if params is None else offset(params, ids, len(prompt), OPENS, CLOSES)
        if params is not None and delta is not None:
            logits[sorted(set(params.token_ids or []))] += delta
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_batch_in_disorder_generates_what_each_request_does_alone(data):
    """Requests are admitted, chunked, preempted with and without a part of their cache, and aborted at random; rows change
    places, drafts are fed and rejected. No request can tell."""
    runtime, free = runtime_of(num_slots=4), [0, 1, 2]
    nobody = runtime.context.nobody
    waiting = [
        {"prompt": data.draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=6)), "out": [], "fed": 0, "slot": None}
        | {"params": data.draw(st.sampled_from([None, "wave"])) and wave(data), "length": data.draw(st.integers(1, 14))}
        for _ in range(data.draw(st.integers(2, 6)))
    ]
    running, done = [], []
    for _ in range(200):
        while waiting and len(running) < 3:
            request = waiting.pop(0)
            ids = request["prompt"] + request["out"]
            request["fed"] = data.draw(st.integers(0, len(ids) - 1))  # a part is still cached
            if request["params"] is not None:
                request["slot"] = free.pop(data.draw(st.integers(0, len(free) - 1)))
                spec = (Steer(ReflectionCycle, request["params"]),)
                runtime.admit(request["slot"], spec, long(*request["prompt"]), long(*request["out"]))
            running.append(request)
        if not running:
            break
        parts, asked = [], []
        for request in data.draw(st.permutations(running)):
            ids = request["prompt"] + request["out"]
            count = data.draw(st.integers(1, len(ids) - request["fed"]))
            slot = nobody if request["slot"] is None else request["slot"]
            new = ids[request["fed"] : request["fed"] + count]
            whole = request["fed"] + count == len(ids)
            drafts = data.draw(st.lists(st.integers(1, VOCAB - 1), max_size=3)) if whole else []
            parts += [(token, slot, request["fed"] + n) for n, token in enumerate(new + drafts)]
            if whole:  # a row for the last token, and one for each draft
                asked += [(request, slot, len(ids) - 1 + n, ids + drafts[:n]) for n in range(len(drafts) + 1)]
            else:
                asked.append((request, slot, request["fed"] + count - 1, None))
            request["fed"] += count
        runtime.forward(*(long(*column) for column in zip(*parts, strict=True)))
        asked = data.draw(st.permutations(asked))
        before = torch.stack([model(ids or [0]) for *_, ids in asked])
        logits = before.clone()
        runtime.logits(logits, long(*(row[1] for row in asked)), long(*(row[2] for row in asked)))
        chosen = {}
        for n, (request, slot, position, ids) in enumerate(asked):
            if slot == nobody or ids is None:
                assert torch.equal(logits[n], before[n])
            if ids is not None:
                chosen[id(request), position] = (int(logits[n].argmax()), ids)
        for request in list(running):
            # Drafts count as far as they are what the model says.
            position = len(request["prompt"]) + len(request["out"]) - 1
            while (id(request), position) in chosen:
                token, ids = chosen[id(request), position]
                if ids != request["prompt"] + request["out"] or len(request["out"]) == request["length"]:
                    break
                request["out"].append(token)
                position += 1
            request["fed"] = min(request["fed"], position) if (id(request), position - 1) not in chosen else position
            finished = len(request["out"]) >= request["length"]
            aborted = data.draw(st.integers(0, 19)) == 0
            if finished or aborted or data.draw(st.integers(0, 7)) == 0:
                running.remove(request)
                if request["slot"] is not None:
                    runtime.release(request["slot"])
                    free.append(request["slot"])
                    request["slot"] = None
                (done if finished or aborted else waiting).append(request)
    for request in done:
        assert request["out"] == alone(request["params"], request["prompt"], len(request["out"]))


# -- traces --------------------------------------------------------------------------------------------------------------


def test_the_trace_of_a_request_names_its_plugins_in_order():
    runtime = runtime_of()
    runtime.admit(1, (scale(2.0), add(3.0)), long(3, THINK))
    output = [5, 6, END, 7]
    for n, token in enumerate(output):
        runtime.forward(long(token), long(1), long(2 + n))
    trace = runtime.trace(1, long(*output))
    assert trace == {
        "tokens": 4,
        "think_tokens": 2,
        "replayed": False,
        "plugins": [
            {"name": "scale", "params": {"by": 2.0}, "by": 2.0},
            {"name": "add", "params": {"by": 3.0}, "by": 3.0},
        ],
    }
    assert replay((scale(2.0), add(3.0)), MARKERS, VOCAB, [3, THINK], output) == {**trace, "replayed": True}


@pytest.mark.parametrize("preempted_after", [0, 1, 3, 6])
def test_the_trace_does_not_depend_on_preemptions(preempted_after):
    params = ReflectionCycleParams(token_ids=[5, 6], origin="think", period=8.0)
    prompt, output = [3, THINK], [5, 6, THINK, 5, END, 6]
    runtime = runtime_of()
    spec = (Steer(ReflectionCycle, params),)
    runtime.admit(0, spec, long(*prompt))
    runtime.admit(0, spec, long(*prompt), long(*output[:preempted_after]))
    for n, token in enumerate(output):
        runtime.forward(long(token), long(0), long(2 + n))
    trace = runtime.trace(0, long(*output))
    assert {**trace, "replayed": True} == replay(spec, MARKERS, VOCAB, prompt, output)
    (part,) = trace["plugins"]
    assert part["positions"] == [0, 1, 3, 5]
    assert part["deltas"] == [0.0, 2.5, 2.5, 0.0]
    assert trace["think_tokens"] == 4


@pytest.mark.parametrize(("prompt", "output"), [([], [5, 6]), ([3, THINK], []), ([], [])])
def test_traces_of_nothing(prompt, output):
    spec = (Steer(ReflectionCycle, ReflectionCycleParams(token_ids=[5], origin="output")),)
    trace = replay(spec, MARKERS, VOCAB, prompt, output)
    assert trace["tokens"] == len(output)
    assert trace["plugins"][0]["reflection_tokens"] == output.count(5)
    assert trace["plugins"][0]["deltas"] == [0.0] * output.count(5)


def test_a_trace_without_what_was_not_measured():
    """A closed loop has seen nothing when its trace is replayed; the others tell theirs, in the request's order."""

    class Loop(Scale):
        name = "loop"
        feedback = True

        def admit(self, slot, params, prompt_ids):
            raise AssertionError("it may need what a replay does not have")

    loop = Steer(Loop, Amount(by=2.0))
    trace = replay((loop, add(3.0)), MARKERS, VOCAB, [3, THINK], [5, 6, END, 7])
    assert trace["think_tokens"] == 2
    assert trace["plugins"] == [
        {"name": "loop", "params": {"by": 2.0}, "measured": False},
        {"name": "add", "params": {"by": 3.0}, "by": 3.0},
    ]
    alone = replay((loop,), MARKERS, VOCAB, [3, THINK], [5, 6, END, 7])
    assert (alone["tokens"], alone["think_tokens"], len(alone["plugins"])) == (4, 2, 1)


# -- what hosts of compiled models need ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [0, 2, 5])
def test_a_request_that_comes_back_keeps_what_its_plugins_know(known):
    """Tokens are told apart as in a request that was never away; plugins are not admitted again."""
    prompt, output = [3, THINK], [5, END, 6, THINK, 7]
    runtime, other = runtime_of(), runtime_of()
    for each in (runtime, other):
        each.admit(1, (scale(2.0),), long(*prompt))
    plugin = runtime.plugins[0]
    plugin.table.write(1, by=5.0)  # as if it had learned something
    runtime.resume(1, long(*prompt), long(*output[:known]))
    ids = [*prompt, *output]
    fed = runtime.forward(long(*ids), long(*[1] * len(ids)), torch.arange(len(ids)))
    want = other.forward(long(*ids), long(*[1] * len(ids)), torch.arange(len(ids)))
    for name in ("output_position", "thinking", "think_position", "think_ended"):
        assert torch.equal(getattr(fed, name)[1:], getattr(want, name)[1:]), name
    logits = torch.ones(1, VOCAB)
    runtime.logits(logits, long(1), long(len(ids) - 1))
    assert logits.unique().tolist() == [5.0]


def test_plugins_of_one_kind_see_the_logits():
    class Loop(Scale):
        name = "loop"
        feedback = True

    runtime = runtime_of()
    runtime.admit(0, (add(3.0), Steer(Loop, Amount(by=2.0))), long(3))
    runtime.forward(long(3), long(0), long(0))
    for feedback, want in ((True, 2.0), (False, 4.0), (None, 8.0)):
        logits = torch.ones(1, VOCAB)
        runtime.logits(logits, long(0), long(0), raw=feedback)
        assert logits.unique().tolist() == [want]


def test_plugins_behind_a_layer_are_in_the_order_in_which_they_were_built():
    runtime = runtime_of(num_layers=2)
    for steer in (add(1.0), scale(2.0)):
        runtime.plugin(steer.plugin)
    assert [plugin.name for plugin in runtime.behind(1)] == ["add", "scale"]
    assert runtime.behind(2) == []
