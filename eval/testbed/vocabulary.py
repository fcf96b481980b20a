"""The texts that are one token each."""

from __future__ import annotations

from llm_steer.eval.testbed import entailment, logic_words, traces, words

GLUE = (
    "\n\n", "\n", "\\boxed{", " = ", " + ", " - ", " * ", ": ", "; ", ", ", ". ", "= ?", " = ?", " != ", " == ",
    " | ", " & ", " -> ",
)  # fmt: skip


def pieces() -> list[str]:
    """Every piece longer than a byte; words with and without a leading space. The order is the order of ids: append only."""
    plain = [
        *traces.REFLECTIONS,
        *words.MONTHS,
        *words.PEOPLE,
        *sorted(set(words.PEOPLE.values())),
        *words.THINGS,
        *(word for text in (*words.GAINS, *words.LOSSES, words.DOUBLES) for word in text.split()),
        *("In", "in", "has", "have", "How", "many", "does"),
        *logic_words.WORDS,
    ]
    forms = (form for word in dict.fromkeys(plain) for form in (word, " " + word))
    counts = (count for count in traces.COUNTS if count)
    return [*GLUE, *forms, *entailment.CODE_PIECES, *counts, traces.LAST_END, f" {entailment.NOTHING}"]
