"""An OpenAI-compatible server of a few lines, which answers as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]
"""From a body to a text; or to a status and an error message; or to JSON or bytes, sent as they are; or to None, to drop the
connection."""


def echo(body: dict[str, Any]) -> str:
    return "echo " + (body["messages"][-1]["content"] if "messages" in body else str(body["prompt"]))


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, answer: Answer = echo, *, owner: str = "vllm", steers: bool = True, root: str = "folder/fake"
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.owner, self.steers, self.root = answer, owner, steers, root
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = 0
        """Clients that went away before their answer."""
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        found = {
            "/v1/models": {"data": [{"id": "fake", "owned_by": server.owner, "root": server.root, "max_model_len": 99}]},
            "/version": {"version": "0.0.1"},
            **({"/v1/steer": {"defaults": [["reflection_cycle", {}]]}} if server.steers else {}),
        }.get(self.path)
        self._send(200 if found else 404, found or {"error": {"message": "not there"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        try:
            answer = server.answer(body)
        finally:
            with server.lock:
                server.busy -= 1
        if answer is None:
            self.close_connection = True
            return
        if isinstance(answer, tuple):
            self._send(answer[0], {"error": {"message": answer[1]}})
            return
        if not isinstance(answer, str):
            self._send(200, answer)
            return
        words = answer.split()
        chat = self.path == "/v1/chat/completions"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": answer}} if chat else {"text": answer}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": word, "logprob": -0.5} for word in words]}
        if (body.get("vllm_xargs") or {}).get("steer_trace"):
            choice["steering"] = {"plugins": [{"name": body["vllm_xargs"].get("steer")}]}
        self._send(200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}})

    def _send(self, status: int, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            with self.server.lock:
                self.server.left += 1


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def slow(seconds: float) -> Answer:
    def answer(body: dict[str, Any]) -> str:
        time.sleep(seconds)
        return echo(body)

    return answer
