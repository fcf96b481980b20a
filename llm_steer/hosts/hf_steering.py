"""What a Hugging Face model is steered with: its ``steering`` attribute."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from llm_steer.artifact import ModelIdentity, Shelf
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.hf_call import Outcome, call_of
from llm_steer.hosts.hf_layers import decoder_config, find_layers, run_behind
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.spec import Spec, parse, resolve
from llm_steer.tokens import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class _AsSteered:
    """Default of ``generate(steer=...)``."""

    def __repr__(self) -> str:
        return "<as the model is steered>"


AS_STEERED = _AsSteered()


class Steering:
    """What a model is steered with: its ``steering`` attribute.

    Args:
        model: a transformers model that can generate.
        spec: what its ``generate`` applies where a call says nothing else.
        tokenizer: its tokenizer; looked for beside the model if None.
        layers_path: where its decoder layers are (``"model.layers"``), if that is not found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: Spec,
        tokenizer: PreTrainedTokenizerBase | None = None,
        layers_path: str | None = None,
    ) -> None:
        self.spec = spec
        """Plugins with the parameters that were asked for."""
        self.counters = dict.fromkeys(Outcome().counts, 0)
        """Calls of ``generate`` that ended well, the sequences they returned, those of them that were steered, and the
        tokens these have."""
        self._vocab_size = _width(model)
        self._layers_path = layers_path
        self._vocabulary, self._no_vocabulary = _vocabulary(model, tokenizer, self._vocab_size)
        self.shelf = Shelf(_identity(model, self._vocabulary), paths=True)
        """Artifacts for this model, from anywhere."""
        self._markers: dict[bool, Markers] = {}
        self._resolved = self._resolve(spec)
        self._last = Outcome()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._shadowed: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.markers([self._resolved])
        for steer in self._resolved:  # what the model lacks shows now, not in the first call
            probe = replace(self.context(2, torch.device("cpu"), 1), declared=(steer.params,))
            if layers := steer.plugin(probe).layers():
                self._layers(model, layers)

    def __repr__(self) -> str:
        return f"Steering({', '.join(f'{steer.name}: {steer.params!r}' for steer in self.spec) or 'off'})"

    @property
    def traces(self) -> list[dict[str, Any] | None]:
        """What was done to each sequence that the last call of ``generate`` returned; None for one that was not steered.

        With several threads, the last call to end counts. Traces of methods that depend on token ids only are replayed
        from these when they are first asked for.
        """
        return self._last.traces

    def request(self, asked: Any) -> Spec | list[Spec]:
        """Validate the ``steer`` argument of ``generate``: one spec for all rows, or a list of them for a list."""
        if not isinstance(asked, list | tuple):
            return self._one(asked)
        if not asked:
            raise SteerError("steer", asked, "a list with one for each prompt")
        specs = []
        for index, item in enumerate(asked):
            try:
                specs.append(self._one(item))
            except SteerError as error:
                inner = error.field.removeprefix("steer")
                inner = inner if inner[:1] in ("", ".", "[") else f".{inner}"
                raise SteerError(f"steer[{index}]{inner}", error.value, error.valid) from error
        return specs

    def context(self, num_slots: int, device: torch.device, max_positions: int) -> Context:
        """What plugins are built with."""
        return Context(
            num_slots=num_slots,
            device=device,
            vocab_size=self._vocab_size,
            num_layers=self.shelf.model.num_layers,
            hidden_size=self.shelf.model.hidden_size,
            max_positions=max_positions,
            shelf=self.shelf,
        )

    def markers(self, specs: Sequence[Spec]) -> Markers:
        """What trackers look for: think markers, and step delimiters for plugins that read them."""
        boundaries = any(steer.plugin.needs_boundaries for spec in specs for steer in spec)
        if self._vocabulary is None:
            if boundaries:
                raise self._tokenizer_needed("step boundaries are found in decoded text")
            return Markers()
        if boundaries not in self._markers:
            self._markers[boundaries] = self._vocabulary.markers(boundaries=boundaries)
        return self._markers[boundaries]

    def hook(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """See to it that there is a hook behind each of these layers."""
        if not layers:
            return
        with self._lock:
            for layer, module in self._layers(model, set(layers) - set(self._hooks)).items():
                # In front of the hooks by which transformers records hidden states.
                self._hooks[layer] = module.register_forward_hook(
                    functools.partial(run_behind, self.residual, layer), prepend=True
                )

    def unhook(self) -> None:
        with self._lock:
            for handle in self._hooks.values():
                handle.remove()
            self._hooks.clear()

    def residual(self, layer: int, hidden: torch.Tensor) -> None:
        """Behind a layer."""
        if call := call_of(self):
            call.residual(layer, hidden)

    def record(self, outcome: Outcome) -> None:
        """Count a call that has ended, and keep what its traces need."""
        with self._lock:
            self._last = outcome
            for name, value in outcome.counts.items():
                self.counters[name] += value

    def original(self, model: PreTrainedModel, name: str) -> Callable[..., Any]:
        """The model's own method."""
        if name in self._shadowed:
            return self._shadowed[name]  # type: ignore[no-any-return]
        return inspect.getattr_static(type(model), name).__get__(model, type(model))  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Steering:
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        vars(copy).update(vars(self))  # shares what is never changed, such as the tokenizer
        copy.counters = dict(self.counters)
        copy._hooks = deepcopy(self._hooks, memo)
        copy._shadowed = deepcopy(self._shadowed, memo)
        copy._lock = threading.Lock()
        return copy

    def __reduce__(self) -> Any:
        # Bound methods are pickled by name: the model would come back with its own ones, not steered and not saying so.
        raise pickle.PicklingError(
            "a steered model cannot be pickled: unsteer(model) first, and steer it again where it goes"
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _one(self, asked: Any) -> Spec:
        if asked is AS_STEERED or (asked is True and self.spec):
            return self._resolved
        return self._resolve(parse(asked, defaults=self.spec))

    def _resolve(self, spec: Spec) -> Spec:
        try:
            return resolve(spec, self._vocabulary, self.shelf)
        except SteerError as error:
            if self._vocabulary is None:
                raise self._tokenizer_needed(str(error)) from error
            raise

    def _tokenizer_needed(self, reason: str) -> SteerError:
        return SteerError("tokenizer", None, f"the model's tokenizer ({reason}; {self._no_vocabulary})")

    def _layers(self, model: PreTrainedModel, indices: Iterable[int]) -> dict[int, torch.nn.Module]:
        layers = find_layers(model, self._layers_path)
        for index in indices:
            if not 0 <= index < len(layers):
                raise UnsupportedError(f"layer {index} is to be steered, but the model has layers 0 to {len(layers) - 1}")
        return {index: layers[index] for index in indices}


def _identity(model: PreTrainedModel, vocabulary: Vocabulary | None) -> ModelIdentity:
    tokenizer = None if vocabulary is None else vocabulary.tokenizer
    return ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tokenizer)


def _width(model: PreTrainedModel) -> int:
    """Width of the logits."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        return int(decoder_config(model).vocab_size)
    return int(getattr(head, "out_features", 0) or head.weight.shape[0])


def _vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, size: int
) -> tuple[Vocabulary | None, str]:
    """The model's vocabulary, or None and why there is none."""
    if tokenizer is not None:
        if not hasattr(tokenizer, "get_vocab"):
            raise SteerError("tokenizer", tokenizer, "a Hugging Face tokenizer, such as AutoTokenizer.from_pretrained gives")
        return Vocabulary(tokenizer, size), ""
    name = model.config._name_or_path
    if not name:
        return None, "the model does not say where it was loaded from"
    from transformers import AutoTokenizer

    try:
        return Vocabulary(AutoTokenizer.from_pretrained(name), size), ""
    except Exception as error:  # whatever the folder holds, or the network does
        reason = f"none could be loaded from {name!r}: {error}"
        logger.warning("Steering %s without a tokenizer, so think spans are not seen: %s", type(model).__name__, reason)
        return None, reason
