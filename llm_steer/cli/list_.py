"""``llm-steer list``: the installed plugins."""

from __future__ import annotations

from llm_steer.cli.common import Json, output


def list_(json: Json = False) -> None:
    """List the installed steering plugins, and the package each comes from."""
    with output(json) as out:
        from llm_steer.cli.plugins import installed

        rows = installed()
        if json:
            out.document(rows)
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("plugin", "what it does", "from"):
            table.add_column(column, overflow="fold")
        for row in rows:
            what = Text(row["error"], "red") if row["error"] else Text(row["summary"] or "")
            table.add_row(Text(row["name"], "bold"), what, f"{row['package']} {row['version']}")
        out.console.print(table)
        out.console.print("\nParameters of one: llm-steer show NAME", style="dim")
