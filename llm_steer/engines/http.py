"""OpenAI-compatible servers.

vLLM is recognised by the name that it gives in ``/v1/models``. What other servers do not know is sent to them only where a
request asks for it, and steering never: they would drop it without a word.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llm_steer import spec
from llm_steer.engines import voting
from llm_steer.engines.base import Engine, Request, Response, Stream
from llm_steer.engines.common import QueueStream, check, failed, response_of
from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError

if TYPE_CHECKING:
    import httpx

TRIES = 4
"""Attempts at one request at one server. If it could not be reached in the last one, it is dead."""
LOST = 3
"""Servers that may die over one request before the request is given up."""
FAULTS = 3
"""Requests that a server may fail and others answer before it is dropped."""
SILENCE = 120.0
"""Seconds without an answer after which a server hangs, if others answered meanwhile; at least ``PATIENCE`` times as long as
the longest answer took."""
PATIENCE = 5.0
BACKOFF = 0.5
"""Seconds before the second attempt; doubled for each further one, with jitter."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes that are tried again."""
OUT = (401, 403, 429, 502, 503, 504)
"""Status codes that say something of the server, not of the request: another server is asked."""

UNSTEERED = (
    "the server does not steer (it has no /v1/steer), so the request would be answered unsteered; "
    "serve the model with vLLM and llm-steer-plugin installed beside it"
)

_log = logging.getLogger(__name__)


class HTTPEngine(Engine):
    """One model behind one or more URLs.

    Args:
        urls: up to and with ``/v1``, or without it.
        model: name; the only one that the first server has if None.
        api_key: sent as a bearer token, and nowhere else.
        parallel: requests at a time, at each server.
        timeout: seconds in which one response must come. A server that lets it pass is dropped if there are others.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str | None = None,
        *,
        api_key: str | None = None,
        parallel: int = 32,
        timeout: float = 1800.0,
    ) -> None:
        if not urls:
            raise SteerError("urls", urls, "a list with at least one URL")
        for url in urls:
            if not re.match(r"https?://[^/]", url):
                raise SteerError("urls", _public(url, api_key), "URLs that begin with http:// or https://")
        if parallel < 1:
            raise SteerError("parallel", parallel, "at least 1")
        if not 0 < timeout < float("inf"):
            raise SteerError("timeout", timeout, "a number of seconds above 0")
        self._urls = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]
        if twice := [url for url, count in Counter(self._urls).items() if count > 1]:
            raise SteerError("urls", _public(twice[0], api_key), "URLs that are given once")
        self._key, self._parallel, self._timeout = api_key, parallel, timeout
        self._model = model
        self._servers: list[_Server] | None = None
        self._dropped: dict[str, str] = {}
        self._redone: Counter[str] = Counter()

    def submit(self, requests: Sequence[Request]) -> Stream:
        check(requests)
        return voting.submit(self._start, requests, local=False)

    def dropped(self) -> list[str]:
        return [
            f"{_public(url)}: {problem}; others redid {self._redone[url]} of its requests"
            for url, problem in self._dropped.items()
        ]

    def identity(self) -> dict[str, Any]:
        server = self._connect()[0]
        return {"engine": "http", "model": server.model, **server.about}

    # ------------------------------------------------------------------------------------------------------------------

    def _connect(self) -> list[_Server]:
        """The servers that answer, asked once."""
        if self._servers is None:
            found: list[_Server] = []
            problems: dict[str, str] = {}
            with _httpx().Client(headers=self._headers(), timeout=30) as client:
                for url in self._urls:
                    try:
                        found.append(_ask(client, url, self._model))
                    except SteerError as error:  # it is there, and serves something else
                        valid = f"{error.valid}, which {_public(url, self._key)} has"
                        raise SteerError(error.field, error.value, valid) from error
                    except (_httpx().HTTPError, ValueError) as error:
                        problems[url] = _public(str(error) or type(error).__name__, self._key)
            if not found:
                told = "; ".join(f"{_public(url)}: {problem}" for url, problem in problems.items())
                raise UnsupportedError(f"no server answers: {told}")
            self._refuse_difference(found)
            for url, problem in problems.items():
                self._drop(url, problem)
            self._servers = found
        return self._servers

    def _drop(self, url: str, problem: str) -> None:
        _log.warning("%s: %s: this server is asked no more", _public(url), problem)
        self._dropped[url] = problem

    def _refuse_difference(self, servers: Sequence[_Server]) -> None:
        """Answers of servers that are not alike must not be mixed."""
        first, *others = servers
        for other in others:
            for name in sorted({*first.identity, *other.identity}):
                here, there = first.identity.get(name), other.identity.get(name)
                if here != there:
                    url = _public(other.url, self._key)
                    raise SteerError("urls", url, f"servers that are alike: {name} is {there} there and {here} at the first")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _start(self, requests: Sequence[Request]) -> Stream:
        known = self._connect()
        servers = [server for server in known if server.url not in self._dropped] or known
        run = _Run(servers, requests, self._headers(), self._parallel, self._timeout, self._key, self._drop, self._redone)
        return run.stream


@dataclass(frozen=True)
class _Server:
    url: str
    model: str
    vllm: bool
    steers: bool
    about: Mapping[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self.model, "is vLLM": self.vllm, "can steer": self.steers, **self.about}


def _ask(client: httpx.Client, url: str, model: str | None) -> _Server:
    """What a server is."""
    answer = client.get(f"{url}/v1/models")
    answer.raise_for_status()
    models = {entry["id"]: entry for entry in answer.json().get("data", ())}
    if model is None and len(models) != 1:
        raise SteerError("model", None, f"one of {', '.join(models)}")
    name = model if model is not None else next(iter(models))
    if models and name not in models:
        raise SteerError("model", model, f"one of {', '.join(models)}")
    entry = models.get(name, {})
    about: dict[str, Any] = {k: entry[k] for k in ("root", "max_model_len") if entry.get(k) is not None}
    vllm = entry.get("owned_by") == "vllm"
    if vllm and (version := client.get(f"{url}/version")).is_success:
        about["vllm"] = version.json().get("version")
    status = client.get(f"{url}/v1/steer")
    if steers := vllm and status.is_success:
        about["steering"] = status.json().get("defaults", [])
    return _Server(url, name, vllm, steers, about)


class _Place:
    """A server while requests are on their way."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.dead = asyncio.Event()
        self.tasks: set[asyncio.Task[Response]] = set()
        self.refused: deque[int] = deque()
        """Requests that failed here, for others to try."""
        self.faults = 0
        """How many of these others answered."""
        self.heard = time.monotonic()
        """When it last answered, or had nothing to do."""


class _Run:
    """Requests on their way, in a thread with an event loop of its own."""

    def __init__(
        self,
        servers: Sequence[_Server],
        requests: Sequence[Request],
        headers: Mapping[str, str],
        parallel: int,
        timeout: float,
        key: str | None,
        drop: Callable[[str, str], None],
        redone: Counter[str],
    ) -> None:
        self._tell_dropped, self._redone = drop, redone
        self._places, self._requests, self._headers = [_Place(server) for server in servers], requests, headers
        self._parallel, self._timeout, self._key = parallel, timeout, key
        self._alive = len(servers)
        self._todo = deque(range(len(requests)))
        self._left = len(requests)
        self._tasks: dict[int, asyncio.Task[Response]] = {}
        self._aborted: set[int] = set()
        self._lost: Counter[int] = Counter()
        self._failed: dict[int, tuple[_Place, Response]] = {}
        """By request, the first place where it failed."""
        self._longest = 0.0
        """Seconds that an answer took."""
        self._problem = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self.stream = QueueStream(len(requests), self._abort, self._stop)
        threading.Thread(target=self._work, name="llm-steer-http", daemon=True).start()

    # -- from the caller's thread ------------------------------------------------------------------------------------------

    def _abort(self, index: int) -> None:
        self._aborted.add(index)
        self._call(lambda: self._cancel(index))

    def _stop(self) -> None:
        self._aborted.update(range(len(self._requests)))
        self._call(self._cancel_all)

    def _call(self, function: Any) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.stream.put(error)

    async def _main(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._more = asyncio.Condition()
        httpx = _httpx()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._parallel)
        timeout = httpx.Timeout(self._timeout, connect=10.0)
        try:
            async with httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout) as client:
                at_each = min(self._parallel, len(self._requests))
                workers = (self._worker(client, place) for place in self._places for _ in range(at_each))
                watch = asyncio.ensure_future(self._watch())
                await asyncio.gather(*workers)
                watch.cancel()
            for index in self._todo:
                self._done(index, failed(f"no server is left ({self._problem})"))
            for index in (index for place in self._places for index in place.refused):
                self._done(index, self._failed[index][1])
        finally:
            with self._lock:
                self._loop = None

    async def _worker(self, client: httpx.AsyncClient, place: _Place) -> None:
        """Keep a server busy until nothing is left, or it is dead."""
        while (index := await self._next(place)) is not None:
            response = await self._answer(client, place, index)
            async with self._more:
                if response is not None:
                    self._done(index, response)
                self._more.notify_all()

    async def _next(self, place: _Place) -> int | None:
        """A request for this server, once there is one; None when there will be none."""

        def queue() -> deque[int] | None:
            refused = (p.refused for p in self._places if p is not place or not self._others(place))
            return next((waiting for waiting in (*refused, self._todo) if waiting), None)

        async with self._more:
            await self._more.wait_for(lambda: queue() or not self._left or place.dead.is_set())
            if place.dead.is_set() or not self._left:
                return None
            if not place.tasks:
                place.heard = time.monotonic()
            waiting = queue()
            assert waiting is not None
            return waiting.popleft()

    async def _answer(self, client: httpx.AsyncClient, place: _Place, index: int) -> Response | None:
        """The response to a request; None if another server has to give it."""
        if index in self._aborted:
            return Response(finish="abort")
        before = self._failed.get(index)
        if before and before[0] is place:  # nobody else is left to try
            return before[1]
        try:
            path, body = _body(place.server, self._requests[index])
        except (SteerError, UnsupportedError) as error:
            return failed(error)
        task = asyncio.ensure_future(self._ask(client, place, path, body))
        self._tasks[index] = task
        place.tasks.add(task)
        try:
            response = await task
        except asyncio.CancelledError:
            if index in self._aborted:
                return Response(finish="abort")
            if not place.dead.is_set():
                raise
            return self._lose(place, index)
        except _Dead as error:
            self._drop(place, str(error))
            return self._lose(place, index)
        finally:
            self._tasks.pop(index, None)
            place.tasks.discard(task)
        place.heard = time.monotonic()
        if response.finish == "error":
            if before or not self._others(place):
                return response
            self._failed[index] = place, response
            place.refused.append(index)
            return None
        self._longest = max(self._longest, response.seconds)
        if before:
            self._blame(*before)
        return response

    def _lose(self, place: _Place, index: int) -> Response | None:
        self._lost[index] += 1
        if self._lost[index] == LOST:
            return failed(f"{LOST} servers died of it")
        self._redone[place.server.url] += 1
        self._todo.appendleft(index)
        return None

    def _blame(self, place: _Place, response: Response) -> None:
        """Note that a request which failed at a server was answered by another."""
        place.faults += 1
        self._redone[place.server.url] += 1
        if place.faults == FAULTS:
            self._drop(place, f"it failed {FAULTS} requests that others answered ({response.error})")

    async def _watch(self) -> None:
        """Drop servers that hang, and let others do their work."""
        while True:
            await asyncio.sleep(SILENCE / 20)
            silence = max(SILENCE, PATIENCE * self._longest)
            for place in self._places:
                silent = place.tasks and time.monotonic() - place.heard > silence
                if silent and self._longest and self._others(place) and not place.dead.is_set():
                    self._drop(place, f"no answer in {silence:.0f} s, in which others answered")
                    for task in list(place.tasks):
                        task.cancel()
                    async with self._more:
                        self._more.notify_all()  # its workers that wait for requests

    def _others(self, place: _Place) -> int:
        """How many servers are left besides this one."""
        return self._alive - (not place.dead.is_set())

    def _drop(self, place: _Place, problem: str) -> None:
        if not place.dead.is_set():
            place.dead.set()
            self._alive -= 1
            self._problem = f"{_public(place.server.url)}: {problem}"
            self._tell_dropped(place.server.url, problem)

    def _done(self, index: int, response: Response) -> None:
        self._left -= 1
        self.stream.put((index, response))

    def _cancel_all(self) -> None:
        for index in list(self._tasks):
            self._cancel(index)

    def _cancel(self, index: int) -> None:
        if (task := self._tasks.get(index)) is not None:
            task.cancel()

    async def _ask(self, client: httpx.AsyncClient, place: _Place, path: str, body: Mapping[str, Any]) -> Response:
        httpx = _httpx()
        began = time.perf_counter()
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF * 2 ** (attempt - 1) * (1 + random.random() / 4))
            if place.dead.is_set():
                raise _Dead(self._problem)
            try:
                answer = await client.post(place.server.url + path, json=body)
            except httpx.ReadTimeout:
                problem = f"no answer in {self._timeout:g} s"
                if not self._others(place):
                    return failed(problem)
                break
            except httpx.HTTPError as error:
                problem = _public(str(error) or type(error).__name__, self._key)
                continue
            if answer.status_code in BUSY and attempt < TRIES - 1:
                continue
            if answer.status_code not in OUT or not self._others(place):
                return _response(answer, time.perf_counter() - began, self._key)
            problem = f"status {answer.status_code}"
            break
        raise _Dead(problem)


class _Dead(Exception):
    """A server does not answer any more."""


def _body(server: _Server, request: Request) -> tuple[str, dict[str, Any]]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if server.vllm:  # else its own defaults, from the model's generation config, would stand in
        body.update(top_k=sampling.top_k, min_p=0.0, repetition_penalty=1.0, return_token_ids=True)
    elif sampling.top_k:
        body["top_k"] = sampling.top_k
    if request.template:
        body["chat_template_kwargs"] = dict(request.template)
    body.update(_steering(server, request))
    if request.prompt is not None:
        body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        if server.vllm and request.logprob:
            body["logprobs"] = 0
        return "/v1/completions", body
    body["messages"] = [dict(message) for message in request.messages or ()]
    if server.vllm and request.logprob:
        body["logprobs"] = True
    if request.continues:
        body.update(add_generation_prompt=False, continue_final_message=True)
    return "/v1/chat/completions", body


def _steering(server: _Server, request: Request) -> dict[str, Any]:
    steer = request.steer
    if not server.steers:
        if steer not in (None, False, spec.OFF, [], ()) or request.trace:
            raise UnsupportedError(UNSTEERED)
        return {}
    arguments: dict[str, Any] = {}
    if steer is not None:
        arguments[spec.PREFIX] = steer if isinstance(steer, str) else spec.OFF if not steer else json.dumps(steer)
    if request.trace:
        arguments[f"{spec.PREFIX}_trace"] = 1
    return {"vllm_xargs": arguments} if arguments else {}


def _response(answer: httpx.Response, seconds: float, key: str | None) -> Response:
    try:
        content = answer.json()
    except ValueError:
        content = answer.text
    response = response_of(answer.status_code, content, seconds)
    return replace(response, error=_public(response.error, key)) if response.error else response


def _public(text: str, key: str | None = None) -> str:
    """Without the key, and without the name and the password of an address."""
    return re.sub(r"(https?://)[^/@\s]*@", r"\1", text.replace(key, "…") if key else text)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingDependencyError("httpx", "http", "talking to a server") from None
    return httpx
