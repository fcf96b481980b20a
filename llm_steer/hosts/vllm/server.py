"""OpenAI server: an ASGI middleware that refuses misplaced steering keys and adds the trace to responses.

It is the innermost middleware, so that vLLM's API key guards it. Requests without a word about steering pass straight
through: their bodies are looked at as bytes and not parsed.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from llm_steer import registry, spec
from llm_steer.errors import SteerError, UnsupportedError, shorten
from llm_steer.hosts.vllm import admission, artifacts, compat, trace, voting
from llm_steer.hosts.vllm.voting import send_json as _send_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TOP_LEVEL = ("extra_args",)
_CARRIER = re.compile("xarg|^extra", re.IGNORECASE)
"""What fields are called that are meant to be vllm_xargs, or hold it: vLLM drops them."""
_SUSPECTS = re.compile(rb"steer|extra_args|logits_processors|use_beam_search|\\u|\x00", re.IGNORECASE)
_MISPLACED = "left out of the body's top level, where vLLM drops it: put it inside vllm_xargs"
_MISPLACED_CARRIER = (
    "called vllm_xargs, at the body's top level: vLLM drops this field (extra_body is an argument of the openai client, "
    "which sends what is in it at the top level)"
)
_MISPLACED_NAME = "left out: a request asks with vllm_xargs {'steer': NAME}, and a server with --logits-processor NAME"
_XARGS = "a text, a number or a list of these, as all of vllm_xargs; nested values go as JSON text into steer"
_EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)
_WITHOUT_CHOICES = ("/v1/responses", "/v1/messages")
_DONE = re.compile(rb"^data: \[DONE\]\r?$", re.MULTILINE)


class SteerMiddleware:
    """Pure ASGI: no task of its own, no buffering of streams."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "GET" and scope["path"] == "/v1/steer":
            await _send_json(send, 200, _status(scope["app"]))
            return
        if scope["path"].startswith(artifacts.PATH):
            await _send_json(send, *await _artifacts(scope, receive))
            return
        if scope["method"] == "POST" and _is_json(scope["headers"]):
            body, receive = await _read(receive)
            try:
                if _SUSPECTS.search(body):
                    if vote := voting.find(body, scope["path"]):
                        await voting.answer(self, scope, receive, send, *vote)
                        return
                    _check_body(body, scope["path"], admission.of_app(scope.get("app")))
            except (SteerError, UnsupportedError) as error:
                await _send_json(send, 400, _refusal(error))
                return
        choices: list[trace.Choice] = []
        trace.collected.set(choices)
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        await self.app(scope, receive, _Tracing(send, choices, client))


class _Tracing:
    """``send`` that adds what was traced: a field of each choice, or one more event of a stream."""

    def __init__(self, send: Send, choices: list[trace.Choice], client: Any = None) -> None:
        self._send = send
        self._choices = choices
        self._client = client
        self._start: Message | None = None
        self._body = bytearray()
        self._streams = False
        self._event: dict[str, Any] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = b"text/event-stream" in dict(message["headers"]).get(b"content-type", b"")
            if self._choices and not self._streams:  # a whole response: generation is over, the traces are there
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            await self._measure()
            body = _with_traces(bytes(self._body), self._choices)
            headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
            await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            message = {**message, "body": body}
        elif message["type"] == "http.response.body" and self._choices:
            body = await self._with_event(message.get("body", b""), message.get("more_body", False))
            message = {**message, "body": body}
        await self._send(message)

    async def _measure(self) -> None:
        await trace.measure(self._client, [choice.source for choice in self._choices if choice.source is not None])

    async def _with_event(self, part: bytes, more: bool) -> bytes:
        """A part of a stream; before its end mark, one more event like the others, with the traces.

        Goes by whole lines: one that is not complete waits for its end.
        """
        self._body += part
        end = self._body.rfind(b"\n") + 1 if more else len(self._body)
        lines = bytes(self._body[:end])
        del self._body[:end]
        if self._event is None and (match := _EVENT.search(lines)):
            event = json.loads(match[1])
            self._event = {key: event.get(key) for key in ("id", "object", "created", "model")}
        if (done := _DONE.search(lines)) is None:
            return lines
        await self._measure()
        event = json.dumps({**(self._event or {}), "choices": [], "steering": _traces(self._choices)})
        return lines[: done.start()] + b"data: " + event.encode() + b"\n\n" + lines[done.start() :]


def _traces(choices: Iterable[trace.Choice]) -> list[dict[str, Any]]:
    """Traces in the order of the response's choices, each with its ``index``."""
    order = sorted(choices, key=lambda c: (_prompt_number(c.request_id), c.index))
    return [{"index": i, **(c.source.trace() if c.source else {"plugins": []})} for i, c in enumerate(order)]


def _prompt_number(request_id: str) -> int:
    # vLLM numbers the prompts of one HTTP request at the end of their ids: cmpl-<uuid>-3.
    match = re.search(r"[-_](\d+)$", request_id)
    return int(match[1]) if match else 0


def _with_traces(body: bytes, choices: Iterable[trace.Choice]) -> bytes:
    try:
        response = json.loads(body)
    except ValueError:
        return body
    if not isinstance(response, dict):
        return body
    if isinstance(response.get("choices"), list):
        traces = {t.pop("index"): t for t in _traces(choices)}
        for choice in response["choices"]:
            choice["steering"] = traces.get(choice.get("index"))
    else:  # an API without choices (responses, messages)
        response["steering"] = _traces(choices)
    return json.dumps(response, ensure_ascii=False).encode()


def _check_body(body: bytes, path: str, front_end: admission.Admission | None) -> None:
    """Refuse what vLLM would drop without a word, or refuse too late."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return  # vLLM says what is wrong with it
    if not isinstance(request, dict):
        return
    for key, value in request.items():
        if key in TOP_LEVEL or key.lower().startswith(spec.PREFIX):
            raise SteerError(key, value, _MISPLACED)
        if key != "vllm_xargs" and _CARRIER.search(key) and f'"{spec.PREFIX}' in json.dumps(value).lower():
            raise SteerError(key, value, _MISPLACED_CARRIER)
        if key == "logits_processors" and any(registry.is_plugin(str(name).partition(":")[0]) for name in _items(value)):
            raise SteerError(key, value, _MISPLACED_NAME)
    arguments = request.get("vllm_xargs")
    if arguments is None:
        return
    if not isinstance(arguments, dict):
        raise SteerError("vllm_xargs", arguments, "a mapping of names to values")
    for key, value in arguments.items():
        if admission.is_ours(key) and not _fits_xargs(value):
            raise SteerError(key, value, _XARGS + (f"; {spec.OFF!r} steers nothing" if value is None else ""))
    if request.get("use_beam_search"):
        # vLLM drops vllm_xargs here, so that neither a request to steer nor "off" would arrive.
        if admission.asks_for_steering(arguments):
            raise UnsupportedError(
                f"steering ({shorten(arguments)}) and use_beam_search exclude each other: vLLM's beam search ranks raw "
                "log-probabilities; leave one of them out"
            )
        if spec.PREFIX in arguments:
            admission.without_steering()
        return
    if request.get("stream") and arguments.get(f"{spec.PREFIX}_trace") and path.rstrip("/").endswith(_WITHOUT_CHOICES):
        raise SteerError(f"{spec.PREFIX}_trace", 1, "left out of a stream of this API, which has no place for the trace")
    if front_end is not None:
        # vLLM looks at them when a stream has begun, with status 200, and gets booleans as numbers.
        front_end.read(arguments)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fits_xargs(value: Any) -> bool:
    """vLLM's HTTP schema takes it."""
    return all(isinstance(item, str | int | float) for item in _items(value))


async def _artifacts(scope: Message, receive: Receive) -> tuple[int, Any]:
    app = scope["app"]
    body = b"" if scope["method"] == "GET" else (await _read(receive))[0]
    if (front_end := admission.of_app(app)) is not None:
        try:
            client = app.state.engine_client
            said = await artifacts.answer(scope["method"], scope["path"].rstrip("/"), body, client, front_end)
        except (SteerError, UnsupportedError) as error:
            return 400, _refusal(error)
        if said is not None:
            return said
    return 404, {"error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}}


def _refusal(error: SteerError | UnsupportedError) -> dict[str, Any]:
    parameter = error.field if isinstance(error, SteerError) else spec.PREFIX
    return {"error": {"message": str(error), "type": "BadRequestError", "param": parameter, "code": 400}}


def _status(app: Any) -> dict[str, Any]:
    front_end = admission.of_app(app)
    return front_end.status() if front_end else {}


def _is_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and b"json" in value.lower() for name, value in headers)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole request body, and a ``receive`` that hands out the same messages again."""
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)
    messages.reverse()

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return body, again


def install() -> None:
    """Hook the middleware in, if this process is an API server."""
    if compat.MIDDLEWARE.module not in sys.modules:
        return
    compat.install(compat.MIDDLEWARE, _around_init_middleware)
    voting.configure()
    # It was imported by name before we came.
    application: Any = sys.modules.get("vllm.entrypoints.launchers.app")
    if application is not None:
        application.init_entrypoints_middleware = sys.modules[compat.MIDDLEWARE.module].init_entrypoints_middleware


def _around_init_middleware(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *more: Any, **kwargs: Any) -> Any:
        app.add_middleware(SteerMiddleware)  # the first that is added is the innermost
        return original(args, app, *more, **kwargs)

    return init_entrypoints_middleware
