"""One grader a kind of task. A grader gets what counts of a response, and says what it answers and whether that is right."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llm_steer import normal, sandbox
from llm_steer.errors import MissingDependencyError
from llm_steer.normal import Form

from .answers import MAX_ANSWER, NO_ANSWER, Verdict, compare, for_algebra
from .boxes import after_thinking, last_box
from .pool import MathPool

VERSION = 4
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


_PROGRAM = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Program(Grader):
    """What the response's program prints last: its last fenced block of Python, run in the sandbox and nowhere else."""

    def __init__(self, pool: MathPool | None = None) -> None:
        super().__init__(pool)
        if not sandbox.available():
            raise MissingDependencyError("wasmtime, or a system that it runs on", "sandbox", "grading of programs")

    def grade(self, gold: Gold, response: str, *, thinking_required: bool = False) -> Verdict:
        programs = _PROGRAM.findall(after_thinking(response, required=thinking_required))
        if not programs or len(programs[-1]) > sandbox.LONGEST:
            return NO_ANSWER
        outcome = sandbox.run(programs[-1])
        if outcome.status == "timeout":  # the clock's, which depends on the machine; fuel does not
            return Verdict(None, None, False, "timeout")
        printed = outcome.stdout.strip().rpartition("\n")[2].strip()
        if outcome.status != "ok" or not printed:
            return Verdict(None, None, False, f"program: {outcome.status if outcome.status != 'ok' else 'printed nothing'}")
        return self.judge(gold, printed[:MAX_ANSWER])

    def judge(self, gold: Gold, answer: str) -> Verdict:
        """Equal numbers are equal; everything else letter by letter."""
        decided = compare(gold.answer, answer)
        correct = decided[0] if decided is not None else answer == gold.answer.strip()
        return Verdict(answer, Form.of(answer).value, correct, "program")


GRADERS: Mapping[str, type[Grader]] = {
    "math": Math,
    "exact": Exact,
    "choice": Choice,
    "label": Label,
    "program": Program,
    "testbed": Testbed,
}


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
