"""What the benchmarks share: statistics of repeated measurements, the machine in words, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Of repeated measurements of one thing."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    best: float
    """The smallest: what is left when nobody else disturbs."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(median, low, high, min(values), len(values))


def bootstrap_interval(values: Sequence[float], draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the median, by resampling."""
    dice = random.Random(seed)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def machine() -> dict[str, Any]:
    """What a figure has to be read with."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": cores,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def in_words(setup: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setup.items())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns; the first one is aligned left."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [
        [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))]
        for r in (header, *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def say(line: str) -> None:
    """Progress: to stderr, so that stdout is the result alone."""
    print(line, file=sys.stderr, flush=True)


def print_json(benchmark: str, setup: dict[str, Any], figures: dict[str, Any]) -> None:
    """One object: ``figures`` by name."""
    print(json.dumps({"benchmark": benchmark, "setup": setup, "figures": figures}, indent=1))
