"""What a response answers, and whether that is right. Exact: the text in the box, or what the response's program says."""

from __future__ import annotations

import re

from llm_steer.eval.testbed.evaluator import Refused, run
from llm_steer.eval.testbed.problem import Problem

VERDICTS = ("True", "False", "Uncertain")

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _after_thinking(text: str) -> str:
    """What follows the end of thinking; nothing where thinking did not end."""
    _, closed, rest = text.rpartition("</think>")
    return rest if closed else ""


def boxed(text: str) -> str | None:
    """The content of the last box behind the end of thinking; None where there is none."""
    found = _BOXED.findall(_after_thinking(text))
    return found[-1].strip() if found else None


def executed(text: str) -> str | None:
    """What the program behind the end of thinking answers; None where there is none, or where it doesn't run."""
    match = _PROGRAM.search(_after_thinking(text))
    if not match:
        return None
    try:
        answer = run(match[1]).get("answer")
    except Refused:
        return None
    return answer if answer in VERDICTS else None


def answer_of(text: str) -> str | None:
    """What a response (thinking included) answers. A program that runs is believed, the box where there is none."""
    return executed(text) or boxed(text)


def grade(problem: Problem, text: str) -> bool:
    """Whether a response (thinking included) is right."""
    return answer_of(text) == problem.answer
