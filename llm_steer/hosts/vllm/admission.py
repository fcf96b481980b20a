"""Front end: what each request asks for, validated and resolved before the engine sees it.

A steered request reaches the engine with one key in ``extra_args``, :data:`STAMP`: finished numbers, no words, no
defaults to merge. A request that does not steer is passed on untouched.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from llm_steer import registry, spec
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.vllm import compat, declared
from llm_steer.hosts.vllm.declared import DEFAULTS
from llm_steer.markers import Markers
from llm_steer.plugin import Context, Plugin
from llm_steer.runtime import Runtime, refuse_unknown_prompt
from llm_steer.spec import Spec

CLASS_PATH = re.compile(r"[\w.]+:[\w.]+")
STAMP = "llm_steer"
"""Key in ``extra_args`` that the front end writes and workers read; clients may not."""

PROCESSOR = "llm_steer.hosts.vllm.logits:SteerLogitsProcessor"

_markers: dict[str, Markers] = {}
"""Of the engines of this front end that were told at start what steers, by what their requests' stamps say."""

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
        self._vocabulary = declared.vocabulary_of(tokenizer, model_config)
        self._config = vllm_config
        self.defaults: Spec = spec.from_wire(getattr(model_config, DEFAULTS, ()))
        self.requires_stamp = bool(self.defaults)
        self.counts: Counter[str] = Counter()
        self._declared = declared.read(model_config)
        self.shelf = self._declared.shelf
        """Artifacts that requests may name; None where nothing steers by default."""
        self._trial = self._make_trial()
        self._trying = threading.Lock()
        self._markers_key = ""
        if self._declared.markers is not None:
            self._markers_key = f"engine {id(self)}"
            _markers[self._markers_key] = self._declared.markers
        if self.defaults:
            self._check(self._resolve(self.defaults))

    def status(self) -> dict[str, Any]:
        """What this front end steers, and has steered so far."""
        return {
            "defaults": spec.to_wire(self.defaults),
            "declared": [steer.name for steer in self._declared.residual],
            "plugins": registry.names(),
            "refused_here": self._refusals,
            "requests": dict(self.counts),
        }

    @functools.cached_property
    def _markers_on_wire(self) -> Any:
        if self._markers_key:  # every process has them
            return self._markers_key
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
        if not self.defaults and not any(is_ours(key) for key in arguments):
            return params
        for key in arguments:
            if not isinstance(key, str):
                raise SteerError("extra_args", key, "a mapping with strings for keys: others kill the engine core's input")
        rest = {key: value for key, value in arguments.items() if not is_ours(key)}
        if not request.spec and not self.requires_stamp and not request.trace:
            return with_arguments(params, rest)  # asked for "off": as good as not asked
        stamp = {
            "plugins": spec.to_wire(request.spec),
            "markers": self._markers_on_wire,
            "vocab_size": self.vocab_size,
            "trace": request.trace,
        }
        self.counts.update(steer.name for steer in request.spec)
        return with_arguments(params, {**rest, STAMP: stamp})

    def read(self, arguments: Mapping[str, Any]) -> spec.Request:
        """What a request with these ``extra_args`` asks for, in finished numbers. Raises as :meth:`stamp` does."""
        if STAMP in arguments:
            raise SteerError(STAMP, arguments[STAMP], "left out: steering is asked for with steer and steer_* keys")
        try:
            request = spec.parse_flat(arguments, () if _unsteered.get() else self.defaults)
        except SteerError:
            name = arguments.get(spec.PREFIX)  # no parameter would make up for a plugin that was not declared
            if isinstance(name, str) and registry.is_plugin(name):
                self._check_declared([registry.get(name)])
            raise
        if request.spec and _beams.get():
            raise UnsupportedError(
                "steering and beam search exclude each other: vLLM's beam search ranks raw log-probabilities and drops "
                "vllm_xargs; sample instead, or turn steering off (over HTTP vllm_xargs {'steer': 'off'}, offline "
                "`with llm_steer.hosts.vllm.admission.unsteered():`)"
            )
        self._check_declared([steer.plugin for steer in request.spec])
        resolved = self._resolve(request.spec)
        self._check(resolved)
        if arguments.get("kv_transfer_params") and any(steer.plugin.steers_hidden_states() for steer in resolved):
            raise UnsupportedError(
                "hidden states cannot be steered in a request whose keys and values come from or go to another engine "
                "(kv_transfer_params): that one does not know how it steers"
            )
        return spec.Request(resolved, request.trace)

    def _resolve(self, request: Spec) -> Spec:
        return spec.resolve(request, self._vocabulary, self.shelf)

    def _check_declared(self, plugins: Iterable[type[Plugin[Any]]]) -> None:
        known = {steer.name for steer in self.defaults}
        for plugin in plugins:
            if plugin.name in known:
                continue
            if plugin.steers_hidden_states():
                what = "steers hidden states, which is built into the model when it is loaded"
            elif plugin.needs_boundaries:
                what = "reads step boundaries, whose table engines get at start"
            else:
                continue
            raise UnsupportedError(
                f"{plugin.name} {what}: start the engine with --logits-processor {plugin.name}:key=value,... (the same: "
                f"llm-steer serve MODEL --steer {plugin.name}:key=value,...; offline: LLM(..., "
                f"logits_processors=['{plugin.name}:...'])); requests can then change its parameters or turn it off"
            )

    def _check(self, request: Spec) -> None:
        """Raise for what this engine, or what was declared at its start, does not allow."""
        if not request:
            return
        if self._refusals:
            raise UnsupportedError(f"this engine cannot steer: {'; '.join(self._refusals)}")
        residual = [steer for steer in request if steer.plugin.steers_hidden_states()]
        if residual and self._residual_refusals:
            raise UnsupportedError(f"this engine cannot steer hidden states: {'; '.join(self._residual_refusals)}")
        if any(steer.plugin.feedback for steer in request) and self._feedback_refusals:
            raise UnsupportedError(f"this engine cannot run a closed loop: {'; '.join(self._feedback_refusals)}")
        if self._trial is not None:
            # What workers will do, on one slot of our own: an error there would end the engine.
            nothing = torch.empty(0, dtype=torch.int64)
            with self._trying:
                for steer in residual:
                    plugin = self._trial.plugin(steer.plugin)
                    try:
                        plugin.admit(0, steer.params, nothing)
                    except (SteerError, UnsupportedError):
                        raise
                    except Exception as error:
                        raise UnsupportedError(f"{steer.name} cannot be admitted: {error}") from error
                    finally:
                        plugin.admit(0, None, nothing)

    @functools.cached_property
    def _residual_refusals(self) -> list[str]:
        return compat.residual_refusals(self._config)

    @functools.cached_property
    def _feedback_refusals(self) -> list[str]:
        layers = set[int]()
        if self._trial is not None:
            for steer in self._declared.residual:
                if steer.plugin.feedback:
                    layers.update(self._trial.plugin(steer.plugin).layers())
        return compat.feedback_refusals(self._config, layers)

    def _make_trial(self) -> Runtime | None:
        if not self._declared.residual:
            return None
        context = worker_context(self._config.model_config, 2, torch.device("cpu"), self._declared)
        return Runtime(context, self._declared.markers or Markers(), self._declared.residual)


def of_app(app: Any) -> Admission | None:
    """Of an API server's application."""
    client = getattr(getattr(app, "state", None), "engine_client", None)
    found: Admission | None = getattr(getattr(client, "input_processor", None), "llm_steer", None)
    return found


def worker_context(model_config: Any, num_slots: int, device: torch.device, told: declared.Declared) -> Context:
    """What plugins are built with on this engine."""
    context = Context(num_slots, device, model_config.get_vocab_size())
    if not told.residual:
        return context
    return replace(
        context,
        num_layers=model_config.get_total_num_hidden_layers(),
        hidden_size=model_config.get_hidden_size(),
        max_positions=model_config.max_model_len,
        shelf=told.shelf,
    )


def read_stamp(params: Any) -> dict[str, Any] | None:
    """The stamp of a request, or None."""
    arguments = getattr(params, "extra_args", None)
    return arguments.get(STAMP) if arguments else None


def markers_of(stamp: Mapping[str, Any]) -> Markers:
    """The think markers and step delimiters that a request brings along, or that its front end has."""
    wire = stamp["markers"]
    return _markers[wire] if isinstance(wire, str) else Markers.from_wire(wire)


def unstamped_keys(params: Any) -> list[str]:
    """Steering keys as a client writes them: nothing of that sort may get past the front end."""
    return [key for key in (getattr(params, "extra_args", None) or {}) if is_ours(key)]


def asks_for_steering(arguments: Mapping[str, Any]) -> bool:
    """A request's ``extra_args`` steer or trace, or are meant to: not a word of ours, or ``off``, do not.

    Says less than :meth:`Admission.read`: for requests that cannot be steered, whatever they ask for.

    Raises:
        SteerError: ``steer`` holds what is nothing here.
    """
    asked = {key: value for key, value in arguments.items() if is_ours(key)}
    if asked.get(f"{spec.PREFIX}_trace") == 0:
        del asked[f"{spec.PREFIX}_trace"]
    if not asked or asked.get(spec.PREFIX, 1) == 1:  # nothing, or the default, which there may be or not
        return bool(asked)
    request = spec.parse_flat(asked)
    return bool(request.spec) or request.trace


def is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.lower().startswith(spec.PREFIX)


def with_arguments(params: Any, arguments: dict[str, Any]) -> Any:
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
        declared.declare(self, config, ours)
        return config

    return create_model_config


def _split_processors(named: Any) -> tuple[Spec, Any]:
    """Our plugins out of the list of logits processors. vLLM loads our one class by itself, through its entry point."""
    ours: list[spec.Steer] = []
    rest = []
    for item in named or ():
        # What names neither a plugin nor, as module:Class, a class of vLLM's is a plugin's name misspelt.
        if isinstance(item, str) and (registry.is_plugin(item.partition(":")[0]) or not CLASS_PATH.fullmatch(item)):
            ours.append(spec.parse_option(item))
        elif item != PROCESSOR and f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', '')}" != PROCESSOR:
            rest.append(item)
    for steer in ours:
        if sum(other.name == steer.name for other in ours) > 1:
            raise SteerError("--logits-processors", steer.name, "named once")
    return tuple(ours), rest or (None if named is None else [])


def _install_front_end() -> None:
    from vllm import envs

    from llm_steer.hosts.vllm import plugin, server, trace

    compat.install(compat.INPUT_INIT, _around_input_init)
    compat.install(compat.INPUT, _around_process_inputs)
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # the engine core runs in this process
        plugin.install_core()
    compat.install(compat.OUTPUT_STATE, trace.around_from_new_request)
    compat.install(compat.OUTPUT, trace.around_new_completion_output)
    compat.install(compat.STEP, trace.around_step)
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
                if kwargs.get("resumable") and read_stamp(params) is not None:
                    raise UnsupportedError("steering and streaming input exclude each other: a request must come as a whole")
            except SteerError as error:
                raise VLLMValidationError(str(error), parameter=error.field) from error
            except UnsupportedError as error:
                raise VLLMValidationError(str(error), parameter=spec.PREFIX) from error
        request = original(self, request_id, prompt, params, *args, **kwargs)
        stamp = read_stamp(params) if getattr(request, "prompt_embeds", None) is not None else None
        try:
            refuse_unknown_prompt(spec.from_wire(stamp["plugins"]) if stamp else ())
        except UnsupportedError as error:
            raise VLLMValidationError(str(error), parameter=spec.PREFIX) from error
        return request

    return process_inputs


def around_preprocess_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    from llm_steer.hosts.vllm import cache

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
            cache.identify(request, self.vllm_config)
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
