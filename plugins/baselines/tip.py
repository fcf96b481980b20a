"""TIP, the thought-switching penalty (Wang et al. 2025, arXiv 2501.18585)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from llm_steer.plugins.reflection_cycle.params import MAX_IDS, REFERENCE_WORDS, TokenId, Word
from pydantic import Field

from llm_steer.artifact import Shelf
from llm_steer.errors import SteerError
from llm_steer.plugin import Context, Flag, Params, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable
from llm_steer.tokens import Vocabulary
from llm_steer.tracking import latest

from .history import History, runs
from .sets import TokenSets


class TipParams(Params):
    """The penalty, how long it lasts, and which tokens open a new thought."""

    alpha: Annotated[float, Field(ge=-100, le=100)] = 3.0
    """Subtracted from the logits of the tokens that switch thoughts, before temperature."""
    beta: Annotated[int, Field(ge=1, lt=2**31)] = 600
    """For how many tokens."""
    mode: Literal["thought", "absolute"] = "thought"
    """Where these are counted from: ``thought``, as in TIP's paper, the token that opened the current thought, so that each
    switch starts the penalty anew; ``absolute``, as in CyclicReflex's code, the first token, once."""
    origin: Literal["auto", "think", "output"] = "auto"
    """Where the first thought begins: the first token generated in the think span, or the first generated token. ``auto`` is
    ``think`` if the tokenizer has a piece for ``</think>``. After ``</think>`` nothing is changed."""
    words: Annotated[list[Word], Field(max_length=64)] | None = None
    """Words that open a new thought; the five of reflection_cycle if neither words nor token_ids are given."""
    token_ids: Annotated[list[TokenId], Field(max_length=MAX_IDS)] | None = None
    """Such tokens by id, beside those of the words."""
    leading_space: Flag = False
    """Also the pieces with a space before the word."""
    ignore_case: Flag = False
    """Also the lower-case, capitalised and upper-case forms."""

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> TipParams:
        words = self.words if self.words is not None else [] if self.token_ids else list(REFERENCE_WORDS)
        ids = list(self.token_ids or ())
        if vocabulary is None:
            if words or not ids:
                raise SteerError("words", words, "left out where no tokenizer is at hand: give token_ids")
            if self.origin == "auto":
                raise SteerError("origin", "auto", "think or output where no tokenizer is at hand")
            return self
        vocabulary.check_ids(ids, "token_ids")
        ids += vocabulary.words(words, leading_space=self.leading_space, ignore_case=self.ignore_case).ids
        if not ids:
            raise SteerError("words", words, "words that are one piece of this tokenizer")
        origin = self.origin if self.origin != "auto" else "think" if vocabulary.has_think_markers else "output"
        return self.model_copy(update={"words": [], "token_ids": list(dict.fromkeys(ids)), "origin": origin})

    def needs_prompt_ids(self) -> bool:
        return self.origin != "output"


class Tip(Plugin[TipParams]):
    """Keeps a model with its thought: switch words are less likely for a while after each of them.

    Where the current thought began is a function of the tokens generated so far. It is kept for the last tokens by position,
    so tokens may come again or be taken back.
    """

    name = "tip"
    summary = "TIP: a penalty on words that switch thoughts, for a while after each switch"
    Params: ClassVar = TipParams

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers = SlotTable(("alpha", "beta"), context.num_slots, context.device)
        self._flags = SlotTable(("steers", "from_output", "absolute"), context.num_slots, context.device, torch.bool)
        self._ids = TokenSets(context)
        self._last = History(context)  # output position of the last switch up to each

    def admit(self, slot: int, params: TipParams | None, prompt_ids: torch.Tensor) -> None:
        self._last.clear(slot)
        if params is None:
            self._flags.write(slot)
            self._numbers.write(slot)
            self._ids.write(slot, None)
            return
        self._flags.write(slot, steers=True, from_output=params.origin == "output", absolute=params.mode == "absolute")
        self._numbers.write(slot, alpha=params.alpha, beta=params.beta)
        self._ids.write(slot, params.token_ids)

    def step(self, tokens: Tokens) -> None:
        slot, position = tokens.slot, tokens.output_position
        start, end = runs(tokens)
        index = torch.arange(len(slot), device=slot.device)
        switch = latest(self._ids.contains(slot, tokens.ids) & (position >= 0), index)
        carried = self._last.at(slot, position - 1)[start]
        self._last.store(tokens, torch.where(switch >= start, position[switch], carried), end)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        delta, acts = self._offsets(rows, self._last.at(rows.slot, rows.output_position - 1))
        self._ids.add(logits, rows.slot, delta, acts)

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        switch = self._ids.contains(tokens.slot, tokens.ids) & self._flags["steers"][slot]
        upto = latest(switch, torch.arange(len(switch), device=switch.device))
        delta, acts = self._offsets(rows, torch.cat([upto.new_full((1,), -1), upto])[: len(upto)])
        return {
            "steered_steps": int((acts & (delta != 0)).sum()),
            "reflection_tokens": int(switch.sum()),
            "positions": tokens.output_position[switch].tolist(),
            "deltas": torch.where(acts, delta, 0.0)[switch].tolist(),
        }

    def _offsets(self, rows: Rows, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to each row's switch tokens, and whether it is.

        Args:
            last: output position of the last switch before each row; -1 if there was none.
        """
        number, flag = self._numbers.rows(rows.slot), self._flags.rows(rows.slot)
        from_output = flag["from_output"]
        origin = torch.where(from_output, 0, rows.output_position - rows.think_position)
        start = torch.where(flag["absolute"], origin, torch.maximum(origin, last))
        runs = (from_output | rows.thinking) & ~rows.think_ended
        acts = flag["steers"] & rows.live & runs & (rows.output_position - start < number["beta"])
        return -number["alpha"], acts
