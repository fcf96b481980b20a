"""A third party's plugin beside reflection_cycle, for requests in all their forms."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from llm_steer.plugins.reflection_cycle import ReflectionCycle, ReflectionCycleParams
from pydantic import Field, model_validator

from llm_steer import Params, Plugin, SteerError, registry, spec
from llm_steer.spec import Steer

RC = "reflection_cycle"
NAMES = "odd, reflection_cycle"
ONE_OF = f"one of {NAMES}"


class Inner(Params):
    layer: int
    scale: float = 1.0


class OddParams(Params):
    """Fields of a third party's plugin, of sorts that the built-in one has none of."""

    size: int | str = 1
    values: int | list[int] = 1
    table: dict[str, float] = {}  # noqa: RUF012
    inner: Inner | None = None
    code: Annotated[str, Field(pattern="^[a-z]+$")] = "a"
    needed: int = 0
    layers: list[int] = [1]  # noqa: RUF012

    @model_validator(mode="after")
    def _together(self) -> OddParams:
        if self.needed == 7:
            raise ValueError("needed and size cannot both be 7")
        if self.needed == 8:
            raise ValueError("needed: any number but 8")
        if self.needed == 9:
            raise SteerError("layers[0]", self.layers[0], "another layer")
        return self


class Odd(Plugin[OddParams]):
    name = "odd"
    Params = OddParams


def default(**fields: Any) -> spec.Spec:
    return (Steer(ReflectionCycle, ReflectionCycleParams(**fields)),)


def steer(**fields: Any) -> Steer:
    return Steer(ReflectionCycle, ReflectionCycleParams(**fields))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reflection_cycle and the odd one are the plugins that there are."""
    classes = {RC: ReflectionCycle, "odd": Odd}
    monkeypatch.setattr(registry, "names", lambda: sorted(classes))
    monkeypatch.setattr(registry, "is_plugin", classes.__contains__)
    real = registry.get
    monkeypatch.setattr(registry, "get", lambda name: classes[name] if name in classes else real(name))
