"""Metrics of all clients at once: accuracy, F1, area under the ROC curve, and those of plug-ins.

To add a metric, decorate a function with `register_metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.nn.segments import Segments
from polyphily.registry import Registry

SPLITS = ("val", "test")


@dataclass(frozen=True)
class Predictions:
    """The scored nodes of all clients. Intermediate results that metrics share are cached.

    Attributes:
        logits: class scores, `[n, C]`.
        labels: classes, `[n]`.
        segments: which nodes belong to which client; `segments.sum` adds up values per client.
        classes: C.
    """

    logits: Tensor
    labels: Tensor
    segments: Segments
    classes: int

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.segments.sizes)

    @cached_property
    def confusion(self) -> Tensor:
        """The confusion matrices, float64 `[clients, true, predicted]`."""
        c = self.classes
        cell = (self.segments.owner * c + self.labels) * c + self.logits.argmax(dim=1)
        counts = torch.zeros(self.clients * c * c, dtype=torch.float64, device=cell.device)
        counts.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
        return counts.view(-1, c, c)

    @cached_property
    def averages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Accuracy, macro F1 and weighted F1 of every client."""
        return from_confusion(self.confusion)


MetricFunction = Callable[[Predictions], Tensor]


@dataclass(frozen=True)
class Metric:
    """A metric of node classification.

    Attributes:
        name: the name it is registered under.
        title: the name in reports, such as "AUC".
        function: computes one value per client.
        selects: whether the metric can select a model on validation. Larger must be better.
        classes: the number of classes that the metric needs; None for any.
    """

    name: str
    title: str
    function: MetricFunction
    selects: bool = True
    classes: int | None = None

    def compute(self, predictions: Predictions) -> Tensor:
        """Return the value of every client, float64 `[clients]`; NaN if it is undefined."""
        shape = (predictions.clients,)
        if self.classes not in (None, predictions.classes):
            device = predictions.logits.device
            return torch.full(shape, math.nan, dtype=torch.float64, device=device)
        values = self.function(predictions)
        if not isinstance(values, Tensor) or tuple(values.shape) != shape:
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
            raise UserError(
                f"metric '{self.name}' returned {got}: it must return a tensor with one value per "
                f"client, of shape {shape}"
            )
        return values.to(torch.float64)


class MetricRegistry(Registry[Metric]):
    """The registered metrics in the order of the axis of scores.

    The library's own metrics come first, those of other packages follow in alphabetical order.
    """

    own = ("accuracy", "f1_macro", "f1_weighted", "auc")

    def __iter__(self) -> Iterator[str]:
        others = [name for name in super().__iter__() if name not in self.own]
        return iter((*self.own, *sorted(others)))

    def index(self, name: str) -> int:
        """Return the position of a metric on the axis of scores."""
        return list(self).index(name)

    def selecting(self) -> tuple[str, ...]:
        """Return the names of the metrics that can select a model on validation."""
        return tuple(name for name in self if self[name].selects)


METRICS = MetricRegistry("metric", "metrics")


def register_metric(
    name: str, *, title: str = "", selects: bool = True, classes: int | None = None
) -> Callable[[MetricFunction], MetricFunction]:
    """Make a metric available by name, in scores and for `--metric`.

    The decorated function gets `Predictions`, whose `logits`, `labels` and `segments` are those of
    the scored nodes of all clients. It returns one value from 0 to 1 per client, or NaN for a
    client for which it is undefined:

        @register_metric("balanced_accuracy", title="balanced accuracy")
        def balanced_accuracy(predictions):
            recall = predictions.confusion.diagonal(dim1=1, dim2=2) / predictions.confusion.sum(2)
            return recall.nanmean(dim=1)

    The function runs after every round, on the device of the logits. It should not copy values to
    the host (`.item()`, `.cpu()`, `.tolist()`): that makes rounds on a GPU slower.

    Other packages name the module with such a function as an entry point in the group
    `polyphily.metrics`.

    Args:
        name: what users write; also the key in summaries.
        title: the name in reports; `name` unless given.
        selects: whether the metric can select a model on validation. Larger must be better.
        classes: the number of classes that the metric needs; None for any.
    """

    def add(function: MetricFunction) -> MetricFunction:
        key = METRICS.key(name)
        METRICS.add(key, Metric(key, title or key, function, selects, classes))
        return function

    return add


@register_metric("accuracy")
def accuracy(predictions: Predictions) -> Tensor:
    """Compute the share of nodes whose class is predicted."""
    return predictions.averages[0]


@register_metric("f1_macro", title="macro F1")
def f1_macro(predictions: Predictions) -> Tensor:
    """Compute the mean F1 score over the classes that occur among labels or predictions."""
    return predictions.averages[1]


@register_metric("f1_weighted", title="weighted F1")
def f1_weighted(predictions: Predictions) -> Tensor:
    """Compute the mean F1 score over classes, weighted by their numbers of nodes."""
    return predictions.averages[2]


@register_metric("auc", title="AUC", classes=2)
def area_under_curve(predictions: Predictions) -> Tensor:
    """Compute the area under the ROC curve of the difference of the two logits."""
    logits = predictions.logits
    return auc(logits[:, 1] - logits[:, 0], predictions.labels, predictions.segments)


def check_metric(name: str, classes: int, dataset: str) -> None:
    """Raise a `UserError` if a metric is not defined for the number of classes.

    Args:
        name: the metric.
        classes: the number of classes.
        dataset: the name of the data in the message.
    """
    needed = METRICS.find(name).classes
    if needed not in (None, classes):
        count = "two" if needed == 2 else str(needed)
        raise UserError(f"metric {name} needs {count} classes, {dataset} has {classes}")


def check_score_axis(length: int, where: str) -> None:
    """Raise a `UserError` unless stored scores have as many metrics as are registered now.

    Args:
        length: the length of the axis of metrics in the stored scores.
        where: where they are stored, such as a run folder.
    """
    if length != len(METRICS):
        raise UserError(
            f"{where} has scores of {length} metrics, but {len(METRICS)} are registered now "
            f"({', '.join(METRICS)}): install the metric plug-ins that the run was started with, "
            "or start it anew"
        )


class Evaluator:
    """Computes all metrics on the validation and test nodes.

    Args:
        graphs: the clients' graphs with their masks.
        classes: the number of classes.
        device: the device of the predictions.
    """

    def __init__(self, graphs: Sequence[Graph], classes: int, device: torch.device) -> None:
        self.classes, self.clients = classes, len(graphs)
        self.metrics = tuple(METRICS.values())
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
        """The number of scored nodes of each client, `[clients, splits]`."""
        return np.array([segments.sizes for segments in self._segments], dtype=np.float64).T

    def scores(self, logits: Tensor) -> Tensor:
        """Compute all metrics, `[clients, splits, metrics]`; NaN where one is undefined.

        Args:
            logits: class scores of the nodes of all clients, `[nodes, C]`.
        """
        return torch.stack(
            [
                self._scores(Predictions(logits[nodes], labels, segments, self.classes))
                for nodes, labels, segments in zip(
                    self._nodes, self._labels, self._segments, strict=True
                )
            ],
            dim=1,
        )

    def _scores(self, predictions: Predictions) -> Tensor:
        return torch.stack([metric.compute(predictions) for metric in self.metrics], dim=1)


def from_confusion(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute accuracy, macro F1 and weighted F1 from matrices `[clients, true, predicted]`.

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
    """Compute the area under the ROC curve of each client; NaN for a client with a single class.

    It is the share of (positive, negative) pairs in which the positive node has the higher score.
    Ties count half.
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
    """Return one split's scores `[clients, metrics]` in the form of the summary.

    The key with a metric's name is the mean weighted by the clients' scored nodes,
    `…_client_mean` the unweighted mean, and `…_per_client` the list. Clients without a value are
    left out of the means and are None in the list. A metric that needs a certain number of classes
    is left out if no client has a value.
    """
    found: dict[str, Any] = {}
    for column, (name, metric) in enumerate(METRICS.items()):
        values = scores[:, column]
        known = ~np.isnan(values)
        if not known.any():
            if metric.classes is None:
                found |= {name: None, f"{name}_client_mean": None}
                found[f"{name}_per_client"] = [None] * len(values)
            continue
        found[name] = float(np.average(values[known], weights=counts[known]))
        found[f"{name}_client_mean"] = float(values[known].mean())
        found[f"{name}_per_client"] = [None if math.isnan(v) else float(v) for v in values]
    return found
