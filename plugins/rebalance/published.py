"""Vectors as the authors published them: a bare ``[hidden_size]`` tensor in a .pt file, constants in a table."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from llm_steer.artifact import MAX_TENSORS, Artifact, Description, ModelIdentity, tokenizer_hash
from llm_steer.errors import SteerError, did_you_mean

from .control import INITIAL, PRESETS


def read(path: Path, preset: str, tokenizer: Any = None) -> Artifact:
    """An artifact from a published vector.

    Args:
        path: the .pt file; read with ``weights_only``, so that nothing in it is executed.
        preset: the model that it is for, one of :data:`PRESETS`.
        tokenizer: that model's tokenizer, to be checked when the artifact is used; None: it is not.

    Raises:
        SteerError: no such model, or not a vector of its size.
    """
    known = PRESETS.get(preset)
    if known is None:
        raise SteerError("preset", preset, f"one of {', '.join(PRESETS)}{did_you_mean(preset, PRESETS)}")
    try:
        if path.stat().st_size > MAX_TENSORS:
            raise SteerError("vector", str(path), f"a file of at most {MAX_TENSORS} bytes")
        vector = torch.load(path, map_location="cpu", weights_only=True)
    except SteerError:
        raise
    except Exception as error:  # a damaged or malicious file makes the unpickler raise whatever it likes
        reason = str(error).split("\n")[0]
        raise SteerError("vector", str(path), f"a readable .pt file of plain tensors ({reason})") from error
    if not isinstance(vector, torch.Tensor) or vector.shape != (known.hidden_size,) or not vector.is_floating_point():
        found = list(vector.shape) if isinstance(vector, torch.Tensor) else type(vector).__name__
        raise SteerError("vector", found, f"a tensor of {known.hidden_size} numbers, as wide as {known.model}")
    if not bool(torch.isfinite(vector).all()) or not vector.any():
        raise SteerError("vector", "NaN, infinity or zero", "finite numbers, not all 0")
    description = Description(
        method="rebalance",
        model=ModelIdentity(
            id=known.model,
            architecture=known.architecture,
            hidden_size=known.hidden_size,
            num_layers=known.num_layers,
            tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        ),
        layer=known.layer,
        site="before",
        positions="delimiter",
        sign="towards_overthinking",
        constants={**vars(known.constants), "initial": INITIAL},
        calibration={"source": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "mode": "reference"},
    )
    return Artifact(description, {"vector": vector.float()})
