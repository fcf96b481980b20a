"""Votes inside the HTTP middleware, around a fake application."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_steer.plugins.mixture_of_thought import MixtureOfThought
from llm_steer.plugins.mixture_of_thought.modalities import TAGS

from hosts.vllm.test_server import application, front_end
from llm_steer import SteerError, sandbox
from llm_steer.hosts.vllm import compat, server, voting
from llm_steer.sandbox import limits as limits_module

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Is it wet?"}], "max_tokens": 50}
MOT = {"steer": "mixture_of_thought"}
MODALITY_OF = {tag: modality for modality, tag in TAGS.items()}


@pytest.fixture(autouse=True)
def _registered(register: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    register(MixtureOfThought)
    monkeypatch.setattr(compat, "refusals", lambda config: [])
    monkeypatch.setattr(sandbox, "available", lambda: False)


class FakeApp:
    """Answers a chat request as told; one that waits is given up when its client leaves."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.given_up = 0
        self.counted: list[Any] = []
        self.room = 1024
        """What was asked how many tokens it has."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message["body"])
        headers = dict(scope["headers"])
        assert int(headers[b"content-length"]) == len(message["body"])
        if scope["path"] == "/tokenize":
            self.counted.append(body["messages"])
            data = json.dumps({"count": 24 + len(self.counted), "max_model_len": self.room}).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": data})
            return
        self.bodies.append(body)
        self.headers.append(headers)
        said = self.answers.get(MODALITY_OF.get(body["messages"][-1]["content"].rsplit("\n", 1)[-1], "plain"), "A")
        if body.get("stream") and not isinstance(said, tuple):
            await self.stream(said, receive, send)
            return
        if said == "wait":
            assert (await receive())["type"] == "http.disconnect"
            self.given_up += 1
            return
        status, content = 200, self.whole(f"...<answer>({said})")
        if isinstance(said, tuple):
            status, content = said[0], {"error": {"message": said[1], "code": said[0]}}
        data = json.dumps(content).encode()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": data[:9], "more_body": True})
        await send({"type": "http.response.body", "body": data[9:]})

    async def stream(self, said: str, receive: Any, send: Any) -> None:
        """As vLLM does with usage in every event, in parts that end anywhere."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})

        async def event(content: str | None, finish: str | None, tokens: int) -> None:
            choices = [] if content is None else [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]
            usage = {"prompt_tokens": 9, "completion_tokens": tokens}
            data = b"data: " + json.dumps({"model": "full-name", "choices": choices, "usage": usage}).encode() + b"\n\n"
            for part in (data[:20], data[20:]):
                await send({"type": "http.response.body", "body": part, "more_body": True})

        await event("", None, 0)
        await event("...", None, 1)
        if said == "wait":
            await event("Let me", None, 3)
            assert (await receive())["type"] == "http.disconnect"
            self.given_up += 1
            return
        await event(f"<answer>({said})", "stop", 4)
        await event(None, None, 4)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def whole(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {"model": "full-name", "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}


def post(app: FakeApp, body: Any, *, path: str = PATH, leaves: bool = False, headers: Any = ()) -> tuple[int, bytes]:
    """Status and body. ``leaves``: the client goes away at once."""
    sent: list[Any] = []
    data = json.dumps(body).encode()
    parts = [{"type": "http.request", "body": data}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent_along = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": sent_along, "state": {"x": 1}}
    scope["app"] = application(front_end())
    asyncio.run(asyncio.wait_for(server.SteerMiddleware(app)(scope, receive, send), 20))
    if not sent:
        return 0, b""
    assert sent[0]["type"] == "http.response.start"
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def ask(app: FakeApp, xargs: Any = MOT, **changes: Any) -> tuple[int, Any]:
    status, body = post(app, {**BODY, "vllm_xargs": xargs, **changes})
    return status, json.loads(body)


def test_one_completion() -> None:
    app = FakeApp(natural="A", code="B", table="A")
    status, answer = ask(app, {**MOT, "steer_early": 0}, temperature=0.3, priority=2, chat_template_kwargs={"x": 1})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "full-name"
    assert answer["usage"] == {"prompt_tokens": 27, "completion_tokens": 12, "total_tokens": 39}
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "...<answer>(A)\n\nThe final answer is \\boxed{True}."}
    assert choice["finish_reason"] == "stop"
    (plugin,) = choice["steering"]["plugins"]
    assert (plugin["name"], plugin["answer"], plugin["scores"]) == (
        "mixture_of_thought",
        "True",
        {"True": 2.0, "False": 1.0},
    )
    assert len(app.bodies) == 3
    for body in app.bodies:
        assert body["vllm_xargs"] == {"steer": "off"}
        assert {k: body[k] for k in ("model", "temperature", "priority", "max_tokens")} == {
            "model": "m", "temperature": 0.3, "priority": 2, "max_tokens": 50,
        }  # fmt: skip
        assert body["stop"] == ["<end_of_answer>"]


def test_other_plugins_and_keys_go_along() -> None:
    app = FakeApp()
    wave = {"name": "reflection_cycle", "amplitude": 5}
    steer = json.dumps([{"name": "mixture_of_thought", "modalities": ["natural"]}, wave])
    status, _ = ask(app, {"steer": steer, "other": 3})
    assert status == 200
    (body,) = app.bodies
    assert json.loads(body["vllm_xargs"].pop("steer")) == [wave]
    assert body["vllm_xargs"] == {"other": 3}


def test_flat_parameters() -> None:
    app = FakeApp()
    settings = json.dumps({"code": {"n": 2, "temperature": 1.0}})
    status, _ = ask(app, {**MOT, "steer_modalities": ["natural", "code"], "steer_settings": settings, "steer_early": 0})
    assert status == 200
    assert sorted(body.get("temperature", 0) for body in app.bodies) == [0, 1.0, 1.0]


def test_ids_do_not_clash() -> None:
    app = FakeApp()
    body = {**BODY, "vllm_xargs": {**MOT, "steer_early": 0}, "request_id": "mine"}
    post(app, body, headers=[(b"x-request-id", b"theirs"), (b"authorization", b"Bearer k")])
    assert sorted(body["request_id"] for body in app.bodies) == ["mine-0", "mine-1", "mine-2"]
    assert sorted(h[b"x-request-id"] for h in app.headers) == [b"theirs-0", b"theirs-1", b"theirs-2"]
    assert {h[b"authorization"] for h in app.headers} == {b"Bearer k"}


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_stream() -> None:
    app = FakeApp(natural="A", code="B", table="A")
    xargs = {**MOT, "steer_early": 0}
    body = {**BODY, "vllm_xargs": xargs, "stream": True, "stream_options": {"include_usage": True}}
    status, text = post(app, body)
    assert status == 200
    *found, done = events(text)
    assert done == "[DONE]"
    assert {e["object"] for e in found} == {"chat.completion.chunk"}
    assert len({e["id"] for e in found}) == 1
    progress = [e["steering"]["progress"] for e in found if e["choices"] and "steering" in e]
    assert [p["read"] for p in progress] == [1, 2, 3]
    assert {(p["modality"], p["answer"]) for p in progress} == {("natural", "True"), ("code", "False"), ("table", "True")}
    deltas = [e["choices"][0] for e in found if e["choices"]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(d["delta"].get("content", "") for d in deltas) == "...<answer>(A)\n\nThe final answer is \\boxed{True}."
    assert [d["finish_reason"] for d in deltas] == [None] * 4 + ["stop"]
    usage, steering = found[-2:]
    assert usage["usage"]["total_tokens"] == 39
    assert steering["choices"] == []
    assert steering["steering"][0]["index"] == 0
    assert steering["steering"][0]["plugins"][0]["answer"] == "True"


def test_the_third_is_given_up() -> None:
    app = FakeApp(natural="A", code="A", table="wait")
    status, answer = ask(app)
    assert status == 200
    assert app.given_up == 1
    (plugin,) = answer["choices"][0]["steering"]["plugins"]
    assert plugin["aborted"] == 1
    assert [request["tokens"] for request in plugin["requests"]] == [4, 4, 3]  # what it had by then is counted
    assert answer["usage"] == {"prompt_tokens": 27, "completion_tokens": 11, "total_tokens": 38}


def test_one_request_is_not_streamed() -> None:
    app = FakeApp(natural="A")
    status, answer = ask(app, {**MOT, "steer_modalities": ["natural"]})
    assert (status, answer["usage"]["total_tokens"]) == (200, 13)
    assert "stream" not in app.bodies[0]


def test_a_long_question_arrives_whole() -> None:
    question = "{x} <answer>(A) \\boxed{ " * 4000
    app = FakeApp(natural="A", code="A", table="A")
    assert ask(app, messages=[{"role": "user", "content": question}])[0] == 200
    assert all(question.strip() in body["messages"][-1]["content"] for body in app.bodies)
    for hostile in ("\n" * 100_000 + "x", "(A) " * 25_000, "(A)" + " " * 100_000 + "x", "A) x\n" * 20_000):
        status, answer = ask(app, {**MOT, "steer_answers": "choice"}, messages=[{"role": "user", "content": hostile}])
        assert status == 400
        assert "options" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_everything(stream: bool) -> None:
    app = FakeApp(natural="wait", code="wait", table="wait")
    status, _ = post(app, {**BODY, "vllm_xargs": MOT, "stream": stream}, leaves=True)
    assert status == 0
    assert len(app.bodies) in (0, 3)  # it left before they began, or they were given up


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_server_refuses_is_passed_on(stream: bool) -> None:
    refused = (404, "no such model")
    status, answer = ask(FakeApp(natural=refused, code=refused, table=refused), stream=stream)
    assert status == 404
    assert answer["error"]["message"] == "no such model"


def test_one_that_fails_abstains() -> None:
    status, answer = ask(FakeApp(natural=(500, "boom"), code="B", table="x"))
    assert status == 200
    assert answer["choices"][0]["steering"]["plugins"][0]["answer"] == "False"


BAD: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({}, {"n": 2}, ("n", "2", "left out")),
    ({}, {"tools": [{"type": "function"}]}, ("tools", "left out")),
    ({}, {"response_format": {"type": "json_object"}}, ("response_format",)),
    ({}, {"logprobs": True}, ("logprobs",)),
    ({}, {"top_logprobs": 3}, ("top_logprobs",)),
    ({}, {"structured_outputs": {"choice": ["a"]}}, ("structured_outputs",)),
    ({}, {"use_beam_search": True}, ("use_beam_search",)),
    ({}, {"continue_final_message": True}, ("continue_final_message",)),
    ({}, {"messages": []}, ("messages",)),
    ({}, {"messages": "hi"}, ("messages",)),
    ({}, {"messages": [{"role": "user", "content": "  "}]}, ("messages",)),
    ({}, {"messages": [{"role": "assistant", "content": "x"}]}, ("messages",)),
    ({}, {"max_tokens": 10**6}, ("max_tokens", "65536", "3000000")),
    ({}, {"max_tokens": -1}, ("max_tokens",)),
    ({}, {"max_tokens": "many"}, ("max_tokens",)),
    ({}, {"max_tokens": True}, ("max_tokens",)),
    ({}, {"max_completion_tokens": 0}, ("max_completion_tokens", "0")),
    ({}, {"messages": ["hi"]}, ("messages[0]", "hi", "mapping")),
    ({}, {"messages": [None]}, ("messages[0]", "mapping")),
    ({}, {"messages": [{"content": "x"}]}, ("messages[0]", "role")),
    ({}, {"messages": [{"role": "user", "content": 5}]}, ("messages",)),
    ({}, {"stop": 5}, ("stop", "5", "text")),
    ({}, {"stop": {"a": 1}}, ("stop", "text")),
    ({}, {"stop": [""]}, ("stop", "empty")),
    ({}, {"stop": [1]}, ("stop",)),
    ({}, {"seed": "abc"}, ("seed", "abc", "whole number")),
    ({}, {"seed": 2**63}, ("seed", "9223372036854775807")),
    ({"steer_settings": '{"natural": {"steer": "nope"}}'}, {}, ("steer", "nope")),
    ({"steer_settings": '{"code": {"steer": {"name": "reflection_cycle", "amplitud": 1}}}'}, {}, ("amplitud",)),
    ({"steer_settings": '{"code": {"steer": {"name": "reflection_cycle", "words": ["no one token"]}}}'}, {}, ("words",)),
    ({"steer_n": 64}, {}, ("steer_n", "64")),
    ({"steer_n": 10**6}, {}, ("steer_n", "1000000", "64")),
    ({"steer_n": 0}, {}, ("steer_n", "0")),
    ({"steer_n": 20}, {"max_tokens": 2000}, ("max_tokens", "120000")),
    ({"steer_modalities": ["verse"]}, {}, ("steer_modalities", "verse")),
    ({"steer_prompts": "/etc"}, {}, ("steer_prompts", "/etc", "clients")),
    ({"steer_trace": 2}, {}, ("steer_trace", "2")),
    ({"steer_settings": "{"}, {}, ("steer_settings", "JSON")),
    ({"Steer_n": 2}, {}, ("Steer_n",)),
    ({"steer_settings": '{"code": {"steer": "mixture_of_thought"}}'}, {}, ("steer", "do not vote")),
    ({"steer": '["mixture_of_thought", "reflection_cycle"]', "steer_n": 2}, {}, ("steer_n", "inside a mapping")),
    ({"steer": '["mixture_of_thought", {"name": "mixture_of_thought"}]'}, {}, ("steer[1]", "only plugin")),
]


@pytest.mark.parametrize(("xargs", "body", "words"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(xargs: dict[str, Any], body: dict[str, Any], words: tuple[str, ...], stream: bool) -> None:
    app = FakeApp()
    status, answer = ask(app, {**MOT, **xargs}, stream=stream, **body)
    assert status == 400, answer
    for word in words:
        assert word in answer["error"]["message"]
    assert app.bodies == []


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
def test_without_max_tokens_the_model_s_room_counts(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(voting.TOKENS, "3000")
    app = FakeApp(natural="A", code="A", table="A")
    body = {key: value for key, value in BODY.items() if key != "max_tokens"} | {"vllm_xargs": {**MOT, "steer_early": 0}}
    status, answer = post(app, {**body, **given})
    assert status == 200, answer
    assert len(app.counted) == 3
    assert sorted(b["max_tokens"] for b in app.bodies) == [1024 - 27, 1024 - 26, 1024 - 25]
    monkeypatch.setenv(voting.TOKENS, "2000")
    assert post(app, {**body, **given})[0] == 400
    app = FakeApp(natural="A", code="A", table="A")
    assert ask(app, {**MOT, "steer_early": 0})[0] == 200
    assert not app.counted


def test_where_there_is_no_room_vllm_is_asked_all_the_same() -> None:
    """Its answer is that the prompt is too long, and not about a max_tokens that nobody sent."""
    app = FakeApp(natural="A", code="A", table="A")
    app.room = 20
    body = {key: value for key, value in BODY.items() if key != "max_tokens"}
    assert post(app, {**body, "vllm_xargs": {**MOT, "steer_early": 0}})[0] == 200
    assert [b["max_tokens"] for b in app.bodies] == [1, 1, 1]


def test_seeds_stay_in_range() -> None:
    app = FakeApp(natural="A", code="A", table="A")
    assert ask(app, {**MOT, "steer_early": 0}, seed=2**63 - 1)[0] == 200
    assert sorted(b["seed"] for b in app.bodies) == [-(2**63), -(2**63) + 1, 2**63 - 1]


class Saying(FakeApp):
    """Streams one text to everybody."""

    def __init__(self, text: str, finish: str = "stop") -> None:
        super().__init__()
        self.text, self.finish = text, finish

    async def stream(self, said: str, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        choice = {"index": 0, "delta": {"content": self.text}, "finish_reason": self.finish}
        event = {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 9}}
        data = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("stream", [False, True])
def test_that_all_were_cut_is_told(stream: bool) -> None:
    for finish, text in (("length", "I ramble"), ("stop", "I ramble"), ("length", "The answer is (A).\nI ramble")):
        status, body = post(Saying(text, finish), {**BODY, "vllm_xargs": MOT, "stream": stream})
        assert status == 200
        choices = [e["choices"][0] for e in events(body)[:-1] if e["choices"]] if stream else json.loads(body)["choices"]
        assert choices[-1]["finish_reason"] == finish


@pytest.mark.parametrize("stream", [False, True])
def test_a_rambling_table_is_an_abstention(stream: bool) -> None:
    text = "Premises:\n" + "∧".join(["P"] * 6000) + "\n" + "(" * 3000 + "\nStatement:\nP\n"
    status, body = post(Saying(text), {**BODY, "vllm_xargs": MOT, "stream": stream})
    assert status == 200
    assert b"unreadable" in body


def test_programs_end_with_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program may run at once; when the client leaves, it ends and the others do not begin."""
    began: list[float] = []
    pool = sandbox.pool._Pool(1)

    def run(code: str, limits: sandbox.Limits) -> sandbox.Outcome:
        began.append(time.monotonic())
        while not limits_module.stopped():
            time.sleep(0.01)
        return sandbox.Outcome("stopped")

    monkeypatch.setattr(pool, "_run", run)
    monkeypatch.setattr(sandbox, "run", lambda code: pool.run(code, sandbox.Limits()))
    monkeypatch.setattr(sandbox, "available", lambda: True)
    data = json.dumps({**BODY, "vllm_xargs": {**MOT, "steer_modalities": ["code"], "steer_n": 6}}).encode()
    parts = [{"type": "http.request", "body": data}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        while not began:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "headers": headers,
        "state": {},
        "app": application(front_end()),
    }
    app = Saying("```python\nwhile True: pass\n```\n<answer>(A)")
    asyncio.run(asyncio.wait_for(server.SteerMiddleware(app)(scope, receive, send), 20))
    assert pool._free is not None
    assert pool._free.acquire(timeout=20)  # none runs any longer
    assert len(began) == 1


def test_elsewhere_the_call_is_named() -> None:
    app = FakeApp()
    status, body = post(app, {"model": "m", "prompt": "x", "vllm_xargs": MOT}, path="/v1/completions")
    assert status == 400
    assert b"/v1/chat/completions" in body
    assert app.bodies == []


def test_other_requests_pass() -> None:
    app = FakeApp()
    for xargs in ({"steer": "reflection_cycle"}, {"steer": "off"}, {}):
        status, _ = ask(app, xargs)
        assert status == 200
    assert len(app.bodies) == 3


def test_the_operator_s_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(voting.TOKENS, "100")
    status, answer = ask(FakeApp())
    assert status == 400
    assert "100" in answer["error"]["message"]
    monkeypatch.setenv(voting.TOKENS, "150")
    assert ask(FakeApp())[0] == 200
    allowed: list[Any] = []
    monkeypatch.setattr(sandbox, "allow", lambda *given: allowed.append(given))
    voting.configure()
    for text in ("4", "wasm:2", "bubblewrap:3"):
        monkeypatch.setenv(voting.SANDBOX, text)
        voting.configure()
    assert allowed == [(0, "wasm"), (4, "wasm"), (2, "wasm"), (3, "bubblewrap")]
    for text in ("many", "docker:4", "bubblewrap", "bubblewrap:", "-1", ":4:"):
        monkeypatch.setenv(voting.SANDBOX, text)
        with pytest.raises(SteerError, match="LLM_STEER_SANDBOX"):
            voting.configure()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts of an operator, for questions with three answers."""
    monkeypatch.setattr(sandbox, "allow", lambda *given: None)  # which the start turns off
    (tmp_path / "three").mkdir()
    for modality, tag in TAGS.items():
        (tmp_path / "three" / f"{modality}.txt").write_text(f"Ours: [[question]]\n{tag}")
    return tmp_path


def test_the_operator_s_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(voting.DEFAULTS, f"mixture_of_thought:prompts={folder},early=false")
    voting.configure()
    app = FakeApp(natural="A", code="A", table="B")
    status, answer = ask(app)
    assert status == 200
    assert {b["messages"][-1]["content"].splitlines()[0] for b in app.bodies} == {"Ours: Is it wet?"}
    assert str(folder) not in json.dumps(answer)
    (plugin,) = answer["choices"][0]["steering"]["plugins"]
    assert (plugin["aborted"], plugin["params"]) == (0, {"early": False})
    # A request's own parameters win, but it names no folder, and is not told which one is used.
    assert ask(app, {**MOT, "steer_vote": "weighted", "steer_early": 1})[0] == 200
    for xargs, words in (
        ({"steer_prompts": str(folder)}, ("steer_prompts", "clients")),
        ({"steer": json.dumps({"name": "mixture_of_thought", "prompts": "/etc"})}, ("steer.prompts", "clients")),
        ({"steer_answers": "two"}, ("steer_prompts", "two/natural.txt", "the operator's")),
    ):
        status, answer = ask(app, {**MOT, **xargs})
        assert status == 400
        message = answer["error"]["message"]
        assert all(word in message for word in words), message
    assert str(folder) not in message


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "mixture_of_thought:prompts=/nowhere/at/all",
            ("LLM_STEER_VOTING: prompts", "/nowhere/at/all", "three/natural.txt"),
        ),
        ("mixture_of_thought:prompts={folder},examples=true", ("LLM_STEER_VOTING: prompts", "[[examples]]")),
        ("mixture_of_thought:prompts={folder},answers=two", ("two/natural.txt",)),
        ("mixture_of_thought:prompt={folder}", ("LLM_STEER_VOTING: mixture_of_thought:prompt", "prompts")),
        ("mixture_of_thought:n=0", ("LLM_STEER_VOTING: mixture_of_thought:n", "0")),
        ("reflection_cycle", ("LLM_STEER_VOTING", "a plugin that votes")),
        ("{folder}", ("LLM_STEER_VOTING", "mixture_of_thought")),
    ],
)
def test_bad_defaults_of_the_operator_end_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(voting.DEFAULTS, option.replace("{folder}", str(folder)))
    with pytest.raises(SteerError) as error:
        voting.configure()
    for word in words:
        assert word in str(error.value)
