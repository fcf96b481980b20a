"""Parameters of activation_reasoning."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from llm_steer.errors import SteerError
from llm_steer.plugin import Params

from .book import MAX_TEXT, read_book
from .program import Program, link

if TYPE_CHECKING:
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

MAX_EXTRA = 256
MAX_PROGRAM = 8 << 20


class ActivationReasoningParams(Params):
    """The rules file, and what one request adds to it."""

    rules: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] | None = None
    """Path of the rules file (YAML): concepts, propositions, rules, actions. In Python also its text."""
    extra_rules: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=MAX_EXTRA)] = []  # noqa: RUF012
    """More rules for this request, such as ``wumpus(?x) -> mammal(?x)``."""
    facts: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_EXTRA)] = []  # noqa: RUF012
    """Propositions that hold from the start: ``rainy``, ``wumpus(max)``."""
    strength: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Factor for the strength of every steer action; 0 only detects and reasons."""
    program: Annotated[str, Field(max_length=4 * MAX_TEXT)] | None = None
    """Filled in where the tokenizer is: the file made ready for this model, packed."""

    @model_validator(mode="after")
    def _check_together(self) -> ActivationReasoningParams:
        if self.rules is None and self.program is None:
            raise ValueError("rules: given, the path of a rules file")
        return self

    @classmethod
    def inherit(cls, defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Another file, other rules or facts need another program."""
        stale = {"rules", "extra_rules", "facts"} & own.keys()
        return {**{name: value for name, value in defaults.items() if not (stale and name == "program")}, **own}

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> ActivationReasoningParams:
        outside = shelf is not None and not shelf.paths
        if self.program is not None:
            if outside and self.program not in _LOADED.values():
                raise SteerError("program", self.program, "left out: it is filled in here")
            return self
        if outside:
            if self.extra_rules or self.facts:
                raise SteerError(
                    "extra_rules", self.extra_rules or self.facts, "left out (and facts, too): not from outside"
                )
            known = {Path(name).stem: program for name, program in _LOADED.items()} | _LOADED
            if self.rules not in known:
                names = ", ".join(sorted(Path(name).stem for name in _LOADED))
                raise SteerError("rules", self.rules, f"one of the files that were named at start: {names or 'none'}")
            return self.model_copy(update={"program": known[self.rules]})
        try:
            book = read_book(self.rules or "", self.extra_rules)
            text = link(book, self.facts, vocabulary, shelf).model_dump_json()
        except SteerError as error:
            if error.field in type(self).model_fields:
                raise
            raise SteerError(f"rules: {error.field}", error.value, error.valid) from error
        program = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
        if not (self.extra_rules or self.facts or "\n" in (self.rules or "")):
            _LOADED[self.rules or ""] = program
        return self.model_copy(update={"program": program})


_LOADED: dict[str, str] = {}
"""Files that this process has made ready, by path: the ones among which requests from outside may choose."""


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
