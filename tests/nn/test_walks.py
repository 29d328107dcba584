"""Return probabilities of random walks, against dense powers of the transition matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import CPU, dense_adjacency, random_graph
from polyphily.graphs.graph import Graph
from polyphily.nn import walks
from polyphily.nn.walks import return_probabilities


def graph_of(nodes: int, *edges: tuple[int, int]) -> Graph:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return Graph.build(np.ones((nodes, 1), np.float32), ends, np.zeros(nodes, np.int64))


def test_a_triangle() -> None:
    found = return_probabilities(graph_of(3, (0, 1), (1, 2), (0, 2)), 5, CPU)
    np.testing.assert_allclose(found, [[0, 0.5, 0.25, 0.375, 0.3125]] * 3)


def test_a_path_of_three() -> None:
    found = return_probabilities(graph_of(3, (0, 1), (1, 2)), 4, CPU)
    np.testing.assert_allclose(found, [[0, 0.5, 0, 0.5], [0, 1, 0, 1], [0, 0.5, 0, 0.5]])


def test_a_ring_of_fifty() -> None:
    found = return_probabilities(graph_of(50, *((v, (v + 1) % 50) for v in range(50))), 5, CPU)
    np.testing.assert_allclose(found, [[0, 0.5, 0, 0.375, 0]] * 50)


@pytest.mark.parametrize("steps", [0, 1, 6, 7])
@pytest.mark.parametrize("held", [1, 70, 1 << 22])
@pytest.mark.parametrize("thin", [0, 0.2, 1])
def test_blocks_of_any_size_agree_with_dense_powers(
    steps: int, held: int, thin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "CACHED", held)
    monkeypatch.setattr(walks, "THIN", thin)
    graph = random_graph(20, density=0.1, seed=3)  # some nodes have no neighbours
    adjacency = dense_adjacency(graph)
    move = adjacency / adjacency.sum(dim=0).clamp(min=1)
    powers = [torch.linalg.matrix_power(move, k).diagonal() for k in range(1, steps + 1)]
    wanted = torch.stack(powers, dim=1) if powers else torch.zeros(20, 0).double()
    torch.testing.assert_close(return_probabilities(graph, steps, CPU), wanted)


def test_a_graph_without_nodes_or_edges() -> None:
    assert return_probabilities(graph_of(0), 3, CPU).shape == (0, 3)
    assert not return_probabilities(graph_of(2), 3, CPU).any()
