"""One client over every engine: Hugging Face, vLLM offline, any OpenAI-compatible URL.

Voting and evaluation run on this interface and know no engine. An engine takes any number of requests, runs as many at once
as it can, and yields the responses as they finish, in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llm_steer.errors import SteerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Engine", "Request", "Response", "Sampling", "Stream"]

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The same fields, with the same meaning, on every engine."""

    max_tokens: int = 1024
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int | None = None
    """Of this one request: its text does not depend on what runs beside it (up to rounding)."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One question to one model: chat messages, or a prompt as text or ids."""

    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] | None = None
    """Instead of ``messages``: used as it is, without a chat template."""
    sampling: Sampling = field(default_factory=Sampling)
    steer: Any = None
    """As in ``steer(model, ...)``: a name, a mapping with ``name``, a list, ``"off"``; None: the engine's default."""
    trace: bool = False
    """Ask for :attr:`Response.steering`."""
    logprob: bool = True
    """Ask for :attr:`Response.logprob`. vLLM gathers it in Python, a token at a time: with a model whose steps are short, a
    quarter of the tokens a second."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template (``enable_thinking``)."""
    continues: bool = False
    """The last message is the assistant's and is continued rather than answered."""


@dataclass(frozen=True)
class Response:
    """What came back. A request that failed has ``error`` and no text; the others go on."""

    text: str = ""
    finish: Literal["stop", "length", "abort", "error"] = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated tokens, the end-of-sequence token included."""
    token_ids: Sequence[int] | None = None
    """None where the engine does not tell."""
    logprob: float | None = None
    """Sum over the generated tokens, nats, before steering; None where the engine does not tell."""
    steering: Mapping[str, Any] | None = None
    seconds: float = 0.0
    """From submission to the last token."""
    error: str | None = None
    cause: Exception | None = field(default=None, repr=False, compare=False)
    """What ``error`` says, where this process raised it."""


class Stream(ABC):
    """Requests on their way. Iterate for ``(index, response)`` as they finish; each index comes once.

    Leaving the ``with`` block aborts what still runs.
    """

    def __iter__(self) -> Iterator[tuple[int, Response]]:
        return self

    @abstractmethod
    def __next__(self) -> tuple[int, Response]: ...

    @abstractmethod
    def abort(self, index: int) -> None:
        """Give one request up: it still comes, with ``finish="abort"`` and what it has. No effect once it has come."""

    @abstractmethod
    def close(self) -> None:
        """Abort everything. Safe to call again."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(ABC):
    """Runs requests on one model."""

    @staticmethod
    def from_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 16) -> Engine:
        """Hugging Face ``generate``, in batches.

        Raises:
            SteerError: ``model`` is no transformers model that can generate, or ``tokenizer`` no transformers tokenizer.
        """
        from transformers import PreTrainedTokenizerBase

        from llm_steer.engines.hf import HFEngine

        given: Any = tokenizer
        if not isinstance(given, PreTrainedTokenizerBase):
            valid = "the model's transformers tokenizer, as AutoTokenizer.from_pretrained gives it"
            raise SteerError("tokenizer", _shown(tokenizer), valid)
        return HFEngine(model, tokenizer, batch_size=batch_size)

    @staticmethod
    def from_vllm(llm: Any) -> Engine:
        """A vLLM ``LLM`` object in this process.

        Raises:
            SteerError: ``llm`` is something else.
        """
        from llm_steer.engines.vllm import VLLMEngine

        if not all(hasattr(llm, name) for name in ("get_tokenizer", "llm_engine")):
            valid = "a vllm.LLM, as LLM(MODEL, logits_processors=[NAME]) makes it; a server's address goes to from_url"
            raise SteerError("llm", _shown(llm), valid)
        return VLLMEngine(llm)

    @staticmethod
    def from_url(
        urls: str | Sequence[str],
        model: str | None = None,
        *,
        api_key: str | None = None,
        parallel: int = 32,
        timeout: float = 1800.0,
    ) -> Engine:
        """OpenAI-compatible servers, each with up to ``parallel`` requests at a time, each answered within ``timeout``
        seconds. Dead ones, and those that hang or fail what others answer, are dropped and their work is redone by others.

        Raises:
            SteerError: ``urls`` are not URLs.
        """
        from llm_steer.engines.http import HTTPEngine

        named = [urls] if isinstance(urls, str) else list(urls) if isinstance(urls, Iterable) else []
        if not named or not all(isinstance(url, str) for url in named):
            raise SteerError("urls", urls, "a URL such as http://localhost:8000, or a list of at least one")
        return HTTPEngine(named, model, api_key=api_key, parallel=parallel, timeout=timeout)

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> Stream:
        """Start the requests. A bad one (of steering, too long a prompt) comes back as an error, alone.

        Raises:
            SteerError: a field that no engine could take.
        """

    def dropped(self) -> list[str]:
        """Servers that are not asked any more: which, why, and how many requests others were asked instead."""
        return []

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the text besides the requests, JSON types only: engine and its version, model (name or path, and a
        hash of its configuration), tokenizer and chat template hashes, dtype, versions of torch and of this package. Keys
        ``engine`` and ``model`` are always there. No address and no key of a server is in it."""

    def run(self, requests: Sequence[Request]) -> list[Response]:
        """All responses, in the order of the requests.

        Raises:
            SteerError: something in the list is no :class:`Request`.
        """
        given: Sequence[Any] = requests
        for index, request in enumerate(given):
            if not isinstance(request, Request):
                valid = "a Request: Request(messages=[...]) or Request(prompt=...)"
                raise SteerError(f"requests[{index}]", _shown(request), valid)
        responses: list[Response | None] = [None] * len(requests)
        with self.submit(requests) as stream:
            for index, response in stream:
                responses[index] = response
        return [response for response in responses if response is not None]

    def chat(
        self, messages: str | Sequence[Message], *, steer: Any = None, trace: bool = False, **sampling: Any
    ) -> Response:
        """One question, one answer. ``mixture_of_thought`` asks it in several ways and votes.

        Raises:
            SteerError, UnsupportedError: the request cannot be run, or not be steered so.
            RuntimeError: the engine could not answer it.
        """
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        for name, value in sampling.items():
            if name not in Sampling.__dataclass_fields__:
                raise SteerError(name, value, f"one of {', '.join(Sampling.__dataclass_fields__)}")
        response = self.run([Request(messages=asked, sampling=Sampling(**sampling), steer=steer, trace=trace)])[0]
        if response.error is not None:
            raise response.cause or RuntimeError(response.error)
        return response


def _shown(given: Any) -> Any:
    """A value of Python's own types, or else what sort of thing it is: a whole model is nothing to read."""
    return given if isinstance(given, str | int | float | None) else type(given).__name__
