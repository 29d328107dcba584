"""S2FGL's parts, each against a computation written out here in plain numpy or torch."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import CPU, dense_adjacency, random_graph
from cases import assert_close, assert_same_bits, simulate, small_federation, weights_of
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph, Masks
from polyphily.heterogeneity import pagerank
from polyphily.methods.s2fgl import S2FGL, spectrum
from polyphily.methods.s2fgl.centrality import label_centrality
from polyphily.methods.s2fgl.spectrum import extremes, projections
from polyphily.nn.backbones import BACKBONES
from polyphily.nn.segments import Segments

PAPER = {"warm_up": 0, "ramp": 0}
SIZES = (31, 9, 24, 40)


def method(**options: object) -> S2FGL:
    made = create("s2fgl", {**PAPER, **options})
    assert isinstance(made, S2FGL)
    return made


def moved(simulation: Simulation, distance: float = 0.3) -> Local:
    """The local view in the next round, after the parameters have moved away from the global."""
    local = simulation.received()
    local.constants = simulation.method.prepare_round(local)
    source = torch.Generator().manual_seed(5)
    local.params = {
        n: (p + distance * torch.randn(p.shape, generator=source).to(p)).requires_grad_()
        for n, p in local.params.items()
    }
    return local


def inverse(graph: Graph, alpha: float, *, loops: bool = False) -> np.ndarray:
    """(I - (1-alpha) D^-1 A)^-1 by plain inversion."""
    adjacency = dense_adjacency(graph).numpy() + (np.eye(graph.num_nodes) if loops else 0)
    walk = adjacency / np.maximum(adjacency.sum(1, keepdims=True), 1)
    return np.linalg.inv(np.eye(graph.num_nodes) - (1 - alpha) * walk)


def graph_with_loner(nodes: int = 23) -> Graph:
    """A random graph whose last node has no edge."""
    graph = random_graph(nodes, density=0.15, seed=3)
    kept = (graph.edges != nodes - 1).all(axis=0)
    return Graph(graph.features, graph.edges[:, kept], graph.labels, graph.masks)


# PageRank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.15, 0.85])
@pytest.mark.parametrize("loops", [False, True])
def test_pagerank_is_the_inverse(alpha: float, loops: bool) -> None:
    graph = graph_with_loner()
    assert graph.masks is not None
    train = graph.masks.train
    expected = alpha * inverse(graph, alpha, loops=loops)
    np.testing.assert_allclose(
        pagerank.pagerank_matrix(graph, alpha, loops=loops), expected, atol=1e-12
    )
    np.testing.assert_allclose(
        pagerank.received_from(graph, train, alpha, loops=loops), expected[train].sum(0), atol=1e-9
    )
    np.testing.assert_allclose(
        pagerank.sent_to(graph, train, alpha, loops=loops), expected[:, train].sum(1), atol=1e-9
    )


@pytest.mark.parametrize("masked", [False, True])
def test_strongest_without_a_dense_matrix(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with_loner(60)
    assert graph.masks is not None
    train = graph.masks.train if masked else None
    matrix = 0.15 * inverse(graph, 0.15)
    expected = (matrix if train is None else matrix * train).max(axis=1)
    np.testing.assert_allclose(pagerank.strongest(graph, 0.15, train), expected, atol=1e-12)
    monkeypatch.setattr(pagerank, "DENSE", 10)
    monkeypatch.setattr(pagerank, "BLOCK", 17)
    pushed = pagerank.strongest(graph, 0.15, train, tolerance=1e-7)
    np.testing.assert_allclose(pushed, expected, atol=1e-7 * 60)
    rough = pagerank.strongest(graph, 0.15, train, tolerance=1e-3)
    largest_degree = np.bincount(graph.edges[0]).max()
    assert ((rough <= expected + 1e-12) & (rough >= expected - 1e-3 * largest_degree)).all()
    with pytest.raises(ValueError, match="too many"):
        pagerank.pagerank_matrix(graph, 0.15)


def test_a_large_graph_is_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = 4_500
    ring = np.stack([np.arange(nodes), (np.arange(nodes) + 1) % nodes])
    train = np.arange(nodes) % 2 == 0
    graph = Graph.build(
        np.zeros((nodes, 1), np.float32),
        ring,
        np.zeros(nodes, int),
        masks=Masks(train, ~train, ~train),
    )
    monkeypatch.setattr(sp.csr_array, "toarray", None)
    score = label_centrality(graph, "paper", 0.15)
    # All nodes of a ring are alike: P_uu = alpha / sqrt(1 - (1-alpha)^2) on an endless one.
    np.testing.assert_allclose(pagerank.strongest(graph, 0.15), 0.15 / np.sqrt(1 - 0.85**2), 1e-2)
    assert score.shape == (nodes,)


def test_structure_inertia_score() -> None:
    graph = graph_with_loner()
    assert graph.masks is not None
    expected = (0.15 * inverse(graph, 0.15) * graph.masks.train).max(1).sum()
    assert pagerank.structure_inertia_score(graph, graph.masks.train) == pytest.approx(expected)


# Centrality and selection --------------------------------------------------------------------


def test_label_centrality_of_the_paper_and_of_the_code() -> None:
    graph = graph_with_loner()
    assert graph.masks is not None
    train = graph.masks.train
    paper = 0.15 * inverse(graph, 0.15)
    spread = 0.15 * inverse(graph, 0.15, loops=True)
    np.testing.assert_allclose(
        label_centrality(graph, "paper", 0.15), paper.max(1) + spread[train].sum(0), atol=1e-9
    )
    code = inverse(graph, 0.85)
    expected = (code * train).max(1) + 0.85 * code[:, train].sum(1)
    np.testing.assert_allclose(label_centrality(graph, "code", 0.85), expected, atol=1e-9)


def test_the_most_central_nodes_are_chosen() -> None:
    simulation = simulate(method(), small_federation(SIZES))
    cohort = simulation.cohort
    nodes, rows = method().top_nodes(cohort, 1 / 3)
    assert rows.sizes == tuple(size // 3 for size in SIZES)
    for k, graph in enumerate(cohort.graphs):
        own = nodes[rows.pointers[k] : rows.pointers[k + 1]] - cohort.segments.pointers[k]
        score = label_centrality(graph, "paper", 0.15)
        rest = np.delete(score, own)
        assert score[own].min() >= rest.max()
    again, _ = method().top_nodes(cohort, 1 / 3)
    assert again is nodes
    other, _ = method(centrality="code", alpha=0.85).top_nodes(cohort, 1 / 3)
    assert not torch.equal(other, nodes)


def test_frequencies_need_more_nodes_than_eigenvectors() -> None:
    cohort = simulate(method(), small_federation((70, 9, 30))).cohort
    assert method().spectral_nodes(cohort)[1].sizes == (14, 9, 11)
    assert method(spectral_share=1.0).spectral_nodes(cohort)[1].sizes == (70, 9, 30)


# Prototypes and the server -------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["predicted", "train"])
def test_prototypes_are_class_means_of_selected_nodes(labels: str) -> None:
    simulation = simulate(method(labels=labels), small_federation(SIZES), 1, dropout=0.5)
    local = simulation.trained()
    sent = simulation.method.upload(local)
    output = local.frozen(local.params)
    cohort = local.cohort
    nodes, _ = method().top_nodes(cohort, 1 / 3)
    seen = unseen = 0
    for k in range(4):
        mine = [v for v in nodes.tolist() if cohort.segments.owner[v] == k]
        for c in range(3):
            members = []
            for v in mine:
                known = int(cohort.labels[v])
                guess = int(output.logits[v].argmax()) if labels == "predicted" else -1
                if (known if known >= 0 else guess) == c:
                    members.append(v)
                    seen, unseen = seen + (known >= 0), unseen + (known < 0)
            assert sent["counts"][k, c] == len(members)
            mean = output.embedding[members].mean(dim=0) if members else torch.zeros(8).double()
            torch.testing.assert_close(sent["prototypes"][k, c], mean)
    assert seen
    assert bool(unseen) == (labels == "predicted")


PROTOTYPES = torch.tensor([[[1.0], [5.0], [0.0]], [[4.0], [0.0], [0.0]], [[7.0], [0.0], [0.0]]])
HELD = torch.tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 0.0], [1.0, 0.0, 0.0]])


def served(options: dict[str, object], seed: int = 0) -> Tensor:
    """The repository the server makes of these uploads."""
    uploads = Uploads(
        (0, 1, 2),
        {
            "model/w": torch.tensor([[0.0], [3.0], [6.0]]),
            "weight": torch.tensor([1.0, 1.0, 2.0]),
            "prototypes": PROTOTYPES,
            "counts": HELD,
        },
    )
    after = method(**options).aggregate({}, uploads, np.random.default_rng(seed))
    assert after["model/w"].item() == 3.75
    return after["repository"]


@pytest.mark.parametrize("sampling", ["holders", "class", "replica"])
def test_all_clients_in_every_replica_give_the_weighted_mean(sampling: str) -> None:
    repository = served({"sampling": sampling, "client_share": 1.0})
    assert repository.shape == (4, 3, 1)
    expected = torch.tensor([(1 * 1 + 2 * 4 + 1 * 7) / 4, 5.0, 0.0])
    torch.testing.assert_close(repository[:, :, 0], expected.expand(4, 3))


def test_replicas_come_from_some_of_the_clients() -> None:
    pairs = {round((1 + 8) / 3, 4), round((1 + 7) / 2, 4), round((8 + 7) / 3, 4)}  # two of three
    found = {sampling: [] for sampling in ("holders", "class", "replica")}  # type: ignore[var-annotated]
    for sampling, values in found.items():
        for seed in range(20):
            repository = served({"sampling": sampling, "client_share": 0.7}, seed)
            assert {round(float(v), 4) for v in repository[:, 0, 0]} <= pairs
            values += [tuple(row) for row in repository[:, :2, 0].tolist()]
        assert {round(first, 4) for first, _ in values} == pairs
    # The second class is held by client 0 alone: only a draw among holders never misses it.
    assert {second for _, second in found["holders"]} == {5.0}
    assert {second for _, second in found["class"]} == {0.0, 5.0}
    # One draw for all classes: the second class is there exactly when client 0 is in the first.
    assert all((second == 5.0) == (first != 5.0) for first, second in found["replica"])
    assert any((second == 5.0) != (first != 5.0) for first, second in found["class"])


def test_the_number_of_replicas() -> None:
    assert served({"replicas": 7}).shape == (7, 3, 1)


def test_the_repository_travels() -> None:
    simulation = simulate(method(), small_federation(SIZES), 1)
    sent = simulation.method.download(simulation.states[0], [2, 0])
    assert sent["repository"].shape == (2, 4, 3, 8)
    torch.testing.assert_close(sent["repository"][1], simulation.states[0]["repository"])


# The similarity graph and its spectrum -------------------------------------------------------


def laplacian_of(h: Tensor, neighbours: int) -> Tensor:
    """D - S of Eq. 9-10 in loops, S made symmetric."""
    count = len(h)
    weights = torch.zeros(count, count, dtype=torch.float64)
    for u in range(count):
        cosine = [
            float(F.cosine_similarity(h[u], h[v], dim=0)) if v != u else -9.0 for v in range(count)
        ]
        for v in sorted(range(count), key=lambda v: -cosine[v])[: min(neighbours, count - 1)]:
            weights[u, v] = max(cosine[v], 0.0)
    weights = (weights + weights.T) / 2
    return torch.diag(weights.sum(dim=1)) - weights


def random_rows(sizes: tuple[int, ...], width: int = 5) -> tuple[Tensor, Segments]:
    source = torch.Generator().manual_seed(2)
    h = torch.rand(sum(sizes), width, generator=source, dtype=torch.float64)
    return h, Segments(sizes, CPU)


def assert_extremes(h: Tensor, rows: Segments, found: Tensor, count: int, atol: float) -> None:
    for k, own in enumerate(torch.split(found, list(rows.sizes))):
        mine = h[rows.pointers[k] : rows.pointers[k + 1]]
        values, _ = torch.linalg.eigh(laplacian_of(mine, 3))
        kept = min(count, len(mine))
        expected = torch.cat([values[:kept], values[len(values) - kept :]])
        vectors = torch.cat([own[:, :kept], own[:, count : count + kept]], dim=1)
        torch.testing.assert_close(
            laplacian_of(mine, 3) @ vectors, vectors * expected, atol=atol, rtol=0
        )
        torch.testing.assert_close(vectors.norm(dim=0), torch.ones(2 * kept).double())
        assert (own[:, kept:count] == 0).all()
        assert (own[:, count + kept :] == 0).all()


def test_extremes_are_the_ends_of_the_spectrum() -> None:
    h, rows = random_rows((19, 22, 4, 1, 20))
    assert_extremes(h, rows, extremes(h, rows, 3, 6, 0.0), 6, 1e-9)
    assert_extremes(h, rows, extremes(h, rows, 3, 6, 1e-4), 6, 2e-4)


def test_the_sparse_solver_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    h, rows = random_rows((70, 12, 61))
    dense = extremes(h, rows, 3, 4, 1e-4)
    monkeypatch.setattr(spectrum, "DENSE_CPU", 20)
    monkeypatch.setattr(spectrum, "BATCH", 500)  # several blocks of rows
    sparse = extremes(h, rows, 3, 4, 1e-4)
    assert not torch.equal(sparse, dense)
    overlap = rows.sum(dense * sparse).abs()
    torch.testing.assert_close(overlap, torch.ones(3, 8).double(), atol=1e-6, rtol=0)


def test_equal_eigenvalues_do_not_hang_on_rounding() -> None:
    """Three components give three zeros; noise must not turn the vectors that belong to them."""
    source = torch.Generator().manual_seed(0)
    h = torch.zeros(18, 6, dtype=torch.float64)
    for v in range(18):
        h[v, 2 * (v % 3) : 2 * (v % 3) + 2] = torch.rand(2, generator=source).double()
    rows = Segments((18,), CPU)
    noise = 1e-13 * torch.randn(18, 6, generator=source).double()
    apart = [
        (1 - rows.sum(extremes(h, rows, 3, 4, t) * extremes(h + noise, rows, 3, 4, t)).abs()).max()
        for t in (0.0, 1e-4)
    ]
    assert apart[1] < 1e-6 < apart[0]


def test_projections_are_products_with_gradient() -> None:
    h, rows = random_rows((6, 9, 2))
    basis = torch.randn(17, 4, dtype=torch.float64)
    h.requires_grad_()
    found = projections(h, basis, rows)
    for k in range(3):
        part = slice(rows.pointers[k], rows.pointers[k + 1])
        torch.testing.assert_close(found[k], basis[part].T @ h[part])
    (grad,) = torch.autograd.grad(found.sum(), h)
    torch.testing.assert_close(grad, basis.sum(dim=1, keepdim=True).expand(-1, 5))


# Losses --------------------------------------------------------------------------------------


def distillation(
    h: Tensor, h_global: Tensor, repository: Tensor, temperature: float, divergence: str
) -> Tensor:
    """Eq. 8 node by node."""
    total = torch.zeros((), dtype=torch.float64)
    for ours, theirs in zip(h, h_global, strict=True):
        p, q = (
            torch.softmax(F.cosine_similarity(z.unsqueeze(0), repository) / temperature, dim=0)
            for z in (ours, theirs)
        )
        if divergence == "global||local":
            p, q = q, p
        total = total + (p * (p / q).log()).sum()
    return total / len(h)


def frequency_gap(h: Tensor, h_global: Tensor, count: int, refresh: str) -> Tensor:
    """Eq. 9-12 with projected matrices written out."""
    size = len(h)
    slope = 1e-4 * torch.diag(((torch.arange(size) + 1) / size).double().sqrt())
    _, v = torch.linalg.eigh(laplacian_of(h_global.detach(), 3) + slope)
    _, u = torch.linalg.eigh(laplacian_of(h.detach(), 3) + slope)
    if refresh == "round":
        u = v
    kept = min(count, size)
    total = torch.zeros((), dtype=torch.float64)
    for m in [*range(kept), *range(size - kept, size)]:
        z = torch.outer(u[:, m], u[:, m]) @ h
        z_global = torch.outer(v[:, m], v[:, m]) @ h_global
        total = total + F.mse_loss(z, z_global)
    return total


@pytest.mark.parametrize(
    "options",
    [
        {"fgma": False, "temperature": 1.0},
        {"fgma": False, "temperature": 0.2, "divergence": "global||local"},
        {"nlir": False},
        {"nlir": False, "spectral_share": 1.0, "eigenvectors": 4},
        {"nlir": False, "refresh": "round"},
        {"lambda1": 0.7, "lambda2": 3.0},
    ],
)
def test_the_loss_is_that_of_the_paper(options: dict[str, object]) -> None:
    chosen = method(**options)
    simulation = simulate(chosen, small_federation(SIZES), 2)
    local = moved(simulation)
    loss = chosen.loss(local)
    output = local.forward()
    far = local.frozen(model_part(local.received)).embedding
    cohort = local.cohort
    spectral, _ = chosen.spectral_nodes(cohort)
    for k in range(4):
        mine = torch.nonzero(cohort.segments.owner == k).view(-1)
        train = mine[cohort.labels[mine] >= 0]
        expected = F.cross_entropy(output.logits[train], cohort.labels[train])
        if chosen.nlir:
            repository = simulation.states[0]["repository"].reshape(12, 8)
            expected = expected + chosen.lambda1 * distillation(
                output.embedding[mine], far[mine], repository, chosen.temperature, chosen.divergence
            )
        if chosen.fgma:
            seen = spectral[cohort.segments.owner[spectral] == k]
            expected = expected + chosen.lambda2 * frequency_gap(
                output.embedding[seen], far[seen], chosen.eigenvectors, chosen.refresh
            )
        assert loss[k].item() == pytest.approx(expected.item(), rel=1e-7)
        # No gradient runs through eigenvectors: the embedding is all that is differentiated.
        weight = local.params["convs.0.weight"]
        ours, theirs = (
            torch.autograd.grad(value, weight, retain_graph=True)[0][k]
            for value in (loss[k], expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_both_terms_vanish_at_the_global_model() -> None:
    simulation = simulate(method(), small_federation(SIZES), 2)
    local = moved(simulation, 0.0)
    plain = create("fedavg").loss(local)
    torch.testing.assert_close(simulation.method.loss(local), plain, atol=1e-12, rtol=0)
    away = moved(simulation)
    assert (simulation.method.loss(away) > create("fedavg").loss(away) + 1e-4).all()


def test_the_gradient_reaches_every_parameter() -> None:
    local = moved(simulate(method(), small_federation(SIZES), 2))
    grads = torch.autograd.grad(method().loss(local).sum(), list(local.params.values()))
    for grad in grads:
        assert (grad.flatten(1).abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gat", "acm-gcn"])
@pytest.mark.parametrize("term", ["distillation", "frequency_alignment"])
def test_each_term_reaches_every_layer_below_the_classifier(term: str, backbone: str) -> None:
    reached: dict[str, set[str]] = {}
    for head in ("none", "linear"):
        chosen = method(head=head)
        local = moved(simulate(chosen, small_federation(SIZES), 2, backbone=backbone))
        value = getattr(chosen, term)(local, local.forward().embedding).sum()
        names, params = zip(*local.params.items(), strict=True)
        grads = torch.autograd.grad(value, params, allow_unused=True)
        reached[head] = {
            name
            for name, grad in zip(names, grads, strict=True)
            if grad is not None and grad.flatten(1).any(dim=1).all()
        }
        below = {name for name in names if not local.network.is_classifier(name)}
        assert reached[head] == below
    layers = {head: {n.split("convs.")[1][0] for n in names} for head, names in reached.items()}
    assert layers == {"none": {"0"}, "linear": {"0", "1"}}


@pytest.mark.parametrize(("head", "layer"), [("none", "convs.0"), ("linear", "trunk.convs.1")])
def test_the_embedding_is_the_input_of_the_last_layer(head: str, layer: str) -> None:
    simulation = simulate(method(head=head), small_federation(SIZES), 1, backbone="acm-gcn")
    seen: list[Tensor] = []
    conv = simulation.network.get_submodule(layer)
    with conv.register_forward_hook(lambda _, __, output: seen.append(output)):
        embedding = simulation.received().forward().embedding
    torch.testing.assert_close(embedding, seen[-1].relu())
    assert (
        simulation.network.describe()
        == {
            "none": "acm-gcn",
            "linear": "acm-gcn with a linear head",
        }[head]
    )


def test_strength_grows_after_the_warm_up() -> None:
    usual = method(warm_up=20, ramp=10)
    assert [usual.strength(r) for r in (0, 19, 20, 24, 29, 30, 99)] == [0, 0, 0.1, 0.5, 1, 1, 1]
    assert [method().strength(r) for r in (0, 1, 2)] == [0, 1, 1]
    local = simulate(usual, small_federation(SIZES), 1).received()
    assert usual.prepare_round(replace(local, phase=usual.phase(19))) == {}
    later = usual.prepare_round(replace(local, phase=usual.phase(24), round_index=24))
    assert later["strength"].item() == 0.5


def test_the_first_round_and_the_warm_up_are_plain_federated_averaging() -> None:
    federation = small_federation(SIZES)
    plain = [simulate("fedavg", federation, rounds) for rounds in (1, 2)]
    first = simulate(method(), federation, 1)
    assert_same_bits(model_part(first.states[0]), model_part(plain[0].states[0]))
    waiting = simulate("s2fgl", federation, 2)
    assert_same_bits(model_part(waiting.states[0]), model_part(plain[1].states[0]))
    acting = simulate(method(), federation, 2)
    assert not torch.allclose(
        acting.states[0]["model/convs.0.weight"], plain[1].states[0]["model/convs.0.weight"]
    )


def test_each_part_can_be_switched_off() -> None:
    federation = small_federation(SIZES)
    neither = simulate(method(nlir=False, fgma=False), federation, 3)
    assert_same_bits(neither.states[0], simulate("fedavg", federation, 3).states[0])
    one = simulate(method(fgma=False), federation, 3)
    other = simulate(method(nlir=False), federation, 3)
    both = simulate(method(), federation, 3)
    assert "repository" not in other.states[0]
    weights = [s.states[0]["model/convs.0.weight"] for s in (neither, one, other, both)]
    for i, first in enumerate(weights):
        assert not any(torch.allclose(first, second) for second in weights[i + 1 :])


# Forms, and hyperparameters that change nothing -------------------------------------------------


def test_the_form_of_the_authors_code() -> None:
    made, paper = create("s2fgl", {"code": True}), create("s2fgl", {"paper": True})
    assert made == replace(
        paper,
        lambda2=1.0,
        centrality="code",
        alpha=0.85,
        sampling="replica",
        divergence="global||local",
        spectral_share=0.2,
    )
    simulation = simulate(made, small_federation(SIZES), 3)
    assert all(t.isfinite().all() for t in simulation.tensors().values())
    # In this form labelled nodes come first: no prediction is needed while there are enough.
    nodes, _ = made.top_nodes(simulation.cohort, made.selected)
    assert (simulation.cohort.labels[nodes] >= 0).all()


def test_when_it_acts() -> None:
    assert create("s2fgl").rounds_before_it_acts() == 20
    assert create("s2fgl", {"paper": True}).rounds_before_it_acts() == 1
    for neither in ({"nlir": False, "fgma": False}, {"lambda1": 0, "fgma": False}):
        assert method(**neither).rounds_before_it_acts() == 0
    federation = small_federation(SIZES)
    for one in ({"fgma": False}, {"nlir": False}):
        chosen = method(warm_up=2, **one)
        first = chosen.rounds_before_it_acts()
        assert first == 2
        for rounds, same in ((first, True), (first + 1, False)):
            ours, plain = (
                simulate(m, federation, rounds).states[0]["model/convs.0.weight"]
                for m in (chosen, "fedavg")
            )
            assert torch.equal(ours, plain) == same


OTHER: dict[str, tuple[object, object]] = {  # a second value of every hyperparameter
    "nlir": (True, False),
    "fgma": (True, False),
    "head": ("none", "linear"),
    "weighting": ("nodes", "uniform"),
    "lambda1": (5.0, 2.0),
    "lambda2": (0.05, 1.0),
    "warm_up": (0, 2),
    "ramp": (0, 4),
    "centrality": ("paper", "code"),
    "alpha": (0.15, 0.85),
    "selected": (1 / 3, 0.6),
    "labels": ("predicted", "train"),
    "replicas": (4, 2),
    "client_share": (0.7, 0.4),
    "sampling": ("holders", "class"),
    "temperature": (0.2, 1.0),
    "divergence": ("local||global", "global||local"),
    "neighbours": (3, 5),
    "eigenvectors": (3, 2),
    "spectral_share": (0.2, 0.5),
    "refresh": ("round", "step"),
    "tie_break": (1e-4, 1e-2),
}
BASES: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {"paper": True},
    "code, with nodes outside the train mask": {"code": True, "selected": 0.8},
    "without NLIR": {"nlir": False},
    "without NLIR, all nodes": {"nlir": False, "spectral_share": 1.0},
    "NLIR without weight": {"lambda1": 0},
    "without FGMA": {"fgma": False},
    "without FGMA, all nodes": {"fgma": False, "selected": 1.0},
    "FGMA without weight": {"lambda2": 0},
    "all clients in every prototype": {"client_share": 1.0, "sampling": "class"},
    "neither": {"nlir": False, "fgma": False},
    "neither, without weights": {"lambda1": 0, "lambda2": 0, "nlir": False},
}


@pytest.mark.parametrize("base", BASES)
def test_hyperparameters_act_or_are_named_as_idle(base: str) -> None:
    federation = small_federation((18, 25, 21))
    start = method(**{"eigenvectors": 3, **BASES[base]})
    assert OTHER.keys() == start.hyperparameters().keys()

    def trained(chosen: S2FGL) -> Tensor:
        state = model_part(simulate(chosen, federation, 4).states[0])
        return torch.cat([value.flatten() for _, value in sorted(state.items())])

    usual, idle = trained(start), start.without_effect()
    for name, values in OTHER.items():
        value = values[values[0] == getattr(start, name)]
        other = trained(replace(start, **{name: value}))
        acts = len(other) != len(usual) or bool((other - usual).abs().max() > 1e-9)
        assert acts == (name not in idle), name
    assert all(re.search(r"; set \w+", reason) for reason in idle.values())


# With both terms on, what every method must keep ----------------------------------------------


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_stacked_equals_sequential(backbone: str) -> None:
    federation = small_federation(SIZES)
    chosen = {"backbone": backbone, "dropout": 0.3, "input_dropout": 0.2}
    stacked = simulate(method(), federation, 4, **chosen)
    sequential = simulate(method(), federation, 4, engine="sequential", **chosen)
    assert_close(weights_of(stacked), weights_of(sequential), 1e-5)


def test_clients_of_several_federations_stay_apart() -> None:
    first, second = small_federation(SIZES, seed=1), small_federation((11, 5, 28), seed=2)
    together = simulate(method(), [first, second], 3, participation=0.7, dropout=0.3)
    for s, federation in enumerate((first, second)):
        alone = simulate(method(), federation, 3, participation=0.7, dropout=0.3)
        assert_close(together.states[s], alone.states[0], 1e-5)


@pytest.mark.parametrize("options", [{"sampling": "replica"}, {"spectral_share": 1.0}])
def test_awkward_clients(options: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    single = Graph.build(
        rng.standard_normal((1, 6)).astype(np.float32),
        np.zeros((2, 0), int),
        np.zeros(1, int),
        masks=Masks(np.array([True]), np.array([False]), np.array([False])),
    )
    alike = Graph.build(  # no edges, all nodes the same, one class
        np.ones((14, 6), np.float32),
        np.zeros((2, 0), int),
        np.ones(14, int),
        masks=Masks(np.arange(14) < 5, np.arange(14) == 5, np.arange(14) > 5),
    )
    federation = small_federation(SIZES)
    clients = (*federation.clients, single, alike)
    awkward = replace(federation, clients=clients)
    simulation = simulate(method(**options), awkward, 4, dropout=0.4)
    assert all(t.isfinite().all() for t in simulation.tensors().values())
    alone = simulate(method(**options), replace(federation, clients=(single,)), 3)
    assert all(t.isfinite().all() for t in alone.tensors().values())
