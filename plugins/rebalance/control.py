"""ReBalance's control function: step confidence and variance to the coefficient of the steering vector.

The dynamic control function of the released code (``modeling_qwen2_dynamic_3D.py``): a calibrated tanh curve in the
confidence, and two near-step gates in (confidence, variance).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

TAU = 0.01
"""Value of the base curve at full confidence."""
SLOPE = 1200.0
"""Steepness of the gates over an interquartile range: in effect, steps."""
SLOPE_NORM = 12.0
"""Steepness in the norm of the upper gate; the released code mixes the two."""


@dataclass(frozen=True)
class Constants:
    """Thresholds and amplitudes of one model.

    Args:
        q25c, q75c: quartiles of step confidence, in [0, 1], q25c < q75c.
        q25v, q75v: quartiles of step variance, at least 0.
        low: coefficient at q25c (negative: away from over-thinking).
        floor: coefficient in the over-thinking corner (low confidence, high variance).
        ceiling: coefficient in the under-thinking corner (high confidence, low variance).
    """

    q25c: float
    q75c: float
    q25v: float
    q75v: float
    low: float
    floor: float
    ceiling: float = 0.1

    def steepness(self) -> float:
        """``k`` of the base curve: where it passes through TAU at full confidence.

        Solves ``tanh(k (1 - m)) / tanh(k s) = 1 + 2 TAU / |low|`` by bisection, as the released code does (80 halvings).
        """
        middle, spread = (self.q25c + self.q75c) / 2, (self.q75c - self.q25c) / 2
        target = 1 + 2 * TAU / abs(self.low)

        def ratio(k: float) -> float:
            return math.tanh(k * (1 - middle)) / math.tanh(k * spread)

        lower, upper = 1e-6, 1.0
        while ratio(upper) > target and upper < 1e6:
            upper *= 2
        for _ in range(80):
            k = (lower + upper) / 2
            lower, upper = (k, upper) if ratio(k) > target else (lower, k)
        return (lower + upper) / 2


@dataclass(frozen=True)
class Preset:
    """What was published for one model."""

    model: str
    architecture: str
    hidden_size: int
    num_layers: int
    layer: int
    """The vector is added before this layer."""
    constants: Constants


PRESETS = {
    "r1-distill-qwen-1.5b": Preset(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen2ForCausalLM",
        1536,
        28,
        19,
        Constants(0.662293, 0.94805, 0.000560, 0.011597, -1.02, -1.91),
    ),
    "r1-distill-qwen-7b": Preset(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "Qwen2ForCausalLM",
        3584,
        28,
        22,
        Constants(0.666017, 0.927745, 0.000488, 0.009931, -1.19, -2.34),
    ),
    "qwq-32b": Preset(
        "Qwen/QwQ-32B",
        "Qwen2ForCausalLM",
        5120,
        64,
        58,
        Constants(0.700670, 0.917506, 0.000386, 0.007279, -1.31, -2.73),
    ),
    "qwen3-14b": Preset(
        "Qwen/Qwen3-14B",
        "Qwen3ForCausalLM",
        5120,
        40,
        34,
        Constants(0.816174, 0.965398, 0.000149, 0.003593, -1.03, -1.13),
    ),
}
"""Constants of the released code, by model."""

INITIAL = -1.0
"""Coefficient of the released commands at a delimiter that no step has ended before."""

COLUMNS = ("q25c", "q75c", "q25v", "q75v", "low", "floor", "ceiling", "steepness")


def coefficient(confidence: torch.Tensor, variance: torch.Tensor, of: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Coefficient of the steering vector.

    Args:
        confidence, variance: float64 ``[n]``; NaN confidence counts as 0.5.
        of: the columns of :data:`COLUMNS`, float64 ``[n]``.

    Returns:
        float64 ``[n]``, in ``[min(low, floor), max(TAU, ceiling)]``.
    """
    c = confidence.nan_to_num(nan=0.5).clamp(0.0, 1.0)
    v = variance.clamp(min=0.0)
    q25c, q75c = torch.minimum(of["q25c"], of["q75c"]), torch.maximum(of["q25c"], of["q75c"])
    q25v, q75v = torch.minimum(of["q25v"], of["q75v"]), torch.maximum(of["q25v"], of["q75v"])
    range_c, range_v = (q75c - q25c).clamp(min=1e-12), (q75v - q25v).clamp(min=1e-12)
    low, floor, ceiling, k = of["low"], of["floor"], of["ceiling"], of["steepness"]

    middle, spread = (q25c + q75c) / 2, (q75c - q25c) / 2

    def base(x: torch.Tensor) -> torch.Tensor:
        return low / 2 - low / (2 * torch.tanh(k * spread)) * torch.tanh(k * (x - middle))

    def gate(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.clamp(-60.0, 60.0))

    lower = gate(SLOPE * (q25c - c) / range_c) * gate(SLOPE * (v - q75v) / range_v) / 0.25
    norm = 0.5 * gate(SLOPE_NORM * (1 - q75c) / range_c)
    upper = gate(SLOPE * (c - q75c) / range_c) * gate(SLOPE * (q25v - v) / range_v) / norm
    value = (
        base(c) + (floor - base(q25c)) * lower.clamp(max=1.0) + (ceiling - base(torch.ones_like(c))) * upper.clamp(max=1.0)
    )
    return torch.minimum(torch.maximum(value, torch.minimum(low, floor)), ceiling.clamp(min=TAU))


def paper_coefficient(confidence: torch.Tensor, variance: torch.Tensor, of: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Coefficient in the form of the paper: ``sign(c - q75c) B(c, v) tanh(|c - q75c|)``.

    What the paper derives B from could not be recovered. Here it is chosen so that the curve passes through the same points
    as the released code's, from the same constants: ``low`` at q25c; ``floor`` at q25c in the over-thinking state
    (``c <= q25c and v >= q75v``); ``ceiling`` at full confidence in the under-thinking state (``c >= q75c and v <= q25v``),
    TAU at full confidence otherwise.

    Args, Returns: as :func:`coefficient`; limited to the same range.
    """
    c = confidence.nan_to_num(nan=0.5).clamp(0.0, 1.0)
    low, floor, ceiling, q25c, q75c = of["low"], of["floor"], of["ceiling"], of["q25c"], of["q75c"]
    below = torch.where((c <= q25c) & (variance >= of["q75v"]), floor, low) / torch.tanh(q75c - q25c)
    above = torch.where((c >= q75c) & (variance <= of["q25v"]), ceiling, TAU) / torch.tanh(1 - q75c).clamp(min=1e-6)
    value = torch.where(c < q75c, below, above) * torch.tanh((c - q75c).abs())
    return torch.minimum(torch.maximum(value, torch.minimum(low, floor)), ceiling.clamp(min=TAU))
