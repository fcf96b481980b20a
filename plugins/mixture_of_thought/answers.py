"""What a model's text answers, with a reason. A text that answers nothing, or two things, abstains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from llm_steer.plugins.mixture_of_thought.choosing import Chooser
from llm_steer.plugins.mixture_of_thought.free import last_number, without_words
from llm_steer.plugins.mixture_of_thought.passages import Passage, passages
from llm_steer.plugins.mixture_of_thought.said import Answer

from llm_steer.errors import SteerError
from llm_steer.normal import Form

__all__ = ["THREE", "TWO", "Answer", "groups", "options_in", "read_choice", "read_free", "reference"]

LONGEST = 200
"""Characters of an answer that is compared by its value; longer ones are compared as they stand."""
THREE = {"A": "True", "B": "False", "C": "Uncertain"}
TWO = {"A": "True", "B": "False"}

_OPTION_LINE = re.compile(r"^[^\S\n]*[(\[]?([A-Z])[)\].:][^\S\n]*(\S.*)$", re.M)
_MARK = re.compile(r"[(\[]([A-Z])[)\]]")


def options_in(question: str) -> dict[str, str]:
    """The options that a question lists: letter to text.

    Raises:
        SteerError: there are not two, lettered from A on.
    """
    for listed in (_OPTION_LINE.findall(question), _inline(question)):
        found = {letter: text.rstrip() for letter, text in listed}
        if len(found) >= 2 and list(found) == [chr(ord("A") + i) for i in range(len(found))]:
            return found
    raise SteerError("messages", question, 'a question that lists its options as (A), (B), ... with answers="choice"')


def _inline(question: str) -> list[tuple[str, str]]:
    """Options that follow one another in a line: what stands between two of their letters."""
    marks = list(_MARK.finditer(question))
    found = []
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        text = question[mark.end() : following.start() if following else None].strip()
        text = text.partition("\n")[0].rstrip()
        if following and text[-1:] in (",", ";"):
            text = text[:-1].rstrip()
        if text:
            found.append((mark[1], text))
    return found


def read_choice(text: str, options: Mapping[str, str], *, source: bool = False, truncated: bool = False) -> Answer:
    """Which option a text chooses.

    Args:
        options: letter to text; the values that are returned are the texts of verdicts (True, False, Uncertain), and the
            letters of other options.
        source: the prompt opened a program, which is no answer.
        truncated: the text was cut at the limit of tokens.
    """
    chooser = Chooser(options)
    return _read(text, lambda passage: chooser.choose(passage.text), source, truncated)


def read_free(text: str, *, source: bool = False, truncated: bool = False) -> Answer:
    """A number, an expression or a few words.

    Args:
        source, truncated: as in :func:`read_choice`.
    """

    def whole(passage: Passage) -> Answer:
        if passage.cut and truncated:  # maybe inside of a number
            return Answer(None, "truncated")
        if passage.place == "last_line":
            number = last_number(passage.text)
            return Answer(number, "number") if number else Answer(None, "no_answer")
        found = without_words(passage.text, boxed=passage.boxed)
        return Answer(found, "") if found else Answer(None, "no_answer")

    return _read(text, whole, source, truncated)


def _read(text: str, choose: Callable[[Passage], Answer], source: bool, truncated: bool) -> Answer:
    """What the first passage says that says something; only "the answer is" may be followed by nothing."""
    text = text.rpartition("</think>")[2]
    if not text.strip():
        return Answer(None, "truncated" if truncated else "empty")
    for passage in passages(text, source=source, truncated=truncated):
        answer = choose(passage)
        if answer.value is not None:
            return Answer(answer.value, answer.reason or passage.place)
        if passage.place != "stated" or answer.reason != "no_answer":
            return answer
    return Answer(None, "truncated" if truncated else "no_answer")


def groups(answers: Sequence[str]) -> list[str]:
    """For each free answer the first one that equals it: by value if both are numbers, else by normal form, as in grading.

    Symmetric and transitive, so that groups do not depend on the order in which answers came.
    """
    first: dict[str, str] = {}
    return [first.setdefault(Form.of(a).value if len(a) <= LONGEST else a, a) for a in answers]


def reference(text: str, tag: str) -> str:
    """The released code's reading, misreadings included: True, False, Uncertain or Unknown.

    Source: spec of ``eval`` with ``final`` prompts: text behind the last opening mode tag, up to the first end of an answer;
    the first letter A to D with or without parentheses, inside of words too; else the first of true, false, uncertain that
    occurs anywhere.
    """
    text = text.replace("```python", "").replace("```", "\n</code>")
    text = text.rpartition(tag)[2]
    text = text.partition("<end_of_answer>")[0] + "<end_of_answer>"
    _, opened, rest = text.partition("<answer>")
    body = rest.partition("<end_of_answer>")[0] if opened else ""
    if match := re.search(r"\(?([A-D])\)?", body):
        return {"A": "True", "B": "False", "C": "Uncertain", "D": "Unknown"}[match[1]]
    return next((word.capitalize() for word in ("true", "false", "uncertain") if word in body.lower()), "Unknown")
