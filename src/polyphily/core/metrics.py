"""Metrics of all clients at once, from confusion matrices and rankings, and those of plug-ins.

To add a metric, decorate a function with `register_metric`. The metrics of torchmetrics take one
client at a time and check values on the host; those here take the nodes of all clients, stay on the
device, and share one sort. Tests compare them with scikit-learn and torchmetrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.errors import UserError, unknown
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.imbalance import train_counts
from polyphily.nn.segments import Segments
from polyphily.registry import Registry

SPLITS = ("val", "test")


@dataclass(frozen=True)
class Predictions:
    """The scored nodes of all clients. Intermediate results that metrics share are cached.

    Where several models or splits are scored in one pass, each counts as further clients.

    Attributes:
        logits: class scores, `[n, C]`.
        labels: classes, `[n]`.
        segments: which nodes belong to which client; `segments.sum` adds up values per client.
        classes: C.
        positive: the position of the positive class of two.
    """

    logits: Tensor
    labels: Tensor
    segments: Segments
    classes: int
    positive: int = 1

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.segments.sizes)

    @cached_property
    def confusion(self) -> Tensor:
        """The confusion matrices, float64 `[clients, true, predicted]`."""
        c = self.classes
        cell = (self.segments.owner * c + self.labels) * c + self.logits.max(dim=1).indices
        counts = torch.zeros(self.clients * c * c, dtype=torch.float64, device=cell.device)
        counts.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
        return counts.view(-1, c, c)

    @cached_property
    def averages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Accuracy, macro F1 and weighted F1 of every client."""
        return from_confusion(self.confusion)

    @cached_property
    def ranking(self) -> Ranking:
        """The nodes ranked by the positive class of two or, with more, by each class in turn."""
        if self.classes == 2:
            other = 1 - self.positive
            score = (self.logits[:, self.positive] - self.logits[:, other]).unsqueeze(1)
            return Ranking.of(score, (self.labels == self.positive).unsqueeze(1), self.segments)
        hit = self.labels.unsqueeze(1) == torch.arange(self.classes, device=self.labels.device)
        return Ranking.of(self.logits.double().log_softmax(dim=1), hit, self.segments)


@dataclass(frozen=True)
class Ranking:
    """The nodes of each client in ascending order of a score, for one or several scores.

    Nodes of equal score form a group. A threshold separates groups, so that each group is a point
    of the precision-recall curve: all nodes with at least its score are called positive. All
    counts are of nodes of the same client, and whole numbers in float64, so that sums are exact.

    Attributes:
        segments: the nodes of each client.
        positive: 1 at positive nodes, `[n, scores]`.
        positives: the number of positive nodes, `[clients, scores]`.
        negatives: the number of other nodes, `[clients, scores]`.
        below: the number of negative nodes with a lower score, `[n, scores]`.
        tied: the number of negative nodes with the same score, `[n, scores]`.
        reached: the number of positive nodes with at least this score, `[n, scores]`.
    """

    segments: Segments
    positive: Tensor
    positives: Tensor
    negatives: Tensor
    below: Tensor
    tied: Tensor
    reached: Tensor

    @classmethod
    def of(cls, score: Tensor, hit: Tensor, segments: Segments) -> Ranking:
        """Rank nodes by one or several scores.

        Args:
            score: `[n, scores]`.
            hit: which nodes are positive, `[n, scores]`.
            segments: the nodes of each client.
        """
        by_score = torch.sort(score, dim=0, stable=True).indices
        order = by_score.gather(0, torch.sort(segments.owner[by_score], dim=0, stable=True).indices)
        score, positive = score.gather(0, order), hit.gather(0, order).to(torch.float64)
        owner = segments.owner.unsqueeze(1)
        fresh = torch.ones_like(order)
        fresh[1:] = ((owner[1:] != owner[:-1]) | (score[1:] != score[:-1])).long()
        group = torch.cumsum(fresh.T.reshape(-1), dim=0) - 1  # one score after the other
        negative = 1 - positive
        positives, negatives = segments.sum(positive), segments.sum(negative)

        def lower(values: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
            """Return each node's sum over lower groups of its client, and over its own group."""
            own = torch.zeros(order.numel(), dtype=torch.float64, device=order.device)
            own = own.index_add_(0, group, values.T.reshape(-1))
            before = (torch.cumsum(own, dim=0) - own)[group].view(order.T.shape).T
            blocks = totals.T.reshape(-1)  # the clients of one score after those of the other
            earlier = (torch.cumsum(blocks, dim=0) - blocks).view(totals.T.shape).T
            return before - earlier[segments.owner], own[group].view(order.T.shape).T

        below, tied = lower(negative, negatives)
        reached = positives[segments.owner] - lower(positive, positives)[0]
        return cls(segments, positive, positives, negatives, below, tied, reached)

    @cached_property
    def area(self) -> Tensor:
        """The area under the ROC curve, `[clients, scores]`; NaN without nodes of both kinds.

        It is the share of (positive, negative) pairs in which the positive node has the higher
        score. Ties count half.
        """
        wins = self.segments.sum(self.positive * (self.below + self.tied / 2))
        return wins / (self.positives * self.negatives)

    @cached_property
    def precision(self) -> Tensor:
        """The precision if all nodes with at least this score are called positive."""
        return self.reached / (self.reached + self.negatives[self.segments.owner] - self.below)

    @cached_property
    def average_precision(self) -> Tensor:
        """The mean precision at positive nodes, `[clients, scores]`; NaN without positive nodes."""
        return self.segments.sum(self.positive * self.precision) / self.positives

    def recall_at(self, precision: float) -> Tensor:
        """Return the largest recall at which the precision is at least this much, `[clients, …]`.

        It is 0 if no threshold has this precision, and NaN without positive nodes.
        """
        enough = torch.where(self.precision >= precision, self.reached, 0)
        owner = self.segments.owner.unsqueeze(1).expand_as(enough)
        most = torch.zeros_like(self.positives).scatter_reduce_(0, owner, enough, "amax")
        return most / self.positives


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
        ranks: whether the metric ranks nodes (`Predictions.ranking`). With more than two classes,
            rankings are computed only if a metric that needs them selects.
    """

    name: str
    title: str
    function: MetricFunction
    selects: bool = True
    classes: int | None = None
    ranks: bool = False

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
    Names are written with underscores; dashes are accepted. `recall@precision=0.8` is found for
    any precision, without being registered.
    """

    own = (
        "accuracy",
        "f1_macro",
        "f1_weighted",
        "auc",
        "auprc",
        "f1",
        "balanced_accuracy",
        "recall_at_precision_0.9",
    )

    def __iter__(self) -> Iterator[str]:
        others = [name for name in super().__iter__() if name not in self.own]
        return iter((*self.own, *sorted(others)))

    def key(self, name: str) -> str:
        """Return the name of a metric as in summaries.

        >>> METRICS.key("Macro-F1"), METRICS.key("recall@precision=0.90")
        ('f1_macro', 'recall_at_precision_0.9')
        """
        key = super().key(name).replace("-", "_")
        if (found := RECALL.fullmatch(key)) and 0 < float(found[1]) < 1:
            return f"{RECALL_KEY}{float(found[1]):g}"
        return ALIASES.get(key, key)

    def find(self, name: str) -> Metric:
        key = self.key(name)
        if key.startswith(RECALL_KEY) and key not in self and RECALL.fullmatch(key):
            return recall_at_precision(float(key.removeprefix(RECALL_KEY)))
        return super().find(name)

    def index(self, name: str) -> int:
        """Return the position of a registered metric on the axis of scores."""
        return list(self).index(name)

    def selecting(self) -> tuple[str, ...]:
        """Return the names of the metrics that can select a model on validation."""
        return tuple(name for name in self if self[name].selects)


RECALL = re.compile(r"recall(?:@precision=|_at_precision_)(0?\.[0-9]+)")
RECALL_KEY = "recall_at_precision_"
ALIASES = {"macro_f1": "f1_macro", "weighted_f1": "f1_weighted"}
METRICS = MetricRegistry("metric", "metrics")


def register_metric(
    name: str,
    *,
    title: str = "",
    selects: bool = True,
    classes: int | None = None,
    ranks: bool = False,
) -> Callable[[MetricFunction], MetricFunction]:
    """Make a metric available by name, in scores and for `--metric`.

    The decorated function gets `Predictions`, whose `logits`, `labels` and `segments` are those of
    the scored nodes of all clients. It returns one value from 0 to 1 per client, or NaN for a
    client for which it is undefined:

        @register_metric("worst_recall", title="worst recall")
        def worst_recall(predictions):
            recall = predictions.confusion.diagonal(dim1=1, dim2=2) / predictions.confusion.sum(2)
            worst = recall.nan_to_num(nan=2.0).amin(dim=1)  # NaN: a class that a client lacks
            return worst.masked_fill(worst > 1, math.nan)

    The function runs after every round, on the device of the logits. It should not copy values to
    the host (`.item()`, `.cpu()`, `.tolist()`): that makes rounds on a GPU slower.

    Other packages name the module with such a function as an entry point in the group
    `polyphily.metrics`.

    Args:
        name: what users write; also the key in summaries, with underscores for dashes.
        title: the name in reports; `name` unless given.
        selects: whether the metric can select a model on validation. Larger must be better.
        classes: the number of classes that the metric needs; None for any.
        ranks: whether it uses `Predictions.ranking`; with more than two classes it is then computed
            only if such a metric selects.
    """

    def add(function: MetricFunction) -> MetricFunction:
        key = METRICS.key(name)
        METRICS.add(key, Metric(key, title or key, function, selects, classes, ranks))
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


@register_metric("f1", title="F1")
def f1(predictions: Predictions) -> Tensor:
    """Compute the F1 score of the positive class of two, or the macro mean of more classes.

    With two classes it is undefined for a client without positive nodes.
    """
    if predictions.classes != 2:
        return predictions.averages[1]
    confusion, at = predictions.confusion, predictions.positive
    support, predicted = confusion[:, at].sum(dim=1), confusion[:, :, at].sum(dim=1)
    found = 2 * confusion[:, at, at] / (support + predicted)
    return torch.where(support > 0, found, math.nan)


@register_metric("balanced_accuracy", title="balanced accuracy")
def balanced_accuracy(predictions: Predictions) -> Tensor:
    """Compute the mean recall over the classes that the client's nodes have."""
    support = predictions.confusion.sum(dim=2)
    return (predictions.confusion.diagonal(dim1=1, dim2=2) / support).nanmean(dim=1)


@register_metric("auc", title="AUC", ranks=True)
def area_under_curve(predictions: Predictions) -> Tensor:
    """Compute the area under the ROC curve; of more than two classes, one against the others.

    The mean is over the classes for which it is defined.
    """
    return predictions.ranking.area.nanmean(dim=1)


@register_metric("auprc", title="AUPRC", ranks=True)
def area_under_precision_recall(predictions: Predictions) -> Tensor:
    """Compute the average precision: the area under the precision-recall curve.

    With more than two classes it is the mean over the classes that the client's nodes have.
    """
    return predictions.ranking.average_precision.nanmean(dim=1)


@cache
def recall_at_precision(precision: float) -> Metric:
    """Return the metric of the largest recall at which the precision is at least this much."""

    def function(predictions: Predictions) -> Tensor:
        """Compute the largest recall at which the precision is at least this much."""
        return predictions.ranking.recall_at(precision).nanmean(dim=1)

    name = f"{RECALL_KEY}{precision:g}"
    return Metric(name, f"recall at precision {precision:g}", function, ranks=True)


METRICS.add(f"{RECALL_KEY}0.9", recall_at_precision(0.9))


def score_axis(metric: str | None = None) -> tuple[str, ...]:
    """Return the names on the axis of scores of a run: all metrics, and the one that selects.

    Args:
        metric: the metric that selects, if it may be one that is not registered by itself, such as
            `recall_at_precision_0.8`.
    """
    names = tuple(METRICS)
    return names if metric is None or metric in names else (*names, METRICS.find(metric).name)


def positive_index(classes: Sequence[str], positive: str = "") -> int | None:
    """Return the position of the positive class of two; None if there are more classes.

    Args:
        classes: the names of the classes.
        positive: the name of the positive class; the second unless given.

    Raises:
        UserError: for a name that is not a class, or if there are not two classes.
    """
    if positive and len(classes) != 2:
        raise UserError(f"--positive {positive}: it is for two classes, there are {len(classes)}")
    if positive and positive not in classes:
        raise unknown("class", positive, classes)
    if len(classes) != 2:
        return None
    return list(classes).index(positive) if positive else 1


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


def first_axis() -> tuple[str, ...]:
    """Return the axis of scores of early versions, whose checkpoints do not name their metrics."""
    others = [name for name in METRICS if name not in METRICS.own]
    return ("accuracy", "f1_macro", "f1_weighted", "auc", *others)


def align_scores(
    scores: npt.NDArray[np.float64], stored: Sequence[str], wanted: Sequence[str], where: str
) -> npt.NDArray[np.float64]:
    """Return stored scores `[…, metrics]` with the metrics that are wanted now, in their order.

    Metrics that were not stored are NaN.

    Args:
        scores: the stored scores.
        stored: the names of their metrics.
        wanted: the names on the axis of the result.
        where: where they are stored, such as a run folder.

    Raises:
        UserError: if a stored metric is not registered now.
    """
    gone = [name for name in stored if name not in wanted]
    if gone or len(stored) != scores.shape[-1]:
        raise UserError(
            f"{where} has scores of other metrics ({', '.join(gone or stored)}) than those that "
            f"are registered now ({', '.join(wanted)}): install the metric plug-ins that the run "
            "was started with, or start it anew"
        )
    found = np.full((*scores.shape[:-1], len(wanted)), math.nan)
    for column, name in enumerate(stored):
        found[..., wanted.index(name)] = scores[..., column]
    return found


class Evaluator:
    """Computes all metrics on the validation and test nodes.

    Args:
        graphs: the clients' graphs with their masks.
        classes: the number of classes.
        device: the device of the predictions.
        metric: the metric that selects; it decides whether rankings of more than two classes are
            computed.
        positive: the position of the positive class of two.

    Attributes:
        metrics: the metrics on the axis of scores.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        classes: int,
        device: torch.device,
        metric: str = "accuracy",
        positive: int | None = None,
    ) -> None:
        self.classes, self.clients = classes, len(graphs)
        self.positive = 1 if positive is None else positive
        self.metrics = tuple(METRICS.find(name) for name in score_axis(metric))
        self._ranks = classes == 2 or METRICS.find(metric).ranks
        self._train_counts = train_counts(graphs, classes)
        self._sizes = tuple(graph.num_nodes for graph in graphs)
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
        self._together: dict[int, tuple[Tensor, Tensor, Segments]] = {}

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """The number of scored nodes of each client, `[clients, splits]`."""
        return np.array([segments.sizes for segments in self._segments], dtype=np.float64).T

    def scores(self, logits: Tensor) -> Tensor:
        """Compute all metrics, `[clients, splits, metrics]`; NaN where one is undefined.

        Args:
            logits: class scores of the nodes of all clients, `[nodes, C]`.
        """
        return self.scores_of_views([logits])[:, 0]

    def scores_of_views(self, views: Sequence[Tensor]) -> Tensor:
        """Compute all metrics of several models, `[clients, views, splits, metrics]`, in one pass.

        Splits of views are like further clients, so that every metric is computed once.

        Args:
            views: the class scores of each, `[nodes, C]`.
        """
        nodes, labels, segments = self._all_splits(len(views))
        logits = views[0] if len(views) == 1 else torch.cat(list(views))
        logits = logits.index_select(0, nodes)
        everything = Predictions(logits, labels, segments, self.classes, self.positive)
        found = self._scores(everything)
        return found.view(len(views), len(SPLITS), self.clients, -1).permute(2, 0, 1, 3)

    def _all_splits(self, views: int) -> tuple[Tensor, Tensor, Segments]:
        """Return nodes, labels and segments of all splits of some views, one after the other."""
        if views not in self._together:
            shift = sum(self._sizes)
            nodes = [own + view * shift for view in range(views) for own in self._nodes]
            sizes = tuple(size for segments in self._segments for size in segments.sizes)
            segments = Segments(sizes * views, self._nodes[0].device)
            self._together[views] = (torch.cat(nodes), torch.cat(self._labels * views), segments)
        return self._together[views]

    def predictions(self, logits: Tensor) -> list[Predictions]:
        """Return the scored nodes of each split with their class scores."""
        return [
            Predictions(logits[nodes], labels, segments, self.classes, self.positive)
            for nodes, labels, segments in zip(
                self._nodes, self._labels, self._segments, strict=True
            )
        ]

    def _scores(self, predictions: Predictions) -> Tensor:
        undefined = torch.full(
            (predictions.clients,), math.nan, dtype=torch.float64, device=predictions.logits.device
        )
        return torch.stack(
            [
                metric.compute(predictions) if self._ranks or not metric.ranks else undefined
                for metric in self.metrics
            ],
            dim=1,
        )

    def baseline(self) -> Tensor:
        """Score the trivial predictor: every node of a client has the client's majority class.

        The majority is that of the client's train labels, or of all clients' if it has none. All
        nodes have the same scores, so that AUC is 0.5 and AUPRC the share of positive nodes.

        Returns:
            The scores, `[clients, splits, metrics]`.
        """
        counts = self._train_counts
        counts = np.where(counts.sum(axis=1, keepdims=True) > 0, counts, counts.sum(axis=0))
        majority = np.repeat(counts.argmax(axis=1), self._sizes)
        logits = torch.nn.functional.one_hot(torch.from_numpy(majority), self.classes)
        return self.scores(logits.to(self._nodes[0].device, torch.float64))


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

    Args:
        score: of every node, `[n]`.
        label: 1 or True at positive nodes, `[n]`.
        segments: the nodes of each client.
    """
    return Ranking.of(score.unsqueeze(1), label.unsqueeze(1), segments).area[:, 0]


def describe(
    scores: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return one split's scores `[clients, metrics]` in the form of the summary.

    The key with a metric's name is the mean weighted by the clients' scored nodes,
    `…_client_mean` the unweighted mean, and `…_per_client` the list. Clients without a value are
    left out of the means and are None in the list. A metric that needs a certain number of classes
    or a ranking is left out if no client has a value.

    Args:
        scores: of one split, `[clients, metrics]`.
        counts: the number of scored nodes of each client.
        names: the metrics on the axis; `score_axis()` unless given.
    """
    return describe_all(scores[:, None], counts[:, None], names)[0]


def describe_all(
    scores: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return what `describe` does for several splits, from scores `[clients, splits, metrics]`."""
    known = ~np.isnan(scores)
    filled, weights = np.where(known, scores, 0.0), known * counts[..., None]
    number, weight = known.sum(axis=0), weights.sum(axis=0)
    means = (filled * weights).sum(axis=0) / np.where(weight > 0, weight, 1)
    plain = filled.sum(axis=0) / np.maximum(number, 1)
    each = scores.transpose(1, 2, 0)
    axis = score_axis() if names is None else names
    parts = zip(means.tolist(), plain.tolist(), each.tolist(), number.tolist(), strict=True)
    return [_described(axis, *part) for part in parts]


def _described(
    names: Sequence[str],
    means: list[float],
    plain: list[float],
    each: list[list[float]],
    counted: list[int],
) -> dict[str, Any]:
    """Return the scores of a split by name, from lists over metrics."""
    found: dict[str, Any] = {}
    for name, mean, level, own, count in zip(names, means, plain, each, counted, strict=True):
        if not count:
            if _always_shown(name):
                found |= {name: None, f"{name}_client_mean": None}
                found[f"{name}_per_client"] = [None] * len(own)
            continue
        found[name] = mean
        found[f"{name}_client_mean"] = level
        complete = count == len(own)
        found[f"{name}_per_client"] = (
            own if complete else [None if math.isnan(value) else value for value in own]
        )
    return found


def _always_shown(name: str) -> bool:
    """Return whether a metric is shown even if no client has a value."""
    if name.startswith(RECALL_KEY):
        return False
    metric = METRICS[name]
    return metric.classes is None and not metric.ranks
