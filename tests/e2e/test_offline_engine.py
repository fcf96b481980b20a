"""The engine client over vLLM offline, against the one over Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.offline_engine import request_of
from e2e.scenarios import OPEN

WAVE = {"name": "reflection_cycle", "amplitude": 25.0, "period": 9.4}
GREEDY = {"max_tokens": 10, "temperature": 0.0}
SEEDED = {"max_tokens": 10, "temperature": 1.0, "seed": 4}
CHAT = [{"role": "user", "content": "so the w7"}]
REQUESTS: list[dict[str, Any]] = [
    {"messages": CHAT, "sampling": GREEDY},
    {"prompt": [20, 30, 40, OPEN], "sampling": GREEDY, "steer": WAVE, "trace": True},
    {"prompt": [20, 30, 40, OPEN], "sampling": GREEDY, "steer": "off", "trace": True},
    {"prompt": [9, OPEN], "sampling": SEEDED, "steer": [WAVE]},
    {"prompt": [9, OPEN], "sampling": {**SEEDED, "top_k": 5, "top_p": 0.9}},
    {"prompt": [9, OPEN], "sampling": GREEDY, "steer": "nonsense"},
    {"prompt": [9] * 300, "sampling": GREEDY},
]


@pytest.fixture(scope="module")
def result(llama: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "e2e.offline_engine", str(llama), json.dumps(REQUESTS)]
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400)
    assert "RESULT " in done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    return found


def test_greedy_equals_hugging_face(result: dict[str, Any], llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer.engines.base import Engine

    tokenizer = AutoTokenizer.from_pretrained(llama)
    engine = Engine.from_hf(AutoModelForCausalLM.from_pretrained(llama), tokenizer)
    ours = engine.run([request_of(dict(r)) for r in REQUESTS[:3]])
    for vllm, hf in zip(result["together"], ours, strict=False):
        assert vllm["token_ids"] == list(hf.token_ids or ())
        assert vllm["logprob"] == pytest.approx(hf.logprob, abs=1e-2)
        for name in ("text", "finish", "tokens", "prompt_tokens", "error"):
            assert vllm[name] == getattr(hf, name), name
    traced = result["together"][1]["steering"]
    assert traced["plugins"] == ours[1].steering["plugins"]  # type: ignore[index]
    assert result["together"][2]["steering"] is None


def test_alone_and_together(result: dict[str, Any]) -> None:
    for alone, together in zip(result["alone"], result["together"], strict=True):
        assert alone["token_ids"] == together["token_ids"]


def test_bad_requests_come_back_alone(result: dict[str, Any]) -> None:
    assert "nonsense" in result["together"][5]["error"]
    assert "256" in result["together"][6]["error"]
    assert [r["error"] for r in result["together"][:5]] == [None] * 5


def test_streaming_and_abort(result: dict[str, Any]) -> None:
    first, *aborted, other = result["order"]
    assert first == [1, "length", 3]
    assert sorted(index for index, _, _ in aborted) == [0, 2]
    assert all(finish == "abort" and tokens < 200 for _, finish, tokens in aborted)
    assert other[:2] == [3, "length"]
    assert result["left"] is False


def test_what_is_aborted_comes_with_what_it_has(result: dict[str, Any]) -> None:
    whole = result["unaborted"]
    for part in result["aborted"]:
        assert part["tokens"] == len(part["token_ids"]) >= 2  # the other request had three by then
        assert part["token_ids"] == whole["token_ids"][: part["tokens"]]
        assert part["text"]
        assert whole["text"].startswith(part["text"])


def test_identity(result: dict[str, Any]) -> None:
    identity = result["identity"]
    assert identity["engine"] == "vllm"
    assert {"model", "config", "tokenizer", "chat_template", "dtype", "torch", "llm_steer"} <= set(identity)
    assert any(name.startswith("vllm") for name in identity)
