"""What tests of the whole plugin need. The modules beside them can be imported by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_steer import sandbox
from llm_steer.engines import voting

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def scripted(register: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is there; programs do not run, except where a test says what they print."""
    from llm_steer.plugins.mixture_of_thought import MixtureOfThought

    register(MixtureOfThought)
    monkeypatch.setattr(sandbox, "available", lambda: False)
    monkeypatch.setattr(voting, "GRACE", 10.0)  # what is decided does not depend on how busy this machine is
