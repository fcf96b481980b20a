"""Models that answer by a script, for tests of what becomes of the answers."""

from __future__ import annotations

from typing import Any

import pytest
from llm_steer.plugins.mixture_of_thought.modalities import TAGS

from engines.scripted import ScriptedEngine
from llm_steer import sandbox
from llm_steer.engines.base import Request, Response

MOT = "mixture_of_thought"
MODALITY_OF = {tag: modality for modality, tag in TAGS.items()}
CODE = "```python\nprint(1)\n```\n<end_of_code>\n<answer>(B)"
TABLE = "Premises:\n1. P → Q\n2. P\nStatement: Q\nRows:\n| P | Q |\n|---|---|\n| T | T |\n<end_of_truth_table>\n"


def prints(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: True)
    monkeypatch.setattr(sandbox, "run", lambda code: sandbox.Outcome("ok", text))


def modality(request: Request) -> str:
    assert request.messages is not None
    return MODALITY_OF[request.messages[-1]["content"].rsplit("\n", 1)[1]]


def says(**answers: Any) -> ScriptedEngine:
    """Answers by modality: a letter, or a text, or a list of them, one for each sample."""
    left = {name: list(value) if isinstance(value, list) else None for name, value in answers.items()}

    def answer(request: Request) -> Any:
        name = modality(request)
        said = answers[name] if left[name] is None else left[name].pop(0)  # type: ignore[union-attr]
        return f"...<answer>({said})" if isinstance(said, str) and len(said) == 1 else said

    return ScriptedEngine(answer)


def told(response: Response) -> dict[str, Any]:
    assert response.error is None, response.error
    assert response.steering is not None
    (plugin,) = response.steering["plugins"]
    assert plugin["name"] == MOT
    return dict(plugin)
