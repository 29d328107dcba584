"""Small random graphs, cohorts and parameters that several tests build on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.graphs.graph import BoolArray, Graph
from polyphily.testing.examples import (
    cohort_of,
    of_client,
    predict,
    random_cohort,
    random_graph,
    random_graphs,
    random_masks,
    random_parameters,
    split_by_client,
    with_edge_attributes,
)

__all__ = [
    "CPU",
    "call",
    "cohort_of",
    "dense_adjacency",
    "dense_features",
    "edge_index",
    "mask_at",
    "of_client",
    "predict",
    "random_cohort",
    "random_graph",
    "random_graphs",
    "random_masks",
    "random_parameters",
    "split_by_client",
    "with_edge_attributes",
    "with_features",
]

CPU = torch.device("cpu")


def with_features(graph: Graph, features: object) -> Graph:
    return Graph(features, graph.edges, graph.labels, graph.masks, name=graph.name)


def dense_features(graph: Graph) -> Tensor:
    """Return a graph's features as a dense float64 tensor."""
    x = graph.features
    return torch.from_numpy(np.asarray(x.toarray() if sp.issparse(x) else x, dtype=np.float64))


def dense_adjacency(graph: Graph) -> Tensor:
    return torch.from_numpy(graph.adjacency().toarray()).double()


def edge_index(graph: Graph) -> Tensor:
    return torch.from_numpy(graph.edges)


def call(network: torch.nn.Module, params: dict[str, Tensor], *arguments: object) -> Tensor:
    """Return the output of a layer with these parameters."""
    result: Tensor = functional_call(network, params, arguments)
    return result


def mask_at(nodes: int, chosen: Sequence[int]) -> BoolArray:
    mask = np.zeros(nodes, dtype=np.bool_)
    mask[list(chosen)] = True
    return mask
