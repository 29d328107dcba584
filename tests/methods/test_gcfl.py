"""GCFL and GCFL+: splitting, distances of series and the server, against plain computations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import assert_close, assert_same_bits, simulate, small_federation
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import METHODS, Method, create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.methods.gcfl.partition import PARTITIONS, warping_distances
from polyphily.testing import METHOD_CHECKS, MethodCase

NAMES = ("gcfl", "gcfl+")
AT_ONCE: dict[str, dict[str, Any]] = {  # every cluster of three or more is split in every round
    "gcfl": {"warm_up": 0, "ratio": 1.0},
    "gcfl+": {"warm_up": 0, "ratio": 1.0, "length": 1},
}
PAIRS = np.kron(np.eye(2), np.ones((2, 2)))  # 1 within the pairs (0, 1) and (2, 3)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def at_once(name: str, **options: Any) -> Method:
    return create(name, {**AT_ONCE[name], **options})


def clusters(simulation: Simulation) -> list[list[int]]:
    """Return the clients of each cluster, in the order of their first clients."""
    numbers = simulation.states[0]["cluster"].tolist()
    return sorted([k for k, n in enumerate(numbers) if n == c] for c in set(numbers))


def by_hand(method: Method, updates: list[list[float]], **sent: list[float]) -> dict[str, Tensor]:
    """Return the state after a first round whose clients moved so, from w = 0."""
    state = method.init_server_state({"w": torch.zeros(len(updates[0])).double()}, len(updates))
    tensors = {
        "model/w": torch.tensor(updates).double(),
        "weight": torch.ones(len(updates)).double(),
    }
    tensors |= {name: torch.tensor(values).double() for name, values in sent.items()}
    return method.aggregate(state, Uploads(tuple(range(len(updates))), tensors), rng())


# Dynamic time warping ----------------------------------------------------------------------------


def cheapest_path(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return the least cost of walking both series to their ends, by trying every path."""
    first = (a[0] - b[0]) ** 2
    if len(a) == len(b) == 1:
        return first
    rest = [(a[1:], b[1:]), (a[1:], b), (a, b[1:])]
    return first + min(cheapest_path(x, y) for x, y in rest if x and y)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((1, 2, 3, 4, 5), (2, 3, 4, 5, 6), math.sqrt(2)), ((1,) * 5, (3,) * 5, 4.4721)],
)
def test_warping_distances_of_the_card(
    first: tuple[float, ...], second: tuple[float, ...], expected: float
) -> None:
    found = warping_distances(np.array([first, second], dtype=np.float64))
    assert found[0, 1] == found[1, 0] == pytest.approx(expected, abs=1e-4)
    assert found.diagonal().tolist() == [0, 0]


def test_warping_distances_against_all_paths() -> None:
    series = rng().random((4, 5))
    found = warping_distances(series)
    for i, j in itertools.product(range(4), repeat=2):
        expected = math.sqrt(cheapest_path(tuple(series[i]), tuple(series[j])))
        assert found[i, j] == pytest.approx(expected)


# Partitions --------------------------------------------------------------------------------------


def cut_weight(similarity: np.ndarray, part: list[int]) -> float:
    others = [k for k in range(len(similarity)) if k not in part]
    return float(similarity[np.ix_(part, others)].sum())


@pytest.mark.parametrize(("cross", "weight", "sizes"), [(-0.2, 3.2, [2, 2]), (0.2, 4.4, [1, 3])])
def test_the_minimum_cut_of_two_pairs(cross: float, weight: float, sizes: list[int]) -> None:
    similarity = 1 + np.where(PAIRS == 1, 1.0, cross)
    parts = PARTITIONS["mincut"](similarity, rng())
    assert sorted(map(len, parts)) == sizes
    assert cut_weight(similarity, parts[0]) == pytest.approx(weight)


def test_linkage_finds_the_pairs_where_the_minimum_cut_peels_off_a_client() -> None:
    similarity = 1 + np.where(PAIRS == 1, 1.0, 0.2)
    assert PARTITIONS["linkage"](similarity, rng()) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_the_minimum_cut_is_the_least_of_all(seed: int) -> None:
    half = np.random.default_rng(seed).random((6, 6))
    similarity = half + half.T
    every = [
        cut_weight(similarity, list(part))
        for size in range(1, 6)
        for part in itertools.combinations(range(6), size)
    ]
    parts = PARTITIONS["mincut"](similarity, rng())
    assert cut_weight(similarity, parts[0]) == pytest.approx(min(every))


def test_the_minimum_cut_goes_through_similarities_of_zero() -> None:
    assert PARTITIONS["mincut"](PAIRS, rng()) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_linkage_against_a_plain_loop(seed: int) -> None:
    half = np.random.default_rng(seed).random((7, 7))
    similarity = half + half.T
    groups = [[k] for k in range(7)]
    while len(groups) > 2:
        _, a, b = max(
            (similarity[np.ix_(groups[a], groups[b])].min(), a, b)
            for a, b in itertools.combinations(range(len(groups)), 2)
        )
        groups[a] = sorted(groups[a] + groups.pop(b))
    assert sorted(PARTITIONS["linkage"](similarity, rng())) == sorted(groups)


def test_random_members_have_the_sizes_of_linkage() -> None:
    similarity = 1 + np.where(PAIRS == 1, 1.0, 0.2)
    drawn = [PARTITIONS["random"](similarity, np.random.default_rng(s)) for s in range(20)]
    assert all(sorted(map(len, parts)) == [2, 2] for parts in drawn)
    assert all(sorted(parts[0] + parts[1]) == [0, 1, 2, 3] for parts in drawn)
    assert len({str(sorted(parts)) for parts in drawn}) == 3


@pytest.mark.parametrize("partition", PARTITIONS)
def test_equal_clients_are_split_too(partition: str) -> None:
    parts = PARTITIONS[partition](np.ones((4, 4)), rng())
    assert sorted(k for part in parts for k in part) == [0, 1, 2, 3]
    assert len(parts) == (4 if partition == "singletons" else 2)
    assert all(parts)


# The server's step -------------------------------------------------------------------------------


def test_a_split_and_its_means_by_hand() -> None:
    # δ_mean = 0.1 and δ_max = 1.2; 0 and 1 move to the right, 2 and 3 to the left.
    method = create("gcfl", {"warm_up": 0, "ratio": 0.1})
    state = method.init_server_state({"w": torch.zeros(2).double()}, clients=4)
    moved = torch.tensor([[1.0, 0.1], [1.2, -0.1], [-0.8, 0.0], [-1.0, 0.0]]).double()
    sent = {"model/w": moved, "weight": torch.tensor([1.0, 3.0, 1.0, 1.0]).double()}
    after = method.aggregate(state, Uploads((0, 1, 2, 3), sent), rng())
    assert after["cluster"].tolist() == [0, 0, 1, 1]
    received = method.download(after, [3, 0])["model/w"]
    torch.testing.assert_close(received, torch.tensor([[-0.9, 0.0], [1.15, -0.05]]).double())
    weights = method.collaboration(after)
    assert weights is not None
    assert weights.tolist() == [[0.25, 0.75, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("options", "split"),
    [  # δ_mean = 0.1, δ_max = 1.2, a ratio of 0.083
        ({"ratio": 0.1}, True),
        ({"ratio": 0.08}, False),
        ({"criterion": "absolute", "epsilon1": 0.11, "epsilon2": 1.1}, True),
        ({"criterion": "absolute", "epsilon1": 0.09, "epsilon2": 1.1}, False),
        ({"criterion": "absolute", "epsilon1": 0.11, "epsilon2": 1.3}, False),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_when_a_cluster_is_split(name: str, options: dict[str, Any], split: bool) -> None:
    method = create(name, {**AT_ONCE[name], **options})
    sent = {"gradient_norm": [1.0, 1.0, 3.0, 3.0]} if name == "gcfl+" else {}
    after = by_hand(method, [[1.0, 0.1], [1.2, -0.1], [-0.8, 0.0], [-1.0, 0.0]], **sent)
    assert after["cluster"].tolist() == ([0, 0, 1, 1] if split else [0, 0, 0, 0])


def test_clusters_of_two_stay_together() -> None:
    assert by_hand(at_once("gcfl"), [[1.0], [-1.0]])["cluster"].tolist() == [0, 0]
    assert by_hand(at_once("gcfl"), [[1.0], [-1.0], [1.0]])["cluster"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_split_during_the_warm_up(name: str) -> None:
    method = at_once(name, warm_up=2)
    assert method.rounds_before_it_acts() == 2
    simulation = simulate(method, small_federation(), 2)
    assert clusters(simulation) == [[0, 1, 2, 3]]
    simulation.advance()
    assert len(clusters(simulation)) > 1


def test_a_warm_up_is_fedavg_and_the_first_split_is_not() -> None:
    federation = small_federation()
    method = at_once("gcfl", warm_up=2)
    plain, ours = simulate("fedavg", federation, 2), simulate(method, federation, 2)
    assert_same_bits(ours.received().params, plain.received().params)
    plain.advance()
    ours.advance()
    with pytest.raises(AssertionError):
        assert_close(ours.received().params, plain.received().params, 1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("never", [{"ratio": 0.0}, {"criterion": "absolute", "epsilon1": 0.0}])
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_without_splits_it_is_fedavg_to_the_bit(
    name: str, never: dict[str, Any], participation: float
) -> None:
    federation = small_federation()
    chosen: dict[str, Any] = {"dropout": 0.4, "dtype": "float32", "participation": participation}
    ours = simulate(create(name, {"warm_up": 0, **never}), federation, 4, **chosen)
    plain = simulate("fedavg", federation, 4, **chosen)
    assert_same_bits(ours.received().params, plain.received().params)
    assert_same_bits(ours.memory, plain.memory)
    assert ours.method.rounds_before_it_acts() == 0


@pytest.mark.parametrize("name", NAMES)
def test_clusters_are_fedavg_among_their_members(name: str) -> None:
    """Each client receives the mean of the models that its cluster trained."""
    federation = small_federation()
    simulation = simulate(at_once(name), federation, 2)
    assert len(clusters(simulation)) > 1
    trained, received = model_part(simulation.memory), simulation.received().params
    sizes = [graph.num_nodes for graph in federation.clients]
    for members in clusters(simulation):
        total = sum(sizes[k] for k in members)
        for tensor, value in trained.items():
            mean = sum(value[k] * (sizes[k] / total) for k in members)
            for k in members:
                torch.testing.assert_close(received[tensor][k], mean)


@pytest.mark.parametrize("name", NAMES)
def test_singletons_train_as_local_from_the_split_on(name: str) -> None:
    federation = small_federation()
    alone = simulate(at_once(name, partition="singletons"), federation, 4)
    local = simulate("local", federation, 4)
    assert clusters(alone) == [[0], [1], [2], [3]]
    assert_same_bits(model_part(alone.memory), model_part(local.memory))
    assert_same_bits(alone.received().params, local.received().params)


def test_the_partition_changes_the_weights() -> None:
    federation = small_federation((17, 9, 24, 9, 12, 14))
    found = {
        partition: simulate(at_once("gcfl", partition=partition), federation, 3).received().params
        for partition in PARTITIONS
    }
    for first, second in itertools.combinations(found.values(), 2):
        assert not torch.equal(first["convs.0.weight"], second["convs.0.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_is_split_only_when_all_its_members_answered(name: str) -> None:
    method = at_once(name)
    state = method.init_server_state({"w": torch.zeros(1).double()}, clients=4)

    def round_of(state: dict[str, Tensor], *clients: int) -> dict[str, Tensor]:
        moved = {0: 1.0, 1: 1.1, 2: -1.0, 3: -1.1}
        sent = {"model/w": method.download(state, clients)["model/w"].clone()}
        sent["model/w"] += torch.tensor([[moved[k]] for k in clients]).double()
        sent["weight"] = torch.ones(len(clients)).double()
        if name == "gcfl+":
            sent["gradient_norm"] = torch.tensor([moved[k] for k in clients]).double()
        return method.aggregate(state, Uploads(clients, sent), rng())

    state = round_of(state, 0, 1, 2)
    assert state["cluster"].tolist() == [0, 0, 0, 0]
    state = round_of(state, 3, 1, 2, 0)
    assert state["cluster"].tolist() == [0, 0, 1, 1]
    before = method.download(state, range(4))["model/w"]
    state = round_of(state, 1)  # the other cluster keeps its model
    after = method.download(state, range(4))["model/w"]
    torch.testing.assert_close(after[2:], before[2:])
    torch.testing.assert_close(after[:2], before[:2] + 1.1)
    weights = method.collaboration(state)
    assert weights is not None
    assert weights.tolist() == [[0, 1, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2


def test_a_cluster_without_train_nodes_keeps_its_model() -> None:
    method = at_once("gcfl", partition="singletons", weighting="train")
    state = method.init_server_state({"w": torch.full((1,), 7.0).double()}, clients=3)
    sent = {"model/w": torch.tensor([[8.0], [6.0], [9.0]]), "weight": torch.tensor([2.0, 0, 1])}
    tensors = {name: value.double() for name, value in sent.items()}
    after = method.aggregate(state, Uploads((0, 1, 2), tensors), rng())
    assert method.download(after, range(3))["model/w"].tolist() == [[8.0], [7.0], [9.0]]


@pytest.mark.parametrize("name", NAMES)
def test_clients_of_different_clusters_keep_models_of_their_own(name: str) -> None:
    simulation = simulate(at_once(name), small_federation(), 1)
    assert not simulation.servers[0].one_model
    assert simulation.method.view == "received"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_split_resumes_to_the_bit(name: str) -> None:
    federation = small_federation((17, 9, 24, 9, 12, 14))
    chosen: dict[str, Any] = {"dropout": 0.4}
    straight = simulate(at_once(name), federation, 2, **chosen)
    saved = {n: t.clone() for n, t in straight.tensors().items()}
    resumed = simulate(at_once(name), federation, 0, **chosen)
    resumed.restore(saved, 2, ())
    for simulation in (straight, resumed):
        simulation.advance()
        simulation.advance()
    assert len(clusters(straight)) > 2
    assert_same_bits(straight.tensors(), resumed.tensors())


@pytest.mark.parametrize("name", NAMES)
def test_the_last_layer_stays_with_share_conv(name: str) -> None:
    simulation = simulate(at_once(name, share="conv"), small_federation(), 1)
    received, own = simulation.received().params, model_part(simulation.memory)
    assert torch.equal(received["convs.1.weight"], own["convs.1.weight"])
    assert not torch.equal(received["convs.0.weight"], own["convs.0.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_the_clusters(name: str) -> None:
    federation = small_federation((17, 9, 24, 9, 12))
    split = simulate(at_once(name), federation, 3)
    sizes = sorted(map(len, clusters(split)), reverse=True)
    (remark,) = split.servers[0].remarks()
    assert remark == f"{len(sizes)} clusters of {', '.join(map(str, sizes))} clients at the end"
    (remark,) = simulate(create(name), federation, 1).servers[0].remarks()
    assert "as in FedAvg" in remark


@pytest.mark.parametrize("check", METHOD_CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_properties_of_every_method_hold_where_clusters_are_split(name: str, check: str) -> None:
    METHOD_CHECKS[check](MethodCase(at_once(name)))


# Series of gradient norms ------------------------------------------------------------------------


def test_the_norm_is_that_of_each_clients_last_gradient() -> None:
    """Under SGD a step is -lr times the gradient, which the last two models show."""
    federation, steps = small_federation(), (1, 3, 2, 3)
    chosen: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    simulation = simulate("gcfl+", federation, 0, **chosen)
    received = simulation.download([range(4)])

    def after(counts: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        done = simulation.clients.train(received, simulation.memory, 0, counts)
        return model_part(done.memory), done.uploads

    last, sent = after(list(steps))
    for k, count in enumerate(steps):
        if count == 1:
            before = model_part(received)
        else:
            before, _ = after([count - 1] * 4)
        squares = sum(float((last[n][k] - before[n][k]).square().sum()) for n in last)
        assert sent["gradient_norm"][k].item() == pytest.approx(math.sqrt(squares) / 0.1)


def test_the_norm_leaves_out_what_stays_with_the_client() -> None:
    def sent(share: str) -> Tensor:
        simulation = simulate(create("gcfl+", {"share": share}), small_federation(), 0)
        return simulation.backend.train(range(4), [range(4)]).trained.uploads["gradient_norm"]

    assert (sent("conv") < sent("all")).all()


def test_on_samples_a_client_that_has_stopped_keeps_its_norm() -> None:
    simulation = simulate("gcfl+", small_federation(), 0, sample="4,4", batch=5)
    assert simulation.cohort.sampling is not None
    received = simulation.download([range(4)])

    def norms(*steps: int) -> Tensor:
        trained = simulation.clients.train(received, simulation.memory, 0, steps)
        return trained.uploads["gradient_norm"]

    once, thrice, mixed = norms(1, 1, 1, 1), norms(3, 3, 3, 3), norms(1, 3, 1, 3)
    torch.testing.assert_close(mixed, torch.stack([once[0], thrice[1], once[2], thrice[3]]))
    assert not torch.isclose(once, thrice).any()


def plus(length: int, **options: Any) -> Method:
    return create("gcfl+", {"warm_up": 0, "ratio": 1.0, "length": length, **options})


def course(method: Method, norms: list[list[float]]) -> list[list[int]]:
    """Return the clusters after rounds in which clients sent these norms, and moved apart."""
    clients = len(norms[0])
    state = method.init_server_state({"w": torch.zeros(1).double()}, clients)
    found = []
    for row in norms:
        start = method.download(state, range(clients))["model/w"]
        signs = torch.tensor([[(-1.0) ** k] for k in range(clients)]).double()
        sent = {"model/w": start + signs, "weight": torch.ones(clients).double()}
        sent["gradient_norm"] = torch.tensor(row).double()
        state = method.aggregate(state, Uploads(tuple(range(clients)), sent), rng())
        found.append(state["cluster"].tolist())
    return found


def test_series_decide_and_not_updates() -> None:
    """Clients 0 and 3 have one course of norms, 1 and 2 another; updates pair 0 with 2."""
    norms = [[1.0, 5.0, 5.0, 1.0], [1.0, 4.0, 4.5, 1.0], [2.0, 5.0, 5.0, 2.5]]
    assert course(plus(3), norms) == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
    updates = course(plus(3, series="updates"), norms)
    assert updates[-1] != [0, 1, 1, 0]
    assert plus(3).rounds_before_it_acts() == 2


def test_only_the_last_norms_count() -> None:
    norms = [[1.0, 1.0, 9.0, 9.0], [1.0, 5.0, 5.0, 1.0], [1.0, 5.0, 5.0, 1.0]]
    assert course(plus(2, warm_up=2), norms)[-1] == [0, 1, 1, 0]


def test_series_begin_anew_after_a_split() -> None:
    first, later = [1.0, 1.0, 1.0, 9.0], [1.0, 5.0, 1.0, 9.0]
    found = course(plus(2), [first, first, later, later])
    assert found[1] == found[2] == [0, 0, 0, 1]
    assert found[3] == [0, 1, 0, 2]


def test_standardised_series_are_compared_by_their_course() -> None:
    norms = [[1.0, 10.0, 1.0, 10.0], [2.0, 20.0, 1.5, 15.0], [1.0, 10.0, 2.0, 20.0]]
    assert course(plus(3), norms)[-1] == [0, 1, 0, 1]
    assert course(plus(3, standardise=True), norms)[-1] == [0, 0, 1, 1]


def test_a_series_has_at_least_one_norm() -> None:
    with pytest.raises(UserError, match="length"):
        create("gcfl+", {"length": 0})


def test_norms_of_updates_do_not_travel() -> None:
    simulation = simulate(create("gcfl+", {"series": "updates"}), small_federation(), 0)
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert set(sent) == set(
        simulate("gcfl", small_federation()).backend.train(range(4), [range(4)]).trained.uploads
    )


# Hyperparameters ---------------------------------------------------------------------------------

START: dict[str, Any] = {"warm_up": 1, "ratio": 1.0, "epsilon1": 100.0}  # splits from round 2 on
BASES: dict[str, dict[str, Any]] = {
    "ratio": {"epsilon1": 0.0},
    "absolute": {"criterion": "absolute", "ratio": 0.0},
    "never": {"ratio": 0.0},
    "never, absolute": {"criterion": "absolute", "epsilon1": 0.0},
    "singletons": {"partition": "singletons", "epsilon1": 0.0},
}
OTHERS: dict[str, list[Any]] = {
    "ratio": [0.0, 2.0],
    "epsilon1": [0.0, 100.0],
    "epsilon2": [1e6],
    "warm_up": [3],
    "length": [4],
    "standardise": [True],
}


def outcome(name: str, options: dict[str, Any]) -> Tensor:
    method = create(name, options)
    federation = small_federation((17, 9, 24, 9, 12, 14))
    simulation = simulate(method, federation, 4, optimizer="sgd", lr=0.5)
    return simulation.predict(simulation.received())


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("name", "field"), [(name, f) for name in NAMES for f in METHODS[name].hyperparameters()]
)
def test_a_hyperparameter_acts_or_is_said_not_to(name: str, field: str, base: str) -> None:
    start = {**START, **({"length": 3} if name == "gcfl+" else {}), **BASES[base]}
    choices = METHODS[name].hyperparameters()[field].metadata["choices"]
    usual = outcome(name, start)
    acts = any(
        not torch.equal(outcome(name, {**start, field: value}), usual)
        for value in (choices or OTHERS[field])
    )
    idle = create(name, start).without_effect()
    assert acts == (field not in idle)


@pytest.mark.parametrize("name", NAMES)
def test_the_form_of_the_paper(name: str) -> None:
    paper = create(name, {"paper": True})
    assert {n: getattr(paper, n) for n in ("share", "criterion", "partition")} == {
        "share": "conv",
        "criterion": "absolute",
        "partition": "mincut",
    }
    assert (paper.epsilon1, paper.epsilon2, paper.warm_up) == (0.01, 0.1, 20)
