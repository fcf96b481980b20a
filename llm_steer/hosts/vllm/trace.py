"""Front end: what steering did to each output.

What follows from token ids is replayed from them when somebody reads it. A closed loop has to be asked: its workers keep its
state when it has ended until another request needs the room, at least as long as fewer have ended since than may run at
once. Offline the trace is fetched when it is read, or as soon as the output is finished if the request asked for it; a
server fetches it before it answers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from llm_steer import registry, spec
from llm_steer.hosts.vllm import admission
from llm_steer.runtime import replay

collected: ContextVar[list[Choice] | None] = ContextVar("llm_steer_collected", default=None)
"""Set by the HTTP middleware: the choices of this HTTP request whose trace was asked for."""

_finished: ContextVar[list[Source] | None] = ContextVar("llm_steer_finished", default=None)
"""Set while an offline engine makes a step: the outputs that it finishes."""

_engines: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Offline engines, by name."""
_count = itertools.count()


@dataclass
class Choice:
    """One output of one HTTP request."""

    request_id: str
    """vLLM's external id: one for each prompt of the HTTP request."""
    index: int
    """Among the ``n`` outputs of that prompt."""
    source: Source | None = None
    """Set when the output is finished."""


@dataclass
class Source:
    """What a trace is made from."""

    request_id: str
    """The engine core's."""
    stamp: dict[str, Any]
    prompt_ids: list[int]
    output_ids: list[int]
    engine: str = ""
    """Name of the offline engine that can be asked."""
    measured: dict[str, Any] | None = None
    """What the workers said."""

    @property
    def asks(self) -> bool:
        """There is a closed loop of which the workers have not told yet."""
        return self.measured is None and any(registry.get(name).feedback for name, _ in self.stamp["plugins"])

    def trace(self) -> dict[str, Any]:
        if self.asks and (engine := _engines.get(self.engine)) is not None:
            _measure(engine, [self])
        if self.measured is not None:
            return self.measured
        request, markers = spec.from_wire(self.stamp["plugins"]), admission.markers_of(self.stamp)
        return replay(request, markers, self.stamp["vocab_size"], self.prompt_ids, self.output_ids)


def _asked(sources: Sequence[Source]) -> list[tuple[str, list[int]]]:
    return [(source.request_id, source.output_ids) for source in sources]


def _tell(sources: Sequence[Source], said: Iterable[Sequence[dict[str, Any] | None]]) -> None:
    """Keep what the workers said, each of them about all sources."""
    for index, source in enumerate(sources):
        source.measured = next((traces[index] for traces in said if traces[index] is not None), None)


def _measure(engine: Any, sources: Sequence[Source]) -> None:
    _tell(sources, engine.collective_rpc(METHOD, args=(_asked(sources),)))


async def measure(client: Any, sources: Iterable[Source]) -> None:
    """Ask the workers what closed loops did.

    Args:
        client: vLLM's engine client, such as an ``AsyncLLM``.
        sources: attributes ``llm_steer`` of finished outputs, or those of choices.
    """
    sources = [source for source in sources if source.asks]
    if not sources:
        return
    ask_all = getattr(client.engine_core, "call_utility_all_async", None)
    if ask_all is None:
        engines = [await client.collective_rpc(METHOD, args=(_asked(sources),))]
    else:  # every data-parallel one: one of them knows
        engines = await ask_all("collective_rpc", METHOD, None, (_asked(sources),), None)
    _tell(sources, [traces for workers in engines for traces in workers])


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
            ids = list(self.detokenizer.output_token_ids)
            source = output.llm_steer = Source(self.request_id, stamp, self.prompt_token_ids or [], ids)
            if (finished := _finished.get()) is not None:
                finished.append(source)
            if (choice := getattr(self, "llm_steer_choice", None)) is not None:
                choice.source = source
        return output

    return _new_completion_output


def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """An offline engine's step: whoever finished in it can ask the engine, or has asked."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        finished: list[Source] = []
        token = _finished.set(finished)
        try:
            outputs = original(self)
        finally:
            _finished.reset(token)
        if finished:
            name = vars(self).setdefault("llm_steer_name", f"engine {next(_count)}")
            _engines[name] = self
            for source in finished:
                source.engine = name
            if asked := [source for source in finished if source.stamp["trace"] and source.asks]:
                _measure(self, asked)
        return outputs

    return step


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


# -- worker --------------------------------------------------------------------------------------------------------------

METHOD = "llm_steer_traces"
"""Of vLLM's worker, for ``collective_rpc``."""


def llm_steer_traces(worker: Any, asked: Sequence[tuple[str, Sequence[int]]]) -> list[dict[str, Any] | None]:
    """See :meth:`~llm_steer.hosts.vllm.worker.WorkerSteering.traces`; nothing on pipeline ranks that see no logits."""
    from vllm.distributed import get_pp_group

    traces: list[dict[str, Any] | None] = worker.model_runner.llm_steer.traces(asked)
    return traces if get_pp_group().is_last_rank else [None] * len(asked)
