"""Files of results that survive being killed: JSON Lines that only grow, and a lock on their folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llm_steer.errors import SteerError, shorten

SYNC_SECONDS = 1.0
"""A loss of power can take so much; a kill takes nothing."""


class Journal:
    """A JSON Lines file. A row is in it as a whole or not at all.

    What a kill left of a last, torn row is cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._synced = 0.0
        with _named(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = self._repair()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. May be called by several threads.

        Raises:
            SteerError: the file cannot be written; what it holds is whole.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with self._lock, _named(self.path):
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                self._size += len(line)
                if time.monotonic() - self._synced > SYNC_SECONDS:
                    os.fsync(self._file)
                    self._synced = time.monotonic()
            except OSError:
                os.ftruncate(self._file, self._size)
                raise

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def _repair(self) -> int:
        size = os.fstat(self._file).st_size
        block, end = 1 << 16, size
        while end:
            start = max(end - block, 0)
            newline = (
                os.pread(self._file, end - start, start).rfind(b"\n") if hasattr(os, "pread") else self._seek(start, end)
            )
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._file, end)
        return end

    def _seek(self, start: int, end: int) -> int:
        os.lseek(self._file, start, os.SEEK_SET)
        return os.read(self._file, end - start).rfind(b"\n")


def rows(path: Path, fields: Mapping[str, Any] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Rows of a journal; a torn last one, which is still being written, is left out.

    Args:
        fields: what every row has, with the type of each; it may have more.

    Raises:
        SteerError: a line is not what a journal holds.
    """
    if not path.exists():
        return
    with _named(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SteerError(
                    f"{path} line {number}", line.decode(errors="replace"), f"a JSON object ({error})"
                ) from error
            if problem := misshapen(row, fields):
                raise SteerError(f"{path} line {number}", line.decode(errors="replace"), f"a row of this file: {problem}")
            yield row


def misshapen(row: Any, fields: Mapping[str, Any]) -> str:
    """What is wrong with a JSON value that should be an object with these fields; nothing if it is one."""
    if not isinstance(row, dict):
        return "it is no JSON object"
    for name, kind in fields.items():
        if name not in row:
            return f"it has no {name!r}"
        if not isinstance(row[name], kind):
            return f"its {name!r} is {shorten(row[name], 40)}"
    return ""


def write_whole(path: Path, text: str) -> None:
    """Replace a file, or leave it as it was."""
    temporary = path.with_name(path.name + ".new")
    with _named(path):
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)


class FolderLock:
    """Keeps other runs out of a folder until this process ends, however it ends.

    Args:
        rank, ranks: of a run that several processes share; these let each other in.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        with _named(folder):
            self._new = [f for f in (folder, *folder.parents) if not f.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._files = [(folder / "lock").open("a")]
            shared = ranks > 1
            if shared:
                self._files.append((folder / f"lock-{rank}").open("a"))
        try:
            _lock(self._files[0], shared=shared)
            if shared:
                _lock(self._files[1], shared=False)
        except OSError as error:
            self.release()
            raise SteerError("--out", str(folder), "a folder that no other run is writing to") from error

    def release(self) -> None:
        """Let other runs in. A folder that was made for this one and holds nothing is taken away again."""
        for file in self._files:
            file.close()
        with contextlib.suppress(OSError):
            if self._new and {p.name for p in self._new[0].iterdir()} == {Path(file.name).name for file in self._files}:
                for file in self._files:
                    Path(file.name).unlink()
                for folder in self._new:
                    folder.rmdir()


def _lock(file: Any, *, shared: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


class _named:
    """Turns what the system says about a file into one line that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, OSError):
            return
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        valid = "on a disk with room for it" if full else "a place that can be written"
        kept = "; what was finished is kept, and the same command goes on from there" if full else ""
        raise SteerError("--out", str(self.path), f"{valid} ({error.strerror}){kept}") from error
