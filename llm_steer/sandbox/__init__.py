"""Runs Python programs that a model wrote, and nobody has read.

The program runs in CPython that is compiled to WebAssembly: it has no files but the standard library, no network, no
processes and no threads, and a counted budget of instructions, memory and output. The WebAssembly runtime is in a worker
process, which is killed when the wall-clock limit passes. Everything comes from packages (extra ``sandbox``); nothing needs
root, namespaces or a container.

Whoever operates it can choose bubblewrap instead: :func:`allow`.
"""

from __future__ import annotations

from llm_steer.sandbox.limits import LONGEST, Limits, Outcome, until
from llm_steer.sandbox.pool import Backend, allow, allowed, available, close, run, warm_up

__all__ = ["LONGEST", "Backend", "Limits", "Outcome", "allow", "allowed", "available", "close", "run", "until", "warm_up"]
