"""What a chat request asks, in an OpenAI body that nobody has looked at yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_steer.errors import SteerError

SEEDS = (-(2**63), 2**63 - 1)
"""Seeds that engines take: the lowest and the highest one."""


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message.

    Raises:
        SteerError: it is not the user's, or holds no text.
    """
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise SteerError(f"messages[{number}]", message, "a mapping with a role and a content")
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text", "")) for part in content)
    if last.get("role") != "user" or not isinstance(content, str) or not content.strip():
        raise SteerError("messages", content, "ended by a message of the user that asks something, in text")
    return content.strip()


def stops_of(request: Mapping[str, Any]) -> list[str]:
    """Stop strings."""
    stop = request.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise SteerError("stop", request["stop"], "a text, or a list of texts that are not empty")
    return list(stop)


def seed_of(request: Mapping[str, Any], index: int) -> int | None:
    """The seed of one of the requests that a question becomes: the next ones, behind the highest the lowest."""
    seed = request.get("seed")
    if seed is None:
        return None
    low, high = SEEDS
    if not isinstance(seed, int) or isinstance(seed, bool) or not low <= seed <= high:
        raise SteerError("seed", seed, f"a whole number from {low} to {high}, or null")
    return (seed + index - low) % (high - low + 1) + low


def max_tokens_of(request: Mapping[str, Any], default: int) -> int:
    """Tokens that each of the requests may generate; ``max_completion_tokens`` is another name, and null says nothing."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (tokens := request.get(name)) is not None:
            if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
                raise SteerError(name, tokens, "a whole number of at least 1, or null")
            return tokens
    return default
