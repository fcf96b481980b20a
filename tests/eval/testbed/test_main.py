"""``python -m llm_steer.eval.testbed`` from the outside: JSON, and one line for what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm_steer.eval.testbed import measure
from llm_steer.eval.testbed.__main__ import NAME, app

from llm_steer.cli import run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: Any) -> tuple[int, str, str]:
        code = run([*map(str, arguments)], app, NAME)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["train", "nosuch"], "name: got 'nosuch'; must be one of arithmetic, logic"),
        (["train", "logic", "--steps", "0"], "--steps: got 0; must be a number at least 1"),
        (["train", "logic", "--steps", "many"], "'--steps'"),
        (["train", "logic", "--save-every", "0"], "--save-every: got 0"),
        (["train", "logic", "--steps", "1", "--out", "/proc/nowhere"], "--out: got '/proc/nowhere/logic'"),
        (["measure", "--count", "1"], "--count: got 1; must be a number at least 2"),
        (["measure", "--only", "all"], "--only: got 'all'; must be one of accuracy, reflection"),
        (["measure", "--models", "/proc"], "--models: got '/proc'; must be a folder with the checkpoints"),
        (["measure", "--out", "/proc/nowhere/report.md"], "--out: got '/proc/nowhere/report.md'"),
        (["show", "nosuch"], "name: got 'nosuch'"),
    ],
)
def test_bad_input_is_one_line(call: Any, arguments: list[str], what: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert err.count("\n") == 1


def test_a_smoke_run_of_a_shipped_recipe(call: Any, tmp_path: Path) -> None:
    """Stopped after two steps, and gone on with for one more."""
    for steps in (2, 3):
        code, out, err = call("train", "logic", "--steps", steps, "--out", tmp_path, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert [row["step"] for row in found["log"]] == list(range(2, steps + 1))
    assert found["folder"] == str(tmp_path / "logic")
    assert (tmp_path / "logic" / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"no tensors", (2**40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}"])
def test_a_damaged_state_is_named(call: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "logic").mkdir()
    (tmp_path / "logic" / "state").write_bytes(content)
    code, _, err = call("train", "logic", "--steps", 1, "--out", tmp_path)
    assert code == 2
    assert err.startswith("llm-steer: --out: got ")
    assert "/logic'; must be a place that" in err
    assert "Traceback" not in err


def test_shown_problems_as_json(call: Any) -> None:
    code, out, _ = call("show", "logic", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["task"] for row in rows} >= {"ontology", "entailment-words", "entailment-code", "entailment-table"}
    assert all(row["prompt"] in call("show", "logic")[1] for row in rows)


def test_a_report_as_json() -> None:
    tables = [measure.table(["a", "b"], [["1", "2 ± 3"], ["", "x"]]), measure.table(["c"], [["4"]])]
    report = f"About.\n\n### One\n\n{tables[0]}\n\nA note.\n\n### Two\n\n{tables[1]}\n\n{tables[0]}\n\nIt took a minute.\n"
    first = {"head": ["a", "b"], "rows": [["1", "2 ± 3"], ["", "x"]]}
    assert measure.document(report) == {
        "about": "About.",
        "sections": [
            {"title": "One", "tables": [first], "notes": ["A note."]},
            {"title": "Two", "tables": [{"head": ["c"], "rows": [["4"]]}, first], "notes": []},
        ],
        "time": "It took a minute.",
    }
