"""What a program may use, and what became of it, whatever runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

LONGEST = 200_000
"""Characters of a program."""


Status = Literal["ok", "error", "fuel", "output", "timeout", "crash", "stopped"]
"""``ok``: it ended with exit status 0; ``error``: with another one, as after an exception; ``fuel``, ``output``,
``timeout``: a limit; ``crash``: the interpreter itself broke (stack overflow, abort); ``stopped``: nobody waits for it any
longer (:func:`until`)."""

_needless: ContextVar[threading.Event | None] = ContextVar("llm_steer_sandbox_needless", default=None)
PATIENCE = 0.1
"""Seconds between two looks whether somebody waits still."""


@contextmanager
def until(needless: threading.Event) -> Iterator[None]:
    """Programs that this thread runs inside end, and do not begin, once the event is set."""
    token = _needless.set(needless)
    try:
        yield
    finally:
        _needless.reset(token)


def stopped() -> bool:
    """Nobody waits for the program that this thread runs."""
    needless = _needless.get()
    return needless is not None and needless.is_set()


@dataclass(frozen=True)
class Limits:
    """What one program may use. The WebAssembly interpreter itself takes 0.2e9 instructions to start."""

    fuel: int = 6_000_000_000
    """WebAssembly instructions, 1 to 2 seconds' worth. The same program always runs out at the same place. In bubblewrap,
    which counts none, a second of processor time for each 3e9, rounded up."""
    memory: int = 128 * 2**20
    """Bytes."""
    output: int = 64 * 1024
    """Bytes of standard output and standard error together."""
    wall: float = 20.0
    """Seconds, after which the process is killed: what waits burns no fuel."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    fuel: int = 0
    """Instructions that it took; 0 where they are not counted."""
    seconds: float = 0.0
