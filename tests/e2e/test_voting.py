"""mixture_of_thought inside a real OpenAI server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Engines
from e2e.engine_client import Server

PATH = "/v1/chat/completions"
KEY = "secret"
PLAIN: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "so the w7"}],
    "temperature": 0,
    "max_tokens": 6,
}
"""The model is random and answers nothing that could be read: votes abstain, tokens are counted."""
VOTED = {**PLAIN, "vllm_xargs": {"steer": "mixture_of_thought"}}


@pytest.fixture(scope="module")
def server(engines: Engines, llama: Path) -> Server:
    return engines.start(lambda log: Server(llama, log, "--max-model-len", "1024", key=KEY))


def told(choice: dict[str, Any]) -> dict[str, Any]:
    (plugin,) = choice["steering"]["plugins"]
    assert plugin["name"] == "mixture_of_thought"
    return dict(plugin)


def metric(server: Server, name: str) -> float:
    """The sum of what ``/metrics`` tells under a name."""
    _, text = server.request("GET", "/metrics")
    return sum(float(n) for n in re.findall(rf"^vllm:(?:{name})\{{[^}}]*\}} (\S+)", text, re.M))


def running(server: Server) -> float:
    """Requests that the engine runs or holds in its queue."""
    return metric(server, "num_requests_(?:running|waiting)")


def test_one_completion(server: Server) -> None:
    status, answer = server.request("POST", PATH, VOTED)
    assert status == 200, answer
    (choice,) = answer["choices"]
    plugin = told(choice)
    assert plugin["answer"] is None
    assert plugin["abstained"] == 3
    assert [r["tokens"] for r in plugin["requests"]] == [6, 6, 6]
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] > 30
    assert choice["message"]["content"].startswith("No answer")
    assert answer["model"] == "tiny"


def test_with_curl(server: Server) -> None:
    """Plain and streaming, as a user types it."""
    command = ["curl", "-sN", f"http://127.0.0.1:{server.port}{PATH}", "-H", "Content-Type: application/json"]
    command += ["-H", f"Authorization: Bearer {KEY}", "-d"]
    plain = subprocess.run([*command, json.dumps(VOTED)], capture_output=True, text=True, check=True, timeout=60)
    assert told(json.loads(plain.stdout)["choices"][0])["abstained"] == 3
    streamed = subprocess.run(
        [*command, json.dumps({**VOTED, "stream": True})], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [line for line in streamed.stdout.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert sum('"progress"' in line for line in lines) == 3


def test_a_stream(server: Server) -> None:
    *events, last, done = server.events(PATH, {**VOTED, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert last["steering"][0]["plugins"][0]["name"] == "mixture_of_thought"
    assert events[-1]["usage"]["completion_tokens"] == 18
    assert [e["steering"]["progress"]["read"] for e in events if "steering" in e] == [1, 2, 3]


def test_steered_and_traced_parts(server: Server) -> None:
    """Each of the requests is steered by the other plugin, and says what was done to it."""
    steer = json.dumps([{"name": "mixture_of_thought", "modalities": ["natural", "code"]}, "reflection_cycle"])
    status, answer = server.request("POST", PATH, {**PLAIN, "vllm_xargs": {"steer": steer, "steer_trace": 1}})
    assert status == 200, answer
    for request in told(answer["choices"][0])["requests"]:
        assert request["steering"]["plugins"][0]["name"] == "reflection_cycle"
        assert request["steering"]["tokens"] == 6


def test_next_to_ordinary_traffic(server: Server) -> None:
    want = server.request("POST", PATH, PLAIN)[1]["choices"][0]["message"]["content"]

    def ask(number: int) -> Any:
        return server.request("POST", PATH, VOTED if number % 3 == 0 else PLAIN)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(18)))
    for number, (status, answer) in enumerate(answers):
        assert status == 200, answer
        if number % 3:
            assert answer["choices"][0]["message"]["content"] == want
            assert "steering" not in answer["choices"][0]
        else:
            assert told(answer["choices"][0])["abstained"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(server: Server, stream: bool) -> None:
    body = {**VOTED, "max_tokens": 600, "ignore_eos": True, "stream": stream}
    body["vllm_xargs"] = {"steer": "mixture_of_thought", "steer_n": 2}
    before = metric(server, "generation_tokens_total")
    with contextlib.closing(server.open("POST", PATH, body)):
        deadline = time.monotonic() + 30
        while not running(server):
            assert time.monotonic() < deadline, "the requests never ran"
            time.sleep(0.02)
    deadline = time.monotonic() + 30
    while running(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(server) == 0
    assert 0 < metric(server, "generation_tokens_total") - before < 6 * 600
    assert server.request("POST", PATH, PLAIN)[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 100_000}, ("max_tokens", "65536")),
        ({"n": 2}, ("n", "left out")),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ("tools",)),
        ({"vllm_xargs": {**VOTED["vllm_xargs"], "steer_n": 10**6}}, ("steer_n", "64")),
        ({"vllm_xargs": {**VOTED["vllm_xargs"], "steer_prompts": "/etc"}}, ("steer_prompts",)),
        ({"messages": [{"role": "user", "content": ""}]}, ("messages",)),
        ({"messages": [{"role": "user", "content": "w1 " * 33_000}]}, ("1024",)),
        ({"model": "other"}, ("other",)),
        ({"max_tokens": 2000}, ("1024",)),
    ],
)
def test_bad_input(server: Server, body: dict[str, Any], words: tuple[str, ...]) -> None:
    for stream in (False, True):
        status, answer = server.request("POST", PATH, {**VOTED, **body, "stream": stream})
        assert status in (400, 404), answer
        for word in words:
            assert word in answer["error"]["message"]
    assert running(server) == 0


def test_elsewhere_the_call_is_named(server: Server) -> None:
    body = {"model": "tiny", "prompt": [20, 30], "max_tokens": 3, "vllm_xargs": {"steer": "mixture_of_thought"}}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert PATH in answer["error"]["message"]


def test_the_key_guards_it(server: Server) -> None:
    assert server.request("POST", PATH, VOTED, key="wrong")[0] == 401


def test_through_the_engine_client(server: Server) -> None:
    """The client's own fan-out against the same server: each request is one of vLLM's."""
    from llm_steer.engines.base import Engine

    engine = Engine.from_url(f"http://127.0.0.1:{server.port}/v1", api_key=KEY)
    response = engine.chat("so the w7", steer="mixture_of_thought", max_tokens=6, temperature=0)
    assert response.error is None
    assert response.tokens == 18
    plain = engine.chat(
        "so the w7", max_tokens=6, temperature=0, steer={"name": "reflection_cycle", "amplitude": 9.0}, trace=True
    )
    assert plain.tokens == 6
    assert plain.logprob is not None
    assert plain.steering is not None
    assert plain.steering["plugins"][0]["params"]["amplitude"] == 9.0
    identity = engine.identity()
    assert identity["model"] == "tiny"
    assert identity["steering"] == []
    assert KEY not in json.dumps(identity)
    assert str(server.port) not in json.dumps(identity)
