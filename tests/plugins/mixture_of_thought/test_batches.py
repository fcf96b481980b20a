"""Questions in a batch with others: what goes wrong, what is not awaited, and what no order of arrival changes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_steer.plugins.mixture_of_thought import answers
from mot_scripted import CODE, MOT, TABLE, says, told

from engines.scripted import ScriptedEngine
from llm_steer import SteerError, sandbox
from llm_steer.engines import voting
from llm_steer.engines.base import Request, Response, Stream
from llm_steer.sandbox import limits

pytestmark = pytest.mark.usefixtures("scripted")


def test_votes_do_not_nest() -> None:
    engine = says(natural="A", code="A", table="A")
    for own in (MOT, {"name": MOT}, ["reflection_cycle", MOT], '{"name": "mixture_of_thought"}'):
        with pytest.raises(SteerError, match="do not vote"):
            engine.chat("q", steer={"name": MOT, "settings": {"code": {"steer": own}}})
    assert engine.asked == []


@pytest.mark.parametrize("error", [OSError("no more processes"), RecursionError(), MemoryError(), ValueError("x")])
def test_nothing_that_checking_raises_ends_a_batch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: True)

    def broken(code: str) -> Any:
        raise error

    monkeypatch.setattr(sandbox, "run", broken)
    ask = Request(messages=[{"role": "user", "content": "q"}], steer={"name": MOT, "modalities": ["code"]})
    engine = says(code=CODE)
    engine.answer = lambda request, vote=engine.answer: "plain" if request.prompt else vote(request)
    voted, plain = engine.run([ask, Request(prompt="x", steer="off")])
    (reading,) = told(voted)["requests"]
    assert (reading["answer"], reading["check"]["reason"], reading["verified"]) == ("False", "failed", False)
    assert type(error).__name__ in reading["check"]["error"]
    assert plain.text == "plain"
    monkeypatch.setattr(answers, "read_choice", lambda *a, **k: 1 / 0)
    (reading,) = told(engine.run([ask])[0])["requests"]
    assert (reading["answer"], reading["reason"]) == (None, "failed")


RAMBLING_TABLE = "Premises:\n" + "1. P\n" * 900 + "Statement:\nP\n<answer>(A)"


def test_a_rambling_table_does_not_end_a_batch() -> None:
    engine = says(table=RAMBLING_TABLE)
    (reading,) = told(engine.chat("q", steer={"name": MOT, "modalities": ["table"]}))["requests"]
    assert (reading["answer"], reading["check"]["reason"]) == ("True", "no_rows")


class Ordered(ScriptedEngine):
    """Responses come in a given order."""

    def __init__(self, texts: list[str], order: list[int]) -> None:
        super().__init__(lambda request: "")
        self.texts, self.order = texts, order

    def _start(self, requests: Any) -> Stream:
        left, texts = list(self.order), self.texts
        aborted: set[int] = set()

        class Coming(Stream):
            def __next__(self) -> tuple[int, Response]:
                if not left:
                    raise StopIteration
                index = left.pop(0)
                return index, Response(finish="abort") if index in aborted else Response(text=texts[index], tokens=1)

            def abort(self, index: int) -> None:
                aborted.add(index)

            def close(self) -> None:
                left.clear()

        return Coming()


SPELLINGS = st.sampled_from(
    [
        "The answer is 0.5",
        "\\boxed{1/2}",
        "\\boxed{\\frac{1}{2}}",
        "\\boxed{7}",
        "\\boxed{7.0}",
        "I do not know.",
        "\\boxed{Ana}",
        "\\boxed{ana}",
    ]
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SPELLINGS, min_size=2, max_size=5), st.data())
def test_a_free_answer_does_not_depend_on_the_order(texts: list[str], data: st.DataObject) -> None:
    """The answer, and the form in which it is shown, are the same in every order of arrival, with early decision too."""
    order = data.draw(st.permutations(range(len(texts))))
    vote, ties = (
        data.draw(st.sampled_from(["majority", "weighted"])),
        data.draw(st.sampled_from(["priority", "random", "alphabetical"])),
    )
    asked = {
        "name": MOT,
        "answers": "free",
        "modalities": ["natural"],
        "n": len(texts),
        "reply": "answer",
        "vote": vote,
        "ties": ties,
    }
    shown = {
        Ordered(texts, list(way)).chat("q", steer={**asked, "early": early}).text
        for way in (order, range(len(texts)))
        for early in (False, True)
    }
    assert len(shown) == 1


def test_early_decision_saves_with_free_answers_too() -> None:
    asked = {"name": MOT, "answers": "free", "modalities": ["natural"], "n": 3}
    texts = ["\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{3}"]
    assert told(Ordered(texts, [0, 1, 2]).chat("q", steer=asked))["aborted"] == 1
    assert told(Ordered(texts, [1, 0, 2]).chat("q", steer=asked))["aborted"] == 1
    assert told(Ordered(["\\boxed{3}", *texts[:2]], [1, 2, 0]).chat("q", steer=asked))["aborted"] == 0  # its name may come


def test_a_text_that_says_another_answer_is_not_the_reasoning_of_the_computed_one() -> None:
    asked = {"name": MOT, "modalities": ["table", "natural"], "disagreement": "verified"}
    table = TABLE + "<answer>The final answer is (B)."
    response = says(table=table, natural="A").chat("q", steer=asked)
    assert response.text == "...<answer>(A)\n\nThe final answer is \\boxed{True}."
    response = says(table=table, natural="x y").chat("q", steer=asked)
    assert response.text.endswith(
        "(B).\n\nThis was computed again, and gives another answer. The final answer is \\boxed{True}."
    )


def test_that_all_were_cut_is_told() -> None:
    cut = Response(text="\\boxed{True} and", finish="length", tokens=1)
    assert says(natural=cut, code=cut, table=cut).chat("q", steer=MOT).finish == "length"
    assert says(natural=cut, code=cut, table="A").chat("q", steer={"name": MOT, "early": False}).finish == "stop"


@pytest.mark.parametrize(
    ("own", "word"),
    [("nope", "nope"), ({"name": "nope"}, "nope"), (["reflection_cycle", "nope"], "nope"),
     ({"name": "reflection_cycle", "amplitud": 1}, "amplitud"), ({"name": "reflection_cycle", "period": -1}, "period")],
)  # fmt: skip
def test_bad_plugins_in_settings_are_refused_before_anything_runs(own: Any, word: str) -> None:
    engine = says(natural="A", code="A", table="A")
    with pytest.raises(SteerError, match=word):
        engine.chat("q", steer={"name": MOT, "settings": {"natural": {"steer": own}}})
    assert engine.asked == []


def test_a_remote_server_may_have_other_plugins() -> None:
    engine = says(natural="A", code="A", table="A")
    ask = Request(
        messages=[{"role": "user", "content": "q"}], steer={"name": MOT, "settings": {"natural": {"steer": "theirs"}}}
    )
    assert [response.error for _, response in voting.submit(engine._start, [ask], local=False)] == [None]


def test_seeds_of_the_last_number() -> None:
    engine = says(natural="A", code="A", table="A")
    engine.chat("q", steer={"name": MOT, "early": False}, seed=2**63 - 1)
    assert [r.sampling.seed for r in engine.asked] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_a_program_that_makes_no_difference_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked still when the others have decided; giving the questions up ends it too."""
    monkeypatch.setattr(voting, "GRACE", 0.01)
    monkeypatch.setattr(sandbox, "available", lambda: True)
    ended = threading.Event()

    def endless(code: str) -> sandbox.Outcome:
        while not limits.stopped():
            time.sleep(0.01)
        ended.set()
        return sandbox.Outcome("stopped")

    monkeypatch.setattr(sandbox, "run", endless)
    asked = {"name": MOT, "modalities": ["code", "natural"], "settings": {"natural": {"n": 3}}}
    plugin = told(says(code=CODE, natural="A").chat("q", steer=asked))
    assert plugin["answer"] == "True"
    assert plugin["requests"][0]["check"]["reason"] == "stopped"
    ended.clear()
    engine = says(code=CODE, natural="A")
    plain = Request(prompt="x", steer="off")
    engine.answer = lambda request, vote=engine.answer: "plain" if request.prompt else vote(request)
    ask = Request(messages=[{"role": "user", "content": "q"}], steer={"name": MOT, "modalities": ["code"]})
    with engine.submit([ask, plain]) as stream:
        assert next(stream)[1].text == "plain"
    assert ended.wait(20)
