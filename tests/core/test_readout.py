"""`--readout jump`: which networks classify from all blocks, and what methods do with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyphily
from polyphily.core.messages import Message, model_part
from polyphily.core.method import METHODS, create
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.nn.backbones import BACKBONES, Shape
from polyphily.nn.residual import Residual
from polyphily.runtime.network import complete
from polyphily.testing.examples import small_federation

JUMP = {"backbone": "res-gcn", "hidden": 8, "readout": "jump", "dtype": "float64", "epochs": 2}
ABLE = {"res-gcn", "res-sage", "res-gat", "res-acm"}
WITH_RESIDUAL = sorted(n for n in METHODS if "res-gcn" in create(n).supported_backbones())


def simulate(method: str, rounds: int, **options: Any) -> Simulation:
    federation, chosen = small_federation(), create(method)
    settings = from_mapping({**JUMP, **options})
    filled = complete(settings, chosen, federation.kind, federation.metric, dense=federation.dense)
    simulation = Simulation(chosen, [federation], filled)
    for _ in range(rounds):
        simulation.advance()
    return simulation


def levels(params: Message) -> list[torch.Tensor]:
    """Return the logits of levels of every network, `[K, levels]`."""
    return [value for name, value in params.items() if name.endswith("jump")]


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_backbones_without_it_are_refused_with_those_that_have_it(backbone: str) -> None:
    options = {"backbone": backbone, "heads": 2}
    network = BACKBONES[backbone](Shape(6, 3, heads=2))
    if any(isinstance(part, Residual) for part in network.modules()):
        assert levels(simulate("fedavg", 0, **options).received().params)
        return
    assert backbone not in ABLE
    with pytest.raises(UserError, match=f"--readout jump: {backbone} has no such") as refused:
        simulate("fedavg", 0, **options)
    named = str(refused.value).rpartition("use ")[2].replace(" or ", ", ").split(", ")
    assert set(named) == ABLE


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_every_backbone_reads_its_last_layer(backbone: str) -> None:
    simulation = simulate("fedavg", 0, backbone=backbone, heads=2, readout="last")
    assert not levels(simulation.received().params)


@pytest.mark.parametrize("method", WITH_RESIDUAL)
def test_every_method_trains_the_weights_of_levels(method: str) -> None:
    trained = levels(model_part(simulate(method, 2, layers=3).memory))
    assert trained
    assert all(value.shape == (len(small_federation()), 4) for value in trained)
    assert all((value != 0).all() for value in trained)


def test_fedavg_averages_the_logits_of_levels() -> None:
    simulation = simulate("fedavg", 1)
    (received,), (own,) = (
        levels(params) for params in (simulation.received().params, model_part(simulation.memory))
    )
    sizes = [graph.num_nodes for graph in small_federation().clients]
    weights = torch.tensor(sizes, dtype=torch.float64)
    assert (own[0] - own[1]).abs().max() > 1e-6
    torch.testing.assert_close(received[0], weights @ own / weights.sum(), rtol=1e-9, atol=1e-12)


def test_clients_side_by_side_are_clients_one_by_one() -> None:
    stacked, sequential = simulate("fedavg", 3), simulate("fedavg", 3, engine="sequential")
    assert levels(stacked.memory)
    for name, value in model_part(stacked.memory).items():
        other = model_part(sequential.memory)[name]
        torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-9)


def test_a_method_whose_network_has_no_such_readout_is_refused() -> None:
    class Own(type(create("fedavg"))):  # type: ignore[misc]
        def build(self, backbone: str, shape: Any, seed: int) -> Any:
            return BACKBONES["gcn"](shape)

    federation = small_federation()
    filled = complete(from_mapping(JUMP), create("fedavg"), federation.kind, "accuracy")
    with pytest.raises(UserError, match="--readout jump: fedavg has a network of its own"):
        Simulation(Own(), [federation], filled)


def test_the_summary_has_the_readout() -> None:
    options = {"rounds": 1, "hidden": 8, "backbone": "res-gcn", "readout": "Jump"}
    summary = polyphily.run("fedavg", small_federation(), **options).summary
    assert summary["settings"]["readout"] == "jump"
