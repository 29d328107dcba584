"""Every equation of FedATH's paper, in the paper's form, against sums written out here.

`docs/equations/fedath.md` says which test belongs to which equation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from builders import dense_adjacency, dense_features, of_client, split_by_client
from cases import assert_close, simulate, small_federation
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part, with_prefix
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.methods.fedath import FedATH
from polyphily.methods.fedath.losses import hsic
from polyphily.methods.fedath.network import DualGNN

Params = dict[str, Tensor]
LAMBDA = 0.1


def paper(**options: object) -> FedATH:
    method = create("fedath", {"paper": True, **options})
    assert isinstance(method, FedATH)
    return method


def started(method: FedATH, **settings: object) -> tuple[Simulation, Local]:
    """A simulation before its first step, with parameters that are different at every client."""
    simulation = simulate(method, small_federation(), weight_decay=0.0, **settings)
    local = simulation.received()
    source = torch.Generator().manual_seed(3)
    local.params = {
        name: (value + 0.3 * torch.randn(value.shape, generator=source)).requires_grad_()
        for name, value in local.params.items()
    }
    return simulation, local


def clients(simulation: Simulation) -> list[Graph]:
    return list(simulation.cohort.graphs)


# The paper's computation for one client, on dense matrices ---------------------------------------


def edge_weights(graph: Graph, phi: Params) -> Tensor:
    """Ω^c: ω_ij = sigmoid(Φ([x_i || x_j])) at the edges, Eqs. 5 and 6, edge by edge."""
    x = dense_features(graph)
    first, second = phi["weight"][0].chunk(2, dim=1)  # of x_i and of x_j
    omega = torch.zeros(len(x), len(x), dtype=torch.float64)
    for i, j in graph.edges.T.tolist():
        both = torch.cat([x[i], x[j]])
        hidden = (both @ torch.cat([first, second]) + phi["hidden_bias"][0]).clamp(min=0)
        score = hidden @ phi["last"][0, :, 0] + phi["bias"][0, 0]
        omega = omega.index_put((torch.tensor(i), torch.tensor(j)), 1 / (1 + torch.exp(-score)))
    return omega


def gcn(adjacency: Tensor, x: Tensor, params: Params) -> Tensor:
    """f(A, X) = P relu(P X W_1) W_2, P = (D+I)^-1/2 (A+I) (D+I)^-1/2 (before Eq. 21)."""
    n = len(x)
    degree = [1 + sum(adjacency[i, j] for j in range(n)) for i in range(n)]
    scale = torch.stack([d**-0.5 for d in degree])
    p = scale.view(-1, 1) * (adjacency + torch.eye(n, dtype=torch.float64)) * scale
    hidden = (p @ x @ params["convs.0.weight"][0] + params["convs.0.bias"][0]).clamp(min=0)
    return p @ hidden @ params["convs.1.weight"][0] + params["convs.1.bias"][0]


def representations(graph: Graph, params: Params) -> tuple[Tensor, Tensor]:
    """H^c and H^b on A ⊙ Ω^c and A ⊙ Ω^b, Eq. 7."""
    a, x = dense_adjacency(graph), dense_features(graph)
    omega = edge_weights(graph, with_prefix(params, "evaluator."))
    causal = gcn(a * omega, x, with_prefix(params, "causal."))
    biased = gcn(a * (1 - omega), x, with_prefix(params, "biased."))
    return causal, biased


def log_softmax(row: Tensor) -> Tensor:
    return row - torch.log(torch.exp(row).sum())


def cross_entropy(causal: Tensor, graph: Graph) -> Tensor:
    """Eq. 8: minus the mean log-probability of the labels of the N_t train nodes."""
    assert graph.masks is not None
    train = np.flatnonzero(graph.masks.train).tolist()
    return -sum(log_softmax(causal[i])[graph.labels[i]] for i in train) / len(train)  # type: ignore[return-value]


def entropy(biased: Tensor) -> Tensor:
    """Eq. 9 as printed, without p before log p: the mean over the N_k nodes."""
    return -sum(log_softmax(row).sum() for row in biased) / len(biased)  # type: ignore[return-value]


def dependence(causal: Tensor, biased: Tensor) -> Tensor:
    """Eqs. 10 and 11: (N-1)^-2 Tr(K_1 C K_2 C), K = H H^T, C = I - 11^T / N."""
    n = len(causal)
    c = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    return torch.trace(causal @ causal.T @ c @ biased @ biased.T @ c) / (n - 1) ** 2


def objective(graph: Graph, params: Params) -> Tensor:
    """Eq. 12."""
    causal, biased = representations(graph, params)
    return cross_entropy(causal, graph) + entropy(biased) + LAMBDA * dependence(causal, biased)


# The form ----------------------------------------------------------------------------------------


def test_the_papers_form_is_the_printed_method() -> None:
    method = paper()
    assert (method.entropy, method.hsic, method.joint) == ("printed", "pairs", True)
    assert (method.evaluator, method.symmetric, method.unit_features) == ("mlp", False, False)
    assert (method.share, method.weighting, method.independence) == ("causal", "nodes", LAMBDA)
    assert (method.use_entropy, method.use_independence) == (True, True)
    assert (method.initial_score, method.evaluator_lr) == (0, 0)


def test_the_codes_form_differs_where_the_code_does() -> None:
    method = create("fedath", {"code": True})
    assert isinstance(method, FedATH)
    assert (method.entropy, method.hsic, method.joint) == ("sum", "nodes", False)
    assert (method.evaluator, method.evaluator_width, method.independence) == ("gcn", 512, 7)
    assert (method.symmetric, method.unit_features) == (False, False)


# Section 4.2 -------------------------------------------------------------------------------------


def test_equations_5_and_6_edge_weights() -> None:
    simulation, local = started(paper())
    network, cohort = local.network, simulation.cohort
    assert isinstance(network, DualGNN)
    phi = with_prefix(local.params, "evaluator.")
    ours = functional_call(network.evaluator, phi, (cohort, None)).sigmoid()
    found = torch.zeros(cohort.num_nodes, cohort.num_nodes, dtype=torch.float64)
    found[cohort.edges.row, cohort.edges.col_long] = ours.detach()
    for k, (start, graph) in enumerate(
        zip(cohort.segments.pointers, clients(simulation), strict=False)
    ):
        mine = slice(start, start + graph.num_nodes)
        expected = edge_weights(graph, of_client(phi, k)).detach()
        torch.testing.assert_close(found[mine, mine], expected)
        if graph.edges.size:
            assert not torch.allclose(expected, expected.T)  # [x_i || x_j] is ordered


def test_equation_7_representations_of_the_two_subgraphs() -> None:
    simulation, local = started(paper())
    causal, biased = paper().represent(local)
    assert biased is not None
    pairs = (split_by_client(h, simulation.cohort) for h in (causal, biased))
    for k, (h_c, h_b) in enumerate(zip(*pairs, strict=True)):
        expected = representations(clients(simulation)[k], of_client(local.params, k))
        torch.testing.assert_close((h_c, h_b), expected)


# Section 4.3 -------------------------------------------------------------------------------------


def without(local: Local, **switches: bool) -> list[float]:
    return paper(**switches).loss(local).tolist()


def test_equation_8_cross_entropy_of_the_causal_gnn() -> None:
    simulation, local = started(paper())
    ours = without(local, use_entropy=False, use_independence=False)
    for k, graph in enumerate(clients(simulation)):
        causal, _ = representations(graph, of_client(local.params, k))
        assert ours[k] == pytest.approx(cross_entropy(causal, graph).item())


def test_equation_9_entropy_as_printed() -> None:
    simulation, local = started(paper())
    plain = without(local, use_entropy=False, use_independence=False)
    ours = without(local, use_independence=False)
    for k, graph in enumerate(clients(simulation)):
        _, biased = representations(graph, of_client(local.params, k))
        assert ours[k] - plain[k] == pytest.approx(entropy(biased).item())


def test_equation_9_is_smallest_for_uniform_predictions() -> None:
    """Minus the sum of log p is at least C log C, with equality where every p is 1/C."""
    _, local = started(paper())
    plain = without(local, use_entropy=False, use_independence=False)
    flat = {n: 0 * p if n.startswith("biased.") else p for n, p in local.params.items()}
    lowest = 3 * math.log(3)
    uneven = without(local, use_independence=False)
    assert all(a - b > lowest for a, b in zip(uneven, plain, strict=True))
    local.params = flat
    for a, b in zip(without(local, use_independence=False), plain, strict=True):
        assert a - b == pytest.approx(lowest)


def test_equations_10_and_11_dependence() -> None:
    simulation, local = started(paper())
    plain = without(local, use_entropy=False, use_independence=False)
    ours = without(local, use_entropy=False)
    for k, graph in enumerate(clients(simulation)):
        expected = dependence(*representations(graph, of_client(local.params, k)))
        assert ours[k] - plain[k] == pytest.approx(LAMBDA * expected.item(), rel=1e-6)


def test_definition_4_1_inner_products_of_the_centred_rows() -> None:
    """Tr(K_1 C K_2 C) as a double sum over pairs of nodes, without a matrix C."""
    simulation, local = started(paper())
    causal, biased = (h.detach() for h in paper().represent(local) if h is not None)
    ours = hsic(causal, biased, simulation.cohort.segments, "pairs")
    pairs = (split_by_client(h, simulation.cohort) for h in (causal, biased))
    for k, (h_c, h_b) in enumerate(zip(*pairs, strict=True)):
        n = len(h_c)
        one, two = h_c - sum(h_c) / n, h_b - sum(h_b) / n
        total = sum((one[i] @ one[j]) * (two[i] @ two[j]) for i in range(n) for j in range(n))
        assert ours[k].item() == pytest.approx(float(total) / (n - 1) ** 2)


def test_equation_12_and_its_gradient_for_all_parameters() -> None:
    simulation, local = started(paper())
    loss = paper().loss(local)
    ours = torch.autograd.grad(loss.sum(), list(local.params.values()))
    for k, graph in enumerate(clients(simulation)):
        own = {n: p.detach().requires_grad_() for n, p in of_client(local.params, k).items()}
        expected = objective(graph, own)
        assert loss[k].item() == pytest.approx(expected.item())
        theirs = torch.autograd.grad(expected, list(own.values()), materialize_grads=True)
        found = {n: g[k : k + 1] for n, g in zip(local.params, ours, strict=True)}
        assert_close(found, dict(zip(own, theirs, strict=True)), 1e-7)


def test_joint_off_takes_the_biased_losses_from_the_evaluator_alone() -> None:
    """Both GNNs have the gradients of Eq. 12 and of Algorithm 1; Φ has those of CE + λ DEP(H_b)."""
    simulation, local = started(paper())
    loss = paper(joint=False).loss(local)
    ours = torch.autograd.grad(loss.sum(), list(local.params.values()))
    for k, graph in enumerate(clients(simulation)):
        own = {n: p.detach().requires_grad_() for n, p in of_client(local.params, k).items()}
        causal, biased = representations(graph, own)
        through_causal = cross_entropy(causal, graph) + LAMBDA * dependence(causal, biased.detach())
        for part, expected in (
            ("causal.", cross_entropy(causal, graph) + LAMBDA * dependence(causal, biased)),
            ("biased.", entropy(biased) + LAMBDA * dependence(causal, biased)),
            ("evaluator.", through_causal),
        ):
            names = [n for n in own if n.startswith(part)]
            theirs = torch.autograd.grad(
                expected, [own[n] for n in names], retain_graph=True, materialize_grads=True
            )
            found = {n: g[k : k + 1] for n, g in zip(local.params, ours, strict=True) if n in names}
            assert_close(found, dict(zip(names, theirs, strict=True)), 1e-7)


# Algorithm 1 -------------------------------------------------------------------------------------


def test_lines_3_to_11_local_epochs() -> None:
    """E full-batch steps of Adam on Eq. 12 for causal GNN, biased GNN and Φ at every client."""
    simulation, _ = started(paper(), epochs=3)
    before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    after = model_part(simulation.memory)
    for k, graph in enumerate(clients(simulation)):
        own = {n: t.clone().requires_grad_() for n, t in of_client(before, k).items()}
        optimizer = torch.optim.Adam(own.values(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            objective(graph, own).backward()
            optimizer.step()
        assert_close(of_client(after, k), {n: t.detach() for n, t in own.items()}, 1e-5)


def test_lines_12_to_18_and_equation_4_the_round_trip() -> None:
    """Only causal GNNs go up; sum_k N_k/N W_k^c comes down to everyone; the rest stays."""
    simulation, _ = started(paper())
    simulation.advance()
    trained = model_part(simulation.memory)
    nodes = [graph.num_nodes for graph in clients(simulation)]
    sent = simulation.method.upload(simulation.trained())
    assert {n for n in sent if n != "weight"} == {
        f"model/{n}" for n in trained if n.startswith("causal.")
    }
    received = simulation.received().params
    for name, value in trained.items():
        if name.startswith("causal."):
            mean = sum(n / sum(nodes) * value[k] for k, n in enumerate(nodes))
            torch.testing.assert_close(received[name], mean.expand_as(value))  # type: ignore[union-attr]
        else:
            assert torch.equal(received[name], value)


def test_equation_4_by_hand() -> None:
    method = paper()
    tensors = {"model/causal.w": torch.tensor([[2.0], [6.0]]), "weight": torch.tensor([3.0, 1.0])}
    state = method.init_server_state({"causal.w": torch.zeros(1)}, 2)
    after = method.aggregate(state, Uploads((0, 1), tensors), np.random.default_rng(0))
    assert after["model/causal.w"].item() == (3 * 2 + 1 * 6) / 4


def test_equations_2_and_3_every_client_minimises_its_own_risk() -> None:
    """No client's gradient depends on another client's parameters or graph."""
    simulation, local = started(paper())
    losses = paper().loss(local)
    for k, graph in enumerate(clients(simulation)):
        grads = torch.autograd.grad(
            losses[k], list(local.params.values()), retain_graph=True, materialize_grads=True
        )
        for grad in grads:
            others = [row for j, row in enumerate(grad) if j != k]
            assert not torch.stack(others).any()
        assert losses[k].item() == pytest.approx(
            objective(graph, of_client(local.params, k)).item()
        )


def test_the_result_is_the_global_causal_gnn_on_the_clients_causal_graph() -> None:
    simulation, _ = started(paper())
    simulation.advance()
    simulation.advance()
    logits = split_by_client(simulation.predict(simulation.received()), simulation.cohort)
    state = with_prefix(model_part(simulation.states[0]), "causal.")
    causal = {n: t.unsqueeze(0) for n, t in state.items()}
    memory = model_part(simulation.memory)
    for k, graph in enumerate(clients(simulation)):
        omega = edge_weights(graph, with_prefix(of_client(memory, k), "evaluator."))
        expected = gcn(dense_adjacency(graph) * omega, dense_features(graph), causal)
        torch.testing.assert_close(logits[k], expected)
