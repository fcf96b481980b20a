"""Methods that ask again: they need the request loop, which no plugin has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llm_steer.eval.settings import Strict
from pydantic import Field

from llm_steer.engines.base import Request, Response
from llm_steer.tokens import THINK_CLOSE, THINK_OPEN


class Continuation(Strict):
    """Turns a response into the next request, or is done."""

    def begin(self, request: Request) -> Request:
        """The first request."""
        return request

    def next(self, original: Request, text: str, tokens: int, passes: int, opener: str) -> tuple[str, Request] | None:
        """What to append to the text, and the request that goes on from there; None if the answer is finished.

        Args:
            original: the question.
            text: generated so far, by all passes.
            tokens: how many tokens that took.
            passes: how many requests were answered.
            opener: what the chat template puts before the assistant's text.
        """
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        return {"name": type(self).__name__.lower(), **self.model_dump(mode="json")}


class S1(Continuation):
    """Budget forcing (Muennighoff et al. 2025, "s1"; as AlphaOne runs it for R1 models).

    Each of the first ``ignore`` ends of thinking is replaced by ``word``; all passes share the token budget. Only requests
    that ended by themselves go on. An end-of-sequence token inside of thinking counts as its end.
    """

    ignore: int = Field(default=2, ge=0, le=64)
    """How many ends of thinking are not accepted."""
    word: str = Field(default="Wait", min_length=1)
    """What stands in their place."""

    def begin(self, request: Request) -> Request:
        return self._stopping(request) if self.ignore else request

    def next(self, original: Request, text: str, tokens: int, passes: int, opener: str) -> tuple[str, Request] | None:
        left = original.sampling.max_tokens - tokens - 1  # the word costs one too
        if passes > self.ignore or left < 1:
            return None
        told = [*(original.messages or ()), {"role": "assistant", "content": f"{opener}{text}{self.word}"}]
        seed = original.sampling.seed
        sampling = replace(original.sampling, max_tokens=left, seed=None if seed is None else (seed + passes) % 2**63)
        request = replace(original, messages=told, continues=True, sampling=sampling)
        return self.word, self._stopping(request) if passes < self.ignore else request

    def _stopping(self, request: Request) -> Request:
        return replace(request, sampling=replace(request.sampling, stop=(*request.sampling.stop, THINK_CLOSE)))


def opener_of(tokenizer: Any) -> str:
    r"""What a chat template puts before the assistant's text: ``<think>\n`` or the like, or nothing."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return f"{THINK_OPEN}\n"
    asked = [{"role": "user", "content": "?"}]
    text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    _, found, behind = text.rpartition(THINK_OPEN)
    return f"{found}{behind}" if found and not behind.strip() else ""


def joined(parts: list[Response], words: list[str]) -> Response:
    """The passes of one answer as one response."""
    texts = [part.text + word for part, word in zip(parts, [*words, ""], strict=True)]
    return replace(
        parts[-1],
        text="".join(texts),
        prompt_tokens=parts[0].prompt_tokens,
        tokens=sum(part.tokens for part in parts) + len(words),
        token_ids=None,
        logprob=None,
        seconds=sum(part.seconds for part in parts),
    )
