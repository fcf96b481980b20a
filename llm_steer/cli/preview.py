"""``llm-steer preview``: the curve that a plugin would add, without a model."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, get_args, get_origin

import typer

from llm_steer.cli.common import Json, Output, check_range, get_plugin, given, note, output, spec_text
from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError, did_you_mean

MAX_LENGTH = 1_000_000

FORMATS = (".png", ".svg", ".pdf")

OWN = ("--length", "--out", "--json")
"""Options of the command; all others are parameters of the plugin."""


def preview(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME[:key=value,...]", help="A plugin that can be previewed, such as reflection_cycle.")
    ],
    length: Annotated[int | None, typer.Option(help="Tokens to show; left out, the plugin chooses.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also draw to this file (.png, .svg or .pdf); needs matplotlib.")] = None,
    json: Json = False,
) -> None:
    """Draw what a plugin adds to the logits, token by token. Its parameters are options: --amplitude 5 --period 1200."""
    with output(json) as terminal:
        if length is not None:
            check_range("--length", length, 1, MAX_LENGTH)
        if out is not None:
            _check_path(out)
        plugin, params = parameters(name, context.args)
        draw = getattr(plugin, "preview", None)
        if draw is None:
            raise UnsupportedError(f"{plugin.name} has no preview: what it does depends on the model")
        curve = draw(params, length)
        title = spec_text(plugin.name, given(params))
        if out is not None:
            save(curve, title, out)
        if json:
            terminal.document(
                {
                    "plugin": plugin.name,
                    "params": params.model_dump(mode="json", exclude_unset=True),
                    "length": len(curve["t"]),
                    **curve,
                    "file": str(out) if out else None,
                }
            )
            return
        _print(terminal, curve, title)
        if out is not None:
            note(f"Drawn to {out}")


def parameters(name: str, arguments: list[str]) -> tuple[Any, Any]:
    """The plugin, and its parameters from ``NAME:...`` and from options (``--amplitude 5``, ``--leading-space``)."""
    from llm_steer.spec import build, parse_option

    bare, colon, _ = name.partition(":")
    plugin = get_plugin(bare)
    fields = parse_option(name).params.model_dump(exclude_unset=True) if colon else {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise SteerError(
                "arguments", argument, f"options of {bare} such as --{next(iter(plugin.Params.model_fields), 'name')}"
            )
        option, equals, text = argument.partition("=")
        key = option[2:].replace("-", "_")
        parameter = plugin.Params.model_fields.get(key)
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)  # which may be negative
        if parameter is None:
            own = [f"--{name.replace('_', '-')}" for name in plugin.Params.model_fields] + list(OWN)
            raise SteerError(option, text, f"one of the options {', '.join(own)}{did_you_mean(option, own)}")
        if not equals:
            if parameter.annotation is not bool:
                raise SteerError(option, "", f"followed by a value: {option} VALUE")
            text = "true"
        fields[key] = _value(parameter.annotation, text, f"--{key}")
    return plugin, build(plugin, fields, "--")


def _value(annotation: Any, text: str, option: str) -> Any:
    """Of an option's text: JSON, a list's items with commas between them (``--words Wait,But``), or one plain value."""
    from llm_steer.formats import from_json, from_option

    if text[:1] in ("[", "{"):
        return from_json(text, option)
    if _may_be_list(annotation):
        return [from_option(item) for item in text.split(",")]
    return from_option(text)


def _may_be_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_may_be_list, get_args(annotation)))


def save(curve: dict[str, Any], title: str, path: Path) -> None:
    """Draw to a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot", "drawing to a file") from error
    t, delta = curve["t"], curve["delta"]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.6", linewidth=0.8)
    positive, negative = [max(d, 0.0) for d in delta], [min(d, 0.0) for d in delta]
    axes.fill_between(t, positive, color="tab:green", alpha=0.25, linewidth=0, label="promoted")
    axes.fill_between(t, negative, color="tab:red", alpha=0.25, linewidth=0, label="suppressed")
    axes.plot(t, delta, color="0.15", linewidth=1.4)
    for index, (start, end) in enumerate(curve.get("window") or ()):
        if start <= t[-1]:
            axes.axvspan(start, min(end, t[-1]), color="tab:blue", alpha=0.08, label=None if index else "window")
    axes.set(xlabel="t (generated tokens)", ylabel="offset (logits)", xlim=(t[0], max(t[-1], t[0] + 1)))
    axes.set_title("\n".join(wrap(title, 100)), loc="left", fontsize=10)
    figure.legend(loc="outside lower right", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise SteerError("--out", str(path), f"a file that can be written ({error.strerror})") from error


def _check_path(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise SteerError("--out", str(path), f"a file name that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise SteerError("--out", str(path), "in a folder that exists")
    if path.is_dir():
        raise SteerError("--out", str(path), "a file, not a folder")


def _print(terminal: Output, curve: dict[str, Any], title: str) -> None:
    from rich.text import Text

    from llm_steer.cli.draw import curve as drawn

    console = terminal.console
    console.print(Text(title, "bold"))
    console.print(
        drawn(
            curve["t"],
            curve["delta"],
            width=min(console.width, 100),
            height=11,
            window=curve.get("window"),
            unicode=terminal.unicode,
        )
    )
    low, high = min(curve["delta"]), max(curve["delta"])
    window = " The line of dashes shows the window in which it acts." if curve.get("window") else ""
    console.print(f"offset (logits) over t (generated tokens); from {low:+g} to {high:+g}.{window}", style="dim")
