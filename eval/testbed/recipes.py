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


@dataclass(frozen=True)
class Round:
    """One rise and fall of the learning rate."""

    steps: int
    peak: float = 1.0
    """Share of ``Recipe.lr``."""
    decay: float = 0.25
    """Fraction of the round, its last part, in which the learning rate falls to zero."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a checkpoint, together with a seed."""

    name: str
    parts: Sequence[Part]
    mix: Mix = field(default_factory=Mix)
    hidden_size: int = 128
    layers: int = 4
    head_size: int = 32
    intermediate_size: int = 448
    vocab_size: int = 640
    """Rows of the embedding: the tokenizer's length and some room."""
    positions: int = 1024
    rounds: tuple[Round, ...] = (Round(1600),)
    batch: int = 32
    """Traces a step."""
    lr: float = 3e-3
    warmup: int = 50
    """Steps at the start of a round."""
    margin: float = 11.0
    """Nats. Where a step is not over, reflection words are pushed below ``exp(-margin)`` in all. A large model's margins
    come from its size; without any, a bias of +6 makes words out of the noise of a small one."""
    margin_weight: float = 0.05
    """Loss per nat above that."""
    margin_from: int = 1400
    """Step from which on the margin is asked for inside of steps."""
    cap_from: int = 1600
    """Step from which on it is asked for behind ``mix.max_rechecks`` reflections on one step, too: however strong the bias,
    an answer ends."""
    clean: tuple[int, int] = (360, 1080)
    """Until the first of these steps there are no slips, from the second on all of them."""

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.rounds)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "arithmetic",
            (
                Part(Arithmetic(), {2: 3, 4: 3, 6: 3, 8: 1.5, 12: 1}),
                Part(Words(), {2: 2, 4: 2, 6: 1, 8: 0.5, 12: 0.5}),
            ),
            rounds=(Round(1600), Round(600, peak=0.7, decay=1.0)),
        ),
        Recipe(
            "logic",
            (
                Part(Entailment("words"), {3: 2, 4: 2, 5: 1}),
                Part(Entailment("code"), {3: 1, 4: 2, 5: 0.5}),
                Part(Entailment("table"), {3: 2, 4: 2, 5: 0.5}),
                Part(Ontology(), {1: 0.5, 3: 1, 5: 1}),
            ),
            mix=Mix(slip=(0.05, 0.45, 0.65), fix=0.75, recheck=0.08, spoil=0.3),
            rounds=(Round(1200),),
            margin_from=1050,
            cap_from=1050,
        ),
    )
}
