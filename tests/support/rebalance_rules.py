"""ReBalance's rules for one request, in plain Python, from their description: no tensors, no slots, no chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def solve_k(q25c: float, q75c: float, low: float) -> float:
    m, s = (q25c + q75c) / 2, (q75c - q25c) / 2
    target = 1 + 0.02 / abs(low)
    lo, hi = 1e-6, 1.0
    while math.tanh(hi * (1 - m)) / math.tanh(hi * s) > target:
        hi *= 2
    for _ in range(80):
        mid = (lo + hi) / 2
        if math.tanh(mid * (1 - m)) / math.tanh(mid * s) > target:
            lo = mid
        else:
            hi = mid
    return (lo + hi) / 2


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, x))))


def reference_control(c: float, v: float, k: float, q25c, q75c, q25v, q75v, low, floor, ceiling) -> float:
    m, s = (q25c + q75c) / 2, (q75c - q25c) / 2

    def curve(x: float) -> float:
        return low / 2 - low / (2 * math.tanh(k * s)) * math.tanh(k * (x - m))

    ic, iv = q75c - q25c, q75v - q25v
    w_low = min(1.0, sigma(1200 * (q25c - c) / ic) * sigma(1200 * (v - q75v) / iv) / 0.25)
    w_high = sigma(1200 * (c - q75c) / ic) * sigma(1200 * (q25v - v) / iv)
    w_high = min(1.0, w_high / (0.5 * sigma(12 * (1 - q75c) / ic)))
    value = curve(c) + (floor - curve(q25c)) * w_low + (ceiling - curve(1.0)) * w_high
    return max(min(low, floor), min(max(0.01, ceiling), value))


def paper_control(c: float, v: float, k: float, q25c, q75c, q25v, q75v, low, floor, ceiling) -> float:
    if c < q75c:
        height = (floor if c <= q25c and v >= q75v else low) / math.tanh(q75c - q25c)
    else:
        height = (ceiling if v <= q25v else 0.01) / math.tanh(1 - q75c)
    return max(min(low, floor), min(max(0.01, ceiling), height * math.tanh(abs(c - q75c))))


@dataclass
class Sequence:
    """The six rules of the released code, one token at a time."""

    constants: dict[str, float]
    coefficient: float
    thinking: bool = False
    paper: bool = False
    window: int = 2
    everywhere: bool = False
    values: list[float] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    last: float | None = None
    added: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.k = solve_k(self.constants["q25c"], self.constants["q75c"], self.constants["low"])

    def feed(self, delimiter: bool, thinking: bool) -> float:
        """The coefficient of what is added at this token."""
        self.thinking = thinking
        if self.last is not None and not delimiter:
            self.values.append(self.last)
        if delimiter and self.values:
            count = len(self.values)
            c = sum(self.values) / count
            if self.paper:
                c = math.exp(sum(math.log(p) for p in self.values) / count)
            self.history.append(c)
            latest = self.history[-self.window :]
            mean = sum(latest) / len(latest)
            v = sum((x - mean) ** 2 for x in latest) / len(latest)
            self.coefficient = (paper_control if self.paper else reference_control)(c, v, self.k, **self.constants)
            self.values = []
        acts = delimiter and (thinking or self.everywhere)
        self.added.append(self.coefficient if acts else 0.0)
        return self.added[-1]
