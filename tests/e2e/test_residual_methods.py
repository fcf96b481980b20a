"""The methods that come with the package and steer hidden states: vLLM's tokens are those of the Hugging Face host."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import scenarios, tiny
from e2e.conftest import Engines
from e2e.engine_client import Engine, EngineError, Server

BLANK = tiny.SPECIAL.index("\n\n")
TOKENS = 40
CONSTANTS = {"q25c": 0.1, "q75c": 0.3, "q25v": 1e-4, "q75v": 1e-3, "low": -1.0, "floor": -2.0, "ceiling": 0.5}


@pytest.fixture(scope="module")
def talkative(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head that likes blank lines and ends of thought, so that there are steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    head = model.lm_head.weight.detach().clone()
    head[BLANK] *= 5.0
    head[scenarios.CLOSE] *= 1.5
    model.lm_head.weight = torch.nn.Parameter(head)
    folder = tmp_path_factory.mktemp("models") / "talkative"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shelf(talkative: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two vectors and a closed loop for that model, and a vector for another one."""
    from transformers import AutoConfig, AutoTokenizer

    from llm_steer.artifact import Artifact, Description, ModelIdentity

    config, tokenizer = AutoConfig.from_pretrained(talkative), AutoTokenizer.from_pretrained(talkative)
    identity = ModelIdentity.of(config, dtype=torch.float32, tokenizer=tokenizer)
    folder = tmp_path_factory.mktemp("artifacts")

    def save(name: str, method: str, seed: int, model: ModelIdentity = identity) -> None:
        vector = 30 * torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(seed)), dim=0)
        about = Description(
            method=method,
            model=model,
            layer=0,
            site="after",
            positions="delimiter",
            sign="towards_overthinking",
            constants=CONSTANTS if method == "rebalance" else {},
        )
        Artifact(about, {"vector": vector}).save(folder / name)

    save("calm", "constant_vector", 1)
    save("bold", "constant_vector", 2)
    save("loop", "rebalance", 3)
    save("stranger", "constant_vector", 4, identity.model_copy(update={"architecture": "OtherForCausalLM"}))
    return folder


def requests(shelf: Path) -> list[tuple[list[int], Any]]:
    """Prompts, and what steers; artifacts by name."""
    rng = random.Random(8)
    steers: list[Any] = [
        "off",
        {"name": "constant_vector", "artifact": "calm", "coefficient": 1.0},
        {"name": "constant_vector", "artifact": "bold", "coefficient": -2.0, "positions": "all"},
        {"name": "constant_vector", "artifact": "bold", "coefficient": 2.0, "positions": "delimiters"},
        {"name": "random_vector", "seed": 5, "norm": 40.0, "layers": [1], "positions": "think"},
        {"name": "rebalance", "artifact": "loop", "strength": 1.0},
        {"name": "rebalance", "artifact": "loop", "strength": 3.0, "mode": "paper"},
        [
            {"name": "constant_vector", "artifact": "calm", "coefficient": 0.5},
            {"name": "rebalance", "artifact": "loop", "strength": 2.0},
        ],
    ]
    return [([*scenarios.words(rng, rng.randint(2, 12)), scenarios.OPEN], steer) for steer in steers for _ in range(2)]


def declared(shelf: Path) -> list[str]:
    return [
        f"constant_vector:artifact={shelf / 'calm'},coefficient=0",
        'random_vector:{"norm": 1.0, "layers": [1], "coefficient": 1.0}',
        f"rebalance:artifact={shelf / 'loop'},strength=0",
    ]


Told = tuple[list[int], dict[str, Any] | None]
"""Tokens of a request, and its trace."""


@pytest.fixture(scope="module")
def wanted(talkative: Path, shelf: Path) -> list[Told]:
    """What the Hugging Face host says, one request at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer import steer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(talkative, dtype=torch.float32).eval()
    steer(model, "off", tokenizer=AutoTokenizer.from_pretrained(talkative))

    def by_path(asked: Any) -> Any:
        if isinstance(asked, list):
            return [by_path(one) for one in asked]
        return {**asked, "artifact": str(shelf / asked["artifact"])} if "artifact" in asked else asked

    rows = []
    for prompt, asked in requests(shelf):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), steer=[by_path(asked)], **options)
        rows.append((out[0, len(prompt) :].tolist(), model.steering.traces[0]))  # type: ignore[union-attr]
    assert sum(row.count(BLANK) > 2 for row, _ in rows) > len(rows) / 2, "there are steps"
    assert len({tuple(row) for row, _ in rows}) > 12
    return rows


def check_loop(got: dict[str, Any] | None, want: dict[str, Any] | None, tokens: int) -> bool:
    """A request's trace tells of its closed loop what Hugging Face's does, for as many tokens; whether there is one."""

    def loop(trace: dict[str, Any] | None) -> dict[str, Any]:
        return next((plugin for plugin in (trace or {"plugins": []})["plugins"] if plugin["name"] == "rebalance"), {})

    said, expected = loop(got), loop(want)
    if not expected:
        assert not said
        return False
    assert got is not None
    assert (got["tokens"], got["replayed"]) == (tokens, False)
    added = [
        (at, value) for at, value in zip(expected["positions"], expected["coefficients"], strict=True) if at < tokens - 1
    ]
    assert (said["positions"], said["steered_steps"]) == ([at for at, _ in added], len(added))
    assert said["coefficients"] == pytest.approx([value for _, value in added], abs=1e-3)
    assert len(said["confidences"]) == said["steps"] <= expected["steps"]
    assert said["confidences"] == pytest.approx(expected["confidences"][: said["steps"]], abs=1e-4)
    assert said["steps"] == expected["steps"] or tokens < TOKENS
    assert {**said["params"], "layers": None} == {**expected["params"], "layers": None}
    return True


def ask(engine: Engine, shelf: Path, tokens: int = TOKENS) -> list[dict[str, Any]]:
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    batch = [
        {"prompt_token_ids": prompt, "params": {**params, "extra_args": {"steer": steer}}}
        for prompt, steer in requests(shelf)
    ]
    return [output for (output,) in engine.generate(batch)]


@pytest.mark.parametrize(
    ("runner", "options", "tokens"),
    [
        pytest.param("v1", {}, TOKENS, id="v1"),
        pytest.param("v1-async", {"max_num_batched_tokens": 16}, TOKENS, id="v1-async-chunks"),
        pytest.param("v1", {"enforce_eager": False, "env": {"VLLM_CPU_CI_ENV": "1"}}, TOKENS, id="v1-dynamo"),
        pytest.param("v1", {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}, 20, id="v1-tp"),
        pytest.param("v2", {}, 14, id="v2"),
    ],
)
def test_tokens(
    engines: Engines,
    talkative: Path,
    shelf: Path,
    wanted: list[Told],
    runner: str,
    options: dict[str, Any],
    tokens: int,
) -> None:
    env = {**options.get("env", {}), "LLM_STEER_ARTIFACTS": str(shelf)}
    options = {**options, "env": env, "logits_processors": declared(shelf)}
    engine = engines.get(talkative, runner, one_process="tensor_parallel_size" not in options, **options)
    got = ask(engine, shelf, tokens)
    loops = 0
    for (prompt, steer), output, (want, trace) in zip(requests(shelf), got, wanted, strict=True):
        assert output["token_ids"] == want[:tokens], (prompt, steer)
        loops += check_loop(output["steering"], trace, tokens)
    assert loops == 6


def test_preemption(engines: Engines, talkative: Path, shelf: Path, wanted: list[Told]) -> None:
    """In a cache that holds a few of the requests that run: recomputed tokens get the coefficients that they had."""
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    small = {"max_model_len": 128, "max_num_seqs": 10, "block_size": 32, "num_gpu_blocks_override": 13}
    engine = engines.get(talkative, "v1", one_process=True, env=env, logits_processors=declared(shelf), **small)
    params = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    asked = [
        {"id": str(i), "prompt_token_ids": prompt, "params": {**params, "extra_args": {"steer": steer}}}
        for i, (prompt, steer) in enumerate(requests(shelf))
    ]
    # The closed loops come last, and give way first.
    order = sorted(asked, key=lambda one: "rebalance" in str(one["params"]))
    played = engine.call("play", script=[{"add": [one]} for one in order])
    assert played["preemptions"] > 0
    assert [played["tokens"][str(i)] for i in range(len(asked))] == [tokens for tokens, _ in wanted]


def test_traces_of_many_closed_loops(engines: Engines, talkative: Path, shelf: Path, wanted: list[Told]) -> None:
    """More than workers remember: those that ask for their trace get it, the last of the others too."""
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    engine = engines.get(talkative, "v1", one_process=True, env=env, logits_processors=declared(shelf))
    (prompt, steer), (_, trace) = requests(shelf)[10], wanted[10]
    for asked in (True, False):
        extra = {"steer": steer, **({"steer_trace": 1} if asked else {})}
        params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "extra_args": extra}
        got = engine.generate([{"prompt_token_ids": prompt, "params": params}] * 40)
        told = [output["steering"]["plugins"][0].get("measured", True) for (output,) in got]
        assert told == [True] * 40 if asked else told == [False] * 24 + [True] * 16
        assert check_loop(got[-1][0]["steering"], trace, 8)


def test_what_may_be_named(engines: Engines, talkative: Path, shelf: Path) -> None:
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    engine = engines.get(talkative, "v1", one_process=True, env=env, logits_processors=declared(shelf))

    def refused(**steer: Any) -> str:
        with pytest.raises(EngineError) as error:
            engine.one([20, 30], max_tokens=2, extra_args={"steer": {"name": "constant_vector", **steer}})
        assert not engine.broken
        return error.value.message

    assert "bold, calm, loop" in refused(artifact="calmer")
    assert "did you mean 'calm'" in refused(artifact="calmer")
    assert "one of" in refused(artifact=str(shelf / "bold"))
    assert "one of" in refused(artifact="../calm")
    assert "OtherForCausalLM" in refused(artifact="stranger")
    assert "declared for the layers [0]" in refused(artifact="calm", layers=[1])
    assert "coefficient" in refused(artifact="calm", coefficient=1e9)


@pytest.fixture(scope="module")
def server(engines: Engines, talkative: Path, shelf: Path) -> Server:
    """Two front ends of one engine."""
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    arguments = ["--logits-processors", *declared(shelf), "--api-server-count", "2"]
    started: Server = engines.start(lambda log: Server(talkative, log, *arguments, key="secret", env=env))
    return started


def test_artifacts_over_http(server: Server, shelf: Path, wanted: list[Told]) -> None:
    path = "/v1/steer/artifacts"
    assert server.request("GET", path, key=None)[0] == 401
    assert server.request("POST", f"{path}/load", {"name": "bold"}, key=None)[0] == 401
    for _ in range(6):  # whichever front end answers
        status, said = server.request("GET", path)
        assert status == 200
        about = {row["name"]: row for row in said["artifacts"]}
        assert set(about) == {"calm", "bold", "loop", "stranger"}
        assert "OtherForCausalLM" in about["stranger"]["refused"]
        assert about["bold"]["hash"] not in said["held"]
    status, loaded = server.request("POST", f"{path}/load", {"name": "bold"})
    assert (status, loaded["hash"]) == (200, about["bold"]["hash"])
    assert server.request("GET", path)[1]["held"][loaded["hash"]] == 0
    prompt, asked = requests(shelf)[4]
    for _ in range(6):
        xargs = {"steer": "constant_vector", **{f"steer_{k}": v for k, v in asked.items() if k != "name"}}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = server.request("POST", "/v1/completions", {**body, "return_token_ids": True, "vllm_xargs": xargs})
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == wanted[4][0]
    prompt, asked = requests(shelf)[12]
    xargs = {"steer": "rebalance", "steer_trace": 1, **{f"steer_{k}": v for k, v in asked.items() if k != "name"}}
    body |= {"prompt": prompt, "vllm_xargs": xargs}
    for _ in range(3):
        (choice,) = server.request("POST", "/v1/completions", body)[1]["choices"]
        assert check_loop(choice["steering"], wanted[12][1], TOKENS)
    (told,) = next(e for e in server.events("/v1/completions", body) if e != "[DONE]" and e.get("steering"))["steering"]
    assert check_loop(told, wanted[12][1], TOKENS)
    assert not any(server.request("GET", path)[1]["held"].values()), "nobody uses what ended"
    assert server.request("POST", f"{path}/unload", {"name": "bold"})[0] == 200
    assert loaded["hash"] not in server.request("GET", path)[1]["held"]
    for body in ({"name": "nothing"}, {"name": str(shelf / "bold")}, {"names": 1}, "no json", {"name": "stranger"}):
        status, answer = server.request("POST", f"{path}/load", body)
        assert status == 400, answer
        assert answer["error"]["message"]
    assert server.request("DELETE", path)[0] == 404
    assert server.request("GET", f"{path}/other")[0] == 404
    assert server.request("GET", "/health")[0] == 200


def test_both_front_ends_answer(server: Server) -> None:
    """Each counts the requests that came through it."""
    body = {"model": "tiny", "prompt": [20, 30], "max_tokens": 1, "vllm_xargs": {"steer": "random_vector", "steer_seed": 3}}

    def count(_: int) -> int:
        counts: dict[str, int] = server.request("GET", "/v1/steer")[1]["requests"]
        return counts.get("random_vector", 0)

    with ThreadPoolExecutor(8) as threads:  # at once, or one of them takes all
        answers = threads.map(lambda _: server.request("POST", "/v1/completions", body), range(65))
        assert {status for status, _ in answers} == {200}
        told = set(threads.map(count, range(128)))
    assert len(told) == 2
    assert sum(told) == 65


def save_hostile(shelf: Path, name: str) -> None:
    """A folder that looks like an artifact for the served model, and is wrong in one way."""
    import pickle

    from llm_steer.artifact import Artifact, load

    good = load(shelf / "calm", None)
    about, vector, folder = good.description, good.vector(), shelf / name
    changes: dict[str, Any] = {
        "wide": {"model": about.model.model_copy(update={"hidden_size": 128})},
        "deep": {"layer": 7},
        "drowning": {"relative_dose": 1e4},
    }.get(name, {})
    tensor = {"short": vector[:-1], "nan": vector * float("nan"), "huge": vector * 1e8}.get(name, vector)
    Artifact(about.model_copy(update=changes), {"vector": tensor}).save(folder)
    tensors = folder / "vectors.safetensors"
    if name == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif name == "device":
        tensors.unlink()
        tensors.symlink_to("/dev/zero")
    elif name in ("pickle", "header"):
        data = pickle.dumps({"vector": vector}) if name == "pickle" else (2**60).to_bytes(8, "little") + b"{" * 64
        tensors.write_bytes(data)
        text = json.loads((folder / "steer.json").read_text())
        (folder / "steer.json").write_text(json.dumps({**text, "sha256": hashlib.sha256(data).hexdigest()}))
    elif name == "nested":
        (folder / "steer.json").write_text("[" * 50_000)


HOSTILE = {
    "short": "a tensor 'vector' of 64 numbers",
    "wide": "hidden_size: got 128",
    "deep": "layer: got 7; must be between 0 and 1",
    "nan": "finite numbers",
    "truncated": "the file that steer.json names",
    "pickle": "a safetensors file",
    "header": "a safetensors file",
    "device": "no file",
    "nested": "valid JSON",
    "stranger": "OtherForCausalLM",
    "nothing": "one of",
    "../calm": "one of",
    "/etc": "one of",
    "sha256:" + "0" * 64: "content hash",
    "calm\0": "one of",
    "x" * 4000: "one of",
}
"""Artifacts, and the reason why each is refused."""
TOO_MUCH = {"huge": "added to an element", "drowning": "times the norm of the residual stream"}


def test_hostile_artifacts_and_requests(server: Server, shelf: Path, wanted: list[Told]) -> None:
    """Each is refused with the reason, to whoever asks, and the server goes on."""
    names = [name for name in (*HOSTILE, *TOO_MUCH) if name.isalpha() and len(name) < 100]
    made = [name for name in names if name not in ("stranger", "nothing")]
    for name in made:
        save_hostile(shelf, name)
    prompt, good = requests(shelf)[4]
    plain = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    def ask(**steer: Any) -> tuple[int, Any]:
        xargs = {f"steer_{name}" if name != "name" else "steer": value for name, value in steer.items()}
        return server.request("POST", "/v1/completions", {**plain, "return_token_ids": True, "vllm_xargs": xargs})

    def refused(answer: tuple[int, Any], reason: str) -> None:
        assert answer[0] == 400, answer
        assert reason in answer[1]["error"]["message"], answer

    for name, reason in {**HOSTILE, **TOO_MUCH}.items():
        refused(ask(name="constant_vector", artifact=name, coefficient=1.0), reason)
        if name in HOSTILE:
            refused(server.request("POST", "/v1/steer/artifacts/load", {"name": name}), reason)
    refused(ask(name="rebalance", artifact="calm"), "made for rebalance")
    for value, reason in ((1e9, "1000"), (-1001, "1000"), ("nan", "coefficient"), ("much", "coefficient")):
        refused(ask(name="constant_vector", artifact="calm", coefficient=value), reason)
    refused(ask(name="rebalance", artifact="loop", strength=1e300), "strength")
    refused(ask(name="constant_vector", artifact="calm", layers=[9]), "layers: got 9; must be between 0 and 1")
    refused(ask(name="constant_vector", artifact="calm", layers=[1]), "declared for the layers [0]")
    refused(ask(name="random_vector", norm=1e300, layers=[1]), "norm")
    said = {row["name"]: row for row in server.request("GET", "/v1/steer/artifacts")[1]["artifacts"]}
    assert set(made) <= set(said)
    assert all("refused" in said[name] for name in ("wide", "deep", "nan", "truncated", "pickle", "header", "device"))
    assert server.request("GET", "/health")[0] == 200
    status, answer = ask(**good)
    assert (status, answer["choices"][0]["token_ids"]) == (200, wanted[4][0])
    for name in made:
        shutil.rmtree(shelf / name)
