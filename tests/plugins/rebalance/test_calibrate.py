"""Calibration against direct computation, and runs that are stopped on the way."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_steer.plugins.rebalance import Rebalance, calibrate, collect
from llm_steer.plugins.rebalance.control import PRESETS
from llm_steer.plugins.rebalance.picture import draw, surface
from llm_steer.plugins.rebalance.published import read
from llm_steer.plugins.rebalance.steps import Thresholds

from llm_steer import SteerError, UnsupportedError, steer
from llm_steer.artifact import Artifact, ModelIdentity, load
from support.vocabulary import BLANK, THINK

SETTINGS = calibrate.Settings("data", "model", max_tokens=60, temperature=1.0, top_p=1.0, seed=3, batch_size=4)
PROMPTS = [[1, 30 + i, THINK] + [40 + i] * (i % 3) for i in range(20)]


@pytest.fixture
def model(tiny_model):
    model = tiny_model()
    with torch.no_grad():  # likes blank lines
        head = model.lm_head.weight
        head[BLANK] *= 10 * head.norm(dim=1).mean() / head[BLANK].norm()
    return model


def test_confidences_and_hidden_states_are_those_of_the_model(model, tiny_tokenizer) -> None:
    told = collect.generate(model, tiny_tokenizer, PROMPTS[:3], max_tokens=20, temperature=1.0, top_p=0.9, seed=0)
    sequences = [prompt + one["ids"] for prompt, one in zip(PROMPTS, told, strict=False)]
    positions = [[3, 7], [], [5, len(sequences[2]) - 1]]
    states = list(collect.hidden_states(model, sequences, positions, 2))
    for prompt, one, ids, at, found in zip(PROMPTS, told, sequences, positions, states, strict=False):
        with torch.no_grad():
            output = model.model(torch.tensor([ids]), output_hidden_states=True)
            logits = model.lm_head(output.last_hidden_state)[0]
        expected = logits.softmax(1).amax(1)[len(prompt) - 1 : -1]
        assert torch.allclose(torch.tensor(one["confidences"]), expected, atol=1e-4)
        assert one["boundary"] == [token == BLANK for token in one["ids"]]
        assert torch.allclose(found[:, 0], output.hidden_states[1][0, at], atol=1e-4)
        assert found.shape == (len(at), 2, 32)
    assert not hasattr(model, "steering")


def test_a_model_that_is_steered_stays_so(model, tiny_tokenizer) -> None:
    before = steer(model, "off", tokenizer=tiny_tokenizer).steering
    collect.generate(model, tiny_tokenizer, PROMPTS[:1], max_tokens=3, temperature=0.0, top_p=1.0, seed=0)
    assert model.steering is before


class Stopped(Exception):
    pass


@pytest.fixture
def whole(model, tiny_tokenizer, tmp_path) -> list[calibrate.Output]:
    generate = collect.source(model, tiny_tokenizer)
    return calibrate.collect_outputs(generate, PROMPTS, tmp_path / "whole", SETTINGS, lambda done: None)


@pytest.mark.parametrize("cut", [0, 1, 40], ids=["between batches", "last line damaged", "in a batch"])
def test_a_run_that_was_stopped_goes_on(cut, whole, model, tiny_tokenizer, tmp_path) -> None:
    folder, seen, generate = tmp_path / "stopped", [], collect.source(model, tiny_tokenizer)

    def stop(done: int) -> None:
        seen.append(done)
        if sum(seen) >= 8:
            raise Stopped

    with pytest.raises(Stopped):
        calibrate.collect_outputs(generate, PROMPTS, folder, SETTINGS, stop)
    path = folder / calibrate.OUTPUTS
    path.write_text(path.read_text()[: -cut or None])
    told: list[int] = []
    again = calibrate.collect_outputs(generate, PROMPTS, folder, SETTINGS, told.append)
    assert again == whole
    assert told[0] == (4 if cut else 8)
    assert path.read_text() == (tmp_path / "whole" / calibrate.OUTPUTS).read_text()
    told.clear()
    assert calibrate.collect_outputs(generate, PROMPTS, folder, SETTINGS, told.append) == whole
    assert told == [20]


def test_a_run_with_other_settings_is_refused(whole, model, tiny_tokenizer, tmp_path) -> None:
    with pytest.raises(SteerError, match="same model, data and settings"):
        calibrate.collect_outputs(
            collect.source(model, tiny_tokenizer),
            PROMPTS,
            tmp_path / "whole",
            replace(SETTINGS, temperature=0.5),
            lambda done: None,
        )


@pytest.mark.parametrize("states", ["first", "delimiter"])
def test_the_vector_is_the_difference_of_class_means(states, whole, model, tiny_tokenizer, tmp_path) -> None:
    """Against all hidden states at once, from transformers itself."""
    options = {"states": states, "layer": 0}
    report = calibrate.run(model, tiny_tokenizer, PROMPTS, tmp_path / "whole", SETTINGS, "reference", **options)
    artifact = load(tmp_path / "whole", "rebalance")
    outputs = whole
    thresholds, labelled = calibrate.label(outputs, tiny_tokenizer, "reference", False)
    rows: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    norms = []
    for step in labelled:
        ids = outputs[step.problem].prompt + outputs[step.problem].ids
        assert ids[step.start - 1] == BLANK
        with torch.no_grad():
            stream = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
        norms.append(stream[step.start - 1].norm())
        if step.over is not None and step.problem % calibrate.HELD_OUT:
            rows[step.over].append(stream[step.start - (states == "delimiter")])
    expected = torch.stack(rows[True]).mean(0) - torch.stack(rows[False]).mean(0)
    assert torch.allclose(artifact.tensors["vector"], expected, atol=1e-4)
    assert artifact.description.relative_dose == pytest.approx(float(expected.norm() / torch.stack(norms).mean()), rel=1e-4)
    assert (artifact.description.layer, artifact.description.site) == (0, "after")
    assert report["constants"]["q25c"] == thresholds.q25c
    assert (report["over"], report["under"]) == (len(rows[True]), len(rows[False]))
    assert report["constants"]["floor"] <= report["constants"]["low"] < 0
    assert json.loads((tmp_path / "whole" / calibrate.REPORT).read_text()) == report
    assert report["floor_dose"] == pytest.approx(-report["constants"]["floor"] * report["relative_dose"])
    assert report["floor_dose"] <= calibrate.MOST + 1e-9
    assert any("amplitudes are" in note for note in report["notes"]) == (report["constants"]["low"] > -1)
    moved = {"mean": torch.stack(rows[True]).mean(0) - expected, "others": torch.stack(rows[False]).mean(0)}
    assert torch.allclose(moved["mean"] @ expected, moved["others"] @ expected, rtol=1e-3)


@pytest.mark.parametrize("mode", ["reference", "paper"])
def test_what_was_calibrated_steers(mode, model, tiny_tokenizer, tmp_path, register) -> None:
    register(Rebalance)
    report = calibrate.run(model, tiny_tokenizer, PROMPTS, tmp_path, SETTINGS, mode, layer=0)
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=str(tmp_path))
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    trace = model.steering.traces[0]["plugins"][0]
    assert trace["steered_steps"] > 0
    assert trace["params"]["artifact"] == f"sha256:{report['artifact']}"
    assert (trace["params"]["mode"], trace["params"]["warnings"]) == (mode, [])
    other = "paper" if mode == "reference" else "reference"
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, do_sample=False, steer={"mode": other})
    warning = f"calibrated with mode {mode!r}, used with {other!r}"
    assert model.steering.traces[0]["plugins"][0]["params"]["warnings"] == [warning]
    if mode == "reference":
        with pytest.raises(SteerError, match="window: got 4; must be left out"):
            steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=str(tmp_path), window=4)
    draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_model_teaches_nothing(whole, model, tiny_tokenizer, tmp_path) -> None:
    """No layer is chosen, and none is taken in its place; the report says why."""
    folder = tmp_path / "whole"
    with pytest.raises(SteerError, match="no layer is better than chance") as error:
        calibrate.run(model, tiny_tokenizer, PROMPTS, folder, SETTINGS, "reference")
    assert "layer" in str(error.value)
    report = json.loads((folder / calibrate.REPORT).read_text())
    assert (report["layer"], report["artifact"], len(report["r2"]), len(report["auc"])) == (None, None, 1, 1)
    assert not (folder / "steer.json").exists()
    assert calibrate.run(model, tiny_tokenizer, PROMPTS, folder, SETTINGS, "reference", layer=0)["layer"] == 0


def identity(layers: int) -> ModelIdentity:
    return ModelIdentity(id="m", architecture="LlamaForCausalLM", hidden_size=8, num_layers=layers, dtype="float32")


def moments(signal: list[float], spread: float = 1.0, size: float = 3.0) -> calibrate.Moments:
    """Of 60 problems with 10 steps: by layer, how strongly the states tell confidence and class.

    Args:
        spread: of what tells nothing.
        size: norm of the stream.
    """
    rng = np.random.default_rng(0)
    found = calibrate.Moments()
    for problem in range(60):
        confidence = rng.uniform(size=10)
        steps = [calibrate.Labelled(problem, 5, c, bool(c < 0.3) if abs(c - 0.5) > 0.2 else None) for c in confidence]
        states = rng.normal(size=(10, len(signal), 8)) * spread
        states[:, :, 0] -= np.outer(confidence, signal)
        delimiters = np.full((10, len(signal), 8), size / np.sqrt(8))
        found.add(torch.tensor(states).float(), torch.tensor(delimiters).float(), steps)
    return found


THRESHOLDS = Thresholds(0.3, 0.7, 0.001, 0.01)


def built(signal: list[float], layer: int | None = None, **options: float) -> tuple[Artifact | None, dict[str, Any]]:
    return calibrate.build(identity(len(signal)), THRESHOLDS, moments(signal, **options), "reference", {}, layer)


def test_the_layer_that_tells_most_is_chosen() -> None:
    artifact, report = built([0.0, 1.0, 4.0, 0.0, 9.0], size=1000.0)  # the last one is left out
    assert artifact is not None
    assert artifact.description.layer == report["layer"] == 2
    assert report["r2"][2] > report["r2"][1] > max(report["r2"][0], report["r2"][3])
    assert report["auc"][2] == report["held_out"]["auc"] > 0.95
    assert abs(report["auc"][0] - 0.5) < 3 * report["auc_error"][0]
    assert report["notes"] == []


def test_a_layer_at_chance_is_never_chosen() -> None:
    artifact, report = built([0.0, 0.0, 0.0, 9.0])
    assert artifact is None
    assert report["layer"] is None
    assert report["notes"] == [calibrate.NO_LAYER]
    artifact, report = built([0.0, 0.0, 0.0, 9.0], layer=1)
    assert artifact is not None
    assert any("not shown to be better than chance" in note for note in report["notes"])


def test_a_layer_must_tell_the_kinds_apart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "auc", lambda high, low: (0.55, 0.03))
    assert built([4.0, 4.0])[0] is None
    monkeypatch.setattr(calibrate, "auc", lambda high, low: (0.57, 0.03))
    assert built([4.0, 4.0])[0] is not None


def test_the_dose_is_bounded() -> None:
    """The floor adds half the norm of the stream at most; amplitudes keep their proportions."""
    gentle, small = built([4.0, 4.0], size=1000.0)
    strong, large = built([4.0, 4.0], size=3.0)
    assert gentle is not None
    assert strong is not None
    assert small["constants"]["low"] == -1.0
    assert small["floor_dose"] < large["floor_dose"] == pytest.approx(calibrate.MOST)
    for name in ("floor", "ceiling"):
        ratio = [report["constants"][name] / report["constants"]["low"] for report in (small, large)]
        assert ratio[0] == pytest.approx(ratio[1])
    assert any("the floor may add 0.5" in note for note in large["notes"])
    assert large["constants"]["low"] == strong.description.constants["initial"]


def test_too_little_data(model, tiny_tokenizer, tmp_path) -> None:
    with pytest.raises(SteerError, match="at least 100 reasoning steps"):
        calibrate.run(model, tiny_tokenizer, PROMPTS[:2], tmp_path, SETTINGS, "reference")


def test_layers_that_cannot_be_read(model) -> None:
    layer = model.model.layers[1]
    model.model.layers[1] = torch.nn.Identity()
    model.model.layers[1].forward = layer.forward  # type: ignore[method-assign]
    assert len(list(collect.hidden_states(model, [[1, 2]], [[0]], 1))) == 1
    model.model.layers[1] = Bypassed(layer)
    with pytest.raises(UnsupportedError, match="only 1 of 2 layers"):
        list(collect.hidden_states(model, [[1, 2]], [[0]], 1))


class Bypassed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner.forward(*args, **kwargs)


# -- statistics ----------------------------------------------------------------------------------------------------------


def test_ridge_splits_by_problem() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(400, 20)).astype(np.float32)
    groups = list(np.repeat(np.arange(40), 10))
    line = states @ rng.normal(size=20)
    r2, error = calibrate.ridge_r2(states, line, groups)
    assert r2 > 0.98
    assert error < 0.01
    r2, error = calibrate.ridge_r2(states, rng.normal(size=400), groups)
    assert r2 < 2 * error
    # States that only tell the problem, targets that only depend on it: nothing that another problem could use.
    marks = np.eye(40, dtype=np.float32)[groups]
    r2, error = calibrate.ridge_r2(marks, rng.normal(size=40)[groups], groups)
    assert r2 < 2 * error


def test_one_column_does_not_drown_the_others() -> None:
    """A massive activation that tells nothing, beside columns that tell all."""
    rng = np.random.default_rng(2)
    states = rng.normal(size=(300, 6)).astype(np.float32)
    line = states @ rng.normal(size=6)
    states = np.concatenate([states * 1e-3, rng.normal(size=(300, 1)).astype(np.float32) * 1e4], axis=1)
    assert calibrate.ridge_r2(states, line, list(range(300)))[0] > 0.99


def test_the_error_of_r2_is_its_spread_over_samples() -> None:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(60):
        x = rng.normal(size=(200, 3)).astype(np.float32)
        noise = np.repeat(rng.normal(size=40), 5) + rng.normal(size=200)  # common to a problem's steps
        found.append(calibrate.ridge_r2(x, x[:, 0] + noise, list(np.repeat(np.arange(40), 5))))
    values, errors = np.array(found).T
    assert 0.6 < errors.mean() / values.std() < 1.6


@pytest.mark.parametrize("size", [5, 90], ids=["tall", "wide"])
def test_ridge_solves_the_normal_equations(size: int) -> None:
    rng = np.random.default_rng(1)
    x, y, groups = rng.normal(size=(60, size)).astype(np.float32) * 3 + 1, rng.normal(size=60), list(range(60))
    y = y + x[:, 0]
    best = []
    for penalty in calibrate.PENALTIES:
        fold = np.asarray([int(calibrate.hashlib.sha256(str(g).encode()).hexdigest(), 16) % 5 for g in groups])
        error = total = 0.0
        for held in range(5):
            center, scale, mean = x[fold != held].mean(0), x[fold != held].std(0), y[fold != held].mean()
            a, b = (x[fold != held] - center) / scale, (x[fold == held] - center) / scale
            unit = penalty * (a**2).sum() / min(a.shape)
            weights = np.linalg.solve(a.T @ a + unit * np.eye(size), a.T @ (y[fold != held] - mean))
            error += ((y[fold == held] - mean - b @ weights) ** 2).sum()
            total += ((y[fold == held] - mean) ** 2).sum()
        best.append(1 - error / total)
    assert calibrate.ridge_r2(x, y, groups)[0] == pytest.approx(max(best), abs=1e-4)


def test_auc() -> None:
    assert calibrate.auc(np.array([2.0, 3.0, 4.0]), np.array([1.0, 2.0]))[0] == pytest.approx(5.5 / 6)
    assert np.isnan(calibrate.auc(np.array([]), np.array([1.0]))[0])
    rng = np.random.default_rng(0)
    area, error = calibrate.auc(rng.normal(size=2000), rng.normal(size=2000))
    assert abs(area - 0.5) < 4 * error < 0.1


def test_surface() -> None:
    constants = PRESETS["r1-distill-qwen-7b"].constants
    for mode in ("reference", "paper"):
        confidence, variance, values = surface(constants, mode, 11)
        assert values.shape == (11, 11)
        assert values[10, 0] == pytest.approx(constants.floor)  # no confidence, most variance
        assert values[0, 10] == pytest.approx(constants.ceiling, abs=1e-6)
        assert (confidence[10], variance[0]) == (1.0, 0.0)


# -- published vectors ---------------------------------------------------------------------------------------------------


def test_a_published_vector_becomes_an_artifact(tmp_path: Path) -> None:
    vector = torch.randn(1536)
    torch.save(vector, tmp_path / "steer_vector_layer19_conf_mixed.pt")
    artifact = read(tmp_path / "steer_vector_layer19_conf_mixed.pt", "r1-distill-qwen-1.5b")
    loaded = load(artifact.save(tmp_path / "a"), "rebalance")
    assert torch.equal(loaded.vector(), vector)
    assert loaded.behind == 18
    assert loaded.description.constants == {
        "q25c": 0.662293,
        "q75c": 0.94805,
        "q25v": 0.000560,
        "q75v": 0.011597,
        "low": -1.02,
        "floor": -1.91,
        "ceiling": 0.1,
        "initial": -1.0,
    }
    assert loaded.description.model.id == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"


class Evil:
    def __reduce__(self):
        return Path.write_text, (Path("pwned"), "x")


def test_what_is_no_published_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, size = tmp_path / "v.pt", 1536
    bad = [
        (torch.ones(1537), "a tensor of 1536 numbers"),
        (torch.ones(1, size), "a tensor of 1536 numbers"),
        (torch.ones(size, dtype=torch.int64), "a tensor of 1536 numbers"),
        ({"vector": torch.ones(size)}, "a tensor of 1536 numbers"),
        (torch.full((size,), float("nan")), "finite"),
        (torch.zeros(size), "not all 0"),
        (Evil(), "of plain tensors"),
    ]
    for content, message in bad:
        torch.save(content, path)
        with pytest.raises(SteerError, match=message):
            read(path, "r1-distill-qwen-1.5b")
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(SteerError, match="a readable"):
        read(path, "r1-distill-qwen-1.5b")
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(SteerError, match="did you mean 'qwq-32b'"):
        read(path, "qwq32b")
    with pytest.raises(SteerError, match="a readable"):
        read(tmp_path / "nothing.pt", "qwq-32b")
