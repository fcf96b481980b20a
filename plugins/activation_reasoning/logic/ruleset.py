"""A rule set with its semantics: what the rest of the plugin sees of the logic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal as OneOf

from llm_steer.errors import SteerError

from .closed import BOTTOM, ClosedProgram, compile_closed, derive
from .formula import Atom, Iff, Implies, Literal, Not, inputs_of
from .open import OpenProgram, Verdict, clash, compile_open, entails
from .open import verdict as open_verdict
from .parser import Place, parse
from .proof import Proof, prove_all_closed, prove_clash, prove_open
from .rules import Rule, ground, read_rules, subjects_of
from .soft import Truth

Semantics = OneOf["closed", "open"]


@dataclass(frozen=True)
class RuleSet:
    """Rules with variables replaced, checked and compiled."""

    semantics: Semantics
    rules: tuple[Rule, ...]
    """As they were written."""
    subjects: tuple[str, ...]
    program: ClosedProgram | OpenProgram

    @classmethod
    def build(
        cls, rules: Sequence[Rule], semantics: Semantics = "closed", subjects: Iterable[str] = (), truth: Truth = "crisp"
    ) -> RuleSet:
        """Check rules.

        Args:
            subjects: what variables stand for, beside the subjects that the rules name.
            truth: of closed semantics.

        Raises:
            SteerError: naming the rule's place, its text, and what would be valid.
        """
        everyone = tuple(dict.fromkeys([*subjects, *subjects_of(rules)]))
        instances = ground(rules, everyone)
        compiled = compile_closed(instances, truth == "crisp") if semantics == "closed" else compile_open(instances)
        return cls(semantics, tuple(rules), everyone, compiled)

    @classmethod
    def read(
        cls, texts: Sequence[str], semantics: Semantics = "closed", subjects: Iterable[str] = (), source: str = "rules",
        truth: Truth = "crisp",
    ) -> RuleSet:  # fmt: skip
        """Parse and check rules, a formula each."""
        return cls.build(read_rules(texts, source=source), semantics, subjects, truth)

    @property
    def atoms(self) -> tuple[str, ...]:
        """Atoms that the rules mention."""
        return self.program.inputs

    def conclusions(self, facts: Collection[Literal]) -> list[Literal]:
        """Every literal about the rules' atoms and the facts' that holds, facts included; in a contradiction, open
        semantics concludes only the facts. Plain Python."""
        if isinstance(self.program, ClosedProgram):
            true = derive(self.program, _true(facts))
            return [Literal(atom) for atom in dict.fromkeys([*self.atoms, *(f.atom for f in facts)]) if atom in true]
        if self.contradicts(facts):
            return sorted(facts)
        atoms = dict.fromkeys([*self.atoms, *(fact.atom for fact in facts)])
        both = (Literal(atom, positive) for atom in atoms for positive in (True, False))
        return [literal for literal in both if entails(self.program, facts, literal)]

    def contradicts(self, facts: Collection[Literal]) -> bool:
        """Facts and rules exclude each other."""
        if isinstance(self.program, ClosedProgram):
            return BOTTOM in derive(self.program, _true(facts))
        return clash(self.program, facts) is not None

    def verdict(self, facts: Collection[Literal], goal: Literal) -> Verdict:
        """Closed semantics knows no Unknown."""
        if isinstance(self.program, OpenProgram):
            return open_verdict(self.program, facts, goal)
        true = derive(self.program, _true(facts))
        if BOTTOM in true:
            return "Contradiction"
        return "True" if (goal.atom in true) == goal.positive else "False"

    def ask(self, facts: Collection[Literal], question: str) -> Verdict:
        """The verdict on any formula.

        ``a -> b`` asks for ``b`` supposing ``a``: that is True exactly if rules and facts entail the implication, and False
        if they entail ``not b`` once ``a`` holds.
        """
        formula = parse(question, Place("question"))
        supposed: list[Rule] = []
        while isinstance(formula, Implies):
            supposed.append(Rule(formula.left, str(formula.left), "question"))
            formula = formula.right
        goal = Atom(next(name for name in map("goal{}".format, count()) if name not in self.atoms))
        define: type[Implies | Iff] = Implies if self.semantics == "closed" else Iff
        definition = Rule(define(formula, goal), str(formula), "question")
        try:
            asked = RuleSet.build([*self.rules, *supposed, definition], self.semantics, self.subjects)
        except SteerError:
            if supposed and self.semantics == "open":
                return "Contradiction"
            raise
        return asked.verdict(facts, Literal(str(goal)))

    def proofs(self, facts: Collection[Literal], goals: Collection[Literal]) -> dict[Literal, Proof]:
        """Why each goal holds; those that do not are left out."""
        if isinstance(self.program, ClosedProgram):
            atoms = prove_all_closed(self.program, _true(facts), [g.atom for g in goals if g.positive])
            return {Literal(atom): proof for atom, proof in atoms.items()}
        found = {goal: prove_open(self.program, facts, goal) for goal in goals}
        return {goal: proof for goal, proof in found.items() if proof is not None}

    def proof_of_contradiction(self, facts: Collection[Literal]) -> Proof | None:
        if isinstance(self.program, ClosedProgram):
            return prove_all_closed(self.program, _true(facts), [BOTTOM]).get(BOTTOM)
        return prove_clash(self.program, facts)


def _true(facts: Collection[Literal]) -> set[str]:
    """Facts of closed semantics: that something is not so needs no saying."""
    return {fact.atom for fact in facts if fact.positive}


def read_fact(text: str, place: Place | None = None) -> Literal:
    """A fact: an atom, or ``not`` and an atom.

    Raises:
        SteerError: it is anything else.
    """
    place = place or Place("fact")
    formula = parse(text, place)
    positive = not isinstance(formula, Not)
    inner = formula.of if isinstance(formula, Not) else formula
    names = list(inputs_of(inner))
    if names != [str(inner)] or "?" in str(inner):
        raise SteerError(place.at(text, 0), text, "an atom without variables, or not and an atom")
    return Literal(names[0], positive)
