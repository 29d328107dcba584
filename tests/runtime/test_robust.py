"""Robust aggregation against independent computations, and against hostile uploads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import polyphily
from polyphily.core.declarations import example_sizes
from polyphily.core.messages import Mean, Sum, Uploads, count, statistic
from polyphily.core.method import METHODS, create
from polyphily.engines.attacks import hostile_clients
from polyphily.engines.simulation import Simulation
from polyphily.errors import TrainingError, UserError
from polyphily.runtime.network import complete
from polyphily.runtime.robust import (
    KINDS,
    Defence,
    geometric_median_weights,
    krum_weights,
    trimmed_mean,
)

DEFENCES = ("median", "trimmed-mean=0.25", "krum=1", "geometric-median", "clip=auto")
numbers = st.floats(-1e3, 1e3)


@given(arrays(np.float64, (7, 3), elements=numbers))
def test_trimmed_means_are_those_of_scipy(values: np.ndarray) -> None:
    found = trimmed_mean(torch.from_numpy(values), share=0.2).numpy()
    np.testing.assert_allclose(found, scipy.stats.trim_mean(values, 0.2), atol=1e-9)
    np.testing.assert_allclose(
        trimmed_mean(torch.from_numpy(values)).numpy(), np.median(values, axis=0), atol=1e-9
    )


def test_entries_that_do_not_count_are_left_out() -> None:
    values = torch.tensor([[1.0, 0.0], [2.0, 5.0], [9.0, 0.0], [4.0, 0.0]])
    valid = torch.tensor([[True, False], [True, True], [True, False], [True, False]])
    assert trimmed_mean(values, valid).tolist() == [3.0, 5.0]
    assert trimmed_mean(values, torch.zeros_like(valid)).tolist() == [0.0, 0.0]


def test_krum_leaves_out_those_far_from_the_rest() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(7, 4))
    rows[[2, 5]] += 100
    scores = []
    for i in range(7):  # the definition: the K - f - 2 = 3 nearest others
        far = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(7) if j != i)
        scores.append(sum(far[:3]))
    kept = set(np.argsort(scores)[:5])
    weights = krum_weights(torch.from_numpy(rows), 2)
    assert set(weights.nonzero().view(-1).tolist()) == kept
    assert kept == {0, 1, 3, 4, 6}
    assert weights.sum().item() == pytest.approx(1)


def test_the_geometric_median_has_the_smallest_sum_of_distances() -> None:
    rows = np.random.default_rng(1).normal(size=(9, 3))
    rows[0] = 50
    found = (geometric_median_weights(torch.from_numpy(rows), 200) @ torch.from_numpy(rows)).numpy()
    best = scipy.optimize.minimize(
        lambda x: np.linalg.norm(rows - x, axis=1).sum(),
        rows.mean(0),
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 10_000},
    )
    np.testing.assert_allclose(found, best.x, atol=1e-4)


def test_means_are_over_clients_that_have_something_and_sums_are_scaled() -> None:
    declared = (statistic("s", (2,), Mean("n")), count("n", (), Sum()))
    tensors = {
        "s": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1e9, 1e9], [7.0, 7.0]]),
        "n": torch.tensor([5.0, 5.0, 5.0, 5.0, 0.0]),
    }
    seen = Defence("median")(Uploads(tuple(range(5)), tensors), declared, 1)
    assert seen.clients == ()
    assert seen["s"].tolist() == [[2.5, 2.5]]
    assert seen["n"].tolist() == [25.0]


def test_clipping_bounds_every_upload_and_its_count() -> None:
    declared = (statistic("s", (1,), Mean("n")), count("n", (), Sum()))
    tensors = {
        "s": torch.tensor([[1.0], [2.0], [3.0], [-1e9], [1e9]]),
        "n": torch.tensor([5.0, 6.0, 7.0, 1e12, 4.0]),
    }
    seen = Defence("clip")(Uploads(tuple(range(5)), tensors), declared, 1)
    assert seen["s"].view(-1).tolist() == pytest.approx([1, 2, 3, 1, 3])
    assert seen["n"].tolist() == [5, 6, 7, 60, 4]


def test_a_client_that_claims_to_have_less_than_nothing_is_not_heard() -> None:
    declared = (statistic("s", (1,), Mean("n")), count("n", (), Sum()))
    tensors = {
        "s": torch.tensor([[1.0], [2.0], [3.0], [1e9]]),
        "n": torch.tensor([5.0, 6.0, 7.0, -3.0]),
    }
    seen = Defence("clip")(Uploads(tuple(range(4)), tensors), declared, 1)
    assert seen["s"].view(-1).tolist() == pytest.approx([1, 2, 3, 2])  # the median of the others
    assert seen["n"].tolist() == [5, 6, 7, 0]


def test_clipping_keeps_counts_of_classes_that_few_clients_have() -> None:
    declared = (statistic("s", (2, 1), Mean("n")), count("n", (2,), Sum()))
    tensors = {
        "s": torch.tensor([[[1.0], [0.0]], [[2.0], [0.0]], [[3.0], [8.0]]]),
        "n": torch.tensor([[5.0, 0.0], [6.0, 0.0], [7.0, 4.0]]),
    }
    seen = Defence("clip")(Uploads((0, 1, 2), tensors), declared, 1)
    assert torch.equal(seen["n"], tensors["n"])
    assert seen["s"][2, 1].item() == 8.0  # the only client that has the class


def test_too_few_answers_end_the_run() -> None:
    declared = (statistic("s", (1,), Sum()),)
    uploads = Uploads((0, 1), {"s": torch.ones(2, 1)})
    with pytest.raises(TrainingError, match="2 answers arrived, but --robust median needs 3"):
        Defence("median")(uploads, declared, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mean", "unknown robust aggregation"),
        ("trimmed-mean=0.5", "below 0.5"),
        ("krum=1.5", "number of hostile clients"),
        ("median=3", "takes no value"),
        ("clip=far", "not a number"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Defence.parse(text)


def five() -> polyphily.Federation:
    return polyphily.load("csbm:nodes=60,features=6", clients=5, seed=0)


def settings_of(method: str, **given: object) -> polyphily.Settings:
    chosen = polyphily.Settings(
        **{"rounds": 4, "epochs": 1, "hidden": 8, "dtype": "float64", **given}  # type: ignore[arg-type]
    )
    return complete(chosen, create(method), "synthetic", "accuracy", dense=True)


def sums_suffice(name: str) -> bool:
    method = create(name)
    return method.reason_against_sums(example_sizes(method)) is None


@pytest.mark.parametrize("name", sorted(n for n in METHODS if sums_suffice(n) and n != "local"))
@pytest.mark.parametrize("defence", DEFENCES)
def test_no_method_is_moved_far_by_a_hostile_client(name: str, defence: str) -> None:
    settings = settings_of(name, robust=defence, attack="scale=1e8", attackers="0.2")
    simulation = Simulation(create(name), [five()], settings)
    for _ in range(settings.rounds):
        simulation.advance()
    largest = max(
        (t.abs().max().item() for t in simulation.states[0].values() if t.numel()), default=0
    )
    assert largest < 1e4, f"{name}: the server's state reaches {largest:.0e}"


def test_without_a_defence_a_hostile_client_decides() -> None:
    settings = settings_of("fedavg", attack="scale=1e8", attackers="0.2")
    simulation = Simulation(create("fedavg"), [five()], settings)
    simulation.advance()
    assert max(t.abs().max().item() for t in simulation.states[0].values()) > 1e4


@pytest.mark.parametrize("defence", DEFENCES)
def test_stacked_equals_sequential(defence: str) -> None:
    weights = []
    for engine in ("stacked", "sequential"):
        result = polyphily.run(
            "fedavg",
            five(),
            rounds=3,
            epochs=2,
            hidden=8,
            dtype="float64",
            engine=engine,
            robust=defence,
            attack="noise",
            attackers="0.2",
        )
        weights.append(result.models["global"])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-9, rtol=1e-9)


def test_what_cannot_be_combined_is_refused() -> None:
    for defence in DEFENCES:
        with pytest.raises(UserError, match="fedgnn cannot take --robust: "):
            polyphily.run("fedgnn", five(), rounds=1, robust=defence, expand=True)
    with pytest.raises(UserError, match="needs at least 3 answers in a round, here are 2"):
        polyphily.run(
            "fedavg", polyphily.load("csbm:nodes=60", clients=2), rounds=1, robust="median"
        )
    with pytest.raises(UserError, match="secure-aggregation: the server sees no single upload"):
        polyphily.run("fedavg", five(), rounds=1, robust="median", secure_aggregation=True)


def test_hostile_clients_by_share_and_by_name() -> None:
    federation = five()
    names = [graph.name for graph in federation.clients]
    chosen = hostile_clients(federation, polyphily.Settings(attack="noise", attackers="0.4"))
    assert len(chosen) == 2
    named = polyphily.Settings(attack="noise", attackers=f"{names[3]}, {names[1]}")
    assert hostile_clients(federation, named) == [1, 3]
    assert hostile_clients(federation, polyphily.Settings(attackers="0.4")) == []
    with pytest.raises(UserError, match="unknown client"):
        hostile_clients(federation, polyphily.Settings(attack="noise", attackers="nobody"))
    with pytest.raises(UserError, match="every client would be hostile"):
        hostile_clients(federation, polyphily.Settings(attack="noise", attackers=",".join(names)))


def test_attacks_are_as_defined() -> None:
    federation = five()
    honest, hostile = (
        Simulation(
            create("fedavg"),
            [federation],
            settings_of("fedavg", attack=attack, attackers=federation.clients[2].name),
        )
        for attack in ("off", "sign-flip=3")
    )
    sent = {n: t[0] for n, t in honest.download([[2]]).items()}
    uploads = [
        s.backend.train(range(5), [list(range(5))]).trained.uploads for s in (honest, hostile)
    ]
    for name, start in sent.items():
        fair, unfair = (u[name] for u in uploads)
        torch.testing.assert_close(unfair[2], start - 3 * (fair[2] - start))
        for k in (0, 1, 3, 4):
            torch.testing.assert_close(unfair[k], fair[k], rtol=0, atol=0)


def test_wrong_labels_are_those_of_train_nodes_of_hostile_clients() -> None:
    federation = five()
    settings = settings_of("fedavg", attack="labels", attackers=federation.clients[0].name)
    simulation = Simulation(create("fedavg"), [federation], settings)
    for k, (before, after) in enumerate(
        zip(federation.clients, simulation.cohort.graphs, strict=True)
    ):
        assert before.masks is not None
        changed = before.labels != after.labels
        assert np.array_equal(changed, before.masks.train if k == 0 else np.zeros_like(changed))


def test_every_kind_is_tried_here() -> None:
    assert {text.partition("=")[0] for text in DEFENCES} == set(KINDS)
    assert all(math.isfinite(Defence.parse(text).fewest) for text in DEFENCES)  # type: ignore[union-attr]
