"""A key-value cache that is written in place. transformers' own copies everything that it holds at every token, which is
most of the time of decoding with a network this small."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 128
"""Positions that the buffer grows by."""


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values: views of buffers ``[batch, heads, capacity, head_size]``."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._keys, self._values = self._grown(key_states, 0), self._grown(value_states, 0)
            self.length = 0
        end = self.length + key_states.shape[-2]
        if end > self._keys.shape[-2]:
            self._keys, self._values = self._grown(self._keys, end), self._grown(self._values, end)
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]

    @staticmethod
    def _grown(old: torch.Tensor, end: int) -> torch.Tensor:
        fresh = old.new_zeros(*old.shape[:2], max(end, old.shape[2]) + ROOM, old.shape[3])
        if end:
            fresh[:, :, : old.shape[2]] = old
        return fresh


def growing_cache() -> Cache:
    """An empty cache; ``generate(past_key_values=...)`` takes it too."""
    return Cache(layer_class_to_replicate=GrowingLayer)
