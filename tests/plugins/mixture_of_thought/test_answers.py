"""What a text answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.plugins.mixture_of_thought import answers
from llm_steer.plugins.mixture_of_thought.answers import THREE, TWO, options_in, read_choice, read_free, reference
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS

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


RAMBLES = ["\\boxed{", "{", "\n", " ", "(A) ", "true ", "not ", "cannot be determined ", "<answer>", "the answer is "]
RAMBLES += ["| T | F |\n", "1", "¬"]


@pytest.mark.timeout(60)  # what takes the square of the length takes minutes
@pytest.mark.parametrize("part", RAMBLES)
def test_a_model_that_rambles_to_the_limit(part: str) -> None:
    """Texts as long as a server's limit of tokens: read in a time that grows with the length."""
    for text in (part * (100_000 // len(part)), "(A) <answer>" + part * (100_000 // len(part))):
        for options in (THREE, {"A": "red", "B": "blue"}):
            read_choice(text, options, truncated=True)
            for name in ("code", "table"):
                CHECKS[name](text, options)
        read_free(text, truncated=True)
        reference(text, "<code>")
        with pytest.raises(SteerError, match="options"):
            options_in(text)


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
