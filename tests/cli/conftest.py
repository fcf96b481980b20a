"""Running the command line inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llm_steer.cli import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What ``--json`` printed, which must be all that is on standard output."""
        assert self.code in (0, 1), self.err
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error that ``--json`` printed on standard error."""
        assert self.code == 2
        assert self.out == ""
        return json.loads(self.err.strip().splitlines()[-1])["error"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``cli("show", "reflection_cycle", "--json")``."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any, tiny_tokenizer: Any) -> Path:
    """A tiny random model with tokenizer, as a folder."""
    path = tmp_path / "tiny"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None  # so that outputs have the length that was asked for
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path
