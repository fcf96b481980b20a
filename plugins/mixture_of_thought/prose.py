"""A text without the programs in it: what a program's source says is no answer."""

from __future__ import annotations

import re

_OPENS, _ENDS = "<code>", ("<end_of_code>", "</code>")
_TAGS = re.compile(r"<code>|<end_of_code>|</code>|<answer>")
_FENCE = re.compile(r"[ \t]{0,8}```[ \t]{0,8}(\w{0,16})")
_LANGUAGES = ("python", "py", "python3", "pycon")
_SOURCE = re.compile(
    r"(?:\t|  )[^=(\[{:,)\]}]*[=(\[{:,)\]}]"  # indented
    r"|(?:def|class|if|elif|else|for|while|try|except|finally|with)\b.*:\s*(?:#.*)?$"
    r"|(?:import|from|assert|raise|return|global|print|pass|break|continue)\b(?![,.])"
    r"|@\w"
    r"|[A-Za-z_][\w.]*(?:\[[^\]]*\])?\s{0,4}(?::[^=]{1,60})?[-+*/|&^]?=(?!=)"
    r"|[A-Za-z_][\w.]*\(.*\)\s*(?:#.*)?$"
    r"|\#"
    r"|.*[\[({,]$"
    r"|[\])}]+[,;]?$"
)
"""A line of Python."""
_LONGEST_LINE = 1000
"""Characters of a line that are looked at."""


def without_program(text: str, *, source: bool, truncated: bool) -> str:
    """The lines of a text that are not between a program's tags or fences.

    Args:
        source: the prompt opened a program, so that the text may begin inside of it, and without tags and fences too.
        truncated: the text was cut, maybe inside of the program.
    """
    lines = _TAGS.sub(lambda m: f"\n{m[0]}" if m[0] == "<answer>" else f"\n{m[0]}\n", text).split("\n")
    if source:
        lines = _without_beginning(lines, truncated)
    kept: list[str] = []
    block: list[str] | None = None
    fenced = False
    for line in lines:
        fence = _FENCE.match(line)
        if block is None:
            if line == _OPENS or fence:
                block, fenced = [line], fence is not None
            elif line not in _ENDS:
                kept.append(line)
        elif line.startswith("<answer>") or line in _ENDS or (fenced and fence):
            kept += [] if _is_program(block) else block
            block = None
            if line.startswith("<answer>"):
                kept.append(line)
        else:
            block.append(line)
    if block is not None and not _is_program(block):
        kept += block
    return "\n".join(kept)


def _without_beginning(lines: list[str], truncated: bool) -> list[str]:
    """Of a text whose prompt opened a program: without the lines from the first to the last one of source."""
    marks = (
        i
        for i, line in enumerate(lines)
        if line in _ENDS or line == _OPENS or line.startswith("<answer>") or _FENCE.match(line)
    )
    end = next(marks, None)
    if end is not None and lines[end] in _ENDS:
        return lines[end:]
    head = lines[:end]
    found = [i for i, line in enumerate(head) if _SOURCE.match(line[:_LONGEST_LINE])]
    if not found or (end is not None and not lines[end].startswith("<answer>")):
        return lines
    last = len(head) if truncated and end is None else found[-1] + 1
    return head[: found[0]] + lines[last:]


def _is_program(block: list[str]) -> bool:
    """Of what a tag or a fence opened."""
    fence = _FENCE.match(block[0])
    if fence is None or fence[1].lower() in _LANGUAGES:
        return True
    return not fence[1] and any(_SOURCE.match(line[:_LONGEST_LINE]) for line in block[1:])
