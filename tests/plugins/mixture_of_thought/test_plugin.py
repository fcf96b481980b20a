"""One question, several requests, one answer; through the engine client."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from mot_scripted import CODE, MOT, TABLE, modality, prints, says, told

from engines.scripted import ScriptedEngine
from llm_steer import SteerError, UnsupportedError, spec, steer
from llm_steer.engines.base import Engine, Request, Response, Sampling

pytestmark = pytest.mark.usefixtures("scripted")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_three_requests_one_answer() -> None:
    engine = says(natural="A", code="B", table="A")
    response = engine.chat("It rains.\nIs it {wet}?", steer=MOT, max_tokens=50, temperature=0.5, seed=7)
    assert engine.batches == [3]
    assert [modality(r) for r in engine.asked] == ["natural", "code", "table"]
    assert [r.sampling.seed for r in engine.asked] == [7, 8, 9]
    for request in engine.asked:
        assert request.steer == "off"
        assert request.sampling.max_tokens == 50
        assert request.sampling.temperature == 0.5
        assert request.sampling.stop == ("<end_of_answer>",)
        assert "It rains.\nIs it {wet}?\n" in request.messages[-1]["content"]  # type: ignore[index]
    plugin = told(response)
    assert plugin["answer"] == "True"
    assert plugin["scores"] == {"True": 2.0, "False": 1.0}
    assert response.text == "...<answer>(A)\n\nThe final answer is \\boxed{True}."
    assert response.finish == "stop"
    assert response.tokens == sum(r["tokens"] for r in plugin["requests"]) == 3
    assert response.prompt_tokens == 15


def test_questions_are_one_batch_and_others_go_along() -> None:
    engine = says(natural="A", code="A", table="A")
    plain = Request(prompt="x", steer="off")
    engine.answer = lambda request, vote=engine.answer: "plain" if request.prompt else vote(request)
    ask = Request(messages=[{"role": "user", "content": "q"}], steer=[MOT, {"name": "reflection_cycle"}])
    responses = engine.run([ask, plain, ask, Request(messages=[{"role": "user", "content": " "}], steer=MOT)])
    assert engine.batches == [7]
    assert [told(responses[i])["answer"] for i in (0, 2)] == ["True", "True"]
    assert responses[1].text == "plain"
    assert "asks something" in (responses[3].error or "")
    assert {str(r.steer) for r in engine.asked} == {"off", str([{"name": "reflection_cycle"}])}


def test_settings_of_each_modality() -> None:
    engine = says(natural="A", code="A")
    wave = {"name": "reflection_cycle", "amplitude": 5.0}
    own = {
        "natural": {"n": 3, "temperature": 1.0, "steer": wave, "max_tokens": 9},
        "code": {"top_k": 4, "top_p": 0.5, "steer": "rebalance"},
    }
    engine.chat("q", steer={"name": MOT, "modalities": ["code", "natural"], "settings": own, "early": 0}, temperature=0)
    assert [modality(r) for r in engine.asked] == ["code", "natural", "natural", "natural"]
    code, natural = engine.asked[0], engine.asked[1]
    assert (code.sampling.temperature, code.sampling.top_k, code.sampling.top_p, code.steer) == (0, 4, 0.5, "rebalance")
    assert (natural.sampling.temperature, natural.sampling.max_tokens, natural.steer) == (1.0, 9, wave)


def test_the_conversation_before_the_question() -> None:
    engine = says(natural="A")
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    engine.chat([*history, {"role": "user", "content": "q"}], steer={"name": MOT, "modalities": ["natural"]})
    assert engine.asked[0].messages[:3] == history  # type: ignore[index]


def test_own_prompts(tmp_path: Any) -> None:
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "natural.txt").write_text("[[question]]")
    (tmp_path / "three" / "natural.system.txt").write_text("words")
    engine = ScriptedEngine(lambda request: "\\boxed{True}")
    params = {"name": MOT, "modalities": ["natural"], "prompts": str(tmp_path)}
    system = {"role": "system", "content": "Be kind."}
    assert told(engine.chat("q", steer=params))["answer"] == "True"
    engine.chat([system, {"role": "user", "content": "q"}], steer=params)
    assert engine.asked[0].messages == [{"role": "system", "content": "words"}, {"role": "user", "content": "q"}]
    assert engine.asked[1].messages[0]["content"] == "Be kind.\n\nwords"  # type: ignore[index]
    with pytest.raises(SteerError, match=r"steer\.prompts: .*three/code\.txt"):
        engine.chat("q", steer={**params, "modalities": ["code"]})


def test_baseline_has_the_same_budget() -> None:
    engine = says(natural=["A", "B", "B", "A", "B"])
    response = engine.chat(
        "q", steer={"name": MOT, "settings": {"natural": {"n": 3}}, "baseline": "natural", "early": False}
    )
    assert [modality(r) for r in engine.asked] == ["natural"] * 5
    assert told(response)["answer"] == "False"


# -- reading and voting ------------------------------------------------------------------------------------------------


def test_a_failed_modality_never_outvotes_an_answer() -> None:
    engine = says(natural="B", code="I ramble on", table=Response(text="true " * 99, finish="length", tokens=99))
    plugin = told(engine.chat("q", steer=MOT))
    assert plugin["answer"] == "False"
    assert plugin["abstained"] == 2
    assert [r["reason"] for r in plugin["requests"]] == ["tagged", "no_answer", "truncated"]
    engine = says(natural=Response(error="status 500", finish="error"), code="x", table="C")
    assert told(engine.chat("q", steer=MOT))["answer"] == "Uncertain"


def test_nobody_answers() -> None:
    response = says(natural="x y", code="x y", table="x y").chat("q", steer=MOT)
    assert told(response)["answer"] is None
    assert response.text == "No answer: none of the 3 responses could be read."
    failed = Response(error="too long", finish="error")
    with pytest.raises(RuntimeError, match="too long"):
        says(natural=failed, code=failed, table=failed).chat("q", steer=MOT)


def test_reference_preset() -> None:
    """Unknown votes, the alphabet decides, and texts are misread as they are there."""
    steer_ = {"name": MOT, "preset": "reference"}
    plugin = told(says(natural="A", code="x y", table="x y").chat("q", steer=steer_))
    assert plugin["answer"] == "Unknown"
    assert told(says(natural="A", code="B", table="C").chat("q", steer=steer_))["answer"] == "False"
    misread = "<answer>Answer: (B)"
    assert told(says(natural=misread, code=misread, table="B").chat("q", steer=steer_))["answer"] == "True"


def test_paper_preset_draws_ties() -> None:
    found = {
        told(says(natural="A", code="B", table="C").chat("q", steer={"name": MOT, "preset": "paper", "tie_seed": i}))[
            "answer"
        ]
        for i in range(20)
    }
    assert found == {"True", "False", "Uncertain"}


def test_the_most_trusted_breaks_ties() -> None:
    for order, answer in ((["natural", "code"], "True"), (["code", "natural"], "False")):
        plugin = told(says(natural="A", code="B").chat("q", steer={"name": MOT, "modalities": order}))
        assert plugin["answer"] == answer


def test_log_probability_breaks_ties() -> None:
    sure = Response(text="<answer>(B)", logprob=-1.0, tokens=10)
    unsure = Response(text="<answer>(A)", logprob=-2.0, tokens=10)
    engine = says(natural=unsure, code=sure)
    plugin = told(engine.chat("q", steer={"name": MOT, "modalities": ["natural", "code"], "ties": "logprob"}))
    assert plugin["answer"] == "False"


def test_tables_are_verified() -> None:
    """A table whose verdict agrees with the text counts twice; one that does not is a signal."""
    weighted = {"name": MOT, "vote": "weighted", "early": False}
    engine = says(natural="B", code="x y", table=TABLE + "<answer>(A)")
    plugin = told(engine.chat("q", steer=weighted))
    assert plugin["scores"] == {"False": 1.0, "True": 2.0}
    assert plugin["requests"][2]["verified"] is True
    wrong_row = TABLE.replace("| T | T |", "| T | T |\n| F | T |") + "<answer>(A)"
    assert told(says(natural="B", code="x y", table=wrong_row).chat("q", steer=weighted))["scores"] == {
        "False": 1,
        "True": 1,
    }
    off = {**weighted, "verify": False}
    assert told(says(natural="B", code="x y", table=TABLE + "<answer>(A)").chat("q", steer=off))["scores"]["True"] == 1


@pytest.mark.parametrize(("policy", "answer"), [("text", "False"), ("verified", "True"), ("abstain", None)])
def test_disagreement(policy: str, answer: str | None) -> None:
    engine = says(table=TABLE + "<answer>(B)")
    plugin = told(engine.chat("q", steer={"name": MOT, "modalities": ["table"], "disagreement": policy}))
    assert plugin["answer"] == answer
    assert plugin["requests"][0]["verified"] is False
    assert plugin["requests"][0]["check"]["answer"] == "True"


@pytest.mark.parametrize(
    ("printed", "check", "verified"),
    [
        ("x\nFalse\n", "False", True),
        ("B", "False", True),
        ("True", "True", False),
        ("None", "Uncertain", False),
        ("7", None, False),
    ],
)
def test_programs_are_compared(monkeypatch: pytest.MonkeyPatch, printed: str, check: str | None, verified: bool) -> None:
    prints(monkeypatch, printed)
    (request,) = told(says(code=CODE).chat("q", steer={"name": MOT, "modalities": ["code"]}))["requests"]
    assert request["check"]["answer"] == check
    assert request["verified"] is verified
    assert request["answer"] == "False"


def test_without_a_sandbox_the_text_counts_and_it_is_said() -> None:
    (request,) = told(says(code=CODE).chat("q", steer={"name": MOT, "modalities": ["code"]}))["requests"]
    assert request["answer"] == "False"
    assert request["check"]["reason"] == "no_sandbox"


def test_free_answers_are_grouped() -> None:
    engine = says(natural=["The answer is 0.5", "\\boxed{7}"], code=["The answer is 1/2.", "\\boxed{\\frac{14}{2}}"])
    engine.answer = _tagged(["0.5", "7", "\\frac12", "0.50"])
    response = engine.chat("How much?", steer={"name": MOT, "answers": "free", "n": 2, "early": False})
    plugin = told(response)
    assert plugin["answer"] == "0.5"
    assert plugin["scores"] == {"0.5": 3.0, "7": 1.0}
    assert response.text.endswith("The final answer is \\boxed{0.5}.")


def _tagged(texts: list[str]) -> Callable[[Request], str]:
    left = list(texts)
    return lambda request: f"<answer>\\boxed{{{left.pop(0)}}}"


def test_choice() -> None:
    engine = says(natural="C", code="C")
    response = engine.chat("Who?\n(A) Ana\n(B) Bo\n(C) Cem", steer={"name": MOT, "answers": "choice", "reply": "answer"})
    assert response.text == "The final answer is \\boxed{C}."
    with pytest.raises(SteerError, match="options"):
        engine.chat("Who?", steer={"name": MOT, "answers": "choice"})


# -- early decision ----------------------------------------------------------------------------------------------------


def test_the_third_is_not_awaited() -> None:
    engine = says(natural="A", code="A", table="B")
    plugin = told(engine.chat("q", steer=MOT))
    assert engine.aborted == plugin["aborted"] == 1
    assert plugin["requests"][2] == {
        "modality": "table",
        "finish": "abort",
        "tokens": 1,
        "answer": None,
        "reason": "aborted",
    }
    engine = says(natural="A", code="A", table="B")
    assert told(engine.chat("q", steer={"name": MOT, "early": False}))["aborted"] == 0


@pytest.mark.parametrize("vote", ["majority", "weighted", "verified"])
@pytest.mark.parametrize("ties", ["priority", "random", "alphabetical"])
def test_answers_are_the_same_with_and_without(vote: str, ties: str) -> None:
    rng = random.Random(f"{vote}{ties}")
    saved = 0
    for _ in range(40):
        said = {m: [_random_text(rng, m) for _ in range(2)] for m in ("natural", "code", "table")}
        params = {"name": MOT, "vote": vote, "ties": ties, "n": 2, "settings": {"natural": {"weight": 1.5}}}
        early, full = says(**said), says(**said)
        question = f"q{rng.random()}"
        one = told(early.chat(question, steer=params))
        other = told(full.chat(question, steer={**params, "early": False}))
        assert one["answer"] == other["answer"]
        saved += early.aborted
    assert saved > 0 or vote == "verified"  # the tables come last, and each may be the one that counts


def _random_text(rng: random.Random, name: str) -> str:
    letter = rng.choice("AAABBC?")
    answer = "" if letter == "?" else f"<answer>({letter})"
    return (TABLE if name == "table" else "...") + answer


def test_giving_a_question_up() -> None:
    engine = says(natural="A", code="x y", table="A")
    ask = Request(messages=[{"role": "user", "content": "q"}], steer=MOT)
    with engine.submit([ask, ask]) as stream:
        stream.abort(1)
        finished = dict(stream)
    assert finished[0].finish == "stop"
    assert finished[1].finish == "abort"
    with engine.submit([ask]) as stream:
        pass
    assert list(stream) == []


# -- where it cannot run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 0}, ("n", "0", "1")),
        ({"n": 10**6}, ("n", "1000000", "64")),
        ({"n": 22}, ("n", "64")),
        ({"modalities": ["verse"]}, ("modalities", "verse", "natural")),
        ({"modalities": ["code", "code"]}, ("modalities", "once")),
        ({"settings": {"prose": {}}}, ("settings", "prose")),
        ({"settings": "{"}, ("settings", "JSON")),
        ({"answers": "free", "modalities": ["table"]}, ("modalities", "free")),
        ({"preset": "reference", "answers": "free"}, ("answers", "reference")),
        ({"prompts": "/nowhere"}, ("prompts", "/nowhere")),
        ({"wieght": 1}, ("wieght",)),
    ],
)
def test_bad_parameters(params: dict[str, Any], words: tuple[str, ...]) -> None:
    engine = says(natural="A", code="A", table="A")
    with pytest.raises(SteerError) as error:
        engine.chat("q", steer={"name": MOT, **params})
    for word in words:
        assert word in str(error.value)
    assert engine.asked == []


def test_bad_questions() -> None:
    engine = says(natural="A")
    ask = {"name": MOT, "modalities": ["natural"]}
    for messages in ([{"role": "user", "content": ""}], [{"role": "assistant", "content": "x"}],
                     [{"role": "user", "content": [{"type": "image_url"}]}]):  # fmt: skip
        assert "messages" in (engine.run([Request(messages=messages, steer=ask)])[0].error or "")
    assert engine.run([Request(prompt="x", steer=ask)])[0].error
    assert engine.run([Request(messages=[{"role": "user", "content": "x"}], steer=[MOT, {"name": MOT}])])[0].error
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
    assert engine.run([Request(messages=parts, steer=ask)])[0].error is None  # type: ignore[arg-type]
    assert "x\ny" in engine.asked[-1].messages[-1]["content"]  # type: ignore[index]


def test_generate_names_the_call_that_does_it(tiny_model: Any, tiny_tokenizer: Any) -> None:
    model = tiny_model()
    with pytest.raises((SteerError, UnsupportedError), match=r"Engine\.from_hf") as error:
        steer(model, MOT, tokenizer=tiny_tokenizer)
    assert "vllm_xargs" in str(error.value)
    assert not hasattr(model, "steering")
    with pytest.raises(SteerError, match="chat/completions"):
        spec.resolve(spec.parse(MOT), None)


def test_through_hugging_face(tiny_model: Any, tiny_tokenizer: Any) -> None:
    """A random model answers nothing: every response comes, none can be read, the long question is refused."""
    engine = Engine.from_hf(tiny_model(), tiny_tokenizer)
    response = engine.chat("so the w7", steer={"name": MOT, "execute": False}, max_tokens=4, temperature=0)
    assert told(response)["answer"] is None
    assert response.tokens == 12
    with pytest.raises(SteerError, match="1024"):
        engine.chat("x " * 50_000, steer=MOT, max_tokens=4)
    traced = engine.run(
        [
            Request(
                messages=[{"role": "user", "content": "q"}],
                sampling=Sampling(max_tokens=3, temperature=0),
                steer=[{"name": MOT, "modalities": ["natural"]}, "reflection_cycle"],
                trace=True,
            )
        ]
    )[0]
    assert told(traced)["requests"][0]["steering"]["plugins"][0]["name"] == "reflection_cycle"
