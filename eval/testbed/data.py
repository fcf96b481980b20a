"""Batches of traces. A batch is a function of the recipe, the seed and its number, so a run can stop and go on anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from llm_steer.eval.testbed.problem import Problem, draw
from llm_steer.eval.testbed.recipes import Recipe
from llm_steer.eval.testbed.tokenizer import END
from llm_steer.eval.testbed.traces import Trace, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GROUP = 8
"""Batches that are drawn together and sorted by length, so that little of a batch is padding."""
IGNORE = -100
"""The label of positions that are not learnt: prompts, forced words and padding."""


def progress(recipe: Recipe, step: int) -> float:
    """How far the curriculum is at a step, for :meth:`~llm_steer.eval.testbed.traces.Mix.at`."""
    start, full = recipe.clean
    return (step / recipe.steps - start) / (full - start)


def example(recipe: Recipe, rng: random.Random, step: int) -> tuple[Problem, Trace]:
    """A training problem and a trace of it."""
    parts = recipe.parts
    part = rng.choices(parts, [sum(p.weights.values()) for p in parts])[0]
    level = rng.choices(list(part.weights), list(part.weights.values()))[0]
    problem = draw(part.task, rng, level, "train")
    return problem, write(part.task.walk(problem), rng, part.mix.at(progress(recipe, step)))


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches number ``first`` and on: ids and labels, int64 ``[batch, length]`` each, padded on the right."""
    group, skip = divmod(first, GROUP)
    while True:
        rng = random.Random(f"{seed}/{group}")
        drawn = [example(recipe, rng, group * GROUP) for _ in range(GROUP * recipe.batch)]
        rows = sorted(_encode(drawn, tokenizer), key=lambda row: len(row[0]))
        for place in rng.sample(range(GROUP), GROUP)[skip:]:
            yield _pad(rows[place * recipe.batch : (place + 1) * recipe.batch], tokenizer.pad_token_id)
        group, skip = group + 1, 0


def _encode(drawn: list[tuple[Problem, Trace]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompt and trace, and their labels."""
    prompts = [tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True) for p, _ in drawn]
    asked = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    texts = [trace.text + END for _, trace in drawn]
    told = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    rows = []
    for prompt, ids, spans, (_, trace) in zip(asked, told["input_ids"], told["offset_mapping"], drawn, strict=True):
        forced = set(trace.forced)
        labels = [IGNORE if start in forced else i for i, (start, _) in zip(ids, spans, strict=True)]
        rows.append((prompt + ids, [IGNORE] * len(prompt) + labels))
    return rows


def _pad(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids) for ids, _ in rows)
    inputs = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORE)
    for index, (ids, wanted) in enumerate(rows):
        inputs[index, : len(ids)] = torch.tensor(ids)
        labels[index, : len(ids)] = torch.tensor(wanted)
    return inputs, labels
