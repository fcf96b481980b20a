"""A model's think markers and step delimiters at token level, and the automaton that finds them.

Markers have one token or several, or none of their own and are then found in the text, however it is cut into tokens. The
automaton reads a token at a time: one look into a table tells where a request stands behind it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

NO_ID = -1
"""No token has this id. A prompt may hold it where embeddings were given."""


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

    @cached_property
    def automaton(self) -> Automaton:
        """What finds them in a request's ids. On the CPU."""
        return Automaton.build(self)

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

ENDED, INSIDE = 1, 2
"""Bits of a standing: an end marker was generated; the think span is open. Above them stands what is matched so far."""


@dataclass(frozen=True)
class Automaton:
    """Where a request stands with its markers: *standings*, small integers, and what a token makes of each.

    Tokens are sorted into *kinds* by what they do. Behind ``reach`` tokens, what was matched does not depend on what came
    before them.
    """

    kind: torch.Tensor
    """int64 ``[vocab_size + 2]``: the kind of token ``id`` at ``id + 1``; ids that are none stand at both ends."""
    kinds: int
    table: torch.Tensor
    """int64, at ``standing * kinds + kind``: the standing behind the token, and the flags below."""
    bits: int
    """Width of a standing."""
    reach: int

    @property
    def standing(self) -> int:
        """Mask: the standing in a code or packed state."""
        return (1 << self.bits) - 1

    @property
    def matched(self) -> int:
        """Mask: what of a standing is known anywhere in a prompt too."""
        return self.standing & ~(ENDED | INSIDE)

    @property
    def opens(self) -> int:
        """Flag of a code: the token opened a span that was not open."""
        return 1 << self.bits

    @property
    def boundary(self) -> int:
        """Flag of a code: the token ends a step."""
        return 2 << self.bits

    def to(self, device: torch.device) -> Automaton:
        return Automaton(self.kind.to(device), self.kinds, self.table.to(device), self.bits, self.reach)

    def kinds_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Of any ids, int64 ``[n]``: a prompt may hold some that the logits do not."""
        return self.kind.index_select(0, (ids + 1).clamp_(0, len(self.kind) - 1))

    def read(self, standing: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """Codes: the standing behind each token, with flags. int64 ``[n]``."""
        return self.table.index_select(0, torch.add(kind, standing, alpha=self.kinds))

    @classmethod
    def build(cls, markers: Markers) -> Automaton:
        openers, closers = _reader(markers.openers), _reader(markers.closers)
        flags = [f for f in (getattr(markers, name) for name in _NEWLINES) if f is not None]
        named = sorted({*openers.tokens, *closers.tokens})
        newlines = torch.zeros(max([-1, *named, *(len(f) - 1 for f in flags)]) + 3, dtype=torch.int64)
        for bit, flag in enumerate(flags):
            newlines[1 : len(flag) + 1] += flag.to(torch.int64) << bit

        # Kinds: what a token is to each marker, and its newlines. The first is that of ids which are no tokens.
        numbers: dict[tuple[Hashable, Hashable, int], int] = {}
        kind = newlines.clone()
        for pattern in range(1 << len(flags)):
            kind[newlines == pattern] = numbers.setdefault((None, None, pattern), len(numbers))
        for token in named:
            of = (openers.role(token), closers.role(token), int(newlines[token + 1]))
            kind[token + 1] = numbers.setdefault(of, len(numbers))

        # What can be matched: every state of the three readers that some tokens lead to.
        matched: dict[tuple[Any, Any, bool], int] = {(openers.start, closers.start, False): 0}
        transitions: list[list[tuple[int, bool, bool, bool]]] = []
        for state in _growing(matched):
            row = []
            for opener, closer, newline in numbers:
                opening, opens = openers.step(state[0], opener)
                closing, closes = closers.step(state[1], closer)
                blank, ends, starts = (bool(newline >> bit & 1) for bit in range(3))
                after = matched.setdefault((opening, closing, ends), len(matched))
                row.append((after, opens, closes, blank or (state[2] and starts)))
            transitions.append(row)

        bits = 2 + (len(matched) - 1).bit_length()
        # Room for every number of that width, so that whatever stands in a slot that is nobody's can be looked up.
        table = torch.zeros(1 << bits, len(numbers), dtype=torch.int64)
        table[: 4 * len(transitions)] = torch.tensor(
            [
                [_code(bits, standing & 3, *transition) for transition in transitions[standing >> 2]]
                for standing in range(4 * len(transitions))
            ]
        )
        reach = max(openers.reach, closers.reach, 1 if flags else 0)
        return cls(kind, len(numbers), table.flatten(), bits, reach)


def _code(bits: int, before: int, after: int, opens: bool, closes: bool, boundary: bool) -> int:
    inside = opens or (bool(before & INSIDE) and not closes)
    fresh = opens and not before & INSIDE
    ended = closes or bool(before & ENDED)
    return after << 2 | inside * INSIDE | ended * ENDED | (fresh | boundary << 1) << bits


def _growing(items: Mapping[Any, int]) -> Iterable[Any]:
    """The keys in order, those included that are added on the way."""
    done = 0
    while done < len(items):
        fresh = list(items)[done:]
        yield from fresh
        done += len(fresh)


class _Reader(Protocol):
    """Looks for one marker, a token at a time."""

    tokens: frozenset[int]
    """Those that can take part."""
    start: Any
    reach: int

    def role(self, token: int) -> Hashable:
        """What :meth:`step` needs to know of a token; None: it takes no part."""

    def step(self, state: Any, role: Any) -> tuple[Any, bool]:
        """The state behind a token, and whether a marker ends with it."""


class _Sequences:
    """Alternatives, each a sequence of ids. The state: the longest beginning of one that the ids end with."""

    start = ()

    def __init__(self, markers: tuple[tuple[int, ...], ...]) -> None:
        self._markers = markers
        self.tokens = frozenset(token for marker in markers for token in marker)
        self.reach = max(map(len, markers), default=1) - 1

    def role(self, token: int) -> int | None:
        return token if token in self.tokens else None

    def step(self, state: tuple[int, ...], role: int | None) -> tuple[tuple[int, ...], bool]:
        if role is None:
            return (), False
        seen = (*state, role)
        found = any(seen[-len(marker) :] == marker for marker in self._markers)
        while seen and not any(len(marker) > len(seen) and marker[: len(seen)] == seen for marker in self._markers):
            seen = seen[1:]
        return seen, found


class _Spelled:
    """A marker in the text that the ids spell. The state: how many of its bytes the text ends with."""

    start = 0

    def __init__(self, marker: SpelledMarker) -> None:
        self._roles = {
            token: tuple(_match(marker.text, n, text) for n in range(len(marker.text))) for token, text in marker.parts
        }
        self.tokens = frozenset(self._roles)
        self.reach = len(marker.text) - 1  # a token brings at least one byte

    def role(self, token: int) -> tuple[tuple[int, bool], ...] | None:
        role = self._roles.get(token)
        return role if role is not None and any(matched or found for matched, found in role) else None

    def step(self, state: int, role: tuple[tuple[int, bool], ...] | None) -> tuple[int, bool]:
        return (0, False) if role is None else role[state]


def _match(marker: bytes, matched: int, text: bytes) -> tuple[int, bool]:
    """What a text does to a match of the marker's first ``matched`` bytes: the bytes that are matched behind it, and whether
    the marker ends inside it."""
    found = False
    for i in range(len(text)):
        tail = marker[:matched] + text[i : i + 1]
        found = found or tail == marker
        # The longest beginning of the marker, short of all of it, that what was read so far ends with.
        shorter = range(min(len(tail), len(marker) - 1), -1, -1)
        matched = next(length for length in shorter if tail.endswith(marker[:length]))
    return matched, found


def _reader(markers: tuple[tuple[int, ...], ...] | SpelledMarker) -> _Reader:
    return _Spelled(markers) if isinstance(markers, SpelledMarker) else _Sequences(markers)
