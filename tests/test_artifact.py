"""Artifacts: what is written is what is read; everything else is refused with the reason."""

import json
from pathlib import Path

import pytest
import torch

from llm_steer.artifact import DESCRIPTION, TENSORS, Artifact, Description, ModelIdentity, check, load
from llm_steer.errors import SteerError

MODEL = ModelIdentity(id="m", dtype="float32", architecture="LlamaForCausalLM", hidden_size=4, num_layers=3, tokenizer="t")


def make(**changes: object) -> Artifact:
    fields = {
        "method": "rebalance",
        "model": MODEL,
        "layer": 1,
        "site": "after",
        "positions": "delimiter",
        "constants": {"q25c": 0.5},
        **changes,
    }
    return Artifact(Description(**fields), {"vector": torch.arange(4.0)})


def test_round_trip(tmp_path: Path) -> None:
    artifact = make()
    loaded = load(artifact.save(tmp_path / "a"), "rebalance")
    assert torch.equal(loaded.tensors["vector"], artifact.tensors["vector"])
    assert loaded.description.constants == {"q25c": 0.5}
    assert check(loaded, MODEL) == []


def test_content_hash_names_what_steers(tmp_path: Path) -> None:
    same = make(calibration={"date": "2026-11-30"})
    assert make().content_hash == same.content_hash
    assert make().content_hash != make(layer=2).content_hash
    other = Artifact(make().description, {"vector": torch.arange(4.0) + 1e-6})
    assert make().content_hash != other.content_hash


def damaged(folder: Path, how: str) -> None:
    description = json.loads((folder / DESCRIPTION).read_text())
    if how == "truncated tensors":
        data = (folder / TENSORS).read_bytes()[:-3]
        (folder / TENSORS).write_bytes(data)
    elif how == "no tensors":
        (folder / TENSORS).unlink()
    elif how == "not JSON":
        (folder / DESCRIPTION).write_text("{")
    elif how == "deep JSON":
        (folder / DESCRIPTION).write_text("[" * 100_000)
    elif how == "newer format":
        (folder / DESCRIPTION).write_text(json.dumps({**description, "format_version": 2}))
    elif how == "unknown field":
        (folder / DESCRIPTION).write_text(json.dumps({**description, "pickle": "x"}))
    elif how == "negative layer":
        (folder / DESCRIPTION).write_text(json.dumps({**description, "layer": -1}))
    elif how == "too long":
        (folder / DESCRIPTION).write_text(" " * 2_000_000)


DAMAGES = ["truncated tensors", "no tensors", "not JSON", "deep JSON", "newer format", "unknown field", "negative layer"]


@pytest.mark.parametrize("how", [*DAMAGES, "too long"])
def test_damaged_folders_are_refused(tmp_path: Path, how: str) -> None:
    folder = make().save(tmp_path / "a")
    damaged(folder, how)
    with pytest.raises(SteerError, match="artifact"):
        load(folder, "rebalance")


def test_a_pickle_in_disguise_is_refused(tmp_path: Path) -> None:
    import hashlib
    import pickle

    folder = make().save(tmp_path / "a")
    data = pickle.dumps({"vector": [1.0]})
    (folder / TENSORS).write_bytes(data)
    description = json.loads((folder / DESCRIPTION).read_text())
    description["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(SteerError, match="safetensors"):
        load(folder, "rebalance")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = Artifact(make().description, {"vector": torch.tensor([1.0, float("nan")])}).save(tmp_path / "a")
    with pytest.raises(SteerError, match="finite"):
        load(folder, "rebalance")


def test_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SteerError, match="made for constant_vector"):
        load(make().save(tmp_path / "a"), "constant_vector")


@pytest.mark.parametrize(
    "change", [{"architecture": "Qwen2ForCausalLM"}, {"hidden_size": 8}, {"num_layers": 2}, {"tokenizer": "other"}]
)
def test_a_model_of_another_kind_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(SteerError, match=next(iter(change))):
        check(make(), MODEL.model_copy(update=change))


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(SteerError, match="layer: got 3; must be between 0 and 2"):
        check(make(layer=3), MODEL)


def test_another_checkpoint_is_a_warning() -> None:
    warnings = check(make(), MODEL.model_copy(update={"id": "n", "dtype": "bfloat16"}))
    assert warnings == ["made for id 'm', used with 'n'", "made for dtype 'float32', used with 'bfloat16'"]
