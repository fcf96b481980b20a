"""What ``list`` and ``doctor`` say about the installed plugins."""

from __future__ import annotations

from typing import Any


def installed() -> list[dict[str, Any]]:
    """Every registered plugin, also those that cannot be loaded (``error`` says why), sorted by name."""
    from importlib.metadata import entry_points

    from llm_steer import registry

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for point in entry_points(group=registry.GROUP):
        row = {
            "name": point.name,
            "class": point.value,
            "package": point.dist.name if point.dist else None,
            "version": point.dist.version if point.dist else None,
            "summary": None,
            "error": None,
        }
        try:
            row["summary"] = registry.get(point.name).summary
        except Exception as error:  # a third party's module may raise anything
            row["error"] = str(error)
        found[point.name, point.value] = row
    return [found[key] for key in sorted(found)]
