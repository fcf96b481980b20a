"""Vote rules against a plain oracle."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.mixture_of_thought.answers import LONGEST, groups
from llm_steer.plugins.mixture_of_thought.vote import Pending, Vote, decided, scores, winner

ANSWERS = ["True", "False", "Uncertain"]
WEIGHTS = [1.0, 2.0, 0.5, 3.0, 0.1, 0.3]
RULES: list[Any] = ["majority", "weighted", "verified"]


@st.composite
def ballots(draw: Any, size: int = 6) -> list[Vote]:
    count = draw(st.integers(0, size))
    return [
        Vote(
            draw(st.sampled_from(ANSWERS)),
            draw(st.sampled_from(WEIGHTS)),
            draw(st.booleans()),
            rank,
            draw(st.none() | st.sampled_from([-0.1, -0.2, -0.7])),
        )
        for rank in range(count)
    ]


def tied(votes: list[Vote], rule: str) -> tuple[set[str], list[Vote]]:
    """The answers with most, and the votes that were counted."""
    counted = [v for v in votes if v.verified] if rule == "verified" and any(v.verified for v in votes) else votes
    total: dict[str, Fraction] = {}
    for vote in counted:
        total[vote.answer] = total.get(vote.answer, Fraction(0)) + (Fraction(str(vote.weight)) if rule == "weighted" else 1)
    most = max(total.values(), default=Fraction(0))
    return {answer for answer, score in total.items() if score == most}, counted


@given(ballots(), st.sampled_from(RULES), st.sampled_from(["priority", "random", "logprob", "alphabetical"]))
def test_the_winner_is_the_oracle_s(votes: list[Vote], rule: Any, ties: Any) -> None:
    best, counted = tied(votes, rule)
    found = winner(votes, rule, ties, "seed")
    if not votes:
        assert found is None
        return
    assert found in best
    assert found == winner(list(reversed(votes)), rule, ties, "seed")  # in whatever order they came
    mine = [v for v in counted if v.answer in best]
    if ties == "alphabetical":
        assert found == min(best)
    elif ties == "priority" or (ties == "logprob" and len(best) > 1 and all(v.logprob is None for v in mine)):
        assert found == min(mine, key=lambda v: v.rank).answer
    elif ties == "logprob" and len(best) > 1:
        highest = max(v.logprob for v in mine if v.logprob is not None)
        assert highest in [v.logprob for v in mine if v.answer == found]


def test_random_ties_are_drawn_by_the_seed() -> None:
    votes = [Vote("True"), Vote("False"), Vote("Uncertain")]
    drawn = Counter(winner(votes, "majority", "random", str(seed)) for seed in range(300))
    assert set(drawn) == set(ANSWERS)
    assert min(drawn.values()) > 60
    assert {winner(votes, "majority", "random", "7") for _ in range(5)} == {winner(votes[::-1], "majority", "random", "7")}


@settings(max_examples=300)
@given(ballots(4), st.lists(st.tuples(st.sampled_from(WEIGHTS), st.booleans()), max_size=2), st.sampled_from(RULES))
def test_decided_means_that_nothing_can_change(votes: list[Vote], rest: list[tuple[float, bool]], rule: Any) -> None:
    """All ways in which the pending votes can fall, abstentions included. A new answer stands for any other one."""
    pending = [Pending(weight, verifiable) for weight, verifiable in rest]
    if not decided(votes, pending, rule):
        return
    ways: list[list[Vote | None]] = []
    for number, item in enumerate(pending, len(votes)):
        ways.append([None])
        for answer, verified in itertools.product([*ANSWERS, "other"], [True, False] if item.verifiable else [False]):
            ways[-1].append(Vote(answer, item.weight, verified, number, -0.01))
            ways[-1].append(Vote(answer, item.weight / 2, verified, number))
    for ties in ("priority", "random", "logprob", "alphabetical"):
        want = winner(votes, rule, ties, "s")  # type: ignore[arg-type]
        for way in itertools.product(*ways):
            assert winner([*votes, *(v for v in way if v is not None)], rule, ties, "s") == want  # type: ignore[arg-type]


def test_decided_saves() -> None:
    two = [Vote("True"), Vote("True")]
    assert decided(two, [Pending()], "majority")
    assert not decided(two[:1], [Pending(), Pending()], "majority")
    assert not decided([Vote("True"), Vote("False")], [Pending()], "majority")
    assert decided(two, [Pending(1.5)], "weighted")
    assert not decided(two, [Pending(2.0)], "weighted")
    assert not decided(two, [Pending(verifiable=True)], "verified")
    assert decided(two, [Pending()], "verified")
    assert decided([Vote("True", verified=True), *two], [Pending()], "verified")


@given(st.lists(st.sampled_from([*ANSWERS, None]), min_size=3, max_size=3))
def test_who_abstains_outvotes_nobody(said: list[str | None]) -> None:
    votes = [Vote(answer, rank=rank) for rank, answer in enumerate(said) if answer is not None]
    found = winner(votes, "majority", "priority")
    assert (found is None) == (said == [None] * 3)
    assert found is None or found in said


@given(st.lists(st.sampled_from([*ANSWERS, "Unknown"]), min_size=3, max_size=3))
def test_reference_rule(said: list[str]) -> None:
    """The released script on three readings: two equal ones win, Unknown like any other; else the first in the alphabet."""
    found = winner([Vote(answer, rank=rank) for rank, answer in enumerate(said)], "majority", "alphabetical")
    (top, count), *_ = Counter(said).most_common()
    assert found == (top if count >= 2 else min(said))


def test_scores() -> None:
    votes = [Vote("a", 0.1), Vote("a", 0.2), Vote("b", 0.3, verified=True)]
    assert scores(votes, "majority") == {"a": 2.0, "b": 1.0}
    assert scores(votes, "weighted") == {"a": 0.3, "b": 0.3}
    assert scores(votes, "verified") == {"b": 1.0}


SAME = [
    ["1/2", "0.5", "\\frac{1}{2}", "\\dfrac12", "$0.50$", " 1 / 2 "],
    ["50\\%", "50", "50 percent"],  # the question says of what
    ["1200", "1,200", "1{,}200", "x = 1200", "1200."],
    ["-3", "−3", "- 3", "-3.0"],
    ["3", "3.00", "x = 3"],
    ["3 1/2", "7/2", "3.5"],
    ["\\text{Evelyn}", "evelyn", "Evelyn."],
    ["\\left( 1, 2 \\right)", "(1,2)"],
    ["p - q", "p-q"],
    ["p + q"],
    ["336^\\circ", "336"],
    ["1/0"],
    ["2, 1"],
    ["21"],
]


def test_equal_answers_are_grouped_and_others_are_not() -> None:
    told = [text for group in SAME for text in group]
    expected = [group[0] for group in SAME for _ in group]
    assert groups(told) == expected
    assert groups(told[::-1]) == [group[-1] for group in SAME[::-1] for _ in group]  # in whatever order they came


@given(st.text(max_size=40))
def test_any_answer_is_its_own_equal(text: str) -> None:
    assert groups([text, text]) == [text, text]


def test_endless_answers_are_compared_as_they_stand() -> None:
    for part in ("1", "{", "(1,", "\\frac", "a ", "1 cm"):
        text = part * 100_000
        assert groups([text, text, text[:LONGEST]]) == [text, text, text[:LONGEST]]


def test_weights_are_decimal_numbers() -> None:
    votes = [Vote("a", 0.1, rank=1), Vote("a", 0.1, rank=2), Vote("a", 0.1, rank=3), Vote("b", 0.3)]
    assert winner(votes, "weighted", "priority") == "b"
    assert winner(votes, "weighted", "alphabetical") == "a"
    assert not decided(votes[3:], [Pending(0.1)] * 3, "weighted")
    assert decided(votes[3:], [Pending(0.1)] * 2, "weighted")
