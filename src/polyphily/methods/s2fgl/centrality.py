"""Structure-aware label centrality (S2FGL, Eq. 3-5), and the nodes that are highest in it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polyphily.graphs.graph import Graph
from polyphily.heterogeneity.pagerank import FloatArray, received_from, sent_to, strongest
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import StackedGraph


def label_centrality(graph: Graph, form: str, alpha: float) -> FloatArray:
    """Compute the structure-aware label centrality of every node (Eq. 3).

    Args:
        graph: with its masks drawn.
        form: "paper", or "code" for the form of the released code.
        alpha: restart probability of PageRank.
    """
    assert graph.masks is not None, f"{graph.name}: no split was drawn"
    train = graph.masks.train
    if form == "paper":  # Eq. 4-5: tau = 1 for all nodes; self-loops where labels spread
        return strongest(graph, alpha) + received_from(graph, train, alpha, loops=True)
    # The released code: tau marks train nodes, no factor alpha in the first term, the transpose of
    # P in the second, no self-loops.
    return strongest(graph, alpha, train) / alpha + sent_to(graph, train, alpha)


def most_central(
    graphs: StackedGraph, form: str, alpha: float, share: float, least: int = 1
) -> tuple[Tensor, Segments]:
    """Return the int(share · n) nodes of the largest centrality of each client, in node order.

    Args:
        graphs: of the clients.
        form: see `label_centrality`.
        alpha: see `label_centrality`.
        share: of a client's nodes.
        least: nodes of a client at least, if it has as many.

    Returns:
        The nodes, and which of them belong to which client.
    """

    def select(graphs: StackedGraph) -> tuple[Tensor, Segments]:
        scores = graphs.cached_per_graph(
            ("label centrality", form, alpha), lambda graph: label_centrality(graph, form, alpha)
        )
        chosen = []
        for score, start in zip(scores, graphs.segments.pointers, strict=False):
            count = min(max(int(share * len(score) + 1e-9), least), len(score))
            chosen.append(start + np.sort(np.argsort(-score, kind="stable")[:count]))
        rows = Segments(tuple(len(nodes) for nodes in chosen), graphs.device)
        return torch.from_numpy(np.concatenate(chosen)).to(graphs.device), rows

    return graphs.cached(("s2fgl", form, alpha, share, least), select)
