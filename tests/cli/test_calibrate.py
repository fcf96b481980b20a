"""``llm-steer calibrate``: data that is refused, published vectors, and a whole run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llm_steer.artifact import load
from llm_steer.cli.calibrate import app, encode, read_problems
from llm_steer.errors import SteerError
from support.vocabulary import BLANK


def test_problems(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]
    lines = [{"problem": "a", "answer": 1}, {"question": "b"}, {"prompt": "c"}, {"messages": chat}, {"problem": "e"}]
    data.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_problems(data, 4, None) == [[{"role": "user", "content": x}] for x in "abc"] + [chat]
    assert len(read_problems(data, 100, None)) == 5
    assert read_problems(data, 1, "be brief")[0][0] == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"--data, line 2: got '\{'; must be JSON"),
        ("[" * 100_000, "--data, line 2"),
        ("5", "line 2: got 5; must be an object with one of problem, question, prompt, messages"),
        ('{"text": "x"}', "line 2"),
        ('{"problem": 5}', "line 2"),
        ('{"messages": ["x"]}', "messages with role and content"),
        ('{"messages": [{"role": "user"}]}', "messages with role and content"),
    ],
)
def test_lines_that_hold_no_problem(tmp_path: Path, line: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(f'{{"problem": "a"}}\n{line}\n')
    with pytest.raises(SteerError, match=message):
        read_problems(data, 10, None)


def test_files_that_hold_none(tmp_path: Path) -> None:
    with pytest.raises(SteerError, match="a readable file of JSON lines"):
        read_problems(tmp_path / "nothing", 1, None)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(SteerError, match="at least one problem"):
        read_problems(tmp_path / "empty", 1, None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SteerError, match="a readable file of JSON lines"):
        read_problems(tmp_path / "binary", 1, None)


def test_without_a_chat_template(tiny_tokenizer) -> None:
    chats = [[{"role": "user", "content": "so the"}]]
    with_template = encode(tiny_tokenizer, chats, "m")
    template, tiny_tokenizer.chat_template = tiny_tokenizer.chat_template, None
    try:
        assert encode(tiny_tokenizer, chats, "m") == [with_template[0][:-1]]
    finally:
        tiny_tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "--limit"),
        (["--mode", "both"], "--mode: got 'both'; must be reference or paper"),
        (["--temperature", "nan"], "--temperature"),
        (["--layer", "2"], "--layer: got 2; must be a number at least 0 and at most 1"),
    ],
)
def test_options(options: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SteerError, match=message):
        run(folder, tmp_path, *options)


@pytest.fixture
def folder(tiny_model, tiny_tokenizer, tmp_path: Path) -> Path:
    """A tiny model on disk that likes blank lines, and problems."""
    model = tiny_model()
    with torch.no_grad():
        head = model.lm_head.weight
        head[BLANK] *= 10 * head.norm(dim=1).mean() / head[BLANK].norm()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    words = ["so", "the", "is", "a", "one", "two", "three", "four", "Wait", "but"]
    lines = [json.dumps({"problem": f"{a} {b}"}) for a in words for b in words]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder: Path, out: Path, *options: str) -> None:
    fixed = ["--data", str(folder / "data.jsonl"), "--out", str(out), "--max-tokens", "60", "--temperature", "1"]
    app(["rebalance", str(folder / "model"), *fixed, *options], standalone_mode=False)


def test_a_whole_run(folder: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SteerError, match="no layer is better than chance"):  # a random model
        run(folder, tmp_path / "out", "--limit", "24")
    assert (tmp_path / "out" / "report.json").is_file()
    assert not (tmp_path / "out" / "steer.json").exists()
    run(folder, tmp_path / "out", "--limit", "24", "--layer", "0", "--json")
    document = json.loads(capsys.readouterr().out)
    artifact = load(tmp_path / "out", "rebalance")
    assert document["artifact"] == artifact.content_hash
    assert document["problems"] == 24
    assert artifact.description.model.id == "model"
    assert (tmp_path / "out" / "report.png").is_file()
    run(folder, tmp_path / "out", "--limit", "32", "--layer", "1")  # goes on with 8 more
    shown = capsys.readouterr().out
    assert "layer      behind 1, as asked" in shown
    assert "AUC" in shown
    assert load(tmp_path / "out", "rebalance").description.layer == 1


def test_published(tmp_path: Path, capsys) -> None:
    torch.save(torch.ones(3584), tmp_path / "v.pt")
    options = ["published", str(tmp_path / "v.pt"), "--preset", "r1-distill-qwen-7b", "--out", str(tmp_path / "a")]
    app([*options, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    artifact = load(tmp_path / "a", "rebalance")
    assert (document["artifact"], document["layer"]) == (artifact.content_hash, 22)
    app(options, standalone_mode=False)
    assert f"before layer 22, sha256:{artifact.content_hash}" in capsys.readouterr().out.replace("\n", "")
