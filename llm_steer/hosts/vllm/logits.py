"""The logits processor: one class for both of vLLM's interfaces, loaded through the entry point ``vllm.logits_processors``.

vLLM's V1 sampler names rows by their index in a batch whose rows move, and tells a logits processor how; Model Runner V2
names stable request indices. What is done is in :mod:`llm_steer.hosts.vllm.worker`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2
except ImportError:  # vLLM before 0.31 has the V1 interface only

    class LogitsProcessorV2:  # type: ignore[no-redef]
        """Stands in for the missing base."""


from llm_steer import registry
from llm_steer.hosts.vllm import admission, compat
from llm_steer.plugin import Plugin


class SteerLogitsProcessor(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]  # vLLM is not type-checked
    """Carries the plugins' ``logits`` hook into vLLM's sampler; does nothing while no request steers.

    Constructed by vLLM in each worker: ``(vllm_config, device, is_pin_memory)`` on V1, ``(vllm_config, req_states)`` on V2.
    """

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        self.steering: Any = None
        """The worker's :class:`~llm_steer.hosts.vllm.worker.WorkerSteering`, once its model is loaded."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Front end: nothing may get this far unstamped. What a request asks for was validated before."""
        keys = admission.unstamped_keys(sampling_params)
        if admission.read_stamp(sampling_params) is not None and not compat.installed(compat.INPUT):
            keys.append(admission.STAMP)
        if keys:
            raise ValueError(
                f"{', '.join(keys)}: steering is not active in this process, so the request would be answered unsteered; "
                "let vLLM load the general plugin llm_steer (VLLM_PLUGINS must name it, or be unset)"
            )

    # -- V1 ---------------------------------------------------------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        # False: applied before penalties and temperature, and to greedy requests too.
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        if self.steering is None:
            for _, params, _, _ in batch_update.added:
                self._check_attached(params)
            return
        # vLLM's order is removed, added, moved; an added request may replace a live row without a removal.
        for row in batch_update.removed:
            self.steering.leave(row)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self.steering.enter(row, admission.read_stamp(params), prompt_ids or (), output_ids)
        for first, second, direction in batch_update.moved:
            if direction == MoveDirectionality.SWAP:
                self.steering.swap(first, second)
            else:
                self.steering.move(first, second)

    # -- V2 ---------------------------------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether the request's logits must come here: those that read raw logits get them before."""
        if self.steering is None:
            self._check_attached(sampling_params)
        stamp = admission.read_stamp(sampling_params)
        plugins = [registry.get(name) for name, _ in stamp["plugins"]] if stamp else []
        return any(plugin.logits is not Plugin.logits and not plugin.sees_raw_logits() for plugin in plugins)

    def apply_staged_writes(self) -> None:
        pass

    # -- both -------------------------------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        steering = self.steering
        if steering is None or not steering.steers(None if ctx is None else ctx.idx_mapping_np):
            return logits
        if ctx is None:
            steering.logits(logits, raw=False)
        else:
            steering.logits(logits, ctx.expanded_idx_mapping, ctx.pos, raw=False)
        return logits

    def _check_attached(self, params: Any) -> None:
        if (admission.read_stamp(params) or {}).get("plugins"):
            raise RuntimeError("llm_steer: a request steers, and this worker was started without the hooks that steer it")
