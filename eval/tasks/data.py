"""A task's problems: read from a file, from the hub, or drawn; then written as prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_steer.eval.grading import Gold
from llm_steer.eval.grading.graders import label_of, option_of

from llm_steer.errors import MissingDependencyError, SteerError, shorten

from .spec import PLACEHOLDER, ROWS, Column, Generated, Hub, TaskSpec

Row = Mapping[str, Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """One problem, as it is asked."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    gold: Gold
    level: str | None = None
    asked: str | None = None
    """What the row says in small letters, without the task's own sentences around it; None where problems are drawn."""

    @property
    def words(self) -> str:
        """SHA-256 of what the row says, whatever its spaces and capitals: equal for the same problem in tasks that put it
        into different prompts."""
        if self.asked is None:
            return self.fingerprint
        return hashlib.sha256(self.asked.encode(errors="surrogatepass")).hexdigest()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the prompt: equal for the same problem, whatever its task or number."""
        text = json.dumps([dict(m) for m in self.messages], ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Loaded:
    """A task with its problems."""

    spec: TaskSpec
    items: tuple[Item, ...]
    source: str
    """The file's name, the hub's path, or ``generated``."""
    sha256: str
    """Of the file, or of the rows as JSON lines."""


def load(spec: TaskSpec, data: Path | None = None, *, seed: int = 0, limit: int | None = None) -> Loaded:
    """Load a task.

    Args:
        data: a file of rows, JSON Lines or one JSON array; the hub if there is none.
        seed: shuffles the options of choices.
        limit: take the first so many problems; with generated levels, of each level.

    Raises:
        SteerError: a file that cannot be read, or a row that lacks something; with its line.
    """
    if spec.generated is not None and data is not None:
        raise SteerError("--data", str(data), f"left out for {spec.name}, whose problems are generated")
    if spec.generated is not None and spec.generated.task not in ROWS:
        items = [*_generate(spec.generated, limit)]
        return Loaded(spec, tuple(items), "generated", _digest([i.id, i.messages, i.gold.answer] for i in items))
    rows: Iterable[tuple[str, Row]]
    if spec.generated is not None:
        drawn = [*_drawn(spec.generated, limit)]
        rows = ((f"problem {n}", row) for n, row in enumerate(drawn, 1))
        sha256, source, limit = _digest(drawn), "generated", None
    elif data is not None:
        text = _read(data).removeprefix("\ufeff")
        rows, sha256, source = _rows(text, data.name), hashlib.sha256(text.encode()).hexdigest(), data.name
    elif spec.hub is not None:
        found = [*_from_hub(spec.hub)]
        rows = ((f"row {n}", row) for n, row in enumerate(found, 1))
        sha256, source = _digest(found), f"hub: {spec.hub.path}"
    else:
        raise SteerError("--data", None, f"a file for {spec.name}, which is not on the hub ({spec.source})")
    items = []
    seen: dict[str, str] = {}
    golds: dict[str, tuple[str, str]] = {}
    for where, row in rows:
        if limit is not None and len(items) == limit:
            break
        item = _item(spec, row, f"{source} {where}", seed)
        if item.id in seen:
            if spec.id is not None:
                raise SteerError(f"{source} {where}: id", item.id, f"another than in {seen[item.id]}")
            item = replace(item, id=f"{item.id}-{len(items)}")
        seen[item.id] = where
        gold = item.gold.options[ord(item.gold.answer) - ord("A")] if spec.choices else item.gold.answer
        before, first = golds.setdefault(item.words, (gold, where))
        if before != gold:
            answers = f"{shorten(gold, 40)}, there {shorten(before, 40)}"
            _log.warning("%s %s: the same problem as in %s with another answer, %s", source, where, first, answers)
        items.append(item)
    if not items:
        raise SteerError("--data", source, "data with at least one row")
    return Loaded(spec, tuple(items), source, sha256)


# -- rows ----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SteerError("--data", str(path), f"a readable file, JSON Lines or a JSON array ({reason})") from error


def _rows(text: str, name: str) -> Iterator[tuple[str, Row]]:
    if text.lstrip().startswith("["):
        for n, row in enumerate(_parsed(text, name, ""), 1):
            yield f"item {n}", _mapping(row, f"{name} item {n}")
        return
    for n, line in enumerate(text.split("\n"), 1):  # U+2028 is a line's end to splitlines(), and stands inside of rows
        if line.strip():
            yield f"line {n}", _mapping(_parsed(line, name, f" line {n}"), f"{name} line {n}")


def _parsed(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SteerError(f"{name}{where}", text, f"valid JSON ({error})") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise SteerError(where, row, "a JSON object")
    return row


def _from_hub(hub: Hub) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError("datasets", "eval", "a task's data from the hub") from None
    configs: Sequence[str | None] = hub.configs or [None]
    for config in configs:
        try:
            rows = datasets.load_dataset(hub.path, config, split=hub.split, revision=hub.revision)
        except Exception as error:  # offline, gated, renamed: every one has its own class
            reason = str(error).strip().split("\n")[0]
            raise SteerError(
                "--data", None, f"a file, for {hub.path} cannot be had from the hub ({type(error).__name__}: {reason})"
            ) from error
        yield from (dict(row) for row in rows)


def _digest(rows: Iterable[Any]) -> str:
    whole = hashlib.sha256()
    for row in rows:
        whole.update(
            (json.dumps(row, sort_keys=True, default=str, ensure_ascii=False) + "\n").encode(errors="surrogatepass")
        )
    return whole.hexdigest()


# -- problems ------------------------------------------------------------------------------------------------------------


def _item(spec: TaskSpec, row: Row, where: str, seed: int) -> Item:
    values = {name: _needed(row, column, f"{where}: {name}", "given") for name, column in spec.columns.items()}
    asked = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    own_id = _value(row, spec.id) if spec.id else None
    if spec.id and own_id is None:
        raise SteerError(f"{where}: {spec.id.any_of[0]}", None, "given: it is the problem's id")
    id_ = _text(own_id) if spec.id else hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()[:12]
    plain = (unicodedata.normalize("NFKC", _text(value)).casefold().split() for value in values.values())
    said = json.dumps(sorted(" ".join(words) for words in plain), ensure_ascii=False)
    options: tuple[str, ...] = ()
    if spec.choices:
        options, answer = _shuffled(spec, row, where, random.Random(f"{seed}/{spec.name}/{id_}"))
        values["options"] = [f"{chr(ord('A') + n)}) {option}" for n, option in enumerate(options)]
    else:
        assert spec.answer is not None
        answer = _answer(row, spec.answer, where)
    if spec.labels:
        if spec.options:
            options = tuple(_bare(o) for o in _value(row, spec.options) or ())
        labels = {label: tuple(others) for label, others in spec.labels.items()}
        label = label_of(answer, labels, options)
        if label is None:
            raise SteerError(f"{where}: answer", answer, f"one of {', '.join(labels)}, or the letter of an option")
        gold = Gold(label, options, labels)
    else:
        gold = Gold(answer, options)
    level = _value(row, spec.level) if spec.level else None
    messages = [{"role": "user", "content": _filled(spec.prompt.strip(), values)}]
    if spec.system is not None:
        messages.insert(0, {"role": "system", "content": spec.system.strip()})
    return Item(id_, tuple(messages), gold, None if level is None else _text(level), said)


def _value(row: Row, column: Column) -> Any:
    value = next((row[name] for name in column.any_of if row.get(name) is not None), None)
    if value is None:
        return None
    if column.count:
        return len(value) if isinstance(value, list) else None
    if column.bands:
        return _band(value, column.bands)
    if column.after is not None and column.after in str(value):
        value = str(value).split(column.after, 1)[1].strip()
    if column.match is not None:
        found = re.search(column.match, str(value))
        return found[1] if found else None
    return value


def _band(value: Any, bands: Mapping[str, int | None]) -> str | None:
    number = int(value) if re.fullmatch(r"-?\d{1,18}", str(value)) else None
    return None if number is None else next((name for name, top in bands.items() if top is None or number <= top), None)


def _needed(row: Row, column: Column, field: str, valid: str) -> Any:
    value = _value(row, column)
    if value is None or not _text(value).strip():
        raise SteerError(field, value, valid)
    return value


def _answer(row: Row, column: Column, where: str) -> str:
    """What is right: a text, a number or a truth value, or a list of one of these."""
    field = f"{where}: {column.any_of[0]}"
    value = _needed(row, column, field, "an answer: this row has none")
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str | int | float) or (isinstance(one, float) and not math.isfinite(one)):
            raise SteerError(field, value, "a text, a number or a truth value, or a list of these")
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return ", ".join(_text(v) for v in value)
    return str(value)


def _filled(prompt: str, values: Mapping[str, Any]) -> str:
    def text(match: re.Match[str]) -> str:
        value = values[match[1]]
        return "\n".join(_text(v) for v in value) if isinstance(value, list) else _text(value).strip()

    return PLACEHOLDER.sub(text, prompt)


def _bare(option: Any) -> str:
    """An option's text, without its letter."""
    return re.sub(r"^\(?[A-Z][).:]\s*", "", _text(option).strip())


def _shuffled(spec: TaskSpec, row: Row, where: str, rng: random.Random) -> tuple[tuple[str, ...], str]:
    """Options in a new order, and the right one's letter."""
    choices = spec.choices
    assert choices is not None
    if choices.correct is not None:
        columns = [choices.correct, *(Column(any_of=[name]) for name in choices.wrong)]
        texts = [_text(_needed(row, c, f"{where}: {c.any_of[0]}", "an option: this row has none")).strip() for c in columns]
        right = 0
    else:
        assert choices.options is not None
        assert spec.answer is not None
        given: Sequence[Any] = _needed(row, choices.options, f"{where}: options", "a list of options")
        texts = [_bare(option) for option in given]
        answer = _answer(row, spec.answer, where)
        letter = option_of(answer, tuple(texts))
        if letter is None:
            raise SteerError(f"{where}: {spec.answer.any_of[0]}", answer, "the letter or the text of one of the options")
        right = ord(letter) - ord("A")
    order = list(range(len(texts)))
    rng.shuffle(order)
    return tuple(texts[i] for i in order), chr(ord("A") + order.index(right))


def _drawn(spec: Generated, limit: int | None) -> Iterator[Row]:
    from llm_steer.eval.logic_tasks import prontoqa, rail2country

    count = spec.count if limit is None else min(limit, spec.count)
    for level in spec.levels:
        if spec.task == "prontoqa":
            problems = prontoqa(count, level, spec.seed)
        else:
            problems = rail2country(count, spec.task == "rail2country-similes", spec.seed)
        for p in problems:
            yield {"id": p.id, "context": p.context, "question": p.question, "answer": p.answer, "level": level}


def _generate(spec: Generated, limit: int | None) -> Iterator[Item]:
    from llm_steer.eval.testbed.arithmetic import Arithmetic
    from llm_steer.eval.testbed.entailment import Entailment
    from llm_steer.eval.testbed.grading import VERDICTS
    from llm_steer.eval.testbed.ontology import Ontology
    from llm_steer.eval.testbed.problem import Task, held_out
    from llm_steer.eval.testbed.words import Words

    kind, _, modality = spec.task.partition("-")
    tasks: dict[str, Task] = {"arithmetic": Arithmetic(), "words": Words(), "ontology": Ontology()}
    task = Entailment(modality) if kind == "entailment" else tasks[kind]
    for level in spec.levels:
        count = spec.count if limit is None else min(limit, spec.count)
        for problem in held_out(task, level, count, spec.seed):
            number = hashlib.sha256(problem.canonical.encode()).hexdigest()[:12]
            labels = dict.fromkeys(VERDICTS, ()) if problem.answer in VERDICTS else {}
            yield Item(f"{level}-{number}", tuple(problem.messages), Gold(problem.answer, (), labels), str(level))
