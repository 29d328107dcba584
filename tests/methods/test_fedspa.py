"""The parts of FedSPA, each against a computation written out here, node by node."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from builders import (
    call,
    dense_adjacency,
    dense_features,
    of_client,
    predict,
    random_cohort,
    random_graph,
    random_parameters,
    with_features,
)
from cases import assert_close, assert_same_bits, simulate, small_federation, weights_of
from effects import changes_predictions
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity.spectral import high_frequency_area
from polyphily.methods.fedspa import FedSPA
from polyphily.methods.fedspa import edges as edges_of_kinds
from polyphily.methods.fedspa.edges import edge_kinds, mark
from polyphily.methods.fedspa.network import (
    ACMDecoupledConv,
    AttentionDecoupledConv,
    Decoupled,
    PlainDecoupledConv,
    channel_of,
)
from polyphily.methods.fedspa.weights import bias_weights
from polyphily.nn.backbones import ACMGCN, BACKBONES, GCN, GraphSAGE, Shape

NO_RNG = np.random.default_rng(0)
SIZES = (9, 1, 14, 9)
BASES: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {"paper": True},
    "code": {"code": True},
    "without SFPD": {"sfpd": False},
    "without prior": {"prior": False},
    "without posterior": {"posterior": False},
    "without HBDA": {"prior": False, "posterior": False},
    "without all": {"sfpd": False, "prior": False, "posterior": False},
    "by area alone": {"code": True, "sfpd": False},
    "by area, without posterior": {"code": True, "posterior": False},
}
kinds_of_features = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
networks = pytest.mark.parametrize(
    ("form", "backbone"), [("paper", "acm-gcn"), ("code", "acm-gcn"), ("paper", "sage")]
)


# The high-frequency area ---------------------------------------------------------------------


@kinds_of_features
@pytest.mark.parametrize("laplacian", ["symmetric", "combinatorial"])
def test_high_frequency_area_against_a_dense_laplacian(laplacian: str, sparse: bool) -> None:
    graph = random_graph(15, density=0.1, sparse=sparse, seed=1)
    x = dense_features(graph).numpy().copy()
    x[:, 2] = 0
    graph = with_features(graph, sp.csr_array(x) if sparse else x)
    a = dense_adjacency(graph).numpy()
    d = a.sum(axis=1)
    assert (d == 0).any(), "the case should hold a node without edges"
    matrix = np.diag(d) - a
    if laplacian == "symmetric":
        scale = np.diag(1 / np.sqrt(np.maximum(d, 1)))
        matrix = scale @ matrix @ scale
    expected = [x[:, f] @ matrix @ x[:, f] / (x[:, f] @ x[:, f]) for f in (0, 1, 3, 4, 5)]
    assert high_frequency_area(graph, laplacian) == pytest.approx(np.mean(expected))  # type: ignore[arg-type]


def test_high_frequency_area_without_edges_or_features_is_zero() -> None:
    empty = Graph.build(np.ones((3, 2)), np.zeros((2, 0), int), np.zeros(3, int))
    assert high_frequency_area(empty) == 0
    blank = Graph.build(np.zeros((3, 2)), np.array([[0, 1], [1, 2]]), np.zeros(3, int))
    assert high_frequency_area(blank) == 0


def test_high_frequency_area_falls_as_homophily_grows() -> None:
    rng = np.random.default_rng(5)
    labels = np.arange(200) % 2
    x = np.where(labels[:, None] == 0, 1.0, -1.0) + rng.standard_normal((200, 8))
    areas = []
    for homophily in (0.1, 0.5, 0.9):
        wanted = np.where(labels[:, None] == labels, homophily, 1 - homophily) * 0.05
        edges = np.stack(np.nonzero(np.triu(rng.random((200, 200)) < wanted, 1)))
        areas.append(high_frequency_area(Graph.build(x, edges, labels)))
    assert areas[0] > areas[1] > areas[2]
    assert all(0 <= area <= 2 for area in areas)


# SFPD ----------------------------------------------------------------------------------------


def kind(u: int, v: int, labels: list[int]) -> str:
    if labels[u] < 0 or labels[v] < 0:
        return "unk"
    return "hom" if labels[u] == labels[v] else "het"


def neighbours(graph: Graph, v: int) -> list[int]:
    return graph.edges[1][graph.edges[0] == v].tolist()


def labels_by_client(cohort: Cohort) -> list[list[int]]:
    return [part.tolist() for part in torch.split(cohort.labels, list(cohort.segments.sizes))]


def test_edges_have_the_kind_of_their_train_labels() -> None:
    cohort = random_cohort(SIZES, density=0.4)
    kinds = edge_kinds(cohort, cohort.labels)
    expected: dict[str, list[tuple[int, int]]] = {"hom": [], "het": [], "unk": []}
    for start, graph in zip(cohort.segments.pointers, cohort.graphs, strict=False):
        assert graph.masks is not None
        own = np.where(graph.masks.train, graph.labels, -1).tolist()
        for u, v in graph.edges.T.tolist():
            expected[kind(u, v, own)].append((u + start, v + start))
    for name, matrix in (("hom", kinds.hom), ("het", kinds.het), ("unk", kinds.unknown)):
        assert expected[name], f"no {name} edge in this case"
        found = zip(matrix.row.tolist(), matrix.col.tolist(), strict=True)
        assert list(found) == expected[name]
        turned = matrix.transposed
        reverse = [(v, u) for u, v in expected[name]]
        assert list(zip(turned.row.tolist(), turned.col.tolist(), strict=True)) == sorted(reverse)
        ends = torch.stack([matrix.row, matrix.col_long])
        assert torch.equal(ends[:, matrix.permutation], ends.flip(0))


@pytest.mark.parametrize("cached", [1, 20, 1 << 17])
def test_sums_of_inputs_in_pieces_are_sums_of_messages(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges_of_kinds, "CACHED", cached)  # a node, a few nodes, or all of them
    cohort = random_cohort((7, 12, 5))
    kinds, x = edge_kinds(cohort, cohort.labels), torch.randn(24, 3).double()
    hom, het = (torch.randn(3, 3, 4).double().requires_grad_() for _ in range(2))
    alpha = torch.rand(24, 1).double().requires_grad_()
    ours = kinds.sum_inputs(x, cohort.edges @ x, alpha, hom, het, cohort.segments)
    messages = (cohort.segments.matmul(x, weight) for weight in (hom, het))
    expected = kinds.sum(*messages, alpha)
    torch.testing.assert_close(ours, expected)
    leaves, above = (alpha, hom, het), torch.randn(24, 4).double()
    wanted = torch.autograd.grad(expected, leaves, above)
    for left, right in zip(torch.autograd.grad(ours, leaves, above), wanted, strict=True):
        torch.testing.assert_close(left, right)


def typed_sum(
    own: dict[str, Tensor], graph: Graph, labels: list[int], v: int, scale: Tensor
) -> Tensor:
    """Equation 6 without the node itself, with theta_unk mixed for this centre node (5)."""
    x = dense_features(graph)
    alpha = torch.sigmoid(x[v] @ own["harmoniser.weight"][0, :, 0] + own["harmoniser.bias"][0, 0])
    theta = {"hom": own["weight_hom"][0], "het": own["weight_het"][0]}
    theta["unk"] = alpha * theta["hom"] + (1 - alpha) * theta["het"]
    total = torch.zeros(theta["hom"].shape[1], dtype=torch.float64)
    for u in neighbours(graph, v):
        total += scale[u] * x[u] @ theta[kind(u, v, labels)]
    return total


def acm_mixture(messages: list[Tensor], scores: list[Tensor], mix: Tensor) -> Tensor:
    n = len(messages)
    weights = torch.softmax(torch.stack(scores).sigmoid() @ mix / n, dim=0)
    return n * sum(w * m for w, m in zip(weights, messages, strict=True))


def expected_acm(own: dict[str, Tensor], graph: Graph, labels: list[int], norm: str) -> Tensor:
    x, width = dense_features(graph), own["attend"].shape[1]
    rows = []
    for v in range(graph.num_nodes):
        d = len(neighbours(graph, v))
        near = typed_sum(own, graph, labels, v, torch.ones(graph.num_nodes))
        self_low, self_high, identity = torch.split(x[v] @ own["weight_self"][0], width)
        low, high = self_low + near[:width], d * self_high - near[width:]
        if norm == "mean":
            low, high = low / (d + 1), high / (d + 1)
        messages = [low.relu(), high.relu(), identity.relu()]
        scores = [m @ own["attend"][0, :, i] for i, m in enumerate(messages)]
        rows.append(acm_mixture(messages, scores, own["mix"][0]))
    return torch.stack(rows)


def expected_plain(own: dict[str, Tensor], graph: Graph, labels: list[int], norm: str) -> Tensor:
    x = dense_features(graph)
    degrees = dense_adjacency(graph).sum(dim=1)
    rows = []
    for v in range(graph.num_nodes):
        z, d = x[v] @ own["weight_self"][0], degrees[v]
        if norm == "gcn":
            near = typed_sum(own, graph, labels, v, (degrees + 1) ** -0.5)
            out = z / (d + 1) + near / (d + 1) ** 0.5
        else:
            near = typed_sum(own, graph, labels, v, torch.ones(graph.num_nodes))
            out = z + (near / max(d, 1) if norm == "mean" else near)
        rows.append(out + own["bias"][0])
    return torch.stack(rows)


def expected_code(own: dict[str, Tensor], graph: Graph, labels: list[int], norm: str) -> Tensor:
    x, a = dense_features(graph), dense_adjacency(graph)
    smooth = (a + torch.eye(len(a))) / (a.sum(dim=1, keepdim=True) + 1)
    low = (smooth @ x @ own["weight_low"][0]).relu()
    high = ((torch.eye(len(a)) - smooth) @ x @ own["weight_high"][0]).relu()
    rows = []
    for v in range(graph.num_nodes):
        d = max(len(neighbours(graph, v)), 1) if norm == "mean" else 1
        messages, scores = [], []
        for name in ("het", "hom"):
            for band, passed in enumerate((low, high)):
                near = [passed[u] for u in neighbours(graph, v) if kind(u, v, labels) == name]
                messages.append(sum(near, torch.zeros_like(low[0])) / d)
                scores.append(messages[-1] @ own[f"attend_{name}"][0, :, band])
        for band, passed in enumerate((low, high)):
            near = [passed[u] for u in neighbours(graph, v) if kind(u, v, labels) == "unk"]
            m = sum(near, torch.zeros_like(low[0])) / d
            alpha = torch.sigmoid(m @ own["harmoniser.weight"][0, :, 0] + own["harmoniser.bias"][0])
            hom, het = (m @ own[f"attend_{name}"][0, :, band] for name in ("hom", "het"))
            messages.append(m)
            scores.append((alpha * hom + (1 - alpha) * het).squeeze())
        messages.append((x[v] @ own["weight_self"][0]).relu())
        scores.append(messages[-1] @ own["attend_self"][0, :, 0])
        rows.append(acm_mixture(messages, scores, own["mix"][0]))
    return torch.stack(rows)


@kinds_of_features
@pytest.mark.parametrize(
    ("layer", "expected", "norm"),
    [
        (ACMDecoupledConv, expected_acm, "mean"),
        (ACMDecoupledConv, expected_acm, "sum"),
        (PlainDecoupledConv, expected_plain, "gcn"),
        (PlainDecoupledConv, expected_plain, "mean"),
        (PlainDecoupledConv, expected_plain, "sum"),
        (AttentionDecoupledConv, expected_code, "mean"),
        (AttentionDecoupledConv, expected_code, "sum"),
    ],
)
def test_a_layer_is_its_formula_at_every_node(layer, expected, norm: str, sparse: bool) -> None:  # type: ignore[no-untyped-def]
    cohort = random_cohort(SIZES, density=0.4, sparse=sparse)
    module = layer(cohort.num_features, 4, norm, False).double()
    params = random_parameters(module, len(cohort))
    out = call(module, params, cohort.x, cohort, edge_kinds(cohort, cohort.labels))
    found = torch.split(out, list(cohort.segments.sizes))
    for k, (graph, labels) in enumerate(zip(cohort.graphs, labels_by_client(cohort), strict=True)):
        torch.testing.assert_close(found[k], expected(of_client(params, k), graph, labels, norm))


@pytest.mark.parametrize("backbone", ["acm-gcn", "gcn", "sage"])
def test_equal_channels_are_the_plain_backbone(backbone: str) -> None:
    """For any output of the harmoniser."""
    cohort = random_cohort(SIZES, density=0.4)
    shape = Shape(cohort.num_features, 3, hidden=5)
    network = create("fedspa", {"tied": True}).build(backbone, shape, 3).double()
    params = {
        n: p.detach().expand(len(cohort), *p.shape[1:]) for n, p in network.named_parameters()
    }
    plain = {"acm-gcn": ACMGCN, "gcn": GCN, "sage": GraphSAGE}[backbone](shape).double()
    theirs = {}
    for i, width in enumerate((5, 3)):
        own = {n.removeprefix(f"convs.{i}."): p for n, p in params.items() if f"convs.{i}" in n}
        if backbone == "acm-gcn":
            names = ("weight_low", "weight_high", "weight_self")
            split = torch.split(own["weight_self"], width, dim=2)
            layer = {
                "attend": own["attend"],
                "mix": own["mix"],
                **dict(zip(names, split, strict=True)),
            }
        elif backbone == "gcn":
            layer = {"weight": own["weight_hom"], "bias": own["bias"]}
        else:
            layer = {"weight_near": own["weight_hom"], "weight_self": own["weight_self"]}
            layer["bias"] = own["bias"]
        theirs |= {f"convs.{i}.{n}": p for n, p in layer.items()}
    found, expected = predict(network, params, cohort), predict(plain, theirs, cohort)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.embedding, expected.embedding)


def test_channels_start_apart_unless_tied() -> None:
    for tied in (True, False):
        network = create("fedspa", {"tied": tied}).build("acm-gcn", Shape(6, 3), 0)
        params = dict(network.named_parameters())
        same = torch.equal(params["convs.0.weight_hom"], params["convs.0.weight_het"])
        assert same == tied


@networks
def test_a_gradient_reaches_every_parameter(form: str, backbone: str) -> None:
    cohort = random_cohort((9, 14), density=0.4)
    network = create("fedspa", {"form": form}).build(backbone, Shape(6, 3, hidden=5), 0).double()
    params = {n: p.requires_grad_() for n, p in random_parameters(network, 2).items()}
    logits = predict(network, params, cohort).logits
    grads = torch.autograd.grad(logits.square().sum(), list(params.values()))
    for name, grad in zip(params, grads, strict=True):
        assert (grad.flatten(1).abs().amax(dim=1) > 0).all(), name


@networks
def test_every_form_trains_stacked_as_alone(form: str, backbone: str) -> None:
    federation = small_federation(sparse=True)
    chosen = {"dropout": 0.5, "input_dropout": 0.3, "epochs": "1-4", "backbone": backbone}
    method = create("fedspa", {"form": form})
    stacked = simulate(method, federation, 4, **chosen)
    sequential = simulate(method, federation, 4, engine="sequential", **chosen)
    assert_close(weights_of(stacked), weights_of(sequential), 1e-7)


@networks
def test_every_parameter_of_every_form_is_trained(form: str, backbone: str) -> None:
    method = create("fedspa", {"form": form})
    simulation = simulate(method, small_federation(), 0, weight_decay=0.0, backbone=backbone)
    before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    for name, value in model_part(simulation.memory).items():
        assert ((value - before[name]).flatten(1).abs().amax(dim=1) > 0).all(), name


def test_without_sfpd_the_network_is_the_backbone() -> None:
    shape = Shape(6, 3)
    assert isinstance(create("fedspa", {"sfpd": False}).build("gcn", shape, 0), GCN)
    assert isinstance(create("fedspa").build("gcn", shape, 0), Decoupled)
    assert create("fedspa", {"sfpd": False}).supported_backbones() == tuple(BACKBONES)


@pytest.mark.parametrize(("form", "others"), [("paper", ("gcn", "sage")), ("code", ())])
def test_what_is_trained_is_what_is_named(form: str, others: tuple[str, ...]) -> None:
    method = create("fedspa", {"form": form})
    assert method.supported_backbones() == ("acm-gcn", *others)
    for name in method.supported_backbones():
        assert method.build(name, Shape(6, 3), 0).describe() == f"SFPD in {name}"
    for name in {*BACKBONES} - {*method.supported_backbones()}:
        with pytest.raises(ValueError, match=name):
            method.build(name, Shape(6, 3), 0)


def test_without_its_three_parts_it_is_fedavg() -> None:
    federation = small_federation()
    off = {"sfpd": False, "prior": False, "posterior": False}
    ours = simulate(create("fedspa", off), federation, 3, dropout=0.4, backbone="acm-gcn")
    theirs = simulate("fedavg", federation, 3, dropout=0.4, backbone="acm-gcn")
    assert_same_bits(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("name", FedSPA.hyperparameters())
@pytest.mark.parametrize("base", BASES)
def test_a_hyperparameter_acts_or_is_said_not_to(base: str, name: str) -> None:
    method = create("fedspa", BASES[base])
    assert changes_predictions(method, name) == (name not in method.without_effect())


# Hidden labels -------------------------------------------------------------------------------


def started(simulation: Simulation) -> Local:
    """The local view at the start of the next round, before any step."""
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    local.draws = local.cohort.draws(simulation.round)
    return local


def hidden_in(simulation: Simulation, steps: int) -> list[Tensor]:
    """Which train nodes hide their labels in the next round's steps."""
    method, draws = simulation.method, simulation.cohort.draws(simulation.round)
    assert isinstance(method, FedSPA)
    return [method.hides(simulation.cohort, draws) for _ in range(steps)]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_every_step_hides_another_share_of_each_clients_labels(share: float) -> None:
    simulation = simulate(create("fedspa", {"hidden_share": share}), small_federation())
    masks, segments = hidden_in(simulation, 2), simulation.cohort.train_segments
    for mask in masks:
        counts = [int(part.sum()) for part in mask.split(list(segments.sizes))]
        assert counts == [max(1, round(share * size)) for size in segments.sizes]
    assert torch.equal(*masks) == (share == 1)
    alone = simulation.cohort.take([2])
    assert isinstance(simulation.method, FedSPA)
    own = masks[0].split(list(segments.sizes))[2]
    assert torch.equal(simulation.method.hides(alone, alone.draws(0)), own)
    simulation.advance()
    assert torch.equal(hidden_in(simulation, 1)[0], masks[0]) == (share == 1)


def test_every_train_node_is_hidden_equally_often() -> None:
    simulation = simulate("fedspa", small_federation((60, 20)))
    total = torch.stack(hidden_in(simulation, 400)).double().sum(dim=0)
    assert (total - 200).abs().max() < 5 * 10


def test_the_loss_is_on_hidden_nodes_whose_edges_are_unknown() -> None:
    simulation = simulate("fedspa", small_federation(), 1, backbone="acm-gcn")
    local, cohort = started(simulation), simulation.cohort
    for mask in hidden_in(simulation, 2):
        loss = simulation.method.loss(local)
        labels = cohort.labels.clone()
        nodes = cohort.train_nodes[mask]
        labels[nodes] = -1
        arguments = (cohort, None, edge_kinds(cohort, labels))
        logits = functional_call(local.network, local.params, arguments).logits
        for k in range(4):
            mine = nodes[cohort.segments.owner[nodes] == k]
            assert len(mine)
            expected = F.cross_entropy(logits[mine], cohort.labels[mine])
            assert loss[k].item() == pytest.approx(expected.item())


def test_hidden_labels_do_not_reach_the_network() -> None:
    """Other labels at hidden nodes change no logit, those at the other train nodes do."""
    cohort = random_cohort((40, 12), density=0.8)
    network = create("fedspa").build("acm-gcn", Shape(6, 3, hidden=5), 0).double()
    params = random_parameters(network, 2)
    hidden = torch.zeros(len(cohort.train_nodes), dtype=torch.bool)
    hidden[::2] = True

    def logits(changed: Tensor) -> Tensor:
        labels = cohort.labels.clone()
        nodes = cohort.train_nodes[changed]
        labels[nodes] = (labels[nodes] + 1) % 3
        labels[cohort.train_nodes[hidden]] = -1
        arguments = (cohort, None, edge_kinds(cohort, labels))
        found: Tensor = functional_call(network, params, arguments).logits
        return found

    none = torch.zeros_like(hidden)
    assert torch.equal(logits(hidden), logits(none))
    shown = none.clone()
    shown[np.flatnonzero(~hidden)[::2]] = True
    assert not torch.equal(logits(shown), logits(none))


def test_the_papers_way_hides_nothing() -> None:
    simulation = simulate(create("fedspa", {"hidden_share": 0}), small_federation(), 1)
    local = started(simulation)
    assert not local.constants
    expected = local.cross_entropy(local.forward().logits)
    torch.testing.assert_close(simulation.method.loss(local), expected)
    with pytest.raises(UserError, match="hidden_share"):
        create("fedspa", {"hidden_share": 1.5})


def test_evaluation_sees_all_train_labels_in_the_edges() -> None:
    simulation = simulate("fedspa", small_federation(), 1)
    view = simulation.received()
    kinds = edge_kinds(view.cohort, view.cohort.labels)
    arguments = (view.cohort, None, kinds)
    expected = functional_call(view.network, view.params, arguments).logits
    assert kinds.hom.nnz
    torch.testing.assert_close(simulation.predict(view), expected)


def test_the_channels_have_a_learning_rate_of_their_own() -> None:
    chosen = {"optimizer": "sgd", "weight_decay": 0.0, "epochs": 1, "backbone": "acm-gcn"}
    moves = []
    for factor in (1.0, 2.0):
        simulation = simulate(
            create("fedspa", {"channel_lr": factor}), small_federation(), **chosen
        )
        before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
        simulation.advance()
        after = model_part(simulation.memory)
        moves.append({n: after[n] - before[n] for n in after})
    for name, once in moves[0].items():
        factor = 2 if channel_of(name) else 1
        torch.testing.assert_close(moves[1][name], factor * once)


# HBDA ----------------------------------------------------------------------------------------


def test_fisher_is_the_squared_gradient_of_the_mean_log_likelihood() -> None:
    simulation = simulate("fedspa", small_federation(), 1, dropout=0.5, backbone="acm-gcn")
    local = simulation.trained()
    local.draws = simulation.cohort.draws(0)  # must not be used
    sent = simulation.method.upload(local)
    fisher = {n: t for n, t in sent.items() if n.startswith("fisher/")}
    assert {n.removeprefix("fisher/") for n in fisher} == {
        f"convs.{i}.weight_{c}" for i in (0, 1) for c in ("hom", "het")
    }
    for k in range(4):
        alone = simulation.cohort.take([k])
        own = {n: t.clone().requires_grad_() for n, t in of_client(local.params, k).items()}
        logits = predict(local.network, own, alone).logits
        log_p = torch.log_softmax(logits, dim=1)[alone.train_nodes, alone.train_labels].mean()
        for name, value in fisher.items():
            (grad,) = torch.autograd.grad(
                log_p, own[name.removeprefix("fisher/")], retain_graph=True
            )
            torch.testing.assert_close(value[k], grad[0] ** 2)


def test_bias_weights_by_hand() -> None:
    values = torch.tensor([[1.0, 0.0], [2.0, 4.0], [5.0, 0.0]], dtype=torch.float64)
    nodes = torch.tensor([1.0, 1.0, 2.0])
    # The federation: (3.25, 1). Deviations: (2.25+1)/2, (1.25+3)/2, (1.75+1)/2.
    gamma = np.array([(1.625 - 1.375) / 0.75, 1.0, 0.0])
    expected = np.exp(-gamma) / np.exp(-gamma).sum()
    found = bias_weights(values, nodes)
    assert found.tolist() == pytest.approx(expected.tolist())
    assert (found.max() / found.min()).item() == pytest.approx(math.e)


def test_weights_by_the_values_themselves() -> None:
    values = torch.tensor([[2.0], [1.0], [5.0]], dtype=torch.float64)
    raised = np.exp([-0.25, 0.0, -1.0])
    for nodes in ([1.0, 1.0, 1.0], [1.0, 9.0, 2.0]):
        found = bias_weights(values, torch.tensor(nodes), distance=False)
        assert found.tolist() == pytest.approx((raised / raised.sum()).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_deviations_give_uniform_weights(dtype: torch.dtype) -> None:
    third = torch.tensor([[1 / 3], [1 / 3], [1 / 3]], dtype=dtype)
    uneven = torch.tensor([3.0, 7.0, 11.0], dtype=dtype)
    assert bias_weights(third, uneven).tolist() == pytest.approx([1 / 3] * 3)
    pair = torch.tensor([[0.1], [0.7]], dtype=dtype)  # one size: equal but for rounding
    assert bias_weights(pair, torch.tensor([17.0, 17.0], dtype=dtype)).tolist() == [0.5, 0.5]
    assert bias_weights(pair[:1], torch.tensor([5.0], dtype=dtype)).tolist() == [1.0]
    zeros = torch.zeros(3, 4, dtype=dtype)
    assert bias_weights(zeros, uneven).tolist() == pytest.approx([1 / 3] * 3)


def hand_made_uploads() -> Uploads:
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    tensors = {
        "model/c.weight_hom": rows,
        "model/c.weight_het": 10 * rows,
        "model/c.harmoniser.weight": rows,
        "model/c.weight_self": 100 * rows,
        "fisher/c.weight_hom": torch.tensor([[0.0], [0.0], [4.0]], dtype=torch.float64),
        "fisher/c.weight_het": torch.tensor([[4.0], [0.0], [0.0]], dtype=torch.float64),
        "high_frequency_area": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        "weight": torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64),
    }
    return Uploads((0, 1, 2), tensors)


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("posterior", [True, False])
def test_each_part_of_the_network_has_its_own_weights(prior: bool, posterior: bool) -> None:
    uploads = hand_made_uploads()
    if not posterior:
        kept = {n: t for n, t in uploads.tensors.items() if not n.startswith("fisher/")}
        uploads = Uploads(uploads.clients, kept)
    method = create("fedspa", {"prior": prior, "posterior": posterior})
    after = model_part(method.aggregate({}, uploads, NO_RNG))

    def mean(deviations: list[float]) -> float:
        gamma = (np.array(deviations) - min(deviations)) / (max(deviations) - min(deviations))
        return float(np.exp(-gamma) @ [1, 2, 4] / np.exp(-gamma).sum())

    by_size = (1 + 2 + 2 * 4) / 4
    # Federation: hom (0 + 0 + 2 · 4) / 4 = 2, all deviate by 2; het (4 + 0 + 0) / 4 = 1; S = 3/4.
    hom = (1 + 2 + 4) / 3 if posterior else by_size
    het = mean([3, 1, 1]) if posterior else by_size
    rest = mean([0.25, 0.75, 0.25]) if prior else by_size
    assert after["c.weight_hom"].item() == pytest.approx(hom)
    assert after["c.weight_het"].item() == pytest.approx(10 * het)
    assert after["c.harmoniser.weight"].item() == pytest.approx(rest)
    assert after["c.weight_self"].item() == pytest.approx(100 * rest)


def test_what_travels_follows_the_parts_that_are_on() -> None:
    def sent(**options: bool) -> set[str]:
        simulation = simulate(create("fedspa", options), small_federation(), 1)
        return set(simulation.method.upload(simulation.trained()))

    extra = sent() - sent(prior=False, posterior=False)
    assert "high_frequency_area" in extra
    assert sum(name.startswith("fisher/") for name in extra) == 4
    assert sent(sfpd=False) == {"high_frequency_area"} | sent(
        sfpd=False, prior=False, posterior=False
    )


def test_the_area_is_each_clients_own_and_follows_the_laplacian() -> None:
    federation = small_federation()
    for laplacian in ("symmetric", "combinatorial"):
        simulation = simulate(create("fedspa", {"laplacian": laplacian}), federation)
        found = simulation.memory["high_frequency_area"].tolist()
        assert found == [high_frequency_area(g, laplacian) for g in federation.clients]  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["paper", "code"])
def test_nodes_without_edges_and_clients_without_known_edges_work(form: str) -> None:
    cohort = random_cohort((5, 1, 6), density=0.0)
    network = FedSPA(form=form).build("acm-gcn", Shape(6, 3, hidden=5), 0).double()
    output = predict(network, random_parameters(network, 3), cohort)
    assert torch.isfinite(output.logits).all()
    everything_unknown = edge_kinds(cohort, torch.full_like(cohort.labels, -1))
    assert everything_unknown.hom.nnz == everything_unknown.het.nnz == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kinds_of_a_single_step_on_a_gpu_are_the_same_edges(dtype: torch.dtype) -> None:
    """Zeros and ones at all edges give the products of the edges that are chosen."""
    cohort = random_cohort((40, 12), density=0.8)
    labels = cohort.labels[cohort.edges.row], cohort.labels[cohort.edges.col_long]
    chosen = (labels[0] >= 0) & (labels[0] == labels[1])
    marked = mark(cohort.edges, chosen, dtype)
    x = torch.randn(52, 3, dtype=dtype, generator=torch.manual_seed(0)).requires_grad_()
    hom = edge_kinds(cohort, cohort.labels).hom
    torch.testing.assert_close(marked @ x, hom @ x)
    upstream = torch.randn(52, 3, dtype=dtype, generator=torch.manual_seed(1))
    grads = [torch.autograd.grad((m @ x * upstream).sum(), x)[0] for m in (marked, hom)]
    torch.testing.assert_close(*grads)
