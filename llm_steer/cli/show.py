"""``llm-steer show``: what a plugin does and which parameters it takes."""

from __future__ import annotations

import inspect
import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_steer.cli.common import Json, get_plugin, output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_steer.plugin import Plugin


def show(
    name: Annotated[str, typer.Argument(help="A plugin's name, as `llm-steer list` prints it.")], json: Json = False
) -> None:
    """Show what a plugin does, its parameters with type, range and default, and with --json their JSON schema."""
    with output(json) as out:
        plugin = get_plugin(name)
        parameters = describe(plugin)
        documentation = inspect.cleandoc(plugin.__doc__ or "")
        if json:
            out.document(
                {
                    "name": plugin.name,
                    "summary": plugin.summary,
                    "documentation": documentation,
                    "class": f"{plugin.__module__}:{plugin.__qualname__}",
                    "feedback": plugin.feedback,
                    "parameters": parameters,
                    "schema": plugin.Params.model_json_schema(),
                }
            )
            return
        from rich.table import Table
        from rich.text import Text

        console = out.console
        console.print(Text(plugin.name, "bold"), Text(plugin.summary), sep="  ")
        console.print(Text("\n" + plain(paragraphs(documentation))))
        if plugin.feedback:
            console.print("\nDepends on what the model computes: refused with beam search and speculative decoding.")
        table = Table(box=None, pad_edge=False, header_style="bold", title=None, row_styles=["", "on grey7"])
        table.add_column("parameter", no_wrap=True)
        table.add_column("type and range", ratio=2)
        table.add_column("default", overflow="fold")
        table.add_column("", ratio=3)
        for row in parameters:
            default = (
                "required" if row["required"] else "" if row["default"] is None else jsonlib.dumps(row["default"]).strip('"')
            )
            table.add_row(Text(row["name"], "bold"), Text(row["type"]), Text(default), Text(plain(row["description"])))
        console.print()
        console.print(table)
        console.print("\nOn a command line: ", style="dim", end="")
        console.print(Text(f"--steer {plugin.name}:{_example(parameters)}"))


def describe(plugin: type[Plugin[Any]]) -> list[dict[str, Any]]:
    """Each parameter's name, type in words, default and description."""
    schema = plugin.Params.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "type": type_text(field, definitions),
            "default": field.get("default"),
            "required": name in required,
            "description": " ".join(field.get("description", "").split()),
        }
        for name, field in schema.get("properties", {}).items()
    ]


def type_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return type_text(definitions.get(schema["$ref"].rpartition("/")[2], {}), definitions)
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            parts = [type_text(part, definitions) for part in schema[union] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    kind = schema.get("type", "any")
    limits = _limits(schema)
    if kind == "array":
        items = schema.get("items", {})
        size = _size(schema)
        return f"list of {size}{type_text(items, definitions)}"
    if kind == "object":
        return "mapping"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true | false"}
    return names.get(kind, str(kind)) + (f" {limits}" if limits else "")


def _limits(schema: Mapping[str, Any]) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    signs = (("at least", low), ("above", above), ("at most", high), ("below", below))
    return " and ".join(f"{sign} {_number(value)}" for sign, value in signs if value is not None)


def _size(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minItems"), schema.get("maxItems")
    if low is not None and low == high:
        return f"{low} × "
    return f"at most {high} × " if high is not None else ""


def _number(value: float) -> str:
    if value in (2**31, 2**63):
        return f"2^{int(value).bit_length() - 1}"
    return f"{value:g}"


def _example(parameters: list[dict[str, Any]]) -> str:
    numeric = [row for row in parameters if isinstance(row["default"], int | float) and not isinstance(row["default"], bool)]
    return ",".join(f"{row['name']}={row['default']:g}" for row in numeric[:2])


def paragraphs(documentation: str) -> str:
    """Documentation with each paragraph on one line, for the terminal to break; indented parts stay as they are."""
    parts = documentation.split("\n\n")
    return "\n\n".join(part if "\n " in f"\n{part}" else " ".join(part.splitlines()) for part in parts)


def plain(documentation: str) -> str:
    """Documentation without reStructuredText's double quotes."""
    return documentation.replace("``", "")
