"""AlphaOne (Zhang et al. 2025, arXiv 2505.24863): slow thinking by chance up to a moment, fast thinking from there on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from llm_steer.plugins.reflection_cycle.params import MAX_IDS, TokenId
from pydantic import Field

from llm_steer.artifact import Shelf
from llm_steer.errors import SteerError
from llm_steer.plugin import Context, Params, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable
from llm_steer.tokens import Vocabulary

from .history import History, runs
from .sets import TokenSets, force

STATE = 2**62 - 1
"""Bits of the hash of an output, of which a boundary's mark takes one more."""


class AlphaOneParams(Params):
    """Where the moment is, and which words are slow."""

    alpha: Annotated[float, Field(ge=0, le=1000)] = 1.4
    """The moment comes after ``alpha * think_tokens`` tokens of thinking. 0: no word is inserted, all are replaced."""
    think_tokens: Annotated[float, Field(ge=1, lt=2**31)] = 3150.0
    """How long the model thinks by itself, in tokens, on average over such problems. The released code's figures: 2500 for
    R1-Distill-Qwen-1.5B, 3150 for 7B, 4800 for QwQ-32B."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the draws. They also depend on what was generated so far, so samples of one prompt differ."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """The request's own, which a plugin is not told: with it, the end of thinking is as likely as it was together with the
    words that it replaces."""
    word: Annotated[str, Field(min_length=1, max_length=64)] = "Wait"
    """What is said behind a blank line, one piece of the tokenizer, and what becomes the end of thinking later, with a space
    before it too."""
    word_id: TokenId | None = None
    """The word that is said, by id."""
    slow_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)] | None = None
    """The words that are replaced, by id."""
    end_id: TokenId | None = None
    """The token that ends thinking; that of ``</think>`` if left out."""

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> AlphaOneParams:
        word, slow, end = self.word_id, self.slow_ids, self.end_id
        if vocabulary is None:
            for name in ("word_id", "slow_ids", "end_id"):
                if getattr(self, name) is None:
                    raise SteerError(name, None, "given where no tokenizer is at hand")
            return self
        if word is None and (word := vocabulary.piece(self.word)) is None:
            raise SteerError("word", self.word, "one piece of this tokenizer")
        if slow is None:
            slow = list(dict.fromkeys([word, *vocabulary.words([self.word], leading_space=True).ids]))
        if end is None and (end := vocabulary.piece(vocabulary.think_close)) is None:
            raise SteerError("end_id", None, f"given: {vocabulary.think_close} is several pieces of this tokenizer")
        vocabulary.check_ids([word], "word_id")
        vocabulary.check_ids(slow, "slow_ids")
        vocabulary.check_ids([end], "end_id")
        return self.model_copy(update={"word_id": word, "slow_ids": slow, "end_id": end})

    def needs_prompt_ids(self) -> bool:
        return True  # what counts is thinking, which the prompt may have begun


class AlphaOne(Plugin[AlphaOneParams]):
    """Up to the moment ``Wait`` is said behind a blank line, with a probability that falls from 1 to 0; after it, a ``Wait``
    that the model draws becomes the end of thinking.

    The draws are a hash of the seed and of the output so far: the same again when a token is computed again.
    """

    name = "alpha_one"
    summary = "AlphaOne: Wait by chance, less and less often, then the end of thinking in its place"
    Params: ClassVar = AlphaOneParams
    needs_boundaries = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers = SlotTable(("moment", "temperature"), context.num_slots, context.device)
        self._ids = SlotTable(("steers", "word", "end", "seed"), context.num_slots, context.device, torch.int64)
        self._slow = TokenSets(context)
        self._past = History(context)  # see _number

    def admit(self, slot: int, params: AlphaOneParams | None, prompt_ids: torch.Tensor) -> None:
        self._past.clear(slot)
        if params is None:
            self._numbers.write(slot)
            self._ids.write(slot)
            self._slow.write(slot, None)
            return
        assert params.word_id is not None
        assert params.end_id is not None
        self._numbers.write(slot, moment=params.alpha * params.think_tokens, temperature=params.temperature)
        self._ids.write(slot, steers=1, word=params.word_id, end=params.end_id, seed=params.seed)
        self._slow.write(slot, params.slow_ids)

    def step(self, tokens: Tokens) -> None:
        start, end = runs(tokens)
        carried = self._past.at(tokens.slot, tokens.output_position - 1)[start].clamp_(min=0) >> 1
        self._past.store(tokens, _number(tokens, start, carried), end)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        own = self._ids.rows(rows.slot)
        waits, ends = self._acts(rows, self._past.at(rows.slot, rows.output_position - 1))
        force(logits, own["word"], waits)

        slow, end = self._slow.rows(rows.slot), own["end"][:, None]
        before, was = logits.gather(1, slow), logits.gather(1, end)
        repeated = torch.zeros_like(slow, dtype=torch.bool)
        repeated[:, 1:] = slow[:, 1:] == slow[:, :-1]
        shares = torch.cat([was, before.masked_fill(repeated, -torch.inf)], dim=1).double()
        heat = self._numbers["temperature"][rows.slot].clamp(min=0.01)[:, None]  # nobody's is 0
        together = (heat * torch.logsumexp(shares / heat, dim=1, keepdim=True)).to(logits.dtype)
        ends = ends[:, None]
        logits.scatter_(1, slow, torch.where(ends, -torch.inf, before))
        logits.scatter_(1, end, torch.where(ends & (was > -torch.inf), together, was))

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        start = torch.zeros_like(tokens.slot)
        number = _number(tokens, start, start)
        waits, ends = self._acts(rows, torch.cat([number.new_full((1,), -1), number])[: len(number)])
        return {
            "steered_steps": int((waits | ends).sum()),
            "forced": int(waits.sum()),
            "ending_steps": int(ends.sum()),
            "positions": tokens.output_position[waits].tolist(),
        }

    def _acts(self, rows: Rows, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the word is said, and where it is replaced: bool ``[rows]`` each.

        Args:
            past: number of the token before each row; -1 if there was none.
        """
        own, t = self._ids.rows(rows.slot), rows.think_position
        moment = self._numbers["moment"][rows.slot]
        acts = (own["steers"] == 1) & rows.live & rows.thinking
        behind_blank = (past >= 0) & (past & 1 == 1)
        draw = (_mix((past >> 1) + _mix(own["seed"])) & (2**53 - 1)).double() * 2.0**-53
        return acts & behind_blank & (draw < 1 - t / moment), acts & (t >= moment)


def _number(tokens: Tokens, start: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    """A hash of the output up to each token, times 2, plus 1 if a blank line ends there: int64 ``[num_tokens]``.

    Args:
        start: index of the first token of each token's run.
        carried: the hash before that.
    """
    position = tokens.output_position
    parts = torch.where(position >= 0, _mix(_mix(position) + tokens.ids), 0)
    total = parts.cumsum(0)  # wraps around
    state = (carried + total - (total - parts)[start]) & STATE
    return (state << 1) | tokens.boundary.to(torch.int64)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of each number, by the finalizer of SplitMix64 with signed shifts."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
