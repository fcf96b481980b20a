"""Ontology questions of the testbed with rules: the model by itself, activation_reasoning, and the solver without a model.

    python benchmarks/ontology.py eval/testbed/models/logic --count 2000

The model thinks, without steering, and opens its box. There the arms differ: ``model`` writes on; ``forced`` has the verdict
force the answer, so it is the solver with the propositions that were detected; ``steered`` only pushes hidden states towards
``True`` or ``False``. Propositions are detected by ``words`` (a string match) or in hidden states (``states``: a probe for
each class, fitted on training problems). ``solver`` parses the text and solves it, with no model at all. Controls: rules of
another problem, and random directions of the same norm. What steers acts behind the box's opening only, so all arms share
what was thought; thinking that never ends is wrong in all of them.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llm_steer.eval.logic_tasks import LogicProblem, parse_then_solve
from llm_steer.eval.testbed.logic_words import KINDS
from llm_steer.eval.testbed.ontology import Ontology
from llm_steer.eval.testbed.problem import Problem, draw, held_out
from llm_steer.eval.testbed.sampling import load, prompts, sample_hf
from llm_steer.eval.testbed.statistics import difference, mean
from llm_steer.eval.testbed.words import PEOPLE
from llm_steer.plugins.activation_reasoning import ActivationReasoning, ActivationReasoningParams
from llm_steer.plugins.activation_reasoning.concepts import LEVELS, Concept, Dictionary, direction_concept, unit
from llm_steer.plugins.activation_reasoning.find import Encoded, find
from llm_steer.plugins.activation_reasoning.params import parse_program
from measuring import in_words, machine, print_json, say, table

from llm_steer.artifact import ModelIdentity, Shelf
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime
from llm_steer.spec import Steer
from llm_steer.tokens import Vocabulary

TASK = Ontology()
BOX = "\\boxed{"
ANSWERS = ("True", "False")
RULES = 32
"""A problem's own, at most."""
BATCH = 50


@dataclass(frozen=True)
class Asked:
    """A problem with what the model thought of it."""

    problem: Problem
    prompt: list[int]
    thought: list[int] | None
    """Up to the opening of the box; None if it never came."""


def rules_of(problem: Problem) -> list[str]:
    """What the problem's sentences say about its individual, as rules of :func:`rules_file`."""
    climb = TASK.walk(problem)
    rules = []
    for kind, what in climb.rules:
        _, sign, name = re.fullmatch(r"(a )?(not )?(\w+)", what).groups()  # type: ignore[union-attr]
        rules.append(f"is_{kind} -> {'not_' if sign else ''}{'is_' if name in KINDS else ''}{name}")
    # The goal last: a verdict on another problem's goal is none.
    said = {rule.split("-> ")[1] for rule in rules}
    goals = (("", "yes"), ("not_", "no"))
    return [*rules, *(f"{no}{climb.goal} -> {verdict}" for no, verdict in goals if f"{no}{climb.goal}" in said)]


def rules_file(dictionary: Path, detection: str) -> str:
    """``is_KIND`` is detected where a sentence names the individual and then a kind."""
    lines = [f"dictionary: {dictionary}", "concepts:", f"  person: {{words: [{', '.join(PEOPLE)}]}}"]
    lines += [f"  box: {{words: ['{BOX}']}}"]
    if detection == "words":
        lines += [f"  {kind}: {{words: [{kind}]}}" for kind in KINDS]
    lines += ["propositions:", "  box: {scope: output, hold: 0}"]
    lines += [f"  is_{kind}: {{pattern: [person, {kind}], scope: prompt}}" for kind in KINDS]
    lines += ["rules: ['yes -> yes', 'no -> no']", "actions:"]
    for verdict, answer in (("yes", "True"), ("no", "False")):
        lines += [f"  - {{when: '{verdict}', log: true}}", f"  - {{when: '{verdict} and box', force: ['{answer}']}}"]
        lines += [f"  - {{when: '{verdict} and box', steer: {{concept: '{answer}', strength: 1.0, layers: [LAYER]}}}}"]
    return "\n".join(lines) + "\n"


class Bench:
    """A model, its tokenizer and where it is steered."""

    def __init__(self, folder: str, detect: int, steered: int) -> None:
        self.model, self.tokenizer = load(folder)
        self.detect, self.steered = detect, steered
        self.vocabulary = Vocabulary(self.tokenizer, self.model.config.vocab_size)
        self.identity = ModelIdentity.of(self.model.config, dtype=torch.float32, tokenizer=self.tokenizer)
        self.box = self.tokenizer.encode(BOX, add_special_tokens=False)[-1]
        self.answer = {name: self.tokenizer.encode(name, add_special_tokens=False)[0] for name in ANSWERS}

    def ask(self, problems: Sequence[Problem], seed: int = 0) -> list[Asked]:
        """Let the model think."""
        answers = sample_hf(self.model, self.tokenizer, problems, seed=seed)
        found = []
        for problem, text, response in zip(problems, prompts(self.tokenizer, problems), answers.responses, strict=True):
            end = response.ids.index(self.box) + 1 if self.box in response.ids else 0
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            found.append(Asked(problem, ids, response.ids[:end] if end else None))
        return found

    @torch.inference_mode()
    def states(self, asked: Sequence[Asked], layers: Sequence[int]) -> list[dict[int, torch.Tensor]]:
        """Hidden states behind layers: of the prompt and what was thought, ``[tokens, hidden_size]``."""
        found = []
        for one in asked:
            ids = torch.tensor([[*one.prompt, *(one.thought or ())]])
            hidden = self.model(ids, output_hidden_states=True, use_cache=False).hidden_states
            found.append({layer: hidden[layer + 1][0] for layer in layers})
        return found

    def dictionary(self, asked: Sequence[Asked]) -> tuple[Dictionary, dict[str, float]]:
        """Kinds by a probe over the prompts' tokens; ``True`` and ``False`` where the box opens."""
        states = self.states(asked, (self.detect, self.steered))
        concepts, report = list[Concept](), {}
        pieces = {kind: [self.tokenizer.convert_tokens_to_ids(form) for form in (kind, f"Ġ{kind}")] for kind in KINDS}
        for kind in KINDS:
            examples = []
            for number, (one, state) in enumerate(zip(asked, states, strict=True)):
                label = torch.tensor([token in pieces[kind] for token in one.prompt[1:]])
                examples.append(Encoded(state[self.detect][1 : len(one.prompt)], {kind: label}, number % 2 == 1))
            concept = find(kind, examples, "probe")
            concepts.append(concept)
            report[f"auc.{kind}"] = concept.report["token/auc"]
        at_box = [(o.problem.answer, s[self.steered][-1]) for o, s in zip(asked, states, strict=True) if o.thought]
        centre = {name: torch.stack([state for answer, state in at_box if answer == name]).mean(0) for name in ANSWERS}
        for name, other in (ANSWERS, ANSWERS[::-1]):
            concepts.append(direction_concept(name, unit(centre[name] - centre[other]), 0.0, dict.fromkeys(LEVELS, 0.0)))
        return Dictionary(tuple(concepts), self.detect), report

    def arm(
        self,
        asked: Sequence[Asked],
        rules: Sequence[Sequence[str]],
        dictionary: Path,
        detection: str,
        kind: str,
        strength: float,
    ) -> list[tuple[str | None, str | None, set[str]]]:
        """What the model writes into its box (None: no answer), the verdict, and the propositions that were detected.

        Args:
            kind: ``force`` or ``steer``: the other actions are left out.
        """
        text = rules_file(dictionary, detection).replace("LAYER", str(self.steered))
        text = "".join(line for line in text.splitlines(True) if {"force": "steer:", "steer": "force:"}[kind] not in line)
        made = Shelf(self.identity, paths=True)
        declared = ActivationReasoningParams(rules=text, allow_rules=RULES, strength=strength).resolve(self.vocabulary, made)
        shelf = Shelf(self.identity, named=tuple(made.read), declared=(declared,))
        size = self.model.config
        longest = max(len(one.prompt) + len(one.thought or ()) for one in asked)
        context = Context(
            BATCH + 1, torch.device("cpu"), size.vocab_size, size.num_hidden_layers, size.hidden_size, longest, shelf=shelf
        )
        runtime = Runtime(context, Markers(), declared=(Steer(ActivationReasoning, declared),))
        runtime.plugin(ActivationReasoning)
        found = []
        for start in range(0, len(asked), BATCH):
            found += self._run(runtime, asked[start : start + BATCH], rules[start : start + BATCH], shelf, strength)
        return found

    @torch.inference_mode()
    def _run(
        self, runtime: Runtime, asked: Sequence[Asked], rules: Sequence[Sequence[str]], shelf: Shelf, strength: float
    ) -> list[tuple[str | None, str | None, set[str]]]:
        there = [index for index, one in enumerate(asked) if one.thought]
        for slot, index in enumerate(there):
            params = ActivationReasoningParams(rules="rules", extra_rules=list(rules[index]), strength=strength)
            steer = Steer(ActivationReasoning, params.resolve(self.vocabulary, shelf))
            runtime.admit(slot, (steer,), torch.tensor(asked[index].prompt))
        rows = [[*asked[index].prompt, *(asked[index].thought or ())] for index in there]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        position = (real.cumsum(1) - 1).clamp(min=0)
        slot = torch.arange(len(rows))[:, None].expand_as(ids)
        tokens = runtime.forward(ids[real], slot[real], position[real])

        def hook(layer: int) -> Any:
            def run(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
                flat = output[real].clone()
                runtime.residual(layer, flat, tokens)
                output = output.clone()
                output[real] = flat
                return output

            return run

        handles = [self.model.model.layers[layer].register_forward_hook(hook(layer)) for layer in runtime.layers]
        out = self.model(ids, attention_mask=real.long(), position_ids=position, use_cache=False, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        logits = out.logits[:, -1].float()
        runtime.logits(logits, slot[:, 0], position[:, -1])
        names = {token: name for name, token in self.answer.items()}
        plugin: Any = runtime.plugin(ActivationReasoning)
        actions, width = parse_program(shelf.declared[0].program).actions, len(plugin.detector.literals)
        found: list[tuple[str | None, str | None, set[str]]] = [(None, None, set())] * len(asked)
        for number, index in enumerate(there):
            # What traces are made of, without their proofs.
            moments, _ = plugin.history.entries(number)
            acting = [actions[column - width] for column in (moments[-1][1] if moments else ()) if column >= width]
            verdicts = [action.when for action in acting if action.kind == "log"]
            verdict = {"yes": "True", "no": "False"}[verdicts[0]] if len(verdicts) == 1 else None
            facts = {plugin.detector.literals[column][1].atom for _, true in moments for column in true if column < width}
            seen = {atom for atom in facts if atom.startswith("is_")}
            found[index] = names.get(int(logits[number].argmax())), verdict, seen
            runtime.release(number)
        return found


def solver(problem: Problem) -> bool:
    """Parse, then solve: without a model."""
    *context, question = problem.prompt.split(". ")
    person, goal = question.removeprefix("Is ").removesuffix("?").split()
    logic = LogicProblem("", ". ".join(context) + ".", f"{person} is {goal}.", ANSWERS, problem.answer)
    return parse_then_solve(logic) == problem.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=2000, help="held-out questions of each number of hops")
    parser.add_argument("--train", type=int, default=600, help="training questions that concepts come from")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--detect", type=int, default=0, help="layer behind which propositions are detected")
    parser.add_argument("--steered", type=int, default=2, help="layer behind which answers are steered")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--quick", action="store_true", help="a few questions of one kind: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.count, options.train, options.hops, options.strengths = 4, 80, [1], [0.5]
    bench = Bench(options.model, options.detect, options.steered)
    figures: dict[str, float] = {}
    rng = random.Random("ontology/train")
    drawn = [draw(TASK, rng, rng.choice((1, 3, 5)), "train") for _ in range(options.train)]
    dictionary, report = bench.dictionary(bench.ask(drawn, seed=1))
    figures["auc.kinds"] = sum(report.values()) / len(report)
    with tempfile.TemporaryDirectory() as folder:
        signs, noise = Path(folder) / "signs", Path(folder) / "noise"
        dictionary.to_artifact(bench.identity, {}).save(signs)
        generator = torch.Generator().manual_seed(0)
        anyhow = tuple(
            replace(c, steer=unit(torch.randn(c.steer.shape, generator=generator))) if c.name in ANSWERS else c
            for c in dictionary.concepts
        )
        replace(dictionary, concepts=anyhow).to_artifact(bench.identity, {}).save(noise)
        for hops in options.hops:
            measure(bench, hops, options, signs, noise, figures)
    setup = {**machine(), "questions": options.count, "detect": options.detect, "steered": options.steered}
    if options.json:
        print_json("ontology", setup, figures)
        return
    print(in_words(setup))
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


def measure(bench: Bench, hops: int, options: Any, signs: Path, noise: Path, figures: dict[str, float]) -> None:
    problems = held_out(TASK, hops, options.count)
    asked = bench.ask(problems)
    own = [rules_of(problem) for problem in problems]
    others = [rules_of(problem) for problem in (*problems[1:], problems[0])]
    right: dict[str, list[bool]] = {"solver": [solver(problem) for problem in problems]}

    def arm(name: str, rules: Sequence[Sequence[str]], detection: str, kind: str, strength: float, at: Path = signs) -> Any:
        found = bench.arm(asked, rules, at, detection, kind, strength)
        right[name] = [answer == p.answer for (answer, _, _), p in zip(found, problems, strict=True)]
        return found

    arm("model", [()] * len(asked), "words", "force", 0.0)
    for detection in ("words", "states"):
        found = arm(f"forced.{detection}", own, detection, "force", 0.0)
        right[f"verdict.{detection}"] = [v == p.answer for (_, v, _), p in zip(found, problems, strict=True)]
        gold = [
            {f"is_{bench_kind(problem)}"} if one.thought else set() for problem, one in zip(problems, asked, strict=True)
        ]
        hits = sum(len(seen & true) for (_, _, seen), true in zip(found, gold, strict=True))
        told = sum(len(seen) for _, _, seen in found) + sum(map(len, gold))
        figures[f"{hops}.propositions_f1.{detection}"] = 2 * hits / max(told, 1)
    arm("forced.shuffled_rules", others, "states", "force", 0.0)
    for strength in options.strengths:
        arm(f"steered.{strength:g}", own, "states", "steer", strength)
        arm(f"steered.{strength:g}.shuffled_rules", others, "states", "steer", strength)
        arm(f"steered.{strength:g}.random", own, "states", "steer", strength, noise)
    figures[f"{hops}.boxes"] = sum(one.thought is not None for one in asked) / len(asked)
    for name, values in right.items():
        estimate = mean(values)
        figures[f"{hops}.{name}"], figures[f"{hops}.{name}_error"] = estimate.value, estimate.error
        if name not in ("model", "solver"):
            figures[f"{hops}.{name}_gain"] = difference(values, right["model"]).value
            figures[f"{hops}.{name}_gain_error"] = difference(values, right["model"]).error
    mine = {name: value for name, value in figures.items() if name.startswith(f"{hops}.")}
    say(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in mine.items()]))


def bench_kind(problem: Problem) -> str:
    """The individual's class."""
    return TASK.walk(problem).kind


if __name__ == "__main__":
    main()
