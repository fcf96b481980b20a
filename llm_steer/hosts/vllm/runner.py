"""Worker: what both model runners tell, before and after each forward pass: who comes and goes, which tokens are fed (with
their real ids, on the device), which logits came out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from llm_steer.hosts.vllm import admission, compat


def install(vllm_config: Any) -> None:
    """Hook into the model runner of this worker."""
    for hook in compat.runner_hooks(vllm_config):
        compat.install(hook, _WRAPPERS[hook])


def attach(model_runner: Any, steering: Any) -> None:
    """From here on, a model runner and its sampler tell their steering.

    Args:
        steering: a :class:`~llm_steer.hosts.vllm.worker.WorkerSteering`.
    """
    model_runner.llm_steer = steering
    sampler = getattr(model_runner, "sampler", None)
    if sampler is not None:  # the ranks that sample
        sampler.llm_steer = steering
    if model_runner.vllm_config.use_v2_model_runner:
        processors = getattr(sampler, "logits_processors", ())
    else:
        processors = model_runner.input_batch.logitsprocs.all
    from llm_steer.hosts.vllm.logits import SteerLogitsProcessor

    for processor in processors:
        if isinstance(processor, SteerLogitsProcessor):
            processor.steering = steering


# -- V1 ------------------------------------------------------------------------------------------------------------------


def around_update_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who has ended; who is new comes to the logits processor, with its row."""

    @functools.wraps(original)
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        if (steering := _of(self)) is not None:
            steering.finish(scheduler_output.finished_req_ids)
        return original(self, scheduler_output)

    return _update_states


def around_model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The one call around the model on real steps, eager, compiled or replayed."""

    @functools.wraps(original)
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (steering := _of(self)) is not None:
            if steering.steers():
                count = self.input_batch.num_reqs
                tokens = int(self.query_start_loc.np[count])
                steering.step(self.input_ids.gpu[:tokens], self.positions[:tokens], self.query_start_loc.gpu[: count + 1])
            else:
                steering.rest()
        return original(self, *args, **kwargs)

    return _model_forward


def around_apply_logits_processors(original: Callable[..., Any]) -> Callable[..., Any]:
    """The logits as the model made them (a grammar's mask aside), float32."""

    @functools.wraps(original)
    def apply_logits_processors(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        steering = _of(self)
        if steering is not None and steering.measures and steering.steers():
            steering.logits(logits, raw=True)
        return original(self, logits, *args, **kwargs)

    return apply_logits_processors


# -- V2 ------------------------------------------------------------------------------------------------------------------


def around_finish_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who has ended. Preempted requests leave their rows here too, but keep their slots."""

    @functools.wraps(original)
    def finish_requests(self: Any, scheduler_output: Any) -> Any:
        if (steering := _of(self)) is not None:
            steering.finish(scheduler_output.finished_req_ids)
            for request_id in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
                if (row := self.req_states.req_id_to_index.get(request_id)) is not None:
                    steering.leave(row)
        return original(self, scheduler_output)

    return finish_requests


def around_add_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who is new, or back after a preemption; on every pipeline rank."""

    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        if (steering := _of(self)) is not None:
            for request in scheduler_output.scheduled_new_reqs:
                ids, prompt_len = request.prefill_token_ids, request.prompt_len
                row = self.req_states.req_id_to_index[request.req_id]
                steering.enter(row, admission.read_stamp(request.sampling_params), ids[:prompt_len], ids[prompt_len:])
        return result

    return add_requests


def around_prepare_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """The batch of a real step, drafts included, with everything on the device."""

    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        if (steering := _of(self)) is not None:
            if steering.steers(batch.idx_mapping_np):
                tokens, count = batch.num_tokens, batch.num_reqs
                starts = batch.query_start_loc[: count + 1]
                steering.step(batch.input_ids[:tokens], batch.positions[:tokens], starts, batch.idx_mapping)
            else:
                steering.rest()
        return batch

    return prepare_inputs


def around_apply_sampling_params(original: Callable[..., Any]) -> Callable[..., Any]:
    """The logits as the model made them (a grammar's mask aside)."""

    @functools.wraps(original)
    def apply_sampling_params(
        self: Any,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        pos: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        steering = _of(self)
        if steering is not None and steering.measures and steering.steers(idx_mapping_np):
            logits = logits.to(torch.float32, copy=True)  # the ones that come in are reported as log-probabilities
            steering.logits(logits, expanded_idx_mapping, pos, raw=True)
        return original(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, *args, **kwargs)

    return apply_sampling_params


# ----------------------------------------------------------------------------------------------------------------------

_WRAPPERS = {
    compat.STATES_V1: around_update_states,
    compat.RUNNER_V1: around_model_forward,
    compat.SAMPLER_V1: around_apply_logits_processors,
    compat.FINISH_V2: around_finish_requests,
    compat.ADD_V2: around_add_requests,
    compat.RUNNER_V2: around_prepare_inputs,
    compat.SAMPLER_V2: around_apply_sampling_params,
}


def _of(owner: Any) -> Any:
    """Steering of a model runner or sampler; None for that of a drafting model, or while the model is loaded."""
    return vars(owner).get("llm_steer")
