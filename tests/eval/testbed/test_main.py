"""``python -m llm_steer.eval.testbed`` from the outside: JSON, and one line for what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llm_steer.eval.testbed import MODELS, measure
from llm_steer.eval.testbed.__main__ import NAME, app
from llm_steer.eval.testbed.recipes import RECIPES
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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
        (["measure", "--seed", "-1"], "--seed: got -1"),
        (["train", "logic", "--seed", str(2**64)], "--seed: got 18446744073709551616; must be a number at least 0"),
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
        assert [row["step"] for row in found["log"]] == [steps]  # what an unbroken run would have
        assert found["steps"] == steps
    assert found["folder"] == str(tmp_path / "logic")
    assert (tmp_path / "logic" / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"no tensors", (2**40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}"])
def test_a_damaged_state_is_named(call: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "logic").mkdir()
    (tmp_path / "logic" / "state").write_bytes(content)
    code, _, err = call("train", "logic", "--steps", 1, "--out", tmp_path)
    assert code == 2
    assert err.startswith("llm-steer: state: got ")
    assert "state'; must be a state of a run" in err
    assert err.count("\n") == 1


def test_a_run_that_cannot_go_on_says_why(call: Any, tmp_path: Path) -> None:
    """Nothing of it is changed, whatever is wrong."""
    assert call("train", "logic", "--steps", 2, "--out", tmp_path)[0] == 0
    state, log = tmp_path / "logic" / "state", tmp_path / "logic" / "train.csv"
    assert call("train", "logic", "--steps", 1, "--out", tmp_path)[0::2] == (
        2,
        f"llm-steer: steps: got 1; must be at least 2: so many steps are behind the run in {tmp_path / 'logic'}\n",
    )
    good = state.read_bytes(), log.read_bytes()

    def refused(field: str) -> None:
        before = state.read_bytes(), log.read_bytes()
        code, out, err = call("train", "logic", "--steps", 3, "--out", tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{field}: got" in err
        assert (state.read_bytes(), log.read_bytes()) == before
        state.write_bytes(good[0])
        log.write_bytes(good[1])

    tensors, metadata = load_file(state), {}
    with safe_open(state, "pt") as file:
        metadata = dict(file.metadata())
    first = sorted(name for name in tensors if name.startswith("optimizer"))[0]
    for change in ({"step": "-3"}, {"step": "2.5"}, {"identity": "0" * 64}, {"sha256": ""}):
        save_file(tensors, state, {**metadata, **change})
        refused("state")
    save_file({**tensors, first: tensors[first].flatten()[:1].clone()}, state, metadata)
    refused("state")
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, state, metadata)
    refused("state")
    save_file(tensors, state)
    refused("state")
    state.write_bytes(good[0][:-1])
    refused("state")
    for text in ("", "step,loss\n", "step,loss,lr,seconds,cpu_seconds\nx,1,1,1,1\n", "\x00"):
        log.write_text(text)
        refused("log")
    code, out, err = call("train", "logic", "--steps", 3, "--out", tmp_path, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["steps"], found["of"], len(found["log"])) == (3, RECIPES["logic"].steps, 1)


def test_damaged_checkpoints_are_told_before_the_work(call: Any, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)

    def refused() -> None:
        code, out, err = call("measure", "--models", models, "--count", 2, "--only", "accuracy")
        assert (code, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("llm-steer: --models: got ")
        assert "logic cannot be loaded (" in last

    report = tmp_path / "report.md"
    report.write_text("of an earlier run")
    assert call("measure", "--models", "/nope", "--out", report)[0] == 2
    assert report.read_text() == "of an earlier run"
    weights, config = models / "logic" / "model.safetensors", models / "logic" / "config.json"
    good = weights.read_bytes()
    weights.write_bytes(good[: len(good) // 2])
    refused()
    weights.write_bytes(good)
    config.write_text("{")
    refused()
    config.write_text((MODELS / "logic" / "config.json").read_text().replace('"hidden_size": 128', '"hidden_size": 64'))
    refused()


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
