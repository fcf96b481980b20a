"""Files that only grow, killed and filled up."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.eval.journal import FolderLock, Journal, rows, write_whole

from llm_steer import SteerError


@given(texts=st.lists(st.text(max_size=30), max_size=5), cut=st.integers(0, 200))
@settings(max_examples=40, deadline=None)
def test_a_torn_file_keeps_its_whole_rows(texts, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    journal = Journal(path)
    for n, text in enumerate(texts):
        journal.append({"n": n, "text": text})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut] if cut < len(whole) else b"")
    kept = path.read_bytes().count(b"\n")
    assert [row["n"] for row in rows(path)] == list(range(kept))
    journal = Journal(path)
    journal.append({"n": "next"})
    journal.close()
    assert [row["n"] for row in rows(path)] == [*range(kept), "next"]


def test_a_long_torn_row(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"n": 0}\n{"text": "' + "x" * 300_000)
    Journal(path).close()
    assert list(rows(path)) == [{"n": 0}]


def test_a_damaged_row_is_named(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"n": 0}\nnonsense\n{"n": 2}\n')
    with pytest.raises(SteerError, match=r"j.jsonl line 2"):
        list(rows(path))


FILL = """
import resource, sys
from pathlib import Path
from llm_steer.eval.journal import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = Journal(Path(sys.argv[1]))
for n in range(1000):
    journal.append({"n": n, "text": "x" * 80})
"""


def test_a_full_disk_keeps_whole_rows(tmp_path):
    path = tmp_path / "j.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, path], capture_output=True, text=True)
    assert "SteerError: --out" in done.stderr
    assert "room" in done.stderr
    kept = list(rows(path))
    assert path.read_bytes().endswith(b"\n")
    assert [row["n"] for row in kept] == list(range(len(kept)))
    assert 900 < path.stat().st_size <= 1000


def _write_forever(path: Path) -> None:
    journal = Journal(path)
    for n in range(10**9):
        journal.append({"n": n, "text": "x" * (n % 5000)})


def test_kill_nine(tmp_path):
    path = tmp_path / "j.jsonl"
    spawn = multiprocessing.get_context("fork")
    for _ in range(3):
        process = spawn.Process(target=_write_forever, args=(path,))
        process.start()
        size = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < size + 20_000:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        Journal(path).close()
        assert all(set(json.loads(line)) == {"n", "text"} for line in path.read_text().splitlines())


def test_two_runs_cannot_have_one_folder(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(SteerError, match="no other run"):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


def test_processes_of_one_run_share_it(tmp_path):
    first, second = FolderLock(tmp_path, 0, 2), FolderLock(tmp_path, 1, 2)
    for ranks in ((1, 2), (0, 1)):
        with pytest.raises(SteerError, match="no other run"):
            FolderLock(tmp_path, *ranks)
    first.release()
    second.release()


def test_a_file_is_replaced_or_left(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_whole(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SteerError, match="room"):
        write_whole(path, "new")
    assert path.read_text() == "old"
