"""What else a request or an engine may have while hidden states are steered: it works as on Hugging Face, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import residual
from e2e.conftest import Engines
from e2e.engine_client import ENGINE_ARGS, SLEEPER, EngineError
from e2e.test_residual_methods import TOKENS, Told, ask, check_loop, declared, requests, shelf, talkative, wanted

__all__ = ["shelf", "talkative", "wanted"]  # fixtures

GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(talkative: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of rank 4 that changes what the model says."""
    from safetensors.torch import load_file, save_file

    weights = load_file(talkative / "model.safetensors")
    dice = torch.Generator().manual_seed(0)
    tensors = {}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        for layer in range(2):
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            down, up = torch.randn(4, weight.shape[1], generator=dice), torch.randn(weight.shape[0], 4, generator=dice)
            down *= 0.3 * weight.norm() / (up @ down).norm()
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    folder = tmp_path_factory.mktemp("adapter")
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM"}))
    return folder


def hugging_face(talkative: Path, adapter: Path | None = None) -> Any:
    """The model, the adapter added to its weights, ready to be steered."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer import steer

    model = AutoModelForCausalLM.from_pretrained(talkative, dtype=torch.float32).eval()
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for key in [key for key in tensors if key.endswith("lora_A.weight")]:
            update = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            model.get_submodule(module).weight.data += update
    steer(model, "off", tokenizer=AutoTokenizer.from_pretrained(talkative))
    return model


def test_adapters_prompt_logprobs_and_several_outputs(
    engines: Engines, talkative: Path, shelf: Path, wanted: list[Told], adapter: Path
) -> None:
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    # Two places for one adapter: on CPUs vLLM gives requests without one what lies in the last place.
    options = {"logits_processors": declared(shelf), "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = engines.get(talkative, "v1", one_process=True, env=env, **options)
    asked = requests(shelf)
    batch: list[dict[str, Any]] = []
    for prompt, steer in asked:
        plain = {"prompt_token_ids": prompt, "params": {**GREEDY, "extra_args": {"steer": steer}}}
        batch += [plain, {**plain, "lora": str(adapter)}]
    got = engine.generate(batch)
    model = hugging_face(talkative, adapter)
    changed = 0
    for (prompt, steer), (base, trace), (alone,), (adapted,) in zip(asked, wanted, got[::2], got[1::2], strict=True):
        assert alone["token_ids"] == base
        assert check_loop(alone["steering"], trace, TOKENS) == (trace is not None and "rebalance" in str(steer))
        paths = json.loads(json.dumps(steer).replace('"artifact": "', f'"artifact": "{shelf}/'))
        ids = torch.tensor([prompt])
        rest = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), steer=[paths], **rest)
        assert adapted["token_ids"] == out[0, len(prompt) :].tolist(), steer
        check_loop(adapted["steering"], model.steering.traces[0], TOKENS)
        changed += adapted["token_ids"] != base
    assert changed > len(asked) / 2, "the adapter shows"

    # Prompt log-probabilities are those of the steered prompt.
    prompt, _ = asked[4]
    for coefficient in (0.0, -2.0):
        steer = {"name": "constant_vector", "artifact": "bold", "coefficient": coefficient, "positions": "all"}
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "extra_args": {"steer": steer}}
        ((output,),) = engine.generate([{"prompt_token_ids": prompt, "params": params}])
        assert output["prompt_logprobs"] == pytest.approx(steered_logprobs(talkative, shelf, prompt, coefficient), abs=2e-3)

    # Each of several outputs of a closed loop has a state, and a trace, of its own.
    prompt, steer = asked[12]
    likeliest = {"temperature": 1.0, "top_k": 1}  # as good as greedy, which takes no n
    params = {**GREEDY, **likeliest, "n": 3, "extra_args": {"steer": steer}}
    (outputs,) = engine.generate([{"prompt_token_ids": prompt, "params": params}])
    for output in outputs:
        assert output["token_ids"] == wanted[12][0]
        assert check_loop(output["steering"], wanted[12][1], TOKENS)


@pytest.fixture(scope="module")
def quantised(talkative: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model with weights of 8 bits (compressed-tensors), and the same weights in full."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights, packed, full = load_file(talkative / "model.safetensors"), {}, {}
    for name, weight in weights.items():
        packed[name] = full[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            packed[name] = (weight / scale).round().to(torch.int8)
            packed[f"{name}_scale"] = scale
            full[name] = packed[name].float() * scale
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    about = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config = json.loads((talkative / "config.json").read_text())
    folders = []
    for name, tensors, more in (
        ("packed", packed, {"quantization_config": {**about, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}}),
        ("full", full, {}),
    ):
        folder = tmp_path_factory.mktemp(name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        AutoTokenizer.from_pretrained(talkative).save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


def test_quantised_weights(engines: Engines, shelf: Path, quantised: tuple[Path, Path]) -> None:
    """The steered stream is that of the model in full, as far as numbers of 8 bits go; a loop tells what it measured."""
    packed, full = quantised
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    engine = engines.get(packed, "v1", one_process=True, env=env, logits_processors=declared(shelf))
    prompt, _ = requests(shelf)[4]
    expected, found = [], []
    for coefficient in (0.0, -2.0):
        steer = {"name": "constant_vector", "artifact": "bold", "coefficient": coefficient, "positions": "all"}
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "extra_args": {"steer": steer}}
        ((output,),) = engine.generate([{"prompt_token_ids": prompt, "params": params}])
        found.append(torch.tensor(output["prompt_logprobs"]))
        expected.append(torch.tensor(steered_logprobs(full, shelf, prompt, coefficient)))
    moved = (expected[1] - expected[0]).abs().mean()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().mean() < 0.1 * moved
    prompt, steer = requests(shelf)[12]
    output = engine.one(prompt, **GREEDY, extra_args={"steer": steer})
    (loop,) = output["steering"]["plugins"]
    assert loop["steered_steps"] > 0


def steered_logprobs(talkative: Path, shelf: Path, prompt: list[int], coefficient: float) -> list[float]:
    """Of the prompt's tokens, by a plain hook."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(talkative, dtype=torch.float32).eval()
    vector = load_file(shelf / "bold" / "vectors.safetensors")["vector"] * coefficient
    model.model.layers[0].register_forward_hook(
        lambda _module, _inputs, out: (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector
    )
    with torch.no_grad():
        found = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(found[at, token]) for at, token in enumerate(prompt[1:])]


def test_a_deep_sleep(engines: Engines, talkative: Path, shelf: Path, wanted: list[Told]) -> None:
    """Level 2 gives the memory of the weights away, and ``reload_weights`` brings them back; vectors, buffers and the states
    of slots lie elsewhere, and are as they were."""
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    options = {"logits_processors": declared(shelf), "enable_sleep_mode": True}
    engine = engines.get(talkative, SLEEPER, one_process=True, env=env, **options)
    expected = [tokens for tokens, _ in wanted]
    assert [output["token_ids"] for output in ask(engine, shelf)] == expected
    engine.call("sleep")
    lost = [output["token_ids"] for output in ask(engine, shelf, tokens=4)]
    assert sum(a != b[:4] for a, b in zip(lost, expected, strict=True)) > len(lost) / 2, "there was nothing to reload"
    engine.call("reload_weights")
    got = ask(engine, shelf)
    assert [output["token_ids"] for output in got] == expected
    assert sum(check_loop(o["steering"], trace, TOKENS) for o, (_, trace) in zip(got, wanted, strict=True)) == 6


def test_what_engines_do_not_start_with(engines: Engines, llama: Path, tmp_path: Path) -> None:
    toys = {"PYTHONPATH": str(residual.install(tmp_path))}
    engine = engines.get(llama, one_process=True, env=toys)
    push, loop = ['push:{"layers": [1]}'], ["thermostat:gain=3"]
    several = {"distributed_executor_backend": "mp"}
    transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_sharing_fast_prefill": True, "logits_processors": push}, "--kv-sharing-fast-prefill"),
        ({"kv_transfer_config": {**transfer, "kv_role": "kv_producer"}, "logits_processors": push}, "different engines"),
        ({"kv_transfer_config": {**transfer, "kv_role": "kv_consumer"}, "logits_processors": loop}, "different engines"),
        ({"kv_transfer_config": {**transfer, "kv_role": "kv_both"}, "logits_processors": push}, "ExampleConnector"),
        ({"ubatch_size": 2, "all2all_backend": "deepep_low_latency", "logits_processors": push}, "dual-batch overlap"),
        ({"pipeline_parallel_size": 2, **several, "logits_processors": loop}, "layers [0] run on pipeline ranks"),
    ]
    common = {"model": str(llama), **ENGINE_ARGS, "distributed_executor_backend": "uni"}
    reasons = engine.call("starts", cases=[case for case, _ in cases], **common)
    for reason, (case, words) in zip(reasons, cases, strict=True):
        assert words in reason, (case, reason)

    # Caches of compiled models tell apart what is built into the model, and nothing else.
    others = [[], push, push, ['push:{"layers": [0]}'], ["thermostat:gain=3,layer=1"], ["reflection_cycle"]]
    told = engine.call(
        "compiled", cases=[{"logits_processors": named} for named in others], **{**common, "enforce_eager": False}
    )
    assert len({tuple(modes) for _, *modes in told}) == 1
    none, one, again, other, third, logits = (name for name, *_ in told)
    assert one == again
    assert none == logits
    assert len({none, one, other, third}) == 4


def test_prompts_that_come_in_parts(engines: Engines, llama: Path) -> None:
    engine = engines.get(llama, one_process=True, logits_processors=["reflection_cycle"])
    with pytest.raises(EngineError, match="streaming input"):
        engine.call("stream_input", prompt_token_ids=[20, 30], **GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 3, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}, id="three-workers"),
        pytest.param({"enforce_eager": False}, id="inductor"),
    ],
)
def test_smollm2(engines: Engines, smollm2: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Open and closed loops, and nobody, in one batch; three workers, since two could not share nine heads."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from llm_steer import steer
    from llm_steer.artifact import Artifact, Description, ModelIdentity

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    identity = ModelIdentity.of(AutoConfig.from_pretrained(smollm2), dtype=torch.float32, tokenizer=tokenizer)
    vector = torch.randn(identity.hidden_size, generator=torch.Generator().manual_seed(0))
    for name, method in (("vector", "constant_vector"), ("loop", "rebalance")):
        about = Description(
            method=method,
            model=identity,
            layer=15,
            site="after",
            positions="delimiter",
            sign="towards_overthinking",
            constants={"q25c": 0.5, "q75c": 0.8, "q25v": 1e-3, "q75v": 1e-2, "low": -1.0, "floor": -2.0, "ceiling": 0.5}
            if method == "rebalance"
            else {},
        )
        Artifact(about, {"vector": 60 * vector / vector.norm()}).save(tmp_path / name)
    texts = ["First, we add the two numbers.\n\nThen", "The capital of France is", "1. Boil water.\n\n2. Add salt.\n\n3."]
    steers: list[Any] = [
        "off",
        {"name": "constant_vector", "artifact": "vector", "coefficient": 1.0},
        {"name": "rebalance", "artifact": "loop"},
    ]
    asked = [(tokenizer(text)["input_ids"], one) for text in texts for one in steers]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    steer(model, "off", tokenizer=tokenizer)
    expected = []
    for prompt, one in asked:
        own = {**one, "artifact": str(tmp_path / one["artifact"])} if isinstance(one, dict) else one
        ids = torch.tensor([prompt])
        rest = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), steer=[own], **rest)
        expected.append((out[0, len(prompt) :].tolist(), model.steering.traces[0]))
    del model
    named = [f"constant_vector:artifact={tmp_path / 'vector'}", f"rebalance:artifact={tmp_path / 'loop'}"]
    env = {"LLM_STEER_ARTIFACTS": str(tmp_path), **options.get("env", {})}
    engine = engines.get(smollm2, **{**options, "env": env}, logits_processors=named)
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    batch = [{"prompt_token_ids": ids, "params": {**params, "extra_args": {"steer": one}}} for ids, one in asked]
    for (_, one), (output,), (tokens, trace) in zip(asked, engine.generate(batch), expected, strict=True):
        assert output["token_ids"] == tokens, one
        check_loop(output["steering"], trace, 16)
    assert expected[0][0] != expected[1][0]
