"""The places in vLLM that the host hooks into, each checked against the signature it was written for.

A place that looks different is left alone, and steering is refused with that reason: never a silently unsteered answer.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_MARK = "_llm_steer_hook"


@dataclass(frozen=True)
class Hook:
    """One place: a function or method of vLLM, and the parameters that our wrapper relies on."""

    module: str
    name: str
    parameters: tuple[str, ...]
    purpose: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


CONFIG = Hook(
    "vllm.engine.arg_utils", "EngineArgs.create_model_config", ("self",), "takes our names out of --logits-processors"
)
INPUT_INIT = Hook(
    "vllm.v1.engine.input_processor", "InputProcessor.__init__", ("self", "vllm_config"), "reads the defaults at start-up"
)
INPUT = Hook(
    "vllm.v1.engine.input_processor",
    "InputProcessor.process_inputs",
    ("self", "request_id", "prompt", "params"),
    "validates and resolves each request",
)
CORE = Hook(
    "vllm.v1.engine.core",
    "EngineCore.preprocess_add_request",
    ("self", "request"),
    "turns away requests that bypass the front end",
)
OUTPUT_STATE = Hook(
    "vllm.v1.engine.output_processor",
    "RequestState.from_new_request",
    ("cls", "request", "request_index"),
    "remembers how a request steers",
)
OUTPUT = Hook(
    "vllm.v1.engine.output_processor",
    "RequestState._new_completion_output",
    ("self", "token_ids", "finish_reason", "stop_reason"),
    "attaches the trace",
)
STEP = Hook("vllm.v1.engine.llm_engine", "LLMEngine.step", ("self",), "asks the workers what closed loops did (offline)")
BEAM_OFFLINE = Hook(
    "vllm.entrypoints.generate.beam_search.offline",
    "BeamSearchOfflineMixin.beam_search",
    ("self", "prompts", "params"),
    "refuses beam search with steering",
)
BEAM_ONLINE = Hook(
    "vllm.entrypoints.generate.beam_search.online",
    "BeamSearchOnlineMixin.beam_search",
    ("self", "prompt", "request_id", "params"),
    "refuses beam search with steering",
)
MIDDLEWARE = Hook(
    "vllm.entrypoints.serve.middleware.register",
    "init_entrypoints_middleware",
    ("args", "app"),
    "adds the trace to HTTP responses",
)
_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
WORKER = Hook("vllm.v1.worker.gpu_worker", "Worker.load_model", ("self",), "puts residual hooks into the model")
STATES_V1 = Hook(_V1, "GPUModelRunner._update_states", ("self", "scheduler_output"), "sees requests end (V1 runner)")
RUNNER_V1 = Hook(_V1, "GPUModelRunner._model_forward", ("self",), "sees each forward's tokens (V1 runner)")
SAMPLER_V1 = Hook(
    "vllm.v1.sample.sampler", "Sampler.apply_logits_processors", ("self", "logits"), "sees raw logits (V1 runner)"
)
FINISH_V2 = Hook(_V2, "GPUModelRunner.finish_requests", ("self", "scheduler_output"), "sees requests end (V2 runner)")
ADD_V2 = Hook(_V2, "GPUModelRunner.add_requests", ("self", "scheduler_output"), "sees requests begin (V2 runner)")
RUNNER_V2 = Hook(_V2, "GPUModelRunner.prepare_inputs", ("self",), "sees each forward's tokens (V2 runner)")
SAMPLER_V2 = Hook(
    "vllm.v1.worker.gpu.sample.sampler",
    "Sampler.apply_sampling_params",
    ("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos"),
    "sees raw logits (V2 runner)",
)
CACHE = Hook(
    "vllm.v1.core.kv_cache_utils",
    "generate_block_hash_extra_keys",
    ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    "keeps steered keys and values apart in the prefix cache",
)

FRONT_END = (CONFIG, INPUT_INIT, INPUT, CORE, CACHE, OUTPUT_STATE, OUTPUT, STEP, BEAM_OFFLINE, BEAM_ONLINE)
"""What every engine's front end and core need; ``MIDDLEWARE`` comes on top where there is an HTTP server."""

BY_TOKENS = {"ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1"}
"""KV connectors of vLLM that look at neither its block hashes nor a request's cache salt."""

HOOKS_V1 = (STATES_V1, RUNNER_V1, SAMPLER_V1)
HOOKS_V2 = (FINISH_V2, ADD_V2, RUNNER_V2, SAMPLER_V2)


def install(hook: Hook, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace a function by ``wrap(function)``, once. Returns whether the wrapper is in place."""
    import importlib

    if (problem := check(hook)) is not None:
        logger().warning("llm_steer: %s cannot be hooked (%s); steering will be refused", hook, problem)
        return False
    owner: Any = importlib.import_module(hook.module)
    *path, name = hook.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    raw = inspect.getattr_static(owner, name)
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    function = raw.__func__ if kind else raw
    if not getattr(function, _MARK, False):
        wrapper = wrap(function)
        setattr(wrapper, _MARK, True)
        setattr(owner, name, kind(wrapper) if kind else wrapper)
    return True


def installed(hook: Hook) -> bool:
    """The wrapper is in place in this process."""
    import sys

    owner: Any = sys.modules.get(hook.module)
    for part in hook.name.split("."):
        owner = getattr(owner, part, None)
    return bool(getattr(owner, _MARK, False))


@cache
def check(hook: Hook) -> str | None:
    """Why vLLM's source does not have the place as we know it; None if it has. Reads the source, imports nothing."""
    if (source := _source(hook.module)) is None:
        return "the module does not exist in this vLLM"
    node: Any = ast.parse(source.read_text(encoding="utf-8"))
    for part in hook.name.split("."):
        node = next((n for n in getattr(node, "body", ()) if getattr(n, "name", None) == part), None)
        if node is None:
            return f"{part} does not exist in this vLLM"
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    missing = [p for p in hook.parameters if p not in names]
    return f"it takes no parameter {', '.join(missing)}" if missing else None


def _source(module: str) -> Path | None:
    """The file of a module. Unlike ``find_spec`` it runs none of the packages around it, which takes vLLM's 10 s."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for depth in range(len(inner)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join((top, *inner[: depth + 1]))
        spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def runner_hooks(vllm_config: Any) -> tuple[Hook, ...]:
    return HOOKS_V2 if vllm_config.use_v2_model_runner else HOOKS_V1


def refusals(vllm_config: Any) -> list[str]:
    """Why this engine cannot steer at all; each with what to do about it."""
    reasons = [
        f"llm_steer cannot hook into {hook}: {problem}; use a vLLM version that `llm-steer doctor` lists as supported"
        for hook in (*FRONT_END, WORKER, *runner_hooks(vllm_config))
        if (problem := check(hook)) is not None
    ]
    if vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
        reasons.append(
            "the V1 model runner drops logits processors under speculative decoding; remove --speculative-config, or use "
            "Model Runner V2"
        )
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        reasons.append("prefill context parallelism splits a request's tokens over ranks; set its size to 1")
    if vllm_config.model_config.runner_type != "generate":
        reasons.append(f"a {vllm_config.model_config.runner_type} model does not generate")
    if getattr(vllm_config.model_config, "is_diffusion", False):
        reasons.append("a diffusion model does not generate one token after the other")
    return reasons


def residual_refusals(vllm_config: Any) -> list[str]:
    """Why hidden states cannot be steered on this engine."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    reasons = []
    if parallel.use_ubatching:
        reasons.append("dual-batch overlap runs a batch in two halves; remove --enable-dbo")
    if cache.kv_sharing_fast_prefill:
        reasons.append("fast prefill feeds the upper layers fewer tokens; remove --kv-sharing-fast-prefill")
    passes = vllm_config.compilation_config.pass_config
    if parallel.tensor_parallel_size > 1 and getattr(passes, "enable_sp", False):  # gone in vLLM 0.32
        reasons.append("sequence parallelism splits hidden states over ranks; set pass_config.enable_sp to false")
    connectors = _connectors(transfer)
    if {"kv_producer", "kv_consumer"} & {role for _, role in connectors}:
        reasons.append("prefill and decode run on different engines, which do not know how the other one steers")
    if named := sorted(BY_TOKENS & {name for name, _ in connectors}):
        reasons.append(
            f"{', '.join(named)} finds keys and values by token ids alone, and would give steered ones to requests that do "
            "not steer; use a connector that goes by vLLM's block hashes or cache salts, such as OffloadingConnector"
        )
    if vllm_config.model_config.is_encoder_decoder:
        reasons.append("encoder-decoder models are not supported")
    return reasons


def _connectors(transfer: Any) -> list[tuple[str | None, str | None]]:
    """Names and roles of a KV transfer's connectors; a MultiConnector holds others."""
    if transfer is None:
        return []
    inner = transfer.kv_connector_extra_config.get("connectors", ())
    return [(transfer.kv_connector, transfer.kv_role), *((one.get("kv_connector"), one.get("kv_role")) for one in inner)]


def feedback_refusals(vllm_config: Any, layers: Collection[int]) -> list[str]:
    """Why a closed loop cannot run on this engine.

    Args:
        layers: those that it steers.
    """
    parallel = vllm_config.parallel_config
    reasons = []
    if vllm_config.speculative_config is not None:
        reasons.append("a closed loop cannot know which drafts will be accepted; remove --speculative-config")
    if parallel.enable_batch_sharded_sampling:
        reasons.append("batch-sharded sampling shows each rank only some logits; remove --enable-batch-sharded-sampling")
    if parallel.pipeline_parallel_size > 1:
        from vllm.distributed.utils import get_pp_indices

        stages = parallel.pipeline_parallel_size
        first, _ = get_pp_indices(vllm_config.model_config.get_total_num_hidden_layers(), stages - 1, stages)
        if early := sorted(layer for layer in layers if layer < first):
            reasons.append(
                f"layers {early} run on pipeline ranks that see no logits, where a closed loop would do nothing; steer "
                f"layers from {first} on, or set --pipeline-parallel-size to 1"
            )
    return reasons


def report() -> list[dict[str, Any]]:
    """Every hook with whether it would work here, and how that is known (for ``llm-steer doctor``)."""
    rows = []
    for hook in (*FRONT_END, MIDDLEWARE, WORKER, *HOOKS_V1, *HOOKS_V2):
        problem = check(hook)
        how = f"signature read from source: {', '.join(hook.parameters)}" if problem is None else problem
        rows.append({"hook": str(hook), "purpose": hook.purpose, "active": problem is None, "how": how})
    return rows


def logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.llm_steer")
