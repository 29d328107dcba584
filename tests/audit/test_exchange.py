"""What the attacker sees: the messages of the method, as they would be sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audit.runs import HOMOPHILIC, trained
from polyphily.audit.exchange import last_exchange
from polyphily.core.messages import Contract
from polyphily.core.method import METHODS


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_declared_upload_is_seen_and_the_run_stays_as_it_is(method: str) -> None:
    simulation = trained(method, rounds=1)
    memory = {n: t.clone() for n, t in simulation.memory.items()}
    state = {n: t.clone() for n, t in simulation.states[0].items()}
    seen = last_exchange(simulation)
    declared = simulation.servers[0].declared_uploads
    Contract.of(declared, 1, torch.float32).check(seen.upload)
    assert simulation.round == 1
    assert all(torch.equal(simulation.memory[n], t) for n, t in memory.items())
    assert all(torch.equal(simulation.states[0][n], t) for n, t in state.items())


def test_what_was_sent_in_early_rounds_only_is_still_known() -> None:
    """FedGSP's singular vectors do not change, so those of round 1 are in the clients' memory."""
    simulation = trained("fedgsp", 3, values={"exchange": 1})
    assert "homophily" not in simulation.servers[0].upload_contract(2).shapes
    seen = last_exchange(simulation)
    assert torch.equal(seen.upload["homophily"], simulation.memory["homophily"])
    assert any(name.startswith("model/") for name in seen.upload)


def test_secure_aggregation_shows_means_only() -> None:
    plain = last_exchange(trained("fedproto", data=HOMOPHILIC)).upload
    simulation = trained("fedproto", data=HOMOPHILIC)
    simulation.settings = replace(simulation.settings, secure_aggregation=True)
    summed = last_exchange(simulation).upload
    counts, prototypes = plain["counts"], plain["prototypes"]
    for c in range(counts.shape[1]):
        total = sum(counts[k, c] * prototypes[k, c] for k in range(2))
        for k in range(2):
            assert torch.allclose(summed["prototypes"][k, c], total / counts[:, c].sum())
            assert summed["counts"][k, c] == pytest.approx(float(counts[:, c].sum()) / 2)


def test_differential_privacy_is_part_of_what_is_seen() -> None:
    plain = last_exchange(trained("fedavg", 1)).upload
    noised = last_exchange(trained("fedavg", 1, dp="epsilon=100,clip=1")).upload
    assert set(noised["weight"].tolist()) == {1.0} != set(plain["weight"].tolist())
    name = max(plain, key=lambda n: plain[n].numel())
    assert (noised[name] - plain[name]).std() > 0.1
