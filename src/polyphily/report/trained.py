"""Measures of a run's models: embeddings, filters, and differences between clients' weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.core.local import Local
from polyphily.core.messages import Message, model_part
from polyphily.core.method import travels
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.heterogeneity.divergence import collaboration_heterogeneity, embedding_divergence
from polyphily.heterogeneity.filters import FREQUENCIES, basis_response, polynomial_response
from polyphily.heterogeneity.inspection import Trained
from polyphily.heterogeneity.spectral import normalised_adjacency
from polyphily.nn.backbones import GPRGNN
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.unifilter import UniFilter, bases, train_homophily
from polyphily.report.evidence import FloatArray, to_array


def examine(simulation: Simulation, view: str) -> Trained:
    """Measure the models of a simulation's first federation.

    Args:
        simulation: the simulation, after its last round.
        view: which models to measure, "received" or "trained".
    """
    local = simulation.received() if view == "received" else simulation.trained()
    federation = simulation.federations[0]
    clients = range(len(federation))
    embedding = local.frozen(local.params).embedding.double().cpu().numpy()
    pointers = simulation.cohort.segments.pointers[: len(clients) + 1]
    per_class, pairs = embedding_divergence(
        [embedding[start:stop] for start, stop in pairwise(pointers)],
        [graph.labels for graph in federation.clients],
        len(federation.classes),
        federation.seed,
    )
    responses = filter_responses(local, federation.clients)
    weights, kind = _collaboration_weights(simulation)
    trained = model_part(simulation.memory)
    names = [n for n in trained if travels(simulation.method, simulation.network, n)] or [*trained]
    theta = np.concatenate([_rows(trained[n], len(clients)) for n in names], axis=1)
    total = collaboration_heterogeneity(weights, theta)
    squares = (theta**2).sum(axis=1)
    largest = float((weights * (squares[:, None] + squares)).sum())
    return Trained(
        method=simulation.method.name,
        network=simulation.network.describe(),
        round=simulation.round,
        seed=federation.seed,
        view=view,
        embedding_divergence=pairs,
        embedding_divergence_per_class=per_class,
        frequencies=None if responses is None else FREQUENCIES,
        responses=responses,
        collaboration=kind,
        heterogeneity=total,
        heterogeneity_relative=total / largest if largest else 0.0,
    )


def filter_responses(local: Local, graphs: Sequence[Graph]) -> FloatArray | None:
    """Return g(λ) of each client's filter at `FREQUENCIES`; None if the network has no filter.

    GPR-GNN propagates with self-loops: its λ is an eigenvalue of I - (D+I)^-1/2 (A+I) (D+I)^-1/2.
    That of UniFilter is one of I - D^-1/2 A D^-1/2.
    """
    network, params = local.network, _to_arrays(local.params)
    if isinstance(network, GPRGNN):
        return polynomial_response(params["gamma"][: len(graphs)])
    if not isinstance(network, UniFilter):
        return None
    found = []
    for graph, weights in zip(graphs, params["coefficients"], strict=False):
        assert graph.masks is not None
        labels = np.where(graph.masks.train, graph.labels, UNLABELLED)
        h = train_homophily(graph.edges, labels)
        make = partial(host_bases, homophily=h, order=network.order)
        found.append(
            basis_response(make, normalised_adjacency(graph), graph.features, weights, network.tau)
        )
    return np.stack(found)


def host_bases(
    propagation: sp.csr_array, x: FloatArray, homophily: float, order: int
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield UniFilter's bases of NumPy arrays."""
    ordered = propagation.sorted_indices()
    p = ordered.tocoo()
    matrix = SparseMatrix.from_coordinates(
        p.row, p.col, p.data, p.shape, dtype=torch.float64, device=torch.device("cpu")
    )
    for near, far in bases(matrix, torch.from_numpy(x), homophily, order):
        yield near.numpy(), far.numpy()


def _collaboration_weights(simulation: Simulation) -> tuple[FloatArray, str]:
    """Return weights `[K, K]` with rows that sum to one: those the server learned, or equal."""
    count = len(simulation.federations[0])
    learned = simulation.servers[0].collaboration()
    if learned is not None:
        return to_array(learned), "learned"
    return np.full((count, count), 1 / count), "equal"


def _rows(tensor: Tensor, count: int) -> FloatArray:
    return to_array(tensor[:count]).reshape(count, -1)


def _to_arrays(params: Message) -> dict[str, FloatArray]:
    return {name: to_array(value) for name, value in params.items()}
