"""`--norms home`: normalisations stay with every client (FedBN, Li et al. 2021)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from polyphily.core.messages import model_part
from polyphily.core.method import METHODS, create
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation, load
from polyphily.runtime.network import complete
from polyphily.testing.examples import small_federation

HOME = {"backbone": "res-gcn", "hidden": 8, "norms": "home", "dtype": "float64", "epochs": 2}
# These share normalisations of a residual backbone, which can then stay at home.
SHARING = sorted(
    {"fedavg", "fedprox", "fednova", "fedopt", "fedper", "moon", "scaffold", "s2fgl", "fgssl"}
    | {"fedgta", "gcfl", "gcfl+", "fedpub", "adafgl", "fggp"}
)


def simulate(
    method: str, rounds: int, federation: Federation | None = None, **options: Any
) -> Simulation:
    federation = federation or small_federation()
    chosen = create(method)
    settings = from_mapping({**HOME, **options})
    filled = complete(settings, chosen, federation.kind, federation.metric, dense=federation.dense)
    simulation = Simulation(chosen, [federation], filled)
    for _ in range(rounds):
        simulation.advance()
    return simulation


def parts(simulation: Simulation) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the clients' normalisations and their other parameters, as they are received."""
    params = simulation.received().params
    norms = {n for n in params if simulation.network.is_norm(n)}
    return {n: params[n] for n in norms}, {n: t for n, t in params.items() if n not in norms}


def test_norms_differ_between_clients_and_the_rest_does_not() -> None:
    norms, others = parts(simulate("fedavg", 2))
    assert norms
    assert all((t[0] - t[1]).abs().max() > 1e-6 for t in norms.values())
    assert all((t == t[:1]).all() for t in others.values())


def test_shared_norms_do_not_differ() -> None:
    norms, _ = parts(simulate("fedavg", 2, norms="shared"))
    assert all((t == t[:1]).all() for t in norms.values())


@pytest.mark.parametrize("method", SHARING)
def test_norms_are_not_sent(method: str) -> None:
    simulation = simulate(method, 0)
    norms = [n for n, _ in simulation.network.named_parameters() if simulation.network.is_norm(n)]
    server = simulation.servers[0]
    for r in range(2):
        sent = {*server.upload_contract(r).shapes, *server.download_contract(r).shapes}
        assert not [name for name in sent if name.endswith(tuple(norms))]
        simulation.advance()


@pytest.mark.parametrize("method", SHARING)
def test_clients_side_by_side_are_clients_one_by_one(method: str) -> None:
    stacked, sequential = simulate(method, 3), simulate(method, 3, engine="sequential")
    for name, value in model_part(stacked.memory).items():
        other = model_part(sequential.memory)[name]
        torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-9)


def test_what_stays_at_home_is_trained() -> None:
    simulation = simulate("fedavg", 0)
    before = {n: t.clone() for n, t in parts(simulation)[0].items()}
    simulation.advance()
    assert all((parts(simulation)[0][n] != t).any() for n, t in before.items())


def test_equal_clients_are_as_if_norms_were_shared() -> None:
    """Where all clients are alike, the mean of the normalisations is each of them."""
    graph = load("csbm:nodes=30,features=5", clients=1, seed=0).clients[0]
    twins = load([graph, graph])
    plain = {"dropout": 0.0, "input_dropout": 0.0}
    home, shared = (simulate("fedavg", 2, twins, norms=n, **plain) for n in ("home", "shared"))
    for name, value in home.received().params.items():
        torch.testing.assert_close(value, shared.received().params[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedavg", {"backbone": "gcn"}, "gcn has no normalisation"),
        ("local", {}, "does not share normalisations"),
        ("fedtad", {}, "needs whole models"),
    ],
)
def test_what_makes_no_sense_is_refused(method: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(method, 0, **options)


def test_every_method_trains_or_says_why_not() -> None:
    for name in METHODS:
        if "res-gcn" not in create(name).supported_backbones():
            continue
        with suppress(UserError):
            simulate(name, 1)
            continue
        with pytest.raises(UserError, match="--norms home"):
            simulate(name, 1)
