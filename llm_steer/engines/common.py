"""What the engines share: checks of requests, hashes for :meth:`Engine.identity`, responses from another thread."""

from __future__ import annotations

import hashlib
import json
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_steer.engines.base import Request, Response, Sampling, Stream
from llm_steer.errors import SteerError, shorten_text

BLOCKS, BLOCK = 64, 1 << 16
"""Of each file of weights, how many blocks are hashed, and their bytes. A file of up to 4 MiB is hashed as a whole."""


def failed(error: object) -> Response:
    """The response to a request that could not be run."""
    return Response(finish="error", error=str(error), cause=error if isinstance(error, Exception) else None)


def check(requests: Sequence[Request]) -> None:
    """Raise ``SteerError`` for what no engine could take."""
    for index, request in enumerate(requests):
        where = f"requests[{index}]"
        messages: Any = request.messages
        if (request.messages is None) == (request.prompt is None):
            raise SteerError(f"{where}.messages", request.messages, "given, unless prompt is, and not beside it")
        if messages is not None:
            if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
                raise SteerError(f"{where}.messages", messages, "a list with at least one message")
            for message in messages:
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                    raise SteerError(f"{where}.messages", message, 'mappings {"role": ..., "content": ...}')
            if request.continues and messages[-1]["role"] != "assistant":
                raise SteerError(f"{where}.messages", messages[-1], "ended by the assistant's, to be continued")
        elif not request.prompt:
            raise SteerError(f"{where}.prompt", request.prompt, "a text, or token ids, that is not empty")
        _check_sampling(request.sampling, f"{where}.sampling")


def _check_sampling(sampling: Sampling, where: str) -> None:
    stop: Any = sampling.stop

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    for name, good, valid in (
        ("max_tokens", whole(sampling.max_tokens) and sampling.max_tokens >= 1, "a whole number of at least 1"),
        ("temperature", 0 <= sampling.temperature < math.inf, "a finite number of at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "a number above 0 and at most 1"),
        ("top_k", whole(sampling.top_k) and sampling.top_k >= 0, "a whole number, 0 for off"),
        ("seed", sampling.seed is None or whole(sampling.seed), "a whole number or None"),
        ("stop", not isinstance(stop, str) and all(stop), "texts that are not empty"),
    ):
        if not good:
            raise SteerError(f"{where}.{name}", getattr(sampling, name), valid)


def digest(value: Any) -> str:
    """SHA-256 of a text, or of the JSON form of a value; 16 hexadecimal digits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_identity(config: Any, tokenizer: Any) -> dict[str, str]:
    """Hashes of a model's configuration, of its tokenizer, and of its chat template."""
    options = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return {"config": digest(options), **tokenizer_identity(tokenizer)}


def weights_identity(folder: str | Path) -> dict[str, str]:
    """A hash of the weights' files in a folder: names, sizes, and ``BLOCKS`` blocks of each, spread evenly, so that a model
    trained anew in its place is another. Nothing for what is no folder, such as a name on the hub."""
    found = Path(folder).glob("*") if str(folder) else ()  # a model made in memory has no name
    files = sorted(path for path in found if path.suffix in (".safetensors", ".bin", ".pt"))
    return {"weights": digest([[path.name, path.stat().st_size, _sampled(path)] for path in files])} if files else {}


def _sampled(path: Path) -> str:
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for number in range(BLOCKS):
            file.seek(max(size - BLOCK, 0) * number // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return found.hexdigest()


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer and of its chat template."""
    special = {str(k): str(v) for k, v in tokenizer.special_tokens_map.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "tokenizer": digest([backend.to_str() if backend is not None else tokenizer.get_vocab(), special]),
        "chat_template": digest(getattr(tokenizer, "chat_template", None) or ""),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of torch, of this package, and of others."""
    from importlib.metadata import version

    import torch

    import llm_steer

    own = {"torch": torch.__version__, "llm_steer": llm_steer.__version__}
    return {**own, **{package: version(package) for package in packages}}


def prompt_ids(request: Request, tokenizer: Any) -> list[int]:
    """Token ids of a request's prompt.

    Raises:
        SteerError: the tokenizer has no chat template, or the template fails.
    """
    if request.prompt is not None:
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        return list(tokenizer(request.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SteerError("tokenizer", type(tokenizer).__name__, "one with a chat template, or the request a prompt")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in request.messages or ()],
            tokenize=False,
            add_generation_prompt=not request.continues,
            continue_final_message=request.continues,
            **request.template,
        )
    except Exception as error:  # whatever a template raises
        raise SteerError("messages", request.messages, f"ones that the model's chat template takes ({error})") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def response_of(status: int, content: Any, seconds: float) -> Response:
    """The response in what an OpenAI-compatible server answered, to a completion or to a chat.

    Args:
        content: the body: JSON, or text where it is none.
    """
    if status != 200 or not isinstance(content, dict) or not content.get("choices"):
        error = content.get("error", content) if isinstance(content, dict) else content
        message = error.get("message", error) if isinstance(error, dict) else error
        return failed(shorten_text(f"status {status}: {message}", 2000))
    try:
        return _answer(content["choices"][0], content.get("usage") or {}, seconds)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return failed(shorten_text(f"status 200, but no answer in it ({type(error).__name__}: {error}): {content}", 2000))


def _answer(choice: Any, usage: Any, seconds: float) -> Response:
    text = choice.get("text")
    if text is None:
        message = choice["message"]
        text = message.get("content")
        # A server that splits the thinking off: put it back, so that texts are alike on every engine.
        if thinking := message.get("reasoning") or message.get("reasoning_content"):
            text = f"<think>{thinking}</think>{text or ''}"
    if not isinstance(text, str):
        raise TypeError(f"its text is {text!r}")
    return Response(
        text=text,
        finish="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=usage.get("prompt_tokens") or 0,
        tokens=usage.get("completion_tokens") or 0,
        token_ids=choice.get("token_ids"),
        logprob=_logprob(choice.get("logprobs")),
        steering=choice.get("steering"),
        seconds=seconds,
    )


class Gathered:
    """The chat completion that a stream of server-sent events adds up to, complete or not."""

    def __init__(self) -> None:
        self._line = b""
        self._fields: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._logprobs: list[Any] = []
        self._choice: dict[str, Any] = {}

    def feed(self, part: bytes) -> None:
        """Take bytes as they come, cut anywhere."""
        *lines, self._line = (self._line + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):  # not the end mark
                self._add(json.loads(line.removeprefix(b"data: ")))

    def _add(self, event: dict[str, Any]) -> None:
        self._fields |= {key: event[key] for key in ("error", "model", "usage") if event.get(key)}
        for steering in event.get("steering") or ():
            self._choice["steering"] = {key: value for key, value in steering.items() if key != "index"}
        for choice in event.get("choices") or ():
            for key in ("content", "reasoning", "reasoning_content"):
                if text := (choice.get("delta") or {}).get(key):
                    self._texts.setdefault(key, []).append(text)
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            if choice.get("finish_reason"):
                self._choice["finish_reason"] = choice["finish_reason"]

    @property
    def content(self) -> dict[str, Any]:
        """As the body of an answer that is not streamed."""
        if "error" in self._fields:
            return self._fields
        message = {"content": "", **{key: "".join(texts) for key, texts in self._texts.items()}}
        logprobs = {"content": self._logprobs} if self._logprobs else None
        return {**self._fields, "choices": [{**self._choice, "message": message, "logprobs": logprobs}]}


def _logprob(logprobs: Any) -> float | None:
    if not logprobs:
        return None
    if logprobs.get("content") is not None:
        return float(sum(token["logprob"] for token in logprobs["content"]))
    return float(sum(logprobs["token_logprobs"])) if logprobs.get("token_logprobs") else None


class QueueStream(Stream):
    """Responses that another thread hands over.

    Args:
        count: responses that will come.
        stop: called once, when the stream is closed.
    """

    def __init__(self, count: int, abort: Callable[[int], None], stop: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Response] | BaseException] = queue.SimpleQueue()
        self._left = count
        self._abort = abort
        self._stop = stop

    def put(self, item: tuple[int, Response] | BaseException) -> None:
        """From the other thread: a response, or what ended it."""
        self._queue.put(item)

    def __next__(self) -> tuple[int, Response]:
        if not self._left:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._left -= 1
        return item

    def abort(self, index: int) -> None:
        self._abort(index)

    def close(self) -> None:
        self._left = 0
        self._stop()
