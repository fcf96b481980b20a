"""The worker process: takes programs from standard input, one JSON document a line, and answers in the same way.

Started by path, with nothing of this package imported: what is not here cannot be reached from a program that breaks out.

Of WASI the program gets what an interpreter needs to start. Output goes to memory of this process and ends the program when
it is too much; there is no folder that it could open, and sockets and everything that changes a file are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

import wasmtime

BADF, NOSYS, NOTCAPABLE = 8, 52, 76
"""WASI error numbers."""
REFUSED = (
    "path_create_directory",
    "path_filestat_set_times",
    "path_link",
    "path_remove_directory",
    "path_rename",
    "path_symlink",
    "path_unlink_file",
    "fd_allocate",
    "fd_filestat_set_size",
    "fd_filestat_set_times",
    "fd_pwrite",
    "sock_accept",
    "sock_recv",
    "sock_send",
    "sock_shutdown",
)
WASI = "wasi_snapshot_preview1"


class TooMuchOutput(Exception):
    pass


class Exited(Exception):
    """The program ended itself, with a status; wasmtime's own takes those above 125 for a mistake."""

    def __init__(self, code: int) -> None:
        self.code = code


def leave(code: int) -> None:
    raise Exited(code)


class Output:
    """What a program writes to its standard output and standard error."""

    def __init__(self, limit: int) -> None:
        self.parts: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self.limit = limit
        self.full = False

    def write(self, caller: Any, fd: int, vectors: int, count: int, written: int) -> int:
        if fd not in self.parts:
            return BADF
        memory = caller["memory"]
        total = 0
        for i in range(count):
            head = memory.read(caller, vectors + 8 * i, vectors + 8 * i + 8)
            start, length = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
            room = self.limit - sum(map(len, self.parts.values()))
            self.parts[fd] += memory.read(caller, start, start + min(length, room))
            total += length
            if length > room:
                self.full = True
                raise TooMuchOutput
        memory.write(caller, total.to_bytes(4, "little"), written)
        return 0

    def text(self, fd: int) -> str:
        return self.parts[fd].decode(errors="replace")


def linker_for(engine: wasmtime.Engine, module: wasmtime.Module, output: Output) -> wasmtime.Linker:
    linker: Any = wasmtime.Linker(engine)
    linker.define_wasi()
    linker.allow_shadowing = True
    for item in module.imports:
        if item.name == "fd_write":
            linker.define_func(WASI, item.name, item.type, output.write, access_caller=True)
        elif item.name == "proc_exit":
            linker.define_func(WASI, item.name, item.type, leave)
        elif item.name in REFUSED:
            linker.define_func(WASI, item.name, item.type, lambda *_: NOTCAPABLE)
    return linker  # type: ignore[no-any-return]


def run(engine: wasmtime.Engine, module: wasmtime.Module, job: dict[str, Any]) -> dict[str, Any]:
    """Run one program, in an interpreter of its own."""
    output = Output(job["output"])
    store = wasmtime.Store(engine)
    store.set_fuel(job["fuel"])
    store.set_limits(memory_size=job["memory"], instances=1, memories=1, tables=4, table_elements=1_000_000)
    wasi = wasmtime.WasiConfig()
    began = time.perf_counter()
    try:
        # -S: no site module; hash seed: the same program prints the same.
        wasi.argv = ["python", "-B", "-S", "-c", job["code"]]
        wasi.env = [("PYTHONHASHSEED", "0"), ("PYTHONDONTWRITEBYTECODE", "1")]
        store.set_wasi(wasi)
        instance = linker_for(engine, module, output).instantiate(store, module)
        start: Any = instance.exports(store)["_start"]
        start(store)
        status = "ok"
    except Exited as end:
        status = "ok" if end.code == 0 else "error"
    except TooMuchOutput:
        status = "output"
    except wasmtime.Trap:
        status = "fuel" if store.get_fuel() == 0 else "crash"
    except (wasmtime.WasmtimeError, ValueError) as error:  # a program that is no C string; memory that is not to be had
        status = "output" if output.full else "crash"
        output.parts[2] += str(error).encode(errors="replace")[:1000]
    return {
        "status": "output" if output.full else status,
        "stdout": output.text(1),
        "stderr": output.text(2),
        "fuel": job["fuel"] - store.get_fuel(),
        "seconds": time.perf_counter() - began,
    }


def configuration() -> wasmtime.Config:
    """As the module was compiled: another one does not load it."""
    config = wasmtime.Config()
    config.consume_fuel = True
    config.wasm_threads = False
    return config


def confine() -> None:
    """What this process will not need is taken from it, should a program break out of the runtime."""
    with contextlib.suppress(ImportError):  # there is none on Windows
        import resource

        for what, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
            resource.setrlimit(what, (most, most))


def main(compiled: str) -> None:
    engine = wasmtime.Engine(configuration())
    module = wasmtime.Module.deserialize_file(engine, compiled)
    confine()
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        job = json.loads(line)
        # Whoever sent it kills this process first; it may be dead itself.
        alarm = threading.Timer(job["wall"] + 2, os._exit, (1,))
        alarm.daemon = True
        alarm.start()
        answer = run(engine, module, job)
        alarm.cancel()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
