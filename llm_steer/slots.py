"""Per-slot parameters: written on the host at admission, read on the device at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SlotTable:
    """A ``[num_slots, num_columns]`` device tensor with a mirror on the host.

    Admissions write rows of the mirror; :meth:`flush` moves them to the device in one asynchronous copy, once per step at
    most, and only if something changed.

    Args:
        columns: their names, in order; ``table["name"]`` is a device view ``[num_slots]``.
    """

    def __init__(
        self, columns: Sequence[str], num_slots: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> None:
        self._index = {name: i for i, name in enumerate(columns)}
        self._host = torch.zeros(len(columns), num_slots, dtype=dtype)
        self._device = self._host.to(device, copy=True)
        self._dirty = False

    def write(self, slot: int, **values: float) -> None:
        """Set every named column of one slot; columns that are not named become 0."""
        self._host[:, slot] = 0
        for name, value in values.items():
            self._host[self._index[name], slot] = value
        self._dirty = True

    def flush(self) -> None:
        """Bring the device up to date. Cheap when nothing changed."""
        if self._dirty:
            copy_async(self._host, self._device)
            self._dirty = False

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._device[self._index[name]]


def copy_async(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy host memory to ``target`` without waiting for the device.

    The source may be changed right afterwards: what travels is a pinned copy of its own.
    """
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
