"""The numbers of the testbed, as tables: ``python -m llm_steer.eval.testbed measure``.

Every number is about a toy. It tests mechanisms; it doesn't predict what a real model does.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_steer.eval.testbed import reading, sampling
from llm_steer.eval.testbed import statistics as stats
from llm_steer.eval.testbed.arithmetic import Arithmetic
from llm_steer.eval.testbed.entailment import MODALITIES, Entailment, make_problem, parse_prompt
from llm_steer.eval.testbed.grading import answer_of, boxed, executed, grade
from llm_steer.eval.testbed.problem import MIN_DISTINCT, Problem, Task, held_out
from llm_steer.eval.testbed.recipes import RECIPES
from llm_steer.eval.testbed.sampling import BANNED, Answers, Response

from llm_steer.errors import SteerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIDDLE = {"arithmetic": 6, "words": 6, "entailment": 5, "ontology": 5}
"""The level of each task that leaves room both ways."""
BIASES = (0.0, BANNED, -2.0, 2.0, 4.0, 6.0)
SECTIONS = ("accuracy", "reflection", "confidence", "modalities", "engines")
LENGTH_BIN = 10
"""Tokens; answers whose lengths fall into one bin count as equally long."""


@dataclass
class Bench:
    """Checkpoints, and what was already sampled from them."""

    models: Path
    count: int = 2000
    """Problems a cell."""
    seed: int = 0
    say: Callable[[str], None] = print
    _loaded: dict[str, tuple[Any, PreTrainedTokenizerBase]] = field(default_factory=dict)
    _known: dict[Any, tuple[list[Problem], Answers]] = field(default_factory=dict)

    def checkpoint(self, name: str) -> tuple[Any, PreTrainedTokenizerBase]:
        """Model and tokenizer, loaded once.

        Raises:
            SteerError: its files are missing or damaged.
        """
        if name not in self._loaded:
            folder, valid = self.models / name, f"a folder with the checkpoints {', '.join(RECIPES)}"
            if not (folder / "config.json").is_file():
                raise SteerError("--models", str(self.models), valid)
            try:
                self._loaded[name] = sampling.load(folder)
            except Exception as error:  # whatever transformers makes of a damaged file
                reason = " ".join(str(error).split())[:200]
                raise SteerError("--models", str(self.models), f"{valid}; {name} cannot be loaded ({reason})") from error
        return self._loaded[name]

    def problems(self, task: Task, level: int) -> list[Problem]:
        """Held-out problems of a level; those of entailment are the same in every modality."""
        if not isinstance(task, Entailment):
            return held_out(task, level, self.count, self.seed)
        shared = held_out(Entailment(MODALITIES[0]), level, self.count, self.seed)
        return [make_problem(*parse_prompt(problem.prompt), level, task.modality) for problem in shared]

    def ask(
        self, name: str, task: Task, level: int, *, bias: float = 0.0, temperature: float = 1.0, repeat: int = 0
    ) -> tuple[list[Problem], Answers]:
        """Held-out problems of a level and the answers of a checkpoint; ``repeat`` draws other answers to them."""
        key = (task.name, level, bias, temperature, repeat)
        if key not in self._known:
            model, tokenizer = self.checkpoint(name)
            problems = self.problems(task, level)
            seed = random.Random(f"{self.seed}/{key}").getrandbits(32)
            answers = sampling.sample_hf(model, tokenizer, problems, bias=bias, temperature=temperature, seed=seed)
            self._known[key] = problems, answers
            right = sum(_right(problems, answers)) / len(problems)
            self.say(f"  {task.name} {level} bias {bias:+g} T={temperature:g}: {right:.3f}, {answers.seconds:.0f} s")
        return self._known[key]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _right(problems: Sequence[Problem], answers: Answers) -> list[bool]:
    return [grade(problem, response.text) for problem, response in zip(problems, answers.responses, strict=True)]


def _length(answers: Answers) -> float:
    return answers.tokens / len(answers.responses)


def _cut(answers: Answers) -> str:
    return f"{sum(not r.finished for r in answers.responses) / len(answers.responses):.1%}"


def accuracy(bench: Bench) -> str:
    """Every task and level at T=1."""
    rows = []
    for recipe in RECIPES.values():
        for part in recipe.parts:
            for level in part.task.levels:
                if part.task.distinct(level) < MIN_DISTINCT:
                    rows.append([part.task.name, level, "too few problems", "", "", ""])
                    continue
                problems, answers = bench.ask(recipe.name, part.task, level)
                right, speed = stats.mean(_right(problems, answers)), answers.tokens / answers.seconds
                rows.append([part.task.name, level, right, f"{_length(answers):.0f}", _cut(answers), f"{speed:,.0f}"])
    return table(["task", "level", "accuracy", "tokens", "cut off", "tokens/s"], rows)


def reflection(bench: Bench) -> str:
    """The middle level of arithmetic with a bias on the reflection words."""
    task, level = Arithmetic(), MIDDLE["arithmetic"]
    ids = set(sampling.reflection_ids(bench.checkpoint("arithmetic")[1]))
    base = _right(*bench.ask("arithmetic", task, level))
    cells = {}
    for bias in BIASES:
        problems, answers = bench.ask("arithmetic", task, level, bias=bias)
        right = _right(problems, answers)
        change = stats.difference(right, base)
        words = sum(reading.reflections(r, ids) for r in answers.responses) / len(problems)
        against = f"{change.value:+.3f} (z {change.z:+.1f})" if bias else ""
        cells[bias] = [stats.mean(right), against, f"{_length(answers):.0f}", f"{words:.2f}", _cut(answers)]
    rows = [["banned" if bias == BANNED else f"{bias:+g}" if bias else "0", *cells[bias]] for bias in sorted(BIASES)]
    problems, answers = bench.ask("arithmetic", task, level, temperature=0.6)
    words = sum(reading.reflections(r, ids) for r in answers.responses) / len(problems)
    rows.append(
        ["0, T=0.6", stats.mean(_right(problems, answers)), "", f"{_length(answers):.0f}", f"{words:.2f}", _cut(answers)]
    )
    return table(["bias", "accuracy", "against 0 (paired)", "tokens", "reflections", "cut off"], rows)


def confidence(bench: Bench) -> str:
    """How the largest probability tells wrong steps from right ones, and overthinking from normal answers."""
    _, tokenizer = bench.checkpoint("arithmetic")
    _, answers = bench.ask("arithmetic", Arithmetic(), MIDDLE["arithmetic"])
    read = [(response, reading.attempts(response, tokenizer)) for response in answers.responses]
    first = [a for _, found in read for a in found if a.first and not a.reflected]
    rows = []
    for label, chosen in (
        ("all first attempts", first),
        *((f"difficulty {d}", [a for a in first if a.difficulty == d]) for d in (0, 1, 2)),
    ):
        right, wrong = ([a.confidence for a in chosen if a.right == side] for side in (True, False))
        rows.append([label, len(right), len(wrong), stats.mean(right), stats.mean(wrong), stats.auc(right, wrong)])
    first_table = table(["steps", "right", "wrong", "confidence if right", "confidence if wrong", "AUC"], rows)
    return f"{first_table}\n\n{_variance(read)}"


def _variance(read: Sequence[tuple[Response, list[reading.Attempt]]]) -> str:
    """Variance of the confidence over the steps of an answer, and of two neighbouring steps, as ReBalance takes it."""
    groups: dict[bool, list[tuple[int, float, float]]] = {True: [], False: []}
    for response, found in read:
        values = [a.confidence for a in found]
        if len(values) < 2 or not response.finished:
            continue
        center = sum(values) / len(values)
        whole = sum((v - center) ** 2 for v in values) / len(values)
        steps = [(b - a) ** 2 / 4 for a, b in itertools.pairwise(values)]
        groups[reading.overthinks(found)].append((len(response.ids), whole, sum(steps) / len(steps)))
    rows = []
    for column, label in ((1, "whole answer"), (2, "neighbouring steps")):
        over, normal = ([(row[0], row[column]) for row in groups[side]] for side in (True, False))
        change, (low, high), matched = stats.matched_difference(over, normal, LENGTH_BIN)
        means = [stats.mean([value for _, value in side]) for side in (over, normal)]
        cells = [f"{m.value:.4f} ± {m.error:.4f}" for m in means]
        rows.append([label, len(over), len(normal), *cells, f"{change.value:+.4f} [{low:+.4f}, {high:+.4f}]", matched])
    head = [
        "variance of confidence",
        "overthinking answers",
        "normal",
        "overthinking",
        "normal",
        "difference at matched length, 95 %",
    ]
    return table([*head, "matched"], rows)


def modalities(bench: Bench) -> str:
    """Entailment in words, code and tables; one of each in a vote against three of the best."""
    level = MIDDLE["entailment"]
    said: dict[str, list[str | None]] = {}
    cost: dict[str, float] = {}
    rows = []
    problems: list[Problem] = []
    for modality in MODALITIES:
        problems, answers = bench.ask("logic", Entailment(modality), level)
        said[modality] = [answer_of(r.text) for r in answers.responses]
        cost[modality] = _length(answers)
        rows.append([modality, stats.mean(_right(problems, answers)), f"{cost[modality]:.0f}", _cut(answers)])
        if modality == "code":
            ran = [executed(r.text) is not None for r in answers.responses]
            same = [boxed(r.text) == executed(r.text) for r in answers.responses]
            rows.append(["code: it runs", stats.mean(ran), "", ""])
            rows.append(["code: the box says what the program says", stats.mean(same), "", ""])
    truth = [problem.answer for problem in problems]
    best = _to_beat(bench, level)
    again = [said[best]]
    for repeat in (1, 2):
        _, answers = bench.ask("logic", Entailment(best), level, repeat=repeat)
        again.append([answer_of(r.text) for r in answers.responses])
    mixed = [
        a == t
        for a, t in zip(_votes([said[name] for name in (best, *(m for m in MODALITIES if m != best))]), truth, strict=True)
    ]
    single = [a == t for a, t in zip(_votes(again), truth, strict=True)]
    rows.append(["majority of the three", stats.mean(mixed), f"{sum(cost.values()):.0f}", ""])
    rows.append([f"majority of three of {best}", stats.mean(single), f"{3 * cost[best]:.0f}", ""])
    gain = stats.difference(mixed, single)
    rows.append(["difference of the two (paired)", f"{gain.value:+.3f} ± {gain.error:.3f} (z {gain.z:+.1f})", "", ""])
    pairs = [(a, b) for i, a in enumerate(MODALITIES) for b in MODALITIES[i + 1 :]]
    differ = [[f"{a} and {b}", stats.mean([x != y for x, y in zip(said[a], said[b], strict=True)])] for a, b in pairs]
    differ.append(
        ["not all three the same", stats.mean([len({*answers}) > 1 for answers in zip(*said.values(), strict=True)])]
    )
    return f"{table(['', 'accuracy', 'tokens', 'cut off'], rows)}\n\n{table(['answers that differ', 'share'], differ)}"


def _to_beat(bench: Bench, level: int) -> str:
    """The best modality, chosen on other problems than those on which it is judged."""
    other = Bench(bench.models, -(-bench.count // 4), bench.seed + 1, bench.say, bench._loaded)
    return max(MODALITIES, key=lambda name: sum(_right(*other.ask("logic", Entailment(name), level))))


def _votes(said: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The majority; the first voter's answer where all differ."""
    votes = []
    for answers in zip(*said, strict=True):
        given = [answer for answer in answers if answer is not None]
        votes.append(Counter(given).most_common(1)[0][0] if given else None)
    return votes


def engines(bench: Bench) -> str:
    """The middle level of arithmetic at bias 0 on every engine: the same accuracy, and how fast."""
    task, level = Arithmetic(), MIDDLE["arithmetic"]
    model, tokenizer = bench.checkpoint("arithmetic")
    problems, known = bench.ask("arithmetic", task, level)
    generated = sampling.sample_generate(model, tokenizer, problems, seed=bench.seed + 1)
    bench.say(f"  transformers, generate: {generated.seconds:.0f} s")
    runs = [("transformers, own loop", known), ("transformers, generate", generated)]
    try:
        from vllm import LLM
    except ImportError:
        bench.say("  vLLM is not installed: its row is left out")
    else:
        # Whole prompts: vLLM's CPU worker cannot draw with a seed behind a part of one.
        sizes = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 16_384}
        engine = LLM(
            str(bench.models / "arithmetic"),
            dtype="float32",
            seed=bench.seed,
            enforce_eager=True,
            **sizes,
            enable_chunked_prefill=False,
            gpu_memory_utilization=0.3,  # of the machine's memory, in spite of its name
        )
        runs.append(("vLLM", sampling.sample_vllm(engine, tokenizer, problems, seed=bench.seed + 1)))
    rows = [
        [
            name,
            stats.mean(_right(problems, a)),
            f"{_length(a):.0f}",
            _cut(a),
            f"{a.seconds:.0f}",
            f"{a.tokens / a.seconds:,.0f}",
        ]
        for name, a in runs
    ]
    return table(["engine", "accuracy", "tokens", "cut off", "seconds", "tokens/s"], rows)


def measure(
    models: Path,
    *,
    count: int = 2000,
    seed: int = 0,
    only: Sequence[str] = SECTIONS,
    say: Callable[[str], None] = print,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Run the sections. Returns a report in Markdown.

    Args:
        models: folder with a folder for each checkpoint.
        count: problems a cell.
        say: called with lines of progress.
        tell: called with the report so far, behind every section.

    Raises:
        SteerError: a checkpoint is missing or damaged.
    """
    bench = Bench(models, count, seed, say)
    for name in RECIPES:
        bench.checkpoint(name)  # a damaged one is told before the work
    parts = [f"Measured on a toy, {count} held-out problems a cell, seed {seed}; ± is one standard error."]
    started = time.monotonic()
    for name in only:
        say(name)
        section: Callable[[Bench], str] = _SECTIONS[name]
        parts.append(f"### {(section.__doc__ or name).splitlines()[0]}\n\n{section(bench)}")
        tell("\n\n".join(parts) + "\n")
    parts.append(f"All of it took {(time.monotonic() - started) / 60:.0f} minutes.")
    return "\n\n".join(parts) + "\n"


def document(report: str) -> dict[str, Any]:
    """A report in JSON types: its sections with their tables, cells as they are printed."""
    first, *sections, last = report.strip().split("\n\n### ") if "\n\n### " in report else (report, "")
    last, _, time_taken = last.rpartition("\n\n")
    found = []
    for section in filter(None, (*sections, last)):
        title, *blocks = section.split("\n\n")
        rows = [[_cells(line) for line in block.splitlines()] for block in blocks if block.startswith("|")]
        tables = [{"head": head, "rows": body} for head, _, *body in rows]
        found.append({"title": title, "tables": tables, "notes": [b for b in blocks if not b.startswith("|")]})
    return {"about": first.strip(), "sections": found, "time": time_taken}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


_SECTIONS: dict[str, Callable[[Bench], str]] = {
    "accuracy": accuracy,
    "reflection": reflection,
    "confidence": confidence,
    "modalities": modalities,
    "engines": engines,
}
