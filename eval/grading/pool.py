"""math-verify in processes of their own, each killed when one comparison takes too long."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from importlib.util import find_spec

from llm_steer.errors import MissingDependencyError

PATIENCE = 120.0
"""A niced process on a busy machine gets little of it: a verdict must not depend on what else runs."""
LOADING = 300.0
"""Seconds in which a worker must have loaded its libraries."""


class MathPool:
    """Compares answers by computer algebra: one process for each thread that asks.

    Args:
        seconds: whole seconds of CPU time that one comparison may take; ``PATIENCE`` times as many on the clock.
    """

    def __init__(self, seconds: int = 5) -> None:
        if find_spec("math_verify") is None:
            raise MissingDependencyError("math-verify", "eval", "grading of mathematics")
        self.seconds = seconds
        self._local = threading.local()
        self._started: list[_Worker] = []

    def equal(self, gold: str, answer: str) -> bool | str:
        """Whether math-verify finds two expressions equal; ``"timeout"`` or an exception's name where it says nothing."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.alive:
            worker = self._local.worker = _Worker(self.seconds)
            self._started.append(worker)
        return worker.ask(gold, answer)

    def close(self) -> None:
        for worker in self._started:
            worker.end()

    def __enter__(self) -> MathPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process, used by one thread."""

    def __init__(self, seconds: int) -> None:
        command = [sys.executable, "-m", "llm_steer.eval.grading.worker", str(seconds)]
        self.seconds = seconds
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._read(LOADING)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, gold: str, answer: str) -> bool | str:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.end()
            return "error"
        line = self._read(self.seconds * PATIENCE)
        if not line:
            self.end()
            return "timeout"
        result: bool | str = json.loads(line)
        return result

    def _read(self, seconds: float) -> str:
        """The next line; nothing once the process is dead, which it is after ``seconds``."""
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be written has no reader
                    pipe.close()
