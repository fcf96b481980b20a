"""A free answer in a short passage: without the words around it."""

from __future__ import annotations

import re

_LEADS = re.compile(
    r"""(?: [\s:=\-\u2013\u2014*_`"'\u201c\u201d]
      | (?:is | simply | just | therefore | thus | exactly | clearly | approximately | about | probably | indeed)\b )*+""",
    re.I | re.X,
)
_NUMERIC = re.compile(r"[\d.\\$]")
_REST = re.compile(
    r"""  ,?\s(?: because | since | which | as\s(?!well) | so\sthat | if )\b
      | ,\s(?: not | so | and\snot )\b
      | [!;]\s
      | (?<=[\d)}\]$%*'"])[.:]\s
      | (?<=\w{4})\.\s""",
    re.X,
)
"""A reason, or another sentence. A full stop behind a short word may be that of an abbreviation."""
_STATED = re.compile(r"\b(?:final\s)?answer\s?(?:is\b|[:=])|\bverdict\s?(?:is\b|[:=])", re.I)
_NOTHING = re.compile(
    r"""\b(?: not | never | cannot | unknown | unclear | unsure | undetermined | uncertain | maybe | perhaps
      | impossible\sto | hard\sto | no\sidea )\b | n['\u2019]t\b""",
    re.I | re.X,
)
_EMPTY_BOX = re.compile(r"(?:un|not )(?:known|clear|sure|determined)|\?+|n/a", re.I)
_NUMBER = re.compile(r"(?:(?<![\w).}])[-\u2212\u2013])?(?<![\w.])\d[\d,]*+(?:\.\d+)?(?:/\d+)?")
_LABEL = re.compile(
    r"""\b(?: steps? | premises? | rules? | lines? | equations? | cases? | options? | rows? | figures? | no\. | numbers?
      | problems? )\s*\#?\(?$""",
    re.I | re.X,
)


def without_words(text: str, *, boxed: bool) -> str | None:
    r"""What a passage says that an answer is; None if it says that there is none.

    Args:
        boxed: the passage is the content of ``\boxed{}``, and taken as it is.
    """
    text = text.strip()
    if boxed:
        shown = _tidy(text)
        return None if not shown or _EMPTY_BOX.fullmatch(re.sub(r"\\text\{|\}", "", shown)) else shown
    if stated := _STATED.search(text):
        text = text[stated.end() :]
    text = _after_lead(text).partition("\n")[0]
    if rest := _REST.search(text):
        text = text[: rest.start()]
    text = _tidy(text)
    return text if text and not _NOTHING.search(text) else None


def last_number(text: str) -> str | None:
    """The last number of a line that claims something."""
    if _NOTHING.search(text):
        return None
    numbers = [m[0] for m in _NUMBER.finditer(text) if not _LABEL.search(text[max(m.start() - 16, 0) : m.start()])]
    return _tidy(numbers[-1].rstrip(",")) if numbers else None


def _after_lead(text: str) -> str:
    """Without what stands before an answer; a sign before a number belongs to it."""
    lead = _LEADS.match(text)
    assert lead is not None  # it matches nothing, too
    end = lead.end()
    sign = len(text[:end].rstrip()) - 1
    return text[sign:] if sign >= 0 and text[sign] in "-\u2212\u2013" and _NUMERIC.match(text, end) else text[end:]


def _tidy(text: str) -> str:
    text = re.sub(r"^[\u2212\u2013](?=\s?[\d.])", "-", text.strip())
    return text.rstrip(".").strip().strip('*`"\u201c\u201d').strip().removesuffix(".").strip()
