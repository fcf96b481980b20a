"""CyclicReflex: a wave on the logits of reflection tokens (ICLR 2026)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from llm_steer.errors import SteerError
from llm_steer.plugin import Context, Plugin, Rows, Tokens
from llm_steer.slots import RaggedTable, SlotTable

from . import schedule
from .params import ReflectionCycleParams

KINDS = (*schedule.WAVES, "piecewise", "shuffled")

NOTHING = 1e-9
"""An offset that small is a rounded zero: the wave crosses it without having steered."""


class ReflectionCycle(Plugin[ReflectionCycleParams]):
    """Adds ``d(t)`` to the logits of a request's reflection tokens, before temperature.

    ``t`` counts generated tokens, so the offset is a function of the position alone: nothing is accumulated, and every
    row of a batch is computed in one fused update.
    """

    name = "reflection_cycle"
    summary = "CyclicReflex: a triangular wave on the logits of reflection tokens (Wait, But, Alternatively)"
    Params: ClassVar = ReflectionCycleParams

    NUMBERS = ("kind", "amplitude", "period", "phase", "start_position")
    FLAGS = ("steers", "from_output", "restarts", "continues", "windowed")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers = SlotTable(self.NUMBERS, context.num_slots, context.device)
        self._flags = SlotTable(self.FLAGS, context.num_slots, context.device, torch.bool)
        self._params: dict[int, ReflectionCycleParams] = {}
        # What some slot makes use of; nothing is computed for the rest.
        self._in_use: frozenset[str] = frozenset()
        # Tables with a width, grown when a request needs more: [num_slots, width].
        self._ids = RaggedTable(context.num_slots, 1, context.device, torch.int64)
        self._window = _pairs(context, 1)
        self._points = _pairs(context, 2)
        self._order = RaggedTable(context.num_slots, 1, context.device, torch.int64)

    def admit(self, slot: int, params: ReflectionCycleParams | None, prompt_ids: torch.Tensor) -> None:
        if params is not None:
            self._check(params)
            self._params[slot] = params
        else:
            self._params.pop(slot, None)
        self._in_use = frozenset(use for p in self._params.values() for use in _uses(p))
        if params is None:
            self._flags.write(slot)
            self._ids.write(slot, [0])
            return
        self._flags.write(
            slot,
            steers=True,
            from_output=params.origin == "output",
            restarts=params.after_end == "restart",
            continues=params.after_end == "continue",
            windowed=params.window is not None,
        )
        self._numbers.write(
            slot,
            kind=KINDS.index(params.schedule),
            amplitude=params.amplitude,
            period=params.period,
            phase=params.phase,
            start_position=params.start_position,
        )
        self._ids.write(slot, params.token_ids or [])
        for column, table in enumerate(self._window):
            table.write(slot, [pair[column] for pair in params.window or [[0, 0]]])
        for column, table in enumerate(self._points):
            table.write(slot, [pair[column] for pair in params.points or [[0.0, 0.0]]])
        if params.schedule == "shuffled":
            self._order.write(slot, schedule.shuffled_order(int(params.period), params.shuffle_seed or 0))

    def _check(self, params: ReflectionCycleParams) -> None:
        if not params.token_ids or params.origin == "auto":
            raise ValueError("reflection_cycle was admitted with parameters that were not resolved")
        if max(params.token_ids) >= self.context.vocab_size:
            raise SteerError("token_ids", max(params.token_ids), f"below {self.context.vocab_size}, the width of the logits")

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        delta, acts = self.offsets(rows)
        ids = self._ids.rows(rows.slot)
        before = logits.gather(1, ids)
        # Rows that do not steer get their own values back: bit-identical. Padding repeats an id of the same row.
        after = torch.where(acts[:, None], before + delta[:, None].to(logits.dtype), before)
        logits.scatter_(1, ids, after)

    def offsets(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to the reflection tokens of each row: float64 ``[rows]``, and bool ``[rows]``, the wave acts."""
        number, flag = self._numbers.rows(rows.slot), self._flags.rows(rows.slot)
        from_output = flag["from_output"]
        t = torch.where(from_output, rows.output_position, rows.think_position) + number["start_position"]
        runs = (from_output | rows.thinking) & ~rows.think_ended
        if "restart" in self._in_use:
            again = flag["restarts"] & rows.think_ended & rows.thinking
            t = torch.where(again, rows.think_position.to(t.dtype), t)
            runs = runs | again
        if "continue" in self._in_use:
            runs = torch.where(flag["continues"], from_output | (rows.think_position >= 0), runs)
        acts = runs & flag["steers"] & rows.live
        if "window" in self._in_use:
            starts, ends = (table.rows(rows.slot) for table in self._window)
            within = ((t[:, None] >= starts) & (t[:, None] < ends)).any(1)
            acts = acts & (within | ~flag["windowed"])

        delta: torch.Tensor | None = None
        for index, kind in enumerate(KINDS):
            if kind not in self._in_use:
                continue
            # Meaningless for rows of another kind, which are overwritten, and for those that do not steer.
            form = (number["amplitude"], number["period"], number["phase"])
            if kind == "piecewise":
                value = schedule.piecewise(t, *(table.rows(rows.slot) for table in self._points))
            elif kind == "shuffled":
                another = self._order.at(rows.slot, schedule.place(t, number["period"]))
                value = schedule.triangular(another.to(t.dtype), *form)
            else:
                value = schedule.WAVES[kind](t, *form)
            delta = value if delta is None else torch.where(number["kind"] == index, value, delta)
        return torch.zeros_like(t) if delta is None else torch.where(acts, delta, 0.0), acts

    @classmethod
    def preview(cls, params: ReflectionCycleParams, length: int | None = None) -> dict[str, Any]:
        """The offsets of an output that is one long think span, for ``llm-steer preview``.

        Args:
            length: tokens; two periods, or what else shows the whole form, if None.

        Returns:
            ``t`` and ``delta`` of each token, and ``window`` if there is one.
        """
        length = length or _telling_length(params)
        output_position = torch.arange(length)
        inside = torch.ones(length, dtype=torch.bool)
        plugin = cls(Context(num_slots=2, device=torch.device("cpu"), vocab_size=1))
        # Which tokens it moves takes a tokenizer; the wave does not depend on them.
        plugin.admit(0, params.model_copy(update={"token_ids": [0], "origin": "output"}), output_position[:0])
        delta, _ = plugin.offsets(
            Rows(
                slot=torch.zeros_like(output_position),
                output_position=output_position,
                thinking=inside,
                think_position=output_position,
                think_ended=~inside,
                live=inside,
            )
        )
        curve: dict[str, Any] = {"t": (output_position + params.start_position).tolist(), "delta": delta.tolist()}
        return {**curve, "window": params.window} if params.window else curve

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        delta, acts = self.offsets(rows)
        reflection = torch.isin(tokens.ids, self._ids.rows(tokens.slot[:1])) & self._flags["steers"][slot]
        return {
            "steered_steps": int((acts & (delta.abs() > NOTHING)).sum()),
            "reflection_tokens": int(reflection.sum()),
            "positions": tokens.output_position[reflection].tolist(),
            "deltas": [round(d, 6) for d in delta[reflection].tolist()],
        }


def _uses(params: ReflectionCycleParams) -> tuple[str, ...]:
    return (params.schedule, params.after_end, "window" if params.window is not None else "")


def _telling_length(params: ReflectionCycleParams) -> int:
    """Tokens that show a whole wave: two periods of a repeating one."""
    if params.schedule == "piecewise":
        span = 1.25 * (params.points or [[0.0]])[-1][0]
    elif params.schedule == "linear_decay":
        span = 1.5 * params.period
    else:
        span = {"constant": 256.0, "silver": 2.0 * schedule.SILVER_PERIOD}.get(params.schedule, 2 * params.period)
    if params.window:
        span = min(max(span, 1.1 * max(end for _, end in params.window)), 8 * max(span, 64.0))
    return int(min(max(span, 64), 100_000)) + 1


def _pairs(context: Context, width: int) -> tuple[RaggedTable, RaggedTable]:
    """First and second numbers of each slot's list of pairs."""
    first, second = (RaggedTable(context.num_slots, width, context.device) for _ in range(2))
    return first, second
