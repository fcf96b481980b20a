"""The batch: every method on the same problems, with the same seeds, in a folder that can be gone on with at any time."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_steer.eval import continuation, tasks
from llm_steer.eval.config import RunConfig
from llm_steer.eval.grade import Grading
from llm_steer.eval.journal import FolderLock, Journal
from llm_steer.eval.methods import Method, parse_methods, split
from llm_steer.eval.rows import result_row
from llm_steer.eval.store import DROPPED, GRADES, PROBLEMS, RESULTS, SESSIONS, Folder

from llm_steer.engines.base import Engine, Request, Response, Sampling
from llm_steer.engines.common import digest
from llm_steer.errors import SteerError, UnsupportedError, shorten


@dataclass
class Attempt:
    """One answer on its way."""

    key: str
    task: str
    item: tasks.Item
    sample: int
    method: Method
    request: Request
    parts: list[Response] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def advance(self, response: Response, opener: str) -> Request | None:
        """Take a response: the request that goes on from it, or None when the answer is finished."""
        self.parts.append(response)
        loop = self.method.loop
        if loop is None or response.finish != "stop":
            return None
        whole = self.whole()
        following = loop.next(self.request, whole.text, whole.tokens, len(self.parts), opener)
        if following is None:
            return None
        word, request = following
        self.words.append(word)
        return request

    def whole(self) -> Response:
        return self.parts[0] if len(self.parts) == 1 else continuation.joined(self.parts, self.words)


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    finished: int
    """Answers that were added."""
    before: int
    """Answers that were there already."""
    failed: list[str]
    """Errors of requests that got no answer."""
    complete: bool
    """No answer and no verdict of the run is missing, those of other processes included."""


def run(
    config: RunConfig,
    engine: Engine | None = None,
    *,
    tokenizer: Any = None,
    progress: Callable[[Iterable[Any], int, int], Iterable[Any]] | None = None,
    only: Callable[[tasks.Item], bool] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Outcome:
    """Generate and grade whatever is missing in the run's folder.

    Args:
        engine: in place of the one that the configuration names.
        progress: wraps the stream of answers; is also given how many will come, and how many are there.
        only: which problems to take.
        notes: further content of ``run.json``.

    Raises:
        SteerError: a task, a method, a file or a folder that is not right; before anything is generated.
    """
    rank, ranks = place()
    methods = parse_methods([part for m in config.steer for part in (split(m) if isinstance(m, str) else [m])])
    loaded = load_tasks(config)
    folder = Folder(Path(config.out))
    folder.run()  # an old folder is refused before a model is loaded
    lock = FolderLock(folder.path, rank, ranks)
    journals: list[Journal] = []
    part = "" if ranks == 1 else f"-{rank}"
    try:
        if engine is None:
            from llm_steer.eval.engine import open_engine

            engine, tokenizer = open_engine(config, methods)
        describe = Description(config, methods, loaded, identity(engine), only)
        document = describe.checked(folder, dict(notes or {}))
        if rank == 0:
            describe.enter(folder, document)
        results, grades, sessions = (Journal(folder.path / f"{name}{part}.jsonl") for name in (RESULTS, GRADES, SESSIONS))
        journals += [results, grades, sessions]
        attempts = describe.attempts()
        wanted = {attempt.key for attempt in attempts}
        graded = folder.grades().keys()
        stored: set[str] = set()
        ungraded: list[dict[str, Any]] = []
        for row in folder.results():
            if row["key"] in wanted:
                stored.add(row["key"])
                ungraded += [row] if row["key"] not in graded and rank == 0 else []
        # A process's share depends on nothing that the others do meanwhile.
        todo = [attempt for attempt in attempts[rank::ranks] if attempt.key not in stored]
        session = len(folder.sessions())
        sessions.append({"session": session, "rank": rank, "began": time.time(), "batch_size": config.batch_size})

        problems = describe.problems()
        with Grading(grades.append, {t.spec.grader for t in loaded}, config.graders) as grading:
            for row in ungraded:
                grading.submit(row["key"], problems[row["task"], row["id"]], row["text"])
            stream = _generate(engine, todo, continuation.opener_of(tokenizer))
            failed: list[str] = []
            try:
                for attempt, response in progress(stream, len(todo) + len(stored), len(stored)) if progress else stream:
                    if response.finish in ("error", "abort"):
                        failed.append(response.error or response.finish)
                        continue
                    row = result_row(attempt, response, tokenizer, session)
                    results.append(row)
                    grading.submit(attempt.key, problems[attempt.task, attempt.item.id], response.text)
            finally:
                if dropped := engine.dropped():
                    journals.append(Journal(folder.path / f"{DROPPED}{part}.jsonl"))
                    for text in dropped:
                        journals[-1].append({"session": session, "text": text})
            grading.finish()
        complete = wanted <= folder.grades().keys()
        return Outcome(len(todo) - len(failed), len(stored), failed, complete)
    finally:
        for journal in journals:
            journal.close()
        lock.release()


def place() -> tuple[int, int]:
    """This process's rank, and how many share the run: what ``accelerate launch`` and ``torchrun`` say."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def load_tasks(config: RunConfig) -> list[tasks.Loaded]:
    """The tasks of a configuration.

    Raises:
        SteerError: an unknown task, or bad data.
    """
    specs = [tasks.find(name) for name in config.tasks]
    names = [spec.name for spec in specs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SteerError("--tasks", twice[0], "given once")
    if unknown := [name for name in config.data if name not in names]:
        raise SteerError("--data", unknown[0], f"a file for one of the run's tasks: {', '.join(names)}")
    files = {name: Path(file) for name, file in config.data.items()}
    return [tasks.load(spec, files.get(spec.name), seed=config.seed, limit=config.limit) for spec in specs]


def identity(engine: Engine) -> dict[str, Any]:
    """Of an engine, without what it is steered with by default: every request here says how it is steered."""
    return {key: value for key, value in engine.identity().items() if key != "steering"}


class Description:
    """Everything that decides an answer, as it stands in ``run.json`` and in the answers' keys."""

    def __init__(
        self,
        config: RunConfig,
        methods: Sequence[Method],
        loaded: Sequence[tasks.Loaded],
        identity: Mapping[str, Any],
        only: Callable[[tasks.Item], bool] | None = None,
    ) -> None:
        self.config, self.methods, self.loaded, self.engine = config, methods, loaded, dict(identity)
        self.items = {t.spec.name: [i for i in t.items if only is None or only(i)] for t in loaded}
        self.sampling = {t.spec.name: config.sampling(t.spec.sampling.model_dump()) for t in loaded}

    def tasks(self) -> dict[str, Any]:
        return {
            t.spec.name: {
                "title": t.spec.title,
                "licence": t.spec.licence,
                "grader": t.spec.grader,
                "source": t.source,
                "sha256": t.sha256,
                "problems": len(self.items[t.spec.name]),
                "sampling": self.sampling[t.spec.name],
            }
            for t in self.loaded
        }

    def problems(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (t.spec.name, item.id): {
                "task": t.spec.name,
                "id": item.id,
                "level": item.level,
                "gold": item.gold.answer,
                "options": list(item.gold.options),
                "labels": {label: list(others) for label, others in item.gold.labels.items()},
                "grader": t.spec.grader,
                "thinking": t.spec.thinking,
                "messages": [dict(m) for m in item.messages],
                "fingerprint": item.fingerprint,
                "words": item.words,
            }
            for t in self.loaded
            for item in self.items[t.spec.name]
        }

    def attempts(self) -> list[Attempt]:
        """All answers of the run: methods side by side, so that what a kill leaves can be compared."""
        attempts = []
        common = {"engine": self.engine, "template": self.config.template}
        identities = {m.label: digest({**common, "method": m.identity()}) for m in self.methods}
        for sample in range(self.config.samples):
            for loaded in self.loaded:
                name = loaded.spec.name
                for item in self.items[name]:
                    seed = _seed(self.config.seed, name, item.id, sample)
                    sampling = Sampling(**self.sampling[name], seed=seed)
                    for method in self.methods:
                        request = Request(
                            messages=item.messages,
                            sampling=sampling,
                            steer=method.steer,
                            trace=self.config.trace and bool(method.spec),
                            logprob=False,
                            template=self.config.template,
                        )
                        what = [name, item.id, sample, identities[method.label], item.fingerprint, asdict(sampling)]
                        attempts.append(Attempt(digest(what), name, item, sample, method, request))
        return attempts

    def checked(self, folder: Folder, notes: dict[str, Any]) -> dict[str, Any]:
        """``run.json`` as it will be.

        Raises:
            SteerError: the folder holds something else, or another run.
        """
        run = folder.run()
        new = self._document(notes)
        if run is None and (others := [p.name for p in folder.path.iterdir() if not _OURS.fullmatch(p.name)]):
            raise SteerError("--out", str(folder.path), f"an empty folder, or one with a run: this one has {others[0]}")
        if run is not None:
            _refuse_difference(folder, run, new)
            for part in ("methods", "tasks"):
                new[part] = {**run[part], **new[part]}
            new["samples"] = max(run["samples"], new["samples"])
            new["notes"] = {**run["notes"], **new["notes"]}
        _refuse_other_problems(folder, self.problems())
        return new

    def enter(self, folder: Folder, document: Mapping[str, Any]) -> None:
        """Write ``run.json``, and those problems that are new."""
        known = folder.problems()
        folder.write_run(document)
        journal = Journal(folder.path / PROBLEMS)
        for place, problem in self.problems().items():
            if place not in known:
                journal.append(problem)
        journal.close()

    def _document(self, notes: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.config.model,
            "engine": self.engine,
            "template": self.config.template,
            "seed": self.config.seed,
            "samples": self.config.samples,
            "tasks": self.tasks(),
            "methods": {m.label: {"steer": m.steer, **m.identity()} for m in self.methods},
            "notes": notes,
        }


_OURS = re.compile(r"lock(-\d+)?|run\.json\.new|(results|grades|sessions|dropped)-\d+\.jsonl")
"""What the other processes of a new run may have put into its folder before the first one writes ``run.json``."""


def _refuse_difference(folder: Folder, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """An old folder may get further tasks, methods, problems and samples, but nothing else may differ."""

    def differences(where: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
        if isinstance(a, dict) and isinstance(b, dict):
            return [d for k in sorted(a.keys() | b.keys()) for d in differences(f"{where}.{k}", a.get(k), b.get(k))]
        return [] if a == b else [(where, a, b)]

    found = [d for name in ("engine", "template", "seed") for d in differences(name, old.get(name), new[name])]
    for part, fields in (("methods", ("plugins", "loop")), ("tasks", ("sampling", "grader"))):
        for name in old[part].keys() & new[part].keys():
            for one in fields:
                found += differences(f"{part}.{name}.{one}", old[part][name].get(one), new[part][name][one])
    if found:
        what = "; ".join(f"{where} was {shorten(a, 60)} there and is {shorten(b, 60)} now" for where, a, b in found[:3])
        raise SteerError("--out", str(folder.path), f"a new folder, for its answers were made otherwise: {what}")


def _refuse_other_problems(folder: Folder, problems: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """A problem of an old folder must be asked and graded as it was there."""
    known = folder.problems()
    for place in known.keys() & problems.keys():
        task, id_ = place
        old, new = known[place], problems[place]
        if old["fingerprint"] != new["fingerprint"]:
            raise SteerError(
                "--out", str(folder.path), f"a folder whose problem {id_} of {task} was asked in the same words"
            )
        for name in ("gold", "options", "labels", "grader", "thinking"):
            if old[name] != new[name]:
                was = f"was {shorten(old[name], 60)} there and is {shorten(new[name], 60)} now"
                valid = f"a folder whose problem {id_} of {task} was graded in the same way: {name} {was}"
                raise SteerError("--out", str(folder.path), valid)


def _seed(*parts: Any) -> int:
    """Of one answer: the same for every method, another for every problem and sample."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6], "big")


def _generate(engine: Engine, attempts: Sequence[Attempt], opener: str) -> Iterable[tuple[Attempt, Response]]:
    """Answers as they are finished; those that are asked again follow in rounds."""
    pairs = [(a, a.method.loop.begin(a.request) if a.method.loop else a.request) for a in attempts]
    while pairs:
        again: list[tuple[Attempt, Request]] = []
        with engine.submit([request for _, request in pairs]) as stream:
            for index, response in stream:
                attempt = pairs[index][0]
                following = attempt.advance(response, opener)
                if following is not None:
                    again.append((attempt, following))
                else:
                    yield attempt, response if response.finish == "error" else attempt.whole()
        pairs = again


def tqdm_progress(stream: Iterable[Any], total: int, before: int) -> Iterable[Any]:
    """A bar on a terminal, a line now and then in a log."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 30.0
    rank, ranks = place()
    who = f"process {rank + 1} of {ranks}" if ranks > 1 else None
    return tqdm(stream, who, total, initial=before, unit="answer", mininterval=interval, maxinterval=interval)


def explain_failures(outcome: Outcome) -> None:
    """Raise if requests got no answer."""
    if outcome.failed:
        first = outcome.failed[0]
        raise UnsupportedError(
            f"{len(outcome.failed)} requests got no answer; what was finished is kept, and the same command asks for the "
            f"rest. The first error: {first}"
        )
