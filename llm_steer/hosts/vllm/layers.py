"""Worker: the decoder layers of vLLM's model, and ``residual`` hooks as a part of their forward pass.

A layer's class is replaced by a subclass before the model is first run, so that what it does is traced, compiled and
captured with the rest. What changes from step to step lies in tensors that were allocated before and are filled in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llm_steer.errors import UnsupportedError
from llm_steer.plugin import Plugin, Tokens

WHOLE = ("CohereDecoderLayer",)
"""Layers that return a pair whose first element is the whole residual stream; the second is no part of it."""

_OTHER_STACKS = {"visual", "vision", "audio", "encoder", "mtp", "vision_model", "vision_tower", "audio_tower"}


class TokenBuffer:
    """The tokens of the forward pass that is about to run, where a graph reads them.

    Args:
        size: most tokens of one pass, padding included.
        nobody: slot of tokens that are no request's.
    """

    def __init__(self, size: int, nobody: int, device: torch.device) -> None:
        numbers = torch.zeros(5, size, dtype=torch.int64, device=device).unbind(0)
        flags = torch.zeros(3, size, dtype=torch.bool, device=device).unbind(0)
        self._numbers = ("ids", "slot", "position", "output_position", "think_position")
        self._flags = ("thinking", "think_ended", "boundary")
        fields = dict(zip((*self._numbers, *self._flags), (*numbers, *flags), strict=True))
        self._tokens = Tokens(**fields)
        self._nobody = nobody
        self._tokens.slot.fill_(nobody)
        self._filled = 0

    def fill(self, tokens: Tokens) -> None:
        """Hold these; what lies behind them is nobody's."""
        count = len(tokens.ids)
        for names in (self._numbers, self._flags):  # of one dtype each: one kernel for all of them
            targets = [getattr(self._tokens, name)[:count] for name in names]
            torch._foreach_copy_(targets, [getattr(tokens, name) for name in names])
        self._end(count)

    def clear(self) -> None:
        """Hold nobody's tokens."""
        self._end(0)

    def _end(self, count: int) -> None:
        if count < self._filled:
            self._tokens.slot[count : self._filled] = self._nobody
        self._filled = count

    def first(self, count: int) -> Tokens:
        """Views of as many tokens. Called inside graphs."""
        return Tokens(**{name: value[:count] for name, value in vars(self._tokens).items()})


def find_layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """The decoder layers; those of other pipeline ranks are placeholders.

    Args:
        count: decoder layers of the whole model.

    Raises:
        UnsupportedError: they were not found.
    """
    wrapper: Any = model
    root: Any = wrapper.get_language_model() if hasattr(model, "get_language_model") else model
    found = [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    inside = [name for name, _ in found]
    found = [
        (name, module)
        for name, module in found
        if not _OTHER_STACKS & set(name.split(".")) and not any(name.startswith(f"{other}.") for other in inside)
    ]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise UnsupportedError(
            f"the {count} decoder layers of {type(root).__name__} were not found (lists of that length: {names}), so that "
            "hidden states cannot be steered; declare no plugin that does"
        )
    return found[0][1]


def is_elsewhere(layer: torch.nn.Module) -> bool:
    """The layer belongs to another pipeline rank."""
    return type(layer).__name__ == "PPMissingLayer"


def steer_behind(layer: torch.nn.Module, index: int, plugins: Sequence[Plugin[Any]], buffer: TokenBuffer) -> None:
    """Have a layer add what the plugins say to the residual stream that it returns."""
    base: Any = type(layer)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _steered(self, base.forward(self, *args, **kwargs))

    # Attributes of the module, not of a closure: a compiled graph reads tensors from where it found them.
    layer.__dict__["_llm_steer"] = (index, tuple(plugins), buffer, base.__name__ in WHOLE)
    layer.__class__ = type(f"Steered{base.__name__}", (base,), {"forward": forward})


def _steered(layer: Any, output: Any) -> Any:
    """A layer's output with the steered stream.

    Most layers return the stream as two tensors, which the next one adds up: what is added to either is added to the
    stream. The first is right for all of them.
    """
    index, plugins, buffer, whole = layer._llm_steer
    pair = isinstance(output, tuple)
    given = output[0] if pair else output
    stream = first = given.flatten(0, -2)  # the Transformers backend has a batch of one
    if pair and not whole and len(output) > 1 and output[1] is not None:
        stream = first + output[1].flatten(0, -2)
    tokens = buffer.first(first.shape[0])
    for plugin in plugins:
        added = plugin.residual(index, stream, tokens)
        first = first + added
        stream = stream + added
    first = first.view(given.shape)
    return (first, *output[1:]) if pair else first
