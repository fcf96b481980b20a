"""Slots by request id: kept from admission to finish, whatever the rows do."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_steer.hosts.vllm import compat
from llm_steer.hosts.vllm import worker as worker_module
from llm_steer.hosts.vllm.worker import RowTable, WorkerSteering

CPU = torch.device("cpu")
SEQS = 3


def steering() -> WorkerSteering:
    model = SimpleNamespace(get_vocab_size=lambda: 32)
    return WorkerSteering(SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=SEQS)), CPU)


def stamp(name: str, *, loop: bool = False) -> dict[str, Any]:
    plugins = [["reflection_cycle", {"amplitude": 5.0, "token_ids": [3], "words": [], "origin": "output"}]]
    if loop:
        plugins = [["budget_forcing", {"ignore": 1, "word_id": 3, "end_id": 4}]]
    return {"id": name, "plugins": plugins, "markers": {"openers": [[2]], "closers": []}}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_request_keeps_its_slot(seed: int) -> None:
    rng = random.Random(seed)
    worker = steering()
    rows: dict[int, str] = {}
    parked: list[str] = []
    slot_of: dict[str, int] = {}
    count = 0
    for _ in range(40):
        action = rng.choice(("add", "add", "park", "finish", "back", "swap"))
        free = [row for row in range(SEQS) if row not in rows]
        if action == "add" and free:
            name = f"r{count}"
            count += 1
            rows[free[0]] = name
            worker.enter(free[0], stamp(name, loop=count % 3 == 0), [1, 2], [])
            slot_of[name] = int(worker._rows.slots()[free[0]])
        elif action == "park" and rows and len(parked) < SEQS:
            row = rng.choice(list(rows))
            worker.leave(row)
            parked.append(rows.pop(row))
        elif action == "back" and parked and free:
            name = parked.pop(rng.randrange(len(parked)))
            rows[free[0]] = name
            worker.enter(free[0], stamp(name), [1, 2], [5, 6, -1])
        elif action == "finish" and (rows or parked):
            name = rng.choice([*rows.values(), *parked])
            if name in parked:
                parked.remove(name)
            else:
                row = next(row for row, owner in rows.items() if owner == name)
                del rows[row]
                worker.leave(row)
            worker.finish([name, "never came"])
            del slot_of[name]
        elif action == "swap" and len(rows) > 1:
            a, b = rng.sample(list(rows), 2)
            worker.swap(a, b)
            rows[a], rows[b] = rows[b], rows[a]
        expected = [slot_of[rows[row]] if row in rows else 2 * SEQS for row in range(SEQS)]
        assert worker._rows.slots().tolist() == expected
        assert len(set(slot_of.values())) == len(slot_of)
        assert worker.steers() == bool(rows)
        assert worker.measures == any(int(name[1:]) % 3 == 2 for name in slot_of)
        for row in range(SEQS):
            assert worker.steers([row]) == (row in rows)


def test_a_parked_request_gives_way_when_no_slot_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[Any] = []
    monkeypatch.setattr(compat, "logger", lambda: SimpleNamespace(warning=lambda *args: warnings.append(args)))
    worker = steering()
    for number in range(2 * SEQS):
        worker.enter(0, stamp(f"r{number}"), [1], [])
        if number < 2 * SEQS - 1:
            worker.leave(0)
    running = int(worker._rows.slots()[0])
    worker.enter(1, stamp("one more"), [1], [])
    assert "r0" in str(warnings)
    assert int(worker._rows.slots()[0]) == running != int(worker._rows.slots()[1]) < 2 * SEQS
    worker.enter(2, stamp("r0"), [1], [4])  # comes back as a new one
    assert len({*worker._rows.slots().tolist()}) == 3


def test_what_closed_loops_did_is_told_once_while_there_is_room() -> None:
    worker = steering()
    for number in range(4 * SEQS):
        worker.enter(0, stamp(f"r{number}", loop=True), [1, 2], [])
        ids = torch.tensor([1, 2])
        worker.step(ids, torch.tensor([0, 1]), torch.tensor([0, 2]))
        logits = torch.zeros(1, 32)
        logits[0, 4] = 9.0  # the end of thinking is the likeliest token
        worker.logits(logits, raw=True)
        worker.leave(0)
        worker.finish([f"r{number}"])
    assert not worker.measures
    ids = [f"r{number}" for number in range(4 * SEQS)]
    told = worker.traces([(name, [3, 8]) for name in [*ids, "never came"]])
    assert [trace is not None for trace in told] == [False] * (2 * SEQS) + [True] * (2 * SEQS) + [False]
    assert told[-2] is not None
    assert [told[-2][key] for key in ("tokens", "replayed")] == [2, False]
    assert told[-2]["plugins"][0]["positions"] == [0]
    assert worker.traces([(ids[-1], [3, 8])]) == [None]
    worker.enter(0, stamp("runs", loop=True), [1, 2], [])
    (running,) = worker.traces([("runs", [8])])  # it has ended, and nobody has said so yet
    assert running is not None
    assert running["plugins"][0]["positions"] == []
    worker.finish(["runs"])
    worker.forget()
    assert worker.traces([("runs", [8])]) == [None]


def test_requests_that_do_not_steer_take_no_slot() -> None:
    worker = steering()
    worker.enter(0, None, [1], [])
    worker.enter(1, {"plugins": []}, [1], [])
    assert not worker.steers()
    assert worker.plugins == []


def test_rows() -> None:
    rows = RowTable(3, nobody=9, device=CPU)
    rows.set(0, 4)
    rows.set(2, 5)
    rows.swap(0, 2)
    assert rows.slots().tolist() == [5, 9, 4]
    assert rows.any(None)
    assert rows.any([1, 2])
    assert not rows.any([1])
    rows.set(0, 9)
    rows.set(2, 9)
    rows.set(2, 9)
    assert not rows.any(None)


def test_what_steers_is_made_outside_of_the_pool_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's level-2 sleep gives that pool's memory away: vectors and buffers must not lie there."""
    seen: list[tuple[str, bool]] = []
    pool = {"open": False}

    class Watched(WorkerSteering):
        def __init__(self, *args: Any) -> None:
            seen.append(("made", pool["open"]))

        def instrument(self, model: torch.nn.Module) -> None:
            seen.append(("built in", pool["open"]))

    def load_model(worker: Any) -> None:
        pool["open"] = True
        seen.append(("loaded", pool["open"]))
        pool["open"] = False

    monkeypatch.setattr(worker_module, "WorkerSteering", Watched)
    monkeypatch.setattr(worker_module.runner, "install", lambda config: None)
    monkeypatch.setattr(worker_module.runner, "attach", lambda model_runner, steering: None)
    model_runner = SimpleNamespace(vllm_config=None, device=CPU, get_model=torch.nn.Module)
    worker_module.around_load_model(load_model)(SimpleNamespace(model_runner=model_runner))
    assert seen == [("made", False), ("loaded", True), ("built in", False)]
