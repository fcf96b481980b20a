"""The logits processor on both of vLLM's interfaces, driven by a model of vLLM's batches instead of vLLM.

Every row's offset is compared with ``e2e.oracle``; what it does not steer must keep every bit.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e import scenarios, tiny
from e2e.oracle import Span, complete, ids_of, offset
from e2e.scenarios import CLOSE, OPEN

pytest.importorskip("vllm")

from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from llm_steer.hosts.vllm import admission
from llm_steer.hosts.vllm.logits import SteerLogitsProcessor
from llm_steer.hosts.vllm.worker import WorkerSteering

SEQS = 6
CPU = torch.device("cpu")
TOKENIZER = tiny.tokenizer()
PIECES = TOKENIZER.get_vocab()


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(get_vocab_size=lambda: tiny.VOCABULARY, runner_type="generate", is_diffusion=False),
        "scheduler_config": SimpleNamespace(max_num_seqs=SEQS),
        "parallel_config": SimpleNamespace(prefill_context_parallel_size=1),
        "speculative_config": None,
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**{**parts, **changes})


_NUMBERS = itertools.count()
ADMISSION = admission.Admission(config(), TOKENIZER)


def attached() -> SteerLogitsProcessor:
    """As a worker has it once its model is loaded."""
    made = SteerLogitsProcessor(config())
    made.steering = WorkerSteering(config(), CPU)
    return made


@dataclass
class Request:
    """One request of the simulated engine."""

    prompt: list[int]
    steer: dict[str, Any] | None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens that were fed."""
    slot: int = -1
    pending: bool = False
    """The last id was not known yet when the request came back."""
    id: str = field(default_factory=lambda: str(next(_NUMBERS)))

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    def params(self) -> Any:
        arguments = None if self.steer is None else {"steer": {"name": "reflection_cycle", **self.steer}}
        params = ADMISSION.stamp(SimpleNamespace(extra_args=arguments))
        if self.steer is not None:  # as the engine core does it
            params.extra_args[admission.STAMP]["id"] = self.id
        return params

    def expected(self, logits: torch.Tensor, known: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The row after steering, and the ids that it moves, when ``known`` is fed so far."""
        row = logits.clone()
        if self.steer is None or len(known) < len(self.ids):
            return row, []
        span = Span(OPEN, CLOSE, len(self.prompt))
        for token in known:
            span.feed(token)
        steer = complete(self.steer)
        delta = offset(steer, span, len(known) - len(self.prompt))
        ids = sorted(set(ids_of(steer, PIECES)))
        if delta is None:
            return row, []
        row[ids] += delta
        return row, ids


def new_request(rng: random.Random) -> Request:
    steer = scenarios.steering(rng) if rng.random() < 0.6 else None
    return Request(scenarios.prompt(rng, 12), steer)


def next_token(rng: random.Random) -> int:
    return rng.choice((OPEN, CLOSE)) if rng.random() < 0.25 else rng.choice(scenarios.TALK)


def check(logits: torch.Tensor, before: torch.Tensor, rows: list[tuple[Request, list[int]]]) -> None:
    for index, (request, known) in enumerate(rows):
        if request.pending and len(known) == len(request.ids) - 1:
            continue  # looks like the end of what is known; vLLM throws the sample away
        want, ids = request.expected(before[index], known)
        others = torch.ones(tiny.VOCABULARY, dtype=torch.bool)
        others[ids] = False
        assert torch.equal(logits[index, others], before[index, others]), (index, request)
        assert torch.allclose(logits[index, ids], want[ids], rtol=0, atol=2e-4), (index, request)


# -- V1 ------------------------------------------------------------------------------------------------------------------


class BatchV1:
    """vLLM's persistent batch: rows that are freed, replaced, moved together and swapped."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows: list[Request | None] = []
        self.preempted: list[Request] = []
        self.finished: list[str] = []

    def update(self) -> BatchUpdate | None:
        rng, rows = self.rng, self.rows
        added: list[Any] = []
        moved: list[Any] = []
        preempted = self.preempted
        free = []
        for index, request in enumerate(rows):
            if request is not None and rng.random() < 0.2:
                rows[index] = None
                free.append(index)
                if rng.random() < 0.4 and request.output and len(preempted) < SEQS:
                    preempted.append(request)
                else:
                    self.finished.append(request.id)
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            index = free.pop(0) if free else len(rows)
            if index >= SEQS:
                break
            if preempted and rng.random() < 0.7:  # comes back with what it has generated
                request = preempted.pop(rng.randrange(len(preempted)))
                request.computed = 0
            else:
                request = new_request(rng)
            # Under asynchronous scheduling the last id may not be known yet.
            request.pending = bool(request.output) and rng.random() < 0.3
            output = [*request.output[:-1], -1] if request.pending else list(request.output)
            self._put(index, request)
            added.append((index, request.params(), list(request.prompt), output))
        removed = list(free)
        while free and rows:  # close the holes from behind
            if rows[-1] is None:
                rows.pop()
                free = [i for i in free if i < len(rows)]
                continue
            target = free.pop(0)
            rows[target] = rows.pop()
            moved.append((len(rows), target, MoveDirectionality.UNIDIRECTIONAL))
        if len(rows) > 1 and rng.random() < 0.4:
            a, b = rng.sample(range(len(rows)), 2)
            rows[a], rows[b] = rows[b], rows[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        if not (removed or added or moved):
            return None
        return BatchUpdate(batch_size=len(rows), removed=removed, added=added, moved=moved)

    def _put(self, index: int, request: Request) -> None:
        if index == len(self.rows):
            self.rows.append(request)
        else:
            self.rows[index] = request


def portion(rng: random.Random, request: Request) -> list[int]:
    """The ids that a step feeds: all that is missing, or a chunk of it."""
    missing = request.ids[request.computed :]
    return missing[: rng.randint(1, len(missing))] if len(missing) > 1 and rng.random() < 0.4 else missing


def feed(processor: SteerLogitsProcessor, requests: list[Request], portions: list[list[int]], slots: Any) -> None:
    ids = [i for fed in portions for i in fed]
    positions = [r.computed + k for r, fed in zip(requests, portions, strict=True) for k in range(len(fed))]
    starts = np.cumsum([0, *map(len, portions)])
    # As vLLM has them: int32 ids, int64 positions, int32 starts.
    processor.steering.step(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(positions), torch.from_numpy(starts).to(torch.int32), slots
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_v1_rows_that_come_go_and_move(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    processor = attached()
    batch = BatchV1(rng)
    for _ in range(20):
        update = batch.update()
        processor.steering.finish(batch.finished)
        batch.finished.clear()
        processor.update_state(update)
        requests = [r for r in batch.rows if r is not None]
        if not requests:
            continue
        portions = [portion(rng, r) for r in requests]
        if processor.steering.steers():
            feed(processor, requests, portions, None)
        before = torch.randn(len(requests), tiny.VOCABULARY, generator=generator) * 3
        before[:, 100] = -torch.inf
        logits = processor.apply(before.clone())
        known = [(r, r.ids[: r.computed + len(fed)]) for r, fed in zip(requests, portions, strict=True)]
        check(logits, before, known)
        for request, fed in zip(requests, portions, strict=True):
            request.computed += len(fed)
            if request.computed == len(request.ids):
                request.output.append(next_token(rng))


def test_v1_a_row_may_be_replaced_without_being_removed() -> None:
    processor = attached()
    steered = Request([20, OPEN], {"schedule": "constant", "amplitude": 5.0})
    plain = Request([20, OPEN], None)
    for requests, fresh in (([steered], steered), ([plain], plain)):
        processor.update_state(
            BatchUpdate(batch_size=1, removed=[], added=[(0, fresh.params(), fresh.prompt, [])], moved=[])
        )
        assert processor.steering.steers() == (fresh is steered)
        if processor.steering.steers():
            feed(processor, requests, [fresh.prompt], None)
        before = torch.randn(1, tiny.VOCABULARY)
        check(processor.apply(before.clone()), before, [(fresh, fresh.prompt)])


def test_it_acts_before_temperature_and_on_greedy_requests() -> None:
    assert SteerLogitsProcessor(config(), CPU, False).is_argmax_invariant() is False


# -- V2 ------------------------------------------------------------------------------------------------------------------


def context(requests: list[Request], portions: list[list[int]], drafts: list[int]) -> tuple[Any, list[Any]]:
    """The rows of a step: one a request and one for each of its drafts; and what is known at each."""
    rows, slots, positions, local, ids = [], [], [], [], []
    for request, fed, count in zip(requests, portions, drafts, strict=True):
        for k in range(count + 1):
            end = len(fed) - count + k
            known = request.ids[: request.computed] + fed[:end]
            rows.append((request, known))
            slots.append(request.slot)
            positions.append(len(known) - 1)
            local.append(k)
            ids.append(known[-1])
    mapping = [r.slot for r in requests]
    made = LogitsContext(
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping=torch.tensor(mapping, dtype=torch.int32),
        idx_mapping_np=np.array(mapping, dtype=np.int32),
        expanded_local_pos=torch.tensor(local, dtype=torch.int32),
        input_ids=torch.tensor(ids, dtype=torch.int32),
        pos=torch.tensor(positions),
        seq_lens_upper_bound_np=np.array([p + 1 for p in positions], dtype=np.int32),
    )
    return made, rows


def part_of(made: Any, rows: slice) -> Any:
    names = ("expanded_idx_mapping", "expanded_local_pos", "input_ids", "pos")
    return SimpleNamespace(**{**vars(made), **{name: getattr(made, name)[rows] for name in names}})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_v2_slots_drafts_and_parts_of_a_batch(seed: int) -> None:
    """Rows in another order each step, drafts that are rejected (a drafted ``</think>`` too), recycled slots, preemption."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    processor = attached()
    steering = processor.steering
    free, running, preempted = list(range(SEQS)), [], []
    for _ in range(20):
        for request in list(running):
            if rng.random() < 0.15:
                running.remove(request)
                free.append(request.slot)
                steering.leave(request.slot)
                if rng.random() < 0.4 and len(preempted) < SEQS:
                    preempted.append(request)
                else:
                    steering.finish([request.id])
        for _ in range(rng.choice((0, 1, 2))):
            if not free:
                break
            back = bool(preempted) and rng.random() < 0.7
            request = preempted.pop(rng.randrange(len(preempted))) if back else new_request(rng)
            request.slot, request.computed = free.pop(), 0
            params = request.params()
            assert processor.add_request(request.slot, params) == (request.steer is not None)
            steering.enter(request.slot, admission.read_stamp(params), request.prompt, request.output)
            running.append(request)
        if not running:
            continue
        requests = rng.sample(running, len(running))
        portions, drafts = [], []
        for request in requests:
            fed = portion(rng, request)
            whole = request.computed + len(fed) == len(request.ids)
            count = rng.choice((0, 0, 1, 3)) if whole and request.output else 0
            portions.append(fed + [next_token(rng) for _ in range(count)])
            drafts.append(count)
        slots = torch.tensor([r.slot for r in requests], dtype=torch.int32)
        if steering.steers([r.slot for r in requests]):
            feed(processor, requests, portions, slots)
        made, rows = context(requests, portions, drafts)
        before = torch.randn(len(rows), tiny.VOCABULARY, generator=generator) * 3
        logits = before.clone()
        cut = rng.randint(0, len(rows))
        for part in (slice(0, cut), slice(cut, len(rows))):
            logits[part] = processor.apply(logits[part].clone(), part_of(made, part))
        check(logits, before, rows)
        for request, fed, count in zip(requests, portions, drafts, strict=True):
            accepted = rng.randint(0, count)
            new = fed[len(fed) - count : len(fed) - count + accepted]
            request.computed += len(fed) - count + accepted
            request.output += new
            if request.computed == len(request.ids):
                request.output.append(next_token(rng))


def test_v2_a_request_that_does_not_steer_is_declined() -> None:
    processor = attached()
    assert processor.add_request(0, SimpleNamespace(extra_args=None)) is False
    assert processor.add_request(0, SimpleNamespace(extra_args={"other": 1})) is False
    processor.steering.enter(0, None, [20], [])
    assert not processor.steering.steers()


def test_without_the_hooks_a_steered_request_is_an_error() -> None:
    processor = SteerLogitsProcessor(config())
    steered = Request([20], {"amplitude": 3.0}).params()
    update = BatchUpdate(batch_size=1, removed=[], added=[(0, steered, [20], [])], moved=[])
    for call in (lambda: processor.update_state(update), lambda: processor.add_request(0, steered)):
        with pytest.raises(RuntimeError, match="without the hooks"):
            call()


# -- the front end's last check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["steer", "steer_amplitude", "STEER", "llm_steer"])
def test_what_was_not_admitted_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        SteerLogitsProcessor.validate_params(SimpleNamespace(extra_args={key: "reflection_cycle"}))


def test_what_does_not_steer_passes() -> None:
    for arguments in (None, {}, {"kv_transfer_params": {}}):
        SteerLogitsProcessor.validate_params(SimpleNamespace(extra_args=arguments))
