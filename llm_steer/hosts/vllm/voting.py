"""OpenAI server: one chat request that a plugin answers by several.

The requests that it becomes go through the middleware and the application like any client's, inside this process: they are
validated, steered, traced and aborted by what there is for that. The client gets one completion, or one stream of progress
with the answer at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast, get_args

from llm_steer import sandbox, spec
from llm_steer.engines.ballot import Ballot, Voter, voter_of
from llm_steer.engines.base import Response
from llm_steer.engines.common import Gathered, response_of
from llm_steer.errors import SteerError
from llm_steer.hosts.vllm import admission
from llm_steer.plugin import Plugin

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PATH = "/v1/chat/completions"
TOKENS = "LLM_STEER_VOTING_TOKENS"
"""Environment variable of the operator: tokens that all requests of one question may generate together."""
MOST_TOKENS = 65_536
SANDBOX = "LLM_STEER_SANDBOX"
"""Environment variable of the operator: programs that may run at once, 0 for none; ``bubblewrap:4`` runs them there."""

DEFAULTS = "LLM_STEER_VOTING"
"""Environment variable of the operator: parameters of a plugin that votes, over which a request's own are merged; written as
for ``llm-steer serve --steer``."""
QUESTION = {"role": "user", "content": "Which one?\n(A) This.\n(B) That."}
"""Of any kind."""

TOKENIZE = "/tokenize"
"""Path of vLLM's server that tells how many tokens a prompt has."""

_readers = ThreadPoolExecutor(32, thread_name_prefix="llm-steer-read")
"""Not the loop's own: programs in the sandbox take their time, and wait for each other."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None,),
}
"""Fields that mean nothing for an answer that several requests gave, and the values that ask for nothing."""


def configure() -> None:
    """Read what the operator allows, at start-up."""
    backend, _, parallel = os.environ.get(SANDBOX, "").rpartition(":")
    if backend not in ("", *get_args(sandbox.Backend)) or (backend and not parallel):
        raise SteerError(SANDBOX, f"{backend}:{parallel}", "a whole number, or wasm: or bubblewrap: and one")
    sandbox.allow(_whole(SANDBOX, parallel, 0), cast(sandbox.Backend, backend or "wasm"))
    _number(TOKENS, MOST_TOKENS)
    for steer in _defaults():  # ask once in vain: what a question needs (prompts) is there
        Ballot(Voter(steer.plugin, steer.params, spec.OFF, f"{DEFAULTS}: "), {"messages": [QUESTION]})


def _number(name: str, default: int) -> int:
    return _whole(name, os.environ.get(name, ""), default)


def _whole(name: str, text: str, default: int) -> int:
    if text and not text.isdecimal():
        raise SteerError(name, text, "a whole number")
    return int(text) if text else default


def _defaults() -> spec.Spec:
    text = os.environ.get(DEFAULTS, "").strip()
    if not text:
        return ()
    try:
        steer = spec.parse_option(text)
    except SteerError as error:
        raise SteerError(f"{DEFAULTS}: {error.field}", error.value, error.valid) from error
    if not steer.plugin.votes:
        raise SteerError(DEFAULTS, text, "a plugin that votes; those that steer tokens are declared to vLLM")
    return (steer,)


def find(body: bytes, path: str) -> tuple[dict[str, Any], Voter] | None:
    """The chat request, and the plugin that votes on it; None for every other request.

    Raises:
        SteerError: parameters or fields that it does not take.
    """
    if not path.rstrip("/").endswith(PATH):
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    arguments = request.get("vllm_xargs") if isinstance(request, dict) else None
    if not isinstance(arguments, dict) or spec.PREFIX not in arguments:
        return None
    named = (spec.PREFIX, f"{spec.PREFIX}_trace")
    prefix = f"{spec.PREFIX}_"
    fields = {k.removeprefix(prefix): v for k, v in arguments.items() if k.startswith(prefix) and k not in named}
    voter = voter_of(arguments[spec.PREFIX], fields, _defaults(), prefix=prefix)
    if voter is None:
        return None
    for name in sorted(voter.given):
        if _is_operator_s(voter.plugin, name):
            raise SteerError(
                f"{voter.label}{name}", getattr(voter.params, name), "left out: it is not for clients of a server"
            )
    spec.parse_flat({k: v for k, v in arguments.items() if k.removeprefix(prefix) not in fields})
    for name, harmless in UNSUPPORTED.items():
        if name in request and request[name] not in harmless:
            raise SteerError(name, request[name], f"left out with {voter.plugin.name}, which answers by a vote")
    if not isinstance(request.get("messages"), list):
        raise SteerError("messages", request.get("messages"), "a list")
    return request, voter


def _is_operator_s(plugin: type[Plugin[Any]], name: str) -> bool:
    field = plugin.Params.model_fields.get(name)
    extra = field.json_schema_extra if field else None
    return isinstance(extra, dict) and bool(extra.get("operator"))


def _ballot(voter: Voter, request: Mapping[str, Any]) -> Ballot:
    try:
        return Ballot(voter, request)
    except SteerError as error:
        name = error.field.removeprefix(voter.label)
        if name in voter.given or not _is_operator_s(voter.plugin, name):
            raise
        raise SteerError(error.field, "the operator's", error.valid) from error  # no path of this machine for a client


async def answer(app: App, scope: Message, receive: Receive, send: Send, request: dict[str, Any], voter: Voter) -> None:
    """Answer a chat request.

    Args:
        app: takes the requests that it becomes.
        receive: of the client, whose body has been read.

    Raises:
        SteerError: before anything was sent or started.
    """
    streams = bool(request.get("stream"))
    poll = _Poll(app, scope, request, voter)
    await poll.prepare()
    reply = _Stream(send, poll) if streams else _Whole(send, poll)
    gone = asyncio.ensure_future(_gone(receive))
    work = asyncio.ensure_future(poll.run(reply.progress))
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            await reply.end()
    finally:
        poll.leave()
        for task in (gone, work):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _gone(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Poll:
    """The requests that one chat request becomes."""

    def __init__(self, app: App, scope: Message, request: dict[str, Any], voter: Voter) -> None:
        self.app, self.scope, self.request = app, scope, request
        arguments = {k: v for k, v in request["vllm_xargs"].items() if not k.startswith(spec.PREFIX)}
        rest = voter.rest if isinstance(voter.rest, str) else json.dumps(voter.rest)
        arguments[spec.PREFIX] = rest
        if request["vllm_xargs"].get(f"{spec.PREFIX}_trace"):
            arguments[f"{spec.PREFIX}_trace"] = 1
        plain = {k: v for k, v in request.items() if k not in ("stream", "stream_options") and k not in UNSUPPORTED}
        self.ballot = _ballot(voter, {**plain, "vllm_xargs": arguments})
        for body in self.ballot.bodies:
            _check_steering(scope, body)
        self.refused: tuple[int, Any] | None = None
        """Status and body of the first request that was not answered."""
        self.model = request.get("model")
        self.stops = [asyncio.Event() for _ in self.ballot.bodies]
        self._needless = threading.Event()
        """Set when nobody waits for what the responses say: programs that are checked end then."""

    async def prepare(self) -> None:
        """What must be known before anything runs.

        Raises:
            SteerError: the requests may generate too much together.
        """
        if self.request.get("max_tokens") is None and self.request.get("max_completion_tokens") is None:
            await self._fit()
        self._check_cost()

    async def _fit(self) -> None:
        """Nobody said how many tokens: no more than the model has room for behind each prompt."""
        prompts = {json.dumps(body["messages"]): body for body in self.ballot.bodies}
        rooms = dict(zip(prompts, await asyncio.gather(*map(self._room, prompts.values())), strict=True))
        for body in self.ballot.bodies:
            body["max_tokens"] = min(body["max_tokens"], rooms[json.dumps(body["messages"])] or body["max_tokens"])

    async def _room(self, body: Mapping[str, Any]) -> int | None:
        """Tokens that the model can generate behind a prompt, at least 1: vLLM says of a prompt that is too long that it is.
        None if that is not known."""
        fields = ("model", "messages", "chat_template_kwargs", "chat_template")
        asked = json.dumps({name: body[name] for name in fields if name in body}).encode()
        path = self.scope["path"].rstrip("/").removesuffix(PATH) + TOKENIZE
        scope = {**_scope(self.scope, 0, len(asked)), "path": path, "raw_path": path.encode()}
        status, content = await _ask(self.app, scope, asked)
        if status != 200 or not isinstance(content, dict) or "max_model_len" not in content:
            return None
        most, used = int(content["max_model_len"]), int(content["count"])
        return max(most - used, 1)

    def _check_cost(self) -> None:
        most = _number(TOKENS, MOST_TOKENS)
        asked = [body["max_tokens"] for body in self.ballot.bodies]
        if (total := sum(asked)) > most:
            raise SteerError(
                "max_tokens",
                max(asked),
                f"lower (or n): the {len(asked)} requests of this question may have {most} tokens together, not {total}",
            )

    async def run(self, progress: Callable[[int, dict[str, Any]], Awaitable[None]]) -> None:
        """Ask all, read what comes, and stop the others once the answer is certain."""
        tasks = {asyncio.ensure_future(self._ask(index)): index for index in range(len(self.ballot.bodies))}
        try:
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):
                    index = tasks[task]
                    response, reading = task.result()
                    self.ballot.put(index, response, reading)
                    if reading is not None:
                        if response.error is None:
                            await progress(index, reading)
                        if self.ballot.decided:
                            self.leave()
                            for missing in self.ballot.missing:
                                self.stops[missing].set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        """What the remaining responses say makes no difference."""
        self._needless.set()

    def _read(self, index: int, response: Response) -> dict[str, Any]:
        with sandbox.until(self._needless):
            return self.ballot.read(index, response)

    async def _ask(self, index: int) -> tuple[Response, dict[str, Any] | None]:
        """One request, through the application."""
        body = dict(self.ballot.bodies[index])
        if len(self.stops) > 1:  # it may be stopped: what it has by then is known of a stream only
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if "request_id" in body:
            body["request_id"] = f"{body['request_id']}-{index}"
        data = json.dumps(body).encode()
        stop = self.stops[index]
        parts = [{"type": "http.request", "body": data, "more_body": False}]
        status, content, whole = 0, bytearray(), False
        stream: Gathered | None = None

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await stop.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, whole, stream
            if message["type"] == "http.response.start":
                status = message["status"]
                if b"text/event-stream" in dict(message["headers"]).get(b"content-type", b""):
                    stream = Gathered()
            else:
                whole = not message.get("more_body")
                if stream is None:
                    content.extend(message.get("body", b""))
                else:
                    stream.feed(message.get("body", b""))

        began = time.perf_counter()
        call = asyncio.ensure_future(self.app(_scope(self.scope, index, len(data)), receive, send))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({call, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and not whole:
                if stream is None:
                    return Response(finish="abort"), None
                return replace(response_of(200, stream.content, time.perf_counter() - began), finish="abort"), None
            await call
        finally:
            # It sees that its client has left, and aborts. If it were cancelled, vLLM's handler would leave its task behind.
            stop.set()
            stopped.cancel()
            await asyncio.wait({call}, timeout=5)
            call.cancel()
            await asyncio.wait({call})
        try:
            answered = json.loads(bytes(content)) if stream is None else stream.content
        except ValueError:
            answered = bytes(content).decode(errors="replace")
        response = response_of(status, answered, time.perf_counter() - began)
        if response.error is not None and self.refused is None:
            self.refused = status if status >= 400 else 500, answered
        elif response.error is None:
            self.model = answered.get("model", self.model)
        loop = asyncio.get_running_loop()
        return response, await loop.run_in_executor(_readers, self._read, index, response)


async def _ask(app: App, scope: Message, body: bytes) -> tuple[int, Any]:
    """Status and JSON of one request that is not stopped."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    status, content = 0, bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # a client that stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        content.extend(message.get("body", b""))

    await app(scope, receive, send)
    try:
        return status, json.loads(bytes(content))
    except ValueError:
        return status, None


def _check_steering(scope: Message, body: Mapping[str, Any]) -> None:
    """What the front end would refuse when the first requests run already."""
    if (front_end := admission.of_app(scope.get("app"))) is not None:
        front_end.read(body.get("vllm_xargs") or {})


def _scope(scope: Message, index: int, length: int) -> Message:
    """The client's scope for one of the requests: of another length and, if it was given one, with another id."""
    headers = []
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            headers.append((name, value + b"-%d" % index))
        elif name not in (b"content-length", b"transfer-encoding", b"content-encoding"):
            headers.append((name, value))
    copied = {**scope, "headers": [*headers, (b"content-length", b"%d" % length)]}
    copied["state"] = dict(scope.get("state") or {})
    return copied


class _Reply:
    """What the client gets."""

    def __init__(self, send: Send, poll: _Poll) -> None:
        self._send, self._poll = send, poll
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}

    async def progress(self, index: int, reading: dict[str, Any]) -> None:
        """A response was read."""

    async def end(self) -> None:
        """All that matter were."""
        raise NotImplementedError

    async def _refuse(self) -> bool:
        """Pass on why nothing was answered."""
        if self._poll.refused is None or self._poll.ballot.result().error is None:
            return False
        await send_json(self._send, *self._poll.refused)
        return True

    def _usage(self, response: Response) -> dict[str, int]:
        total = response.prompt_tokens + response.tokens
        return {"prompt_tokens": response.prompt_tokens, "completion_tokens": response.tokens, "total_tokens": total}

    def _fields(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._poll.model}


class _Whole(_Reply):
    async def end(self) -> None:
        if await self._refuse():
            return
        response = self._poll.ballot.result()
        message = {"role": "assistant", "content": response.text}
        choice = {"index": 0, "message": message, "finish_reason": response.finish, "steering": response.steering}
        whole = {**self._fields("chat.completion"), "choices": [choice], "usage": self._usage(response)}
        await send_json(self._send, 200, whole)


class _Stream(_Reply):
    """Server-sent events: after each response that was read an event with an empty delta and ``steering.progress``; then the
    answer; then, as behind every stream of a traced request, an event without choices that has ``steering``."""

    _started = False

    async def progress(self, index: int, reading: dict[str, Any]) -> None:
        ballot = self._poll.ballot
        told = {k: v for k, v in reading.items() if k not in ("check", "steering")}
        read = len(ballot.bodies) - len(ballot.missing)
        progress = {"request": index, "read": read, "of": len(ballot.bodies), **told}
        await self._event({"content": ""}, steering={"progress": progress})

    async def end(self) -> None:
        if not self._started and await self._refuse():
            return
        response = self._poll.ballot.result()
        await self._event({"content": response.text if response.error is None else ""})
        await self._event({}, finish="length" if response.finish == "length" else "stop")
        options = self._poll.request.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            await self._line({**self._fields("chat.completion.chunk"), "choices": [], "usage": self._usage(response)})
        told = [{"index": 0, **(response.steering or {"plugins": []})}]
        await self._line({**self._fields("chat.completion.chunk"), "choices": [], "steering": told})
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        if not self._started:  # not before: a request that is refused gets its status
            self._started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        await self._line({**self._fields("chat.completion.chunk"), "choices": [choice], **more})

    async def _line(self, event: dict[str, Any]) -> None:
        body = b"data: " + json.dumps(event).encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def send_json(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
