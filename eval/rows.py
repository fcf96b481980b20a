"""What is kept of an answer: a row of ``results.jsonl``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from llm_steer.engines.base import Response
from llm_steer.tokens import THINK_CLOSE

if TYPE_CHECKING:
    from llm_steer.eval.run import Attempt

REFLECTION = re.compile(r"\b(?:[Ww]ait|[Bb]ut|[Aa]lternatively|[Hh]mm|[Hh]owever)\b")
"""What counts as a reflection, in every method's texts alike."""

MOST_POSITIONS = 4000
"""A trace with more steered positions is kept without them."""
MOST_MARKS = 500
"""Steered positions whose places in the text are kept."""


def result_row(attempt: Attempt, response: Response, tokenizer: Any, session: int) -> dict[str, Any]:
    """A row of ``results.jsonl``."""
    thinking, exact = think_tokens(response, tokenizer)
    return {
        "key": attempt.key,
        "task": attempt.task,
        "id": attempt.item.id,
        "sample": attempt.sample,
        "method": attempt.method.label,
        "finish": response.finish,
        "prompt_tokens": response.prompt_tokens,
        "tokens": response.tokens,
        "think_tokens": thinking,
        "think_exact": exact,
        "reflections": len(REFLECTION.findall(response.text)),
        "passes": len(attempt.parts),
        "seconds": round(response.seconds, 4),
        "logprob": response.logprob,
        "text": response.text,
        "steering": slim(response.steering),
        "marks": marks(response, tokenizer),
        "session": session,
        "at": round(time.time(), 3),
    }


def think_tokens(response: Response, tokenizer: Any) -> tuple[int, bool]:
    """Generated tokens up to the end of thinking, and whether they were counted rather than estimated from the text."""
    ids = response.token_ids
    if ids is not None and tokenizer is not None:
        close = tokenizer.convert_tokens_to_ids(THINK_CLOSE)
        if isinstance(close, int) and tokenizer.convert_ids_to_tokens(close) == THINK_CLOSE:
            ends = [i for i, token in enumerate(ids) if token == close]
            return (ends[-1] + 1, True) if ends else (response.tokens if THINK_CLOSE not in response.text else 0, True)
    before, closed, _ = response.text.rpartition(THINK_CLOSE)
    if not closed:
        return 0, False
    return round(response.tokens * (len(before) + len(closed)) / max(len(response.text), 1)), False


def marks(response: Response, tokenizer: Any) -> list[list[Any]]:
    """Where steering says that it acted: start and end in the text, in characters, with the offset (None: not told)."""
    found: dict[int, float | None] = {}
    for plugin in (response.steering or {}).get("plugins", ()):
        positions = plugin.get("positions") or []
        deltas = plugin.get("deltas") or [None] * len(positions)
        found.update(zip(positions[:MOST_MARKS], deltas, strict=False))
    if not found or tokenizer is None or response.token_ids is None:
        return []
    pieces = tokenizer.batch_decode([[i] for i in response.token_ids], skip_special_tokens=True)
    if "".join(pieces) != response.text:  # characters of several tokens, or a tokenizer that joins pieces in its own way
        return []
    ends = [*accumulate(map(len, pieces))]
    return [[ends[p] - len(pieces[p]), ends[p], found[p]] for p in sorted(found) if p < len(ends)]


def slim(steering: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A trace without lists that are too long to keep for every answer."""
    if steering is None:
        return None
    plugins = [
        {k: v for k, v in p.items() if not (isinstance(v, list) and len(v) > MOST_POSITIONS)}
        for p in steering.get("plugins", ())
    ]
    return {**steering, "plugins": plugins}
