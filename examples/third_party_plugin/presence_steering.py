"""A presence penalty for the first tokens of an answer: tokens that were generated already become less likely."""

import torch

from llm_steer import Params, Plugin


class PresenceParams(Params):
    penalty: float = 2.0
    """Subtracted from the logit of each token that was generated before."""
    first: int = 64
    """How many tokens of the answer it acts on."""


class Presence(Plugin[PresenceParams]):
    name = "presence"
    summary = "Presence penalty on the first tokens of an answer"
    Params = PresenceParams

    def __init__(self, context):
        super().__init__(context)
        self.seen = torch.zeros(context.num_slots, context.vocab_size, dtype=torch.bool, device=context.device)
        self.penalty = torch.zeros(context.num_slots, device=context.device)
        self.first = torch.zeros(context.num_slots, dtype=torch.int64, device=context.device)

    def admit(self, slot, params, prompt_ids):
        self.seen[slot] = False
        self.penalty[slot] = params.penalty if params else 0.0
        self.first[slot] = params.first if params else 0

    def step(self, tokens):
        self.seen[torch.where(tokens.is_prompt, self.context.nobody, tokens.slot), tokens.ids] = True

    def logits(self, logits, rows):
        acts = rows.live & (rows.output_position < self.first[rows.slot])
        logits -= torch.where(acts, self.penalty[rows.slot], 0.0)[:, None] * self.seen[rows.slot]
