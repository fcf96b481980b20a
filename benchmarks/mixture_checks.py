"""What checking a response of the test bed's entailment task says, for mixture_of_thought in place of its own checks.

The test bed writes programs and tables in a notation of its own. Both are judged by what the model wrote, never by the
question: a table whose premises were copied wrongly is enumerated with these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from llm_steer.eval.testbed.entailment import FAILS, HOLDS
from llm_steer.eval.testbed.grading import executed
from llm_steer.eval.testbed.propositions import Assignment, Literal, Premise
from llm_steer.eval.testbed.traces import COUNTS, REFLECTIONS
from llm_steer.plugins.mixture_of_thought import MixtureOfThought
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS, Check

_REFLECTION = re.compile(rf"(?:^|\s+)(?:{'|'.join(REFLECTIONS)})(?:{'|'.join(filter(None, COUNTS))})?, |\n\n")
_LITERAL = r"(?:not )?\w+"
_AND = r"(?: and |, )"
_CELL = re.compile(rf"(?:(?:It is )?({_LITERAL}(?:{_AND}{_LITERAL})*)\. )?((?:If|Either) .+?):? ({HOLDS}|{FAILS})\.?")
_SO = re.compile(rf"so ({_LITERAL})\.?")


def code(text: str, options: Mapping[str, str] | None) -> Check:  # noqa: ARG001  (as the plugin's)
    """What the program says."""
    answer = executed(text)
    return Check(answer, "no_program" if answer is None else "executed")


@dataclass
class Table:
    """A table as it was written; of several attempts at a cell the last one."""

    rows: dict[tuple[Literal, ...], dict[Premise, bool]] = field(default_factory=dict)
    goals: set[str] = field(default_factory=set)
    """Atoms that the rows are said to decide."""

    @classmethod
    def read(cls, text: str) -> Table:
        """Parts that are no cell are left out."""
        table = cls()
        cells: dict[Premise, bool] | None = None
        for part in _REFLECTION.split(text.partition("</think>")[0]):
            if match := _SO.fullmatch(part.strip()):
                table.goals.add(Literal.parse(match[1]).atom)
            elif match := _CELL.fullmatch(part.strip()):
                head, premise, result = match.groups()
                if head is not None:
                    cells = table.rows.setdefault(tuple(map(Literal.parse, re.split(_AND, head))), {})
                try:
                    written = Premise.parse(premise)
                except ValueError:
                    continue
                if cells is not None:
                    cells[written] = result == HOLDS
        return table


def table(text: str, options: Mapping[str, str] | None) -> Check:  # noqa: ARG001
    """What follows from the rows and premises that were written, and whether every cell is right and no row is missing."""
    written = Table.read(text)
    if len(written.goals) != 1:
        return Check(None, "no_goal")
    (goal,) = written.goals
    premises = {premise for cells in written.rows.values() for premise in cells}
    rows: list[tuple[Assignment, dict[Premise, bool]]] = [
        ({literal.atom: literal.positive for literal in head}, cells) for head, cells in written.rows.items()
    ]
    atoms = {literal.atom for premise in premises for literal in premise.literals} | {goal}
    if any(not atoms <= row.keys() or row.keys() != rows[0][0].keys() for row, _ in rows):
        return Check(None, "unreadable")
    wrong = sum(premise.holds(row) != holds for row, cells in rows for premise, holds in cells.items())
    surviving = [row for row, _ in rows if all(premise.holds(row) for premise in premises)]
    seen = {row[goal] for row in surviving}
    if not seen:
        return Check(None, "premises_contradict")
    # Both values seen: no other row matters. Else all rows must be there that differ in what is not the same in all.
    varied = sum(len({row[atom] for row, _ in rows}) == 2 for atom in rows[0][0])
    missing = 0 if len(seen) == 2 else 2**varied - len(rows)
    answer = "Uncertain" if len(seen) == 2 else str(seen == {True})
    return Check(answer, "enumerated", sound=not (wrong or missing), notes={"wrong": wrong, "missing": missing})


class TestbedMixture(MixtureOfThought):
    """The plugin, with checks that read the test bed's notation."""

    checks: ClassVar = {**CHECKS, "code": code, "table": table}
