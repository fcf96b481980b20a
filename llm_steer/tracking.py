"""Where each request stands: generated position, think span, step boundaries; per slot, on the device.

:class:`Tracker` is a function of token ids and positions, never of how often or in which portions it is called. What lies
before ``base_len`` (the prompt, and after a preemption the output so far) is scanned once, at admission. What follows is
kept in a short ring of per-position states, so that tokens may come again or be taken back: a rejected draft is simply
overwritten by the token that is fed at its position.

A state is one int64: the markers' standing (see :mod:`llm_steer.markers`), and above it, plus 1, the position of the first
token of the current or last think span, -1 if none has opened.
"""

from __future__ import annotations

import torch

from llm_steer.markers import ENDED, INSIDE, Markers
from llm_steer.plugin import Rows, Tokens

RING = 128
"""How far tokens can be taken back, and the most drafts in one forward pass: one less than this."""

FAR = 2**40
"""A position that no token reaches: ``base_len`` and ``prompt_len`` where no request is followed."""


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
        self._automaton = markers.automaton.to(device)
        self._finds_boundaries = markers.blank_line is not None
        self._ring_size = RING + 1  # and the token before the last that can be taken back

        def table(*shape: int, fill: int = -1) -> torch.Tensor:
            return torch.full((num_slots, *shape), fill, dtype=torch.int64, device=device)

        # base_len, the state after the last token before it, prompt_len: read together.
        self._slots = table(3, fill=FAR)
        self._base_len, self._base_state, self.prompt_len = self._slots.unbind(1)
        # (position, state) of recent tokens at [slot, position % ring_size].
        self._ring = table(self._ring_size, 2, fill=-FAR)
        # What preempted requests had generated before, which is fed again: the states of each such slot's positions, one
        # slot after another in _past, position 0 at _past_start.
        self._past_of: dict[int, torch.Tensor] = {}
        self._past = torch.zeros(0, dtype=torch.int64, device=device)
        self._past_start = table()
        # Tokens of a pass that fed one each, whether a span has opened, how far base_len lies behind: what their rows are
        # made of.
        self._fed: tuple[Tokens, torch.Tensor, torch.Tensor] | None = None

    def admit(self, slot: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Start following a request.

        Args:
            slot: its slot.
            prompt_ids: int64 ``[prompt_len]``.
            output_ids: int64, what it has generated before (after a preemption); every id is real.
        """
        ids = torch.cat([prompt_ids, output_ids]).to(self.device)
        prompt_len, total = len(prompt_ids), len(ids)
        position = torch.arange(total, device=self.device)
        self.prompt_len[slot] = prompt_len
        self._base_len[slot] = total
        state = torch.zeros_like(ids)  # not thinking, nothing ended
        if total:
            state, _ = self._scan(ids, position, position == 0, state, torch.full_like(ids, prompt_len))
        self._base_state[slot] = state[-1] if total else 0
        state[: max(prompt_len - 1, 0)] &= self._automaton.matched
        self._ring[slot] = -FAR
        end = slice(max(total - self._ring_size, 0), total)
        self._ring[slot, position[end] % self._ring_size] = torch.stack([position, state], dim=1)[end]
        self._remember(slot, state if len(output_ids) else None)
        self._fed = None

    def release(self, slot: int) -> None:
        """Stop following; rows that still point at the slot are no longer live."""
        self.prompt_len[slot] = FAR
        self._base_len[slot] = FAR
        self._remember(slot, None)
        self._fed = None

    def advance(self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, *, single: bool = False) -> Tokens:
        """Take note of the tokens of one forward pass.

        Args:
            ids, slot, position: int64 ``[num_tokens]``, a request's tokens next to each other, in order.
            single: no two of the tokens are of one request, as in plain decoding, for which there is a shorter way.

        Returns:
            The tokens with their state. Those before ``base_len`` are known already and change nothing.
        """
        base_len, base_state, prompt_len = self._slots.index_select(0, slot).unbind(1)
        ahead = position - base_len
        before = self._before(slot, position - 1, base_len, ahead, base_state)
        if single:
            state, code = self._next(ids, position, before)
        else:
            first = torch.ones_like(ids, dtype=torch.bool)
            first[1:] = (slot[1:] != slot[:-1]) | (position[1:] != position[:-1] + 1) | (ahead[1:] == 0)
            state, code = self._scan(ids, position, first, before, prompt_len)
        known = torch.where(ahead == -1, base_state, code & self._automaton.matched)
        if self._past_of:
            past_state, past = self._recall(slot, position, base_len)
            known = torch.where(past, past_state, known)
        state = torch.where(ahead >= 0, state, known)
        self._store(slot, position, state, single)

        start, inside, ended = self._unpack(state)
        opened = start >= 0
        boundary = torch.zeros_like(inside)
        if self._finds_boundaries:
            boundary = ((code & self._automaton.boundary) != 0) & (slot != self.nobody)
        tokens = Tokens(
            ids=ids,
            slot=slot,
            position=position,
            output_position=position - prompt_len,
            thinking=inside,
            think_position=torch.where(opened, (position - start).clamp_(min=-1), -1),
            think_ended=ended,
            boundary=boundary,
        )
        self._fed = (tokens, opened, ahead) if single else None
        return tokens

    def rows(self, slot: torch.Tensor, position: torch.Tensor) -> Rows:
        """State for the logits rows of the tokens fed at ``position``.

        Args:
            slot, position: int64 ``[num_rows]``; the row's logits predict the token at ``position + 1``. Where they are the
                tensors that :meth:`advance` was given last, with ``single``, nothing needs to be looked up again.
        """
        if self._fed is not None and self._fed[0].slot is slot and self._fed[0].position is position:
            tokens, opened, ahead = self._fed
            inside, ended, live = tokens.thinking, tokens.think_ended, ahead >= -1
            output_position, since_start = tokens.output_position + 1, tokens.think_position + 1
        else:
            base_len, base_state, prompt_len = self._slots.index_select(0, slot).unbind(1)
            state, live = self._lookup(slot, position, base_len, base_state)
            start, inside, ended = self._unpack(state)
            opened = start >= 0
            output_position, since_start = position + 1 - prompt_len, position + 1 - start
        return Rows(
            slot=slot,
            output_position=output_position,
            thinking=inside,
            think_position=torch.where(opened, since_start, -1),
            think_ended=ended,
            live=live,
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _lookup(
        self, slot: torch.Tensor, position: torch.Tensor, base_len: torch.Tensor, base_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """State after the token at ``position`` (0 where it is not known), and whether a token sampled from it will be
        kept."""
        at, state = self._ring[slot, position % self._ring_size].unbind(1)
        at_base = position == base_len - 1
        recent = (at == position) & (position >= base_len)
        state = torch.where(at_base, base_state, torch.where(recent, state, 0))
        if self._past_of:
            past_state, past = self._recall(slot, position, base_len)
            state = torch.where(past, past_state, state)
        return state, at_base | recent

    def _before(
        self,
        slot: torch.Tensor,
        position: torch.Tensor,
        base_len: torch.Tensor,
        ahead: torch.Tensor,
        base_state: torch.Tensor,
    ) -> torch.Tensor:
        """State after the token at ``position``, as far as what comes next depends on it."""
        at, state = self._ring[slot, position % self._ring_size].unbind(1)
        state = torch.where(ahead == 0, base_state, torch.where(at == position, state, 0))
        if self._past_of:
            past_state, past = self._recall(slot, position, base_len)
            state = torch.where(past, past_state, state)
        return state

    def _next(self, ids: torch.Tensor, position: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and codes of generated tokens, one of each request."""
        automaton = self._automaton
        standing = before & automaton.standing
        code = automaton.read(standing, automaton.kinds_of(ids))
        start = torch.where((code & automaton.opens) != 0, (position + 2) << automaton.bits, before - standing)
        return start + (code & automaton.standing), code

    def _scan(
        self, ids: torch.Tensor, position: torch.Tensor, first: torch.Tensor, before: torch.Tensor, prompt_len: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and codes of several runs of consecutive tokens.

        Args:
            first: the token starts a run; its predecessor's state is in ``before``.
        """
        automaton = self._automaton
        kind = automaton.kinds_of(ids)
        origin = torch.where(first, before & automaton.matched, 0)
        code = automaton.read(origin, kind)
        for _ in range(automaton.reach):  # each time one more token of what comes before is taken in
            matched = torch.cat([code.new_zeros(1), code & automaton.matched])[:-1]
            code = automaton.read(torch.where(first, origin, matched), kind)
        opens, closes = (code & automaton.opens) != 0, (code & ENDED) != 0

        index = torch.arange(len(position), device=position.device)
        run = latest(first, index)
        start, inside, ended = (field[run] for field in self._unpack(before))
        event = latest(opens | closes, index)
        # A second opener inside an open span opens nothing: only the first after a closer (or the carry) counts.
        previous = torch.cat([event.new_full((1,), -1), event])[:-1]
        was_open = torch.where(previous >= run, opens[previous], inside)
        opened = latest(opens & ~was_open, index)
        inside = torch.where(event >= run, opens[event], inside)
        start = torch.where(opened >= run, torch.maximum(position[opened] + 1, prompt_len), start)
        ended = ended | (latest(closes & (position >= prompt_len), index) >= run)
        state = ((start + 1) << automaton.bits) + (code & automaton.matched) + inside * INSIDE + ended * ENDED
        return state, code

    def _unpack(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Position of the first token of the current or last think span, whether it is open, whether an end marker was
        generated."""
        return (state >> self._automaton.bits) - 1, (state & INSIDE) != 0, (state & ENDED) != 0

    def _remember(self, slot: int, past: torch.Tensor | None) -> None:
        """Keep the states ``[total]`` of what a slot's request generated before, or nothing."""
        if past is None and slot not in self._past_of:
            return
        self._past_of.pop(slot, None)
        if past is not None:
            self._past_of[slot] = past
        self._past_start.fill_(-1)
        start = 0
        for owner, kept in self._past_of.items():
            self._past_start[owner] = start
            start += len(kept)
        self._past = torch.cat([self._past[:0], *self._past_of.values()])

    def _recall(
        self, slot: torch.Tensor, position: torch.Tensor, base_len: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """State at a position before ``base_len``, and whether it was kept."""
        start = self._past_start[slot]
        kept = (start >= 0) & (position >= 0) & (position < base_len)
        return self._past[torch.where(kept, start + position, 0)], kept

    def _store(self, slot: torch.Tensor, position: torch.Tensor, state: torch.Tensor, single: bool) -> None:
        if len(state) > self._ring_size and not single:
            # One entry per ring cell: a run longer than the ring keeps its end, or duplicate indices would race.
            last = torch.full_like(self._base_len, -1).scatter_reduce_(0, slot, position, "amax")
            slot = torch.where(position > last[slot] - self._ring_size, slot, self.nobody)
        self._ring[slot, position % self._ring_size] = torch.stack([position, state], dim=1)


def latest(flag: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Index of the last True at or before each position; -1 where there is none."""
    return torch.where(flag, index, -1).cummax(0).values
