"""Programs in bubblewrap, where it works; and that it is said where it does not."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_steer import SteerError, UnsupportedError, sandbox
from llm_steer.sandbox import bubblewrap
from support.hostile import CONTAINED

SMALL = sandbox.Limits(fuel=1_500_000_000, wall=8)
SOME = ["read", "climb", "write", "unlink", "symlink", "connect", "fork bomb", "threads", "environment", "sys tricks"]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = sandbox.allowed()
    yield
    sandbox.allow(before)
    bubblewrap._chosen.cache_clear()


def test_it_is_said_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap._chosen.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    before = sandbox.allowed()
    with pytest.raises(UnsupportedError, match="bwrap is not installed"):
        sandbox.allow(2, "bubblewrap")
    assert sandbox.allowed() == before
    sandbox.allow(0, "bubblewrap")  # nothing is to run
    assert not sandbox.available()


def test_it_is_said_why_it_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: no permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:  # pytest's own: a worker of several has one more
        if folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    bubblewrap._chosen.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    monkeypatch.setattr(bubblewrap.os, "defpath", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"does not work here .*no permissions to create a new namespace"):
        sandbox.allow(2, "bubblewrap")


def test_one_that_may_not_be_run_is_said_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("not a program")
    bubblewrap._chosen.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "bwrap"))
    monkeypatch.setattr(bubblewrap.os, "defpath", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"does not work here \(.*[Pp]ermission denied"):
        sandbox.allow(2, "bubblewrap")


def test_no_other_backend() -> None:
    with pytest.raises(SteerError, match="backend"):
        sandbox.allow(2, "docker")  # type: ignore[arg-type]


# -- where it works ----------------------------------------------------------------------------------------------------


@pytest.fixture
def wrapped() -> None:
    bubblewrap._chosen.cache_clear()
    if reason := bubblewrap.problem():
        pytest.skip(reason)
    sandbox.allow(2, "bubblewrap")


@pytest.mark.usefixtures("wrapped")
def test_programs() -> None:
    assert sandbox.available()
    outcome = sandbox.run(
        "from dataclasses import dataclass\nprint(__name__, 'ü')\nimport sys\nsys.stderr.write('e')", SMALL
    )
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", "__main__ ü\n", "e")
    assert "ZeroDivisionError" in sandbox.run("1/0", SMALL).stderr
    assert sandbox.run("1/0", SMALL).status == sandbox.run("import sys; sys.exit(3)", SMALL).status == "error"
    one, other = (sandbox.run("print({'a', 'b', 'c'})", SMALL).stdout for _ in range(2))
    assert one == other
    assert sandbox.run("import os\nprint(dict(os.environ), open('/x', 'w'))", SMALL).status == "error"
    assert sandbox.run("#" * 190_000, SMALL).status == "ok"


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "fuel"),
        ("import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass", "fuel"),
        ("print(len(' ' * 10**9))", "error"),
        ("print('x' * 10**7)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 999)", "output"),
        ("import time\ntime.sleep(99)", "timeout"),
        ("import os, time\nos.close(1); os.close(2); time.sleep(99)", "timeout"),
        ("import os\nos.abort()", "crash"),
    ],
)
def test_greedy_programs(code: str, status: str) -> None:
    wall = 1.0 if status == "timeout" else 60.0  # processor time is what ends it, however busy the machine is
    outcome = sandbox.run(code, sandbox.Limits(fuel=1_500_000_000, wall=wall))
    assert outcome.status == status
    assert len(outcome.stdout) + len(outcome.stderr) <= SMALL.output


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize("name", SOME)
def test_contained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = tmp_path / "canary.txt"
    canary.write_text("tweet")
    monkeypatch.setenv("LLM_STEER_TEST_SECRET", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = CONTAINED[name]
        for key, value in {
            "canary": repr(str(canary)),
            "canary_name": repr(canary.name),
            "folder": repr(str(tmp_path)),
            "target": repr(str(tmp_path / "target")),
            "port": str(server.getsockname()[1]),
            "secret": repr("s3cret"),
        }.items():
            code = code.replace(f"{{{key}}}", value)
        outcome = sandbox.run(code, SMALL)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "ESCAPED" not in outcome.stdout, outcome
    assert "SyntaxError" not in outcome.stderr, outcome
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("canary.txt", "tweet")]
