"""The HTTP engine against a server that answers as told."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engines.fake_server import FakeServer, echo, serving, slow
from llm_steer import SteerError, UnsupportedError
from llm_steer.engines import http
from llm_steer.engines.base import Engine, Request, Sampling

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF", 0.01)


@pytest.fixture
def serve() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(serving(FakeServer(*args, **kwargs)))


def questions(count: int, **options: Any) -> list[Request]:
    return [Request(messages=[{"role": "user", "content": f"q{i}"}], **options) for i in range(count)]


def test_what_is_sent_to_vllm(serve: Any) -> None:
    server = serve()
    steer = [{"name": "reflection_cycle", "amplitude": 5.0}, "rebalance"]
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, seed=3, stop=("x",), ignore_eos=True)
    message = {"role": "user", "content": "hi"}
    engine = Engine.from_url(server.url, api_key=KEY)
    chat, prompt = engine.run(
        [
            Request(messages=[message], sampling=sampling, steer=steer, trace=True, template={"enable_thinking": False}),
            Request(prompt=[1, 2], sampling=Sampling(max_tokens=2)),
        ]
    )
    sent = {"messages" in body: body for body in server.bodies}
    assert sent[True] == {
        "model": "fake", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "stop": ["x"],
        "ignore_eos": True, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": False}, "messages": [message],
        "vllm_xargs": {"steer": json.dumps(steer), "steer_trace": 1},
    }  # fmt: skip
    assert sent[False]["prompt"] == [1, 2]
    assert "vllm_xargs" not in sent[False]
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert (chat.text, chat.prompt_tokens, chat.tokens, chat.logprob) == ("echo hi", 7, 2, -1.0)
    assert chat.steering == {"plugins": [{"name": json.dumps(steer)}]}
    assert prompt.text == "echo [1, 2]"

    (silent,) = engine.run(questions(1, logprob=False))
    assert "logprobs" not in server.bodies[-1]
    assert silent.logprob is None


def test_what_is_sent_to_others(serve: Any) -> None:
    server = serve(owner="someone", steers=False)
    engine = Engine.from_url(server.url.removesuffix("/v1"))
    plain, off, steered = engine.run(
        [*questions(1), *questions(1, steer="off"), *questions(1, steer={"name": "reflection_cycle"})]
    )
    assert plain.error is None
    assert off.error is None
    assert "answered unsteered" in (steered.error or "")
    for body in server.bodies:
        assert set(body) == {"model", "messages", "max_tokens", "temperature", "top_p"}
    assert plain.logprob is None
    assert engine.identity()["model"] == "fake"


def test_identity_has_no_address_and_no_key(serve: Any) -> None:
    server = serve()
    identity = Engine.from_url(server.url, api_key=KEY).identity()
    assert identity == {
        "engine": "http", "model": "fake", "root": "folder/fake", "max_model_len": 99, "vllm": "0.0.1",
        "steering": [["reflection_cycle", {}]],
    }  # fmt: skip


def test_errors_stay_with_their_request_and_hide_the_key(serve: Any) -> None:
    def answer(body: dict[str, Any]) -> Any:
        text = body["messages"][0]["content"]
        return (400, f"steer_amplitude: bad, {KEY}") if text == "q1" else (500, "boom") if text == "q2" else echo(body)

    responses = Engine.from_url(serve(answer).url, api_key=KEY).run(questions(4))
    assert [r.finish for r in responses] == ["stop", "error", "error", "stop"]
    assert "steer_amplitude: bad" in (responses[1].error or "")
    assert KEY not in (responses[1].error or "")
    assert "500" in (responses[2].error or "")


def test_a_busy_server_is_asked_again(serve: Any) -> None:
    seen: set[str] = set()

    def answer(body: dict[str, Any]) -> Any:
        text = body["messages"][0]["content"]
        first = text not in seen
        seen.add(text)
        return (503, "busy") if first else echo(body)

    server = serve(answer)
    assert [r.text for r in Engine.from_url(server.url).run(questions(5))] == [f"echo q{i}" for i in range(5)]
    assert len(server.bodies) == 10


def test_the_work_of_a_dead_server_is_redone(serve: Any) -> None:
    """It drops connections after its third answer."""
    count = 0
    lock = threading.Lock()

    def dying(body: dict[str, Any]) -> Any:
        nonlocal count
        with lock:
            count += 1
            return echo(body) if count <= 3 else None

    bad, good = serve(dying), serve(slow(0.01))
    responses = Engine.from_url([bad.url, good.url], parallel=2).run(questions(30))
    assert [r.text for r in responses] == [f"echo q{i}" for i in range(30)]
    assert len(good.bodies) == 27


@pytest.mark.parametrize(
    ("options", "what"),
    [({"root": "folder/other"}, "root is folder/other there"), ({"steers": False}, "can steer is False")],
)
def test_servers_that_differ_are_refused(serve: Any, options: Any, what: str) -> None:
    urls = [serve().url, serve(**options).url]
    with pytest.raises(SteerError, match=f"servers that are alike: {what}"):
        Engine.from_url(urls).run(questions(4))


@pytest.mark.parametrize("status", [401, 403, 429, 502, 503, 504])
def test_the_work_of_a_server_that_refuses_is_done_by_another(serve: Any, caplog: Any, status: int) -> None:
    bad, good = serve(lambda body: (status, f"no, {KEY}")), serve(slow(0.01))
    engine = Engine.from_url([bad.url, good.url], api_key=KEY, parallel=2)
    assert [r.text for r in engine.run(questions(20))] == [f"echo q{i}" for i in range(20)]
    (told,) = engine.dropped()
    assert re.fullmatch(rf"{bad.url.removesuffix('/v1')}: status {status}; others redid [12] of its requests", told)
    assert [record.getMessage() for record in caplog.records] == [
        f"{bad.url.removesuffix('/v1')}: status {status}: this server is asked no more"
    ]


def test_a_server_that_is_away_from_the_start_is_told(serve: Any, caplog: Any) -> None:
    engine = Engine.from_url(["http://me:secret@127.0.0.1:1", serve().url])
    assert engine.dropped() == []
    assert [r.text for r in engine.run(questions(3))] == [f"echo q{i}" for i in range(3)]
    (told,) = engine.dropped()
    assert told.startswith("http://127.0.0.1:1: ")
    assert told.endswith("; others redid 0 of its requests")
    assert "secret" not in told + caplog.text


def test_the_last_server_s_refusals_are_told(serve: Any) -> None:
    responses = Engine.from_url([serve(lambda body: (401, "bad key")).url for _ in range(2)]).run(questions(3))
    assert all("401" in (r.error or "") for r in responses)


def test_all_servers_dead(serve: Any) -> None:
    servers = [serve(lambda body: None) for _ in range(2)]
    responses = Engine.from_url([s.url for s in servers], api_key=KEY).run(questions(3))
    assert all(r.finish == "error" and "server" in (r.error or "") for r in responses)


def test_nobody_is_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UnsupportedError, match="no server answers"):
            Engine.from_url(url, api_key=KEY).run(questions(1))


def test_no_more_than_parallel(serve: Any) -> None:
    three = threading.Barrier(3, timeout=30)  # none is answered before there are three

    def answer(body: dict[str, Any]) -> str:
        three.wait()
        return echo(body)

    server = serve(answer)
    assert [r.error for r in Engine.from_url(server.url, parallel=3).run(questions(12))] == [None] * 12
    assert server.most_busy == 3


def test_abort(serve: Any) -> None:
    """Of one that runs and of one that waits; what runs besides goes on."""
    release = threading.Event()

    def answer(body: dict[str, Any]) -> str:
        if body["messages"][0]["content"] == "q0":
            release.wait(10)
        return echo(body)

    server = serve(answer)
    with Engine.from_url(server.url, parallel=1).submit(questions(3)) as stream:
        stream.abort(0)
        stream.abort(2)
        finished = dict(stream)
        release.set()
    assert {i: r.finish for i, r in finished.items()} == {0: "abort", 1: "stop", 2: "abort"}
    assert finished[1].text == "echo q1"


def test_leaving_the_block_ends_everything(serve: Any) -> None:
    release = threading.Event()
    server = serve(lambda body: release.wait(10) and echo(body))
    with Engine.from_url(server.url).submit(questions(3)) as stream:
        pass
    assert list(stream) == []
    release.set()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "messages"),
        (Request(messages=[]), "messages"),
        (Request(messages=[{"role": "user"}]), "messages"),
        (Request(prompt=""), "prompt"),
        (Request(prompt="x", messages=[{"role": "user", "content": "x"}]), "messages"),
        (Request(messages=[{"role": "user", "content": "x"}], continues=True), "messages"),
        (Request(prompt="x", sampling=Sampling(max_tokens=0)), "max_tokens"),
        (Request(prompt="x", sampling=Sampling(temperature=float("nan"))), "temperature"),
        (Request(prompt="x", sampling=Sampling(temperature=-1)), "temperature"),
        (Request(prompt="x", sampling=Sampling(top_p=0)), "top_p"),
        (Request(prompt="x", sampling=Sampling(top_k=-1)), "top_k"),
        (Request(prompt="x", sampling=Sampling(seed=True)), "seed"),
        (Request(prompt="x", sampling=Sampling(stop=("",))), "stop"),
    ],
)
def test_bad_requests(request_: Request, field: str) -> None:
    with pytest.raises(SteerError) as error:
        Engine.from_url("http://127.0.0.1:9").submit([request_])
    assert error.value.field.endswith(field)


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: (400, "no luck"),
        lambda body: (404, "no luck"),
        lambda body: (500, "no luck"),
        lambda body: {"choices": []},
        lambda body: {"choices": [{"index": 0, "message": {"role": "assistant", "content": None}}]},
        lambda body: {"choices": [{"index": 0}]},
        lambda body: {"choices": ["no luck"]},
        lambda body: ["no luck"],
        lambda body: b"<html>no luck",
    ],
)
def test_a_server_that_fails_what_others_answer_eats_nothing(serve: Any, answer: Any) -> None:
    bad, good = serve(answer), serve(slow(0.005))
    engine = Engine.from_url([bad.url, good.url], parallel=2)
    assert [r.text for r in engine.run(questions(20))] == [f"echo q{i}" for i in range(20)]
    (told,) = engine.dropped()
    assert "it failed 3 requests that others answered" in told
    asked = len(bad.bodies)
    assert [r.error for r in engine.run(questions(5))] == [None] * 5
    assert len(bad.bodies) == asked  # "asked no more" holds for what is submitted later


def test_what_every_server_refuses_is_refused(serve: Any) -> None:
    """And costs none of them its place."""

    def answer(body: dict[str, Any]) -> Any:
        return (400, "too long") if body["messages"][0]["content"] in {f"q{i}" for i in range(10)} else echo(body)

    servers = [serve(answer), serve(answer)]
    engine = Engine.from_url([server.url for server in servers], parallel=2)
    responses = engine.run(questions(20))
    assert [r.error for r in responses] == ["status 400: too long"] * 10 + [None] * 10
    assert engine.dropped() == []
    asked = [body["messages"][0]["content"] for server in servers for body in server.bodies]
    assert all(asked.count(f"q{i}") == (2 if i < 10 else 1) for i in range(20))


def test_a_server_that_hangs_is_left(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SILENCE", 0.4)
    hung = threading.Event()
    bad, good = serve(lambda body: hung.wait(60) and echo(body)), serve(slow(0.01))
    engine = Engine.from_url([bad.url, good.url], parallel=3)
    assert [r.text for r in engine.run(questions(30))] == [f"echo q{i}" for i in range(30)]
    (told,) = engine.dropped()
    assert told.endswith("no answer in 0 s, in which others answered; others redid 3 of its requests")
    hung.set()


def test_a_slow_server_is_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the longest answer: slow is not dead."""
    monkeypatch.setattr(http, "SILENCE", 0.02)
    engine = Engine.from_url([serve(slow(0.3)).url, serve(slow(0.2)).url], parallel=1)
    assert [r.text for r in engine.run(questions(8))] == [f"echo q{i}" for i in range(8)]
    assert engine.dropped() == []


def test_an_answer_has_its_time(serve: Any) -> None:
    hung = threading.Event()

    def answer(body: dict[str, Any]) -> Any:
        return hung.wait(60) and echo(body) if body["messages"][0]["content"] == "q1" else echo(body)

    responses = Engine.from_url(serve(answer).url, timeout=0.3).run(questions(3))
    assert [r.error for r in responses] == [None, "no answer in 0.3 s", None]
    bad, good = serve(lambda body: hung.wait(60) and echo(body)), serve(slow(0.05))
    engine = Engine.from_url([bad.url, good.url], timeout=0.3)
    assert [r.error for r in engine.run(questions(9))] == [None] * 9
    assert "no answer in 0.3 s" in engine.dropped()[0]
    hung.set()


def test_a_server_without_the_model_is_refused(serve: Any) -> None:
    first, other = serve(), serve()
    with pytest.raises(SteerError, match=f"model: got 'other'; must be one of fake, which {first.url[:-3]} has"):
        Engine.from_url([first.url, other.url], "other").run(questions(1))


def test_bad_urls() -> None:
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(SteerError, match="timeout"):
            Engine.from_url("http://a:1", timeout=timeout)
    for twice in (["http://a:1", "http://a:1/v1/"], ["http://a:1/", "http://b:1", "http://a:1"]):
        with pytest.raises(SteerError, match="given once"):
            Engine.from_url(twice)
    for urls in ([], ["localhost:8000"], "file:///etc/passwd"):
        with pytest.raises(SteerError, match="urls"):
            Engine.from_url(urls)
