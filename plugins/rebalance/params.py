"""Parameters of rebalance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from llm_steer.artifact import HASH, check_dose
from llm_steer.errors import SteerError
from llm_steer.plugin import Params
from llm_steer.tokens import Vocabulary

from .control import INITIAL, Constants

if TYPE_CHECKING:
    from llm_steer.artifact import Artifact, Shelf

METHOD = "rebalance"
"""What artifacts must be made for."""
MAX_WINDOW = 8
NO_WINDOW = "left out with mode='reference', which takes the last two steps"


class RebalanceParams(Params):
    """The artifact, and how confidence becomes a coefficient."""

    artifact: Annotated[str, Field(min_length=1, max_length=4096)]
    """The calibrated vector and its constants: name of an artifact on the server; in Python also its folder, or a
    repository of the Hugging Face hub. Where steering is carried out, ``sha256:`` and its content hash."""
    mode: Literal["auto", "reference", "paper"] = "auto"
    """``auto``: as the artifact was calibrated. ``reference``: the released code for Qwen2 (arithmetic mean of a step's
    confidence, variance over two steps, its control curve). ``paper``: geometric mean, variance over ``window`` steps, the
    paper's control curve."""
    strength: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Multiplies every coefficient, in [0, 100]; 1 is as calibrated."""
    initial: Annotated[float, Field(ge=-100, le=100)] | None = None
    """Coefficient at a delimiter that no step has ended before; the artifact's if left out."""
    window: Annotated[int, Field(ge=2, le=MAX_WINDOW)] = 2
    """Steps that the variance is taken over, in paper mode."""
    scope: Literal["auto", "think", "output"] = "auto"
    """Where steps are steered: in think spans, or in the whole output. ``auto`` is ``think`` if the tokenizer has a piece
    for ``</think>``, else ``output``. Confidence is followed everywhere."""
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1)] | None = None
    """Filled in when the artifact is found: the decoder layer behind which the vector is added."""
    warnings: list[str] = Field(default=[], max_length=16)
    """Filled in when the artifact is found: how it does not quite fit this model."""

    @model_validator(mode="after")
    def _check_together(self) -> RebalanceParams:
        if self.mode == "reference" and self.window != 2:
            raise ValueError(f"window: {NO_WINDOW}")
        return self

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> RebalanceParams:
        update: dict[str, Any] = {}
        if self.scope == "auto":
            if vocabulary is None:
                raise SteerError("scope", "auto", "think or output where no tokenizer is at hand")
            update["scope"] = "think" if vocabulary.has_think_markers else "output"
        elif self.scope == "think" and vocabulary is not None and not vocabulary.has_think_markers:
            raise SteerError("scope", "think", "auto or output: this tokenizer has no think markers")
        if shelf is None:
            if not self.artifact.startswith(HASH) or self.layers is None:
                raise SteerError("artifact", self.artifact, "left out where no model is at hand")
            return self.model_copy(update=update)
        artifact, warnings = shelf.find(self.artifact, METHOD)
        constants = constants_of(artifact)
        if artifact.behind < 0:
            raise SteerError("artifact", "layer 0, before", "made for a place behind a layer")
        if self.layers is not None and self.layers != [artifact.behind]:
            raise SteerError("layers", self.layers, f"left out: this artifact is for {artifact.behind}")
        initial = self.initial if self.initial is not None else artifact.description.constants.get("initial", INITIAL)
        largest = max(map(abs, (constants.low, constants.floor, constants.ceiling, initial)))
        dose = artifact.description.relative_dose
        check_dose("strength", self.strength, artifact.vector() * largest, None if dose is None else dose * largest)
        made_in = artifact.description.calibration.get("mode")
        mode = self.mode if self.mode != "auto" else "paper" if made_in == "paper" else "reference"
        if made_in not in (None, mode):
            warnings = [*warnings, f"calibrated with mode {made_in!r}, used with {mode!r}"]
        if mode == "reference" and self.window != 2:
            raise SteerError("window", self.window, NO_WINDOW)
        update |= {
            "mode": mode,
            "artifact": HASH + artifact.content_hash,
            "initial": initial,
            "layers": [artifact.behind],
            "warnings": warnings,
        }
        return self.model_copy(update=update)


def constants_of(artifact: Artifact) -> Constants:
    """The thresholds and amplitudes of an artifact, for a vector that points towards over-thinking.

    Raises:
        SteerError: they are missing or make no sense.
    """
    given = dict(artifact.description.constants)
    given.pop("initial", None)
    try:
        constants = Constants(**given)
    except TypeError as error:
        names = ", ".join(Constants.__dataclass_fields__)
        raise SteerError("artifact", sorted(given), f"one with the constants {names} ({error})") from error
    if not (0 <= constants.q25c < constants.q75c < 1 and 0 <= constants.q25v < constants.q75v):
        raise SteerError("artifact", given, "one with 0 <= q25c < q75c < 1 and 0 <= q25v < q75v")
    if not (constants.low < 0 and constants.floor < 0 <= constants.ceiling):
        raise SteerError("artifact", given, "one with low and floor below 0, and ceiling at least 0")
    if artifact.description.sign == "none":
        raise SteerError("artifact", "sign none", "one that says towards_overthinking or away_from_overthinking")
    return constants
