"""From hidden states to scores of concepts.

Only the rows of the encoder that some concept uses are computed, so the cost does not depend on the SAE's width; the whole
code is, where it decides: which features of a top-k SAE are active, or how many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .concepts import Concept, Dictionary, similarity
from .sae import Features, normalized, top_codes


class Scorer:
    """Scores of all concepts of a dictionary that are in use: one matrix product a token.

    Args:
        dictionary: where the concepts are.
        names: the ones that are needed, in the order of the columns.
        device: where it runs.
    """

    def __init__(self, dictionary: Dictionary, names: Sequence[str], device: torch.device) -> None:
        concepts = [dictionary[name] for name in names]
        self._normalize = dictionary.normalize
        self._rows = torch.cat([c.features.rows for c in concepts]).to(device)
        self._scale = torch.cat([c.features.scale for c in concepts]).to(device)
        self._bias = torch.cat([c.features.bias for c in concepts]).to(device)
        self._gate = torch.cat([c.features.gate for c in concepts]).to(device)
        kinds = [c.kind != "direction" for c in concepts for _ in c.weights]
        self._floor = torch.tensor([0.0 if positive else float("-inf") for positive in kinds], device=device)
        ends = torch.tensor([0, *[len(c.weights) for c in concepts]]).cumsum(0).tolist()
        mix = torch.zeros(ends[-1], len(concepts))
        for column, concept in enumerate(concepts):
            if concept.tree is None and concept.tversky is None:
                mix[ends[column] : ends[column + 1], column] = concept.weights
        self._mix = mix.to(device)
        self._trees = _Trees(concepts, ends, device) if any(c.tree for c in concepts) else None
        similar = [(column, concept) for column, concept in enumerate(concepts) if concept.tversky]
        self._sets = _Sets(similar, ends, device) if similar else None
        self._all: Features | None = None
        if (whole := dictionary.whole) is not None:
            self._all = Features(*(part.to(device) for part in (whole.rows, whole.scale, whole.bias, whole.gate)))
        self._k = dictionary.k
        index = [c.indices or (-1,) * len(c.weights) for c in concepts]
        self._index = torch.tensor([i for indices in index for i in indices], device=device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, concepts]``; not finite where ``hidden`` is not.

        Args:
            hidden: ``[tokens, hidden_size]``.
        """
        x = normalized(hidden.float(), self._normalize)
        dot = x @ self._rows.T
        values = torch.maximum(self._scale * dot + self._bias, self._floor)
        values = torch.where(dot > self._gate, values, 0.0)
        active = None
        if self._all is not None and (self._k or self._sets is not None):
            code = self._all(x)
            if self._k:  # a feature counts if it is among the k largest of all
                code = torch.where(code >= code.topk(self._k, dim=1).values[:, -1:], code, 0.0)
                values = torch.where(self._index < 0, values, code[:, self._index.clamp(min=0)])
            active = (code > 0).sum(1, keepdim=True)
        scores = values @ self._mix
        if self._trees is not None:
            scores = scores + self._trees(values)
        if self._sets is not None:
            scores = scores + self._sets(values, active)
        return torch.where(torch.isfinite(dot.sum(1, keepdim=True)), scores, float("nan"))

    def released(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the released code takes for detected: a feature of the concept is among the token's two largest of the whole
        SAE, and no other concept is stronger. bool ``[tokens, concepts]``; thresholds play no part."""
        assert self._all is not None
        code = top_codes(self._all(normalized(hidden.float(), self._normalize)), 2)
        values = torch.where(self._index >= 0, code[:, self._index.clamp(min=0)], 0.0)
        score = values @ (self._mix != 0).float()
        return (score > 0) & (score == score.amax(1, keepdim=True))


class _Trees:
    """Decision trees as comparisons: a leaf is reached where every split above it goes its way."""

    def __init__(self, concepts: Sequence[Concept], ends: Sequence[int], device: torch.device) -> None:
        feature, threshold = list[int](), list[float]()
        paths: list[tuple[list[tuple[int, bool]], float, int]] = []
        for column, concept in enumerate(concepts):
            if concept.tree is None:
                continue
            offset = len(feature)
            feature += [ends[column] + index for index in concept.tree.feature]
            threshold += concept.tree.threshold
            for path, probability in concept.tree.leaves():
                paths.append(([(offset + node, right) for node, right in path], probability, column))
        ways = torch.zeros(len(feature), len(paths))
        needed = torch.zeros(len(paths))
        self._probability = torch.zeros(len(paths), len(concepts), device=device)
        for leaf, (path, probability, column) in enumerate(paths):
            for node, right in path:
                ways[node, leaf] = 1.0 if right else -1.0
            needed[leaf] = len(path)
            self._probability[leaf, column] = probability
        self._feature = torch.tensor(feature, device=device)
        self._threshold = torch.tensor(threshold, device=device)
        self._ways, self._needed = ways.to(device), needed.to(device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        went = torch.where(values[:, self._feature] > self._threshold, 1.0, -1.0)
        return ((went @ self._ways) == self._needed).float() @ self._probability


class _Sets:
    """Tversky similarities of the active features and each concept's."""

    def __init__(self, concepts: Sequence[tuple[int, Concept]], ends: Sequence[int], device: torch.device) -> None:
        self._member = torch.zeros(ends[-1], len(ends) - 1, device=device)
        alpha, beta = torch.zeros(2, len(ends) - 1, device=device)
        for column, concept in concepts:
            assert concept.tversky is not None
            self._member[ends[column] : ends[column + 1], column] = 1
            alpha[column], beta[column] = concept.tversky.alpha, concept.tversky.beta
        self._alpha, self._beta, self._size = alpha, beta, self._member.sum(0)

    def __call__(self, values: torch.Tensor, active: torch.Tensor | None) -> torch.Tensor:
        """``[tokens, features]`` of all concepts and numbers of active ones ``[tokens, 1]`` -> ``[tokens, concepts]``."""
        shared = (values > 0).float() @ self._member
        return similarity(shared, shared if active is None else active, self._size, self._alpha, self._beta)
