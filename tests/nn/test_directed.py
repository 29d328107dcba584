"""Convolutions on weighted, directed and typed edges, against torch_geometric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from builders import call, cohort_of, dense_features, random_graph, with_edge_attributes
from polyphily.graphs.graph import Graph
from polyphily.nn.backbones import BACKBONES, Shape, build
from polyphily.nn.layers import (
    DirectedConv,
    GATConv,
    GCNConv,
    RelationalConv,
    SAGEConv,
)
from polyphily.nn.relational import BASES
from polyphily.testing.examples import FEATURES, RELATIONS, random_parameters

pyg = pytest.importorskip("torch_geometric.nn")

OUT = 4
Params = dict[str, Tensor]


def graph_of(*, weighted: bool = True, directed: bool = True, relations: Any = ()) -> Graph:
    plain = random_graph(11, density=0.4)
    return with_edge_attributes(plain, weighted=weighted, directed=directed, relations=relations)


def as_index(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return edge_index and edge_weight as torch_geometric takes them."""
    kept = slice(None) if graph.arcs is None else graph.arcs
    edges = torch.from_numpy(graph.edges[:, kept])
    weights = np.ones(graph.edges.shape[1]) if graph.edge_weights is None else graph.edge_weights
    return edges, torch.from_numpy(np.asarray(weights, dtype=np.float64)[kept])


def load(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Fill a torch_geometric module: weights of linear layers are transposed there."""
    module.double()
    own = dict(module.named_parameters())
    assert own.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return module


def test_a_weighted_gcn_is_that_of_pyg() -> None:
    graph, layer = graph_of(directed=False), GCNConv(FEATURES, OUT)
    params = random_parameters(layer, 1)
    theirs = load(
        pyg.GCNConv(FEATURES, OUT),
        {"lin.weight": params["weight"][0].T, "bias": params["bias"][0]},
    )
    x, (edges, weights) = dense_features(graph), as_index(graph)
    torch.testing.assert_close(
        call(layer, params, x, cohort_of([graph])), theirs(x, edges, weights)
    )


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_directed_sage_is_that_of_pyg(direction: str) -> None:
    """torch_geometric sends messages from source to target: each node hears its in-neighbours."""
    graph, layer = graph_of(weighted=False), SAGEConv(FEATURES, OUT)
    params = random_parameters(layer, 1)
    theirs = load(
        pyg.SAGEConv(FEATURES, OUT),
        {
            "lin_l.weight": params["weight_near"][0].T,
            "lin_l.bias": params["bias"][0],
            "lin_r.weight": params["weight_self"][0].T,
        },
    )
    x, (edges, _) = dense_features(graph), as_index(graph)
    found = call(layer, params, x, cohort_of([graph], direction=direction))
    torch.testing.assert_close(found, theirs(x, edges if direction == "in" else edges.flip(0)))


def test_a_directed_gat_is_that_of_pyg() -> None:
    graph, heads = graph_of(weighted=False), 3
    layer = GATConv(FEATURES, OUT, heads, average=False)
    params = random_parameters(layer, 1)
    theirs = load(
        pyg.GATConv(FEATURES, OUT, heads),
        {
            "lin.weight": params["weight"][0].T,
            "att_src": params["attend_source"],
            "att_dst": params["attend_target"],
            "bias": params["bias"][0],
        },
    )
    x, (edges, _) = dense_features(graph), as_index(graph)
    found = call(layer, params, x, cohort_of([graph], direction="in"))
    torch.testing.assert_close(found, theirs(x, edges))


def one_sage(params: Params, part: str) -> dict[str, Tensor]:
    return {"lin_l.weight": params[f"{part}.weight_near"][0].T}


def one_gat(params: Params, part: str) -> dict[str, Tensor]:
    return {
        "lin.weight": params[f"{part}.weight"][0].T,
        "att_src": params[f"{part}.attend_source"],
        "att_dst": params[f"{part}.attend_target"],
    }


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "part"),
    [
        (
            lambda: SAGEConv(FEATURES, OUT, own=False),
            lambda: pyg.SAGEConv(FEATURES, OUT, root_weight=False, bias=False),
            one_sage,
        ),
        (
            lambda: GATConv(FEATURES, OUT, 3, average=True, own=False),
            lambda: pyg.GATConv(FEATURES, OUT, 3, concat=False, add_self_loops=False, bias=False),
            one_gat,
        ),
    ],
    ids=["sage", "gat"],
)
def test_separate_directions_are_those_of_dir_gnn(
    ours: Callable[[], nn.Module],
    theirs: Callable[[], nn.Module],
    part: Callable[[Params, str], Params],
    backward: bool,
) -> None:
    graph = graph_of(weighted=False)
    layer = DirectedConv(FEATURES, OUT, ours)
    params = random_parameters(layer, 1)
    reference = load(
        pyg.DirGNNConv(theirs(), alpha=DirectedConv.alpha),
        {
            **{f"conv_in.{n}": v for n, v in part(params, "conv_in").items()},
            **{f"conv_out.{n}": v for n, v in part(params, "conv_out").items()},
            "lin.weight": params["own.weight"][0].T,
            "lin.bias": params["own.bias"][0],
        },
    )
    x, (edges, _) = dense_features(graph).requires_grad_(), as_index(graph)
    found = call(layer, params, x, cohort_of([graph], direction="separate"))
    wanted = reference(x, edges)
    if backward:
        way = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0)).double()
        (found,), (wanted,) = (torch.autograd.grad((y * way).sum(), x) for y in (found, wanted))
    torch.testing.assert_close(found, wanted)


def test_separate_gcn_is_normalised_by_both_degrees() -> None:
    """Rossi et al. 2023: D_out^-1/2 A D_in^-1/2 and its transpose, without self-loops."""
    graph = graph_of()
    layer = DirectedConv(FEATURES, OUT, lambda: GCNConv(FEATURES, OUT, own=False))
    params = random_parameters(layer, 1)
    a = torch.from_numpy(graph.weighted_adjacency().toarray()).double()  # [u, v]: from u to v
    out, inside = (
        torch.diag(a.sum(dim=d).where(a.sum(dim=d) > 0, torch.inf) ** -0.5) for d in (1, 0)
    )
    s, x = out @ a @ inside, dense_features(graph)
    wanted = (
        x @ params["own.weight"][0]
        + params["own.bias"]
        + 0.5 * s.T @ x @ params["conv_in.weight"][0]
        + 0.5 * s @ x @ params["conv_out.weight"][0]
    )
    found = call(layer, params, x, cohort_of([graph], direction="separate"))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("bases", [2, BASES])
def test_relations_are_those_of_r_gcn(bases: int) -> None:
    graph = graph_of(weighted=False, relations=RELATIONS)
    layer = RelationalConv(FEATURES, OUT, len(RELATIONS), bases)
    params = random_parameters(layer, 1)
    shared = {"comp": params["shares"][0]} if bases < len(RELATIONS) else {}
    theirs = load(
        pyg.RGCNConv(FEATURES, OUT, len(RELATIONS), num_bases=bases if shared else None),
        {
            "weight": params["bases"][0],
            **shared,
            "root": params["own.weight"][0],
            "bias": params["own.bias"][0],
        },
    )
    assert graph.arcs is not None
    assert graph.edge_types is not None
    kept = np.flatnonzero(graph.arcs)
    bits = (graph.edge_types[kept, None] >> np.arange(len(RELATIONS))) & 1
    entry, relation = np.nonzero(bits)
    x, edges = dense_features(graph), torch.from_numpy(graph.edges[:, kept[entry]])
    cohort = cohort_of([graph], direction="in", relation_names=RELATIONS)
    torch.testing.assert_close(
        call(layer, params, x, cohort), theirs(x, edges, torch.from_numpy(relation))
    )


def test_more_relations_than_bases_share_them() -> None:
    few, many = (RelationalConv(FEATURES, OUT, count, BASES) for count in (BASES, BASES + 5))
    assert few.shares is None
    assert few.bases.shape == (1, BASES, FEATURES, OUT)
    assert many.shares is not None
    assert many.bases.shape == (1, BASES, FEATURES, OUT)
    assert many.shares.shape == (1, BASES + 5, BASES)


@pytest.mark.parametrize("name", [n for n, cls in BACKBONES.items() if cls.separable])
def test_backbones_with_separate_directions_tell_them_apart(name: str) -> None:
    """Reversing all edges changes the output; without directions it does not."""
    graph = graph_of(relations=RELATIONS if name == "rgcn" else ())
    reverse = graph.with_edges(
        graph.edge_list.take(graph.edges, np.lexsort((graph.edges[0], graph.edges[1])))
    )
    for direction in ("both", "separate"):
        shape = Shape(FEATURES, 3, hidden=8, separate=direction == "separate", relations=3)
        network = build(name, shape, 0).double()
        names = RELATIONS if name == "rgcn" else ()
        one, two = (
            network(cohort_of([g], direction=direction, relation_names=names)).logits
            for g in (graph, reverse)
        )
        assert torch.allclose(one, two) == (direction == "both")
