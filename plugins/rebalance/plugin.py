"""ReBalance: confidence sets how much of a vector is added at the end of each reasoning step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch

from llm_steer.bank import VectorBank
from llm_steer.errors import UnsupportedError
from llm_steer.plugin import Context, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable

from .confidence import Confidence
from .control import COLUMNS, coefficient, paper_coefficient
from .params import MAX_WINDOW, METHOD, RebalanceParams, constants_of

MAX_STEPS = 1024
"""Steps whose confidence the trace can tell."""


class Rebalance(Plugin[RebalanceParams]):
    """Adds ``coefficient * vector`` to the residual stream at every step delimiter, at one layer.

    The coefficient is a function of the confidence of the step that the delimiter ends, and of its variance over the last
    steps. A token's confidence is the largest probability in the distribution that it was drawn from.

    One token of a request is new in each forward pass: the first one whose position was not seen before. It moves the state
    of its slot; what is fed again (recomputed after a preemption, without a cache) finds the coefficient that its position
    had. Memory: 4 bytes for each slot and position that it can hold.
    """

    name = "rebalance"
    summary = "ReBalance: confidence sets how much of a vector is added at the end of each reasoning step"
    Params: ClassVar = RebalanceParams
    feedback = True
    needs_boundaries = True

    NUMBERS = (*COLUMNS, "scale", "initial", "window")
    FLAGS = ("steers", "paper", "everywhere")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        slots, device = context.num_slots, context.device
        self._layers = sorted({layer for params in context.declared for layer in params.layers or ()})  # type: ignore[attr-defined]
        self.bank = VectorBank(slots - 1, context.hidden_size, device)
        """The vectors that requests steer with, by content hash."""
        self._numbers = SlotTable(self.NUMBERS, slots, device)
        self._flags = SlotTable(self.FLAGS, slots, device, torch.bool)
        self._where = SlotTable(("row", "layer"), slots, device, torch.int64)
        for slot in range(slots):
            self._where.write(slot, row=self.bank.nothing, layer=-1)
        self._number = {name: self._numbers[name] for name in self.NUMBERS}
        self._flag = {name: self._flags[name] for name in self.FLAGS}
        self._row, self._layer = self._where["row"], self._where["layer"]

        # Output position of the next token that is new, and that for which `last` was measured.
        self._next = torch.zeros(slots, dtype=torch.int64, device=device)
        self._measured = torch.full((slots,), -1, dtype=torch.int64, device=device)
        # Sum and number of the running step's confidences, coefficient, confidence of the next token: see _fresh.
        self._state = torch.zeros(4, slots, dtype=torch.float64, device=device)
        self._sum, self._count, self._coefficient, self._last = self._state.unbind(0)
        self._recent = torch.full((slots, MAX_WINDOW), torch.nan, dtype=torch.float64, device=device)  # newest first
        # What was added at the last prompt token (column 0) and at each output position after it, in units of the vector;
        # the last column takes what lies beyond.
        self._added = torch.zeros(slots, context.max_positions + 2, dtype=torch.float32, device=device)
        self._confidences = torch.zeros(slots, MAX_STEPS + 1, dtype=torch.float32, device=device)
        self._steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self._each = torch.arange(slots, device=device)
        self._age = torch.arange(MAX_WINDOW, device=device)
        self._confidence = Confidence()

    @classmethod
    def first_steered(cls, params: RebalanceParams, prompt_len: int) -> int:
        return max(prompt_len - 1, 0)

    def layers(self) -> Collection[int]:
        return self._layers

    def admit(self, slot: int, params: RebalanceParams | None, prompt_ids: torch.Tensor) -> None:
        self.bank.unpin(slot)
        self._numbers.write(slot)
        self._flags.write(slot)
        self._where.write(slot, row=self.bank.nothing, layer=-1)
        self._next[slot] = 0
        self._measured[slot] = -1
        self._recent[slot] = torch.nan
        self._added[slot] = 0.0
        self._steps[slot] = 0
        self._state[:, slot] = 0.0
        if params is None:
            return
        if params.layers is None or params.initial is None or self.context.shelf is None:
            raise ValueError(f"{self.name} was admitted with parameters that were not resolved")
        if params.layers[0] not in self._layers:
            raise UnsupportedError(f"{self.name} was declared for the layers {self._layers}, not for {params.layers}")
        artifact = self.context.shelf.open(params.artifact, METHOD)
        constants = constants_of(artifact)
        sign = -1.0 if artifact.description.sign == "away_from_overthinking" else 1.0
        self._numbers.write(
            slot,
            **vars(constants),
            steepness=constants.steepness(),
            scale=sign * params.strength,
            initial=params.initial,
            window=params.window,
        )
        self._flags.write(slot, steers=True, paper=params.mode == "paper", everywhere=params.scope == "output")
        self._where.write(slot, row=self.bank.pin(slot, params.artifact, artifact.vector), layer=params.layers[0])
        self._coefficient[slot] = params.initial

    # -- one forward pass -----------------------------------------------------------------------------------------------

    def step(self, tokens: Tokens) -> None:
        for table in (self._numbers, self._flags, self._where):
            table.flush()
        number, flag = self._number, self._flag
        inside = tokens.thinking | flag["everywhere"][tokens.slot]
        ends_prompt, at = self._one_a_slot(tokens, tokens.output_position == -1)
        self._note(ends_prompt & tokens.boundary[at] & inside[at], ends_prompt, number["initial"], 0)

        new, at = self._one_a_slot(tokens, tokens.output_position == self._next[tokens.slot])
        delimiter = new & tokens.boundary[at]
        # The delimiter's own confidence does not count, and nothing does that was not measured.
        counts = new & ~delimiter & (self._measured == self._next) & ~self._last.isnan()
        self._sum += torch.where(counts, torch.where(flag["paper"], self._last.log(), self._last), 0.0)
        self._count += counts
        ends = delimiter & (self._count > 0)
        mean = self._sum / self._count.clamp(min=1)
        confidence = torch.where(flag["paper"], mean.exp(), mean)
        recent = torch.where(ends[:, None], torch.cat([confidence[:, None], self._recent[:, :-1]], 1), self._recent)
        self._recent.copy_(recent)
        value = self._control(confidence, self._variance(recent))
        self._coefficient.copy_(torch.where(ends, value, self._coefficient))
        self._sum.masked_fill_(ends, 0.0)
        self._count.masked_fill_(ends, 0.0)

        self._note(delimiter & inside[at], new, self._coefficient, self._next + 1)
        self._confidences[self._each, torch.where(ends, self._steps.clamp(max=MAX_STEPS), MAX_STEPS)] = confidence.float()
        self._steps += ends
        self._next += new

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        home = self.bank.vectors.device
        if tokens.slot.device != home:  # a model that is split over several
            tokens = tokens.to(home)
        slot, column = tokens.slot, tokens.output_position + 1
        gain = self._added[slot, column.clamp(0, self._added.shape[1] - 1)]
        gain = torch.where((column >= 0) & (self._layer[slot] == layer), gain, 0.0)
        return (gain[:, None] * self.bank.vectors[self._row[slot]]).to(hidden.device, hidden.dtype)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        confidence = self._confidence.of(logits).double()
        awaited = rows.live & self._flag["steers"][rows.slot]
        awaited &= (rows.output_position == self._next[rows.slot]) & (rows.output_position != self._measured[rows.slot])
        # Rows of which nothing is kept write to nobody.
        slot = torch.where(awaited, rows.slot, self.context.nobody)
        self._last[slot] = torch.where(awaited, confidence, torch.nan)
        self._measured[slot] = torch.where(awaited, rows.output_position, -1)

    def _one_a_slot(self, tokens: Tokens, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of chosen tokens, at most one a request: bool ``[num_slots]``, whether there is one, and its index or 0."""
        chosen = chosen & self._flag["steers"][tokens.slot]
        index = torch.arange(len(tokens.slot), device=tokens.slot.device)
        at = torch.full_like(self._next, -1)
        at[torch.where(chosen, tokens.slot, self.context.nobody)] = torch.where(chosen, index, -1)
        return at >= 0, at.clamp(min=0)

    def _note(self, steered: torch.Tensor, known: torch.Tensor, value: torch.Tensor, column: torch.Tensor | int) -> None:
        """Write down what is added at one position of each slot for which it is known."""
        column = torch.as_tensor(column, device=self._each.device).clamp(max=self._added.shape[1] - 1).expand_as(self._each)
        added = torch.where(steered, value * self._number["scale"], 0.0).float()
        self._added[self._each, column] = torch.where(known, added, self._added[self._each, column])

    def _variance(self, recent: torch.Tensor) -> torch.Tensor:
        """Population variance of the step confidences in each slot's window; 0 for its first step."""
        valid = ~recent.isnan() & (self._age < self._number["window"][:, None])
        count = valid.sum(1).clamp(min=1)
        mean = torch.where(valid, recent, 0.0).sum(1) / count
        return torch.where(valid, (recent - mean[:, None]) ** 2, 0.0).sum(1) / count

    def _control(self, confidence: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        value = coefficient(confidence, variance, self._number)
        return torch.where(self._flag["paper"], paper_coefficient(confidence, variance, self._number), value)

    # -- afterwards -----------------------------------------------------------------------------------------------------

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        """``steered_steps`` with the output ``positions`` at which something was added (-1: the last prompt token), and how
        much, ``coefficients``; ``steps`` that ended and the ``confidences`` of the first 1,024."""
        added = self._added[slot, : max(len(tokens.ids), 1)]  # the last token was never fed
        positions = added.nonzero().flatten()
        ends = tokens.boundary[:-1].clone()
        ends[1:] &= ~tokens.boundary[:-2]
        # A host may have fed more than what became the output; what it starts with ends no step.
        steps = min(int(self._steps[slot]), int(ends[1:].sum()))
        return {
            "steps": steps,
            "steered_steps": len(positions),
            "positions": (positions - 1).tolist(),
            "coefficients": [round(value, 6) for value in added[positions].tolist()],
            "confidences": [round(value, 6) for value in self._confidences[slot, : min(steps, MAX_STEPS)].tolist()],
        }
