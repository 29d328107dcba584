"""Training on sampled neighbourhoods: equal to full batches if all is drawn, else unbiased."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import random_graphs
from cases import (
    assert_close,
    federation_of,
    simulate,
    small_federation,
    usual_backbone,
    weights_of,
)
from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.method import METHODS, create
from polyphily.core.sampling import Neighbours, Sampling, check_sampling, lowest
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph, Masks
from polyphily.nn.backbones import BACKBONES
from polyphily.runs.run import run

ALL, FEW = {"sample": "99,99", "batch": 1000}, {"sample": "2,1", "batch": 3}
NEAR = tuple(name for name, backbone in BACKBONES.items() if backbone.local_reach)
OTHER_FORMS = {"scaffold": {"option": "II"}, "fedspa": {"sfpd": False}}
OTHER_FORMS["s2fgl"] = {"nlir": False, "fgma": False}
WHOLE = (
    *("fedath", "fedgsp", "fedhero", *OTHER_FORMS, "adafgl", "fedfa", "fedgnn", "fediih"),
    *("fedlit", "fedsage+", "fedstar", "fggp", "fgssl", "polyphony"),
)


def cohort_of(sizes: tuple[int, ...] = (30, 12), *, seed: int = 0, density: float = 0.3) -> Cohort:
    graphs = random_graphs(sizes, seed=seed, density=density)
    keys = [(0, k) for k in range(len(sizes))]
    return Cohort(graphs, keys, 3, dtype=torch.float64)


# Everything drawn is a full batch ----------------------------------------------------------------


@pytest.mark.parametrize("backbone", NEAR)
@pytest.mark.parametrize("sparse", [False, True])
def test_all_neighbours_of_all_train_nodes_are_a_full_batch(backbone: str, sparse: bool) -> None:
    federation = small_federation(sparse=sparse)
    whole = simulate("fedavg", federation, 4, backbone=backbone, layers=2)
    for chosen in (ALL, {"sample": "99"}, {"batch": 1000}):
        sampled = simulate("fedavg", federation, 4, backbone=backbone, layers=2, **chosen)
        assert_close(weights_of(whole), weights_of(sampled), 1e-6)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_trains_on_samples_or_says_why_not(name: str) -> None:
    method = create(name)
    federation = small_federation()
    if name in WHOLE:
        with pytest.raises(UserError, match=f"--sample: {re.escape(name)} needs whole graphs"):
            run(method, federation, rounds=1, backbone=usual_backbone(method), **FEW)
        if name not in OTHER_FORMS:
            return
        method = create(name, OTHER_FORMS[name])
    whole = simulate(method, federation, 3)
    assert_close(weights_of(whole), weights_of(simulate(method, federation, 3, **ALL)), 1e-6)
    few = simulate(method, federation, 3, **FEW)
    apart = simulate(method, federation, 3, engine="sequential", **FEW)
    assert_close(weights_of(few), weights_of(apart), 1e-6)


@pytest.mark.parametrize("backbone", NEAR)
def test_stacked_equals_sequential_on_samples(backbone: str) -> None:
    chosen = {"backbone": backbone, "layers": 2, "dropout": 0.5, "input_dropout": 0.3, **FEW}
    chosen |= {"epochs": "1-4"}
    federation = small_federation(sparse=True)
    stacked = simulate("fedprox", federation, 4, **chosen)
    sequential = simulate("fedprox", federation, 4, engine="sequential", **chosen)
    assert_close(weights_of(stacked), weights_of(sequential), 1e-7)
    again = simulate("fedprox", federation, 4, **chosen)
    assert_close(weights_of(stacked), weights_of(again), 0)


def test_few_neighbours_and_few_train_nodes_both_change_what_is_learned() -> None:
    federation = small_federation()
    weight = "state/0/model/convs.0.weight"
    whole = simulate("fedavg", federation, 2).tensors()[weight]
    for chosen in ({"sample": "1,1"}, {"batch": 2}):
        other = simulate("fedavg", federation, 2, **chosen).tensors()[weight]
        assert not torch.allclose(whole, other, rtol=1e-3)


@pytest.mark.parametrize("backbone", NEAR)
def test_scores_are_those_of_the_whole_graph(backbone: str) -> None:
    federation = small_federation()
    sampled = simulate("fedavg", federation, 2, backbone=backbone, layers=2, **FEW)
    whole = simulate("fedavg", federation, 0, backbone=backbone, layers=2)
    whole.set_state(sampled.memory, sampled.states, sampled.round)
    torch.testing.assert_close(whole.predict(whole.received()), sampled.predict(sampled.received()))
    torch.testing.assert_close(whole.predict(whole.trained()), sampled.predict(sampled.trained()))


def test_clients_without_train_nodes_or_without_edges_do_no_harm() -> None:
    graphs = random_graphs((8, 9, 6), density=0.4)
    graphs[2] = Graph.build(graphs[2].features, np.zeros((2, 0), int), graphs[2].labels)
    federation = federation_of(graphs)
    clients = list(federation.clients)
    nothing = np.zeros(9, dtype=np.bool_)
    clients[1] = replace(clients[1], masks=Masks(nothing, nothing, nothing))
    cohort = Cohort(clients, [(0, 0), (0, 1), (0, 2)], 3, dtype=torch.float64)
    batch = Sampling((2, 1), 3).draw(cohort, cohort.draws(0))
    assert batch.segments.sizes[1] == 0
    assert batch.train_segments.sizes[1] == 0
    assert batch.segments.sizes[2] == batch.train_segments.sizes[2] > 0
    assert (batch.gcn @ torch.ones(batch.num_nodes, 2, dtype=torch.float64)).isfinite().all()


# What is drawn -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    fanouts=st.lists(st.integers(1, 6) | st.none(), min_size=1, max_size=3),
    batch=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_a_batch_is_a_part_of_its_cohort(
    sizes: list[int], fanouts: list[int | None], batch: int, seed: int
) -> None:
    cohort = cohort_of(tuple(sizes), seed=seed)
    drawn = Sampling(tuple(fanouts), batch).draw(cohort, cohort.draws(0))
    nodes = drawn.nodes
    whole, part = cohort.edges, drawn.edges
    known = set(zip(whole.row.tolist(), whole.col.tolist(), strict=True))
    found = list(zip(nodes[part.row].tolist(), nodes[part.col_long].tolist(), strict=True))
    assert len(set(found)) == len(found), "a neighbour is drawn twice"
    assert known.issuperset(found)
    taken = torch.bincount(part.row, minlength=len(nodes))
    assert (taken <= max(f or 99 for f in fanouts)).all()
    degrees = cohort.degrees[nodes]
    assert torch.equal(drawn.degrees, degrees)
    at_first = drawn.train_nodes
    widest = torch.full_like(degrees, fanouts[0] or 99)
    assert torch.equal(taken[at_first], degrees.minimum(widest).long()[at_first])
    totals = part.sum_by_row(drawn.weight)
    torch.testing.assert_close(totals[taken > 0], degrees[taken > 0])
    assert set(nodes[at_first].tolist()) <= set(cohort.train_nodes.tolist())
    for count, all_of_them in zip(
        drawn.train_segments.sizes, cohort.train_segments.sizes, strict=True
    ):
        assert count == (min(batch, all_of_them) if batch else all_of_them)
    assert torch.equal(drawn.train_labels, cohort.labels[nodes[at_first]])
    dense = part.with_value(torch.arange(1.0, part.nnz + 1))
    here = torch.randn(len(nodes), 2)
    torch.testing.assert_close(dense.transposed.transposed @ here, dense @ here)


def test_each_entry_is_as_likely_as_any_other() -> None:
    rng = np.random.default_rng(0)
    counts = torch.tensor([7, 0, 2, 4])
    owner = torch.repeat_interleave(counts)
    times, hits = 4000, torch.zeros(len(owner))
    for _ in range(times):
        lots = torch.from_numpy(rng.random(len(owner)))
        kept = lowest(lots, owner, counts, 3)
        assert torch.bincount(owner[kept], minlength=4).tolist() == [3, 0, 2, 3]
        hits[kept] += 1
    share = counts.clamp(max=3)[owner] / counts[owner]
    deviation = (share * (1 - share) / times).sqrt().clamp(min=1e-9)
    assert ((hits / times - share).abs() <= 4 * deviation).all()


# Unbiased ----------------------------------------------------------------------------------------


def one_layer_gradient(graph: TrainingGraph, matrix: str, weight: Tensor) -> Tensor:
    """Of the mean over train nodes of a fixed linear functional of one layer's output."""
    weight = weight.clone().requires_grad_()
    x = graph.x
    assert isinstance(x, Tensor)
    out = getattr(graph, matrix) @ graph.segments.matmul(x, weight)
    targets = torch.nn.functional.one_hot(graph.train_labels, 3).to(out.dtype)
    values = (out[graph.train_nodes] * targets).sum(dim=1)
    loss = graph.train_segments.sum(values) / graph.num_train.clamp(min=1)
    return torch.autograd.grad(loss.sum(), weight)[0]


@pytest.mark.parametrize("matrix", ["mean", "gcn", "random_walk"])
def test_gradients_are_unbiased_over_draws(matrix: str) -> None:
    cohort = cohort_of((40, 25))
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((2, cohort.num_features, 3)))
    exact = one_layer_gradient(cohort, matrix, weight)
    sampling = Sampling((3,), 4)
    found = torch.stack(
        [
            one_layer_gradient(sampling.draw(cohort, cohort.draws(number)), matrix, weight)
            for number in range(1500)
        ]
    )
    error = found.std(dim=0) / len(found) ** 0.5
    assert float(error.max()) < 0.1 * float(exact.abs().max()), "too few draws to tell"
    assert ((found.mean(dim=0) - exact).abs() <= 4.5 * error + 1e-12).all()
    assert (found.std(dim=0) > 0).any()


# Memory ------------------------------------------------------------------------------------------


def test_a_sampled_run_never_builds_the_operators_of_the_whole_graph() -> None:
    simulation = simulate("fedavg", small_federation(), 2, **FEW)
    simulation.predict(simulation.received())
    built = vars(simulation.cohort)
    assert not {"gcn", "mean", "random_walk", "edges", "edges_with_loops"} & set(built)
    assert "neighbours" in simulation.cohort._kept


def test_more_clients_train_together_where_they_are_sampled() -> None:
    federation = small_federation((60, 60, 60))
    whole = simulate("fedavg", federation, 0, hidden=256)
    sampled = simulate("fedavg", federation, 0, hidden=256, sample="1,1", batch=2)
    assert sampled.groups._bytes_to_train[0] < whole.groups._bytes_to_train[0]
    assert Sampling((1, 1), 2).most_nodes(federation.clients[0]) == 6
    assert Sampling((None,), 2).most_nodes(federation.clients[0]) == 60


def test_neighbours_are_the_cohorts_edges() -> None:
    cohort = cohort_of((9, 1, 14))
    near = Neighbours.of(cohort)
    assert torch.equal(near.crow, cohort.edges.crow)
    assert torch.equal(near.col, cohort.edges.col)


# What users say and see --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "ten", "10,", "0", "5,0", "-3", "1.5", "10;10"])
def test_numbers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--sample"):
        Settings(sample=text).check()


def test_numbers_of_neighbours() -> None:
    assert Settings(sample="off").fanouts() is None
    assert Settings(sample=" 15, 10").fanouts() == (15, 10)
    assert Sampling.of(Settings(layers=3, sample="7")) == Sampling((7, 7, 7))
    assert Sampling.of(Settings(layers=2, batch=5)) == Sampling((None, None), 5)
    assert Sampling.of(Settings()) is None
    with pytest.raises(UserError, match="network has 2 layers"):
        Sampling.of(Settings(layers=2, sample="5,5,5"))


def test_a_backbone_that_reaches_further_is_refused() -> None:
    with pytest.raises(UserError, match="gpr-gnn reaches further") as refused:
        run("fedavg", small_federation(), rounds=1, backbone="gpr-gnn", **ALL)
    named = str(refused.value).rpartition("use one of ")[2].split(", ")
    assert sorted(named) == sorted(NEAR)


def test_every_backbone_is_trained_on_samples_or_refused() -> None:
    for name, backbone in BACKBONES.items():
        chosen = Settings(backbone=name, layers=2, sample="3,3")
        if backbone.local_reach:
            check_sampling(create("fedavg"), chosen)
        else:
            with pytest.raises(UserError, match=f"--sample: {re.escape(name)} reaches further"):
                check_sampling(create("fedavg"), chosen)


def test_a_batch_says_that_it_has_no_whole_graphs() -> None:
    cohort = cohort_of()
    batch = Sampling((2, 1)).draw(cohort, cohort.draws(0))
    with pytest.raises(TypeError, match="needs_whole_graph"):
        batch.cached_per_graph("size", lambda graph: graph.num_nodes)


def test_a_cohort_samples_itself_only_if_told_to() -> None:
    cohort = cohort_of()
    assert cohort.sample(cohort.draws(0)) is cohort
    assert cohort.forward_only is cohort
    sampled = Cohort(cohort.graphs, cohort.keys, 3, sampling=Sampling((2, 1), 3))
    batch = sampled.sample(sampled.draws(0))
    assert batch is not sampled
    assert batch.num_nodes < sampled.num_nodes
    assert batch.sample(sampled.draws(0)) is batch
    assert batch.forward_only is batch
    assert batch.constant((1.0, 2.0)) is sampled.constant((1.0, 2.0))


def test_the_summary_tells() -> None:
    federation = small_federation()
    chosen = {"rounds": 1, "backbone": "gcn"}
    assert run("fedavg", federation, **chosen).summary["sampling"] is None
    told = run("fedavg", federation, sample="4,2", batch=8, **chosen).summary["sampling"]
    assert told == {"neighbours": [4, 2], "train_nodes": 8}
    told = run("fedavg", federation, batch=8, **chosen).summary["sampling"]
    assert told == {"neighbours": [None, None], "train_nodes": 8}
