"""Files and options as strict pydantic models, whose errors name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from llm_steer.errors import SteerError, did_you_mean


class Strict(BaseModel):
    """Unknown fields are errors, types are strict, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, populate_by_name=True
    )


M = TypeVar("M", bound=Strict)


def validated(model: type[M], data: Any, where: str) -> M:
    """Build a model from data.

    Args:
        where: put before the field's name in errors.

    Raises:
        SteerError: naming the first field that is not right.
    """
    if not isinstance(data, dict):
        raise SteerError(where.rstrip(": "), data, "a mapping of names to values")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        path = ".".join(str(part) for part in problem["loc"])
        if not path:  # a validator of the whole model names the field itself
            path, _, message = message.partition(": ")
            raise SteerError(where + path, data.get(path), message) from error
        if problem["type"] == "extra_forbidden":
            unknown = str(problem["loc"][-1])
            message = f"left out: there is no such field{did_you_mean(unknown, model.model_fields)}"
        elif problem["type"] == "missing":
            message = "given"
        elif problem["type"] == "too_short":
            message = f"a list with at least {problem['ctx']['min_length']}"
        raise SteerError(where + path, None if problem["type"] == "missing" else problem["input"], message) from error
