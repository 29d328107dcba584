"""Declarations of messages, compared with what methods send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cases import simulate, small_federation
from polyphily.core.declarations import example_sizes
from polyphily.core.messages import (
    Contract,
    Declared,
    Individually,
    Mean,
    Message,
    Sizes,
    State,
    Sum,
    Uploads,
    weights_of_means,
)
from polyphily.core.method import METHODS, Method, create, sizes_of
from polyphily.engines.simulation import Simulation
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.scaffold import Scaffold

ROUNDS = 3

FORMS: dict[str, Sequence[dict[str, Any]]] = {
    "fedavg": [{"weighting": weighting} for weighting in ("train", "uniform")],
    "scaffold": [{"option": "II"}],
    "fedopt": [{"rule": rule} for rule in ("yogi", "adagrad")],
    "fedspa": [
        {"form": "code"},
        {"sfpd": False},
        {"sfpd": False, "prior": False},
        {"prior": False},
        {"posterior": False},
        {"prior": False, "posterior": False},
        {"sfpd": False, "prior": False, "posterior": False},
    ],
    "fedgsp": [
        {"sharing": 0},
        {"complementing": 0},
        {"sharing": 0, "complementing": 0},
        {"exchange": 0},
        {"exchange": 1},
        {"exchange": 2, "vectors": 5, "order": 2},
        {"coefficients": "order"},
        {"strengths": "control"},
    ],
    "fedhero": [
        *[{"share": share} for share in ("global", "none", "all", "task")],
        *[{"paper": True, "share": share} for share in ("none", "all", "task")],
        {"paper": True, "share_projection": True},
        {"paper": True, "dual_channel": False, "share": "task"},
        {"dual_channel": False},
        *[{"learner": learner} for learner in ("weighted-cosine", "gat", "glcn", "gaug")],
    ],
    "s2fgl": [
        {"nlir": False},
        {"fgma": False},
        {"nlir": False, "fgma": False},
        {"warm_up": 0, "ramp": 0, "replicas": 2},
        {"labels": "train", "sampling": "replica"},
    ],
    "fedath": [
        *[{"share": share} for share in ("causal+evaluator", "causal+biased", "all")],
        {"evaluator": "gcn", "share": "all"},
    ],
}
EVERY: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(METHODS)]
EVERY += [(name, {"paper": True}) for name, cls in METHODS.items() if cls.paper_form()]
EVERY += [(name, form) for name, forms in FORMS.items() for form in forms]


def words(case: object) -> str:
    if isinstance(case, dict):
        return ",".join(f"{n}={v}" for n, v in case.items()) or "defaults"
    return str(case)


def only_sums(name: str, form: dict[str, Any]) -> bool:
    method = create(name, form)
    return method.reason_against_sums(example_sizes(method)) is None


every_form = pytest.mark.parametrize(("name", "form"), EVERY, ids=words)


def start(method: Method, **settings: object) -> Simulation:
    return simulate(method, small_federation(), **settings)


def declared_by(simulation: Simulation) -> tuple[tuple[Declared, ...], tuple[Declared, ...]]:
    sizes = sizes_of(simulation.method, simulation.network, len(simulation.cohort))
    return simulation.method.uploads(sizes), simulation.method.downloads(sizes)


def next_round(simulation: Simulation) -> tuple[Message, Message]:
    """Return what clients upload in the next round, and what they are sent before."""
    received = simulation.download([range(len(simulation.cohort))])
    trained = simulation.clients.train(received, simulation.memory, simulation.round)
    return trained.uploads, received


@every_form
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_declared_is_what_travels(name: str, form: dict[str, Any], dtype: str) -> None:
    simulation = start(create(name, form), dtype=dtype)
    up, down = declared_by(simulation)
    for number in range(1, ROUNDS + 1):
        for declared, message in zip((up, down), next_round(simulation), strict=True):
            contract = Contract.of(declared, number, getattr(torch, dtype))
            contract.check(message)
            shapes = {n: tuple(t.shape[1:]) for n, t in message.items()}
            assert shapes == dict(contract.shapes)
            assert {t.dtype for t in message.values()} <= {contract.dtype}
        simulation.advance()


@every_form
@pytest.mark.parametrize("layers", [1, 3])
def test_shapes_follow_the_size_of_the_network(
    name: str, form: dict[str, Any], layers: int
) -> None:
    simulation = start(create(name, form), layers=layers, hidden=4, hops=3)
    up, down = declared_by(simulation)
    simulation.advance()
    for declared, message in zip((up, down), next_round(simulation), strict=True):
        Contract.of(declared, 2, torch.float64).check(message)


@every_form
def test_nothing_is_declared_that_never_travels(name: str, form: dict[str, Any]) -> None:
    method = create(name, form)
    sizes = example_sizes(method)
    for entry in (*method.uploads(sizes), *method.downloads(sizes)):
        assert entry.shapes
        assert entry.rounds.last is None or entry.rounds.first <= entry.rounds.last
        assert entry.meaning
    assert all(entry.server is not None for entry in method.uploads(sizes))


# What sums are enough for ------------------------------------------------------------------------

NEEDS_EACH_CLIENT = {
    *("fednova", "fedspa", "fedgsp", "s2fgl", "fedgnn", "fedpub", "fedgta", "fedsage+"),
    *("gcfl", "gcfl+", "fedtad", "fedlit", "fediih"),
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_which_servers_need_each_client(name: str) -> None:
    method = create(name)
    reason = method.reason_against_sums(example_sizes(method))
    assert bool(reason) == (name in NEEDS_EACH_CLIENT)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("fedspa", {"sfpd": False, "prior": False, "posterior": False}),
        ("fedspa", {"sfpd": False, "prior": False}),
        ("fedspa", {"prior": False, "posterior": False}),
        ("s2fgl", {"nlir": False}),
        ("fedhero", {"share": "none"}),
    ],
    ids=words,
)
def test_forms_whose_server_only_averages(name: str, form: dict[str, Any]) -> None:
    method = create(name, form)
    assert method.reason_against_sums(example_sizes(method)) is None


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, form in EVERY if only_sums(name, form)], ids=words
)
def test_sums_give_the_same_state_if_they_are_declared_to(name: str, form: dict[str, Any]) -> None:
    """One row of sums is what secure aggregation leaves."""
    method = create(name, form)
    simulation = start(method)
    simulation.advance()
    sent, _ = next_round(simulation)
    weights = weights_of_means(declared_by(simulation)[0])
    sums = {}
    for tensor, value in sent.items():
        if tensor not in weights:
            sums[tensor] = value.sum(dim=0, keepdim=True)
            continue
        weight = sent[weights[tensor]]
        weight = weight.reshape(*weight.shape, *[1] * (value.dim() - weight.dim()))
        total = weight.sum(dim=0, keepdim=True)
        sums[tensor] = (weight * value).sum(dim=0, keepdim=True) / total.clamp(min=1)
    state, rng = simulation.states[0], np.random.default_rng(0)
    each = method.aggregate(state, Uploads((0, 1, 2, 3), sent), rng)
    summed = method.aggregate(state, Uploads((), sums), rng)
    assert each.keys() == summed.keys()
    for tensor, value in each.items():
        torch.testing.assert_close(summed[tensor], value)


# Subclasses --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlyTheServer(FedAvg):
    """Changes its server and says nothing about what that needs."""

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return super().aggregate(state, uploads, rng)


@dataclass(frozen=True)
class ServerAndDeclaration(OnlyTheServer):
    """Says so."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return super().uploads(sizes)


@dataclass(frozen=True)
class ServerOfScaffold(Scaffold):
    """Changes the server of a class that has declared."""

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return super().aggregate(state, uploads, rng)


@dataclass(frozen=True)
class OnlyTheLoss(OnlyTheServer):
    """Inherits a server that was not declared."""


def test_a_changed_server_does_not_inherit_the_promise_of_its_base() -> None:
    sizes = example_sizes(FedAvg())
    assert FedAvg().reason_against_sums(sizes) is None
    for cls in (OnlyTheServer, OnlyTheLoss):
        reason = cls().reason_against_sums(sizes)
        assert reason is not None
        assert "OnlyTheServer" in reason
    assert ServerAndDeclaration().reason_against_sums(sizes) is None
    assert "ServerOfScaffold" in (ServerOfScaffold().reason_against_sums(sizes) or "")


@dataclass(frozen=True)
class Undecided(FedAvg):
    """Declares a tensor without saying what the server does with it."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        first, *others = super().uploads(sizes)
        unspecified = Declared(first.name, first.shapes, first.role, None)
        return (unspecified, *others)


def test_an_unspecified_use_rules_sums_out() -> None:
    reason = Undecided().reason_against_sums(example_sizes(FedAvg()))
    assert reason is not None
    assert "model" in reason


def test_uses_of_the_simple_methods() -> None:
    def uses(name: str) -> dict[str, object]:
        method = create(name)
        return {entry.name: entry.server for entry in method.uploads(example_sizes(method))}

    assert uses("fedavg") == {"model/": Mean("weight"), "weight": Sum()}
    assert uses("fedproto") == {"prototypes": Mean("counts"), "counts": Sum()}
    assert uses("scaffold")["control_change/"] == Sum()
    assert all(isinstance(use, Individually) for use in uses("fednova").values())
