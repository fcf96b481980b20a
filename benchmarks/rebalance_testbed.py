"""What ReBalance does on the test bed, against each of its parts alone.

    python benchmarks/rebalance_testbed.py [--quick] [--json] [--out DIR]

The test bed's model thinks about chains of arithmetic (temperature 1, held-out problems); its training problems calibrate
the vector. Every arm answers the same problems with the same seeds. With ``--out`` everything is kept in a folder, block by
block: the same command goes on where it was stopped, and one with more problems, seeds or arms adds what is missing. Arms:

* ``plain``: not steered;
* ``constant``: the vector at every step delimiter, with the mean coefficient that rebalance used (as in SEAL);
* ``random``: as constant, in a random direction of the same norm;
* ``shuffled``: coefficients drawn from those that rebalance used, whatever the confidence;
* ``rebalance``: the released code's rules; ``paper``: those of the paper, with a vector of their own.

For each arm: accuracy and tokens an answer, and their differences to plain and of rebalance to it, paired by problem, with
95 % intervals over problems. Every number is about a toy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
from dataclasses import dataclass, field
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
from llm_steer.spec import Spec, Steer, build, to_wire

LEVEL = 6
BLOCK = 250
"""Problems that are answered together."""
ARMS = ("plain", "constant", "random", "shuffled", "rebalance", "paper")


class Shuffled(Rebalance):
    """Draws each new coefficient from a pool, instead of computing it from confidence."""

    name = "rebalance_shuffled"
    pool = torch.zeros(1, dtype=torch.float64)
    dice = torch.Generator()

    def _control(self, confidence: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return self.pool[torch.randint(len(self.pool), confidence.shape, generator=self.dice)]


@dataclass
class Arm:
    """Accuracy, tokens and share cut off of each problem, means over seeds; and the coefficients that were added."""

    right: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)


class Bench:
    """One model, its problems, and what was answered, in a folder."""

    def __init__(self, model: Any, tokenizer: Any, problems: list[Problem], seeds: int, folder: Path) -> None:
        self.model, self.tokenizer, self.problems, self.seeds, self.folder = model, tokenizer, problems, seeds, folder

    def arm(self, spec: Spec, salt: str = "") -> Arm:
        """
        Args:
            salt: what decides the answers beside problems, seeds and steering.
        """
        found, made = Arm(), [load(Path(steer.params.artifact), "rebalance") for steer in spec]  # type: ignore[attr-defined]
        content = [[a.description.layer, a.description.constants, a.vector().tolist()] for a in made]
        name = hashlib.sha256(json.dumps([to_wire(spec), content, salt]).encode()).hexdigest()[:12]
        for start in range(0, len(self.problems), BLOCK):
            part = self.problems[start : start + BLOCK]
            sums = [[0.0] * len(part) for _ in range(3)]
            for seed in range(self.seeds):
                block = self._block(spec, part, 1000 * seed + start // BLOCK, self.folder / f"{name}-{seed}-{start}.json")
                for total, values in zip(sums, block[:3], strict=True):
                    total[:] = [a + b / self.seeds for a, b in zip(total, values, strict=True)]
                found.coefficients += block[3]
            for values, kept in zip(sums, (found.right, found.tokens, found.cut), strict=True):
                kept += values
        return found

    def _block(self, spec: Spec, problems: list[Problem], seed: int, path: Path) -> list[list[float]]:
        if path.exists() and len((kept := json.loads(path.read_text()))[0]) == len(problems):
            return list(kept)
        coefficients: list[float] = []
        Shuffled.dice.manual_seed(seed)
        hf.install(self.model, Traced(self.model, spec, self.tokenizer, coefficients))
        responses = sampling.sample_generate(self.model, self.tokenizer, problems, seed=seed, batch=BLOCK).responses
        hf.uninstall(self.model)
        right = [float(grade(problem, response.text)) for problem, response in zip(problems, responses, strict=True)]
        lengths, cut = [float(len(r.ids)) for r in responses], [float(not r.finished) for r in responses]
        block = [right, lengths, cut, [round(value, 6) for value in coefficients]]
        path.with_suffix(".part").write_text(json.dumps(block))
        path.with_suffix(".part").rename(path)
        return block


class Traced(Steering):
    """Gathers the coefficients of every call."""

    def __init__(self, model: Any, spec: Spec, tokenizer: Any, gathered: list[float]) -> None:
        super().__init__(model, spec, tokenizer)
        self.gathered = gathered

    def record(self, outcome: Any) -> None:
        super().record(outcome)
        for trace in outcome.live or ():
            self.gathered += trace["plugins"][0].get("coefficients", []) if trace else []


def calibrated(model: Any, tokenizer: Any, count: int, folder: Path, **options: Any) -> Path:
    """An artifact from training problems."""
    dice = random.Random("rebalance_testbed")
    chats = [draw(Arithmetic(), dice, LEVEL, "train").messages for _ in range(count)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    settings = calibrate.Settings(f"test bed, level {LEVEL}", "", sampling.MAX_NEW_TOKENS, 1.0, 1.0, 0, BLOCK)
    report = calibrate.run(model, tokenizer, prompts, folder, settings, **options)
    kept = ("layer", "r2", "auc", "constants", "relative_dose", "over", "under", "held_out", "notes")
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
    measured: dict[str, Arm] = {}
    mean = -1.0
    for name in ("plain", "rebalance", *(arm for arm in arms if arm not in ("plain", "rebalance"))):
        salt = f"{len(Shuffled.pool)} {Shuffled.pool.sum()}" if name == "shuffled" else ""
        measured[name] = arm = bench.arm(specs(artifacts, strength, mean)[name], salt)
        if name == "rebalance":
            Shuffled.pool = torch.tensor(arm.coefficients or [0.0], dtype=torch.float64) / max(strength, 1e-9)
            mean = round(float(Shuffled.pool.mean()) * strength, 6)
        say(f"{name}: accuracy {stats.mean(arm.right)}, tokens {stats.mean(arm.tokens)}, {len(arm.coefficients)} times")
    figures: dict[str, Any] = {"mean_coefficient": mean}
    rows = []
    for name in [arm for arm in ARMS if arm in measured]:
        arm = measured[name]
        figures[f"{name}.accuracy"], figures[f"{name}.tokens"] = stats.mean(arm.right).value, stats.mean(arm.tokens).value
        figures[f"{name}.cut"] = stats.mean(arm.cut).value
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
            pairs = (("accuracy", 4, arm.right, base.right), ("tokens", 1, arm.tokens, base.tokens))
            for what, digits, values, others in pairs:
                found = compare(values, others)
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
    parser.add_argument("--out", type=Path, help="keep outputs and answers in this folder, and go on from what is there")
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--calibration", type=int, default=1000, help="training problems to calibrate on")
    parser.add_argument(
        "--states", choices=("first", "delimiter"), default="delimiter", help="what the vector is learnt from"
    )
    parser.add_argument("--layer", type=int, help="instead of choosing one")
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    if options.quick:
        options.problems, options.seeds, options.calibration = min(options.problems, 40), 1, min(options.calibration, 250)
    setup = {**machine(), "problems": options.problems, "seeds": options.seeds, "strength": options.strength, "level": LEVEL}
    setup |= {"states": options.states}
    model, tokenizer = sampling.load(options.model)
    problems = held_out(Arithmetic(), LEVEL, options.problems)
    with TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        artifacts: dict[str, Path] = {}
        for mode in ("reference", "paper") if "paper" in options.arms else ("reference",):
            made = folder / f"{mode}-{options.calibration}-{options.states}-{options.layer}"
            made.mkdir(parents=True, exist_ok=True)
            for other in folder.glob(f"*/{calibrate.OUTPUTS}"):  # the same whatever is learnt from them
                if not (made / calibrate.OUTPUTS).exists():
                    shutil.copy(other, made)
            how = {"mode": mode, "states": options.states, "layer": options.layer}
            artifacts[mode] = calibrated(model, tokenizer, options.calibration, made, **how)
        description = load(artifacts["reference"], "rebalance").description
        setup |= {"layer": description.layer, "relative_dose": description.relative_dose, "model": description.model.id}
        bench = Bench(model, tokenizer, problems, options.seeds, folder)
        figures, text = run(bench, artifacts, options.strength, options.arms)
    if options.json:
        print_json("rebalance_testbed", setup, figures)
    else:
        print(in_words(setup), text, sep="\n\n")


if __name__ == "__main__":
    main()
