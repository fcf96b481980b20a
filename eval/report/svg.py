"""Plots as inline SVG that follows the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from llm_steer.eval.statistics import Estimate
from llm_steer.eval.summary import TaskSummary

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 20, 44
LABEL = 40
"""Characters of a method's label that fit into a plot."""
LETTER, LINE = 7.0, 14.0
"""Width and height of a letter, at most: labels are kept apart by them."""


class Axes:
    """From values to places."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        height: int = HEIGHT,
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> None:
        self.width, self.height = WIDTH, height
        self.x, self.y = _widened(xs), _widened(ys, within)

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            round(LEFT + across * (self.width - LEFT - RIGHT), 1),
            round(self.height - BOTTOM - up * (self.height - TOP - BOTTOM), 1),
        )

    def frame(self, x_name: str, y_name: str) -> str:
        """Grid, ticks and names."""
        parts = []
        for tick in _ticks(*self.x):
            x, y = self.at(tick, self.y[0])
            parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{y + 16}" text-anchor="middle">{tick:g}</text>')
        for tick in _ticks(*self.y):
            x, y = self.at(self.x[0], tick)
            parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{self.width - RIGHT}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        centre, middle = self.width / 2, self.height / 2
        parts.append(f'<text class="name" x="{centre}" y="{self.height - 8}" text-anchor="middle">{escape(x_name)}</text>')
        turned = f'transform="rotate(-90 14 {middle})"'
        parts.append(f'<text class="name" x="14" y="{middle}" text-anchor="middle" {turned}>{escape(y_name)}</text>')
        return "".join(parts)

    def wrap(self, content: str, title: str) -> str:
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {box} role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>{content}</svg>'


def pareto(task: TaskSummary) -> str:
    """Accuracy over tokens, each method with its two intervals; a line joins those that no other beats in both."""
    points = [(s.method, s.tokens, s.accuracy) for s in task.scores if not math.isnan(s.accuracy.value)]
    if not points:
        return ""
    axes = Axes(
        [v for _, tokens, _ in points for v in _ends(tokens)],
        [100 * v for *_, accuracy in points for v in _ends(accuracy)],
        within=(0.0, 100.0),
    )
    parts = [axes.frame("tokens of an answer", "accuracy, %")]
    reached = {(tokens.value, accuracy.value) for _, tokens, accuracy in points}
    front = [(t, a) for t, a in reached if not any(u <= t and b >= a and (u, b) != (t, a) for u, b in reached)]
    path = " ".join("{},{}".format(*axes.at(t, 100 * a)) for t, a in sorted(front))
    parts.append(f'<polyline class="front" points="{path}"/>')
    for i, (_, tokens, accuracy) in enumerate(points):
        x, y = axes.at(tokens.value, 100 * accuracy.value)
        colour = f'class="m{i % 8}"'
        if not math.isnan(tokens.low):
            (x1, _), (x2, _) = axes.at(tokens.low, 0), axes.at(tokens.high, 0)
            parts.append(f'<line {colour} x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"/>')
        if not math.isnan(accuracy.low):
            (_, y1), (_, y2) = axes.at(axes.x[0], 100 * accuracy.low), axes.at(axes.x[0], 100 * accuracy.high)
            parts.append(f'<line {colour} x1="{x}" y1="{y1}" x2="{x}" y2="{y2}"/>')
        parts.append(f'<circle {colour} cx="{x}" cy="{y}" r="5"/>')
    shown = [method if len(method) <= LABEL else method[: LABEL - 1] + "…" for method, *_ in points]
    centres = [axes.at(tokens.value, 100 * accuracy.value) for _, tokens, accuracy in points]
    for i, (label, (x, y)) in enumerate(zip(shown, place_labels(centres, list(map(len, shown))), strict=True)):
        across, up = centres[i]
        if abs(y + LINE / 2 - up) > 2 * LINE:  # too far to see whose it is
            end = x if x > across else x + LETTER * len(label)
            parts.append(f'<line class="m{i % 8} leader" x1="{across}" y1="{up}" x2="{end}" y2="{y + LINE / 2}"/>')
        parts.append(f'<text class="label" x="{x}" y="{y + LINE - 3}">{escape(label)}</text>')
    return axes.wrap("".join(parts), f"Accuracy over tokens: {task.about['title']}")


def place_labels(points: Sequence[tuple[float, float]], letters: Sequence[int]) -> list[tuple[float, float]]:
    """Top left corners of the points' labels: above or below their points, as near as no label covers another, nor a point.

    Args:
        letters: of each label.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    placed = []
    for (x, y), count in zip(points, letters, strict=True):
        width = LETTER * count
        lefts = [at for at in (x + 8, x - 8 - width) if at >= 0 and at + width <= WIDTH] or [max(WIDTH - width, 0.0)]
        away = [4 + LINE * step / 2 for step in range(2 * int(HEIGHT / LINE))]
        tops = [top for d in away for top in (y - d - LINE, y + d) if 0 <= top <= HEIGHT - BOTTOM - LINE]
        boxes = [(left, top, left + width, top + LINE) for top in tops for left in lefts]
        box = next((box for box in boxes if not any(_overlap(box, other) for other in taken)), boxes[0])
        taken.append(box)
        placed.append((round(box[0], 1), round(box[1], 1)))
    return placed


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def curve(t: Sequence[float], delta: Sequence[float], name: str) -> str:
    """The offset that a method adds at each token."""
    step = max(len(t) // 600, 1)
    axes = Axes(list(t), [*delta, 0.0], height=200)
    points = " ".join("{},{}".format(*axes.at(x, y)) for x, y in zip(t[::step], delta[::step], strict=True))
    zero = axes.at(axes.x[0], 0.0)[1]
    line = f'<line class="zero" x1="{LEFT}" y1="{zero}" x2="{axes.width - RIGHT}" y2="{zero}"/>'
    return axes.wrap(
        axes.frame("generated tokens", "logit offset") + line + f'<polyline class="wave" points="{points}"/>', name
    )


def _ends(estimate: Estimate) -> list[float]:
    return [v for v in (estimate.value, estimate.low, estimate.high) if not math.isnan(v)]


def _widened(values: Sequence[float], within: tuple[float, float] = (-math.inf, math.inf)) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or max(abs(high) * 0.1, 1.0)
    return max(low - room, within[0]), min(high + room, within[1])


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
