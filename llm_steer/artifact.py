"""A calibrated method on disk: one folder with ``steer.json`` and ``vectors.safetensors``, checked against its model.

Never a pickle. What is refused and what is only a warning: an artifact made for another architecture, hidden size, depth
or tokenizer cannot mean the same thing and is refused; another checkpoint id, revision or dtype of the same shape may, and
is a warning that the trace records.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llm_steer.errors import SteerError, did_you_mean

DESCRIPTION, TENSORS = "steer.json", "vectors.safetensors"
MAX_DESCRIPTION = 1_000_000
MAX_TENSORS = 1 << 30
"""Bytes; a larger file is not read."""
HASH = "sha256:"
"""What the content hash of an artifact begins with where it stands for the artifact's name."""
MAX_DOSE = 10.0
"""Largest norm of what is added, in norms of the residual stream at calibration."""
MAX_ELEMENT = 1e4
"""Largest number that is added to one element of the stream: well inside float16."""
NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ModelIdentity(BaseModel):
    """Which model an artifact belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = ""
    """Repository id or folder name, as it was loaded; informative."""
    revision: str | None = None
    dtype: str | None = None
    """``"bfloat16"`` etc.; informative."""
    quantization: str | None = None
    """``"awq"`` etc., as the configuration names it; informative."""
    architecture: str
    """``config.architectures[0]``."""
    hidden_size: int = Field(ge=0)
    """0 where the configuration does not tell: no artifact fits."""
    num_layers: int = Field(ge=0)
    tokenizer: str | None = None
    """:func:`tokenizer_hash`; None where the method does not depend on tokens."""

    @classmethod
    def of(cls, config: Any, *, architecture: str = "", dtype: Any = None, tokenizer: Any = None) -> ModelIdentity:
        """The identity of a loaded model: the same on every host.

        Args:
            config: its transformers configuration.
            architecture: its class, where the configuration does not name it.
            dtype: of its weights, a ``torch.dtype`` or its name; the configuration's if None.
            tokenizer: its tokenizer, or None if it has none.
        """
        text = config.get_text_config(decoder=True)
        name = str(getattr(config, "_name_or_path", "") or "")
        quantization = getattr(config, "quantization_config", None) or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        dtype = dtype if dtype is not None else getattr(config, "dtype", None)
        return cls(
            id=Path(name).name if Path(name).is_dir() else name,
            revision=getattr(config, "_commit_hash", None),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            quantization=None if method is None else str(getattr(method, "value", method)),
            architecture=(getattr(config, "architectures", None) or [architecture])[0],
            hidden_size=int(getattr(text, "hidden_size", None) or getattr(text, "d_model", None) or 0),
            num_layers=getattr(text, "num_hidden_layers", 0),
            tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        )


class Description(BaseModel):
    """Contents of ``steer.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

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
    """Norm of the vector over the mean norm of the residual stream where it is added: the dose of a coefficient of 1."""
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
        """Names what steers, independent of where it lies: sha256 over description and tensors, in hexadecimal."""
        text = self.description.model_copy(update={"calibration": {}, "sha256": ""}).model_dump_json()
        return hashlib.sha256(f"{text}{_tensors_hash(self.tensors)}".encode()).hexdigest()

    @property
    def behind(self) -> int:
        """Index of the decoder layer behind which the residual stream is steered; -1: before the first layer."""
        return self.description.layer - (self.description.site == "before")

    def vector(self, name: str = "vector") -> torch.Tensor:
        """One of the tensors as a direction in the residual stream, ``[hidden_size]``.

        Raises:
            SteerError: there is none of this name and size.
        """
        size = self.description.model.hidden_size
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != (size,):
            found = ", ".join(f"{key} {list(value.shape)}" for key, value in self.tensors.items()) or "no tensors"
            raise SteerError("artifact", found, f"one with a tensor {name!r} of {size} numbers")
        return tensor

    def save(self, folder: Path) -> Path:
        """Write the folder; existing files of an artifact are replaced."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / TENSORS)
        digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
        description = self.description.model_copy(update={"sha256": digest})
        (folder / DESCRIPTION).write_text(description.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return folder

    def publish(self, repository: str) -> None:
        """Save to a repository of the Hugging Face hub, which is made if it is not there (private)."""
        from tempfile import TemporaryDirectory

        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        with TemporaryDirectory() as folder:
            api.upload_folder(repo_id=repository, folder_path=self.save(Path(folder)), commit_message="llm_steer artifact")


@dataclass(frozen=True)
class Shelf:
    """The artifacts that a caller may name, for one model. What was read once is kept for as long as its files stay."""

    model: ModelIdentity
    folder: Path | None = None
    """Where names are looked up: its subfolders are the artifacts."""
    paths: bool = False
    """A caller may name any folder of this machine, and any repository of the Hugging Face hub, too: for callers in this
    process, never for requests from outside."""
    named: tuple[Path, ...] = ()
    """Folders of single artifacts that were named at start: found by content hash alone."""
    declared: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """Resolved parameters of the plugins that were declared at start: what else requests may choose among."""
    _read: dict[Path, tuple[tuple[int, ...], Artifact]] = field(default_factory=dict, repr=False, compare=False)
    _opened: dict[str, Artifact] = field(default_factory=dict, repr=False, compare=False)

    def find(self, name: str, method: str | None) -> tuple[Artifact, list[str]]:
        """The artifact of that name, checked against the model, and warnings for the trace.

        Args:
            name: of a subfolder of ``folder``; ``sha256:`` and a content hash; with ``paths`` also a folder or a repository.
            method: what it must have been made for; None: anything.

        Raises:
            SteerError: there is none, it is damaged, for another method, or made for another model.
        """
        artifact = self._named(name, method)
        return artifact, check(artifact, self.model)

    def open(self, content_hash: str, method: str | None) -> Artifact:
        """The artifact with that content, whatever its name: what workers are told.

        Args:
            content_hash: with ``sha256:`` before it or without.
        """
        content_hash = content_hash.removeprefix(HASH)
        if content_hash not in self._opened:
            for folder in self._folders():
                try:
                    self._load(folder, None)
                except SteerError:
                    continue  # a damaged neighbour is for whoever asks for it
        artifact = self._opened.get(content_hash)
        if artifact is None:
            raise SteerError("artifact", HASH + content_hash, "the content hash of an artifact that lies here")
        _check_method(artifact.description, method, HASH + content_hash)
        return artifact

    @property
    def read(self) -> list[Path]:
        """The folders of what was read so far."""
        return list(self._read)

    def names(self) -> list[str]:
        """What can be named, sorted."""
        return sorted(path.name for path in self._folders(named=False))

    def _named(self, name: str, method: str | None) -> Artifact:
        if name.startswith(HASH):
            return self.open(name, method)
        if NAME.fullmatch(name) and self.folder is not None and (self.folder / name).is_dir():
            try:
                return self._load(self.folder / name, method)
            except SteerError as error:  # a client is told the name that it gave, not where the operator keeps it
                at = f"{self.folder}{os.sep}"
                value = error.value.replace(at, "") if isinstance(error.value, str) else error.value
                raise SteerError(error.field.replace(at, ""), value, error.valid.replace(at, "")) from error
        if not self.paths:
            known = self.names()
            valid = f"one of {', '.join(known)}{did_you_mean(name, known)}" if known else "left out: no artifacts lie here"
            raise SteerError("artifact", name, valid)
        if REPOSITORY.fullmatch(name) and not os.path.exists(name):
            return self._load(download(name), method)
        return self._load(Path(name), method)

    def _folders(self, *, named: bool = True) -> Iterator[Path]:
        if self.folder is not None and self.folder.is_dir():
            yield from (path for path in sorted(self.folder.iterdir()) if (path / DESCRIPTION).is_file())
        if named:
            yield from self.named

    def _load(self, folder: Path, method: str | None) -> Artifact:
        try:
            stats = [(folder / name).stat() for name in (DESCRIPTION, TENSORS)]
        except (OSError, ValueError):
            return load(folder, method)  # which says what is missing
        stamp = tuple(number for s in stats for number in (s.st_mtime_ns, s.st_size, s.st_ino))
        known = self._read.get(folder)
        if known is None or known[0] != stamp:
            known = (stamp, load(folder, None))
            self._read[folder] = known
            self._opened[known[1].content_hash] = known[1]
        _check_method(known[1].description, method, str(folder))
        return known[1]


def download(repository: str) -> Path:
    """The folder of an artifact on the Hugging Face hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=[DESCRIPTION, TENSORS]))
    except Exception as error:  # whatever the network, the hub or the cache has to say
        raise SteerError("artifact", repository, f"a folder, or a repository of the Hugging Face hub ({error})") from error


def load(source: str | Path, method: str | None) -> Artifact:
    """Read an artifact from a folder.

    Args:
        method: what it must have been made for; None: anything.

    Raises:
        SteerError: it is missing, damaged, of another format, or for another method.
    """
    folder = Path(source)
    raw = _read(source, DESCRIPTION, MAX_DESCRIPTION)
    data = _read(source, TENSORS, MAX_TENSORS)
    try:
        description = Description.model_validate(json.loads(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SteerError(f"artifact {source}: {where}", first["input"], first["msg"].lower()) from error
    except (ValueError, RecursionError) as error:
        raise SteerError("artifact", str(source), f"described by valid JSON in {DESCRIPTION} ({error})") from error
    _check_method(description, method, str(source))
    if (digest := hashlib.sha256(data).hexdigest()) != description.sha256:
        raise SteerError(f"artifact {source}: {TENSORS}", digest, f"the file that {DESCRIPTION} names: {description.sha256}")
    return Artifact(description, _parse_tensors(folder, data))


def _read(source: str | Path, name: str, limit: int) -> bytes:
    path = Path(source) / name
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for a writer
            raise OSError(f"{name} is no file")
        if found.st_size > limit:
            raise SteerError(f"artifact {source}: {name}", f"{found.st_size} bytes", f"a file of at most {limit} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, SteerError):
            raise
        raise SteerError("artifact", str(source), f"a folder with {DESCRIPTION} and {TENSORS} ({error})") from error


def _check_method(description: Description, method: str | None, source: str) -> None:
    if method is not None and description.method != method:
        raise SteerError("artifact", source, f"made for {method}, but it is for {description.method}")


def check(artifact: Artifact, model: ModelIdentity) -> list[str]:
    """Compare an artifact with the model that loads it.

    Returns:
        Warnings, for the trace.

    Raises:
        SteerError: it cannot mean the same in this model.
    """
    made_for = artifact.description.model
    for name in ("architecture", "hidden_size", "num_layers", "tokenizer"):
        expected, found = getattr(made_for, name), getattr(model, name)
        if expected is not None and found is not None and expected != found:
            raise SteerError(f"artifact: {name}", expected, f"this model's: {found!r}")
    last = model.num_layers - (artifact.description.site == "after")
    if artifact.description.layer > last:
        raise SteerError("artifact: layer", artifact.description.layer, f"between 0 and {last} in this model")
    return [
        f"made for {name} {getattr(made_for, name)!r}, used with {getattr(model, name)!r}"
        for name in ("id", "revision", "dtype", "quantization")
        if getattr(made_for, name) != getattr(model, name)
    ]


def check_dose(field: str, value: float, vector: torch.Tensor | float, dose: float | None) -> None:
    """Raise ``SteerError`` for a coefficient that drowns the residual stream.

    Args:
        vector: what the value is multiplied with, or its norm.
        dose: norm of the vector over that of the stream, if it is known.
    """
    largest = vector if isinstance(vector, float) else float(vector.double().abs().max())
    limit, what = MAX_ELEMENT / max(largest, 1e-30), f"at most {MAX_ELEMENT:g} added to an element"
    if dose and dose * limit > MAX_DOSE:
        limit, what = MAX_DOSE / dose, f"at most {MAX_DOSE:g} times the norm of the residual stream"
    if abs(value) > limit:
        raise SteerError(field, value, f"between {-limit:.4g} and {limit:.4g} ({what})")


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of a tokenizer's pieces and ids."""
    table = tokenizer.get_vocab()  # some over tiktoken's files have bytes for keys
    named = ((key.decode("latin-1") if isinstance(key, bytes) else key, token) for key, token in table.items())
    pieces = sorted(named, key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(pieces, ensure_ascii=True).encode()).hexdigest()


def _parse_tensors(source: str | Path, data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        tensors = parse(data)
    except (SafetensorError, ValueError) as error:
        raise SteerError(f"artifact {source}: {TENSORS}", f"{len(data)} bytes", f"a safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise SteerError(f"artifact {source}: tensor {name}", str(tensor.dtype), f"of one of the types {valid}")
        if not bool(torch.isfinite(tensor).all()):
            raise SteerError(f"artifact {source}: tensor {name}", "NaN or infinity", "finite numbers")
    return tensors


def _tensors_hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
