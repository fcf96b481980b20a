"""What ReBalance does on the test bed, against each of its parts alone.

    python benchmarks/rebalance_testbed.py [--quick] [--json] [--artifact DIR]

The test bed's model thinks about chains of arithmetic (temperature 1, held-out problems); its training problems calibrate
the vector unless an artifact is given. Every arm answers the same problems with the same seeds:

* ``plain``: not steered;
* ``constant``: the vector at every step delimiter, with the mean coefficient that rebalance used (as in SEAL);
* ``random``: as constant, in a random direction of the same norm;
* ``shuffled``: coefficients drawn from those that rebalance used, whatever the confidence;
* ``rebalance``: the released code's rules; ``paper``: those of the paper.

For each arm: accuracy and tokens an answer, and their differences to plain and of rebalance to it, paired by problem, with
95 % intervals over problems. Every number is about a toy.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from llm_steer.eval.testbed import sampling
from llm_steer.eval.testbed import statistics as stats
from llm_steer.eval.testbed.arithmetic import Arithmetic
from llm_steer.eval.testbed.grading import grade
from llm_steer.eval.testbed.problem import Problem, draw, held_out
from llm_steer.plugins.rebalance import Rebalance, calibrate
from llm_steer.plugins.vector import ConstantVector, RandomVector
from measuring import in_words, machine, print_json, say, table

from llm_steer.artifact import load
from llm_steer.hosts import hf
from llm_steer.hosts.hf_steering import Steering
from llm_steer.spec import Spec, Steer, build

LEVEL = 6
ARMS = ("plain", "constant", "random", "shuffled", "rebalance", "paper")


class Shuffled(Rebalance):
    """Draws each new coefficient from a pool, instead of computing it from confidence."""

    name = "rebalance_shuffled"
    pool = torch.zeros(1, dtype=torch.float64)
    dice = torch.Generator()

    def _control(self, confidence: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return self.pool[torch.randint(len(self.pool), confidence.shape, generator=self.dice)]


class Bench:
    """One model, its problems, and what was answered."""

    def __init__(self, model: Any, tokenizer: Any, problems: list[Problem], seeds: int, batch: int) -> None:
        self.model, self.tokenizer, self.problems, self.seeds, self.batch = model, tokenizer, problems, seeds, batch

    def arm(self, spec: Spec) -> tuple[list[float], list[float], list[float], list[float]]:
        """Accuracy, tokens and share cut off of each problem, means over seeds; and the coefficients that were added."""
        right, tokens, cut = ([0.0] * len(self.problems) for _ in range(3))
        coefficients: list[float] = []
        hf.install(self.model, Traced(self.model, spec, self.tokenizer, coefficients))
        for seed in range(self.seeds):
            answers = sampling.sample_generate(self.model, self.tokenizer, self.problems, seed=seed, batch=self.batch)
            for i, (problem, response) in enumerate(zip(self.problems, answers.responses, strict=True)):
                right[i] += grade(problem, response.text) / self.seeds
                tokens[i] += len(response.ids) / self.seeds
                cut[i] += (not response.finished) / self.seeds
        hf.uninstall(self.model)
        return right, tokens, cut, coefficients


class Traced(Steering):
    """Gathers the coefficients of every call."""

    def __init__(self, model: Any, spec: Spec, tokenizer: Any, gathered: list[float]) -> None:
        super().__init__(model, spec, tokenizer)
        self.gathered = gathered

    def record(self, outcome: Any) -> None:
        super().record(outcome)
        for trace in outcome.live or ():
            self.gathered += trace["plugins"][0].get("coefficients", []) if trace else []


def calibrated(model: Any, tokenizer: Any, count: int, folder: Path, batch: int, **options: Any) -> Path:
    """An artifact from training problems."""
    dice = random.Random("rebalance_testbed")
    chats = [draw(Arithmetic(), dice, LEVEL, "train").messages for _ in range(count)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    settings = calibrate.Settings(json.dumps(chats), "", sampling.MAX_NEW_TOKENS, 1.0, 1.0, 0, batch)
    report = calibrate.run(model, tokenizer, prompts, folder, settings, **options)
    kept = ("layer", "r2", "constants", "relative_dose", "over", "under", "held_out")
    say(f"calibrated ({options}): " + json.dumps({key: report[key] for key in kept}))
    return folder


def specs(artifacts: dict[str, Path], strength: float, mean: float) -> dict[str, Spec]:
    """What each arm steers with; constant and random with the given mean coefficient."""
    open_loop = {"artifact": str(artifacts["reference"]), "coefficient": mean, "positions": "delimiters"}
    closed = {"artifact": str(artifacts["reference"]), "strength": strength}

    def one(plugin: Any, **fields: Any) -> Spec:
        return (Steer(plugin, build(plugin, fields)),)

    return {
        "plain": (),
        "constant": one(ConstantVector, **open_loop),
        "random": one(RandomVector, **open_loop),
        "shuffled": one(Shuffled, **closed),
        "rebalance": one(Rebalance, **closed),
        "paper": one(Rebalance, **{**closed, "artifact": str(artifacts.get("paper"))}, mode="paper"),
    }


def compare(values: list[float], base: list[float]) -> dict[str, float]:
    found = stats.difference(values, base)
    return {"difference": found.value, "low": found.value - 1.96 * found.error, "high": found.value + 1.96 * found.error}


def interval(found: dict[str, float], digits: int) -> str:
    return f"{found['difference']:+.{digits}f} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"


def run(bench: Bench, artifacts: dict[str, Path], strength: float, arms: list[str]) -> tuple[dict[str, Any], str]:
    """Figures by name, and the tables."""
    measured: dict[str, tuple[list[float], list[float], list[float], list[float]]] = {}
    mean = -1.0
    for name in ("plain", "rebalance", *(arm for arm in arms if arm not in ("plain", "rebalance"))):
        measured[name] = bench.arm(specs(artifacts, strength, mean)[name])
        if name == "rebalance":
            Shuffled.pool = torch.tensor(measured[name][3] or [0.0], dtype=torch.float64) / max(strength, 1e-9)
            Shuffled.dice.manual_seed(0)
            mean = float(Shuffled.pool.mean()) * strength
        right, tokens, _, coefficients = measured[name]
        say(f"{name}: accuracy {stats.mean(right)}, tokens {stats.mean(tokens)}, {len(coefficients)} coefficients")
    figures: dict[str, Any] = {"mean_coefficient": mean}
    rows = []
    for name in [arm for arm in ARMS if arm in measured]:
        right, tokens, cut, _ = measured[name]
        figures[f"{name}.accuracy"], figures[f"{name}.tokens"] = stats.mean(right).value, stats.mean(tokens).value
        figures[f"{name}.cut"] = stats.mean(cut).value
        row = [
            name,
            f"{figures[f'{name}.accuracy']:.4f}",
            f"{figures[f'{name}.tokens']:.1f}",
            f"{figures[f'{name}.cut']:.1%}",
        ]
        for label, base in (("plain", measured["plain"]), ("rebalance", measured["rebalance"])):
            if name == label:
                row += ["", ""]
                continue
            for index, (what, digits) in enumerate((("accuracy", 4), ("tokens", 1))):
                found = compare(measured[name][index], base[index])
                figures |= {f"{name}.{what}_against_{label}.{key}": value for key, value in found.items()}
                row.append(interval(found, digits))
        rows.append(row)
    head = [
        "",
        "accuracy",
        "tokens",
        "cut off",
        "accuracy - plain",
        "tokens - plain",
        "accuracy - rebalance",
        "tokens - rebalance",
    ]
    return figures, table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems: shows that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, default=Path(sampling.__file__).parent / "models" / "arithmetic")
    parser.add_argument("--artifact", type=Path, help="calibrated already, with mode=reference; default: calibrated here")
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--calibration", type=int, default=500, help="training problems to calibrate on")
    parser.add_argument("--states", choices=("first", "delimiter"), default="first", help="what the vector is learnt from")
    parser.add_argument("--layer", type=int, help="instead of choosing one")
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    if options.quick:
        options.problems, options.seeds, options.calibration = min(options.problems, 40), 1, min(options.calibration, 60)
    setup = {**machine(), "problems": options.problems, "seeds": options.seeds, "strength": options.strength, "level": LEVEL}
    setup |= {"states": options.states}
    model, tokenizer = sampling.load(options.model)
    problems = held_out(Arithmetic(), LEVEL, options.problems)
    with TemporaryDirectory() as folder:
        artifacts = {}
        for mode in ("reference", "paper") if "paper" in options.arms else ("reference",):
            if mode == "reference" and options.artifact:
                artifacts[mode] = options.artifact
                continue
            if "reference" in artifacts and not options.artifact:  # the outputs are the same
                (Path(folder) / mode).mkdir()
                shutil.copy(artifacts["reference"] / calibrate.OUTPUTS, Path(folder) / mode)
            how = {"mode": mode, "states": options.states, "layer": options.layer}
            made = Path(folder) / mode
            artifacts[mode] = calibrated(model, tokenizer, options.calibration, made, options.batch, **how)
        description = load(artifacts["reference"], "rebalance").description
        setup |= {"layer": description.layer, "relative_dose": description.relative_dose, "model": description.model.id}
        figures, text = run(
            Bench(model, tokenizer, problems, options.seeds, options.batch), artifacts, options.strength, options.arms
        )
    if options.json:
        print_json("rebalance_testbed", setup, figures)
    else:
        print(in_words(setup), text, sep="\n\n")


if __name__ == "__main__":
    main()
