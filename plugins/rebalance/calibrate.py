"""Calibration: from outputs of a model to the artifact that rebalance steers it with."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from llm_steer.artifact import Artifact, Description, ModelIdentity
from llm_steer.errors import SteerError

from . import collect
from .control import Constants
from .steps import Mode, Step, Thresholds, split, variances

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

States = Literal["first", "delimiter"]
"""Where the hidden states of a step are read: at its first token, as in the released code, or at the delimiter before it,
where the vector will be added."""

OUTPUTS, REPORT = "outputs.jsonl", "report.json"
HELD_OUT = 5
"""One problem in so many is not calibrated on."""
SAMPLE = 2000
"""Steps whose hidden states are held in memory, for choosing the layer and for the check; class means use all."""
FOLDS = 5
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Of the ridge regression, in units of the mean eigenvalue."""
CEILING = 0.1
"""Coefficient in the under-thinking corner, as in every published calibration."""
REACH = 0.9
"""The over-thinking floor moves this share of the over-thinking steps to the mean of the others, or beyond."""


@dataclass(frozen=True)
class Settings:
    """What decides the outputs. A run that is resumed must have the same."""

    data: str
    """Hash of the problems, those included that a limit leaves out."""
    model: str
    """Hash of the model's identity."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int


@dataclass(frozen=True)
class Output:
    """One generated output: its ids behind those of the prompt, and what the recorder told."""

    prompt: list[int]
    ids: list[int]
    confidences: list[float]
    boundary: list[bool]
    thinking: list[bool]

    def steps(self, mode: Mode, everywhere: bool) -> list[Step]:
        inside = [True] * len(self.ids) if everywhere else self.thinking
        return split(self.confidences, self.boundary, inside, mode)


def collect_outputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    folder: Path,
    settings: Settings,
    progress: Callable[[int], None],
) -> list[Output]:
    """Generate an output for each prompt, going on where an earlier run into the same folder was stopped.

    Args:
        progress: told how many outputs were added.

    Raises:
        SteerError: the folder holds outputs of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, header = folder / OUTPUTS, json.dumps(asdict(settings))
    if not path.exists():
        path.write_text(header + "\n", encoding="utf-8")
    kept, *lines = path.read_text(encoding="utf-8").split("\n")
    if kept != header:
        raise SteerError("out", str(folder), "a folder of a run with the same model, data and settings, or a new one")
    complete = lines[:-1]  # what follows the last line break was cut off
    if len(complete) < len(prompts):  # whole batches, whose numbers are drawn together
        complete = complete[: len(complete) // settings.batch_size * settings.batch_size]
    outputs = [Output(**json.loads(line)) for line in complete[: len(prompts)]]
    path.write_text("".join(line + "\n" for line in (header, *complete)), encoding="utf-8")
    progress(len(outputs))
    with path.open("a", encoding="utf-8") as file:
        for start in range(len(outputs), len(prompts), settings.batch_size):
            batch = prompts[start : start + settings.batch_size]
            told = collect.generate(
                model,
                tokenizer,
                batch,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=settings.seed + start,
            )
            for prompt, one in zip(batch, told, strict=True):
                fields = {key: one[key] for key in ("ids", "confidences", "boundary", "thinking")}
                outputs.append(Output(prompt=list(prompt), **fields))
                file.write(json.dumps(asdict(outputs[-1])) + "\n")
            file.flush()
            progress(len(batch))
    return outputs


@dataclass(frozen=True)
class Labelled:
    """One step that steering could have acted on."""

    problem: int
    start: int
    """Position of its first token, the prompt counted."""
    confidence: float
    over: bool | None


def label(
    outputs: Sequence[Output], tokenizer: PreTrainedTokenizerBase, mode: Mode, everywhere: bool
) -> tuple[Thresholds, list[Labelled]]:
    """Thresholds from all steps, and the steps behind a delimiter with their labels.

    Raises:
        SteerError: there are too few.
    """
    steps = [output.steps(mode, everywhere) for output in outputs]
    total = sum(map(len, steps))
    if total < 100 or sum(len(own) > 1 for own in steps) < 2 * HELD_OUT:
        raise SteerError("data", f"{total} steps", "problems whose outputs have at least 100 reasoning steps in all")
    thresholds = Thresholds.of(steps)
    labelled = []
    for problem, (output, own) in enumerate(zip(outputs, steps, strict=True)):
        for step, variance in zip(own, variances([s.confidence for s in own]), strict=True):
            if step.follows_delimiter:
                text = str(tokenizer.decode(output.ids[step.start : step.stop]))
                over = thresholds.label(step.confidence, variance, text, mode)
                labelled.append(Labelled(problem, len(output.prompt) + step.start, step.confidence, over))
    return thresholds, labelled


class Moments:
    """Class means of the hidden states behind every layer, by streaming, and a sample of the states themselves."""

    def __init__(self) -> None:
        self.sums: dict[bool, torch.Tensor] = {}
        self.counts = {True: 0, False: 0}
        self.norms: torch.Tensor | None = None
        self.seen = 0
        self.sample: dict[bool, list[tuple[torch.Tensor, Labelled]]] = {True: [], False: []}
        """By whether the problem is held out; hidden states bfloat16 ``[layers, hidden]``."""

    def add(self, hidden: torch.Tensor, delimiters: torch.Tensor, steps: Sequence[Labelled]) -> None:
        """The states of one output, float32 ``[steps, layers, hidden]``: to learn from, and where they are steered."""
        held_out = steps[0].problem % HELD_OUT == 0
        norms = delimiters.norm(dim=2).double().sum(0)
        self.norms = norms if self.norms is None else self.norms + norms
        self.seen += len(steps)
        for state, step in zip(hidden, steps, strict=True):
            if not held_out and step.over is not None:
                self.sums[step.over] = self.sums.get(step.over, 0) + state.double()
                self.counts[step.over] += 1
            if len(self.sample[held_out]) < SAMPLE:
                self.sample[held_out].append((state.bfloat16(), step))

    def direction(self) -> torch.Tensor:
        """Mean of the over-thinking states minus that of the others: float64 ``[layers, hidden]``."""
        if not all(self.counts.values()):
            raise SteerError("data", self.counts, "problems whose outputs have steps of both kinds")
        return self.sums[True] / self.counts[True] - self.sums[False] / self.counts[False]

    @property
    def mean_norm(self) -> torch.Tensor:
        assert self.norms is not None
        return self.norms / self.seen


def read_states(
    model: PreTrainedModel,
    outputs: Sequence[Output],
    labelled: Sequence[Labelled],
    states: States,
    batch_size: int,
    progress: Callable[[int], None],
) -> Moments:
    """One pass over the outputs."""
    moments = Moments()
    of: dict[int, list[Labelled]] = {}
    for step in labelled:
        of.setdefault(step.problem, []).append(step)
    sequences = [outputs[problem].prompt + outputs[problem].ids for problem in of]
    positions = [[s.start - d for d in (0, 1) for s in steps] for steps in of.values()]
    for steps, found in zip(of.values(), collect.hidden_states(model, sequences, positions, batch_size), strict=True):
        first, delimiters = found[: len(steps)], found[len(steps) :]
        moments.add(first if states == "first" else delimiters, delimiters, steps)
        progress(1)
    return moments


def ridge_r2(states: NDArray[np.float32], target: NDArray[np.float64], groups: Sequence[int]) -> float:
    """Cross-validated R^2 of a ridge regression, no group on both sides of a split; the best of a few penalties.

    Args:
        states: ``[n, hidden]``.
        target: ``[n]``.
        groups: of each row.
    """
    fold = np.asarray([int(hashlib.sha256(str(group).encode()).hexdigest(), 16) % FOLDS for group in groups])
    errors = np.zeros(len(PENALTIES))
    total = 0.0
    x = states.astype(np.float64)
    for held in range(FOLDS):
        test, train = fold == held, fold != held
        if not test.any() or train.sum() < 2:
            continue
        center, mean = x[train].mean(0), target[train].mean()
        a, b = x[train] - center, x[test] - center
        gram, cross = a @ a.T, b @ a.T
        values, vectors = np.linalg.eigh(gram)
        rotated = vectors.T @ (target[train] - mean)
        for index, penalty in enumerate(PENALTIES):
            weights = vectors @ (rotated / (values.clip(0) + penalty * np.trace(gram) / len(gram)))
            errors[index] += float(((target[test] - mean - cross @ weights) ** 2).sum())
        total += float(((target[test] - mean) ** 2).sum())
    return float(1 - errors.min() / total) if total else math.nan


def auc(high: NDArray[np.float64], low: NDArray[np.float64]) -> tuple[float, float]:
    """Chance that a draw of ``high`` exceeds one of ``low``, and its standard error (Hanley and McNeil)."""
    if not (len(high) and len(low)):
        return math.nan, math.nan
    ordered = np.sort(low)
    below, upto = np.searchsorted(ordered, high, "left"), np.searchsorted(ordered, high, "right")
    area = float((below + upto).mean() / 2 / len(low))  # ties count half
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    error = area * (1 - area) + (len(high) - 1) * (one - area**2) + (len(low) - 1) * (two - area**2)
    return area, math.sqrt(max(error, 0.0) / (len(high) * len(low)))


def build(
    identity: ModelIdentity,
    thresholds: Thresholds,
    moments: Moments,
    mode: Mode,
    calibration: dict[str, str | int | float | None],
    layer: int | None = None,
) -> tuple[Artifact, dict[str, Any]]:
    """The artifact, and what the report tells about it.

    The layer is the one whose states tell the confidence of the coming step best; the last is left out, since what is added
    behind it changes no later token. Amplitudes, in units of the vector: ``low`` moves the mean of the over-thinking steps
    onto that of the others; ``floor`` moves nine tenths of them there or beyond.

    Args:
        layer: behind this layer, instead of choosing.
    """
    states = torch.stack([state for state, _ in moments.sample[False]])
    steps = [step for _, step in moments.sample[False]]
    target = np.asarray([step.confidence for step in steps])
    groups = [step.problem for step in steps]
    candidates = range(max(identity.num_layers - 1, 1))
    scores = [ridge_r2(states[:, index].float().numpy(), target, groups) for index in candidates]
    chosen = int(np.nanargmax(scores)) if layer is None else layer
    vector = moments.direction()[chosen]
    length = float(vector @ vector)

    def along(kept: Iterable[tuple[torch.Tensor, Labelled]], over: bool) -> NDArray[np.float64]:
        own = [state[chosen].double() @ vector for state, step in kept if step.over is over]
        return np.asarray([float(value) / length for value in own])

    reach = float(np.quantile(along(moments.sample[False], True), REACH) - along(moments.sample[False], False).mean())
    constants = Constants(**asdict(thresholds), low=-1.0, floor=-max(reach, 1.0), ceiling=CEILING)
    over, under = along(moments.sample[True], True), along(moments.sample[True], False)
    area, error = auc(over, under)
    dose = math.sqrt(length) / float(moments.mean_norm[chosen])
    description = Description(
        method="rebalance",
        model=identity,
        layer=chosen,
        site="after",
        positions="delimiter",
        sign="towards_overthinking",
        constants={**vars(constants), "initial": constants.low},
        relative_dose=dose,
        calibration={
            **calibration,
            "mode": mode,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "steps": moments.seen,
        },
    )
    notes, most = [], -constants.floor * dose
    if layer is None and max(scores) <= 0:
        notes.append("no layer tells the confidence of the coming step: the choice means little; compare layers on problems")
    if most > 1:
        notes.append(f"the floor adds {most:.1f} times the norm of the stream: try a strength below {1 / most:.2g}")
    if not area - 2 * error > 0.5:
        notes.append("on problems held out, the vector does not clearly tell the two kinds of steps apart")
    report = {
        "notes": notes,
        "layer": chosen,
        "r2": scores,
        "constants": vars(constants),
        "norm": math.sqrt(length),
        "relative_dose": dose,
        "steps": moments.seen,
        "over": moments.counts[True],
        "under": moments.counts[False],
        "held_out": {"over": len(over), "under": len(under), "auc": _number(area), "error": _number(error)},
    }
    return Artifact(description, {"vector": vector.float()}), report


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    folder: Path,
    settings: Settings,
    mode: Mode,
    *,
    states: States = "first",
    layer: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Calibrate, and leave artifact, report and outputs in a folder.

    Args:
        prompts: token ids, chat template applied.
        states: see :data:`States`.
        progress: told the stage, how much of it was just done, and how much there is.

    Returns:
        The report.
    """
    from llm_steer.tokens import Vocabulary

    tell = progress or (lambda *_: None)
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tokenizer)
    everywhere = not Vocabulary(tokenizer, len(tokenizer)).has_think_markers
    outputs = collect_outputs(
        model, tokenizer, prompts, folder, settings, lambda done: tell("generating", done, len(prompts))
    )
    thresholds, labelled = label(outputs, tokenizer, mode, everywhere)
    count = len({step.problem for step in labelled})
    moments = read_states(
        model, outputs, labelled, states, settings.batch_size, lambda done: tell("reading hidden states", done, count)
    )
    facts: dict[str, str | int | float | None] = {
        "data": settings.data,
        "states": states,
        "problems": len(outputs),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
    }
    artifact, report = build(identity, thresholds, moments, mode, facts, layer)
    artifact.save(folder)
    confidences = [step.confidence for output in outputs for step in output.steps(mode, everywhere)]
    report |= {
        "mode": mode,
        "states": states,
        "artifact": artifact.content_hash,
        "problems": len(outputs),
        "tokens": sum(len(output.ids) for output in outputs),
        "confidence": np.quantile(confidences, np.linspace(0, 1, 21)).tolist(),
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report
