"""`--label-inputs`: what a training step sees of features and labels, and what it must not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from builders import dense_features, mask_at, predict, random_graphs, random_parameters
from cases import assert_same_bits, simulate, small_federation, with_noise_outside_training
from polyphily.core.cohort import Cohort
from polyphily.core.labels import LabelledFeatures, LabelsHidden
from polyphily.core.local import Local
from polyphily.core.method import create
from polyphily.core.optimizers import OptimizerSpec
from polyphily.graphs.graph import Graph, Masks
from polyphily.nn.backbones import GCN, Backbone, Output, Shape, build
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph
from polyphily.testing.examples import CLASSES, FEATURES

ON_EDGES = ("gcn", "sage", "gat", "gpr-gnn", "acm-gcn", "res-gcn")
DROPPED = {"dropout": 0.4, "input_dropout": 0.3}


def split_of(nodes: int, train: int) -> Masks:
    """Return a split in which this many nodes train, every second one, and all others test."""
    chosen = mask_at(nodes, [2 * i + 1 for i in range(train)])
    return Masks(chosen, np.zeros(nodes, dtype=np.bool_), ~chosen)


def clients(train: Sequence[int] = (4, 0, 7, 1), *, sparse: bool = False) -> list[Graph]:
    """Return connected random graphs of clients with these numbers of train nodes."""
    graphs = random_graphs([2 * n + 8 for n in train], density=0.4, sparse=sparse)
    sizes = zip(graphs, train, strict=True)
    return [replace(graph, masks=split_of(graph.num_nodes, n)) for graph, n in sizes]


def cohort_of(graphs: Sequence[Graph], share: float = 0.5, *, first: int = 0) -> Cohort:
    keys = [(0, first + k) for k in range(len(graphs))]
    return Cohort(graphs, keys, CLASSES, dtype=torch.float64, label_inputs=share)


def step_of(cohort: Cohort, round_index: int = 0) -> LabelsHidden:
    """Return what the first step of a round sees."""
    seen = cohort.sample(cohort.draws(round_index))
    assert isinstance(seen, LabelsHidden)
    return seen


def dense(x: Tensor | SparseMatrix) -> Tensor:
    if isinstance(x, Tensor):
        return x
    assert x.value is not None
    found = x.value.new_zeros(x.shape)
    found[x.row, x.col_long] = x.value
    return found


def by_hand(graphs: Sequence[Graph], visible: Sequence[np.ndarray], *, sparse: bool) -> Tensor:
    """Return features beside one-hot labels of visible nodes, client by client."""
    parts = []
    for graph, shown in zip(graphs, visible, strict=True):
        own = np.zeros((graph.num_nodes, CLASSES))
        for node in np.flatnonzero(shown):
            own[node, graph.labels[node]] = 1
        parts.append(torch.cat([dense_features(graph), torch.from_numpy(own)], dim=1))
    return torch.block_diag(*parts) if sparse else torch.cat(parts)


def masks_of(graph: Graph) -> Masks:
    assert graph.masks is not None
    return graph.masks


def hidden_of(seen: LabelsHidden, cohort: Cohort) -> list[np.ndarray]:
    """Return which nodes of each client hide their labels."""
    mask = torch.zeros(cohort.num_nodes, dtype=torch.bool)
    mask[seen.train_nodes] = True
    return [part.numpy() for part in torch.split(mask, list(cohort.segments.sizes))]


def visible_of(seen: LabelsHidden, cohort: Cohort) -> list[np.ndarray]:
    """Return which nodes of each client show their labels."""
    hidden = hidden_of(seen, cohort)
    return [masks_of(g).train & ~own for g, own in zip(cohort.graphs, hidden, strict=True)]


def with_labels(graph: Graph, nodes: np.ndarray, shift: int = 1) -> Graph:
    """Return the graph with other labels at some nodes."""
    other = (graph.labels + shift) % CLASSES
    return replace(graph, labels=np.where(nodes, other, graph.labels))


# Features ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_all_train_labels_are_among_the_features_of_a_cohort(sparse: bool) -> None:
    graphs = clients(sparse=sparse)
    cohort = cohort_of(graphs)
    assert isinstance(cohort.x, SparseMatrix) == sparse
    expected = by_hand(graphs, [masks_of(g).train for g in graphs], sparse=sparse)
    assert torch.equal(dense(cohort.x), expected)
    assert cohort.num_features == FEATURES + CLASSES
    plain = cohort_of(graphs, 0.0)
    assert torch.equal(dense(cohort.plain_x), dense(plain.x))
    assert plain.num_features == FEATURES


@settings(max_examples=60, deadline=None)
@given(
    train=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    share=st.floats(0.001, 0.999),
    sparse=st.booleans(),
    round_index=st.integers(0, 5),
)
def test_a_step_sees_the_labels_that_are_not_hidden(
    train: list[int], share: float, sparse: bool, round_index: int
) -> None:
    graphs = clients(train, sparse=sparse)
    cohort = cohort_of(graphs, share)
    seen = step_of(cohort, round_index)
    expected = by_hand(graphs, visible_of(seen, cohort), sparse=sparse)
    assert torch.equal(dense(seen.x), expected)
    if isinstance(seen.x, SparseMatrix):  # gradients use the transpose
        assert torch.equal(dense(seen.x.transposed), expected.T)
    assert isinstance(cohort.x, SparseMatrix) == sparse
    assert seen.x_pointers == cohort.x_pointers == cohort.segments.pointers_into(seen.x)


def test_a_pattern_without_values_stands_for_ones() -> None:
    graphs = clients(sparse=True)
    cohort = cohort_of(graphs)
    assert isinstance(cohort.plain_x, SparseMatrix)
    pattern = replace(cohort.plain_x, value=None, value_t=None)
    shown = torch.arange(len(cohort.train_nodes)) % 2 == 0
    found = LabelledFeatures(cohort, pattern, CLASSES).seen(shown)
    ones = [
        replace(g, features=sp.csr_array(g.features.astype(bool).astype(np.float32)))
        for g in graphs
    ]
    mask = torch.zeros(cohort.num_nodes, dtype=torch.bool)
    mask[cohort.train_nodes[shown]] = True
    visible = [part.numpy() for part in torch.split(mask, list(cohort.segments.sizes))]
    assert torch.equal(dense(found), by_hand(ones, visible, sparse=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_changes_neither_the_cohort_nor_another_step(sparse: bool) -> None:
    graphs = clients(sparse=sparse)
    cohort = cohort_of(graphs)
    whole, steps = cohort.x, [step_of(cohort, r) for r in range(3)]
    features = [seen.x for seen in steps]
    nobody = cohort.labelled_features.seen(torch.zeros(len(cohort.train_nodes)))
    shown = [visible_of(seen, cohort) for seen in steps]
    for x, visible in zip(features, shown, strict=True):
        assert torch.equal(dense(x), by_hand(graphs, visible, sparse=sparse))
    everybody = [masks_of(g).train for g in graphs]
    assert torch.equal(dense(whole), by_hand(graphs, everybody, sparse=sparse))
    hidden = [np.zeros(g.num_nodes, dtype=np.bool_) for g in graphs]
    assert torch.equal(dense(nobody), by_hand(graphs, hidden, sparse=sparse))


@pytest.mark.parametrize("sparse", [False, True])
def test_taken_and_repeated_cohorts_have_label_inputs_too(sparse: bool) -> None:
    graphs = clients(sparse=sparse)
    cohort = cohort_of(graphs)
    taken, twice = cohort.take([2, 0]), cohort.repeated(2)
    order = [graphs[2], graphs[0]]
    shown = by_hand(order, [masks_of(g).train for g in order], sparse=sparse)
    assert torch.equal(dense(taken.x), shown)
    assert taken.changes
    assert twice.changes
    assert twice.num_features == FEATURES + CLASSES


# A step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.01, (0, 1, 1, 1, 1)),
        (0.25, (0, 1, 1, 2, 3)),
        (0.5, (0, 1, 2, 4, 6)),  # 3.5 and 5.5 are rounded to even numbers
        (0.9, (0, 1, 4, 6, 10)),
        (0.999, (0, 1, 4, 7, 11)),
    ],
)
def test_a_share_of_each_client_is_hidden_and_at_least_one(
    share: float, expected: tuple[int, ...]
) -> None:
    seen = step_of(cohort_of(clients((0, 1, 4, 7, 11)), share))
    assert seen.train_segments.sizes == expected
    assert seen.num_train.tolist() == list(expected)
    assert len(seen.train_nodes) == sum(expected)


def test_train_nodes_and_labels_of_a_step_are_those_that_are_hidden() -> None:
    graphs = clients()
    cohort = cohort_of(graphs)
    seen = step_of(cohort)
    train = set(cohort.train_nodes.tolist())
    nodes = seen.train_nodes.tolist()
    assert nodes == sorted(set(nodes))
    assert set(nodes) < train
    labels = np.concatenate([g.labels for g in graphs])
    assert seen.train_labels.tolist() == labels[nodes].tolist()
    owner = np.repeat(np.arange(len(graphs)), [g.num_nodes for g in graphs])
    counts = np.bincount(owner[nodes], minlength=len(graphs))
    assert seen.train_segments.sizes == tuple(counts)
    assert seen.train_segments.owner.tolist() == owner[nodes].tolist()
    assert seen.num_train.tolist() == counts.tolist()
    assert seen.num_train.dtype == torch.float64
    known = np.full(cohort.num_nodes, -1)
    known[nodes] = labels[nodes]
    assert seen.labels.tolist() == known.tolist()
    assert torch.equal(seen.train_onehot, F.one_hot(seen.train_labels, CLASSES).double())


def test_a_step_has_the_clients_and_edges_of_its_cohort() -> None:
    cohort = cohort_of(clients())
    seen = step_of(cohort)
    assert (len(seen), seen.keys, seen.blocks) == (len(cohort), cohort.keys, cohort.blocks)
    assert (seen.classes, seen.num_nodes) == (cohort.classes, cohort.num_nodes)
    assert seen.num_features == FEATURES + CLASSES
    assert seen.edges is cohort.edges
    assert seen.gcn is cohort.gcn
    assert not seen.changes
    assert seen.forward_only is seen
    assert seen.sample(cohort.draws(0)) is seen


def test_every_step_hides_others_and_all_are_hidden_equally_often() -> None:
    cohort = cohort_of(clients((8, 12)), 0.25)
    times = torch.zeros(cohort.num_nodes)
    steps = 800
    drawn = set()
    for round_index in range(steps // 4):
        draws = cohort.draws(round_index)
        for _ in range(4):
            nodes = cohort.sample(draws).train_nodes
            times[nodes] += 1
            drawn.add(tuple(nodes.tolist()))
    assert len(drawn) > steps / 2
    often = times[cohort.train_nodes] / steps
    assert times.sum() == times[cohort.train_nodes].sum()
    assert (often - 0.25).abs().max() < 0.06  # four standard deviations of a share of 800


def test_a_round_draws_the_same_again_and_another_round_draws_others() -> None:
    cohort = cohort_of(clients((8, 12)))
    first, again, other = (step_of(cohort, r).train_nodes.tolist() for r in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("sparse", [False, True])
def test_a_client_hides_the_same_labels_alone_as_among_others(sparse: bool) -> None:
    graphs = clients((4, 0, 7, 5), sparse=sparse)
    cohort = cohort_of(graphs)
    draws = cohort.draws(2)
    alone = [cohort_of([graph], first=k) for k, graph in enumerate(graphs)]
    own_draws = [own.draws(2) for own in alone]
    for _ in range(3):
        seen = cohort.sample(draws)
        assert isinstance(seen, LabelsHidden)
        together = hidden_of(seen, cohort)
        blocks = torch.split(dense(seen.x), list(cohort.segments.sizes))
        for k, (own, own_draw) in enumerate(zip(alone, own_draws, strict=True)):
            own_seen = own.sample(own_draw)
            assert isinstance(own_seen, LabelsHidden)
            assert np.array_equal(hidden_of(own_seen, own)[0], together[k])
            width = FEATURES + CLASSES
            block = blocks[k][:, k * width : (k + 1) * width] if sparse else blocks[k]
            assert torch.equal(dense(own_seen.x), block)


# Blindness ---------------------------------------------------------------------------------------


def logits_of(backbone: str, cohort: Cohort, round_index: int = 0) -> Tensor:
    """Return the logits of a training step, with dropout."""
    shape = Shape(FEATURES + CLASSES, CLASSES, 8, 2, heads=2, hops=3, **DROPPED)
    network = build(backbone, shape, seed=0).double()
    params = random_parameters(network, len(cohort))
    draws = cohort.draws(round_index)
    return predict(network, params, cohort.sample(draws), draws).logits


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("backbone", [*ON_EDGES, "mlp"])
def test_no_output_of_a_step_depends_on_hidden_labels(backbone: str, sparse: bool) -> None:
    cohort = cohort_of(clients(sparse=sparse))
    for round_index in range(3):
        hidden = hidden_of(step_of(cohort, round_index), cohort)
        for shift in (1, 2):
            pairs = zip(cohort.graphs, hidden, strict=True)
            other = cohort_of([with_labels(g, own, shift) for g, own in pairs])
            assert not torch.equal(other.labels, cohort.labels)
            first, second = (logits_of(backbone, c, round_index) for c in (cohort, other))
            assert torch.equal(first, second)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("backbone", ON_EDGES)
def test_neighbours_see_a_visible_label(backbone: str, sparse: bool) -> None:
    """Dropout is on, so one of several visible labels has to change some neighbour's output."""
    cohort = cohort_of(clients((6, 5), sparse=sparse))
    visible = visible_of(step_of(cohort), cohort)
    before = logits_of(backbone, cohort)
    reached = 0
    for node in np.flatnonzero(visible[0]):
        graph = cohort.graphs[0]
        changed = with_labels(graph, mask_at(graph.num_nodes, [int(node)]))
        moved = (logits_of(backbone, cohort_of([changed, cohort.graphs[1]])) != before).any(dim=1)
        neighbours = graph.edges[1][graph.edges[0] == node]
        reached += bool(moved[neighbours].any())
        assert not moved[graph.num_nodes :].any()  # never those of another client
    assert reached


def test_without_edges_a_label_reaches_nobody_else() -> None:
    cohort = cohort_of(clients((6,)))
    (visible,) = visible_of(step_of(cohort), cohort)
    (graph,) = cohort.graphs
    moved = logits_of("mlp", cohort_of([with_labels(graph, visible)])) != logits_of("mlp", cohort)
    assert not moved.any(dim=1).numpy()[~visible].any()


@pytest.mark.parametrize("sparse", [False, True])
def test_labels_outside_training_never_matter(sparse: bool) -> None:
    federation = small_federation(sparse=sparse)
    other = replace(
        federation, clients=tuple(with_noise_outside_training(g) for g in federation.clients)
    )
    first, second = (
        simulate("fedavg", data, 2, label_inputs=0.5, **DROPPED) for data in (federation, other)
    )
    assert_same_bits(first.tensors(), second.tensors())
    for view in ("received", "trained"):
        scores = [simulation.predict(getattr(simulation, view)()) for simulation in (first, second)]
        assert torch.equal(*scores)


@pytest.mark.parametrize("backbone", ON_EDGES)
def test_predictions_follow_from_the_labels_of_all_train_nodes(backbone: str) -> None:
    """A network without dropout on features that were put together by hand says the same."""
    simulation = simulate("fedavg", small_federation(), 2, label_inputs=0.5, backbone=backbone)
    graphs = simulation.cohort.graphs
    expected = logits_by_hand(
        simulation.network,
        simulation.received().params,
        graphs,
        [masks_of(g).train for g in graphs],
    )
    torch.testing.assert_close(simulation.predict(simulation.received()), expected)


# The loss ----------------------------------------------------------------------------------------


def logits_by_hand(
    network: Backbone, params: Any, graphs: Sequence[Graph], visible: Sequence[np.ndarray]
) -> Tensor:
    """Return logits on graphs without label inputs that have visible labels as plain features."""
    plain = [
        replace(graph, features=by_hand([graph], [shown], sparse=False).numpy())
        for graph, shown in zip(graphs, visible, strict=True)
    ]
    return predict(network, params, cohort_of(plain, 0.0)).logits


def losses_by_hand(
    network: Backbone,
    params: Any,
    graphs: Sequence[Graph],
    visible: Sequence[np.ndarray],
    hidden: Sequence[np.ndarray],
) -> list[Tensor]:
    """Return each client's mean over its hidden nodes of -log p(label)."""
    sizes = [g.num_nodes for g in graphs]
    parts = torch.split(logits_by_hand(network, params, graphs, visible), sizes)
    losses = []
    for graph, own, logits in zip(graphs, hidden, parts, strict=True):
        terms = [
            logits[node].logsumexp(dim=0) - logits[node, graph.labels[node]]
            for node in np.flatnonzero(own)
        ]
        losses.append(torch.stack(terms).mean() if terms else logits.sum() * 0)
    return losses


@pytest.mark.parametrize("sparse", [False, True])
def test_the_loss_is_the_mean_over_hidden_nodes(sparse: bool) -> None:
    cohort = cohort_of(clients(sparse=sparse))
    seen = step_of(cohort)
    network = build("gcn", Shape(FEATURES + CLASSES, CLASSES, 8, 2), seed=0).double()
    params = random_parameters(network, len(cohort))
    local = Local(seen, network, params, {}, {}, OptimizerSpec())
    found = create("fedavg").loss(local)
    expected = losses_by_hand(
        network, params, cohort.graphs, visible_of(seen, cohort), hidden_of(seen, cohort)
    )
    torch.testing.assert_close(found, torch.stack(expected))
    assert found[1] == 0  # a client without train nodes


def test_training_takes_the_steps_of_a_loop_by_hand() -> None:
    """Two rounds of three steps of gradient descent, by a loop that uses nothing of `labels`."""
    rate, share = 0.3, 0.4
    options = {"optimizer": "sgd", "lr": rate, "weight_decay": 0.0, "epochs": 3}
    simulation = simulate("local", small_federation(), 0, label_inputs=share, **options)
    network, cohort = simulation.network, simulation.cohort
    params = {n: t.clone() for n, t in simulation.trained().params.items()}
    train = [np.flatnonzero(masks_of(g).train) for g in cohort.graphs]
    for round_index in range(2):
        draws = cohort.draws(round_index)
        for _ in range(3):
            lots = draws.uniform(1, cohort.train_segments.pointers).view(-1)
            hidden, visible = [], []
            for graph, own, lot in zip(
                cohort.graphs, train, torch.split(lots, [len(t) for t in train]), strict=True
            ):
                count = max(1, round(share * len(own)))
                chosen = own[np.argsort(lot.numpy())[:count]]
                hidden.append(mask_at(graph.num_nodes, chosen.tolist()))
                visible.append(masks_of(graph).train & ~hidden[-1])
            leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
            losses = losses_by_hand(network, leaves, cohort.graphs, visible, hidden)
            grads = torch.autograd.grad(torch.stack(losses).sum(), list(leaves.values()))
            steps = zip(params.items(), grads, strict=True)
            params = {n: t - rate * g for (n, t), g in steps}
        simulation.advance()
    found = simulation.trained().params
    for name, value in params.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_scaffold_compares_with_the_gradient_at_the_received_model() -> None:
    """c_i is the gradient at what the client received, although every step sees something else."""
    simulation = simulate("scaffold", small_federation(), 0, label_inputs=0.5, epochs=4)
    network, cohort = simulation.network, simulation.cohort
    seen = step_of(cohort)
    received = simulation.received().params
    leaves = {n: t.clone().requires_grad_() for n, t in received.items()}
    losses = losses_by_hand(
        network, leaves, cohort.graphs, visible_of(seen, cohort), hidden_of(seen, cohort)
    )
    grads = torch.autograd.grad(torch.stack(losses).sum(), list(leaves.values()))
    simulation.advance()
    for name, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(
            simulation.memory[f"control/{name}"], grad, rtol=1e-9, atol=1e-11
        )


# What is kept from step to step ------------------------------------------------------------------


class Keeping(GCN):
    """A GCN that keeps its propagated input, which must not be done."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        graph.cached("keeping/input", lambda g: g.gcn @ g.x)  # type: ignore[operator]
        return super().forward(graph, draws)


class KeepingDeeply(GCN):
    """One that keeps it by way of something else that it keeps."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        graph.cached("outer", lambda g: g.cached("inner", lambda h: h.x))
        return super().forward(graph, draws)


@pytest.mark.parametrize("network", [Keeping, KeepingDeeply])
def test_a_network_that_keeps_what_it_computes_from_features_is_an_error(
    network: type[Backbone],
) -> None:
    cohort = cohort_of(clients())
    made = network(Shape(FEATURES + CLASSES, CLASSES, 8, 2)).double()
    params = random_parameters(made, len(cohort))
    with pytest.raises(TypeError, match=r"must not keep \(`graph.cached`\) what it computes"):
        predict(made, params, step_of(cohort))
    predict(made, params, cohort)  # nothing changes in prediction
    with pytest.raises(TypeError, match="every step hides others"):
        predict(made, params, step_of(cohort))


def test_what_depends_on_edges_alone_is_kept() -> None:
    cohort = cohort_of(clients())
    made = []

    def make(graph: StackedGraph) -> Tensor:
        made.append(graph.degrees)
        return graph.degrees

    found = [step_of(cohort, r).cached("degrees", make) for r in range(3)]
    assert len(made) == 1
    assert all(value is found[0] for value in found)
