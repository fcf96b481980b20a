"""What a parser and the solver answer to the logic tasks, without a model: the bar for whatever reads activations.

python -m llm_steer.eval.logic_baselines [--count 500] [--prontoqa FILE] [--proverqa FILE] [--beavertails FILE] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llm_steer.eval.logic_tasks import (
    SIMILES,
    LogicProblem,
    Moderated,
    country_by_words,
    load_beavertails,
    load_prontoqa,
    load_proverqa,
    parse_then_solve,
    prontoqa,
    rail2country,
    solve,
)
from llm_steer.plugins.activation_reasoning.logic import RuleSet
from llm_steer.plugins.activation_reasoning.logic.formula import Literal

from llm_steer.errors import SteerError


def baselines(
    count: int, prontoqa_file: Path | None = None, proverqa_file: Path | None = None, beavertails_file: Path | None = None
) -> list[dict[str, Any]]:
    """What a parser and the solver answer, without a model.

    Args:
        count: problems of each kind that is drawn.

    Returns:
        For each kind: ``task``, ``how`` it is answered, ``problems``, how many were ``understood``, and how many ``right``.
    """
    found = []

    def answer(
        task: str, how: str, problems: Iterable[Any], solver: Callable[[Any], Any], gold: Callable[[Any], Any]
    ) -> None:
        pairs = [(solver(problem), gold(problem)) for problem in problems]
        understood = sum(given is not None for given, _ in pairs)
        right = sum(given == wanted for given, wanted in pairs)
        found.append({"task": task, "how": how, "problems": len(pairs), "understood": understood, "right": right})

    def written(problem: LogicProblem) -> str:
        return problem.answer

    for hops in (1, 3, 5):
        answer(f"PrOntoQA, drawn, {hops} hops", "sentences parsed", prontoqa(count, hops), parse_then_solve, written)
    answer("Rail2Country", "colours by their names", rail2country(count), country_by_words, written)
    similes = rail2country(count, meta=True)
    answer("Rail2Country, similes", "colours by their names", similes, country_by_words, written)
    answer("Rail2Country, similes", "a lexicon of the similes", similes, partial(country_by_words, words=SIMILES), written)
    if prontoqa_file is not None:
        answer("PrOntoQA, file", "sentences parsed", load_prontoqa(prontoqa_file), parse_then_solve, written)
    if proverqa_file is not None:
        problems = load_proverqa(proverqa_file)
        answer("ProverQA", "sentences parsed", problems, parse_then_solve, written)
        answer("ProverQA", "the file's own formulas", problems, solve, written)
    if beavertails_file is not None:
        examples = load_beavertails(beavertails_file)
        half = len(examples) // 2
        words = unsafe_words(examples[:half])
        how = f"{len(words)} words from the first half of the file; any of them -> unsafe"
        rules = RuleSet.read([f'"{word}" -> unsafe' for word in sorted(words)] or ["true -> true"])
        unsafe = Literal("unsafe")

        def judged(example: Moderated) -> bool:
            return rules.verdict([Literal(word) for word in words & _words(example.response)], unsafe) != "True"

        answer("BeaverTails", how, examples[half:], judged, lambda example: example.safe)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Logic tasks: what a parser and the solver answer, without a model.")
    parser.add_argument("--count", type=int, default=500, help="problems of each kind that is drawn")
    for name in ("prontoqa", "proverqa", "beavertails"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = baselines(options.count, options.prontoqa, options.proverqa, options.beavertails)
    except (SteerError, OSError) as error:
        raise SystemExit(f"logic_baselines: {error}") from None
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for row in found:
        print(
            f"{row['task']:24} {row['right']:5} of {row['problems']:5} right, {row['understood']:5} understood: {row['how']}"
        )


MOST_WORDS = 100
"""Of :func:`unsafe_words`."""


def unsafe_words(examples: Sequence[Moderated]) -> frozenset[str]:
    """Words that say most that a response is unsafe: by the shares of unsafe and of safe responses that hold them (log-odds,
    one of each added), if five or more do."""
    totals = Counter(example.safe for example in examples)
    counts = {safe: Counter(w for e in examples if e.safe is safe for w in _words(e.response)) for safe in (True, False)}

    def odds(word: str) -> float:
        unsafe, safe = ((counts[kind][word] + 1) / (totals[kind] + 2) for kind in (False, True))
        return math.log(unsafe / safe)

    common = [word for word, count in (counts[False] + counts[True]).items() if count >= 5]
    return frozenset(sorted((w for w in common if odds(w) > 0), key=lambda w: (-odds(w), w))[:MOST_WORDS])


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z']+", text.casefold()))


if __name__ == "__main__":
    main()
