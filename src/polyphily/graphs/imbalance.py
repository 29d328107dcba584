"""Rare classes among train labels, and the metric that suits them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyphily.graphs.graph import UNLABELLED, Graph, IntArray

RARE = 0.1  # share of train labels below which one of two classes is rare
USUAL = "accuracy"


def train_counts(graphs: Sequence[Graph], classes: int) -> IntArray:
    """Return the number of train labels of each class at each client, `[clients, classes]`."""
    counts = np.zeros((len(graphs), classes), dtype=np.int64)
    for k, graph in enumerate(graphs):
        assert graph.masks is not None, f"{graph.name}: no split was drawn"
        labels = graph.labels[graph.masks.train & (graph.labels != UNLABELLED)]
        counts[k] = np.bincount(labels, minlength=classes)
    return counts


def usual_metric(graphs: Sequence[Graph], classes: Sequence[str]) -> tuple[str, str]:
    """Return the metric for data that have none of their own, and why if it is not accuracy.

    With two classes of which one is rare, a model that never predicts the rare one has a high
    accuracy. The area under the precision-recall curve is used instead.
    """
    counts = train_counts(graphs, len(classes)).sum(axis=0)
    if len(classes) != 2 or counts.min() >= RARE * counts.sum():
        return USUAL, ""
    name, share = classes[int(counts.argmin())], counts.min() / counts.sum()
    reason = (
        f"'{name}' has {100 * share:.1f} % of the train labels: the best round is chosen by auprc, "
        "not by accuracy (--metric accuracy changes this)"
    )
    return "auprc", reason
