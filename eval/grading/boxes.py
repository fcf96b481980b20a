r"""The answer's place in a text: the last ``\boxed{}``."""

from __future__ import annotations

import re

from llm_steer.tokens import THINK_CLOSE

_OPENING = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_WITHOUT_BRACES = re.compile(r"[^\s$\\{}]+")


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` (or ``\fbox{...}``, or ``\boxed 7``).

    The last one alone counts: if it is empty, or never closed, there is no answer, whatever was boxed before.
    """
    opening = None
    for opening in _OPENING.finditer(text):  # noqa: B007  (the last match is wanted)
        pass
    if opening is None:
        return None
    if text[opening.end() : opening.end() + 1] == "{":
        content = _group(text, opening.end())
    else:
        bare = _WITHOUT_BRACES.match(text, opening.end())
        content = bare[0].rstrip(".,") if bare else None
    return (content or "").strip() or None


def after_thinking(text: str, *, required: bool) -> str:
    """What follows the last ``</think>``.

    Args:
        required: a text without one is still thinking and answers nothing; otherwise all of it counts.
    """
    _, closed, rest = text.rpartition(THINK_CLOSE)
    return rest if closed or not required else ""


def _group(text: str, start: int) -> str | None:
    """What stands between the brace at ``start`` and its partner; None if it has none."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
        i += 1
    return None
