"""Requests that steer hidden states with the toy methods, and what the oracle says to them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e import scenarios
from e2e.oracle import Oracle, Push, Result, Thermostat

TOYS = Path(__file__).parent / "toys"
DECLARED = ['push:{"layers": [0, 1], "strength": 0.0}', "thermostat:gain=0,layer=1"]
"""Both at strength 0: what they do is up to each request."""


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH where the toy methods look installed."""
    info = folder / "toy_residual-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-residual\nVersion: 1\n")
    points = "".join(f"{name.lower()} = toy_residual:{name}\n" for name in ("Push", "Thermostat", "Damp"))
    (info / "entry_points.txt").write_text(f"[llm_steer.plugins]\n{points}")
    (folder / "toy_residual.py").write_text((TOYS / "toy_residual.py").read_text())
    return folder


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    pushes: tuple[dict[str, Any], ...] = ()
    """Parameters of ``push`` (with ``layers``) and ``thermostat`` (with ``gain``), in the order of declaration."""

    def to_engine(self) -> dict[str, Any]:
        named = [{"name": "thermostat" if "gain" in push else "push", **push} for push in self.pushes]
        return {"prompt_token_ids": self.prompt, "params": {**self.params, "extra_args": {"steer": named or "off"}}}

    def want(self, oracle: Oracle, runner: str = "v1") -> Result:
        pushes: list[Push] = []
        for push in self.pushes:
            if "gain" in push:
                pushes.append(Thermostat(**push))
            else:
                rest = {name: value for name, value in push.items() if name != "layers"}
                pushes += [Push(**rest, layer=layer) for layer in push["layers"]]
        return oracle.generate(self.prompt, self.params, None, runner, pushes=pushes)


KINDS = ("none", "open", "closed", "both")


def pushed(rng: random.Random, kind: str, layers: int = 2) -> tuple[dict[str, Any], ...]:
    pushes: list[dict[str, Any]] = []
    if kind in ("open", "both"):
        where = sorted(rng.sample(range(layers), rng.choice((1, layers))))
        positions = rng.choice(("all", "output"))
        strength = rng.choice((-40.0, 20.0, 60.0))
        pushes.append({"layers": where, "positions": positions, "strength": strength, "seed": rng.randrange(5)})
    if kind in ("closed", "both"):
        pushes.append({"gain": rng.choice((-150.0, 100.0, 300.0)), "target": 0.3, "seed": rng.randrange(5), "layer": 1})
    return tuple(pushes)


def batch(rng: random.Random, count: int, tokens: int = 20, longest: int = 24) -> list[Asked]:
    """Plain, open-loop and closed-loop requests in turn."""
    return [
        Asked(scenarios.prompt(rng, longest), scenarios.sampling(rng, tokens), pushed(rng, KINDS[i % len(KINDS)]))
        for i in range(count)
    ]


def describe(request: Asked, expected: Any, got: Mapping[str, Any] | list[int]) -> str:
    return scenarios.describe(request, expected, got)  # type: ignore[arg-type]
