"""``python -m llm_steer.eval.testbed train|measure|show``."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Annotated

# A network this small gains nothing from threads that spin while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from llm_steer.eval.testbed import MODELS
from llm_steer.eval.testbed.measure import SECTIONS
from llm_steer.eval.testbed.recipes import RECIPES

app = typer.Typer(add_completion=False, no_args_is_help=True, help="A small reasoning model of our own.")


@app.command()
def train(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its log and the state to resume from.")] = Path("testbed"),
    seed: Annotated[int, typer.Option(help="Decides the first weights and every batch.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps of the run; give the command again to go on.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two states to resume from.")] = 200,
) -> None:
    """Train a checkpoint, or go on with one."""
    from llm_steer.eval.testbed import train as training
    from llm_steer.eval.testbed.card import loss_curve

    if name not in RECIPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(RECIPES)}")
    folder = training.train(RECIPES[name], out / name, seed=seed, steps=steps, save_every=save_every)
    typer.echo(loss_curve((folder / training.LOG).read_text(encoding="utf-8")))
    typer.echo(f"wrote {folder}")


@app.command()
def measure(
    models: Annotated[Path, typer.Option(help="Folder with the checkpoints.")] = MODELS,
    count: Annotated[int, typer.Option(help="Problems a cell.")] = 2000,
    seed: Annotated[int, typer.Option(help="Decides the problems and what is sampled.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"Sections: {', '.join(SECTIONS)}. All when left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the report; standard output when left out.")] = None,
) -> None:
    """Print the table of what the checkpoints show."""
    from llm_steer.eval.testbed.measure import measure as run

    for section in only or ():
        if section not in SECTIONS:
            raise typer.BadParameter(f"{section!r} is not one of {', '.join(SECTIONS)}")

    def tell(report: str) -> None:
        if out:
            out.write_text(report, encoding="utf-8")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    report = run(models, count=count, seed=seed, only=only or SECTIONS, say=say, tell=tell)
    tell(report)
    if not out:
        typer.echo(report)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    seed: Annotated[int, typer.Option(help="Decides the problems.")] = 0,
) -> None:
    """Print a problem of each task with a trace that is learnt from."""
    from llm_steer.eval.testbed.problem import draw
    from llm_steer.eval.testbed.traces import write

    rng = random.Random(seed)
    for part in RECIPES[name].parts:
        problem = draw(part.task, rng, part.task.levels[1], "train")
        trace = write(part.task.walk(problem), rng, part.mix)
        typer.echo(f"[{problem.task}, level {problem.level}] {problem.prompt}\n<think>{trace.text}\n")


if __name__ == "__main__":
    app()
