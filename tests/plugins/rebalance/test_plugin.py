"""The plugin's state against the rules in plain Python, whatever the order, the chunks and the neighbours."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from llm_steer.plugins.rebalance import Rebalance, RebalanceParams
from llm_steer.plugins.rebalance.control import PRESETS

from llm_steer.artifact import Artifact, Description, ModelIdentity, Shelf
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime
from llm_steer.spec import Steer
from support.rebalance_rules import Sequence

CPU = torch.device("cpu")
VOCABULARY, OPEN, CLOSE, BLANK, MORE = 16, 1, 2, 3, 4
HIDDEN = 6
MODEL = ModelIdentity(architecture="A", hidden_size=HIDDEN, num_layers=4)
CONSTANTS = vars(PRESETS["r1-distill-qwen-1.5b"].constants)
OTHERS = vars(PRESETS["qwq-32b"].constants)


def make(sign: str = "towards_overthinking", layer: int = 2, seed: int = 0, **constants: float) -> Artifact:
    description = Description(
        method="rebalance",
        model=MODEL,
        layer=layer,
        site="before",
        positions="delimiter",
        sign=sign,
        constants={**CONSTANTS, **constants},
    )
    return Artifact(description, {"vector": torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))})


class Here(Shelf):
    """Artifacts by their hash, without files."""

    def __init__(self, *artifacts: Artifact) -> None:
        super().__init__(MODEL)
        self._opened.update({artifact.content_hash: artifact for artifact in artifacts})


VOCAB = SimpleNamespace(has_think_markers=True)


def markers() -> Markers:
    blank = torch.zeros(VOCABULARY, dtype=torch.bool)
    blank[[BLANK, MORE]] = True
    none = torch.zeros(VOCABULARY, dtype=torch.bool)
    return Markers(((OPEN,),), ((CLOSE,),), blank, none, none)


def build(params: list[RebalanceParams], shelf: Shelf, slots: int, positions: int = 400) -> Runtime:
    context = Context(slots + 1, CPU, VOCABULARY, num_layers=4, hidden_size=HIDDEN, max_positions=positions, shelf=shelf)
    runtime = Runtime(context, markers(), tuple(Steer(Rebalance, p) for p in params))
    assert runtime.plugin(Rebalance).layers() == sorted({p.layers[0] for p in params})
    return runtime


def resolved(artifact: Artifact, shelf: Shelf, **fields) -> RebalanceParams:
    return RebalanceParams(artifact=f"sha256:{artifact.content_hash}", **fields).resolve(VOCAB, shelf)


@dataclass
class Request:
    """One request on its way, with what the rules say about it."""

    slot: int
    prompt: list[int]
    rules: Sequence
    params: RebalanceParams
    vector: torch.Tensor
    ids: list[int] = field(default_factory=list)
    fed: int = 0

    def thinking(self, upto: int) -> bool:
        marks = [token for token in self.ids[:upto] if token in (OPEN, CLOSE)]
        return bool(marks) and marks[-1] == OPEN


def draw(rng: random.Random) -> int:
    return rng.choice([OPEN, CLOSE, BLANK, BLANK, MORE, *range(5, 16), *range(5, 16)])


def feed(runtime: Runtime, parts: list[tuple[Request, int, int]], idle: int = 0) -> torch.Tensor:
    """One forward pass over some columns of some requests, beside tokens of nobody's: what was added [tokens, layers]."""
    nobody = runtime.context.nobody
    ids, slot, position = [], [], []
    for request, start, stop in parts:
        ids += request.ids[start:stop]
        slot += [request.slot] * (stop - start)
        position += range(start, stop)
    ids, slot, position = ids + [BLANK] * idle, slot + [nobody] * idle, position + [7] * idle
    tokens = runtime.forward(*(torch.tensor(x) for x in (ids, slot, position)))
    plugin = runtime.plugin(Rebalance)
    hidden = torch.randn(len(ids), HIDDEN)
    return torch.stack([plugin.residual(layer, hidden, tokens) for layer in plugin.layers()], 1)


def logits_after(runtime: Runtime, ends: list[tuple[Request, int]], rng: random.Random) -> torch.Tensor:
    """Rows of logits about the tokens behind these columns."""
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    scale = torch.tensor([rng.choice([0.5, 3.0, 8.0, 20.0]) for _ in ends])
    logits = torch.randn(len(ends), VOCABULARY, generator=generator) * scale[:, None]
    before = logits.clone()
    slot = torch.tensor([request.slot for request, _ in ends])
    runtime.logits(logits, slot, torch.tensor([at for _, at in ends]))
    assert torch.equal(logits, before)
    return before.double().softmax(1).amax(1)


def check(request: Request, added: torch.Tensor, start: int, stop: int, layers: list[int]) -> None:
    """What was added at columns [start, stop) is what the rules say, at the request's layer and nowhere else."""
    for row, column in enumerate(range(start, stop)):
        at = column - len(request.prompt) + 1
        expected = request.rules.added[at] if at >= 0 else 0.0
        for index, layer in enumerate(layers):
            here = expected if layer == request.params.layers[0] else 0.0
            assert torch.allclose(added[row, index], request.params.strength * here * request.vector, atol=1e-5, rtol=0)


def compare(plugin: Rebalance, request: Request) -> int:
    """Mismatches of the state of one request."""
    rules, slot = request.rules, request.slot
    transformed = [torch.tensor(p, dtype=torch.float64).log().item() if rules.paper else p for p in rules.values]
    pairs = [
        (plugin._sum[slot].item(), sum(transformed)),
        (plugin._count[slot].item(), len(rules.values)),
        (plugin._coefficient[slot].item(), rules.coefficient),
        (plugin._steps[slot].item(), len(rules.history)),
        (plugin._next[slot].item(), len(rules.added) - 1),
    ]
    if rules.history:
        pairs.append((plugin._recent[slot, 0].item(), rules.history[-1]))
    return sum(abs(ours - theirs) > 1e-5 for ours, theirs in pairs)


def test_ten_thousand_steps_of_mixed_requests() -> None:
    """Requests come and go; prompts come in chunks; some are fed from the start again; every mode is in the batch."""
    rng = random.Random(5)
    towards, away, other = make(), make("away_from_overthinking", seed=1), make(layer=4, seed=2, **OTHERS)
    shelf = Here(towards, away, other)
    variants = [
        ({"artifact": towards}, {}),
        ({"artifact": away, "strength": 0.5}, {}),
        ({"artifact": other, "mode": "paper", "window": 4}, {"paper": True, "window": 4, "constants": OTHERS}),
        ({"artifact": towards, "mode": "paper", "initial": 0.25}, {"paper": True}),
        ({"artifact": other, "scope": "output", "initial": -0.5}, {"everywhere": True, "constants": OTHERS}),
    ]
    params = [resolved(fields.pop("artifact"), shelf, **fields) for fields in ({**f} for f, _ in variants)]
    runtime = build(params, shelf, slots=9)
    plugin, layers = runtime.plugin(Rebalance), runtime.plugin(Rebalance).layers()
    live: list[Request] = []
    steps = mismatches = steered = again = 0
    while steps < 10_000:
        while len(live) < 9 and rng.random() < 0.7:
            kind = rng.randrange(len(variants))
            rules = Sequence(**{"constants": CONSTANTS, "coefficient": params[kind].initial, **variants[kind][1]})
            artifact = variants[kind][0]["artifact"]
            prompt = [draw(rng) for _ in range(rng.randrange(1, 12))]
            sign = -1.0 if artifact is away else 1.0
            slot = rng.choice(sorted(set(range(9)) - {r.slot for r in live}))
            request = Request(slot, prompt, rules, params[kind], sign * artifact.tensors["vector"], ids=list(prompt))
            runtime.admit(slot, (Steer(Rebalance, params[kind]),), torch.tensor(prompt))
            live.append(request)
        rng.shuffle(live)
        parts = []
        for request in live:
            ready = len(request.ids)
            if request.fed == ready - 1 and len(request.ids) > len(request.prompt) and rng.random() < 0.03:
                request.fed, again = rng.choice([0, max(ready - 60, 0)]), again + 1  # as after a preemption
            stop = ready if rng.random() < 0.6 else rng.randrange(request.fed + 1, ready + 1)
            parts.append((request, request.fed, stop))
        for request, _start, stop in parts:
            for column in range(len(request.prompt) - 1 + len(request.rules.added), stop):
                request.rules.feed(request.ids[column] in (BLANK, MORE), request.thinking(column + 1))
        added = feed(runtime, parts, idle=rng.randrange(3))
        offset = 0
        for request, start, stop in parts:
            check(request, added[offset : offset + stop - start], start, stop, layers)
            offset += stop - start
            if stop == len(request.ids) and stop > len(request.prompt):
                steps += 1
                mismatches += compare(plugin, request)
                steered += request.rules.added[-1] != 0
        assert not added[offset:].any()
        ends = [(request, stop - 1) for request, _, stop in parts]
        confidence = logits_after(runtime, ends, rng)
        for (request, _, stop), p in zip(parts, confidence.tolist(), strict=True):
            request.fed = stop
            if stop == len(request.ids):
                request.rules.last = p
                request.ids.append(draw(rng))
        for request in [r for r in live if (r.fed == len(r.ids) - 1 and rng.random() < 0.01) or len(r.ids) > 380]:
            output = torch.tensor(request.ids[len(request.prompt) :])
            trace = runtime.trace(request.slot, output)["plugins"][0]
            at = [i for i, value in enumerate(request.rules.added) if value]
            sign = -1.0 if request.params.artifact.endswith(away.content_hash) else 1.0
            expected = [request.params.strength * sign * request.rules.added[i] for i in at]
            assert trace["positions"] == [i - 1 for i in at]
            assert trace["coefficients"] == pytest.approx(expected, abs=1e-5)
            assert trace["confidences"] == pytest.approx(request.rules.history, abs=1e-5)
            assert (trace["steps"], trace["steered_steps"]) == (len(request.rules.history), len(at))
            runtime.release(request.slot)
            live.remove(request)
    assert mismatches == 0
    assert steered > 400
    assert again > 100
