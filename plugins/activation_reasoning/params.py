"""Parameters of activation_reasoning."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from llm_steer.artifact import HASH
from llm_steer.errors import SteerError, did_you_mean
from llm_steer.plugin import Params

from .book import MAX_TEXT, read_book
from .own import check_own
from .program import Program, link

if TYPE_CHECKING:
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

MAX_EXTRA = 256
MAX_FILES = 32
MAX_PROGRAM = 8 << 20

Packed = Annotated[str, Field(max_length=4 * MAX_TEXT)]


class ActivationReasoningParams(Params):
    """The rules file, and what one request adds to it."""

    rules: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] | None = None
    """Path of the rules file (YAML): concepts, propositions, rules, actions. In Python also its text; for requests to a
    server the name of a file that it was started with."""
    extra_rules: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=MAX_EXTRA)] = []  # noqa: RUF012
    """More rules for this request, such as ``wumpus(?x) -> mammal(?x)``."""
    facts: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_EXTRA)] = []  # noqa: RUF012
    """Propositions that hold from the start: ``rainy``, ``wumpus(max)``."""
    strength: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Factor for the strength of every steer action; 0 only detects and reasons."""
    files: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=MAX_FILES)] = []  # noqa: RUF012
    """Where a server is started: more rules files among which requests may choose, by name."""
    allow_rules: Annotated[int, Field(ge=0, le=MAX_EXTRA)] = 0
    """Where a server is started: how many rules and facts of its own a request may bring. Sets the size of the tables."""
    program: Packed | None = None
    """Filled in: the file made ready for this model, packed; for requests to a server the content hash of that."""
    reads_prompt: bool | None = None
    """Filled in for requests to a server: a proposition looks at the prompt."""
    library: dict[str, Packed] | None = None
    """Filled in: ``files`` made ready, by name."""

    @model_validator(mode="after")
    def _check_together(self) -> ActivationReasoningParams:
        if self.rules is None and self.program is None:
            raise ValueError("rules: given, the path of a rules file")
        return self

    @classmethod
    def inherit(cls, defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Other rules or facts need another program, and what was added to one file is not added to another."""
        stale = {"program"} if {"rules", "extra_rules", "facts"} & own.keys() else set[str]()
        if "rules" in own:
            stale |= {"extra_rules", "facts"}
        return {**{name: value for name, value in defaults.items() if name not in stale}, **own}

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> ActivationReasoningParams:
        if shelf is not None and not shelf.paths:
            return self._chosen(shelf)
        if self.program is not None:
            return self
        try:
            program = link(read_book(self.rules or "", self.extra_rules), self.facts, vocabulary, shelf)
            library: dict[str, Program] = {}
            for path in self.files:
                if _name(path) in (_name(self.rules or ""), *library):
                    raise SteerError("files", path, "a file with another name than the others")
                library[_name(path)] = link(read_book(path), (), vocabulary, shelf)
            soft = next((p.truth for p in (program, *library.values()) if p.truth != "crisp"), None)
            if self.allow_rules and soft:
                raise SteerError("allow_rules", self.allow_rules, f"0 where a file has truth: {soft}")
        except SteerError as error:
            if error.field in type(self).model_fields:
                raise
            raise SteerError(f"rules: {error.field}", error.value, error.valid) from error
        packed = {"library": {name: pack(other) for name, other in library.items()}} if library else {}
        return self.model_copy(update={"program": pack(program), **packed})

    def _chosen(self, shelf: Shelf) -> ActivationReasoningParams:
        """A request from outside: one of the loaded files, by name, and what the operator allows beside it."""
        declared = next((p for p in shelf.declared if isinstance(p, ActivationReasoningParams)), None)
        if declared is None or declared.program is None:
            raise SteerError("rules", self.rules, "left out: no rules file was named at start")
        for field in ("files", "allow_rules"):
            if field in self.model_fields_set and getattr(self, field) != getattr(declared, field):
                raise SteerError(field, getattr(self, field), "left out: it is set where the server is started")
        first = _name(declared.rules or "")
        known = {first: declared.program, **(declared.library or {})}
        paths = {path: _name(path) for path in (declared.rules or "", *declared.files)}
        name = paths.get(self.rules or "", self.rules or "")
        if name not in known:
            valid = f"one of the files that were named at start: {', '.join(sorted(known))}{did_you_mean(name, known)}"
            raise SteerError("rules", self.rules, valid)
        digest = digest_of(known[name])
        program = parse_program(known[name])
        filled_in = {"program": digest, "reads_prompt": program.reads_prompt, "library": None}
        for field, value in filled_in.items():
            if getattr(self, field) not in (None, value):
                raise SteerError(field, getattr(self, field), "left out: it is filled in here")
        added = {"extra_rules": self.extra_rules, "facts": self.facts}
        if name == first and (self.extra_rules, self.facts) == (declared.extra_rules, declared.facts):
            added = {}  # a part of the program
        elif self.extra_rules or self.facts:
            check_own(program, self.extra_rules, self.facts, declared.allow_rules)
        kept: dict[str, Any] = {"strength": self.strength} if "strength" in self.model_fields_set else {}
        kept |= {key: value for key, value in added.items() if value}
        return type(self)(rules=name, program=digest, reads_prompt=program.reads_prompt, **kept)

    def shown(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True, exclude={"program", "library", "reads_prompt"})


def _name(path: str) -> str:
    """What requests from outside call a file."""
    return Path(path).stem if "\n" not in path else "rules"


def pack(program: Program) -> str:
    return base64.b85encode(zlib.compress(program.model_dump_json().encode(), 9)).decode()


def digest_of(packed: str) -> str:
    return HASH + hashlib.sha256(packed.encode()).hexdigest()


@lru_cache(maxsize=MAX_FILES + 1)
def parse_program(text: str | None) -> Program:
    """Read a program that :meth:`ActivationReasoningParams.resolve` made.

    Raises:
        SteerError: someone else made it.
    """
    if text is None:
        raise ValueError("activation_reasoning was admitted with parameters that were not resolved")
    try:
        packed = zlib.decompressobj()
        plain = packed.decompress(base64.b85decode(text), MAX_PROGRAM)
        if packed.unconsumed_tail:
            raise ValueError(f"more than {MAX_PROGRAM} bytes")
        return Program.model_validate_json(plain)
    except (ValueError, zlib.error) as error:
        raise SteerError("program", text, f"what this plugin filled in ({str(error).splitlines()[0]})") from error
