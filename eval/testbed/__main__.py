"""``python -m llm_steer.eval.testbed train|measure|show``."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

# A network this small gains nothing from threads that spin while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the report

import typer
from llm_steer.eval.testbed import MODELS
from llm_steer.eval.testbed.measure import SECTIONS
from llm_steer.eval.testbed.recipes import RECIPES, Recipe

from llm_steer.cli import run
from llm_steer.cli.common import Json, check_range, note, output
from llm_steer.errors import SteerError

NAME = "python -m llm_steer.eval.testbed"

LAST_SEED = 2**63 - 1

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="A small reasoning model of our own."
)

Checkpoint = Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")]


@app.command()
def train(
    name: Checkpoint,
    out: Annotated[Path, typer.Option(help="Folder for the model, its log and the state to resume from.")] = Path("testbed"),
    seed: Annotated[int, typer.Option(help="Decides the first weights and every batch.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps of the run; give the command again to go on.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two states to resume from.")] = 200,
    json: Json = False,
) -> None:
    """Train a checkpoint, or go on with one."""
    from llm_steer.eval.testbed import train as training
    from llm_steer.eval.testbed.card import loss_curve

    with output(json) as out_:
        recipe = _recipe(name)
        if steps is not None:
            check_range("--steps", steps, 1, recipe.steps)
        check_range("--save-every", save_every, 1, recipe.steps)
        check_range("--seed", seed, 0, LAST_SEED)
        with _named("--out", out / name):
            folder = training.train(recipe, out / name, seed=seed, steps=steps, save_every=save_every)
            log = (folder / training.LOG).read_text(encoding="utf-8")
        if json:
            head, *rows = (line.split(",") for line in log.splitlines())
            log_rows = [dict(zip(head, map(float, row), strict=True)) for row in rows]
            steps = int(log_rows[-1]["step"]) if log_rows else 0
            out_.document({"folder": str(folder), "seed": seed, "steps": steps, "of": recipe.steps, "log": log_rows})
        else:
            out_.text(f"{loss_curve(log)}\nwrote {folder}\n")


@app.command()
def measure(
    models: Annotated[Path, typer.Option(help="Folder with the checkpoints.")] = MODELS,
    count: Annotated[int, typer.Option(help="Problems a cell.")] = 2000,
    seed: Annotated[int, typer.Option(help="Decides the problems and what is sampled.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"Sections: {', '.join(SECTIONS)}. All when left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the report; standard output when left out.")] = None,
    json: Json = False,
) -> None:
    """Print the table of what the checkpoints show."""
    from llm_steer.eval.journal import write_whole
    from llm_steer.eval.testbed.measure import document
    from llm_steer.eval.testbed.measure import measure as sections

    with output(json) as out_:
        check_range("--count", count, 2, 10_000)
        check_range("--seed", seed, 0, LAST_SEED)
        for section in only or ():
            _one_of("--only", section, SECTIONS)

        def tell(report: str) -> None:
            if out:
                write_whole(out, report)

        if out:  # a place that cannot be written is told before the work
            with _named("--out", out):
                out.open("a").close()
        report = sections(models, count=count, seed=seed, only=list(dict.fromkeys(only or SECTIONS)), say=note, tell=tell)
        tell(report)
        if json:
            out_.document(document(report))
        elif not out:
            out_.text(report)


@app.command()
def show(
    name: Checkpoint,
    seed: Annotated[int, typer.Option(help="Decides the problems.")] = 0,
    json: Json = False,
) -> None:
    """Print a problem of each task with a trace that is learnt from."""
    from llm_steer.eval.testbed.problem import draw
    from llm_steer.eval.testbed.traces import write

    with output(json) as out_:
        check_range("--seed", seed, 0, LAST_SEED)
        rng = random.Random(seed)
        found: list[dict[str, Any]] = []
        for part in _recipe(name).parts:
            problem = draw(part.task, rng, part.task.levels[1], "train")
            trace = write(part.task.walk(problem), rng, part.mix)
            found.append({"task": problem.task, "level": problem.level, "prompt": problem.prompt, "trace": trace.text})
        if json:
            out_.document(found)
            return
        for row in found:
            out_.text(f"[{row['task']}, level {row['level']}] {row['prompt']}\n<think>{row['trace']}\n\n")


def _recipe(name: str) -> Recipe:
    _one_of("name", name, RECIPES)
    return RECIPES[name]


def _one_of(field: str, value: str, known: Any) -> None:
    if value not in known:
        raise SteerError(field, value, f"one of {', '.join(known)}")


@contextmanager
def _named(option: str, path: Path) -> Iterator[None]:
    """What the file system has to say, in one line."""
    try:
        yield
    except OSError as error:
        raise SteerError(option, str(path), f"a place that can be written ({error.strerror or error})") from error


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], app, NAME))
