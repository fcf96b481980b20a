"""A run as one HTML file that needs nothing else, and as Markdown."""

from __future__ import annotations

from llm_steer.eval.journal import write_whole
from llm_steer.eval.summary import Summary

from .html import page, side_files
from .markdown import document

__all__ = ["write"]


def write(summary: Summary) -> None:
    """Write ``report.html``, ``report.md`` and, for what is too much for one page, ``traces/``."""
    embedded, files = side_files(summary)
    folder = summary.folder / "traces"
    if files:
        folder.mkdir(exist_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)
    write_whole(summary.folder / "report.html", page(summary, embedded))
    write_whole(summary.folder / "report.md", document(summary))
