"""ActivationReasoning: propositions from hidden states, rules that chain, actions (Helff et al., 2025)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch

from llm_steer.artifact import HASH
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.plugin import Context, Plugin, Rows, Tokens

from .actions import Actions
from .concepts import METHOD, Dictionary
from .detection import Detector
from .history import History
from .logic.formula import Literal
from .logic.reasoner import PackedReasoner, SoftReasoner
from .logic.schedule import schedule
from .logic.soft import HALF
from .own import Own, OwnReasoner, check_own, compile_own, limits
from .params import ActivationReasoningParams, digest_of, parse_program

MAX_DOSE = 2.0
"""Largest sum of strengths: what is added is at most that many times as long as the hidden state."""


class ActivationReasoning(Plugin[ActivationReasoningParams]):
    """Detects concepts in hidden states, reasons over them with rules, and acts on what follows.

    At each token the scores of concepts (features of a sparse autoencoder, or directions) become propositions; rules are
    applied until nothing new follows; conclusions steer towards or away from concepts, force or forbid tokens, or stop.
    Concepts, propositions, rules and actions stand in one YAML file: ``llm-steer rules check FILE`` explains it.

    Detection reads every token. Steering changes the last prompt token and the generated ones, never the prompt before: what
    holds at a token is a function of the tokens up to it, however they were fed.
    """

    name = METHOD
    summary = "ActivationReasoning: concepts in hidden states, rules that chain, actions on what follows"
    Params: ClassVar = ActivationReasoningParams
    feedback = True

    measures_logits = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        given = [p for p in context.declared if isinstance(p, ActivationReasoningParams)]
        texts = list(dict.fromkeys(text for p in given for text in (p.program, *(p.library or {}).values())))
        self._programs = [parse_program(text) for text in texts]
        self._number = {text: index for index, text in enumerate(texts)}
        self._number |= {digest_of(text): index for text, index in self._number.items() if text is not None}
        self._allowed = max((p.allow_rules for p in given), default=0)
        layers = {program.layer for program in self._programs if program.dictionary} or {0}
        if len(layers) > 1:
            raise UnsupportedError(
                f"rules files with dictionaries of several layers ({sorted(layers)}) cannot run in one batch: use one layer"
            )
        self._detects = min(layers)
        self._built = False
        if not (context.num_layers and self._programs):
            self._layers: list[int] = []
            return
        steered = {layer for program in self._programs for action in program.actions for layer in action.layers}
        self._layers = sorted({self._detects, *steered})
        if context.shelf is None:
            return  # asked only for its layers
        self._build(context)

    def _build(self, context: Context) -> None:
        dictionaries: dict[str, Dictionary] = {}
        for program in self._programs:
            if program.dictionary and program.dictionary not in dictionaries and context.shelf:
                artifact = context.shelf.open(program.dictionary, METHOD)
                dictionaries[program.dictionary] = Dictionary.from_artifact(artifact)
        self._built = True
        device, slots, programs = context.device, context.num_slots, self._programs
        linked = [(program, dictionaries.get(program.dictionary or "")) for program in programs]
        self.detector = Detector(linked, slots, device)
        self._actions = Actions([(n, action) for n, p in enumerate(programs) for action in p.actions], slots, device)
        self._program = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self._factor = torch.zeros(slots, device=device)
        literals, acting = self.detector.literals, self._actions.actions
        self._own_facts = torch.tensor([n for n, _ in literals], dtype=torch.int64, device=device)
        self._own_actions = torch.tensor([n for n, _ in acting], dtype=torch.int64, device=device)
        flags = [programs[n].ignores_contradiction for n, _ in acting]
        self._ignores = torch.tensor(flags, dtype=torch.bool, device=device)
        self._above = torch.tensor([action.above for _, action in acting], device=device)
        self._reasoners: list[PackedReasoner | SoftReasoner] = []
        self._columns: list[torch.Tensor] = []
        for number, program in enumerate(programs):
            facts = [literal for n, literal in literals if n == number]
            wanted = [Literal(action.atom, action.positive) for action in program.actions]
            plan = schedule(program.ruleset().program, [literal.atom for literal in facts])
            if program.truth == "crisp":
                self._reasoners.append(PackedReasoner(plan, facts, wanted, device))
            else:
                self._reasoners.append(SoftReasoner(plan, facts, wanted, program.truth, device))
            columns = [column for column, (n, _) in enumerate(literals) if n == number]
            self._columns.append(torch.tensor(columns, dtype=torch.int64, device=device))
        self._own: OwnReasoner | None = None
        if self._allowed:
            self._own = OwnReasoner(literals, acting, limits(programs, self._allowed), slots, device)
        self._asked: dict[int, Own] = {}
        """What the slots reason with whose requests bring rules or facts."""
        soft = any(program.truth != "crisp" for program in programs)
        self.history = History(len(literals) + len(acting), slots, device, degrees=len(literals) if soft else 0)

        steering = [(index, action) for index, (_, action) in enumerate(acting) if action.kind == "steer"]
        self._steering = torch.tensor([index for index, _ in steering], dtype=torch.int64, device=device)
        vectors = [
            dictionary[program.concepts[action.concept]].steer
            for program, dictionary in linked for action in program.actions if action.kind == "steer" and dictionary
        ]  # fmt: skip
        self._vectors = torch.stack(vectors).to(device) if vectors else torch.zeros(0, context.hidden_size, device=device)
        self._at = {
            layer: torch.tensor([float(layer in action.layers) for _, action in steering], device=device)
            for layer in self._layers
        }
        # Strengths go from the layer that detects to those that steer, by slot and position.
        places = context.max_positions if steering else 1
        self._doses = torch.zeros(slots, places, max(len(steering), 1), dtype=torch.float16, device=device)
        self._tokens = [
            (index, action.kind, torch.tensor(action.tokens, dtype=torch.int64, device=device))
            for index, (_, action) in enumerate(acting) if action.kind in ("force", "stop", "forbid")
        ]  # fmt: skip

    # -- one request ----------------------------------------------------------------------------------------------------

    @classmethod
    def first_steered(cls, params: ActivationReasoningParams, prompt_len: int) -> int | None:
        return prompt_len - 1

    @classmethod
    def reads_prompt(cls, params: ActivationReasoningParams) -> bool:
        return params.reads_prompt is not False

    def layers(self) -> Collection[int]:
        return self._layers

    def admit(self, slot: int, params: ActivationReasoningParams | None, prompt_ids: torch.Tensor) -> None:
        number = -1
        if params is not None:
            number = self._number.get(params.program, -1)
            if number < 0:
                raise SteerError("rules", params.rules, "one of the rules files that were named when the engine was started")
        if not self._built:
            return
        self._admit_own(slot, number, params)
        self.detector.reset(slot)
        self._actions.reset(slot)
        self.history.reset(slot)
        self._program[slot] = number
        self._factor[slot] = params.strength if params is not None else 0.0
        self._doses[slot] = 0

    def _admit_own(self, slot: int, number: int, params: ActivationReasoningParams | None) -> None:
        """Rules and facts that are not a part of the program already."""
        self._asked.pop(slot, None)
        own = None
        if params is not None and (params.program or "").startswith(HASH) and (params.extra_rules or params.facts):
            check_own(self._programs[number], params.extra_rules, params.facts, self._allowed)
            own = self._asked[slot] = compile_own(self._programs[number], params.extra_rules, params.facts)
        if self._own is not None:
            self._own.write(slot, number, own)

    # -- one forward pass -----------------------------------------------------------------------------------------------

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        home = self.context.device
        if hidden.device != home:  # a model that is split over several devices
            return self.residual(layer, hidden.to(home), tokens.to(home)).to(hidden.device)
        if layer == self._detects:
            self._reason(hidden, tokens)
        delta = torch.zeros_like(hidden)
        if not len(self._steering):
            return delta
        place = tokens.position.clamp(min=0, max=self._doses.shape[1] - 1)
        acts = (tokens.slot != self.context.nobody) & (tokens.output_position >= -1)
        dose = self._doses[tokens.slot, place].float() * self._at[layer] * acts[:, None]
        dose = dose * (MAX_DOSE / dose.abs().sum(1, keepdim=True).clamp(min=MAX_DOSE))
        change = (dose @ self._vectors) * hidden.float().norm(dim=1, keepdim=True)
        change = torch.where(torch.isfinite(change) & acts[:, None], change, 0.0)
        return change.to(hidden.dtype)

    def _reason(self, hidden: torch.Tensor, tokens: Tokens) -> None:
        passed = self.detector(hidden, tokens)
        slot = passed.slot
        program = self._program[slot]
        facts = passed.facts & (self._own_facts == program[:, None])
        degrees = None if passed.degrees is None else passed.degrees * (self._own_facts == program[:, None])
        wanted, weight, clashes = self._conclude(facts, degrees)
        if self._own is not None:
            mine, contradiction = self._own(facts, slot)
            own = self._own.used[slot][:, None]
            wanted, clashes = torch.where(own, mine, wanted), torch.where(own, contradiction, clashes)
        wanted = wanted & (~clashes | self._ignores)
        acts = (tokens.output_position >= -1) & (slot != self.context.nobody)
        wanted = wanted & (self._own_actions == program[:, None]) & acts[:, None]
        acting, strength = self._actions(wanted, tokens.position, slot, passed.runs, passed.owner)
        self.history.note(torch.cat([facts, acting], 1), tokens.position, slot, passed.runs, passed.owner, degrees)
        if len(self._steering):
            strength = strength * weight
            dose = (strength[:, self._steering] * self._factor[slot][:, None]).to(self._doses.dtype)
            place = tokens.position.clamp(min=0, max=self._doses.shape[1] - 1)
            self._doses[slot, place] = dose
            self._doses[self.context.nobody] = 0

    def _conclude(
        self, facts: torch.Tensor, degrees: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the programs say of each action, ``[tokens, actions]``: whether its formula holds, how much (1 where truth is
        crisp), and whether facts and rules exclude each other."""
        known, clash, weights, done = [], [], [], 0
        for reasoner, columns in zip(self._reasoners, self._columns, strict=True):
            if isinstance(reasoner, SoftReasoner):
                assert degrees is not None
                weight, excluded = reasoner(degrees[:, columns])
                holds, contradiction = weight > self._above[done : done + weight.shape[1]], excluded > HALF
            else:
                holds, contradiction = reasoner(facts[:, columns])
                weight = torch.ones_like(holds, dtype=torch.float32)
            done += holds.shape[1]
            known.append(holds)
            weights.append(weight)
            clash.append(contradiction[:, None].expand_as(holds))
        return torch.cat(known, 1), torch.cat(weights, 1), torch.cat(clash, 1)

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        for index, kind, ids in self._tokens if self._built else ():
            acts = self._actions.acting[rows.slot, index] & rows.live
            if kind == "forbid":
                others = logits.index_fill(1, ids, float("-inf"))
            else:
                others = torch.full_like(logits, float("-inf"))
                others[:, ids] = logits[:, ids]
            # Where nothing would be left, a grammar or another method wants the opposite, and wins.
            acts = acts & ~torch.isneginf(others).all(1)
            logits.copy_(torch.where(acts[:, None], others, logits))

    # -- trace ----------------------------------------------------------------------------------------------------------

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        number = int(self._program[slot])
        if number < 0:
            return {}
        from .trace import trace

        acting = [action for _, action in self._actions.actions]
        return trace(self._programs[number], number, slot, self.detector, self.history, acting, self._asked.get(slot))
