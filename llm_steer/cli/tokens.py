"""``llm-steer tokens``: what words, think markers and step delimiters are for a model's tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llm_steer.cli.common import Json, find_model, load_tokenizer, logits_width, note, output, quiet_transformers
from llm_steer.errors import SteerError

EXAMPLES = 8


def tokens(
    model: Annotated[
        str | None, typer.Argument(help="A model's folder or Hugging Face id; the embedded default if left out.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Option("--words", "-w", help="Words, separated by commas; may be repeated.", metavar="WORD,WORD"),
    ] = None,
    leading_space: Annotated[
        bool, typer.Option("--leading-space", help="Also the pieces with a space before the word.")
    ] = False,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", help="Also lower-case, capitalised and upper-case forms.")
    ] = False,
    multi_piece: Annotated[
        str, typer.Option(help="A form that is several pieces: skip it, or take its first piece.")
    ] = "skip",
    json: Json = False,
) -> None:
    """Show which tokens steering would move and look for: reflection words, think markers, step delimiters."""
    with output(json) as out:
        if multi_piece not in ("skip", "first"):
            raise SteerError("--multi-piece", multi_piece, "skip or first")
        chosen = [word for option in words or () for word in option.split(",")]
        if any(not word.strip() for word in chosen):
            raise SteerError("--words", ",".join(chosen), "words separated by commas, none of them empty")
        from llm_steer.plugins.reflection_cycle.params import REFERENCE_WORDS
        from llm_steer.tokens import Vocabulary

        quiet_transformers()
        source, label = find_model(model, "MODEL", tokenizer_only=True)
        tokenizer = load_tokenizer(source, label, "MODEL")
        try:
            width = logits_width(source, label, "MODEL")
        except SteerError:
            width = len(tokenizer)
            note("No model configuration here: the tokenizer's length stands for the width of the logits.")
        vocabulary = Vocabulary(tokenizer, width)
        match = vocabulary.words(
            chosen or REFERENCE_WORDS,
            leading_space=leading_space,
            ignore_case=ignore_case,
            multi_piece="first" if multi_piece == "first" else "skip",
        )
        delimiters = vocabulary.step_delimiters
        document: dict[str, Any] = {
            "model": label,
            "vocabulary": len(tokenizer),
            "logits_width": width,
            "matched": [_row(tokenizer, form, token) for form, token in match.matched],
            "first_pieces": [_row(tokenizer, form, token) for form, token in match.first_pieces],
            "skipped": match.skipped,
            "ids": match.ids,
            "think": {
                marker: [[_piece(tokenizer, token) | {"id": token} for token in ids] for ids in vocabulary.marker(marker)]
                for marker in (vocabulary.think_open, vocabulary.think_close)
            },
            "reasoning_model": vocabulary.has_think_markers,
            "step_delimiters": {
                "count": len(delimiters),
                "examples": [_piece(tokenizer, token) | {"id": token} for token in delimiters[:EXAMPLES]],
            },
        }
        if json:
            out.document(document)
        else:
            _print(out.console, document)


def _row(tokenizer: Any, form: str, token: int) -> dict[str, Any]:
    return {"form": form, "id": token, **_piece(tokenizer, token)}


def _piece(tokenizer: Any, token: int) -> dict[str, Any]:
    return {"piece": tokenizer.convert_ids_to_tokens(token), "text": tokenizer.decode([token])}


def _print(console: Any, document: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(
        f"{document['model']}: {document['vocabulary']} tokens, logits {document['logits_width']} wide\n", markup=False
    )
    first = {row["form"] for row in document["first_pieces"]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("word")
    table.add_column("id", justify="right")
    table.add_column("piece")
    table.add_column("")
    for row in document["matched"]:
        told = Text("its first piece only", "yellow") if row["form"] in first else ""
        table.add_row(Text(repr(row["form"])), str(row["id"]), Text(str(row["piece"])), told)
    for form in document["skipped"]:
        table.add_row(
            Text(repr(form), "dim"), "", "", Text("skipped: several pieces (--multi-piece first takes the first)", "dim")
        )
    console.print(table)

    console.print("\nThink markers", style="bold")
    for marker, spellings in document["think"].items():
        shown = " or ".join(" ".join(f"{piece['piece']} ({piece['id']})" for piece in ids) for ids in spellings)
        console.print(Text(f"  {marker}  {shown or 'cannot be spelt'}"))
    if not document["reasoning_model"]:
        console.print(
            "  No piece of its own for the end marker: origin=auto counts from the first generated token.", style="dim"
        )
    steps = document["step_delimiters"]
    console.print("\nStep delimiters", style="bold")
    examples = ", ".join(f"{piece['text']!r} ({piece['id']})" for piece in steps["examples"])
    console.print(Text(f"  {steps['count']} tokens hold a blank line: {examples}"))
