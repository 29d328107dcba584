"""FedAvg against an independent loop, and aggregation rules against numbers worked out by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from cases import SIZES, assert_close, assert_same_bits, simulate, small_federation
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.core.optimizers import add_proximal
from polyphily.methods.fedavg import FedAvg


class Reference(nn.Module):
    """Two of torch_geometric's own convolutions."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(features, hidden), GCNConv(hidden, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("sparse", [False, True])
def test_agrees_with_a_loop_over_torch_geometric_models(optimizer: str, sparse: bool) -> None:
    federation = small_federation(sparse=sparse)
    simulation = simulate("fedavg", federation, 0, optimizer=optimizer, epochs=3)
    start = {n: t.clone() for n, t in model_part(simulation.states[0]).items()}
    for _ in range(3):
        simulation.advance()

    server = Reference(6, 8, 3).double()
    with torch.no_grad():
        server.first.lin.weight.copy_(start["convs.0.weight"].T)
        server.first.bias.copy_(start["convs.0.bias"])
        server.second.lin.weight.copy_(start["convs.1.weight"].T)
        server.second.bias.copy_(start["convs.1.bias"])
    make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    for _ in range(3):
        trained = []
        for graph in federation.clients:
            assert graph.masks is not None
            dense = graph.features.toarray() if sparse else graph.features
            x = torch.from_numpy(np.asarray(dense)).double()
            edges, y = torch.from_numpy(graph.edges), torch.from_numpy(graph.labels)
            train = torch.from_numpy(graph.masks.train)
            client = copy.deepcopy(server)
            stepper = make(client.parameters(), lr=0.05, weight_decay=1e-3)
            for _ in range(3):
                stepper.zero_grad()
                nn.functional.cross_entropy(client(x, edges)[train], y[train]).backward()
                stepper.step()
            trained.append(client.state_dict())
        total = sum(SIZES)
        server.load_state_dict(
            {
                n: sum(t[n] * size / total for t, size in zip(trained, SIZES, strict=True))
                for n in trained[0]
            }
        )
    ours = model_part(simulation.states[0])
    theirs = server.state_dict()
    for name, other in {
        "convs.0.weight": theirs["first.lin.weight"].T,
        "convs.0.bias": theirs["first.bias"],
        "convs.1.weight": theirs["second.lin.weight"].T,
        "convs.1.bias": theirs["second.bias"],
    }.items():
        torch.testing.assert_close(ours[name], other, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "fedper", "fednova", "fedopt", "fedproto", "scaffold", "local"]
)
def test_seeds_side_by_side_are_separate_runs_to_the_bit(name: str) -> None:
    federations = [small_federation(seed=1), small_federation((11, 5, 8), seed=2)]
    chosen = {"dropout": 0.4, "dtype": "float32", "keep_optimizer": True}
    together = simulate(name, federations, 4, **chosen)
    for s, federation in enumerate(federations):
        alone = simulate(name, federation, 4, **chosen)
        rows = slice(together.starts[s], together.starts[s + 1])
        assert_same_bits({n: t[rows] for n, t in together.memory.items()}, alone.memory)
        assert_same_bits(together.states[s], alone.states[0])


def uploads(**tensors: list[float] | list[list[float]]) -> Uploads:
    made = {n.replace("model_", "model/"): torch.tensor(v).double() for n, v in tensors.items()}
    return Uploads(tuple(range(len(next(iter(made.values()))))), made)


NO_RNG = np.random.default_rng(0)


def test_fedavg_by_hand() -> None:
    state = {"model/w": torch.tensor([9.0, 9.0]).double()}
    sent = uploads(model_w=[[1.0, 2.0], [4.0, 8.0]], weight=[1.0, 2.0])
    after = create("fedavg").aggregate(state, sent, NO_RNG)
    assert after["model/w"].tolist() == pytest.approx([3.0, 6.0])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("nodes", list(SIZES)), ("uniform", [1, 1, 1, 1]), ("train", None)],
)
def test_what_a_client_weighs(weighting: str, expected: list[int] | None) -> None:
    federation = small_federation()
    simulation = simulate(create("fedavg", {"weighting": weighting}), federation)
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    counts = expected or [int(g.masks.train.sum()) for g in federation.clients if g.masks]
    assert sent["weight"].tolist() == counts


def test_fednova_by_hand() -> None:
    # w = 10; two clients, weights 1 and 3 (p = .25, .75), 2 and 4 steps, ending at 6 and 2.
    # d = (10-6)/2 = 2 and (10-2)/4 = 2; effort .25*2 + .75*4 = 3.5; w = 10 - 3.5 * 2 = 3.
    state = {"model/w": torch.tensor([10.0]).double()}
    sent = uploads(model_w=[[6.0], [2.0]], weight=[1.0, 3.0], effort=[2.0, 4.0])
    after = create("fednova").aggregate(state, sent, NO_RNG)
    assert after["model/w"].tolist() == pytest.approx([3.0])


def test_fednova_is_fedavg_only_where_all_clients_take_the_same_steps() -> None:
    federation = small_federation()
    for epochs, same in ((3, True), ("1-5", False)):
        nova = simulate("fednova", federation, 3, epochs=epochs, optimizer="sgd", lr=0.3)
        mean = simulate("fedavg", federation, 3, epochs=epochs, optimizer="sgd", lr=0.3)
        ours, theirs = model_part(nova.states[0]), model_part(mean.states[0])
        close = all(torch.allclose(ours[n], theirs[n], rtol=1e-8) for n in ours)
        assert close is same


def test_fednova_effort_with_momentum() -> None:
    # rho = .5, three steps: v1 = g, v2 = 1.5 g, v3 = 1.75 g, so |a| = 4.25.
    simulation = simulate("fednova", small_federation(), optimizer="sgd", momentum=0.5, epochs=3)
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert sent["effort"].tolist() == pytest.approx([4.25] * 4)


def test_fedadam_by_hand() -> None:
    # D = 2; m = .1 * 2 = .2; v = .99 * 1e-6 + .01 * 4; w = 1 + .1 * m / (sqrt(v) + .001).
    method = create("fedopt", {"rule": "adam", "server_lr": 0.1})
    state = method.init_server_state({"w": torch.tensor([1.0]).double()}, clients=2)
    sent = uploads(model_w=[[2.0], [4.0]], weight=[1.0, 1.0])
    after = method.aggregate(state, sent, NO_RNG)
    v = 0.99e-6 + 0.04
    assert after["model/w"].item() == pytest.approx(1 + 0.1 * 0.2 / (v**0.5 + 1e-3))
    again = method.aggregate(after, sent, NO_RNG)
    w = after["model/w"].item()
    m = 0.9 * 0.2 + 0.1 * (3 - w)
    v = 0.99 * v + 0.01 * (3 - w) ** 2
    assert again["model/w"].item() == pytest.approx(w + 0.1 * m / (v**0.5 + 1e-3))


@pytest.mark.parametrize(
    ("rule", "second"),
    [("yogi", 1e-6 + 0.01 * 4), ("adagrad", 1e-6 + 4)],
)
def test_fedyogi_and_fedadagrad_by_hand(rule: str, second: float) -> None:
    method = create("fedopt", {"rule": rule, "server_lr": 0.1})
    state = method.init_server_state({"w": torch.tensor([1.0]).double()}, clients=2)
    after = method.aggregate(state, uploads(model_w=[[3.0]], weight=[1.0]), NO_RNG)
    assert after["model/w"].item() == pytest.approx(1 + 0.1 * 0.2 / (second**0.5 + 1e-3))


def test_fedprox_pulls_towards_what_was_received() -> None:
    federation = small_federation()
    free = simulate(create("fedprox", {"mu": 0.0}), federation, 1, epochs=10)
    plain = simulate("fedavg", federation, 1, epochs=10)
    held = simulate(create("fedprox", {"mu": 100.0}), federation, 1, epochs=10, lr=0.005)
    loose = simulate(create("fedprox", {"mu": 0.0}), federation, 1, epochs=10, lr=0.005)
    start = model_part(simulate("fedavg", federation).memory)

    def moved(simulation: object) -> float:
        model = model_part(simulation.memory)  # type: ignore[attr-defined]
        return sum(float((model[n] - start[n]).square().sum()) for n in start) ** 0.5

    for name, value in model_part(free.memory).items():
        assert torch.equal(value, model_part(plain.memory)[name])
    assert moved(held) < 0.5 * moved(loose)


def test_fedprox_gradient_is_that_of_the_proximal_term() -> None:
    simulation = simulate(create("fedprox", {"mu": 0.7}), small_federation())
    local = simulation.received()
    assert simulation.method.proximal(local) is None, "the first step starts at the anchor"
    local.taken = 1
    local.params = {n: (p + 0.1).requires_grad_() for n, p in local.params.items()}
    pull = simulation.method.proximal(local)
    assert pull is not None
    grads = {n: torch.ones_like(p) for n, p in local.params.items()}
    term = add_proximal(*pull, local.params, grads)
    expected = 0.7 / 2 * local.drift(model_part(local.received))
    torch.testing.assert_close(term, expected.detach())
    found = torch.autograd.grad(expected.sum(), list(local.params.values()))
    for (name, grad), wanted in zip(grads.items(), found, strict=True):
        torch.testing.assert_close(grad, 1 + wanted, msg=name)


@dataclass(frozen=True)
class TermInLoss(FedAvg):
    """FedProx with its term in the loss, as the paper has it."""

    name = "term in loss"

    def loss(self, local: Local) -> Tensor:
        return super().loss(local) + 0.7 / 2 * local.drift(model_part(local.received))


@pytest.mark.parametrize("epochs", ["3", "1-4"])
def test_fedprox_trains_as_with_the_term_in_the_loss(epochs: str) -> None:
    settings = {"epochs": epochs, "dropout": 0.3, "clip": 0.5}
    found = simulate(create("fedprox", {"mu": 0.7}), small_federation(), 2, **settings)
    expected = simulate(TermInLoss(), small_federation(), 2, **settings)
    assert_close(found.tensors(), expected.tensors(), 1e-10)
    assert found.advance().loss == pytest.approx(expected.advance().loss, rel=1e-10)


def test_fedper_keeps_classifiers_apart() -> None:
    simulation = simulate("fedper", small_federation(), 3)
    view = simulation.received().params
    assert torch.equal(view["convs.0.weight"][0], view["convs.0.weight"][1])
    assert not torch.allclose(view["convs.1.weight"][0], view["convs.1.weight"][1])
    assert set(model_part(simulation.states[0])) == {"convs.0.weight", "convs.0.bias"}


def test_local_shares_nothing() -> None:
    simulation = simulate("local", small_federation(), 4)
    assert simulation.states == [{}]
    report = simulation.advance()
    assert (report.bytes_up, report.bytes_down) == ([0], [0])
