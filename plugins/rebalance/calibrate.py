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
"""Where the hidden states of a step are read: at the delimiter before it, where the vector will be added, or at its first
token, as in the released code."""

OUTPUTS, REPORT = "outputs.jsonl", "report.json"
HELD_OUT = 5
"""One problem in so many is not calibrated on."""
SAMPLE = 2000
"""Steps whose hidden states are held in memory, for choosing the layer and for the check; class means use all."""
FOLDS = 5
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Of the ridge regression, in units of the mean eigenvalue."""
SURE = 2.0
"""Standard errors by which a layer must do better than chance to be chosen."""
CEILING = 0.1
"""Coefficient in the under-thinking corner, as in every published calibration."""
REACH = 0.9
"""The over-thinking floor moves this share of the over-thinking steps to the mean of the others, or beyond."""
MOST = 0.5
"""The over-thinking floor adds at most this times the norm of the stream; amplitudes are shrunk together to that."""


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
    generate: collect.Source,
    prompts: Sequence[list[int]],
    folder: Path,
    settings: Settings,
    progress: Callable[[int], None],
) -> list[Output]:
    """Generate an output for each prompt, going on where an earlier run into the same folder was stopped.

    Args:
        generate: a batch of outputs.
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
            told = generate(
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


def ridge_r2(states: NDArray[np.float32], target: NDArray[np.float64], groups: Sequence[int]) -> tuple[float, float]:
    """Cross-validated R^2 of a ridge regression on standardised states, no group on both sides of a split; the best of a few
    penalties.

    Args:
        states: ``[n, hidden]``.
        target: ``[n]``.
        groups: of each row.

    Returns:
        R^2 against the mean of each training side, and its standard error over groups; NaN where there is nothing to tell.
    """
    fold = np.asarray([int(hashlib.sha256(str(group).encode()).hexdigest(), 16) % FOLDS for group in groups])
    base = np.zeros(len(target))
    errors = np.zeros((len(PENALTIES), len(target)))
    for held in range(FOLDS):
        test, train = fold == held, fold != held
        if not test.any() or train.sum() < 2:
            continue
        x = states[train].astype(np.float64)
        center, scale, mean = x.mean(0), x.std(0).clip(1e-12), target[train].mean()
        a, b = (x - center) / scale, (states[test] - center) / scale
        base[test] = (target[test] - mean) ** 2
        wide = a.shape[1] > a.shape[0]
        gram = a @ a.T if wide else a.T @ a
        values, vectors = np.linalg.eigh(gram)
        seen = b @ a.T @ vectors if wide else b @ vectors
        rotated = vectors.T @ (target[train] - mean if wide else a.T @ (target[train] - mean))
        unit = values.sum() / len(gram)
        for index, penalty in enumerate(PENALTIES):
            guess = seen @ (rotated / (values.clip(0) + penalty * unit).clip(1e-12))
            errors[index, test] = (target[test] - mean - guess) ** 2
    total = base.sum()
    if not total:
        return math.nan, math.nan
    error = errors[errors.sum(1).argmin()]
    r2 = 1 - error.sum() / total
    # A ratio of sums over groups: its error is that of the sum of what is left of each group's numerator.
    own = np.bincount(np.unique(groups, return_inverse=True)[1], base - error - r2 * base)
    return float(r2), float(math.sqrt((own**2).sum()) / total)


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


@dataclass(frozen=True)
class Layers:
    """How the layers compare, on problems that a fit did not see. Numbers by layer, the last left out: what is added behind
    it changes no later token."""

    r2: list[float]
    """How well the states tell the confidence of the coming step."""
    r2_error: list[float]
    auc: list[float]
    """How well projections on the difference of class means tell the two kinds of steps apart: one half is chance."""
    auc_error: list[float]

    @classmethod
    def of(cls, moments: Moments, num_layers: int) -> Layers:
        states = torch.stack([state for state, _ in moments.sample[False]])
        steps = [step for _, step in moments.sample[False]]
        target = np.asarray([step.confidence for step in steps])
        groups = [step.problem for step in steps]
        direction = moments.direction()
        told = [
            (
                *ridge_r2(states[:, layer].float().numpy(), target, groups),
                *auc(*(along(moments.sample[True], direction[layer], layer, kind) for kind in (True, False))),
            )
            for layer in range(max(num_layers - 1, 1))
        ]
        return cls(*(list(column) for column in zip(*told, strict=True)))

    def better_than_chance(self, layer: int) -> bool:
        """By both measures; layers that were not measured are not."""
        return (
            layer < len(self.r2)
            and self.r2[layer] - SURE * self.r2_error[layer] > 0
            and self.auc[layer] - SURE * self.auc_error[layer] > 0.5
        )

    @property
    def best(self) -> int | None:
        """The layer with the highest R^2, of those that do better than chance."""
        return max(filter(self.better_than_chance, range(len(self.r2))), key=self.r2.__getitem__, default=None)


def along(
    kept: Iterable[tuple[torch.Tensor, Labelled]], vector: torch.Tensor, layer: int, over: bool
) -> NDArray[np.float64]:
    """Projections of the states of one kind of steps on a vector, in units of it."""
    length = float(vector @ vector)
    return np.asarray([float(state[layer].double() @ vector) / length for state, step in kept if step.over is over])


def build(
    identity: ModelIdentity,
    thresholds: Thresholds,
    moments: Moments,
    mode: Mode,
    calibration: dict[str, str | int | float | None],
    layer: int | None = None,
) -> tuple[Artifact | None, dict[str, Any]]:
    """The artifact, and what the report tells about it.

    The layer is :attr:`Layers.best`. Amplitudes, in units of the vector: ``low`` moves the mean of the over-thinking steps
    onto that of the others; ``floor`` moves nine tenths of them there or beyond; both less where the floor would add more
    than half the norm of the stream.

    Args:
        layer: behind this layer, instead of choosing.

    Returns:
        No artifact where no layer is better than chance.
    """
    layers = Layers.of(moments, identity.num_layers)
    curves = {name: [_number(value) for value in values] for name, values in vars(layers).items()}
    counts = {"steps": moments.seen, "over": moments.counts[True], "under": moments.counts[False]}
    chosen = layers.best if layer is None else layer
    if chosen is None:
        return None, {"notes": [NO_LAYER], "layer": None, **curves, **counts}
    vector = moments.direction()[chosen]
    dose = float(vector.norm()) / float(moments.mean_norm[chosen])
    learnt = {over: along(moments.sample[False], vector, chosen, over) for over in (True, False)}
    reach = max(float(np.quantile(learnt[True], REACH) - learnt[False].mean()), 1.0)
    shrink = min(MOST / (reach * dose), 1.0)
    constants = Constants(**asdict(thresholds), low=-shrink, floor=-shrink * reach, ceiling=shrink * CEILING)
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
    notes = []
    if not layers.better_than_chance(chosen):
        notes.append("the layer that was asked for is not shown to be better than chance on problems held out")
    if shrink < 1:
        notes.append(f"amplitudes are {shrink:.2g} of what moves the classes: the floor may add {MOST} of the stream's norm")
    held = {over: along(moments.sample[True], vector, chosen, over) for over in (True, False)}
    area, error = auc(held[True], held[False])
    report = {
        "notes": notes,
        "layer": chosen,
        **curves,
        "constants": vars(constants),
        "norm": float(vector.norm()),
        "relative_dose": dose,
        "floor_dose": -constants.floor * dose,
        **counts,
        "held_out": {"over": len(held[True]), "under": len(held[False]), "auc": _number(area), "error": _number(error)},
    }
    return Artifact(description, {"vector": vector.float()}), report


NO_LAYER = "no layer is better than chance, on problems held out, both at telling the confidence of the coming step and at "
NO_LAYER += "telling the two kinds of steps apart"


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
    states: States = "delimiter",
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

    Raises:
        SteerError: there is too little to learn from, or nothing was learnt: the report is written, no artifact is.
    """
    from llm_steer.tokens import Vocabulary

    tell = progress or (lambda *_: None)
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tokenizer)
    everywhere = not Vocabulary(tokenizer, len(tokenizer)).has_think_markers
    outputs = collect_outputs(
        collect.source(model, tokenizer), prompts, folder, settings, lambda done: tell("generating", done, len(prompts))
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
    if artifact is not None:
        artifact.save(folder)
    confidences = [step.confidence for output in outputs for step in output.steps(mode, everywhere)]
    report |= {
        "mode": mode,
        "states": states,
        "artifact": None if artifact is None else artifact.content_hash,
        "problems": len(outputs),
        "tokens": sum(len(output.ids) for output in outputs),
        "confidence": np.quantile(confidences, np.linspace(0, 1, 21)).tolist(),
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if artifact is None:
        raise SteerError("layer", None, f"given, if there must be an artifact: {NO_LAYER} (curves: {folder / REPORT})")
    return report
