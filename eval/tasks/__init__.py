"""Tasks: one YAML file each, in this folder or a user's own. ``docs/evaluation.md`` says how one is written."""

from .data import Item, Loaded, load
from .spec import TaskSpec, find, names

__all__ = ["Item", "Loaded", "TaskSpec", "find", "load", "names"]
