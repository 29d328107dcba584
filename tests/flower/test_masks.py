"""Secure aggregation between a server and sites, all in this process: the sum and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("flwr")

from flower.federations import Wires, coordinate, federation, plan_for, settings_for, sites_of
from polyphily.core.declarations import example_sizes
from polyphily.core.messages import Contract
from polyphily.core.method import METHODS, create
from polyphily.errors import TrainingError, UserError
from polyphily.flower.account import FILE, Account
from polyphily.flower.deployment import Deployment
from polyphily.flower.joining import Answer
from polyphily.flower.masks import MASKED, to_numbers, to_uploads
from polyphily.flower.plan import Plan
from polyphily.flower.site_files import SiteState
from polyphily.flower.wire import CONFIRM, FINISH, KEYS, REVEAL, ROUND, SHARE, Parcel, WireError
from polyphily.privacy.secure_aggregation import STEP, encode
from polyphily.runs.models import LAST, SavedModel
from polyphily.runs.run import Execution

SUMMABLE = [
    n for n in sorted(METHODS) if not create(n).reason_against_sums(example_sizes(create(n)))
]
STILL = {"dropout": 0.0, "input_dropout": 0.0}
Moment = tuple[str, str, int]
"""A site, a kind of message, a round."""


def masked_plan(clients: int = 3, method: str = "fedavg", **given: object) -> Plan:
    return plan_for(federation(clients), method, **{**STILL, "secure_aggregation": True, **given})


def twisted(what: Callable[[Parcel], Parcel | Answer | None], *moments: Moment) -> Any:
    """Something happens to the replies of some moments."""

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | Answer | None:
        at = (name, asked.facts["kind"], asked.facts.get("round"))
        return what(reply) if at in moments else reply

    return twist


def lost(_: Parcel) -> None:
    return None


def kinds(wires: Wires, number: int, site: str = "client-0") -> list[str]:
    """What a site was asked in a round."""
    return [
        str(asked.facts["kind"])
        for name, asked in wires.asked
        if name == site and asked.facts.get("round") == number
    ]


def last_models(place: Path, sites: Wires) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: SavedModel.load(SiteState(place / name, "a-run").model(LAST)).params
        for name in sites.sites
    }


def assert_like_plain(
    place: Path, plan: Plan, wires: Wires, gone: set[tuple[str, int]], within: float = 1e-6
) -> None:
    """The sites end with the models of a run without masks in which the same answers were lost."""
    data = federation(len(plan.sites))
    bare = replace(plan, settings=replace(plan.settings, secure_aggregation=False))
    twist = twisted(lost, *[(name, ROUND, number) for name, number in gone])
    other = Wires(sites_of(data, place / "plain"), twist)
    coordinate(bare, other, place / "plain" / "run").go()
    ours, theirs = last_models(place, wires), last_models(place / "plain", other)
    for name, model in ours.items():
        for key, value in model.items():
            torch.testing.assert_close(value, theirs[name][key], rtol=0, atol=within)


# The same result -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SUMMABLE)
def test_a_masked_run_ends_where_a_plain_one_does(method: str, tmp_path: Path) -> None:
    plan = masked_plan(method=method)
    wires = Wires(sites_of(federation(), tmp_path))
    summary = coordinate(plan, wires, tmp_path / "run", 3).go()
    assert summary["troubles"] == []
    assert summary["secure_aggregation"] == {
        "step": STEP,
        "error_bound_of_sums": 3 * STEP / 2,
        "threshold": 3,
        "colluding_clients_tolerated": 1,
    }
    # Scaffold's control variates are changes divided by the learning rate: so are their errors.
    assert_like_plain(tmp_path, plan, wires, set(), 1e-5 if method == "scaffold" else 1e-6)


def test_one_aggregate_is_within_the_bound(tmp_path: Path) -> None:
    """Weights of one each: no entry of the mean is off by more than half a step."""
    states = []
    for secure in (False, True):
        place = tmp_path / str(secure)
        plan = masked_plan(rounds=1, secure_aggregation=secure, dtype="float64")
        plan = replace(plan, hyperparameters={"weighting": "uniform"})
        own = coordinate(plan, Wires(sites_of(federation(), place)), place / "run", 3)
        own.go()
        states.append(own.server.state)
    for name, value in states[0].items():
        gap = float((value - states[1][name]).abs().max())
        assert gap <= STEP / 2 * (1 + 1e-6)
    assert any(not torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_as_many_bytes_as_in_a_simulation(tmp_path: Path) -> None:
    plan = masked_plan(rounds=2)
    summary = coordinate(plan, Wires(sites_of(federation(), tmp_path)), tmp_path / "run", 3).go()
    chosen = settings_for("fedavg", rounds=2, secure_aggregation=True, **STILL)
    expected = Execution(create("fedavg"), [federation()], chosen, None).go(None).summary
    ours, theirs = summary["bytes_up_per_round"], expected["bytes_up_per_round"]
    assert ours == pytest.approx(theirs, rel=0.01)  # letters are numbered in decimals
    assert summary["secure_aggregation"] == expected["secure_aggregation"]


def test_a_round_takes_two_exchanges_more(tmp_path: Path) -> None:
    """Keys and letters travel ahead while nobody is missing, and not beyond the last round."""
    wires = Wires(sites_of(federation(), tmp_path))
    coordinate(masked_plan(), wires, tmp_path / "run", 3).go()
    assert kinds(wires, 1) == [KEYS, SHARE, ROUND, CONFIRM, REVEAL]
    assert kinds(wires, 2) == [ROUND, CONFIRM, REVEAL]
    assert kinds(wires, 3) == [ROUND, CONFIRM, REVEAL, FINISH, "close"]
    (last,) = [
        a for n, a in wires.asked
        if n == "client-0" and (a.facts["kind"], a.facts.get("round")) == (ROUND, 3)
    ]  # fmt: skip
    assert "then" not in last.facts["masks"]


def test_with_noise_too(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    plan = masked_plan(dp="epsilon=50")
    summary = coordinate(plan, Wires(sites_of(federation(), tmp_path)), tmp_path / "run", 3).go()
    assert summary["dp"]["epsilon"] == pytest.approx(50)
    for site in plan.sites:
        sent = Account(tmp_path / site / FILE).uploads()
        assert len(sent) == 3


def test_a_repeated_round_under_noise_masks_the_same_upload_anew(tmp_path: Path) -> None:
    """The second attempt costs no privacy: it is the same upload, under other masks."""
    pytest.importorskip("dp_accounting")
    answers: list[np.ndarray] = []
    tries = []

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        if (asked.facts["kind"], asked.facts.get("round")) != (ROUND, 2):
            return reply
        if name == "client-0":
            answers.append(reply.tensors[MASKED].numpy())
        if name == "client-2":
            tries.append(name)
            return None if len(tries) == 1 else reply
        return reply

    wires = Wires(sites_of(federation(), tmp_path), twist)
    coordinate(masked_plan(dp="epsilon=50"), wires, tmp_path / "run", 3).go()
    first, second = answers
    assert looks_random((first - second).view(np.uint64)[0])
    sent = Account(tmp_path / "client-0" / FILE).uploads()
    assert len(sent) == 3


# What the server sees --------------------------------------------------------------------------


def looks_random(numbers: np.ndarray) -> bool:
    """Whether the numbers could be even draws from all of 64 bits."""
    return bool(stats.kstest(numbers / 2.0**64, "uniform").pvalue > 1e-6)


def test_what_arrives_is_not_the_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are noise; the numbers beneath them, caught at the site, are not."""
    from polyphily.flower import masks

    beneath: list[np.ndarray] = []
    arrived: list[np.ndarray] = []

    def caught(*arguments: Any) -> np.ndarray:
        beneath.append(to_numbers(*arguments))
        return beneath[-1]

    def listen(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if asked.facts["kind"] == ROUND:
            assert reply.tensors.keys() == {MASKED}
            arrived.append(reply.tensors[MASKED].numpy().view(np.uint64)[0])
        return reply

    monkeypatch.setattr(masks, "to_numbers", caught)
    wires = Wires(sites_of(federation(), tmp_path), listen)
    coordinate(masked_plan(hidden=64), wires, tmp_path / "run", 3).go()
    assert len(arrived) == len(beneath) == 9
    for plain, masked in zip(beneath, arrived, strict=True):
        assert not (plain == masked).any()
        assert not looks_random(plain)
        assert looks_random(masked)
        assert looks_random(masked - plain)
    for one, other in zip(arrived, arrived[3:], strict=False):
        assert looks_random(one - other)


def test_nothing_else_leaves_a_site(tmp_path: Path) -> None:
    told: dict[str, set[str]] = {}

    def listen(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        told.setdefault(str(asked.facts["kind"]), set()).update(reply.facts)
        return reply

    wires = Wires(sites_of(federation(), tmp_path), listen)
    coordinate(masked_plan(), wires, tmp_path / "run", 3).go()
    always = {"kind", "run", "round", "seconds", "attempt"}
    assert told[KEYS] == always | {"keys"}
    assert told[SHARE] == always | {"letters"}
    assert told[ROUND] == always | {"keys", "note", "loss", "trained", "received"}
    assert told[CONFIRM] == always | {"signature"}
    assert told[REVEAL] == always | {"shares", "letters"}


# Sites that drop out ---------------------------------------------------------------------------


def test_a_site_that_drops_out_after_sharing_is_survived(tmp_path: Path) -> None:
    wires = Wires(sites_of(federation(4), tmp_path), twisted(lost, ("client-1", ROUND, 2)))
    plan = masked_plan(4)
    summary = coordinate(plan, wires, tmp_path / "run", 3).go()
    (trouble,) = summary["troubles"]
    assert (trouble["site"], trouble["round"], trouble["what"]) == ("client-1", 2, "late")
    assert "took its masks off" in trouble["reason"]
    assert kinds(wires, 2, "client-1") == [ROUND]
    again = [KEYS, SHARE, ROUND, CONFIRM, REVEAL, FINISH, "close"]
    assert kinds(wires, 3) == again, "not ahead any more"
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert record["failed"] == [1]
    assert_like_plain(tmp_path, plan, wires, {("client-1", 2)})


@pytest.mark.parametrize("kind", [KEYS, SHARE])
def test_a_site_that_drops_out_before_is_no_party(kind: str, tmp_path: Path) -> None:
    """Four sites: three are left to hide among."""
    wires = Wires(sites_of(federation(4), tmp_path), twisted(lost, ("client-3", kind, 1)))
    plan = masked_plan(4)
    (trouble,) = coordinate(plan, wires, tmp_path / "run", 3).go()["troubles"]
    assert (trouble["site"], trouble["what"]) == ("client-3", "late")
    assert trouble["reason"].endswith("before it shared keys")
    assert ROUND not in kinds(wires, 1, "client-3")
    assert_like_plain(tmp_path, plan, wires, {("client-3", 1)})


@pytest.mark.parametrize("kind", [CONFIRM, REVEAL])
def test_a_site_that_does_not_reveal_is_in_the_sum(kind: str, tmp_path: Path) -> None:
    wires = Wires(sites_of(federation(4), tmp_path), twisted(lost, ("client-1", kind, 2)))
    plan = masked_plan(4)
    (trouble,) = coordinate(plan, wires, tmp_path / "run", 3).go()["troubles"]
    assert "its numbers are in the sum" in trouble["reason"]
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert record["failed"] == []
    assert_like_plain(tmp_path, plan, wires, set())


def test_a_site_that_was_restarted_is_out_for_a_round(tmp_path: Path) -> None:
    """Its keys were in memory only; it is back with new ones in the round after."""
    data = federation(4)
    sites = sites_of(data, tmp_path)

    class Restarting(Wires):
        def ask(self, messages, timeout):  # type: ignore[no-untyped-def]
            facts = next(iter(messages.values())).facts
            if (facts["kind"], facts.get("round")) == (ROUND, 2):
                old = sites["client-1"]
                self.sites["client-1"] = type(old)(
                    old.name, old.graph, old.folder, identity=old.identity
                )
            yield from super().ask(messages, timeout)

    class Failing(Wording, Restarting):
        pass

    wires = Failing(sites)
    plan = masked_plan(4)
    (trouble,) = coordinate(plan, wires, tmp_path / "run", 3).go()["troubles"]
    assert (trouble["site"], trouble["round"], trouble["what"]) == ("client-1", 2, "refused")
    assert "restarted" in trouble["reason"]
    again = [KEYS, SHARE, ROUND, CONFIRM, REVEAL, FINISH, "close"]
    assert kinds(wires, 3, "client-1") == again
    assert_like_plain(tmp_path, plan, wires, {("client-1", 2)})


def test_too_few_repeat_the_round_with_everybody(tmp_path: Path) -> None:
    """Two of three are lost once: below the threshold, and nothing is uncovered of that attempt."""
    tries: list[str] = []

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        if (asked.facts["kind"], asked.facts.get("round")) == (ROUND, 2) and name != "client-0":
            tries.append(name)
            return None if len(tries) <= 2 else reply
        return reply

    wires = Wires(sites_of(federation(), tmp_path), twist)
    plan = masked_plan()
    summary = coordinate(plan, wires, tmp_path / "run", 1).go()
    assert summary["troubles"] == []
    assert kinds(wires, 2) == [ROUND, KEYS, SHARE, ROUND, CONFIRM, REVEAL]
    assert_like_plain(tmp_path, plan, wires, set())


def test_two_sites_are_no_crowd(tmp_path: Path) -> None:
    """One of three is gone for good: the run ends with the last good model, and says why."""
    moments = [("client-2", kind, 2) for kind in (KEYS, ROUND)]
    wires = Wires(sites_of(federation(), tmp_path), twisted(lost, *moments))
    with pytest.raises(TrainingError, match=r"2 sites exchanged keys, 3 are needed.* of round 1"):
        coordinate(masked_plan(), wires, tmp_path / "run", 3).go()
    assert kinds(wires, 2) == [ROUND, KEYS]
    late = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (late["event"], late["site"]) == ("late", "client-2")


def test_a_killed_server_begins_with_new_keys(tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    def cut(reply: Parcel) -> Parcel:
        raise Cut

    plan, sites = masked_plan(), sites_of(federation(), tmp_path)
    wires = Wires(sites, twisted(cut, ("client-2", REVEAL, 2)))
    with pytest.raises(Cut):
        coordinate(plan, wires, tmp_path / "run", 3).go()
    wires = Wires(sites)  # the sites were not killed, and remember
    assert coordinate(plan, wires, tmp_path / "run", 3).go()["troubles"] == []
    assert kinds(wires, 2) == [KEYS, SHARE, ROUND, CONFIRM, REVEAL]
    assert_like_plain(tmp_path, plan, wires, set())


class Wording(Wires):
    """Errors of a site come back as words, as they do over Flower."""

    def ask(self, messages, timeout):  # type: ignore[no-untyped-def]
        for name, message in messages.items():
            try:
                yield from super().ask({name: message}, timeout)
            except WireError as error:
                yield name, Answer(error=str(error))


def test_a_revealed_round_is_not_summed_again_without_a_site(tmp_path: Path) -> None:
    """The server is killed before it stores the sum; then a site is away; then it is back."""

    class Cut(Exception):
        pass

    def cut(reply: Parcel) -> Parcel:
        raise Cut

    plan, sites = masked_plan(4), sites_of(federation(4), tmp_path)
    cutting = Wires(sites, twisted(cut, ("client-2", REVEAL, 2)))
    with pytest.raises(Cut):
        coordinate(plan, cutting, tmp_path / "run", 3).go()
    away = Wording(sites, twisted(lost, ("client-3", ROUND, 2)))
    with pytest.raises(TrainingError, match=r"round 2 was summed over client-0, client-1, .*-3 be"):
        coordinate(plan, away, tmp_path / "run", 3).go()
    wires = Wires(sites)
    assert coordinate(plan, wires, tmp_path / "run", 3).go()["rounds"] == 3
    assert_like_plain(tmp_path, plan, wires, set())


# Sites that misbehave --------------------------------------------------------------------------


def with_tensor(tensor: torch.Tensor) -> Callable[[Parcel], Parcel]:
    return lambda reply: Parcel(reply.facts, {MASKED: tensor})


BAD = {
    "is not": with_tensor(torch.zeros(1, 3, dtype=torch.int64)),
    "of 64 bits": with_tensor(torch.zeros(1, 3)),
    "other tensors": lambda reply: Parcel(reply.facts, {**reply.tensors, "more": torch.zeros(1)}),
    "another attempt": lambda reply: Parcel({**reply.facts, "attempt": "x"}, reply.tensors),
    "a public key that cannot be read": lambda reply: Parcel(
        {**reply.facts, "keys": {"mask": "AAAA", "post": "AAAA"}}, reply.tensors
    ),
}


@pytest.mark.parametrize("words", sorted(BAD))
def test_answers_that_cannot_be_are_refused_by_name(words: str, tmp_path: Path) -> None:
    twist = twisted(BAD[words], ("client-1", ROUND, 2))
    wires = Wires(sites_of(federation(4), tmp_path), twist)
    plan = masked_plan(4)
    (trouble,) = coordinate(plan, wires, tmp_path / "run", 3).go()["troubles"]
    assert (trouble["site"], trouble["what"]) == ("client-1", "refused")
    assert words in trouble["reason"]
    assert_like_plain(tmp_path, plan, wires, {("client-1", 2)})


def test_noise_for_an_answer_ends_the_run_and_not_with_a_wrong_model(tmp_path: Path) -> None:
    """Whose it was cannot be told; that it was not a model is plain to see in the sum."""

    def noise(reply: Parcel) -> Parcel:
        rng = np.random.default_rng(0)
        shape = reply.tensors[MASKED].shape
        drawn = rng.integers(-(2**63), 2**63, size=tuple(shape), dtype=np.int64)
        return Parcel(reply.facts, {MASKED: torch.from_numpy(drawn)})

    wires = Wires(sites_of(federation(), tmp_path), twisted(noise, ("client-1", ROUND, 2)))
    own = coordinate(masked_plan(), wires, tmp_path / "run", 2)
    with pytest.raises(TrainingError, match=r"not one of models.* is that of round 1"):
        own.go()
    assert kinds(wires, 2) == [ROUND, CONFIRM, REVEAL], "and no second sum of the round"
    assert all(float(value.abs().max()) < 100 for value in own.server.state.values())


def test_shares_that_do_not_fit_end_the_attempt(tmp_path: Path) -> None:
    tries: list[int] = []

    def wrong(reply: Parcel) -> Parcel:
        tries.append(1)
        shares = dict.fromkeys(reply.facts["shares"], "AAAAAAAA")
        return Parcel({**reply.facts, "shares": shares}) if len(tries) == 1 else reply

    wires = Wires(sites_of(federation(), tmp_path), twisted(wrong, ("client-0", REVEAL, 2)))
    plan = masked_plan()
    coordinate(plan, wires, tmp_path / "run", 3).go()
    again = [KEYS, SHARE, ROUND, CONFIRM, REVEAL]
    assert kinds(wires, 2) == [ROUND, CONFIRM, REVEAL, *again]
    assert_like_plain(tmp_path, plan, wires, set())


@pytest.mark.parametrize("tally", [0.0, -1.0])
def test_a_sum_of_nodes_must_be_above_zero(tally: float) -> None:
    contract = Contract({"model/w": (2,), "n": ()}, torch.float32)
    averaged = {"model/w": "n"}
    good = encode(np.array([6.0, 12.0, 3.0]), 3)
    found = to_uploads(good, contract, averaged, ["n"])
    assert found["model/w"].tolist() == [[2.0, 4.0]]
    with pytest.raises(WireError, match="not above zero"):
        to_uploads(encode(np.array([6.0, 12.0, tally]), 3), contract, averaged, ["n"])


# A server that misbehaves ----------------------------------------------------------------------


def keys_of(plan: Plan, sites: dict[str, Any], attempt: str) -> dict[str, Any]:
    asked = Parcel({"kind": KEYS, "plan": plan.to_json(), "round": 1, "attempt": attempt})
    return {str(k): sites[name].answer(asked).facts["keys"] for k, name in enumerate(plan.sites)}


def share(plan: Plan, keys: dict[str, Any], attempt: str = "a") -> Parcel:
    facts = {"kind": SHARE, "plan": plan.to_json(), "round": 1, "attempt": attempt, "keys": keys}
    return Parcel(facts)


def test_a_site_does_not_take_keys_that_the_server_made_up(tmp_path: Path) -> None:
    """A server that put itself in the middle of every pair would uncover each answer."""
    plan, sites = masked_plan(), sites_of(federation(), tmp_path / "a")
    keys = keys_of(plan, sites, "a")
    false = keys_of(plan, sites_of(federation(), tmp_path / "b"), "a")
    with pytest.raises(WireError, match="passes on as 'client-1' are not signed"):
        sites["client-0"].answer(share(plan, {**keys, "1": false["1"]}))


@pytest.mark.parametrize("change", ["attempt", "run", "site"])
def test_a_signature_is_good_for_one_site_in_one_attempt(change: str, tmp_path: Path) -> None:
    plan, sites = masked_plan(), sites_of(federation(), tmp_path)
    keys = keys_of(plan, sites, "a")
    if change == "site":
        with pytest.raises(WireError, match="passes on as 'client-1' are not signed"):
            sites["client-0"].answer(share(plan, {**keys, "1": keys["2"]}))
        return
    other = replace(plan, run="another") if change == "run" else plan
    later = keys_of(other, sites, "b")
    with pytest.raises(WireError, match="passes on as 'client-1' are not signed"):
        sites["client-0"].answer(share(other, {**later, "1": keys["1"]}, "b"))


def test_a_site_makes_keys_once_for_an_attempt(tmp_path: Path) -> None:
    plan, sites = masked_plan(), sites_of(federation(), tmp_path)
    keys_of(plan, sites, "a")
    with pytest.raises(WireError, match="twice"):
        keys_of(plan, sites, "a")


def test_a_site_hides_among_three_or_not_at_all(tmp_path: Path) -> None:
    plan, sites = masked_plan(), sites_of(federation(), tmp_path)
    keys = keys_of(plan, sites, "a")
    with pytest.raises(WireError, match="2 sites take part, 3 are needed"):
        sites["client-0"].answer(share(plan, {k: keys[k] for k in ("0", "1")}))


def test_a_site_sends_nothing_bare_in_a_masked_run(tmp_path: Path) -> None:
    plan, sites = masked_plan(), sites_of(federation(), tmp_path)
    network = plan.network()
    down = {f"model/{n}": p.detach().clone() for n, p in network.named_parameters()}
    facts = {"kind": ROUND, "plan": plan.to_json(), "round": 1, "base": 0, "best": 0}
    with pytest.raises(WireError, match="without masks"):
        sites["client-0"].answer(Parcel(facts, down))


def test_a_site_can_insist(tmp_path: Path) -> None:
    site = sites_of(federation(), tmp_path)["client-0"]
    site.secure = True
    bare = masked_plan(secure_aggregation=False)
    with pytest.raises(UserError, match="with secure aggregation only"):
        site.answer(Parcel({"kind": "prepare", "plan": bare.to_json()}))
    assert (
        "counts" in site.answer(Parcel({"kind": "prepare", "plan": masked_plan().to_json()})).facts
    )


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SUMMABLE)))
def test_methods_that_need_every_upload_refuse(method: str, tmp_path: Path) -> None:
    names = [graph.name for graph in federation().clients]
    own = Deployment.create(tmp_path / "server", names, "example.org", 9443, 9444)
    with pytest.raises(UserError, match=f"{re.escape(method)} cannot take"):
        own.new_run(method, {"secure_aggregation": True}, {})
    site = sites_of(federation(), tmp_path)["client-0"]
    plan = masked_plan(method=method).to_json()
    with pytest.raises(UserError, match=f"{re.escape(method)} cannot take"):
        site.answer(Parcel({"kind": "prepare", "plan": plan}))


def test_two_sites_are_too_few_to_begin(tmp_path: Path) -> None:
    own = Deployment.create(tmp_path / "server", ["a", "b"], "example.org", 9443, 9444)
    with pytest.raises(UserError, match="at least 3 clients"):
        own.new_run("fedavg", {"secure_aggregation": True}, {})


def test_two_that_come_of_three_are_too_few_to_begin(tmp_path: Path) -> None:
    sites = sites_of(federation(), tmp_path)
    own = Deployment.create(tmp_path / "server", list(sites), "example.org", 9443, 9444)
    with pytest.raises(UserError, match=r"min_sites 2: .* at least 3 sites"):
        own.new_run("fedavg", {"secure_aggregation": True, "min_sites": 2}, {})
    name = own.new_run("fedavg", {"secure_aggregation": True, "join_timeout": 0.5}, {})
    sites.pop("client-2")
    with pytest.raises(TrainingError, match="2 of 3 sites joined"):
        own.conduct(name, Wires(sites))
