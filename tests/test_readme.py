"""The README and the pages in docs/: their code runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

import llm_steer
from llm_steer import cli
from llm_steer.cli import preview
from llm_steer.spec import parse_flat, parse_option

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    """Lines after a ``$``, with what is continued on the next lines."""
    found = []
    for body in blocks(page, "console"):
        for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
            found.append(part.strip())
    return found


def each(what) -> list:
    return [pytest.param(item, id=f"{page.stem}-{i}") for page in PAGES for i, item in enumerate(what(page))]


@pytest.mark.parametrize("source", each(lambda page: blocks(page, "python")))
def test_python_parses_and_takes_only_names_that_exist(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llm_steer":
            module = __import__(node.module, fromlist=["_"])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize("line", each(commands))
def test_commands_parse(line):
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    match words:
        case ["llm-steer", *arguments]:
            command: Any = typer.main.get_command(cli.app)
            name = "llm-steer"
            while hasattr(command, "commands"):
                with command.make_context(name, list(arguments)) as context:
                    name, command, arguments = command.resolve_command(context, list(arguments))
            with command.make_context(name, list(arguments)) as context:
                if name in ("generate", "serve"):
                    for spec in context.params["steer"]:
                        parse_option(spec)
                if name == "preview":
                    preview.parameters(context.params["name"], context.args)
        case ["export", *_]:
            pass
        case ["make", target, *_]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M)
        case ["inspect", "eval", _, "--model", model, *arguments]:
            assert model.startswith("llm-steer/")
            settings = dict(word.split("=", 1) for flag, word in pairwise(arguments) if flag == "-M")
            parse_option(settings.pop("steer"))
            assert settings.keys() <= {"engine", "batch_size", "dtype", "device"}
        case ["vllm" | "python", *arguments]:
            index = next((i for i, word in enumerate(arguments) if word.startswith("--logits-processor")), None)
            if index is not None:
                parse_option(arguments[index + 1])
        case ["pip", "install", *packages]:
            for extras in re.findall(r"(?:llm-steer-plugin|\.)\[([\w,-]+)\]", " ".join(packages)):
                declared = (ROOT / "pyproject.toml").read_text()
                assert all(re.search(rf"^{extra} = \[", declared, re.M) for extra in extras.split(","))
        case ["curl", *arguments]:
            if "-d" in arguments:
                parse_flat(
                    json.loads(arguments[arguments.index("-d") + 1])["vllm_xargs"], (parse_option("reflection_cycle"),)
                )
        case _:
            raise AssertionError(f"not checked: {line}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_request_keys_in_tables_are_valid(page):
    defaults = (parse_option("reflection_cycle"),)
    for cell in re.findall(r"^\| `(\{.*?\})` \|", page.read_text(encoding="utf-8"), re.M):
        if "..." not in cell:
            parse_flat(json.loads(cell), defaults)


def test_every_parameter_of_reflection_cycle_has_a_row():
    from llm_steer.plugins.reflection_cycle import ReflectionCycleParams

    page = (ROOT / "docs" / "reflection_cycle.md").read_text(encoding="utf-8")
    section = page.partition("## Parameters")[2].partition("## In a step-wise")[0]
    rows = dict(re.findall(r"^\| (`[\w`, ]+`) \|([^|]*)\|", section, re.M))
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named >= set(ReflectionCycleParams.model_fields)
    for name in ("amplitude", "period", "phase"):
        assert float(rows[f"`{name}`"]) == ReflectionCycleParams.model_fields[name].default


def test_the_hugging_face_example_runs(tmp_path, tiny_model, tiny_tokenizer, capsys):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (source,) = [body for body in blocks(ROOT / "README.md", "python") if "transformers" in body]
    source, replaced = re.subn(r'^name = ".*"$', f"name = {str(tmp_path)!r}", source, flags=re.M)
    assert replaced == 1
    space: dict = {}
    exec(compile(source, "README.md", "exec"), space)
    assert "'name': 'reflection_cycle'" in capsys.readouterr().out
    assert not hasattr(space["model"], "steering")


def test_the_offline_example_asks_for_what_is_valid():
    (source,) = [body for body in blocks(ROOT / "README.md", "python") if "from vllm" in body]
    tree = ast.parse(source)
    given = [
        ast.literal_eval(k.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        for k in n.keywords
        if k.arg == "extra_args"
    ]
    named = [
        ast.literal_eval(k.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        for k in n.keywords
        if k.arg == "logits_processors"
    ]
    defaults = tuple(parse_option(text) for text in named[0])
    first, second = (parse_flat(arguments, defaults).spec for arguments in given)
    assert first[0].params.amplitude == 7.0
    assert first[0].params.period == 1200.0
    assert second == ()


def test_the_plugin_of_the_page_steers(register, tiny_model, tiny_tokenizer):
    import torch

    source = next(body for body in blocks(ROOT / "docs" / "plugins.md", "python") if "class Hush" in body)
    space: dict = {}
    exec(compile(source, "docs/plugins.md", "exec"), space)
    register(space["Hush"])
    model = tiny_model("llama")
    inputs = {"input_ids": torch.tensor([[1, 20, 30]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    options = {**inputs, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**options)
    often = plain[0, 3].item()
    llm_steer.steer(model, "hush", token_id=often, by=1000.0, tokenizer=tiny_tokenizer)
    steered = model.generate(**options)
    assert often in plain[0, 3:]
    assert often not in steered[0, 3:]
    assert torch.equal(model.generate(**options, steer="off"), plain)
