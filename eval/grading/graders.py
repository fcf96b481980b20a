"""One grader a kind of task. A grader gets what counts of a response, and says what it answers and whether that is right."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from . import normal
from .answers import MAX_ANSWER, NO_ANSWER, Form, Verdict, compare, for_algebra
from .boxes import after_thinking, last_box
from .pool import MathPool

VERSION = 1
"""Raise it when a verdict can change: runs graded before then say so and can be regraded."""


@dataclass(frozen=True)
class Gold:
    """What is right, and what a grader has to know besides."""

    answer: str
    options: tuple[str, ...] = ()
    """Texts of the options A, B, C ... in order."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels with other spellings of each."""


class Grader(ABC):
    """Grades responses of one kind."""

    def __init__(self, pool: MathPool | None = None) -> None:
        self.pool = pool

    def grade(self, gold: Gold, response: str, *, thinking_required: bool = False) -> Verdict:
        """Grade a response, thinking included."""
        answer = last_box(after_thinking(response, required=thinking_required))
        return NO_ANSWER if answer is None else self.judge(gold, answer)

    @abstractmethod
    def judge(self, gold: Gold, answer: str) -> Verdict:
        """Grade what stands in the box."""


class Math(Grader):
    """Numbers, expressions, lists, intervals, matrices, words."""

    def judge(self, gold: Gold, answer: str) -> Verdict:
        if len(answer) > MAX_ANSWER:
            return Verdict(answer[:MAX_ANSWER], None, False, "too long")
        value = Form.of(answer).value
        decided = compare(gold.answer, answer)
        if decided is not None:
            return Verdict(answer, value, *decided)
        if self.pool is None:
            raise RuntimeError("this answer takes computer algebra: the grader needs a MathPool")
        result = self.pool.equal(*for_algebra(gold.answer, answer))
        if isinstance(result, str):
            return Verdict(answer, value, False, "timeout" if result == "timeout" else "error")
        return Verdict(answer, value, result, "math-verify")


class Exact(Grader):
    """The text in the box, letter by letter."""

    def judge(self, gold: Gold, answer: str) -> Verdict:
        return Verdict(answer, answer, answer == gold.answer.strip(), "exact")


class Choice(Grader):
    """A letter, however it is dressed (``(C)``, ``C.``, ``C) 12``), or the text of an option."""

    def judge(self, gold: Gold, answer: str) -> Verdict:
        letter = option_of(answer, gold.options)
        return Verdict(answer, letter, letter == gold.answer, "label")


class Label(Grader):
    """A word of a small set (``True``, ``False``, ``Uncertain``), another spelling of it, or its option's letter."""

    def judge(self, gold: Gold, answer: str) -> Verdict:
        label = label_of(answer, gold.labels, gold.options)
        return Verdict(answer, label, label == gold.answer, "label")


class Testbed(Label):
    """The testbed's own: what the response's program says in its evaluator, which runs nothing else, or the box."""

    def grade(self, gold: Gold, response: str, *, thinking_required: bool = True) -> Verdict:
        from llm_steer.eval.testbed.grading import answer_of, executed

        answer = answer_of(response)
        if answer is None:
            return NO_ANSWER
        verdict = self.judge(gold, answer)
        return replace(verdict, how="program") if executed(response) else verdict


GRADERS: Mapping[str, type[Grader]] = {"math": Math, "exact": Exact, "choice": Choice, "label": Label, "testbed": Testbed}


def option_of(answer: str, options: tuple[str, ...]) -> str | None:
    """The letter that an answer gives; None if it gives none of the options."""
    shown = normal.plain_text(answer)
    letters = [chr(ord("A") + i) for i in range(len(options) or 26)]
    for letter, option in zip(letters, options, strict=False):
        if shown.casefold() == normal.plain_text(option).casefold():
            return letter
    found = re.match(r"(?:option |answer |choice )?[(\[]?([A-Za-z])(?:[)\].:]|$)", shown, re.IGNORECASE)
    letter = found[1].upper() if found else ""
    return letter if letter in letters else None


def label_of(answer: str, labels: Mapping[str, tuple[str, ...]], options: tuple[str, ...] = ()) -> str | None:
    """The label that an answer gives; None if it is none of them."""
    shown = normal.plain_text(answer).casefold()
    for label, others in labels.items():
        if shown in (label.casefold(), *(other.casefold() for other in others)):
            return label
    letter = option_of(answer, options) if options else None
    if letter is None:
        return None
    option = options[ord(letter) - ord("A")]
    return label_of(option, labels)
