"""Words, think markers and step delimiters as token ids, for any tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from llm_steer.errors import SteerError
from llm_steer.tracking import Markers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

MultiPiece = Literal["skip", "first"]


@dataclass(frozen=True)
class WordMatch:
    """What a list of words became.

    ``ids`` holds every id once, in the order of the words; ``matched`` says which form gave which id; ``skipped`` which
    forms have no single piece; ``first_pieces`` which of them stand with their first piece only.
    """

    ids: list[int] = field(default_factory=list)
    matched: list[tuple[str, int]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    first_pieces: list[tuple[str, int]] = field(default_factory=list)


class Vocabulary:
    """A tokenizer seen as a table of pieces, and the width of the logits over it.

    Args:
        tokenizer: any Hugging Face tokenizer, byte-level BPE or SentencePiece.
        size: width of the model's logits; may exceed ``len(tokenizer)`` (Qwen pads its head), or fall short of it.
        think_markers: the strings that open and close a think span.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        size: int,
        think_markers: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
    ) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.think_open, self.think_close = think_markers

    @cached_property
    def pieces(self) -> dict[str, int]:
        """Vocabulary piece, as the tokenizer spells it, to id."""
        return dict(self.tokenizer.get_vocab())

    def words(
        self,
        words: Sequence[str],
        *,
        leading_space: bool = False,
        ignore_case: bool = False,
        multi_piece: MultiPiece = "skip",
    ) -> WordMatch:
        """Resolve words to the ids of the pieces that spell them.

        Args:
            words: as they appear in text.
            leading_space: also take the piece with a space before the word (``ĠWait``, ``▁Wait``): the form inside a line.
            ignore_case: also take the lower-case, capitalised and upper-case forms.
            multi_piece: what to do with a form that is several pieces: ``"skip"`` it, or take its ``"first"`` piece.

        Raises:
            SteerError: a word is empty, or its id lies beyond the logits.
        """
        match = WordMatch()
        for form in dict.fromkeys(f for word in words for f in _forms(word, leading_space, ignore_case)):
            token = self.piece(form)
            if token is None and multi_piece == "first":
                token = self._first_piece(form)
                match.first_pieces.append((form, token))
            if token is None:
                match.skipped.append(form)
                continue
            self.check_ids([token], field=f"words ({form!r})")
            match.matched.append((form, token))
            if token not in match.ids:
                match.ids.append(token)
        return match

    def piece(self, text: str) -> int | None:
        """Id of the single piece that spells exactly ``text``, leading space included; None if there is none."""
        for spelling in self._spellings(text):
            if spelling in self.pieces:
                return self.pieces[spelling]
        return None

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise ``SteerError`` for the first id that the logits do not hold."""
        for i in ids:
            if not 0 <= i < self.size:
                raise SteerError(field, i, f"a token id between 0 and {self.size - 1}, the width of the logits")

    def marker(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Id sequences that spell a marker; one sequence of one id where the tokenizer has a piece for it.

        A marker that is not a piece of its own is written with different pieces depending on its surroundings (``>`` or
        ``>\\n``), so each is tried.
        """
        token = self.piece(text)
        if token is not None:
            return ((token,),)
        found: dict[tuple[int, ...], None] = {}
        for before in ("", "\n", "\n\n", "a "):
            for after in ("", "\n", "\n\n", " a", "a"):
                if ids := self._smallest_run(before + text + after, text):
                    found[ids] = None
        return tuple(found)

    @cached_property
    def has_think_markers(self) -> bool:
        """The tokenizer has a piece for the end marker: the mark of a reasoning model."""
        return self.piece(self.think_close) is not None

    def markers(self, *, boundaries: bool = False) -> Markers:
        """What the :class:`~llm_steer.tracking.Tracker` looks for.

        Args:
            boundaries: also step delimiters, which takes decoding the whole vocabulary once (2 s for 150,000 pieces).
        """
        opener, closer = self.marker(self.think_open), self.marker(self.think_close)
        return Markers(opener, closer, *self._newlines) if boundaries else Markers(opener, closer)

    @property
    def step_delimiters(self) -> list[int]:
        """Ids whose own text holds a blank line."""
        ids: list[int] = self._newlines[0].nonzero().flatten().tolist()
        return ids

    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _newlines(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bool ``[size]`` each: the text holds a blank line, ends in a newline, starts with one."""
        blank, ends, starts = (torch.zeros(self.size, dtype=torch.bool) for _ in range(3))
        for i, text in enumerate(self._texts()):
            blank[i] = "\n\n" in text
            ends[i] = text.endswith("\n")
            starts[i] = text.startswith("\n")
        return blank, ends, starts

    def _texts(self) -> list[str]:
        """Decoded text of every id, each on its own."""
        count = min(self.size, len(self.tokenizer))
        texts: list[str] = self.tokenizer.batch_decode([[i] for i in range(count)], clean_up_tokenization_spaces=False)
        return texts

    def _spellings(self, text: str) -> Iterator[str]:
        """How a vocabulary may spell a text: itself (added tokens), byte-level, SentencePiece."""
        if not text.startswith(" "):
            yield text
        yield _byte_level(text)
        yield text.replace(" ", "▁")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _first_piece(self, form: str) -> int:
        # Behind a line break, SentencePiece adds no space of its own.
        lead = self._encode("\n")
        ids = self._encode("\n" + form)
        return ids[len(lead)] if ids[: len(lead)] == lead and len(ids) > len(lead) else self._encode(form)[0]

    def _smallest_run(self, text: str, marker: str) -> tuple[int, ...]:
        """The shortest run of ids in ``text`` whose decoded text holds ``marker``."""
        ids = self._encode(text)
        for length in range(1, len(ids) + 1):
            for start in range(len(ids) - length + 1):
                run = ids[start : start + length]
                if marker in self.tokenizer.decode(run, clean_up_tokenization_spaces=False):
                    return tuple(run)
        return ()


def _forms(word: str, leading_space: bool, ignore_case: bool) -> Iterator[str]:
    if not word.strip():
        raise SteerError("words", word, "words with at least one visible character")
    cases = [word, word.lower(), word.capitalize(), word.upper()] if ignore_case else [word]
    for case in cases:
        yield case
        if leading_space and not case.startswith(" "):
            yield " " + case


def _byte_level(text: str) -> str:
    """GPT-2's printable spelling of the text's UTF-8 bytes (``" Wait"`` -> ``"ĠWait"``), by the tokenizers library."""
    from tokenizers.pre_tokenizers import ByteLevel

    return "".join(part for part, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
