"""The logits processor: one class for both of vLLM's interfaces, loaded through the entry point ``vllm.logits_processors``.

vLLM's V1 sampler names rows by their index in a batch whose rows move; Model Runner V2 names stable request slots. Both
are adapted here to one :class:`~llm_steer.runtime.Runtime`, which works on slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2
except ImportError:  # vLLM before 0.31 has the V1 interface only

    class LogitsProcessorV2:  # type: ignore[no-redef]
        """Stands in for the missing base."""


from llm_steer import spec
from llm_steer.hosts.vllm import admission, compat, runner
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime
from llm_steer.slots import copy_async


class SteerLogitsProcessor(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]  # vLLM is not type-checked
    """Carries the plugins' ``logits`` hook into vLLM's sampler; does nothing while no request steers.

    Constructed by vLLM in each worker: ``(vllm_config, device, is_pin_memory)`` on V1, ``(vllm_config, req_states)`` on V2.
    """

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        self._config = vllm_config
        self._runtime: Runtime | None = None
        if len(rest) == 1:
            self._request_states = rest[0]
            self._device = rest[0].device
            self._slots = rest[0].max_num_reqs
            self._pending: dict[int, dict[str, Any]] = {}
            self._rows = None
            compat.install(compat.RUNNER_V2, runner.around_prepare_inputs)
        else:
            self._device = rest[0]
            self._slots = vllm_config.scheduler_config.max_num_seqs
            self._rows = _Rows(self._slots, self._device)
            compat.install(compat.RUNNER_V1, runner.around_model_forward)
        # Slot of each request that was fed last, and position of its last token (for V1; V2 says it itself).
        self._fed: tuple[torch.Tensor, torch.Tensor] | None = None

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
        rows = self._rows
        assert rows is not None
        # vLLM's order is removed, added, moved; an added request may replace a live row without a removal.
        for row in batch_update.removed:
            self._leave(rows.drop(row))
        for row, params, prompt_ids, output_ids in batch_update.added:
            self._leave(rows.drop(row))
            stamp = admission.read_stamp(params)
            if stamp and stamp["plugins"]:
                slot = rows.take(row)
                known = len(output_ids)
                while known and output_ids[known - 1] < 0:  # placeholders of async scheduling; fed with real ids later
                    known -= 1
                self._admit(slot, stamp, self._ids(prompt_ids or ()), self._ids(output_ids[:known]))
        for first, second, direction in batch_update.moved:
            if direction == MoveDirectionality.SWAP:
                rows.swap(first, second)
            else:
                self._leave(rows.move(first, second))
        rows.flush()

    # -- V2 ---------------------------------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._leave(req_idx)
        self._pending.pop(req_idx, None)
        stamp = admission.read_stamp(sampling_params)
        if not stamp or not stamp["plugins"]:
            return False
        self._pending[req_idx] = stamp
        return True

    def apply_staged_writes(self) -> None:
        # The requests' token ids are on the device only now. This runs before the forward pass.
        states = self._request_states
        for slot, stamp in self._pending.items():
            ids = states.all_token_ids.gpu[slot, : int(states.prefill_len.np[slot])].to(torch.int64)
            prompt_len = int(states.prompt_len.np[slot])
            self._admit(slot, stamp, ids[:prompt_len], ids[prompt_len:])
        self._pending.clear()

    # -- both -------------------------------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        if self._runtime is None or not self._runtime.steering:
            return logits
        if ctx is not None:
            self._runtime.logits(logits, ctx.expanded_idx_mapping.to(torch.int64), ctx.pos.to(torch.int64))
            return logits
        assert self._fed is not None
        self._runtime.logits(logits, *self._fed)
        return logits

    def step(self, ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor | None) -> None:
        """Before a forward pass.

        Args:
            ids, positions: ``[num_tokens]``, on the device, real ids.
            starts: ``[num_requests + 1]``, where each request's tokens begin.
            slots: ``[num_requests]``; None on V1, where the rows say it.
        """
        assert self._runtime is not None
        positions = positions.to(torch.int64)
        count = len(starts) - 1
        if slots is None:
            assert self._rows is not None
            slots = self._rows.slots[:count]
        else:
            slots = slots.to(torch.int64)
        single = len(ids) == count  # plain decoding: one token of each request
        if single:
            self._fed = (slots, positions)
        else:
            ends = starts[1:].to(torch.int64)
            self._fed = (slots, positions[ends - 1])
            # searchsorted rather than repeat_interleave, which would wait for the device to know the result's size.
            request = torch.searchsorted(ends, torch.arange(len(ids), device=ids.device), right=True)
            slots = slots[request.clamp(max=count - 1)]
        self._runtime.forward(ids.to(torch.int64), slots, positions, single=single)

    def steers(self, slots: Sequence[int] | None = None) -> bool:
        """Some request steers; with ``slots``, one of these."""
        if self._runtime is None or not self._runtime.steering:
            return False
        return slots is None or self._runtime.steers_any(slots)

    def _admit(self, slot: int, stamp: dict[str, Any], prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        if self._runtime is None:
            context = Context(self._slots + 1, self._device, self._config.model_config.get_vocab_size())
            self._runtime = Runtime(context, admission.markers_of(stamp))
        self._runtime.admit(slot, spec.from_wire(stamp["plugins"]), prompt_ids, output_ids)

    def _leave(self, slot: int | None) -> None:
        if self._runtime is not None and slot is not None:
            self._runtime.release(slot)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device, non_blocking=True)


class _Rows:
    """V1: which slot each row of the batch has. Rows move, slots do not."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._nobody = count
        self._free = list(range(count))
        self._host = torch.full((count,), count, dtype=torch.int64)
        self.slots = self._host.to(device, copy=True)
        """int64 ``[max_num_seqs]`` on the device; nobody's slot for rows that do not steer."""
        self._dirty = False

    def take(self, row: int) -> int:
        slot = self._free.pop()
        self._set(row, slot)
        return slot

    def drop(self, row: int) -> int | None:
        """Free the row's slot; returns it."""
        slot = int(self._host[row])
        if slot == self._nobody:
            return None
        self._free.append(slot)
        self._set(row, self._nobody)
        return slot

    def swap(self, first: int, second: int) -> None:
        a, b = int(self._host[first]), int(self._host[second])
        self._set(first, b)
        self._set(second, a)

    def move(self, source: int, target: int) -> int | None:
        """The source's request takes the target row; returns the slot of the request that it replaces."""
        replaced = self.drop(target)
        self._set(target, int(self._host[source]))
        self._set(source, self._nobody)
        return replaced

    def flush(self) -> None:
        if self._dirty:
            copy_async(self._host, self.slots)
            self._dirty = False

    def _set(self, row: int, slot: int) -> None:
        if int(self._host[row]) != slot:
            self._host[row] = slot
            self._dirty = True
