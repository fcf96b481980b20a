"""The page. What a model wrote reaches it as JSON only, and is put into the document as text, never as markup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from llm_steer.eval.rows import REFLECTION
from llm_steer.eval.summary import Row, Summary, TaskSummary

from . import markdown, svg

EMBEDDED = 2_000_000
"""Characters of answers in the page itself; the rest goes into side files."""
SIDE_FILE = 1_000_000
"""Characters of one side file."""
TRACE_NUMBERS = 2000
"""Points of one curve of an answer's trace."""

Embedded = list[dict[str, Any]]


def side_files(summary: Summary) -> tuple[Embedded, dict[str, str]]:
    """Every problem with its answers: those in the page, and the side files of the rest by name.

    A problem that is not in the page stands there with the name of its file.
    """
    by_problem: dict[tuple[str, str], list[Row]] = {}
    for row in summary.rows:
        by_problem.setdefault((row["task"], row["id"]), []).append(row)
    embedded: Embedded = []
    files: dict[str, str] = {}
    waiting: dict[str, Any] = {}
    used = size = 0
    for place, problem in summary.problems.items():
        answers = [_answer(row, summary.grades[row["key"]]) for row in by_problem.get(place, ())]
        if not answers:
            continue
        head = {"task": place[0], "id": place[1], "level": problem["level"], "gold": problem["gold"]}
        head["right"] = {m: [a["right"] for a in answers if a["method"] == m] for m in summary.run["methods"]}
        body = {"messages": problem["messages"], "answers": answers}
        length = len(json.dumps(body))
        if used + length <= EMBEDDED:
            used += length
            embedded.append({**head, **body})
            continue
        if waiting and size + length > SIDE_FILE:
            files[_name(files)] = _side(waiting)
            waiting, size = {}, 0
        embedded.append({**head, "file": _name(files)})
        waiting[f"{place[0]}/{place[1]}"] = body
        size += length
    if waiting:
        files[_name(files)] = _side(waiting)
    return embedded, files


def _name(files: Mapping[str, str]) -> str:
    return f"{len(files):04d}.js"


def _side(problems: Mapping[str, Any]) -> str:
    # A page opened from a disk may not fetch data, but it may load a script.
    return f"traces({_json(problems)});\n"


def _answer(row: Row, grade: Row) -> dict[str, Any]:
    curves = {}
    for plugin in (row["steering"] or {}).get("plugins", ()):
        for name, values in plugin.items():
            if name not in ("positions", "deltas") and _is_curve(values):
                curves[f"{plugin['name']}: {name}"] = values[:TRACE_NUMBERS]
    return {
        "method": row["method"],
        "sample": row["sample"],
        "text": row["text"],
        "answer": grade["answer"],
        "right": grade["correct"],
        "how": grade["how"],
        "tokens": row["tokens"],
        "finish": row["finish"],
        "marks": row.get("marks") or [],
        "curves": curves,
    }


def _is_curve(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 2 and all(type(v) in (int, float) for v in values)


def page(summary: Summary, embedded: Embedded) -> str:
    """``report.html``."""
    files = resources.files(__package__)
    css, script = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"{summary.run['model']}: {', '.join(task.about['title'] for task in summary.tasks)}"
    data = {"problems": embedded, "methods": list(summary.run["methods"]), "reflection": REFLECTION.pattern}
    body = [
        f"<h1>{escape(str(summary.run['model']))}</h1>",
        _table(["", ""], markdown.about(summary), "facts"),
        *(_task(task) for task in summary.tasks),
        _methods(summary),
        "<h2>Answers</h2>",
        '<div id="browser"><noscript>The answers are shown by a script.</noscript></div>',
    ]
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><style>{css}</style></head>\n<body>\n{"".join(body)}\n'
        f'<script type="application/json" id="data">{_json(data)}</script>\n<script>{script}</script>\n</body></html>\n'
    )


def _task(task: TaskSummary) -> str:
    parts = [f"<h2>{escape(task.about['title'])}</h2><p>{escape(markdown.source(task))}</p>"]
    parts.append(_table(*markdown.score_table(task)))
    if task.against:
        parts.append("<h3>Problem by problem</h3>" + _table(*markdown.against_table(task)))
    parts += [f"<p>{escape(line)}</p>" for line in markdown.seen(task)]
    parts.append(f"<figure>{svg.pareto(task)}</figure>")
    if any(score.levels for score in task.scores):
        parts.append("<h3>Accuracy by level, %</h3>" + _table(*markdown.level_table(task)))
    for score in task.scores:
        if score.confusion:
            parts.append(f"<h3>{escape(score.method)}: answers by label</h3>" + _table(*markdown.confusion_table(score)))
    return "".join(parts)


def _methods(summary: Summary) -> str:
    parts = ["<h2>Methods</h2>"]
    for label, method in summary.run["methods"].items():
        steer = json.dumps(method["steer"] if method["loop"] is None else method["loop"], ensure_ascii=False)
        parts.append(f"<h3>{escape(label)}</h3><p><code>{escape(steer)}</code></p>")
        for drawn in _previews(method["steer"]) if method["plugins"] else ():
            parts.append(f"<figure>{svg.curve(drawn['t'], drawn['delta'], f'{label}: offset over tokens')}</figure>")
    tuning = summary.run["notes"].get("tuning")
    if tuning:
        parts.append("<h2>Tuning, on other problems</h2>" + _table(*markdown.tuning_table(tuning)))
    return "".join(parts)


def _previews(steer: Any) -> list[dict[str, Any]]:
    """The curves of the plugins that can draw one; none if they are not installed here."""
    from llm_steer import spec

    try:
        steers = spec.parse(steer)
    except (ValueError, RuntimeError):  # parameters may have changed since
        return []
    found = [(getattr(s.plugin, "preview", None), s.params) for s in steers]
    return [preview(params) for preview, params in found if preview]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    top = "" if kind else "<thead><tr>" + "".join(f"<th>{escape(c)}</th>" for c in head) + "</tr></thead>"
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def _json(value: Any) -> str:
    """JSON that can stand in a script element and in a script: no ``</script>``, no ``<!--``, no line separators."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
