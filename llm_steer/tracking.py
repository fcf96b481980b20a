"""Where each request stands: generated position, think span, step boundaries; per slot, on the device.

:class:`Tracker` is a function of token ids and positions, never of how often or in which portions it is called. What lies
before ``base_len`` (the prompt, and after a preemption the output so far) is scanned once, at admission. What follows is
kept in a short ring of per-position states, so that tokens may come again or be taken back: a rejected draft is simply
overwritten by the token that is fed at its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_steer.plugin import Rows, Tokens

RING = 128
"""Positions of history kept per slot: how far tokens can be taken back, and the most drafts in one forward pass."""

_NEVER = 2**62
"""``base_len`` of a slot that follows no request: every token lies before it."""

NO_ID = -1
"""Padding inside marker tables; no token has this id."""


@dataclass(frozen=True)
class Markers:
    """Token-level description of a model's think span and step delimiter.

    ``openers`` and ``closers`` are alternatives, each a sequence of one or several token ids. A step boundary is a token
    whose own text holds a blank line, or one that completes a blank line together with the token before it.
    """

    openers: tuple[tuple[int, ...], ...] = ()
    closers: tuple[tuple[int, ...], ...] = ()
    blank_line: torch.Tensor | None = None
    """bool ``[vocab_size]``, the token's text holds a blank line (``"\\n\\n" in text``)."""
    ends_in_newline: torch.Tensor | None = None
    """bool ``[vocab_size]``."""
    starts_with_newline: torch.Tensor | None = None
    """bool ``[vocab_size]``."""


def sampled_from(tokens: Tokens, first: Rows) -> Rows:
    """The logits rows that one request's generated tokens were sampled from.

    Args:
        tokens: everything that was generated, in order.
        first: the row of the first token (``tracker.rows`` at the last prompt position).
    """

    def before(after: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return torch.cat([start, after[:-1]])[: len(after)]

    opened = tokens.thinking | (tokens.think_position >= 0)
    return Rows(
        slot=tokens.slot,
        output_position=tokens.output_position,
        thinking=before(tokens.thinking, first.thinking),
        think_position=before(torch.where(opened, tokens.think_position + 1, -1), first.think_position),
        think_ended=before(tokens.think_ended, first.think_ended),
        live=torch.ones_like(tokens.thinking),
    )


class Tracker:
    """Per-slot view of every request's output.

    Args:
        markers: think markers and step delimiters of the model's tokenizer.
        num_slots: slots to keep, nobody's slot included (the last).
        device: where the state lives.
    """

    def __init__(self, markers: Markers, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.nobody = num_slots - 1
        openers, closers = markers.openers, markers.closers
        self._width = max((len(m) for m in (*openers, *closers)), default=1)
        # [alternatives, width], right-aligned: column -1 is the token at hand, column -2 the one before it ...
        self._openers = _table(openers, self._width, device)
        self._closers = _table(closers, self._width, device)
        flags = (markers.blank_line, markers.ends_in_newline, markers.starts_with_newline)
        self._newlines = None if flags[0] is None else torch.stack([f.to(device) for f in flags if f is not None])
        # How many tokens before the one at hand a decision needs.
        self._lookback = max(self._width - 1, 0 if self._newlines is None else 1)

        def table(*shape: int) -> torch.Tensor:
            return torch.full((num_slots, *shape), -1, dtype=torch.int64, device=device)

        self.prompt_len = table()
        # State after the last token before base_len, and the ids that end there (most recent last).
        self._base_len = table().fill_(_NEVER)
        self._base_state = table()
        self._base_tail = table(self._lookback)
        # (position, id, state) of recent generated tokens at [slot, position % RING].
        self._ring = table(RING, 3)

    def admit(self, slot: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Start following a request.

        Args:
            slot: its slot.
            prompt_ids: int64 ``[prompt_len]``.
            output_ids: int64, what it has generated before (after a preemption); every id is real.
        """
        ids = torch.cat([prompt_ids, output_ids]).to(self.device)
        prompt_len, total = len(prompt_ids), len(ids)
        self.prompt_len[slot] = prompt_len
        self._base_len[slot] = total
        self._ring[slot] = -1
        self._base_tail[slot] = -1
        if keep := min(total, self._lookback):
            self._base_tail[slot, -keep:] = ids[total - keep :]
        if total == 0:
            self._base_state[slot] = 0  # not thinking, nothing ended
            return
        padded = torch.cat([ids.new_full((self._lookback,), NO_ID), ids])
        history = padded.unfold(0, self._lookback + 1, 1)
        position = torch.arange(total, device=self.device)
        state = self._scan(
            history, position, position == 0, torch.full_like(position, -1), position.new_full((total,), prompt_len)
        )
        self._base_state[slot] = state[-1]

    def release(self, slot: int) -> None:
        """Stop following; rows that still point at the slot are no longer live."""
        self._base_len[slot] = _NEVER
        self._ring[slot] = -1

    def advance(self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> Tokens:
        """Take note of the tokens of one forward pass.

        Args:
            ids, slot, position: int64 ``[num_tokens]``, a request's tokens next to each other, in order.

        Returns:
            The tokens with their state. Those before ``base_len`` are known already and change nothing.
        """
        base_len = self._base_len[slot]
        generated = (position >= base_len) & (slot != self.nobody)
        history = self._history(ids, slot, position)
        first = torch.ones_like(generated)
        if len(ids) > 1:
            first[1:] = (slot[1:] != slot[:-1]) | (position[1:] != position[:-1] + 1) | (position[1:] == base_len[1:])
        before, _ = self._lookup(slot, position - 1)
        state = self._scan(history, position, first, before, self.prompt_len[slot])
        known, _ = self._lookup(slot, position)
        state = torch.where(generated, state, known)
        self._store(ids, slot, position, state, generated)

        start, inside, ended = _unpack(state)
        return Tokens(
            ids=ids,
            slot=slot,
            position=position,
            output_position=position - self.prompt_len[slot],
            thinking=inside,
            think_position=torch.where(start >= 0, (position - start).clamp_(min=-1), -1),
            think_ended=ended,
            boundary=self._boundary(history),
        )

    def rows(self, slot: torch.Tensor, position: torch.Tensor) -> Rows:
        """State for the logits rows of the tokens fed at ``position``.

        Args:
            slot, position: int64 ``[num_rows]``; the row's logits predict the token at ``position + 1``.
        """
        state, known = self._lookup(slot, position)
        start, inside, ended = _unpack(state)
        return Rows(
            slot=slot,
            output_position=position + 1 - self.prompt_len[slot],
            thinking=inside,
            think_position=torch.where(start >= 0, position + 1 - start, -1),
            think_ended=ended,
            live=known & (slot != self.nobody),
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _lookup(self, slot: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """State after the token at ``position``, and whether it is known."""
        entry = self._ring[slot, position % RING]
        at_base = position == self._base_len[slot] - 1
        recent = entry[:, 0] == position
        state = torch.where(at_base, self._base_state[slot], torch.where(recent, entry[:, 2], -1))
        return state, (at_base | recent) & (position >= self._base_len[slot] - 1)

    def _history(self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, lookback + 1]``: each token's id, preceded by those of the positions before it."""
        columns = [ids]
        base_len = self._base_len[slot]
        for back in range(1, self._lookback + 1):
            where = position - back
            entry = self._ring[slot, where % RING]
            earlier = torch.where(entry[:, 0] == where, entry[:, 1], NO_ID)
            tail = self._lookback - (base_len - where)
            earlier = torch.where(
                (where < base_len) & (tail >= 0),
                self._base_tail[slot, tail.clamp(0, self._lookback - 1)],
                earlier,
            )
            if len(ids) > back:  # tokens fed in the same pass come first
                same = (slot[back:] == slot[:-back]) & (position[:-back] == where[back:])
                earlier[back:] = torch.where(same, ids[:-back], earlier[back:])
            columns.insert(0, earlier)
        return torch.stack(columns, dim=1)

    def _scan(
        self,
        history: torch.Tensor,
        position: torch.Tensor,
        first: torch.Tensor,
        before: torch.Tensor,
        prompt_len: torch.Tensor,
    ) -> torch.Tensor:
        """Packed state after each token of several runs of consecutive tokens.

        Args:
            history: from :meth:`_history`.
            first: the token starts a run; its predecessor's packed state is in ``before``.
        """
        opens = _ends_with(history, self._openers)
        closes = _ends_with(history, self._closers)
        if len(position) == 0:
            return before
        index = torch.arange(len(position), device=position.device)
        run = _latest(first, index)
        start, inside, ended = (field[run] for field in _unpack(before))
        event = _latest(opens | closes, index)
        # A second opener inside an open span opens nothing: only the first after a closer (or the carry) counts.
        previous = torch.cat([event.new_full((1,), -1), event[:-1]])
        was_open = torch.where(previous >= run, opens[previous], inside)
        opened = _latest(opens & ~was_open, index)
        inside = torch.where(event >= run, opens[event], inside)
        start = torch.where(opened >= run, torch.maximum(position[opened] + 1, prompt_len), start)
        ended = ended | (_latest(closes & (position >= prompt_len), index) >= run)
        return _pack(start, inside, ended)

    def _store(
        self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, state: torch.Tensor, generated: torch.Tensor
    ) -> None:
        if len(ids) > RING:
            # One entry per ring cell: a run longer than the ring keeps its end, or duplicate indices would race.
            last = torch.full_like(self._base_len, -1).scatter_reduce_(0, slot, position, "amax")
            generated = generated & (position > last[slot] - RING)
        owner = torch.where(generated, slot, self.nobody)
        self._ring[owner, position % RING] = torch.stack([position, ids, state], dim=1)

    def _boundary(self, history: torch.Tensor) -> torch.Tensor:
        if self._newlines is None:
            return torch.zeros_like(history[:, -1], dtype=torch.bool)
        blank, ends, starts = self._newlines
        current, previous = history[:, -1], history[:, -2]
        joined = (previous >= 0) & ends[previous.clamp(min=0)] & starts[current]
        boundary: torch.Tensor = blank[current] | joined
        return boundary


def _table(markers: tuple[tuple[int, ...], ...], width: int, device: torch.device) -> torch.Tensor:
    rows = [[NO_ID] * (width - len(marker)) + list(marker) for marker in markers]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), width)


def _ends_with(history: torch.Tensor, markers: torch.Tensor) -> torch.Tensor:
    """bool ``[num_tokens]``: the ids up to and including the token end with one of the markers."""
    recent = history[:, None, history.shape[1] - markers.shape[1] :]
    return ((recent == markers) | (markers == NO_ID)).all(-1).any(-1)


def _latest(flag: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Index of the last True at or before each position; -1 where there is none."""
    return torch.where(flag, index, -1).cummax(0).values


def _pack(start: torch.Tensor, inside: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """One int64 for: position of the first token of the current or last think span (-1 if none opened), whether the span
    is open, whether an end marker was generated."""
    return (start + 1) * 4 + inside * 2 + ended


def _unpack(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state = state.clamp(min=0)  # -1: nothing known, as good as nothing opened
    return state // 4 - 1, (state // 2 % 2).bool(), (state % 2).bool()
