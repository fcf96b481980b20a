"""The picture of a calibration: confidences, layers, and the control surface."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from llm_steer.errors import MissingDependencyError

from .control import COLUMNS, Constants, coefficient, paper_coefficient


def surface(constants: Constants, mode: str, size: int = 101) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Confidences ``[size]``, variances ``[size]``, and coefficients ``[size, size]`` (variance by confidence)."""
    columns = {name: torch.tensor(value) for name, value in vars(constants).items()}
    columns["steepness"] = torch.tensor(constants.steepness())
    of = {name: columns[name].double().expand(size * size) for name in COLUMNS}
    confidence, variance = torch.linspace(0, 1, size).double(), torch.linspace(0, 3 * constants.q75v, size).double()
    control = coefficient if mode == "reference" else paper_coefficient
    c, v = confidence.repeat(size), variance.repeat_interleave(size)
    return confidence, variance, control(c, v, of).view(size, size)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of :func:`calibrate.run`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot", "drawing the picture of a calibration") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    constants = Constants(**report["constants"])
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    quantiles = report["confidence"]
    left.plot(quantiles, [i / (len(quantiles) - 1) for i in range(len(quantiles))])
    for value, name, side in ((constants.q25c, "q25", "right"), (constants.q75c, "q75", "left")):
        left.axvline(value, linestyle="--", color="grey")
        left.text(value, 0.02, f" {name} {value:.3f} ", ha=side)
    left.set(xlabel="confidence of a step", ylabel="share of steps below", title=f"{report['steps']} steps")
    for name, shown in (("r2", "R², confidence of the coming step"), ("auc", "AUC, the two kinds of steps")):
        middle.errorbar(
            range(len(report[name])),
            [math.nan if value is None else value for value in report[name]],
            [value or 0.0 for value in report[f"{name}_error"]],
            marker="o",
            label=shown,
        )
    middle.legend()
    middle.axvline(report["layer"], linestyle="--", color="grey")
    middle.set(xlabel="behind layer", ylabel="on problems held out", title=f"layer {report['layer']}")
    confidence, variance, values = surface(constants, report["mode"])
    limit = max(abs(constants.low), abs(constants.floor), constants.ceiling)
    image = right.pcolormesh(confidence, variance, values, cmap="coolwarm", vmin=-limit, vmax=limit, shading="nearest")
    right.set(xlabel="confidence", ylabel="variance", title="coefficient")
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
