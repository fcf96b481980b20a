"""Steering a Hugging Face model: ``steer``, ``unsteer``, ``steering``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from llm_steer.errors import SteerError
from llm_steer.hosts import hf
from llm_steer.hosts.hf_steering import Steering
from llm_steer.spec import parse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

M = TypeVar("M", bound="PreTrainedModel")

Method = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def steer(
    model: M,
    method: Method,
    /,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    layers_path: str | None = None,
    **params: Any,
) -> M:
    """Steer what a transformers model generates.

    ::

        steer(model, "reflection_cycle", amplitude=5, period=1200)
        model.generate(**inputs, max_new_tokens=2000)           # steered
        model.generate(**inputs, steer={"amplitude": 8})        # with another amplitude, for this call
        model.generate(**inputs, steer=[{"period": 600}, None])  # by row: the second prompt is not steered
        model.generate(**inputs, steer="off")                   # as if the model were not steered
        model.steering.traces                                   # what was done to each sequence

    ``generate`` and everything built on it is steered: pipelines, streamers, sampling, ``num_return_sequences``, padded
    batches, beam search, prompt lookup and assistants (refused for methods that depend on what the model computed).
    Calling the model itself is not, and continuous batching is refused. Steering a steered model replaces what it was
    steered with. While ``generate`` runs in another thread, leave the model as it is.

    ``generate(steer=...)`` takes what ``method`` takes, or a list with one of these for each prompt (or for each returned
    sequence, without beams); a mapping without ``"name"`` changes parameters of the method that the model is steered
    with; ``None`` and ``"off"`` turn it off. Several methods for one row are a list in the list.

    Where a prompt is given as embeddings, or all but its end lies in a cache, its ids are not known: a think span that it
    opened is not seen. A steered model can be deep-copied, but not pickled.

    Args:
        model: any model that can ``generate``; it is changed in place.
        method: name of a plugin; a mapping ``{"name": ..., parameters}``; a list of these, applied in this order; or
            ``"off"``, to steer only the calls that ask for it.
        tokenizer: the model's tokenizer, which turns words and think markers into token ids. By default the one in the
            folder or repository that the model was loaded from.
        layers_path: where the decoder layers are (``"model.layers"``), for models where they are not found.
        params: parameters of the method, if it is given by its name.

    Returns:
        The same model.

    Raises:
        SteerError: naming the argument, its value, and what would be valid. The model is left as it was.
        UnsupportedError: the model lacks what a method needs, such as a layer.
    """
    hf.check_model(model)
    if not method:
        raise SteerError("method", method, 'the name of a plugin, or "off" to steer only the calls that ask for it')
    hf.install(model, Steering(model, parse(method, params), tokenizer, layers_path))
    return model


def unsteer(model: M, /) -> M:
    """Take the steering off a model: everything is as it was before :func:`steer`. Harmless on one that is not steered.

    Returns:
        The same model.
    """
    hf.check_model(model)
    hf.uninstall(model)
    return model


@contextmanager
def steering(
    model: M,
    method: Method,
    /,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    layers_path: str | None = None,
    **params: Any,
) -> Iterator[M]:
    """Steer a model inside a ``with`` block: :func:`steer`, and afterwards whatever was there before.

    ::

        with steering(model, "reflection_cycle", amplitude=5):
            model.generate(**inputs)
    """
    before = getattr(model, hf.ATTRIBUTE, None)
    steer(model, method, tokenizer=tokenizer, layers_path=layers_path, **params)
    try:
        yield model
    finally:
        if before is None:
            hf.uninstall(model)
        else:
            hf.install(model, before)
