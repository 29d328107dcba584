"""How well models do, for all clients at once: accuracy, F1, area under the ROC curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.nn.segments import Segments

METRICS = ("accuracy", "f1_macro", "f1_weighted", "auc")
SPLITS = ("val", "test")


class Evaluator:
    """Scores class scores against the labels of validation and test nodes.

    Args:
        graphs: the clients' graphs with their masks.
        classes: number of classes; the area under the curve is computed where there are two.
        device: where predictions will live.
    """

    def __init__(self, graphs: Sequence[Graph], classes: int, device: torch.device) -> None:
        self.classes, self.clients = classes, len(graphs)
        starts = np.cumsum([0, *[graph.num_nodes for graph in graphs]])
        self._nodes: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._segments: list[Segments] = []
        for split in SPLITS:
            nodes = [
                np.flatnonzero(getattr(g.masks, split) & (g.labels != UNLABELLED)) for g in graphs
            ]
            found = [g.labels[n] for g, n in zip(graphs, nodes, strict=True)]
            shifted = [n + start for n, start in zip(nodes, starts, strict=False)]
            self._nodes.append(torch.from_numpy(np.concatenate(shifted)).to(device))
            self._labels.append(torch.from_numpy(np.concatenate(found)).to(device))
            self._segments.append(Segments(tuple(len(n) for n in nodes), device))

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How many nodes each client is scored on, `[clients, splits]`."""
        return np.array([segments.sizes for segments in self._segments], dtype=np.float64).T

    def scores(self, logits: Tensor) -> Tensor:
        """`[clients, splits, metrics]`, NaN where a client has nothing to be scored on."""
        return torch.stack(
            [
                self._scores(logits[nodes], labels, segments)
                for nodes, labels, segments in zip(
                    self._nodes, self._labels, self._segments, strict=True
                )
            ],
            dim=1,
        )

    def _scores(self, logits: Tensor, labels: Tensor, segments: Segments) -> Tensor:
        owner, c = segments.owner, self.classes
        cell = (owner * c + labels) * c + logits.argmax(dim=1)
        confusion = torch.zeros(self.clients * c * c, dtype=torch.float64, device=logits.device)
        confusion.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
        columns = list(from_confusion(confusion.view(-1, c, c)))
        if c == 2:
            columns.append(auc(logits[:, 1] - logits[:, 0], labels, segments))
        else:
            columns.append(torch.full_like(columns[0], math.nan))
        return torch.stack(columns, dim=1)


def from_confusion(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy, macro F1 and weighted F1 from matrices `[clients, true, predicted]`.

    As in scikit-learn, the macro mean is over classes that occur among the labels or predictions.
    """
    hit = confusion.diagonal(dim1=1, dim2=2)
    support, predicted = confusion.sum(dim=2), confusion.sum(dim=1)
    total = support.sum(dim=1)
    either = support + predicted
    f1 = 2 * hit / either.clamp(min=1)
    macro = f1.sum(dim=1) / (either > 0).sum(dim=1)
    return hit.sum(dim=1) / total, macro, (f1 * support).sum(dim=1) / total


def auc(score: Tensor, label: Tensor, segments: Segments) -> Tensor:
    """Area under the ROC curve of each client; NaN for a client with a single class.

    The share of (positive, negative) pairs in which the positive scores higher, ties counting half.
    """
    by_score = torch.sort(score, stable=True).indices
    order = by_score[torch.sort(segments.owner[by_score], stable=True).indices]
    owner, score = segments.owner[order], score[order]
    positive = label[order].to(torch.float64)
    negative = 1 - positive
    fresh = torch.ones_like(owner)
    fresh[1:] = ((owner[1:] != owner[:-1]) | (score[1:] != score[:-1])).long()
    tie = torch.cumsum(fresh, dim=0) - 1
    tied = torch.zeros_like(negative).index_add_(0, tie, negative)
    below = torch.cumsum(tied, dim=0) - tied
    negatives, positives = segments.sum(negative), segments.sum(positive)
    earlier = torch.cumsum(negatives, dim=0) - negatives
    wins = segments.sum(positive * (below[tie] - earlier[owner] + tied[tie] / 2))
    return wins / (positives * negatives)


def describe(scores: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> dict[str, Any]:
    """One split's scores `[clients, metrics]` as the summary gives them.

    A metric's own name is the mean weighted by the clients' scored nodes, `…_client_mean` the plain
    mean, `…_per_client` the list; clients without a value are left out of the means, and null in
    the list.
    """
    found: dict[str, Any] = {}
    for column, metric in enumerate(METRICS):
        values = scores[:, column]
        known = ~np.isnan(values)
        if not known.any():
            if metric != "auc":
                found |= {metric: None, f"{metric}_client_mean": None}
                found[f"{metric}_per_client"] = [None] * len(values)
            continue
        found[metric] = float(np.average(values[known], weights=counts[known]))
        found[f"{metric}_client_mean"] = float(values[known].mean())
        found[f"{metric}_per_client"] = [None if math.isnan(v) else float(v) for v in values]
    return found
