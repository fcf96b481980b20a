"""What one run is: the same fields on the command line, in YAML and in ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llm_steer.eval.settings import Strict, validated
from pydantic import Field

from llm_steer.errors import SteerError, did_you_mean
from llm_steer.formats import from_option, from_yaml_file


class RunConfig(Strict):
    """A run. What is left out of ``sampling`` is the task's."""

    model: str
    """A folder or a Hugging Face id; with ``urls``, the served name."""
    tasks: list[str] = Field(min_length=1)
    steer: list[str | dict[str, Any]] = Field(default=["none"])
    samples: int = Field(default=1, ge=1, le=10_000)
    """Answers to each problem with each method."""
    seed: int = Field(default=0, ge=0, lt=2**62)
    out: str
    engine: Literal["auto", "hf", "vllm", "url"] = "auto"
    """``auto``: url if there are urls, vllm if it is installed and the machine has a GPU, else hf."""
    urls: list[str] = Field(default_factory=list)
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the servers' key."""
    parallel: int = Field(default=32, ge=1)
    """Requests at a time, at each server."""
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds in which a server must answer a request."""
    data: dict[str, str] = Field(default_factory=dict)
    """Files of rows by task, in place of the hub."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many problems of each task."""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template (``enable_thinking``)."""
    dtype: str = "auto"
    device: str = "auto"
    """Of the hf engine."""
    batch_size: int = Field(default=16, ge=1)
    """Of the hf engine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``vllm.LLM`` or ``from_pretrained``."""
    trace: bool = True
    """Keep what steering did to each answer."""
    graders: int = Field(default=1, ge=1, le=64)
    """Grading processes."""

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """A task's sampling with this run's over it."""
        own = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        return {**defaults, **{name: value for name, value in own.items() if value is not None}}


def read(file: Path | None, options: Mapping[str, Any], settings: Sequence[str] = (), kind: type[Strict] = RunConfig) -> Any:
    """A configuration from a YAML file, options over it, and ``key=value`` settings over both.

    Raises:
        SteerError: a field that does not exist, or a value that does not fit.
    """
    data: dict[str, Any] = {}
    if file is not None:
        loaded = from_yaml_file(file, "--config")
        if not isinstance(loaded, dict):
            raise SteerError("--config", str(file), "a YAML file with a mapping of names to values")
        data.update(loaded)
    data.update({key: value for key, value in options.items() if value is not None})
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise SteerError("--set", setting, "written key=value, or key.inner=value")
        _put(data, key.strip(), value, kind)
    return validated(kind, data, "")


def _put(data: dict[str, Any], key: str, text: str, kind: type[Strict]) -> None:
    name, *inner = key.split(".")
    field = kind.model_fields.get(name)
    if field is None:
        raise SteerError("--set", key, f"one of {', '.join(kind.model_fields)}{did_you_mean(name, kind.model_fields)}")
    value = from_option(text)
    if inner:
        place = data.setdefault(name, {})
        for part in inner[:-1]:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise SteerError("--set", key, f"a mapping at {name}, to set something inside of it")
        place[inner[-1]] = value
    elif str(field.annotation).startswith("list"):
        data[name] = text.split(",") if text else []
    else:
        data[name] = value
