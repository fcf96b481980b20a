"""What a task is: where its problems come from, how they are asked, how answers are graded."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from llm_steer.eval.settings import Strict, validated
from pydantic import AfterValidator, Field, model_validator

from llm_steer.errors import SteerError, did_you_mean
from llm_steer.formats import from_yaml_file


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from error
    return text


class Column(Strict):
    """A value of a row."""

    any_of: list[str] = Field(min_length=1, alias="from")
    """Names it may have; the first that the row has is taken."""
    after: str | None = None
    """Only what follows the first occurrence of this text, if it occurs."""
    match: Annotated[str, AfterValidator(_pattern)] | None = None
    """Only the first group of this regular expression."""
    count: bool = False
    """How many items the list has, in place of the list."""
    bands: dict[str, int | None] = Field(default_factory=dict)
    """In place of a whole number, the name of the first band that it does not pass. Each has its highest number, or null."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, str | list):
            data = {"from": data}
        if isinstance(data, dict) and isinstance(data.get("from"), str):
            data = {**data, "from": [data["from"]]}
        return data


class Hub(Strict):
    """A data set on the Hugging Face hub."""

    path: str
    configs: list[str] = Field(default_factory=list)
    """Configurations, one after the other; the only one if none is named."""
    split: str = "test"
    revision: str | None = None


class Generated(Strict):
    """Problems that are drawn and not stored: the testbed's, as it asks them; or rows (``id``, ``context``, ``question``,
    ``answer``, ``level``) of ``logic_tasks``, which the task puts into its prompt."""

    task: Literal[
        "arithmetic", "words", "entailment-words", "entailment-code", "entailment-table", "ontology",
        "prontoqa", "rail2country", "rail2country-similes",
    ]  # fmt: skip
    levels: list[int] = Field(min_length=1)
    """Of trains: 3, their cars. Of PrOntoQA: hops."""
    count: int = Field(default=500, ge=1)
    """Problems of each level."""
    seed: int = 0


ROWS = ("prontoqa", "rail2country", "rail2country-similes")
"""Generated tasks whose problems are rows."""


class Choices(Strict):
    """Options of which one is right, shuffled for each problem with the run's seed."""

    correct: Column | None = None
    """The right option's text; ``wrong`` holds the columns of the others."""
    wrong: list[str] = Field(default_factory=list)
    options: Column | None = None
    """Or: a list of all options, with the right one's letter as the answer."""


class Drawing(Strict):
    """How answers are sampled unless the run says otherwise."""

    max_tokens: int = Field(default=32768, ge=1)
    temperature: float = Field(default=0.6, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class TaskSpec(Strict):
    """A task file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    title: str
    grader: Literal["math", "choice", "label", "exact", "program", "testbed"]
    source: str = ""
    """Where the data comes from, for people."""
    licence: str = ""
    hub: Hub | None = None
    generated: Generated | None = None
    columns: dict[str, Column] = Field(default_factory=dict)
    """Values for the prompt, by the name they have there."""
    answer: Column | None = None
    level: Column | None = None
    """What results are broken down by."""
    id: Column | None = None
    """A hash of the problem where there is none."""
    options: Column | None = None
    """Options ``A) ...`` that letters stand for, of label tasks."""
    choices: Choices | None = None
    labels: dict[str, list[str]] = Field(default_factory=dict)
    """Of label tasks: each label with other spellings of it."""
    prompt: str = ""
    """The user's message: ``{{name}}`` is a column's value; a list is written one item a line."""
    system: str | None = None
    thinking: Literal["optional", "required"] = "optional"
    """``required``: without an end of thinking, nothing was answered."""
    sampling: Drawing = Drawing()

    @model_validator(mode="after")
    def _complete(self) -> TaskSpec:
        if self.generated is None or self.generated.task in ROWS:
            if not self.prompt:
                raise ValueError("prompt: given, unless the problems are generated")
            if (self.answer is None) == (self.choices is None or self.choices.correct is None):
                raise ValueError("answer: the column of the right answer, unless choices.correct is given")
            known = {*self.columns, *(("options",) if self.choices else ())}
            if unknown := [name for name in placeholders(self.prompt) if name not in known]:
                raise ValueError(
                    f"prompt: without {{{{{unknown[0]}}}}}, which is none of columns ({', '.join(sorted(known))})"
                )
        if (self.grader == "label") != bool(self.labels):
            raise ValueError("labels: given for grader: label, and for no other")
        if (self.grader == "choice") != bool(self.choices):
            raise ValueError("choices: given for grader: choice, and for no other")
        return self


PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def placeholders(prompt: str) -> list[str]:
    return PLACEHOLDER.findall(prompt)


def names() -> list[str]:
    """Tasks that come with the package."""
    return sorted(Path(entry.name).stem for entry in resources.files(__package__).iterdir() if entry.name.endswith(".yaml"))


def find(task: str) -> TaskSpec:
    """A task by its name, or by the path of its YAML file.

    Raises:
        SteerError: there is no such task, or its file is not right.
    """
    if task in names():
        path = Path(str(resources.files(__package__) / f"{task}.yaml"))
    elif task.endswith((".yaml", ".yml")):
        path = Path(task)
    else:
        raise SteerError("--tasks", task, f"one of {', '.join(names())}, or a YAML file{did_you_mean(task, names())}")
    spec = validated(TaskSpec, from_yaml_file(path, "--tasks"), f"{path.name}: ")
    if task not in names() and spec.name in names():
        raise SteerError(f"{path.name}: name", spec.name, "another name: the built-in task has this one")
    return spec
