"""S2FGL with `paper=on`, equation by equation, against dense numpy written from the paper."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from builders import dense_adjacency, dense_features
from cases import simulate, small_federation
from polyphily.core.local import Local
from polyphily.core.messages import Message, Uploads
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.methods.s2fgl import S2FGL
from polyphily.nn.backbones import Output

Array = npt.NDArray[np.float64]
SIZES = (31, 14, 24, 40)
ALPHA, K_SIM, K_EIG, CLASSES = 0.15, 3, 10, 3
PAPER = create("s2fgl", {"paper": True})
assert isinstance(PAPER, S2FGL)


def after(rounds: int) -> Simulation:
    return simulate(PAPER, small_federation(SIZES), rounds, dropout=0.5, epochs=3)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """After two rounds with dropout: the repository was used once."""
    return after(2)


@pytest.fixture
def local(simulation: Simulation) -> Local:
    """The view of the clients in the next round, moved away from the global model."""
    found = simulation.received()
    found.draws = found.cohort.draws(7)  # dropout is on, but not for the global model
    found.constants = PAPER.prepare_round(found)
    source = torch.Generator().manual_seed(5)
    found.params = {
        n: (p + 0.3 * torch.randn(p.shape, generator=source).to(p)).requires_grad_()
        for n, p in found.params.items()
    }
    return found


def plain(value: torch.Tensor) -> Array:
    return np.asarray(value.detach().double().numpy())


def output_of(local: Local) -> Output:
    """The output that the loss is computed from; the same entries are dropped in every call."""
    local.draws = local.cohort.draws(7)
    return local.forward()


def rows_of(local: Local, k: int) -> slice:
    pointers = local.cohort.segments.pointers
    return slice(pointers[k], pointers[k + 1])


def network(graph: Graph, params: Message, k: int) -> tuple[Array, Array]:
    """Two graph convolutions and a linear classifier without dropout: (logits, h)."""
    own = {name: plain(value[k]) for name, value in params.items()}
    loops = dense_adjacency(graph).numpy() + np.eye(graph.num_nodes)
    degree = loops.sum(1)
    h = dense_features(graph).numpy()
    for layer in ("trunk.convs.0", "trunk.convs.1"):
        h = (loops / np.sqrt(np.outer(degree, degree))) @ h @ own[f"{layer}.weight"]
        h = np.maximum(h + own[f"{layer}.bias"], 0)
    return h @ own["head.weight"] + own["head.bias"], h


def pagerank(adjacency: Array) -> Array:
    """Eq. 1 and 5: alpha (I - (1 - alpha) D^-1 A)^-1."""
    walk = np.diag(1 / np.maximum(adjacency.sum(1), 1)) @ adjacency
    return ALPHA * np.linalg.inv(np.eye(len(adjacency)) - (1 - ALPHA) * walk)


def centrality(graph: Graph) -> Array:
    """Eq. 3-5, node by node."""
    assert graph.masks is not None
    adjacency = dense_adjacency(graph).numpy()
    p, p_labels = pagerank(adjacency), pagerank(adjacency + np.eye(len(adjacency)))
    score = np.zeros(graph.num_nodes)
    for u in range(graph.num_nodes):
        prominence = max(p[u, v] * 1 for v in range(graph.num_nodes))  # tau_v = 1
        influence = sum(p_labels[v, u] for v in range(graph.num_nodes) if graph.masks.train[v])
        score[u] = prominence + influence
    return score


def selection(graph: Graph) -> list[int]:
    """The top K nodes, K = n/3."""
    return sorted(np.argsort(-centrality(graph))[: graph.num_nodes // 3].tolist())


def cosine(a: Array, b: Array) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else 0.0


def softmax(x: Array) -> Array:
    return np.exp(x) / np.exp(x).sum()


def log_softmax(x: Array) -> Array:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def laplacian(h: Array) -> Array:
    """Eq. 9-10, S made symmetric."""
    count = len(h)
    s = np.zeros((count, count))
    for u in range(count):
        others = sorted((v for v in range(count) if v != u), key=lambda v: -cosine(h[u], h[v]))
        for v in others[:K_SIM]:
            s[u, v] = cosine(h[u], h[v])
    s = (s + s.T) / 2
    return np.diag(s.sum(1)) - s


# NLIR --------------------------------------------------------------------------------------------


def test_eq_3_to_5_select_a_third_of_the_nodes(simulation: Simulation) -> None:
    nodes, rows = PAPER.top_nodes(simulation.cohort, PAPER.selected)
    for k, graph in enumerate(simulation.cohort.graphs):
        found = (
            nodes[rows.pointers[k] : rows.pointers[k + 1]] - simulation.cohort.segments.pointers[k]
        )
        assert found.tolist() == selection(graph)


def test_eq_6_prototypes_and_their_counts() -> None:
    local = after(1).trained()
    local.draws = local.cohort.draws(7)  # no entry may be dropped here
    sent = PAPER.upload(local)
    for k, graph in enumerate(local.cohort.graphs):
        assert graph.masks is not None
        logits, h = network(graph, local.params, k)
        for c in range(CLASSES):
            members = [
                u
                for u in selection(graph)
                if (graph.labels[u] if graph.masks.train[u] else logits[u].argmax()) == c
            ]
            mean = sum((h[u] for u in members), np.zeros(h.shape[1])) / max(len(members), 1)
            assert sent["counts"][k, c] == len(members)
            np.testing.assert_allclose(plain(sent["prototypes"][k, c]), mean, atol=1e-9)


def test_eq_7_four_weighted_means_per_class_of_clients_drawn_for_each() -> None:
    clients, replicas = 10, 4
    counts = torch.arange(1.0, clients * CLASSES + 1).view(clients, CLASSES).double()
    prototypes = torch.eye(clients).double().unsqueeze(1).expand(-1, CLASSES, -1)  # who it is from
    everyone = tuple(range(clients))
    sent = {"prototypes": prototypes, "counts": counts, "model/w": counts[:, :1]}
    uploads = Uploads(everyone, {**sent, "weight": torch.ones(clients).double()})
    repository = PAPER.aggregate({}, uploads, np.random.default_rng(0))["repository"]
    assert repository.shape == (replicas, CLASSES, clients)
    drawn = set()
    for k in range(replicas):
        for c in range(CLASSES):
            members = [i for i in everyone if repository[k, c, i] > 0]
            assert len(members) == 7  # 70 percent
            total = sum(float(counts[i, c]) for i in members)
            for i in everyone:
                expected = float(counts[i, c]) / total if i in members else 0
                assert float(repository[k, c, i]) == pytest.approx(expected)
            drawn.add(tuple(members))
    assert len(drawn) > replicas  # drawn for every class, too, not once per replica


def test_eq_7_a_class_that_nobody_sent_has_a_prototype_of_zeros() -> None:
    sent = {"prototypes": torch.ones(3, CLASSES, 2), "counts": torch.tensor([[1.0, 2.0, 0.0]] * 3)}
    uploads = Uploads((0, 1, 2), {**sent, "model/w": torch.ones(3, 1), "weight": torch.ones(3)})
    repository = PAPER.aggregate({}, uploads, np.random.default_rng(0))["repository"]
    assert (repository[:, :2] == 1).all()
    assert (repository[:, 2] == 0).all()


def test_the_repository_goes_to_every_client_with_the_model(simulation: Simulation) -> None:
    state = simulation.states[0]
    sent = PAPER.download(state, [2, 0, 1])
    assert sent.keys() == {n for n in state if n.startswith("model/")} | {"repository"}
    for value in sent["repository"]:
        assert torch.equal(value, state["repository"])


def test_the_model_is_the_mean_weighted_by_nodes(simulation: Simulation) -> None:
    local = simulation.trained()
    sent = PAPER.upload(local)
    uploads = Uploads((0, 1, 2, 3), sent)
    found = PAPER.aggregate({}, uploads, np.random.default_rng(0))
    for name in ("model/trunk.convs.0.weight", "model/head.weight"):
        expected = sum(n * plain(sent[name][k]) for k, n in enumerate(SIZES)) / sum(SIZES)
        np.testing.assert_allclose(plain(found[name]), expected, atol=1e-12)


def test_eq_8_divergence_of_local_and_frozen_global_similarities(
    simulation: Simulation, local: Local
) -> None:
    repository = plain(simulation.states[0]["repository"]).reshape(-1, 8)
    assert len(repository) == 4 * CLASSES
    output = output_of(local)
    found = plain(PAPER.distillation(local, output.embedding))
    for k, graph in enumerate(local.cohort.graphs):
        _, h_global = network(graph, simulation.received().params, k)
        h = plain(output.embedding)[rows_of(local, k)]
        total = 0.0
        for u in range(len(h)):
            p, q = (
                softmax(np.array([cosine(z[u], anchor) for anchor in repository]))
                for z in (h, h_global)
            )
            total += sum(p[j] * np.log(p[j] / q[j]) for j in range(len(p)))
        assert total > 0
        assert found[k] == pytest.approx(total / len(h), rel=1e-6)


# FGMA --------------------------------------------------------------------------------------------


def test_eq_9_and_10_extremes_of_the_similarity_graph_of_all_nodes(local: Local) -> None:
    nodes, rows = PAPER.spectral_nodes(local.cohort)
    assert nodes.tolist() == list(range(local.cohort.num_nodes))
    near = output_of(local).embedding
    far = local.frozen({n.removeprefix("model/"): p for n, p in local.received.items()}).embedding
    ours = PAPER.basis(local, near, rows)
    theirs = local.constants["global basis"]
    for h, basis in ((near, ours), (far, theirs)):
        for k in range(len(SIZES)):
            matrix = laplacian(plain(h)[rows_of(local, k)])
            vectors = plain(basis)[rows_of(local, k)]
            values = np.linalg.eigvalsh(matrix)
            ends = np.concatenate([values[:K_EIG], values[-K_EIG:]])
            assert vectors.shape[1] == 2 * K_EIG
            np.testing.assert_allclose(matrix @ vectors, vectors * ends, atol=1e-9)
            np.testing.assert_allclose((vectors**2).sum(0), 1, atol=1e-9)


def test_eq_11_and_12_sum_of_mean_squares_between_projections(
    simulation: Simulation, local: Local
) -> None:
    _, rows = PAPER.spectral_nodes(local.cohort)
    h = output_of(local).embedding
    found = plain(PAPER.frequency_alignment(local, h))
    u_all, v_all = plain(PAPER.basis(local, h, rows)), plain(local.constants["global basis"])
    for k, graph in enumerate(local.cohort.graphs):
        own = rows_of(local, k)
        near, u, v = plain(h)[own], u_all[own], v_all[own]
        _, far = network(graph, simulation.received().params, k)
        total = 0.0
        for m in range(2 * K_EIG):  # the low ones, then the high ones
            z = np.outer(u[:, m], u[:, m]) @ near
            z_global = np.outer(v[:, m], v[:, m]) @ far
            total += ((z - z_global) ** 2).mean()
        assert total > 0
        assert found[k] == pytest.approx(total, rel=1e-6)


def test_eq_12_no_gradient_through_eigenvectors(local: Local) -> None:
    """The gradient of |u u^T h - z|^2 in h is 2 u u^T (u u^T h - z) if u is held fixed."""
    _, rows = PAPER.spectral_nodes(local.cohort)
    h = output_of(local).embedding
    (found,) = torch.autograd.grad(PAPER.frequency_alignment(local, h).sum(), h)
    far = local.frozen({n.removeprefix("model/"): p for n, p in local.received.items()}).embedding
    u_all, v_all = plain(PAPER.basis(local, h, rows)), plain(local.constants["global basis"])
    for k in range(len(SIZES)):
        own = rows_of(local, k)
        near, wide, u, v = plain(h)[own], plain(far)[own], u_all[own], v_all[own]
        expected = np.zeros_like(near)
        for m in range(2 * K_EIG):
            projector = np.outer(u[:, m], u[:, m])
            gap = projector @ near - np.outer(v[:, m], v[:, m]) @ wide
            expected += 2 * projector @ gap / near.size
        np.testing.assert_allclose(plain(found)[own], expected, atol=1e-9)


# The whole loss ----------------------------------------------------------------------------------


def test_eq_13_the_weighted_sum(local: Local) -> None:
    output = output_of(local)
    local.draws = local.cohort.draws(7)
    found = plain(PAPER.loss(local))
    terms = (PAPER.distillation, PAPER.frequency_alignment)
    distilled, aligned = (plain(term(local, output.embedding)) for term in terms)
    for k, graph in enumerate(local.cohort.graphs):
        assert graph.masks is not None
        scores = log_softmax(plain(output.logits)[rows_of(local, k)])
        labelled = np.flatnonzero(graph.masks.train)
        entropy = -sum(scores[u, graph.labels[u]] for u in labelled) / len(labelled)
        expected = entropy + 5 * distilled[k] + 0.05 * aligned[k]
        assert found[k] == pytest.approx(expected, rel=1e-9)


def test_both_terms_begin_in_full_in_the_second_round() -> None:
    first, second = after(0).received(), after(1).received()
    assert PAPER.prepare_round(first) == {}
    constants = PAPER.prepare_round(second)
    assert float(constants["strength"]) == 1
    assert {"anchors", "global basis"} <= constants.keys()
