"""Answers of a checkpoint to many problems at once, with a bias on the reflection words. One function per engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from llm_steer.eval.testbed.problem import Problem
from llm_steer.eval.testbed.tokenizer import END
from llm_steer.eval.testbed.traces import REFLECTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 500
"""Sequences that transformers decodes together."""
DROP = 0.2
"""Share of ended answers at which a batch is made smaller."""
MAX_NEW_TOKENS = 800
"""Where an answer is cut off."""
BANNED = float("-inf")


@dataclass
class Response:
    """One answer."""

    ids: list[int]
    """Generated tokens, the end token not among them."""
    text: str
    finished: bool
    """False where it was cut off."""
    confidence: list[float] = field(default_factory=list)
    """Largest probability at each token, before bias and temperature; empty where the engine does not say."""


@dataclass
class Answers:
    """The answers to a list of problems, in its order."""

    responses: list[Response]
    seconds: float
    """Wall-clock time of decoding alone."""

    @property
    def tokens(self) -> int:
        return sum(len(r.ids) for r in self.responses)


def reflection_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the reflection words, bare and with a leading space."""
    return [tokenizer.encode(form, add_special_tokens=False)[0] for word in REFLECTIONS for form in (word, " " + word)]


def load(folder: Path | str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A checkpoint in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.encode(END, add_special_tokens=False)[0])


def prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
    return [str(tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True)) for p in problems]


@torch.inference_mode()
def sample_hf(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    bias: float = 0.0,
    temperature: float = 1.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch: int = BATCH,
) -> Answers:
    """Sample with the model of transformers in a loop of our own, which drops answers from the batch as they end.

    Args:
        bias: added to the logits of the reflection words; ``BANNED`` for minus infinity.
        temperature: 0 for greedy.
        seed: what is drawn depends on it, the problems and ``batch``.
    """
    end, words = _end(tokenizer), torch.tensor(reflection_ids(tokenizer))
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if bias:
            logits[:, words] += bias
        if not temperature:
            return logits.argmax(-1)
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]

    def decode(ids: torch.Tensor, mask: torch.Tensor) -> list[Response]:
        tokens, confidence = _decode(model, ids, mask, choose, end, max_new_tokens)
        rows = zip(tokens.tolist(), confidence.tolist(), strict=True)
        return [_response(tokenizer, row, values, end) for row, values in rows]

    return _in_batches(tokenizer, problems, batch, decode)


def _in_batches(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    batch: int,
    decode: Callable[[torch.Tensor, torch.Tensor], list[Response]],
) -> Answers:
    """Answer problems in batches of like lengths; ``decode`` takes ids and mask, padded on the left."""
    texts = prompts(tokenizer, problems)
    order = sorted(range(len(texts)), key=lambda i: (problems[i].level, len(texts[i])))  # little padding in a batch
    responses: dict[int, Response] = {}
    started = time.monotonic()
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        inputs = tokenizer([texts[i] for i in rows], return_tensors="pt", padding=True, add_special_tokens=False)
        responses |= zip(rows, decode(inputs["input_ids"], inputs["attention_mask"]), strict=True)
    return Answers([responses[i] for i in range(len(texts))], time.monotonic() - started)


def _decode(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor],
    end: int,
    max_new_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one batch, padded on the left. Returns tokens and confidence ``[batch, new]``; -1 behind the end token."""
    from llm_steer.eval.testbed.cache import growing_cache

    cache = growing_cache()
    tokens = torch.full((len(ids), max_new_tokens), -1)
    confidence = torch.zeros(len(ids), max_new_tokens)
    rows = torch.arange(len(ids))  # which answers the batch still holds
    done = torch.zeros(len(ids), dtype=torch.bool)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    for step in range(max_new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float()
        sure = logits.softmax(-1).amax(-1)
        chosen = choose(logits)
        tokens[rows[~done], step], confidence[rows[~done], step] = chosen[~done], sure[~done]
        done |= chosen == end
        position = position[:, -1:] + 1
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        if bool(done.all()):
            break
        if done.float().mean() > DROP:
            keep = (~done).nonzero().flatten()
            cache.batch_select_indices(keep)
            rows, chosen, mask, position, done = rows[keep], chosen[keep], mask[keep], position[keep], done[keep]
        ids = chosen[:, None]
    return tokens, confidence


def _response(tokenizer: PreTrainedTokenizerBase, ids: list[int], confidence: list[float], end: int) -> Response:
    length = next((n for n, i in enumerate(ids) if i in (end, -1)), len(ids))
    finished = length < len(ids) and ids[length] == end
    return Response(ids[:length], str(tokenizer.decode(ids[:length])), finished, confidence[:length])


def sample_generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch: int = BATCH,
    **options: Any,
) -> Answers:
    """Sample with transformers' ``generate``, as a user would: what a steering method under test hooks into.

    Args:
        options: passed on to ``generate``.
    """
    from llm_steer.eval.testbed.cache import growing_cache
    from transformers import GenerationConfig

    end = _end(tokenizer)
    choice = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    )
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens, eos_token_id=end, pad_token_id=tokenizer.pad_token_id, **choice
    )
    torch.manual_seed(seed)

    @torch.inference_mode()
    def decode(ids: torch.Tensor, mask: torch.Tensor) -> list[Response]:
        output = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=growing_cache(), generation_config=config, **options
        )
        return [_response(tokenizer, row, [], end) for row in output[:, ids.shape[1] :].tolist()]

    return _in_batches(tokenizer, problems, batch, decode)


def sample_vllm(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    bias: float = 0.0,
    temperature: float = 1.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Answers:
    """Sample with a ``vllm.LLM``. Finite biases only: its ``logit_bias`` takes -100 to 100."""
    from vllm import SamplingParams

    ids = reflection_ids(tokenizer)
    logit_bias = dict.fromkeys(ids, max(bias, -100.0)) if bias else None
    texts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in prompts(tokenizer, problems)]
    parameters = [
        SamplingParams(temperature=temperature, max_tokens=max_new_tokens, seed=seed * 1_000_003 + i, logit_bias=logit_bias)
        for i in range(len(texts))
    ]
    started = time.monotonic()
    outputs = engine.generate(texts, parameters, use_tqdm=False)
    seconds = time.monotonic() - started
    end = _end(tokenizer)
    responses = []
    for output in outputs:
        ids = [i for i in output.outputs[0].token_ids if i != end]
        responses.append(Response(ids, str(tokenizer.decode(ids)), output.outputs[0].finish_reason == "stop"))
    return Answers(responses, seconds)
