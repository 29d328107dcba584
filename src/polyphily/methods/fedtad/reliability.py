"""How reliable a client's knowledge of each class is: neighbours that resemble its train nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import TrainingGraph
from polyphily.graphs.graph import Graph
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.walks import return_probabilities


def node_reliability(graph: StackedGraph, walk: int) -> Tensor:
    """Return r_v of every node, `[N]`, each from the client's own graph; computed once."""
    key = ("fedtad/reliability", walk)
    return graph.cached(
        key,
        lambda whole: torch.cat(
            whole.cached_per_graph(key, lambda own: reliability_in(own, walk))
        ).to(whole.device, whole.dtype),
    )


def reliability_in(graph: Graph, walk: int) -> Tensor:
    """Compute r_v = (1 + sum of cos(g_v, g_u) over neighbours u) / (d_v + 1), `[n]` in float64.

    g_v = [x_v || t_v], where t_v are the probabilities that a random walk is back after 1 to
    `walk` steps. The sum is ĝ_v · (A ĝ)_v for vectors ĝ of unit length, so that no matrix over
    pairs of nodes is needed. A node without neighbours has r = 1.
    """
    topology = return_probabilities(graph, walk, torch.device("cpu")).numpy()
    parts: list[Any] = [graph.features.astype(np.float64), topology]
    squares = sum(np.asarray((part * part).sum(axis=1)) for part in parts)
    scale = np.where(squares > 0, 1 / np.sqrt(np.where(squares > 0, squares, 1)), 0)
    adjacency = graph.adjacency().astype(np.float64)
    likeness = np.zeros(graph.num_nodes)
    for part in parts:
        unit = part * scale[:, None]
        likeness += np.asarray((unit * (adjacency @ unit)).sum(axis=1))
    degrees = np.bincount(graph.edges[0], minlength=graph.num_nodes)
    return torch.from_numpy((1 + likeness) / (degrees + 1))


def class_reliability(graph: TrainingGraph, walk: int) -> Tensor:
    """Compute CKR_ic, the sum of r_v over the train nodes of class c, `[K, classes]`."""
    own = node_reliability(graph, walk)[graph.train_nodes]
    return graph.train_segments.sum(graph.train_onehot * own.unsqueeze(1))
