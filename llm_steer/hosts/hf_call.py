"""One ``generate`` call in progress: which row is which request, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor

from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.markers import NO_ID, Markers
from llm_steer.plugin import Plugin, Tokens
from llm_steer.runtime import Runtime, refuse_unknown_prompt, replay
from llm_steer.spec import Spec
from llm_steer.tracking import RING

if TYPE_CHECKING:
    from llm_steer.hosts.hf_steering import Steering


_CALL: ContextVar[Call | None] = ContextVar("llm_steer_call", default=None)


def call_of(steering: Steering) -> Call | None:
    """The call in progress, if it is one of a model steered by ``steering``."""
    call = _CALL.get()
    return call if call is not None and call.steering is steering else None


@contextmanager
def during(call: Call | None) -> Iterator[None]:
    """Make a call the one in progress, or none."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


@dataclass(frozen=True)
class Decoding:
    """What matters here about the way in which ``generate`` decodes."""

    reorders: bool
    """A row may hold another sequence than in the step before, or a shorter one (beams, drafts): what is known about it
    is made anew from its ids each time."""
    log_probs: bool
    """Processors get log-probabilities instead of logits, and what they return is added up."""
    eos_ids: frozenset[int]
    pad_id: int | None
    max_length: int
    """The most columns that ``generate`` may add to those of the prompts."""

    def cut(self, ids: list[int]) -> list[int]:
        """What a row generated, without what was appended after its end."""
        for index, token in enumerate(ids):
            if token in self.eos_ids:
                return ids[: index + 1]
        end = len(ids)
        while end and ids[end - 1] == self.pad_id:  # ended by another criterion than an end-of-sequence token
            end -= 1
        return ids[:end]


class SteerProcessor(LogitsProcessor):
    """Hands the logits of each step to the call."""

    def __init__(self, call: Call) -> None:
        self.call = call

    # generate demands more arguments of its caller if there are other parameters than these two.
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self.call.logits(input_ids, scores)  # type: ignore[return-value]


class Call:
    """The rows of one ``generate`` call.

    Columns are counted as ``generate`` counts them: column ``width`` is the first generated token of every row, pads
    included. What has no ids (a prompt given as embeddings, the part of it that is in the cache already) stands in the
    columns below 0.

    Args:
        steering: what the model is steered with.
        specs: one for all rows, or a list of one for each prompt (or for each row).
        decoding: how the rows are decoded.
    """

    runtime: Runtime | None = None
    """None until the rows are known."""

    def __init__(self, steering: Steering, specs: Spec | list[Spec], decoding: Decoding) -> None:
        self.steering = steering
        self.decoding = decoding
        self._asked = specs

    def admit(self, input_ids: torch.Tensor, mask: torch.Tensor | None, embedded: int | None, copies: int) -> None:
        """Learn the rows, before the first forward pass.

        Args:
            input_ids: int64 ``[rows, width]``, prompts with padding.
            mask: ``[rows, columns]``, 0 for padding; None if there is none. Its first columns are those below 0.
            embedded: length of a prompt that is given as embeddings.
            copies: rows for each prompt, next to each other.
        """
        self.rows, self.width = input_ids.shape
        self._copies = copies
        self.specs = self._per_row()
        device = input_ids.device
        fed = max(self.width, embedded or 0)
        real = torch.ones(self.rows, fed, dtype=torch.bool, device=device) if mask is None else mask.to(device).bool()
        self._before = real.shape[1] - self.width
        self._prompts = [ids[mask] for ids, mask in zip(self._pad(input_ids).cpu(), real.cpu(), strict=True)]
        if self._before:  # columns without ids
            for asked, prompt in zip(self.specs, self._prompts, strict=True):
                refuse_unknown_prompt(asked if bool((prompt == NO_ID).any()) else ())
        self._prompt_len = real.sum(1)
        self._position = (real.cumsum(1) - 1).masked_fill_(~real, 0)
        self._steers = torch.tensor([bool(spec) for spec in self.specs], device=device)
        self._slot = torch.where(self._steers, torch.arange(self.rows, device=device), self.rows)
        self._prompt_slot = torch.where(real, self._slot[:, None], self.rows)
        self._eos = torch.tensor(sorted(self.decoding.eos_ids), device=device, dtype=torch.int64)
        self._end = 0
        self._followed, self._reach = input_ids.cpu(), self.width
        self._tokens: dict[torch.device, Tokens] = {}

        self._markers = self.steering.markers(self.specs)
        context = self.steering.context(self.rows + 1, device, real.shape[1] + self.decoding.max_length)
        different = {id(spec): spec for spec in self.specs}.values()
        self.runtime = Runtime(context, self._markers, tuple(steer for spec in different for steer in spec))
        self._admit_rows(self.runtime)
        self._restarts = self.decoding.reorders and any(type(p).step is not Plugin.step for p in self.runtime.plugins)
        self.layers = self.runtime.layers

    def forward(self, input_ids: torch.Tensor, count: int, *, embedded: bool) -> None:
        """Before a forward pass: let plugins see its tokens.

        Args:
            input_ids: int64 ``[rows, any]``, the sequences so far (with drafts), or one chunk of the prompts.
            count: how many columns are fed.
            embedded: what is fed are the prompts' embeddings.
        """
        if self.runtime is None:
            return
        stop = input_ids.shape[1]
        if count == stop and self._end + count <= self.width:
            stop += self._end  # a chunk of the prompts
        start, self._end = stop - count, stop
        if self.decoding.reorders and stop > self.width:
            tokens = self._follow(self.runtime, input_ids, min(start, self._unchanged(input_ids)))
            tokens = _last_columns(tokens, self.rows, count)
        else:
            ids = input_ids.new_full((self.rows, count), NO_ID) if embedded else input_ids[:, -count:]
            if stop > self.width and len(self._eos):
                # What is fed behind the end of a row belongs to no request.
                self._slot = torch.where(torch.isin(ids[:, -1].to(self._slot.device), self._eos), self.rows, self._slot)
            tokens = self._observe(self.runtime, ids, start)
        if self.layers:
            self._tokens = {tokens.ids.device: tokens}

    def residual(self, layer: int, hidden: torch.Tensor) -> None:
        """Behind a layer: let plugins change the hidden states ``[rows, count, hidden_size]``."""
        if self.runtime is None or not self._tokens:
            return
        tokens = self._tokens.get(hidden.device)
        if tokens is None:
            tokens = next(iter(self._tokens.values())).to(hidden.device)
            self._tokens[hidden.device] = tokens
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(flat) != len(tokens.ids):
            raise UnsupportedError(
                f"layer {layer} was given {len(flat)} tokens where generate fed {len(tokens.ids)}: hidden states of "
                "this model cannot be steered"
            )
        self.runtime.residual(layer, flat, tokens)
        if flat.data_ptr() != hidden.data_ptr():
            hidden.copy_(flat.view_as(hidden))
        if layer == self.layers[-1]:
            # Used up: another forward pass that generate did not prepare (guidance, a caller's own) is not steered.
            self._tokens = {}

    def logits(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """After a forward pass: steered scores.

        Args:
            input_ids: int64 ``[rows, any]``.
            scores: ``[rows, vocab_size]``; not changed, since ``generate`` still returns them as raw logits.
        """
        if self.runtime is None or len(scores) != self.rows:
            raise UnsupportedError(
                "this way of generating lays out its rows in a way that steering cannot follow; "
                'use greedy decoding, sampling, beam search or assisted decoding, or pass steer="off"'
            )
        device, width = self._slot.device, input_ids.shape[1]
        if self.layers and (self._tokens or (self.decoding.log_probs and not self._end)):
            raise UnsupportedError(
                f"layers {self.layers} were not steered: this way of generating runs them where steering does not see it"
            )
        if self.decoding.reorders:
            start = self._unchanged(input_ids)
            if start < width:
                self._follow(self.runtime, input_ids, start)
        elif width != self._end:
            raise RuntimeError("the model was unsteered, or its methods replaced, while generate was running")
        steered = scores.to(device, torch.float32, copy=True)
        self.runtime.logits(steered, self._slot, self._prompt_len + (width - self.width - 1))
        if self.decoding.log_probs:
            # The mass that earlier processors left stays as it is: log_softmax(logits + delta) if they left all of it.
            shift = scores.to(device, torch.float32).logsumexp(1) - steered.logsumexp(1)
            steered += torch.where(self._steers, shift, 0.0)[:, None]
        return steered.to(scores.device, scores.dtype)

    def finish(self, result: Any) -> Outcome:
        """After the last forward pass: what ``generate`` returned, row by row."""
        sequences = sequences_of(result)
        runtime = self.runtime
        prompts = self.rows // self._copies if runtime else 0
        if sequences is None or runtime is None or len(sequences) % prompts:
            return Outcome()
        # Beam search returns the best of the rows of each prompt.
        same, per_prompt = len(sequences) == self.rows, len(sequences) // prompts
        row_of = [i if same else i // per_prompt * self._copies for i in range(len(sequences))]
        outputs = [self.decoding.cut(ids) for ids in sequences[:, self.width :].tolist()]
        specs = [self.specs[row] for row in row_of]
        live = None
        if runtime.feedback:
            live = [
                runtime.trace(row, torch.tensor(ids, dtype=torch.int64, device=self._slot.device)) if spec else None
                for row, spec, ids in zip(row_of, specs, outputs, strict=True)
            ]
        return Outcome(
            specs, [self._prompts[row] for row in row_of], outputs, self._markers, runtime.context.vocab_size, live
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _per_row(self) -> list[Spec]:
        if isinstance(self._asked, tuple):
            return [self._asked] * self.rows
        prompts = self.rows // self._copies
        if len(self._asked) == prompts:
            return [spec for spec in self._asked for _ in range(self._copies)]
        if len(self._asked) == self.rows and not self.decoding.reorders:
            return self._asked
        valid = f"one for each of the {prompts} prompts"
        if self._copies > 1 and not self.decoding.reorders:
            valid += f", or one for each of the {self.rows} returned sequences"
        raise SteerError("steer", f"a list of {len(self._asked)}", f"a list with {valid}")

    def _admit_rows(self, runtime: Runtime) -> None:
        for row, spec in enumerate(self.specs):
            if spec:
                runtime.admit(row, spec, self._prompts[row])

    def _pad(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` from column 0 on, with the columns below."""
        return torch.nn.functional.pad(ids, (self._before, 0), value=NO_ID)

    def _unchanged(self, input_ids: torch.Tensor) -> int:
        """The column up to which all rows are as they were when they were last gone through."""
        if self._restarts:
            return -self._before
        ids, before = input_ids.cpu(), self._followed
        shared = min(ids.shape[1], before.shape[1])
        differs = (ids[:, :shared] != before[:, :shared]).any(0).nonzero()
        same = int(differs[0]) if len(differs) else shared
        return same if self._reach - same < RING else self.width  # the tracker remembers no more

    def _follow(self, runtime: Runtime, input_ids: torch.Tensor, start: int) -> Tokens:
        """Go through all columns from ``start`` on, as they are now."""
        if self._restarts:  # a plugin gathers what it sees: it sees each sequence from the beginning, once
            self._admit_rows(runtime)
        self._followed = input_ids.cpu()
        self._reach = max(self._reach if start > self.width else 0, input_ids.shape[1])
        return self._observe(runtime, self._pad(input_ids)[:, start + self._before :], start)

    def _observe(self, runtime: Runtime, ids: torch.Tensor, start: int) -> Tokens:
        stop = start + ids.shape[1]
        inside = slice(start + self._before, min(stop, self.width) + self._before)
        behind = torch.arange(max(start, self.width), max(stop, self.width), device=self._slot.device) - self.width
        position = torch.cat([self._position[:, inside], self._prompt_len[:, None] + behind], dim=1)
        slot = torch.cat([self._prompt_slot[:, inside], self._slot[:, None].expand(-1, len(behind))], dim=1)
        flat = (x.flatten() for x in (ids.to(self._slot.device), slot, position))
        return runtime.forward(*flat, single=ids.shape[1] == 1)


@dataclass
class Outcome:
    """The sequences that a call returned. Holds nothing of the call itself: its state may be large, and on the
    accelerator."""

    specs: list[Spec] = field(default_factory=list)
    prompts: list[torch.Tensor] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    markers: Markers = field(default_factory=Markers)
    vocab_size: int = 0
    live: list[dict[str, Any] | None] | None = None
    """Traces that only the call itself could make."""

    @cached_property
    def traces(self) -> list[dict[str, Any] | None]:
        if self.live is not None:
            return self.live
        return [
            replay(spec, self.markers, self.vocab_size, prompt.tolist(), ids) if spec else None
            for spec, prompt, ids in zip(self.specs, self.prompts, self.outputs, strict=True)
        ]

    @property
    def counts(self) -> dict[str, int]:
        steered = [len(ids) for spec, ids in zip(self.specs, self.outputs, strict=True) if spec]
        return {
            "calls": 1,
            "sequences": len(self.specs),
            "steered_sequences": len(steered),
            "steered_tokens": sum(steered),
        }


def unsteered(result: Any) -> Outcome:
    """The outcome of a call in which nothing was steered."""
    sequences = sequences_of(result)
    count = 0 if sequences is None else len(sequences)
    return Outcome([()] * count, [torch.empty(0)] * count, [[]] * count)


def sequences_of(result: Any) -> torch.Tensor | None:
    """The token ids that ``generate`` returned; None where it returned something else."""
    sequences = getattr(result, "sequences", result)
    return sequences if isinstance(sequences, torch.Tensor) and sequences.ndim == 2 else None


def _last_columns(tokens: Tokens, rows: int, count: int) -> Tokens:
    return replace(tokens, **{name: x.view(rows, -1)[:, -count:].flatten() for name, x in vars(tokens).items()})


def refuse_feedback(specs: Sequence[Spec], decoding: Decoding) -> None:
    """Raise if rows are decoded in a way that a method of theirs cannot follow."""
    names = sorted({steer.name for spec in specs for steer in spec if steer.plugin.feedback})
    if decoding.reorders and names:
        raise UnsupportedError(
            f"{', '.join(names)} depends on what the model computed, which beam search, assisted decoding and custom "
            "decoding loops re-order or take back; use greedy decoding or sampling (num_beams=1, no assistant), "
            'or pass steer="off"'
        )
