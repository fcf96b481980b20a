"""An engine whose answers a test writes down. One response comes at a time; what is aborted before comes as aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llm_steer.engines import voting
from llm_steer.engines.base import Engine, Request, Response, Stream
from llm_steer.engines.common import check

Answer = Callable[[Request], str | Response]


class ScriptedEngine(Engine):
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Request] = []
        self.batches: list[int] = []
        self.aborted = 0

    def submit(self, requests: Sequence[Request]) -> Stream:
        check(requests)
        return voting.submit(self._start, requests)

    def identity(self) -> dict[str, Any]:
        return {"engine": "scripted", "model": "none"}

    def _start(self, requests: Sequence[Request]) -> Stream:
        self.asked.extend(requests)
        self.batches.append(len(requests))
        return _Stream(self, requests)


class _Stream(Stream):
    def __init__(self, engine: ScriptedEngine, requests: Sequence[Request]) -> None:
        self._engine, self._requests = engine, requests
        self._left = list(range(len(requests)))
        self._aborted: set[int] = set()

    def __next__(self) -> tuple[int, Response]:
        if not self._left:
            raise StopIteration
        index = self._left.pop(0)
        if index in self._aborted:
            self._engine.aborted += 1
            return index, Response(finish="abort", tokens=1)
        said = self._engine.answer(self._requests[index])
        return index, said if isinstance(said, Response) else Response(text=said, tokens=len(said.split()), prompt_tokens=5)

    def abort(self, index: int) -> None:
        if index in self._left:
            self._aborted.add(index)

    def close(self) -> None:
        self._left = []
