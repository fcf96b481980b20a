"""Requests that a plugin answers by several, on any engine: all of them run as one batch."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any

from llm_steer import sandbox, spec
from llm_steer.engines.ballot import Ballot, voter_of
from llm_steer.engines.base import Request, Response, Sampling, Stream
from llm_steer.engines.common import check, failed
from llm_steer.errors import SteerError

READERS = 4
"""Responses that are read at once."""
GRACE = 0.02
"""Seconds to wait for a response to be read before the engine goes on: most are at once, and may end the others."""


def submit(start: Callable[[Sequence[Request]], Stream], requests: Sequence[Request], *, local: bool = True) -> Stream:
    """Start requests, those that vote too.

    Args:
        start: runs plain requests on an engine.
        local: the engine runs here, so that its plugins are those that are installed here.
    """
    ballots: dict[int, Ballot | SteerError] = {}
    for index, request in enumerate(requests):
        try:
            if (voter := voter_of(request.steer)) is not None:
                if request.messages is None or request.continues:
                    raise SteerError("messages", request.messages, f"a question: {voter.plugin.name} votes on answers")
                ballots[index] = Ballot(voter, body_of(request), local=local)
        except SteerError as error:
            ballots[index] = error
    return _Voting(start, requests, ballots) if ballots else start(requests)


def body_of(request: Request) -> dict[str, Any]:
    """A request as OpenAI body, as plugins see it."""
    sampling = {k: v for k, v in asdict(request.sampling).items() if v is not None}
    return {"messages": [dict(m) for m in request.messages or ()], **sampling, "stop": list(request.sampling.stop)}


def request_of(body: Mapping[str, Any], original: Request, rest: Any) -> Request:
    """The request that a plugin made of another one's body."""
    given = {name: body[name] for name in asdict(original.sampling) if name in body}
    given["stop"] = tuple(given.get("stop") or ())
    own = (body.get("vllm_xargs") or {}).get(spec.PREFIX)
    template = body.get("chat_template_kwargs")
    return replace(
        original,
        messages=body["messages"],
        sampling=Sampling(**given),
        steer=rest if own is None else json.loads(own) if own[:1] in ("{", "[") else own,
        template=original.template if template is None else template,
        logprob=original.logprob or bool(body.get("logprobs")),
        continues=bool(body.get("continue_final_message", original.continues)),
    )


class _Voting(Stream):
    """Takes responses from an engine, and hands out one for each question."""

    def __init__(
        self,
        start: Callable[[Sequence[Request]], Stream],
        requests: Sequence[Request],
        ballots: Mapping[int, Ballot | SteerError],
    ) -> None:
        self._ballots = {index: ballot for index, ballot in ballots.items() if isinstance(ballot, Ballot)}
        self._ready: deque[tuple[int, Response]] = deque()
        self._ready.extend((index, failed(e)) for index, e in ballots.items() if isinstance(e, SteerError))
        self._owner: list[tuple[int, int]] = []
        """Of each running request: its question, and its number among the requests of that."""
        self._aborted: set[int] = set()
        running: list[Request] = []
        for index, request in enumerate(requests):
            ballot = ballots.get(index)
            if ballot is None:
                self._owner.append((index, 0))
                running.append(request)
            elif isinstance(ballot, Ballot):
                for number, body in enumerate(ballot.bodies):
                    self._owner.append((index, number))
                    running.append(request_of(body, request, ballot.voter.rest))
        self._number_of = {owner: i for i, owner in enumerate(self._owner)}
        check(running)
        self._began = time.perf_counter()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="llm-steer-read")
        self._reading: dict[Future[dict[str, Any]], tuple[int, int, Response]] = {}
        self._needless = {index: threading.Event() for index in self._ballots}
        """Set when nobody waits for what a question's responses say: programs that are checked end then."""
        self._stream = start(running)

    def __next__(self) -> tuple[int, Response]:
        while not self._ready:
            self._collect(0)
            if self._ready:
                break
            try:
                number, response = next(self._stream)
            except StopIteration:
                if not self._reading:
                    self._pool.shutdown()
                    raise
                self._collect(None)
                continue
            index, part = self._owner[number]
            ballot = self._ballots.get(index)
            if ballot is None:
                self._ready.append((index, response))
            elif response.finish == "abort":
                self._put(ballot, index, part, response, None)
            else:
                future = self._pool.submit(self._read, ballot, index, part, response)
                self._reading[future] = (index, part, response)
                self._collect(GRACE)
        return self._ready.popleft()

    def _read(self, ballot: Ballot, index: int, part: int, response: Response) -> dict[str, Any]:
        with sandbox.until(self._needless[index]):
            return ballot.read(part, response)

    def _collect(self, timeout: float | None) -> None:
        """Take what was read."""
        if self._reading:
            done, _ = wait(self._reading, timeout, FIRST_COMPLETED)
            for future in done:
                index, part, response = self._reading.pop(future)
                self._put(self._ballots[index], index, part, response, future.result())

    def _put(self, ballot: Ballot, index: int, part: int, response: Response, reading: dict[str, Any] | None) -> None:
        ballot.put(part, response, reading)
        if not ballot.missing:
            result = replace(ballot.result(), seconds=time.perf_counter() - self._began)
            self._ready.append((index, replace(result, finish="abort") if index in self._aborted else result))
        elif reading is not None and ballot.decided:
            self._give_up(index)

    def _give_up(self, index: int) -> None:
        ballot = self._ballots[index]
        self._needless[index].set()
        for part in ballot.missing:
            self._stream.abort(self._number_of[index, part])

    def abort(self, index: int) -> None:
        if index in self._ballots:
            self._aborted.add(index)
            self._give_up(index)
        elif (index, 0) in self._number_of:
            self._stream.abort(self._number_of[index, 0])

    def close(self) -> None:
        self._stream.close()
        self._ready.clear()
        self._reading.clear()
        for needless in self._needless.values():
            needless.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
