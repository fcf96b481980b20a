"""Statistics against values worked out otherwise, reading of responses, and every section on a handful of problems."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from llm_steer.eval.testbed import reading
from llm_steer.eval.testbed import statistics as stats
from llm_steer.eval.testbed.entailment import MODALITIES, Entailment
from llm_steer.eval.testbed.measure import Bench, _to_beat, _votes, measure
from llm_steer.eval.testbed.sampling import Answers, Response
from llm_steer.eval.testbed.tokenizer import build

TOKENIZER = build()


def respond(text: str, confidence: float = 0.5) -> Response:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return Response(ids, text, True, [confidence] * len(ids))


def test_auc_counts_pairs() -> None:
    rng = random.Random(0)
    high, low = ([rng.randint(0, 9) + shift for _ in range(50)] for shift in (2, 0))
    pairs = [(a > b) + (a == b) / 2 for a in high for b in low]
    assert stats.auc(high, low).value == pytest.approx(sum(pairs) / len(pairs))
    assert np.isnan(stats.auc([], low).value)


def test_mean_and_paired_difference() -> None:
    right, base = [True, True, False, True], [True, False, False, False]
    assert stats.mean(right).value == 0.75
    assert stats.mean(right).error == pytest.approx(0.25)
    assert stats.difference(right, base).value == 0.5
    assert stats.difference(right, right).z == 0.0
    assert str(stats.mean(right)) == "0.750 ± 0.250"


def test_matched_difference_compares_equal_lengths() -> None:
    """Values that depend on length alone differ by nothing once lengths match."""
    rng = random.Random(1)
    treated = [(length, length + rng.random()) for length in range(50, 100) for _ in range(20)]
    control = [(length, length + rng.random()) for length in range(100) for _ in range(20)]
    change, (low, high), matched = stats.matched_difference(treated, control, 1)
    assert matched == len(treated)
    assert low < 0.05
    assert high > -0.05
    assert abs(change.value) < 0.1


def test_reads_attempts() -> None:
    text = (
        "b: 15 + 7 = 12\n\nWait, b: 15 + 7 = 22 Hmm again, b: 15 + 7 = 22"
        "\n\nc: 22 - 1 = 21\n\nso what\n\n</think>\n\n\\boxed{21}"
    )
    found = reading.attempts(respond(text), TOKENIZER)
    assert [(a.label, a.reflected, a.first, a.right, a.difficulty) for a in found] == [
        ("b", False, True, False, 1),
        ("b", True, False, True, 1),
        ("b", True, False, True, 1),
        ("c", False, True, True, 0),
    ]
    assert all(a.confidence == pytest.approx(0.5) for a in found)
    assert not reading.overthinks(found)
    again = text.replace("\n\nc:", "\n\nBut finally, b: 15 + 7 = 22\n\nc:")
    assert reading.overthinks(reading.attempts(respond(again), TOKENIZER))


def test_votes() -> None:
    assert _votes([["a", "a", None, None], ["b", "b", "b", None], ["a", "c", None, None]]) == ["a", "a", "b", None]


@pytest.mark.e2e
def test_every_section_runs(tmp_path: Path) -> None:
    from llm_steer.eval.testbed import MODELS

    report = measure(MODELS, count=20, only=("accuracy", "reflection", "confidence", "modalities"), say=lambda line: None)
    assert report.count("### ") == 4
    assert "toy" in report


def test_modalities_are_asked_the_same_problems():
    """Votes and differences over modalities mean nothing otherwise."""
    bench = Bench(Path(), count=5)
    asked = [bench.problems(Entailment(modality), 4) for modality in MODALITIES]
    for words, code, table in zip(*asked, strict=True):
        assert words.prompt == code.prompt == table.prompt
        assert words.answer == code.answer == table.answer
        assert [p.system for p in (words, code, table)] == list(MODALITIES)


def test_the_modality_to_beat_is_chosen_on_other_problems(monkeypatch):
    chosen_on = set()

    def ask(bench, name, task, level):
        problems = bench.problems(task, level)
        chosen_on.update(p.canonical for p in problems)
        answers = [p.answer if task.modality == "table" else "" for p in problems]
        texts = [f"</think>\\boxed{{{answer}}}" for answer in answers]
        return problems, Answers([Response([], text, True) for text in texts], 1.0)

    monkeypatch.setattr(Bench, "ask", ask)
    bench = Bench(Path(), count=40)
    assert _to_beat(bench, 5) == "table"
    assert len(chosen_on) == 10
    assert not chosen_on & {p.canonical for p in bench.problems(Entailment("table"), 5)}
