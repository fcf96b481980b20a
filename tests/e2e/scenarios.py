"""Requests that a tiny model can be asked for: prompts, sampling parameters and steering, drawn at random from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e import tiny

OPEN, CLOSE = tiny.SPECIAL.index("<think>"), tiny.SPECIAL.index("</think>")
TALK = range(len(tiny.SPECIAL), tiny.VOCABULARY)
"""Ids of words without a meaning of their own."""

TURNS = {OPEN: 4.0, CLOSE: 4.0}
"""``logit_bias`` with which think spans open and end now and then by themselves."""


@dataclass(frozen=True)
class Asked:
    """One request, in terms that the engine, the Hugging Face host and the oracle all understand."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's ``SamplingParams``."""
    steer: dict[str, Any] | None = None
    """Parameters of reflection_cycle; None for a request that does not steer."""

    def to_engine(self, *, steered: bool = True) -> dict[str, Any]:
        params = dict(self.params)
        if self.steer is not None and steered:
            params["extra_args"] = {"steer": {"name": "reflection_cycle", **self.steer}}
        return {"prompt_token_ids": self.prompt, "params": params}


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(TALK) for _ in range(count)]


def prompt(rng: random.Random, longest: int = 24) -> list[int]:
    """Plain, or with a think span that is open, closed, or opened again."""
    ids = words(rng, rng.randint(1, longest))
    for marker in rng.choice(((), (OPEN,), (OPEN, CLOSE), (OPEN, CLOSE, OPEN), (CLOSE,), (OPEN, OPEN))):
        ids.append(marker)
        ids += words(rng, rng.choice((0, 0, 1, 3)))
    return ids


def sampling(rng: random.Random, tokens: int) -> dict[str, Any]:
    """Greedy or seeded."""
    params: dict[str, Any] = {"max_tokens": rng.randint(tokens // 2, tokens)}
    if rng.random() < 0.4:
        params["temperature"] = 0.0
    else:
        params |= {"temperature": rng.choice((0.6, 1.0, 1.5)), "seed": rng.randrange(2**31)}
        if rng.random() < 0.3:
            params |= rng.choice(({"top_k": 40}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.8}))
    if rng.random() < 0.8:
        params["logit_bias"] = dict(TURNS)
    if rng.random() < 0.2:
        params["min_tokens"] = 5
    return params


def steering(rng: random.Random) -> dict[str, Any]:
    """Any of the forms of a wave, anywhere in the output."""
    schedule = rng.choice(("triangular", "triangular", "cosine", "linear_decay", "constant", "silver", "piecewise"))
    steer: dict[str, Any] = {"schedule": schedule}
    if schedule == "piecewise":
        times = sorted(rng.sample(range(40), 4))
        steer["points"] = [[t, rng.uniform(-40, 40)] for t in times]
    else:
        steer["amplitude"] = rng.choice((-60.0, -5.0, 5.0, 12.0, 30.0, 100.0))
    if schedule in ("triangular", "cosine", "linear_decay"):
        steer["period"] = rng.choice((2.5, 7.0, 12.0, 33.3))
        steer["phase"] = rng.choice((0.0, -0.25, 0.4))
    if rng.random() < 0.3:
        steer["window"] = rng.choice(([[0, 6]], [[2, 5], [9, 100]]))
    if rng.random() < 0.3:
        steer["start_position"] = rng.randint(0, 30)
    if rng.random() < 0.8:
        steer["origin"] = rng.choice(("think", "output", "auto"))
    if rng.random() < 0.8:
        steer["after_end"] = rng.choice(("off", "restart", "continue"))
    which = rng.random()
    if which < 0.3:
        steer["token_ids"] = rng.sample(TALK, rng.choice((1, 3, 40)))
    elif which < 0.5:
        steer["words"] = rng.sample(tiny.WORDS, 3)
    elif which < 0.6:  # what it steers is what ends and opens spans
        steer["token_ids"] = [OPEN, CLOSE, *rng.sample(TALK, 5)]
    return steer


def asked(rng: random.Random, *, tokens: int = 20, steered: bool | None = None, longest: int = 24) -> Asked:
    steers = rng.random() < 0.6 if steered is None else steered
    return Asked(prompt(rng, longest), sampling(rng, tokens), steering(rng) if steers else None)


def describe(request: Asked, expected: Any, got: Mapping[str, Any] | list[int]) -> str:
    """For the message of an assertion."""
    tokens = got["token_ids"] if isinstance(got, Mapping) else got
    return f"{request}\nexpected {expected.token_ids} (closest decision {expected.gap:.2e})\ngot      {tokens}"
