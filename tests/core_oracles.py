"""Slow, plain answers that the core's tests compare with: they see a request's whole list of ids at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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


# -- the waves, one number at a time -------------------------------------------------------------------------------------


def code_form(t: float, amplitude: float, period: float, phase: float) -> float:
    """The released code's three pieces."""
    u = ((t + phase * period) % period) / period
    if u <= 0.25:
        return 4 * amplitude * u
    if u <= 0.75:
        return amplitude - 4 * amplitude * (u - 0.25)
    return -amplitude + 4 * amplitude * (u - 0.75)


def paper_form(t: float, amplitude: float, period: float, phase: float) -> float:
    return amplitude * abs(4 * ((t + phase * period - period / 4) % period) / period - 2) - amplitude


def linear_decay_form(t: float, amplitude: float, period: float, phase: float) -> float:
    progress = t / period + phase
    if progress <= 0:
        return amplitude
    return amplitude - 2 * amplitude * progress if progress < 1 else -amplitude


def cosine_form(t: float, amplitude: float, period: float, phase: float) -> float:
    return amplitude * math.cos(2 * math.pi * (t / period + phase))


def silver_form(t: float, amplitude: float, period: float, phase: float) -> float:
    """A rho^(v - 1), rho = 2, v two less than the bit length of the lowest set bit of k + 1, k = t mod 64."""
    k = int(t) % 64 + 1
    v = (k & -k).bit_length() - 2
    return amplitude * 2.0 ** (v - 1)


def constant_form(t: float, amplitude: float, period: float, phase: float) -> float:
    return amplitude


FORMS = {
    "triangular": code_form,
    "constant": constant_form,
    "linear_decay": linear_decay_form,
    "cosine": cosine_form,
    "silver": silver_form,
}


def piecewise_form(t: float, points: list[tuple[float, float]]) -> float:
    if t <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if t <= x1:
            return y0 + (y1 - y0) * (t - x0) / (x1 - x0)
    return points[-1][1]


def shuffled_form(t: int, amplitude: float, period: float, phase: float, seed: int) -> float:
    """The triangular wave at a token of the same period that is drawn without replacement."""
    order = random.Random(seed).sample(range(int(period)), int(period))
    return code_form(order[t % int(period)], amplitude, period, phase)


# -- reflection_cycle ----------------------------------------------------------------------------------------------------


def offset(params: Any, ids: Ids, prompt_len: int, opens: Ends, closes: Ends) -> float | None:
    """What reflection_cycle adds to the reflection tokens of the token that follows the ids; None where it doesn't act."""
    state = states(ids, prompt_len, opens, closes)[-1] if ids else State()
    generated = len(ids) - prompt_len
    in_span = None if state.start is None else len(ids) - state.start
    t = generated if params.origin == "output" else in_span
    if params.after_end == "restart" and state.ended:
        if not state.thinking:
            return None
        t = in_span
    else:
        if t is None:
            return None
        if params.after_end != "continue" and (state.ended or (params.origin == "think" and not state.thinking)):
            return None
        t += params.start_position
    assert t is not None
    if params.window is not None and not any(start <= t < end for start, end in params.window):
        return None
    if params.schedule == "piecewise":
        return piecewise_form(t, [tuple(point) for point in params.points])
    if params.schedule == "shuffled":
        return shuffled_form(t, params.amplitude, params.period, params.phase, params.shuffle_seed or 0)
    return FORMS[params.schedule](t, params.amplitude, params.period, params.phase)
