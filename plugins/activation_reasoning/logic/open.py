"""Open semantics: what is not known is unknown.

Rules are any formulas, facts are literals, and a verdict is classical entailment: True, False, Unknown, or Contradiction
where rules and facts exclude each other. Rules are compiled into their prime implicates, the strongest clauses that follow
from them: a literal follows from facts and rules exactly if some prime implicate holds it and its other literals are all
denied by facts (Quine 1955; Reiter and de Kleer 1987). One look at them decides, so there is nothing to iterate on a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from llm_steer.errors import SteerError

from .formula import All, Any, Literal, Normal, inputs_of
from .rules import Rule, normal_of

MAX_CLAUSES = 4_096
"""Clauses of a rule set, before and while prime implicates are made."""
MAX_STEPS = 4_000_000
"""Comparisons of two clauses."""

Verdict = OneOf["True", "False", "Unknown", "Contradiction"]

Literals = frozenset[int]
"""A clause: atom ``i`` is ``i + 1``, its negation ``-(i + 1)``."""


@dataclass(frozen=True)
class Implicate:
    """One of its literals holds."""

    literals: tuple[Literal, ...]
    rules: tuple[int, ...]
    """Indices of the ground rules that it was made from."""


@dataclass(frozen=True)
class OpenProgram:
    """A checked rule set."""

    rules: tuple[Rule, ...]
    """Ground."""
    implicates: tuple[Implicate, ...]
    inputs: tuple[str, ...]


def compile_open(rules: Sequence[Rule]) -> OpenProgram:
    """Check ground rules and compile them.

    Raises:
        SteerError: the rules contradict each other, or have too many clauses.
    """
    atoms = list(dict.fromkeys(atom for rule in rules for atom in inputs_of(rule.formula)))
    number = {atom: index + 1 for index, atom in enumerate(atoms)}
    found: dict[Literals, frozenset[int]] = {}
    for index, rule in enumerate(rules):
        for clause in _clauses(normal_of(rule.formula, rule), number, {}, rule):
            found.setdefault(clause, frozenset((index,)))
        if len(found) > MAX_CLAUSES:
            raise SteerError(rule.place, rule.text, f"part of a rule set of at most {MAX_CLAUSES} clauses")
    prime = _primes(found, rules)
    empty = prime.get(frozenset())
    if empty is not None:
        culprits = sorted(empty)
        text = "; ".join(f"{rules[i]}" for i in culprits[:4])
        raise SteerError(rules[culprits[-1]].place, text, "free of contradiction: these rules cannot all hold")
    implicates = [
        Implicate(tuple(sorted(Literal(atoms[abs(x) - 1], x > 0) for x in clause)), tuple(sorted(sources)))
        for clause, sources in prime.items()
    ]
    return OpenProgram(tuple(rules), tuple(sorted(implicates, key=lambda i: (len(i.literals), i.literals))), tuple(atoms))


def verdict(program: OpenProgram, facts: Collection[Literal], goal: Literal) -> Verdict:
    """Whether facts and rules entail the goal, its negation, or neither."""
    if clash(program, facts) is not None:
        return "Contradiction"
    if entails(program, facts, goal) is not None:
        return "True"
    return "False" if entails(program, facts, ~goal) is not None else "Unknown"


def entails(program: OpenProgram, facts: Collection[Literal], goal: Literal) -> Implicate | None:
    """The first implicate by which the goal follows; one without rules if it is a fact; None if it does not follow."""
    if goal in facts:
        return Implicate((goal,), ())
    for implicate in program.implicates:
        if goal in implicate.literals and all(lit == goal or ~lit in facts for lit in implicate.literals):
            return implicate
    return None


def clash(program: OpenProgram, facts: Collection[Literal]) -> Implicate | None:
    """What shows that the facts cannot hold together with the rules; None if they can."""
    for fact in facts:
        if ~fact in facts:
            return Implicate((fact, ~fact), ())
    for implicate in program.implicates:
        if all(~lit in facts for lit in implicate.literals):
            return implicate
    return None


def _clauses(formula: Normal, number: Mapping[str, int], known: dict[int, set[Literals]], rule: Rule) -> set[Literals]:
    if id(formula) in known:
        return known[id(formula)]
    match formula:
        case Literal(atom, positive):
            found = {frozenset((number[atom] if positive else -number[atom],))}
        case All(items):
            found = set().union(*(_clauses(item, number, known, rule) for item in items))
        case Any(items):
            found = {frozenset()}
            for item in items:
                options = _clauses(item, number, known, rule)
                if len(found) * len(options) > MAX_CLAUSES:
                    raise SteerError(rule.place, rule.text, f"a formula of at most {MAX_CLAUSES} clauses")
                pairs = (one | other for one in found for other in options)
                found = _minimal({clause for clause in pairs if not any(-x in clause for x in clause)})
    known[id(formula)] = found
    return found


def _minimal(clauses: set[Literals]) -> set[Literals]:
    """Without those that another one implies."""
    if len(clauses) > 256:  # quadratic: not worth it for what is cut down later anyway
        return clauses
    return {clause for clause in clauses if not any(other < clause for other in clauses)}


def _primes(clauses: Mapping[Literals, frozenset[int]], rules: Sequence[Rule]) -> dict[Literals, frozenset[int]]:
    """All prime implicates: resolve atom by atom (Tison 1967), keeping only clauses that no other implies."""
    kept: dict[Literals, frozenset[int]] = {}
    steps = 0

    def add(clause: Literals, sources: frozenset[int]) -> bool:
        nonlocal steps
        steps += len(kept)
        if steps > MAX_STEPS or len(kept) > MAX_CLAUSES:
            first = rules[min(sources)]
            valid = f"part of a rule set with at most {MAX_CLAUSES} consequences to keep; split it, or use semantics: closed"
            raise SteerError(first.place, first.text, valid)
        if any(other <= clause for other in kept):
            return False
        for other in [other for other in kept if clause < other]:
            del kept[other]
        kept[clause] = sources
        return True

    for clause, sources in sorted(clauses.items(), key=lambda item: (len(item[0]), sorted(item[0]))):
        add(clause, sources)
    for atom in sorted({abs(x) for clause in clauses for x in clause}):
        # Resolvents on an atom do not contain it, so one round over each atom is enough.
        yes = [(clause, kept[clause]) for clause in kept if atom in clause]
        no = [(clause, kept[clause]) for clause in kept if -atom in clause]
        for clause, sources in yes:
            for other, more in no:
                steps += 1
                resolvent = (clause - {atom}) | (other - {-atom})
                if clause in kept and other in kept and not any(-x in resolvent for x in resolvent):
                    add(resolvent, sources | more)
    return kept
