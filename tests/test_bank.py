"""The bank of vectors: against a model that keeps no rows, under any order of calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_steer.bank import VectorBank
from llm_steer.errors import SteerError, UnsupportedError

CPU, CAPACITY, SLOTS = torch.device("cpu"), 3, 6


def vector(key: str) -> torch.Tensor:
    return torch.tensor([float(ord(key)), 1.0])


class BankMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bank = VectorBank(CAPACITY, 2, CPU)
        self.table, self.storage = self.bank.vectors, self.bank.vectors.data_ptr()
        self.used: list[str] = []  # held, least recently used first
        self.pins: dict[int, str] = {}
        self.rows: dict[int, int] = {}
        self.made: list[str] = []

    def make(self, key: str):
        def call() -> torch.Tensor:
            self.made.append(key)
            return vector(key)

        return call

    def expect_load(self, key: str) -> bool:
        """Whether there is room; the held keys are updated if so."""
        if key in self.used:
            self.used.remove(key)
        elif len(self.used) == CAPACITY:
            loose = [k for k in self.used if k not in self.pins.values()]
            if not loose:
                return False
            self.used.remove(loose[0])
        self.used.append(key)
        return True

    @rule(slot=st.integers(0, SLOTS - 1), key=st.sampled_from("abcdef"))
    def pin(self, slot: int, key: str) -> None:
        self.pins.pop(slot, None)
        self.rows.pop(slot, None)
        held = key in self.used
        self.made.clear()
        if not self.expect_load(key):
            with pytest.raises(UnsupportedError, match="all 3 vectors that fit at once are in use"):
                self.bank.pin(slot, key, self.make(key))
            return
        self.rows[slot] = self.bank.pin(slot, key, self.make(key))
        self.pins[slot] = key
        assert self.made == ([] if held else [key])

    @rule(key=st.sampled_from("abcdef"))
    def load(self, key: str) -> None:
        if self.expect_load(key):
            assert torch.equal(self.table[self.bank.load(key, self.make(key))], vector(key))

    @rule(slot=st.integers(0, SLOTS - 1))
    def unpin(self, slot: int) -> None:
        self.bank.unpin(slot)
        self.pins.pop(slot, None)
        self.rows.pop(slot, None)

    @rule(key=st.sampled_from("abcdef"))
    def unload(self, key: str) -> None:
        if key in self.pins.values():
            with pytest.raises(UnsupportedError, match="in use by a request"):
                self.bank.unload(key)
        else:
            assert self.bank.unload(key) == (key in self.used)
            self.used = [k for k in self.used if k != key]

    @precondition(lambda self: self.pins)
    @invariant()
    def every_slot_reads_its_own_vector(self) -> None:
        for slot, row in self.rows.items():
            assert torch.equal(self.table[row], vector(self.pins[slot]))
        assert not self.table[self.bank.nothing].any()
        assert self.bank.loaded == {key: list(self.pins.values()).count(key) for key in self.used}
        assert self.table.data_ptr() == self.storage


TestBank = BankMachine.TestCase
TestBank.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_cannot_be_held() -> None:
    bank = VectorBank(2, 4, CPU, torch.float16)
    for wrong, message in (
        (torch.zeros(5), "4 numbers"),
        (torch.zeros(1, 4), "4 numbers"),
        (torch.full((4,), float("nan")), "finite"),
        (torch.full((4,), 1e6), "finite numbers that torch.float16 can hold"),
    ):
        with pytest.raises(SteerError, match=message):
            bank.pin(0, "a", lambda wrong=wrong: wrong)
    assert bank.loaded == {}
    for key in "ab":
        bank.load(key, lambda: torch.ones(4))
    assert bank.vectors.tolist() == [[1.0] * 4] * 2 + [[0.0] * 4]
