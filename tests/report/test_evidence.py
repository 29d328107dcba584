"""What is gathered of a run: against the run's own scores and byte counts, and against sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import simulate, small_federation
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.heterogeneity.inspection import inspect
from polyphily.report import evidence
from polyphily.runs.run import Execution

TIGHT = 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 999))
def test_mixing_finds_the_weights_of_means(clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((clients, clients)) + 0.01
    weights /= weights.sum(axis=1, keepdims=True)
    sent = {"w": torch.from_numpy(rng.normal(size=(clients, 5, 4))), "b": torch.ones(clients, 3)}
    back = {n: torch.einsum("ij,j...->i...", torch.from_numpy(weights), t.double())
            for n, t in sent.items()}  # fmt: skip
    found = evidence.mixing(sent, back)
    assert found is not None
    assert found[0] == pytest.approx(weights, abs=TIGHT)
    assert found[1] < TIGHT


def test_mixing_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sent, back = ({"w": torch.from_numpy(rng.normal(size=(3, 50)))} for _ in range(2))
    whole = evidence.mixing(sent, back)
    monkeypatch.setattr(evidence, "BLOCK", 21)
    parts = evidence.mixing(sent, back)
    assert whole is not None
    assert parts is not None
    assert parts[0] == pytest.approx(whole[0])
    assert parts[1] == pytest.approx(whole[1])


def test_mixing_says_how_much_is_no_mean() -> None:
    rng = np.random.default_rng(0)
    sent = {"w": torch.from_numpy(rng.normal(size=(3, 50)))}
    elsewhere = {"w": torch.from_numpy(rng.normal(size=(3, 50)))}
    found = evidence.mixing(sent, elsewhere)
    assert found is not None
    assert found[1] > 0.5
    assert found[0].sum(axis=1) == pytest.approx(np.ones(3))
    assert evidence.mixing(sent, {"other": sent["w"]}) is None


def test_fedavg_mixes_by_train_nodes_and_local_not_at_all() -> None:
    federation = small_federation()
    found = evidence.collaboration(simulate("fedavg", federation, rounds=2))
    assert found is not None
    weights = np.array(found["weights"])
    assert found["kind"] == "fitted"
    assert found["residual"] < 1e-4
    method = create("fedavg")
    counts = [
        g.num_nodes if getattr(method, "weighting", "") == "nodes" else int(g.masks.train.sum())  # type: ignore[union-attr]
        for g in federation.clients
    ]
    assert weights == pytest.approx(np.tile(np.array(counts) / sum(counts), (4, 1)), abs=1e-4)
    assert evidence.collaboration(simulate("local", federation, rounds=2)) is None


def test_fedgsp_weights_are_the_servers_own() -> None:
    simulation = simulate("fedgsp", small_federation(), rounds=2)
    found = evidence.collaboration(simulation)
    assert found is not None
    assert found["kind"] == "learned"
    assert np.array(found["weights"]) == pytest.approx(
        simulation.states[0]["strength"][:, -1].numpy()
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_sent_tensors_add_up_to_the_bytes_counted(method: str) -> None:
    """In the first round, in the last, and nothing of the run is changed by looking."""
    simulation = simulate(method, small_federation())
    first = simulation.advance()
    last = first
    for _ in range(3):
        last = simulation.advance()
    before = {name: value.clone() for name, value in simulation.tensors().items()}
    found = evidence.sent(simulation)
    assert [entry["round"] for entry in found] == [1, 4]
    for entry, report in zip(found, (first, last), strict=True):
        total = sum(tensor["bytes"] for tensor in entry["tensors"])
        assert total * len(simulation.cohort) == report.bytes_up[0]
    for name, value in simulation.tensors().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("method", sorted(METHODS))
def test_confusion_has_the_accuracy_of_the_best_round(method: str) -> None:
    """Of the first seed, whose best round is not the last in some of these runs."""
    federations = [small_federation(), replace(small_federation(), seed=5)]
    settings_ = Settings(rounds=6, lr=0.3, hidden=8)
    execution = Execution(create(method), federations, settings_, None)
    summary = execution.go().summary
    confusion = evidence.confusion(execution)
    test = summary["per_seed"][0]["best_val"]["test"]
    assert np.trace(confusion) / confusion.sum() == pytest.approx(test["accuracy"])


def test_best_models_are_not_the_last() -> None:
    execution = Execution(
        create("fedavg"), [small_federation()], Settings(rounds=6, lr=0.3, hidden=8), None
    )
    execution.go()
    assert execution.tracker.best_round["received"][0] < 6
    last = execution.simulation.received().params
    assert any(not torch.equal(t, last[n]) for n, t in execution.best().params.items())


def test_what_is_gathered_is_kept(tmp_path: Path) -> None:
    federation = small_federation()
    execution = Execution(create("fedavg"), [federation], Settings(rounds=3, hidden=8), None)
    execution.go()
    found = evidence.gather(execution, inspect(federation))
    assert found["round"] == 3
    assert len(found["inspection"]["clients"]) == len(federation)
    evidence.write(tmp_path, found)
    assert evidence.read(tmp_path)["confusion_at_best"] == found["confusion_at_best"]
    assert evidence.read(tmp_path / "nowhere") == {}


def test_collaboration_is_recorded_from_the_first_round_to_the_last(tmp_path: Path) -> None:
    federation = small_federation()
    rounds = 2 * evidence.FRAMES + 1
    settings_ = Settings(rounds=rounds, epochs=1, hidden=4, backbone="mlp")
    execution = Execution(create("fedavg"), [federation], settings_, tmp_path)
    assert execution.folder
    execution.folder.create(execution.config(), [federation])
    execution.go(evidence.Collaboration(execution))
    lines = (tmp_path / evidence.COLLABORATION).read_text(encoding="utf-8").splitlines()
    seen = [json.loads(line)["round"] for line in lines]
    assert seen[0] == 1
    assert seen[-1] == rounds
    assert len(seen) <= evidence.FRAMES + 2
    assert np.diff(seen).max() == 2
