"""Engines and servers of vLLM as child processes, so that each has its own environment and one runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHIM = HERE / "v2shim"

RUNNERS: dict[str, tuple[str, ...]] = {"v1": (), "v1-async": ("async",), "v2": ("v2",)}
"""What the shim changes for each of the ways in which vLLM runs a model."""

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 256,
    "max_num_seqs": 8,
}

REFUSALS = ("ValueError", "VLLMValidationError", "UnsupportedError", "SteerError")
"""Errors after which an engine goes on."""


class EngineError(Exception):
    """The engine raised ``kind`` with ``message``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Child:
    """A process with all its children, whose output goes to a file."""

    broken = False
    gently = True
    """Let it end by itself first: it shares memory with its own children."""

    def __init__(self, command: Sequence[str], log: Path, shim: Sequence[str] = (), env: Mapping[str, str] | None = None):
        self.log = log
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(env or {}),
        }
        if shim:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), variables.get("PYTHONPATH")]))
            variables["LLM_STEER_SHIM"] = ",".join(shim)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if command[-1].endswith("engine_worker.py") else output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """End the process, and what it has started."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            if self.gently:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(Child):
    """vLLM's ``LLM`` in another process; every method of ``engine_worker.Worker`` is a method here.

    Args:
        model: folder of the model.
        log: file for its output.
        shim: what to change in vLLM, see ``v2shim``.
        one_process: the engine core and the worker live in the process of the front end, so that every step is ours.
        args: arguments of ``LLM``, over :data:`ENGINE_ARGS`.

    Raises:
        EngineError: it does not start.
    """

    def __init__(
        self,
        model: Path | str,
        log: Path,
        *,
        shim: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        one_process: bool = False,
        **args: Any,
    ) -> None:
        env = dict(env or {})
        if one_process:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            args.setdefault("distributed_executor_backend", "uni")
            self.gently = False
        super().__init__([sys.executable, str(HERE / "engine_worker.py")], log, shim, env)
        self._buffer = b""
        try:
            self.info: dict[str, Any] = self.call("make", model=str(model), **{**ENGINE_ARGS, **args})
        except BaseException:
            self.close()
            raise

    def call(self, name: str, timeout: float = 400, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        reply = json.loads(self._line(timeout))
        if "error" in reply:
            error = EngineError(reply["error"], reply["message"])
            self.broken = error.kind not in REFUSALS
            raise error
        return reply["result"]

    def generate(self, requests: Sequence[Mapping[str, Any]], **arguments: Any) -> list[list[dict[str, Any]]]:
        result: list[list[dict[str, Any]]] = self.call("generate", requests=list(requests), **arguments)
        return result

    def one(self, prompt: Any, **params: Any) -> dict[str, Any]:
        """The first output of one request."""
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        return self.generate([{key: prompt, "params": params}])[0][0]

    def _line(self, timeout: float) -> bytes:
        assert self.process.stdout is not None
        stream = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise TimeoutError(f"no answer in {timeout} s; its log ends:\n{self.tail()}")
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                raise EngineError("Died", f"exit status {self.process.poll()}; its log ends:\n{self.tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
