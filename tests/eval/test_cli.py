"""``llm-steer eval`` from the outside: what it does, and one line for what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llm_steer.eval import engine as engines
from llm_steer.eval.testbed import MODELS

from engines.fake_server import FakeServer, serving
from llm_steer.cli import run as command
from support.fake_engine import FakeEngine, answer_by_seed, sums


@pytest.fixture
def cli(capsys):
    def call(*arguments):
        capsys.readouterr()
        code = command(["eval", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def fake(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engines, "open_engine", lambda config, methods: (engine, None))
    return engine


@pytest.fixture
def options(tmp_path):
    given = sums(tmp_path)
    return ["--tasks", given["tasks"][0], "--data", given["data"]["sums"], "--out", given["out"]]


def test_the_command_of_the_issue(cli, fake, options, tmp_path):
    arguments = ["fake", *options, "--steer", "none,reflection_cycle", "--samples", "2", "--seed", "0"]
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "| reflection_cycle |" in out
    folder = tmp_path / "out"
    assert {"run.json", "report.html", "report.md", "results.jsonl"} <= {p.name for p in folder.iterdir()}
    assert len(fake.asked) == 20
    code, out, _ = cli("run", *arguments, "--json")
    assert code == 0
    assert len(fake.asked) == 20
    assert json.loads(out)["tasks"][0]["name"] == "sums"
    assert cli("report", folder)[0] == 0
    code, _, err = cli("regrade", folder)
    assert (code, "0 verdicts changed" in err) == (0, True)


def test_options_first_and_yaml(cli, fake, options, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("model: fake\nsteer: [none]\nsamples: 5\n")
    code, _, err = cli("--config", config, *options, "--set", "samples=1", "--set", "limit=3", "--no-report")
    assert code == 0, err
    assert len(fake.asked) == 3
    assert not (tmp_path / "out" / "report.html").exists()


def test_compare_and_sweep(cli, fake, options, tmp_path):
    cli("fake", *options, "--samples", "2")
    other = tmp_path / "other"
    cli("fake", *options[:-1], other, "--samples", "1")
    code, out, err = cli("compare", tmp_path / "out", other)
    assert code == 0, err
    assert "other" in out
    more = tmp_path / "more"
    more.mkdir()
    given = sums(more, 20)
    where = ["--tasks", given["tasks"][0], "--data", given["data"]["sums"], "--out", given["out"]]
    code, out, err = cli("sweep", "fake", *where, "--grid", "reflection_cycle.amplitude=1,2", "--share", "0.4")
    assert code == 0, err
    assert "Chosen: reflection_cycle" in err
    assert "| reflection_cycle |" in out


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"--tasks": "math50"}, "did you mean 'math500'"),
        ({"--steer": "cyclic_reflection"}, "one of none"),
        ({"--data": "sums=nowhere.jsonl"}, "No such file"),
        ({"--data": "other=nowhere.jsonl"}, "one of the run's tasks"),
        ({"--samples": "0"}, "samples"),
        ({"--set": "sample=3"}, "did you mean 'samples'"),
        ({"--engine": "tpu"}, "engine"),
        ({"--set": "tasks="}, "tasks: got []; must be a list with at least 1"),
        ({"--set": "timeout=0"}, "timeout: got 0"),
        ({"--config": "nowhere.yaml"}, "readable YAML file"),
    ],
)
def test_bad_input_is_one_line(cli, options, change, match):
    given = dict(zip(options[::2], options[1::2], strict=True)) | change
    code, out, err = cli("fake", *(part for pair in given.items() for part in pair))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert match in err


DAMAGES = [
    ("results", '{"task": "sums"}', "results.jsonl line 6", "'key'"),
    ("results", "[1, 2]", "results.jsonl line 6", "no JSON object"),
    ("results", '{"key": 5', "results.jsonl line 6", "JSON"),
    ("problems", '{"task": "sums", "id": "9"}', "problems.jsonl line 6", "'gold'"),
    ("grades", '{"key": "x", "answer": null, "value": null, "correct": "yes"}', "grades.jsonl line 6", "'yes'"),
    ("sessions", "null", "sessions.jsonl line 2", "no JSON object"),
]


@pytest.mark.parametrize(("file", "row", "where", "what"), DAMAGES)
def test_a_damaged_folder(cli, fake, options, tmp_path, file, row, where, what):
    assert cli("fake", *options)[0] == 0
    folder, whole = tmp_path / "out", tmp_path / "whole"
    shutil.copytree(folder, whole)
    with (folder / f"{file}.jsonl").open("a") as journal:
        journal.write(row + "\n")
    reading = {"problems": 4, "results": 4, "grades": 4, "sessions": 2}[file]
    for asked in (["report", folder], ["fake", *options], ["compare", whole, folder], ["regrade", folder])[:reading]:
        code, _, err = cli(*asked)
        assert code == 2, asked
        assert where in err
        assert what in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"methods": None}, "its 'methods' is None"),
        ({"samples": "many"}, "its 'samples' is 'many'"),
        ({"methods": {"none": 3}}, "of method none: it is no JSON object"),
        ({"tasks": {"sums": {"title": "Sums"}}}, "of task sums: it has no 'grader'"),
    ],
)
def test_a_damaged_run_document(cli, fake, options, tmp_path, change, what):
    assert cli("fake", *options)[0] == 0
    path = tmp_path / "out" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for asked in (["report", path.parent], ["fake", *options]):
        code, _, err = cli(*asked)
        assert code == 2
        assert what in err


def test_problems_that_are_gone(cli, fake, options, tmp_path):
    assert cli("fake", *options)[0] == 0
    (tmp_path / "out" / "problems.jsonl").write_text("")
    before = (tmp_path / "out" / "grades.jsonl").read_bytes()
    for command_ in ("regrade", "report"):
        code, _, err = cli(command_, tmp_path / "out")
        assert (code, "problems.jsonl has" in err) == (2, True)
    assert (tmp_path / "out" / "grades.jsonl").read_bytes() == before


def test_answers_that_are_gone(cli, fake, options, tmp_path):
    assert cli("fake", *options)[0] == 0
    results = tmp_path / "out" / "results.jsonl"
    whole = results.read_text()
    results.write_text(whole[: whole.index("\n") + 1])
    code, _, err = cli("report", tmp_path / "out")
    assert (code, "4 are missing" in err) == (2, True)
    results.unlink()
    code, _, err = cli("report", tmp_path / "out")
    assert (code, "5 are missing" in err) == (2, True)
    assert cli("fake", *options)[0] == 0
    assert cli("report", tmp_path / "out")[0] == 0
    assert sorted(json.loads(line)["key"] for line in results.read_text().splitlines()) == sorted(
        json.loads(line)["key"] for line in whole.splitlines()
    )


def test_a_server_that_does_not_steer_is_refused_at_the_start(cli, options, tmp_path):
    with serving(FakeServer(steers=False)) as server:
        steered = ["fake", *options, "--url", server.url, "--steer", "none,reflection_cycle"]
        code, _, err = cli(*steered)
        assert (code, server.bodies) == (2, [])
        assert "--steer reflection_cycle: the server does not steer (it has no /v1/steer)" in err
        assert not (tmp_path / "out").exists()
        assert cli("fake", *options, "--url", server.url)[0] == 0


def test_a_device_that_is_not_there(cli, options):
    code, _, err = cli(MODELS / "arithmetic", *options, "--set", "device=cuda:99")
    assert code == 2
    assert err.startswith("llm-steer: device: got 'cuda:99'; must be a device of this machine")


def test_an_unknown_argument_of_the_engine(cli, options):
    code, _, err = cli(MODELS / "arithmetic", *options, "--engine", "hf", "--set", "engine_args.x=1")
    assert code == 2
    assert err.startswith("llm-steer: engine_args.x: got 1; must be left out")


def test_a_task_with_the_name_of_another(cli, fake, options, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(Path(options[1]).read_text().replace("name: sums", "name: amc23"))
    options[1] = str(own)
    code, _, err = cli("fake", *options)
    assert code == 2
    assert "own.yaml: name: got 'amc23'; must be another name: the built-in task has this one" in err


def test_a_run_that_cannot_begin_leaves_nothing(cli, options, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    options[options.index("--out") + 1] = str(file)
    code, _, err = cli("no/such-model", *options)
    assert (code, file.read_text()) == (2, "mine")
    assert err.startswith("llm-steer: folder: got ")
    assert err.endswith("; must be a folder, and not a file\n")
    options[options.index("--out") + 1] = str(tmp_path / "deep" / "er")
    assert cli("no/such-model", *options)[0] == 2
    assert not (tmp_path / "deep").exists()
    (tmp_path / "deep").mkdir()
    assert cli("no/such-model", *options)[0] == 2
    assert list(tmp_path.glob("deep/*")) == []


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "llm_steer", "list", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "reflection_cycle" in {plugin["name"] for plugin in json.loads(done.stdout)}


def test_a_model_s_folder_that_is_missing(cli, options, tmp_path):
    code, _, err = cli(tmp_path / "no-model", *options, "--engine", "hf")
    assert code == 2
    assert "a folder that exists" in err


def test_a_row_without_an_answer(cli, fake, options, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"n": 1, "a": 1, "b": 2, "sum": 3}\n{"n": 2, "a": 1, "b": 2}\n')
    code, _, err = cli("fake", *options)
    assert code == 2
    assert "sums.jsonl line 2: sum" in err
    assert "an answer" in err


def test_a_server_that_is_not_there(cli, options, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code, _, err = cli("served", *options, "--url", "http://127.0.0.1:9/v1")
    assert code == 2
    assert "no server answers" in err
    assert "Nothing was lost" in err
    assert all(b"sk-secret" not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_requests_without_an_answer_are_told(cli, fake, options):
    fake.answer = lambda r: answer_by_seed(r) if r.messages[0]["content"] != "10+0" else 1 / 0
    with pytest.raises(ZeroDivisionError):
        cli("fake", *options)
    from llm_steer.engines.base import Response

    fake.answer = lambda r: Response(finish="error", error="no server is left (it went away)")
    code, _, err = cli("fake", *options)
    assert code == 2
    assert "no server is left" in err
    assert "the same command asks for the rest" in err


def test_an_old_folder(cli, fake, options, tmp_path):
    cli("fake", *options)
    results = (tmp_path / "out" / "results.jsonl").read_bytes()
    code, _, err = cli("fake", *options, "--seed", "3")
    assert code == 2
    assert "seed was 0 there and is 3 now" in err
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == results


def test_a_tiny_model(cli, options, tmp_path, tiny_model, tiny_tokenizer):
    """All the way through Hugging Face."""
    model = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    steer = "none,reflection_cycle:amplitude=9,period=8"
    code, _, err = cli(model, *options, "--engine", "hf", "--steer", steer, "--max-tokens", "12", "--limit", "2")
    assert code == 0, err
    rows = [json.loads(line) for line in (Path(tmp_path) / "out" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["think_exact"] for row in rows)
    steered = [row for row in rows if row["method"] != "none"]
    assert all(row["steering"]["plugins"][0]["name"] == "reflection_cycle" for row in steered)
    # The wave reached the logits: the same seeds, other texts.
    texts = {(row["id"], row["method"] == "none"): row["text"] for row in rows}
    assert any(texts[id_, True] != texts[id_, False] for id_ in {row["id"] for row in rows})


def test_what_vllm_is_told_at_its_start(register):
    """Plugins that change hidden states or read step boundaries, once each; the others are asked for by every request."""
    from llm_steer.eval.methods import parse_methods
    from llm_steer.plugins.baselines import AlphaOne
    from llm_steer.plugins.vector import RandomVector

    register(RandomVector)
    register(AlphaOne)
    methods = parse_methods(
        [
            "none",
            "reflection_cycle",
            {"label": "a", "steer": {"name": "random_vector", "norm": 2.0, "layers": [1]}},
            {"label": "b", "steer": ["reflection_cycle", {"name": "random_vector", "norm": 3.0, "layers": [1]}]},
            "alpha_one:alpha=2",
        ]
    )
    vector, boundaries = engines.declared(methods)["logits_processors"]
    assert vector.startswith("random_vector:{")
    assert boundaries == 'alpha_one:{"alpha": 2.0}'
    assert engines.declared(methods[:2]) == {}
