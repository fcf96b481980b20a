"""The language of rules.

From what binds least to what binds most::

    a <-> b      a and b are both true or both false
    a -> b       b is true if a is; a -> b -> c is a -> (b -> c)
    a xor b      exactly one
    a or b
    a and b
    not a
    a then b     detected in this order (propositions only)
    at least 2 of (a, b, c)
    (a)   true   false   name   "a name"   name(subject)   name(?variable)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from llm_steer.errors import SteerError, did_you_mean

from .formula import RESERVED, And, AtLeast, Atom, Constant, Formula, Iff, Implies, Not, Or, Then, Xor

MAX_LENGTH = 4_096
"""Characters of a formula."""
MAX_DEPTH = 40
"""Formulas inside formulas."""
MAX_NAME = 128
"""Characters of a name."""

_TOKEN = re.compile(r'\s*(?:(<->|->|[(),])|"([^"\n]*)"|(\??[^\W\d](?:\w|-(?!>))*)|(\d+(?!\w)))')
_FOREIGN = {"&": "and", "&&": "and", "∧": "and", "|": "or", "||": "or", "∨": "or", "!": "not", "~": "not", "¬": "not",
            "⊕": "xor", "^": "xor", "=>": "->", "→": "->", "⇒": "->", "↔": "<->", "<=>": "<->", "⇔": "<->"}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a formula stands, for errors."""

    source: str = "rule"
    """A file's name, or a field."""
    line: int = 1
    column: int = 1
    """Of the formula's first character; counted from 1."""

    def at(self, text: str, offset: int) -> str:
        """The place of a character of the formula ``text``."""
        before = text[:offset]
        line = before.count("\n")
        column = offset - before.rfind("\n") if line else self.column + offset
        return f"{self.source}, line {self.line + line}, column {column}"


def parse(text: str, place: Place | None = None) -> Formula:
    """Read a formula.

    Raises:
        SteerError: naming line and column, what is there, and what would be valid.
    """
    return _Parser(text, place or Place()).parse()


@dataclass(frozen=True)
class _Token:
    kind: str
    """``symbol``, ``word`` (in lower case), ``name``, ``number`` or ``end``."""
    text: str
    offset: int


class _Parser:
    def __init__(self, text: str, place: Place) -> None:
        self.text, self.place = text, place
        if len(text) > MAX_LENGTH:
            raise SteerError(place.at(text, 0), text, f"a formula of at most {MAX_LENGTH} characters")
        self.tokens = self._scan()
        self.index = self.depth = 0

    def parse(self) -> Formula:
        formula = self._iff()
        if self._next.kind != "end":
            raise self._error("followed by an operator (and, or, xor, then, ->, <->) or the end of the formula")
        return formula

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _scan(self) -> list[_Token]:
        tokens, offset = [], 0
        while self.text[offset:].strip():
            found = _TOKEN.match(self.text, offset)
            if found is None:
                offset += len(self.text[offset:]) - len(self.text[offset:].lstrip())
                raise self._foreign(offset)
            symbol, quoted, word, number = found.groups()
            start = found.end() - len(found[0].lstrip())
            if symbol:
                tokens.append(_Token("symbol", symbol, start))
            elif quoted is not None:
                if not quoted.strip():
                    raise SteerError(self.place.at(self.text, start), found[0].strip(), "a name with a visible character")
                tokens.append(_Token("name", quoted, start))
            elif word:
                plain = word.lower()
                tokens.append(_Token("word", plain, start) if plain in RESERVED else _Token("name", word, start))
            else:
                tokens.append(_Token("number", number, start))
            if len(tokens[-1].text) > MAX_NAME:
                raise SteerError(self.place.at(self.text, start), tokens[-1].text, f"at most {MAX_NAME} characters long")
            offset = found.end()
        return [*tokens, _Token("end", "the end of the formula", len(self.text))]

    def _foreign(self, offset: int) -> SteerError:
        rest = self.text[offset:]
        where = self.place.at(self.text, offset)
        for sign in sorted(_FOREIGN, key=len, reverse=True):
            if rest.startswith(sign):
                return SteerError(where, sign, f"written {_FOREIGN[sign]!r}")
        if rest.startswith('"'):
            return SteerError(where, rest[:20], 'a name that is closed by another "')
        return SteerError(where, rest[0], "a name, a quoted name, a parenthesis or an operator")

    @property
    def _next(self) -> _Token:
        return self.tokens[self.index]

    def _error(self, valid: str, token: _Token | None = None) -> SteerError:
        token = token or self._next
        hint = did_you_mean(token.text, [*RESERVED, "->"]) if token.kind == "name" and "operator" in valid else ""
        return SteerError(self.place.at(self.text, token.offset), token.text, valid + hint)

    def _take(self, *texts: str) -> bool:
        if self._next.kind in ("symbol", "word") and self._next.text in texts:
            self.index += 1
            return True
        return False

    def _expect(self, text: str, valid: str) -> None:
        if not self._take(text):
            raise self._error(valid)

    def _deeper(self, parse: Callable[[], Formula]) -> Formula:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"nested at most {MAX_DEPTH} deep")
        formula = parse()
        self.depth -= 1
        return formula

    # -- grammar -----------------------------------------------------------------------------------------------------

    def _iff(self) -> Formula:
        left = self._implies()
        while self._take("<->"):
            left = Iff(left, self._implies())
            if self._next.text == "<->" and self._next.kind == "symbol":
                raise self._error("put in parentheses: a <-> b <-> c can be read in two ways")
        return left

    def _implies(self) -> Formula:
        left = self._xor()
        return Implies(left, self._deeper(self._implies)) if self._take("->") else left

    def _xor(self) -> Formula:
        left = self._or()
        if self._take("xor"):
            left = Xor(left, self._or())
            if self._next.text == "xor" and self._next.kind == "word":
                raise self._error("put in parentheses: a xor b xor c can be read in two ways")
        return left

    def _or(self) -> Formula:
        items = [self._and()]
        while self._take("or"):
            items.append(self._and())
        return Or(tuple(items)) if len(items) > 1 else items[0]

    def _and(self) -> Formula:
        items = [self._not()]
        while self._take("and"):
            items.append(self._not())
        return And(tuple(items)) if len(items) > 1 else items[0]

    def _not(self) -> Formula:
        if self._take("not"):
            return Not(self._deeper(self._not))
        return self._then()

    def _then(self) -> Formula:
        items = [self._primary()]
        start = self._next
        while self._take("then"):
            items.append(self._primary())
        if len(items) == 1:
            return items[0]
        if not all(isinstance(item, Atom) for item in items):
            raise self._error("between names: only detected propositions have an order", start)
        return Then(tuple(item for item in items if isinstance(item, Atom)))

    def _primary(self) -> Formula:
        if self._take("("):
            formula = self._deeper(self._iff)
            self._expect(")", "a closing parenthesis or an operator")
            return formula
        if self._take("true"):
            return Constant(True)
        if self._take("false"):
            return Constant(False)
        if self._take("at"):
            return self._at_least()
        token = self._next
        if token.kind != "name":
            raise self._error('a name, a parenthesis, not, or at least N of (names that are also operators are "quoted")')
        if token.text.startswith("?"):
            raise self._error("inside the parentheses of a proposition: a variable is none by itself")
        self.index += 1
        return Atom(token.text, self._arguments())

    def _arguments(self) -> tuple[str, ...]:
        if not self._take("("):
            return ()
        args: list[str] = []
        while True:
            token = self._next
            if token.kind not in ("name", "number"):
                raise self._error("a subject or a ?variable")
            self.index += 1
            args.append(token.text)
            if self._take(")"):
                return tuple(args)
            self._expect(",", "a comma or a closing parenthesis")

    def _at_least(self) -> Formula:
        self._expect("least", "'least', as in: at least 2 of (a, b, c)")
        token = self._next
        if token.kind != "number":
            raise self._error("a number, as in: at least 2 of (a, b, c)")
        self.index += 1
        self._expect("of", "'of', as in: at least 2 of (a, b, c)")
        self._expect("(", "a list in parentheses, as in: at least 2 of (a, b, c)")
        items = [self._deeper(self._iff)]
        while self._take(","):
            items.append(self._deeper(self._iff))
        self._expect(")", "a comma or a closing parenthesis")
        if not (len(token.text) < 6 and 1 <= int(token.text) <= len(items)):
            raise self._error(f"between 1 and {len(items)}, the length of the list", token)
        return AtLeast(int(token.text), tuple(items))
