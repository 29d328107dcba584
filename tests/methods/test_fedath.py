"""The parts of FedATH, each against a computation written out here on dense matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from builders import (
    call,
    cohort_of,
    dense_adjacency,
    dense_features,
    of_client,
    random_cohort,
    random_graphs,
    random_parameters,
    split_by_client,
)
from cases import assert_close, federation_of, simulate, small_federation
from effects import changes_predictions
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part, with_prefix
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph, Masks
from polyphily.methods.fedath import FedATH, scores
from polyphily.methods.fedath.losses import hsic, negative_entropy
from polyphily.methods.fedath.network import (
    DualGNN,
    GCNEvaluator,
    MLPEvaluator,
    edge_segments,
)
from polyphily.nn.backbones import BACKBONES, Shape
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.subgraphs import Normalised, Subgraph

ALGORITHM_1 = {"paper": True, "joint": False}
BASES: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {"paper": True},
    "code": {"code": True, "evaluator_width": 8},
    "without HSIC": {"use_independence": False},
    "without entropy": {"use_entropy": False},
    "without either": {"use_independence": False, "use_entropy": False},
    "HSIC of weight 0": {"independence": 0.0},
    "paper, without HSIC": {"paper": True, "use_independence": False},
    "paper, without either": {"paper": True, "use_independence": False, "use_entropy": False},
}
SIZES = (7, 1, 12, 5)


def started(simulation: Simulation) -> Local:
    """The local view at the start of the next round, before any step."""
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    return local


def random_like(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def dense(matrix: SparseMatrix | Normalised) -> Tensor:
    return matrix @ torch.eye(matrix.shape[1], dtype=torch.float64)


def some_weights(cohort: Cohort) -> Tensor:
    return torch.rand(cohort.edges.nnz, generator=torch.Generator().manual_seed(5)).double()


def gcn(adjacency: Tensor, x: Tensor, params: dict[str, Tensor]) -> Tensor:
    """A two-layer GCN of one client on a dense weighted adjacency."""
    loops = adjacency + torch.eye(len(adjacency), dtype=adjacency.dtype)
    scale = loops.sum(dim=1).rsqrt()
    a = scale.view(-1, 1) * loops * scale
    hidden = (a @ (x @ params["convs.0.weight"][0]) + params["convs.0.bias"]).relu()
    return a @ (hidden @ params["convs.1.weight"][0]) + params["convs.1.bias"]


def mlp_scores(
    graph: Graph, params: dict[str, Tensor], *, symmetric: bool = True, unit: bool = True
) -> Tensor:
    """c_ij of one client as a dense matrix, from the concatenated endpoints of Eq. 5."""
    x = dense_features(graph)
    if unit:
        x = F.normalize(x, dim=1)
    n = len(x)
    ends = torch.cat([x.repeat_interleave(n, dim=0), x.repeat(n, 1)], dim=1)
    weight = torch.cat(params["weight"][0].chunk(2, dim=1), dim=0)  # [2F, hidden]
    hidden = (ends @ weight + params["hidden_bias"]).relu()
    score = (hidden @ params["last"][0] + params["bias"]).view(n, n)
    return (score + score.T) / 2 if symmetric else score


def dense_hsic(one: Tensor, two: Tensor) -> Tensor:
    """Eq. 10 as it stands, with Gram matrices."""
    n = len(one)
    c = torch.eye(n, dtype=one.dtype) - 1 / n
    return torch.trace(one @ one.T @ c @ two @ two.T @ c) / (n - 1) ** 2


# The losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["pairs", "nodes", "alignment"])
def test_hsic_is_the_trace_of_the_centred_gram_matrices(scale: str) -> None:
    segments = random_cohort((7, 12, 5)).segments
    one, two = random_like((24, 3)), random_like((24, 3), 1)
    ours = hsic(one, two, segments, scale)
    start = 0
    for k, n in enumerate(segments.sizes):
        a, b = (t[start : start + n] for t in (one, two))
        start += n
        expected = dense_hsic(a, b)
        if scale == "nodes":
            expected = expected * (n - 1) ** 2 / n
        if scale == "alignment":
            expected = expected / (dense_hsic(a, a) * dense_hsic(b, b)).sqrt()
        assert ours[k].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("scale", ["pairs", "nodes", "alignment"])
def test_hsic_of_a_single_node_or_of_constant_rows_is_zero_with_zero_gradient(scale: str) -> None:
    segments = random_cohort((1, 4)).segments
    one = torch.cat([random_like((1, 3)), torch.ones(4, 3).double()]).requires_grad_()
    value = hsic(one, random_like((5, 3), 1), segments, scale)
    assert value.tolist() == pytest.approx([0, 0], abs=1e-12)
    (grad,) = torch.autograd.grad(value.sum(), one)
    assert grad.isfinite().all()


def test_alignment_does_not_depend_on_the_scale_of_the_logits() -> None:
    segments = random_cohort((7, 12, 5)).segments
    one, two = random_like((24, 3)), random_like((24, 3), 1)
    torch.testing.assert_close(
        hsic(0.01 * one, 50 * two, segments, "alignment"), hsic(one, two, segments, "alignment")
    )


def test_negative_entropy_in_its_four_forms() -> None:
    segments = random_cohort((7, 12, 5)).segments
    logits = 3 * random_like((24, 3))
    for k, part in enumerate(torch.split(logits, list(segments.sizes))):
        p = part.exp() / part.exp().sum(dim=1, keepdim=True)
        total = (p * p.log()).sum()
        printed = -p.log().sum()
        expected = {"sum": total, "mean": total / len(p), "printed-sum": printed}
        expected["printed"] = printed / len(p)
        for form, value in expected.items():
            ours = negative_entropy(logits, segments, form)[k]
            assert ours.item() == pytest.approx(value.item()), form


def test_negative_entropy_survives_certain_predictions() -> None:
    segments = random_cohort((2,)).segments
    logits = torch.tensor([[1e4, 0.0, 0.0], [0.0, 1e4, -1e4]]).double().requires_grad_()
    value = negative_entropy(logits, segments, "mean")
    assert value.item() == 0
    assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


# Weighted graphs -------------------------------------------------------------------------------


def test_the_operators_of_a_subgraph_are_those_of_the_weighted_adjacency() -> None:
    cohort = random_cohort(SIZES)
    weight = some_weights(cohort)
    view = Subgraph(cohort, weight)
    a = dense(cohort.edges.with_value(weight))
    loops = a + torch.eye(len(a)).double()
    degree = loops.sum(dim=1)
    scale = degree.rsqrt()
    torch.testing.assert_close(dense(view.gcn), scale.view(-1, 1) * loops * scale)
    torch.testing.assert_close(dense(view.random_walk), loops / degree.view(-1, 1))
    neighbours = cohort.degrees.clamp(min=1).view(-1, 1)
    torch.testing.assert_close(dense(view.mean), a / neighbours)
    score = random_like((cohort.edges_with_loops.nnz, 2))
    attention = view.attention.softmax(score)
    for head in range(2):
        e = dense(cohort.edges_with_loops.with_value(score[:, head].exp())) * loops
        ours = dense(cohort.edges_with_loops.with_value(attention[:, head]))
        torch.testing.assert_close(ours, e / e.sum(dim=1, keepdim=True))


def test_weights_of_one_leave_the_graph_as_it_is() -> None:
    cohort = random_cohort(SIZES)
    view = Subgraph(cohort, torch.ones(cohort.edges.nnz).double())
    for name in ("gcn", "random_walk", "mean"):
        torch.testing.assert_close(dense(getattr(view, name)), dense(getattr(cohort, name)))
    assert view.segments is cohort.segments


@pytest.mark.parametrize("backbone", sorted({*FedATH().supported_backbones()} - {"mlp"}))
def test_gradients_reach_the_edge_weights_of_every_backbone(backbone: str) -> None:
    cohort = random_cohort((6, 4))
    network = BACKBONES[backbone](Shape(6, 3, hidden=4, heads=2, hops=3)).double()
    params = random_parameters(network, 2)
    target = random_like((10, 3))

    def loss(weight: Tensor) -> Tensor:
        view = Subgraph(cohort, weight)
        return (functional_call(network, params, (view,)).logits * target).sum()

    weight = (0.1 + 0.8 * some_weights(cohort)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (weight,))
    assert (torch.autograd.grad(loss(weight), weight)[0] != 0).any()


# The evaluator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("symmetric", "unit"), [(True, True), (False, True), (True, False)])
def test_the_mlp_evaluator_scores_concatenated_endpoints(
    symmetric: bool, unit: bool, sparse: bool
) -> None:
    graphs = random_graphs(SIZES, sparse=sparse)
    cohort = cohort_of(graphs)
    evaluator = MLPEvaluator(Shape(6, 3), 5, 0.0, symmetric=symmetric, unit=unit).double()
    params = random_parameters(evaluator, len(graphs))
    ours = dense(cohort.edges.with_value(call(evaluator, params, cohort)))
    start = 0
    for k, graph in enumerate(graphs):
        mine = slice(start, start + graph.num_nodes)
        start += graph.num_nodes
        expected = mlp_scores(graph, of_client(params, k), symmetric=symmetric, unit=unit)
        torch.testing.assert_close(ours[mine, mine], expected * dense_adjacency(graph))


@pytest.mark.parametrize("cached", [5, 20, 1 << 17])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scores_in_blocks_and_their_gradients_are_those_of_whole_tensors(
    symmetric: bool, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "CACHED", cached)  # one edge, four edges, or all of a client
    cohort = random_cohort(SIZES)
    one, two = (random_like((sum(SIZES), 5), seed).requires_grad_() for seed in (1, 2))
    last = random_like((len(SIZES), 5, 1), 3).requires_grad_()
    edges = edge_segments(cohort)
    ours = scores.rectified_scores(one, two, last, cohort, edges, symmetric=symmetric)
    hidden = (one[cohort.edges.row] + two[cohort.edges.col_long]).relu()
    expected = (hidden * last[edges.owner, :, 0]).sum(dim=1)
    torch.testing.assert_close(ours, expected)
    weights = random_like((cohort.edges.nnz,), 4)
    leaves = (one, two, last)
    if symmetric:
        ours = scores.mean_of_both_ways(ours, cohort.edges)
        expected = (expected + expected[cohort.edges.permutation]) / 2
    found = torch.autograd.grad((ours * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_the_gcn_evaluator_is_that_of_the_code() -> None:
    graphs = random_graphs((9, 14))
    cohort = cohort_of(graphs)
    evaluator = GCNEvaluator(Shape(6, 4), 5, 0.0, symmetric=False, unit=False).double()
    params = random_parameters(evaluator, 2)
    ours = dense(cohort.edges.with_value(call(evaluator, params, cohort)))
    start = 0
    for k, graph in enumerate(graphs):
        mine, p = slice(start, start + graph.num_nodes), of_client(params, k)
        start += graph.num_nodes
        a, x = dense_adjacency(graph), dense_features(graph)
        h = x @ p["embed"][0] + p["embed_bias"]
        convs = {f"convs.0.{n}": p[f"conv1.{n}"] for n in ("weight", "bias")}
        convs |= {"convs.1.weight": p["conv2"], "convs.1.bias": torch.zeros(4).double()}
        h = gcn(a, h, convs)
        rows, cols = a.nonzero(as_tuple=True)
        z = torch.cat([h[rows], h[cols]], dim=1)
        first = torch.cat(p["mlp1"][0].chunk(2, dim=1), dim=0)
        for i, weight in ((1, first), (2, p["mlp2"][0])):
            scale, shift = p[f"norm{i}.scale"][0], p[f"norm{i}.shift"][0]
            z = F.batch_norm(z @ weight, None, None, scale, shift, training=True).relu()
        score = (z @ p["last"][0] + p["bias"]).view(-1)
        torch.testing.assert_close(ours[mine, mine][rows, cols], score)


def test_symmetric_scores_are_symmetric_and_ordered_ones_are_not() -> None:
    cohort = random_cohort((9, 14))
    for symmetric in (True, False):
        evaluator = MLPEvaluator(Shape(6, 3), 5, 0.0, symmetric=symmetric, unit=True).double()
        scores = dense(
            cohort.edges.with_value(call(evaluator, random_parameters(evaluator, 2), cohort))
        )
        assert torch.allclose(scores, scores.T) == symmetric


def test_edges_start_near_one_by_default_and_near_a_half_in_the_paper() -> None:
    for options, low, high in (({}, 0.9, 1.0), ({"initial_score": 0.0}, 0.2, 0.8)):
        local = simulate(create("fedath", options), small_federation()).received()
        network = local.network
        assert isinstance(network, DualGNN)
        params = with_prefix(local.params, "evaluator.")
        weight = call(network.evaluator, params, local.cohort).sigmoid()
        assert low < weight.min()
        assert weight.max() < high


# A round ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        ALGORITHM_1,
        {"hsic": "nodes", "entropy": "sum", "independence": 0.5, "evaluator_lr": 0.01},
    ],
)
def test_a_round_is_two_alternating_updates_per_epoch(options: dict[str, object]) -> None:
    """Algorithm 1 with the code's two Adams, client by client, on dense matrices."""
    federation = small_federation()
    method = create("fedath", options)
    ours = simulate(method, federation, 0, weight_decay=0.0, epochs=3)
    network = ours.network
    assert isinstance(network, DualGNN)
    initial = {n: t.clone() for n, t in model_part(ours.memory).items()}
    ours.advance()
    settings = create("fedath", options).__dict__
    for k, graph in enumerate(federation.clients):
        leaf = {n: t[k : k + 1].clone().requires_grad_() for n, t in initial.items()}
        part = {p: with_prefix(leaf, p) for p in ("causal.", "biased.", "evaluator.")}
        slow = settings["evaluator_lr"] or 0.05
        groups = [
            {"params": list(part["causal."].values()), "lr": 0.05},
            {"params": list(part["evaluator."].values()), "lr": slow},
        ]
        first = torch.optim.Adam(groups)
        second = torch.optim.Adam(list(part["biased."].values()), lr=0.05)
        adjacency, x = dense_adjacency(graph), dense_features(graph)
        assert graph.masks is not None
        train, labels = torch.from_numpy(graph.masks.train), torch.from_numpy(graph.labels)

        def dependence(a: Tensor, b: Tensor) -> Tensor:
            n, value = len(a), dense_hsic(a, b)
            if settings["hsic"] == "alignment":
                value = value / (dense_hsic(a, a) * dense_hsic(b, b)).sqrt()
            if settings["hsic"] == "nodes":
                value = value * (n - 1) ** 2 / n
            return settings["independence"] * value

        for _ in range(3):
            score = mlp_scores(
                graph,
                part["evaluator."],
                symmetric=settings["symmetric"],
                unit=settings["unit_features"],
            )
            weight = score.sigmoid()
            h_c = gcn(adjacency * weight, x, part["causal."])
            h_b = gcn(adjacency * (1 - weight).detach(), x, part["biased."])
            loss_c = F.cross_entropy(h_c[train], labels[train]) + dependence(h_c, h_b.detach())
            p = h_b.softmax(dim=1)
            printed = settings["entropy"] == "printed"
            entropy = -p.log().sum() if printed else (p * p.log()).sum()
            entropy = entropy / (1 if settings["entropy"] == "sum" else len(p))
            loss_b = entropy + dependence(h_c.detach(), h_b)
            for optimizer, loss in ((first, loss_c), (second, loss_b)):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        trained = {n: t[k : k + 1] for n, t in model_part(ours.memory).items()}
        assert_close(trained, {n: t.detach() for n, t in leaf.items()}, 1e-5)


def gradients(options: dict[str, object]) -> dict[str, Tensor]:
    simulation = simulate(create("fedath", options), small_federation())
    local = started(simulation)
    values = list(local.params.values())
    loss = simulation.method.loss(local).sum()
    found = torch.autograd.grad(loss, values, materialize_grads=True)
    return dict(zip(local.params, found, strict=True))


def moved(options: dict[str, object], other: dict[str, object], part: str) -> bool:
    """Whether a part's gradients differ between two choices of options."""
    one, two = (with_prefix(gradients(o), part) for o in (options, other))
    return any(not torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-12) for n in one)


def test_each_loss_acts_where_it_should_and_can_be_dropped() -> None:
    no_entropy, no_hsic = {"use_entropy": False}, {"use_independence": False}
    assert not moved({}, no_entropy, "causal.")
    assert not moved({}, no_entropy, "evaluator.")
    assert moved({}, no_entropy, "biased.")
    for part in ("causal.", "evaluator.", "biased."):
        assert moved({}, no_hsic, part)
        assert not moved({"independence": 0.0}, no_hsic, part)
    neither = gradients({**no_entropy, **no_hsic})
    assert all((g == 0).all() for n, g in neither.items() if n.startswith("biased."))
    assert all((g != 0).any() for n, g in neither.items() if not n.startswith("biased."))


def test_dropped_losses_leave_the_terms_that_remain() -> None:
    def loss(**options: bool) -> Tensor:
        return create("fedath", {"joint": True, **options}).loss(local)

    local = started(simulate("fedath", small_federation()))
    plain = loss(use_entropy=False, use_independence=False)
    torch.testing.assert_close(plain, local.cross_entropy(local.forward().logits))
    only_entropy = loss(use_independence=False) - plain
    only_hsic = loss(use_entropy=False) - plain
    torch.testing.assert_close(loss() - plain, only_entropy + only_hsic)
    assert (only_entropy < 0).all()
    assert (only_hsic > 0).all()


def test_joint_lets_the_biased_losses_reach_the_evaluator() -> None:
    assert moved({}, {"joint": True}, "evaluator.")
    assert not moved({}, {"joint": True}, "causal.")
    assert not moved({}, {"joint": True}, "biased.")
    assert moved({"joint": True}, {"joint": True, "use_entropy": False}, "evaluator.")


@pytest.mark.parametrize("form", ["sum", "printed", "printed-sum"])
def test_the_form_of_the_entropy_changes_the_biased_gnn(form: str) -> None:
    assert moved({}, {"entropy": form}, "biased.")


def test_the_learning_rate_of_the_evaluator_is_its_own() -> None:
    chosen = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0, "epochs": 1}
    steps = []
    for rate in (0.01, 0.02, 0.1, 0.0):
        simulation = simulate(
            create("fedath", {"evaluator_lr": rate}), small_federation(), **chosen
        )
        before = model_part(simulation.memory)
        simulation.advance()
        after = model_part(simulation.memory)
        steps.append({n: after[n] - before[n] for n in after})
    for name in steps[0]:
        factor = 2.0 if name.startswith("evaluator.") else 1.0
        torch.testing.assert_close(steps[1][name], factor * steps[0][name], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(steps[2][name], steps[3][name])


@pytest.mark.parametrize("options", [BASES["code"], BASES["paper"], {"joint": True}])
def test_every_parameter_is_trained_in_every_form(options: dict[str, object]) -> None:
    simulation = simulate(create("fedath", options), small_federation(), weight_decay=0.0)
    before = model_part(simulation.memory)
    simulation.advance()
    for name, value in model_part(simulation.memory).items():
        change = (value - before[name]).flatten(1).abs().amax(dim=1)
        assert (change > 0).all(), name


def test_the_gcn_evaluator_is_the_same_stacked_and_sequential() -> None:
    federation = small_federation(sparse=True)
    method = create("fedath", {"evaluator": "gcn", "joint": True})
    chosen = {"dropout": 0.5, "epochs": "1-3"}
    stacked = simulate(method, federation, 3, **chosen)
    sequential = simulate(method, federation, 3, engine="sequential", **chosen)
    assert_close(stacked.tensors(), sequential.tensors(), 1e-6)


def test_the_causal_gnn_starts_where_fedavg_starts_and_the_biased_one_elsewhere() -> None:
    federation = small_federation()
    params = model_part(simulate("fedath", federation).memory)
    plain = model_part(simulate("fedavg", federation).memory)
    assert_close(with_prefix(params, "causal."), plain, 0)
    assert not torch.equal(params["biased.convs.0.weight"], plain["convs.0.weight"])


def test_what_is_predicted_is_the_received_causal_gnn_on_the_own_causal_graph() -> None:
    federation = small_federation()
    simulation = simulate("fedath", federation, 3, dropout=0.5, input_dropout=0.5)
    logits = simulation.predict(simulation.received())
    state, memory = model_part(simulation.states[0]), model_part(simulation.memory)
    assert all(name.startswith("causal.") for name in state)
    causal = {n: t.unsqueeze(0) for n, t in with_prefix(state, "causal.").items()}
    parts = split_by_client(logits, simulation.cohort)
    for k, graph in enumerate(federation.clients):
        own = of_client(with_prefix(memory, "evaluator."), k)
        weighted = dense_adjacency(graph) * mlp_scores(graph, own).sigmoid()
        torch.testing.assert_close(parts[k], gcn(weighted, dense_features(graph), causal))


# What the losses change --------------------------------------------------------------------------


def predictions(options: dict[str, object]) -> Tensor:
    simulation = simulate(create("fedath", options), small_federation(), 3, dropout=0.4)
    return torch.cat([simulation.predict(v) for v in (simulation.received(), simulation.trained())])


@pytest.mark.parametrize("options", [{}, {"share": "all"}, {"evaluator": "gcn"}])
def test_without_hsic_the_entropy_changes_no_prediction(options: dict[str, object]) -> None:
    """To the bit and with dropout: the rows with and without the entropy loss are one model."""
    alone = {**options, "use_independence": False}
    found = predictions(alone)
    assert torch.equal(predictions({**alone, "use_entropy": False}), found)
    assert torch.equal(predictions({**alone, "entropy": "sum"}), found)
    assert torch.equal(predictions({**options, "independence": 0.0}), found)


@pytest.mark.parametrize("options", [{}, ALGORITHM_1, {"code": True, "evaluator_width": 8}])
def test_the_entropy_acts_through_the_hsic(options: dict[str, object]) -> None:
    """In the first step it moves the biased GNN alone, and from then on H_b in the HSIC."""
    assert not torch.equal(predictions(options), predictions({**options, "use_entropy": False}))


def test_in_the_papers_form_the_four_rows_of_the_ablation_are_four_models() -> None:
    switches = [(True, True), (True, False), (False, True), (False, False)]
    rows = [
        predictions({"paper": True, "use_entropy": entropy, "use_independence": independence})
        for entropy, independence in switches
    ]
    for i, row in enumerate(rows):
        assert not any(torch.equal(row, other) for other in rows[:i])


def test_without_both_losses_it_is_fedavg_on_the_evaluators_graph() -> None:
    """With ω = 1 it is FedAvg; the evaluator's training makes it another model."""
    federation, chosen = small_federation(), {"dropout": 0.4}
    plain = model_part(simulate("fedavg", federation, 3, **chosen).states[0])

    def neither(**options: float) -> dict[str, Tensor]:
        method = create("fedath", {**BASES["without either"], **options})
        state = model_part(simulate(method, federation, 3, **chosen).states[0])
        return with_prefix(state, "causal.")

    assert_close(neither(initial_score=100.0), plain, 1e-9)
    with pytest.raises(AssertionError):
        assert_close(neither(), plain, 1e-3)


@pytest.mark.parametrize("name", FedATH.hyperparameters())
@pytest.mark.parametrize("base", BASES)
def test_a_hyperparameter_acts_or_is_said_not_to(base: str, name: str) -> None:
    method = create("fedath", BASES[base])
    assert changes_predictions(method, name) == (name not in method.without_effect())


# Sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "parts"),
    [
        ("causal", {"causal"}),
        ("causal+evaluator", {"causal", "evaluator"}),
        ("causal+biased", {"causal", "biased"}),
        ("all", {"causal", "biased", "evaluator"}),
    ],
)
def test_only_the_shared_parts_travel_and_are_averaged(share: str, parts: set[str]) -> None:
    simulation = simulate(create("fedath", {"share": share}), small_federation(), 1)
    uploads = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert {name.split("/")[1].split(".")[0] for name in uploads if "/" in name} == parts
    received, memory = simulation.received().params, model_part(simulation.memory)
    for name, value in received.items():
        shared = name.split(".")[0] in parts
        same = all(torch.equal(value[0], row) for row in value)
        assert same if shared else torch.equal(value, memory[name])


def test_the_server_weights_by_nodes() -> None:
    method = create("fedath")
    tensors = {"model/causal.w": torch.tensor([[1.0], [5.0]]), "weight": torch.tensor([3.0, 1.0])}
    state = method.init_server_state({"causal.w": torch.zeros(1)}, 2)
    after = method.aggregate(state, Uploads((0, 1), tensors), np.random.default_rng(0))
    assert after["model/causal.w"].tolist() == [2.0]
    sent = method.upload(simulate("fedath", small_federation(), 1).trained())
    assert sent["weight"].tolist() == [17, 9, 24, 9]


# Awkward clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluator", ["mlp", "gcn"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_client_without_edges_skips_the_evaluator(evaluator: str, alone: bool) -> None:
    plain = small_federation().clients
    masks = Masks(*(np.arange(9) % 3 == i for i in range(3)))
    bare = Graph.build(
        plain[1].features, np.zeros((2, 0), int), np.arange(9) % 3, masks=masks, name="bare"
    )
    federation = federation_of([*plain, bare])
    if alone:
        federation = dataclasses.replace(federation, clients=federation.clients[-1:])
    method = create("fedath", {"evaluator": evaluator})
    simulation = simulate(method, federation, weight_decay=0.0, dropout=0.3)
    before = {n: t[-1].clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    simulation.advance()
    for name, value in model_part(simulation.memory).items():
        assert value.isfinite().all()
        same = torch.equal(value[-1], before[name])
        assert same == name.startswith("evaluator."), name
