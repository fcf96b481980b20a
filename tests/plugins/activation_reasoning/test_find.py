"""SAEs from disk, finding concepts, thresholds, and dictionaries that come back as they were saved."""

from __future__ import annotations

import json
import math
import os

import huggingface_hub
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.plugins.activation_reasoning import hub
from llm_steer.plugins.activation_reasoning.concepts import METHOD, Dictionary, Tversky
from llm_steer.plugins.activation_reasoning.find import (
    Encoded,
    Example,
    auc,
    find,
    grow,
    labels_of_tokens,
    log_decay,
    read_examples,
    threshold,
    width,
)
from llm_steer.plugins.activation_reasoning.sae import load_sae
from llm_steer.plugins.activation_reasoning.train_sae import encode, save, train
from safetensors.torch import save_file

from llm_steer import SteerError, UnsupportedError
from llm_steer.artifact import ModelIdentity, load

SIZE, WIDTH = 8, 40
MODEL = ModelIdentity(architecture="LlamaForCausalLM", hidden_size=SIZE, num_layers=4)


def weights(seed=0, **more):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "W_enc": torch.randn(SIZE, WIDTH, generator=g),
        "b_enc": torch.randn(WIDTH, generator=g) * 0.1,
        "W_dec": torch.randn(WIDTH, SIZE, generator=g),
        "b_dec": torch.randn(SIZE, generator=g) * 0.1,
    }
    return {**tensors, **more}


def write(folder, tensors, config=None, name="sae_weights.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    if config is not None:
        (folder / "cfg.json").write_text(json.dumps(config))
    return folder


X = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(9))


def saelens_encode(kind, t, x, config):
    """The formulas of SAELens, as its documentation states them."""
    x = x - t["b_dec"] if config.get("apply_b_dec_to_input", True) else x
    if kind == "gated":
        pre = x @ t["W_enc"]
        return ((pre + t["b_gate"]) > 0) * torch.relu(pre * t["r_mag"].exp() + t["b_mag"])
    pre = x @ t["W_enc"] + t["b_enc"]
    if kind == "jumprelu":
        return torch.relu(pre) * (pre > t["threshold"])
    if kind == "topk":
        top = pre.topk(config["k"])
        return torch.zeros_like(pre).scatter(1, top.indices, torch.relu(top.values))
    return torch.relu(pre)


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("kind", ["standard", "topk", "jumprelu", "gated"])
def test_saelens_folders(kind, subtract, tmp_path):
    tensors = weights()
    if kind == "jumprelu":
        tensors["threshold"] = torch.rand(WIDTH)
    if kind == "gated":
        del tensors["b_enc"]
        tensors |= {name: torch.randn(WIDTH) * 0.3 for name in ("b_gate", "r_mag", "b_mag")}
    config = {"architecture": kind, "d_in": SIZE, "d_sae": WIDTH, "apply_b_dec_to_input": subtract}
    config |= {"k": 5} if kind == "topk" else {}
    sae = load_sae(write(tmp_path / "sae", tensors, config), SIZE)
    assert (sae.architecture, sae.width) == (kind, WIDTH)
    assert torch.allclose(sae.encode(X), saelens_encode(kind, tensors, X, config), atol=1e-4)
    assert torch.allclose(sae.decode(sae.encode(X)), sae.encode(X) @ tensors["W_dec"] + tensors["b_dec"], atol=1e-4)
    if kind != "topk":  # a few rows by themselves are what they are in the whole
        some = torch.tensor([3, 17, 20])
        assert torch.allclose(sae.features(some)(sae.prepare(X)), sae.encode(X)[:, some], atol=1e-4)


def test_sparsify_and_plain_folders(tmp_path):
    tensors = weights()
    other = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"], "W_dec": tensors["W_dec"],
             "b_dec": tensors["b_dec"]}  # fmt: skip
    sae = load_sae(write(tmp_path / "a", other, {"k": 6, "activation": "topk", "d_in": SIZE}, "sae.safetensors"))
    assert torch.allclose(sae.encode(X), saelens_encode("topk", tensors, X, {"k": 6}), atol=1e-4)
    plain = load_sae(write(tmp_path / "b", {**tensors, "threshold": torch.ones(WIDTH)}, None, "x.safetensors"))
    assert plain.architecture == "jumprelu"


def test_inputs_that_are_normalised_first(tmp_path):
    config = {"architecture": "standard", "normalize_activations": "constant_norm_rescale"}
    sae = load_sae(write(tmp_path / "a", weights(), config))
    scaled = X * math.sqrt(SIZE) / X.norm(dim=1, keepdim=True)
    assert torch.allclose(sae.encode(X), saelens_encode("standard", weights(), scaled, {}), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "config", "error", "what"),
    [
        (
            {"W_dec": torch.zeros(3, SIZE)},
            {},
            SteerError,
            r"tensor W_dec: got '\[3, 8\] of torch.float32'; must be of shape \[40, 8\]",
        ),
        ({"W_enc": torch.ones(SIZE, WIDTH, dtype=torch.int32)}, {}, SteerError, "tensor W_enc.*floating-point"),
        ({"b_enc": torch.ones(WIDTH, dtype=torch.int64)}, {}, SteerError, "tensor b_enc.*floating-point"),
        ({"W_enc": torch.zeros(SIZE, 0)}, {}, SteerError, "tensor W_enc.*at least one feature"),
        ({"W_enc": torch.zeros(SIZE)}, {}, SteerError, "tensor W_enc: got .* must be a matrix"),
        ({}, [1], SteerError, r"cfg.json: got \[1\]; must be a JSON object"),
        ({}, {"architecture": "topk", "k": "many"}, SteerError, "k: got 'many'"),
        ({"b_dec": torch.full((SIZE,), float("nan"))}, {}, SteerError, "tensor b_dec: got 'NaN or infinity'"),
        ({}, {"architecture": "temporal"}, UnsupportedError, "temporal"),
        ({}, {"architecture": "topk"}, SteerError, "k: got 0"),
        ({}, {"normalize_activations": "covariance_whitening"}, UnsupportedError, "covariance_whitening"),
    ],
)
def test_saes_that_cannot_be_read(change, config, error, what, tmp_path):
    with pytest.raises(error, match=what):
        load_sae(write(tmp_path / "a", weights(**change), config))


def test_an_sae_of_another_width_or_nothing(tmp_path):
    with pytest.raises(SteerError, match="hidden states of 8'; must be made for 9"):
        load_sae(write(tmp_path / "a", weights()), 9)
    with pytest.raises(SteerError, match="no such folder"):
        load_sae(tmp_path / "nothing")
    (tmp_path / "a" / "sae_weights.safetensors").write_bytes(b"pickle")
    with pytest.raises(SteerError, match="valid files"):
        load_sae(tmp_path / "a")
    (tmp_path / "a" / "sae_weights.safetensors").unlink()
    os.mkfifo(tmp_path / "a" / "sae_weights.safetensors")
    with pytest.raises(SteerError, match="is no file"):
        load_sae(tmp_path / "a")
    write(tmp_path / "b", weights())
    (tmp_path / "b" / "cfg.json").write_text("[" * 100_000)
    with pytest.raises(SteerError, match="valid files"):
        load_sae(tmp_path / "b")


def test_gemma_scopes_own_files(tmp_path):
    tensors = {**weights(), "threshold": torch.rand(WIDTH)}
    np.savez(tmp_path / "params.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    sae = load_sae(tmp_path, SIZE)
    assert sae.architecture == "jumprelu"
    assert torch.allclose(sae.encode(X), saelens_encode("jumprelu", tensors, X, {"apply_b_dec_to_input": False}), atol=1e-4)
    np.savez_compressed(tmp_path / "params.npz", W_enc=np.zeros((4096, 4096), np.float32))
    with pytest.raises(SteerError, match=r"params\.npz.*far more room"):
        load_sae(tmp_path)
    np.savez(tmp_path / "params.npz", W_enc=np.array([object()]))
    with pytest.raises(SteerError, match=r"params\.npz"):
        load_sae(tmp_path)


@pytest.mark.parametrize("config", [{"activation": "groupmax"}, {"transcode": True}, {"signed": True}])
def test_sparsify_saes_of_other_kinds_are_refused(config, tmp_path):
    tensors = weights()
    other = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"], "W_dec": tensors["W_dec"],
             "b_dec": tensors["b_dec"]}  # fmt: skip
    with pytest.raises(UnsupportedError, match="sparsify"):
        load_sae(write(tmp_path / "a", other, {"k": 6, **config}, "sae.safetensors"))


# -- the hub -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("someone/sae-llama-64x/layers.23", ("someone/sae-llama-64x", None, "layers.23")),
        ("someone/saes/layer_20/width_131k/average_l0_114", ("someone/saes", None, "layer_20/width_131k/average_l0_114")),
        ("some-one/one.sae@v1.0", ("some-one/one.sae", "v1.0", "")),
        ("someone/saes/blocks.15.hook_resid_post@0123abc", ("someone/saes", "0123abc", "blocks.15.hook_resid_post")),
    ],
)
@pytest.mark.parametrize("file", ["sae_weights.safetensors", "sae.safetensors", "params.npz"])
def test_an_sae_of_the_hub_is_asked_for_by_its_folder(name, asked, file, tmp_path, monkeypatch):
    """Only the files of one SAE, in the layouts of SAELens, sparsify and Gemma Scope."""
    repo, revision, folder = asked
    tensors = {**weights(), "threshold": torch.rand(WIDTH)}
    calls = []

    def fake(repo_id, *, revision, allow_patterns):
        calls.append((repo_id, revision, sorted(allow_patterns)))
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        if file == "params.npz":
            np.savez(place / file, **{key: tensor.numpy() for key, tensor in tensors.items()})
        elif file == "sae.safetensors":
            sparse = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"]}
            sparse |= {key: tensors[key] for key in ("W_dec", "b_dec")}
            write(place, sparse, {"k": 4}, file)
        else:
            write(place, tensors, {"architecture": "jumprelu"}, file)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    sae = load_sae(name, SIZE)
    assert sae.width == WIDTH
    start = f"{folder}/" if folder else ""
    files = ("cfg.json", "params.npz", "sae.safetensors", "sae_weights.safetensors")
    assert calls == [(repo, revision, [start + one for one in files])]
    assert sae.architecture == ("topk" if file == "sae.safetensors" else "jumprelu")


def test_an_sae_in_the_hubs_cache_needs_no_connection(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "models--someone--saes"
    commit = "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit).mkdir(parents=True)
    write(cache / "snapshots" / commit / "layers.3", weights(), {"architecture": "standard"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert load_sae("someone/saes/layers.3", SIZE).width == WIDTH
    with pytest.raises(SteerError, match=r"got 'someone/saes/layers.9'; must be the name of a folder of someone/saes with"):
        load_sae("someone/saes/layers.9", SIZE)
    with pytest.raises(SteerError, match=r"someone/other/layers.3.*an SAE of the Hugging Face hub that can be reached"):
        load_sae("someone/other/layers.3", SIZE)


def test_names_that_are_not_the_hubs():
    for name in ("/a/b", "./a/b", "../a/b", "a", "a/b/../c", "a/b@", "a b/c", "https://a/b", ""):
        assert not hub.is_hub_name(name), name
    with pytest.raises(SteerError, match="no such folder"):
        load_sae("nothing")


# -- thresholds ----------------------------------------------------------------------------------------------------------


def test_the_threshold_lies_between_the_classes():
    """Spec E: where the released code returns 1.0 and never fires."""
    tau, balanced = threshold(torch.tensor([0.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]).bool())
    assert 0 < tau < 1
    assert balanced == 1.0


@given(data=st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=30))
def test_no_other_threshold_is_better(data):
    scores, labels = torch.tensor([float(s) for s, _ in data]), torch.tensor([b for _, b in data])
    if labels.all() or not labels.any():
        with pytest.raises(SteerError, match="both classes"):
            threshold(scores, labels)
        return

    def balanced(tau):
        return float(((scores > tau)[labels].float().mean() + (scores <= tau)[~labels].float().mean()) / 2)

    tau, claimed = threshold(scores, labels)
    assert claimed == pytest.approx(balanced(tau))
    inner = [x + 0.5 for x in range(int(scores.min()), int(scores.max()))]
    assert claimed == pytest.approx(max(map(balanced, inner), default=0.5), abs=1e-6)
    pairs = [(a, b) for a, la in data for b, lb in data if la and not lb]
    assert auc(scores, labels) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs))


def test_weights_of_the_paper():
    """Spec E."""
    assert log_decay(1) == [1.0]
    assert log_decay(3) == pytest.approx([1.7569, 0.8785, 0.3646], abs=1e-4)
    assert log_decay(5) == pytest.approx([2.1477, 1.3169, 0.8309, 0.4860, 0.2185], abs=1e-4)


# -- finding -------------------------------------------------------------------------------------------------------------


def examples(count=60, seed=0):
    """Texts of which half hold tokens that lie 3 further along the first axis; the label is on the tokens."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        hidden = torch.randn(12, SIZE, generator=g)
        labels = torch.zeros(12, dtype=torch.bool)
        if index % 2:
            labels[torch.randperm(12, generator=g)[:3]] = True
        hidden[labels, 0] += 3
        found.append(Encoded(hidden, {"c": labels}, index % 5 < 2))
    return found


@pytest.fixture
def sae(tmp_path):
    """Feature 7 reads the first axis; the others are noise that is hardly ever active."""
    tensors = weights(b_enc=torch.full((WIDTH,), -6.0), b_dec=torch.zeros(SIZE))
    tensors["W_enc"][:, 7] = torch.eye(SIZE)[0]
    tensors["W_dec"][7] = torch.eye(SIZE)[0] * 2
    tensors["b_enc"][7] = 0.0
    return load_sae(write(tmp_path / "sae", tensors))


@pytest.mark.parametrize("method", ["single", "top_k", "relational", "tversky", "direction", "probe"])
def test_a_concept_is_found_judged_and_saved(method, sae, tmp_path):
    concept = find("c", examples(), method, sae if method not in ("direction", "probe") else None, top_k=3)
    least = {"relational": 0.8, "tversky": 0.7}.get(method, 0.9)  # trees and sets have few different scores
    assert concept.report["token/auc"] > least
    assert concept.report["max/auc"] > least
    assert concept.steer[0] > 0.7
    assert concept.steer.norm().item() == pytest.approx(1)
    if method in ("single", "top_k", "tversky"):
        assert concept.indices[0] == 7
    kinds = {"probe": "direction"}
    assert concept.kind == kinds.get(method, method) or len(concept.indices) == 1
    held_out = [e for e in examples() if e.held_out]
    scores = torch.cat([concept.score(e.hidden) for e in held_out])
    labels = torch.cat([e.labelled["c"] for e in held_out])
    hits = scores > concept.thresholds["token"]
    balanced = (hits[labels].float().mean() + (~hits)[~labels].float().mean()) / 2
    assert balanced.item() == pytest.approx(concept.report["token/balanced_accuracy"], abs=1e-5)

    Dictionary.of((concept,), 2, sae).to_artifact(MODEL, {"data": "x"}).save(tmp_path / "out")
    again = Dictionary.from_artifact(load(tmp_path / "out", METHOD))
    assert again.layer == 2
    for part in ("kind", "indices", "thresholds", "widths", "report", "tversky"):
        assert getattr(again["c"], part) == getattr(concept, part)
    assert (again.whole is not None) == (method == "tversky"), "only what counts the others needs them"
    assert torch.allclose(again["c"].score(X), concept.score(X), atol=1e-5)
    assert torch.equal(again["c"].steer, concept.steer)


def test_a_similarity_that_counts_others_needs_the_whole_sae(sae):
    own = find("c", examples(), "tversky", sae, 3, Tversky(0.0, 1.0))
    assert Dictionary.of((own,), 2, sae).whole is None
    with pytest.raises(SteerError, match="--alpha: got -1"):
        find("c", examples(), "tversky", sae, 3, Tversky(-1, 1))
    broken = Dictionary((find("c", examples(), "tversky", sae, 3),), 2).to_artifact(MODEL, {})
    with pytest.raises(SteerError, match=r"tversky/alpha: got 0\.5; must be 0 in a dictionary without the whole SAE"):
        Dictionary.from_artifact(broken)


@given(data=st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=4, max_size=40))
def test_the_width_is_the_likeliest(data):
    x, labels = torch.tensor([v for v, _ in data]), torch.tensor([b for _, b in data])
    if labels.all() or not labels.any() or x.abs().max() < 0.1:
        return
    found = width(x, labels)
    p, n = labels.sum().item(), (~labels).sum().item()

    def loss(w):
        total = 0.0
        for value, label in zip(x.tolist(), labels.tolist(), strict=True):
            target = (p + 1) / (p + 2) if label else 1 / (n + 2)
            z = value / w
            cost = max(z, 0) + math.log1p(math.exp(-abs(z))) - target * z
            total += cost * (0.5 / p if label else 0.5 / n)
        return total

    assert found > 0
    scale = sum(abs(v) * (0.5 / p if b else 0.5 / n) for v, b in data)
    others = [found * f for f in (0.5, 0.9, 1.1, 2.0) if 1e-4 < found * f / scale < 1e4]
    assert loss(found) <= min(map(loss, others), default=math.inf) + 1e-9


def test_too_little_data_and_methods_without_an_sae():
    with pytest.raises(SteerError, match="at least 4 of each"):
        find("c", examples(10), "direction")
    with pytest.raises(SteerError, match="without an SAE use direction or probe"):
        find("c", examples(), "top_k")


def test_a_tree_separates_what_needs_two_features():
    x = torch.rand(400, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5) != (x[:, 2] > 0.5)
    y = y | ((x[:, 0] > 0.9) & (x[:, 2] > 0.9))  # or neither feature alone says anything, and a greedy tree is lost
    tree = grow(x, y, 4)
    assert ((tree.score(x) > 0.5) == y).float().mean() > 0.95
    assert max(len(path) for path, _ in tree.leaves()) <= 4


def test_labels_of_tokens():
    spans = Example("a cat sat", frozenset({"cat"}), ((2, 5, "cat"),))
    assert labels_of_tokens(spans, "cat", [(0, 1), (1, 5), (5, 9)]) == [False, True, False]
    assert labels_of_tokens(Example("a", frozenset({"x"})), "x", [(0, 1), (1, 2)]) == [True, True]


def test_examples_are_read_and_mistakes_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a b", "labels": ["x"]}\n\n{"text": "c", "spans": [[0, 1, "y"]]}\n')
    assert [sorted(e.labels) for e in read_examples(path)] == [["x"], ["y"]]
    for line in ("{", '{"labels": []}', '{"text": "a", "spans": [[1]]}', "[1]"):
        path.write_text('{"text": "a"}\n' + line)
        with pytest.raises(SteerError, match="--data, line 2"):
            read_examples(path)


@pytest.mark.parametrize("architecture", ["topk", "jumprelu"])
def test_a_small_sae_learns_sparse_directions(architecture, tmp_path):
    g = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(16, SIZE, generator=g), dim=1)
    code = torch.rand(4000, 16, generator=g) * (torch.rand(4000, 16, generator=g) < 0.12)
    rows = 50 * code @ directions + 7
    result = train(rows, 32, 2, 300, architecture, batch=256, lr=3e-3)
    assert result.explained > 0.7
    assert result.active == pytest.approx(2, abs=1.0)
    save(result, tmp_path / "sae", 2, 1, "toy")
    sae = load_sae(tmp_path / "sae", SIZE)
    assert sae.hook == "blocks.1.hook_resid_post"
    assert torch.allclose(sae.encode(rows[:50]), encode(result.tensors, rows[:50], 2), atol=1e-2)
