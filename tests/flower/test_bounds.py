"""Bounds on uploads and on their aggregate: gross attacks are refused, honest sites never are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower.federations import Twist, Wires, coordinate, federation, plan_for, sites_of
from polyphily.core.messages import Message
from polyphily.core.method import METHODS
from polyphily.errors import TrainingError, UserError
from polyphily.flower.bounds import drowning
from polyphily.flower.deployment import make_policy
from polyphily.flower.plan import Plan
from polyphily.flower.wire import PREPARE, ROUND, Parcel
from polyphily.graphs.loading import Federation, load

BAD = "client-1"


def scaled(asked: Parcel, reply: Parcel, factor: float) -> Parcel:
    """An upload r + factor (u - r), where r is what the site received."""
    changed = dict(reply.tensors)
    for name, received in asked.tensors.items():
        changed[name] = received + factor * (changed[name] - received)
    return Parcel(reply.facts, changed)


def weighted(reply: Parcel, weight: float) -> Parcel:
    return Parcel(reply.facts, {**reply.tensors, "weight": torch.tensor([weight])})


ATTACKS: dict[str, tuple[Callable[[Parcel, Parcel], Parcel], str]] = {
    "change times 1e6": (lambda asked, reply: scaled(asked, reply, 1e6), "max_update"),
    "upload times 1e6": (
        lambda _, reply: Parcel(
            reply.facts,
            {n: t * (1e6 if n.startswith("model/") else 1) for n, t in reply.tensors.items()},
        ),
        "max_update",
    ),
    "upload times 1e38": (
        lambda _, reply: Parcel(
            reply.facts,
            {
                n: torch.nan_to_num(t * (1e38 if n.startswith("model/") else 1))
                for n, t in reply.tensors.items()
            },
        ),
        "max_update",
    ),
    "weight below zero": (lambda _, reply: weighted(reply, -120.0), "count below zero"),
    "weight 1e12": (lambda _, reply: weighted(reply, 1e12), "above 1e+09"),
    "weight 1e8": (lambda _, reply: weighted(reply, 1e8), "max_weight"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_upload_out_of_bounds_is_refused_by_name(attack: str, tmp_path: Path) -> None:
    """The models are those of a run in which the site was silent."""
    change, words = ATTACKS[attack]
    data = federation()
    plan = plan_for(data, "fedavg")

    def at_two(make: Callable[[Parcel, Parcel], Parcel | None]) -> Twist:
        def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
            if name != BAD or asked.facts["kind"] != ROUND or asked.facts["round"] != 2:
                return reply
            return make(asked, reply)

        return twist

    runs = {}
    for case, make in {"bad": change, "silent": lambda *_: None}.items():
        wires = Wires(sites_of(data, tmp_path / case), at_two(make))
        coordinator = coordinate(plan, wires, tmp_path / case / "run", 2)
        runs[case] = coordinator.go(), coordinator.server.state
    summary, state = runs["bad"]
    (trouble,) = summary["troubles"]
    assert (trouble["site"], trouble["round"], trouble["what"]) == (BAD, 2, "refused")
    assert words in trouble["reason"]
    assert all(torch.equal(value, runs["silent"][1][name]) for name, value in state.items())


def only_in(number: int, change: Callable[[Parcel, Parcel], Parcel]) -> Twist:
    """A site that changes its upload of a round."""

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        hit = name == BAD and asked.facts["kind"] == ROUND and asked.facts["round"] == number
        return change(asked, reply) if hit else reply

    return twist


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("number", [1, 3])
def test_small_federations_and_first_rounds_are_protected_too(
    clients: int, number: int, tmp_path: Path
) -> None:
    data = federation(clients)
    attack = only_in(number, lambda asked, reply: scaled(asked, reply, 1e6))
    wires = Wires(sites_of(data, tmp_path), attack)
    summary = coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run").go()
    assert [(t["site"], t["round"]) for t in summary["troubles"]] == [(BAD, number)]


@pytest.mark.parametrize("clients", [2, 3])
def test_a_site_that_changes_nothing_makes_nobody_else_suspicious(
    clients: int, tmp_path: Path
) -> None:
    """Tiny updates and weights must not make honest ones look large."""
    data = federation(clients)

    def tiny(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if name != BAD or asked.facts["kind"] != ROUND:
            return reply
        return weighted(scaled(asked, reply, 1e-9), 1e-9)

    wires = Wires(sites_of(data, tmp_path), tiny)
    summary = coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run").go()
    assert summary["troubles"] == []


def unlike(clients: int) -> Federation:
    """A federation of one large client and small ones."""
    large = load("csbm:nodes=1200,features=8,gap=0.6", clients=1).clients[0]
    small = load("csbm:nodes=20-30,features=8,gap=0.6", clients=clients)
    named = replace(large, name=small.clients[0].name)
    return replace(small, clients=(named, *small.clients[1:]))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_honest_sites_that_differ_are_never_refused(method: str, tmp_path: Path) -> None:
    """One site has 40 times as many nodes as the others, in federations of two and four."""
    for clients in (2, 4):
        data = unlike(clients)
        wires = Wires(sites_of(data, tmp_path / str(clients)))
        plan = plan_for(data, method)
        summary = coordinate(plan, wires, tmp_path / f"run-{clients}").go()
        assert summary["troubles"] == []


@pytest.mark.parametrize("clients", [2, 3])
def test_noise_of_differential_privacy_is_within_bounds(clients: int, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    data = federation(clients)
    plan = plan_for(data, "fedavg", dp="epsilon=0.1")
    summary = coordinate(plan, Wires(sites_of(data, tmp_path)), tmp_path / "run", clients).go()
    assert summary["troubles"] == []


@pytest.mark.parametrize("name", ["max_update", "max_weight"])
def test_bounds_can_be_off(name: str, tmp_path: Path) -> None:
    data = federation()
    policy = make_policy({"min_sites": 2, name: "off"}, 3)
    assert getattr(policy, name) == math.inf
    change = {"max_update": ATTACKS["change times 1e6"], "max_weight": ATTACKS["weight 1e8"]}[name]
    wires = Wires(sites_of(data, tmp_path), only_in(2, change[0]))
    limits = {name: getattr(policy, name)}
    run = coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run", 2, **limits)
    assert run.go()["troubles"] == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"max_update": "of"}, "max_update must be a number above 0 or \"off\", not 'of'"),
        ({"max_weight": -1}, "max_weight must be a number above 0"),
        ({"grace": "off"}, "grace must be a number above 0, not 'off'"),
        ({"timeout": True}, "timeout must be a number above 0"),
        ({"misses": 0}, "misses must be a whole number, 1 or more"),
        ({"repeats": 1.5}, "repeats must be a whole number, 0 or more"),
    ],
)
def test_limits_are_checked(entries: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_policy({"min_sites": 1, **entries}, 3)


def test_the_number_of_scored_nodes_is_bounded(tmp_path: Path) -> None:
    """It weighs a site's scores in the choice of the best round."""
    data = federation()

    def boast(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if name != BAD or asked.facts["kind"] != PREPARE:
            return reply
        return Parcel({**reply.facts, "counts": [1e8, 1e8]})

    wires = Wires(sites_of(data, tmp_path), boast)
    coordinator = coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run", 2)
    (trouble,) = coordinator.go()["troubles"]
    assert (trouble["site"], trouble["what"]) == (BAD, "refused")
    assert coordinator.tracker.counts[1].tolist() == [0.0, 0.0]


def prototypes_of_1e38(asked: Parcel, reply: Parcel) -> Parcel:
    return Parcel(
        reply.facts,
        {
            "prototypes": torch.full_like(reply.tensors["prototypes"], 3e38),
            "counts": torch.full_like(reply.tensors["counts"], 1e3),
        },
    )


def test_a_bad_aggregate_is_not_kept_and_its_author_is_found(tmp_path: Path) -> None:
    """Between two sites a statistic has nothing to be compared with; the aggregate overflows."""
    data = federation(2)
    plan = plan_for(data, "fedproto")
    wires = Wires(sites_of(data, tmp_path), only_in(2, prototypes_of_1e38))
    coordinator = coordinate(plan, wires, tmp_path / "run", 1)
    (trouble,) = coordinator.go()["troubles"]
    assert (trouble["site"], trouble["round"], trouble["what"]) == (BAD, 2, "refused")
    assert "aggregate is unsound" in trouble["reason"]
    assert all(bool(torch.isfinite(value).all()) for value in coordinator.server.state.values())


def test_a_bad_aggregate_that_cannot_be_mended_ends_with_the_last_good_state(
    tmp_path: Path,
) -> None:
    """Resumed without the attack, the run reaches the models that it would have had."""
    data = federation(2)
    plan = plan_for(data, "fedproto")
    wires = Wires(sites_of(data, tmp_path / "bad"), only_in(2, prototypes_of_1e38))
    with pytest.raises(TrainingError, match=r"unsound.*last good model is that of round 1"):
        coordinate(plan, wires, tmp_path / "bad" / "run", 2).go()
    resumed = coordinate(plan, Wires(sites_of(data, tmp_path / "bad")), tmp_path / "bad" / "run", 2)
    resumed.go()
    whole = coordinate(plan, Wires(sites_of(data, tmp_path / "b")), tmp_path / "b" / "run", 2)
    whole.go()
    for name, value in whole.server.state.items():
        assert torch.equal(resumed.server.state[name], value)


def test_the_sum_of_secure_aggregation_is_bounded(tmp_path: Path) -> None:
    """The server sees no single upload, so that the mean is all that it can check."""
    data = federation()
    plan = plan_for(data, "fedavg", secure_aggregation=True)
    sites = sites_of(data, tmp_path)
    train = type(sites[BAD])._masked

    class Hostile(type(sites[BAD])):  # type: ignore[misc]
        def _masked(self, plan: Plan, facts: Any, upload: Message, masks: Any) -> Parcel:
            large = {n: t * (1e3 if n.startswith("model/") else 1) for n, t in upload.items()}
            return train(self, plan, facts, large, masks)

    sites[BAD].__class__ = Hostile
    with pytest.raises(TrainingError, match="change of the mean model"):
        coordinate(plan, Wires(sites), tmp_path / "run", 3).go()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_half_of_the_sites_are_never_above_the_others(values: list[float]) -> None:
    found = drowning({str(k): value for k, value in enumerate(values)}, 2.0)
    assert len(found) <= len(values) / 2
    assert all(
        sum(own > value for value in values) * 2 >= len(values) - 1
        for own in (values[int(k)] for k in found)
    )
