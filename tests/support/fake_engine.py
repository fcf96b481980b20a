"""An engine that answers by a rule, at once, and a task file to ask it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_steer.engines.base import Engine, Request, Response, Stream


def answer_by_seed(request: Request) -> Response:
    """Right for two seeds in three; steered answers are longer."""
    assert request.messages is not None
    a, b = (int(n) for n in request.messages[-1]["content"].split("+"))
    wrong = (request.sampling.seed or 0) % 3 == 0
    steered = request.steer not in (None, "off")
    thinking = "Wait, " * (2 if steered else 1)
    return Response(
        text=f"{thinking}</think>\\boxed{{{a + b + wrong}}}", prompt_tokens=3, tokens=8 + 4 * steered, seconds=0.01
    )


class FakeEngine(Engine):
    """Answers in reverse order, so that order is seen to be of no matter.

    Args:
        answer: from a request to its response; may raise to break off.
    """

    def __init__(self, answer: Callable[[Request], Response] = answer_by_seed, **identity: Any) -> None:
        self.answer, self.about = answer, identity
        self.asked: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> Stream:
        return _Stream(self, requests)

    def identity(self) -> dict[str, Any]:
        return {"engine": "fake", "model": "fake", "steering": [], **self.about}


class _Stream(Stream):
    def __init__(self, engine: FakeEngine, requests: Sequence[Request]) -> None:
        self._left: Iterator[tuple[int, Request]] = iter(reversed(list(enumerate(requests))))
        self._engine = engine

    def __next__(self) -> tuple[int, Response]:
        index, request = next(self._left)
        self._engine.asked.append(request)
        return index, self._engine.answer(request)

    def abort(self, index: int) -> None:
        pass

    def close(self) -> None:
        self._left = iter(())


def sums(folder: Path, count: int = 5, grader: str = "exact") -> dict[str, Any]:
    """A task of sums as a file: what a configuration has to say to use it."""
    task, rows = folder / "sums.yaml", folder / "sums.jsonl"
    task.write_text(
        f"name: sums\ntitle: Sums\ngrader: {grader}\ncolumns: {{a: a, b: b}}\nanswer: sum\nid: n\nlevel: b\n"
        "prompt: '{{a}}+{{b}}'\nthinking: required\nsampling: {max_tokens: 100}\n"
    )
    lines = [{"n": n, "a": 10 + n, "b": n % 2, "sum": 10 + n + n % 2} for n in range(count)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"model": "fake", "tasks": [str(task)], "data": {"sums": str(rows)}, "out": str(folder / "out")}
