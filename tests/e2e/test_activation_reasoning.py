"""activation_reasoning inside vLLM: what is detected, concluded and done is what the Hugging Face host does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import scenarios
from e2e.conftest import Engines
from e2e.engine_client import Server

TOKENS = 24
CUE, OTHER, FORCED, NEVER = 121, 122, 91, 92
"""Ids of ``w100`` and so on: a word that prompts hold or not, and words that rules speak of."""
MAIN = """
dictionary: {signs}
concepts:
  cue: {{words: [w100]}}
  other: {{words: [w101]}}
subjects: {{max: [w102], sam: [w103]}}
propositions:
  hot: {{hold: 5}}
  warm: {{concept: hot, level: global, aggregate: mean, threshold: {mean}}}
  cold: {{scope: output, hold: 3}}
  early: {{pattern: [cue, hot], within: scope, scope: prompt}}
  bold(?x): {{pattern: ["?x", hot], within: scope}}
rules:
  - cue and not cold -> go
  - go -> away
  - early and other -> answer
  - answer -> answer
  - bold(?x) -> brave(?x)
actions:
  - {{when: hot, steer: {{concept: hot, strength: -0.7, layers: [0, 1], decay: 0.9}}, duration: 6}}
  - {{when: away, steer: {{concept: cold, strength: 0.6}}, priority: 1}}
  - {{when: answer, force: [w70], duration: 2}}
  - {{when: warm and brave(max), forbid: [w71, w72, w73]}}
"""
STRICT = """
semantics: open
dictionary: {signs}
concepts:
  cue: {{words: [w100]}}
propositions:
  hot: {{hold: 1}}
rules:
  - cue -> hot or cold
  - hot xor calm
actions:
  - {{when: calm, steer: {{concept: cold, strength: 1.0}}}}
  - {{when: not calm, steer: {{concept: cold, strength: -0.5, layers: [1]}}, duration: 4}}
"""
LATER = """
dictionary: {signs}
concepts:
  other: {{words: [w101]}}
propositions:
  hot: {{scope: output, hold: 2}}
  other: {{scope: output}}
  cold: {{level: global, aggregate: mean, scope: output, threshold: {mean}}}
actions:
  - {{when: hot and not other, steer: {{concept: cold, strength: 1.2}}}}
  - {{when: cold, steer: {{concept: hot, strength: 0.4, layers: [1]}}, duration: 3}}
"""
SOFT = """
truth: product
dictionary: {signs}
concepts:
  cue: {{words: [w100]}}
propositions:
  hot: {{hold: 2}}
  chill: {{concept: cold, level: global, aggregate: mean, threshold: {mean}}}
rules:
  - hot and not chill -> go
  - cue and chill -> go
actions:
  - {{when: go, steer: {{concept: cold, strength: 1.4}}, above: 0.1}}
  - {{when: chill and not go, steer: {{concept: hot, strength: 0.8, layers: [1]}}, above: 0.3}}
"""
STOP = """
concepts:
  cue: {{words: [w100]}}
actions: [{{when: cue, stop: true}}]
"""


@pytest.fixture(scope="module")
def files(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dictionary of two directions, and rules files."""
    from llm_steer.plugins.activation_reasoning.concepts import LEVELS, Dictionary, direction_concept
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer.artifact import ModelIdentity

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(llama)
    rng = random.Random(0)
    with torch.no_grad():
        rows = [
            model(torch.tensor([scenarios.words(rng, 60)]), output_hidden_states=True).hidden_states[1][0, 1:] for _ in "ab"
        ]
    states = torch.cat(rows)
    concepts, means = [], []
    for seed, name in enumerate(("hot", "cold")):
        direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(seed)), dim=0)
        scores = (states @ direction).sort().values
        threshold = float(scores[int(0.85 * len(scores))] + 0.01)
        means.append(float(scores.mean()))
        concept = direction_concept(name, direction, 0.0, dict.fromkeys(LEVELS, threshold))
        concepts.append(replace(concept, widths=dict.fromkeys(LEVELS, float(scores.std()))))
    folder = tmp_path_factory.mktemp("rules")
    identity = ModelIdentity.of(model.config, dtype=torch.float32, tokenizer=tokenizer)
    Dictionary(tuple(concepts), 0).to_artifact(identity, {}).save(folder / "signs")
    for name, text in (("main", MAIN), ("strict", STRICT), ("later", LATER), ("soft", SOFT), ("halt", STOP)):
        (folder / f"{name}.yaml").write_text(text.format(signs=folder / "signs", mean=means[0] + 0.05))
    return folder


def requests() -> list[tuple[list[int], Any]]:
    """Prompts, and what steers; files by name."""
    rng = random.Random(8)
    name = {"name": "activation_reasoning"}
    steers: list[Any] = [
        "off",
        {**name},
        {**name, "strength": 2.5},
        {**name, "rules": "strict"},
        {**name, "rules": "later"},
        {**name, "rules": "main", "extra_rules": ["hot or cue -> answer"]},
        {**name, "rules": "main", "facts": ["bold(max)", "other"]},
        {**name, "rules": "main", "extra_rules": ["key and bold(?x) -> away", "cue -> key"], "facts": ["bold(sam)"]},
        {**name, "rules": "strict", "extra_rules": ["cue -> not hot", "storm -> not hot"], "facts": ["storm"]},
    ]
    found = []
    for steer in steers:
        for length in (3, 9, 40):
            prompt = scenarios.words(rng, length)
            for planted in rng.choice(((), (CUE,), (CUE, OTHER), (123, CUE))):
                prompt.insert(rng.randint(0, 2), planted)
            found.append((prompt, steer))
    return found


def declared(files: Path) -> list[str]:
    others = ", ".join(f'"{files / name}.yaml"' for name in ("strict", "later", "halt"))
    return [f'activation_reasoning:{{"rules": "{files}/main.yaml", "files": [{others}], "allow_rules": 4}}']


def soft_requests() -> list[tuple[list[int], Any]]:
    rng = random.Random(9)
    steers = ({"name": "activation_reasoning", "rules": "soft"}, "off")
    found = [(scenarios.words(rng, length), steers[0]) for length in (3, 9, 9, 40)]
    found.append(([CUE, *scenarios.words(rng, 12)], steers[0]))
    return [*found, (found[1][0], steers[1])]


def on_hugging_face(llama: Path, files: Path, asked_for: list[tuple[list[int], Any]]) -> list[tuple[list[int], Any]]:
    """Tokens and traces of the Hugging Face host, one request at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer import steer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    steer(model, "off", tokenizer=AutoTokenizer.from_pretrained(llama))
    rows = []
    for prompt, asked in asked_for:
        by_path = asked if asked == "off" else {**asked, "rules": str(files / f"{asked.get('rules', 'main')}.yaml")}
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), steer=[by_path], **options)
        trace = model.steering.traces[0]
        rows.append((out[0, len(prompt) :].tolist(), trace["plugins"][0] if trace else None))
    return rows


@pytest.fixture(scope="module")
def wanted(llama: Path, files: Path) -> list[tuple[list[int], Any]]:
    return on_hugging_face(llama, files, requests())


def check_trace(got: Any, want: Any, prompt: list[int], tokens: int) -> int:
    """What was detected, concluded and done, and why, is what Hugging Face's trace says; the number of moments."""
    if want is None:
        assert got is None
        return 0
    (said,) = got["plugins"]
    assert (said["semantics"], said["truth"], said["broken_tokens"]) == (want["semantics"], want["truth"], 0)
    assert not said["missed_tokens"]
    seen = [moment for moment in want["moments"] if moment["position"] < len(prompt) + tokens - 1]
    for one, other in zip(said["moments"], seen, strict=True):
        levels = [moment.get("degrees", {}) for moment in (one, other)]
        assert {**one, "degrees": None} == {**other, "degrees": None}
        assert levels[0] == pytest.approx(levels[1], abs=1e-3)
    if tokens == TOKENS:
        assert said["changes"] == want["changes"]
        for one, other in zip(said["propositions"], want["propositions"], strict=True):
            assert {**one, "highest_score": None} == {**other, "highest_score": None}
            assert one["highest_score"] == pytest.approx(other["highest_score"], abs=1e-3)
    return len(seen)


def test_the_requests_show_something(llama: Path, wanted: list[tuple[list[int], Any]], oracle: Any) -> None:
    plain = [
        oracle(llama).generate(prompt, {"max_tokens": TOKENS, "temperature": 0.0}, None, "v1") for prompt, _ in requests()
    ]
    changed = sum(row != one.token_ids for (row, trace), one in zip(wanted, plain, strict=True) if trace)
    acted = {action["when"] for _, trace in wanted if trace for m in trace["moments"] for action in m["actions"]}
    assert changed >= 12
    assert {"hot", "away", "answer", "calm", "not calm", "hot and not other", "warm and brave(max)"} <= acted, acted


WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "v1": ("v1", {"enable_prefix_caching": True, "block_size": 32}, TOKENS),
    "v1-chunks": ("v1", {"max_num_batched_tokens": 16, "enable_prefix_caching": False}, TOKENS),
    "v1-async": ("v1-async", {}, TOKENS),
    "v1-dynamo": ("v1", {"enforce_eager": False, "env": {"VLLM_CPU_CI_ENV": "1"}}, TOKENS),
    "v2": ("v2", {"enable_prefix_caching": True}, 12),
    "v2-chunks": ("v2-sync", {"max_num_batched_tokens": 16}, 12),
    "v2-dynamo": ("v2", {"enforce_eager": False, "env": {"VLLM_CPU_CI_ENV": "1"}}, 12),
}
"""Ways to run a model: model runner, options, tokens."""


@pytest.mark.parametrize("way", list(WAYS))
def test_tokens(engines: Engines, llama: Path, files: Path, wanted: list[tuple[list[int], Any]], way: str) -> None:
    runner, options, tokens = WAYS[way]
    engine = engines.get(llama, runner, one_process=True, logits_processors=declared(files), **options)
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    batch = [
        {"prompt_token_ids": prompt, "params": {**params, "extra_args": {"steer": steer, "steer_trace": 1}}}
        for prompt, steer in requests()
    ]
    for _ in range(2):  # the second time, prompts could come from the prefix cache
        got, moments = engine.generate(batch), 0
        for (prompt, steer), (output,), (want, trace) in zip(requests(), got, wanted, strict=True):
            assert output["token_ids"] == want[:tokens], (prompt, steer, trace)
            moments += check_trace(output["steering"], trace, prompt, tokens)
        assert moments > 40


@pytest.mark.parametrize("way", ["v1-chunks", "v2-dynamo"])
def test_degrees_of_truth(engines: Engines, llama: Path, files: Path, way: str) -> None:
    runner, options, tokens = WAYS[way]
    option = [f"activation_reasoning:rules={files}/soft.yaml"]
    engine = engines.get(llama, runner, one_process=True, logits_processors=option, **options)
    batch = [
        {"prompt_token_ids": prompt, "params": {**options_of(tokens), "extra_args": {"steer": steer, "steer_trace": 1}}}
        for prompt, steer in soft_requests()
    ]
    wanted = on_hugging_face(llama, files, soft_requests())
    degrees = [d for _, trace in wanted if trace for m in trace["moments"] for d in m["degrees"].values()]
    assert sum(0.1 < d < 0.9 for d in degrees) > 10
    for (prompt, _), (output,), (want, trace) in zip(soft_requests(), engine.generate(batch), wanted, strict=True):
        assert output["token_ids"] == want[:tokens], (prompt, trace)
        check_trace(output["steering"], trace, prompt, tokens)
    assert wanted[1][0] != wanted[-1][0], "steering that shows"


def test_compiled_by_inductor(engines: Engines, llama: Path, files: Path, wanted: list[tuple[list[int], Any]]) -> None:
    """One small file without tables: what there is to compile grows with what is declared."""
    option = [f"activation_reasoning:rules={files}/later.yaml"]
    engine = engines.get(llama, one_process=True, enforce_eager=False, logits_processors=option)
    chosen = [i for i, (_, steer) in enumerate(requests()) if steer == "off" or steer.get("rules") == "later"]
    batch = [
        {"prompt_token_ids": requests()[i][0], "params": {**options_of(12), "extra_args": {"steer": requests()[i][1]}}}
        for i in chosen
    ]
    for i, (output,) in zip(chosen, engine.generate(batch), strict=True):
        assert output["token_ids"] == wanted[i][0][:12]


def options_of(tokens: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def test_a_prompt_in_the_cache_is_read_all_the_same(engines: Engines, llama: Path, files: Path) -> None:
    """Its propositions stand at its beginning, which nobody would see again; what it leaves there is good for others."""
    options = {"block_size": 32, "enable_prefix_caching": True, "max_logprobs": -1}
    engine = engines.get(llama, one_process=True, logits_processors=declared(files), **options)
    prompt = [CUE, *scenarios.words(random.Random(3), 100)]

    def run(steer: Any, ids: list[int] = prompt) -> tuple[int, list[int]]:
        got = engine.call("cached", prompt_token_ids=ids, **options_of(), extra_args={"steer": steer})
        return got["cached"], got["outputs"][0]["token_ids"]

    steer = {"name": "activation_reasoning", "extra_rules": ["cue -> answer"]}
    engine.call("reset_prefix_cache")
    cold, plain = run(steer)[1], run("off")
    assert plain[0] == 96, "what the steered request computed at its prompt is the model's own"
    assert cold != plain[1]
    assert run(steer) == (0, cold)
    assert run("off") == (96, plain[1])
    engine.call("reset_prefix_cache")
    later = run({"name": "activation_reasoning", "rules": "later"})
    assert run({"name": "activation_reasoning", "rules": "later"}) == (96, later[1]), "which looks at the output alone"
    turn = [*prompt, *cold, *scenarios.words(random.Random(4), 20)]
    warm = run(steer, turn)
    engine.call("reset_prefix_cache")
    assert run(steer, turn) == warm
    assert warm[0] == 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_preemption(engines: Engines, llama: Path, files: Path, wanted: list[tuple[list[int], Any]], runner: str) -> None:
    """Who is fed again from the beginning, its own blocks in the cache or not, detects and does the same."""
    small = {"max_model_len": 128, "max_num_seqs": 10, "block_size": 32, "num_gpu_blocks_override": 6}
    engine = engines.get(
        llama, runner, one_process=True, enable_prefix_caching=True, logits_processors=declared(files), **small
    )
    # One block each, and a second one for the last tokens: more than there are.
    chosen = [i for i, (prompt, _) in enumerate(requests()) if 9 <= len(prompt) < 20]
    add = [
        {"id": str(i), "prompt_token_ids": requests()[i][0],
         "params": {**options_of(TOKENS), "extra_args": {"steer": requests()[i][1]}}} for i in chosen
    ]  # fmt: skip
    played = engine.call("play", script=[{"add": add}])
    assert played["preemptions"] > 0
    for i in chosen:
        assert played["tokens"][str(i)] == wanted[i][0], requests()[i]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_mask_of_vllm_wins(engines: Engines, llama: Path, files: Path, runner: str) -> None:
    """``stop`` waits for ``min_tokens``: nothing would be left."""
    engine = engines.get(llama, runner, one_process=True, logits_processors=declared(files))
    steer = {"name": "activation_reasoning", "rules": "halt"}
    prompt = [*scenarios.words(random.Random(5), 6), CUE]
    greedy = {"temperature": 0.0, "max_tokens": 8}
    plain = engine.one(prompt, **greedy, min_tokens=8, extra_args={"steer": "off"})["token_ids"]
    assert engine.one(prompt, **greedy, extra_args={"steer": steer})["token_ids"] == [2]
    assert engine.one(prompt, **greedy, min_tokens=4, extra_args={"steer": steer})["token_ids"] == [*plain[:4], 2]


def test_what_requests_may_bring(engines: Engines, llama: Path, files: Path, wanted: list[tuple[list[int], Any]]) -> None:
    """Over HTTP, whichever of two front ends answers."""
    arguments = ["--logits-processors", *declared(files), "--api-server-count", "2"]
    server: Server = engines.start(lambda log: Server(llama, log, *arguments))

    def ask(prompt: list[int], **steer: Any) -> tuple[int, Any]:
        xargs = {"steer": "activation_reasoning", **{f"steer_{name}": value for name, value in steer.items()}}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = server.request("POST", "/v1/completions", {**body, "return_token_ids": True, "vllm_xargs": xargs})
        return status, answer["choices"][0]["token_ids"] if status == 200 else answer["error"]["message"]

    for _ in range(4):
        for index in (3, 9, 12, 15, 18, 21):
            prompt, asked = requests()[index]
            steer = {name: value for name, value in asked.items() if name != "name"}
            assert ask(prompt, **steer) == (200, wanted[index][0])
    for steer, what in (
        ({"rules": str(files / "strict.yaml")}, None),
        (
            {"rules": "stricter"},
            "one of the files that were named at start: halt, later, main, strict (did you mean 'strict'?)",
        ),
        ({"rules": "/etc/passwd"}, "one of the files"),
        ({"rules": "rules: [a]\n"}, "one of the files"),
        ({"extra_rules": ["hot -> go"] * 5}, "at most 4 of extra_rules and facts together"),
        ({"extra_rules": ["hot and unheard_of -> go"]}, "unheard_of"),
        ({"extra_rules": ["(" * 5000]}, "4096"),
        ({"extra_rules": ["not away -> go"]}, "negation through a cycle"),
        ({"facts": ["brave(tom)"]}, "subjects"),
        ({"allow_rules": 100}, "where the server is started"),
        ({"program": "abc"}, "left out"),
    ):
        status, said = ask([20, 30], **steer)
        assert status == (200 if what is None else 400), (steer, said)
        assert what is None or what in said, (steer, said)
    assert server.request("GET", "/health")[0] == 200
