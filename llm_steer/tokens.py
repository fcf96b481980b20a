"""Words, think markers and step delimiters as token ids, for any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from llm_steer.errors import SteerError
from llm_steer.markers import Markers, SpelledMarker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

MultiPiece = Literal["skip", "first"]


@dataclass(frozen=True)
class WordMatch:
    """What a list of words became.

    ``ids`` holds every id once, in the order of the words; ``matched`` says which form gave which id; ``first_pieces`` which
    of these are only the first of several; ``skipped`` which forms gave none.
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
        return {key.decode(errors="replace") if isinstance(key, bytes) else key: i for key, i in self._keys.items()}

    @cached_property
    def _keys(self) -> dict[str | bytes, int]:
        """The tokenizer's own table; some over tiktoken's files have bytes for keys."""
        keys: Mapping[Any, int] = self.tokenizer.get_vocab()
        return dict(keys)

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
                if token is not None:
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
        # A vocabulary spells a text as it is (added tokens), as printable bytes (GPT-2) or with ▁ for a space
        # (SentencePiece). The same characters can spell something else in another convention: decoding tells.
        for spelling in (text, _byte_level(text), text.replace(" ", "▁")):
            token = self.pieces.get(spelling)
            if token is None:
                continue
            decoded = (self._decode([token]), self._text(token))
            if text in decoded or (spelling == text and not any(decoded)):  # some decode control tokens to nothing
                return token
        ids = self._encode_line(text)
        return ids[0] if len(ids) == 1 and self._text(ids[0]) == text else None

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise ``SteerError`` for the first id that the logits do not hold."""
        for i in ids:
            if not 0 <= i < self.size:
                raise SteerError(field, i, f"a token id between 0 and {self.size - 1}, the width of the logits")

    @cached_property
    def has_think_markers(self) -> bool:
        """The tokenizer has a piece for the end marker: the mark of a reasoning model."""
        return self.piece(self.think_close) is not None

    def marker(self, text: str) -> tuple[tuple[int, ...], ...]:
        """How a marker is written, as id sequences: its own piece, or the pieces it is cut into on a line of its own.

        For show: in other surroundings the pieces differ (``>`` or ``>\\n``), which :meth:`markers` allows for.
        """
        token = self.piece(text)
        return ((token,),) if token is not None else (tuple(self._encode_line(text)),)

    def markers(self, *, boundaries: bool = False) -> Markers:
        """What the :class:`~llm_steer.tracking.Tracker` looks for.

        Args:
            boundaries: also step delimiters. Takes decoding the whole vocabulary once, unless it is byte-level.
        """
        openers, closers = self._marker(self.think_open), self._marker(self.think_close)
        return Markers(openers, closers, *(self._newlines if boundaries else ()))

    @property
    def step_delimiters(self) -> list[int]:
        """Ids whose own text holds a blank line."""
        ids: list[int] = self._newlines[0].nonzero().flatten().tolist()
        return ids

    # ------------------------------------------------------------------------------------------------------------------

    def _marker(self, text: str) -> tuple[tuple[int, ...], ...] | SpelledMarker:
        token = self.piece(text)
        # Only an added token is always cut out of its surroundings; a piece that was learned may lose its ">" to a ">\n".
        if token is not None and text in self._added:
            return ((token,),)
        parts = self._parts_of(text.encode())
        if token is not None:
            parts[token] = text.encode()  # whatever it decodes to
        return SpelledMarker(text.encode(), tuple(parts.items()))

    def _parts_of(self, marker: bytes) -> dict[int, bytes]:
        """Text of the pieces that can take part in a marker: all others would only be decoded to no end."""
        inner = {marker[i:j] for i in range(len(marker)) for j in range(i + 1, len(marker) + 1)}
        heads, tails = tuple(marker[:i] for i in range(1, len(marker))), tuple(marker[i:] for i in range(1, len(marker)))
        parts = []
        for i, text in self._spelled_bytes.items():
            # b"<0x" also begins the spelling of a byte in SentencePiece.
            if text in inner or text.endswith(heads) or text.startswith((*tails, b"<0x")) or marker in text:
                parts.append(i)
        return dict(zip(parts, self._bytes(parts), strict=True))

    @cached_property
    def _newlines(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bool ``[size]`` each: the text holds a blank line, ends in a newline, starts with one."""
        ids = sorted(i for i in set(self.pieces.values()) if 0 <= i < self.size)
        texts = self._bytes(ids)
        where = torch.tensor(ids, dtype=torch.int64)

        def flags(values: Iterable[bool]) -> torch.Tensor:
            return torch.zeros(self.size, dtype=torch.bool).index_copy_(
                0, where, torch.tensor(list(values), dtype=torch.bool)
            )

        return (
            flags(b"\n\n" in text for text in texts),
            flags(text.endswith(b"\n") for text in texts),
            flags(text.startswith(b"\n") for text in texts),
        )

    @cached_property
    def _added(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, as they appear in text; Mistral's own tokenizers don't tell."""
        get = getattr(self.tokenizer, "get_added_vocab", None)
        return dict(get()) if get else {}

    @cached_property
    def _byte_level_pieces(self) -> bool:
        """The vocabulary spells bytes as GPT-2's does: its line break is ``Ċ``."""
        token = self.pieces.get(_byte_level("\n"))
        return token is not None and self._decode([token]) == "\n"

    @cached_property
    def _spelled_bytes(self) -> dict[int, bytes]:
        """UTF-8 of every id's text, from its spelling: exact where the vocabulary spells bytes."""
        byte_of, added = {c: b for b, c in enumerate(_BYTE_SPELLING)}, set(self._added.values())

        def text(key: str | bytes, i: int) -> bytes:
            if isinstance(key, bytes):
                return key
            if self._byte_level_pieces and i not in added:
                return bytes(byte_of[c] for c in key if c in byte_of)
            return key.replace("▁", " ").encode()

        return {i: text(key, i) for key, i in self._keys.items() if 0 <= i < self.size}

    def _bytes(self, ids: Sequence[int]) -> list[bytes]:
        """UTF-8 of the text that each id adds behind other text."""
        spelled = [self._spelled_bytes[i] for i in ids]
        if self._byte_level_pieces or any(isinstance(key, bytes) for key in self._keys):
            return spelled
        return [_fallback_byte(key) or text.encode() for key, text in zip(spelled, self._texts(ids), strict=True)]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ids to decode others behind (SentencePiece drops the space of a first piece), and their text."""
        ids = self._encode("a")
        return ids, self._decode(ids)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds behind other text."""
        anchor, before = self._anchor
        texts: list[str] = self.tokenizer.batch_decode([[*anchor, i] for i in ids], clean_up_tokenization_spaces=False)
        return [
            text[len(before) :] if text.startswith(before) else self._decode([i]) for text, i in zip(texts, ids, strict=True)
        ]

    def _text(self, token: int) -> str:
        return self._texts([token])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode_line(self, text: str) -> list[int]:
        """Ids of a text at the start of a line: behind a line break, SentencePiece adds no space of its own."""
        lead = self._encode("\n")
        ids = self._encode("\n" + text)
        return ids[len(lead) :] if ids[: len(lead)] == lead and len(ids) > len(lead) else self._encode(text)

    def _first_piece(self, form: str) -> int | None:
        """The first piece of a form, unless it is a mere space, or the tokenizer has nothing for the form."""
        ids = self._encode_line(form)
        return ids[0] if ids and self._decode([ids[0]]).strip() else None


def _forms(word: str, leading_space: bool, ignore_case: bool) -> Iterator[str]:
    if not word.strip():
        raise SteerError("words", word, "words with at least one visible character")
    bare = word.lstrip(" ")
    space = word[: len(word) - len(bare)]
    cases = [bare, bare.lower(), bare.capitalize(), bare.upper()] if ignore_case else [bare]
    for case in cases:
        yield space + case
        if leading_space and not space:
            yield " " + case


def _byte_spelling() -> str:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_SPELLING = _byte_spelling()
"""GPT-2's character for each byte: printable ones stand for themselves, for the others come those from U+0100 on."""


def _byte_level(text: str) -> str:
    """GPT-2's spelling of a text (``" Wait"`` -> ``"ĠWait"``)."""
    return "".join(_BYTE_SPELLING[byte] for byte in text.encode(errors="replace"))


def _fallback_byte(piece: bytes) -> bytes | None:
    """SentencePiece's ``<0x0A>`` as the byte it stands for; None for any other piece."""
    found = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
    return bytes([int(found[1], 16)]) if found else None
