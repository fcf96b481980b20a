"""Problems of logic in words, and the baseline that parses and solves them without a model.

PrOntoQA in its published form (own generator, and the file of the Logic-LM project), Rail2Country (own generator from the
fifteen colour triples), loaders for ProverQA and BeaverTails, whose data the user brings. Rules and a solver hold most of
the answers: ``logic_baselines`` says how many, beside whatever a model with rules answers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llm_steer.eval.journal import misshapen
from llm_steer.plugins.activation_reasoning.logic import RuleSet, Semantics
from llm_steer.plugins.activation_reasoning.logic.formula import Atom, Not
from llm_steer.plugins.activation_reasoning.logic.parser import parse
from llm_steer.plugins.activation_reasoning.logic.rules import read_rules, subjects_of

from llm_steer.errors import SteerError


@dataclass(frozen=True)
class LogicProblem:
    """A text, a question and what the text says as rules."""

    id: str
    context: str
    question: str
    options: tuple[str, ...]
    """What can be answered: ``True``, ``False``, ``Uncertain``, or countries."""
    answer: str
    rules: tuple[str, ...] = ()
    """The context as formulas, where the data tells; facts are among them."""
    goal: str = ""
    """The question as a formula."""
    semantics: Semantics = "open"

    @property
    def prompt(self) -> str:
        return f"{self.context}\n{self.question}"


VERDICTS = {"True": "True", "False": "False", "Unknown": "Uncertain", "Contradiction": "Uncertain"}


def solve(problem: LogicProblem) -> str:
    """The answer that the problem's own formulas give."""
    who = subjects_of(read_rules([problem.goal]))  # general rules may name nobody
    return VERDICTS[RuleSet.read(problem.rules, problem.semantics, who).ask([], problem.goal)]


def parse_then_solve(problem: LogicProblem) -> str | None:
    """The answer from the text alone, by regular expressions and the solver; None where the text is not understood."""
    rules = [parse_sentence(text) for text in sentences(problem.context)]
    goal = parse_sentence(sentences(problem.question)[-1])
    if goal is None or any(rule is None for rule in rules):
        return None
    return VERDICTS[RuleSet.read([rule for rule in rules if rule], "open").ask([], goal)]


def sentences(text: str) -> list[str]:
    """Cut at ``.`` and ``?``."""
    return [part.strip() for part in re.split(r"[.?]\s*", text) if part.strip()]


# -- PrOntoQA ------------------------------------------------------------------------------------------------------------

CLASSES = (
    "wumpus", "yumpus", "zumpus", "dumpus", "rompus", "numpus", "tumpus", "vumpus", "impus", "jompus", "gorpus", "shumpus",
    "lempus", "sterpus", "grimpus", "lorpus", "brimpus",
)  # fmt: skip
PROPERTIES = (
    ("blue", "red", "brown", "orange"), ("small", "large"), ("metallic", "wooden", "luminous", "liquid"),
    ("transparent", "opaque"), ("nervous", "happy", "feisty", "shy"), ("bright", "dull"),
    ("sweet", "sour", "spicy", "bitter"), ("floral", "fruity", "earthy"), ("hot", "cold", "temperate"),
    ("kind", "mean", "angry", "amenable", "aggressive"), ("melodic", "muffled", "loud"), ("slow", "moderate", "fast"),
)  # fmt: skip
INDIVIDUALS = ("Fae", "Rex", "Sally", "Max", "Alex", "Sam", "Polly", "Stella", "Wren")

_KIND = r"(?:an? )?(\w+?)"
_GENERAL = re.compile(r"(?:(?:Each|Every) (\w+) is|(\w+?)e?s are) (not )?(?:(an?) (\w+)|(\w+))")
_SINGLE = re.compile(r"([A-Z]\w*) is (not )?(?:an? )?(\w+)")


def parse_sentence(text: str) -> str | None:
    """A sentence of PrOntoQA as a formula; None if it is none."""
    if found := _GENERAL.fullmatch(text):
        below = (found[1] or _singular(found[2] + "es" if not text.startswith(("Each", "Every")) else found[2])).lower()
        above = found[5] or found[6]
        above = _singular(above) if not found[4] else above
        return f"{below}(?x) -> {'not ' if found[3] else ''}{above}(?x)"
    if found := _SINGLE.fullmatch(text):
        return f"{'not ' if found[2] else ''}{found[3].lower()}({found[1].lower()})"
    return None


def _singular(word: str) -> str:
    """``wumpuses`` -> ``wumpus``; other words as they are."""
    word = word.removesuffix("es") if word.endswith("uses") else word
    return word


def prontoqa(count: int, hops: int, seed: int = 0) -> list[LogicProblem]:
    """Problems with a chain of ``hops`` rules to the property that is asked for; half of the answers are True.

    As in the published data: made-up classes in a chain, a property at each, one class beside it with the opposite of the
    one that is asked for, sentences in random order, no other distractors.
    """
    rng = random.Random(f"prontoqa/{hops}/{seed}")
    return [_ontology(rng, hops, f"prontoqa-{hops}-{seed}-{index}") for index in range(count)]


def _ontology(rng: random.Random, hops: int, name: str) -> LogicProblem:
    length = hops + rng.randint(2, 4)  # the chain begins before the individual's class and goes on behind the answer
    classes = rng.sample(CLASSES, length + 1)
    *chain, aside = classes
    groups = rng.sample(PROPERTIES, min(length, len(PROPERTIES)))
    start = rng.randint(0, length - hops)
    end = start + hops - 1
    facts: list[tuple[str, str, bool, bool]] = [(a, b, True, True) for a, b in pairwise(chain)]
    properties = [rng.choice(group) for group in groups]
    signs = [rng.random() < 0.5 for _ in properties]
    facts += [(kind, p, sign, False) for kind, p, sign in zip(chain, properties, signs, strict=False)]
    asked, sign = properties[end], signs[end]
    facts.append((aside, asked, not sign, False))
    rng.shuffle(facts)
    person = rng.choice(INDIVIDUALS)
    written = [_general(rng, *fact) for fact in facts]
    claim = rng.random() < 0.5
    statement = f"{person} is {'' if claim else 'not '}{asked}"
    context = " ".join([*(f"{text}." for text in written), f"{person} is {_article(chain[start])} {chain[start]}."])
    rules = [f"{a}(?x) -> {'' if positive else 'not '}{b}(?x)" for a, b, positive, _ in facts]
    return LogicProblem(
        name, context, f"Is the following statement true or false? {statement}.", ("True", "False"), str(claim == sign),
        (*rules, f"{chain[start]}({person.lower()})"), f"{'' if claim else 'not '}{asked}({person.lower()})",
    )  # fmt: skip


def _general(rng: random.Random, below: str, above: str, positive: bool, is_class: bool) -> str:
    no = "" if positive else "not "
    if rng.random() < 0.5:
        return f"{rng.choice(('Each', 'Every'))} {below} is {no}{_article(above) + ' ' if is_class else ''}{above}"
    return f"{below.capitalize()}es are {no}{above + 'es' if is_class else above}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def load_prontoqa(path: Path) -> list[LogicProblem]:
    """The file of the Logic-LM project: a JSON list."""
    letters = {"A": "True", "B": "False"}
    return [
        LogicProblem(row["id"], row["context"], row["question"], ("True", "False"), letters[row["answer"]])
        for row in _rows(path, letters)
    ]


def rules_text(problem: LogicProblem, rules: Sequence[str] | None = None) -> str:
    """A rules file (text) for activation_reasoning: classes are detected, bound to the individual next before them in the
    sentence, and the verdict forces the answer.

    The question's own statement is no fact: only classes are propositions, and it is about a property.

    Args:
        rules: in place of the problem's, as a control.
    """
    goal = parse(problem.goal)
    atom = goal.of if isinstance(goal, Not) else goal
    assert isinstance(atom, Atom)
    person, rules = atom.args[0], [r for r in (rules or problem.rules) if "->" in r]
    classes = sorted({match for rule in rules for match in re.findall(r"(\w+)\(\?x\)", rule) if match in CLASSES})
    negated = "not" if isinstance(goal, Not) else ""
    lines = ["semantics: open", "concepts:", "  denial: {words: [not]}"]
    lines += [f"  {name}: {{words: [{name}]}}" for name in classes]
    lines += [f"subjects: {{{person}: [{person.capitalize()}]}}", "propositions:"]
    lines += [f'  {name}(?x): {{pattern: ["?x", {name}], without: [denial], scope: prompt}}' for name in classes]
    lines += ["rules:", *(f"  - {rule}" for rule in rules), "actions:"]
    lines += [f"  - {{when: {negated} {atom}, force: ['True']}}", f"  - {{when: not {negated} {atom}, force: ['False']}}"]
    return "\n".join(lines) + "\n"


# -- Rail2Country --------------------------------------------------------------------------------------------------------

COUNTRIES = {
    ("green", "white", "orange"): "Ireland", ("black", "yellow", "red"): "Belgium", ("blue", "white", "red"): "France",
    ("green", "white", "red"): "Italy", ("blue", "yellow", "red"): "Romania", ("green", "white", "green"): "Nigeria",
    ("red", "blue", "red"): "Mongolia", ("blue", "white", "blue"): "Argentina", ("red", "white", "blue"): "Netherlands",
    ("black", "red", "gold"): "Germany", ("red", "white", "red"): "Austria", ("red", "white", "green"): "Hungary",
    ("white", "green", "red"): "Bulgaria", ("red", "yellow", "red"): "Spain", ("red", "white", "black"): "Egypt",
}  # fmt: skip
SIMILES = {
    "red": ("a tomato", "a fire engine"), "green": ("fresh grass", "a frog"), "blue": ("the clear sky", "a deep sea"),
    "white": ("fresh snow", "milk"), "black": ("coal", "a raven"), "yellow": ("a lemon", "a canary"),
    "orange": ("a pumpkin", "a carrot"), "gold": ("a wedding ring", "a treasure"),
}  # fmt: skip
LOADS = ("coal", "timber", "cars", "grain", "steel", "mail")


def rail2country(count: int, meta: bool = False, seed: int = 0) -> list[LogicProblem]:
    """Trains of three cars whose colours are a country's.

    Args:
        meta: colours are told by a simile (``looks like a tomato``), not by their name.
    """
    rng = random.Random(f"rail2country/{meta}/{seed}")
    found = []
    for index in range(count):
        colours = rng.choice(list(COUNTRIES))
        parts = []
        for place, colour in zip(("first", "second", "third"), colours, strict=True):
            look = f"looks like {rng.choice(SIMILES[colour])}" if meta else f"is {colour}"
            parts.append(f"The {place} car {look}.")  # no loads: coal would be a colour's simile
        rules = tuple(f"{' then '.join(triple)} -> {country}" for triple, country in COUNTRIES.items())
        found.append(
            LogicProblem(
                f"rail2country-{'meta' if meta else 'mono'}-{seed}-{index}",
                " ".join(parts),
                "Which country does this train belong to?",
                tuple(COUNTRIES.values()),
                COUNTRIES[colours],
                rules,
                "",
                "closed",
            )
        )
    return found


def country_by_words(problem: LogicProblem, words: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """Parse, then solve: the country of the three colours that the text names, in order.

    Args:
        words: what names each colour; the colours themselves by default, which is all that a word match knows.
    """
    words = words or {colour: (colour,) for colour in SIMILES}
    spots = sorted((m.start(), colour) for colour, names in words.items() for n in names
                   for m in re.finditer(rf"\b{re.escape(n)}\b", problem.context))  # fmt: skip
    found = tuple(colour for _, colour in spots)
    return next((country for colours, country in COUNTRIES.items() if colours == found), None)


# -- ProverQA, BeaverTails -----------------------------------------------------------------------------------------------

_SYMBOLS = (("∀x", ""), ("⊕", " xor "), ("∧", " and "), ("∨", " or "), ("¬", " not "), ("→", " -> "), ("↔", " <-> "))


def load_proverqa(path: Path) -> list[LogicProblem]:
    """A file of ProverQA: a JSON list whose items hold ``nl2fol`` and ``conclusion_fol``. Its licence is unclear: the user
    brings it."""
    names = {"A": "True", "B": "False", "C": "Uncertain"}
    return [
        LogicProblem(
            str(row["id"]), row["context"], row["question"], ("True", "False", "Uncertain"), names[row["answer"]],
            tuple(map(from_fol, row["nl2fol"].values())), from_fol(row["conclusion_fol"]),
        )
        for row in _rows(path, names, {"nl2fol": dict, "conclusion_fol": str})
    ]  # fmt: skip


def from_fol(text: str) -> str:
    """First-order logic over one variable ``x`` in our notation."""
    for symbol, word in _SYMBOLS:
        text = text.replace(symbol, word)
    text = re.sub(r"\bx\b", "?x", text)
    return re.sub(r"\((\w[\w .'-]*)\)", lambda m: f'("{m[1]}")' if " " in m[1] or "'" in m[1] else m[0], text).strip()


@dataclass(frozen=True)
class Moderated:
    """A response of BeaverTails."""

    prompt: str
    response: str
    safe: bool
    categories: frozenset[str]


def load_beavertails(path: Path) -> list[Moderated]:
    """JSON lines with ``prompt``, ``response``, ``is_safe`` and ``category`` (name to boolean). CC-BY-NC-4.0: the user
    brings it."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SteerError(f"{path.name}, line {number}", line, f"a JSON object ({error})") from error
            if problem := misshapen(row, {"prompt": str, "response": str, "is_safe": bool, "category": dict}):
                valid = f"an object with prompt, response, is_safe and category: {problem}"
                raise SteerError(f"{path.name}, line {number}", line, valid)
            categories = frozenset(name for name, there in row["category"].items() if there)
            found.append(Moderated(row["prompt"], row["response"], row["is_safe"], categories))
    return found


def _rows(path: Path, answers: Collection[str], more: Mapping[str, type] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Items of a JSON list of questions.

    Args:
        answers: that an item may have.
        more: further fields that it must have, with their types.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SteerError("data", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(rows, list):
        raise SteerError(path.name, rows, "a JSON list of questions")
    fields = {"id": str | int, **dict.fromkeys(("context", "question", "answer"), str), **more}
    for number, row in enumerate(rows, 1):
        if problem := misshapen(row, fields):
            raise SteerError(f"{path.name}, item {number}", row, f"a question: {problem}")
        if row["answer"] not in answers:
            raise SteerError(f"{path.name}, item {number}: answer", row["answer"], f"one of {', '.join(answers)}")
    return rows


def check(problem: LogicProblem) -> None:
    """Raise ``SteerError`` if a formula of the problem cannot be read."""
    for text in (*problem.rules, *([problem.goal] if problem.goal else [])):
        parse(text)
