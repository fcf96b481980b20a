"""Worker: the steered requests of one model runner, V1 or V2, and the one runtime that layers and sampler share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from llm_steer import spec
from llm_steer.errors import UnsupportedError
from llm_steer.hosts.vllm import admission, compat, declared, layers, runner
from llm_steer.markers import Markers
from llm_steer.plugin import Plugin
from llm_steer.runtime import Runtime
from llm_steer.slots import copy_async

PADDING = 1024
"""Tokens by which a batch may be padded."""


class WorkerSteering:
    """Knows the slot of each steered request, from admission to finish, and which row of vLLM's batch it has just now.

    A row is an index into the batch on the V1 runner, where rows move, and a request's index on Model Runner V2. A request
    that is preempted leaves its row and keeps its slot.

    Args:
        vllm_config: of the worker.
        device: of the model.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self._declared = declared.read(vllm_config.model_config)
        rows = vllm_config.scheduler_config.max_num_seqs
        # As many requests may be preempted at once as run.
        self._nobody = 2 * rows
        self._slots: dict[str, int] = {}
        # Requests that measure logits; those that run a closed loop; and of these the ones that have ended, whose slots
        # wait to be asked what they did.
        self._measuring: set[str] = set()
        self._loops: set[str] = set()
        self._ended: dict[str, int] = {}
        self._free = list(range(self._nobody))[::-1]
        self._rows = RowTable(rows, self._nobody, device)
        self._runtime: Runtime | None = None
        self._buffer: layers.TokenBuffer | None = None
        # Slot of each request that was fed last, and position of its last token.
        self._fed: tuple[torch.Tensor, torch.Tensor] | None = None

    def instrument(self, model: torch.nn.Module) -> None:
        """Put the declared plugins into the model, before it is run, compiled or captured."""
        if not self._declared.residual:
            return
        runtime = self._build(Markers())
        for steer in self._declared.residual:
            runtime.plugin(steer.plugin)
        count = runtime.context.num_layers
        found = layers.find_layers(model, count)
        if outside := [index for index in runtime.layers if not 0 <= index < count]:
            raise UnsupportedError(f"layer {outside[0]} is to be steered, but the model has layers 0 to {count - 1}")
        tokens = self._config.scheduler_config.max_num_batched_tokens + PADDING
        self._buffer = layers.TokenBuffer(tokens, self._nobody, self._device)
        for index in runtime.layers:
            if not layers.is_elsewhere(found[index]):
                layers.steer_behind(found[index], index, runtime.behind(index), self._buffer)

    @property
    def plugins(self) -> list[Plugin[Any]]:
        return self._runtime.plugins if self._runtime is not None else []

    # -- requests ---------------------------------------------------------------------------------------------------------

    def enter(self, row: int, stamp: dict[str, Any] | None, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """A request takes a row: a new one, or one that was preempted.

        Args:
            stamp: None, or one without plugins, for a request that does not steer.
            output_ids: what it has generated; a negative id is not known yet, and will be fed as a real one.
        """
        if not stamp or not stamp["plugins"]:
            self._rows.set(row, self._nobody)
            return
        known = len(output_ids)
        while known and output_ids[known - 1] < 0:
            known -= 1
        prompt, output = self._ids(prompt_ids), self._ids(output_ids[:known])
        runtime = self._runtime or self._build(admission.markers_of(stamp) if self._declared.markers is None else Markers())
        slot = self._slots.get(stamp["id"])
        if slot is not None:
            runtime.resume(slot, prompt, output)
        else:
            asked = spec.from_wire(stamp["plugins"])
            slot = self._slots[stamp["id"]] = self._room()
            runtime.admit(slot, asked, prompt, output)
            if any(steer.plugin.sees_raw_logits() for steer in asked):
                self._measuring.add(stamp["id"])
            if any(steer.plugin.feedback for steer in asked):
                self._loops.add(stamp["id"])
        self._rows.set(row, slot)

    def leave(self, row: int) -> None:
        """The row's request has left the batch, finished or not."""
        self._rows.set(row, self._nobody)

    def swap(self, first: int, second: int) -> None:
        self._rows.swap(first, second)

    def move(self, source: int, target: int) -> None:
        """The source's request takes the target row."""
        self._rows.swap(source, target)
        self._rows.set(source, self._nobody)

    def finish(self, request_ids: Iterable[str]) -> None:
        """The requests have ended: their slots are free, those of closed loops as soon as another request needs them."""
        for request_id in request_ids:
            if (slot := self._slots.pop(request_id, None)) is None:
                continue
            self._measuring.discard(request_id)
            if request_id in self._loops:
                self._loops.discard(request_id)
                self._ended[request_id] = slot
            else:
                self._release(slot)

    def forget(self) -> None:
        """Let go of what closed loops that have ended still hold."""
        while self._ended:
            self._release(self._ended.pop(next(iter(self._ended))))

    def traces(self, asked: Iterable[tuple[str, Sequence[int]]]) -> list[dict[str, Any] | None]:
        """What was done to requests whose output is complete, once each: :meth:`Runtime.trace`, None where it is not known
        (any more). The worker may not have been told that they ended.

        Args:
            asked: ids of requests, and everything that they generated.
        """
        found: list[dict[str, Any] | None] = []
        for request_id, output_ids in asked:
            slot = self._slots.get(request_id, self._ended.get(request_id))
            if slot is None or self._runtime is None:
                found.append(None)
                continue
            found.append(self._runtime.trace(slot, self._ids(output_ids)))
            if self._ended.pop(request_id, None) is not None:
                self._release(slot)
        return found

    # -- one forward pass -------------------------------------------------------------------------------------------------

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Before a forward pass with requests that steer.

        Args:
            ids, positions: ``[num_tokens]``, on the device, real ids.
            starts: ``[num_requests + 1]``, where each request's tokens begin.
            rows: ``[num_requests]``, their rows; None if they are the first ones in order.
        """
        assert self._runtime is not None
        positions = positions.to(torch.int64)
        count = len(starts) - 1
        slots = self._rows.slots()
        slots = slots[:count] if rows is None else slots[rows]
        single = len(ids) == count  # plain decoding: one token of each request
        if single:
            self._fed = (slots, positions)
        else:
            ends = starts[1:].to(torch.int64)
            self._fed = (slots, positions[ends - 1])
            # searchsorted rather than repeat_interleave, which would wait for the device to know the result's size.
            request = torch.searchsorted(ends, torch.arange(len(ids), device=ids.device), right=True)
            slots = slots[request.clamp(max=count - 1)]
        tokens = self._runtime.forward(ids.to(torch.int64), slots, positions, single=single)
        if self._buffer is not None:
            self._buffer.fill(tokens)

    def rest(self) -> None:
        """Before a forward pass in which nothing steers."""
        if self._buffer is not None:
            self._buffer.clear()

    def steers(self, rows: Sequence[int] | None = None) -> bool:
        """Some request in the batch steers; with ``rows``, one of these."""
        return self._runtime is not None and self._runtime.steering and self._rows.any(rows)

    def logits(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        raw: bool,
    ) -> None:
        """After a forward pass: let plugins change the logits, in place.

        Args:
            logits: float32 ``[num_rows, vocab_size]``.
            rows, positions: ``[num_rows]``, whose each row is and where the token stands that was fed; None: as in ``step``.
            raw: see :meth:`Runtime.logits`.
        """
        assert self._runtime is not None
        if rows is None or positions is None:
            assert self._fed is not None
            slots, positions = self._fed
        else:
            slots, positions = self._rows.slots()[rows], positions.to(torch.int64)
        self._runtime.logits(logits, slots, positions, raw=raw)

    @property
    def measures(self) -> bool:
        """A plugin in use reads the logits as the model made them."""
        return bool(self._measuring)

    # ------------------------------------------------------------------------------------------------------------------

    def _build(self, markers: Markers) -> Runtime:
        """
        Args:
            markers: where the engine was not told any.
        """
        context = admission.worker_context(self._config.model_config, self._nobody + 1, self._device, self._declared)
        self._runtime = Runtime(context, self._declared.markers or markers, self._declared.residual)
        return self._runtime

    def _release(self, slot: int) -> None:
        assert self._runtime is not None
        self._runtime.release(slot)
        self._free.append(slot)

    def _room(self) -> int:
        if not self._free and self._ended:
            self._release(self._ended.pop(next(iter(self._ended))))
        if not self._free:  # more preempted requests than can run at once: only ever by priorities
            parked = next(name for name, slot in self._slots.items() if not self._rows.holds(slot))
            compat.logger().warning(
                "llm_steer: no slot is left, so that the preempted request %s loses its state; plugins that go by token ids "
                "alone are not affected, closed loops start over",
                parked,
            )
            self._loops.discard(parked)
            self.finish([parked])
        return self._free.pop()

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device, non_blocking=True)


class RowTable:
    """Which slot each row has; nobody's slot for rows that do not steer."""

    def __init__(self, count: int, nobody: int, device: torch.device) -> None:
        self._nobody = nobody
        self._host = [nobody] * count
        self._steering = 0
        self._device = torch.full((count,), nobody, dtype=torch.int64, device=device)
        self._dirty = False

    def set(self, row: int, slot: int) -> None:
        if (before := self._host[row]) != slot:
            self._host[row] = slot
            self._steering += (slot != self._nobody) - (before != self._nobody)
            self._dirty = True

    def swap(self, first: int, second: int) -> None:
        a, b = self._host[first], self._host[second]
        self.set(first, b)
        self.set(second, a)

    def slots(self) -> torch.Tensor:
        """int64 ``[count]``, on the device."""
        if self._dirty:
            copy_async(torch.tensor(self._host, dtype=torch.int64), self._device)
            self._dirty = False
        return self._device

    def any(self, rows: Sequence[int] | None) -> bool:
        """One of the rows steers."""
        return self._steering > 0 and (rows is None or any(self._host[row] != self._nobody for row in rows))

    def holds(self, slot: int) -> bool:
        return slot in self._host


def around_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """The one place in which every worker has a model that was not run yet."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model_runner = self.model_runner
        steering = WorkerSteering(model_runner.vllm_config, model_runner.device)
        runner.install(model_runner.vllm_config)
        result = original(self, *args, **kwargs)
        steering.instrument(model_runner.get_model())
        runner.attach(model_runner, steering)
        return result

    return load_model
