"""Parameters of constant_vector and random_vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from llm_steer.artifact import HASH, check_dose
from llm_steer.errors import SteerError
from llm_steer.plugin import Params
from llm_steer.tokens import Vocabulary

if TYPE_CHECKING:
    from llm_steer.artifact import Artifact, Shelf

Layer = Annotated[int, Field(ge=0, le=9999)]
ArtifactName = Annotated[str, Field(min_length=1, max_length=4096)]


class VectorParams(Params):
    """What both have: how much is added, where in the model and at which tokens."""

    coefficient: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """What the vector is multiplied with before it is added, in [-1000, 1000]. What is added must stay within 10 times the
    norm of the residual stream, where the artifact tells it."""
    layers: Annotated[list[Layer], Field(min_length=1, max_length=256)] | None = None
    """Decoder layers behind which the vector is added; the artifact's own if left out."""
    positions: Literal["output", "think", "delimiters", "output_delimiters", "all"] = "output"
    """Tokens that are steered. ``output``: every token that an output token is predicted from, the last prompt token and all
    generated ones; ``think``: those of them inside a think span; ``delimiters``: those of them that end a reasoning step
    inside a think span (of a tokenizer without think markers: anywhere, as ``output_delimiters``); ``all``: the prompt
    too."""
    warnings: list[str] = Field(default=[], max_length=16)
    """Filled in when the artifact is found: how it does not quite fit this model."""

    @field_validator("layers")
    @classmethod
    def _each_once(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and len(set(layers)) < len(layers):
            raise ValueError("a list that names each layer once")
        return layers

    def _settled(
        self, vocabulary: Vocabulary | None, shelf: Shelf | None, artifact: Artifact | None, warnings: list[str]
    ) -> dict[str, Any]:
        """Layers, positions and warnings, as they are after resolving."""
        update: dict[str, Any] = {}
        if artifact is not None:
            update["warnings"] = warnings
            update["layers"] = self.layers or [artifact.behind]
            if artifact.behind < 0 and self.layers is None:
                raise SteerError("artifact", "layer 0, before", "made for a place behind a layer; or give layers")
        if shelf is not None:
            for layer in update.get("layers", self.layers) or []:
                if layer >= shelf.model.num_layers:
                    raise SteerError("layers", layer, f"between 0 and {shelf.model.num_layers - 1} in this model")
        if vocabulary is not None and not vocabulary.has_think_markers:
            if self.positions == "think":
                raise SteerError("positions", "think", "output, delimiters or all: this tokenizer has no think markers")
            if self.positions == "delimiters":
                update["positions"] = "output_delimiters"
        return update


class ConstantVectorParams(VectorParams):
    """The artifact and its coefficient."""

    artifact: ArtifactName
    """The vector: name of an artifact on the server; in Python also its folder, or a repository of the Hugging Face hub. Any
    method's that holds a ``vector``. Where steering is carried out, ``sha256:`` and its content hash."""

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> ConstantVectorParams:
        if shelf is None:
            if not self.artifact.startswith(HASH):
                raise SteerError("artifact", self.artifact, "left out where no model is at hand")
            return self.model_copy(update=self._settled(vocabulary, None, None, []))
        artifact, warnings = shelf.find(self.artifact, None)
        check_dose("coefficient", self.coefficient, artifact.vector(), artifact.description.relative_dose)
        update = {"artifact": HASH + artifact.content_hash, **self._settled(vocabulary, shelf, artifact, warnings)}
        return self.model_copy(update=update)


class RandomVectorParams(VectorParams):
    """The seed and the norm."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the direction: the same on every machine."""
    norm: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of the vector, before it is multiplied with the coefficient; the artifact's if left out."""
    artifact: ArtifactName | None = None
    """Of an artifact to be matched: the random vector gets its norm and its layer unless these are given."""

    @model_validator(mode="after")
    def _check_together(self) -> RandomVectorParams:
        if self.artifact is None and (self.norm is None or self.layers is None):
            raise ValueError("artifact: given, or else both norm and layers")
        return self

    def resolve(self, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> RandomVectorParams:
        if self.artifact is None or shelf is None:
            if self.norm is None or self.layers is None:
                raise SteerError("artifact", self.artifact, "left out where no model is at hand: give norm and layers")
            check_dose("coefficient", self.coefficient, self.norm, None)
            return self.model_copy(update=self._settled(vocabulary, shelf, None, []))
        artifact, warnings = shelf.find(self.artifact, None)
        own = float(artifact.vector().double().norm())
        norm = self.norm or own
        if not 0 < norm <= 1e6:
            raise SteerError("artifact", f"norm {own:g}", "one whose vector has a norm above 0 and at most 1e6")
        dose = artifact.description.relative_dose
        check_dose("coefficient", self.coefficient, norm, None if dose is None else dose * norm / own)
        update = {"artifact": HASH + artifact.content_hash, "norm": norm}
        return self.model_copy(update={**update, **self._settled(vocabulary, shelf, artifact, warnings)})
