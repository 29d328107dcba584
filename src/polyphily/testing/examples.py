"""Small random graphs, federations, cohorts and simulations to check things on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.core.declarations import USUAL_BACKBONE
from polyphily.core.messages import Message
from polyphily.core.method import Method, create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, Masks
from polyphily.graphs.loading import Federation, load
from polyphily.graphs.partitions import Partition
from polyphily.nn.backbones import Output
from polyphily.nn.draws import Draws
from polyphily.nn.stacked import StackedGraph

SIZES = (17, 9, 24, 9)
FEATURES, CLASSES = 6, 3
RELATIONS = ("family", "trade", "work")
AWKWARD = ("one class", "no edges", "no validation", "one node")

# Graphs ------------------------------------------------------------------------------------------


def random_masks(labels: IntArray, rng: np.random.Generator) -> Masks:
    """Draw train, validation, test or nothing for every labelled node; at least one trains."""
    part = np.where(labels == UNLABELLED, 3, rng.integers(0, 4, len(labels)))
    if not (part == 0).any():
        part[np.flatnonzero(labels != UNLABELLED)[:1]] = 0
    return Masks(part == 0, part == 1, part == 2)


def random_graph(
    nodes: int,
    *,
    seed: int = 0,
    features: int = FEATURES,
    classes: int = CLASSES,
    density: float = 0.3,
    sparse: bool = False,
    unlabelled: float = 0.0,
    name: str = "graph",
) -> Graph:
    """Draw a random graph with masks; about half of the feature entries are zero.

    Args:
        nodes: number of nodes.
        seed: graphs of different sizes differ for the same seed.
        features: number of features.
        classes: number of classes.
        density: the share of pairs of nodes that are joined.
        sparse: whether features are stored sparsely.
        unlabelled: the share of nodes without a label.
        name: the name of the graph.
    """
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


def random_graphs(sizes: Sequence[int], *, seed: int = 0, **options: Any) -> list[Graph]:
    """Draw a graph for every client; options are those of `random_graph`."""
    return [
        random_graph(size, seed=1000 * seed + k, name=f"client-{k}", **options)
        for k, size in enumerate(sizes)
    ]


def with_edge_attributes(
    graph: Graph,
    *,
    seed: int = 0,
    weighted: bool = True,
    directed: bool = True,
    relations: Sequence[str] = RELATIONS,
) -> Graph:
    """Return the graph with random weights, directions and types of its edges.

    About a third of the pairs are joined both ways, and some edges have two types.

    Args:
        graph: the graph.
        seed: of the attributes.
        weighted: whether edges have weights.
        directed: whether they have a direction.
        relations: the names of their types; empty: they have none.
    """
    rng = np.random.default_rng([seed, graph.num_nodes, 7])
    single = graph.edges[:, graph.edges[0] < graph.edges[1]]
    way = rng.integers(0, 3, single.shape[1])
    edges = np.concatenate([single[:, way != 1], single[::-1][:, way != 0]], axis=1)
    edges = np.concatenate([edges, edges[:, rng.random(edges.shape[1]) < 0.2]], axis=1)
    count = edges.shape[1]
    built = Graph.build(
        graph.features,
        edges,
        graph.labels,
        edge_weights=0.2 + 2 * rng.random(count) if weighted else None,
        directed=directed,
        edge_types=rng.integers(0, len(relations), count) if relations else None,
        relations=relations,
    )
    return replace(graph.with_edges(built.edge_list), relations=built.relations)


def awkward_graph(kind: str) -> Graph:
    """Return a client's graph of a kind that is easily forgotten, one of `AWKWARD`."""
    rng = np.random.default_rng(3)
    nodes = 12
    place = np.arange(nodes)
    labels = np.zeros(nodes, np.int64) if kind == "one class" else place % CLASSES
    edges = np.zeros((2, 0), np.int64) if kind == "no edges" else rng.integers(0, nodes, (2, 30))
    val = np.zeros(nodes, np.bool_) if kind == "no validation" else (place >= 6) & (place < 9)
    masks = Masks(place < 6, val, place >= 9)
    if kind == "one node":
        nodes, labels, edges = 1, labels[:1], np.zeros((2, 0), np.int64)
        masks = Masks(np.array([True]), np.array([False]), np.array([False]))
    features = rng.standard_normal((nodes, FEATURES)).astype(np.float32)
    return Graph.build(features, edges, labels, masks=masks, name=kind)


def with_other_labels_outside_training(
    graph: Graph, classes: int = CLASSES, seed: int = 0
) -> Graph:
    """Return the graph with every label outside the train mask replaced by another one."""
    assert graph.masks is not None
    rng = np.random.default_rng(seed)
    shift = rng.integers(1, classes, graph.num_nodes)
    other = (np.maximum(graph.labels, 0) + shift) % classes
    return replace(graph, labels=np.where(graph.masks.train, graph.labels, other))


# Federations -------------------------------------------------------------------------------------


def federation_of(graphs: Sequence[Graph], seed: int = 0) -> Federation:
    """Return a federation of two or more clients' graphs, with a split drawn for each client."""
    return load(list(graphs), seed=seed, split="0.5,0.25,0.25:client")


def small_federation(
    sizes: Sequence[int] = SIZES, *, seed: int = 0, sparse: bool = False
) -> Federation:
    """Draw a federation of random graphs of these sizes."""
    return federation_of(random_graphs(sizes, seed=seed, sparse=sparse, density=0.2), seed=seed)


def with_clients(federation: Federation, clients: Sequence[Graph]) -> Federation:
    """Return the federation with these clients, which bring their masks, in place of its own."""
    ends = np.cumsum([0, *[graph.num_nodes for graph in clients]]).tolist()
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    layout = Partition.of(federation.partition.name, parts)
    return replace(federation, clients=tuple(clients), partition=layout)


# Cohorts and networks ----------------------------------------------------------------------------


def cohort_of(
    graphs: Sequence[Graph],
    *,
    classes: int = CLASSES,
    dtype: torch.dtype = torch.float64,
    keys: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> Cohort:
    """Return the cohort of some graphs, which bring their masks; options are those of `Cohort`."""
    keys = [(0, k) for k in range(len(graphs))] if keys is None else keys
    return Cohort(graphs, keys, classes, dtype=dtype, **options)


def random_cohort(
    sizes: Sequence[int],
    *,
    classes: int = CLASSES,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Cohort:
    """Draw a cohort of random graphs; options are those of `random_graph`."""
    return cohort_of(random_graphs(sizes, classes=classes, **options), classes=classes, dtype=dtype)


def random_parameters(
    network: nn.Module, clients: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Message:
    """Draw parameters `[K, …]`, different for every client and nowhere zero as biases are."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: (0.7 * torch.randn(clients, *value.shape[1:], generator=source)).to(dtype)
        for name, value in network.named_parameters()
    }


def of_client(stacked: Mapping[str, Tensor], k: int) -> Message:
    """Return one client's share of stacked tensors, still with the client axis."""
    return {name: value[k : k + 1] for name, value in stacked.items()}


def predict(
    network: nn.Module,
    params: Mapping[str, Tensor],
    graph: StackedGraph,
    draws: Draws | None = None,
) -> Output:
    """Return the output of a backbone with these parameters."""
    result: Output = functional_call(network, dict(params), (graph, draws))
    return result


def split_by_client(x: Tensor, graph: StackedGraph) -> list[Tensor]:
    """Return the rows of each client of a value per node."""
    return list(torch.split(x, list(graph.segments.sizes)))


# Simulations -------------------------------------------------------------------------------------

_SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "dropout": 0.0,
    "input_dropout": 0.0,
    "hidden": 8,
    "optimizer": "adam",
    "lr": 0.05,
    "weight_decay": 1e-3,
    "epochs": 2,
    "keep_optimizer": False,
}


def simulate(
    method: str | Method,
    federations: Federation | Sequence[Federation],
    rounds: int = 0,
    **settings: Any,
) -> Simulation:
    """Return a simulation after some rounds; float64 and without dropout unless told otherwise.

    Args:
        method: a method, or the name of one.
        federations: one, or several that run side by side.
        rounds: how many to run.
        **settings: fields of `Settings`.
    """
    if isinstance(method, str):
        method = create(method)
    if isinstance(federations, Federation):
        federations = [federations]
    backbone = {"backbone": usual_backbone(method)}
    chosen = Settings(**{"rounds": max(rounds, 1), **_SETTINGS, **backbone, **settings})
    simulation = Simulation(method, federations, fill(chosen, "files", "accuracy"))
    for _ in range(rounds):
        simulation.advance()
    return simulation


def usual_backbone(method: Method) -> str:
    """Return a backbone that the method can train: gcn if possible."""
    supported = method.supported_backbones()
    return USUAL_BACKBONE if USUAL_BACKBONE in supported else method.backbone or supported[0]
