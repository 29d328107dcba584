"""Small random graphs, cohorts and parameters that several tests build on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, Masks
from polyphily.nn.backbones import Output

CPU = torch.device("cpu")


def random_masks(labels: IntArray, rng: np.random.Generator) -> Masks:
    """Train, validation, test or nothing for every labelled node; at least one trains."""
    part = np.where(labels == UNLABELLED, 3, rng.integers(0, 4, len(labels)))
    if not (part == 0).any():
        part[np.flatnonzero(labels != UNLABELLED)[:1]] = 0
    return Masks(part == 0, part == 1, part == 2)


def random_graph(
    nodes: int,
    *,
    seed: int = 0,
    features: int = 6,
    classes: int = 3,
    density: float = 0.3,
    sparse: bool = False,
    unlabelled: float = 0.0,
    name: str = "graph",
) -> Graph:
    """A random graph with masks; about half of the feature entries are zero."""
    rng = np.random.default_rng([seed, nodes])
    x = rng.standard_normal((nodes, features)).astype(np.float32)
    x *= rng.random((nodes, features)) < 0.5
    labels = rng.integers(0, classes, nodes)
    labels[rng.random(nodes) < unlabelled] = UNLABELLED
    adjacency = np.triu(rng.random((nodes, nodes)) < density, 1)
    return Graph.build(
        sp.csr_array(x) if sparse else x,
        np.stack(np.nonzero(adjacency)),
        labels,
        masks=random_masks(labels, rng),
        name=name,
    )


def random_graphs(sizes: Sequence[int], *, seed: int = 0, **options: object) -> list[Graph]:
    return [
        random_graph(size, seed=1000 * seed + k, name=f"client-{k}", **options)
        for k, size in enumerate(sizes)
    ]


def cohort_of(
    graphs: Sequence[Graph],
    *,
    classes: int = 3,
    dtype: torch.dtype = torch.float64,
    keys: Sequence[tuple[int, int]] | None = None,
) -> Cohort:
    keys = [(0, k) for k in range(len(graphs))] if keys is None else keys
    return Cohort(graphs, keys, classes, dtype=dtype)


def random_cohort(
    sizes: Sequence[int],
    *,
    classes: int = 3,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Cohort:
    return cohort_of(random_graphs(sizes, classes=classes, **options), classes=classes, dtype=dtype)


def with_features(graph: Graph, features: object) -> Graph:
    return Graph(features, graph.edges, graph.labels, graph.masks, name=graph.name)


def dense_features(graph: Graph) -> Tensor:
    """A graph's features as a dense float64 tensor."""
    x = graph.features
    return torch.from_numpy(np.asarray(x.toarray() if sp.issparse(x) else x, dtype=np.float64))


def dense_adjacency(graph: Graph) -> Tensor:
    return torch.from_numpy(graph.adjacency().toarray()).double()


def edge_index(graph: Graph) -> Tensor:
    return torch.from_numpy(graph.edges)


def random_parameters(
    network: torch.nn.Module, clients: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Parameters `[K, …]`, different for every client and nowhere zero, as biases are at first."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: (0.7 * torch.randn(clients, *value.shape[1:], generator=source)).to(dtype)
        for name, value in network.named_parameters()
    }


def of_client(params: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """One client's share of stacked parameters, still with the client axis."""
    return {name: value[k : k + 1] for name, value in params.items()}


def call(network: torch.nn.Module, params: dict[str, Tensor], *arguments: object) -> Tensor:
    """What a layer returns with these parameters."""
    result: Tensor = functional_call(network, params, arguments)
    return result


def predict(
    network: torch.nn.Module, params: dict[str, Tensor], cohort: Cohort, draws: object = None
) -> Output:
    """What a backbone returns with these parameters."""
    result: Output = functional_call(network, params, (cohort, draws))
    return result


def split_by_client(x: Tensor, cohort: Cohort) -> list[Tensor]:
    return list(torch.split(x, list(cohort.segments.sizes)))


def mask_at(nodes: int, chosen: Sequence[int]) -> BoolArray:
    mask = np.zeros(nodes, dtype=np.bool_)
    mask[list(chosen)] = True
    return mask
