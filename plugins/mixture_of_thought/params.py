"""Parameters of mixture_of_thought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from llm_steer.errors import SteerError
from llm_steer.formats import from_json
from llm_steer.plugin import Flag, Params

if TYPE_CHECKING:
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

Modality = Literal["natural", "code", "table"]
Answers = Literal["three", "two", "choice", "free"]
OF_ANSWERS: dict[str, list[Modality]] = {
    "three": ["natural", "code", "table"],
    "two": ["natural", "code", "table"],
    "choice": ["natural", "code"],
    "free": ["natural", "code"],
}
"""The modalities in which each kind of question can be asked: a truth table decides statements."""
MOST = 64
"""Requests of one question."""

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"vote": "majority", "ties": "random", "execute": False},
    "reference": {"vote": "majority", "ties": "alphabetical", "execute": False, "early": False},
}

ASKED = "asked as Engine.from_hf(model, tokenizer).chat(question, steer='mixture_of_thought'), as Engine.from_vllm(llm), or \
of a server as vllm_xargs={'steer': 'mixture_of_thought'} in /v1/chat/completions: one question becomes several requests, \
which generate() cannot start"


def _json(value: Any) -> Any:
    """Accept JSON text for a mapping: HTTP carries no nested values."""
    return from_json(value, "settings") if isinstance(value, str) else value


class Settings(BaseModel):
    """Of one modality. What is left out is as in the question's own request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Samples."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Of each vote, where votes are weighted."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    steer: str | dict[str, Any] | list[Any] | None = None
    """Plugins that steer these requests, in place of those beside mixture_of_thought."""


class MixtureOfThoughtParams(Params):
    """In which ways a question is asked, and how the answers are put together."""

    modalities: Annotated[list[Modality], Field(min_length=1, max_length=3)] | None = None
    """Ways of reasoning, the most trusted first: natural language, a Python program, a truth table. All that suit the kind
    of question if left out: a table only decides statements (answers three and two)."""
    n: Annotated[int, Field(ge=1, le=MOST)] = 1
    """Samples of each modality."""
    settings: Annotated[dict[Modality, Settings], BeforeValidator(_json)] = {}  # noqa: RUF012  (frozen)
    """By modality: n, weight, max_tokens, temperature, top_p, top_k, steer. Over HTTP JSON in one string."""
    baseline: Modality | None = None
    """Self-consistency at the same budget: as many samples in all, every one in this modality."""
    answers: Answers = "three"
    """Kind of question: a statement that is true, false or uncertain (three); true or false (two); options that the question
    lists as (A), (B), ... (choice); a number, an expression or a few words (free)."""
    examples: Flag = False
    """Put the worked examples into the prompt."""
    prompts: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(None, json_schema_extra={"operator": True})
    """Folder with prompts of your own; see the documentation for its files. Not for clients of a server."""
    vote: Literal["majority", "weighted", "verified"] = "majority"
    """Which answer wins: the one with most votes; with most weight; with most of the votes that verification bore out, if
    there are any."""
    ties: Literal["priority", "random", "logprob", "alphabetical"] = "priority"
    """Among equals: the one that the first modality voted for; any, drawn by tie_seed and the question; the one whose best
    vote has the highest mean log-probability a token; the first in the alphabet."""
    tie_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """For random ties."""
    execute: Flag = True
    """Run programs in the sandbox, if there is one, and compare what they print with the answer in the text."""
    verify: Flag = True
    """Enumerate truth tables again, and compare rows and verdict."""
    agreement: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """With weighted votes: factor for a vote that verification bore out."""
    disagreement: Literal["text", "verified", "abstain"] = "text"
    """Which answer a vote is for when the text says another one than the program or the table, or none at all."""
    early: Flag = True
    """Abort the remaining requests once the answer is certain."""
    reply: Literal["reasoning", "answer"] = "reasoning"
    """Text of the response: the reasoning of one of the winning votes with the answer behind it, or the answer alone."""
    preset: Literal["paper", "reference"] | None = None
    """``paper``: majority, random ties, nothing is run. ``reference``: the released script exactly: its parser, Unknown
    counts as a vote, ties go to the alphabetically first answer. Fields that are given beside it win."""

    presets: ClassVar = PRESETS

    @model_validator(mode="after")
    def _check_together(self) -> MixtureOfThoughtParams:
        suited = OF_ANSWERS[self.answers]
        for name in ("modalities", "settings"):
            for modality in getattr(self, name) or ():
                if modality not in suited:
                    raise ValueError(f"{name}: among {', '.join(suited)} with answers={self.answers!r}")
        if self.modalities and len(set(self.modalities)) < len(self.modalities):
            raise ValueError("modalities: each named once")
        if unused := [modality for modality in self.settings if modality not in self.order and modality != self.baseline]:
            raise ValueError(f"settings: without {unused[0]}, which is not in modalities")
        if self.baseline is not None and self.baseline not in suited:
            raise ValueError(f"baseline: among {', '.join(suited)} with answers={self.answers!r}")
        if self.preset == "reference" and self.answers not in ("three", "two"):
            raise ValueError("answers: three or two with preset='reference'")
        if len(self.plan) > MOST:
            raise ValueError(f"n: so small that all modalities together have at most {MOST} samples")
        return self

    @classmethod
    def inherit(cls, defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Another preset starts from its own defaults."""
        if own.get("preset", defaults.get("preset")) != defaults.get("preset"):
            return dict(own)
        return {**defaults, **own}

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> MixtureOfThoughtParams:
        """Only a host that steers tokens calls this."""
        raise SteerError("steer", "mixture_of_thought", ASKED)

    def shown(self) -> dict[str, Any]:
        """Without the folder: it says nothing elsewhere, and is the operator's."""
        return self.model_dump(mode="json", exclude_unset=True, exclude={"prompts"})

    @property
    def order(self) -> list[Modality]:
        """Modalities, the most trusted first."""
        return list(self.modalities or OF_ANSWERS[self.answers])

    @property
    def plan(self) -> list[Modality]:
        """The modality of each request."""
        mixture = [m for m in self.order for _ in range(self.of(m).n or self.n)]
        return mixture if self.baseline is None else [self.baseline] * len(mixture)

    def of(self, modality: Modality) -> Settings:
        return self.settings.get(modality) or Settings()
