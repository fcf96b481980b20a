"""Where each request stands: generated position, think span, step boundaries; per slot, on the device.

:class:`Tracker` is a function of token ids and positions, never of how often or in which portions it is called. What lies
before ``base_len`` (the prompt, and after a preemption the output so far) is scanned once, at admission. What follows is
kept in a short ring of per-position states, so that tokens may come again or be taken back: a rejected draft is simply
overwritten by the token that is fed at its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch

from llm_steer.plugin import Rows, Tokens

RING = 128
"""How far tokens can be taken back, and the most drafts in one forward pass: one less than this."""

NO_ID = -1
"""Padding inside marker tables; no token has this id. A prompt may hold it where embeddings were given."""

FAR = 2**40
"""A position that no token reaches: ``base_len`` and ``prompt_len`` where no request is followed."""


@dataclass(frozen=True)
class SpelledMarker:
    """A marker without a token of its own: found in the text, however it is cut into tokens."""

    text: bytes
    """The marker, UTF-8."""
    parts: tuple[tuple[int, bytes], ...]
    """Ids and texts of the tokens that can take part: that hold the marker, or some of its bytes at an end of their text."""


@dataclass(frozen=True)
class Markers:
    """Token-level description of a model's think span and step delimiter.

    ``openers`` and ``closers`` are alternatives, each a sequence of one or several token ids; or a marker that is looked for
    in the text. A step boundary is a token whose own text holds a blank line, or one that completes a blank line together
    with the token before it.
    """

    openers: tuple[tuple[int, ...], ...] | SpelledMarker = ()
    closers: tuple[tuple[int, ...], ...] | SpelledMarker = ()
    blank_line: torch.Tensor | None = None
    """bool ``[vocab_size]``, the token's text holds a blank line (``"\\n\\n" in text``)."""
    ends_in_newline: torch.Tensor | None = None
    """bool ``[vocab_size]``."""
    starts_with_newline: torch.Tensor | None = None
    """bool ``[vocab_size]``."""

    def to_wire(self, *, boundaries: bool = False) -> dict[str, Any]:
        """JSON types, for another process.

        Args:
            boundaries: with the step delimiters, which are large: thousands of ids.
        """

        def plain(markers: tuple[tuple[int, ...], ...] | SpelledMarker) -> Any:
            if isinstance(markers, SpelledMarker):
                parts = [[token, text.decode("latin-1")] for token, text in markers.parts]  # one character a byte
                return {"text": markers.text.decode("latin-1"), "parts": parts}
            return [list(ids) for ids in markers]

        wire = {"openers": plain(self.openers), "closers": plain(self.closers)}
        if boundaries and self.blank_line is not None:
            wire["vocab_size"] = len(self.blank_line)
            wire |= {
                name: flags.nonzero().flatten().tolist() for name in _NEWLINES if (flags := getattr(self, name)) is not None
            }
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Markers:
        """Inverse of :meth:`to_wire`."""

        def markers(plain: Any) -> tuple[tuple[int, ...], ...] | SpelledMarker:
            if isinstance(plain, Mapping):
                parts = tuple((token, text.encode("latin-1")) for token, text in plain["parts"])
                return SpelledMarker(plain["text"].encode("latin-1"), parts)
            return tuple(tuple(ids) for ids in plain)

        def flags(ids: list[int]) -> torch.Tensor:
            return torch.zeros(wire["vocab_size"], dtype=torch.bool).index_fill_(
                0, torch.tensor(ids, dtype=torch.int64), True
            )

        newlines = {name: flags(wire[name]) for name in _NEWLINES if name in wire}
        return cls(markers(wire["openers"]), markers(wire["closers"]), **newlines)


_NEWLINES = ("blank_line", "ends_in_newline", "starts_with_newline")


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
        self._openers = _finder(markers.openers, device)
        self._closers = _finder(markers.closers, device)
        flags = (markers.blank_line, markers.ends_in_newline, markers.starts_with_newline)
        self._newlines = None if flags[0] is None else _for_any_id(torch.stack([f for f in flags if f is not None]), device)
        # How many tokens before the one at hand a decision needs.
        self._lookback = max(self._openers.width, self._closers.width, 1 if self._newlines is None else 2) - 1
        self._ring_size = RING + self._lookback

        def table(*shape: int, fill: int = -1) -> torch.Tensor:
            return torch.full((num_slots, *shape), fill, dtype=torch.int64, device=device)

        # base_len, the state after the last token before it, prompt_len: read together.
        self._slots = table(3, fill=FAR)
        self._base_len, self._base_state, self.prompt_len = self._slots.unbind(1)
        # (position, id, state) of recent tokens at [slot, position % ring_size].
        self._ring = table(self._ring_size, 3, fill=-FAR)
        # What preempted requests had generated before, which is fed again: ids and states of each such slot's positions,
        # one slot after another in _past, position 0 at _past_start.
        self._past_of: dict[int, torch.Tensor] = {}
        self._past = torch.zeros(2, 0, dtype=torch.int64, device=device)
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
            padded = torch.cat([ids.new_full((self._lookback,), NO_ID), ids])
            history = padded.unfold(0, self._lookback + 1, 1)
            opens, closes = self._openers(history), self._closers(history)
            state = _scan(opens, closes, position, position == 0, state, torch.full_like(ids, prompt_len))
        self._base_state[slot] = state[-1] if total else 0
        state[: max(prompt_len - 1, 0)] = -1
        self._ring[slot] = -FAR
        end = slice(max(total - self._ring_size, 0), total)
        self._ring[slot, position[end] % self._ring_size] = torch.stack([position, ids, state], dim=1)[end]
        self._remember(slot, torch.stack([ids, state]) if len(output_ids) else None)
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
        base_len, base_state, prompt_len = self._slots[slot].unbind(1)
        history = self._history(ids, slot, position, base_len, single)
        opens, closes = self._openers(history), self._closers(history)
        ahead = position - base_len
        before = self._before(slot, position - 1, ahead, base_state)
        if single:
            state = _next(opens, closes, position, before)
        else:
            first = torch.ones_like(ids, dtype=torch.bool)
            first[1:] = (slot[1:] != slot[:-1]) | (position[1:] != position[:-1] + 1) | (ahead[1:] == 0)
            state = _scan(opens, closes, position, first, before, prompt_len)
        known = torch.where(ahead == -1, base_state, -1)
        if self._past_of:
            _, past_state, past = self._recall(slot, position, base_len)
            known = torch.where(past, past_state, known)
        state = torch.where(ahead >= 0, state, known)
        self._store(ids, slot, position, state, single)

        start, inside, ended = _unpack(state)
        opened = start >= 0
        boundary = torch.zeros_like(inside)
        if self._newlines is not None:
            boundary = self._boundary(history) & (slot != self.nobody)
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
            base_len, base_state, prompt_len = self._slots[slot].unbind(1)
            state, live = self._lookup(slot, position, base_len, base_state)
            start, inside, ended = _unpack(state)
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
        """State after the token at ``position`` (-1: not known), and whether a token sampled from it will be kept."""
        at, _, state = self._ring[slot, position % self._ring_size].unbind(1)
        at_base = position == base_len - 1
        recent = (at == position) & (position >= base_len)
        state = torch.where(at_base, base_state, torch.where(recent, state, -1))
        if self._past_of:
            _, past_state, past = self._recall(slot, position, base_len)
            state = torch.where(past, past_state, state)
        return state, at_base | recent

    def _before(
        self, slot: torch.Tensor, position: torch.Tensor, ahead: torch.Tensor, base_state: torch.Tensor
    ) -> torch.Tensor:
        """State after the token at ``position``, for those that generated tokens come next to."""
        at, _, state = self._ring[slot, position % self._ring_size].unbind(1)
        return torch.where(ahead == 0, base_state, torch.where(at == position, state, 0))

    def _history(
        self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, base_len: torch.Tensor, single: bool
    ) -> torch.Tensor:
        """``[num_tokens, lookback + 1]``: each token's id, preceded by those of the positions before it."""
        if not self._lookback:
            return ids[:, None]
        back = torch.arange(self._lookback, 0, -1, device=self.device)
        owner, where = slot[:, None], position[:, None] - back
        at, earlier, _ = self._ring[owner, where % self._ring_size].unbind(2)
        earlier = torch.where(at == where, earlier, NO_ID)
        if self._past_of:
            past_ids, _, past = self._recall(owner, where, base_len[:, None])
            earlier = torch.where(past, past_ids, earlier)
        if not single:  # tokens fed in the same pass come first
            source = torch.arange(len(ids), device=self.device)[:, None] - back
            here = source.clamp(min=0)
            same = (source >= 0) & (slot[here] == owner) & (position[here] == where)
            earlier = torch.where(same, ids[here], earlier)
        return torch.cat([earlier, ids[:, None]], dim=1)

    def _remember(self, slot: int, past: torch.Tensor | None) -> None:
        """Keep ids and states ``[2, total]`` of what a slot's request generated before, or nothing."""
        if past is None and slot not in self._past_of:
            return
        self._past_of.pop(slot, None)
        if past is not None:
            self._past_of[slot] = past
        self._past_start.fill_(-1)
        start = 0
        for owner, kept in self._past_of.items():
            self._past_start[owner] = start
            start += kept.shape[1]
        self._past = torch.cat([self._past[:, :0], *self._past_of.values()], dim=1)

    def _recall(
        self, slot: torch.Tensor, position: torch.Tensor, base_len: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Id and state at a position before ``base_len``, and whether they were kept."""
        start = self._past_start[slot]
        kept = (start >= 0) & (position >= 0) & (position < base_len)
        ids, state = self._past[:, torch.where(kept, start + position, 0)]
        return ids, state, kept

    def _store(
        self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, state: torch.Tensor, single: bool
    ) -> None:
        if len(ids) > self._ring_size and not single:
            # One entry per ring cell: a run longer than the ring keeps its end, or duplicate indices would race.
            last = torch.full_like(self._base_len, -1).scatter_reduce_(0, slot, position, "amax")
            slot = torch.where(position > last[slot] - self._ring_size, slot, self.nobody)
        self._ring[slot, position % self._ring_size] = torch.stack([position, ids, state], dim=1)

    def _boundary(self, history: torch.Tensor) -> torch.Tensor:
        assert self._newlines is not None
        blank, ends, starts = self._newlines
        current, previous = history[:, -1], history[:, -2]
        return _at(current, blank) | (_at(previous, ends) & _at(current, starts))


class _Sequences:
    """Looks for alternatives, each a sequence of ids."""

    def __init__(self, markers: tuple[tuple[int, ...], ...]) -> None:
        self.width = max(map(len, markers), default=1)
        self._markers = markers

    def __call__(self, history: torch.Tensor) -> torch.Tensor:
        """bool ``[num_tokens]``: the ids up to and including the token end with a marker."""
        column = history.unbind(1)
        ends = [reduce(and_, (column[i - len(m)] == m[i] for i in range(len(m)))) for m in self._markers]
        return reduce(or_, ends) if ends else torch.zeros_like(column[-1], dtype=torch.bool)


class _Spelled:
    """Looks for a marker in the text that the ids spell.

    Matching runs over bytes, a step takes a whole token: tokens are sorted into kinds by what their text does to a match.
    """

    def __init__(self, marker: SpelledMarker, device: torch.device) -> None:
        # A token brings at least one byte, so that this many reach back to the marker's first.
        self.width = len(marker.text)
        kind = torch.zeros(max((token for token, _ in marker.parts), default=0) + 1, dtype=torch.int64)
        columns = {(0,) * self.width: 0}
        for token, text in marker.parts:
            column = tuple(_match(marker.text, matched, text) for matched in range(self.width))
            kind[token] = columns.setdefault(column, len(columns))
        self._kind = _for_any_id(kind, device)
        steps = torch.tensor(list(columns), dtype=torch.int64, device=device).T.flatten()
        # At len(columns) * (bytes matched before) + kind: the same product after the token; whether the marker ends in it.
        self._next = steps // 2 * len(columns)
        self._complete = steps % 2 == 1

    def __call__(self, history: torch.Tensor) -> torch.Tensor:
        """bool ``[num_tokens]``: the marker ends inside the token."""
        at, *others = _at(history[:, history.shape[1] - self.width :], self._kind).unbind(1)
        for kind in others:
            at = self._next[at] + kind
        return self._complete[at]


def _match(marker: bytes, matched: int, text: bytes) -> int:
    """What a text does to a match of the marker's first ``matched`` bytes: twice the bytes that are matched behind it, plus
    1 if the marker ends inside it."""
    complete = False
    for i in range(len(text)):
        # The longest beginning of the marker that what was read so far ends with.
        tail = marker[:matched] + text[i : i + 1]
        matched = next(length for length in range(len(tail), -1, -1) if tail.endswith(marker[:length]))
        if matched == len(marker):
            complete, matched = True, 0
    return 2 * matched + complete


def _finder(markers: tuple[tuple[int, ...], ...] | SpelledMarker, device: torch.device) -> _Sequences | _Spelled:
    return _Spelled(markers, device) if isinstance(markers, SpelledMarker) else _Sequences(markers)


def _for_any_id(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table ``[..., vocab_size]`` with one more item, 0, for ids outside the vocabulary: see :func:`_at`."""
    return torch.nn.functional.pad(table, (0, 1)).to(device)


def _at(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What a table made by :func:`_for_any_id` holds for the ids. A prompt may hold ids that the logits do not."""
    return table[ids.clamp(-1, len(table) - 1)]  # -1 is the last item too


def _scan(
    opens: torch.Tensor,
    closes: torch.Tensor,
    position: torch.Tensor,
    first: torch.Tensor,
    before: torch.Tensor,
    prompt_len: torch.Tensor,
) -> torch.Tensor:
    """Packed state after each token of several runs of consecutive tokens.

    Args:
        opens, closes: the token completes a marker.
        first: the token starts a run; its predecessor's packed state is in ``before``.
    """
    index = torch.arange(len(position), device=position.device)
    run = _latest(first, index)
    start, inside, ended = (field[run] for field in _unpack(before))
    event = _latest(opens | closes, index)
    # A second opener inside an open span opens nothing: only the first after a closer (or the carry) counts.
    previous = torch.cat([event.new_full((1,), -1), event])[:-1]
    was_open = torch.where(previous >= run, opens[previous], inside)
    opened = _latest(opens & ~was_open, index)
    inside = torch.where(event >= run, opens[event], inside)
    start = torch.where(opened >= run, torch.maximum(position[opened] + 1, prompt_len), start)
    ended = ended | (_latest(closes & (position >= prompt_len), index) >= run)
    return _pack(start, inside, ended)


def _next(opens: torch.Tensor, closes: torch.Tensor, position: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What :func:`_scan` gives for runs of one generated token each, in arithmetic on packed states."""
    fresh = opens & ((before & _INSIDE) == 0)
    state = torch.where(fresh, (position + 2) * 4 + _INSIDE + (before & _ENDED), before)
    return torch.where(closes, torch.where(opens, state, state & ~_INSIDE) | _ENDED, state)


def _latest(flag: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Index of the last True at or before each position; -1 where there is none."""
    return torch.where(flag, index, -1).cummax(0).values


_INSIDE, _ENDED = 2, 1


def _pack(start: torch.Tensor, inside: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """One int64 for: position of the first token of the current or last think span (-1 if none opened), whether the span
    is open, whether an end marker was generated."""
    return (start + 1) * 4 + inside * _INSIDE + ended * _ENDED


def _unpack(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state = state.clamp(min=0)  # -1: nothing known, as good as nothing opened
    return (state >> 2) - 1, (state & _INSIDE) != 0, (state & _ENDED) != 0
