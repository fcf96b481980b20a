"""Prompts: text files, one for each kind of answer and each modality.

A folder holds ``three/natural.txt``, ``three/code.txt``, and so on: ``ANSWERS/MODALITY.txt``. In it ``[[question]]`` stands
for the question, and ``[[examples]]`` for the content of ``MODALITY.examples.txt`` beside it, or for nothing. The content of
``MODALITY.system.txt``, if there is one, becomes a system message. Nothing else is replaced, and what is put in is not
looked at again: braces, tags and brackets in a question are text.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_steer.errors import SteerError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

LONGEST = 200_000
_FIELD = re.compile(r"\[\[(question|examples)\]\]\n?")
_ANY_FIELD = re.compile(r"\[\[(\w+)\]\]")


def messages(
    question: str, answers: str, modality: str, *, examples: bool, folder: str | None = None
) -> list[dict[str, Any]]:
    """The chat messages that ask a question in one modality.

    Raises:
        SteerError: a file of the folder is missing, or lacks a field.
    """
    template, worked, system = _load(folder, answers, modality, examples)

    def fill(match: re.Match[str]) -> str:
        text = question if match[1] == "question" else worked
        return text + "\n" if text and match[0].endswith("\n") else text

    asked = {"role": "user", "content": _FIELD.sub(fill, template)}
    return [{"role": "system", "content": system}, asked] if system else [asked]


def _load(folder: str | None, answers: str, modality: str, examples: bool) -> tuple[str, str, str]:
    """Template, examples, system message."""
    root: Traversable = files("llm_steer.prompts") / "mixture_of_thought" if folder is None else Path(folder).expanduser()
    name = f"{answers}/{modality}.txt"
    template = _text(root, name, folder)
    fields = _ANY_FIELD.findall(template)
    if "question" not in fields:
        raise SteerError("prompts", folder, f"a folder whose {name} has the field [[question]]")
    if unknown := [field for field in fields if field not in ("question", "examples")]:
        raise SteerError("prompts", folder, f"a folder whose {name} has no other fields than [[question]] and [[examples]], "
                         f"not [[{unknown[0]}]]")  # fmt: skip
    worked = ""
    if examples:
        if "examples" not in fields:
            raise SteerError("prompts", folder, f"a folder whose {name} has the field [[examples]], with examples=true")
        worked = _text(root, f"{answers}/{modality}.examples.txt", folder)
    return template, worked, _text(root, f"{answers}/{modality}.system.txt", folder, optional=True)


def _text(root: Traversable, name: str, folder: str | None, *, optional: bool = False) -> str:
    path = root.joinpath(*name.split("/"))
    if not path.is_file():  # a pipe is none: reading it might not end
        if optional:
            return ""
        raise SteerError("prompts", folder, f"a folder with a readable file {name} (there is none)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SteerError("prompts", folder, f"a folder with a readable file {name} ({reason})") from error
    if len(text) > LONGEST:
        raise SteerError("prompts", folder, f"a folder whose {name} has at most {LONGEST} characters")
    return text.removesuffix("\n")
