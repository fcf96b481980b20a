"""Per-slot parameters: written on the host at admission, read on the device at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SlotTable:
    """A ``[num_slots, num_columns]`` device tensor with a mirror on the host.

    Admissions write rows of the mirror; the first read of a step moves them to the device, in one asynchronous copy, and
    only if something changed.

    Args:
        columns: their names, in order; ``table["name"]`` is a device view ``[num_slots]``.
    """

    def __init__(
        self, columns: Sequence[str], num_slots: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> None:
        self._columns = tuple(columns)
        self._host = torch.zeros(num_slots, len(columns), dtype=dtype)
        self._device = self._host.to(device, copy=True)
        self._dirty = False

    def write(self, slot: int, **values: float) -> None:
        """Set every column of one slot; those that are not named become 0."""
        if unknown := values.keys() - set(self._columns):
            raise KeyError(f"no column {', '.join(sorted(unknown))}")
        self._host[slot] = torch.tensor([values.get(name, 0) for name in self._columns], dtype=self._host.dtype)
        self._dirty = True

    def flush(self) -> None:
        """Bring the device up to date. Cheap when nothing changed."""
        if self._dirty:
            copy_async(self._host, self._device)
            self._dirty = False

    def rows(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every column at some slots (int64), by name: one read for all of them."""
        self.flush()
        return dict(zip(self._columns, self._device.index_select(0, slot).unbind(1), strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        self.flush()
        return self._device[:, self._columns.index(name)]


class RaggedTable:
    """A ``[num_slots, width]`` device tensor of lists of unequal length; short ones repeat their last item.

    Args:
        width: to begin with; it grows with the longest list. Read it outside of graphs only.
    """

    def __init__(self, num_slots: int, width: int, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self._host = torch.zeros(num_slots, width, dtype=dtype)
        self._device = self._host.to(device, copy=True)
        self._dirty = False

    def write(self, slot: int, items: list[Any]) -> None:
        """Set one slot's list, of at least one item."""
        width = self._host.shape[1]
        if len(items) > width:
            last = self._host[:, -1:].expand(-1, len(items) - width)
            self._host = torch.cat([self._host, last], dim=1)
            self._device = self._host.to(self._device.device, copy=True)
            width = len(items)
        self._host[slot] = torch.tensor(items + items[-1:] * (width - len(items)), dtype=self._host.dtype)
        self._dirty = True

    def rows(self, slot: torch.Tensor) -> torch.Tensor:
        """The lists of some slots (int64 ``[n]``): ``[n, width]``."""
        self.flush()
        return self._device.index_select(0, slot)

    def at(self, slot: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One item of each list, int64 ``[n]`` both: ``[n]``. An index beyond the table's width gives the last item."""
        self.flush()
        return self._device[slot, index.clamp(max=self._device.shape[1] - 1)]

    def flush(self) -> None:
        """Bring the device up to date. Cheap when nothing changed."""
        if self._dirty:
            copy_async(self._host, self._device)
            self._dirty = False


def copy_async(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy host memory to ``target`` without waiting for the device.

    The source may be changed right afterwards: what travels is a pinned copy of its own.
    """
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
