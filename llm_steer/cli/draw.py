"""A curve in a terminal, from characters: braille dots, or plain ASCII where the terminal cannot show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

ABOVE, BELOW, MARK, FRAME = "green", "red", "bold yellow", "dim"

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character's dots, [row][column]."""


def curve(
    t: Sequence[float],
    values: Sequence[float],
    *,
    width: int,
    height: int = 9,
    marks: Sequence[float] = (),
    window: Sequence[Sequence[float]] | None = None,
    unicode: bool = True,
) -> Text:
    """Draw ``values`` over ``t``.

    Args:
        t: increasing.
        width: characters, labels included.
        height: lines of the drawing itself.
        marks: places on the t axis to point at, in a line of their own.
        window: half-open ranges of ``t`` to show in a line of their own; None for no such line.
    """
    from rich.text import Text

    rise = Rise(values, height)
    labels = {0: f"{rise.top:+.4g}", height - 1: f"{rise.bottom:+.4g}", rise.zero: "0"}
    gutter = max(len(label) for label in labels.values())
    columns = max(width - gutter - 2, 8)
    scale = Axis(t, columns)
    cells = _braille(t, values, scale, rise) if unicode else _ascii(t, values, scale, rise)

    text = Text(no_wrap=True)
    bar = "┤" if unicode else "|"
    for line in range(height):
        text.append(f"{labels.get(line, ''):>{gutter}} {bar}", FRAME)
        style = FRAME if line == rise.zero else ABOVE if line < rise.zero else BELOW
        text.append(cells[line], style)
        text.append("\n")
    if marks:
        where = {scale.column(mark) for mark in marks}
        pointer = "▲" if unicode else "^"
        text.append(" " * (gutter + 2))
        text.append("".join(pointer if column in where else " " for column in range(columns)).rstrip() + "\n", MARK)
    if window is not None:
        inside, outside = ("━", "·") if unicode else ("=", ".")
        acts = [any(a <= at < b for a, b in window) for at in map(scale.at, range(columns))]
        text.append(" " * (gutter + 2))
        text.append("".join(inside if act else outside for act in acts) + "\n", MARK)
    first, last = f"t={scale.first:g}", f"t={scale.last:g}"
    text.append(" " * (gutter + 2) + first + f"{last:>{max(columns - len(first), len(last) + 1)}}", FRAME)
    return text


class Axis:
    """Places on the t axis as columns."""

    def __init__(self, t: Sequence[float], columns: int) -> None:
        self.columns = columns
        self.first, self.last = (t[0], t[-1]) if t else (0.0, 0.0)
        self.span = (self.last - self.first) or 1.0

    def column(self, at: float, per: int = 1) -> int:
        """Column of ``at``, each split into ``per`` parts."""
        part = int((at - self.first) / self.span * (self.columns * per - 1) + 0.5)
        return min(max(part, 0), self.columns * per - 1)

    def at(self, column: int) -> float:
        return self.first + self.span * column / max(self.columns - 1, 1)


class Rise:
    """Values as lines: from the largest size above zero to that below, or one of the two where the curve has one sign."""

    def __init__(self, values: Sequence[float], height: int) -> None:
        high, low = max((*values, 0.0)), min((*values, 0.0))
        size = max(high, -low) or 1.0
        self.top, self.bottom = (0.0 if low < 0 and high <= 0 else size), (0.0 if low >= 0 else -size)
        self.height = height
        self.zero = self.row(0.0)

    def row(self, value: float, per: int = 1) -> int:
        """Line of ``value``, each split into ``per`` parts."""
        rows = self.height * per
        part = int((self.top - value) / (self.top - self.bottom) * (rows - 1) + 0.5)
        return min(max(part, 0), rows - 1)


def _levels(
    t: Sequence[float], values: Sequence[float], axis: Axis, rise: Rise, across: int, down: int
) -> list[tuple[int, int]]:
    """For each part of a column the highest and lowest part of a line that the curve touches."""
    runs: list[tuple[float, float] | None] = [None] * (axis.columns * across)
    for at, value in zip(t, values, strict=True):
        part = axis.column(at, across)
        low, high = runs[part] or (value, value)
        runs[part] = (min(low, value), max(high, value))
    levels: list[tuple[int, int]] = []
    known = [i for i, run in enumerate(runs) if run]
    if not known:
        return [(rise.row(0.0, down),) * 2] * len(runs)
    for part in range(len(runs)):
        run = runs[part]
        if run is None:  # fewer values than columns: on the line between the neighbours
            left = max((i for i in known if i < part), default=known[0])
            right = min((i for i in known if i > part), default=known[-1])
            a, b = runs[left] or (0.0, 0.0), runs[right] or (0.0, 0.0)
            share = (part - left) / (right - left) if right > left else 0.0
            middle = (a[0] + a[1]) / 2 * (1 - share) + (b[0] + b[1]) / 2 * share
            run = (middle, middle)
        levels.append((rise.row(run[1], down), rise.row(run[0], down)))
    return levels


def _braille(t: Sequence[float], values: Sequence[float], axis: Axis, rise: Rise) -> list[str]:
    grid = [[0] * axis.columns for _ in range(rise.height)]
    before: tuple[int, int] | None = None
    for part, (high, low) in enumerate(_levels(t, values, axis, rise, 2, 4)):
        if before:  # no gap where the curve is steep
            high, low = min(high, before[1] + 1), max(low, before[0] - 1)
        before = (high, low)
        for row in range(high, low + 1):
            grid[row // 4][part // 2] |= DOTS[row % 4][part % 2]
    return ["".join(chr(0x2800 + bits) for bits in line) for line in grid]


def _ascii(t: Sequence[float], values: Sequence[float], axis: Axis, rise: Rise) -> list[str]:
    grid = [[" "] * axis.columns for _ in range(rise.height)]
    for column, (high, low) in enumerate(_levels(t, values, axis, rise, 1, 1)):
        for row in range(high, low + 1):
            grid[row][column] = "*"
    return ["".join(line) for line in grid]
