"""``tokens``: what a tokenizer makes of words, markers and delimiters."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from llm_steer.cli.common import find_model
from support.vocabulary import BLANK, END_THINK, REFLECTION, THINK, VOCABULARY


def test_json(cli, folder):
    document = cli("tokens", str(folder), "--json").document
    assert document["ids"] == REFLECTION
    assert [row["form"] for row in document["matched"]] == ["wait", "Wait", "but", "But", "Alternatively"]
    assert document["matched"][0] == {"form": "wait", "id": REFLECTION[0], "piece": "wait", "text": "wait"}
    assert (document["vocabulary"], document["logits_width"]) == (VOCABULARY, VOCABULARY)
    assert [[piece["id"] for piece in ids] for ids in document["think"]["<think>"]] == [[THINK]]
    assert [[piece["id"] for piece in ids] for ids in document["think"]["</think>"]] == [[END_THINK]]
    assert document["reasoning_model"] is True
    assert document["step_delimiters"] == {"count": 1, "examples": [{"piece": "\n\n", "text": "\n\n", "id": BLANK}]}


def test_words_forms_and_skipped(cli, folder):
    document = cli("tokens", str(folder), "--words", "hmm,So", "-w", "the", "--ignore-case", "--json").document
    assert [row["form"] for row in document["matched"]] == ["Hmm", "so", "the"]
    assert document["skipped"] == ["hmm", "HMM", "So", "SO", "The", "THE"]
    text = cli("tokens", str(folder), "--words", "hmm").out
    assert "skipped" in text


def test_first_piece(cli, folder):
    document = cli("tokens", str(folder), "--words", "the so", "--multi-piece", "first", "--json").document
    assert [row["form"] for row in document["first_pieces"]] == ["the so"]
    assert "its first piece only" in cli("tokens", str(folder), "--words", "the so", "--multi-piece", "first").out


def test_terminal(cli, folder):
    result = cli("tokens", str(folder), "--leading-space")
    assert result.code == 0
    for part in ("'Wait'", "Alternatively", "<think>", str(END_THINK), "1 tokens hold a blank line"):
        assert part in result.out


@pytest.mark.parametrize("config", ["{}", None])
def test_a_tokenizer_alone_will_do_with_a_note(cli, folder, config):
    if config is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(config)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    result = cli("tokens", str(folder), "--json")
    assert result.document["logits_width"] == VOCABULARY
    assert "tokenizer's length" in result.err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["no/such/folder/at/all"], "MODEL"),
        (["./missing"], "MODEL"),
        (["not a model"], "MODEL"),
        (["{tmp}"], "MODEL"),
        (["{folder}/config.json"], "MODEL"),
        (["{folder}", "--words", "wait,,but"], "--words"),
        (["{folder}", "--words", ""], "--words"),
        (["{folder}", "--multi-piece", "last"], "--multi-piece"),
        (["{folder}", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_names_the_field(cli, folder, tmp_path, arguments, field):
    error = cli("tokens", "--json", *(a.format(tmp=tmp_path, folder=folder) for a in arguments)).error
    assert error["field"] == field


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """No network, and an empty cache."""
    asked = []

    def send(self, request, **_):
        asked.append(str(request.url))
        raise httpx.ConnectError("Name or service not known", request=request)

    import huggingface_hub.utils._http as http

    httpx = next(module for name, module in vars(http).items() if name.startswith("httpx"))
    monkeypatch.setattr(httpx.Client, "send", send)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return asked


@pytest.mark.parametrize(
    ("command", "field"), [(["tokens", "org/unknown"], "MODEL"), (["generate", "Hi", "--model", "org/unknown"], "--model")]
)
def test_a_model_that_cannot_be_had_is_one_line_at_once(cli, unreachable, command, field):
    result = cli(*command)
    assert result.code == 2
    assert result.err.startswith(f"llm-steer: {field}: got 'org/unknown'; must be a model's folder, or ")
    assert result.err.count("\n") == 1, "and no word of the hub's own"
    assert len(unreachable) == 1, "asked once: not tried again for a minute"


def test_a_model_that_the_hub_does_not_have(cli, monkeypatch, unreachable):
    from huggingface_hub.errors import RepositoryNotFoundError

    def metadata(url):
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", metadata)
    error = cli("tokens", "org/unknown", "--json").error
    assert (error["field"], error["value"]) == ("MODEL", "org/unknown")
    assert "the hub has none of that name" in error["valid"]


def test_a_model_in_the_cache_needs_no_hub(cli, folder, tmp_path, unreachable):
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--org--cached"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    assert find_model("org/cached", "MODEL") == ("org/cached", "org/cached")
    assert unreachable == []


def test_a_damaged_tokenizer_is_one_line(cli, folder):
    for file in folder.glob("tokenizer*"):
        file.write_text("not json")
    result = cli("tokens", str(folder))
    assert (result.code, result.out) == (2, "")
    assert "a model that transformers can load" in result.err
    assert "Traceback" not in result.err
