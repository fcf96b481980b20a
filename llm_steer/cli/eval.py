"""``llm-steer eval``: methods against each other on tasks, in batches that can be broken off and gone on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llm_steer.cli.common import Json, check_range, note, output
from llm_steer.errors import SteerError


class RunByDefault(TyperGroup):
    """``llm-steer eval MODEL ...`` is ``llm-steer eval run MODEL ...``."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        if arguments and arguments[0] not in self.commands:
            arguments = ["run", *arguments]
        return super().resolve_command(context, arguments)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
            arguments = ["run", *arguments]
        return super().parse_args(context, arguments)


app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Compare methods on tasks: run, sweep, regrade, compare, report. Without one of these words: run.",
)

Model = Annotated[str | None, typer.Argument(help="A model's folder or Hugging Face id; with --url, the served name.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with the same fields; options win over it.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key=value over everything: limit=20, engine_args.x=1.")]
Tasks = Annotated[str | None, typer.Option(help="Names or YAML files, with commas between them.")]
Steer = Annotated[
    list[str] | None,
    typer.Option("--steer", "-s", help="Methods, with commas between them: none,s1,NAME:key=value; may be repeated."),
]
Samples = Annotated[int | None, typer.Option(help="Answers to each problem with each method.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling and of shuffled options.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many problems of each task.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer; the task's if left out.")]
Out = Annotated[str | None, typer.Option(help="The run's folder; an existing one is gone on with.")]
EngineName = Annotated[str | None, typer.Option(help="auto, hf, vllm or url.")]
Urls = Annotated[list[str] | None, typer.Option("--url", help="An OpenAI-compatible server; may be repeated.")]
Data = Annotated[list[str] | None, typer.Option(help="TASK=FILE, or FILE for a single task: rows in place of the hub.")]


@app.command("run")
def run(
    model: Model = None,
    tasks: Tasks = None,
    steer: Steer = None,
    samples: Samples = None,
    seed: Seed = None,
    out: Out = None,
    engine: EngineName = None,
    url: Urls = None,
    data: Data = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float | None, typer.Option(help="The task's if left out; 0 is greedy.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows at a time on Hugging Face.")] = None,
    config: Config = None,
    sets: Sets = None,
    report: Annotated[bool, typer.Option(help="Write report.html and report.md at the end.")] = True,
    json: Json = False,
) -> None:
    """Generate, grade and report. The same command again goes on where it was broken off."""
    from llm_steer.eval import config as settings
    from llm_steer.eval.run import explain_failures, place, tqdm_progress
    from llm_steer.eval.run import run as start

    with output(json) as out_:
        options = {
            "model": model,
            "tasks": _listed(tasks),
            "steer": steer,
            "samples": samples,
            "seed": seed,
            "out": out,
            "engine": engine,
            "urls": url,
            "limit": limit,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "batch_size": batch_size,
        }
        read = settings.read(config, {**options, **_data(data, options["tasks"])}, sets or ())
        if "ACCELERATE_MIXED_PRECISION" in os.environ and place()[1] == 1:
            note("accelerate started one process; without GPUs, --multi_gpu --num_processes N makes it start several")
        outcome = start(read, progress=tqdm_progress)
        if report and outcome.complete:
            _report(Path(read.out), out_)
        explain_failures(outcome)


@app.command("sweep")
def sweep(
    model: Model = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="METHOD.parameter=value,value,...; may be repeated. Every combination is tried.")
    ] = None,
    tasks: Tasks = None,
    report_tasks: Annotated[
        str | None, typer.Option(help="Report on these; if left out, half of the problems are kept for that.")
    ] = None,
    share: Annotated[float, typer.Option(help="Of the problems that are tuned on, where tasks are split.")] = 0.5,
    steer: Steer = None,
    samples: Samples = None,
    report_samples: Annotated[
        int | None, typer.Option(help="Answers to each problem that is reported on; --samples if left out.")
    ] = None,
    seed: Seed = None,
    out: Out = None,
    engine: EngineName = None,
    url: Urls = None,
    data: Data = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    config: Config = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Tune methods on some problems and report them on others."""
    from llm_steer.eval import config as settings
    from llm_steer.eval.run import tqdm_progress
    from llm_steer.eval.sweep import Plan, parse_grids
    from llm_steer.eval.sweep import sweep as start

    with output(json) as out_:
        check_range("--share", share, 0, 1, above=True)
        if report_samples is not None and report_samples < 1:
            raise SteerError("--report-samples", report_samples, "at least 1")
        options = {"model": model, "tasks": _listed(tasks), "steer": steer, "samples": samples, "seed": seed, "out": out}
        options |= {"engine": engine, "urls": url, "limit": limit, "max_tokens": max_tokens}
        read = settings.read(config, {**options, **_data(data, options["tasks"])}, sets or ())
        plan = Plan(read, parse_grids(grid or ()), _listed(report_tasks) or (), share, report_samples)
        summary = start(plan, progress=tqdm_progress, say=note)
        _report(summary.folder, out_)


@app.command("regrade")
def regrade(folder: Annotated[Path, typer.Argument(help="A run's folder.")], json: Json = False) -> None:
    """Grade a run's answers again, without generating."""
    from llm_steer.eval.grade import regrade as again

    with output(json) as out:
        changed = again(folder)
        _report(folder, out)
        note(f"{len(changed)} verdicts changed")


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    against: Annotated[
        str | None, typer.Option(help="The method that the others are compared with; none if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the report of what a run has so far."""
    with output(json) as out:
        _report(folder, out, against)


@app.command("compare")
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more runs' folders.")],
    json: Json = False,
) -> None:
    """Methods of several runs against each other, on the problems that they share."""
    from llm_steer.eval.compare import compare as against

    with output(json) as out:
        document, text = against(folders)
        if json:
            out.document(document)
        else:
            out.text(text)


def _report(folder: Path, out: Any, against: str | None = None) -> None:
    from llm_steer.eval.report import write
    from llm_steer.eval.summary import summarize

    summary = summarize(folder, against)
    write(summary)
    if out.as_json:
        out.document(summary.document())
    else:
        from llm_steer.eval.report.markdown import tables

        out.text(tables(summary) + f"\n{folder / 'report.html'}\n")


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _data(given: list[str] | None, tasks: Any) -> dict[str, Any]:
    """``--data`` as a mapping from the task's name to its file."""
    if not given:
        return {}
    files: dict[str, str] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals:
            if len(tasks or ()) != 1 or len(given) != 1:
                raise SteerError("--data", text, "TASK=FILE where there are several tasks")
            from llm_steer.eval import tasks as known

            name, file = known.find(tasks[0]).name, text
        files[name] = file
    return {"data": files}
