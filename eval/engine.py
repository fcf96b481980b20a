"""From a configuration to an engine."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any

from llm_steer.eval.config import RunConfig
from llm_steer.eval.methods import Method

from llm_steer.engines.base import Engine
from llm_steer.engines.http import UNSTEERED
from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError


def open_engine(config: RunConfig, methods: list[Method]) -> tuple[Engine, Any]:
    """The engine that a run asks for, and its tokenizer (None for servers).

    Raises:
        SteerError: a model or a server that is not there.
        MissingDependencyError: vLLM is not installed.
    """
    kind = config.engine
    if kind == "auto":
        kind = "url" if config.urls else "vllm" if _has_gpu() and find_spec("vllm") else "hf"
    if (kind == "url") != bool(config.urls):
        raise SteerError("--url", config.urls, "given for --engine url, and for no other")
    if kind == "url":
        return _servers(config, methods), None
    return _vllm(config, methods) if kind == "vllm" else _hf(config)


def _servers(config: RunConfig, methods: list[Method]) -> Engine:
    key = os.environ.get(config.key_env)
    engine = Engine.from_url(
        config.urls, config.model or None, api_key=key, parallel=config.parallel, timeout=config.timeout
    )
    try:
        identity = engine.identity()
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}. Nothing was lost: the same command goes on when a server is there") from error
    if "steering" not in identity and (steered := [m.label for m in methods if m.spec]):
        raise UnsupportedError(f"--steer {', '.join(steered)}: {UNSTEERED}")
    return engine


def _hf(config: RunConfig) -> tuple[Engine, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from llm_steer.cli.common import find_model, load_tokenizer, loading, quiet_transformers

    source, label = find_model(config.model, "MODEL")
    quiet_transformers()
    tokenizer = load_tokenizer(source, label, "MODEL")
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype, None)
    if dtype is None:
        raise SteerError("--dtype", config.dtype, "auto, float32, bfloat16 or float16")
    device = config.device
    if device == "auto":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SteerError("device", device, f"a device of this machine ({str(error).splitlines()[0]})") from error
    with loading(label, "MODEL"):
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **config.engine_args)
        except TypeError as error:  # what the model's class makes of an unknown name
            if unknown := [name for name in config.engine_args if f"'{name}'" in str(error)]:
                raise SteerError(
                    f"engine_args.{unknown[0]}", config.engine_args[unknown[0]], f"left out ({error})"
                ) from error
            raise
        model = model.to(device).eval()
    return Engine.from_hf(model, tokenizer, batch_size=config.batch_size), tokenizer


def _vllm(config: RunConfig, methods: list[Method]) -> tuple[Engine, Any]:
    if find_spec("vllm") is None:
        raise MissingDependencyError("vllm", "vllm", "--engine vllm")
    from llm_steer.cli.common import find_model, loading

    source, label = find_model(config.model, "MODEL")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the report
    from vllm import LLM
    from vllm.platforms import current_platform

    # A seeded request whose prompt is cut into chunks ends vLLM's CPU worker ("CPU Generator does not use offset").
    whole_prompts = {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}
    arguments: dict[str, Any] = {"seed": 0, "dtype": config.dtype, **whole_prompts, **config.engine_args}
    with loading(label, "MODEL"):
        llm = LLM(source, **declared(methods), **arguments)
    return Engine.from_vllm(llm), llm.get_tokenizer()


def declared(methods: list[Method]) -> dict[str, Any]:
    """What vLLM has to be told at its start: plugins that change hidden states, which are built into its graph, and those
    that read step boundaries, which takes a table."""
    needed = {
        s.name: s.params
        for m in methods
        for s in reversed(m.spec)
        if s.plugin.steers_hidden_states() or s.plugin.needs_boundaries
    }
    named = [f"{name}:{json.dumps(p.model_dump(mode='json', exclude_unset=True))}" for name, p in needed.items()]
    return {"logits_processors": named} if named else {}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
