"""Methods that steer hidden states, as small as they come: open loop, closed loop, and one that reads them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from llm_steer import Params, Plugin


def direction(seed: int, size: int) -> torch.Tensor:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()


class PushParams(Params):
    strength: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    seed: int = 0
    positions: Literal["all", "output"] = "output"
    layers: list[int] = [0]  # noqa: RUF012


class Push(Plugin[PushParams]):
    """Adds a vector of its own for each request, behind any of the layers that were declared."""

    name = "push"
    Params: ClassVar = PushParams

    @classmethod
    def first_steered(cls, params, prompt_len):
        return 0 if params.positions == "all" else prompt_len - 1

    def __init__(self, context):
        super().__init__(context)
        self._layers = sorted({layer for params in context.declared for layer in params.layers})
        self.vectors = torch.zeros(context.num_slots, context.hidden_size, device=context.device)
        self.first = torch.zeros(context.num_slots, dtype=torch.int64, device=context.device)
        self.on = {layer: torch.zeros(context.num_slots, device=context.device) for layer in self._layers}

    def layers(self):
        return self._layers

    def admit(self, slot, params, prompt_ids):
        self.vectors[slot] = 0
        for on in self.on.values():
            on[slot] = 0
        if params is None or not self.context.hidden_size:
            return
        if missing := set(params.layers) - set(self._layers):
            raise ValueError(f"not declared: {missing}")
        self.vectors[slot] = params.strength * direction(params.seed, self.context.hidden_size)
        self.first[slot] = -(2**40) if params.positions == "all" else -1
        for layer in params.layers:
            self.on[layer][slot] = 1

    def residual(self, layer, hidden, tokens):
        on = torch.where(tokens.output_position >= self.first[tokens.slot], self.on[layer][tokens.slot], 0.0)
        return (on[:, None] * self.vectors[tokens.slot]).to(hidden.dtype)


class ThermostatParams(Params):
    gain: float = 50.0
    target: float = 0.5
    seed: int = 0
    layer: int = 0


class Thermostat(Plugin[ThermostatParams]):
    """Pushes each generated token by how far a running mean of the model's confidence was from a target, when it was
    sampled: what it does depends on everything it saw."""

    name = "thermostat"
    Params: ClassVar = ThermostatParams
    feedback = True

    @classmethod
    def first_steered(cls, params, prompt_len):
        return prompt_len

    def __init__(self, context):
        super().__init__(context)
        slots, device = context.num_slots, context.device
        self._layers = sorted({params.layer for params in context.declared})
        self.vectors = torch.zeros(slots, context.hidden_size, device=device)
        self.law = torch.zeros(slots, 2, device=device)
        self.mean = torch.zeros(slots, device=device)
        self.seen = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.history = torch.zeros(slots, max(context.max_positions, 1) + 1, device=device)

    def layers(self):
        return self._layers

    def admit(self, slot, params, prompt_ids):
        for state in (self.vectors, self.law, self.mean, self.history):
            state[slot] = 0
        self.seen[slot] = -1
        if params is not None and self.context.hidden_size:
            self.vectors[slot] = direction(params.seed, self.context.hidden_size)
            self.law[slot] = torch.tensor([params.gain, params.target])

    def residual(self, layer, hidden, tokens):
        count = tokens.output_position
        push = self.history[tokens.slot, count.clamp(0, self.history.shape[1] - 1)]
        push = torch.where(count >= 0, push, 0.0)
        return (push[:, None] * self.vectors[tokens.slot]).to(hidden.dtype)

    def logits(self, logits, rows):
        confidence = logits.softmax(-1).amax(-1)
        slot, count = rows.slot, rows.output_position
        fresh = rows.live & (count > self.seen[slot]) & (slot != self.context.nobody)
        mean = torch.where(count == 0, confidence, 0.75 * self.mean[slot] + 0.25 * confidence)
        gain, target = self.law[slot].unbind(1)
        at = torch.where(fresh, count, self.history.shape[1] - 1).clamp(min=0)
        self.history[slot, at] = torch.where(fresh, gain * (mean - target), 0.0)
        self.mean[slot] = torch.where(fresh, mean, self.mean[slot])
        self.seen[slot] = torch.where(fresh, count, self.seen[slot])


class DampParams(Params):
    layer: int = 0


class Damp(Plugin[DampParams]):
    """Halves the residual stream behind a layer: right only where the whole stream is seen."""

    name = "damp"
    Params: ClassVar = DampParams

    def __init__(self, context):
        super().__init__(context)
        self.on = torch.zeros(context.num_slots, dtype=torch.bool, device=context.device)

    def layers(self):
        return {params.layer for params in self.context.declared}

    def admit(self, slot, params, prompt_ids):
        self.on[slot] = params is not None

    def residual(self, layer, hidden, tokens):
        return torch.where(self.on[tokens.slot][:, None], -0.5 * hidden, 0.0)
