"""The batch, on an engine that answers by a rule: nothing lost, nothing twice, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.eval.config import RunConfig, read
from llm_steer.eval.methods import parse_methods, split
from llm_steer.eval.report import markdown
from llm_steer.eval.rows import think_tokens
from llm_steer.eval.run import run
from llm_steer.eval.store import Folder
from llm_steer.eval.summary import summarize

from llm_steer import SteerError
from llm_steer.engines import voting
from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine, answer_by_seed, sums

METHODS = ["none", "reflection_cycle:period=50"]


def config(folder: Path, **changes) -> RunConfig:
    base = {"steer": METHODS, "samples": 3, **sums(folder, grader=changes.pop("grader", "exact"))}
    return RunConfig(**{**base, **changes})


def stored(c: RunConfig) -> list[dict]:
    return list(Folder(Path(c.out)).results())


def test_every_answer_once_and_graded(tmp_path):
    c = config(tmp_path)
    engine = FakeEngine()
    outcome = run(c, engine)
    assert (outcome.finished, outcome.before, outcome.complete) == (30, 0, True)
    rows = stored(c)
    places = Counter((r["task"], r["id"], r["sample"], r["method"]) for r in rows)
    assert len(places) == 30
    assert set(places.values()) == {1}
    grades = Folder(Path(c.out)).grades()
    assert grades.keys() == {r["key"] for r in rows}
    problems = Folder(Path(c.out)).problems()
    for row in rows:
        right = f"\\boxed{{{problems[row['task'], row['id']]['gold']}}}" in row["text"]
        assert grades[row["key"]]["correct"] is right
        assert row["reflections"] == (2 if row["method"] != "none" else 1)
    # Every method has the same prompts and seeds; every sample and problem another seed.
    seeds = Counter(r.sampling.seed for r in engine.asked)
    assert len(seeds) == 15
    assert set(seeds.values()) == {2}
    assert {r.steer if isinstance(r.steer, str) else r.steer["period"] for r in engine.asked} == {"off", 50.0}


def test_logprobs_cost_time_and_are_asked_for_only_where_a_vote_needs_them(tmp_path):
    engine = FakeEngine()
    run(config(tmp_path), engine)
    asked = engine.asked[0]
    assert not any(request.logprob for request in engine.asked)
    body = voting.body_of(asked)
    assert not voting.request_of(body, asked, None).logprob
    assert voting.request_of({**body, "logprobs": True}, asked, None).logprob


def test_a_finished_run_asks_nothing(tmp_path):
    c = config(tmp_path)
    run(c, FakeEngine())
    before = stored(c)
    engine = FakeEngine()
    outcome = run(c, engine)
    assert (engine.asked, outcome.before, outcome.complete) == ([], 30, True)
    assert stored(c) == before


class Killed(BaseException):
    pass


@given(stops=st.lists(st.integers(0, 12), max_size=4), torn=st.integers(0, 400))
@settings(max_examples=10, deadline=None)
def test_broken_off_anywhere_and_gone_on_with(tmp_path_factory, stops, torn):
    """Breaks off after some answers, tears the last row as a kill in the middle of a write would, and goes on."""
    folder = tmp_path_factory.mktemp("run")
    c = config(folder)

    def dying(count):
        left = [count]

        def answer(request):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return answer_by_seed(request)

        return answer

    for count in stops:
        with contextlib.suppress(Killed):
            run(c, FakeEngine(dying(count)))
        for name in ("results", "grades", "sessions"):
            path = Path(c.out) / f"{name}.jsonl"
            data = path.read_bytes()
            last = data.rstrip(b"\n").rfind(b"\n") + 1
            path.write_bytes(data[: max(last, len(data) - torn)] if torn < len(data) - last else data[:last])
    whole = stored(c) if Path(c.out, "run.json").exists() else []
    engine = FakeEngine()
    outcome = run(c, engine)
    assert outcome.complete
    assert len(engine.asked) == 30 - len(whole)
    lines = Path(c.out, "results.jsonl").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 30
    assert Folder(Path(c.out)).grades().keys() == {json.loads(line)["key"] for line in lines}


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    """It ends with what was finished in order, and the same command goes on when there is room."""
    c = config(tmp_path)
    write, room = os.write, 4000

    def filling(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[:room])
        room -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr("llm_steer.eval.journal.os.write", filling)
        with pytest.raises(SteerError, match=r"room for it.*the same command goes on"):
            run(c, FakeEngine())
    kept = stored(c)
    assert 0 < len(kept) < 30
    engine = FakeEngine()
    assert run(c, engine).complete
    assert len(engine.asked) == 30 - len(kept)
    assert stored(c)[: len(kept)] == kept
    assert Folder(Path(c.out)).grades().keys() == {r["key"] for r in stored(c)}
    assert len({r["key"] for r in stored(c)}) == len(stored(c)) == 30


def test_a_folder_grows(tmp_path):
    run(config(tmp_path, samples=1, steer=["none"], limit=2), FakeEngine())
    engine = FakeEngine()
    outcome = run(config(tmp_path, samples=2), engine)
    assert (len(engine.asked), outcome.before) == (18, 2)
    document = Folder(Path(config(tmp_path).out)).run()
    assert list(document["methods"]) == ["none", "reflection_cycle:period=50"]
    assert document["samples"] == 2


@pytest.mark.parametrize(
    ("changes", "identity", "what"),
    [
        ({"seed": 1}, {}, "seed was 0 there and is 1 now"),
        ({"temperature": 0.1}, {}, "tasks.sums.sampling.temperature was 0.6"),
        ({"template": {"enable_thinking": False}}, {}, "template.enable_thinking"),
        ({}, {"dtype": "float16"}, "engine.dtype was None"),
        ({"steer": [{"label": "none", "steer": "reflection_cycle"}]}, {}, "methods.none.plugins"),
        ({"grader": "math"}, {}, "tasks.sums.grader was 'exact'"),
    ],
)
def test_an_old_folder_is_refused_and_left(tmp_path, changes, identity, what):
    c = config(tmp_path)
    run(c, FakeEngine())
    before = {p.name: p.read_bytes() for p in Path(c.out).iterdir()}
    with pytest.raises(SteerError, match=what):
        run(config(tmp_path, **changes), FakeEngine(**identity))
    assert {p.name: p.read_bytes() for p in Path(c.out).iterdir()} == before


def test_other_folders_are_refused(tmp_path):
    c = config(tmp_path)
    Path(c.out).mkdir()
    Path(c.out, "thesis.txt").write_text("mine")
    with pytest.raises(SteerError, match="has thesis"):
        run(c, FakeEngine())
    Path(c.out, "thesis.txt").unlink()
    Path(c.out, "run.json").write_text('{"format": 0}')
    with pytest.raises(SteerError, match="another version"):
        run(c, FakeEngine())


def test_changed_problems_are_refused(tmp_path):
    c = config(tmp_path)
    run(c, FakeEngine())
    rows = Path(c.data["sums"])
    rows.write_text(rows.read_text().replace('"a": 12', '"a": 99'))
    with pytest.raises(SteerError, match="problem 2 of sums was asked in the same words"):
        run(c, FakeEngine())


def test_requests_that_fail_are_asked_again(tmp_path):
    c = config(tmp_path)

    def answer(request):
        if request.steer != "off":
            return Response(finish="error", error="too long")
        return answer_by_seed(request)

    outcome = run(c, FakeEngine(answer))
    assert (outcome.finished, len(outcome.failed), outcome.complete) == (15, 15, False)
    assert "too long" in outcome.failed[0]
    engine = FakeEngine()
    assert run(c, engine).complete
    assert len(engine.asked) == 15


def test_servers_that_were_given_up_are_told(tmp_path):
    class Losing(FakeEngine):
        def dropped(self):
            return ["http://a: status 503; others redid 2 of its requests"]

    config = RunConfig(**sums(tmp_path, 3))
    run(config, Losing())
    summary = summarize(Path(config.out))
    assert summary.dropped == Losing().dropped()
    assert ("server given up", summary.dropped[0]) in markdown.about(summary)
    assert summary.starts == 1


def test_processes_share_a_run(tmp_path, monkeypatch):
    c = config(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        outcome = run(c, FakeEngine())
        assert outcome.finished == 10
    assert outcome.complete
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(c, FakeEngine()).finished == 0
    keys = [r["key"] for path in Path(c.out).glob("results*.jsonl") for r in map(json.loads, path.read_text().splitlines())]
    assert len(keys) == len(set(keys)) == 30
    assert Folder(Path(c.out)).grades().keys() == set(keys)


def test_s1_asks_again_with_what_is_left(tmp_path):
    asked = []

    def answer(request):
        asked.append(request)
        done = "</think>" not in request.sampling.stop
        return Response(text="so 12." if not done else " yes</think>\\boxed{10}", tokens=10)

    c = config(tmp_path, steer=["s1:ignore=2,word=Hold on"], samples=1, limit=1)
    assert run(c, FakeEngine(answer)).complete
    assert [r.sampling.max_tokens for r in asked] == [100, 89, 78]
    assert [r.continues for r in asked] == [False, True, True]
    assert [r.sampling.stop for r in asked] == [("</think>",), ("</think>",), ()]
    assert asked[1].messages[-1] == {"role": "assistant", "content": "<think>\nso 12.Hold on"}
    assert asked[2].messages[-1]["content"] == "<think>\nso 12.Hold onso 12.Hold on"
    assert len({r.sampling.seed for r in asked}) == 3
    (row,) = stored(c)
    assert row["text"] == "so 12.Hold onso 12.Hold on yes</think>\\boxed{10}"
    assert (row["tokens"], row["passes"]) == (32, 3)
    assert Folder(Path(c.out)).grades()[row["key"]]["correct"]


def test_s1_leaves_what_was_cut_off(tmp_path):
    c = config(tmp_path, steer=["s1"], samples=1, limit=1)
    run(c, FakeEngine(lambda r: Response(text="and so on", finish="length", tokens=100)))
    assert stored(c)[0]["passes"] == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none,s1,reflection_cycle", ["none", "s1", "reflection_cycle"]),
        ("none,reflection_cycle:amplitude=3,period=9,s1", ["none", "reflection_cycle:amplitude=3,period=9", "s1"]),
        ('reflection_cycle:{"words": ["Wait", "But"]}', ['reflection_cycle:{"words": ["Wait", "But"]}']),
        ("s1:ignore=1, none", ["s1:ignore=1", "none"]),
    ],
)
def test_methods_in_one_text(text, parts):
    assert split(text) == parts
    assert [m.label for m in parse_methods(parts)] == parts


@pytest.mark.parametrize(
    ("methods", "match"),
    [
        (["nonesuch"], "one of none, s1, .*reflection_cycle"),
        (["none", "none"], "given once"),
        (["reflection_cycle", "reflection_cycle:amplitude=5"], "another method"),
        (["reflection_cycle:height=5"], "height"),
        (["s1:ignore=-1"], "ignore"),
        (["s1:often=1"], "often"),
        ([{"label": "x"}], "label and steer"),
        ([], "at least one"),
    ],
)
def test_bad_methods(methods, match):
    with pytest.raises(SteerError, match=match):
        parse_methods(methods)


def test_defaults_count_as_parameters():
    """A default that changes in a later version makes other answers: it must change the key."""
    (method,) = parse_methods(["reflection_cycle"])
    assert method.identity()["plugins"][0]["params"]["amplitude"] == 5.0


def test_configuration_from_everywhere(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: m\ntasks: [math500]\nout: o\nsamples: 2\nsteer: [none, {label: x, steer: reflection_cycle}]\n")
    c = read(
        file, {"samples": 3, "seed": None}, ["seed=7", "template.enable_thinking=false", "tasks=aime24,aime25", "out=p"]
    )
    assert (c.samples, c.seed, c.out, c.tasks) == (3, 7, "p", ["aime24", "aime25"])
    assert c.template == {"enable_thinking": False}
    for sets, match in ((["sed=1"], "did you mean 'seed'"), (["seed"], "key=value"), (["samples=0"], "samples")):
        with pytest.raises(SteerError, match=match):
            read(file, {}, sets)
    file.write_text("- a list")
    with pytest.raises(SteerError, match="mapping"):
        read(file, {})


def test_thinking_tokens(tiny_tokenizer):
    end = tiny_tokenizer.convert_tokens_to_ids("</think>")
    counted = Response(text="a </think> b", tokens=5, token_ids=[9, 9, end, 9, 9])
    assert think_tokens(counted, tiny_tokenizer) == (3, True)
    assert think_tokens(Response(text="a b", tokens=2, token_ids=[9, 9]), tiny_tokenizer) == (2, True)
    assert think_tokens(Response(text="a" * 12 + "</think>" + "b" * 20, tokens=100), None) == (50, False)
    assert think_tokens(Response(text="no marker", tokens=3), None) == (0, False)


def test_a_folder_does_not_take_other_answers_to_its_problems(tmp_path):
    c = config(tmp_path)
    run(c, FakeEngine())
    rows = Path(c.data["sums"])
    rows.write_text(rows.read_text().replace('"sum": 13', '"sum": 99').replace('"sum": 14', '"sum": 99'))
    with pytest.raises(SteerError, match=r"problem [0-4] of sums was graded in the same way: gold was"):
        run(c, FakeEngine())
