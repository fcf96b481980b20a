"""Benchmarks are scripts: they are imported from their folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
