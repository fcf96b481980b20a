"""CyclicReflex: steers how often a model reflects with a wave on the logits of its reflection tokens."""

from .params import ReflectionCycleParams
from .plugin import ReflectionCycle

__all__ = ["ReflectionCycle", "ReflectionCycleParams"]
