"""Where in a text an answer may stand: short passages, from the surest place to the least sure one.

Every step goes through a text once. What is then read is a passage of at most :data:`LONGEST` characters, so that reading
takes a time that grows with the length of the text and no faster, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llm_steer.plugins.mixture_of_thought.prose import without_program

LONGEST = 400
"""Characters of a passage."""
TAIL = 32_768
"""Characters at the end of a text in which an answer without tags is looked for."""

_TAG = "<answer>"
_TAG_ENDS = re.compile(r"<end_of_answer>|</answer>|<(?:premises|question|conclusion|options)>")
_STATED = re.compile(
    r"\b(?:answer|verdict|conclusion)\b[ \t*_]{0,4}(?:(?:is|was)\b|[:=]|[-\u2013\u2014](?=[ \t]))[ \t*_:]{0,8}", re.I
)
_BRACE = re.compile(r"(\\boxed\s{0,8})?([{}])")
_NO_ANSWER = ("<", "|", "```")
"""Beginnings of lines that hold tags, rows, fences."""

Place = Literal["tagged", "boxed", "stated", "last_line"]


@dataclass(frozen=True)
class Passage:
    """A short piece of a text."""

    place: Place
    text: str
    boxed: bool = False
    """It is the content of a box."""
    cut: bool = False
    """It reaches to the end of the text."""


def passages(text: str, *, source: bool = False, truncated: bool = False) -> Iterator[Passage]:
    """Where to look, one after the other.

    Args:
        source: the text may be a program from its first line on.
        truncated: the text was cut at the limit of tokens: its last line is no answer.
    """
    text = without_program(text, source=source, truncated=truncated)
    if (found := _tagged(text)) is not None:
        yield found
        return
    text = text[-TAIL:]
    if (box := last_box(text)) is not None:
        yield Passage("boxed", box[:LONGEST], boxed=True)
        return
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if (found := _stated(lines)) is not None:
        yield found
    said = [line for line in lines if not line.startswith(_NO_ANSWER)]
    if said and not truncated:
        yield Passage("last_line", said[-1][-LONGEST:])


def last_box(text: str) -> str | None:
    """Content of the ``\\boxed{...}`` that opens last, of those that hold something and whose braces are balanced."""
    open_: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match[2] == "{":
            open_.append(match.end() if match[1] else None)
        elif open_ and (start := open_.pop()) is not None and not text[start : start + 8].lstrip().startswith("}"):
            last = max(last or (start, 0), (start, match.start()))
    return text[slice(*last)].strip() if last else None


def _tagged(text: str) -> Passage | None:
    """The first answer between tags: what follows it is a new, invented problem. Else what follows an open tag."""
    opened = ""
    for body in text.split(_TAG)[1:]:
        end = _TAG_ENDS.search(body)
        closed = body[: end.start()].strip() if end else ""
        if closed:
            return _body(closed[-LONGEST:] if len(closed) > LONGEST else closed, last_box(closed[-TAIL:]))
        opened = "" if end else body
    if opened.strip():  # the stop string, or the end of the text
        return _body(opened.strip()[:LONGEST], last_box(opened[:TAIL]), cut=len(opened.strip()) <= LONGEST)
    return Passage("tagged", "") if _TAG in text and _TAG_ENDS.search(text) else None


def _body(text: str, box: str | None, cut: bool = False) -> Passage:
    return Passage("tagged", text, cut=cut) if box is None else Passage("tagged", box[:LONGEST], boxed=True)


def _stated(lines: list[str]) -> Passage | None:
    """What stands behind the last "the answer is", in its line or else in the next one."""
    for number in range(len(lines) - 1, -1, -1):
        if match := _STATED.search(lines[number]):
            rest = lines[number][match.end() :].strip("*_ \t")
            if not rest and number + 1 < len(lines):
                number += 1
                rest = lines[number]
            if rest:
                return Passage("stated", rest[:LONGEST], cut=number == len(lines) - 1)
    return None
