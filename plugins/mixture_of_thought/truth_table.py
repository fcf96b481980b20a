"""Truth tables that a model wrote: read, enumerated again, and compared row by row.

What is checked is the table, not the translation: whether the rows and the verdict follow from the formulas that the model
wrote down. Verdicts are those of Mixture of Thought: the statement is True if it holds in every row in which the premises
hold, False if in none, else Uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llm_steer.plugins.mixture_of_thought.formula import (
    Formula,
    FormulaError,
    clauses,
    columns,
    conjunction,
    parse,
    solver,
)

ENUMERATED = 16
"""Variables up to which all rows are gone through; beyond, python-sat answers."""
MOST_VARIABLES = 256
MOST_ROWS = 4096
TOLD = 8
"""Rows of each kind that a finding names."""

_HEADING = re.compile(
    r"^\W*(letters?|let|where|definitions?|variables?|propositions?"
    r"|premises?|conclusion|statement|claim|goal"
    r"|truth table|table|rows|surviving rows|remaining rows|logical chain|reasoning|verdict|so|therefore)"
    r"\b([^:\n]*)(?::\s*(.*))?$",
    re.IGNORECASE,
)
_SECTIONS = {"premise": "premises", "conclusion": "statement", "statement": "statement", "claim": "statement"}
_SECTIONS |= {"goal": "statement"}
_NUMBERING = re.compile(r"^\s*(?:[-*•]\s+|\(?\d{1,3}[.):]\s*|[PpCc]\d{1,3}\s*[:.]\s*)+")
_TRUTH = {"true": True, "t": True, "1": True, "✓": True, "yes": True}
_TRUTH |= {"false": False, "f": False, "0": False, "✗": False, "no": False}


@dataclass(frozen=True)
class Table:
    """A truth table as it was written."""

    premises: tuple[Formula, ...]
    statement: Formula
    head: tuple[Formula, ...] = ()
    """Of each column, its formula."""
    rows: tuple[tuple[bool, ...], ...] = ()

    @property
    def variables(self) -> list[str]:
        """Of the formulas, then of columns that no formula uses."""
        names = [name for f in (*self.premises, self.statement, *self.head) for name in f.variables]
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Finding:
    """What enumerating a table again found."""

    verdict: str | None
    """What follows from the formulas; None if nothing satisfies the premises."""
    problems: tuple[str, ...] = ()
    """In words, the first few of each kind: wrong cells, missing rows, rows that do not belong."""
    wrong: int = 0
    missing: int = 0
    extra: int = 0
    kind: str = "none"
    """``survivors``: only rows in which the premises hold; ``full``: every row; ``none``: no table was written."""

    @property
    def rows_right(self) -> bool:
        return not (self.wrong or self.missing or self.extra)


# -- reading -------------------------------------------------------------------------------------------------------------


def read(text: str) -> Table:
    """Find premises, statement and rows in a model's text.

    Raises:
        FormulaError: there is no statement, or a formula that cannot be read.
    """
    premises: list[Formula] = []
    statements: list[Formula] = []
    head: tuple[Formula, ...] = ()
    rows: list[tuple[bool, ...]] = []
    section = ""
    for line in text.splitlines():
        line = line.strip().replace("**", "").strip("`$ ")
        if line.startswith("|"):
            cells = [cell.strip().strip("*`$ ") for cell in line.strip("|").split("|")]
            if all(cell and set(cell) <= set("-: ") for cell in cells):
                continue
            values = [_TRUTH.get(cell.lower()) for cell in cells]
            if head and None not in values and len(values) == len(head):
                rows.append(tuple(bool(value) for value in values))
            elif not rows:
                head = _head(cells) or head
            elif head and len(values) == len(head):
                raise FormulaError(f"the row {line[:60]!r} has cells that are neither true nor false")
            continue
        if (match := _HEADING.match(line)) and (match[3] is not None or line.endswith(":")):
            word = match[1].lower().rstrip("s")
            section = _SECTIONS.get(word, word)
            line = match[3] or ""
        if not line or section not in ("premises", "statement"):
            continue
        formula = _formula(line)
        (premises if section == "premises" else statements).append(formula)
    if not statements:
        raise FormulaError("there is no statement")
    if len(rows) > MOST_ROWS:
        raise FormulaError(f"{len(rows)} rows, more than {MOST_ROWS}")
    table = Table(tuple(premises), statements[-1], head, tuple(rows))
    if len(table.variables) > MOST_VARIABLES:
        raise FormulaError(f"{len(table.variables)} variables, more than {MOST_VARIABLES}")
    return table


def _formula(line: str) -> Formula:
    """A formula with what stands around it: a number, a name, a remark."""
    line = re.sub(r"[`$]", "", _NUMBERING.sub("", line)).strip().rstrip(".,;")
    remark = re.sub(r"\s+(?:#|//|--|—|\().*$", "", line)
    error: FormulaError | None = None
    for text in dict.fromkeys((line, line.rpartition(":")[2], remark, remark.rpartition(":")[2])):
        try:
            return parse(text.strip())
        except FormulaError as problem:
            error = error or problem
    raise FormulaError(f"{line[:60]!r} is no formula: {error}")


def _head(cells: Sequence[str]) -> tuple[Formula, ...] | None:
    try:
        return tuple(parse(cell) for cell in cells)
    except FormulaError:
        return None


# -- checking ------------------------------------------------------------------------------------------------------------


def check(table: Table) -> Finding:
    """Enumerate a table again.

    Raises:
        MissingDependencyError: more than 16 variables without python-sat.
    """
    return _enumerate(table) if len(table.variables) <= ENUMERATED else _solve(table)


def verdict(premises: Sequence[Formula], statement: Formula) -> str | None:
    """True, False or Uncertain; None if the premises contradict each other."""
    return check(Table(tuple(premises), statement)).verdict


def _of(holds: bool, fails: bool) -> str | None:
    """From whether the statement holds, and fails, in some row in which the premises hold."""
    return {(True, False): "True", (False, True): "False", (True, True): "Uncertain"}.get((holds, fails))


def _enumerate(table: Table) -> Finding:
    names = table.variables
    column, ones = columns(names)
    alive = conjunction(table.premises).bits(column, ones)
    holds = table.statement.bits(column, ones)
    found = _of(bool(alive & holds), bool(alive & ~holds))
    if not table.rows:
        return Finding(found)
    written = _written(table)
    shown = [f.name for f in table.head if f.op == "var"]
    survivors = _projected(alive, names, shown)
    everything = 1 << len(shown)
    wrong = _wrong_cells(table)
    full = len(written) == everything and len(survivors) < everything
    missing = set() if full else survivors - written
    extra = set() if full else written - survivors
    return _finding(found, shown, wrong, missing, extra, "full" if full else "survivors")


def _solve(table: Table) -> Finding:
    numbers = {name: i + 1 for i, name in enumerate(table.variables)}
    fresh = [len(numbers)]
    alive, first = clauses(conjunction(table.premises), numbers, fresh)
    holds, second = clauses(table.statement, numbers, fresh)
    with solver()(bootstrap_with=[*first, *second, [alive]]) as sat:
        found = _of(sat.solve(assumptions=[holds]), sat.solve(assumptions=[-holds]))
        if not table.rows:
            return Finding(found)
        shown = [f.name for f in table.head if f.op == "var"]
        extra = set()
        written = _written(table)
        for row in written:
            literals = [numbers[name] if value else -numbers[name] for name, value in zip(shown, row, strict=True)]
            if not sat.solve(assumptions=literals):
                extra.add(row)
        for row in written:
            sat.add_clause([-numbers[n] if value else numbers[n] for n, value in zip(shown, row, strict=True)])
        missing: set[tuple[bool, ...]] = set()
        while len(missing) <= TOLD and sat.solve():
            model = set(sat.get_model())
            row = tuple(numbers[name] in model for name in shown)
            missing.add(row)
            sat.add_clause([-numbers[n] if value else numbers[n] for n, value in zip(shown, row, strict=True)])
    return _finding(found, shown, _wrong_cells(table), missing, extra, "survivors")


def _written(table: Table) -> set[tuple[bool, ...]]:
    """The assignments of the rows, over the columns that are variables."""
    at = [i for i, formula in enumerate(table.head) if formula.op == "var"]
    return {tuple(row[i] for i in at) for row in table.rows}


def _projected(alive: int, names: Sequence[str], shown: Sequence[str]) -> set[tuple[bool, ...]]:
    """Assignments of some variables that can be extended to a row in which the premises hold."""
    shifts = [len(names) - 1 - names.index(name) for name in shown]
    found = set()
    text = bin(alive)[:1:-1]
    at = text.find("1")
    while at >= 0:
        found.add(tuple(bool(at >> shift & 1) for shift in shifts))
        at = text.find("1", at + 1)
    return found


def _wrong_cells(table: Table) -> list[str]:
    """Cells of formula columns that do not follow from the variables of their row."""
    wrong = []
    for number, row in enumerate(table.rows, 1):
        known = {f.name: value for f, value in zip(table.head, row, strict=True) if f.op == "var"}
        for formula, value in zip(table.head, row, strict=True):
            if formula.op != "var" and known.keys() >= set(formula.variables) and formula.value(known) != value:
                wrong.append(f"row {number}: a cell says {value}, its formula is {not value}")
    return wrong


def _finding(
    found: str | None,
    shown: Sequence[str],
    wrong: Sequence[str],
    missing: set[tuple[bool, ...]],
    extra: set[tuple[bool, ...]],
    kind: str,
) -> Finding:
    def named(row: tuple[bool, ...]) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(shown, row, strict=True))

    problems = [*wrong[:TOLD]]
    problems += [f"missing row: {named(row)}" for row in sorted(missing)[:TOLD]]
    problems += [f"row in which a premise fails: {named(row)}" for row in sorted(extra)[:TOLD]]
    return Finding(found, tuple(problems), len(wrong), len(missing), len(extra), kind)
