"""Engine core: which request is which, and which keys and values it may share.

The prefix cache names a block by its tokens and by the blocks before it. A block that steering touches first gets one more
key, of what steers; the later ones follow from it, and those before it are shared with everybody.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

from llm_steer import spec
from llm_steer.hosts.vllm import admission, compat

KEYS = "keys"
"""Of the stamp: pairs of a position and what steers from there on, as a hash."""


def identify(request: Any, vllm_config: Any) -> None:
    """Write into a request's stamp what only the engine core knows: its id, of its own for each of ``n`` outputs.

    Args:
        request: vLLM's ``EngineCoreRequest``. Its sampling parameters may be shared with others, and are replaced.
    """
    params = request.sampling_params
    stamp = admission.read_stamp(params)
    if stamp is None or not stamp["plugins"]:
        return
    asked = spec.from_wire(stamp["plugins"])
    keys = cache_keys(asked, stamp["plugins"], _length(request), request.request_id)
    stamp = {**stamp, "id": request.request_id, KEYS: keys}
    request.sampling_params = admission.with_arguments(params, {**params.extra_args, admission.STAMP: stamp})
    if any(steer.plugin.reads_prompt(steer.params) for steer in asked):
        # Also when it comes back from a preemption: its own blocks hold no propositions.
        request.sampling_params.skip_reading_prefix_cache = True
    if keys and vllm_config.kv_transfer_config is not None:
        # Connectors may hash tokens themselves; the salt is all that they look at.
        request.cache_salt = _digest([request.cache_salt, keys])


def cache_keys(asked: spec.Spec, wire: Any, prompt_len: int, request_id: str) -> list[list[Any]]:
    """``[position, hash]`` of each plugin that changes keys and values.

    Args:
        wire: the same as ``asked``, in JSON types.
        request_id: what a closed loop does depends on what it saw: nobody shares it.
    """
    keys = []
    for steer, content in zip(asked, wire, strict=True):
        if not steer.plugin.steers_hidden_states():
            continue
        first = steer.plugin.first_steered(steer.params, prompt_len)
        if first is not None:
            keys.append([max(first, 0), _digest([content, request_id if steer.plugin.feedback else None])])
    return keys


def _length(request: Any) -> int:
    return len(request.prompt_token_ids) if request.prompt_token_ids is not None else len(request.prompt_embeds)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def install() -> None:
    """Wrap the function that makes a block's keys, wherever it was imported by name."""
    name = compat.CACHE.name
    module: Any = sys.modules.get(compat.CACHE.module)
    original = getattr(module, name, None)
    if not compat.install(compat.CACHE, _around_extra_keys):
        return
    wrapper = getattr(sys.modules[compat.CACHE.module], name)
    for other in list(sys.modules.values()):
        if original is not None and original is not wrapper and vars(other).get(name) is original:
            setattr(other, name, wrapper)


def _around_extra_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        stamp = admission.read_stamp(request.sampling_params)
        if stamp is None:
            return keys, next_mm_idx
        ours = [("llm_steer", key) for first, key in stamp.get(KEYS, ()) if start_token_idx <= first < end_token_idx]
        return (*(keys or ()), *ours) or None, next_mm_idx

    return generate_block_hash_extra_keys
