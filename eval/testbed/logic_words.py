"""Words that the logic tasks are told in."""

from __future__ import annotations

ATOMS = (
    "cold", "wet", "dark", "loud", "red", "big", "old", "soft", "rich", "kind", "fast", "calm",
)  # fmt: skip
"""Propositions of the entailment task: what a day, a house or a person may be."""
KINDS = (
    "wumpus", "tumpus", "jompus", "vumpus", "zumpus", "dumpus", "rompus", "numpus", "lempus", "gorpus", "shumpus",
    "sterpus", "grimpus", "brimpus", "lorpus", "yumpus",
)  # fmt: skip
"""Made-up classes of the ontology task, after PrOntoQA."""
GLUE_WORDS = (
    "It", "it", "Is", "is", "If", "then", "Either", "or", "not", "Every", "a", "so", "True", "False", "Uncertain",
    "holds", "fails", "for", "and", "words", "code", "table",
)  # fmt: skip

WORDS = (*GLUE_WORDS, *ATOMS, *KINDS)
