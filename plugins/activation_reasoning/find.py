"""Finding concepts: features or directions that tell labelled texts apart, with thresholds between the two classes.

Chosen on one part of the data, calibrated and judged on the other. A text counts for the part that its hash says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from llm_steer.errors import SteerError

from .concepts import LEVELS, Concept, Tversky, check_name, direction_concept, feature_concept, unit
from .concepts import Tree as DecisionTree
from .sae import Sae

Method = Literal["single", "top_k", "relational", "tversky", "direction", "probe"]
DICE = Tversky(0.5, 0.5)

HELD_OUT = 0.4
"""Share of the texts that thresholds and figures come from."""
CANDIDATES = 16
"""Features that a tree chooses from."""
DEPTH = 4
MAX_TEXTS = 20_000
MAX_WEIGHT = 1000.0
"""Of Tversky's weights."""
NARROW = 1e-4
"""Widths are between that many mean distances from the threshold and its inverse."""
MIN_TEXTS = 4
"""With a label, and without it, in each part."""


@dataclass(frozen=True)
class Example:
    """One labelled text."""

    text: str
    labels: frozenset[str]
    spans: tuple[tuple[int, int, str], ...] = ()
    """Characters from, to, label: what is labelled, if it is not the whole text."""

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.text.encode()).digest()[0] / 256 < HELD_OUT


@dataclass(frozen=True)
class Encoded:
    """A text's tokens without its first, which in most models is an attention sink."""

    hidden: torch.Tensor
    """float32 ``[tokens, hidden_size]``, as the SAE takes them."""
    labelled: dict[str, torch.Tensor]
    """By concept: bool ``[tokens]``."""
    held_out: bool


def read_examples(path: Path) -> list[Example]:
    """JSON lines ``{"text": ..., "labels": [...]}``, or ``"spans": [[from, to, label], ...]`` for parts of the text.

    Raises:
        SteerError: naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise SteerError("--data", str(path), f"a readable file of JSON lines ({error})") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            spans = tuple((int(a), int(b), str(label)) for a, b, label in row.get("spans", ()))
            labels = frozenset(map(str, row.get("labels", ()))) | {label for _, _, label in spans}
            found.append(Example(str(row["text"]), labels, spans))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            valid = f'{{"text": ..., "labels": [...]}} ({type(error).__name__}: {error})'
            raise SteerError(f"--data, line {number}", line, valid) from error
    if len(found) > MAX_TEXTS:
        raise SteerError("--data", f"{len(found)} texts", f"at most {MAX_TEXTS}")
    return found


def labels_of_tokens(example: Example, label: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens are labelled: those that end inside a span, or all."""
    spans = [(a, b) for a, b, name in example.spans if name == label]
    if not spans:
        return [label in example.labels] * len(offsets)
    return [any(a < end <= b for a, b in spans) for _, end in offsets]


def find(
    name: str, examples: Sequence[Encoded], method: Method, sae: Sae | None = None, top_k: int = 5, tversky: Tversky = DICE
) -> Concept:
    """Find one concept.

    Args:
        examples: with the concept's labels.
        sae: for the methods that take one.
        top_k: features of ``top_k`` and ``tversky``.
        tversky: weights of ``tversky``.

    Raises:
        SteerError: too few examples, or none that differ.
    """
    check_name(name, "concept")
    for field, weight in (("--alpha", tversky.alpha), ("--beta", tversky.beta)):
        if not 0 <= weight <= MAX_WEIGHT:
            raise SteerError(field, weight, f"between 0 and {MAX_WEIGHT:g}")
    fit = [e for e in examples if not e.held_out]
    for what, part in (("to choose from", fit), ("to judge by", [e for e in examples if e.held_out])):
        there = sum(bool(e.labelled[name].any()) for e in part)
        if min(there, len(part) - there) < MIN_TEXTS:
            counts = f"{there} texts with and {len(part) - there} without it {what}"
            raise SteerError(f"concept {name}", counts, f"at least {MIN_TEXTS} of each: more data is needed")
    x, y = torch.cat([e.hidden for e in fit]), torch.cat([e.labelled[name] for e in fit])
    if method in ("direction", "probe"):
        direction, offset = (_means if method == "direction" else _probe)(x, y)
        raw = direction_concept(name, direction, offset, {})
    else:
        if sae is None:
            raise SteerError("--sae", None, f"given with --method {method}; without an SAE use direction or probe")
        raw = _from_features(name, x, y, method, sae, top_k)
        if method == "tversky":
            raw = replace(raw, kind="tversky", tversky=tversky, code=sae.code if tversky.alpha else None)
    return calibrated(raw, [e for e in examples if e.held_out])


def calibrated(concept: Concept, examples: Sequence[Encoded]) -> Concept:
    """The concept with thresholds and figures from these examples."""
    scores: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {level: ([], []) for level in LEVELS}
    for example in examples:
        score, labels = concept.score(example.hidden), example.labelled[concept.name]
        whole = labels.any()[None]
        for level, value, label in (
            ("token", score, labels), ("sentence", score.max()[None], whole), ("max", score.max()[None], whole),
            ("mean", score.mean()[None], whole),
        ):  # fmt: skip
            scores[level][0].append(value)
            scores[level][1].append(label)
    thresholds, widths, report = {}, {}, {}
    for level, (values, labels_) in scores.items():
        value, label = torch.cat(values), torch.cat(labels_)
        thresholds[level], report[f"{level}/balanced_accuracy"] = threshold(value, label)
        widths[level] = width(value - thresholds[level], label)
        report[f"{level}/auc"] = auc(value, label)
    return replace(concept, thresholds=thresholds, widths=widths, report=report)


def threshold(scores: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Where to cut: midway between two neighbouring scores, where balanced accuracy is highest (of equals, where the gap
    is widest).

    Returns:
        The threshold, and the balanced accuracy of ``score > threshold``.
    """
    order = scores.double().argsort(descending=True)
    value, label = scores.double()[order], labels[order].double()
    positives, negatives = label.sum(), (1 - label).sum()
    if positives == 0 or negatives == 0:
        raise SteerError("labels", f"{int(positives)} of {len(labels)}", "of both classes")
    balanced = (label.cumsum(0) / positives + 1 - (1 - label).cumsum(0) / negatives) / 2
    gap = value[:-1] - value[1:]
    cut = gap > 0
    if not bool(cut.any()):  # one score for all
        return float(value[0]), 0.5
    best = balanced[:-1][cut].max()
    at = torch.where(cut & (balanced[:-1] >= best - 1e-12), gap, -1.0).argmax()
    return float((value[at] + value[at + 1]) / 2), float(best)


def width(beyond: torch.Tensor, labels: torch.Tensor) -> float:
    """How fast doubt fades: ``w`` for which ``sigmoid(beyond / w)`` is likeliest to give the labels, both classes weighing
    the same, with Platt's targets (1999), so that it is positive where the classes are apart.

    Args:
        beyond: scores less their threshold.
    """
    x = beyond.double()
    positives, negatives = labels.sum().double(), (~labels).sum().double()
    target = torch.where(labels, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    weight = torch.where(labels, 0.5 / positives, 0.5 / negatives)
    scale = float((weight * x.abs()).sum())
    if not scale:
        return 1.0
    # The likelihood's slope in 1 / w falls: halve the interval of its logarithm.
    low, high = math.log(NARROW / scale), math.log(1 / NARROW / scale)
    for _ in range(60):
        middle = (low + high) / 2
        rising = float((weight * (target - torch.sigmoid(x * math.exp(middle))) * x).sum()) > 0
        low, high = (middle, high) if rising else (low, middle)
    return math.exp(-(low + high) / 2)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve; ties count half."""
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    rank = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    positives = int(labels.sum())
    negatives = len(labels) - positives
    return float((rank[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_decay(count: int) -> list[float]:
    """Weights ``1 - ln(i + 1) / ln(K + 1)``, of mean 1 (the paper's default)."""
    raw = [1 - math.log(i + 1) / math.log(count + 1) for i in range(count)]
    return [value * count / sum(raw) for value in raw]


# ----------------------------------------------------------------------------------------------------------------------


def _means(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Difference of means, and the offset that puts the midpoint at 0."""
    high, low = x[y].double().mean(0), x[~y].double().mean(0)
    direction = unit(high - low)
    return direction, -float(direction.double() @ (high + low)) / 2


def _probe(x: torch.Tensor, y: torch.Tensor, steps: int = 100, decay: float = 1e-2) -> tuple[torch.Tensor, float]:
    """Logistic regression on standardised hidden states, both classes weighing the same."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    z = (x - mean) / std
    weight = torch.where(y, 0.5 / y.sum(), 0.5 / (~y).sum())
    w, b = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([w, b], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z @ w + b, y.float(), weight, reduction="sum")
        loss = loss + decay * w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    direction = (w / std).detach()
    return direction, float(b.detach() - direction @ mean)


def _from_features(name: str, x: torch.Tensor, y: torch.Tensor, method: Method, sae: Sae, top_k: int) -> Concept:
    count = {"single": 1, "top_k": top_k, "tversky": top_k}.get(method, CANDIDATES)
    high, low = _mean_code(sae, x[y]), _mean_code(sae, x[~y])
    difference = high - low
    indices = difference.topk(min(count, sae.width)).indices
    indices = indices[difference[indices] > 0]
    if not len(indices):
        raise SteerError(f"concept {name}", "no feature", "one that some feature of the SAE is more active for")
    features, decoder = sae.features(indices), sae.decoder[indices]
    if method != "relational":
        return feature_concept(name, features, decoder, log_decay(len(indices)), {}, None, indices.tolist())
    tree = grow(features(x), y, DEPTH)
    # Steering goes towards features of which more makes the concept likelier.
    weights = difference[indices] / difference[indices].sum()
    return feature_concept(name, features, decoder, weights.tolist(), {}, tree, indices.tolist())


def _mean_code(sae: Sae, x: torch.Tensor, batch: int = 1024) -> torch.Tensor:
    return sum((sae.encode(x[at : at + batch]).sum(0) for at in range(0, len(x), batch)), torch.zeros(sae.width)) / len(x)


def grow(values: torch.Tensor, labels: torch.Tensor, depth: int) -> DecisionTree:
    """A decision tree (CART, Gini impurity, both classes weighing the same).

    Args:
        values: float32 ``[rows, features]``.
        labels: bool ``[rows]``.
    """
    weight = torch.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum()).double()
    feature, cut, left, right, probability = list[int](), list[float](), list[int](), list[int](), list[float]()

    def node(rows: torch.Tensor, level: int) -> int:
        number = len(feature)
        own, label = weight[rows], labels[rows]
        total = float(own.sum())
        feature.append(0)
        cut.append(0.0)
        left.append(-1)
        right.append(-1)
        probability.append(float(own[label].sum()) / total)
        split = _best_split(values[rows], label, own) if level and 0 < probability[number] < 1 else None
        if split is not None:
            index, at = split
            below = values[rows, index] <= at
            feature[number], cut[number] = index, at
            left[number] = node(rows[below], level - 1)
            right[number] = node(rows[~below], level - 1)
        return number

    node(torch.arange(len(labels)), depth)
    return DecisionTree(tuple(feature), tuple(cut), tuple(left), tuple(right), tuple(probability))


def _best_split(values: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> tuple[int, float] | None:
    best: tuple[float, int, float] | None = None
    for index in range(values.shape[1]):
        value, order = values[:, index].sort()
        w, y = weight[order], labels[order].double()
        below, yes = w.cumsum(0), (w * y).cumsum(0)
        total, positive = below[-1], yes[-1]
        gini = 2 * (yes * (1 - yes / below) + (positive - yes) * (1 - (positive - yes) / (total - below).clamp(min=1e-12)))
        gini = torch.where(value[1:] > value[:-1], gini[:-1], float("inf"))
        if not len(gini):
            continue
        at = int(gini.argmin())
        found = (float(gini[at]), index, float((value[at] + value[at + 1]) / 2))
        if math.isfinite(found[0]) and (best is None or found[0] < best[0] - 1e-12):
            best = found
    return None if best is None else best[1:]


def word_auc(examples: Sequence[Example], name: str, words: Sequence[str]) -> float:
    """AUC of plain word match on whole texts: how many of the words a text holds. The baseline."""
    scores = torch.tensor([float(sum(word.lower() in e.text.lower() for word in words)) for e in examples])
    return auc(scores, torch.tensor([name in e.labels for e in examples]))
