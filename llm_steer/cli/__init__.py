"""The command ``llm-steer``: one file a command.

Exit codes: 0 done, 1 ``doctor`` found something broken, 2 the command or its input is refused, 130 stopped by Ctrl-C.
Whatever needs torch is imported inside the commands, so that help and mistakes in options answer at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from llm_steer.cli import calibrate, concepts, doctor, eval, generate, list_, lm_eval, preview, rules, serve, show, tokens
from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError

REFUSED, INTERRUPTED = 2, 130

app = typer.Typer(
    name="llm-steer",
    help="Steer how language models reason, at inference time, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# No -h there: it would be seen inside a short option of vLLM's.
passes_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
app.command("generate")(generate.generate)
app.command("show")(show.show)
app.command("list")(list_.list_)
app.command("tokens")(tokens.tokens)
app.command("preview", context_settings=passes_on)(preview.preview)
app.command("serve", context_settings=passes_on)(serve.serve)
app.command("doctor")(doctor.doctor)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(eval.app, name="eval")
app.command("lm-eval")(lm_eval.lm_eval)
app.add_typer(rules.app, name="rules")
app.add_typer(concepts.app, name="concepts")


def version(asked: bool) -> None:
    if asked:
        from llm_steer import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str], program: typer.Typer = app, name: str = "llm-steer") -> int:
    """Run the command line; the exit code."""
    try:
        code = program(list(arguments), prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (SteerError, UnsupportedError, MissingDependencyError) as error:
        refuse(
            arguments,
            str(error),
            getattr(error, "field", None),
            getattr(error, "value", None),
            getattr(error, "valid", None),
        )
        return REFUSED
    except BrokenPipeError:  # the reader went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # no arguments at all: the help was shown
            return REFUSED
        # A mistake in the options themselves.
        parameter = getattr(error, "param", None)
        option = max(getattr(parameter, "opts", None) or [""], key=len) or getattr(error, "option_name", None)
        help_ = getattr(getattr(error, "ctx", None), "command_path", name)
        refuse(arguments, f"{error.format_message().rstrip('.')}. See: {help_} --help", option)
        return REFUSED


def refuse(arguments: Sequence[str], message: str, field: Any = None, value: Any = None, valid: Any = None) -> None:
    """Say in one line on standard error what was refused."""
    before_dashes = list(arguments)[: list(arguments).index("--")] if "--" in arguments else arguments
    if "--json" in before_dashes:
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        error = {"message": message, "field": field, "value": value, "valid": valid}
        print(json.dumps({"error": error}, default=repr), file=sys.stderr)
    else:
        print(f"llm-steer: {' '.join(message.split())}", file=sys.stderr)
