"""The other way to run a program: this machine's Python in namespaces of its own, made by ``bwrap``.

Faster than WebAssembly, and weaker: the program talks to this machine's kernel. It has no network, no processes but its own
one, no environment, no capabilities, no folder that it could write to; it can read ``/usr`` and the interpreter's folder.
Memory, processor time and files are limited by the kernel. Needs Linux, the ``bwrap`` command and user namespaces.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import subprocess
import sys
import time
from functools import cache

from llm_steer.sandbox.limits import PATIENCE, Limits, Outcome, Status, stopped

FUEL_A_SECOND = 3_000_000_000
NOBODY = 65534
"""As root, ``bwrap`` is started as this user: the kernel does not limit how many processes root has."""
_KILLED = 128
"""``bwrap`` ends with this plus the number of the signal that ended the program."""
_OVER = (_KILLED + 9, _KILLED + 24)  # SIGKILL, SIGXCPU: by the kernel, when processor time runs out
_BROKEN = (_KILLED + 4, _KILLED + 6, _KILLED + 7, _KILLED + 11)  # SIGILL, SIGABRT, SIGBUS, SIGSEGV

_PIECE = 1 << 16

_LAUNCHER = """
def _begin():
    import resource, sys
    code = sys.stdin.buffer.read().decode()
    for what, most in (("AS", {memory}), ("CPU", {cpu}), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 16), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most + (what == "CPU")))
    return compile(code, "<string>", "exec")
exec(_begin())
"""
"""Run as ``__main__`` inside: a program's own limits cannot be raised again."""


def problem() -> str | None:
    """Why it cannot be used here; None if it can. Tried once."""
    return _chosen()[1]


def run(code: str, limits: Limits) -> Outcome:
    """Run a program and wait for its end."""
    return _run(_chosen()[0], code, limits)


@cache
def _chosen() -> tuple[str, str | None]:
    """The interpreter, and why neither works. This one's folder may be closed to :data:`NOBODY`."""
    own, reason = os.path.realpath(sys.executable), ""
    if shutil.which("bwrap") is None:
        return own, "the command bwrap is not installed (Debian: apt install bubblewrap)"
    for python in (own, "/usr/bin/python3"):
        try:
            tried = _run(python, "print(1)", Limits(wall=10.0))
        except OSError as error:
            return own, f"bwrap does not work here ({error})"
        if tried.stdout == "1\n":
            return python, None
        said = tried.stderr.strip().partition("\n")[0] or f"a program that prints 1 ends with {tried.status}"
        reason = reason or f"bwrap does not work here ({said})"
    return own, reason


def _run(python: str, code: str, limits: Limits) -> Outcome:
    began = time.perf_counter()
    root = os.geteuid() == 0
    process = subprocess.Popen(
        _command(python, limits),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath},
        cwd=os.path.abspath(os.sep),
        start_new_session=True,
        user=NOBODY if root else None,
        group=NOBODY if root else None,
        extra_groups=[] if root else None,
    )
    try:
        limit, (stdout, stderr) = _attend(process, code.encode(), limits, began + limits.wall)
    finally:
        process.kill()  # and with it everything inside
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
    return Outcome(limit or _status(process.returncode), stdout, stderr, seconds=time.perf_counter() - began)


def _attend(
    process: subprocess.Popen[bytes], code: bytes, limits: Limits, deadline: float
) -> tuple[Status | None, list[str]]:
    """Hand the program over, take what it writes until it ends. Which limit it passed, and what it wrote."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    limit: Status | None = None
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        for stream in written:
            selector.register(stream, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while limit is None and selector.get_map():
            left = deadline - time.perf_counter()
            ready = selector.select(min(max(left, 0), PATIENCE))
            if not ready and (stopped() or left <= PATIENCE):
                limit = "stopped" if stopped() else "timeout"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        code = code[os.write(key.fd, code[:_PIECE]) :]
                    except BrokenPipeError:
                        code = b""
                    if not code:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif part := os.read(key.fd, _PIECE):
                    room = limits.output - sum(map(len, written.values()))
                    written[key.fd] += part[:room]
                    limit = "output" if len(part) > room else limit
                else:
                    selector.unregister(key.fd)
    if limit is None:
        try:
            process.wait(max(deadline - time.perf_counter(), 0))
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            limit = "timeout"
    return limit, [part.decode(errors="replace") for part in written.values()]


def _status(code: int) -> Status:
    if code == 0:
        return "ok"
    return "fuel" if code in _OVER else "crash" if code in _BROKEN else "error"


def _command(python: str, limits: Limits) -> list[str]:
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--setenv", "PYTHONHASHSEED", "0", "--hostname", "sandbox"]
    folders = ["/usr", "/lib", "/lib64", "/lib32", "/bin"]
    if not python.startswith("/usr/"):
        folders.append(os.path.realpath(sys.base_prefix))
    for folder in folders:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    command += ["--remount-ro", "/", "--chdir", "/"]
    launcher = _LAUNCHER.format(memory=limits.memory, cpu=math.ceil(limits.fuel / FUEL_A_SECOND))
    # -P, -s, -S: of the modules only the standard library. Not -I, which would draw another hash seed each time.
    return [*command, python, "-P", "-s", "-S", "-B", "-c", launcher]
