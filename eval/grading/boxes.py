r"""The answer's place in a text: the last ``\boxed{}``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llm_steer.tokens import THINK_CLOSE

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])\s*)(?P<open>\{?)|\\.|[{}]", re.DOTALL)
_WITHOUT_BRACES = re.compile(r"[^\s$\\{}]+")


@dataclass(frozen=True)
class _Box:
    start: int
    content: int
    end: int
    closing: int
    """Width of what closes it: nothing where there are no braces."""


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` (or ``\fbox{...}``, or ``\boxed 7``).

    The last one alone counts: if it is empty, or never closed, there is no answer, whatever was boxed before. If it stands
    in another one, that one is the answer, and boxes within do not show.
    """
    last, boxes = _boxes(text)
    if last not in boxes:
        return None
    inner = boxes[last]
    around = min((box for box in boxes.values() if box.start <= inner.start and inner.end <= box.end), key=lambda b: b.start)
    cuts = {around.content: 0}
    for box in boxes.values():
        if around.start < box.start and box.end < around.end:
            cuts |= {box.start: box.content - box.start, box.end: box.closing}
    shown, place = "", around.content
    for cut in sorted(cuts):
        shown += text[place:cut]
        place = cut + cuts[cut]
    shown = (shown + text[place : around.end]).strip()
    return re.sub(r"(?<!\\)\\$", "", shown).strip() or None  # of a space in mathematics


def _boxes(text: str) -> tuple[int, dict[int, _Box]]:
    """Where the last box starts (-1: nowhere), and all that are whole, by their starts."""
    last, boxes = -1, {}
    opened: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token["box"]:
            last = token.start()
            if token["open"]:
                opened.append((token.start(), token.end()))
            elif bare := _WITHOUT_BRACES.match(text, token.end()):
                boxes[last] = _Box(last, token.end(), token.end() + len(bare[0].rstrip(".,")), 0)
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            boxes[box[0]] = _Box(*box, token.start(), 1)
    return last, boxes


def after_thinking(text: str, *, required: bool) -> str:
    """What follows the last ``</think>``.

    Args:
        required: a text without one is still thinking and answers nothing; otherwise all of it counts.
    """
    _, closed, rest = text.rpartition(THINK_CLOSE)
    return rest if closed or not required else ""
