"""Sparse autoencoders from disk: weights and how a feature is read off them. Serving needs nothing else of their libraries.

Read are folders of SAELens >= 6 (``cfg.json``, ``sae_weights.safetensors``), of EleutherAI's sparsify (``cfg.json``,
``sae.safetensors``), of Gemma Scope (``params.npz``), and plain ones with any single ``*.safetensors`` that holds SAELens'
tensor names; and the same folders of a repository of the Hugging Face hub (``hub``).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from llm_steer.errors import SteerError, UnsupportedError

from .hub import download, is_hub_name

Architecture = Literal["standard", "topk", "batchtopk", "jumprelu", "gated"]
Normalize = Literal["none", "constant_norm_rescale", "layer_norm"]

ALIASES = {"batch_topk": "batchtopk", "relu": "standard"}
WEIGHTS = ("sae_weights.safetensors", "sae.safetensors")
GEMMA_SCOPE = "params.npz"
INFLATION = 20
"""How many times its size a compressed file of weights may take up: weights hardly compress."""


@dataclass(frozen=True)
class Features:
    """How features are read off a hidden state ``x``, all architectures alike.

    ``dot = x @ rows.T``; the value is ``scale * dot + bias`` where ``dot > gate`` and 0 elsewhere, and never negative.
    """

    rows: torch.Tensor
    """float32 ``[features, hidden_size]``."""
    scale: torch.Tensor
    """float32 ``[features]``, as are the next two."""
    bias: torch.Tensor
    gate: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Values of ``x``: ``[..., hidden_size]`` -> ``[..., features]``."""
        dot = x @ self.rows.T
        return torch.where(dot > self.gate, torch.relu(self.scale * dot + self.bias), 0.0)


@dataclass(frozen=True)
class Code:
    """All features of an SAE."""

    features: Features
    k: int = 0
    """Of a top-k SAE: how many of them are active at a token."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Code of ``x``: ``[..., hidden_size]`` -> ``[..., width]``."""
        code = self.features(x)
        return top_codes(code, self.k) if self.k else code


@dataclass(frozen=True)
class Sae:
    """A sparse autoencoder."""

    architecture: Architecture
    normalize: Normalize
    encoder: torch.Tensor
    """float32 ``[features, hidden_size]``."""
    encoder_bias: torch.Tensor
    """float32 ``[features]``, with what subtracting the decoder's bias from the input amounts to."""
    decoder: torch.Tensor
    """float32 ``[features, hidden_size]``."""
    decoder_bias: torch.Tensor
    """float32 ``[hidden_size]``."""
    threshold: torch.Tensor | None = None
    """``[features]``, of jumprelu."""
    magnitude: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scale and bias ``[features]`` of gated; its gate has ``encoder_bias``."""
    k: int = 0
    """Of topk."""
    hook: str = ""
    """Where it was trained, in its library's words."""

    @property
    def hidden_size(self) -> int:
        return self.encoder.shape[1]

    @property
    def width(self) -> int:
        return self.encoder.shape[0]

    def features(self, indices: torch.Tensor) -> Features:
        """Some features by themselves. A top-k SAE's without its top-k step, which takes the whole code."""
        rows, bias = self.encoder[indices], self.encoder_bias[indices]
        scale, gate = torch.ones_like(bias), -bias
        if self.threshold is not None:
            gate = self.threshold[indices] - bias
        if self.magnitude is not None:
            scale, bias = self.magnitude[0][indices], self.magnitude[1][indices]
        return Features(rows, scale, bias, gate)

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states as the encoder takes them, float32."""
        return normalized(x.float(), self.normalize)

    @property
    def code(self) -> Code:
        """Of prepared hidden states."""
        return Code(self.features(torch.arange(self.width)), self.k if self.architecture == "topk" else 0)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The whole code: ``[..., hidden_size]`` -> ``[..., width]``, float32."""
        return self.code(self.prepare(x))

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`encode`, nearly; without undoing ``normalize``."""
        return code @ self.decoder + self.decoder_bias


def top_codes(code: torch.Tensor, k: int) -> torch.Tensor:
    """Only the ``k`` largest values of each row."""
    top = code.topk(min(k, code.shape[-1]), dim=-1)
    return torch.zeros_like(code).scatter_(-1, top.indices, top.values)


def normalized(x: torch.Tensor, how: Normalize) -> torch.Tensor:
    if how == "constant_norm_rescale":
        scaled: torch.Tensor = x * (math.sqrt(x.shape[-1]) / x.norm(dim=-1, keepdim=True).clamp(min=1e-8))
        return scaled
    if how == "layer_norm":
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.std(-1, keepdim=True) + 1e-5)
    return x


def load_sae(source: str | Path, hidden_size: int | None = None) -> Sae:
    """Read an SAE.

    Args:
        source: a folder; or ``OWNER/REPO/FOLDER``, a folder of a repository of the Hugging Face hub, if there is no such
            folder here.
        hidden_size: of the model it is for.

    Raises:
        SteerError: nothing that can be read or reached, values that are not finite, or another width than the model's.
        UnsupportedError: an architecture or normalisation that is not known here.
    """
    folder = Path(source)
    if not folder.is_dir() and is_hub_name(str(source)):
        folder = download(str(source))
    config, tensors = _files(folder)
    if "encoder.weight" in tensors:
        sae = _sparsify(config, tensors)
    elif "W_enc" in tensors:
        sae = _saelens(config, tensors)
    else:
        valid = (
            "an SAE: tensors W_enc, b_enc, W_dec, b_dec (SAELens) or encoder.weight, encoder.bias, W_dec, b_dec (sparsify)"
        )
        raise SteerError("sae", f"{folder} with {', '.join(sorted(tensors)[:8])}", valid)
    if hidden_size is not None and sae.hidden_size != hidden_size:
        raise SteerError("sae", f"{folder}, made for hidden states of {sae.hidden_size}", f"made for {hidden_size}")
    return sae


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    named = [file for file in files if file.name in WEIGHTS]
    if not files and (folder / GEMMA_SCOPE).is_file():
        return _checked(folder, *_gemma_scope(folder / GEMMA_SCOPE))
    chosen = named or files
    if len(chosen) != 1:
        found = f"{len(chosen)} files *.safetensors" if folder.is_dir() else "no such folder"
        raise SteerError("sae", str(folder), f"a folder with one safetensors file ({found})")
    try:
        config = json.loads((folder / "cfg.json").read_text()) if (folder / "cfg.json").is_file() else {}
        if not chosen[0].is_file():  # reading a pipe would wait for a writer
            raise OSError(f"{chosen[0].name} is no file")
        tensors = load_file(chosen[0])
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise SteerError("sae", str(folder), f"a folder with valid files ({error})") from error
    if not isinstance(config, dict):
        raise SteerError(f"sae {folder}: cfg.json", config, "a JSON object")
    return _checked(folder, config, tensors)


def _gemma_scope(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Gemma Scope's own format, of which SAELens has no folder: JumpReLU, without subtracting the decoder's bias."""
    import zipfile

    import numpy as np

    try:
        with zipfile.ZipFile(file) as packed:
            sizes = [(entry.file_size, entry.compress_size) for entry in packed.infolist()]
        if any(size > INFLATION * max(stored, 4096) for size, stored in sizes):
            raise ValueError("it would take up far more room than weights that were compressed")
        with np.load(file, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise SteerError("sae", str(file), f"valid ({error})") from error
    return {"architecture": "jumprelu", "apply_b_dec_to_input": False}, tensors


def _checked(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise SteerError(f"sae {folder}: tensor {name}", "NaN or infinity", "finite")
    return config, tensors


def _take(tensors: dict[str, torch.Tensor], name: str, *shape: int) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape or not tensor.is_floating_point():
        found = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise SteerError(f"sae: tensor {name}", found, f"of shape {list(shape)}, of a floating-point type")
    return tensor.float()


def _matrix(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = tensors[name]
    if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
        found = f"{list(tensor.shape)} of {tensor.dtype}"
        raise SteerError(f"sae: tensor {name}", found, "a matrix with at least one feature, of a floating-point type")
    return tensor.float()


def _saelens(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Sae:
    weight = _matrix(tensors, "W_enc")
    size, width = weight.shape
    deduced = "jumprelu" if "threshold" in tensors else "gated" if "b_gate" in tensors else "standard"
    architecture = str(config.get("architecture", deduced))
    architecture = ALIASES.get(architecture, architecture)
    if architecture not in ("standard", "topk", "batchtopk", "jumprelu", "gated"):
        raise UnsupportedError(f"SAEs of architecture {architecture!r} are not read: use standard, topk, jumprelu or gated")
    normalize = str(config.get("normalize_activations") or "none")
    normalize = "none" if normalize == "expected_average_only_in" else normalize  # folded into the weights when saved
    if normalize not in ("none", "constant_norm_rescale", "layer_norm"):
        raise UnsupportedError(f"SAEs with normalize_activations={normalize!r} are not read: fold it into the weights")
    if config.get("reshape_activations", "none") not in ("none", None):
        raise UnsupportedError("SAEs of attention heads (reshape_activations) are not read: use one of the residual stream")
    encoder = weight.T.contiguous()
    decoder_bias = _take(tensors, "b_dec", size)
    shift = encoder @ decoder_bias if config.get("apply_b_dec_to_input", True) else torch.zeros(width)
    threshold = magnitude = None
    if architecture == "gated":
        bias = _take(tensors, "b_gate", width) - shift
        scale = _take(tensors, "r_mag", width).exp()
        magnitude = (scale, _take(tensors, "b_mag", width) - scale * shift)
    else:
        bias = _take(tensors, "b_enc", width) - shift
    if architecture == "jumprelu" or (architecture == "batchtopk" and "threshold" in tensors):
        threshold = _take(tensors, "threshold", width)
    k = config.get("k", 0)
    if architecture == "topk" and not (isinstance(k, int) and 0 < k <= width):
        raise SteerError("sae: k", k, f"between 1 and {width} in cfg.json of a topk SAE")
    metadata = config.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    hook = str(metadata.get("hook_name") or config.get("hook_name") or "")
    decoder = _take(tensors, "W_dec", width, size)
    return Sae(
        architecture, normalize, encoder, bias, decoder, decoder_bias, threshold, magnitude, int(k or 0), hook  # type: ignore[arg-type]
    )  # fmt: skip


def _sparsify(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Sae:
    encoder = _matrix(tensors, "encoder.weight")
    width, size = encoder.shape
    activation = str(config.get("activation", "topk"))
    kind = "transcoder" if config.get("transcode") else "signed" if config.get("signed") else activation
    if kind != "topk":
        raise UnsupportedError(f"sparsify SAEs of kind {kind!r} are not read: use one with activation topk")
    decoder_bias = _take(tensors, "b_dec", size)
    bias = _take(tensors, "encoder.bias", width) - encoder @ decoder_bias
    decoder, k = _take(tensors, "W_dec", width, size), config.get("k", 32)
    if not (isinstance(k, int) and 0 < k <= width):
        raise SteerError("sae: k", k, f"between 1 and {width} in cfg.json of a topk SAE")
    return Sae("topk", "none", encoder, bias, decoder, decoder_bias, k=k, hook=str(config.get("hookpoint", "")))
