"""Worker processes: started when they are needed, used again, killed when a program does not end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError
from llm_steer.sandbox import bubblewrap
from llm_steer.sandbox.limits import LONGEST, PATIENCE, Limits, Outcome, Status, stopped
from llm_steer.sandbox.module import WORKER, compiled, interpreter

MOST = 32
"""Programs at once, unless :func:`allow` says otherwise; fewer where there are fewer cores."""
Backend = Literal["wasm", "bubblewrap"]


class _Worker:
    def __init__(self, module: Path) -> None:
        # Of the environment only the path to the packages: no keys, no proxies.
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.defpath},
            cwd=os.path.abspath(os.sep),
            start_new_session=True,
        )
        self._buffer = b""
        if self._line(60.0) != b"ready":
            self.kill()
            raise UnsupportedError("the sandbox does not start: wasmtime cannot load its compiled interpreter here")

    def run(self, code: str, limits: Limits) -> Outcome | None:
        """None if it had to be killed, or died."""
        job = {"code": code, "fuel": limits.fuel, "memory": limits.memory, "output": limits.output, "wall": limits.wall}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._line(limits.wall, stopped)
        return Outcome(**json.loads(line)) if line is not None else None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _line(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bytes | None:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or give_up():
                return None
            if not select.select([stream], [], [], min(left, PATIENCE))[0]:
                continue
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class _Pool:
    def __init__(self, parallel: int, backend: Backend = "wasm") -> None:
        self.parallel, self.backend = parallel, backend
        self._free = threading.BoundedSemaphore(parallel) if parallel else None
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, code: str, limits: Limits) -> Outcome:
        if self._free is None:
            raise UnsupportedError("running programs is off here; an operator turns it on by LLM_STEER_SANDBOX=4")
        while not self._free.acquire(timeout=PATIENCE):
            if stopped():
                return Outcome("stopped")
        try:
            if stopped():
                return Outcome("stopped")
            return bubblewrap.run(code, limits) if self.backend == "bubblewrap" else self._run(code, limits)
        finally:
            self._free.release()

    def _run(self, code: str, limits: Limits) -> Outcome:
        worker = self._take(compiled())
        began = time.perf_counter()
        try:
            outcome = worker.run(code, limits)
        except BaseException:
            worker.kill()
            raise
        if outcome is None:
            late = worker.alive
            worker.kill()
            status: Status = "stopped" if stopped() else "timeout" if late else "crash"
            return Outcome(status, seconds=time.perf_counter() - began)
        with self._lock:
            self._idle.append(worker)
        return outcome

    def _take(self, module: Path) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return _Worker(module)
            if worker.alive:
                return worker
            worker.kill()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()


_pool = _Pool(min(MOST, os.cpu_count() or 1))


def run(code: str, limits: Limits | None = None) -> Outcome:
    """Run a program as ``__main__`` and wait for its end. Safe to call from several threads.

    Raises:
        MissingDependencyError: the extra ``sandbox`` is not installed.
        UnsupportedError: it is off, or cannot run here.
        SteerError: a program that is too long.
    """
    if len(code) > LONGEST:
        raise SteerError("code", code, f"a program of at most {LONGEST} characters")
    try:
        code.encode()
    except UnicodeEncodeError:
        return Outcome("error", stderr="the program is not valid Unicode")
    if "\0" in code:
        return Outcome("error", stderr="the program holds a null character")
    return _pool.run(code, limits or Limits())


def allow(parallel: int, backend: Backend = "wasm") -> None:
    """How many programs may run at once in this process; 0 for none. For whoever operates it, never for a request.

    Args:
        backend: ``wasm``, or ``bubblewrap``: this machine's Python in namespaces of its own.

    Raises:
        UnsupportedError: bubblewrap does not work here; says why.
    """
    global _pool
    if parallel < 0:
        raise SteerError("parallel", parallel, "a number of programs, 0 for none")
    if backend not in get_args(Backend):
        raise SteerError("backend", backend, f"one of {', '.join(get_args(Backend))}")
    if backend == "bubblewrap" and parallel and (reason := bubblewrap.problem()):
        raise UnsupportedError(reason)
    if (parallel, backend) != (_pool.parallel, _pool.backend):
        _pool.close()
        _pool = _Pool(parallel, backend)


def allowed() -> int:
    """Programs that may run at once; 0 if it is off."""
    return _pool.parallel


def available() -> bool:
    """Programs can run here: it is on, and what it takes is installed."""
    if _pool.backend == "bubblewrap":
        return _pool.parallel > 0
    try:
        interpreter()
    except (MissingDependencyError, UnsupportedError):
        return False
    return _pool.parallel > 0 and os.name == "posix"


def warm_up() -> None:
    """Compile the interpreter now, if that has not been done on this machine."""
    if _pool.backend == "wasm":
        compiled()


def close() -> None:
    """End the idle workers; the next program starts new ones."""
    _pool.close()


atexit.register(close)
