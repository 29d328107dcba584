"""Differential privacy at real sites: nothing exact leaves, and every upload is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flower.federations import (
    Wires,
    coordinate,
    federation,
    plan_for,
    sites_of,
)
from polyphily.core.budget import Budget
from polyphily.core.method import METHODS
from polyphily.errors import UserError
from polyphily.flower.account import FILE, Account
from polyphily.flower.site import Site
from polyphily.flower.wire import PREPARE, ROUND, Parcel

pytest.importorskip("dp_accounting")

DP = "epsilon=50,delta=1e-5,clip=0.5"


def ask(site: Site, plan: dict[str, object], number: int, tensors: dict | None = None) -> Parcel:
    facts = {"kind": ROUND, "plan": plan, "round": number, "base": 0, "best": 0}
    return site.answer(Parcel(facts, tensors or {}))


def question(method: str, rounds: int = 3) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """A plan, and what the server sends to the first site in the first round."""
    plan = plan_for(federation(), method, dp=DP, rounds=rounds)
    return plan.to_json(), plan.server().download([0])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_and_tells_nothing_exact(method: str, tmp_path: Path) -> None:
    data = federation()
    replies: list[tuple[str, Parcel]] = []

    def listen(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        replies.append((str(asked.facts["kind"]), reply))
        return reply

    wires = Wires(sites_of(data, tmp_path), listen)
    summary = coordinate(plan_for(data, method, dp=DP), wires, tmp_path / "run", 3).go()
    for kind, reply in replies:
        told = {k for k, v in reply.facts.items() if _says_something(v)}
        expected = {"kind", "run", "round", "seconds"} | ({"counts"} if kind == PREPARE else set())
        assert told <= expected, f"{kind} tells {told - expected}"
        if kind == PREPARE:
            assert reply.facts["counts"] == [1, 1]
        if kind == ROUND:
            for tally in plan_for(data, method).server().counts():
                assert tally not in reply.tensors or (reply.tensors[tally] == 1).all()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    spent = [json.loads(line)["epsilon"] for line in lines]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(50) == summary["dp"]["epsilon"]


def _says_something(value: object) -> bool:
    """Whether a fact is more than nothing: null scores say nothing."""
    if isinstance(value, list):
        return any(map(_says_something, value))
    return value not in (None, "")


def test_noise_cannot_be_drawn_again_from_what_the_server_knows(tmp_path: Path) -> None:
    plan, down = question("fedavg")
    first, second = (
        ask(sites_of(federation(), tmp_path / str(k))["client-0"], plan, 1, down) for k in range(2)
    )
    deviation = Budget(50, 1e-5).multiplier(3)  # twice the clip of 0.5
    name = "model/convs.0.weight"
    gap = first.tensors[name] - second.tensors[name]
    assert gap.std().item() == pytest.approx(2**0.5 * deviation, rel=0.3)


def test_the_same_question_gets_the_same_answer_and_costs_once(tmp_path: Path) -> None:
    plan, down = question("fedavg")
    site = sites_of(federation(), tmp_path)["client-0"]
    first = ask(site, plan, 1, down)
    again = ask(sites_of(federation(), tmp_path)["client-0"], plan, 1, down)  # after a restart
    assert all(torch.equal(t, again.tensors[n]) for n, t in first.tensors.items())
    assert len(Account(tmp_path / "client-0" / FILE).uploads()) == 1
    other = ask(site, plan, 1, {n: t + 1e-3 for n, t in down.items()})
    assert not torch.equal(other.tensors["model/convs.0.bias"], first.tensors["model/convs.0.bias"])
    assert len(Account(tmp_path / "client-0" / FILE).uploads()) == 2


def test_a_site_makes_no_more_uploads_than_the_noise_was_made_for(tmp_path: Path) -> None:
    plan, down = question("fedavg", rounds=2)
    site = sites_of(federation(), tmp_path)["client-0"]
    for shift in range(2):
        ask(site, plan, 1, {n: t + shift for n, t in down.items()})
    with pytest.raises(UserError, match="budget of this run is spent: 2 uploads"):
        ask(site, plan, 2, down)


@pytest.mark.parametrize("offered", ["off", "epsilon=9", "epsilon=8,delta=1e-3"])
def test_a_site_can_insist(offered: str, tmp_path: Path) -> None:
    data = federation()
    site = sites_of(data, tmp_path)["client-0"]
    site.dp = Budget(8.0, 1e-5)
    asked = {"kind": PREPARE, "plan": plan_for(data, "fedavg", dp=offered).to_json()}
    with pytest.raises(UserError, match="this site takes part with epsilon at most 8"):
        site.answer(Parcel(asked))
    good = {"kind": PREPARE, "plan": plan_for(data, "fedavg", dp="epsilon=7").to_json()}
    assert site.answer(Parcel(good)).facts["counts"] == [1, 1]
