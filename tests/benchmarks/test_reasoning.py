"""benchmarks/concepts.py and benchmarks/ontology.py: what they compute from answers, against plain oracles."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_steer.plugins.activation_reasoning.concepts import direction_concept
from llm_steer.plugins.activation_reasoning.find import Encoded
from llm_steer.plugins.activation_reasoning.logic import RuleSet
from llm_steer.plugins.activation_reasoning.logic.formula import Literal


@pytest.fixture
def concepts(script: Callable[[str], Any]) -> Any:
    return script("concepts")


@pytest.fixture
def ontology(script: Callable[[str], Any]) -> Any:
    return script("ontology")


def test_steering_is_compared_at_equal_norm_and_at_equal_perplexity(concepts: Any) -> None:
    """Of written scores: the concept's is 3 above none, random features' falls by 2 a nat, whatever the strength."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=40) * 0.01
    own = np.stack([np.stack([noise + gain, np.full(40, nll)], 1) for gain, nll in ((0, 2.0), (3, 2.5), (4, 9.0))])
    curve = ((0, 2.0), (-0.4, 2.2), (-2.0, 3.0))
    drawn = np.stack([np.stack([np.stack([noise + s, np.full(40, n)], 1) for s, n in curve]) for _ in range(4)])
    found = concepts.compared(own, drawn, 1, rounds=200)
    for name, expected in (("gain", 3.0), ("equal_norm", 3.4), ("matched", 4.0)):
        value, low, high = found[name]
        assert value == pytest.approx(expected, abs=0.02), name
        assert low <= value <= high
        assert high - low < 0.02
    assert "matched" not in concepts.compared(own, drawn, 2, rounds=200), "no random feature comes to that perplexity"


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_of_the_best_f1(ontology: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (60, 1), generator=generator).float()
    label = (x[:, 0] + 4 * torch.randn(60, generator=generator)) > 3
    concept = direction_concept("c", torch.ones(1), 0.0, {})

    def f1(cut: float) -> float:
        told = x[:, 0] > cut
        return float(2 * (told & label).sum() / max(int(told.sum() + label.sum()), 1))

    cut = ontology.best_f1(concept, [Encoded(x[:30], {"c": label[:30]}, True), Encoded(x[30:], {"c": label[30:]}, True)])
    assert f1(cut) == pytest.approx(max(f1(at + 0.5) for at in range(-8, 8)))


@pytest.mark.parametrize("hops", [1, 3, 5])
def test_rules_of_a_question_say_its_answer(ontology: Any, hops: int) -> None:
    problems = ontology.fresh(hops, 20, 3)
    assert not {p.canonical for p in problems} & {p.canonical for p in ontology.held_out(ontology.TASK, hops, 2000)}
    for problem in problems:
        rules = RuleSet.read(ontology.rules_of(problem), subjects=[])
        known = rules.conclusions([Literal(f"is_{ontology.TASK.walk(problem).kind}")])
        verdict = {literal.atom for literal in known} & {"yes", "no"}
        assert verdict == {"yes" if problem.answer == "True" else "no"}
        assert ontology.solver(problem)


def test_f1_of_propositions(ontology: Any) -> None:
    rng = random.Random(0)
    problems = [ontology.draw(ontology.TASK, rng, 3, "train") for _ in range(3)]
    own = [f"is_{ontology.TASK.walk(problem).kind}" for problem in problems]
    asked = [
        ontology.Asked(problems[0], [], [1]),
        ontology.Asked(problems[1], [], [1]),
        ontology.Asked(problems[2], [], None),
    ]
    found = [(None, None, None, [own[0], "is_x"]), (None, None, None, []), (None, None, None, [])]
    assert ontology.f1_of(found, asked) == pytest.approx(2 * 1 / (2 + 2))


def test_what_was_computed_is_not_computed_again(ontology: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    kept = ontology.Journal(tmp_path / "runs", tmp_path)
    assert kept.keep("a", lambda: [1, None]) == [1, None]
    assert ontology.Journal(tmp_path / "runs", tmp_path).keep("a", lambda: 1 / 0) == [1, None]
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert ontology.Journal(tmp_path / "runs", tmp_path).keep("a", lambda: 2) == 2
