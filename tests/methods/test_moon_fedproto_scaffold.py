"""The parts of MOON, FedProto and SCAFFOLD, each against a computation written out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cases import assert_close, simulate, small_federation
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation

NO_RNG = np.random.default_rng(0)


def started(simulation: Simulation) -> Local:
    """The local view at the start of the next round, before any step."""
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    local.constants = simulation.method.prepare_round(local)
    return local


def test_moon_contrast_is_that_of_the_paper() -> None:
    simulation = simulate(create("moon", {"mu": 2.0, "temperature": 0.3}), small_federation(), 2)
    local = started(simulation)
    local.params = {n: p + 0.05 for n, p in local.params.items()}
    loss = simulation.method.loss(local)
    z = local.forward().embedding
    near = local.frozen(model_part(local.received)).embedding
    far = local.frozen(model_part(local.memory)).embedding
    owner, train = local.cohort.segments.owner, local.cohort.labels >= 0
    for k in range(4):
        mine = (owner == k) & train
        a = torch.exp(F.cosine_similarity(z[mine], near[mine]) / 0.3)
        b = torch.exp(F.cosine_similarity(z[mine], far[mine]) / 0.3)
        contrast = -(a / (a + b)).log().mean()
        plain = F.cross_entropy(local.forward().logits[mine], local.cohort.labels[mine])
        assert loss[k].item() == pytest.approx((plain + 2 * contrast).item())


def test_moon_has_no_contrast_before_a_client_has_trained() -> None:
    simulation = simulate("moon", small_federation())
    local = started(simulation)
    plain = create("fedavg").loss(local)
    torch.testing.assert_close(simulation.method.loss(local), plain)
    simulation.advance()
    assert simulation.memory["trained"].tolist() == [1.0] * 4


def test_moon_differs_from_fedavg() -> None:
    federation = small_federation()
    moon, plain = simulate("moon", federation, 4), simulate("fedavg", federation, 4)
    ours, theirs = model_part(moon.states[0]), model_part(plain.states[0])
    assert not torch.allclose(ours["convs.0.weight"], theirs["convs.0.weight"])


def test_fedproto_prototypes_are_class_means_of_train_embeddings() -> None:
    federation = small_federation()
    simulation = simulate("fedproto", federation, 1)
    local = simulation.trained()
    sent = simulation.method.upload(local)
    embedding = local.frozen(local.params).embedding
    owner, labels = local.cohort.segments.owner, local.cohort.labels
    for k in range(4):
        for c in range(3):
            mine = (owner == k) & (labels == c)
            assert sent["counts"][k, c] == mine.sum()
            if mine.any():
                mean = embedding[mine].mean(dim=0)
                torch.testing.assert_close(sent["prototypes"][k, c], mean)


def test_fedproto_server_weights_by_class_count() -> None:
    prototypes = torch.tensor([[[1.0], [5.0], [0.0]], [[4.0], [0.0], [0.0]]])
    counts = torch.tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 0.0]])
    sent = Uploads((0, 1), {"prototypes": prototypes, "counts": counts})
    after = create("fedproto").aggregate({}, sent, NO_RNG)
    assert after["prototypes"].view(-1).tolist() == [3.0, 5.0, 0.0]
    assert after["counts"].tolist() == [3.0, 2.0, 0.0]


def test_fedproto_loss_pulls_to_known_prototypes_only() -> None:
    simulation = simulate(create("fedproto", {"pull": 3.0}), small_federation(), 1)
    simulation.states[0]["counts"][1] = 0
    local = started(simulation)
    loss = simulation.method.loss(local)
    output = local.forward()
    prototypes = simulation.states[0]["prototypes"]
    owner, labels = local.cohort.segments.owner, local.cohort.labels
    for k in range(4):
        mine = (owner == k) & (labels >= 0)
        distance = (output.embedding[mine] - prototypes[labels[mine]]).square().mean(dim=1)
        distance = torch.where(labels[mine] == 1, 0.0, distance)
        plain = F.cross_entropy(output.logits[mine], labels[mine])
        assert loss[k].item() == pytest.approx((plain + 3 * distance.mean()).item())


def test_fedproto_sends_prototypes_only() -> None:
    simulation = simulate("fedproto", small_federation(), 1)
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert set(sent) == {"prototypes", "counts"}


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_against_a_plain_loop(option: str) -> None:
    """SCAFFOLD as its paper writes it, on the losses of single clients, with SGD."""
    federation = small_federation()
    method = create("scaffold", {"option": option, "weighting": "uniform"})
    chosen = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0, "epochs": 3}
    ours = simulate(method, federation, 3, **chosen)

    probe = simulate("fedavg", federation, 0, **chosen)
    w = {n: t.clone() for n, t in model_part(probe.states[0]).items()}
    c = {n: torch.zeros_like(t) for n, t in w.items()}
    c_i = [{n: torch.zeros_like(t) for n, t in w.items()} for _ in range(4)]

    def gradient(k: int, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        local = probe.trained()
        local.cohort = probe.cohort.take([k])
        leaf = {n: t.clone().unsqueeze(0).requires_grad_() for n, t in params.items()}
        local.params = leaf
        grads = torch.autograd.grad(probe.method.loss(local).sum(), list(leaf.values()))
        return {n: g[0] for n, g in zip(leaf, grads, strict=True)}

    for _ in range(3):
        ends, changes = [], []
        for k in range(4):
            y = {n: t.clone() for n, t in w.items()}
            fresh = gradient(k, w)
            for _ in range(3):
                g = gradient(k, y)
                y = {n: y[n] - 0.1 * (g[n] - c_i[k][n] + c[n]) for n in y}
            if option == "II":
                fresh = {n: c_i[k][n] - c[n] + (w[n] - y[n]) / 0.3 for n in y}
            changes.append({n: fresh[n] - c_i[k][n] for n in y})
            c_i[k] = fresh
            ends.append(y)
        w = {n: sum(end[n] for end in ends) / 4 for n in w}
        c = {n: c[n] + sum(change[n] for change in changes) / 4 for n in c}
    assert_close(model_part(ours.states[0]), w, 1e-8)
    control = {n.removeprefix("control/"): t for n, t in ours.states[0].items() if "control" in n}
    assert_close(control, c, 1e-8)


def test_scaffold_divides_by_all_clients_also_when_few_answer() -> None:
    method = create("scaffold")
    state = method.init_server_state({"w": torch.zeros(1)}, clients=4)
    tensors = {"model/w": torch.zeros(1, 1), "weight": torch.ones(1)}
    tensors["control_change/w"] = torch.tensor([[2.0]])
    after = method.aggregate(state, Uploads((3,), tensors), NO_RNG)
    assert after["control/w"].item() == 0.5
