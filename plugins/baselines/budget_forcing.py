"""Budget forcing (s1, Muennighoff et al. 2025) by logits alone: thinking is not allowed to end the first times."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from llm_steer.artifact import Shelf
from llm_steer.errors import SteerError
from llm_steer.plugin import Context, Params, Plugin, Rows, Tokens
from llm_steer.slots import SlotTable
from llm_steer.tokens import Vocabulary

from .sets import force

MOST = 16
NEVER = 2**40


class BudgetForcingParams(Params):
    """How often thinking goes on, and with which word."""

    ignore: Annotated[int, Field(ge=0, le=MOST)] = 2
    """How many ends of thinking are not accepted."""
    word: Annotated[str, Field(min_length=1, max_length=64)] = "Wait"
    """What is said in their place: one piece of the tokenizer."""
    word_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The same by id."""
    end_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The token that ends thinking; that of ``</think>`` if left out."""

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> BudgetForcingParams:
        word, end = self.word_id, self.end_id
        if vocabulary is None:
            if word is None or end is None:
                raise SteerError("word_id" if word is None else "end_id", None, "given where no tokenizer is at hand")
            return self
        if word is None and (word := vocabulary.piece(self.word)) is None:
            raise SteerError("word", self.word, "one piece of this tokenizer")
        if end is None and (end := vocabulary.piece(vocabulary.think_close)) is None:
            raise SteerError("end_id", None, f"given: {vocabulary.think_close} is several pieces of this tokenizer")
        vocabulary.check_ids([word], "word_id")
        vocabulary.check_ids([end], "end_id")
        return self.model_copy(update={"word_id": word, "end_id": end})


class BudgetForcing(Plugin[BudgetForcingParams]):
    """Says ``Wait`` where the end of thinking would be likeliest, the first ``ignore`` times.

    Until then the end is masked, so that sampling cannot draw it where another token is likelier. The exact method looks at
    the token that was drawn, which takes a loop around requests: ``s1`` of ``llm-steer eval``.
    """

    name = "budget_forcing"
    summary = "Budget forcing (s1), by logits: Wait in place of the first ends of thinking"
    Params: ClassVar = BudgetForcingParams
    feedback = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ids = SlotTable(("word", "end", "ignore"), context.num_slots, context.device, torch.int64)
        # Output positions at which the word was forced, in order.
        self._forced = torch.full((context.num_slots, MOST + 1), NEVER, dtype=torch.int64, device=context.device)

    def admit(self, slot: int, params: BudgetForcingParams | None, prompt_ids: torch.Tensor) -> None:
        self._forced[slot] = NEVER
        if params is None:
            self._ids.write(slot)
            return
        assert params.word_id is not None
        assert params.end_id is not None
        self._ids.write(slot, word=params.word_id, end=params.end_id, ignore=params.ignore)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        own = self._ids.rows(rows.slot)
        position = rows.output_position
        # Places before this one: the same row may be computed again.
        times = (self._forced[rows.slot] < position[:, None]).sum(1)
        held = rows.live & rows.thinking & (times < own["ignore"])
        forced = held & (logits.argmax(1) == own["end"])
        end = own["end"][:, None]
        logits.scatter_(1, end, logits.gather(1, end).masked_fill_(held[:, None], -torch.inf))
        force(logits, own["word"], forced)
        owner = torch.where(forced, rows.slot, self.context.nobody)
        self._forced[owner, torch.where(forced, times, MOST)] = torch.where(forced, position, NEVER)

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        forced = self._forced[slot]
        positions = forced[forced < NEVER].tolist()
        return {"steered_steps": len(positions), "forced": len(positions), "positions": positions}
