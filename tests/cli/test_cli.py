"""The command line as a whole: help, exit codes, errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from llm_steer import MissingDependencyError, SteerError, UnsupportedError, __version__
from llm_steer.cli import app, common, run, show

ROOT = typer.main.get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, by the words that call it."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


COMMANDS = list(leaves(ROOT))


def test_help_lists_every_command(cli):
    result = cli("--help")
    assert result.code == 0
    names = {path[0] for path in COMMANDS}
    assert names >= {"generate", "show", "list", "tokens", "preview", "serve", "doctor", "calibrate", "eval", "rules"}
    assert all(name in result.out for name in names)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(cli, path):
    result = cli(*path, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_version(cli):
    assert cli("--version").out.strip() == __version__


def test_help_and_bad_options_need_no_torch():
    code = (
        "import sys\nfrom llm_steer.cli import run\nrun(['--help']); run(['generate', '--nonsense'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "error",
    [
        SteerError("amplitude", 1e9, "between -100 and 100"),
        UnsupportedError("this cannot be steered\nhere: do that"),
        MissingDependencyError("vllm", "vllm", "serving"),
    ],
)
def test_our_errors_are_one_line_and_exit_2(cli, monkeypatch, error):
    def fails(name):
        raise error

    monkeypatch.setattr(show, "get_plugin", fails)
    result = cli("show", "x")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"llm-steer: {' '.join(str(error).split())}\n"
    document = cli("show", "x", "--json").error
    assert document["message"] == str(error)
    assert document["field"] == getattr(error, "field", None)
    assert document["valid"] == getattr(error, "valid", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"x", [1, "a"], None])
def test_any_value_fits_into_a_json_error(cli, monkeypatch, value):
    def fails(name):
        raise SteerError("field", value, "something else")

    monkeypatch.setattr(show, "get_plugin", fails)
    assert cli("show", "x", "--json").error["field"] == "field"


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def fails(name):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(show, "get_plugin", fails)
    with pytest.raises(ZeroDivisionError):
        run(["show", "x"])


@pytest.mark.parametrize("arguments", [["nonsense"], ["show"], ["show", "a", "b"], ["--nonsense"]])
def test_bad_usage_points_to_help(cli, arguments):
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "--help" in result.err


def test_what_libraries_print_goes_to_standard_error(cli, monkeypatch):
    real = show.get_plugin

    def noisy(name):
        print("noise")
        return real(name)

    monkeypatch.setattr(show, "get_plugin", noisy)
    result = cli("show", "reflection_cycle", "--json")
    assert json.loads(result.out)["name"] == "reflection_cycle"
    assert "noise" in result.err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -c 'from llm_steer.cli import main; main()' preview reflection_cycle --length 200000 --json"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_ctrl_c_in_a_process_exits_130(tmp_path):
    code = (
        # As at a terminal, also where the tests are started in the background, which ignores Ctrl-C.
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from llm_steer.cli import main, show\n"
        f"def wait(name):\n    open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(60)\n"
        "show.get_plugin = wait\nmain(['show', 'x'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "x"),
        ({"amplitude": 5.0, "period": 37.5, "on": True, "form": "silver"}, "x:amplitude=5,period=37.5,on=true,form=silver"),
        ({"words": ["Wait"]}, 'x:{"words": ["Wait"]}'),
        ({"word": "true"}, 'x:{"word": "true"}'),
        ({"word": "a,b"}, 'x:{"word": "a,b"}'),
    ],
)
def test_a_spec_as_it_would_be_typed(parameters, text):
    assert common.spec_text("x", parameters) == text


def test_typed_specs_come_back():
    from llm_steer.spec import parse_option

    for typed in (
        "reflection_cycle:amplitude=5,period=37.5,leading_space=true,schedule=cosine",
        'reflection_cycle:{"words": ["Wait"], "window": [[0, 5]]}',
        "reflection_cycle:preset=reference,amplitude=2",
    ):
        params = parse_option(typed).params
        assert parse_option(common.spec_text("reflection_cycle", common.given(params))).params == params
