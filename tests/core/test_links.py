"""Operators of weighted and directed edges: against dense matrices, alone, sampled, hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import cohort_of, random_graphs, with_edge_attributes
from polyphily.core.cohort import Cohort
from polyphily.core.links import Reading, link_weights
from polyphily.core.sampling import Sampling, WholeGraph
from polyphily.errors import UserError
from polyphily.graphs.edges import UNTYPED
from polyphily.graphs.graph import Graph, relations_of
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.subgraphs import Subgraph

SIZES = (7, 5, 1, 9)
DIRECTIONS = ("both", "in", "out")
OPERATORS = ("gcn", "random_walk", "mean")


def graphs(*, weighted: bool = True, directed: bool = True) -> list[Graph]:
    """Clients whose edges have attributes, and a last one whose edges have none."""
    *most, last = random_graphs(SIZES, density=0.5)
    kinds = {"weighted": weighted, "directed": directed}
    return [*(with_edge_attributes(g, seed=k, **kinds) for k, g in enumerate(most)), last]


def arcs(graph: Graph, *, weighted: bool) -> Tensor:
    """The weights of arcs, entry by entry: [u, v] is that of the edge from u to v."""
    found = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    for i, (u, v) in enumerate(graph.edges.T.tolist()):
        if graph.arcs is None or graph.arcs[i]:
            given = graph.edge_weights if weighted else None
            found[u, v] = 1.0 if given is None else float(given[i])
    return found


def received(graph: Graph, direction: str, *, weighted: bool) -> Tensor:
    """A by its definition: [v, u] is the weight with which v receives from u."""
    out = arcs(graph, weighted=weighted)
    if direction == "out":
        return out
    if direction == "in":
        return out.T
    both = (out > 0) & (out.T > 0)
    return torch.where(both, (out + out.T) / 2, out + out.T)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.block_diag(*parts)


def dense(matrix: SparseMatrix) -> Tensor:
    found = matrix @ torch.eye(matrix.shape[1], dtype=torch.float64)
    assert isinstance(found, Tensor)
    return found


def formulas(a: Tensor) -> dict[str, Tensor]:
    """The operators of a dense A, as the documentation writes them."""
    loops = a + torch.eye(len(a), dtype=a.dtype)
    row, col = loops.sum(dim=1), loops.sum(dim=0)
    return {
        "gcn": torch.diag(row**-0.5) @ loops @ torch.diag(col**-0.5),
        "random_walk": torch.diag(1 / row) @ loops,
        "mean": torch.diag(1 / a.sum(dim=1).where(a.sum(dim=1) > 0, 1)) @ a,
    }


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operators_are_their_formulas(direction: str, weighted: bool) -> None:
    own = graphs()
    cohort = cohort_of(own, direction=direction, edge_weights=weighted)
    a = stacked([received(g, direction, weighted=weighted) for g in own])
    for name, wanted in formulas(a).items():
        torch.testing.assert_close(dense(getattr(cohort, name)), wanted)
    # The patterns that methods rely on stay symmetric and without weights.
    symmetric = stacked([received(g, "both", weighted=False) for g in own])
    torch.testing.assert_close(dense(cohort.edges), symmetric)
    torch.testing.assert_close(cohort.degrees, symmetric.sum(dim=1))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention_is_weighted_and_follows_the_direction(direction: str) -> None:
    """w e^s / sum w e^s over the links of a row and its loop, of weight 1."""
    own = graphs()
    cohort = cohort_of(own, direction=direction)
    pattern = cohort.attention
    a = stacked([received(g, direction, weighted=True) for g in own])
    loops = a + torch.eye(len(a), dtype=a.dtype)
    scores = torch.randn(len(a), len(a), generator=torch.Generator().manual_seed(0)).double()
    wanted = loops * scores.exp()
    wanted = wanted / wanted.sum(dim=1, keepdim=True)
    nodes = torch.arange(len(a))
    rows, cols = (f(nodes.double()).long() for f in (pattern.at_rows, pattern.at_cols))
    found = pattern.with_value(pattern.softmax(scores[rows, cols].unsqueeze(1))[:, 0])
    assert isinstance(found, SparseMatrix)
    torch.testing.assert_close(dense(found), wanted)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_pass_through_the_transpose(direction: str, name: str) -> None:
    """A backward product must use the transpose of a matrix that is not symmetric."""
    cohort = cohort_of(graphs(), direction=direction)
    matrix = getattr(cohort, name)
    x = torch.randn(cohort.num_nodes, 3, generator=torch.Generator().manual_seed(1)).double()
    way = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    (found,) = torch.autograd.grad(((matrix @ x.requires_grad_()) * way).sum(), x)
    torch.testing.assert_close(found, dense(matrix).T @ way)
    assert direction == "both" or not torch.equal(dense(matrix), dense(matrix).T)


def test_separate_directions_have_no_loops() -> None:
    own = graphs()
    cohort = cohort_of(own, direction="separate")
    for operators, direction in ((cohort.inward, "in"), (cohort.outward, "out")):
        a = stacked([received(g, direction, weighted=True) for g in own])
        row, col = (a.sum(dim=d).where(a.sum(dim=d) > 0, torch.inf) for d in (1, 0))
        wanted = torch.diag(row**-0.5) @ a @ torch.diag(col**-0.5)
        torch.testing.assert_close(dense(operators.gcn), wanted)
        torch.testing.assert_close(dense(operators.mean), torch.diag(1 / row) @ a)
        torch.testing.assert_close(dense(operators.random_walk), torch.diag(1 / row) @ a)
    both = stacked([received(g, "both", weighted=True) for g in own])
    torch.testing.assert_close(dense(cohort.gcn), formulas(both)["gcn"])


@pytest.mark.parametrize("direction", [*DIRECTIONS, "separate"])
def test_relations_are_means_over_their_own_edges(direction: str) -> None:
    own = graphs()
    names = relations_of(own)
    assert names == ("family", "trade", "work", UNTYPED)
    cohort = cohort_of(own, direction=direction, relation_names=names)
    ways = ("in", "out") if direction == "separate" else (direction,)
    wanted = []
    for way in ways:
        for name in names:
            parts = []
            for g in own:
                a = received(g, way, weighted=True)
                belongs = torch.zeros_like(a)
                for i, (u, v) in enumerate(g.edges.T.tolist()):
                    if g.edge_types is None:
                        belongs[u, v] = name == UNTYPED
                    elif name in g.relations and g.arcs is not None and g.arcs[i]:
                        belongs[u, v] = (g.edge_types[i] >> g.relations.index(name)) & 1
                belongs = {"out": belongs, "in": belongs.T}.get(
                    way, torch.maximum(belongs, belongs.T)
                )
                parts.append(a * belongs)
            a = stacked(parts)
            wanted.append(torch.diag(1 / a.sum(dim=1).where(a.sum(dim=1) > 0, 1)) @ a)
    assert len(cohort.relations) == len(wanted)
    for found, matrix in zip(cohort.relations, wanted, strict=True):
        torch.testing.assert_close(dense(found), matrix)


def test_without_types_all_edges_are_of_one_relation() -> None:
    cohort = cohort_of(graphs())
    (found,) = cohort.relations
    torch.testing.assert_close(dense(found), dense(cohort.mean))


def test_a_graph_without_types_is_refused_if_types_are_needed() -> None:
    with pytest.raises(UserError, match=r"client-3.*no types.*family, trade"):
        cohort_of(graphs(), relation_names=("family", "trade"))


def test_plain_edges_take_the_plain_path() -> None:
    plain = random_graphs(SIZES)
    for options in ({}, {"direction": "in"}, {"direction": "separate"}, {"edge_weights": False}):
        assert cohort_of(plain, **options).is_plain
    assert cohort_of(graphs(weighted=False)).is_plain
    assert cohort_of(graphs(directed=False), edge_weights=False).is_plain
    assert not cohort_of(graphs(weighted=False), direction="in").is_plain
    assert not cohort_of(graphs(directed=False)).is_plain


def test_edges_of_weight_one_change_nothing() -> None:
    plain = random_graphs(SIZES)
    ones = [replace(g, edge_weights=np.ones(g.edges.shape[1], np.float32)) for g in plain]
    for name in OPERATORS:
        found, wanted = (dense(getattr(cohort_of(own), name)) for own in (ones, plain))
        torch.testing.assert_close(found, wanted)


def operators_of(graph: StackedGraph, *, sides: bool = True) -> dict[str, Tensor]:
    """All operators as dense matrices, those of both directions among them unless told so."""
    eye = torch.eye(graph.num_nodes, dtype=torch.float64)
    found = {name: getattr(graph, name) @ eye for name in OPERATORS}
    for side in ("inward", "outward") if sides else ():
        found |= {f"{side}/{name}": getattr(getattr(graph, side), name) @ eye for name in OPERATORS}
    return found | {f"relation {r}": mean @ eye for r, mean in enumerate(graph.relations)}


@pytest.mark.parametrize("direction", [*DIRECTIONS, "separate"])
def test_what_is_taken_repeated_or_hidden_has_the_same_operators(direction: str) -> None:
    own = graphs()
    options = {"direction": direction, "relation_names": relations_of(own)}
    whole = operators_of(cohort_of(own, **options))
    cohort = cohort_of(own, label_inputs=0.5, **options)
    for k, graph in enumerate(own):
        start = sum(SIZES[:k])
        part = slice(start, start + graph.num_nodes)
        for name, found in operators_of(cohort.take([k])).items():
            torch.testing.assert_close(found, whole[name][part, part])
    for name, found in operators_of(cohort.sample(cohort.draws(0))).items():
        torch.testing.assert_close(found, whole[name])
    for name, found in operators_of(cohort.repeated(2)).items():
        torch.testing.assert_close(found, torch.block_diag(whole[name], whole[name]))


def sampled(own: Sequence[Graph], fanout: int | None, direction: str) -> Cohort:
    return cohort_of(
        own,
        direction=direction,
        relation_names=relations_of(own),
        sampling=Sampling((fanout, fanout)),
    )


@pytest.mark.parametrize("direction", [*DIRECTIONS, "separate"])
def test_a_batch_with_all_neighbours_has_the_operators_at_its_train_nodes(direction: str) -> None:
    own = graphs()
    cohort = sampled(own, None, direction)
    batch = cohort.sample(cohort.draws(0))
    sides = direction in ("both", "separate")
    whole, part = operators_of(cohort), operators_of(batch, sides=sides)
    nodes, seeds = batch.nodes, batch.train_nodes
    for name, found in part.items():
        torch.testing.assert_close(found[seeds], whole[name][nodes[seeds]][:, nodes])
        outside = torch.ones(cohort.num_nodes, dtype=torch.bool)
        outside[nodes] = False
        assert not whole[name][nodes[seeds]][:, outside].any()
    if sides:
        pattern = dense(cohort.edges.with_value(weights_at_edges(cohort)))
        ends = nodes[batch.edges.row], nodes[batch.edges.col_long]
        assert torch.equal(weights_at_edges(batch), pattern[ends])
    else:
        with pytest.raises(AssertionError, match="one direction only"):
            _ = batch.inward, batch.outward


def weights_at_edges(graph: StackedGraph) -> Tensor:
    assert graph.link_weights is not None
    return graph.link_weights


@pytest.mark.parametrize("direction", ["in", "separate"])
def test_sampled_operators_are_unbiased(direction: str) -> None:
    own = graphs()
    cohort = sampled(own, 2, direction)
    sides, count = direction == "separate", 120
    whole, draws, seeds = operators_of(cohort), cohort.draws(0), cohort.train_nodes
    drawn: dict[str, list[Tensor]] = {}
    for _ in range(count):
        batch = cohort.sample(draws)
        for name, found in operators_of(batch, sides=sides).items():
            full = torch.zeros_like(whole[name])
            full[batch.nodes.unsqueeze(1), batch.nodes] = found
            drawn.setdefault(name, []).append(full[seeds])
    assert torch.stack(drawn["gcn"]).std(dim=0).any()
    for name, parts in drawn.items():
        values = torch.stack(parts)
        error = 5 * values.std(dim=0) / count**0.5 + 1e-12
        assert ((values.mean(dim=0) - whole[name][seeds]).abs() <= error).all(), name


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_passes_without_gradient_have_the_same_operators(direction: str) -> None:
    cohort = sampled(graphs(), 2, direction)
    light = cohort.forward_only
    assert isinstance(light, WholeGraph)
    whole = operators_of(cohort)
    for name, found in operators_of(light).items():
        torch.testing.assert_close(found, whole[name])


def test_learned_weights_multiply_those_of_the_data() -> None:
    own = graphs(directed=False)
    cohort = cohort_of(own)
    omega = torch.rand(cohort.edges.nnz, generator=torch.Generator().manual_seed(0)).double()
    view = Subgraph(cohort, omega)
    given = cohort.link_weights
    assert given is not None
    a = dense(cohort.edges.with_value(given * omega))
    loops = a + torch.eye(len(a), dtype=a.dtype)
    scale = torch.diag(loops.sum(dim=1) ** -0.5)
    torch.testing.assert_close(dense(view.gcn), scale @ loops @ scale)
    sums = dense(cohort.edges.with_value(given)).sum(dim=1)
    torch.testing.assert_close(dense(view.mean), torch.diag(1 / sums.where(sums > 0, 1)) @ a)
    ones = Subgraph(cohort, torch.ones_like(omega))
    for name in OPERATORS:
        torch.testing.assert_close(dense(getattr(ones, name)), dense(getattr(cohort, name)))


def test_links_of_one_direction_are_the_reverse_of_the_other() -> None:
    graph = graphs()[0]
    inward, outward = (link_weights(graph, Reading(d)) for d in ("in", "out"))
    reverse = [graph.edges.T.tolist().index([v, u]) for u, v in graph.edges.T.tolist()]
    np.testing.assert_array_equal(inward[reverse], outward)
    assert (inward > 0).sum() == graph.arcs.sum() if graph.arcs is not None else False
