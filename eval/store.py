"""A run's folder.

================  =====================================================================================================
``run.json``      configuration, engine identity, tasks with checksums, methods
``problems.jsonl``  each problem as it was asked, with the right answer
``results.jsonl``   each answer, as soon as it is there; ``results-R.jsonl`` of process R where several share the run
``grades.jsonl``    the verdict on each, by the answer's key; ``eval regrade`` replaces them
``sessions.jsonl``  when each start of the run began
``dropped.jsonl``   servers that a start stopped asking, and why
``report.html``, ``report.md``, ``traces/``
================  =====================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_steer.eval.journal import misshapen, rows, write_whole

from llm_steer.errors import SteerError

FORMAT = 1

RUN, PROBLEMS, RESULTS, GRADES, SESSIONS, DROPPED = "run.json", "problems.jsonl", "results", "grades", "sessions", "dropped"

# What is read of each file, with its type.
_RUN_FIELDS = {"model": str, "engine": dict, "seed": int, "samples": int, "tasks": dict, "methods": dict, "notes": dict}
_METHOD_FIELDS = {"steer": object, "plugins": list, "loop": dict | None}
_TASK_FIELDS = {**dict.fromkeys(("title", "grader", "source", "sha256", "licence"), str), "sampling": dict}
_PROBLEM_FIELDS = {
    **dict.fromkeys(("task", "id", "gold", "grader", "thinking", "fingerprint"), str),
    **{"level": str | None, "options": list, "labels": dict, "messages": list},
}
_RESULT_FIELDS = {
    **dict.fromkeys(("key", "task", "id", "method", "finish", "text"), str),
    **dict.fromkeys(("sample", "tokens", "think_tokens", "reflections", "session"), int),
    **dict.fromkeys(("seconds", "at"), int | float),
    **{"think_exact": bool, "steering": dict | None},
}
_GRADE_FIELDS = {"key": str, "answer": str | None, "value": str | None, "correct": bool, "how": str, "version": int}
_DROPPED_FIELDS = {"session": int, "text": str}
_SESSION_FIELDS = {"session": int, "rank": int, "began": int | float}


class Folder:
    """Reads a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self) -> dict[str, Any] | None:
        """``run.json``; None where no run has begun."""
        try:
            run = json.loads((self.path / RUN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise SteerError("folder", str(self.path), "a folder, and not a file") from error
        except (OSError, ValueError) as error:
            raise SteerError("folder", str(self.path), f"one whose run.json is what a run wrote ({error})") from error
        if not isinstance(run, dict) or run.get("format") != FORMAT:
            found = run.get("format") if isinstance(run, dict) else None
            raise SteerError(str(self.path), found, f"a folder of format {FORMAT}: this run was written by another version")
        parts: list[tuple[str, Any, Mapping[str, Any]]] = [("", run, _RUN_FIELDS)]
        if not (problem := misshapen(run, _RUN_FIELDS)):
            parts = [(f" of method {label}", method, _METHOD_FIELDS) for label, method in run["methods"].items()]
            parts += [(f" of task {name}", task, _TASK_FIELDS) for name, task in run["tasks"].items()]
        for what, part, fields in parts:
            if problem := misshapen(part, fields):
                raise SteerError(str(self.path / RUN), None, f"what a run wrote{what}: {problem}")
        return run

    def needed(self) -> dict[str, Any]:
        """``run.json`` of a folder that must hold a run."""
        run = self.run()
        if run is None:
            raise SteerError("folder", str(self.path), "a folder that a run was written to: it has no run.json")
        return run

    def problems(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(row["task"], row["id"]): row for row in rows(self.path / PROBLEMS, _PROBLEM_FIELDS)}

    def results(self) -> Iterator[dict[str, Any]]:
        """Every stored answer once, those of all processes."""
        seen: set[str] = set()
        for path in self._parts(RESULTS):
            for row in rows(path, _RESULT_FIELDS):
                if row["key"] not in seen:
                    seen.add(row["key"])
                    yield row

    def grades(self) -> dict[str, dict[str, Any]]:
        return {row["key"]: row for path in self._parts(GRADES) for row in rows(path, _GRADE_FIELDS)}

    def sessions(self) -> list[dict[str, Any]]:
        return [row for path in self._parts(SESSIONS) for row in rows(path, _SESSION_FIELDS)]

    def dropped(self) -> list[dict[str, Any]]:
        return [row for path in self._parts(DROPPED) for row in rows(path, _DROPPED_FIELDS)]

    def _parts(self, name: str) -> list[Path]:
        return [self.path / f"{name}.jsonl", *sorted(self.path.glob(f"{name}-[0-9]*.jsonl"))]

    def write_run(self, run: Mapping[str, Any]) -> None:
        write_whole(self.path / RUN, json.dumps({"format": FORMAT, **run}, indent=1) + "\n")

    def replace_grades(self, grades: list[dict[str, Any]]) -> None:
        """Put new verdicts in place of all old ones."""
        write_whole(self.path / f"{GRADES}.jsonl", "".join(json.dumps(row) + "\n" for row in grades))
        for path in self._parts(GRADES)[1:]:
            path.unlink()
