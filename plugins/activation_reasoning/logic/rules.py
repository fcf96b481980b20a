"""Rules: parsed formulas with their place, and variables replaced by subjects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from llm_steer.errors import SteerError

from .formula import Atom, Constant, Formula, Iff, Implies, Normal, Not, atoms_of, normal, substitute
from .parser import Place, parse

MAX_RULES = 2_000
"""Of a rule set, as written."""
MAX_GROUND = 10_000
"""Of a rule set, variables replaced."""
MAX_SUBJECTS = 256


@dataclass(frozen=True)
class Rule:
    """A formula that is taken to hold, and where it was written."""

    formula: Formula
    text: str = field(compare=False, default="")
    place: str = field(compare=False, default="")

    def __str__(self) -> str:
        return self.text or str(self.formula)


def read_rules(texts: Sequence[str], places: Sequence[Place] | None = None, source: str = "rules") -> list[Rule]:
    """Parse rules.

    Args:
        texts: a formula each.
        places: where each stands; by default ``source[0]``, ``source[1]`` and so on.

    Raises:
        SteerError: too many, or one that cannot be read.
    """
    if len(texts) > MAX_RULES:
        raise SteerError(source, f"{len(texts)} rules", f"at most {MAX_RULES}")
    places = places or [Place(f"{source}[{index}]") for index in range(len(texts))]
    return [Rule(parse(text, place), text, place.at(text, 0)) for text, place in zip(texts, places, strict=True)]


def variables_of(formula: Formula) -> list[str]:
    """Variables in the order in which they appear."""
    return list(dict.fromkeys(arg for atom in atoms_of(formula) for arg in atom.args if arg.startswith("?")))


def subjects_of(rules: Iterable[Rule]) -> list[str]:
    """Subjects that rules name, in the order in which they appear."""
    return list(
        dict.fromkeys(arg for rule in rules for atom in atoms_of(rule.formula) for arg in atom.args if arg[0] != "?")
    )


def ground(rules: Sequence[Rule], subjects: Sequence[str]) -> list[Rule]:
    """Each rule once for every way in which subjects can stand for its variables.

    Raises:
        SteerError: there are variables but no subjects, or too many combinations.
    """
    if len(subjects) > MAX_SUBJECTS:
        raise SteerError("subjects", f"{len(subjects)} subjects", f"at most {MAX_SUBJECTS}")
    found: list[Rule] = []
    for rule in rules:
        variables = variables_of(rule.formula)
        if variables and not subjects:
            raise SteerError(rule.place, rule.text, "without variables, or in a file that names subjects")
        if len(found) + len(subjects) ** len(variables) > MAX_GROUND:
            count = f"{len(subjects)}^{len(variables)} instances"
            raise SteerError(
                rule.place, rule.text, f"part of a rule set of at most {MAX_GROUND} ground rules: this has {count}"
            )
        for chosen in product(subjects, repeat=len(variables)):
            formula = substitute(rule.formula, dict(zip(variables, chosen, strict=True))) if variables else rule.formula
            found.append(Rule(formula, rule.text, rule.place))
    return found


def normal_of(formula: Formula, rule: Rule) -> Normal:
    """The normal form of a rule, or of its body.

    Raises:
        SteerError: at the rule's place, if it has none that is small enough.
    """
    try:
        return normal(formula)
    except SteerError as error:
        raise SteerError(rule.place, rule.text, f"{error.valid}, not {error.value}") from error


def split(rule: Rule) -> list[tuple[Formula, Formula]]:
    """A rule as body and head; several for ``<->``. A fact has the body ``true``."""
    match rule.formula:
        case Implies(left, right):
            return [(left, right)]
        case Iff(left, right):
            return [(left, right), (right, left)]
        case Not(Atom()) | Atom():
            return [(Constant(True), rule.formula)]
        case other:
            return [(Constant(True), other)]
