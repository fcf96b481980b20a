"""Inspect AI on our engines."""

from __future__ import annotations

import asyncio

import pytest

from llm_steer import SteerError
from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine

inspect_ai = pytest.importorskip("inspect_ai", reason="needs inspect-ai, which is not among the test dependencies")


def answer(request):
    question = request.messages[-1]["content"]
    if question == "broken":
        return Response(error="too long", finish="error")
    return Response(text=f"Wait, 5\n\n</think>\n\n{len(question)}", tokens=9, prompt_tokens=4, steering={"tokens": 9})


@pytest.fixture
def engine(monkeypatch):
    from llm_steer.eval import inspect_provider

    engine = FakeEngine(answer)
    engine.opened = []

    def open_engine(config, methods):
        engine.opened.append((config, methods))
        return engine, None

    monkeypatch.setattr(inspect_provider, "open_engine", open_engine)
    return engine


def evaluate(tmp_path, *questions, **options):
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    task = inspect_ai.Task([Sample(q, target=str(len(q))) for q in questions], solver=generate(), scorer=match())
    (log,) = inspect_ai.eval(task, log_dir=str(tmp_path), display="none", fail_on_error=False, retry_on_error=0, **options)
    return log


def test_a_task(engine, tmp_path):
    arguments = {"steer": "reflection_cycle:amplitude=2,period=60", "batch_size": 4, "revision": "main"}
    log = evaluate(
        tmp_path, "one", "three", model="llm-steer/some/model", model_args=arguments, temperature=0.5, seed=3, max_tokens=7
    )
    assert log.results.scores[0].metrics["accuracy"].value == 1
    ((config, (method,)),) = engine.opened  # once, however often Inspect makes a provider
    assert (config.model, config.engine, config.batch_size, config.engine_args) == (
        "some/model", "hf", 4, {"revision": "main"}
    )  # fmt: skip
    assert len(engine.asked) == 2
    for request in engine.asked:
        assert request.steer == method.steer == {"name": "reflection_cycle", "amplitude": 2, "period": 60}
        assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.5, 3, 7)
    output = log.samples[0].output
    assert output.completion == "3"  # not what was thought
    assert output.message.content[0].reasoning == "Wait, 5\n\n"
    assert output.metadata == {"steering": {"tokens": 9}}
    assert (output.usage.input_tokens, output.usage.output_tokens) == (4, 9)


def test_one_that_fails_fails_alone(engine, tmp_path):
    log = evaluate(tmp_path, "broken", "fine", model="llm-steer/m")
    failed, fine = log.samples
    assert "too long" in failed.error.message
    assert fine.error is None


def test_what_cannot_be_kept_is_refused(engine):
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import ToolInfo

    model = get_model("llm-steer/m", memoize=False).api
    asked = [ChatMessageUser(content="x")]
    for tools, config, field in (
        ([ToolInfo(name="search", description="")], GenerateConfig(), "tools"),
        ([], GenerateConfig(num_choices=2), "num_choices"),
        ([], GenerateConfig(frequency_penalty=0.1), "frequency_penalty"),
        ([], GenerateConfig(logprobs=True), "logprobs"),
    ):
        with pytest.raises(SteerError, match=field):
            asyncio.run(model.generate(asked, tools, "auto", config))
    asyncio.run(model.generate(asked, [], "auto", GenerateConfig(num_choices=1, frequency_penalty=0.0, logprobs=False)))
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("arguments", "field"), [({"steer": "none,tip"}, "steer"), ({"steer": "s1"}, "steer"), ({"engine": "url"}, "engine")]
)
def test_bad_arguments(engine, arguments, field):
    from inspect_ai.model import get_model

    with pytest.raises(SteerError, match=field):
        get_model("llm-steer/m", memoize=False, **arguments)


def test_an_engine_that_breaks_answers_every_waiting_request():
    from llm_steer.eval.inspect_provider import Together

    from llm_steer.engines.base import Request

    def breaks(request):
        raise ConnectionError("gone")

    async def ask():
        together = Together(FakeEngine(breaks))
        return await asyncio.gather(*(together.ask(Request(prompt="x")) for _ in range(3)), return_exceptions=True)

    found = asyncio.run(ask())
    assert [str(error) for error in found] == ["gone"] * 3
