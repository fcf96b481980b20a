"""Worker: the tokens of each forward pass, taken where both model runners have their real ids on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


def around_model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """V1: the one call around the model on real steps, eager, compiled or replayed."""

    @functools.wraps(original)
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        processor = _processor(self, lambda: self.input_batch.logitsprocs.all)
        if processor is not None and processor.steers():
            count = self.input_batch.num_reqs
            tokens = int(self.query_start_loc.np[count])
            processor.step(
                self.input_ids.gpu[:tokens], self.positions[:tokens], self.query_start_loc.gpu[: count + 1], slots=None
            )
        return original(self, *args, **kwargs)

    return _model_forward


def around_prepare_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """V2: the batch of a real step, drafts included, with everything on the device."""

    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        processor = _processor(self, lambda: getattr(self.sampler, "logits_processors", ()))
        if processor is not None and processor.steers(batch.idx_mapping_np):
            tokens, count = batch.num_tokens, batch.num_reqs
            processor.step(
                batch.input_ids[:tokens], batch.positions[:tokens], batch.query_start_loc[: count + 1], batch.idx_mapping
            )
        return batch

    return prepare_inputs


def _processor(model_runner: Any, candidates: Callable[[], Iterable[Any]]) -> Any:
    """Our logits processor of this model runner; None where it has none (a rank without a sampler)."""
    from llm_steer.hosts.vllm.logits import SteerLogitsProcessor

    if not hasattr(model_runner, "_llm_steer"):
        found = (p for p in candidates() if isinstance(p, SteerLogitsProcessor))
        model_runner._llm_steer = next(found, None)
    return model_runner._llm_steer
