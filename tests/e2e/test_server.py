"""A real OpenAI server, started by the command that a user types."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Engines
from e2e.engine_client import Server
from e2e.oracle import Oracle, Result
from e2e.scenarios import CLOSE, OPEN

KEY = "secret"
PROMPT = [20, 30, 40, OPEN]
NAME = "reflection_cycle"
WAVE = {"steer": NAME, "steer_amplitude": 25, "steer_period": 9.4}
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 10, "return_token_ids": True}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "so the w7"}],
    "temperature": 0,
    "max_tokens": 10,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(engines: Engines, llama: Path) -> Server:
    """The command to the letter: every request is steered with the plugin's own defaults."""
    return engines.start(lambda log: Server(llama, log, "--logits-processor", NAME, key=KEY))


@pytest.fixture(scope="module")
def want(oracle: Callable[[Path], Oracle], llama: Path) -> Callable[..., Result]:
    def generate(steer: dict[str, Any] | None, prompt: list[int] = PROMPT, **params: Any) -> Result:
        return oracle(llama).generate(prompt, {"temperature": 0.0, "max_tokens": 10, **params}, steer)

    return generate


def complete(server: Server, xargs: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    """The choices of a completion."""
    body = {**BODY, **changes, **({"vllm_xargs": xargs} if xargs is not None else {})}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


# -- steering ----------------------------------------------------------------------------------------------------------


def test_default_own_and_off(server: Server, want: Callable[..., Result]) -> None:
    cases: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
        (None, {}),
        ({"steer": NAME}, {}),
        ({"steer_amplitude": 60, "steer_period": 9.4}, {"amplitude": 60, "period": 9.4}),
        (WAVE, {"amplitude": 25, "period": 9.4}),
        ({"steer": json.dumps({"name": NAME, "amplitude": 25, "window": [[2, 5]], "period": 9.4})},
         {"amplitude": 25, "window": [[2, 5]], "period": 9.4}),
        ({"steer_schedule": "piecewise", "steer_points": [0, 40, 3, -40]},
         {"schedule": "piecewise", "points": [[0, 40], [3, -40]]}),
        ({**WAVE, "steer_words": ["Hmm"], "steer_leading_space": 1}, {"amplitude": 25, "period": 9.4, "words": ["Hmm"]}),
        ({"steer": "off"}, None),
        ({"steer": 0}, None),
    ]  # fmt: skip
    for xargs, steer in cases:
        (choice,) = complete(server, xargs)
        assert choice["token_ids"] == want(steer).token_ids, xargs
        assert "steering" not in choice


def test_seeded_sampling(server: Server, want: Callable[..., Result]) -> None:
    (choice,) = complete(server, WAVE, temperature=1.0, seed=3)
    assert choice["token_ids"] == want({"amplitude": 25, "period": 9.4}, temperature=1.0, seed=3).token_ids


# -- traces ------------------------------------------------------------------------------------------------------------


def check_trace(trace: Any, result: Result) -> None:
    (plugin,) = trace["plugins"]
    assert trace["tokens"] == len(result.token_ids)
    assert (plugin["steered_steps"], plugin["reflection_tokens"]) == (result.steered_steps, len(result.reflection))
    assert plugin["positions"] == [position for position, _ in result.reflection]


def test_trace_of_each_choice(server: Server, want: Callable[..., Result]) -> None:
    """``n`` outputs of several prompts."""
    prompts = [PROMPT, [70, 80, OPEN, 90], [8, OPEN]]
    choices = complete(server, {**WAVE, "steer_trace": 1}, prompt=prompts, n=2, temperature=1.0, seed=5)
    assert [c["index"] for c in choices] == list(range(6))
    for choice in choices:
        prompt, child = prompts[choice["index"] // 2], choice["index"] % 2
        expected = want({"amplitude": 25, "period": 9.4}, prompt, temperature=1.0, seed=5 + child)
        assert choice["token_ids"] == expected.token_ids
        check_trace(choice["steering"], expected)


def test_trace_of_a_chat(server: Server) -> None:
    status, answer = server.request(
        "POST", "/v1/chat/completions", {**CHAT, "temperature": 1.0, "n": 2, "vllm_xargs": {**WAVE, "steer_trace": 1}}
    )
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["steering"]["tokens"] == len(choice["token_ids"]) == 10
        assert choice["steering"]["plugins"][0]["steered_steps"] == 9


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_trace_of_a_stream(server: Server, path: str, body: dict[str, Any]) -> None:
    """One event with no choices, right before the end mark; the traces are those of a plain answer."""
    body = {**body, "vllm_xargs": {**WAVE, "steer_trace": 1}, "n": 2, "temperature": 1.0, "seed": 4}
    *events, last, done = server.events(path, body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["id"] == events[0]["id"]
    assert not any("steering" in event for event in events)
    _, answer = server.request("POST", path, body)
    assert [t["index"] for t in last["steering"]] == [0, 1]
    plain = [choice["steering"] for choice in answer["choices"]]
    assert [{k: v for k, v in t.items() if k != "index"} for t in last["steering"]] == plain
    untraced = server.events(path, {**body, "vllm_xargs": WAVE})
    assert not any("steering" in event for event in untraced if event != "[DONE]")


def test_trace_of_what_was_turned_off(server: Server) -> None:
    (choice,) = complete(server, {"steer": "off", "steer_trace": 1})
    assert choice["steering"] is None or choice["steering"]["plugins"] == []


# -- the server around it ----------------------------------------------------------------------------------------------


def test_the_key_guards_everything(server: Server) -> None:
    for key in (None, "wrong"):
        for method, path, body in (
            ("GET", "/v1/steer", None),
            ("POST", "/v1/completions", BODY),
            ("POST", "/v1/completions", {**BODY, "steer": NAME}),
        ):
            assert server.request(method, path, body, key=key)[0] == 401
    status, answer = server.request("GET", "/v1/steer")
    assert status == 200
    assert answer["defaults"] == [[NAME, {}]]
    assert answer["requests"][NAME] > 0
    assert answer["refused_here"] == []


def test_a_client_that_leaves(server: Server, want: Callable[..., Result]) -> None:
    body = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True, "vllm_xargs": {**WAVE, "steer_trace": 1}}
    for _ in range(3):
        with contextlib.closing(server.open("POST", "/v1/completions", body)) as connection:
            connection.getresponse().read(10)
    half = server.open("POST", "/v1/completions", None)
    half.sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"steer')
    half.close()
    time.sleep(0.5)
    (choice,) = complete(server, WAVE)
    assert choice["token_ids"] == want({"amplitude": 25, "period": 9.4}).token_ids


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD: list[tuple[Any, tuple[str, ...]]] = [
    # names
    ({"steer": "Reflection_Cycle"}, ("steer", "Reflection_Cycle", NAME)),
    ({"steer": "reflection-cycle"}, ("steer", "reflection-cycle", NAME)),
    ({"steer": "nonsense"}, ("steer", "nonsense", NAME)),
    ({"steer": ""}, ("steer", NAME)),
    ({"steer": "OFF"}, ("steer", "OFF", "off")),
    ({"steer": 7}, ("steer", "7", NAME)),
    ({"steer": 0.5}, ("steer", "0.5", NAME)),
    ({"steer": [NAME, NAME]}, ("steer[1]", NAME)),
    ({"steer": ["nonsense"]}, ("steer", "nonsense", NAME)),
    ({"steer": [3]}, ("steer", "3")),
    ({"steer": [NAME] * 500}, ("steer", NAME, "at most 8")),
    ({"steer": "x" * 100_000}, ("steer", "100000")),
    # keys
    ({"steer": NAME, "steer_amplitud": 5}, ("steer_amplitud", "5", "amplitude")),
    ({"steer": NAME, "steer_": 5}, ("steer_", "5")),
    ({"steer": NAME, "Steer_Amplitude": 5}, ("Steer_Amplitude", "lower case")),
    ({"steeramplitude": 5}, ("steeramplitude", "steer_")),
    ({"STEER": NAME}, ("STEER", NAME)),
    ({"steer": NAME, "steer_trace": "yes"}, ("steer_trace", "yes", "0 or 1")),
    ({"steer_trace": 2}, ("steer_trace", "2", "0 or 1")),
    ({"steer": "off", "steer_amplitude": 5}, ("steer_amplitude", "5", "off")),
    ({"steer": [NAME, "off"], "steer_amplitude": 5}, ("steer_amplitude",)),
    ({"llm_steer": "x"}, ("llm_steer", "left out")),
    ({"steer_name": NAME}, ("steer_name",)),
    # types
    ({"steer": NAME, "steer_amplitude": "5"}, ("steer_amplitude", "'5'", "number")),
    ({"steer": NAME, "steer_amplitude": [5]}, ("steer_amplitude", "[5]", "number")),
    ({"steer": NAME, "steer_period": "long"}, ("steer_period", "long", "number")),
    ({"steer": NAME, "steer_schedule": 3}, ("steer_schedule", "3", "triangular")),
    ({"steer": NAME, "steer_schedule": "Cosine"}, ("steer_schedule", "Cosine", "cosine")),
    ({"steer": NAME, "steer_origin": "prompt"}, ("steer_origin", "prompt", "think")),
    ({"steer": NAME, "steer_after_end": "stop"}, ("steer_after_end", "stop", "restart")),
    ({"steer": NAME, "steer_preset": "paper"}, ("steer_preset", "paper", "reference")),
    ({"steer": NAME, "steer_leading_space": "yes"}, ("steer_leading_space", "yes")),
    ({"steer": NAME, "steer_leading_space": 2}, ("steer_leading_space", "2")),
    ({"steer": NAME, "steer_words": "Wait"}, ("steer_words", "Wait", "list")),
    ({"steer": NAME, "steer_words": [1, 2]}, ("steer_words", "1", "string")),
    ({"steer": NAME, "steer_words": []}, ("steer_words", "[]")),
    ({"steer": NAME, "steer_words": ["not-a-piece"]}, ("words", "not-a-piece")),
    ({"steer": NAME, "steer_words": [" "]}, ("words",)),
    ({"steer": NAME, "steer_words": ["x" * 500]}, ("steer_words", "64")),
    ({"steer": NAME, "steer_words": ["Wait"] * 5000}, ("steer_words", "64")),
    ({"steer": NAME, "steer_token_ids": [1.5]}, ("steer_token_ids", "1.5", "integer")),
    ({"steer": NAME, "steer_token_ids": ["8"]}, ("steer_token_ids", "'8'", "integer")),
    ({"steer": NAME, "steer_start_position": 1.5}, ("steer_start_position", "1.5", "integer")),
    # ranges
    ({"steer": NAME, "steer_amplitude": 100.5}, ("steer_amplitude", "100.5", "100")),
    ({"steer": NAME, "steer_amplitude": -1e300}, ("steer_amplitude", "-1e+300", "-100")),
    ({"steer": NAME, "steer_amplitude": 10**400}, ("steer_amplitude", "100000", "number")),
    ({"steer": NAME, "steer_period": 0}, ("steer_period", "0", "greater than")),
    ({"steer": NAME, "steer_period": -5}, ("steer_period", "-5", "greater than")),
    ({"steer": NAME, "steer_phase": 1.01}, ("steer_phase", "1.01", "1")),
    ({"steer": NAME, "steer_start_position": -1}, ("steer_start_position", "-1", "0")),
    ({"steer": NAME, "steer_token_ids": [512]}, ("token_ids", "512", "511")),
    ({"steer": NAME, "steer_token_ids": [-1]}, ("steer_token_ids", "-1", "0")),
    ({"steer": NAME, "steer_token_ids": [2**40]}, ("steer_token_ids", str(2**40))),
    ({"steer": NAME, "steer_token_ids": list(range(2000))}, ("steer_token_ids", "1024")),
    ({"steer": NAME, "steer_window": [5, 2]}, ("steer_window", "start below end")),
    ({"steer": NAME, "steer_window": [5]}, ("steer_window",)),
    ({"steer": NAME, "steer_window": [-5, 2]}, ("steer_window", "-5", "0")),
    ({"steer": NAME, "steer_schedule": "piecewise"}, ("steer_points",)),
    ({"steer": NAME, "steer_schedule": "piecewise", "steer_points": [3, 1, 2, 1]}, ("steer_points", "increasing")),
    ({"steer": NAME, "steer_schedule": "piecewise", "steer_points": [0, 1000]}, ("steer_points", "100")),
    ({"steer": NAME, "steer_schedule": "silver", "steer_period": 5}, ("steer_period", "silver")),
    ({"steer": NAME, "steer_points": [0, 1]}, ("steer_points", "triangular")),
    # JSON in a string
    ({"steer": '{"name": "reflection_cycle"'}, ("steer", "JSON")),
    ({"steer": "[" * 50_000}, ("steer", "JSON")),
    ({"steer": '{"name": "reflection_cycle", "words": ["' + "x" * 70_000 + '"]}'}, ("steer", "65536")),
    ({"steer": '{"name": "nonsense"}'}, ("steer.name", "nonsense", NAME)),
    ({"steer": '{"name": 3}'}, ("steer.name", "3", NAME)),
    ({"steer": '{"name": "reflection_cycle", "amplitude": NaN}'}, ("steer.amplitude", "nan", "finite")),
    ({"steer": '{"name": "reflection_cycle", "amplitude": 1e999}'}, ("amplitude",)),
    ({"steer": '{"name": "reflection_cycle", "amplitude": {"a": 1}}'}, ("steer.amplitude", "number")),
    ({"steer": '{"name": "reflection_cycle", "window": [[1, 2], [3]]}'}, ("steer.window",)),
    ({"steer": '{"name": "reflection_cycle"}', "steer_amplitude": 5}, ("steer_amplitude", "inside")),
    ({"steer": '[[["reflection_cycle"]]]'}, ("steer[0]",)),
    # what vLLM itself does not let through
    ({"steer": None}, ("vllm_xargs",)),
    ({"steer": {"name": NAME}}, ("vllm_xargs",)),
    ({"steer": [[NAME]]}, ("steer", NAME)),
]
"""``vllm_xargs``, and words that the answer must have: the field, the value, what is valid."""

BAD_BODIES: list[tuple[dict[str, Any] | str, tuple[str, ...]]] = [
    ({"steer": NAME}, ("steer", NAME, "vllm_xargs")),
    ({"steer_amplitude": 5}, ("steer_amplitude", "5", "vllm_xargs")),
    ({"STEER": NAME}, ("STEER", "vllm_xargs")),
    ({"extra_args": {"steer": NAME}}, ("extra_args", NAME, "vllm_xargs")),
    ({"use_beam_search": True, "n": 2}, ("beam search", "off")),
    ({"use_beam_search": True, "n": 2, "vllm_xargs": {"steer": NAME}}, ("beam search",)),
    ({"use_beam_search": True, "n": 2, "vllm_xargs": {"steer": "nonsense"}}, ("steer", "nonsense", NAME)),
    ('"vllm_xargs": {"steer": "reflection_cycle", "steer_amplitude": 1e999}', ("steer_amplitude", "inf", "finite")),
    ('"vllm_xargs": {"steer": "reflection_cycle", "steer_amplitude": -1e999}', ("steer_amplitude", "-inf", "finite")),
    ('"vllm_xargs": {"steer": "reflection_cycle", "steer_amplitude": NaN}', ("steer_amplitude", "nan", "finite")),
    ('"vllm_xargs": {"steer": "reflection_cycle", "steer_token_ids": [NaN]}', ("steer_token_ids", "nan")),
    ('"vllm_xargs": {"\\u0073teer": "nonsense"}', ("steer", "nonsense", NAME)),
    ('"\\u0073teer": "reflection_cycle"', ("steer", "vllm_xargs")),
    ('"vllm_xargs": ["steer"]', ("vllm_xargs",)),
    ('"vllm_xargs": "steer"', ("vllm_xargs",)),
]
"""More of a body, as a mapping or as text."""


def body_of(more: dict[str, Any] | str, base: dict[str, Any] = BODY) -> Any:
    return {**base, **more} if isinstance(more, dict) else json.dumps(base)[:-1] + ", " + more + "}"


def test_bad_input(server: Server, want: Callable[..., Result]) -> None:
    """Each is answered with 400 and the reason, and the server answers the next good request."""
    bodies = [({"vllm_xargs": xargs}, words) for xargs, words in BAD] + BAD_BODIES
    assert len(bodies) > 80
    expected = want({"amplitude": 25, "period": 9.4}).token_ids
    problems = []
    for number, (more, words) in enumerate(bodies):
        status, answer = server.request("POST", "/v1/completions", body_of(more))
        text = answer["error"]["message"] if isinstance(answer, dict) and "error" in answer else str(answer)
        if status != 400 or not all(word in text for word in words) or len(text) > 3000:
            problems.append(f"{str(more)[:150]} wants {words}: {status} {text[:300]}")
        if number % 10 == 0:
            (choice,) = complete(server, WAVE)
            assert choice["token_ids"] == expected, more
    assert not problems, "\n".join(problems)
    (choice,) = complete(server, WAVE)
    assert choice["token_ids"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_to_a_chat(server: Server, stream: bool) -> None:
    for more, words in [({"vllm_xargs": xargs}, words) for xargs, words in BAD[:60:7]] + BAD_BODIES[:2]:
        status, answer = server.request("POST", "/v1/chat/completions", body_of({**more, "stream": stream}, CHAT))
        assert status == 400, (more, answer)
        assert all(word in answer["error"]["message"] for word in words), (more, answer)


def test_beam_search_of_a_request_that_is_turned_off(server: Server) -> None:
    body = {**BODY, "use_beam_search": True, "n": 2, "max_tokens": 3, "vllm_xargs": {"steer": "off"}}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    assert len(answer["choices"]) == 2


# -- off is off --------------------------------------------------------------------------------------------------------

LOGPROBS = {"logprobs": 5, "max_tokens": 8}


@pytest.fixture(scope="module")
def off(server: Server) -> list[Any]:
    """What the server that steers by default says to requests that turn it off, alone and beside steered ones."""
    return [
        complete(server, {"steer": "off"}, prompt=prompt, temperature=t, seed=8, **LOGPROBS)
        for prompt in (PROMPT, [50, 60], [OPEN, 70, CLOSE])
        for t in (0, 1.0)
    ]


@pytest.fixture(scope="module")
def plain(engines: Engines, llama: Path, off: list[Any]) -> Server:
    return engines.start(lambda log: Server(llama, log))


class TestWithoutADefault:
    """A server that is not told to steer."""

    def test_off_is_bit_for_bit_what_it_says(self, plain: Server, off: list[Any]) -> None:
        got = [
            complete(plain, prompt=prompt, temperature=t, seed=8, **LOGPROBS)
            for prompt in (PROMPT, [50, 60], [OPEN, 70, CLOSE])
            for t in (0, 1.0)
        ]
        assert got == off

    def test_steering_by_request(self, plain: Server, want: Callable[..., Result]) -> None:
        (choice,) = complete(plain, {**WAVE, "steer_trace": 1})
        expected = want({"amplitude": 25, "period": 9.4})
        assert choice["token_ids"] == expected.token_ids
        check_trace(choice["steering"], expected)

    def test_parameters_need_a_name(self, plain: Server) -> None:
        for xargs in ({"steer_amplitude": 5}, {"steer": 1}):
            status, answer = plain.request("POST", "/v1/completions", {**BODY, "vllm_xargs": xargs})
            assert status == 400
            assert "no default" in answer["error"]["message"]

    def test_beam_search_without_steering(self, plain: Server) -> None:
        body = {**BODY, "use_beam_search": True, "n": 2, "max_tokens": 3}
        assert plain.request("POST", "/v1/completions", body)[0] == 200
        status, _ = plain.request("POST", "/v1/completions", {**body, "vllm_xargs": WAVE})
        assert status == 400


@pytest.fixture(scope="module")
def several(engines: Engines, llama: Path) -> Server:
    named = ["reflection_cycle:amplitude=25,period=9.4", "llm_steer.hosts.vllm.logits:SteerLogitsProcessor"]
    return engines.start(lambda log: Server(llama, log, "--logits-processors", *named, "--api-server-count", "2"))


class TestSeveralFrontEnds:
    """Defaults with values, two API servers, and our class named on the command line: it acts once."""

    def test_every_front_end_steers_once(self, several: Server, want: Callable[..., Result]) -> None:
        expected = want({"amplitude": 25, "period": 9.4})
        for _ in range(8):
            (choice,) = complete(several, {"steer_trace": 1})
            assert choice["token_ids"] == expected.token_ids
            check_trace(choice["steering"], expected)
            status, _ = several.request("POST", "/v1/completions", {**BODY, "vllm_xargs": {"steer": "nonsense"}})
            assert status == 400
