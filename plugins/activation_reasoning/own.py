"""Rules and facts of one request beside those of a loaded file, in tables of fixed size.

The file decides what is detected; a request says what follows from it. Its rules are compiled together with the file's when
it is admitted, and every token looks up the table of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from llm_steer.errors import SteerError, did_you_mean

from .logic import RuleSet, Semantics
from .logic.closed import ClosedProgram
from .logic.formula import Literal, inputs_of, sequences_of
from .logic.parser import Place
from .logic.reasoner import SlotLimits, SlotReasoner
from .logic.rules import ground, read_rules, subjects_of
from .logic.ruleset import read_fact
from .logic.schedule import Schedule, schedule
from .program import Action, Program

MAX_TEXT = 16_384
"""Characters of the rules and facts of one request."""
MAX_DEPTH = 16
"""Steps by which a request's rules may lengthen the longest derivation."""


@dataclass(frozen=True)
class Own:
    """What one request reasons with."""

    rules: RuleSet
    """The file's and its own."""
    given: tuple[Literal, ...]
    """Facts, the file's included."""
    plan: Schedule


def compile_own(program: Program, extra: Sequence[str], facts: Sequence[str]) -> Own:
    """Bring a request's rules and facts together with a file's.

    Raises:
        SteerError: a rule that cannot be read, that contradicts others, or speaks of what the file does not know.
    """
    detected, given = dict.fromkeys(d.literal for d in program.propositions), sorted(program.given)
    file = tuple(program.rules), tuple(program.subjects), program.semantics, tuple(detected), tuple(given)
    return _compiled(*file, tuple(extra), tuple(facts))


def check_own(program: Program, extra: Sequence[str], facts: Sequence[str], allowed: int) -> None:
    """Raise ``SteerError`` for what a request from outside may not bring."""
    count, size = len(extra) + len(facts), sum(map(len, (*extra, *facts)))
    field, value = ("extra_rules", list(extra)) if extra else ("facts", list(facts))
    if count > allowed:
        many = f"at most {allowed} of extra_rules and facts together, not {count}" if allowed else "left out, and facts, too"
        raise SteerError(field, value, f"{many}: allow_rules says so where the server is started")
    if size > MAX_TEXT:
        raise SteerError(field, f"{size} characters", f"at most {MAX_TEXT} characters of extra_rules and facts together")
    compile_own(program, extra, facts)


@lru_cache(maxsize=64)
def _compiled(
    base: tuple[str, ...], subjects: tuple[str, ...], semantics: Semantics, detected: tuple[Literal, ...],
    given: tuple[Literal, ...], extra: tuple[str, ...], facts: tuple[str, ...],
) -> Own:  # fmt: skip
    file, added = read_rules(base), read_rules(extra, source="extra_rules")
    rules = RuleSet.build([*file, *added], semantics, subjects)
    told = [read_fact(text, Place(f"facts[{index}]")) for index, text in enumerate(facts)]
    for fact in told:
        if not fact.positive and semantics == "closed":
            raise SteerError("facts", str(fact), "without not: with closed semantics, what is not said is false")
    people = {*subjects, *subjects_of(file)}
    for source, of in (("extra_rules", added), ("facts", read_rules(facts, source="facts"))):
        if strangers := sorted(set(subjects_of(of)) - people):
            raise SteerError(source, strangers[0], f"about the file's subjects ({', '.join(sorted(people)) or 'none'})")
    known = {literal.atom for literal in (*detected, *given, *told)}
    if isinstance(rules.program, ClosedProgram):
        known |= {clause.head for clause in rules.program.clauses}
    for rule in ground(added, rules.subjects):
        # Open rules may be about anything: what is not known is unknown. An order is detected, or it is nothing.
        asked = map(str, sequences_of(rule.formula)) if semantics == "open" else inputs_of(rule.formula)
        for atom in asked:
            if atom not in known:
                valid = f"about what the file detects, a rule derives, or facts say{did_you_mean(atom, known)}"
                raise SteerError(rule.place, atom, valid)
    literals = tuple(dict.fromkeys((*given, *told)))
    return Own(rules, literals, schedule(rules.program, [literal.atom for literal in (*detected, *literals)]))


def limits(programs: Sequence[Program], allowed: int) -> SlotLimits:
    """Tables for any of the programs with so many rules and facts more: plain ones, of one clause each."""
    plans = [compile_own(program, (), ()).plan for program in programs]
    # A rule makes one gate of a new node. With open semantics a node has four, and what follows from two rules is one more.
    room = 8 if any(program.semantics == "open" for program in programs) else 2
    return SlotLimits(
        nodes=max(plan.nodes for plan in plans) + room * allowed,
        gates=max(sum(len(layer.gates) for layer in plan.layers) for plan in plans) + room * allowed,
        passes=max(plan.passes for plan in plans) + MAX_DEPTH,
    )


class OwnReasoner:
    """Reasons for the slots whose requests bring rules or facts.

    Args:
        facts: program and literal of each column of ``facts``.
        actions: program and action of each column of what is asked for.
        size: of the tables.
        num_slots: the last one is nobody's.
        device: where it runs.
    """

    def __init__(
        self, facts: Sequence[tuple[int, Literal]], actions: Sequence[tuple[int, Action]], size: SlotLimits, num_slots: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._facts, self._actions, self._false = list(facts), list(actions), size.nodes
        self._reasoner = SlotReasoner(size, num_slots, device)
        self.used = torch.zeros(num_slots, dtype=torch.bool, device=device)
        """The slot's request has rules or facts of its own."""
        # Where each node's truth comes from: a column of facts, or the one behind the last, which is false.
        self._source = torch.full((num_slots, size.nodes), len(facts), dtype=torch.int64, device=device)
        self._given = torch.zeros(num_slots, size.nodes, dtype=torch.bool, device=device)
        # Node of what each action waits for, and of a contradiction; the one behind the last is false.
        self._goal = torch.full((num_slots, len(actions) + 1), self._false, dtype=torch.int64, device=device)

    def write(self, slot: int, number: int, own: Own | None) -> None:
        """Give a slot its rules, or none.

        Args:
            number: of the program that they extend.

        Raises:
            SteerError: they do not fit into the tables.
        """
        self.used[slot] = False
        if own is None:
            return
        plan = own.plan
        try:
            self._reasoner.write(slot, plan)
        except SteerError as error:
            raise SteerError("extra_rules", error.value, error.valid) from error
        source = torch.full((self._source.shape[1],), len(self._facts), dtype=torch.int64)
        for column, (program, literal) in enumerate(self._facts):
            if program == number and literal in plan.inputs:
                source[plan.inputs[literal]] = column
        given = torch.zeros(self._given.shape[1], dtype=torch.bool)
        given[[plan.inputs[literal] for literal in own.given]] = True
        goal = [
            plan.outputs.get(Literal(action.atom, action.positive), self._false) if program == number else self._false
            for program, action in self._actions
        ]
        self._source[slot] = source.to(self._source.device)
        self._given[slot] = given.to(self._given.device)
        self._goal[slot] = torch.tensor([*goal, plan.contradiction], device=self._goal.device)
        self.used[slot] = True

    def __call__(self, facts: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw all conclusions.

        Args:
            facts: bool ``[rows, facts]``.
            slot: int64 ``[rows]``.

        Returns:
            bool ``[rows, actions]``, what they wait for holds; bool ``[rows, 1]``, facts and rules exclude each other.
        """
        pad = torch.nn.functional.pad
        nodes = pad(facts, (0, 1)).gather(1, self._source[slot]) | self._given[slot]
        found = pad(self._reasoner(nodes, slot), (0, 1)).gather(1, self._goal[slot])
        return found[:, :-1], found[:, -1:]
