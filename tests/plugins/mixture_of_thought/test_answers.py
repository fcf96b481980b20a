"""What a text answers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.plugins.mixture_of_thought import answers, choosing, passages
from llm_steer.plugins.mixture_of_thought.answers import THREE, TWO, options_in, read_choice, read_free, reference
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS
from mot_readings import CHOICES, FREE, SOURCE, VERDICTS

from llm_steer import SteerError

RIGHT = [
    # what the released parser misreads
    ("<answer>Answer: (B)<end_of_answer>", "False"),
    ("<answer>Conclusion follows, so (B)<end_of_answer>", "False"),
    ("<answer>By premise 2, (A)<end_of_answer>", "True"),
    ("<answer>it is not true, so false<end_of_answer>", "False"),
    ("1. It rains.\nThe final answer is (C).", "Uncertain"),
    ("<nl_cot>1. ...<answer>The final answer is (A).<end_of_answer>\n<nl_cot>", "True"),
    # plain
    ("<answer>\nThe final answer is (A).\n<end_of_answer>", "True"),
    ("<answer>The final answer is (B).", "False"),
    ("<answer>(C) Uncertain</answer>", "Uncertain"),
    ("<answer>B<end_of_answer>", "False"),
    ("<answer>b)<end_of_answer>", "False"),
    ("<answer>Option C.<end_of_answer>", "Uncertain"),
    ("<answer>[A]<end_of_answer>", "True"),
    ("<answer>**(A)**<end_of_answer>", "True"),
    ("<answer>$\\boxed{(A)}$<end_of_answer>", "True"),
    ("so \\boxed{False}", "False"),
    ("\\boxed{True} no: \\boxed{\\text{False}}", "False"),
    ("</think>**Answer: True**", "True"),
    ("Answer = uncertain", "Uncertain"),
    # denied, and undecidable
    ("<answer>The statement is not false. (A)<end_of_answer>", "True"),
    ("<answer>It isn't true; it is false.<end_of_answer>", "False"),
    ("<answer>It cannot be determined to be true.<end_of_answer>", "Uncertain"),
    ("<answer>We can't tell whether it is true or false<end_of_answer>", "Uncertain"),
    ("<answer>Unknown<end_of_answer>", "Uncertain"),
    # a list of options is no answer
    ("(A) True (B) False (C) Uncertain. The answer is uncertain", "Uncertain"),
    ("<answer>True, False, or Uncertain: True<end_of_answer>", "True"),
    ("<answer>(A) is wrong, so (B).<end_of_answer>", "False"),
    ("A contradiction arises, therefore the statement is false.", "False"),
    # what follows the first answer is a new, invented problem
    ("<answer>(B)<end_of_answer>\n<premises>...<answer>(A)<end_of_answer>", "False"),
    ("<think>I must put it in <answer> tags: (A)?</think><answer>(B)<end_of_answer>", "False"),
    ("I must answer in <answer> tags. <answer>(B)<end_of_answer>", "False"),
]

ABSTAINS = [
    ("", "empty"),
    ("   \n", "empty"),
    ("I do not know.", "no_answer"),
    ("<answer><end_of_answer>", "no_answer"),
    ("<answer>(D)<end_of_answer>", "not_an_option"),
    ("<answer>D.<end_of_answer>", "not_an_option"),
    ("<answer>(A) False<end_of_answer>", "contradictory"),
    ("<answer>(A) or (B)<end_of_answer>", "ambiguous"),
    ("<answer>true and false<end_of_answer>", "ambiguous"),
    ("<answer>(A) True (B) False (C) Uncertain<end_of_answer>", "no_answer"),
    ("A dog is an animal.", "no_answer"),
    ("\\boxed{maybe}", "no_answer"),
]


@pytest.mark.parametrize(("text", "value"), RIGHT)
def test_read_right(text: str, value: str) -> None:
    assert read_choice(text, THREE).value == value


@pytest.mark.parametrize(("text", "reason"), ABSTAINS)
def test_abstains(text: str, reason: str) -> None:
    answer = read_choice(text, THREE)
    assert answer.value is None
    assert answer.reason == reason


@pytest.mark.parametrize(("text", "value"), VERDICTS)
def test_verdicts(text: str, value: str | None) -> None:
    assert read_choice(text, THREE).value == value


@pytest.mark.parametrize(("text", "truncated", "value"), SOURCE)
def test_a_program_s_source_is_no_answer(text: str, truncated: bool, value: str | None) -> None:
    assert read_choice(text, THREE, source=True, truncated=truncated).value == value
    free = read_free(text, source=True, truncated=truncated).value
    assert (free is None) == (value is None), free


@pytest.mark.parametrize(("options", "text", "value"), CHOICES)
def test_choices(options: dict[str, str], text: str, value: str | None) -> None:
    assert read_choice(text, options).value == value


@pytest.mark.parametrize(("text", "value"), FREE)
def test_free_answers(text: str, value: str | None) -> None:
    assert read_free(text).value == value


def test_a_number_that_may_have_been_cut_is_none() -> None:
    for text in ("The answer is 4", "<answer>4", "<answer>The final answer is 4"):
        assert read_free(text, truncated=True) == answers.Answer(None, "truncated")
        assert read_free(text).value == "4"
    assert read_free("<answer>\\boxed{42}", truncated=True).value == "42"


def test_a_text_that_was_cut() -> None:
    ramble = "1. If it rains, the statement is true. " * 50
    assert read_choice(ramble, THREE, truncated=True) == answers.Answer(None, "truncated")
    assert read_choice("<answer>(A)<end_of_answer> " + ramble, THREE, truncated=True).value == "True"
    assert read_choice("", THREE, truncated=True).reason == "truncated"


def test_two_labels_have_no_uncertain() -> None:
    assert read_choice("<answer>(C)<end_of_answer>", TWO).reason == "not_an_option"
    assert read_choice("<answer>Uncertain<end_of_answer>", TWO).value is None
    assert read_choice("<answer>(B) False<end_of_answer>", TWO).value == "False"


def test_choice() -> None:
    question = "Which is left?\nA) the red book\nB) the blue book\nC. the green book"
    options = options_in(question)
    assert options == {"A": "the red book", "B": "the blue book", "C": "the green book"}
    for text in (
        "The answer is (B).",
        "\\boxed{B}",
        "The answer is the blue book.",
        "<answer>(B) the blue book<end_of_answer>",
    ):
        assert read_choice(text, options).value == "B"
    assert read_choice("<answer>(B) the red book<end_of_answer>", options).reason == "contradictory"
    assert options_in("Pick (A) one, (B) two or (C) three") == {"A": "one", "B": "two or", "C": "three"}
    with pytest.raises(SteerError, match="options"):
        options_in("What is left?")
    with pytest.raises(SteerError, match="options"):
        options_in("(B) one (C) two")


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("<answer>The final answer is \\boxed{42}.<end_of_answer>", "42", "tagged"),
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "boxed"),
        ("\\boxed{1} and \\boxed{2}", "2", "boxed"),
        ("The answer is 3/4.", "3/4", "stated"),
        ("we get 3, then 1,200 apples", "1,200", "number"),
        ("nothing here", None, "no_answer"),
        ("", None, "empty"),
        ("\\boxed{unclosed", None, "no_answer"),
    ],
)
def test_free(text: str, value: str | None, reason: str) -> None:
    assert read_free(text) == answers.Answer(value, reason)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>Answer: (B)<end_of_answer>", "True"),
        ("<answer>Conclusion follows, so (B)<end_of_answer>", "Uncertain"),
        ("<answer>By premise 2, (A)<end_of_answer>", "False"),
        ("<answer>it is not true, so false<end_of_answer>", "True"),
        ("The final answer is (A).", "Unknown"),
        ("<answer>(A)<end_of_answer> and then <nl_cot>", "Unknown"),
        ("<answer>(D)<end_of_answer>", "Unknown"),
        ("<answer>the final one is (B)", "False"),
        ("```python\nx\n```<answer>uncertain", "Uncertain"),
    ],
)
def test_reference_misreads_as_the_released_script_does(text: str, value: str) -> None:
    assert reference(text, "<nl_cot>") == value


PIECES = st.sampled_from(
    [
        "(A)",
        "(B)",
        "(C)",
        "(D)",
        "true",
        "false",
        "not",
        "so",
        "the answer is",
        "<answer>",
        "<end_of_answer>",
        "\\boxed{",
        "}",
        "\n",
        ".",
        "uncertain",
        "A",
        "{}",
        "</think>",
        "`",
        "1",
        "<nl_cot>",
    ]
)


@given(st.one_of(st.text(), st.lists(PIECES).map(" ".join)), st.booleans())
def test_any_text_is_read(text: str, truncated: bool) -> None:
    for options in (THREE, TWO, {"A": "red", "B": "(x)"}):
        answer = read_choice(text, options, truncated=truncated)
        assert answer.value is None or answer.value in (*options.values(), *options)
        assert answer.reason
    read_free(text, truncated=truncated)
    assert reference(text, "<nl_cot>") in ("True", "False", "Uncertain", "Unknown")


RAMBLES = [
    "\\boxed{", "{", "\n", " ", "(A) ", "true ", "not ", "cannot be determined ", "<answer>", "the answer is ",
    "| T | F |\n", "1", "¬", ",", "!", "answer ", "true so false ", "answer" + " " * 50, "\\boxed" + " " * 50, "1,",
    "\\text{", "```\n",
    "```python\n", "<code>\n", "</code>\n", "def x:\n", "A ", "I ", "(", "( A", "'", "\u0301", "x=", "x[", "P ", "a.", "|",
    "it is false that ", "because ", "-", "- 1", "5.5 ", "1/", "\\", "\\%", "<answer>x</answer>", "answer:\n", " answer: -",
    "::: ", "1. ", "P ∧ ", "P -> ", "P(", "T | ", "Statement: P\n", "Premises:\n", "#",
    "</think>", "```py ", "    x = (", "  " + "=" * 300 + " b c\n",
    "f(" + ")" * 300 + "x\n", "\u0315\u0300",
]  # fmt: skip
BEFORE = [
    "",
    "The answer is True",
    "(A) <answer>",
    "answer",
    "Premises:\nP\nStatement:\nP",
    "| P |\n| T |\n",
    "<code>\nx = 1\n",
]
OPTIONS = [THREE, {"A": "red", "B": "blue"}, dict.fromkeys("ABCD", ","), {"A": "\u0315\u0300" * 20_000, "B": "b"}]

READERS = """
import itertools, json, sys, time
from llm_steer import SteerError
from llm_steer.plugins.mixture_of_thought.answers import groups, options_in, read_choice, read_free, reference
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS
from llm_steer import sandbox
sandbox.available = lambda: False
parts, before, options, length = json.load(sys.stdin)
spent = {}
for part, first in itertools.product(parts, before):
    text = first + part * (length // len(part)) + "x"
    readers = {f"choice {i}": lambda o=o, i=i: read_choice(text, o, source=i == 1) for i, o in enumerate(options)}
    readers |= {f"free {s}": lambda s=s: read_free(text, source=s, truncated=s) for s in (False, True)}
    readers |= {name: lambda c=c: c(text, options[0]) for name, c in CHECKS.items()}
    readers |= {"reference": lambda: reference(text, "<code>"), "groups": lambda: groups([text[:200], text[-200:]])}
    readers["options"] = lambda: options_in(text)
    for name, reader in readers.items():
        began = time.process_time()
        try:
            reader()
        except SteerError:
            assert name == "options"
        spent[name] = spent.get(name, 0) + time.process_time() - began
print(json.dumps(spent))
"""


@pytest.mark.parametrize("length", [20_000])
def test_no_reader_takes_more_than_a_text_s_length(length: int) -> None:
    """Every reader, every repetition: in a process that ends at a limit, which what grows with the square does not reach."""
    asked = json.dumps([RAMBLES, BEFORE, OPTIONS, length])
    done = subprocess.run(
        [sys.executable, "-c", READERS], input=asked, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(CHECKS) | {"reference", "groups", "options", "free True"} <= json.loads(done.stdout).keys()


@pytest.mark.parametrize("count", [1_000, 8_000])
def test_what_is_chosen_from_is_short(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages have a bound, whatever the text; so have the words of one, and the answers that are compared by value."""
    seen: list[int] = []
    choose = choosing.Chooser.choose

    def noted(self: choosing.Chooser, text: str) -> answers.Answer:
        seen.append(len(text))
        return choose(self, text)

    monkeypatch.setattr(choosing.Chooser, "choose", noted)
    for part in RAMBLES:
        for first in BEFORE:
            text = first + part * (count // len(part))
            read_choice(text, THREE)
            read_choice(text, THREE, source=True, truncated=True)
            for passage in passages.passages(text):
                assert len(passage.text) <= passages.LONGEST
    assert len(seen) <= 4 * len(RAMBLES) * len(BEFORE)  # two at most for each reading
    assert max(seen) <= passages.LONGEST


def test_the_last_box_counts() -> None:
    for text, value in (
        ("\\boxed{1} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{a \\boxed{b} c}", "b"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("} {x} \\boxed {y}", "y"),
        ("{ \\boxed{z}", "z"),
    ):
        assert read_free(text).value == value


def test_options_in_a_line_and_in_lines() -> None:
    for text in ("Who? (A) Ana, (B) Bo; (C) Cem", "Who?\n(A) Ana\n(B) Bo\n(C) Cem\n", "Who?\nA. Ana\n B)  Bo \nC: Cem"):
        assert options_in(text) == {"A": "Ana", "B": "Bo", "C": "Cem"}
    assert options_in("(A)\nAna\n(B)\nBo\nWho?") == {"A": "Ana", "B": "Bo"}
