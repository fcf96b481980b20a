"""The rules file: concepts, propositions, rules and actions in one YAML document.

::

    semantics: closed              # or open
    dictionary: concepts/animals   # an artifact made by `llm-steer concepts find`
    concepts:
      negation: {words: [not, never]}
    subjects: [max, sam]
    propositions:
      wumpus(?x): {pattern: ["?x", wumpus], without: [negation]}
      rude: {concept: rude, level: global, aggregate: mean, scope: output}
    rules:
      - wumpus(?x) -> mammal(?x)
    actions:
      - {when: rude, steer: {concept: rude, strength: -0.3}, duration: 64}

Mistakes are reported with line and column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from llm_steer.errors import SteerError, did_you_mean
from llm_steer.formats import YamlLoader

from .concepts import check_name
from .logic import RuleSet, Semantics, Truth
from .logic.formula import Atom, Formula, Implies, Not, Then, atoms_of, sequences_of, substitute
from .logic.formula import Literal as Lit
from .logic.parser import Place, parse
from .logic.rules import MAX_SUBJECTS, Rule, read_rules, subjects_of, variables_of

MAX_TEXT = 262_144
MAX_PROPOSITIONS = 256
MAX_ACTIONS = 32
MAX_WORDS = 64
MAX_DIGITS = 100

Word = Annotated[str, Field(min_length=1, max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Layer = Annotated[int, Field(ge=0, le=9999)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class WordConcept(_Part):
    """A concept that is nothing but words."""

    words: Annotated[list[Word], Field(min_length=1, max_length=MAX_WORDS)]
    """As they are written; found with and without a space before them, and capitalised."""


class PropositionSpec(_Part):
    """When a proposition is true."""

    concept: Name | None = None
    """What detects it; by default the concept of its own name."""
    pattern: Annotated[list[Name], Field(min_length=1, max_length=4)] | None = None
    """Instead: concepts that must be detected in this order; ``?x`` is the subject's."""
    without: Annotated[list[Name], Field(max_length=8)] = []
    """Concepts between whose detection and the pattern's end the pattern must begin anew. Other subjects are among them."""
    within: Literal["sentence", "scope"] = "sentence"
    """How far a pattern reaches."""
    level: Literal["token", "sentence", "global"] = "token"
    """What is compared with the threshold: one token's score, the sentence's so far, or the scope's so far."""
    aggregate: Literal["max", "mean", "any"] = "max"
    """How scores of a sentence or scope become one; ``any`` compares each with the threshold for tokens."""
    scope: Literal["prompt", "output", "both"] = "both"
    """Tokens that are looked at."""
    hold: Count | None = None
    """For how many tokens it stays true behind the last one at which it was detected. Left out: for good, but not longer
    than it is true for a mean, or for a sentence's score."""
    threshold: float | None = None
    """In place of the dictionary's."""

    @model_validator(mode="after")
    def _check_together(self) -> PropositionSpec:
        if self.pattern is None and (self.without or self.within != "sentence"):
            raise ValueError("without and within go with a pattern")
        if self.pattern is not None and (self.concept or self.level != "token" or self.threshold is not None):
            raise ValueError("a pattern takes the place of concept, level and threshold")
        if self.level == "token" and self.aggregate != "max":
            raise ValueError("aggregate goes with level sentence or global")
        return self


class SteerSpec(_Part):
    """Steering towards or away from a concept."""

    concept: Name
    strength: Annotated[float, Field(ge=-2, le=2)]
    """Norm of what is added over that of the hidden state; negative: away from the concept."""
    layers: Annotated[list[Layer], Field(min_length=1, max_length=64)] | None = None
    """Decoder layers, not before the one where concepts are detected: that one by default."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor for each token since the action began."""


class ActionSpec(_Part):
    """What is done while a formula holds. Exactly one of steer, force, forbid, stop and log."""

    when: Annotated[str, Field(min_length=1)]
    steer: SteerSpec | None = None
    force: Annotated[list[Word], Field(min_length=1, max_length=64)] | None = None
    """Words or pieces, of which the next token must be the first piece of one."""
    forbid: Annotated[list[Word], Field(min_length=1, max_length=64)] | None = None
    stop: Literal[True] | None = None
    """End the output."""
    log: Literal[True] | None = None
    """Only say so in the trace."""
    duration: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Tokens from where the formula begins to hold; left out: as long as it holds, and 1 for force."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Among actions that exclude each other (two on one concept; force, stop and forbid) the highest acts, and of equals
    the first."""
    above: Annotated[float, Field(ge=0, lt=1)] | None = None
    """With soft truth: the degree above which the formula counts as holding; 0.5 if left out."""

    @model_validator(mode="after")
    def _check_together(self) -> ActionSpec:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an action has exactly one of {', '.join(KINDS)}")
        return self

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)


KINDS = ("steer", "force", "forbid", "stop", "log")


def _once(names: list[str] | dict[str, Any]) -> list[str] | dict[str, Any]:
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise ValueError(f"each subject once: {twice[0]} is there twice")
    return names


class _Document(_Part):
    semantics: Semantics = "closed"
    truth: Truth = "crisp"
    """What the degree of a conjunction is, where propositions are true by degrees: ``product`` or ``goedel`` (the least). An
    action then steers by its strength times its formula's degree."""
    dictionary: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    concepts: Annotated[dict[Name, WordConcept], Field(max_length=256)] = {}
    subjects: Annotated[list[Name] | dict[Name, list[Word]], Field(max_length=MAX_SUBJECTS), AfterValidator(_once)] = []
    propositions: Annotated[dict[str, PropositionSpec], Field(max_length=MAX_PROPOSITIONS)] = {}
    rules: list[str] = []
    actions: Annotated[list[ActionSpec], Field(max_length=MAX_ACTIONS)] = []
    on_contradiction: Literal["no_actions", "ignore"] = "no_actions"
    """Where facts and rules exclude each other: no action acts, or those whose formulas hold all the same."""
    detection: Literal["threshold", "reference"] = "threshold"
    """``reference``: as the released code does it, for comparison (needs a dictionary with the whole SAE)."""


@dataclass(frozen=True)
class Proposition:
    """One ground proposition."""

    literal: Lit
    spec: PropositionSpec
    subject: dict[str, str]
    """What its variables stand for."""
    implied: bool = False
    """No one wrote it down: an atom of the rules that nothing derives."""


@dataclass(frozen=True)
class Book:
    """A rules file that was read and checked, as far as it can be without its dictionary."""

    semantics: Semantics
    truth: Truth
    dictionary: str | None
    words: dict[str, tuple[str, ...]]
    """Concepts that are words, subjects included."""
    subjects: tuple[str, ...]
    propositions: tuple[Proposition, ...]
    rules: RuleSet
    """The file's rules, and one ``formula -> #action 0`` for each action whose ``when`` is no literal."""
    texts: tuple[str, ...]
    """The file's rules, as written."""
    actions: tuple[tuple[ActionSpec, Lit], ...]
    """With the literal that starts each."""
    ignores_contradiction: bool
    reference: bool
    places: dict[str, str]
    """Where concepts and propositions stand, or first are spoken of; also by an atom's name alone."""

    def place(self, atom: str) -> str:
        return self.places.get(atom) or self.places.get(atom.partition("(")[0], "rules")

    @property
    def concepts(self) -> list[str]:
        """Every concept that detection or steering needs, in the order of their first use."""
        found: dict[str, None] = {}
        for proposition in self.propositions:
            for name in concepts_of(proposition):
                found.setdefault(name)
        for spec, _ in self.actions:
            if spec.steer is not None:
                found.setdefault(spec.steer.concept)
        return list(found)


def concepts_of(proposition: Proposition) -> list[str]:
    """Concepts that a proposition is detected by."""
    spec = proposition.spec
    if spec.pattern is None:
        return [spec.concept or Atom(proposition.literal.atom).name]
    bound = [proposition.subject.get(name, name) for name in (*spec.pattern, *spec.without)]
    return list(dict.fromkeys(bound))


def read_book(source: str | Path, extra_rules: Sequence[str] = ()) -> Book:
    """Read a rules file.

    Args:
        source: its path; or its text, which holds a line break.
        extra_rules: more rules, beside the file's.

    Raises:
        SteerError: naming file, line and column.
    """
    text, name = _text(source)
    data, marks = _yaml(text, name)
    if not isinstance(data, dict):
        raise SteerError(name, data, "a mapping with rules, propositions, actions")
    try:
        document = _Document.model_validate(data)
    except ValidationError as error:
        raise _located(error, marks, name) from error
    book = _Reader(document, marks, name).book(extra_rules)
    # A dictionary's name may be relative to the file.
    beside = Path(source).parent / book.dictionary if book.dictionary and name != "rules" else None
    return replace(book, dictionary=str(beside)) if beside is not None and beside.is_dir() else book


def _text(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        if len(source) > MAX_TEXT:
            raise SteerError("rules", source, f"at most {MAX_TEXT} characters")
        return source, "rules"
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SteerError("rules", str(source), f"a readable rules file ({reason})") from error
    if len(text) > MAX_TEXT:
        raise SteerError("rules", str(source), f"a rules file of at most {MAX_TEXT} characters")
    return text, path.name


Mark = tuple[int, int]
"""Line and column, from 1."""
Path_ = tuple[str | int, ...]


def _yaml(text: str, name: str) -> tuple[Any, dict[Path_, Mark]]:
    """The document, and where each part of it stands: a key's place under ``(*path, "#")``."""
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        marks: dict[Path_, Mark] = {}
        if node is None:
            return None, marks
        _walk(node, (), marks)
        return loader.construct_document(node), marks
    except RecursionError:
        at = loader.get_mark()
        where = f"{name}, line {at.line + 1}, column {at.column + 1}"
        raise SteerError(where, text, "valid YAML, not nested as deeply") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}, line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        raise SteerError(where, chr(error.character), f"text without special characters ({error.reason})") from None
    except (yaml.YAMLError, ValueError) as error:
        problem, mark = getattr(error, "problem", None) or str(error).split("\n")[0], getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        line = [*text.split("\n"), ""][mark.line] if mark else ""
        raise SteerError(where, line, f"valid YAML ({problem})") from error


def _walk(node: yaml.Node, path: Path_, marks: dict[Path_, Mark]) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
        raise yaml.composer.ComposerError(None, None, f"a number of more than {MAX_DIGITS} digits", node.start_mark)
    quote = int(isinstance(node, yaml.ScalarNode) and node.style in ("'", '"'))
    marks[path] = (node.start_mark.line + 1, node.start_mark.column + 1 + quote)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "keys are plain text", key.start_mark)
            inner = (*path, str(key.value))
            _walk(value, inner, marks)
            quote = int(key.style in ("'", '"'))
            marks[*inner, "#"] = (key.start_mark.line + 1, key.start_mark.column + 1 + quote)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), marks)


def _located(error: ValidationError, marks: Mapping[Path_, Mark], name: str) -> SteerError:
    problem = error.errors(include_url=False)[0]
    path: Path_ = ()
    for part in problem["loc"]:
        if (*path, part) in marks:
            path = (*path, part)
    unknown = problem["type"] == "extra_forbidden"
    line, column = marks.get((*path, "#"), marks.get(path, (1, 1))) if unknown else marks.get(path, (1, 1))
    where = f"{name}, line {line}, column {column}"
    if path:
        where += ": " + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    if unknown:
        model = _Document
        for part in path[:-1]:
            inner = {"propositions": PropositionSpec, "actions": ActionSpec, "steer": SteerSpec, "concepts": WordConcept}
            model = inner.get(str(part), model)  # type: ignore[assignment]
        fields = list(model.model_fields)
        hint = did_you_mean(str(path[-1]), fields) if path else ""
        return SteerError(where, problem["input"], f"one of the keys {', '.join(fields)}{hint}")
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return SteerError(where, problem["input"], message[:1].lower() + message[1:])


class _Reader:
    def __init__(self, document: _Document, marks: Mapping[Path_, Mark], name: str) -> None:
        self.document, self.marks, self.name = document, marks, name

    def place(self, *path: str | int) -> Place:
        line, column = self.marks.get(path, (1, 1))
        return Place(self.name, line, column)

    def where(self, *path: str | int) -> str:
        place = self.place(*path)
        return f"{self.name}, line {place.line}, column {place.column}"

    def book(self, extra: Sequence[str]) -> Book:
        document = self.document
        if document.truth != "crisp" and document.semantics == "open":
            raise SteerError(self.where("truth"), document.truth, "crisp with semantics: open")
        for index, action in enumerate(document.actions):
            if action.above is not None and document.truth == "crisp":
                raise SteerError(self.where("actions", index, "above"), action.above, "left out with truth: crisp")
        rules = read_rules(document.rules, [self.place("rules", i) for i in range(len(document.rules))])
        rules += read_rules(extra, source="extra_rules")
        words = {
            check_name(name, self.where("concepts", name, "#")): tuple(c.words) for name, c in document.concepts.items()
        }
        whens = [parse(spec.when, self.place("actions", i, "when")) for i, spec in enumerate(document.actions)]
        named = document.subjects if isinstance(document.subjects, dict) else {s: [s] for s in document.subjects}
        subjects = tuple(dict.fromkeys([*named, *subjects_of(rules)]))
        for subject in subjects:
            words.setdefault(subject, tuple(named.get(subject) or [subject]))
        actions, extra_actions = self._actions(whens, subjects)
        built = RuleSet.build([*rules, *extra_actions], document.semantics, subjects, document.truth)
        propositions = self._propositions(subjects, built, [literal.atom for _, literal in actions])
        return Book(
            document.semantics,
            document.truth,
            document.dictionary,
            words,
            subjects,
            propositions,
            built,
            tuple(str(rule) for rule in rules),
            tuple(actions),
            document.on_contradiction == "ignore",
            document.detection == "reference",
            self._places(rules, whens),
        )

    def _places(self, rules: Sequence[Rule], whens: Sequence[Formula]) -> dict[str, str]:
        found = {name: self.where("propositions", name, "#") for name in self.document.propositions}
        mentions = [(rule.formula, rule.place) for rule in rules]
        mentions += [(formula, self.where("actions", i, "when")) for i, formula in enumerate(whens)]
        for formula, place in mentions:
            for atom in atoms_of(formula):
                found.setdefault(str(atom), place)
        for i, action in enumerate(self.document.actions):
            if action.steer is not None:
                found.setdefault(action.steer.concept, self.where("actions", i, "steer", "concept"))
        for text in list(found):  # an atom about a subject may be written with a variable
            found.setdefault(text.partition("(")[0], found[text])
        return found

    def _actions(self, whens: list[Formula], subjects: tuple[str, ...]) -> tuple[list[tuple[ActionSpec, Lit]], list[Rule]]:
        """Actions with the literal each waits for, and rules that define those literals."""
        actions, rules = [], []
        for index, (spec, formula) in enumerate(zip(self.document.actions, whens, strict=True)):
            if variables_of(formula):
                raise SteerError(self.where("actions", index, "when"), spec.when, "without variables: name the subject")
            match formula:
                case Atom():
                    literal = Lit(str(formula))
                case Not(Atom() as atom) if self.document.semantics == "open":
                    literal = Lit(str(atom), False)
                case _:
                    goal = Atom(f"action {index}")
                    literal = Lit(str(goal))
                    rules.append(
                        Rule(Implies(formula, goal), f"{spec.when} -> {goal}", self.where("actions", index, "when"))
                    )
            actions.append((spec, literal))
        return actions, rules

    def _propositions(self, subjects: tuple[str, ...], rules: RuleSet, awaited: Sequence[str]) -> tuple[Proposition, ...]:
        found: dict[Lit, Proposition] = {}
        for key, spec in self.document.propositions.items():
            place = Place(self.name, *self.marks.get(("propositions", key, "#"), (1, 1)))
            formula = parse(key, place)
            atom = formula.of if isinstance(formula, Not) else formula
            if not isinstance(atom, Atom) or (isinstance(formula, Not) and self.document.semantics == "closed"):
                valid = "an atom such as wumpus(?x)" + (", or not and one, with semantics: open")
                raise SteerError(place.at(key, 0), key, valid)
            variables = variables_of(atom)
            loose = [
                name for name in (*(spec.pattern or ()), *spec.without) if name.startswith("?") and name not in variables
            ]
            if len(variables) > 1 or loose:
                raise SteerError(place.at(key, 0), key, "a proposition about one variable, which its pattern may name")
            if variables and not subjects:
                raise SteerError(place.at(key, 0), key, "without variables, or in a file that names subjects")
            for subject in subjects if variables else ("",):
                binding = {variables[0]: subject} if variables else {}
                ground = substitute(atom, binding)
                others = [s for s in subjects if s != subject] if binding and spec.pattern else []
                bound = spec.model_copy(update={"without": [*spec.without, *others]})
                literal = Lit(str(ground), not isinstance(formula, Not))
                found.setdefault(literal, Proposition(literal, bound, binding))
        # What rules speak of and nothing derives or detects is a concept of that name; a sequence is one of such.
        heads = _heads(rules)
        for rule in rules.program.rules:
            for sequence in sequences_of(rule.formula):
                spec = PropositionSpec(pattern=[_concept_of(atom, found) for atom in sequence.of][:4], within="scope")
                if len(sequence.of) > 4 or len(sequence.of) < 2:
                    raise SteerError(rule.place, str(sequence), "2 to 4 propositions in order")
                found.setdefault(Lit(str(sequence)), Proposition(Lit(str(sequence)), spec, {}))
        known = {literal.atom for literal in found}
        for text in dict.fromkeys([*rules.atoms, *awaited]):
            atom = parse(text)
            if text in known or text in heads or isinstance(atom, Then):
                continue
            if isinstance(atom, Atom) and atom.args:
                if len(atom.args) == 1:
                    others = [s for s in subjects if s != atom.args[0]]
                    spec = PropositionSpec(pattern=[atom.args[0], atom.name], without=others)
                    found[Lit(text)] = Proposition(Lit(text), spec, {}, True)
            elif isinstance(atom, Atom):
                found[Lit(text)] = Proposition(Lit(text), PropositionSpec(concept=atom.name), {}, True)
        return tuple(found.values())


def _concept_of(atom: Atom, found: Mapping[Lit, Proposition]) -> str:
    """The concept whose detection an ordered sequence is about."""
    proposition = found.get(Lit(str(atom)))
    return (proposition.spec.concept if proposition else None) or atom.name


def _heads(rules: RuleSet) -> set[str]:
    """Atoms that closed rules derive; in open semantics any atom can follow, so none is excluded."""
    if rules.semantics == "closed":
        from .logic.closed import ClosedProgram

        assert isinstance(rules.program, ClosedProgram)
        return {clause.head for clause in rules.program.clauses}
    return set()
