"""What an engine is told at start: its default steering, and what residual hooks need before the model is compiled.

The front end works it out, where the tokenizer and the artifacts are, and hangs it on vLLM's ModelConfig: no field, so that
it stays out of the compile hash; part of the object, so that it reaches every process. What shapes the compiled graph goes
into ``additional_config`` too, which the hash takes in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_steer import __version__, spec
from llm_steer.artifact import HASH, ModelIdentity, Shelf
from llm_steer.markers import Markers
from llm_steer.plugin import Params
from llm_steer.spec import Spec
from llm_steer.tokens import Vocabulary

DEFAULTS = "llm_steer_defaults"
"""Attribute of ModelConfig with the engine's default steering, as it was written, in wire form."""

TOLD = "llm_steer_told"
"""Attribute of ModelConfig with the rest, in JSON types; missing where nothing steers by default."""

HASHED = "llm_steer"
"""Key in ``additional_config``."""

FOLDER = "LLM_STEER_ARTIFACTS"
"""Environment variable: the folder whose subfolders are the artifacts that requests may name."""


@dataclass(frozen=True)
class Declared:
    """What a process reads back."""

    residual: Spec = ()
    """Plugins with residual hooks, resolved, in the order in which they act."""
    markers: Markers | None = None
    """None where nothing steers by default: requests bring the markers."""
    shelf: Shelf | None = None


def declare(engine_args: Any, model_config: Any, defaults: Spec) -> None:
    """Front end, at start.

    Raises:
        SteerError: a default that this model, its tokenizer or the artifacts do not allow.
    """
    setattr(model_config, DEFAULTS, spec.to_wire(defaults))
    if not defaults:  # not even a tokenizer is loaded
        return
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    vocabulary = vocabulary_of(tokenizer, model_config)
    boundaries = any(steer.plugin.needs_boundaries for steer in defaults)
    markers = vocabulary.markers(boundaries=boundaries) if vocabulary else Markers()
    told: dict[str, Any] = {"residual": [], "markers": markers.to_wire(boundaries=boundaries)}
    if asked := tuple(steer for steer in defaults if steer.plugin.steers_hidden_states()):
        model = ModelIdentity.of(
            model_config.hf_config, dtype=model_config.dtype, tokenizer=tokenizer if vocabulary else None
        )
        shelf = Shelf(model, folder(), paths=True)
        residual = spec.resolve(asked, vocabulary, shelf)
        told["residual"] = spec.to_wire(residual)
        told["shelf"] = {"model": model.model_dump(), "named": [str(path.resolve()) for path in shelf.read]}
        hashes = {steer.name: steer.params for steer in residual}
        wire = [[name, _by_hash(fields, hashes.get(name))] for name, fields in spec.to_wire(defaults)]
        setattr(model_config, DEFAULTS, wire)
        hashed = {"version": __version__, "residual": told["residual"]}
        engine_args.additional_config = {**(engine_args.additional_config or {}), HASHED: hashed}
    setattr(model_config, TOLD, told)


def read(model_config: Any) -> Declared:
    """What :func:`declare` has left, in any process."""
    told = getattr(model_config, TOLD, None)
    if told is None:
        return Declared()
    shelf, residual = None, spec.from_wire(told["residual"])
    if kept := told.get("shelf"):
        named = tuple(map(Path, kept["named"]))
        shelf = Shelf(ModelIdentity(**kept["model"]), folder(), named=named, declared=tuple(s.params for s in residual))
    return Declared(residual, Markers.from_wire(told["markers"]), shelf)


def vocabulary_of(tokenizer: Any, model_config: Any) -> Vocabulary | None:
    return Vocabulary(tokenizer, model_config.get_vocab_size()) if hasattr(tokenizer, "get_vocab") else None


def folder() -> Path | None:
    """Where artifacts lie that requests may name."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else None


def _by_hash(fields: dict[str, Any], resolved: Params | None) -> dict[str, Any]:
    """A default's parameters with artifacts by content hash, so that requests which change others never name a path."""
    found = {} if resolved is None else resolved.model_dump(mode="json")
    return {
        name: found[name] if isinstance(value, str) and str(found.get(name)).startswith(HASH) else value
        for name, value in fields.items()
    }
