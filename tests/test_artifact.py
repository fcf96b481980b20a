"""Artifacts: what is written is what is read; everything else is refused with the reason."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from llm_steer.artifact import (
    DESCRIPTION,
    MAX_TENSORS,
    TENSORS,
    Artifact,
    Description,
    ModelIdentity,
    Shelf,
    check,
    load,
    tokenizer_hash,
)
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
    assert loaded.content_hash == artifact.content_hash


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
    elif how == "NaN constant":
        (folder / DESCRIPTION).write_text(json.dumps({**description, "constants": {"q25c": float("nan")}}))
    elif how == "not UTF-8":
        (folder / DESCRIPTION).write_bytes(b"\xff\xfe{}")
    elif how == "a folder for a file":
        (folder / TENSORS).unlink()
        (folder / TENSORS).mkdir()
    elif how == "a pipe for a file":  # reading it would never end
        (folder / DESCRIPTION).unlink()
        os.mkfifo(folder / DESCRIPTION)
    elif how == "huge":  # sparse: it takes no room here
        with (folder / TENSORS).open("r+b") as file:
            file.truncate(MAX_TENSORS + 1)


DAMAGES = ["truncated tensors", "no tensors", "not JSON", "deep JSON", "newer format", "unknown field", "negative layer"]
DAMAGES += ["NaN constant", "not UTF-8", "a folder for a file", "a pipe for a file", "huge"]


@pytest.mark.parametrize("how", [*DAMAGES, "too long"])
def test_damaged_folders_are_refused(tmp_path: Path, how: str) -> None:
    folder = make().save(tmp_path / "a")
    damaged(folder, how)
    with pytest.raises(SteerError, match="artifact"):
        load(folder, "rebalance")


def test_a_pickle_in_disguise_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("tensor", [torch.arange(4), torch.ones(4, dtype=torch.bool), torch.ones(4).to(torch.float8_e4m3fn)])
def test_numbers_of_other_types_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    folder = Artifact(make().description, {"vector": tensor}).save(tmp_path / "a")
    with pytest.raises(SteerError, match="of one of the types float64, float32, float16, bfloat16"):
        load(folder, "rebalance")


def test_a_vector_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    for tensors in (
        {"vector": torch.ones(5)},
        {"vector": torch.ones(1, 4)},
        {"vector": torch.tensor(1.0)},
        {"v": torch.ones(4)},
    ):
        folder = Artifact(make().description, tensors).save(tmp_path / "a")
        with pytest.raises(SteerError, match="one with a tensor 'vector' of 4 numbers"):
            load(folder, "rebalance").vector()


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
    quantized = check(make(), MODEL.model_copy(update={"quantization": "awq", "revision": "1"}))
    assert quantized == ["made for revision None, used with '1'", "made for quantization None, used with 'awq'"]


def test_where_a_vector_acts() -> None:
    assert [make(site=site, layer=2).behind for site in ("after", "before")] == [2, 1]
    assert make(site="before", layer=0).behind == -1


# -- the shelf -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two artifacts, one of another method, one damaged, one for another model, and things that are none."""
    root = tmp_path / "shelf"
    make().save(root / "good")
    make(layer=2).save(root / "deeper")
    make(method="constant_vector").save(root / "constant")
    make(model=MODEL.model_copy(update={"hidden_size": 8})).save(root / "wide")
    damaged(make(layer=0).save(root / "damaged"), "truncated tensors")
    (root / "empty").mkdir()
    (root / "note.txt").write_text("x")
    make(positions="outside").save(tmp_path / "outside")
    return root


def test_names_and_hashes(folder: Path) -> None:
    shelf = Shelf(MODEL, folder)
    artifact, warnings = shelf.find("good", "rebalance")
    assert (artifact.content_hash, warnings) == (make().content_hash, [])
    assert shelf.names() == ["constant", "damaged", "deeper", "good", "wide"]
    worker = Shelf(MODEL.model_copy(update={"dtype": "bfloat16"}), folder)  # which has read nothing yet
    assert worker.open(artifact.content_hash, "rebalance").content_hash == artifact.content_hash
    again, warnings = worker.find(f"sha256:{artifact.content_hash}", "rebalance")
    assert again.content_hash == artifact.content_hash
    assert warnings == ["made for dtype 'float32', used with 'bfloat16'"]
    assert shelf.find("constant", None)[0].description.method == "constant_vector"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goood", "must be one of constant, damaged, deeper, good, wide .did you mean 'good'"),
        ("empty", "a folder with steer.json"),
        ("note.txt", "must be one of"),
        ("", "must be one of"),
        ("../outside", "must be one of"),
        ("..", "must be one of"),
        (".", "must be one of"),
        ("good/../../outside", "must be one of"),
        ("good/", "must be one of"),
        ("good\n", "must be one of"),
        ("good\0", "must be one of"),
        ("a" * 5000, "must be one of"),
        ("damaged", "the file that steer.json names"),
        ("constant", "made for rebalance, but it is for constant_vector"),
        ("wide", "hidden_size: got 8; must be this model's: 4"),
        ("sha256:" + "0" * 64, "the content hash of an artifact that lies here"),
        ("sha256:../outside", "the content hash of an artifact that lies here"),
    ],
)
def test_what_cannot_be_found(folder: Path, name: str, message: str) -> None:
    with pytest.raises(SteerError, match=message) as caught:
        Shelf(MODEL, folder).find(name, "rebalance")
    assert str(folder) not in f"{caught.value} {caught.value.field} {caught.value.value}", "where they lie is the operator's"


def test_a_list_tells_what_is_wrong(folder: Path) -> None:
    from llm_steer.hosts.vllm.artifacts import _listed

    short = make(layer=1).save(folder / "short")
    save_file({"vector": torch.ones(3)}, short / TENSORS)
    about = json.loads((short / DESCRIPTION).read_text())
    about["sha256"] = hashlib.sha256((short / TENSORS).read_bytes()).hexdigest()
    (short / DESCRIPTION).write_text(json.dumps(about))
    told = {row["name"]: row.get("refused", "") for row in _listed(Shelf(MODEL, folder))}
    assert [name for name, refused in told.items() if not refused] == ["constant", "deeper", "good"]
    assert "a tensor 'vector' of 4 numbers" in told["short"]
    assert "the file that steer.json names" in told["damaged"]


def test_outsiders_name_no_paths(folder: Path) -> None:
    outside = str(folder.parent / "outside")
    with pytest.raises(SteerError, match="must be one of"):
        Shelf(MODEL, folder).find(outside, "rebalance")
    with pytest.raises(SteerError, match="left out: no artifacts lie here"):
        Shelf(MODEL).find(outside, "rebalance")
    with pytest.raises(SteerError, match="content hash"):
        Shelf(MODEL, folder).open(make(positions="outside").content_hash, None)
    local = Shelf(MODEL, folder, paths=True)
    artifact, _ = local.find(outside, "rebalance")
    assert local.open(artifact.content_hash, "rebalance") is artifact
    named = Shelf(MODEL, folder, named=(folder.parent / "outside",))
    assert named.open(artifact.content_hash, "rebalance").content_hash == artifact.content_hash
    for other in ("outside", outside, outside + "/", str(folder.parent)):
        with pytest.raises(SteerError, match="must be one of"):
            named.find(other, "rebalance")


def test_files_are_read_once_and_again_when_they_change(folder: Path) -> None:
    shelf = Shelf(MODEL, folder)
    first, _ = shelf.find("good", None)
    assert shelf.find("good", None)[0] is first
    make(layer=0).save(folder / "good")
    changed, _ = shelf.find("good", None)
    assert changed.description.layer == 0
    assert shelf.open(first.content_hash, None) is first  # a request that was admitted with it still finds it
    shutil.rmtree(folder / "good")
    with pytest.raises(SteerError, match="must be one of"):
        shelf.find("good", None)


def test_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    made, saved = [], []

    def snapshot(repository, allow_patterns):
        if repository != "someone/vectors":
            raise OSError("no such repository")
        return str(folder / "good")

    class Api:
        def create_repo(self, *args, **options):
            made.append((args, options))

        def upload_folder(self, repo_id, folder_path, commit_message):
            saved.append((repo_id, load(folder_path, None).content_hash))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    shelf = Shelf(MODEL, paths=True)
    assert shelf.find("someone/vectors", "rebalance")[0].content_hash == make().content_hash
    with pytest.raises(SteerError, match=r"a folder, or a repository of the Hugging Face hub \(no such repository"):
        shelf.find("someone/nothing", "rebalance")
    with pytest.raises(SteerError, match="left out: no artifacts lie here"):
        Shelf(MODEL).find("someone/vectors", "rebalance")
    make().publish("someone/vectors")
    assert made == [(("someone/vectors",), {"private": True, "exist_ok": True})]
    assert saved == [("someone/vectors", make().content_hash)]


# -- models --------------------------------------------------------------------------------------------------------------


def test_identity_of_a_configuration(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=3, architectures=["LlamaForCausalLM"])
    config._name_or_path, config._commit_hash = "someone/model", "abc"
    config.quantization_config = {"quant_method": "awq"}
    identity = ModelIdentity.of(config, architecture="Other", dtype=torch.bfloat16)
    assert identity == ModelIdentity(
        id="someone/model",
        revision="abc",
        dtype="bfloat16",
        quantization="awq",
        architecture="LlamaForCausalLM",
        hidden_size=32,
        num_layers=3,
    )
    config._name_or_path = str(tmp_path)  # a folder: where it lies is nobody's business
    config.architectures = None
    here = ModelIdentity.of(config, architecture="LlamaForCausalLM", dtype="torch.bfloat16")
    assert (here.id, here.architecture, here.dtype) == (tmp_path.name, "LlamaForCausalLM", "bfloat16")


def test_identity_of_wrappers() -> None:
    config = AutoConfig.for_model("llava")
    identity = ModelIdentity.of(config, architecture="LlavaForConditionalGeneration")
    assert (identity.hidden_size, identity.num_layers) == (
        config.text_config.hidden_size,
        config.text_config.num_hidden_layers,
    )
    assert ModelIdentity.of(AutoConfig.for_model("mpt"), architecture="M").hidden_size == 2048
    assert ModelIdentity.of(AutoConfig.for_model("gpt2"), architecture="G").num_layers == 12


def test_tokenizer_hash_names_pieces_and_ids() -> None:
    def hashed(**table: int) -> str:
        return tokenizer_hash(SimpleNamespace(get_vocab=lambda: dict(table)))

    assert hashed(a=0, b=1) == hashed(b=1, a=0)
    assert len({hashed(a=0, b=1), hashed(a=1, b=0), hashed(a=0), hashed(a=0, c=1)}) == 4
    assert tokenizer_hash(SimpleNamespace(get_vocab=lambda: {b"\xff": 0})) == hashed(**{"\xff": 0})
