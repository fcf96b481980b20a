"""What each shipped checkpoint is trained on, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_steer.eval.testbed.arithmetic import Arithmetic
from llm_steer.eval.testbed.entailment import Entailment
from llm_steer.eval.testbed.ontology import Ontology
from llm_steer.eval.testbed.problem import Task
from llm_steer.eval.testbed.traces import Mix
from llm_steer.eval.testbed.words import Words


@dataclass(frozen=True)
class Part:
    """One task with the weights at which its levels are drawn."""

    task: Task
    weights: dict[int, float]
    """Level -> relative weight."""
    mix: Mix = field(default_factory=Mix)
    """Flaws of its traces. Each task has its own: what they cost depends on how many steps hang on one another."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a checkpoint, together with a seed."""

    name: str
    parts: Sequence[Part]
    hidden_size: int = 128
    layers: int = 4
    head_size: int = 32
    intermediate_size: int = 448
    vocab_size: int = 640
    """Rows of the embedding: the tokenizer's length and some room."""
    positions: int = 1024
    steps: int = 2000
    batch: int = 24
    """Traces a step."""
    lr: float = 3e-3
    warmup: int = 50
    """Steps in which the learning rate rises."""
    decay: float = 0.35
    """Fraction of the run, its last part, in which the learning rate falls to zero."""
    clean: tuple[float, float] = (0.1, 0.3)
    """Until the first of these fractions of the run there are no slips, from the second on all of them."""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "arithmetic",
            (
                Part(Arithmetic(), {2: 3, 4: 3, 6: 3, 8: 1.5, 12: 0.7}),
                Part(Words(), {2: 2, 4: 2, 6: 1, 8: 0.5, 12: 0.4}),
            ),
        ),
        Recipe(
            "logic",
            (
                # Words go further in fewer tokens than the others, and have more to learn.
                Part(
                    Entailment("words"),
                    {3: 2, 4: 2, 5: 1},
                    Mix(slip=(0.02, 0.16, 0.35), fix=0.65, recheck=0.04, spoil=0.1),
                ),
                Part(
                    Entailment("code"),
                    {3: 0.7, 4: 0.8, 5: 0.5},
                    Mix(slip=(0.01, 0.3, 0.45), fix=0.45, spoil=0.15),
                ),
                # A table is looked up in dozens of places: slips are rare in each.
                Part(
                    Entailment("table"),
                    {3: 1.2, 4: 1.2, 5: 0.4},
                    Mix(slip=(0.005, 0.08, 0.25), fix=0.75, recheck=0.04, spoil=0.1),
                ),
                # A wrong class is often left again, by a later slip or because it leads to the same one.
                Part(Ontology(), {1: 0.3, 3: 0.6, 5: 0.6}, Mix(slip=(0.15, 0.45, 0.6), fix=0.4, spoil=0.2)),
            ),
            steps=3200,
            clean=(0.25, 0.45),
        ),
    )
}
