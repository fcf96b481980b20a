"""Concepts: what a proposition is detected by. A dictionary of them is an artifact, for one layer of one model.

Kinds (names of the paper in brackets): ``single`` (R_single), one SAE feature; ``top_k`` (R_multi), several, weighted;
``relational`` (R_relation), a decision tree over features; ``tversky``, how far the set of active features is the
concept's; ``direction``, no SAE: difference of means, or a probe.

In the artifact, tensors and constants are named after the concept: ``NAME/rows`` [k, hidden_size] and ``NAME/affine``
[k, 4] (scale, bias, gate, 1 if never negative) say how its features are read, ``NAME/weights`` [k] or ``NAME/tree``
[nodes, 5] (feature, threshold, left, right, probability) how they make a score, ``NAME/steer`` [hidden_size] is the unit
vector that steering adds, and ``NAME/threshold/token`` and so on lie between the scores of the two classes;
``NAME/width/token`` and so on say how fast doubt fades beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from llm_steer.artifact import Artifact, Description, ModelIdentity
from llm_steer.errors import SteerError

from .sae import Code, Features, Normalize, Sae

METHOD = "activation_reasoning"
LEVELS = ("token", "sentence", "max", "mean")
"""Score of one token, largest in a sentence, largest and mean over a whole scope: each has a threshold."""
NORMALIZE: tuple[Normalize, ...] = get_args(Normalize)
Kind = Literal["single", "top_k", "relational", "tversky", "direction"]

MAX_CONCEPTS = 256
MAX_FEATURES = 64
NEVER = float("-inf")


@dataclass(frozen=True)
class Tree:
    """A decision tree. Node 0 is the root; a leaf has no children."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    """Left if the feature is at most that."""
    left: tuple[int, ...]
    """-1 for a leaf."""
    right: tuple[int, ...]
    probability: tuple[float, ...]
    """Of the concept, at a leaf."""

    def score(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., features]`` -> probability ``[...]``, one step at a time: the slow twin of the detector's."""
        flat = values.reshape(-1, values.shape[-1])
        found = []
        for row in flat.tolist():
            node = 0
            while self.left[node] >= 0:
                node = self.left[node] if row[self.feature[node]] <= self.threshold[node] else self.right[node]
            found.append(self.probability[node])
        return torch.tensor(found).view(values.shape[:-1])

    def leaves(self) -> list[tuple[list[tuple[int, bool]], float]]:
        """Each leaf: the inner nodes above it with whether it lies right of them, and its probability."""
        found, waiting = [], [(0, list[tuple[int, bool]]())]
        while waiting:
            node, path = waiting.pop()
            if self.left[node] < 0:
                found.append((path, self.probability[node]))
            else:
                waiting += [(self.left[node], [*path, (node, False)]), (self.right[node], [*path, (node, True)])]
        return found


@dataclass(frozen=True)
class Tversky:
    """Similarity of two sets (Tversky, 1977): what they share, over that plus weighted numbers of what only one has.

    1/2 and 1/2 is Dice's coefficient, 1 and 1 Jaccard's, 0 and 1 the share of the concept's features that are active.
    """

    alpha: float
    """Weight of active features that are not the concept's. 0: the others need not be computed."""
    beta: float
    """Weight of features of the concept that are not active."""


Weight = float | torch.Tensor


def similarity(shared: torch.Tensor, active: torch.Tensor, size: Weight, alpha: Weight, beta: Weight) -> torch.Tensor:
    """Tversky's index, in [0, 1]; 0 where nothing is shared.

    Args:
        shared: how many active features are the concept's.
        active: how many are active, of all.
        size: how many the concept has.
    """
    total = shared + alpha * (active - shared) + beta * (size - shared)
    return torch.where(shared > 0, shared / total.clamp(min=1e-9), 0.0)


@dataclass(frozen=True)
class Concept:
    """How strongly a hidden state shows something, and the direction in which it lies."""

    name: str
    kind: Kind
    features: Features
    """At least one. Of a ``direction``: its row."""
    weights: torch.Tensor
    """float32 ``[features]``; of a tree: ones, for steering only."""
    steer: torch.Tensor
    """float32 ``[hidden_size]``, of length 1: towards the concept."""
    thresholds: dict[str, float]
    """By level; what is above is detected."""
    widths: dict[str, float] = field(default_factory=dict)
    """By level: the score by which a threshold must be passed for odds of e to 1 (soft truth). Empty: not known."""
    tree: Tree | None = None
    indices: tuple[int, ...] = ()
    """Of the features in their SAE."""
    report: dict[str, float] = field(default_factory=dict)
    """``token/auc``, ``token/balanced_accuracy`` and so on, on held-out data."""
    tversky: Tversky | None = None
    code: Code | None = None
    """Of ``tversky``: all features of the SAE; None where it does not ask for the others."""

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Feature values of prepared hidden states: ``[..., hidden_size]`` -> ``[..., features]``, float32."""
        if self.kind == "direction":
            return x @ self.features.rows.T * self.features.scale + self.features.bias
        return self.features(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden_size]`` -> ``[...]``."""
        if self.tversky is not None:
            code = self.features(x) if self.code is None else self.code(x)
            on = (code > 0).float()
            shared = (on if self.code is None else on[..., list(self.indices)]).sum(-1)
            active = shared if self.code is None else on.sum(-1)
            return similarity(shared, active, len(self.weights), self.tversky.alpha, self.tversky.beta)
        values = self.values(x)
        return self.tree.score(values) if self.tree else values @ self.weights


@dataclass(frozen=True)
class Dictionary:
    """Concepts of one layer."""

    concepts: tuple[Concept, ...]
    layer: int
    """The decoder layer behind which hidden states are read."""
    normalize: Normalize = "none"
    whole: Features | None = None
    """All features of the SAE, where the whole code decides: which of a top-k SAE's are active, or how many of any."""
    k: int = 0
    """How many of a top-k SAE's are active at each token."""

    @classmethod
    def of(cls, concepts: Sequence[Concept], layer: int, sae: Sae | None = None, whole: bool = False) -> Dictionary:
        """With the whole SAE if that is asked for, or a concept needs it."""
        normalize: Normalize = sae.normalize if sae else "none"
        code = sae.code if sae and (whole or any(concept.code for concept in concepts)) else None
        return cls(tuple(concepts), layer, normalize, code.features if code else None, code.k if code else 0)

    def __getitem__(self, name: str) -> Concept:
        return next(concept for concept in self.concepts if concept.name == name)

    @property
    def names(self) -> list[str]:
        return [concept.name for concept in self.concepts]

    def to_artifact(self, model: ModelIdentity, calibration: dict[str, str | int | float | None]) -> Artifact:
        """For ``artifact.save(folder)``."""
        tensors: dict[str, torch.Tensor] = {}
        constants: dict[str, float] = {"normalize": float(NORMALIZE.index(self.normalize)), "k": float(self.k)}
        for concept in self.concepts:
            rows = concept.features
            positive = torch.full_like(rows.bias, float(concept.kind != "direction"))
            tensors[f"{concept.name}/rows"] = rows.rows
            gate = rows.gate.clamp(min=torch.finfo(torch.float32).min)  # an artifact's numbers are finite
            tensors[f"{concept.name}/affine"] = torch.stack([rows.scale, rows.bias, gate, positive], 1)
            tensors[f"{concept.name}/weights"] = concept.weights
            tensors[f"{concept.name}/steer"] = concept.steer
            if tree := concept.tree:
                columns = (tree.feature, tree.threshold, tree.left, tree.right, tree.probability)
                tensors[f"{concept.name}/tree"] = torch.tensor([list(map(float, column)) for column in columns]).T
            if concept.tversky:
                weights = {"alpha": concept.tversky.alpha, "beta": concept.tversky.beta}
                constants |= {f"{concept.name}/tversky/{name}": value for name, value in weights.items()}
            constants |= {f"{concept.name}/threshold/{level}": value for level, value in concept.thresholds.items()}
            constants |= {f"{concept.name}/width/{level}": value for level, value in concept.widths.items()}
            constants |= {f"{concept.name}/feature/{i}": float(index) for i, index in enumerate(concept.indices)}
            constants |= {f"{concept.name}/report/{key}": value for key, value in concept.report.items()}
        if self.whole is not None:
            whole = self.whole
            tensors |= {"/rows": whole.rows, "/affine": torch.stack([whole.scale, whole.bias, whole.gate], 1)}
        return Artifact(
            Description(
                method=METHOD, model=model, layer=self.layer, site="after", positions="detection: every token",
                constants=constants, calibration=calibration,
            ),
            {name: tensor.float().contiguous() for name, tensor in tensors.items()},
        )  # fmt: skip

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> Dictionary:
        """Inverse of :meth:`to_artifact`.

        Raises:
            SteerError: a tensor is missing or of another shape.
        """
        tensors, constants = artifact.tensors, artifact.description.constants
        names = [key.removesuffix("/rows") for key in tensors if key.endswith("/rows") and key != "/rows"]
        if not 0 < len(names) <= MAX_CONCEPTS:
            raise SteerError("artifact", f"{len(names)} concepts", f"a dictionary of 1 to {MAX_CONCEPTS} concepts")
        whole = None
        if "/rows" in tensors:
            whole = Features(tensors["/rows"], *tensors["/affine"].unbind(1))
        k = int(constants.get("k", 0))
        code = Code(whole, k) if whole else None
        concepts = tuple(_concept(name, artifact, code) for name in sorted(names))
        return cls(concepts, artifact.behind, NORMALIZE[int(constants.get("normalize", 0))], whole, k)


def check_name(name: str, field: str) -> str:
    """Raise ``SteerError`` for a name that a concept cannot have."""
    if not re.fullmatch(r"[^\W\d][\w .-]{0,63}", name):
        raise SteerError(
            field, name, "a letter, and up to 63 letters, digits, spaces, dots, dashes or underscores behind it"
        )
    return name


def _concept(name: str, artifact: Artifact, code: Code | None) -> Concept:
    size = artifact.description.model.hidden_size

    def take(part: str, *shape: int | None) -> torch.Tensor:
        tensor = artifact.tensors.get(f"{name}/{part}")
        if (
            tensor is None
            or len(tensor.shape) != len(shape)
            or any(want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
        ):
            found = "nothing" if tensor is None else str(list(tensor.shape))
            raise SteerError(
                f"artifact: tensor {name}/{part}", found, f"of shape {['any' if s is None else s for s in shape]}"
            )
        return tensor.float()

    check_name(name, "artifact: concept")
    rows = take("rows", None, size)
    if not 0 < len(rows) <= MAX_FEATURES:
        raise SteerError(f"artifact: tensor {name}/rows", len(rows), f"1 to {MAX_FEATURES} features")
    scale, bias, gate, positive = take("affine", len(rows), 4).unbind(1)
    tree = _tree(name, take("tree", None, 5), len(rows)) if f"{name}/tree" in artifact.tensors else None
    constants = artifact.description.constants

    def part(what: str) -> dict[str, float]:
        prefix = f"{name}/{what}/"
        return {key.removeprefix(prefix): value for key, value in constants.items() if key.startswith(prefix)}

    weights = part("tversky")
    tversky = Tversky(weights["alpha"], weights["beta"]) if weights.keys() == {"alpha", "beta"} else None
    kind: Kind = (
        "relational" if tree else "tversky" if tversky else "direction" if not positive[0]
        else "single" if len(rows) == 1 else "top_k"
    )  # fmt: skip
    thresholds, widths = part("threshold"), part("width")
    if missing := set(LEVELS) - thresholds.keys():
        raise SteerError(f"artifact: {name}/threshold/{sorted(missing)[0]}", None, "a number")
    if narrow := [level for level, width in widths.items() if width <= 0]:
        raise SteerError(f"artifact: {name}/width/{narrow[0]}", widths[narrow[0]], "greater than 0")
    indices = tuple(int(constants.get(f"{name}/feature/{i}", -1)) for i in range(len(rows))) if kind != "direction" else ()
    if code is not None and not all(-1 <= index < len(code.features.bias) for index in indices):
        raise SteerError(f"artifact: {name}/feature", max(indices), f"below {len(code.features.bias)}, the width of its SAE")
    counts_others = tversky is not None and tversky.alpha > 0
    if counts_others and (code is None or -1 in indices):
        raise SteerError(f"artifact: {name}/tversky/alpha", weights["alpha"], "0 in a dictionary without the whole SAE")
    return Concept(
        name, kind, Features(rows, scale, bias, gate), take("weights", len(rows)), take("steer", size), thresholds, widths,
        tree, indices, part("report"), tversky, code if counts_others else None,
    )  # fmt: skip


def _tree(name: str, table: torch.Tensor, features: int) -> Tree:
    feature, threshold, left, right, probability = (column.tolist() for column in table.unbind(1))
    as_int = [[int(value) for value in column] for column in (feature, left, right)]
    for node, (index, below, above) in enumerate(zip(*as_int, strict=True)):
        leaf = below < 0
        # Children come after their parent, so there is no cycle.
        if not leaf and not (0 <= index < features and node < below < len(feature) and node < above < len(feature)):
            raise SteerError(
                f"artifact: tensor {name}/tree", f"node {node}", "a tree whose children come after their parents"
            )
    return Tree(tuple(as_int[0]), tuple(threshold), tuple(as_int[1]), tuple(as_int[2]), tuple(probability))


def unit(vector: torch.Tensor) -> torch.Tensor:
    """Of length 1.

    Raises:
        SteerError: it is zero, or not finite.
    """
    norm = vector.double().norm()
    if not bool(torch.isfinite(norm)) or norm == 0:
        raise SteerError("concept", f"a vector of norm {float(norm)}", "a direction: the two classes do not differ")
    scaled: torch.Tensor = (vector.double() / norm).float()
    return scaled


def feature_concept(
    name: str, sae_features: Features, decoder: torch.Tensor, weights: Sequence[float], thresholds: dict[str, float],
    tree: Tree | None = None, indices: Sequence[int] = (), report: dict[str, float] | None = None,
) -> Concept:  # fmt: skip
    """A concept of some features of an SAE.

    Args:
        decoder: ``[features, hidden_size]``, their rows of the decoder. Steering adds the sum of their unit vectors times
            the weights, brought to length 1 (the paper's Sum_j w_j u_j).
    """
    kind: Kind = "relational" if tree else "single" if len(weights) == 1 else "top_k"
    weight = torch.tensor(weights, dtype=torch.float32)
    direction = unit((weight[:, None] * torch.nn.functional.normalize(decoder.float(), dim=1)).sum(0))
    return Concept(name, kind, sae_features, weight, direction, thresholds, {}, tree, tuple(indices), report or {})


def direction_concept(
    name: str, direction: torch.Tensor, offset: float, thresholds: dict[str, float], report: dict[str, float] | None = None
) -> Concept:
    """A concept of a direction; the score is ``direction @ x + offset``."""
    row = direction.float()[None]
    one = torch.ones(1)
    features = Features(row, one, torch.tensor([offset]), torch.tensor([NEVER]))
    return Concept(name, "direction", features, one, unit(direction), thresholds, report=report or {})
