"""Three ways of reasoning and one vote on the test bed's entailment task, against as many samples of the best way.

    python benchmarks/mixture_testbed.py [--quick] [--json] [--cache DIR] [--problems N] [--models DIR]

The test bed's ``logic`` model answers each problem in words, as a program and by a table (temperature 1), some of them
several times. From these answers every method is computed with mixture_of_thought's own hooks, on the same problems:

* ``natural``, ``code``, ``table``: one answer, as its text says; ``code:run``, ``table:run``: what checking it computes,
  the text only where nothing can be computed (``disagreement="verified"``);
* ``majority``, ``weighted``, ``verified`` of one answer each; ``:run`` as above;
* ``WAY*3``: self-consistency, as many samples as the mixture has; ``WAY*tokens``: as many tokens (a number of samples that
  differs by one between problems, so that the mean is the mixture's);
* ``solver:code``, ``solver:table``: what was computed alone, nothing where that fails; ``solver:question``: the problem
  parsed by rules and decided, with no model at all.

Methods are held against self-consistency of the best way, as many samples and as many tokens. The best way, and the order
of trust that decides ties, are chosen on other problems (``--selection``). Differences are paired by problem, with 95 %
bootstrap intervals. ``early``: the same votes with answers arriving in the order of their length; requests and tokens that
need not be waited for.

Answers are kept in ``--cache`` as they come: a run that was stopped, or one with more problems, goes on where it was. Every
number is about a toy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from llm_steer.eval.statistics import avg_at_k, compare
from llm_steer.eval.testbed import MODELS, sampling
from llm_steer.eval.testbed.entailment import Entailment, make_problem, parse_prompt
from llm_steer.eval.testbed.problem import Problem, held_out
from llm_steer.eval.testbed.propositions import decide
from llm_steer.plugins.mixture_of_thought import MixtureOfThoughtParams
from measuring import in_words, machine, print_json, say, table
from mixture_checks import TestbedMixture

from llm_steer.engines.base import Response

SPOKEN = {"natural": "words", "code": "code", "table": "table"}
"""Modalities of the plugin, and what the test bed calls them."""
WAYS = ("natural", "code", "table", "code:run", "table:run")
VOTES = ("majority", "weighted", "verified", "majority:run", "weighted:run", "verified:run")
MOST = 16
"""Samples of one modality, however cheap it is."""
CHUNK = 500


@dataclass(frozen=True)
class Said:
    """One answer of the model."""

    text: str
    tokens: int
    finished: bool


class Answers:
    """Answers to a list of problems, drawn when they are asked for and kept in a folder."""

    def __init__(self, folder: Path, models: Path, problems: Sequence[Problem], label: str) -> None:
        self.problems, self.models, self.label = problems, models, label
        weights = hashlib.sha256((models / "model.safetensors").read_bytes()).hexdigest()
        self.folder = folder / weights[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[tuple[str, int], float] = {}
        """Wall-clock time of decoding each sample of all problems."""
        self._drawn: dict[tuple[str, int], list[Said]] = {}

    def of(self, modality: str, sample: int) -> list[Said]:
        key = (modality, sample)
        if key not in self._drawn:
            chunks = [self._chunk(modality, sample, start) for start in range(0, len(self.problems), CHUNK)]
            self._drawn[key] = [Said(**said) for chunk in chunks for said in chunk["said"]]
            self.seconds[key] = math.fsum(chunk["seconds"] for chunk in chunks)
        return self._drawn[key]

    def _chunk(self, modality: str, sample: int, start: int) -> dict[str, Any]:
        part = self.problems[start : start + CHUNK]
        asked = hashlib.sha256(json.dumps([problem.prompt for problem in part]).encode()).hexdigest()
        path = self.folder / f"{modality}-{sample}-{asked[:12]}.json"
        if not path.exists():
            model, tokenizer = loaded(self.models)
            problems = [make_problem(*parse_prompt(p.prompt), p.level, SPOKEN[modality]) for p in part]
            seed = random.Random(path.stem).getrandbits(32)
            drawn = sampling.sample_hf(model, tokenizer, problems, seed=seed)
            said = [asdict(Said(r.text, len(r.ids) + r.finished, r.finished)) for r in drawn.responses]
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"seconds": drawn.seconds, "said": said}))
            partial.rename(path)
            each = drawn.tokens / len(said)
            say(f"{self.label}, {modality} {sample} from {start}: {each:.0f} tokens an answer, {drawn.seconds:.0f} s")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def tokens(self, modality: str) -> float:
        """Mean of an answer."""
        return math.fsum(said.tokens for said in self.of(modality, 0)) / len(self.problems)


@cache
def loaded(models: Path) -> tuple[Any, Any]:
    model, tokenizer = sampling.load(models)
    return model, tokenizer


class Poll:
    """The methods on one list of problems. A method is a vote of the plugin on some of the answers."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.truth = [problem.answer for problem in answers.problems]
        self._read: dict[tuple[int, str, int, str], tuple[Response, dict[str, Any]]] = {}

    def vote(self, way: str, modalities: Sequence[str], counts: Sequence[int], **params: Any) -> Method:
        """A vote on ``counts[i]`` samples of every modality for problem i.

        Args:
            way: ``RULE`` or ``RULE:run``.
        """
        right, tokens, given = [], [], []
        for i, count in enumerate(counts):
            settings = _params(way, tuple(modalities), count)
            told = [self._reading(i, index, settings) for index in range(len(settings.plan))]
            _, result = TestbedMixture.combine(
                self._request(i), [response for response, _ in told], [reading for _, reading in told], settings
            )
            right.append(float(result["answer"] == self.truth[i]))
            given.append(result["answer"])
            tokens.append(sum(response.tokens for response, _ in told))
        seconds = 0.0
        for sample in range(max(counts)):
            share = sum(count > sample for count in counts) / len(counts)
            seconds += share * sum(self.answers.seconds[m, sample] for m in modalities)
        return Method(np.array(right)[:, None], sum(tokens) / len(counts), seconds, given)

    def solver(self, modality: str) -> Method:
        """What was computed, and nothing else."""
        settings = _params("majority:run", (modality,), 1)
        checks = [self._reading(i, 0, settings)[1].get("check") or {} for i in range(len(self.truth))]
        right = [float(check.get("answer") == truth) for check, truth in zip(checks, self.truth, strict=True)]
        given = [check.get("answer") for check in checks]
        return Method(np.array(right)[:, None], self.answers.tokens(modality), self.answers.seconds[modality, 0], given)

    def by_rules(self) -> Method:
        """No model: the question parsed and decided."""
        began = time.perf_counter()
        given = [decide(*parse_prompt(problem.prompt)) for problem in self.answers.problems]
        seconds = time.perf_counter() - began
        right = [float(said == truth) for said, truth in zip(given, self.truth, strict=True)]
        return Method(np.array(right)[:, None], 0.0, seconds, list(given))

    def early(self, way: str, modalities: Sequence[str], count: int = 1) -> dict[str, float]:
        """The same vote with answers that arrive in the order of their length."""
        settings = _params(way, tuple(modalities), count)
        plan = len(settings.plan)
        saved_requests = saved_tokens = all_tokens = same = 0
        for i in range(len(self.truth)):
            request = self._request(i)
            told = [self._reading(i, index, settings) for index in range(plan)]
            readings: list[dict[str, Any] | None] = [None] * plan
            now = 0
            for index in sorted(range(plan), key=lambda j: told[j][0].tokens):
                readings[index] = told[index][1]
                now = told[index][0].tokens
                if TestbedMixture.decided(request, readings, settings):
                    break
            left = [told[j][0].tokens - now for j in range(plan) if readings[j] is None]
            saved_requests += len(left)
            saved_tokens += sum(left)
            all_tokens += sum(response.tokens for response, _ in told)
            whole, part = (
                TestbedMixture.combine(request, [response for response, _ in told], some, settings)[1]["answer"]
                for some in ([reading for _, reading in told], readings)
            )
            same += whole == part
        total = len(self.truth)
        return {"requests": saved_requests / (total * plan), "tokens": saved_tokens / all_tokens, "same": same / total}

    def _request(self, i: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.answers.problems[i].prompt}]}

    def _reading(self, i: int, index: int, settings: MixtureOfThoughtParams) -> tuple[Response, dict[str, Any]]:
        modality = settings.plan[index]
        sample = settings.plan[:index].count(modality)
        key = (i, modality, sample, settings.disagreement)
        if key not in self._read:
            said = self.answers.of(modality, sample)[i]
            response = Response(said.text, "stop" if said.finished else "length", tokens=said.tokens)
            self._read[key] = response, TestbedMixture.read(self._request(i), index, response, settings)
        return self._read[key]


@dataclass
class Method:
    """One method on all problems."""

    right: Any
    """float64 [problems, 1]."""
    tokens: float
    """Of a problem, mean."""
    seconds: float
    """Wall-clock time of decoding for all problems."""
    given: list[str | None]


@cache
def _params(way: str, modalities: tuple[str, ...], count: int) -> MixtureOfThoughtParams:
    rule, _, run = way.partition(":")
    fields = {"modalities": list(modalities), "n": count, "vote": rule, "disagreement": "verified" if run else "text"}
    return MixtureOfThoughtParams.model_validate(fields)


def equal_counts(mean: float, problems: int) -> list[int]:
    """Whole numbers that are one apart at most, with this mean."""
    high = round((mean - math.floor(mean)) * problems)
    counts = [math.floor(mean) + (i < high) for i in range(problems)]
    random.Random(0).shuffle(counts)
    return counts


def problems_of(levels: Sequence[int], count: int, selection: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Held-out problems to compare on, and others to choose on; of every level as many. More of the first begin with the
    same ones."""
    drawn = [held_out(Entailment("words"), level, -(-(count + selection) // len(levels)), seed) for level in levels]
    mixed = [problem for row in zip(*drawn, strict=True) for problem in row]
    return mixed[selection : selection + count], mixed[:selection]


def measure(asked: Answers, chosen: Answers) -> tuple[dict[str, Any], str]:
    """Figures by name, and the tables."""
    total = len(asked.problems)
    selection = Poll(chosen)
    # As good as each way is elsewhere, so much it is trusted.
    elsewhere = {way: selection.vote(*_single(way), [1] * len(chosen.problems)) for way in WAYS}
    merit = {way: float(method.right.mean()) for way, method in elsewhere.items()}
    say("chosen on other problems: " + ", ".join(f"{way} {value:.3f}" for way, value in merit.items()))
    cost = {modality: chosen.tokens(modality) for modality in SPOKEN}
    best = max(WAYS, key=merit.__getitem__)
    poll = Poll(asked)
    ones = [1] * total
    for modality in SPOKEN:
        asked.of(modality, 0)
    methods: dict[str, Method] = {way: poll.vote(*_single(way), ones) for way in WAYS}
    for way in VOTES:
        methods[way] = poll.vote(way, _trusted(merit, way), ones)
    for way in WAYS:
        rule, (modality,) = _single(way)
        counts = equal_counts(min(sum(cost.values()) / cost[modality], MOST), total)
        for sample in range(1, max(3, *counts)):
            asked.of(modality, sample)
        methods[f"{way}*3"] = poll.vote(rule, [modality], [3] * total)
        methods[f"{way}*tokens"] = poll.vote(rule, [modality], counts)
    for modality in ("code", "table"):
        methods[f"solver:{modality}"] = poll.solver(modality)
    methods["solver:question"] = poll.by_rules()
    bases = {"best*3": methods[f"{best}*3"], "best*tokens": methods[f"{best}*tokens"]}
    early = {way: poll.early(way, _trusted(merit, way)) for way in VOTES}
    figures: dict[str, Any] = {"problems": total, "best": best, **{f"elsewhere.{way}": v for way, v in merit.items()}}
    rows = []
    for name, method in methods.items():
        accuracy = avg_at_k(method.right)
        figures |= {
            f"{name}.accuracy": accuracy.value,
            f"{name}.accuracy_low": accuracy.low,
            f"{name}.accuracy_high": accuracy.high,
            f"{name}.tokens": method.tokens,
            f"{name}.seconds": method.seconds,
            f"{name}.unanswered": method.given.count(None) / total,
        }
        row = [name, f"{accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"]
        for label, base in bases.items():
            found = compare(method.right, base.right)
            difference = found.difference
            figures |= {
                f"{name}-{label}": difference.value,
                f"{name}-{label}_low": difference.low,
                f"{name}-{label}_high": difference.high,
            }
            row.append(f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]")
        rows.append([*row, f"{method.tokens:.0f}", f"{method.seconds:.0f}"])
    head = ["", "accuracy", f"against {best}*3", f"against {best}*tokens", "tokens", "seconds"]
    text = table(head, rows)
    levels = sorted({problem.level for problem in asked.problems})
    at = np.array([problem.level for problem in asked.problems])
    rows = [
        [name, *(f"{method.right[at == level].mean():.3f}" for level in levels)]
        for name, method in methods.items()
        if "*" not in name
    ]
    text += "\n\n" + table(["by level", *map(str, levels)], rows)
    for name, method in methods.items():
        figures |= {f"{name}.level_{level}": float(method.right[at == level].mean()) for level in levels}
    for way, saved in early.items():
        figures |= {f"early.{way}.{key}": value for key, value in saved.items()}
    rows = [[way, *(f"{saved[key]:.1%}" for key in ("requests", "tokens", "same"))] for way, saved in early.items()]
    text += "\n\n" + table(["early", "requests saved", "tokens saved", "same answer"], rows)
    return figures, text


def _single(way: str) -> tuple[str, list[str]]:
    """Rule and modality of one way alone."""
    modality, _, run = way.partition(":")
    return f"majority:{run}" if run else "majority", [modality]


def _trusted(merit: dict[str, float], way: str) -> list[str]:
    """Modalities, the best first."""
    run = way.endswith(":run")

    def value(modality: str) -> float:
        return merit.get(f"{modality}:run", merit[modality]) if run else merit[modality]

    return sorted(SPOKEN, key=value, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few problems: shows that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cache", type=Path, help="folder for the model's answers; left out, they are not kept")
    parser.add_argument("--problems", type=int, help="to compare on (2000)")
    parser.add_argument("--selection", type=int, help="other problems to choose the best way on (500)")
    parser.add_argument("--levels", type=int, nargs="+", default=[3, 4, 5], help="numbers of atoms (3 4 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    parser.add_argument("--models", type=Path, help="the checkpoint (the test bed's logic)")
    options = parser.parse_args()
    models = options.models or Path(MODELS) / "logic"
    count = options.problems or (30 if options.quick else 2000)
    selection = options.selection or (12 if options.quick else 500)
    setup = {**machine(), "problems": count, "levels": options.levels, "seed": options.seed}
    problems, others = problems_of(options.levels, count, selection, options.seed)
    with nullcontext(options.cache) if options.cache else TemporaryDirectory() as folder:
        asked, chosen = (Answers(Path(folder), models, *of) for of in ((problems, "asked"), (others, "selection")))
        figures, text = measure(asked, chosen)
    if options.json:
        print_json("mixture_testbed", setup, figures)
    else:
        print(f"{in_words(setup)}\n\n{text}")


if __name__ == "__main__":
    main()
