"""The sandbox. What needs the compiled interpreter compiles it once on a machine (about 15 seconds)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llm_steer import MissingDependencyError, SteerError, UnsupportedError, sandbox
from llm_steer.sandbox import module, pool
from support.hostile import CONTAINED, GREEDY, SLEEPERS

pytest.importorskip("wasmtime")
SMALL = sandbox.Limits(fuel=1_500_000_000, wall=10)
SOME = [
    "read",
    "climb",
    "write",
    "connect",
    "fork bomb",
    "threads",
    "write to other descriptors",
    "sys tricks",
    "environment",
]

MOT = """
from dataclasses import dataclass
from typing import Optional

@dataclass
class Person:
    kind: Optional[bool] = None
    blue: Optional[bool] = None

anne = Person(kind=True)

def apply_premises() -> bool:
    before = (anne.kind, anne.blue)
    if anne.kind:
        anne.blue = True
    return (anne.kind, anne.blue) != before

def func() -> str:
    while apply_premises():
        pass
    return {True: "True", False: "False", None: "Uncertain"}[anne.blue]

if __name__ == "__main__":
    result = func()
    print(result)
"""


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    sandbox.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What programs try to reach; checked afterwards."""
    canary = tmp_path / "canary.txt"
    canary.write_text("tweet")
    mode = canary.stat().st_mode & 0o777
    monkeypatch.setenv("LLM_STEER_TEST_SECRET", "s3cret")
    sandbox.close()  # workers that were started before do not have it
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield {
            "canary": repr(str(canary)),
            "canary_name": repr(canary.name),
            "folder": repr(str(tmp_path)),
            "target": repr(str(tmp_path / "target")),
            "port": str(server.getsockname()[1]),
            "secret": repr("s3cret"),
        }
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("canary.txt", "tweet")]
    assert canary.stat().st_mode & 0o777 == mode


def filled(code: str, host: dict[str, str]) -> str:
    for name, value in host.items():
        code = code.replace(f"{{{name}}}", value)
    return code


def contained(name: str, host: dict[str, str]) -> None:
    outcome = sandbox.run(filled(CONTAINED[name], host), SMALL)
    assert "ESCAPED" not in outcome.stdout + outcome.stderr.replace("print('ESCAPED')", ""), outcome
    assert "NameError" not in outcome.stdout + outcome.stderr, outcome  # a mistake in the attack itself
    assert "SyntaxError" not in outcome.stdout + outcome.stderr, outcome
    assert outcome.status in ("ok", "error", "fuel", "crash")


def test_a_program() -> None:
    assert sandbox.run("print(1)").stdout == "1\n"
    outcome = sandbox.run(MOT)
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", "True\n", "")
    assert outcome.fuel > 100_000_000


def test_what_programs_need() -> None:
    code = "import math, itertools, functools, collections, re, json, fractions, random, enum, abc, string, operator, copy\n"
    code += "print(math.comb(5, 2), fractions.Fraction(1, 3), re.sub('a', 'ü', 'abä'))\nimport sys\nsys.stderr.write('e')"
    outcome = sandbox.run(code)
    assert (outcome.stdout, outcome.stderr, outcome.status) == ("10 1/3 übä\n", "e", "ok")


def test_nothing_is_left_for_the_next_program() -> None:
    sandbox.run("import builtins, sys\nbuiltins.x = 1\nsys.modules['y'] = 2")
    assert "NameError" in sandbox.run("print(x)").stderr
    one, other = (sandbox.run("print(hash('a'), {'a', 'b', 'c'})").stdout for _ in range(2))
    assert one == other  # and hashes are not random


def test_errors() -> None:
    assert "ZeroDivisionError" in sandbox.run("1/0").stderr
    assert "SyntaxError" in sandbox.run("def").stderr
    for code, status in (("1/0", "error"), ("import sys; sys.exit(3)", "error"), ("import sys; sys.exit()", "ok")):
        assert sandbox.run(code).status == status
    assert sandbox.run("print('a\0b')").status == "error"
    assert sandbox.run("print('\ud800')").status == "error"
    assert sandbox.run("").status == "ok"
    with pytest.raises(SteerError, match="code"):
        sandbox.run("#" * 300_000)


@pytest.mark.parametrize("name", SOME)
def test_contained(name: str, host: dict[str, str]) -> None:
    contained(name, host)


@pytest.mark.parametrize("name", ["loop", "string", "flood", "one long line", "recursion"])
def test_greedy(name: str) -> None:
    code, statuses = GREEDY[name]
    outcome = sandbox.run(code, SMALL)
    assert outcome.status in statuses
    assert len(outcome.stdout) + len(outcome.stderr) <= SMALL.output + 10


def test_sleepers_are_killed() -> None:
    assert sandbox.run("import time; time.sleep(10**6)", sandbox.Limits(wall=0.5)).status == "timeout"
    assert sandbox.run("print(1)").stdout == "1\n"


def test_fuel_is_exact() -> None:
    code = "for i in range(10**9): pass"
    outcomes = [sandbox.run(code, sandbox.Limits(fuel=500_000_000)) for _ in range(2)]
    assert {o.status for o in outcomes} == {"fuel"}
    assert outcomes[0].fuel == outcomes[1].fuel == 500_000_000


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(set(CONTAINED) - set(SOME)))
def test_contained_too(name: str, host: dict[str, str]) -> None:
    contained(name, host)


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(GREEDY))
def test_greedy_too(name: str) -> None:
    test_greedy(name)


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(SLEEPERS))
def test_sleepers_are_killed_too(name: str) -> None:
    assert sandbox.run(SLEEPERS[name], sandbox.Limits(wall=0.5)).status in ("timeout", "error")


@pytest.mark.e2e
def test_in_parallel() -> None:
    """32 programs at once, good and bad ones."""
    before = sandbox.allowed()
    sandbox.allow(32)
    bad = ["while True: pass", MOT, "1/0", "x = 'a' * 10**9"]
    codes = [f"print({i})" if i % 2 else bad[i // 2 % 4] for i in range(64)]
    try:
        with ThreadPoolExecutor(32) as threads:
            outcomes = list(threads.map(lambda code: sandbox.run(code, SMALL), codes))
    finally:
        sandbox.allow(before)
    for i, outcome in enumerate(outcomes):
        if i % 2:
            assert outcome.stdout == f"{i}\n"
    assert {o.status for o in outcomes} == {"ok", "fuel", "error"}


def test_there_are_enough_hostile_programs() -> None:
    assert len(CONTAINED) + len(GREEDY) + len(SLEEPERS) >= 60


# -- who may run what --------------------------------------------------------------------------------------------------


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_pool", pool._Pool(1))


def test_off(own_pool: None) -> None:
    sandbox.allow(0)
    assert not sandbox.available()
    assert sandbox.allowed() == 0
    with pytest.raises(UnsupportedError, match="LLM_STEER_SANDBOX"):
        sandbox.run("print(1)")
    with pytest.raises(SteerError, match="parallel"):
        sandbox.allow(-1)
    sandbox.allow(3)
    assert sandbox.available()


def test_no_more_than_allowed_at_once(own_pool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.allow(2)
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()
    gate = threading.Barrier(2, timeout=10)

    class Fake:
        alive = True

        def __init__(self, path: Path) -> None:
            pass

        def run(self, code: str, limits: sandbox.Limits) -> sandbox.Outcome:
            with lock:
                running.append(1)
                most.append(len(running))
            gate.wait()
            with lock:
                running.pop()
            return sandbox.Outcome("ok")

        def kill(self) -> None:
            pass

    monkeypatch.setattr(pool, "_Worker", Fake)
    monkeypatch.setattr(pool, "compiled", lambda: Path("x"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(sandbox.run, ["x"] * 8))
    assert max(most) == 2


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no-such-package")
    with pytest.raises(MissingDependencyError, match=r"llm-steer-plugin\[sandbox\]"):
        module.interpreter()
    assert not sandbox.available()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, with a compiler that takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[list[str]] = []

    def compile_(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, b"native code %d" % len(calls))

    monkeypatch.setattr(module.subprocess, "run", compile_)
    module.compiled.cache_clear()
    yield tmp_path / "llm-steer" / "sandbox"
    module.compiled.cache_clear()


def again() -> bytes:
    module.compiled.cache_clear()
    return module.compiled().read_bytes()


def test_the_compiled_module_is_kept(cache: Path) -> None:
    assert again() == again() == b"native code 1"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.iterdir())


def test_a_changed_module_is_compiled_again(cache: Path) -> None:
    again()
    path = module.compiled()
    path.write_bytes(b"something else")
    assert again() == b"native code 2"
    path.with_suffix(".json").unlink()
    assert again() == b"native code 3"
    path.with_suffix(".json").write_text(json.dumps({"sha": 1}))
    assert again() == b"native code 4"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_what_others_may_write_is_not_loaded(cache: Path, tmp_path: Path) -> None:
    again()
    path = module.compiled()
    path.chmod(0o666)
    assert again() == b"native code 2"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)
    assert again() == b"native code 3"
    cache.chmod(0o777)
    module.compiled.cache_clear()
    with pytest.raises(UnsupportedError, match="writable by nobody else"):
        module.compiled()


@pytest.mark.parametrize("place", [".", ".."])
def test_a_folder_above_that_others_may_write_is_refused(cache: Path, place: str) -> None:
    again()
    folder = (cache.parent / place).resolve()
    for mode in (0o777, 0o775):
        folder.chmod(mode)
        with pytest.raises(UnsupportedError, match="writable by nobody else"):
            again()
    folder.chmod(0o755)
    assert again() == b"native code 1"


def test_folders_that_anybody_may_write_into_but_not_rename_in(cache: Path) -> None:
    cache.parent.parent.chmod(0o1777)  # as /tmp
    assert again()


@pytest.mark.parametrize("code", [1, 2, 125, 126, 255, -1])
def test_every_exit_status_is_an_error(code: int) -> None:
    outcome = sandbox.run(f"import sys\nprint('there')\nsys.exit({code})")
    assert (outcome.status, outcome.stdout) == ("error", "there\n")


def test_programs_end_when_nobody_waits() -> None:
    """One that runs is killed, those that wait for their turn do not begin."""
    needless = threading.Event()
    pool_ = pool._Pool(1)
    began = threading.Event()
    take = pool_._take

    def noted(module: Path) -> pool._Worker:
        began.set()
        return take(module)

    pool_._take = noted  # type: ignore[method-assign]

    def run() -> str:
        with sandbox.until(needless):
            return pool_.run("import time\ntime.sleep(1000)", sandbox.Limits(wall=300)).status

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(run) for _ in range(4)]
        assert began.wait(60)
        needless.set()
        assert [future.result(60) for future in running] == ["stopped"] * 4
    assert pool_._idle == []
    assert pool_.run("print(1)", sandbox.Limits()).stdout == "1\n"  # for others it goes on
    pool_.close()


def test_a_worker_that_dies_is_replaced() -> None:
    assert sandbox.run("print(1)").status == "ok"
    worker = pool._pool._idle[-1]
    worker._process.kill()
    worker._process.wait()
    assert sandbox.run("print(2)").stdout == "2\n"


def test_workers_end_with_their_parent() -> None:
    code = "from llm_steer import sandbox; sandbox.run('print(1)'); from llm_steer.sandbox import pool; "
    code += "print(pool._pool._idle[0]._process.pid, flush=True); import os; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    pid = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        threading.Event().wait(0.05)
    pytest.fail("the worker is still there")
