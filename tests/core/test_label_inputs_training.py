"""`--label-inputs`: engines, methods and backbones that train with it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import polyphily
from cases import (
    assert_close,
    assert_same_bits,
    simulate,
    small_federation,
    weights_of,
)
from polyphily.core.messages import model_part
from polyphily.core.method import METHODS, Method, create
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Masks
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.gcfl.method import GCFL
from polyphily.nn.backbones import BACKBONES
from polyphily.runs.run import Execution
from polyphily.testing.examples import CLASSES, FEATURES, with_clients

ABLE = (
    *("fedavg", "fednova", "fedopt", "fedper", "fedprox"),
    *("gcfl", "gcfl+", "local", "moon", "scaffold"),
)
ON_EDGES = ("gcn", "sage", "gat", "gpr-gnn", "acm-gcn", "res-gcn")
HALF = {"label_inputs": 0.5}
UNEVEN = {"dropout": 0.4, "input_dropout": 0.3, "epochs": "1-3", "keep_optimizer": True}


def label_rows(simulation: Simulation) -> dict[str, torch.Tensor]:
    """Return the clients' weights of label inputs: the last rows of every first layer."""
    wide = FEATURES + CLASSES
    params = model_part(simulation.memory).items()
    return {n: t[:, FEATURES:] for n, t in params if t.dim() > 2 and t.shape[1] == wide}


# Methods and backbones ---------------------------------------------------------------------------


def test_these_methods_can_have_label_inputs() -> None:
    able = [name for name, method in METHODS.items() if vars(method).get("labels_can_be_inputs")]
    assert sorted(able) == sorted(ABLE)


@pytest.mark.parametrize("backbone", ON_EDGES)
@pytest.mark.parametrize("method", ABLE)
def test_every_method_trains_the_weights_of_labels(method: str, backbone: str) -> None:
    federation = small_federation((9, 12, 7))
    options = {"backbone": backbone, "heads": 2, "hops": 3, "weight_decay": 0.0}
    before, after = (simulate(method, federation, r, **HALF, **options) for r in (0, 2))
    first, rows = label_rows(before), label_rows(after)
    assert rows
    for name, value in rows.items():
        assert torch.isfinite(value).all()
        assert ((value - first[name]).abs().amax(dim=(1, 2)) > 1e-6).all(), name
    plain = simulate(method, federation, 2, **options)
    assert not label_rows(plain)
    labelled, without = (s.predict(s.trained()) for s in (after, plain))
    assert labelled.shape == without.shape
    assert (labelled - without).abs().max() > 1e-6


@pytest.mark.parametrize("method", ABLE)
def test_without_edges_there_is_nothing_to_learn_from_labels(method: str) -> None:
    """The loss of a node with a hidden label does not depend on other nodes' labels."""
    federation = small_federation((9, 12, 7))
    options = {"backbone": "mlp", "weight_decay": 0.0, **HALF}
    before, after = (simulate(method, federation, r, **options) for r in (0, 2))
    assert_same_bits(label_rows(before), label_rows(after))
    assert torch.isfinite(after.predict(after.trained())).all()


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_share_that_is_hidden_changes_what_is_learned(share: float) -> None:
    federation = small_federation((20, 24))
    half, other = (
        simulate("fedavg", federation, 2, label_inputs=own).states[0] for own in (0.5, share)
    )
    assert half.keys() == other.keys()
    assert all((half[name] - other[name]).abs().max() > 1e-6 for name in half)


def test_only_weights_of_the_first_layer_travel_in_addition() -> None:
    """A weight for each class and hidden unit; labels are not sent."""
    sizes = []
    for share in (0.0, 0.5):
        server = simulate("fedavg", small_federation(), 0, label_inputs=share).servers[0]
        contracts = server.upload_contract(0), server.download_contract(0)
        sizes.append([{n: np.prod(s) for n, s in c.shapes.items()} for c in contracts])
    for plain, labelled in zip(*sizes, strict=True):
        assert plain.keys() == labelled.keys()
        more = {n: labelled[n] - plain[n] for n in plain if labelled[n] != plain[n]}
        assert more == {"model/convs.0.weight": CLASSES * 8}


def test_clients_count_all_their_train_nodes() -> None:
    """A client's weight does not depend on how many of its labels a step hides."""
    method = create("fedavg", {"weighting": "train"})
    simulation = simulate(method, small_federation(), 1, label_inputs=0.3)
    weights = simulation.cohort.num_train / simulation.cohort.num_train.sum()
    for name, value in model_part(simulation.memory).items():
        mean = torch.einsum("k,k...->...", weights, value)
        torch.testing.assert_close(simulation.states[0][f"model/{name}"], mean)


def test_clients_without_train_nodes_do_no_harm() -> None:
    federation = small_federation()
    nothing = np.zeros(federation.clients[1].num_nodes, dtype=np.bool_)
    empty = replace(federation.clients[1], masks=Masks(nothing, nothing, ~nothing))
    clients = [federation.clients[0], empty, *federation.clients[2:]]
    for engine in ("stacked", "sequential"):
        simulation = simulate("fedavg", with_clients(federation, clients), 2, engine=engine, **HALF)
        assert all(torch.isfinite(t).all() for t in weights_of(simulation).values())
        assert torch.isfinite(simulation.predict(simulation.received())).all()


# Engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", ABLE)
def test_clients_side_by_side_are_clients_one_by_one(method: str, sparse: bool) -> None:
    federation = small_federation(sparse=sparse)
    stacked, sequential = (
        simulate(method, federation, 3, engine=engine, **HALF, **UNEVEN)
        for engine in ("stacked", "sequential")
    )
    assert_close(weights_of(stacked), weights_of(sequential), 1e-9)
    scores = [s.predict(s.received()) for s in (stacked, sequential)]
    assert_close({"logits": scores[0]}, {"logits": scores[1]}, 1e-9)


@pytest.mark.parametrize("backbone", [*ON_EDGES, "mlp"])
def test_every_backbone_trains_clients_side_by_side_as_one_by_one(backbone: str) -> None:
    federation = small_federation(sparse=True)
    options = {"backbone": backbone, "heads": 2, "hops": 3, **HALF, **UNEVEN}
    stacked = simulate("fedavg", federation, 3, **options)
    sequential = simulate("fedavg", federation, 3, engine="sequential", **options)
    assert_close(weights_of(stacked), weights_of(sequential), 1e-9)


@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "gcfl+"])
def test_a_seed_among_others_is_that_seed_alone(method: str) -> None:
    federations = [small_federation(seed=1), small_federation((11, 5, 8), seed=2)]
    together = simulate(method, federations, 3, **HALF, **UNEVEN)
    for s, federation in enumerate(federations):
        alone = simulate(method, federation, 3, **HALF, **UNEVEN)
        rows = slice(together.starts[s], together.starts[s + 1])
        assert_close({n: t[rows] for n, t in together.memory.items()}, alone.memory, 1e-9)
        assert_close(together.states[s], alone.states[0], 1e-9)


def test_a_federation_with_rates_of_its_own_is_that_federation_alone() -> None:
    federation, method = small_federation(), create("fedavg")
    alone = [simulate(method, federation, 3, lr=lr, **HALF) for lr in (0.05, 0.01)]
    rates = [(0.05, 1e-3), (0.01, 1e-3)]
    cohort = alone[0].cohort.repeated(2)
    settings = alone[0].settings
    together = Simulation(method, [federation] * 2, settings, rates, cohort=cohort)
    for _ in range(3):
        together.advance()
    for s, own in enumerate(alone):
        assert_close(together.states[s], own.states[0], 1e-9)


@pytest.mark.parametrize("method", ABLE)
def test_a_resumed_simulation_ends_with_the_same_bits(method: str) -> None:
    federation = small_federation()
    options = {**HALF, **UNEVEN, "participation": 0.6}
    straight = simulate(method, federation, 2, **options)
    saved = {n: t.clone() for n, t in straight.tensors().items()}
    resumed = simulate(method, federation, 0, **options)
    resumed.restore(saved, 2, [])
    for _ in range(2):
        straight.advance()
        resumed.advance()
    assert_same_bits(straight.tensors(), resumed.tensors())


def test_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    federation = small_federation()
    options = {"hidden": 8, "backbone": "gcn", **HALF}

    def execution(folder: Path, rounds: int) -> Execution:
        settings = from_mapping({**options, "rounds": rounds})
        return Execution(create("fedavg"), [federation], settings, folder)

    straight = execution(tmp_path / "straight", 5)
    begun = execution(tmp_path / "resumed", 2)
    for made in (straight, begun):
        assert made.folder is not None
        made.folder.create(made.config(), [federation])
        made.go()
    resumed = execution(tmp_path / "resumed", 5)
    assert resumed.restore() == 2
    resumed.go()
    assert_same_bits(straight.simulation.tensors(), resumed.simulation.tensors())


def test_the_summary_has_the_setting() -> None:
    result = polyphily.run("fedavg", small_federation(), rounds=1, hidden=8, **HALF)
    assert result.summary["settings"]["label_inputs"] == 0.5
    plain = polyphily.run("fedavg", small_federation(), rounds=1, hidden=8)
    assert plain.summary["settings"]["label_inputs"] == 0


def test_a_result_predicts_with_all_train_labels() -> None:
    """Labels of train nodes change what is predicted for others."""
    federation = small_federation((20, 24))
    simulation = simulate("fedavg", federation, 3, **HALF)
    shifted = [replace(g, labels=(g.labels + 1) % CLASSES) for g in federation.clients]
    other = simulate("fedavg", with_clients(federation, shifted), 0, **HALF)
    other.set_state(simulation.memory, simulation.states, simulation.round)
    first, second = (s.predict(s.received()) for s in (simulation, other))
    outside = torch.ones(simulation.cohort.num_nodes, dtype=torch.bool)
    outside[simulation.cohort.train_nodes] = False
    assert (first - second)[outside].abs().max() > 1e-3


# What is refused ---------------------------------------------------------------------------------


def refusal(method: str | Method, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        simulate(method, small_federation(), 0, **{**HALF, **options})
    return str(refused.value)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ABLE)))
def test_other_methods_are_refused_with_those_that_can(name: str) -> None:
    words = refusal(name)
    assert words.startswith(f"--label-inputs: {name} uses features or labels in a way of its own.")
    assert set(words.rpartition("It is for: ")[2].split(", ")) == set(ABLE)


@dataclass(frozen=True)
class Silent(FedAvg):
    """A method that does not say whether labels can be inputs, although FedAvg does."""

    name: ClassVar[str] = "silent"


@dataclass(frozen=True)
class SilentCluster(GCFL):
    """The same, further down."""

    name: ClassVar[str] = "silent"


@dataclass(frozen=True)
class Outspoken(Silent):
    """One that does say so."""

    labels_can_be_inputs: ClassVar[bool] = True


@pytest.mark.parametrize("method", [Silent(), SilentCluster()])
def test_a_subclass_has_to_say_so_itself(method: Method) -> None:
    assert method.labels_can_be_inputs  # by inheritance, which does not count
    assert refusal(method).startswith("--label-inputs: silent uses features or labels")
    simulate(method, small_federation(), 1)


def test_a_subclass_that_says_so_trains() -> None:
    expected = simulate("fedavg", small_federation(), 2, **HALF)
    found = simulate(Outspoken(), small_federation(), 2, **HALF)
    assert_same_bits(weights_of(expected), weights_of(found))


def test_a_backbone_that_computes_from_features_once_is_refused() -> None:
    assert [name for name, cls in BACKBONES.items() if cls.keeps_features] == ["unifilter"]
    words = refusal("fedavg", backbone="unifilter")
    assert words.startswith("--label-inputs: unifilter computes from the features once")
    assert "use another --backbone" in words
    simulate("fedavg", small_federation(), 1, backbone="unifilter")


@pytest.mark.parametrize("name", [n for n in BACKBONES if not BACKBONES[n].keeps_features])
def test_every_other_backbone_trains_or_is_refused_by_the_method(name: str) -> None:
    if name in create("fedavg").supported_backbones():
        simulation = simulate("fedavg", small_federation(), 1, backbone=name, heads=2, **HALF)
        assert torch.isfinite(simulation.predict(simulation.received())).all()


@pytest.mark.parametrize("options", [{"sample": "3,3"}, {"batch": 4}, {"sample": "3", "batch": 4}])
def test_samples_are_refused(options: dict[str, Any]) -> None:
    assert re.search("cannot be combined with --sample or --batch", refusal("fedavg", **options))


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"label.inputs"):
        polyphily.run("fedavg", small_federation(), rounds=1, hidden=8, label_inputs=share)
