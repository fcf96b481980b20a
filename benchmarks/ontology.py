"""Ontology questions of the testbed with rules: the model by itself, activation_reasoning, and the solver without a model.

    python benchmarks/ontology.py eval/testbed/models/logic --select detection --count 200 --journal runs
    python benchmarks/ontology.py eval/testbed/models/logic --select steering --count 200 --journal runs
    python benchmarks/ontology.py eval/testbed/models/logic --count 2000 --seed 1 --journal runs --detect 0 ...

The model thinks, without steering, and opens its box. There the arms differ: ``model`` writes on; ``forced`` has the verdict
force the answer, so it is the solver with the propositions that were detected; ``steered`` only pushes hidden states towards
``True`` or ``False``. Propositions are detected by ``words`` (a string match) or in hidden states: ``probe`` and ``means``
for each class, and features of an SAE that ``train_sae`` trains (``single``, ``top_k``, ``tversky``). ``solver`` parses the
text and solves it, with no model at all. Controls: rules of another problem, and a random direction of the same norm. What
steers acts behind the box's opening only, so all arms share what was thought; thinking that never ends is wrong in all.

Concepts and SAE come from the training split, ``--select`` compares configurations on other questions of it; the test asks
held-out questions of ``--seed``, without those of seed 0. ``--journal FOLDER`` keeps what was computed: a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
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
from llm_steer.plugins.activation_reasoning.find import Encoded, Method, find
from llm_steer.plugins.activation_reasoning.params import digest_of, parse_program
from llm_steer.plugins.activation_reasoning.sae import Sae, load_sae
from llm_steer.plugins.activation_reasoning.train_sae import main as train_sae
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
CHUNK = 500
METHODS: dict[str, Method] = {
    "probe": "probe", "means": "direction", "single": "single", "top_k": "top_k", "tversky": "tversky"
}  # fmt: skip
"""Detections in hidden states."""
NO_SAE = ("probe", "direction")
SAE_WIDTH, SAE_ACTIVE, SAE_STEPS, SAE_TEXTS = 512, 16, 800, 1000


@dataclass(frozen=True)
class Asked:
    """A problem with what the model thought of it."""

    problem: Problem
    prompt: list[int]
    thought: list[int] | None
    """Up to the opening of the box; None if it never came."""


class Journal:
    """Results by name, in a folder if there is one."""

    def __init__(self, folder: Path | None, model: Path) -> None:
        weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
        self.folder = folder / weights[:12] if folder else None
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What was kept under a name, or what is made now: JSON types."""
        if self.folder is None:
            return make()
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"name": name, "value": make()}))
            partial.rename(path)
        return json.loads(path.read_text())["value"]


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


def rules_file(dictionary: Path, words: bool) -> str:
    """``is_KIND`` is detected where a sentence names the individual and then a kind."""
    lines = [f"dictionary: {dictionary}", "concepts:", f"  person: {{words: [{', '.join(PEOPLE)}]}}"]
    lines += [f"  box: {{words: ['{BOX}']}}"]
    if words:
        lines += [f"  {kind}: {{words: [{kind}]}}" for kind in KINDS]
    lines += ["propositions:", "  box: {scope: output, hold: 0}"]
    lines += [f"  is_{kind}: {{pattern: [person, {kind}], scope: prompt}}" for kind in KINDS]
    lines += ["rules: ['yes -> yes', 'no -> no']", "actions:"]
    for verdict, answer in (("yes", "True"), ("no", "False")):
        lines += [f"  - {{when: '{verdict}', log: true}}", f"  - {{when: '{verdict} and box', force: ['{answer}']}}"]
        lines += [f"  - {{when: '{verdict} and box', steer: {{concept: '{answer}', strength: 1.0, layers: [LAYER]}}}}"]
    return "\n".join(lines) + "\n"


Found = list[tuple[str | None, str | None, str | None, list[str]]]
"""Of each question: the answer, the answer with a forced token (None: none), the verdict, and what was detected."""


class Bench:
    """A model, its tokenizer and what was computed with them."""

    def __init__(self, folder: str, journal: Path | None, trainer: str = "own") -> None:
        self.folder, self.trainer = folder, trainer
        self.model, self.tokenizer = load(folder)
        self.journal = Journal(journal, Path(folder))
        self.trained: dict[str, float] = {}
        """What is known of the SAE that was trained last."""
        self.vocabulary = Vocabulary(self.tokenizer, self.model.config.vocab_size)
        self.identity = ModelIdentity.of(self.model.config, dtype=torch.float32, tokenizer=self.tokenizer)
        self.box = self.tokenizer.encode(BOX, add_special_tokens=False)[-1]
        self.answer = {name: self.tokenizer.encode(name, add_special_tokens=False)[0] for name in ANSWERS}
        self.pieces = {kind: [self.tokenizer.convert_tokens_to_ids(form) for form in (kind, f"Ġ{kind}")] for kind in KINDS}

    def ask(self, name: str, problems: Sequence[Problem], seed: int = 0) -> list[Asked]:
        """Let the model think."""
        found = []
        for at in range(0, len(problems), CHUNK):
            part = problems[at : at + CHUNK]
            prompt = [self.tokenizer.encode(text, add_special_tokens=False) for text in prompts(self.tokenizer, part)]

            def think(part: Sequence[Problem] = part, at: int = at) -> list[list[int] | None]:
                say(f"{name}: questions from {at}")
                ids = [r.ids for r in sample_hf(self.model, self.tokenizer, part, seed=seed + at).responses]
                return [one[: one.index(self.box) + 1] if self.box in one else None for one in ids]

            thoughts = self.journal.keep(f"thoughts {name} {at} {len(part)} {seed}", think)
            found += [Asked(*row) for row in zip(part, prompt, thoughts, strict=True)]
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

    def sae(self, layer: int, folder: Path) -> Sae:
        """Train one on prompts of the training split."""
        rng = random.Random("ontology/sae")
        problems = [draw(TASK, rng, rng.choice(TASK.levels), "train") for _ in range(SAE_TEXTS)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.txt").write_text("\n".join(prompts(self.tokenizer, problems)))
        sizes = {"--width": SAE_WIDTH, "--k": SAE_ACTIVE, "--steps": SAE_STEPS, "--layer": layer}
        options = [text for name, value in sizes.items() for text in (name, str(value))] + ["--trainer", self.trainer]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            train_sae([self.folder, *options, "--text", str(folder / "corpus.txt"), "--out", str(folder / "sae")])
        self.trained = json.loads(said.getvalue())
        say(f"SAE behind layer {layer}: {self.trained}")
        return load_sae(folder / "sae", self.model.config.hidden_size)

    def kinds(
        self, asked: Sequence[Asked], layer: int, method: str, criterion: str, sae: Sae | None
    ) -> tuple[list[Concept], dict[str, float]]:
        """Concepts of the classes, over prompts' tokens; figures are of the half that only calibrates."""
        states = [state[layer] for state in self.states(asked, (layer,))]
        concepts, aucs = list[Concept](), []
        for kind in KINDS:
            examples = []
            for number, (one, state) in enumerate(zip(asked, states, strict=True)):
                label = torch.tensor([token in self.pieces[kind] for token in one.prompt[1:]])
                examples.append(Encoded(state[1 : len(one.prompt)], {kind: label}, number % 2 == 1))
            concept = find(kind, examples, METHODS[method], sae)
            if criterion == "f1":
                cut = best_f1(concept, [e for e in examples if e.held_out])
                concept = replace(concept, thresholds={**concept.thresholds, "token": cut})
            concepts.append(concept)
            aucs.append(concept.report["token/auc"])
        return concepts, {"auc": sum(aucs) / len(aucs), "auc_least": min(aucs)}

    def answers(self, asked: Sequence[Asked], layer: int) -> list[Concept]:
        """``True`` and ``False``, by the difference of means where the box opens."""
        thought = [one for one in asked if one.thought]
        at_box = [(o.problem.answer, s[layer][-1]) for o, s in zip(thought, self.states(thought, (layer,)), strict=True)]
        centre = {name: torch.stack([state for answer, state in at_box if answer == name]).mean(0) for name in ANSWERS}
        return [
            direction_concept(name, unit(centre[name] - centre[other]), 0.0, dict.fromkeys(LEVELS, 0.0))
            for name, other in (ANSWERS, ANSWERS[::-1])
        ]

    @torch.inference_mode()
    def alone(self, asked: Sequence[Asked]) -> list[str | None]:
        """What the model writes into its box."""
        names, found = {token: name for name, token in self.answer.items()}, list[str | None]()
        for one in asked:
            logits = self.model(torch.tensor([[*one.prompt, *(one.thought or ())]]), logits_to_keep=1).logits[0, -1]
            found.append(names.get(int(logits.argmax())) if one.thought else None)
        return found

    def arm(
        self, name: str, asked: Sequence[Asked], rules: Sequence[Sequence[str]], dictionary: Path, words: bool,
        steered: int, strength: float,
    ) -> Found:  # fmt: skip
        """Ask with rules of each question's own.

        Args:
            name: under which it is kept.
            dictionary: of an artifact.
            words: classes are found by their words.
            steered: layer behind which answers are steered.
        """
        text = rules_file(dictionary, words).replace("LAYER", str(steered))
        made = Shelf(self.identity, paths=True)
        declared = ActivationReasoningParams(rules=text, allow_rules=RULES, strength=strength).resolve(self.vocabulary, made)
        shelf = Shelf(self.identity, named=tuple(made.read), declared=(declared,))
        size = self.model.config
        longest = max(len(one.prompt) + len(one.thought or ()) for one in asked)
        context = Context(
            BATCH + 1, torch.device("cpu"), size.vocab_size, size.num_hidden_layers, size.hidden_size, longest, shelf=shelf
        )
        runtime = Runtime(context, Markers(), declared=(Steer(ActivationReasoning, declared),))
        found: Found = []
        for at in range(0, len(asked), CHUNK):
            part = range(at, min(at + CHUNK, len(asked)))

            def run(part: range = part) -> Found:
                say(f"{name}: questions from {part[0]}")
                rows: Found = []
                for start in range(part.start, part.stop, BATCH):
                    here = slice(start, min(start + BATCH, part.stop))
                    rows += self._run(runtime, asked[here], rules[here], shelf, strength)
                return rows

            key = f"arm {name} {digest_of(declared.program or '')} {strength} {part} {hashed(asked[at : part.stop])}"
            found += [(a, f, v, seen) for a, f, v, seen in self.journal.keep(key, run)]
        return found

    @torch.inference_mode()
    def _run(
        self, runtime: Runtime, asked: Sequence[Asked], rules: Sequence[Sequence[str]], shelf: Shelf, strength: float
    ) -> Found:
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
        names = {token: name for name, token in self.answer.items()}
        steered = [names.get(token) for token in logits.argmax(1).tolist()]
        # Where there is no verdict nothing is steered, so what is not forced is the model's own.
        runtime.logits(logits, slot[:, 0], position[:, -1])
        forced = [names.get(token) for token in logits.argmax(1).tolist()]
        plugin: Any = runtime.plugin(ActivationReasoning)
        actions, width = parse_program(shelf.declared[0].program).actions, len(plugin.detector.literals)
        found: Found = [(None, None, None, [])] * len(asked)
        for number, index in enumerate(there):
            # What traces are made of, without their proofs.
            moments, _ = plugin.history.entries(number)
            acting = [actions[column - width] for column in (moments[-1][1] if moments else ()) if column >= width]
            verdicts = [action.when for action in acting if action.kind == "log"]
            verdict = {"yes": "True", "no": "False"}[verdicts[0]] if len(verdicts) == 1 else None
            facts = {plugin.detector.literals[column][1].atom for _, true in moments for column in true if column < width}
            found[index] = steered[number], forced[number], verdict, sorted(a for a in facts if a.startswith("is_"))
            runtime.release(number)
        return found


def hashed(asked: Sequence[Asked]) -> str:
    return hashlib.sha256(json.dumps([(one.prompt, one.thought) for one in asked]).encode()).hexdigest()[:12]


def best_f1(concept: Concept, examples: Sequence[Encoded]) -> float:
    """Midway between two neighbouring scores of tokens, where F1 is highest."""
    score = torch.cat([concept.score(e.hidden) for e in examples]).double()
    label = torch.cat([e.labelled[concept.name] for e in examples])
    value, order = score.sort(descending=True)
    hits = label[order].double().cumsum(0)
    f1 = 2 * hits / (torch.arange(1, len(hits) + 1) + label.sum())
    f1 = torch.where(value[:-1] > value[1:], f1[:-1], -1.0)
    at = int(f1.argmax())
    return float((value[at] + value[at + 1]) / 2)


def f1_of(found: Found, asked: Sequence[Asked]) -> float:
    """Of the propositions ``is_KIND`` of all questions: micro F1."""
    gold = [{f"is_{TASK.walk(one.problem).kind}"} if one.thought else set() for one in asked]
    hits = sum(len(set(seen) & true) for (*_, seen), true in zip(found, gold, strict=True))
    return 2 * hits / max(sum(len(seen) for *_, seen in found) + sum(map(len, gold)), 1)


def solver(problem: Problem) -> bool:
    """Parse, then solve: without a model."""
    *context, question = problem.prompt.split(". ")
    person, goal = question.removeprefix("Is ").removesuffix("?").split()
    logic = LogicProblem("", ". ".join(context) + ".", f"{person} is {goal}.", ANSWERS, problem.answer)
    return parse_then_solve(logic) == problem.answer


def write(
    bench: Bench, folder: Path, concepts: Sequence[Concept], answers: Sequence[Concept], layer: int, sae: Sae | None
) -> Path:
    Dictionary.of([*concepts, *answers], layer, sae).to_artifact(bench.identity, {}).save(folder)
    return folder


def randomly(concepts: Sequence[Concept], seed: int = 0) -> list[Concept]:
    """The same, which steer in random directions."""
    generator = torch.Generator().manual_seed(seed)
    return [replace(c, steer=unit(torch.randn(c.steer.shape, generator=generator))) for c in concepts]


def training(bench: Bench, name: str, count: int) -> list[Asked]:
    """Questions of the training split, another stream for each name."""
    rng = random.Random(f"ontology/{name}")
    return bench.ask(name, [draw(TASK, rng, rng.choice(TASK.levels), "train") for _ in range(count)], seed=1)


def fresh(level: int, count: int, seed: int) -> list[Problem]:
    """Held-out questions that seed 0 does not ask."""
    if not seed:
        return held_out(TASK, level, count)
    known = {problem.canonical for problem in held_out(TASK, level, max(count, 2000))}
    return [p for p in held_out(TASK, level, count + 500, seed) if p.canonical not in known][:count]


def accuracy(answers: Sequence[str | None], asked: Sequence[Asked]) -> float:
    return sum(answer == one.problem.answer for answer, one in zip(answers, asked, strict=True)) / len(asked)


def select_detection(bench: Bench, options: Any, figures: dict[str, float]) -> None:
    """F1 of propositions, of each method and layer, on questions of the training split."""
    known, chosen = training(bench, "train", options.train), training(bench, "select", options.count)
    rules = [rules_of(one.problem) for one in chosen]
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        for layer in options.layers:
            answers, sae = bench.answers(known, layer), bench.sae(layer, at / f"sae{layer}")
            for method in METHODS:
                name = f"{method}.{options.criterion}.{layer}"
                concepts, _ = bench.kinds(known, layer, method, options.criterion, sae)
                folder = write(bench, at / name, concepts, answers, layer, sae)
                figures[f"f1.{name}"] = f1_of(bench.arm(name, chosen, rules, folder, False, layer, 0.0), chosen)
                say(f"{name}: {figures[f'f1.{name}']:.3f}")


def select_steering(bench: Bench, options: Any, figures: dict[str, float]) -> None:
    """Accuracy of steered answers, of each layer and strength, on questions of the training split; classes by words."""
    known, chosen = training(bench, "train", options.train), training(bench, "select", options.count)
    rules = [rules_of(one.problem) for one in chosen]
    figures["model"] = accuracy(bench.alone(chosen), chosen)
    with tempfile.TemporaryDirectory() as temporary:
        for layer in options.layers:
            answers = bench.answers(known, layer)
            for kind, steers in (("steered", answers), ("random", randomly(answers))):
                folder = write(bench, Path(temporary) / f"{kind}.{layer}", (), steers, 0, None)
                for strength in options.strengths:
                    found = bench.arm(f"{kind} {layer}", chosen, rules, folder, True, layer, strength)
                    figures[f"{kind}.{layer}.{strength:g}"] = accuracy([answer for answer, *_ in found], chosen)
                    say(f"{kind} {layer} {strength:g}: {figures[f'{kind}.{layer}.{strength:g}']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=2000, help="questions of each number of hops; with --select, of all")
    parser.add_argument("--train", type=int, default=600, help="training questions that concepts come from")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--seed", type=int, default=1, help="of the held-out questions")
    parser.add_argument("--detections", nargs="+", choices=list(METHODS), default=["probe", "top_k"])
    parser.add_argument("--criterion", choices=("balanced", "f1"), default="f1", help="what thresholds of tokens maximise")
    parser.add_argument("--detect", type=int, default=0, help="layer behind which propositions are detected")
    parser.add_argument("--steered", type=int, default=2, help="layer behind which answers are steered")
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0])
    parser.add_argument("--select", choices=("detection", "steering"), help="compare configurations on the training split")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2], help="that --select compares")
    parser.add_argument("--trainer", choices=("own", "sae-lens"), default="own", help="of the SAE; sae-lens must be there")
    parser.add_argument("--journal", type=Path, help="folder in which results are kept")
    parser.add_argument("--quick", action="store_true", help="a few questions of one kind: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.count, options.train, options.hops, options.strengths, options.detections = 4, 80, [1], [0.5], ["probe"]
        options.layers = [0]
    bench = Bench(options.model, options.journal, options.trainer)
    figures: dict[str, float] = {}
    {"detection": select_detection, "steering": select_steering, None: test}[options.select](bench, options, figures)
    setup = {**machine(), "questions": options.count, "detect": options.detect, "steered": options.steered}
    if options.json:
        print_json("ontology", setup, figures)
        return
    print(in_words(setup))
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


def test(bench: Bench, options: Any, figures: dict[str, float]) -> None:
    known = training(bench, "train", options.train)
    answers = bench.answers(known, options.steered)
    with tempfile.TemporaryDirectory() as temporary:
        at, folders = bench.journal.folder or Path(temporary), dict[str, Path]()
        name = f"{options.detect}.{options.criterion}.{options.steered}.{options.train}.{options.trainer}"
        for method in options.detections:
            folder = folders[method] = at / f"{method}.{name}"

            def fit(method: str = method, folder: Path = folder) -> dict[str, float]:
                sae = None if METHODS[method] in NO_SAE else bench.sae(options.detect, at / f"sae.{name}")
                concepts, report = bench.kinds(known, options.detect, method, options.criterion, sae)
                write(bench, folder, concepts, answers, options.detect, sae)
                write(bench, at / f"random.{method}.{name}", concepts, randomly(answers), options.detect, sae)
                return report | ({f"sae.{what}": value for what, value in bench.trained.items()} if sae else {})

            report = bench.journal.keep(f"fit {method} {name}", fit)
            figures |= {f"kinds.{method}.{what}": value for what, value in report.items()}
        folders["random"] = at / f"random.{options.detections[0]}.{name}"
        for hops in options.hops:
            measure(bench, hops, options, folders, figures)


def measure(bench: Bench, hops: int, options: Any, folders: dict[str, Path], figures: dict[str, float]) -> None:
    problems = fresh(hops, options.count, options.seed)
    asked = bench.ask(f"test {hops} {options.seed}", problems, seed=options.seed)
    own = [rules_of(problem) for problem in problems]
    others = [rules_of(problem) for problem in (*problems[1:], problems[0])]
    first = options.detections[0]
    right: dict[str, list[bool]] = {"solver": [solver(problem) for problem in problems]}

    def note(name: str, answers: Sequence[str | None]) -> None:
        right[name] = [answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]

    def arm(name: str, rules: Sequence[Sequence[str]], folder: Path, words: bool, strength: float) -> Found:
        return bench.arm(f"{name} {hops}", asked, rules, folder, words, options.steered, strength)

    note("model", bench.journal.keep(f"alone {hops} {hashed(asked)}", lambda: bench.alone(asked)))
    for detection in ("words", *options.detections):
        strength = options.strengths[0] if detection == first else 0.0
        found = arm(detection, own, folders.get(detection, folders[first]), detection == "words", strength)
        note(f"verdict.{detection}", [verdict for _, _, verdict, _ in found])
        note(f"forced.{detection}", [forced for _, forced, _, _ in found])
        figures[f"{hops}.propositions_f1.{detection}"] = f1_of(found, asked)
    for strength in options.strengths:
        for name, rules, folder in (
            ("", own, folders[first]), (".shuffled_rules", others, folders[first]), (".random", own, folders["random"])
        ):  # fmt: skip
            found = arm(name or first, rules, folder, False, strength)
            note(f"steered.{strength:g}{name}", [answer for answer, *_ in found])
            if name == ".shuffled_rules":
                note("forced.shuffled_rules", [forced for _, forced, _, _ in found])
    figures[f"{hops}.boxes"] = sum(one.thought is not None for one in asked) / len(asked)
    for name, values in right.items():
        estimate = mean(values)
        figures[f"{hops}.{name}"], figures[f"{hops}.{name}_error"] = estimate.value, estimate.error
        if name not in ("model", "solver"):
            figures[f"{hops}.{name}_gain"] = difference(values, right["model"]).value
            figures[f"{hops}.{name}_gain_error"] = difference(values, right["model"]).error
    mine = {name: value for name, value in figures.items() if name.startswith(f"{hops}.")}
    say(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in mine.items()]))


if __name__ == "__main__":
    main()
