"""What calibration needs from a model: outputs with the confidence of each token, and hidden states at chosen tokens.

The part of calibration that runs a transformers model. Confidence is taken while the output is generated; hidden states
come from one pass over the finished output, at a fraction of the cost, and are handed on, not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from llm_steer.errors import UnsupportedError
from llm_steer.plugin import Context, Params, Plugin, Rows, Tokens

from .confidence import Confidence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Recorder(Plugin[Params]):
    """Steers nothing and tells the confidence of each output token, and where steps and think spans end."""

    name = "confidence_recorder"
    feedback = True
    needs_boundaries = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of = Confidence().of
        self._confidence = torch.zeros(context.num_slots, context.max_positions + 1, device=context.device)

    def admit(self, slot: int, params: Params | None, prompt_ids: torch.Tensor) -> None:
        self._confidence[slot] = 0.0

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        slot = torch.where(rows.live & (rows.output_position >= 0), rows.slot, self.context.nobody)
        column = rows.output_position.clamp(0, self._confidence.shape[1] - 1)
        self._confidence[slot, column] = self._of(logits)

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        return {
            "ids": tokens.ids.tolist(),
            "confidences": self._confidence[slot, : len(tokens.ids)].tolist(),
            "boundary": tokens.boundary.tolist(),
            "thinking": tokens.thinking.tolist(),
        }


class Source(Protocol):
    """What generates: one batch of outputs, as :meth:`Recorder.finish` tells them."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[dict[str, Any]]: ...


def source(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
    """A model in this process."""
    return functools.partial(generate, model, tokenizer)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[dict[str, Any]]:
    """One batch of outputs: :meth:`Recorder.finish` of each.

    Args:
        temperature: 0 is greedy.
    """
    from llm_steer.hosts import hf
    from llm_steer.hosts.hf_steering import Steering
    from llm_steer.spec import Steer

    steering = Steering(model, (Steer(Recorder, Params()),), tokenizer)
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {"do_sample": False}
    )
    torch.manual_seed(seed)
    before = model.__dict__.get(hf.ATTRIBUTE)
    hf.install(model, steering)
    try:
        model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=pad, **sampling
        )
        return [trace["plugins"][0] for trace in steering.traces if trace is not None]
    finally:
        if before is None:
            hf.uninstall(model)
        else:
            hf.install(model, before)


@torch.no_grad()
def hidden_states(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], batch_size: int
) -> Iterator[torch.Tensor]:
    """Residual stream behind every layer at some positions of each sequence: float32 ``[positions, layers, hidden]``.

    Args:
        sequences: token ids, prompt and output.
    """
    from llm_steer.hosts.hf_layers import find_layers

    layers = find_layers(model)
    seen: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            seen[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
    try:
        for start in range(0, len(sequences), batch_size):
            rows = sequences[start : start + batch_size]
            width = max(map(len, rows))
            # Padding stands behind: no real token sees it, and positions count from 0 without being told.
            ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=model.device)
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
            model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)  # type: ignore[no-untyped-call]
            if len(seen) != len(layers):
                raise UnsupportedError(f"only {len(seen)} of {len(layers)} layers of this model were run as modules")
            for row, wanted in enumerate(positions[start : start + batch_size]):
                at = torch.tensor(wanted, dtype=torch.int64)
                yield torch.stack([seen[i][row][at.to(seen[i].device)].float().cpu() for i in range(len(layers))], 1)
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()
