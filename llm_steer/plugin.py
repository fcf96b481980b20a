"""The hook interface: the contract between a steering method and the engines that run it.

A method is a :class:`Plugin`. An engine is a *host*. A plugin never imports an engine, a host never knows a method, and
both meet in this file. Hooks are called in the order in which data flows through one forward pass:

=================================  ====================================================================================
``expand(request)``                once per chat request, before anything runs (voting)
``admit(slot, params, ids)``       once when a request gets a slot, and again if the slot is refilled
``step(tokens)``                   once per forward pass, before it, outside any graph
``residual(layer, hidden, tokens)``  behind each layer the plugin asked for, inside the forward pass: returns what to add
``logits(logits, rows)``           once per forward pass, after it
``finish(slot, tokens, rows)``     once when the request ends; returns the trace
``read``, ``decided``, ``combine``  per chat request, as responses come and after the last (voting)
=================================  ====================================================================================

Three rules keep every method right on every host:

*Flat layout.* The tokens of all requests lie on one axis, each with the slot of its request: vLLM's own layout, the
layout of transformers' continuous batching, and a view of ``[batch, seq]``.

*Slots.* State is a structure of arrays ``[num_slots, ...]`` on the device, allocated once. A slot belongs to one request
from admission to finish. The last slot is nobody's: rows that do not steer point there, so hooks never branch and never
loop over requests, never call ``.item()``, never wait for the device.

*A function of what is given.* Never count calls. Partial prefills, preemption, beam search and drafted tokens call hooks
again or with fewer tokens; positions say where a token stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

if TYPE_CHECKING:
    import torch

    from llm_steer.artifact import Shelf
    from llm_steer.engines.base import Response
    from llm_steer.tokens import Vocabulary

__all__ = ["Context", "Flag", "Params", "Plugin", "Rows", "Tokens"]

Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if type(value) is int and value in (0, 1) else value)]
"""A boolean parameter. Over HTTP, booleans inside ``vllm_xargs`` arrive as 0 and 1."""


class Params(BaseModel):
    """Base of a plugin's parameters: one pydantic model validates Python keywords, ``SamplingParams.extra_args``, HTTP
    ``vllm_xargs`` and YAML alike.

    Types are strict (the string ``"5"`` is not a number), unknown fields are errors, NaN and infinities are refused, and
    instances are frozen. Write sequences as ``list[...]``: JSON has no other, and tuples from Python become lists. A
    validator of the whole model says what is wrong as ``raise ValueError("field: phrase that follows must be")``. No field
    may be called ``name`` or ``trace``, which mean something else beside a plugin's parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of a field ``preset`` with the fields that each stands for; those that are given beside it win."""

    @model_validator(mode="before")
    @classmethod
    def _lists_and_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        preset = data.get("preset")
        if isinstance(preset, str) and preset in cls.presets:
            data = {**cls.presets[preset], **data}
        return {
            key: [_listed(v) for v in value] if isinstance(value, list | tuple) else value for key, value in data.items()
        }

    @classmethod
    def inherit(cls, defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a request's own fields over the defaults that a server or ``steer(model, ...)`` set.

        Override where some fields only make sense together.
        """
        return {**defaults, **own}

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> Params:
        """Turn everything that needs a tokenizer into numbers and names of artifacts into content hashes. Called once, where
        the tokenizer is (the front end).

        Must be idempotent: resolving a resolved object returns an equal one, without a vocabulary or a shelf too.

        Args:
            shelf: the artifacts that the caller may name, for the model that is steered.

        Raises:
            SteerError: a word, marker or id that this tokenizer or vocabulary does not have; an artifact that is not on the
                shelf, damaged, or made for another model.
        """
        return self

    def needs_prompt_ids(self) -> bool:
        """Whether what these (resolved) parameters do hangs on which tokens the prompt holds, a think span that it opens for
        example. A request whose prompt comes as embeddings is then refused instead of being steered otherwise."""
        return False

    def shown(self) -> dict[str, Any]:
        """What a trace tells of them: JSON types."""
        return self.model_dump(mode="json", exclude_unset=True)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


P = TypeVar("P", bound=Params)


@dataclass(frozen=True)
class Context:
    """What a plugin is built with. Constant for its lifetime."""

    num_slots: int
    """Rows to allocate in every per-slot tensor; the last one, ``nobody``, is never admitted."""
    device: torch.device
    """Where per-slot state lives. A residual hook may be called with tensors of another device (a model split over
    several): keep a copy of what it reads on each."""
    vocab_size: int
    """Width of the logits, which can exceed the tokenizer's length."""
    num_layers: int = 0
    """Decoder layers of the model; 0 where hidden states are out of reach (a replay from token ids)."""
    hidden_size: int = 0
    """Width of the residual stream."""
    max_positions: int = 0
    """Longest sequence, prompt and output together, that a slot can hold; 0 if there are no hidden states."""
    declared: tuple[Params, ...] = ()
    """Resolved parameters that this plugin was declared with before the model ran: on vLLM the ones named at start, on
    Hugging Face those of the call's rows. What shapes a graph (the layers, how many vectors) follows from them and stays."""
    shelf: Shelf | None = None
    """Where artifacts are opened by content hash; None where there is nothing to steer with them (a replay)."""

    @property
    def nobody(self) -> int:
        return self.num_slots - 1


@dataclass(frozen=True)
class Tokens:
    """The flat tokens of one forward pass, or of one whole output when a trace is made.

    All fields are device tensors ``[num_tokens]``. Flags and counts describe the state *after* the token: the token that
    opens a think span is inside it, the one that closes it is not.
    """

    ids: torch.Tensor
    """int64, token id."""
    slot: torch.Tensor
    """int64, slot of the request the token belongs to; nobody's slot for tokens of requests that do not steer."""
    position: torch.Tensor
    """int64, index in the sequence, padding not counted; 0 is the first prompt token."""
    output_position: torch.Tensor
    """int64, index among the generated tokens; negative in the prompt."""
    thinking: torch.Tensor
    """bool, inside a think span. In the prompt only its last token carries the state; nobody's tokens carry none."""
    think_position: torch.Tensor
    """int64, index among the generated tokens since the current or last think span opened (what follows its end counts
    on); -1 for the opener itself, and where no span has opened."""
    think_ended: torch.Tensor
    """bool, an end marker has been generated."""
    boundary: torch.Tensor
    """bool, the token ends a reasoning step (a blank line in decoded text); False throughout unless a plugin sets
    ``needs_boundaries``. Not seen: a blank line of two tokens whose first is cached far before the prompt's end."""

    @property
    def is_prompt(self) -> torch.Tensor:
        """bool ``[num_tokens]``."""
        return self.output_position < 0

    def to(self, device: torch.device) -> Tokens:
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Rows:
    """The logits rows of one forward pass. All fields are device tensors ``[num_rows]``.

    Each row is about the token that will be sampled from it: ``output_position`` is the index that token will have.
    """

    slot: torch.Tensor
    """int64, nobody's slot for rows that do not steer."""
    output_position: torch.Tensor
    """int64, number of tokens generated before this one; 0 for the first."""
    thinking: torch.Tensor
    """bool, the token will be sampled inside a think span."""
    think_position: torch.Tensor
    """int64, number of tokens generated before this one since the current or last think span opened; -1 if none has."""
    think_ended: torch.Tensor
    """bool, an end marker was generated before."""
    live: torch.Tensor
    """bool, False where the sample will be thrown away (unfinished prefill chunk, row of a request that does not steer)."""


class Plugin(Generic[P]):
    """One steering method. Subclass it, set ``name`` and ``Params``, override the hooks you need.

    A host builds one instance per engine (or per ``generate`` call), so instance attributes are per-engine state.
    """

    name: ClassVar[str]
    """Lower-case identifier: the entry-point name, what users write."""
    summary: ClassVar[str] = ""
    """One line for ``llm-steer list``."""
    Params: ClassVar[type[Params]] = Params

    feedback: ClassVar[bool] = False
    """True when steering depends on what the model computed (logits, hidden states), not only on token ids. Hosts refuse
    such plugins where rows are re-ordered or drafted (beam search, speculative decoding), and do not replay their trace."""

    measures_logits: ClassVar[bool | None] = None
    """``logits`` reads the logits as the model made them, before other masks; otherwise it is called after these. None: as
    ``feedback`` is."""

    needs_boundaries: ClassVar[bool] = False
    """True when ``step`` or ``residual`` reads ``tokens.boundary``; False elsewhere spares hosts the table of delimiters."""

    def __init__(self, context: Context) -> None:
        """Allocate what the plugin needs. Every slot starts inert, and nobody's slot stays so."""
        self.context = context

    @classmethod
    def steers_hidden_states(cls) -> bool:
        """It has a ``residual`` hook: the host needs its layers, and it can be replayed from token ids only in part."""
        return cls.residual is not Plugin.residual

    @classmethod
    def first_steered(cls, params: P, prompt_len: int) -> int | None:
        """First position whose hidden states ``residual`` may change; None: it changes none.

        Keys and values before it are those of the model as it is, and may be shared through a prefix cache. Steering that
        spares the prompt answers ``prompt_len - 1``: from that position the first output token is predicted.
        """
        return 0

    @classmethod
    def reads_prompt(cls, params: P) -> bool:
        """The request depends on its prompt's hidden states: hosts run all of it and take nothing from a prefix cache."""
        return False

    @classmethod
    def sees_raw_logits(cls) -> bool:
        """When hosts call ``logits``: see ``measures_logits``."""
        return cls.feedback if cls.measures_logits is None else cls.measures_logits

    # -- one chat request, before and after -----------------------------------------------------------------------------

    votes: ClassVar[bool] = False
    """True when one chat request is answered by several: the four hooks below are for such plugins. They are functions of
    their arguments, run where the chat request arrives (an ``Engine``, the HTTP server), and see no token."""

    @classmethod
    def expand(cls, request: Mapping[str, Any], params: P) -> list[dict[str, Any]]:
        """Turn one chat request into the requests that answer it.

        Args:
            request: OpenAI ``/v1/chat/completions`` body; fields that the plugin does not know stay as they are.

        Raises:
            SteerError: a request that cannot be answered in this way.
        """
        return [dict(request)]

    @classmethod
    def read(cls, request: Mapping[str, Any], index: int, response: Response, params: P) -> dict[str, Any]:
        """What one response says: JSON types only. May take its time; runs in a thread of its own, several at once.

        Args:
            index: in the list that ``expand`` returned.
            response: failed and cut ones too.
        """
        return {}

    @classmethod
    def decided(cls, request: Mapping[str, Any], readings: Sequence[Mapping[str, Any] | None], params: P) -> bool:
        """The answer is the same whatever the responses will say that have not been read: they are aborted.

        Args:
            readings: in the order of ``expand``; None where nothing was read yet.
        """
        return False

    @classmethod
    def combine(
        cls,
        request: Mapping[str, Any],
        responses: Sequence[Response | None],
        readings: Sequence[Mapping[str, Any] | None],
        params: P,
    ) -> tuple[str, dict[str, Any]]:
        """The text that the caller sees, and what is told beside it: JSON types only.

        Args:
            responses: in the order of ``expand``; None where none came.
            readings: None where a response was aborted.
        """
        raise NotImplementedError(f"{cls.name} does not vote")

    # -- one request ----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, params: P | None, prompt_ids: torch.Tensor) -> None:
        """Initialise *every* field of ``slot``: its previous owner's state must not show.

        Args:
            slot: in ``[0, num_slots - 1)``.
            params: resolved parameters; None when the slot's request does not use this plugin: make the slot inert.
            prompt_ids: int64 ``[prompt_len]``; -1 where the prompt was given as embeddings.
        """

    def finish(self, slot: int, tokens: Tokens, rows: Rows) -> dict[str, Any]:
        """Say what was done to the request: JSON types only.

        Args:
            slot: the request's slot; per-slot state is still there.
            tokens: everything that was generated. The host may call this on a scratch instance that saw nothing but
                ``admit`` (a replay from token ids), unless ``feedback`` is set.
            rows: the logits row that each of ``tokens`` was sampled from.
        """
        return {}

    # -- one forward pass -----------------------------------------------------------------------------------------------

    def step(self, tokens: Tokens) -> None:
        """Update per-slot state from the tokens that are about to be fed.

        Drafted tokens are among them (speculative decoding): those that are rejected come again at the same position with
        another id. What is gathered here belongs to a position and is overwritten; it is not added up.
        """

    def layers(self) -> Collection[int]:
        """Indices of the decoder layers whose output ``residual`` wants, in ``[0, context.num_layers)``. Asked once."""
        return ()

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """What to add to the residual stream behind ``layer``.

        Runs inside torch.compile and CUDA graphs where the host has them: static-shape tensor arithmetic on buffers that
        were allocated in ``__init__`` and are filled in place by ``admit``, ``step`` and ``logits``; Python numbers are
        frozen into the graph. A change rather than the changed stream, since an engine may keep the stream as a sum of two
        tensors that it never adds up.

        Args:
            hidden: ``[num_tokens, hidden_size]``, the stream as the plugins before left it, model dtype. Not to be changed.
            tokens: on the device of ``hidden``. There may be more of them than are real: nobody's, with any ids.

        Returns:
            ``[num_tokens, hidden_size]``, model dtype; 0 for every token that is not steered, nobody's above all.
        """
        raise NotImplementedError(f"{self.name} asked for layers and has no residual")

    def logits(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change the logits in place. Leave -inf at -inf: a mask by grammar or by another method wins.

        Args:
            logits: float32 ``[num_rows, vocab_size]``, before temperature and truncation.
        """
