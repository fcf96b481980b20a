"""Read a response back: which step each part is an attempt at, whether it is right, and how sure the model was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_steer.eval.testbed.arithmetic import Operator, apply, difficulty
from llm_steer.eval.testbed.sampling import Response, reflection_ids
from llm_steer.eval.testbed.traces import COUNTS, LAST_END, REFLECTIONS, STEP_END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPERATORS: dict[str, Operator] = {"+": "+", "-": "-", "*": "*"}
_ATTEMPT = re.compile(rf"(?:({'|'.join(REFLECTIONS)})(?:{'|'.join(COUNTS)}), )?(\w+): (-?\d+) ([-+*]) (\d+) = (-?\d+)")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step of a chain of arithmetic."""

    label: str
    reflected: bool
    """Behind a reflection word."""
    first: bool
    """The first attempt at this label."""
    right: bool
    """The sum as it stands is right, whatever became of the operands before."""
    difficulty: int
    confidence: float
    """Mean over the attempt's tokens of the largest probability; nan where the engine does not say."""


def attempts(response: Response, tokenizer: PreTrainedTokenizerBase) -> list[Attempt]:
    """The attempts of a response in order. Parts that are no sum are left out."""
    found: list[Attempt] = []
    seen: set[str] = set()
    for ids, confidence in _parts(response, tokenizer):
        match = _ATTEMPT.fullmatch(str(tokenizer.decode(ids)).strip())
        if not match:
            continue
        word, label, value, operator, operand, result = match.groups()
        operation = _OPERATORS[operator], int(operand)
        right = apply(int(value), operation) == int(result)
        mean = sum(confidence) / len(confidence) if confidence else float("nan")
        found.append(Attempt(label, word is not None, label not in seen, right, difficulty(int(value), operation), mean))
        seen.add(label)
    return found


def reflections(response: Response, ids: set[int]) -> int:
    """Number of reflection words."""
    return sum(i in ids for i in response.ids)


def overthinks(found: list[Attempt]) -> bool:
    """Whether some step is attempted two or more times after its first right result."""
    after: dict[str, int] = {}
    for attempt in found:
        if attempt.label in after:
            after[attempt.label] += 1
        elif attempt.right:
            after[attempt.label] = 0
    return any(count >= 2 for count in after.values())


def _parts(response: Response, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[float]]]:
    """The thinking, cut at blank lines and before reflection words."""
    blank = {tokenizer.encode(end, add_special_tokens=False)[0] for end in (STEP_END, LAST_END)}
    close = tokenizer.convert_tokens_to_ids("</think>")
    words = set(reflection_ids(tokenizer))
    parts: list[tuple[list[int], list[float]]] = [([], [])]
    confidence = response.confidence or [float("nan")] * len(response.ids)
    for i, value in zip(response.ids, confidence, strict=True):
        if i == close:
            break
        if i in blank or i in words:
            parts.append(([], []))
        if i not in blank:
            parts[-1][0].append(i)
            parts[-1][1].append(value)
    return parts
