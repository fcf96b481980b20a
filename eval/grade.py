"""Grading beside generation: stored answers in, stored verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llm_steer.eval.grading import GRADERS, Gold, MathPool
from llm_steer.eval.grading.graders import VERSION
from llm_steer.eval.journal import FolderLock
from llm_steer.eval.store import Folder

from llm_steer.errors import SteerError


class Grading:
    """Grades in threads of its own; what takes long runs in niced processes behind them.

    Args:
        write: gets each verdict as a row; called from any thread.
        kinds: of grader, as far as they are needed.
        workers: answers at a time.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], kinds: Collection[str], workers: int = 1) -> None:
        self._pool = MathPool() if "math" in kinds else None
        self._graders = {kind: GRADERS[kind](self._pool) for kind in kinds}
        self._write = write
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grading")
        self._running: set[Future[None]] = set()

    def submit(self, key: str, problem: Mapping[str, Any], text: str) -> None:
        """Grade a response when there is time.

        Args:
            problem: a row of ``problems.jsonl``.

        Raises:
            SteerError: an earlier verdict could not be written.
        """
        for future in [f for f in self._running if f.done()]:
            self._running.discard(future)
            future.result()
        self._running.add(self._threads.submit(self._grade, key, problem, text))

    def _grade(self, key: str, problem: Mapping[str, Any], text: str) -> None:
        verdict = self._graders[problem["grader"]].grade(
            gold_of(problem), text, thinking_required=problem["thinking"] == "required"
        )
        self._write({"key": key, **verdict.row(), "version": VERSION})

    def finish(self) -> None:
        """Wait for everything that was submitted."""
        for future in list(self._running):
            future.result()
        self._running.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gold_of(problem: Mapping[str, Any]) -> Gold:
    labels = {label: tuple(others) for label, others in problem["labels"].items()}
    return Gold(problem["gold"], tuple(problem["options"]), labels)


def regrade(path: Path, workers: int = 1) -> list[str]:
    """Grade a run's stored answers anew.

    Returns:
        Keys of the answers whose verdict changed.
    """
    folder = Folder(path)
    folder.needed()
    lock = FolderLock(path)
    try:
        before, problems = folder.grades(), folder.problems()
        kinds = {p["grader"] for p in problems.values()}
        if unknown := kinds - GRADERS.keys():
            raise SteerError("folder", str(path), f"graded by {', '.join(GRADERS)}, not by {min(unknown)!r}")
        rows: list[dict[str, Any]] = []
        with Grading(rows.append, kinds, workers) as grading:
            for result in folder.results():
                problem = problems.get((result["task"], result["id"]))
                if problem is None:
                    valid = f"a folder whose problems.jsonl has {result['id']!r} of {result['task']}, which an answer is to"
                    raise SteerError("folder", str(path), valid)
                grading.submit(result["key"], problem, result["text"])
            grading.finish()
        folder.replace_grades(rows)
        return [row["key"] for row in rows if before.get(row["key"], {}).get("correct") != row["correct"]]
    finally:
        lock.release()
