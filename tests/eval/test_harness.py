"""lm-evaluation-harness on our engines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from llm_steer import SteerError, UnsupportedError
from llm_steer.cli import run as command
from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine

TASK = """
task: doubles
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["."], max_gen_toks: 9, do_sample: true, temperature: 0.5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def answer(request):
    return Response(text="4" if request.steer != "off" else "5", tokens=1)


@pytest.fixture
def tasks(tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-eval, which is not among the test dependencies")
    data = tmp_path / "rows.json"
    data.write_text(json.dumps({"q": "two and two", "a": "4"}) + "\n" + json.dumps({"q": "one", "a": "2"}) + "\n")
    (tmp_path / "doubles.yaml").write_text(TASK % data)
    (tmp_path / "scores.yaml").write_text(
        (TASK % data)
        .replace("doubles", "scores")
        .replace("generate_until", "loglikelihood")
        .replace("generation_kwargs", "metadata")
    )
    return str(tmp_path)


@pytest.mark.parametrize(("steer", "score"), [("off", 0.0), ({"name": "reflection_cycle"}, 0.5)])
def test_a_task(tasks, tiny_tokenizer, steer, score):
    from llm_steer.eval.harness import evaluate

    engine = FakeEngine(answer)
    found = evaluate(engine, tiny_tokenizer, steer, ["doubles"], include_path=tasks, seed=7)
    assert found["doubles"]["exact_match,none"] == score
    asked = sorted(engine.asked, key=lambda r: r.sampling.seed)
    assert [r.sampling.seed for r in asked] == [7, 8]
    assert {(r.sampling.max_tokens, r.sampling.temperature, r.sampling.stop) for r in asked} == {(9, 0.5, (".",))}
    assert all(isinstance(r.prompt, Sequence) and not isinstance(r.prompt, str) for r in asked)
    assert "<think>" in tiny_tokenizer.decode(asked[0].prompt)


def test_tasks_that_score_texts_are_refused(tasks, tiny_tokenizer):
    from llm_steer.eval.harness import evaluate

    with pytest.raises(UnsupportedError, match="nothing steered"):
        evaluate(FakeEngine(answer), tiny_tokenizer, "off", ["scores"], include_path=tasks)


def test_unknown_tasks(tasks, tiny_tokenizer):
    from llm_steer.eval.harness import evaluate

    with pytest.raises(SteerError, match="a task of"):
        evaluate(FakeEngine(answer), tiny_tokenizer, "off", ["nonesuch"], include_path=tasks)


def test_without_it(monkeypatch, capsys):
    from llm_steer.cli import lm_eval

    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    assert command(["lm-eval", "model", "--tasks", "x"]) == 2
    assert "pip install 'llm-steer-plugin[lm-eval]'" in capsys.readouterr().err
