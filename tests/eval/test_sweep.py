"""Tuning: on its own problems, with the same number of tries, and never on those that are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_steer.eval import tasks
from llm_steer.eval.config import RunConfig
from llm_steer.eval.store import Folder
from llm_steer.eval.summary import summarize
from llm_steer.eval.sweep import Plan, for_tuning, parse_grids, refuse_overlap, split_methods, sweep

from llm_steer import SteerError, UnsupportedError
from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine, sums


def answer(request):
    """The better, the nearer the amplitude is to 3; unsteered, never right."""
    a, b = (int(n) for n in request.messages[0]["content"].split("+"))
    amplitude = request.steer.get("amplitude", 0) if isinstance(request.steer, dict) else 0
    right = (request.sampling.seed or 0) % 10 < 9 - 3 * abs(amplitude - 3)
    return Response(text=f"</think>\\boxed{{{a + b if right else -1}}}", tokens=10)


def test_the_best_is_reported_on_other_problems(tmp_path):
    config = RunConfig(**{**sums(tmp_path, 60), "steer": ["none", "reflection_cycle:period=50"]})
    said = []
    plan = Plan(config, {"reflection_cycle:period=50": {"amplitude": [1, 2, 3, 4, 5]}})
    engine = FakeEngine(answer)
    summary = sweep(plan, engine, say=said.append)
    tune, report = (Folder(Path(config.out) / name) for name in ("tune", "report"))
    tuned, reported = ({p["fingerprint"] for p in f.problems().values()} for f in (tune, report))
    assert tuned.isdisjoint(reported)
    assert len(tuned) + len(reported) == 60
    assert 15 <= len(tuned) <= 45
    methods = report.run()["methods"]
    assert list(methods) == ["none", "reflection_cycle:period=50"]
    assert methods["reflection_cycle:period=50"]["steer"] == {"name": "reflection_cycle", "amplitude": 3.0, "period": 50.0}
    tuning = summary.run["notes"]["tuning"]
    assert [row["steer"]["amplitude"] for row in tuning] == [1, 2, 3, 4, 5]
    assert max(tuning, key=lambda row: row["accuracy"])["steer"]["amplitude"] == 3
    assert [a.method for a in summary.tasks[0].against] == ["reflection_cycle:period=50"]
    asked = len(engine.asked)
    sweep(plan, engine, say=said.append)
    assert len(engine.asked) == asked


def test_controls_are_made_from_what_was_chosen(tmp_path):
    config = RunConfig(**{**sums(tmp_path, 40), "steer": ["none", {"label": "wave", "steer": "reflection_cycle"}]})

    def shuffled(chosen):
        return [{"label": "control", "steer": {**chosen["wave"], "schedule": "shuffled", "period": 8.0}}]

    summary = sweep(Plan(config, {"wave": {"amplitude": [1, 3]}}, controls=shuffled), FakeEngine(answer), say=lambda _: None)
    steer = {"name": "reflection_cycle", "amplitude": 3.0, "schedule": "shuffled", "period": 8.0}
    assert summary.run["methods"]["control"]["steer"] == steer
    assert [score.method for score in summary.tasks[0].scores] == ["none", "wave", "control"]


def test_other_tasks_to_report_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = sums(tmp_path / "a", 6), sums(tmp_path / "b", 12)
    other = Path(there["tasks"][0])
    other.write_text(other.read_text().replace("name: sums", "name: others"))
    data = {"sums": here["data"]["sums"], "others": there["data"]["sums"]}
    config = RunConfig(**{**here, "data": data})
    plan = Plan(config, {"reflection_cycle": {"amplitude": [1, 3]}}, report_tasks=[str(other)])
    with pytest.raises(SteerError, match="6 are in both"):
        sweep(plan, FakeEngine(answer))
    other.write_text(other.read_text().replace("'{{a}}+{{b}}'", "'0{{a}}+{{b}}'"))
    with pytest.raises(SteerError, match="6 are in both"):  # the same problems in another prompt
        sweep(plan, FakeEngine(answer))
    rows = Path(data["others"])
    rows.write_text(rows.read_text().replace('"a": ', '"a": 9').replace('"sum": ', '"sum": 9'))
    summary = sweep(plan, FakeEngine(answer))
    assert [task.name for task in summary.tasks] == ["others"]
    assert summary.tasks[0].problems == 12


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_another_share_in_the_same_folder(tmp_path, share):
    config = RunConfig(**sums(tmp_path, 30))
    grids = {"reflection_cycle": {"amplitude": [1]}}
    sweep(Plan(config, grids), FakeEngine(answer))
    with pytest.raises(SteerError, match="split its problems otherwise") as caught:
        sweep(Plan(config, grids, share=share), FakeEngine(answer))
    assert caught.value.value == config.out


def test_a_folder_that_split_by_other_words(tmp_path):
    """As a version that read words otherwise left it."""
    config = RunConfig(**sums(tmp_path, 30))
    grids = {"reflection_cycle": {"amplitude": [1]}}
    sweep(Plan(config, grids), FakeEngine(answer))
    for part in ("tune", "report"):
        problems = Path(config.out) / part / "problems.jsonl"
        rows = [{**json.loads(line), "words": f"{part} {n}"} for n, line in enumerate(problems.read_text().splitlines())]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep(Plan(config, grids), FakeEngine(answer))
    with pytest.raises(SteerError, match="split its problems otherwise"):
        sweep(Plan(config, grids, share=0.25), FakeEngine(answer))


def test_nothing_is_chosen_while_answers_are_missing(tmp_path):
    config = RunConfig(**sums(tmp_path, 20))
    plan = Plan(config, {"reflection_cycle": {"amplitude": [1]}})
    with pytest.raises(UnsupportedError, match="nothing can be chosen"):
        sweep(plan, FakeEngine(lambda r: Response(finish="error", error="down")))
    assert not (Path(config.out) / "report").exists()


def test_the_report_may_have_more_samples(tmp_path):
    config = RunConfig(**{**sums(tmp_path, 20), "samples": 1})
    summary = sweep(Plan(config, {"reflection_cycle": {"amplitude": [1, 2]}}, report_samples=3), FakeEngine(answer))
    assert [score.answers for score in summary.tasks[0].scores] == [3 * summary.tasks[0].problems] * 2
    assert summarize(Path(config.out) / "tune").run["samples"] == 1


def test_unequal_grids_are_told(tmp_path):
    config = RunConfig(**sums(tmp_path, 20))
    said = []
    sweep(Plan(config, parse_grids(["reflection_cycle.amplitude=1,2", "s1.ignore=1"])), FakeEngine(answer), say=said.append)
    assert "unequal" in said[0]


def test_a_problem_s_half_depends_on_nothing_but_its_words():
    items = tasks.load(tasks.find("testbed_arithmetic"), limit=400).items
    half = [item for item in items if for_tuning(item, 0.5)]
    assert 160 <= len(half) <= 240
    assert {i.id for i in half if for_tuning(i, 0.2)} < {i.id for i in half}


def test_a_problem_that_is_there_twice_has_one_half(tmp_path):
    """However it is spaced, and whatever its capitals."""
    rows = [
        {"problem": f"{how}{n}{end}", "answer": "1"} for n in range(40) for how, end in (("Is it ", ""), ("is  IT ", "\n"))
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = tasks.load(tasks.find("amc23"), file).items
    assert [item.words for item in items[::2]] == [item.words for item in items[1::2]]
    halves = [for_tuning(item, 0.5) for item in items]
    assert halves[::2] == halves[1::2]
    assert len({*halves}) == 2


def test_splits_without_problems():
    items = tasks.load(tasks.find("testbed_arithmetic"), limit=3).items
    with pytest.raises(SteerError, match="problems are left"):
        refuse_overlap({item.words: item.id for item in items}, {})


def test_grids():
    assert parse_grids(["tip.alpha=1,2.5", "tip.mode=thought,absolute"]) == {
        "tip": {"alpha": [1, 2.5], "mode": ["thought", "absolute"]}
    }
    for bad in ("tip", "tip=1", "tip.alpha=", "alpha=1"):
        with pytest.raises(SteerError, match=r"METHOD\.parameter"):
            parse_grids([bad])
    with pytest.raises(SteerError, match="given once"):
        parse_grids(["a.b=1", "a.b=2"])
    with pytest.raises(SteerError, match="at least once"):
        parse_grids([])


def test_methods_with_labels_keep_their_other_parameters(tmp_path):
    wave = {"label": "wave", "steer": {"name": "reflection_cycle", "period": 40}}
    loop = {"label": "forced", "steer": {"name": "s1", "word": "Hmm"}}
    config = RunConfig(**{**sums(tmp_path), "steer": ["none", wave, loop]})
    grids = parse_grids(["wave.amplitude=1,2", "forced.ignore=1", "s1.word=Wait,But", "tip.beta=9"])
    fixed, tuned = split_methods(config, grids)
    assert fixed == ["none"]
    assert tuned["wave"] == [{"name": "reflection_cycle", "period": 40.0, "amplitude": a} for a in (1, 2)]
    assert tuned["forced"] == [{"name": "s1", "word": "Hmm", "ignore": 1}]
    assert tuned["s1"] == [{"name": "s1", "ignore": 2, "word": word} for word in ("Wait", "But")]
    assert tuned["tip"] == [{"name": "tip", "beta": 9}]


def test_bad_configurations(tmp_path):
    config = RunConfig(**sums(tmp_path))
    with pytest.raises(SteerError, match="one of none"):
        split_methods(config, {"nonesuch": {"x": [1]}})
    with pytest.raises(SteerError, match="at most"):
        split_methods(config, {"reflection_cycle": {"amplitude": list(range(101)), "period": list(range(1, 101))}})
    with pytest.raises(SteerError, match="one plugin"):
        split_methods(config, {"none": {"x": [1]}})
