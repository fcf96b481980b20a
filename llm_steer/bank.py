"""Vectors on the device for many requests at once: each slot points at a row, and no step costs more for more of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.slots import copy_async


class VectorBank:
    """A table of vectors, filled in place: what reads ``vectors`` inside a compiled graph goes on reading it.

    A vector is known by a key (the content hash of what it was made from) and loaded once. A slot pins the row that its
    request steers with; a row that nobody pins stays until its place is needed, the one used longest ago first.

    Args:
        capacity: vectors held at once. With one row for each slot it never runs out.
        hidden_size: their length.
        device: where they are read.
        dtype: in which they are kept.
    """

    def __init__(self, capacity: int, hidden_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.vectors = torch.zeros(capacity + 1, hidden_size, dtype=dtype, device=device)
        """``[capacity + 1, hidden_size]``; the last row is zero: for slots that steer with nothing."""
        self._host = torch.zeros(capacity + 1, hidden_size, dtype=dtype)
        self._rows: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pins: dict[int, str] = {}
        self._free = list(range(capacity))[::-1]

    @property
    def nothing(self) -> int:
        """The row that is zero."""
        return len(self._host) - 1

    @property
    def loaded(self) -> dict[str, int]:
        """Keys of the vectors that are held, with how many slots use each."""
        pinned = list(self._pins.values())
        return {key: pinned.count(key) for key in self._rows}

    def pin(self, slot: int, key: str, make: Callable[[], torch.Tensor]) -> int:
        """Give a slot the vector of this key, in place of the one it has.

        Args:
            make: called for ``[hidden_size]`` if the vector is not held yet.

        Returns:
            Its row.

        Raises:
            UnsupportedError: every row is in use by another slot.
            SteerError: the vector is of another size, or not finite.
        """
        self.unpin(slot)
        row = self.load(key, make)
        self._pins[slot] = key
        return row

    def unpin(self, slot: int) -> None:
        """The slot's request has ended. Its vector stays until its row is needed."""
        self._pins.pop(slot, None)

    def load(self, key: str, make: Callable[[], torch.Tensor]) -> int:
        """Hold a vector without using it: as :meth:`pin`, for no slot."""
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        vector = make().detach().to("cpu", self._host.dtype)
        if vector.shape != self._host.shape[1:]:
            raise SteerError("vector", f"{list(vector.shape)}", f"{self._host.shape[1]} numbers, as wide as this model")
        if not bool(torch.isfinite(vector).all()):
            raise SteerError("vector", "NaN or infinity", f"finite numbers that {self._host.dtype} can hold")
        row = self._room()
        self._host[row] = vector
        copy_async(self._host[row], self.vectors[row])
        self._rows[key] = row
        return row

    def unload(self, key: str) -> bool:
        """Let go of a vector; False if it was not held.

        Raises:
            UnsupportedError: a slot uses it.
        """
        if key in self._pins.values():
            raise UnsupportedError(f"the vector {key} is in use by a request: wait until it has ended")
        row = self._rows.pop(key, None)
        if row is not None:
            self._free.append(row)
        return row is not None

    def _room(self) -> int:
        if self._free:
            return self._free.pop()
        in_use = set(self._pins.values())
        for key in self._rows:
            if key not in in_use:
                return self._rows.pop(key)
        raise UnsupportedError(
            f"all {self.nothing} vectors that fit at once are in use by requests; wait until one has ended"
        )
