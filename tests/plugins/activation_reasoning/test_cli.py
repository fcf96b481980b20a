"""``llm-steer rules check`` and ``llm-steer concepts find``."""

from __future__ import annotations

import json

import pytest
from llm_steer.plugins.activation_reasoning import ActivationReasoning

from llm_steer import steer
from llm_steer.cli import run

FILE = """concepts:
  wumpus: {words: [wumpus]}
subjects: [max]
propositions:
  wumpus(?x): {pattern: ["?x", wumpus]}
rules:
  - wumpus(?x) -> mammal(?x)
  - mammal(max) and not rain -> out
actions:
  - {when: out and true, log: true}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(FILE)
    return path


def test_check_explains_a_file(file, capsys):
    assert run(["rules", "check", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["unknown_concepts"] == ["rain"]
    assert report["ground_rules"] == 3
    assert ["mammal(max)", "out", "+"] in report["edges"]
    assert ["rain", "out", "-"] in report["edges"]
    assert ["out", "log", "+"] in report["edges"]
    by_name = {row["proposition"]: row for row in report["propositions"]}
    assert by_name["wumpus(max)"]["detected_by"] == ["max", "wumpus"]
    assert by_name["rain"]["implied"]
    assert run(["rules", "check", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "max then wumpus" in shown
    assert "unknown concepts: rain" in shown


def test_check_says_where_a_mistake_is(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("rules:\n  - a -> (b\n")
    assert run(["rules", "check", str(path), "--json"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["field"] == "bad.yaml, line 2, column 12"
    assert run(["rules", "check", str(tmp_path / "no.yaml")]) == 2
    assert "a readable rules file" in capsys.readouterr().err


def test_check_draws(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(["rules", "check", str(file), "--plot", str(tmp_path / "g.svg")]) == 0
    assert (tmp_path / "g.svg").read_text().startswith("<?xml")
    assert run(["rules", "check", str(file), "--plot", "g.txt"]) == 2
    assert "--plot" in capsys.readouterr().err


def test_concepts_are_found_and_used(tiny_model, tiny_tokenizer, register, tmp_path, capsys):
    register(ActivationReasoning)
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    lines = []
    for index in range(60):
        words = [f"w{(7 * index + 3 * i) % 90 + 20}" for i in range(6)]
        there = index % 2
        if there:
            words[3] = "w200"
        text = " ".join(words)
        start = text.find("w200")
        lines.append({"text": text, "spans": [[start, start + 4, "two hundred"]] if there else []})
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    common = ["concepts", "find", str(tmp_path / "model"), "--data", str(data), "--layer", "0"]
    assert run([*common, "--out", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (concept,) = report["concepts"]
    assert concept["name"] == "two hundred"
    assert concept["report"]["token/auc"] > 0.9
    (tmp_path / "f.yaml").write_text("dictionary: out\nactions: [{when: '\"two hundred\"', log: true}]\n")
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=str(tmp_path / "f.yaml"))
    for text, there in (("w30 w31 w200 w33", True), ("w30 w31 w32 w33", False)):
        ids = tiny_tokenizer(text, return_tensors="pt").input_ids
        model.generate(ids, max_new_tokens=1, do_sample=False)
        moments = model.steering.traces[0]["plugins"][0]["moments"]
        assert bool(moments) == there
    for options, what in (
        (["--layer", "1"], "between 0 and 0"),
        (["--method", "magic"], "one of single"),
        (["--method", "top_k"], "--sae"),
        (["--concept", "x"], "a label of the data"),
    ):
        assert run([*common, *options, "--out", str(tmp_path / "out2")]) == 2
        assert what in capsys.readouterr().err
