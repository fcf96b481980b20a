"""NoWait (2025, arXiv 2506.08343): reflection words are never said."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import torch
from llm_steer.plugins.reflection_cycle.params import TokenId, Word
from pydantic import Field

from llm_steer.artifact import Shelf
from llm_steer.errors import SteerError
from llm_steer.plugin import Context, Params, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable
from llm_steer.tokens import Vocabulary

from .sets import TokenSets

SEEDS = (
    *("wait", "alternatively", "hmm", "but", "however", "alternative", "another", "check", "double-check"),
    *("oh", "maybe", "verify", "other", "again", "now", "ah", "any"),
)
"""The paper's keywords."""

MOST = 8192
"""Tokens that one request may ban."""


class NoWaitParams(Params):
    """Which tokens are kept from being said, and where."""

    penalty: Annotated[float, Field(ge=0, le=100)] = 100.0
    """Subtracted from their logits, before temperature; 100 is a ban."""
    words: Annotated[list[Word], Field(min_length=1, max_length=64)] = Field(default=[*SEEDS])
    """Keywords, in any case."""
    match: Literal["word", "contains"] = "word"
    """Which pieces of the vocabulary count: those in which a keyword stands as a word of its own (``Ġwait``, ``"But``,
    ``Wait,``); or, as in the paper, all that contain one, whose false hits (``button``, ``Ohio``) go into ``keep``."""
    keep: Annotated[list[Word], Field(max_length=1024)] = Field(default_factory=list)
    """Texts of pieces that are left alone, without the space before them, in any case."""
    scope: Literal["output", "think"] = "output"
    """All of the output, or only inside of the think span."""
    token_ids: Annotated[list[TokenId], Field(max_length=MOST)] | None = None
    """The tokens by id, in place of the words."""

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> NoWaitParams:
        if self.token_ids is not None:
            if vocabulary is not None:
                vocabulary.check_ids(self.token_ids, "token_ids")
            return self
        if vocabulary is None:
            raise SteerError("words", self.words, "accompanied by token_ids where no tokenizer is at hand")
        ids = pieces_with(vocabulary, self.words, self.match, self.keep)
        if not ids:
            raise SteerError("words", self.words, "words that some piece of this tokenizer holds")
        if len(ids) > MOST:
            raise SteerError("words", self.words, f"words that at most {MOST} pieces hold, not {len(ids)}")
        return self.model_copy(update={"token_ids": ids})


def pieces_with(vocabulary: Vocabulary, words: list[str], match: str, keep: list[str]) -> list[int]:
    """Ids of the pieces that hold one of the words."""
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    inner = rf"(?<![^\W\d_])(?:{alternatives})(?![^\W\d_])" if match == "word" else alternatives
    pattern, kept = re.compile(inner, re.IGNORECASE), {text.casefold() for text in keep}
    # Letters are spelled as themselves in every vocabulary; its marks for a space are no letters of ours.
    return sorted(
        token
        for piece, token in vocabulary.pieces.items()
        if 0 <= token < vocabulary.size
        and pattern.search(plain := re.sub("[ĠĊĉ▁]", " ", piece))
        and plain.strip().casefold() not in kept
    )


class NoWait(Plugin[NoWaitParams]):
    """Subtracts a penalty from the logits of every keyword."""

    name = "no_wait"
    summary = "NoWait: reflection words are never said"
    Params: ClassVar = NoWaitParams

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers = SlotTable(("penalty",), context.num_slots, context.device)
        self._flags = SlotTable(("steers", "thinking_only"), context.num_slots, context.device, torch.bool)
        self._ids = TokenSets(context)

    def admit(self, slot: int, params: NoWaitParams | None, prompt_ids: torch.Tensor) -> None:
        if params is None:
            self._numbers.write(slot)
            self._flags.write(slot)
            self._ids.write(slot, None)
            return
        self._numbers.write(slot, penalty=params.penalty)
        self._flags.write(slot, steers=True, thinking_only=params.scope == "think")
        self._ids.write(slot, params.token_ids)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        self._ids.add(logits, rows.slot, -self._numbers["penalty"][rows.slot], self._acts(rows))

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        acts = self._acts(rows)
        said = self._ids.contains(tokens.slot, tokens.ids) & self._flags["steers"][slot]
        return {
            "steered_steps": int(acts.sum()),
            "reflection_tokens": int(said.sum()),
            "positions": tokens.output_position[said].tolist(),
        }

    def _acts(self, rows: Rows) -> torch.Tensor:
        flag = self._flags.rows(rows.slot)
        return flag["steers"] & rows.live & (rows.thinking | ~flag["thinking_only"])
