"""What a model's text answers, with a reason. A text that answers nothing, or two things, abstains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llm_steer.errors import SteerError
from llm_steer.normal import Form

LONGEST = 1000
"""Characters of an answer that is compared by its value; longer ones are compared as they stand."""
THREE = {"A": "True", "B": "False", "C": "Uncertain"}
TWO = {"A": "True", "B": "False"}

_SYNONYMS = {
    "unknown": "uncertain",
    "undetermined": "uncertain",
    "indeterminate": "uncertain",
    "undecided": "uncertain",
    "inconclusive": "uncertain",
}
_UNDECIDABLE = re.compile(
    r"\b(?:can\s?not|can't|could not|couldn't|impossible to)\s+(?:be\s+)?(?:determine|decide|infer|conclude|tell|say)\w*",
    re.I,
)
_NEGATION = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor|\bcannot)\s+(?:\w+\s+){0,3}$", re.I)
_CUE = re.compile(
    r"\b(?:so|thus|hence|therefore|consequently|answer\s*(?:is|:)|option|choice|conclude[sd]?(?:\s+that)?)\b", re.I
)
_STATED = re.compile(
    r"(?:\b(?:final\s+)?answer(?:\s+is|\s*[:=])|\bverdict(?:\s+is|\s*[:=])|\bconclusion(?:\s+is|\s*[:=]))\s*(.+)", re.I
)
_TAGGED = re.compile(
    r"<answer>((?:(?!<answer>).)*?)(?:<end_of_answer>|</answer>|(?=<(?:premises|question|conclusion|options)>))", re.S
)
_LETTER = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]]")
_BARE = re.compile(
    r"\s*(?:(?:the|my)\s+)?(?:(?:final\s+)?answer\s*(?:is|:)?\s*)?(?:option\s+|choice\s+)?([A-Z])\s*[.):]?\s*", re.I
)
_OPTION_LINE = re.compile(r"^[^\S\n]*[(\[]?([A-Z])[)\].:][^\S\n]*(\S.*)$", re.M)
_MARK = re.compile(r"[(\[]([A-Z])[)\]]")
_CLAUSE_END = re.compile(r"[.;,\n]|$")
_BRACE = re.compile(r"(\\boxed\s*)?([{}])")
_NEAR = 80
"""Characters before a verdict among which a negation of it is looked for."""


@dataclass(frozen=True)
class Answer:
    """What a text says, and how that is known."""

    value: str | None
    """None abstains."""
    reason: str
    """Of an answer: ``tagged``, ``boxed``, ``stated``, ``last_line``, ``number``. Of an abstention: ``empty``,
    ``truncated``, ``no_answer``, ``ambiguous`` (two answers), ``contradictory`` (a letter with another option's text),
    ``not_an_option``."""


Choose = Callable[[str], Answer]


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


def read_choice(text: str, options: Mapping[str, str], *, truncated: bool = False) -> Answer:
    """Which option a text chooses.

    Args:
        options: letter to text; the values that are returned are the texts of verdicts (True, False, Uncertain), and the
            letters of other options.
        truncated: the text was cut at the limit of tokens.
    """
    chooser = _Chooser(options)
    return _read(text, chooser.choose, truncated)


def read_free(text: str, *, truncated: bool = False) -> Answer:
    """A number, an expression or a few words."""
    answer = _read(text, _whole, truncated)
    if answer.value is None and answer.reason == "no_answer":
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", _after_thinking(text))
        if numbers:
            return Answer(numbers[-1], "number")
    return answer


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


# ----------------------------------------------------------------------------------------------------------------------


def _after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2]


def _last_box(text: str) -> str | None:
    """Content of the ``\\boxed{...}`` that opens last, of those whose braces are balanced."""
    open_: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match[2] == "{":
            open_.append(match.end() if match[1] else None)
        elif open_ and (start := open_.pop()) is not None:
            last = max(last or (start, 0), (start, match.start()))
    return text[slice(*last)].strip() if last else None


def _read(text: str, choose: Choose, truncated: bool) -> Answer:
    """Look where an answer may stand, from the surest place to the least sure one."""
    text = _after_thinking(text)
    if not text.strip():
        return Answer(None, "truncated" if truncated else "empty")
    tagged = [match[1] for match in _TAGGED.finditer(text)]
    if not tagged and "<answer>" in text:  # not closed: a stop string, or the end
        tagged = [text.rpartition("<answer>")[2]]
    for body in tagged:
        if body.strip():
            inner = _last_box(body)
            answer = choose(body if inner is None else inner)
            return Answer(answer.value, "tagged") if answer.value is not None else answer
    if (box := _last_box(text)) is not None:
        answer = choose(box)
        return Answer(answer.value, "boxed") if answer.value is not None else answer
    if stated := [match[1] for line in text.splitlines() if (match := _STATED.search(line))]:
        answer = choose(stated[-1])
        if answer.value is not None:
            return Answer(answer.value, "stated")
        if answer.reason != "no_answer":
            return answer
    if truncated:
        return Answer(None, "truncated")
    if choose is _whole:
        return Answer(None, "no_answer")
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("<", "|", "```"))]
    answer = choose(lines[-1]) if lines else Answer(None, "no_answer")
    return Answer(answer.value, "last_line") if answer.value is not None else answer


def _whole(text: str) -> Answer:
    text = text.strip()
    if stated := _STATED.search(text):
        text = stated[1].strip()
    text = text.splitlines()[0].strip() if text else ""
    text = text.removesuffix(".").strip().strip("*`").strip()
    return Answer(text, "") if text else Answer(None, "no_answer")


class _Chooser:
    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self.verdicts = {
            text.lower(): letter for letter, text in options.items() if text.lower() in ("true", "false", "uncertain")
        }
        self.by_verdict = len(self.verdicts) == len(options)

    def value(self, letter: str) -> str:
        return self.options[letter] if self.by_verdict else letter

    def choose(self, text: str) -> Answer:
        """The one option that a short text names."""
        text = re.sub(r"[*_`$]|\\text\{|\\(?=[()])", "", self._without_list(text))
        if match := _BARE.fullmatch(text):
            letter = match[1].upper()
            return Answer(self.value(letter), "") if letter in self.options else Answer(None, "not_an_option")
        letters = [(m.start(), m[1].upper()) for m in _LETTER.finditer(text)]
        named = [(place, letter) for place, letter in letters if letter in self.options]
        texts = self._texts(text)
        letter = self._one(text, named)
        worded = self._one(text, texts)
        if letter == "" or worded == "":
            return Answer(None, "ambiguous")
        if letter and worded and letter != worded:
            # "It is not false that ..., so (C)": only a text right behind the letter contradicts it.
            behind = text[max(place for place, name in named if name == letter) :]
            if any(name != letter for _, name in self._texts(behind)):
                return Answer(None, "contradictory")
        if chosen := letter or worded:
            return Answer(self.value(chosen), "")
        if letters:
            return Answer(None, "not_an_option")
        return Answer(None, "no_answer")

    def _without_list(self, text: str) -> str:
        """The text without a copy of the list of options."""
        if len(self.options) < 2:
            return text
        items = r"\W*".join(rf"\(?{letter}\)?\W*{re.escape(option)}" for letter, option in self.options.items())
        words = r"\W*(?:,|/|or|and)*\W*".join(re.escape(option) for option in self.options.values())
        return re.sub(rf"{items}|(?<!\w)(?:{words})(?!\w)\s*[:?]", " ", text, flags=re.I)

    def _texts(self, text: str) -> list[tuple[int, str]]:
        """Options that are named by their text, and not denied."""
        found = []
        if not self.by_verdict:
            for letter, option in self.options.items():
                found += [(m.start(), letter) for m in re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.I)]
            return sorted(found)
        blank = list(text)
        if "uncertain" in self.verdicts:
            stop = 0
            for match in _UNDECIDABLE.finditer(text):
                if match.start() < stop:
                    continue
                # "cannot be determined to be true": the rest of the clause names what cannot be.
                end = _CLAUSE_END.search(text, match.end())
                stop = end.start() if end else len(text)
                found.append((match.start(), self.verdicts["uncertain"]))
                blank[match.start() : stop] = " " * (stop - match.start())
        rest = "".join(blank)
        for match in re.finditer(
            r"\b(true|false|uncertain|unknown|undetermined|indeterminate|undecided|inconclusive)\b", rest, re.I
        ):
            word = _SYNONYMS.get(match[1].lower(), match[1].lower())
            if word in self.verdicts and not _NEGATION.search(rest, max(match.start() - _NEAR, 0), match.start()):
                found.append((match.start(), self.verdicts[word]))
        return sorted(found)

    def _one(self, text: str, found: Sequence[tuple[int, str]]) -> str | None:
        """The only option of a list; else the last one, if a word like *so* or *answer* stands between it and the others.
        None if there is none, ``""`` if it is not clear which."""
        if not found:
            return None
        if len({letter for _, letter in found}) == 1:
            return found[0][1]
        place, last = found[-1]
        before = max(p for p, letter in found if letter != last)
        return last if _CUE.search(text[before:place]) else ""
