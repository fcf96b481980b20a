"""Closed semantics: what cannot be derived is false.

Rules are Horn clauses with stratified negation: any formula may stand left of ``->``, atoms joined by ``and`` right of it.
Their meaning is the unique stable model. ``body -> false`` and ``body -> not a`` are constraints: they derive nothing, and
a request that violates one is contradictory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from llm_steer.errors import SteerError

from .formula import All, And, Any, Atom, Constant, Formula, Implies, Literal, Normal, Not, Then, inputs_of
from .rules import MAX_GROUND, Rule, normal_of, split

BOTTOM = "false"
"""The atom that constraints derive. Quoted in formulas, so none is called so."""
HELPER = "#"
"""First character of atoms that stand for parts of a body; no name in a formula is written so."""
MAX_SPREAD = 8
"""Conjunctions that a body is written out as before parts of it get atoms of their own."""


@dataclass(frozen=True)
class Clause:
    """``head`` if every literal of ``body``."""

    head: str
    body: tuple[Literal, ...]
    rule: int
    """Index of the ground rule that it comes from."""


@dataclass(frozen=True)
class ClosedProgram:
    """A checked rule set."""

    rules: tuple[Rule, ...]
    """Ground."""
    clauses: tuple[Clause, ...]
    strata: tuple[tuple[str, ...], ...]
    """Atoms in an order in which they can be decided: each group depends on itself, without negation, and earlier ones."""
    inputs: tuple[str, ...]
    """Atoms that rules mention, without helpers: any of them can be given as a fact."""


def compile_closed(rules: Sequence[Rule], crisp: bool = True) -> ClosedProgram:
    """Check ground rules and bring them into clauses.

    Args:
        crisp: leave out what makes no difference to truth, but does to its degree (``soft``): a literal that stands in a
            conjunction twice, and conjunctions that hold a literal and its negation.

    Raises:
        SteerError: a head with ``or`` or ``xor``, negation through a cycle, rules that contradict themselves without any
            fact, or more than ``MAX_GROUND`` clauses.
    """
    compiler = _Compiler(rules, crisp)
    for index, rule in enumerate(rules):
        for body, head in split(rule):
            compiler.add(index, rule, body, head)
    mentioned = dict.fromkeys(atom for rule in rules for atom in inputs_of(rule.formula))
    clauses = tuple(dict.fromkeys(compiler.clauses))
    program = ClosedProgram(tuple(rules), clauses, tuple(_strata(clauses, rules)), tuple(mentioned))
    if BOTTOM in derive(program, ()):
        culprit = rules[next(clause.rule for clause in firing(program, ()) if clause.head == BOTTOM)]
        raise SteerError(culprit.place, culprit.text, "free of contradiction: it is violated before anything is detected")
    return program


class _Compiler:
    def __init__(self, rules: Sequence[Rule], crisp: bool) -> None:
        self._rules, self._crisp = rules, crisp
        self.clauses: list[Clause] = []
        self._helpers = 0

    def add(self, index: int, rule: Rule, body: Formula, head: Formula) -> None:
        while isinstance(head, Implies):  # a -> (b -> c)
            body, head = And((body, head.left)), head.right
        heads, extra = self._heads(head, rule)
        for target, more in zip(heads, extra, strict=True):
            for literals in self._spread(normal_of(And((body, more)) if more else body, rule), index, {}):
                unique = tuple(dict.fromkeys(literals)) if self._crisp else literals
                if not (self._crisp and any(~literal in unique for literal in unique)):
                    self._append(Clause(target, unique, index))

    def _append(self, clause: Clause) -> None:
        self.clauses.append(clause)
        if len(self.clauses) > 4 * MAX_GROUND:
            rule = self._rules[clause.rule]
            raise SteerError(rule.place, rule.text, f"part of a rule set of at most {4 * MAX_GROUND} clauses")

    def _heads(self, head: Formula, rule: Rule) -> tuple[list[str], list[Formula | None]]:
        match head:
            case Atom():
                return [str(head)], [None]
            case Not(Atom() as atom):
                return [BOTTOM], [atom]
            case Constant(False):
                return [BOTTOM], [None]
            case Constant(True):
                return [], []
            case And(items):
                found = [self._heads(item, rule) for item in items]
                return [h for heads, _ in found for h in heads], [e for _, extra in found for e in extra]
        what = type(head).__name__.lower() if not isinstance(head, Then) else "an order"
        hint = "state it with semantics: open" if not isinstance(head, Then) else "an order is detected, never derived"
        valid = f"an atom, atoms joined by and, not an atom, or false right of -> (not {what}: {hint})"
        raise SteerError(rule.place, rule.text, valid)

    def _spread(self, formula: Normal, index: int, known: dict[int, list[tuple[Literal, ...]]]) -> list[tuple[Literal, ...]]:
        """A body as conjunctions of which one must hold."""
        if id(formula) in known:
            return known[id(formula)]
        match formula:
            case Literal():
                found: list[tuple[Literal, ...]] = [(formula,)]
            case Any(items):
                found = [literals for item in items for literals in self._spread(item, index, known)]
            case All(items):
                options = [self._spread(item, index, known) for item in items]
                total = 1
                for option in options:
                    total *= len(option)
                if total > MAX_SPREAD:
                    options = [self._named(option, index) if len(option) > 1 else option for option in options]
                found = [tuple(literal for part in choice for literal in part) for choice in product(*options)]
        known[id(formula)] = found
        return found

    def _named(self, option: list[tuple[Literal, ...]], index: int) -> list[tuple[Literal, ...]]:
        self._helpers += 1
        helper = f"{HELPER}{self._helpers}"
        for literals in option:
            self._append(Clause(helper, literals, index))
        # What is named once is shared: a graph of xors stays as small as it was written.
        option[:] = [(Literal(helper),)]
        return option


def _strata(clauses: Sequence[Clause], rules: Sequence[Rule]) -> Iterator[tuple[str, ...]]:
    """Strongly connected groups of atoms, those that others depend on first (Tarjan, without recursion)."""
    needs: dict[str, dict[str, Clause | None]] = {}
    for clause in clauses:
        own = needs.setdefault(clause.head, {})
        for literal in clause.body:
            needs.setdefault(literal.atom, {})
            if not literal.positive or literal.atom not in own:
                own[literal.atom] = None if literal.positive else clause
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    inside: set[str] = set()
    for root in needs:
        if root in order:
            continue
        walk = [(root, iter(needs[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        inside.add(root)
        while walk:
            atom, rest = walk[-1]
            following = next(rest, None)
            if following is None:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[atom])
                if low[atom] == order[atom]:
                    group: list[str] = []
                    while not group or group[-1] != atom:
                        group.append(stack.pop())
                    inside.difference_update(group)
                    _check_group(group, needs, rules)
                    yield tuple(sorted(group))
            elif following not in order:
                order[following] = low[following] = len(order)
                stack.append(following)
                inside.add(following)
                walk.append((following, iter(needs[following])))
            elif following in inside:
                low[atom] = min(low[atom], order[following])


def _check_group(group: Sequence[str], needs: Mapping[str, Mapping[str, Clause | None]], rules: Sequence[Rule]) -> None:
    members = set(group)
    for atom in group:
        for other, clause in needs[atom].items():
            if clause is not None and other in members:
                rule = rules[clause.rule]
                names = ", ".join(sorted(name for name in members if name[0] != HELPER)) or atom
                valid = f"free of negation through a cycle (not {other} is needed to derive what it depends on: {names})"
                raise SteerError(rule.place, rule.text, valid)


# -- plain reasoning -----------------------------------------------------------------------------------------------------


def derive(program: ClosedProgram, facts: Sequence[str] | set[str]) -> dict[str, Clause | None]:
    """Every atom that holds, helpers included, in the order of derivation, with the clause it was first derived by.

    Plain forward chaining, stratum by stratum: the slow twin of the compiled reasoner.

    Args:
        facts: atoms that were detected. They have no clause.
    """
    true: dict[str, Clause | None] = dict.fromkeys(facts)
    by_head: dict[str, list[Clause]] = {}
    for clause in program.clauses:
        by_head.setdefault(clause.head, []).append(clause)
    for group in program.strata:
        clauses = [clause for atom in group for clause in by_head.get(atom, ())]
        changed = True
        while changed:
            changed = False
            for clause in clauses:
                if clause.head not in true and all((lit.atom in true) == lit.positive for lit in clause.body):
                    true[clause.head] = clause
                    changed = True
    return true


def firing(program: ClosedProgram, facts: Sequence[str] | set[str]) -> list[Clause]:
    """Every clause whose body holds."""
    true = derive(program, facts)
    return [clause for clause in program.clauses if all((lit.atom in true) == lit.positive for lit in clause.body)]
