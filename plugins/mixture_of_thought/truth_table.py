"""Truth tables that a model wrote: read, enumerated again, and compared row by row.

What is checked is the table, not the translation: whether the rows and the verdict follow from the formulas that the model
wrote down. Verdicts are those of Mixture of Thought: the statement is True if it holds in every row in which the premises
hold, False if in none, else Uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from llm_steer.plugins.mixture_of_thought.formula import (
    Formula,
    FormulaError,
    clauses,
    columns,
    conjunction,
    parse,
)
from llm_steer.plugins.mixture_of_thought.solving import Solver, Undecided

ENUMERATED = 16
"""Variables up to which all rows are gone through; beyond, python-sat answers."""
MOST_VARIABLES = 256
MOST_ROWS = 4096
MOST_PARTS = 20_000
"""Variables, constants and connectives of all formulas together."""
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
_REMARK = re.compile(r"(?<=\s)(?:#|//|--|—|\()")
_COUNTS = {"row", "rows", "#", "no", "no.", "nr", "nr.", "n", "№", "line", "index", "case", "i", ""}
"""Heads of columns that number the rows, unless a formula has such a variable."""
_TRUTH = {"true": True, "t": True, "1": True, "✓": True, "yes": True}
_TRUTH |= {"false": False, "f": False, "0": False, "✗": False, "no": False}


@dataclass(frozen=True)
class Table:
    """A truth table as it was written."""

    premises: tuple[Formula, ...]
    statement: Formula
    head: tuple[Formula, ...] = ()
    """Of each column, its formula; columns about something else are left out."""
    rows: tuple[tuple[bool, ...], ...] = ()

    @property
    def shown(self) -> dict[str, int]:
        """Variables that have a column, and which one; none without rows."""
        columns: dict[str, int] = {}
        for place, formula in enumerate(self.head if self.rows else ()):
            if formula.op == "var":
                columns.setdefault(formula.name, place)  # a second one is compared with the first
        return columns

    @property
    def variables(self) -> list[str]:
        """In order of appearance."""
        return _variables(*self.premises, self.statement, *self.head)


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
    """``survivors``: only rows in which the premises hold; ``full``: every row; ``none``: no table was written, or
    none with a column of a variable; ``undecided``: python-sat did not get through the rows. What a table
    was meant to be is told by what makes fewer rows wrong."""

    @property
    def rows_right(self) -> bool:
        return not (self.wrong or self.missing or self.extra) and self.kind != "undecided"


# -- reading -------------------------------------------------------------------------------------------------------------


def read(text: str) -> Table:
    """Find premises, statement and rows in a model's text.

    Raises:
        FormulaError: there is no statement, or a formula that cannot be read, or too much of something.
    """
    premises: list[Formula] = []
    statements: list[Formula] = []
    rows: list[list[str]] = []
    section = ""
    for line in text.splitlines():
        line = line.strip().replace("**", "").strip("`$ ")
        if line.startswith("|"):
            rows.append([cell.strip().strip("*`$ ") for cell in line.removeprefix("|").removesuffix("|").split("|")])
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
    table = Table(tuple(premises), statements[-1], *_grid(rows, premises, statements[-1]))
    _check_size(table)
    return table


def _check_size(table: Table) -> None:
    parts = sum(formula.size for formula in (*table.premises, table.statement, *table.head))
    for count, what, most in (
        (len(table.rows), "rows", MOST_ROWS),
        (parts, "parts of formulas", MOST_PARTS),
        (len(table.variables), "variables", MOST_VARIABLES),
    ):
        if count > most:
            raise FormulaError(f"{count} {what}, more than {most}")


def _formula(line: str) -> Formula:
    """A formula with what stands around it: a number, a name, a remark."""
    line = re.sub(r"[`$]", "", _NUMBERING.sub("", line)).strip().rstrip(".,;")
    found = _REMARK.search(line)
    remark = line[: found.start()].rstrip() if found else line
    error: FormulaError | None = None
    for text in dict.fromkeys((line, line.rpartition(":")[2], remark, remark.rpartition(":")[2])):
        try:
            return parse(text.strip())
        except FormulaError as problem:
            error = error or problem
    raise FormulaError(f"{line[:60]!r} is no formula: {error}")


def _grid(
    lines: Sequence[Sequence[str]], premises: Sequence[Formula], statement: Formula
) -> tuple[tuple[Formula, ...], tuple[tuple[bool, ...], ...]]:
    """Head and rows of the table that was written, without the columns that are about something else.

    Raises:
        FormulaError: a cell of a formula's column is neither true nor false.
    """
    known = set(_variables(*premises, statement))
    named = {"statement": statement, "conclusion": statement, "premises": conjunction(premises)}
    head: list[Formula | None] = []
    rows: list[tuple[bool, ...]] = []
    for cells in lines:
        if all(cell and set(cell) <= set("-: ") for cell in cells):
            continue
        if not rows and (not head or not any(cell.lower() in _TRUTH for cell in cells)):
            head = [_column(cell, known, named) for cell in cells]
            continue
        if len(cells) != len(head):
            continue
        values = [_TRUTH.get(cell.lower()) for cell, formula in zip(cells, head, strict=True) if formula is not None]
        if None in values:
            raise FormulaError(f"the row {' | '.join(cells)[:60]!r} has cells that are neither true nor false")
        if values:
            rows.append(tuple(bool(value) for value in values))
    return tuple(formula for formula in head if formula is not None), tuple(rows)


def _column(cell: str, known: set[str], named: Mapping[str, Formula]) -> Formula | None:
    """The formula of a column; None if it is about something else."""
    word = cell.lower()
    if cell not in known and (word in _COUNTS or word in named):
        return named.get(word)
    try:
        formula = parse(cell)
    except FormulaError:
        return None
    return formula if known.issuperset(formula.variables) else None


def _variables(*formulas: Formula) -> list[str]:
    return list(dict.fromkeys(name for formula in formulas for name in formula.variables))


# -- checking ------------------------------------------------------------------------------------------------------------


def check(table: Table) -> Finding:
    """Enumerate a table again.

    Raises:
        MissingDependencyError: more than 16 variables without python-sat.
        Undecided: more than 16 variables, and python-sat found no verdict within its budget.
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
    if not (shown := list(table.shown)):
        return Finding(found)
    written, survivors = _written(table), _projected(alive, names, shown)
    every = 1 << len(shown)
    # Meant as a full table: what is not there is missing. Else what is there and does not survive is too much.
    if every - len(written) < len(survivors ^ written):
        absent = (row for row in product((False, True), repeat=len(shown)) if row not in written)
        return _finding(found, shown, _wrong_cells(table), list(absent), [], "full")
    wrong = _wrong_cells(table)
    return _finding(found, shown, wrong, sorted(survivors - written), sorted(written - survivors), "survivors")


def _solve(table: Table) -> Finding:
    numbers = {name: i + 1 for i, name in enumerate(table.variables)}
    fresh = [len(numbers)]
    alive, first = clauses(conjunction(table.premises), numbers, fresh)
    holds, second = clauses(table.statement, numbers, fresh)
    with Solver([*first, *second, [alive]]) as sat:
        found = _of(sat.solve([holds]), sat.solve([-holds]))
        if not (shown := list(table.shown)):
            return Finding(found)
        written = _written(table)

        def literals(row: tuple[bool, ...]) -> list[int]:
            return [numbers[name] if value else -numbers[name] for name, value in zip(shown, row, strict=True)]

        try:
            extra = [row for row in sorted(written) if not sat.solve(literals(row))]
            for row in written:
                sat.add([-literal for literal in literals(row)])
            missing: list[tuple[bool, ...]] = []
            while len(missing) <= TOLD and sat.solve():
                model = sat.model()
                missing.append(tuple(numbers[name] in model for name in shown))
                sat.add([-literal for literal in literals(missing[-1])])
        except Undecided:
            return Finding(found, ("not every row could be compared",), kind="undecided")
    return _finding(found, shown, _wrong_cells(table), missing, extra, "survivors")


def _written(table: Table) -> set[tuple[bool, ...]]:
    """The assignments of the rows, over the columns that are variables."""
    return {tuple(row[i] for i in table.shown.values()) for row in table.rows}


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
    """Cells of formula columns that do not follow from the variables of their row. All rows at once, one bit each."""
    ones = (1 << len(table.rows)) - 1
    written = [int("".join("01"[value] for value in reversed(column)), 2) for column in zip(*table.rows, strict=True)]
    known = {name: written[place] for name, place in table.shown.items()}
    wrong = []
    for formula, column in zip(table.head, written, strict=True):
        if known.keys() >= set(formula.variables):
            differ = column ^ formula.bits(known, ones)
            wrong += [(row, bool(column >> row & 1)) for row in range(len(table.rows)) if differ >> row & 1]
    return [f"row {row + 1}: a cell says {value}, its formula is {not value}" for row, value in sorted(wrong)]


def _finding(
    found: str | None,
    shown: Sequence[str],
    wrong: Sequence[str],
    missing: Sequence[tuple[bool, ...]],
    extra: Sequence[tuple[bool, ...]],
    kind: str,
) -> Finding:
    def named(row: tuple[bool, ...]) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(shown, row, strict=True))

    problems = [*wrong[:TOLD]]
    problems += [f"missing row: {named(row)}" for row in missing[:TOLD]]
    problems += [f"row in which a premise fails: {named(row)}" for row in extra[:TOLD]]
    return Finding(found, tuple(problems), len(wrong), len(missing), len(extra), kind)
