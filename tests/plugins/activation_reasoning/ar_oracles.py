"""Slow, plain oracles: the unique stable model by enumeration, classical entailment by truth table; and random rules."""

from __future__ import annotations

import itertools
import math
import random

from llm_steer.plugins.activation_reasoning.logic.formula import (
    And,
    AtLeast,
    Atom,
    Constant,
    Formula,
    Iff,
    Implies,
    Not,
    Or,
    Then,
    Xor,
    holds,
)  # fmt: skip

NAMES = "abcdef"


def supported(formula: Formula, low: set[str], high: set[str], positive: bool = True) -> bool:
    """Truth where what must hold is looked up in ``low`` and what must not in ``high``: monotone in ``low``."""

    def see(part: Formula, same: bool = True) -> bool:
        return supported(part, low, high, positive == same)

    match formula:
        case Atom() | Then():
            return str(formula) in (low if positive else high)
        case Constant(value):
            return value
        case Not(of):
            return not see(of, False)
        case And(items):
            return all(map(see, items))
        case Or(items):
            return any(map(see, items))
        case Implies(left, right):
            return not see(left, False) or see(right)
        case Xor(left, right):
            return (see(left) and not see(right, False)) or (not see(left, False) and see(right))
        case Iff(left, right):
            return (see(left) and see(right)) or (not see(left, False) and not see(right, False))
        case AtLeast(count, items):
            return sum(map(see, items)) >= count
    raise AssertionError(formula)


def stable_models(rules: list[tuple[Formula, list[str]]], facts: set[str], atoms: list[str]) -> list[set[str]]:
    """Every set of atoms that is the least one closed under the rules once "not" is read off the set itself."""
    models = []
    for chosen in itertools.product((False, True), repeat=len(atoms)):
        guess = {atom for atom, true in zip(atoms, chosen, strict=True) if true} | facts
        least = set(facts)
        while True:
            more = {head for body, heads in rules if supported(body, least, guess) for head in heads} - least
            if not more:
                break
            least |= more
        if least == guess:
            models.append(guess)
    return [model for index, model in enumerate(models) if model not in models[:index]]


def degree(formula: Formula, values: dict[str, float], norm: str, positive: bool = True, absent=None) -> float:
    """How true a formula (or its negation) is: t-norm for and, maximum for or, ``1 - x`` for a negated atom.

    Args:
        absent: values for what is negated, if not ``values``.
    """

    def see(part: Formula, same: bool = True) -> float:
        return degree(part, values, norm, positive == same, absent)

    def both(*parts: float) -> float:
        return math.prod(parts) if norm == "product" else min(parts, default=1.0)

    match formula:
        case Atom() | Then():
            return values[str(formula)] if positive else 1 - (values if absent is None else absent)[str(formula)]
        case Constant(value):
            return float(value == positive)
        case Not(of):
            return see(of, False)
        case And(items):
            return both(*map(see, items)) if positive else max(map(see, items))
        case Or(items):
            return max(map(see, items)) if positive else both(*map(see, items))
        case Implies(left, right):
            parts = (see(left, False), see(right))
            return max(parts) if positive else both(*parts)
        case Xor(left, right) | Iff(left, right):
            yes, no = (degree(left, values, norm, sign, absent) for sign in (True, False))
            other_yes, other_no = (degree(right, values, norm, sign, absent) for sign in (True, False))
            differ = isinstance(formula, Xor) == positive
            return max(both(yes, other_no if differ else other_yes), both(no, other_yes if differ else other_no))
        case AtLeast(count, items):
            needed = count if positive else len(items) - count + 1
            return max(both(*chosen) for chosen in itertools.combinations(list(map(see, items)), needed))
    raise AssertionError(formula)


def soft_model(
    rules: list[tuple[Formula, list[str]]], facts: dict[str, float], atoms: list[str], norm: str
) -> dict[str, float]:
    """Degrees of all atoms: the least ones that rules and facts demand, once "not" is read off themselves."""
    guess = dict.fromkeys(atoms, 0.0)
    while True:
        least = {atom: facts.get(atom, 0.0) for atom in atoms}
        changed = True
        while changed:
            changed = False
            for body, heads in rules:
                value = degree(body, least, norm, absent=guess)
                for head in heads:
                    if value > least[head] + 1e-15:
                        least[head], changed = value, True
        if least == guess:
            return least
        guess = least


def entailed(formulas: list[Formula], facts: dict[str, bool], goal: str, atoms: list[str]) -> str:
    """The verdict on an atom, from every assignment."""
    seen = set()
    for values in itertools.product((False, True), repeat=len(atoms)):
        world = dict(zip(atoms, values, strict=True))
        if all(world[a] == v for a, v in facts.items()) and all(holds(f, world) for f in formulas):
            seen.add(world[goal])
    return {frozenset(): "Contradiction", frozenset({True}): "True", frozenset({False}): "False"}.get(
        frozenset(seen), "Unknown"
    )


def random_formula(rng: random.Random, depth: int, names: str = NAMES) -> Formula:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return Atom(rng.choice(names)) if rng.random() < 0.97 else Constant(rng.random() < 0.5)

    def inner() -> Formula:
        return random_formula(rng, depth - 1, names)

    if kind < 0.5:
        return And(tuple(inner() for _ in range(rng.randint(2, 3))))
    if kind < 0.65:
        return Or(tuple(inner() for _ in range(rng.randint(2, 3))))
    if kind < 0.8:
        return Not(inner())
    if kind < 0.86:
        return Xor(inner(), inner())
    if kind < 0.9:
        return Iff(inner(), inner())
    if kind < 0.95:
        return Implies(inner(), inner())
    items = tuple(inner() for _ in range(rng.randint(2, 3)))
    return AtLeast(rng.randint(1, len(items)), items)


def random_closed(rng: random.Random) -> list[Formula]:
    """Rules whose heads come from later names more often than not, so that many sets are stratified."""
    rules: list[Formula] = []
    for _ in range(rng.randint(1, 6)):
        cut = rng.randint(1, len(NAMES) - 1)
        names = NAMES[:cut] if rng.random() < 0.8 else NAMES
        body = random_formula(rng, rng.randint(0, 3), names)
        heads = tuple(Atom(rng.choice(NAMES[cut:] if rng.random() < 0.8 else NAMES)) for _ in range(rng.randint(1, 2)))
        rules.append(Implies(body, heads[0] if len(heads) == 1 else And(heads)))
    if rng.random() < 0.3:
        rules.append(
            Implies(random_formula(rng, 1), Constant(False) if rng.random() < 0.5 else Not(Atom(rng.choice(NAMES))))
        )
    return rules


def random_open(rng: random.Random) -> list[Formula]:
    return [random_formula(rng, rng.randint(0, 3)) for _ in range(rng.randint(1, 5))]
