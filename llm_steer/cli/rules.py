"""``llm-steer rules``: the rules files of activation_reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_steer.cli.common import Json, Output, note, output
from llm_steer.errors import MissingDependencyError, SteerError

if TYPE_CHECKING:
    from llm_steer.plugins.activation_reasoning.book import Book

app = typer.Typer(no_args_is_help=True, help="Check the rules files of activation_reasoning.")

FORMATS = (".png", ".svg", ".pdf")


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A rules file (YAML).")],
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the graph to this file (.png, .svg or .pdf); needs matplotlib.")
    ] = None,
    json: Json = False,
) -> None:
    """Explain a rules file: what is detected, what follows from what, which concepts are unknown. Needs no model."""
    with output(json) as out:
        if plot is not None and plot.suffix.lower() not in FORMATS:
            raise SteerError("--plot", str(plot), f"a file name that ends in {', '.join(FORMATS)}")
        from llm_steer.plugins.activation_reasoning.book import read_book

        book = read_book(file)
        report = explain(book, file.parent)
        if plot is not None:
            draw(report["edges"], plot)
        if json:
            out.document({"file": str(file), **report, "plot": str(plot) if plot else None})
        else:
            _print(out, file, report)
            if plot is not None:
                note(f"Drawn to {plot}")


def explain(book: Book, folder: Path) -> dict[str, Any]:
    """What a rules file says, in JSON types.

    Args:
        folder: where its dictionary's name starts from, if that is a relative path.
    """
    from llm_steer.plugins.activation_reasoning.book import concepts_of
    from llm_steer.plugins.activation_reasoning.logic.schedule import schedule

    dictionary = _dictionary(book.dictionary, folder)
    known = {*book.words, *dictionary}
    plan = schedule(book.rules.program)
    return {
        "semantics": book.semantics,
        "truth": book.truth,
        "dictionary": book.dictionary,
        "dictionary_found": book.dictionary is None or bool(dictionary),
        "concepts": [{"name": name, "from": _source(name, book, dictionary)} for name in book.concepts],
        "unknown_concepts": sorted(set(book.concepts) - known) if dictionary or book.dictionary is None else [],
        "subjects": list(book.subjects),
        "propositions": [
            {
                "proposition": str(p.literal),
                "detected_by": (names := concepts_of(p))[: len(p.spec.pattern or names)],
                "in_order": p.spec.pattern is not None,
                "broken_off_by": names[len(p.spec.pattern or names) :],
                "level": p.spec.level,
                "scope": p.spec.scope,
                "implied": p.implied,
            }
            for p in book.propositions
        ],
        "rules": list(book.texts),
        "ground_rules": len(book.rules.program.rules),
        "passes": plan.passes,
        "gates": sum(len(layer.gates) for layer in plan.layers),
        "actions": [{"when": spec.when, "kind": spec.kind, "priority": spec.priority} for spec, _ in book.actions],
        "edges": edges(book),
    }


def edges(book: Book) -> list[list[str]]:
    """The rule graph: premise, conclusion, and ``+`` or ``-`` for how the premise stands in the body."""
    from llm_steer.plugins.activation_reasoning.logic.closed import BOTTOM, HELPER, ClosedProgram

    found: dict[tuple[str, str, str], None] = {}
    program = book.rules.program
    if isinstance(program, ClosedProgram):
        bodies = {clause.head: clause.body for clause in program.clauses}
        for clause in program.clauses:
            if clause.head.startswith(HELPER):
                continue
            waiting = list(clause.body)
            while waiting:
                literal = waiting.pop()
                if literal.atom.startswith(HELPER):
                    waiting.extend(bodies[literal.atom])
                else:
                    head = "contradiction" if clause.head == BOTTOM else _shown(clause.head, book)
                    found[literal.atom, head, "+" if literal.positive else "-"] = None
    else:
        for implicate in program.implicates:
            for goal in implicate.literals:
                for literal in implicate.literals:
                    if literal != goal and not goal.atom.startswith('"action '):
                        found[str(~literal), str(goal), "+"] = None
    return [list(edge) for edge in sorted(found)]


def _shown(atom: str, book: Book) -> str:
    for spec, literal in book.actions:
        if literal.atom == atom:
            return spec.kind if atom.startswith('"action ') else atom
    return atom


def _dictionary(name: str | None, folder: Path) -> list[str]:
    """Concepts of a dictionary, if it lies here."""
    from llm_steer.artifact import load
    from llm_steer.plugins.activation_reasoning.concepts import METHOD, Dictionary

    for path in (Path(name), folder / name) if name else ():
        if path.is_dir():
            return Dictionary.from_artifact(load(path, METHOD)).names
    return []


def _source(name: str, book: Book, dictionary: list[str]) -> str:
    return "words" if name in book.words else "dictionary" if name in dictionary else "unknown"


def _print(out: Output, file: Path, report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out.console
    console.print(
        Text(file.name, "bold"),
        Text(
            f"{report['semantics']} semantics, {report['truth']} truth, {report['ground_rules']} ground rules, "
            f"{report['gates']} gates in {report['passes']} passes"
        ),
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("proposition", "detected by", "level", "scope"):
        table.add_column(column, overflow="fold")
    for row in report["propositions"]:
        how = (" then " if row["in_order"] else ", ").join(row["detected_by"])
        table.add_row(Text(row["proposition"]), Text(how), row["level"], row["scope"])
    console.print(table)
    into: dict[str, list[str]] = {}
    for premise, conclusion, sign in report["edges"]:
        into.setdefault(conclusion, []).append(premise if sign == "+" else f"not {premise}")
    arrow = "←" if out.unicode else "<-"
    for conclusion, premises in into.items():
        console.print(Text(f"  {conclusion} {arrow} {', '.join(premises)}"))
    for action in report["actions"]:
        console.print(Text(f"  {action['kind']} when {action['when']}"))
    if not report["dictionary_found"]:
        note(f"The dictionary {report['dictionary']} does not lie here: its concepts are not checked.")
    if report["unknown_concepts"]:
        console.print(Text(f"unknown concepts: {', '.join(report['unknown_concepts'])}", "red"))


def draw(graph: list[list[str]], path: Path) -> None:
    """Draw a rule graph to a file: conclusions right of what they rest on."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot", "drawing to a file") from error
    names = list(dict.fromkeys(name for premise, conclusion, _ in graph for name in (premise, conclusion)))
    column = dict.fromkeys(names, 0)
    for _ in names:  # longest path; a cycle stops growing at the number of names
        for premise, conclusion, _ in graph:
            column[conclusion] = min(max(column[conclusion], column[premise] + 1), len(names) - 1)
    places: dict[str, tuple[float, float]] = {}
    for name in names:
        places[name] = (column[name], -sum(other in places and column[other] == column[name] for other in names))
    height = max((-y for _, y in places.values()), default=0) + 1
    figure = Figure(figsize=(min(3 + 2.2 * len(set(column.values())), 40), min(1 + 0.5 * height, 40)), layout="constrained")
    axes = figure.add_subplot()
    for premise, conclusion, sign in graph:
        style = {"arrowstyle": "->", "color": "tab:green" if sign == "+" else "tab:red", "shrinkA": 20, "shrinkB": 20}
        axes.annotate("", xy=places[conclusion], xytext=places[premise], arrowprops=style)
    for name, (x, y) in places.items():
        axes.text(x, y, name, ha="center", va="center", fontsize=9, bbox={"boxstyle": "round", "fc": "white", "ec": "0.6"})
    axes.set(xlim=(-0.6, max(column.values(), default=0) + 0.6), ylim=(-height, 1))
    axes.axis("off")
    try:
        figure.savefig(path)
    except OSError as error:
        raise SteerError("--plot", str(path), f"a file that can be written ({error.strerror})") from error
