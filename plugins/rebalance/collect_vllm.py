"""Calibration's outputs from vLLM, which generates many at once; hidden states are read with transformers all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from llm_steer.errors import MissingDependencyError, SteerError
from llm_steer.markers import Markers
from llm_steer.tokens import Vocabulary
from llm_steer.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .collect import Source

CPU = torch.device("cpu")


@contextmanager
def source(model: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Iterator[Source]:
    """A source of outputs, as :func:`collect.source` of a model in this process.

    A token's confidence is the probability of the likeliest one in the distribution that vLLM reports as it draws the token:
    of the raw logits, before penalties, temperature and truncation.

    Args:
        model: folder or id.
        options: of vLLM's ``LLM``.

    Raises:
        MissingDependencyError: vLLM is not installed.
        SteerError: a prompt is too long, when it is generated from.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise MissingDependencyError("vllm", "vllm", "calibrating with --engine vllm") from error
    llm = LLM(model, logprobs_mode="raw_logprobs", **options)
    markers = Vocabulary(tokenizer, len(tokenizer)).markers(boundaries=True)

    def generate(
        prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[dict[str, Any]]:
        room = llm.llm_engine.model_config.max_model_len
        if (longest := max(map(len, prompts))) >= room:
            raise SteerError("data", f"a prompt of {longest} tokens", f"prompts below vLLM's max_model_len of {room}")
        params = [
            SamplingParams(
                max_tokens=min(max_tokens, room - len(prompt)),
                temperature=temperature,
                top_p=top_p if temperature else 1.0,
                seed=seed + number,
                logprobs=1,
            )
            for number, prompt in enumerate(prompts)
        ]
        finished = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [told(markers, prompt, one.outputs[0]) for prompt, one in zip(prompts, finished, strict=True)]

    try:
        yield generate
    finally:
        llm.llm_engine.engine_core.shutdown()  # its processes give the device back, for what reads hidden states


def told(markers: Markers, prompt: Sequence[int], output: Any) -> dict[str, Any]:
    """Of vLLM's ``CompletionOutput`` what :meth:`collect.Recorder.finish` tells."""
    ids, start = torch.tensor(output.token_ids, dtype=torch.int64), torch.tensor(prompt, dtype=torch.int64)
    tracker = Tracker(markers, 2, CPU)
    tracker.admit(0, start, start[:0])
    tokens = tracker.advance(ids, torch.zeros_like(ids), len(prompt) + torch.arange(len(ids)))
    return {
        "ids": ids.tolist(),
        "confidences": [math.exp(max(one.logprob for one in step.values())) for step in output.logprobs],
        "boundary": tokens.boundary.tolist(),
        "thinking": tokens.thinking.tolist(),
    }
