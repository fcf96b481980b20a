"""A few steps of training: it resumes to the bit, loads in transformers, and samples."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from llm_steer.eval.testbed import MODELS, sampling
from llm_steer.eval.testbed.arithmetic import Arithmetic
from llm_steer.eval.testbed.card import loss_curve
from llm_steer.eval.testbed.data import example
from llm_steer.eval.testbed.muon import orthogonalise
from llm_steer.eval.testbed.problem import held_out
from llm_steer.eval.testbed.recipes import RECIPES, Part
from llm_steer.eval.testbed.tokenizer import build
from llm_steer.eval.testbed.traces import Mix
from llm_steer.eval.testbed.train import CARD, LOG, fingerprint, schedule, train
from llm_steer.eval.testbed.words import Words

SMOKE = dataclasses.replace(
    RECIPES["arithmetic"],
    parts=(Part(Arithmetic(), {2: 1.0}),),
    hidden_size=32,
    layers=2,
    intermediate_size=64,
    steps=12,
    warmup=3,
    batch=4,
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(SMOKE, tmp_path_factory.mktemp("smoke"), seed=3, save_every=5)


def test_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    train(SMOKE, tmp_path, seed=3, steps=7, save_every=5)
    train(SMOKE, tmp_path, seed=3)
    whole, parts = weights(folder), weights(tmp_path)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / LOG).read_text().count("\n") >= 2
    with pytest.raises(ValueError, match="a run with this recipe, seed and code"):
        train(SMOKE, tmp_path, seed=4)


def test_the_log_is_that_of_an_unbroken_run(tmp_path: Path) -> None:
    """Losses, whatever the steps at which the run was stopped or killed; times add up."""
    recipe = dataclasses.replace(SMOKE, steps=55)
    whole = train(recipe, tmp_path / "whole", save_every=100)
    for steps in (7, 26, 50):
        train(recipe, tmp_path / "parts", steps=steps, save_every=10)
    with (tmp_path / "parts" / LOG).open("a") as log:
        log.write("52,9.0,0.1,999,999\n")  # killed behind its last state
    parts = train(recipe, tmp_path / "parts")
    rows = [[row.split(",") for row in (folder / LOG).read_text().splitlines()] for folder in (whole, parts)]
    assert [row[:3] for row in rows[0]] == [row[:3] for row in rows[1]]
    assert [row[0] for row in rows[0]] == ["step", "25", "50", "55"]
    assert all(float(row[3]) < 900 for row in rows[1][1:])


def test_loads_and_samples(folder: Path) -> None:
    model, tokenizer = sampling.load(folder)
    problems = held_out(Arithmetic(), 2, 9) + held_out(Arithmetic(), 4, 4)
    own = sampling.sample_hf(model, tokenizer, problems, temperature=0, max_new_tokens=12, batch=5)
    theirs = sampling.sample_generate(model, tokenizer, problems, temperature=0, max_new_tokens=12, batch=5)
    assert [r.ids for r in own.responses] == [r.ids for r in theirs.responses]
    assert all(
        len(r.confidence) == len(r.ids) and 0 < min(r.confidence) <= max(r.confidence) <= 1 for r in own.responses if r.ids
    )
    drawn = [sampling.sample_hf(model, tokenizer, problems, seed=s, max_new_tokens=12) for s in (1, 1, 2)]
    assert [r.ids for r in drawn[0].responses] == [r.ids for r in drawn[1].responses] != [r.ids for r in drawn[2].responses]


def test_the_saved_tokenizer_is_ours(folder: Path) -> None:
    """Whatever class transformers picks for the folder."""
    _, tokenizer = sampling.load(folder)
    text = "b = a + 7; c = ?\n\nWait, b Wait</think>\n\n\\boxed{7}"
    assert tokenizer.encode(text) == build().encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bans_and_forces_reflection(folder: Path) -> None:
    model, tokenizer = sampling.load(folder)
    problems, words = held_out(Arithmetic(), 2, 8), set(sampling.reflection_ids(tokenizer))
    banned = sampling.sample_hf(model, tokenizer, problems, bias=sampling.BANNED, max_new_tokens=20)
    forced = sampling.sample_hf(model, tokenizer, problems, bias=50.0, max_new_tokens=20)
    assert not any(words & set(r.ids) for r in banned.responses)
    assert all(words >= set(r.ids) for r in forced.responses)


def test_log_and_card(folder: Path) -> None:
    log = (folder / LOG).read_text()
    assert log.startswith("step,loss,lr,seconds,cpu_seconds\n12,")
    assert "step 1 to 12" in loss_curve(log)
    card = (folder / CARD).read_text()
    assert log.splitlines()[-1] in card
    assert fingerprint(SMOKE, 3) in card
    assert "seed 3" in card


def test_each_part_has_its_own_flaws() -> None:
    """Only the part whose mix has slips slips, and a change of one mix is another recipe."""
    spotless = Mix(slip=(0, 0, 0), spoil=0)
    clumsy = Mix(slip=(1, 1, 1), fix=0, storm=0)
    recipe = dataclasses.replace(
        RECIPES["logic"], parts=(Part(Words(), {4: 1}, spotless), Part(Arithmetic(), {4: 1}, clumsy))
    )
    rng = random.Random(0)
    for _ in range(20):
        problem, trace = example(recipe, rng, recipe.steps)
        assert trace.counts["slips"] == (trace.counts["steps"] if problem.task == "arithmetic" else 0)
    other = dataclasses.replace(recipe, parts=(Part(Words(), {4: 1}, Mix()), recipe.parts[1]))
    assert fingerprint(other, 0) != fingerprint(recipe, 0)


def test_schedule() -> None:
    rates = [schedule(step, SMOKE) for step in range(SMOKE.steps)]
    assert all(0 < rate <= 1 for rate in rates)
    recipe = RECIPES["arithmetic"]
    assert schedule(recipe.warmup, recipe) == 1.0
    assert schedule(recipe.steps - 1, recipe) < 0.01


def test_orthogonalise() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_shipped_checkpoints_load(name: str) -> None:
    model, tokenizer = sampling.load(MODELS / name)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 6e6
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim in (32, 64)
    size = sum(path.stat().st_size for path in (MODELS / name).iterdir())
    assert size <= 12e6
    task = RECIPES[name].parts[0].task
    problems = held_out(task, task.levels[0], 16)
    answers = sampling.sample_hf(model, tokenizer, problems, temperature=0)
    assert all(r.finished and "</think>" in r.text for r in answers.responses)
