"""Engines and servers of vLLM as child processes, so that each has its own environment and one runs at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHIM = HERE / "v2shim"

RUNNERS: dict[str, tuple[str, ...]] = {"v1": (), "v1-async": ("async",), "v2": ("v2", "async")}
"""What the shim changes for each of the ways in which vLLM runs a model."""

V2_SYNC = "v2-sync"
"""Model Runner V2 without asynchronous scheduling."""

SLEEPER = "v1-sleep"
"""With a sleep mode, which vLLM has on GPUs alone."""

SHIMS = {**RUNNERS, V2_SYNC: ("v2",), SLEEPER: ("sleep",)}

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


class Server(Child):
    """vLLM's OpenAI server, by the command that a user types; with several front ends by ``vllm serve``, since the other
    command starts one, whatever ``--api-server-count`` says.

    Args:
        model: folder of the model.
        log: file for its output.
        arguments: of the command line, beside those that every test needs.
        key: API key.
        env: variables of its environment.
    """

    def __init__(
        self, model: Path | str, log: Path, *arguments: str, key: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.key = key
        several = "--api-server-count" in arguments
        start = (
            [str(HERE / "vllm_serve.py"), "serve"] if several else ["-m", "vllm.entrypoints.openai.api_server", "--model"]
        )
        command = [sys.executable, *start, str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--seed", "0"]
        command += [*(["--api-key", key] if key else []), *arguments]
        super().__init__(command, log, env=env)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise EngineError("Died", f"exit status {self.process.returncode}; its log ends:\n{self.tail()}")
            with contextlib.suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.3)
        raise TimeoutError(f"not there in {timeout} s; its log ends:\n{self.tail()}")

    def request(
        self, method: str, path: str, body: Any = None, *, key: str | None = "", timeout: float = 120
    ) -> tuple[int, Any]:
        """Status and answer: JSON, or text where it is none.

        Args:
            body: JSON, or the text of it.
            key: another API key than the server's; None for no key.
        """
        with contextlib.closing(self.open(method, path, body, key=key, timeout=timeout)) as connection:
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def open(
        self, method: str, path: str, body: Any = None, *, key: str | None = "", timeout: float = 120
    ) -> http.client.HTTPConnection:
        """A connection whose request is sent; for answers that are read in part."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        key = self.key if key == "" else key
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request(method, path, data, headers)
        return connection

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, the end mark as ``"[DONE]"``."""
        with contextlib.closing(self.open("POST", path, {**body, "stream": True})) as connection:
            response = connection.getresponse()
            text = response.read().decode()
        assert response.status == 200, text
        found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
        return [e if e == "[DONE]" else json.loads(e) for e in found]
