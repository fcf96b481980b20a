"""Front end: what each request asks for, validated and resolved before the engine sees it.

A steered request reaches the engine with one key in ``extra_args``, :data:`STAMP`: finished numbers, no words, no
defaults to merge. A request that does not steer is passed on untouched.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llm_steer import registry, spec
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.vllm import compat
from llm_steer.spec import Spec
from llm_steer.tokens import Vocabulary
from llm_steer.tracking import Markers

STAMP = "llm_steer"
"""Key in ``extra_args`` that the front end writes and workers read; clients may not."""

DEFAULTS = "llm_steer_defaults"
"""Attribute of vLLM's ModelConfig with the engine's default steering, in wire form. No field, so that it stays out of the
compile hash; part of the object, so that it reaches every process."""

PROCESSOR = "llm_steer.hosts.vllm.logits:SteerLogitsProcessor"

_unsteered: ContextVar[bool] = ContextVar("llm_steer_unsteered", default=False)
_beams: ContextVar[bool] = ContextVar("llm_steer_beams", default=False)


@contextmanager
def unsteered() -> Iterator[None]:
    """Inside, requests do not get the engine's default steering.

    For calls that cannot say ``steer: off`` themselves: ``LLM.beam_search``.
    """
    token = _unsteered.set(True)
    try:
        yield
    finally:
        _unsteered.reset(token)


class Admission:
    """Turns sampling parameters into stamped ones, for one engine."""

    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        model_config = vllm_config.model_config
        self.vocab_size: int = model_config.get_vocab_size()
        self._vocabulary = Vocabulary(tokenizer, self.vocab_size) if hasattr(tokenizer, "get_vocab") else None
        self._config = vllm_config
        self.defaults: Spec = spec.from_wire(getattr(model_config, DEFAULTS, ()))
        self.requires_stamp = bool(self.defaults)
        self.counts: Counter[str] = Counter()
        if self.defaults:
            self._check_supported()
            self._resolve(self.defaults)

    def status(self) -> dict[str, Any]:
        """What this front end steers, and has steered so far."""
        return {
            "defaults": spec.to_wire(self.defaults),
            "plugins": registry.names(),
            "refused_here": self._refusals,
            "requests": dict(self.counts),
        }

    @functools.cached_property
    def _markers_on_wire(self) -> dict[str, Any]:
        return (self._vocabulary.markers() if self._vocabulary else Markers()).to_wire()

    @functools.cached_property
    def _refusals(self) -> list[str]:
        return compat.refusals(self._config)

    def stamp(self, params: Any) -> Any:
        """The parameters to hand to the engine: the same object if there is nothing to say.

        Args:
            params: vLLM ``SamplingParams``; never changed.

        Raises:
            SteerError: a bad value.
            UnsupportedError: this engine cannot do it.
        """
        arguments = params.extra_args or {}
        request = self.read(arguments)
        if not self.defaults and not any(_is_ours(key) for key in arguments):
            return params
        for key in arguments:
            if not isinstance(key, str):
                raise SteerError("extra_args", key, "a mapping with strings for keys: others kill the engine core's input")
        rest = {key: value for key, value in arguments.items() if not _is_ours(key)}
        if not request.spec and not self.requires_stamp and not request.trace:
            return _with_arguments(params, rest)  # asked for "off": as good as not asked
        stamp = {
            "plugins": spec.to_wire(request.spec),
            "markers": self._markers_on_wire,
            "vocab_size": self.vocab_size,
            "trace": request.trace,
        }
        self.counts.update(steer.name for steer in request.spec)
        return _with_arguments(params, {**rest, STAMP: stamp})

    def read(self, arguments: Mapping[str, Any]) -> spec.Request:
        """What a request with these ``extra_args`` asks for, in finished numbers. Raises as :meth:`stamp` does."""
        if STAMP in arguments:
            raise SteerError(STAMP, arguments[STAMP], "left out: steering is asked for with steer and steer_* keys")
        request = spec.parse_flat(arguments, () if _unsteered.get() else self.defaults)
        if request.spec:
            self._check_supported()
            if _beams.get():
                raise UnsupportedError(
                    "steering and beam search exclude each other: vLLM's beam search ranks raw log-probabilities and drops "
                    "vllm_xargs; sample instead, or turn steering off (over HTTP vllm_xargs {'steer': 'off'}, offline "
                    "`with llm_steer.hosts.vllm.admission.unsteered():`)"
                )
        return spec.Request(self._resolve(request.spec), request.trace)

    def _resolve(self, request: Spec) -> Spec:
        return spec.resolve(request, self._vocabulary)

    def _check_supported(self) -> None:
        if self._refusals:
            raise UnsupportedError(f"this engine cannot steer: {'; '.join(self._refusals)}")


def read_stamp(params: Any) -> dict[str, Any] | None:
    """The stamp of a request, or None."""
    arguments = getattr(params, "extra_args", None)
    return arguments.get(STAMP) if arguments else None


def markers_of(stamp: Mapping[str, Any]) -> Markers:
    return Markers.from_wire(stamp["markers"])


def unstamped_keys(params: Any) -> list[str]:
    """Steering keys as a client writes them: nothing of that sort may get past the front end."""
    return [key for key in (getattr(params, "extra_args", None) or {}) if _is_ours(key)]


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.lower().startswith(spec.PREFIX)


def _with_arguments(params: Any, arguments: dict[str, Any]) -> Any:
    params = copy.copy(params)
    params.extra_args = arguments or None
    return params


# -- wrappers around vLLM ----------------------------------------------------------------------------------------------


def around_create_model_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_model_config(self: Any) -> Any:
        _install_front_end()
        ours, rest = _split_processors(self.logits_processors)
        kept, self.logits_processors = self.logits_processors, rest
        try:
            config = original(self)
        finally:
            self.logits_processors = kept
        setattr(config, DEFAULTS, spec.to_wire(ours))
        return config

    return create_model_config


def _split_processors(named: Any) -> tuple[Spec, Any]:
    """Our plugins out of the list of logits processors. vLLM loads our one class by itself, through its entry point."""
    ours: list[spec.Steer] = []
    rest = []
    for item in named or ():
        if isinstance(item, str) and registry.is_plugin(item.partition(":")[0]):
            ours.append(spec.parse_option(item))
        elif item != PROCESSOR and f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', '')}" != PROCESSOR:
            rest.append(item)
    for steer in ours:
        if sum(other.name == steer.name for other in ours) > 1:
            raise SteerError("--logits-processors", steer.name, "named once")
    return tuple(ours), rest or (None if named is None else [])


def _install_front_end() -> None:
    from llm_steer.hosts.vllm import server, trace

    compat.install(compat.INPUT_INIT, _around_input_init)
    compat.install(compat.INPUT, _around_process_inputs)
    compat.install(compat.CORE, around_preprocess_add_request)
    compat.install(compat.OUTPUT_STATE, trace.around_from_new_request)
    compat.install(compat.OUTPUT, trace.around_new_completion_output)
    trace.install()
    compat.install(compat.BEAM_OFFLINE, _around_beam_search_offline)
    compat.install(compat.BEAM_ONLINE, _around_beam_search_online)
    server.install()


def _around_input_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        self.llm_steer = Admission(vllm_config, self.tokenizer)

    return __init__


def _around_process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        if isinstance(params, SamplingParams):
            try:
                params = self.llm_steer.stamp(params)
            except SteerError as error:
                raise VLLMValidationError(str(error), parameter=error.field) from error
            except UnsupportedError as error:
                raise VLLMValidationError(str(error), parameter=spec.PREFIX) from error
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def around_preprocess_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if request.sampling_params is not None:
            keys = unstamped_keys(request.sampling_params)
            steered_by_default = bool(getattr(self.vllm_config.model_config, DEFAULTS, ()))
            if keys or (steered_by_default and read_stamp(request.sampling_params) is None):
                what = f"{', '.join(keys)} in extra_args" if keys else "an engine that steers by default"
                raise UnsupportedError(
                    f"request {request.request_id} did not come through vLLM's Python front end, where llm_steer validates "
                    f"and resolves it ({what}); it is turned away rather than answered unsteered"
                )
        return original(self, request)

    return preprocess_add_request


def _around_beam_search_offline(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _beams.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _beams.reset(token)

    return beam_search


def _around_beam_search_online(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def beam_search(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        # The context is that of one HTTP request, which is all beam search or not at all: nothing to set back.
        _beams.set(True)
        async for output in original(self, *args, **kwargs):
            yield output

    return beam_search


def without_steering() -> None:
    """The rest of this context (an HTTP request) gets no default steering."""
    _unsteered.set(True)
