"""The Hugging Face host: steers ``model.generate``.

What :func:`install` puts on a model are instance attributes, bound to it: its class, its weights and other models are not
touched, a deep copy is steered on its own, and :func:`uninstall` leaves nothing. Everything that one ``generate`` call
knows lives in a :class:`~llm_steer.hosts.hf_call.Call`, which the methods find through a context variable: calls of
several threads do not mix, and whatever ends a call ends it for good.

``generate`` is followed at three places. ``_expand_inputs_for_generation`` sees the finished prompts, one row for each
sequence; ``prepare_inputs_for_generation`` the tokens of each forward pass, outside of any compiled graph; a logits
processor the logits. Calling the model itself (``model(...)``) steers nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.hf_call import Call, Decoding, SteerProcessor, call_of, during, refuse_feedback, unsteered
from llm_steer.hosts.hf_steering import AS_STEERED, Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "steering"


def install(model: PreTrainedModel, steering: Steering) -> None:
    """Put ``steering`` on a model, in the place of what it is steered with."""
    if (old := model.__dict__.get(ATTRIBUTE)) is not None:
        old.unhook()
        steering._shadowed = old._shadowed
    else:
        steering._shadowed = {name: model.__dict__[name] for name in _METHODS if name in model.__dict__}
        for name, method in _METHODS.items():
            model.__dict__[name] = MethodType(_dressed(method, getattr(model, name)), model)
    model.__dict__[ATTRIBUTE] = steering


def uninstall(model: PreTrainedModel) -> None:
    """Take everything off a model that :func:`install` put on it."""
    steering: Steering | None = model.__dict__.get(ATTRIBUTE)
    if steering is None:
        return
    for name in _METHODS:
        if not hasattr(model.__dict__.get(name), _MARK):
            raise RuntimeError(f"model.{name} was replaced after the model was steered: undo that first")
    steering.unhook()
    for name in (*_METHODS, ATTRIBUTE):
        del model.__dict__[name]
    model.__dict__.update(steering._shadowed)


def check_model(model: Any) -> None:
    """Raise ``SteerError`` for anything but a transformers model that can generate."""
    if isinstance(model, GenerationMixin) and isinstance(model, torch.nn.Module):
        return
    hint = ""
    if hasattr(model, "get_base_model"):
        hint = "; steer the model inside: model.get_base_model()"
    elif hasattr(model, "_orig_mod"):
        hint = "; steer the model before it is compiled, or use model.compile()"
    elif type(model).__module__.startswith("vllm"):
        hint = "; vLLM is steered by LLM(..., logits_processors=[NAME])"
    raise SteerError("model", type(model).__name__, f"a transformers model that can generate{hint}")


# -- the methods that replace the model's own ----------------------------------------------------------------------------


def _generate(model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    steering: Steering = model.__dict__[ATTRIBUTE]
    specs = steering.request(kwargs.pop("steer", AS_STEERED))
    own = steering.original(model, "generate")
    bound = inspect.signature(own).bind(*args, **kwargs)
    rest = next((p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    named = {**bound.arguments, **bound.arguments.get(rest, {})}
    processors = list(named.get("logits_processor") or ())
    if ours := [p.call for p in processors if isinstance(p, SteerProcessor)]:
        # A part of a call that is steered already: an assistant's drafts, or the inside of a custom decoding method.
        outer = ours[0] if ours[0].steering is steering and ours[0].runtime is None else None
        with during(outer):
            return own(*bound.args, **bound.kwargs)
    if not any(specs):
        with during(None):
            result = own(*bound.args, **bound.kwargs)
        steering.record(unsteered(result))
        return result

    call = Call(steering, specs, _decoding(model, named, bound.arguments.get(rest, {})))
    refuse_feedback([specs] if isinstance(specs, tuple) else specs, call.decoding)
    target = bound.arguments if "logits_processor" in bound.signature.parameters else bound.arguments.setdefault(rest, {})
    target["logits_processor"] = LogitsProcessorList([*processors, SteerProcessor(call)])
    with during(call):
        result = own(*bound.args, **bound.kwargs)
    steering.record(call.finish(result))
    return result


def _decoding(model: Any, named: Mapping[str, Any], extra: Mapping[str, Any]) -> Decoding:
    options = {name: value for name, value in extra.items() if name not in NOT_OPTIONS}
    config, _ = model._prepare_generation_config(named.get("generation_config"), **options)
    if config.token_healing:
        raise UnsupportedError('token healing rewrites the prompt that is steered; leave it out, or pass steer="off"')
    if named.get("assistant_tokenizer") is not None:
        raise UnsupportedError(
            "an assistant with a tokenizer of its own would be steered by token ids that mean something else to it; "
            'use an assistant with the same tokenizer, or pass steer="off"'
        )
    mode = config.get_generation_mode(named.get("assistant_model"))
    custom = named.get("custom_generate") is not None
    keeps_rows = not custom and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    takes_logits = keeps_rows or (not custom and mode is GenerationMode.ASSISTED_GENERATION)
    eos_ids = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    pad_id = eos_ids[0] if config.pad_token_id is None and eos_ids else config.pad_token_id
    pad_id = None if pad_id is None else int(pad_id)
    # What max_length leaves depends on the prompts, and a default one is counted from their end.
    most = config.max_new_tokens if config.max_new_tokens is not None else config.max_length or DEFAULT_LENGTH
    return Decoding(not keeps_rows, not takes_logits, frozenset(eos_ids), pad_id, most)


def _expand(model: PreTrainedModel, /, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
    steering: Steering = model.__dict__[ATTRIBUTE]
    result = steering.original(model, "_expand_inputs_for_generation")(expand_size, *args, **kwargs)
    if call := call_of(steering):
        input_ids, inputs = result
        decodes = model.config.is_encoder_decoder
        embeds = None if decodes else inputs.get("inputs_embeds")
        mask = inputs.get("decoder_attention_mask" if decodes else "attention_mask")
        call.admit(input_ids, mask, None if embeds is None else embeds.shape[1], expand_size)
        steering.hook(model, call.layers)
    return result


def _prepare(model: PreTrainedModel, /, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    steering: Steering = model.__dict__[ATTRIBUTE]
    inputs = steering.original(model, "prepare_inputs_for_generation")(input_ids, *args, **kwargs)
    if call := call_of(steering):
        fed = inputs.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
        embedded = fed is None
        call.forward(input_ids, (inputs["inputs_embeds"] if embedded else fed).shape[1], embedded=embedded)
    return inputs


def _start_batching(model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    steering: Steering = model.__dict__[ATTRIBUTE]
    if steering.spec:
        raise UnsupportedError(
            "continuous batching (generate_batch) gives logits processors neither the sequences nor a way in; "
            "use generate, vLLM for throughput, or unsteer(model) first"
        )
    return steering.original(model, "init_continuous_batching")(*args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "_expand_inputs_for_generation": _expand,
    "prepare_inputs_for_generation": _prepare,
    "init_continuous_batching": _start_batching,  # what generate_batch begins with
}
NOT_OPTIONS = ("trust_remote_code", "tokenizer", "assistant_tokenizer")
"""Keywords of ``generate`` that are not part of the generation config."""
DEFAULT_LENGTH = 20
"""Tokens that ``generate`` makes if nobody says how many."""
_MARK = "_llm_steer"


def _dressed(method: Callable[..., Any], own: Callable[..., Any]) -> FunctionType:
    """``method`` with the name, documentation and signature of the model's own one."""

    def dressed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    functools.update_wrapper(dressed, own, updated=())
    del dressed.__wrapped__  # type: ignore[attr-defined]  # bound to this model: a deep copy would keep it alive
    signature = inspect.signature(own)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    if method is _generate:
        steer = inspect.Parameter("steer", inspect.Parameter.KEYWORD_ONLY, default=AS_STEERED)
        last = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - last, steer)
    dressed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(dressed, _MARK, True)
    return dressed  # type: ignore[return-value]
