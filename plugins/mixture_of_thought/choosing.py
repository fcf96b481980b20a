"""Which one of some options a short passage names.

A passage is a list of words and signs. Options are named in it by their letter or by their text; the longest text that
matches counts, so that *5* is not found in *5.5*. Then what is denied, asked, supposed or given as a reason is no answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llm_steer.plugins.mixture_of_thought.passages import LONGEST
from llm_steer.plugins.mixture_of_thought.said import Answer

MOST = 400
"""Words and signs of a passage."""
_TOKEN = re.compile(r"(?:(?<![\w)])[-+])?\d+(?:[.,:/]\d+)*%?|\w+(?:'\w+)*|\n|\S")
_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf|it|tt)|mbox)\b|[*_`$\"{}]")
_ESCAPE = re.compile(r"\\(?=[^\w\s])")
_SIGNS = str.maketrans({"−": "-", "–": "-", "—": "-", "’": "'", "‘": " ", "“": " ", "”": " ", "「": " ", "」": " ",
                        "【": "(", "】": ")", "〔": "(", "〕": ")"})  # fmt: skip

_SYNONYMS = ("unknown", "undetermined", "undeterminable", "indeterminate", "undecided", "inconclusive")
_NEGATIONS = {"not", "never", "neither", "nor", "cannot", "no", "hardly"}
_REJECTED = {"wrong", "incorrect", "impossible", "refuted", "rejected", "excluded", "eliminated", "ruled", "out",
             "untenable"}  # fmt: skip
_AUXILIARIES = {"is", "are", "was", "were", "be", "been", "being", "has", "have", "had", "must", "can", "could", "would",
                "does", "do", "did", "clearly", "also", "therefore", "thus"}  # fmt: skip
_SUPPOSED = {"if", "unless", "would", "could", "might", "may", "maybe", "perhaps", "possibly", "suppose", "supposing",
             "assume", "assuming", "whether"}  # fmt: skip
_REASONS = {"because", "since", "as", "given", "considering", "although", "though"}
_SO = {"so", "thus", "hence", "therefore", "consequently", "conclude", "concludes", "concluded", "finally", "actually"}
_NAMES = {"answer", "verdict", "conclusion"}
_BUT = {"but", "instead", "rather"}
_SENTENCE_ENDS = {".", ";", "!", "?", "\n"}
_CLAUSE_ENDS = _SENTENCE_ENDS | {",", ":"} | _SO | _BUT
_LIGHT = {",", "/", "or", "and", ";", ".", ":", "-", "=", "|", "\n", "(", ")", "[", "]", "'"}
_BEFORE_LETTER = {"option", "choice"}
_BEHIND_LETTER = _REASONS | _AUXILIARIES | _BUT | {"or", "and", "so"}
_CAN_NOT = (("can", "not"), ("could", "not"), ("cannot",), ("can't",), ("couldn't",), ("impossible", "to"),
            ("not", "possible", "to"))  # fmt: skip
_DECIDE = ("determin", "decid", "infer", "conclu", "tell", "told", "say", "said", "know", "deduc", "prove")


@dataclass(frozen=True)
class _Claim:
    """An option that is named, from one token up to another."""

    start: int
    end: int
    letter: str
    by_letter: bool


class Chooser:
    """Reads passages about some options.

    Args:
        options: letter to text.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        verdicts = {text.lower(): letter for letter, text in options.items()}
        self.by_verdict = set(verdicts) <= {"true", "false", "uncertain"}
        self._uncertain = verdicts.get("uncertain") if self.by_verdict else None
        texts = list(options.items())
        if self._uncertain is not None:
            texts += [(self._uncertain, synonym) for synonym in _SYNONYMS]
        self._texts: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for letter, text in texts:
            if len(text) <= LONGEST and (tokens := _words(text)):  # a longer one is in no passage
                self._texts.setdefault(tokens[0], []).append((tuple(tokens), letter))
        for found in self._texts.values():
            found.sort(key=lambda item: -len(item[0]))

    def value(self, letter: str) -> str:
        return self.options[letter] if self.by_verdict else letter

    def choose(self, text: str) -> Answer:
        """The one option that a passage names."""
        tokens = _tokens(text)[:MOST]
        words = [token.casefold() for token in tokens]
        claims, foreign = self._claims(tokens, words)
        claims = self._without_lists(words, claims)
        if self._denies_a_statement(words, claims):
            return Answer(None, "ambiguous")
        claims = _affirmed(words, claims)
        letter = _one(words, [claim for claim in claims if claim.by_letter])
        worded = _one(words, [claim for claim in claims if not claim.by_letter])
        if letter == "" or (worded == "" and not letter):
            return Answer(None, "ambiguous")
        if letter:
            # "It is not false that ..., so (C)": only a text behind the letter contradicts it.
            behind = max(claim.start for claim in claims if claim.by_letter and claim.letter == letter)
            if any(c.letter != letter for c in claims if c.start > behind and not c.by_letter):
                return Answer(None, "contradictory")
        if chosen := letter or worded:
            return Answer(self.value(chosen), "")
        return Answer(None, "not_an_option" if foreign else "no_answer")

    # -- what is named -------------------------------------------------------------------------------------------------

    def _claims(self, tokens: Sequence[str], words: Sequence[str]) -> tuple[list[_Claim], bool]:
        """Options that are named, in order, and whether a letter is that is no option."""
        claims: list[_Claim] = []
        foreign = False
        at = 0
        while at < len(tokens):
            end = at + 1
            if (mark := _mark(tokens, at)) or (mark := self._bare(tokens, words, at, claims)):
                letter, end = mark
                if letter in self.options:
                    claims.append(_Claim(at, end, letter, by_letter=True))
                else:
                    foreign = True
            elif found := self._named(words, at):
                claims += found
                end = found[0].end
            elif self._uncertain is not None and (end_ := _undecidable(words, at)):
                end = end_
                claims.append(_Claim(at, end, self._uncertain, by_letter=False))
            at = end
        return claims, foreign

    def _named(self, words: Sequence[str], at: int) -> list[_Claim]:
        """The options with the longest text that stands here; two, if they have the same."""
        found: list[_Claim] = []
        for text, letter in self._texts.get(words[at], ()):
            if found and len(text) < found[0].end - at:
                break
            if tuple(words[at : at + len(text)]) == text:
                found.append(_Claim(at, at + len(text), letter, by_letter=False))
        return found

    def _bare(
        self, tokens: Sequence[str], words: Sequence[str], at: int, claims: Sequence[_Claim]
    ) -> tuple[str, int] | None:
        """A letter without parentheses: alone, first in the passage, or behind *option*, *answer is*, another letter."""
        token = tokens[at]
        if len(token) != 1 or not ("A" <= token.upper() <= "Z"):
            return None
        before = [word for word in words[:at] if word not in _LIGHT]
        behind = [word for word in words[at + 1 :] if word not in _LIGHT and word != "!"]
        if not behind and set(before) <= _BEFORE_LETTER:
            return token.upper(), at + 1
        if not token.isupper():
            return None
        option = words[at - 1 : at] in (["option"], ["choice"])
        led = not before or before[-1] == "answer" or before[-2:] == ["answer", "is"]
        listed = bool(claims) and claims[-1].by_letter and set(words[claims[-1].end : at]) <= _LIGHT
        following = words[at + 1 : at + 2]
        ends = not following or not following[0][0].isalnum() or (following[0] in _BEHIND_LETTER and token != "I")
        return (token, at + 1) if option or ((led or listed) and ends) else None

    # -- what is not an answer -----------------------------------------------------------------------------------------

    def _without_lists(self, words: Sequence[str], claims: list[_Claim]) -> list[_Claim]:
        """Without copies of the list of options."""
        letters = list(self.options)
        if len(letters) < 2:
            return claims
        kept: list[_Claim] = []
        at = 0
        while at < len(claims):
            end = _listed(words, claims, at, letters)
            if end == at:
                kept.append(claims[at])
                end = at + 1
            at = end
        return kept

    def _denies_a_statement(self, words: Sequence[str], claims: Sequence[_Claim]) -> bool:
        """ "It is false that it is false": what is meant is not for this reader."""
        if not self.by_verdict:
            return False
        for claim, following in pairwise(claims):
            if words[claim.start] == "false" and words[claim.end : claim.end + 1] == ["that"] and not following.by_letter:
                between = set(words[claim.end : following.start])
                if not between & (_SENTENCE_ENDS | _SO):
                    return True
        return False


def _words(text: str) -> list[str]:
    return [token.casefold() for token in _tokens(text.rstrip(" .") or text)]


def _tokens(text: str) -> list[str]:
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS))
    return _TOKEN.findall(_MARKUP.sub(" ", _ESCAPE.sub("", text)))


def _mark(tokens: Sequence[str], at: int) -> tuple[str, int] | None:
    """A letter in parentheses; at the end of a text they need not be closed."""
    if tokens[at] in ("(", "[") and at + 1 < len(tokens) and len(tokens[at + 1]) == 1 and tokens[at + 1].isascii():
        closed = at + 2 < len(tokens) and tokens[at + 2] in (")", "]")
        if tokens[at + 1].isalpha() and (closed or at + 2 == len(tokens)):
            return tokens[at + 1].upper(), at + 2 + closed
    return None


def _undecidable(words: Sequence[str], at: int) -> int | None:
    """End of the clause that "cannot be determined" begins here: the rest of it names what cannot be."""
    for spelling in _CAN_NOT:
        end = at + len(spelling)
        if tuple(words[at:end]) == spelling:
            end += words[end : end + 1] == ["be"]
            if end < len(words) and words[end].startswith(_DECIDE):
                return next((i for i in range(end, len(words)) if words[i] in (".", ";", ",", "\n")), len(words))
    return None


def _listed(words: Sequence[str], claims: Sequence[_Claim], at: int, letters: Sequence[str]) -> int:
    """Number of the claim behind a copy of the list of options that begins here; the same if none does."""
    by_letter = claims[at].by_letter
    seen: list[str] = []
    number = at
    while number < len(claims):
        claim = claims[number]
        if number > at and not set(words[claims[number - 1].end : claim.start]) <= _LIGHT:
            break
        if claim.by_letter == by_letter:
            if len(seen) == len(letters):
                break
            seen.append(claim.letter)
        elif not by_letter or claim.letter != seen[-1]:
            break
        number += 1
    if seen != list(letters):
        return at
    behind = words[claims[number - 1].end : claims[number - 1].end + 1]
    return number if by_letter or behind in ([":"], ["?"]) else at


def _affirmed(words: Sequence[str], claims: Sequence[_Claim]) -> list[_Claim]:
    """Without what is denied, supposed, asked, or a reason for what was said before."""
    inside = {at for claim in claims for at in range(claim.start, claim.end)}
    starts: dict[int, list[tuple[_Claim, _Claim | None]]] = {}
    for claim, following in zip(claims, [*claims[1:], None], strict=False):
        starts.setdefault(claim.start, []).append((claim, following))
    kept: list[_Claim] = []
    sentence: list[_Claim] = []
    """Of the current sentence, until it is known to be no question."""
    denied = supposed = reason = False
    for at, word in enumerate(words):
        if at in inside:
            for claim, following in starts.get(at, ()):
                if not (denied or supposed or reason or _rejected(words, claim, following)):
                    sentence.append(claim)
            continue
        if word in _CLAUSE_ENDS:
            denied = supposed = False
        if word in _SENTENCE_ENDS:
            kept += [] if word == "?" else sentence
            sentence, reason = [], False
        if word in _SO:
            reason = False
        denied |= (word in _NEGATIONS and words[at + 1 : at + 2] not in (["doubt"], ["question"])) or word.endswith("n't")
        supposed |= word in _SUPPOSED
        reason |= word in _REASONS and bool(kept or sentence) and "well" not in words[max(at - 1, 0) : at + 2]
    return kept + sentence


def _rejected(words: Sequence[str], claim: _Claim, following: _Claim | None) -> bool:
    """ "(A) is wrong", "(A) True cannot be".

    Args:
        following: the next claim; it may be the text of a letter.
    """
    at = claim.end
    if following and following.letter == claim.letter and set(words[at : following.start]) <= _LIGHT:
        at = max(at, following.end)
    start = at
    while at < len(words) and words[at] in _AUXILIARIES:
        at += 1
    word = words[at] if at < len(words) else ""
    return word in _REJECTED or word.endswith("n't") or word == "cannot" or (word == "not" and at > start)


def _one(words: Sequence[str], claims: Sequence[_Claim]) -> str | None:
    """The only option of a list; else the last one, if a word like *so* or *answer is* stands between it and the others.
    None if there is none, ``""`` if it is not clear which."""
    if not claims:
        return None
    last = claims[-1]
    before = max((claim.end for claim in claims if claim.letter != last.letter), default=None)
    if before is None:
        return last.letter
    for at in range(before, last.start):
        if words[at] in _SO or (words[at] in _NAMES and words[at + 1] in ("is", "was", ":", "=")):
            return last.letter
    return ""
