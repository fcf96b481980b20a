"""A calibrated method on disk: one folder with ``steer.json`` and ``vectors.safetensors``, checked against its model.

Never a pickle. What is refused and what is only a warning: an artifact made for another architecture, hidden size, depth
or tokenizer cannot mean the same thing and is refused; another checkpoint id, revision or dtype of the same shape may, and
is a warning that the trace records.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llm_steer.errors import SteerError

DESCRIPTION, TENSORS = "steer.json", "vectors.safetensors"
MAX_DESCRIPTION = 1_000_000


class ModelIdentity(BaseModel):
    """Which model an artifact belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = ""
    """Repository id or folder name, as it was loaded; informative."""
    revision: str | None = None
    dtype: str | None = None
    """``"bfloat16"`` etc.; informative."""
    architecture: str
    """``config.architectures[0]``."""
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    tokenizer: str | None = None
    """:func:`tokenizer_hash`; None where the method does not depend on tokens."""


class Description(BaseModel):
    """Contents of ``steer.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format_version: Literal[1] = 1
    method: str
    """Name of the plugin that it is for."""
    model: ModelIdentity
    layer: int = Field(ge=0)
    """Index of the decoder layer."""
    site: Literal["before", "after"]
    """Residual stream before or after that layer runs."""
    positions: str
    """Rule for the positions that are steered, in the method's own terms."""
    sign: Literal["towards_overthinking", "away_from_overthinking", "none"] = "none"
    """What adding the vector with a positive coefficient does."""
    constants: dict[str, float] = {}
    relative_dose: float | None = Field(default=None, ge=0)
    """Norm of what is added over the norm of the residual stream, at calibration."""
    calibration: dict[str, str | int | float | None] = {}
    """Hash of the data, number of problems, date ...; informative."""
    sha256: str = ""
    """Of the tensors file."""


@dataclass(frozen=True)
class Artifact:
    """An artifact in memory."""

    description: Description
    tensors: dict[str, torch.Tensor]

    @cached_property
    def content_hash(self) -> str:
        """Names what steers, independent of where it lies: sha256 over description and tensors."""
        text = self.description.model_copy(update={"calibration": {}}).model_dump_json()
        return hashlib.sha256(f"{text}{_tensors_hash(self.tensors)}".encode()).hexdigest()

    def save(self, folder: Path) -> Path:
        """Write the folder; existing files of an artifact are replaced."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / TENSORS)
        digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
        description = self.description.model_copy(update={"sha256": digest})
        (folder / DESCRIPTION).write_text(description.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return folder


@dataclass(frozen=True)
class Shelf:
    """The artifacts that a caller may name, for one model."""

    model: ModelIdentity
    folder: Path | None = None
    """Where names are looked up: its subfolders are the artifacts."""
    paths: bool = False
    """A caller may name any folder of this machine, too: for callers in this process, never for requests from outside."""

    def find(self, name: str, method: str) -> tuple[Artifact, list[str]]:
        """The artifact of that name, checked against the model, and warnings for the trace.

        Raises:
            SteerError: there is none, it is damaged, for another method, or made for another model.
        """
        raise NotImplementedError

    def open(self, content_hash: str, method: str) -> Artifact:
        """The artifact with that content, whatever its name: what workers are told."""
        raise NotImplementedError


def load(source: str | Path, method: str) -> Artifact:
    """Read an artifact from a folder.

    Raises:
        SteerError: it is missing, damaged, of another format, or for another method.
    """
    folder = Path(source)
    try:
        raw = (folder / DESCRIPTION).read_bytes()
        data = (folder / TENSORS).read_bytes()
    except OSError as error:
        raise SteerError("artifact", str(source), f"a folder with {DESCRIPTION} and {TENSORS} ({error})") from error
    if len(raw) > MAX_DESCRIPTION:
        raise SteerError("artifact", str(source), f"described in at most {MAX_DESCRIPTION} bytes of JSON")
    try:
        description = Description.model_validate(json.loads(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SteerError(f"artifact {source}: {field}", first["input"], first["msg"].lower()) from error
    except (ValueError, RecursionError) as error:
        raise SteerError("artifact", str(source), f"described by valid JSON in {DESCRIPTION} ({error})") from error
    if description.method != method:
        raise SteerError("artifact", str(source), f"made for {method}, but it is for {description.method}")
    if (digest := hashlib.sha256(data).hexdigest()) != description.sha256:
        raise SteerError(f"artifact {source}: {TENSORS}", digest, f"the file that {DESCRIPTION} names: {description.sha256}")
    return Artifact(description, _parse_tensors(source, data))


def check(artifact: Artifact, model: ModelIdentity) -> list[str]:
    """Compare an artifact with the model that loads it.

    Returns:
        Warnings, for the trace.

    Raises:
        SteerError: it cannot mean the same in this model.
    """
    made_for = artifact.description.model
    for field in ("architecture", "hidden_size", "num_layers", "tokenizer"):
        expected, found = getattr(made_for, field), getattr(model, field)
        if expected is not None and found is not None and expected != found:
            raise SteerError(f"artifact: {field}", expected, f"this model's: {found!r}")
    last = model.num_layers - (artifact.description.site == "after")
    if artifact.description.layer > last:
        raise SteerError("artifact: layer", artifact.description.layer, f"between 0 and {last} in this model")
    return [
        f"made for {field} {getattr(made_for, field)!r}, used with {getattr(model, field)!r}"
        for field in ("id", "revision", "dtype")
        if getattr(made_for, field) != getattr(model, field)
    ]


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of a tokenizer's pieces and ids."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(pieces, ensure_ascii=True).encode()).hexdigest()


def _parse_tensors(source: str | Path, data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        tensors = parse(data)
    except (SafetensorError, ValueError) as error:
        raise SteerError(f"artifact {source}: {TENSORS}", f"{len(data)} bytes", f"a safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all())):
            raise SteerError(f"artifact {source}: tensor {name}", str(tensor.dtype), "of a floating-point dtype and finite")
    return tensors


def _tensors_hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
