"""The plain loops compute what the methods compute: same start, no dropout, same draws."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyphily import load
from polyphily.bench.geometric import (
    FedGTALoop,
    FedPubLoop,
    FedSagePlusLoop,
    Loop,
    backbone_of_loop,
    make_loop,
)
from polyphily.bench.geometric.fedgta import FedGTAClient, Upload
from polyphily.bench.geometric.fedsage import Draws
from polyphily.bench.timing import accuracy, make_simulation
from polyphily.core.messages import Message, Uploads
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation
from polyphily.methods.fedgta import FedGTA
from polyphily.nn.draws import SequentialDraws

PLAINLY = {"hidden": 8, "epochs": 2, "input_dropout": 0.0, "dropout": 0.0, "weight_decay": 5e-4}
CLIENTS = 4
GCN = {
    "first.bias": "convs.0.bias",
    "first.lin.weight": "convs.0.weight",
    "second.bias": "convs.1.bias",
    "second.lin.weight": "convs.1.weight",
}


def sage(plain: Mapping[str, str]) -> dict[str, str]:
    """Return names of torch_geometric's GraphSAGE layers and of ours, from those of the layers."""
    parts = {"lin_l.weight": "weight_near", "lin_l.bias": "bias", "lin_r.weight": "weight_self"}
    return {f"{a}.{p}": f"{b}.{q}" for a, b in plain.items() for p, q in parts.items()}


LAYERS = sage({"first": "convs.0", "second": "convs.1"})
NEIGHGEN = sage({"first": "encoder.0", "second": "encoder.1"}) | {
    f"{layer}.{kind}": f"{layer}.{kind}"
    for layer in ("count", "generator.first", "generator.second", "generator.last")
    for kind in ("weight", "bias")
}


@cache
def federation() -> Federation:
    """Return clients that differ in size and labels."""
    graph = load("csbm:nodes=240,features=7", clients=1).clients[0]
    return load(graph, partition="dirichlet:alpha=0.3", clients=CLIENTS)


def begin(method: str, hyperparameters: Mapping[str, Any] | None = None) -> tuple[Simulation, Loop]:
    """Return the engine and the loop of one method on the same clients."""
    data = federation()
    options = {**PLAINLY, "backbone": backbone_of_loop(create(method))}
    simulation = make_simulation([data], method, options, hyperparameters)
    loop = make_loop(data, simulation.method, simulation.settings)
    assert loop is not None
    return simulation, loop


def turned(name: str, value: Tensor) -> Tensor:
    """Return a parameter as the other library stores it: weight matrices are transposed."""
    return value.T.contiguous() if value.dim() == 2 else value


def state_of(
    names: Mapping[str, str], ours: Message, prefix: str, client: int
) -> dict[str, Tensor]:
    """Return a client's parameters under torch_geometric's names."""
    return {p: turned(p, ours[prefix + o][client]).clone() for p, o in names.items()}


def copy(names: Mapping[str, str], ours: Message, prefix: str, model: nn.Module) -> None:
    model.load_state_dict(state_of(names, ours, prefix, 0))


def check(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() >= wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


def test_fedgta(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Uploads] = []
    received: list[Upload] = []
    mixing, answer = FedGTA.mixing, FedGTAClient.answer

    def seen(self: FedGTA, uploads: Uploads, rng: np.random.Generator) -> Tensor:
        sent.append(uploads)
        return mixing(self, uploads, rng)

    def answered(self: FedGTAClient, state: dict[str, Tensor]) -> Upload:
        received.append(answer(self, state))
        return received[-1]

    monkeypatch.setattr(FedGTA, "mixing", seen)
    monkeypatch.setattr(FedGTAClient, "answer", answered)
    simulation, loop = begin("fedgta")
    assert isinstance(loop, FedGTALoop)
    loop.states = [state_of(GCN, simulation.received().params, "", 0)] * CLIENTS
    for _ in range(2):
        simulation.advance()
        loop.advance()
    partners = (simulation.states[0]["weights"] > 0).sum(dim=1)
    assert 1 < partners.double().mean() < CLIENTS, "the threshold should divide the clients"
    for k in range(CLIENTS):
        check(loop.states[k], state_of(GCN, simulation.received().params, "", k))
    for k, own in enumerate(received):
        theirs = sent[k // CLIENTS]
        torch.testing.assert_close(own.signature, theirs["signature"][k % CLIENTS])
        assert own.confidence == pytest.approx(float(theirs["confidence"][k % CLIENTS]), rel=1e-5)
    assert loop.accuracy() == pytest.approx(accuracy(simulation))


def test_fedpub() -> None:
    # A large part of the masks is pruned, so that evaluation differs from training.
    simulation, loop = begin("fedpub", {"prune": 0.985, "proximity": 0.5})
    assert isinstance(loop, FedPubLoop)
    loop.states = [state_of(GCN, simulation.received().params, "gnn.", 0)] * CLIENTS
    for _ in range(2):
        simulation.advance()
        loop.advance()
    trained, received = simulation.trained().params, simulation.received().params
    assert 0.1 < (trained["masks.convs/0/weight"] < 0.985).double().mean() < 0.9
    for k, client in enumerate(loop.clients):
        check(loop.states[k], state_of(GCN, received, "gnn.", k))
        own = client.model.state_dict()
        check(own, state_of(GCN, trained, "gnn.", k))
        for layer, place in (("first", 0), ("second", 1)):
            mask = turned("", trained[f"masks.convs/{place}/weight"][k])
            torch.testing.assert_close(own[f"{layer}.mask"], mask, rtol=1e-4, atol=1e-4)
    assert loop.accuracy() == pytest.approx(accuracy(simulation))


def drawn(rows: int, width: int) -> Tensor:
    """Return numbers in [0, 1) that depend on the column only, and are the same for all partners.

    An answer draws nine numbers for nodes and neighbours and twice as many for noise. The engine
    draws those for all partners side by side, and the loop one partner after the other.
    """
    return ((torch.arange(width).double() % 9 * 0.618 + 0.1) % 1).expand(rows, width)


class SameDraws(Draws):
    """Draws that equal those of the engine while it draws from `drawn`."""

    def uniform(self, rows: int, width: int) -> Tensor:
        return drawn(rows, width)

    def normal(self, rows: int, width: int) -> Tensor:
        return torch.special.ndtri(drawn(rows, width)).float()


def test_fedsage_plus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SequentialDraws, "uniform", lambda self, width, pointers: drawn(pointers[-1], width)
    )
    sizes = {"embedding": 6, "first_width": 5, "second_width": 4, "rows": 3, "slots": 2}
    others = {"generator_steps": 3, "first_rounds": 2, "generator_rounds": 3, "partners": 2}
    simulation, loop = begin("fedsage+", {**sizes, **others, "cross": 2.0})
    assert isinstance(loop, FedSagePlusLoop)
    start = simulation.memory
    parts = ("classifier", LAYERS), ("judge", LAYERS), ("neighgen", NEIGHGEN)
    for client in loop.clients:
        client.draws = SameDraws("cpu")
        for part, names in parts:
            copy(names, start, f"model/{part}.", getattr(client, part))
    loop.state = state_of(LAYERS, start, "model/classifier.", 0)
    answered = 0
    for number in range(1, 8):  # two of NeighGen, three of its generator, two of the classifier
        simulation.advance()
        loop.advance()
        answered += any(answer is not None for answer in loop.answers)
        for k, client in enumerate(loop.clients):
            for part, names in parts[1:]:
                wanted = state_of(names, simulation.memory, f"model/{part}.", k)
                check(getattr(client, part).state_dict(), wanted)
        if number > 5:
            check(loop.state, state_of(LAYERS, simulation.received().params, "classifier.", 0))
    assert answered == 2
    assert loop.accuracy() == pytest.approx(accuracy(simulation))
    assert all(client.mended is not None and len(client.mended[1]) for client in loop.clients)


def test_a_loop_is_of_one_backbone() -> None:
    data = federation()
    simulation = make_simulation([data], "fedgta", {**PLAINLY, "backbone": "sage"})
    assert make_loop(data, simulation.method, simulation.settings) is None
    assert backbone_of_loop(create("fedprox")) is None
