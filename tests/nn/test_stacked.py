"""Protocols of stacked graphs: every class that stands for a graph has every member."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import polyphily.nn
from builders import cohort_of, random_cohort, random_graphs, with_edge_attributes
from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.sampling import Batch, Sampling, WholeGraph
from polyphily.nn.backbones import BACKBONES, Shape
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import (
    AttentionPattern,
    GraphOperators,
    GraphView,
    Propagation,
    StackedGraph,
)
from polyphily.nn.subgraphs import Subgraph, WeightedAttention

SIZES = (9, 6, 12)
ALLOWED = ("polyphily.nn", "polyphily.graphs", "polyphily.errors", "polyphily.registry")


def members(protocol: type) -> set[str]:
    """The public members of a protocol and of those it extends, and its operators."""
    names = {name for cls in protocol.__mro__ if cls is not object for name in vars(cls)}
    return {n for n in names if not n.startswith("_") or n in ("__matmul__", "__len__")}


def stacked_graphs() -> dict[str, Any]:
    cohort = cohort_of([with_edge_attributes(graph) for graph in random_graphs(SIZES)])
    return {
        "cohort": cohort,
        "batch": Sampling((2, 1), 3).draw(cohort, cohort.draws(0)),
        "whole graph": WholeGraph(cohort),
        "view": GraphView(cohort),
        "subgraph": Subgraph(cohort, torch.rand(cohort.edges.nnz).double()),
    }


def test_protocols_are_read_as_meant() -> None:
    assert members(Propagation) == {"__matmul__"}
    assert members(AttentionPattern) == {"at_rows", "at_cols", "softmax", "with_value"}
    assert members(GraphOperators) == {"segments", "gcn", "random_walk", "mean"}
    assert members(GraphOperators) < members(StackedGraph) < members(TrainingGraph)


@pytest.mark.parametrize("name", stacked_graphs())
def test_every_stacked_graph_has_every_member(name: str) -> None:
    graph = stacked_graphs()[name]
    with torch.no_grad():
        for member in members(StackedGraph):
            assert getattr(graph, member) is not None
        ones = torch.ones(graph.num_nodes, 2, dtype=graph.dtype)
        for operator in (graph.gcn, graph.random_walk, graph.mean):
            assert (operator @ ones).shape == ones.shape
        scores = graph.attention.at_rows(ones) + graph.attention.at_cols(ones)
        shares = graph.attention.softmax(scores)
        total = graph.attention.with_value(shares[:, 0]) @ ones
        torch.testing.assert_close(total, ones)
    assert isinstance(graph.edges, SparseMatrix)
    assert isinstance(graph.edges_with_loops, SparseMatrix)
    assert "__getattr__" not in {n for cls in type(graph).__mro__ for n in vars(cls)}


@pytest.mark.parametrize("cls", [Cohort, Batch])
def test_what_a_training_step_sees_has_every_member(cls: type) -> None:
    cohort = random_cohort(SIZES)
    graph: Any = cohort if cls is Cohort else Sampling((2, 1), 3).draw(cohort, cohort.draws(0))
    absent = [name for name in members(TrainingGraph) if not hasattr(graph, name)]
    assert not absent
    assert len(graph) == len(SIZES)
    assert graph.train_onehot.shape == (len(graph.train_nodes), graph.classes)
    assert graph.num_train.tolist() == list(graph.train_segments.sizes)


@pytest.mark.parametrize("cls", [SparseMatrix, WeightedAttention])
def test_attention_patterns_have_every_member(cls: type) -> None:
    assert all(hasattr(cls, name) for name in members(AttentionPattern))


def test_a_view_shares_the_cache_of_its_graph() -> None:
    cohort = random_cohort(SIZES)
    view = GraphView(cohort)
    seen: list[StackedGraph] = []
    assert view.cached("a", lambda graph: seen.append(graph) or 3) == 3  # type: ignore[func-returns-value]
    assert cohort.cached("a", lambda graph: 4) == 3
    assert seen == [cohort]
    assert view.cached_per_graph("size", lambda graph: graph.num_nodes) == list(SIZES)


@pytest.mark.parametrize(
    "name", [name for name, backbone in BACKBONES.items() if backbone.weighted_edges]
)
def test_a_subgraph_of_ones_is_the_graph(name: str) -> None:
    cohort = random_cohort(SIZES)
    shape = Shape(cohort.num_features, 3, hidden=8, heads=2, hops=3)
    network = BACKBONES[name](shape).double()
    for parameter in network.parameters():
        parameter.data = parameter.data.repeat(len(SIZES), *[1] * (parameter.dim() - 1))
    ones = torch.ones(cohort.edges.nnz, dtype=torch.float64)
    torch.testing.assert_close(network(Subgraph(cohort, ones)), network(cohort))


def test_networks_know_graphs_and_not_federations() -> None:
    for path in Path(polyphily.nn.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                assert not name.startswith("polyphily") or name.startswith(ALLOWED), (path, name)
