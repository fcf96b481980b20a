"""Slow, plain answers that the core's tests compare with: they see a request's whole list of ids at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Ids = Sequence[int]
Ends = Callable[[Ids], bool]
"""Whether a marker ends with the last of the ids."""


@dataclass(frozen=True)
class State:
    """Where a request stands after some tokens."""

    thinking: bool = False
    start: int | None = None
    ended: bool = False


def one_of(markers: Sequence[Ids]) -> Ends:
    """The ids end with one of several id sequences."""
    return lambda ids: any(list(ids[-len(m) :]) == list(m) for m in markers)


def spelled(marker: str, text_of: Callable[[Ids], str]) -> Ends:
    """The last id brings one more occurrence of the marker into the text."""
    return lambda ids: text_of(ids).count(marker) > text_of(ids[:-1]).count(marker)


def states(ids: Ids, prompt_len: int, opens: Ends, closes: Ends) -> list[State]:
    """The state after each of the ids."""
    thinking, start, ended = False, None, False
    found = []
    for i in range(len(ids)):
        if opens(ids[: i + 1]):
            if not thinking:
                start = max(i + 1, prompt_len)
            thinking = True
        elif closes(ids[: i + 1]):
            thinking = False
            ended = ended or i >= prompt_len
        found.append(State(thinking, start, ended))
    return found


def row_of(state: State, position: int, prompt_len: int) -> tuple[int, bool, int, bool]:
    """output_position, thinking, think_position, think_ended of the row whose last fed token is at ``position``."""
    since = -1 if state.start is None else position + 1 - state.start
    return position + 1 - prompt_len, state.thinking, since, state.ended


def token_of(state: State, position: int, prompt_len: int) -> tuple[int, bool, int, bool]:
    """output_position, thinking, think_position, think_ended of the token at ``position``."""
    since = -1 if state.start is None else max(position - state.start, -1)
    return position - prompt_len, state.thinking, since, state.ended


def facts(view: object) -> list[tuple[int, bool, int, bool]]:
    """The same four of a ``Rows`` or ``Tokens``."""
    columns = [getattr(view, name) for name in ("output_position", "thinking", "think_position", "think_ended")]
    return list(zip(*(c.tolist() for c in columns), strict=True))


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


CPU = torch.device("cpu")
