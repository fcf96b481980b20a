"""The ASGI middleware, around a fake application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from e2e import tiny
from llm_steer import Params, Plugin
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.vllm import admission, compat, server, trace


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middleware is tested without vLLM, where there is nothing to hook into."""
    monkeypatch.setattr(compat, "refusals", lambda config: [])


JSON = [(b"content-type", b"application/json")]
TOKENIZER = tiny.tokenizer()


def front_end() -> admission.Admission:
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: tiny.VOCABULARY, runner_type="generate", is_diffusion=False),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, pipeline_parallel_size=1, enable_batch_sharded_sampling=False
        ),
        speculative_config=None,
        use_v2_model_runner=False,
    )
    return admission.Admission(config, TOKENIZER)


def application(admitted: admission.Admission | None, told: Any = None) -> Any:
    """What an ASGI scope knows of vLLM's application.

    Args:
        told: what the workers answer: of each data-parallel engine, of each rank, of each request.
    """

    async def call_utility_all_async(*arguments: Any) -> Any:
        name, method, timeout, (asked,), rest = arguments
        assert (name, method, timeout, rest) == ("collective_rpc", trace.METHOD, None, None)
        assert [ids for _, ids in asked] == [[8, 20], [20, 5, 8]]
        return told

    core = SimpleNamespace(call_utility_all_async=call_utility_all_async)
    client = SimpleNamespace(input_processor=SimpleNamespace(llm_steer=admitted), engine_core=core)
    return SimpleNamespace(state=SimpleNamespace(engine_client=client))


def source(output: list[int], steer: str = "reflection_cycle") -> trace.Source:
    params = front_end().stamp(SimpleNamespace(extra_args={"steer": steer}))
    stamp = admission.read_stamp(params)
    assert stamp is not None
    return trace.Source("request", stamp, [20, 4], output)


def run(
    answer: Sequence[bytes],
    *,
    request: Sequence[bytes] = (b"{}",),
    content_type: bytes = b"application/json",
    choices: Sequence[tuple[str, int, list[int]]] = (),
    path: str = "/v1/completions",
    method: str = "POST",
    headers: Any = JSON,
    front_end: Any = None,
    steer: str = "reflection_cycle",
    told: Any = None,
) -> tuple[int, dict[bytes, bytes], bytes, list[bytes], bytes]:
    """Status, headers, body and its parts; and the body that the application received."""
    received = bytearray()
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            received.extend(message["body"])
            more = message["more_body"]
        for request_id, index, output in choices:
            collected = trace.collected.get()
            assert collected is not None
            collected.append(trace.Choice(request_id, index, source(output, steer)))
        length = str(sum(map(len, answer))).encode()
        start = [(b"content-type", content_type), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        for number, part in enumerate(answer):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(answer) - 1})

    parts = [{"type": "http.request", "body": p, "more_body": i < len(request) - 1} for i, p in enumerate(request)]

    async def receive() -> Any:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "app": application(front_end, told),
    }
    asyncio.run(server.SteerMiddleware(app)(scope, receive, send))
    bodies = [m.get("body", b"") for m in sent if m["type"] == "http.response.body"]
    assert sent[0]["type"] == "http.response.start"
    assert [m["type"] for m in sent].count("http.response.start") == 1
    assert not sent[-1].get("more_body")
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(bodies), bodies, bytes(received)


ANSWER = json.dumps({"choices": [{"index": 0, "text": "é"}, {"index": 1, "text": "b"}]}, ensure_ascii=False).encode()
TWO = [("cmpl-x-0", 0, [8, 20]), ("cmpl-x-0", 1, [20, 5, 8])]


def test_nothing_is_touched_without_a_trace() -> None:
    parts = [ANSWER[:7], ANSWER[7:]]
    status, headers, body, bodies, received = run(parts, request=[b'{"prompt"', b': "x"}'])
    assert (status, body, bodies, received) == (200, ANSWER, parts, b'{"prompt": "x"}')
    assert headers[b"content-length"] == str(len(ANSWER)).encode()


@pytest.mark.parametrize("cuts", [1, 2, 9])
def test_each_choice_gets_its_trace(cuts: int) -> None:
    size = len(ANSWER) // cuts + 1
    parts = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    _, headers, body, _, _ = run(parts, choices=TWO)
    first, second = json.loads(body)["choices"]
    assert headers[b"content-length"] == str(len(body)).encode()
    assert (first["text"], second["text"]) == ("é", "b")
    assert (first["steering"]["tokens"], second["steering"]["tokens"]) == (2, 3)
    assert "index" not in first["steering"]


@pytest.mark.parametrize("stream", [False, True])
def test_workers_tell_what_closed_loops_did(stream: bool) -> None:
    """The first that knows, of two data-parallel engines with two ranks each; without one, what follows from token ids."""
    known = {"tokens": 2, "replayed": False, "plugins": [{"name": "budget_forcing", "positions": [0]}]}
    told = [[[None, None], [None, None]], [[None, None], [known, None]]]
    parts = [b'data: {"id": "x", "choices": []}\n\ndata: [DONE]\n\n'] if stream else [ANSWER]
    kind = b"text/event-stream" if stream else b"application/json"
    _, _, body, _, _ = run(parts, choices=TWO, steer="budget_forcing", told=told, content_type=kind)
    if stream:
        first, second = json.loads(body.split(b"\n\n")[1].removeprefix(b"data: "))["steering"]
        del first["index"]
    else:
        first, second = (choice["steering"] for choice in json.loads(body)["choices"])
    assert first == known
    assert second["plugins"][0]["measured"] is False


def test_choices_of_several_prompts_are_in_order() -> None:
    """Requests may be registered in any order, and there may be more than ten."""
    answer = json.dumps({"choices": [{"index": i} for i in range(24)]}).encode()
    mixed = [(f"cmpl-x-{p}", i, [20] * (2 * p + i + 1)) for p in reversed(range(12)) for i in (1, 0)]
    _, _, body, _, _ = run([answer], choices=mixed)
    assert [c["steering"]["tokens"] for c in json.loads(body)["choices"]] == list(range(1, 25))


@pytest.mark.parametrize("answer", [b"", b"not json", b"[1, 2]", b'"x"'])
def test_an_answer_of_another_kind_stays(answer: bytes) -> None:
    _, headers, body, _, _ = run([answer], choices=TWO)
    assert body == answer
    assert headers[b"content-length"] == str(len(answer)).encode()


EVENTS = (
    b'data: {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": "x"}]}\n\n'
    b'data: {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 1, "text": "y"}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


def events(body: bytes) -> list[Any]:
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 50, 1000])
def test_a_stream_gets_one_event_more(size: int) -> None:
    """However the stream is cut: the end mark too may come in pieces."""
    stream = EVENTS + DONE
    parts = [stream[i : i + size] for i in range(0, len(stream), size)]
    _, _, body, _, _ = run(parts, content_type=b"text/event-stream; charset=utf-8", choices=TWO)
    *others, last = events(body)
    assert others == events(stream)
    assert last["choices"] == []
    assert [t["index"] for t in last["steering"]] == [0, 1]
    assert [t["tokens"] for t in last["steering"]] == [2, 3]


def test_a_stream_is_not_held_back() -> None:
    middle = EVENTS.index(b"\n\n") + 2
    parts = [EVENTS[:middle], EVENTS[middle:], DONE]
    _, _, _, bodies, _ = run(parts, content_type=b"text/event-stream", choices=TWO)
    assert bodies[:2] == parts[:2]


def test_an_end_mark_in_the_text_ends_nothing() -> None:
    quoted = b'data: {"id": "a", "choices": [{"index": 0, "text": "say data: [DONE]"}]}\n\n'
    stream = quoted + DONE
    _, _, body, _, _ = run([quoted, DONE], content_type=b"text/event-stream", choices=TWO)
    assert events(body)[:-1] == events(stream)
    assert "steering" in events(body)[-1]


def test_a_stream_without_an_end_mark_stays() -> None:
    for stream in (b"", EVENTS, b"data: [DO"):
        _, _, body, _, _ = run([stream], content_type=b"text/event-stream", choices=TWO)
        assert body == stream


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"steer": "reflection_cycle"}', "steer"),
        (b'{"steer_amplitude": 3}', "steer_amplitude"),
        (b'{"Steer": 1}', "Steer"),
        (b'{"\\u0073teer": 1}', "steer"),
        (b'{"extra_args": {}}', "extra_args"),
        (b'{"ste\\u0065r_x": {"a": [1, {}]}}', "steer_x"),
        (b'{"vllm_xarg": {"steer": "off"}}', "vllm_xarg"),
        (b'{"VLLM_XARGS": {"steer_amplitude": 3}}', "VLLM_XARGS"),
        (b'{"xargs": {"Steer": "off"}}', "xargs"),
        (b'{"extra_body": {"vllm_xargs": {"steer": "off"}}}', "extra_body"),
        (b'{"logits_processors": ["reflection_cycle:amplitude=3"]}', "logits_processors"),
        (b'{"use_beam_search": true, "vllm_xargs": {"steer": "reflection_cycle"}}', "steer"),
        (b'{"use_beam_search": true, "vllm_xargs": {"steer_amplitude": 3}}', "steer"),
        (b'{"use_beam_search": true, "vllm_xargs": {"steer": "nonsense"}}', "steer"),
        (b'{"use_beam_search": 1, "vllm_xargs": {"steer_trace": 1}}', "steer"),
    ],
)
def test_what_vllm_would_drop_is_refused(body: bytes, field: str) -> None:
    for request in ([body], [body[:5], body[5:]]):
        status, headers, answer, _, received = run([ANSWER], request=request)
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (400, 400, field)
        assert received == b""
        assert headers[b"content-length"] == str(len(answer)).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "steer and extra_args"}',
        b'{"vllm_xargs": {"steer": "reflection_cycle"}}',
        b'{"messages": [{"content": "\\u0073teer"}]}',
        b'{"use_beam_search": false, "vllm_xargs": {"steer": "reflection_cycle"}}',
        b'{"extra_body": {"top_k": 5}, "prompt": "steer"}',
        b'{"tools": [{"parameters": {"steer": 1}}]}',
        b'{"logits_processors": ["their:Class"]}',
        b'{"steer": ',
        b"[" * 100_000,
        b'["steer"]',
        b"\xff\xfe steer",
        b"",
    ],
    ids=range(12),
)
def test_what_is_vllms_business_passes(body: bytes) -> None:
    status, _, answer, _, received = run([ANSWER], request=[body])
    assert (status, answer, received) == (200, ANSWER, body)


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        (b'{"steer": "nonsense"}', "steer"),
        (b'{"steer": "reflection_cycle", "steer_token_ids": [512]}', "steer_token_ids"),
        (b'{"steer": "reflection_cycle", "steer_amplitude": NaN}', "steer_amplitude"),
        (b'{"llm_steer": 1}', "llm_steer"),
        (b'{"steer": null}', "steer"),
        (b'{"steer": "reflection_cycle", "steer_leading_space": true}', None),
        (b'{"other": 1}', None),
    ],
)
def test_a_stream_is_refused_before_it_begins(xargs: bytes, field: str | None) -> None:
    body = b'{"stream": true, "prompt": "steer", "vllm_xargs": ' + xargs + b"}"
    status, _, answer, _, received = run([ANSWER], request=[body], front_end=front_end())
    if field is None:
        assert (status, received) == (200, body)
    else:
        assert (status, json.loads(answer)["error"]["param"], received) == (400, field, b"")
    if b"null" not in xargs:
        assert run([ANSWER], request=[body])[0] == 200, "no steering in this process: vLLM refuses it"


@pytest.mark.parametrize(
    "xargs",
    [
        {"steer_amplitude": 3},
        {"steer": 1},
        {"steer": True, "steer_amplitude": 1000},
        {"steer_nonsense": 3},
        {"steer": "reflection_cycle", "steer_amplitude": 3},
        {"steer_trace": 1},
        {"steer": "off", "steer_trace": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("admitted", [None, front_end], ids=["unhooked", "hooked"])
def test_beam_search_is_what_is_refused(xargs: dict[str, Any], admitted: Any) -> None:
    """Not that there is no default, or what else is missing: with it, beam search would be refused next."""
    body = json.dumps({"use_beam_search": True, "vllm_xargs": xargs}).encode()
    status, _, answer, _, received = run([ANSWER], request=[body], front_end=admitted and admitted())
    message = json.loads(answer)["error"]["message"]
    assert (status, received) == (400, b"")
    assert "use_beam_search" in message
    assert "default" not in message


@pytest.mark.parametrize("xargs", [{}, {"steer": "off"}, {"steer": 0}, {"steer_trace": 0}, {"other": 1}], ids=str)
def test_beam_search_without_steering_is_vllms(xargs: dict[str, Any]) -> None:
    body = json.dumps({"use_beam_search": True, "prompt": "steer", "vllm_xargs": xargs}).encode()
    assert run([ANSWER], request=[body])[::4] == (200, body)


@pytest.mark.parametrize(
    ("xargs", "field", "value"),
    [
        ({"steer": None}, "steer", "None"),
        ({"steer": "reflection_cycle", "steer_amplitude": None}, "steer_amplitude", "None"),
        ({"steer": {"name": "reflection_cycle"}}, "steer", "{'name': 'reflection_cycle'}"),
        ({"steer": [["reflection_cycle"]]}, "steer", "[['reflection_cycle']]"),
        ({"steer": "reflection_cycle", "steer_window": [[1, 2]]}, "steer_window", "[[1, 2]]"),
        ({"steer": "reflection_cycle", "steer_words": ["a", None]}, "steer_words", "['a', None]"),
        (["steer"], "vllm_xargs", "['steer']"),
        ("steer", "vllm_xargs", "'steer'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_values_that_vllms_schema_lacks_are_named(xargs: Any, field: str, value: str, path: str) -> None:
    body = json.dumps({"messages": [], "vllm_xargs": xargs}).encode()
    status, _, answer, _, received = run([ANSWER], request=[body], path=path, front_end=front_end())
    error = json.loads(answer)["error"]
    assert (status, error["param"], received) == (400, field, b"")
    assert error["message"].startswith(f"{field}: got {value}; must be a ")


def test_no_vllm_xargs_are_vllms_business() -> None:
    body = b'{"prompt": "steer", "vllm_xargs": null}'
    assert run([ANSWER], request=[body], front_end=front_end())[::4] == (200, body)


def test_a_plugin_that_must_be_declared_says_how(register: Any) -> None:
    """In each of the ways to start an engine."""

    class Push(Plugin[Params]):
        name = "push"

        @classmethod
        def steers_hidden_states(cls) -> bool:
            return True

    register(Push)
    body = b'{"prompt": "x", "vllm_xargs": {"steer": "push"}}'
    status, _, answer, _, _ = run([ANSWER], request=[body], front_end=front_end())
    message = json.loads(answer)["error"]["message"]
    assert status == 400
    for way in ("--logits-processor push:", "llm-steer serve MODEL --steer push:", "logits_processors=['push:...']"):
        assert way in message


def test_a_client_that_goes_while_it_sends() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    parts = [{"type": "http.request", "body": b'{"ste', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON}
    asyncio.run(server.SteerMiddleware(app)(scope, receive, send))
    assert seen == ["http.request", "http.disconnect"]


def test_status() -> None:
    status, _, answer, _, _ = run([], method="GET", path="/v1/steer")
    assert (status, json.loads(answer)) == (200, {})


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_a_misplaced_key_is_seen_in_every_encoding(encoding: str) -> None:
    status, _, body, _, received = run([b"{}"], request=['{"steer": "off"}'.encode(encoding)])
    assert status == 400
    assert b"vllm_xargs" in body
    assert received == b""


def test_a_misplaced_key_is_seen_whatever_the_case_of_the_content_type() -> None:
    headers = [(b"content-type", b"APPLICATION/JSON")]
    assert run([b"{}"], request=[b'{"steer": "off"}'], headers=headers)[0] == 400


def test_a_boolean_is_no_number() -> None:
    """vLLM would hand it on as 1."""
    request = b'{"vllm_xargs": {"steer": "reflection_cycle", "steer_amplitude": true}}'
    status, _, body, _, _ = run([b"{}"], request=[request], front_end=front_end())
    assert status == 400
    assert json.loads(body)["error"]["param"] == "steer_amplitude"


@pytest.mark.parametrize(("path", "status"), [("/v1/responses", 400), ("/v1/messages", 400), ("/v1/completions", 200)])
def test_streams_without_a_place_for_the_trace_are_refused(path: str, status: int) -> None:
    request = b'{"stream": true, "vllm_xargs": {"steer": "reflection_cycle", "steer_trace": 1}}'
    assert run([b"{}"], request=[request], path=path, front_end=front_end())[0] == status


@pytest.mark.parametrize("steer", ["off", "reflection_cycle"])
def test_keys_that_would_kill_the_engine_cores_input_are_refused(steer: str) -> None:
    params = SimpleNamespace(extra_args={5: 1, "steer": steer})
    with pytest.raises(SteerError, match="extra_args: got 5"):
        front_end().stamp(params)


@pytest.mark.parametrize("named", ["reflection_cycl", "reflection_cycl:amplitude=5", "", "push;"])
def test_a_processor_that_is_neither_a_plugin_nor_a_class_is_refused(named):
    with pytest.raises(SteerError, match="reflection_cycle"):
        admission._split_processors([named])
    assert admission._split_processors(["somebody.elses:Processor"]) == ((), ["somebody.elses:Processor"])


def test_a_plugin_that_is_not_declared_is_told_so_before_its_parameters_are_looked_at():
    """Its artifact would not help."""
    for arguments in ({"steer": "rebalance"}, {"steer": "rebalance", "steer_artifact": "x"}):
        with pytest.raises(UnsupportedError, match="--logits-processor rebalance:"):
            front_end().stamp(SimpleNamespace(extra_args=arguments))


def test_prompt_embeddings_are_refused_where_the_prompts_tokens_count():
    pytest.importorskip("vllm", reason="raises vLLM's own error")
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    processor = SimpleNamespace(llm_steer=front_end())
    embedded = SimpleNamespace(prompt_embeds=[[0.5]])

    def process(steer):
        call = admission._around_process_inputs(lambda *arguments: embedded)
        return call(processor, "request", None, SamplingParams(extra_args={"steer": steer}))

    assert process("off") is embedded
    assert process({"name": "reflection_cycle", "origin": "output"}) is embedded
    with pytest.raises(VLLMValidationError, match=r"reflection_cycle goes by the prompt's tokens"):
        process("reflection_cycle")
