"""Rules over propositions: a small language, two semantics, proofs, and reasoners on tensors.

``parser`` reads formulas, ``rules`` replaces variables by subjects, ``closed`` and ``open`` give a rule set its meaning in
plain Python, ``schedule`` lays it out as gates, ``reasoner`` computes these for a whole batch on the device, ``proof`` says
why, ``soft`` is about degrees of truth. Nothing here knows models or concepts.
"""

from .open import Verdict
from .ruleset import RuleSet, Semantics
from .soft import Truth

__all__ = ["RuleSet", "Semantics", "Truth", "Verdict"]
