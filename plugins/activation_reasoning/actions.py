"""From conclusions to what is done: which actions act at each token, and how strongly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .program import Action
from .scan import NONE, Runs

FOREVER = 2**40

LOGITS = ("force", "stop", "forbid")
"""Kinds that exclude each other where their tokens do."""


class Actions:
    """The actions of several programs.

    Args:
        actions: program and action of each column.
        num_slots: the last one is nobody's.
        device: where state lives.
    """

    def __init__(self, actions: Sequence[tuple[int, Action]], num_slots: int, device: torch.device) -> None:
        self.actions = list(actions)
        self._conflict = conflicts(actions).to(device)

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._duration = column([FOREVER if a.duration is None else a.duration for _, a in actions], torch.int64)
        self._strength = column([a.strength for _, a in actions], torch.float32)
        self._decay = column([a.decay for _, a in actions], torch.float32)
        self._start = torch.full((num_slots, len(actions)), NONE, dtype=torch.int64, device=device)
        self._was = torch.zeros(num_slots, len(actions), dtype=torch.int64, device=device)
        self.acting = torch.zeros(num_slots, len(actions), dtype=torch.bool, device=device)
        """After each slot's last token."""

    def reset(self, slot: int) -> None:
        self._start[slot] = NONE
        self._was[slot] = 0
        self.acting[slot] = False

    def __call__(
        self, wanted: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, runs: Runs, owner: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which actions act at each token, bool ``[tokens, actions]``, and how strongly: float32, 0 where one does not act
        or does not steer.

        Args:
            wanted: bool ``[tokens, actions]``, the formula holds and the token is one at which actions may act.
            owner: slot to write back to, nobody's for all but the last token of a request.
        """
        where = position[:, None]
        now = wanted.to(torch.int64)
        before = runs.before(now, self._was[slot], 0)
        start = runs.largest(torch.where(wanted & (before == 0), where, NONE), self._start[slot])
        age = where - start
        active = wanted & (age < self._duration)
        acting = active & ~((active.float() @ self._conflict) > 0)
        for state, update in ((self._was, now), (self._start, start), (self.acting, acting)):
            nobody = state[-1].clone()
            state[owner] = update
            state[-1] = nobody
        decayed = self._strength * self._decay ** age.clamp(min=0, max=2**20).float()
        return acting, torch.where(acting, decayed, 0.0)


def conflicts(actions: Sequence[tuple[int, Action]]) -> torch.Tensor:
    """float32 ``[actions, actions]``: row ``i``, column ``j`` is 1 where ``i`` keeps ``j`` from acting.

    Of two steer actions on one concept, of a forced token with another, and of one that is forced and forbidden, the one of
    higher priority acts; of equals the first.
    """
    table = torch.zeros(len(actions), len(actions))
    for i, (program, one) in enumerate(actions):
        for j, (other_program, other) in enumerate(actions):
            if i == j or program != other_program or (-one.priority, i) > (-other.priority, j):
                continue
            steer = one.kind == other.kind == "steer" and one.concept == other.concept
            kinds = {one.kind, other.kind}
            forced = kinds <= {"force", "stop"}
            denied = "forbid" in kinds and kinds & {"force", "stop"} and set(one.tokens) & set(other.tokens)
            table[i, j] = float(bool(steer or forced or denied))
    return table
