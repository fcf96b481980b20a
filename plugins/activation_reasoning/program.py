"""A rules file made ready for one model: words are token ids, the dictionary is a content hash. JSON, for workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from llm_steer.artifact import HASH
from llm_steer.errors import SteerError, did_you_mean

from .book import MAX_WORDS, ActionSpec, Book, Proposition, concepts_of
from .concepts import METHOD, Dictionary
from .logic import RuleSet, Semantics, Truth
from .logic.formula import Literal as Lit
from .logic.parser import Place
from .logic.ruleset import read_fact
from .logic.soft import HALF

if TYPE_CHECKING:
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

MAX_PIECES = 8
"""Tokens of one word."""
ENDS = (".", "!", "?")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Detected(_Part):
    """A ground proposition; see :class:`~.book.PropositionSpec`."""

    atom: str
    positive: bool
    concepts: list[int]
    """Of a pattern, in order; otherwise one."""
    without: list[int]
    pattern: bool
    within: Literal["sentence", "scope"]
    level: Literal["token", "sentence", "global"]
    aggregate: Literal["max", "mean", "any"]
    scope: Literal["prompt", "output", "both"]
    hold: int | None
    threshold: float
    width: float = 0.0
    """Of the threshold, for degrees of truth; 0: it is true or false."""

    @property
    def literal(self) -> Lit:
        return Lit(self.atom, self.positive)


class Action(_Part):
    """See :class:`~.book.ActionSpec`."""

    kind: Literal["steer", "force", "forbid", "stop", "log"]
    when: str
    """As it was written."""
    atom: str
    positive: bool
    concept: int = -1
    strength: float = 0.0
    decay: float = 1.0
    layers: list[int] = []
    tokens: list[int] = []
    duration: int | None = None
    priority: int = 0
    above: float = HALF


class Program(_Part):
    """Everything that detection, reasoning and actions need."""

    semantics: Semantics
    truth: Truth = "crisp"
    rules: list[str]
    subjects: list[str]
    facts: list[str]
    """Literals that hold from the start."""
    dictionary: str | None
    """``sha256:`` and the content hash of an artifact."""
    concepts: list[str]
    words: dict[str, list[list[int]]]
    """Concepts that are words: the token sequences that spell them."""
    propositions: list[Detected]
    actions: list[Action]
    ignores_contradiction: bool
    reference: bool
    layer: int
    """Behind which concepts are detected; 0 if all are words."""
    sentence_ends: list[int]
    """Tokens that end a sentence; none where nothing asks for sentences."""
    special: list[int]
    """Tokens at which nothing is detected."""

    @property
    def layers(self) -> list[int]:
        return sorted({self.layer, *(layer for action in self.actions for layer in action.layers)})

    @property
    def reads_prompt(self) -> bool:
        """Something at the prompt's tokens matters: a word may begin there and end in the output."""
        pieces = max((len(ids) for spellings in self.words.values() for ids in spellings), default=1)
        return any(d.scope != "output" for d in self.propositions) or (bool(self.propositions) and pieces > 1)

    def ruleset(self) -> RuleSet:
        return _ruleset(tuple(self.rules), self.semantics, tuple(self.subjects), self.truth)

    @property
    def given(self) -> set[Lit]:
        return {read_fact(text) for text in self.facts}


@lru_cache(maxsize=64)
def _ruleset(rules: tuple[str, ...], semantics: Semantics, subjects: tuple[str, ...], truth: Truth) -> RuleSet:
    return RuleSet.read(rules, semantics, subjects, truth=truth)


def link(book: Book, facts: Sequence[str], vocabulary: Vocabulary | None, shelf: Shelf | None) -> Program:
    """Bring a rules file, its dictionary and a tokenizer together.

    Raises:
        SteerError: a concept that is nowhere, a word or layer that the model does not have.
    """
    given = {read_fact(text, Place(f"facts[{index}]")) for index, text in enumerate(facts)}
    for fact in given:
        if not fact.positive and book.semantics == "closed":
            raise SteerError("facts", str(fact), "without not: with closed semantics, what is not said is false")
    name, dictionary = book.dictionary, None
    if name is not None:
        if shelf is None:
            raise SteerError("rules", name, "without a dictionary where no model is at hand")
        artifact, _ = shelf.find(name, METHOD)
        name, dictionary = HASH + artifact.content_hash, Dictionary.from_artifact(artifact)
    known = {*book.words, *(dictionary.names if dictionary else ())}
    propositions = [p for p in book.propositions if not _is_left_out(p, book, known, given)]
    needed = dict.fromkeys(c for p in propositions for c in concepts_of(p))
    needed.update(dict.fromkeys(spec.steer.concept for spec, _ in book.actions if spec.steer))
    for concept in needed:
        if concept not in known:
            atom = next((p.literal.atom for p in propositions if concept in concepts_of(p)), concept)
            have = ", ".join(sorted(known)[:20]) or "none: name a dictionary"
            raise SteerError(
                book.place(atom), concept, f"a concept of this file or its dictionary ({have}){did_you_mean(concept, known)}"
            )
    concepts = list(needed)
    number = {concept: index for index, concept in enumerate(concepts)}
    spelled = {c: _spell(book.words[c], vocabulary) for c in concepts if c in book.words}
    layer = dictionary.layer if dictionary else 0
    for spec, _ in book.actions:
        if spec.steer and spec.steer.concept in book.words:
            where = book.place(spec.steer.concept)
            raise SteerError(where, spec.steer.concept, "a concept of the dictionary: words have no direction to steer in")
    detected = [_detected(p, number, dictionary, book) for p in propositions]
    actions = [_action(spec, literal, number, layer, vocabulary, shelf) for spec, literal in book.actions]
    if book.reference and (dictionary is None or dictionary.whole is None):
        raise SteerError("rules", "detection: reference", "used with a dictionary that holds the whole SAE (--whole)")
    sentences = any(d.level == "sentence" or (d.pattern and d.within == "sentence") for d in detected)
    if (sentences or spelled) and vocabulary is None:
        raise SteerError("rules", "words or sentences", "left out where no tokenizer is at hand")
    return Program(
        semantics=book.semantics,
        truth=book.truth,
        rules=[str(rule) for rule in book.rules.rules],
        subjects=list(book.rules.subjects),
        facts=sorted(str(fact) for fact in given),
        dictionary=name,
        concepts=concepts,
        words=spelled,
        propositions=detected,
        actions=actions,
        ignores_contradiction=book.ignores_contradiction,
        reference=book.reference,
        layer=layer,
        sentence_ends=sentence_ends(vocabulary) if sentences and vocabulary else [],
        special=sorted(vocabulary.tokenizer.all_special_ids) if vocabulary else [],
    )


def _is_left_out(proposition: Proposition, book: Book, known: set[str], given: set[Lit]) -> bool:
    """An atom that need not be detected: it is given, or open rules may derive it."""
    absent = any(concept not in known for concept in concepts_of(proposition))
    optional = book.semantics == "open" or any(fact.atom == proposition.literal.atom for fact in given)
    return absent and proposition.implied and optional


def _detected(proposition: Proposition, number: dict[str, int], dictionary: Dictionary | None, book: Book) -> Detected:
    spec, names = proposition.spec, concepts_of(proposition)
    pattern = [proposition.subject.get(name, name) for name in spec.pattern or ()]
    without = [proposition.subject.get(name, name) for name in spec.without]
    level: Literal["token", "sentence", "max", "mean"] = spec.aggregate if spec.aggregate != "any" else "token"
    if spec.level == "token":
        level = "token"
    if spec.level == "sentence" and spec.aggregate == "max":
        level = "sentence"
    threshold, width = spec.threshold, 0.0
    concept = dictionary[names[0]] if dictionary and names[0] in dictionary.names and not spec.pattern else None
    if threshold is None:
        threshold = concept.thresholds[level] if concept else 0.5
    if concept and book.truth != "crisp" and not book.reference:
        if level not in concept.widths:
            place = book.place(proposition.literal.atom)
            raise SteerError(place, names[0], f"one whose dictionary has widths for truth: {book.truth} (find it anew)")
        width = concept.widths[level]
    lasts = spec.level == "token" or (spec.level == "global" and spec.aggregate != "mean")
    return Detected(
        atom=proposition.literal.atom,
        positive=proposition.literal.positive,
        concepts=[number[name] for name in pattern or names[:1]],
        without=[number[name] for name in without if name not in pattern],
        pattern=spec.pattern is not None,
        within=spec.within,
        level=spec.level,
        aggregate=spec.aggregate,
        scope=spec.scope,
        hold=spec.hold if spec.hold is not None or lasts else 0,
        threshold=float(threshold),
        width=width,
    )


def _action(
    spec: ActionSpec, literal: Lit, number: dict[str, int], layer: int, vocabulary: Vocabulary | None, shelf: Shelf | None
) -> Action:
    common: dict[str, Any] = {
        "kind": spec.kind,
        "when": spec.when,
        "atom": literal.atom,
        "positive": literal.positive,
        "priority": spec.priority,
        "above": HALF if spec.above is None else spec.above,
    }
    if spec.steer is not None:
        layers = sorted(set(spec.steer.layers or [layer]))
        if layers[0] < layer:
            raise SteerError("steer.layers", layers[0], f"at least {layer}, the layer behind which concepts are detected")
        if shelf is not None and layers[-1] >= shelf.model.num_layers:
            raise SteerError("steer.layers", layers[-1], f"between {layer} and {shelf.model.num_layers - 1} in this model")
        return Action(
            **common,
            concept=number[spec.steer.concept],
            strength=spec.steer.strength,
            decay=spec.steer.decay,
            layers=layers,
            duration=spec.duration,
        )
    if spec.kind == "log":
        return Action(**common, duration=spec.duration)
    if vocabulary is None:
        raise SteerError("actions", spec.kind, "left out where no tokenizer is at hand")
    if spec.kind == "stop":
        end = vocabulary.tokenizer.eos_token_id
        if end is None:
            raise SteerError("actions", "stop", "used with a tokenizer that has an end-of-sequence token")
        return Action(**common, tokens=[int(end)], duration=spec.duration)
    match = vocabulary.words(spec.force or spec.forbid or [], leading_space=True, multi_piece="first")
    if not match.ids:
        raise SteerError("actions", spec.force or spec.forbid, "words that this tokenizer has a piece for")
    duration = spec.duration or (1 if spec.kind == "force" else None)
    return Action(**common, tokens=match.ids, duration=duration)


def _spell(words: Sequence[str], vocabulary: Vocabulary | None) -> list[list[int]]:
    """Token sequences that spell the words: as they are and capitalised, at a text's start and behind a space."""
    if vocabulary is None:
        raise SteerError("words", list(words), "left out where no tokenizer is at hand")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for form in dict.fromkeys((word, word[:1].upper() + word[1:])):
            for text in (form, " " + form):
                ids = tuple(vocabulary.tokenizer.encode(text, add_special_tokens=False))
                if not 0 < len(ids) <= MAX_PIECES:
                    raise SteerError("words", word, f"a word of at most {MAX_PIECES} tokens, not {len(ids)}")
                found[ids] = None
    if len(found) > 4 * MAX_WORDS:
        raise SteerError("words", f"{len(found)} spellings", f"at most {4 * MAX_WORDS}")
    return [list(ids) for ids in found]


@lru_cache(maxsize=4)
def sentence_ends(vocabulary: Vocabulary) -> list[int]:
    """Tokens whose text holds a line break, or ends in ``.``, ``!`` or ``?``, quotes and brackets behind it aside. An
    abbreviation ends a sentence, too."""
    ids = sorted(i for i in set(vocabulary.pieces.values()) if 0 <= i < vocabulary.size)
    texts = vocabulary.tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    return [i for i, text in zip(ids, texts, strict=True) if "\n" in text or text.rstrip("\"')]}”’» ").endswith(ENDS)]
