"""Adds one vector to the residual stream at the tokens that a request asks for."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

import torch

from llm_steer.bank import VectorBank
from llm_steer.errors import UnsupportedError
from llm_steer.plugin import Context, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable

from .params import ConstantVectorParams, RandomVectorParams, VectorParams

P = TypeVar("P", bound=VectorParams)


class _Vector(Plugin[P]):
    """``stream += coefficient * vector`` behind some layers: the same at every step, whatever the model computes."""

    needs_boundaries = True

    FLAGS = ("prompt", "think", "delimiters")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._layers = sorted({layer for params in context.declared for layer in params.layers or ()})  # type: ignore[attr-defined]
        self.bank = VectorBank(context.num_slots - 1, context.hidden_size, context.device)
        """The vectors that requests steer with, by content hash."""
        self._gains = SlotTable([str(layer) for layer in self._layers], context.num_slots, context.device, torch.float32)
        self._flags = SlotTable(self.FLAGS, context.num_slots, context.device, torch.bool)
        self._row = SlotTable(["row"], context.num_slots, context.device, torch.int64)
        for slot in range(context.num_slots):
            self._row.write(slot, row=self.bank.nothing)
        # Views of what is filled in place: residual may read them inside a graph.
        self._gain_at = {layer: self._gains[str(layer)] for layer in self._layers}
        self._flag = {name: self._flags[name] for name in self.FLAGS}
        self._row_of = self._row["row"]

    @abstractmethod
    def vector(self, params: P) -> tuple[str, torch.Tensor]:
        """What a request steers with: its key in the bank, and ``[hidden_size]``."""

    @classmethod
    def first_steered(cls, params: P, prompt_len: int) -> int:
        return 0 if params.positions == "all" else max(prompt_len - 1, 0)

    def layers(self) -> Collection[int]:
        return self._layers

    def admit(self, slot: int, params: P | None, prompt_ids: torch.Tensor) -> None:
        self.bank.unpin(slot)
        self._gains.write(slot)
        self._flags.write(slot)
        self._row.write(slot, row=self.bank.nothing)
        if params is None:
            return
        flags = {
            "prompt": params.positions == "all",
            "think": params.positions in ("think", "delimiters"),
            "delimiters": params.positions in ("delimiters", "output_delimiters"),
        }
        self._flags.write(slot, **flags)
        if self.context.hidden_size == 0:  # a replay from token ids
            return
        layers = params.layers or []
        if missing := set(layers) - set(self._layers):
            raise UnsupportedError(f"{self.name} was declared for the layers {self._layers}, not for {sorted(missing)}")
        key, vector = self.vector(params)
        self._row.write(slot, row=self.bank.pin(slot, key, lambda: vector))
        self._gains.write(slot, **{str(layer): params.coefficient for layer in layers})

    def step(self, tokens: Tokens) -> None:
        for table in (self._gains, self._flags, self._row):
            table.flush()

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        home = self.bank.vectors.device
        if tokens.slot.device != home:  # a model that is split over several
            tokens = tokens.to(home)
        gain = torch.where(self._acts(tokens), self._gain_at[layer][tokens.slot], 0.0)
        added = gain[:, None] * self.bank.vectors[self._row_of[tokens.slot]]
        return added.to(hidden.device, hidden.dtype)

    def _acts(self, tokens: Tokens) -> torch.Tensor:
        """bool ``[num_tokens]``, the token is one of those that its request steers."""
        prompt, think, delimiters = (self._flag[name][tokens.slot] for name in self.FLAGS)
        return (
            (prompt | (tokens.output_position >= -1))
            & (~think | tokens.thinking)
            & (~delimiters | tokens.boundary)
        )  # fmt: skip

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        """``steered_tokens``: generated tokens that were steered when they were fed; the last one never is."""
        self._flags.flush()
        return {"steered_tokens": int(self._acts(tokens)[:-1].sum())}


class ConstantVector(_Vector[ConstantVectorParams]):
    """A calibrated vector with a fixed coefficient, as in SEAL: the simplest steering there is, and a baseline."""

    name = "constant_vector"
    summary = "A vector from an artifact, added with a fixed coefficient (as in SEAL)"
    Params: ClassVar = ConstantVectorParams

    def vector(self, params: ConstantVectorParams) -> tuple[str, torch.Tensor]:
        if self.context.shelf is None:
            raise UnsupportedError(f"{self.name} needs artifacts, and this host has no place to open them from")
        return params.artifact, self.context.shelf.open(params.artifact, None).vector()


class RandomVector(_Vector[RandomVectorParams]):
    """A random direction of a given norm: the control that tells a vector's meaning from a mere push."""

    name = "random_vector"
    summary = "A random direction of a given norm: the control for constant_vector"
    Params: ClassVar = RandomVectorParams

    def vector(self, params: RandomVectorParams) -> tuple[str, torch.Tensor]:
        if params.norm is None:
            raise ValueError(f"{self.name} was admitted with parameters that were not resolved")
        direction = random_direction(params.seed, self.context.hidden_size) * params.norm
        return f"random:{params.seed}:{params.norm!r}", direction


def random_direction(seed: int, size: int) -> torch.Tensor:
    """A unit vector, float32 ``[size]``, from a hash of the seed: alike on every rank and machine."""
    digest = hashlib.sha256(f"random_vector {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    direction = torch.randn(size, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(direction, dim=0).float()
