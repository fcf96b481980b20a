"""Small dictionaries, programs and token streams, and a slow oracle of detection."""

from __future__ import annotations

import math
import random

import torch
from llm_steer.plugins.activation_reasoning.concepts import LEVELS, Dictionary, direction_concept, feature_concept
from llm_steer.plugins.activation_reasoning.program import Detected, Program
from llm_steer.plugins.activation_reasoning.sae import Features

from llm_steer.plugin import Tokens

HIDDEN = 6
NAMES = ["p", "q", "r", "w", "v"]
"""Three of the dictionary, two of words."""
END, SPECIAL = 7, 8
WORDS = {"w": [[3], [4, 5]], "v": [[5, 5, 6]]}
CPU = torch.device("cpu")


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def dictionary() -> Dictionary:
    """p reads the first number, q the second where it is above 1, r is the sum of the third and twice the fourth."""
    eye = torch.eye(HIDDEN)
    one = torch.ones(1)
    thresholds = {"token": 0.5, "sentence": 0.7, "max": 0.9, "mean": 0.1}
    q = Features(eye[1:2], one, torch.zeros(1), one)
    r = Features(eye[2:4], torch.ones(2), torch.zeros(2), torch.zeros(2))
    return Dictionary(
        (
            direction_concept("p", eye[0], 0.0, thresholds),
            feature_concept("q", q, eye[1:2], [1.0], thresholds, indices=[3]),
            feature_concept("r", r, eye[2:4], [1.0, 2.0], thresholds, indices=[4, 5]),
        ),
        layer=1,
    )


def score(name: str, h: list[float]) -> float:
    return {"p": h[0], "q": h[1] if h[1] > 1 else 0.0, "r": max(h[2], 0) + 2 * max(h[3], 0)}[name]


def random_detected(rng: random.Random, index: int) -> Detected:
    """Thresholds as :func:`dictionary` has them for the level, so that mistakes in choosing one show."""
    common = {"atom": f"a{index}", "positive": True, "scope": rng.choice(["prompt", "output", "both"])}
    if rng.random() < 0.5:
        steps = [rng.randrange(5) for _ in range(rng.randint(1, 3))]
        without = [c for c in range(5) if c not in steps and rng.random() < 0.4]
        return Detected(
            **common, concepts=steps, without=without, pattern=True, within=rng.choice(["sentence", "scope"]), level="token",
            aggregate="max", hold=rng.choice([None, 0, 2]), threshold=0.5,
        )  # fmt: skip
    level = rng.choice(["token", "sentence", "global"])
    aggregate = "max" if level == "token" else rng.choice(["max", "mean", "any"])
    concept = rng.randrange(5)
    return Detected(
        **common, concepts=[concept], without=[], pattern=False, within="sentence", level=level, aggregate=aggregate,
        hold=rng.choice([None, 0, 3]), threshold=rng.choice([0.1, 0.5, 0.9]),
        width=0.0 if NAMES[concept] in WORDS else rng.choice([0.25, 1.0]),
    )  # fmt: skip


def program(detected: list[Detected], **changes) -> Program:
    fields = {
        "semantics": "closed", "rules": [], "subjects": [], "facts": [], "dictionary": "sha256:0", "concepts": NAMES,
        "words": WORDS, "propositions": detected, "actions": [], "ignores_contradiction": False, "reference": False,
        "layer": 1, "sentence_ends": [END], "special": [SPECIAL],
    }  # fmt: skip
    return Program(**{**fields, **changes})


def tokens(slots, ids, positions, prompt_lens) -> Tokens:
    count = len(ids)
    flags = torch.zeros(count, dtype=torch.bool)
    position = long(*positions)
    return Tokens(
        long(*ids), long(*slots), position, position - long(*prompt_lens), flags, torch.full((count,), -1), flags, flags
    )


def oracle(detected: Detected, ids: list[int], hidden: list[list[float]], prompt_len: int) -> list[bool]:
    """Whether a proposition holds at each token of one request, straight from its definition."""
    return [holds for holds, _ in story(detected, ids, hidden, prompt_len)]


def story(detected: Detected, ids: list[int], hidden: list[list[float]], prompt_len: int) -> list[tuple[bool, float]]:
    """Whether a proposition holds at each token, and how true it is."""

    def spelled(name, t):
        return any(t + 1 >= len(w) and ids[t + 1 - len(w) : t + 1] == w for w in WORDS[name]) and ids[t] != SPECIAL

    def value(c, t):
        """The score, or None where nothing is detected."""
        name = NAMES[c]
        if name in WORDS:
            return float(spelled(name, t)) if ids[t] != SPECIAL else None
        if t == 0 or ids[t] == SPECIAL or any(x != x for x in hidden[t]):
            return None
        return score(name, hidden[t])

    def event(c, t):
        return (value(c, t) or 0.0) > 0.5

    def inside(t):
        return detected.scope == "both" or (detected.scope == "prompt") == (t < prompt_len)

    def sentence(t):
        return next((s + 1 for s in range(t - 1, -1, -1) if ids[s] == END), 0)

    def matched(t):
        """Some p1 < p2 < ... = t in one sentence with nothing that breaks it off between."""
        low = sentence(t) if detected.within == "sentence" else 0

        def ends(step, at):
            """Beginnings of chains of ``step + 1`` concepts that end at ``at``."""
            if not (inside(at) and event(detected.concepts[step], at)):
                return set()
            if step == 0:
                return {at}
            return set().union(*(ends(step - 1, earlier) for earlier in range(at)))

        for begin in ends(len(detected.concepts) - 1, t):
            broken = any(inside(s) and event(c, s) for c in detected.without for s in range(begin, t))
            if begin >= low and not broken:
                return True
        return False

    def compared(t):
        """What is compared with the threshold, or None."""
        (c,) = detected.concepts
        if detected.level == "token" or detected.aggregate == "any":
            return value(c, t) if inside(t) else None
        begin = sentence(t) if detected.level == "sentence" else 0
        seen = [value(c, s) for s in range(begin, t + 1) if inside(s) and value(c, s) is not None]
        if not seen:
            return None
        return max(seen) if detected.aggregate == "max" else sum(seen) / len(seen)

    def now(t):
        """The condition at this token, and how true it is."""
        if detected.pattern:
            return matched(t), float(matched(t))
        x = compared(t)
        if x is None:
            return False, 0.0
        if not detected.width:
            return x > detected.threshold, float(x > detected.threshold)
        return x > detected.threshold, 1 / (1 + math.exp((detected.threshold - x) / detected.width))

    found, last = [], None
    for t in range(len(ids)):
        last = t if now(t)[0] else last
        holds = last is not None and (detected.hold is None or t - last <= detected.hold)
        found.append((holds, max(now(t)[1], now(last)[1]) if holds else now(t)[1]))
    return found


THRESHOLDS = dict.fromkeys(LEVELS, 0.5)
