"""The loss of a partition: edges between clients, and the label signal along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyphily.graphs.graph import BoolArray, Graph, IntArray
from polyphily.heterogeneity.pagerank import sent_to

RESTART = 0.15  # restart probability of the walks that carry labels, as in S2FGL
AT_ONCE = 16  # number of clients whose labels are propagated together


@dataclass(frozen=True)
class Loss:
    """The losses of a partition. A share is NaN if there was nothing to lose.

    Attributes:
        edges: the number of undirected edges whose ends are at no client together.
        edges_share: their share among all edges.
        same_class_share: the lost share of edges that join equal labels.
        other_class_share: the lost share of edges that join different labels.
        isolated: the number of nodes that had neighbours and have none at (one of) their clients.
        train_neighbours_share: the lost share of pairs of a node and a neighbouring train node.
        label_signal_share: the lost share of label signal; see `label_signal_lost`.
    """

    edges: int
    edges_share: float
    same_class_share: float
    other_class_share: float
    isolated: int
    train_neighbours_share: float
    label_signal_share: float


def partition_loss(whole: Graph, parts: Sequence[IntArray], train: Sequence[BoolArray]) -> Loss:
    """Compute what is lost if client k holds the nodes `parts[k]`.

    Args:
        whole: the graph before it was divided.
        parts: each client's nodes; they may overlap.
        train: for each client, which of its nodes are train nodes.
    """
    source, target = whole.edges
    kept = np.zeros(len(source), dtype=np.bool_)
    isolated = 0
    had = np.bincount(source, minlength=whole.num_nodes) > 0
    training = np.zeros(whole.num_nodes, dtype=np.bool_)
    for nodes, own in zip(parts, train, strict=True):
        here = np.zeros(whole.num_nodes, dtype=np.bool_)
        here[nodes] = True
        inside = here[source] & here[target]
        kept |= inside
        left = np.bincount(source[inside], minlength=whole.num_nodes) > 0
        isolated += int((had & ~left)[nodes].sum())
        training[nodes[own]] = True
    labels = whole.labels
    known = (labels[source] >= 0) & (labels[target] >= 0)
    same = labels[source] == labels[target]
    return Loss(
        edges=int((~kept).sum()) // 2,
        edges_share=_share(~kept),
        same_class_share=_share(~kept[known & same]),
        other_class_share=_share(~kept[known & ~same]),
        isolated=isolated,
        train_neighbours_share=_share(~kept[training[target]]),
        label_signal_share=label_signal_lost(whole, parts, train),
    )


def label_signal_lost(
    whole: Graph, parts: Sequence[IntArray], train: Sequence[BoolArray], alpha: float = RESTART
) -> float:
    """Compute the share of the label signal that comes from train nodes of other clients.

    In the whole graph a walk from u with restarts ends at a train node with probability sum_v P_uv,
    where P is the personalised PageRank. The walks that end at train nodes outside u's client are
    lost. The result is their share over all nodes of all clients. It is our measure of what S2FGL
    calls label signal disruption. It lies in [0, 1] and cannot decrease if clients are divided
    further.
    """
    everywhere = np.zeros((whole.num_nodes, len(parts)), dtype=np.bool_)
    for k, (nodes, own) in enumerate(zip(parts, train, strict=True)):
        everywhere[nodes[own], k] = True
    training: BoolArray = np.asarray(everywhere.any(axis=1))
    total = sent_to(whole, training, alpha)
    kept = came = 0.0
    for start in range(0, len(parts), AT_ONCE):
        signal = sent_to(whole, everywhere[:, start : start + AT_ONCE], alpha)
        for column, nodes in enumerate(parts[start : start + AT_ONCE]):
            kept += float(signal[nodes, column].sum())
            came += float(total[nodes].sum())
    return max(1 - kept / came, 0.0) if came else float("nan")


def _share(chosen: BoolArray) -> float:
    return float(chosen.mean()) if len(chosen) else float("nan")
