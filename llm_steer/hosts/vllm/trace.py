"""Front end: what steering did to each output, replayed from its token ids when somebody asks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llm_steer import spec
from llm_steer.hosts.vllm import admission
from llm_steer.runtime import replay

collected: ContextVar[list[Choice] | None] = ContextVar("llm_steer_collected", default=None)
"""Set by the HTTP middleware: the choices of this HTTP request whose trace was asked for."""


@dataclass
class Choice:
    """One output of one HTTP request."""

    request_id: str
    """vLLM's external id: one for each prompt of the HTTP request."""
    index: int
    """Among the ``n`` outputs of that prompt."""
    source: Source | None = None
    """Set when the output is finished."""


@dataclass(frozen=True)
class Source:
    """What a trace is replayed from."""

    stamp: dict[str, Any]
    vocab_size: int
    prompt_ids: list[int]
    output_ids: list[int]

    def trace(self) -> dict[str, Any]:
        request = spec.from_wire(self.stamp["plugins"])
        return replay(request, admission.markers_of(self.stamp), self.vocab_size, self.prompt_ids, self.output_ids)


def around_from_new_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, **kwargs)
        request = kwargs.get("request") or next(a for a in args if hasattr(a, "sampling_params"))
        stamp = admission.read_stamp(request.sampling_params)
        if stamp is not None:
            state.llm_steer = stamp
            choices = collected.get()
            if stamp["trace"] and choices is not None:
                state.llm_steer_choice = Choice(state.external_req_id, state.request_index)
                choices.append(state.llm_steer_choice)
        return state

    return from_new_request


def around_new_completion_output(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _new_completion_output(self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
        output = original(self, token_ids, finish_reason, stop_reason)
        stamp = getattr(self, "llm_steer", None)
        if stamp is not None and stamp["plugins"] and finish_reason is not None:
            source = Source(stamp, stamp["vocab_size"], self.prompt_token_ids or [], list(self.detokenizer.output_token_ids))
            output.llm_steer = source
            if (choice := getattr(self, "llm_steer_choice", None)) is not None:
                choice.source = source
        return output

    return _new_completion_output


def install() -> None:
    """Give vLLM's ``CompletionOutput`` the attribute ``steering``: the trace, or None for an output that was not steered.

    Replayed on first use, so that nobody pays for traces that nobody reads.
    """
    from vllm.outputs import CompletionOutput

    def steering(self: Any) -> dict[str, Any] | None:
        source = vars(self).get("llm_steer")
        return source.trace() if source is not None else None

    if not hasattr(CompletionOutput, "steering"):
        cached: Any = functools.cached_property(steering)
        cached.__set_name__(CompletionOutput, "steering")
        CompletionOutput.steering = cached
