"""What dividing one graph among clients takes away: edges, and the labels' way along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyphily.graphs.graph import BoolArray, Graph, IntArray
from polyphily.heterogeneity.pagerank import sent_to

RESTART = 0.15  # of the walks that carry labels, as in S2FGL
AT_ONCE = 16  # clients whose labels are followed at a time


@dataclass(frozen=True)
class Loss:
    """What a partition loses; shares are NaN where there was nothing to lose.

    Attributes:
        edges: undirected edges whose ends no client holds together.
        edges_share: of all edges.
        same_class_share: lost edges among those that join equal labels.
        other_class_share: lost edges among those that join different labels.
        isolated: nodes that had neighbours and have none at (one of) their clients.
        train_neighbours_share: lost among all pairs of a node and a train node next to it.
        label_signal_share: lost among the label signal; see `label_signal_lost`.
    """

    edges: int
    edges_share: float
    same_class_share: float
    other_class_share: float
    isolated: int
    train_neighbours_share: float
    label_signal_share: float


def partition_loss(whole: Graph, parts: Sequence[IntArray], train: Sequence[BoolArray]) -> Loss:
    """What is lost when client k holds the nodes `parts[k]` alone.

    Args:
        whole: the graph before it was divided.
        parts: each client's nodes; they may overlap.
        train: which of them are train nodes.
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
    """The share of the label signal that comes from other clients' train nodes.

    In the whole graph a walk from u with restarts ends at train nodes with probability
    sum_v P_uv, P its personalised PageRank. Lost is what ends at train nodes that u's client does
    not hold, over all nodes of all clients. Our measure of what S2FGL calls label signal
    disruption: in [0, 1], and it can only grow when clients are divided further.
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
