"""A site's policy and its account: servers that ask for more than they are allowed."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.core.budget import Budget, composed
from polyphily.errors import UserError
from polyphily.flower.account import FILE, Account
from polyphily.flower.joining import Answer
from polyphily.flower.plan import Plan
from polyphily.flower.site import Site
from polyphily.flower.site_policy import DEFAULT, POLICY, PolicyFile, Refused, read_policy
from polyphily.flower.wire import FINISH, HELLO, PREPARE, ROUND, Parcel
from polyphily.runs.folder import read_tensors

NAME = "client-0"
NIGHT = dt.datetime(2026, 3, 3, 23, 30, tzinfo=dt.UTC)  # a Tuesday


def site_with(place: Path, policy: str = "", moment: dt.datetime | None = None) -> Site:
    """The first site, with a policy and a clock that stands still."""
    site = sites_of(federation(), place)[NAME]
    site.folder.mkdir(parents=True, exist_ok=True)
    if policy:
        (site.folder / POLICY).write_text(policy)
    if moment is not None:
        site.clock = lambda: moment
    return site


def plan_of(method: str = "fedavg", **given: Any) -> Plan:
    return plan_for(federation(), method, **given)


def ask(site: Site, plan: Plan, kind: str = PREPARE, number: int = 1, shift: float = 0) -> Parcel:
    down = plan.server().download([0]) if kind in (ROUND, FINISH) else {}
    facts = {"kind": kind, "plan": plan.to_json(), "round": number, "base": 0, "best": 0}
    return site.answer(Parcel(facts, {name: tensor + shift for name, tensor in down.items()}))


def refused(site: Site, plan: Plan, kind: str = PREPARE, **more: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        ask(site, plan, kind, **more)
    return caught.value


# Rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "good", "bad", "rule"),
    [
        ('methods = ["fedavg", "fedper"]', {}, {"method": "fedprox"}, "methods"),
        ("sites = 3", {}, {"sites": (NAME, "client-1")}, "sites"),
        ("rounds = 3", {"rounds": 3}, {"rounds": 4}, "rounds"),
        ("epochs = 4", {"epochs": "2-4"}, {"epochs": "2-5"}, "epochs"),
        ("parameters = 200", {}, {"hidden": 64}, "parameters"),
        ("megabytes = 0.001", {}, {"hidden": 64}, "megabytes"),
        ("", {}, {"hidden": 10**8}, "megabytes"),
        ("", {}, {"hidden": 2**40}, "megabytes"),
        ('dp = "epsilon=2"', {"dp": "epsilon=2"}, {"dp": "epsilon=2.1"}, "dp"),
        ('dp = "epsilon=2"', {"dp": "epsilon=1"}, {"dp": "epsilon=1,delta=1e-3"}, "dp"),
        ('dp = "epsilon=2"', {"dp": "epsilon=1"}, {}, "dp"),
        ("epsilon = 2", {"dp": "epsilon=2"}, {"dp": "epsilon=2.1"}, "epsilon"),
        ("epsilon = 2", {"dp": "epsilon=2"}, {}, "epsilon"),
        ("secure_aggregation = true", {"secure_aggregation": True}, {}, "secure_aggregation"),
        ("robust = true", {"robust": "median"}, {}, "robust"),
        ("[fixed]\nlr = 0.25", {"lr": 0.25}, {"lr": 0.3}, "fixed"),
        ("[fixed]\nmu = 0.01", {"method": "fedprox"}, {"method": "fedprox", "mu": 1.0}, "fixed"),
        ("[fixed]\nmu = 0.5", {}, {"method": "fedprox"}, "fixed"),
    ],
)
def test_every_rule_refuses_what_breaks_it(
    policy: str, good: dict[str, Any], bad: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    def planned(given: dict[str, Any]) -> Plan:
        own = {k: v for k, v in given.items() if k not in ("method", "sites", "mu")}
        plan = plan_of(given.get("method", "fedavg"), **own)
        plan = replace(plan, sites=given.get("sites", plan.sites))
        return replace(plan, hyperparameters={"mu": given["mu"]} if "mu" in given else {})

    site = site_with(tmp_path, policy)
    ask(site, planned(good))
    error = refused(site, planned(bad))
    assert error.rule == rule
    assert error.public == f"refused by the site's policy: {rule}"
    ask(site, planned(good))


def test_a_model_that_is_too_large_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """40 GB of weights would not fit into this machine's memory."""
    site = site_with(tmp_path, "megabytes = 100")
    assert refused(site, plan_of(hidden=10**9)).rule == "megabytes"


def test_a_plan_that_changes_under_one_name_is_judged_again(tmp_path: Path) -> None:
    site = site_with(tmp_path, "rounds = 3\nepochs = 2")
    ask(site, plan_of(rounds=3), ROUND)
    assert refused(site, plan_of(rounds=300), ROUND).rule == "rounds"
    assert refused(site, plan_of(epochs=9), ROUND).rule == "epochs"
    ask(site, plan_of(rounds=3), ROUND, number=2)


def test_a_round_beyond_the_plan_is_refused(tmp_path: Path) -> None:
    site = site_with(tmp_path)
    with pytest.raises(Exception, match="round 4 of 3"):
        ask(site, plan_of(rounds=3), ROUND, number=4)


@pytest.mark.parametrize(
    ("policy", "moment", "rule"),
    [
        ('hours = "20:00-06:00"', NIGHT, ""),
        ('hours = "20:00-06:00"', NIGHT.replace(hour=5), ""),
        ('hours = "20:00-06:00"', NIGHT.replace(hour=6, minute=0), "hours"),
        ('hours = "08:00-17:30"', NIGHT.replace(hour=17, minute=29), ""),
        ('hours = "08:00-17:30"', NIGHT.replace(hour=17, minute=30), "hours"),
        ('days = ["mon", "tue"]', NIGHT, ""),
        ('days = ["mon", "wed"]', NIGHT, "days"),
    ],
)
def test_when_a_site_takes_part(
    policy: str, moment: dt.datetime, rule: str, tmp_path: Path
) -> None:
    site = site_with(tmp_path, policy, moment)
    for kind in (HELLO, PREPARE, ROUND, FINISH):
        if rule:
            assert refused(site, plan_of(), kind).rule == rule
        else:
            ask(site, plan_of(), kind)
    ask(site, plan_of(), "close")  # ends what was allowed to begin


def test_messages_are_counted_over_restarts(tmp_path: Path) -> None:
    plan, told = plan_of(), []
    packed = Parcel({"kind": PREPARE, "plan": plan.to_json()}).pack()

    def answers(moment: dt.datetime) -> list[Answer]:
        site = site_with(tmp_path, "messages_per_day = 3", moment)
        return [site.reply(*packed, told.append) for _ in range(2)]

    first = [*answers(NIGHT), *answers(NIGHT + dt.timedelta(hours=23))]
    limit = "refused by the site's policy: messages_per_day"
    assert [answer.error for answer in first] == ["", "", "", limit]
    later = answers(NIGHT + dt.timedelta(hours=24))  # of the three before, one is left
    assert [answer.error for answer in later] == ["", ""]
    assert any("3 messages were answered" in line for line in told)


@pytest.mark.parametrize(("rule", "days"), [("rounds_per_day", 1), ("rounds_per_year", 365)])
def test_uploads_are_counted_over_runs_and_restarts(rule: str, days: int, tmp_path: Path) -> None:
    def upload(run: str, moment: dt.datetime) -> None:
        ask(site_with(tmp_path, f"{rule} = 2", moment), replace(plan_of(), run=run), ROUND)

    upload("one", NIGHT)
    upload("two", NIGHT + dt.timedelta(minutes=1))
    with pytest.raises(Refused) as caught:
        upload("three", NIGHT + dt.timedelta(hours=1))
    assert caught.value.rule == rule
    upload("three", NIGHT + dt.timedelta(days=days, seconds=30))


# The file --------------------------------------------------------------------------------------


def test_the_default_policy_is_valid_with_and_without_its_comments(tmp_path: Path) -> None:
    own = PolicyFile(tmp_path)
    own.write_default()
    assert read_policy(own.file) == own.get()
    rules = [
        line.removeprefix("# ")
        for line in DEFAULT.splitlines()
        if " = " in line or line.startswith("# [")
    ]
    (tmp_path / "all.toml").write_text("\n".join(rules))
    found = read_policy(tmp_path / "all.toml")
    assert set(found.in_words()) >= {"methods", "rounds", "dp", "epsilon", "hours", "fixed"}
    assert found.hours == (20 * 60, 6 * 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("round = 3", "unknown rule in .* 'round': did you mean 'rounds'"),
        ("rounds = 0", "rounds = 0: give a whole number from 1"),
        ("rounds = true", "give a whole number"),
        ('methods = ["fedavgg"]', "methods: unknown method 'fedavgg'"),
        ('hours = "8-17"', 'such as "20:00-06:00"'),
        ('days = ["monday"]', "give one of mon, tue"),
        ('dp = "epsilon=0"', "dp: dp: epsilon must be positive"),
        ("delta = 1e-6", "belong to epsilon"),
        ("secure_aggregation = 1", "give true or false"),
        ("[fixed]\nmuu = 1", "unknown hyperparameter or setting 'muu'"),
        ("rounds = ", "not valid TOML"),
    ],
)
def test_a_policy_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / POLICY).write_text(text)
    with pytest.raises(UserError, match=words):
        read_policy(tmp_path / POLICY)


def test_a_policy_that_everybody_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / POLICY).write_text("rounds = 3")
    (tmp_path / POLICY).chmod(0o666)
    with pytest.raises(UserError, match="chmod o-w"):
        read_policy(tmp_path / POLICY)
    (tmp_path / POLICY).chmod(0o664)
    assert read_policy(tmp_path / POLICY).rounds == 3


def test_a_changed_policy_is_noticed_and_a_broken_one_refuses_everything(tmp_path: Path) -> None:
    site = site_with(tmp_path, "rounds = 3")
    told: list[str] = []
    packed = Parcel({"kind": PREPARE, "plan": plan_of(rounds=3).to_json()}).pack()
    assert not site.reply(*packed, told.append).error
    (site.folder / POLICY).write_text("rounds = 2  # since today")
    assert site.reply(*packed, told.append).error == "refused by the site's policy: rounds"
    assert any("policy.toml has changed" in line for line in told)
    (site.folder / POLICY).write_text("rounds = 'many'")
    assert site.reply(*packed, told.append).error == "refused by the site's policy: policy"
    assert "give a whole number" in told[-1]
    (site.folder / POLICY).unlink()
    assert not site.reply(*packed, told.append).error


def test_the_flags_and_the_policy_both_hold(tmp_path: Path) -> None:
    site = site_with(tmp_path, 'dp = "epsilon=4"\nepsilon = 20')
    site.dp = Budget(2.0, 1e-5)
    assert refused(site, plan_of(dp="epsilon=3")).rule == "dp"
    site.dp, site.secure = Budget(6.0, 1e-5), True
    assert refused(site, plan_of(dp="epsilon=5", secure_aggregation=True)).rule == "dp"
    assert refused(site, plan_of(dp="epsilon=3")).rule == "secure_aggregation"


# Budgets that bind -----------------------------------------------------------------------------


def spent(place: Path) -> float:
    """The epsilon of all uploads that left the site, by another library's composition."""
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant()
    for upload in Account(place / NAME / FILE).uploads():
        accountant.compose(accounting.GaussianDpEvent(upload.multiplier))
    return float(accountant.get_epsilon(1e-5))


def test_more_rounds_under_one_name_do_not_buy_more(tmp_path: Path) -> None:
    """Each plan is within epsilon 1. Counted by the round, their uploads spend 1.92."""
    pytest.importorskip("dp_accounting")
    site = site_with(tmp_path)
    site.dp = Budget(1.0, 1e-5)
    stopped = 0
    for rounds in (1, 4, 16, 64):
        for number in range(1, rounds + 1):
            try:
                ask(site, plan_of(dp="epsilon=1", rounds=rounds), ROUND, number, shift=number)
            except Refused:
                stopped += 1
    assert stopped
    assert 0.9 < spent(tmp_path) <= 1.001


def test_more_names_do_not_buy_more(tmp_path: Path) -> None:
    """Ten runs of epsilon 1 spend 3.62 together."""
    pytest.importorskip("dp_accounting")
    rules = set()
    for run in range(10):
        site = site_with(tmp_path)  # restarted, too
        site.dp = Budget(1.0, 1e-5)
        plan = replace(plan_of(dp="epsilon=1", rounds=2), run=f"run-{run}")
        for number in (1, 2):
            try:
                ask(site, plan, ROUND, number)
            except Refused as error:
                rules.add(error.rule)
    assert rules == {"--dp"}
    assert 0.9 < spent(tmp_path) <= 1.001


@settings(deadline=None, max_examples=25)
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.floats(0.05, 3), st.floats(0.1, 2)),
        max_size=30,
    )
)
def test_no_server_gets_more_than_the_budget(
    asks: list[tuple[int, int, float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any order of runs, rounds, epsilons and clips: what was uploaded is within the budget."""
    pytest.importorskip("dp_accounting")
    policy = PolicyFile(tmp_path_factory.mktemp("site"))
    policy.file.write_text("epsilon = 2.0")
    rules, account, moment = policy.get(), policy.account(), NIGHT
    base = plan_of(dp="epsilon=1")
    for number, (run, rounds, epsilon, clip) in enumerate(asks):
        settings = replace(base.settings, dp=f"epsilon={epsilon},clip={clip}", rounds=rounds)
        plan = replace(base, run=f"run-{run}", settings=settings)
        multiplier = Budget(epsilon, clip=clip).multiplier(rounds)
        try:
            rules.judge(plan)
            rules.judge_budget(plan, ROUND, account, moment)
            rules.judge_upload(plan, multiplier, account, moment)
        except Refused:
            continue
        guard = type("Guard", (), {"multiplier": multiplier, "deviation": 1, "sensitivity": 1})
        account.record(moment, plan.run, number, str(number), guard)  # type: ignore[arg-type]
    made = [upload.multiplier or 0 for upload in Account(policy.folder / FILE).uploads()]
    assert Budget(2.0, 1e-5).spent_by(made) <= 2.0 + 1e-6


def test_the_composition_is_that_of_another_accountant() -> None:
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    multipliers = [3.0, 5.5, 5.5, 9.0, 21.0]
    accountant = pld.PLDAccountant()
    for multiplier in multipliers:
        accountant.compose(accounting.GaussianDpEvent(multiplier))
    assert Budget(1.0).spent_by(multipliers) == pytest.approx(accountant.get_epsilon(1e-5), 1e-3)
    assert composed([4.0] * 16) == pytest.approx(1.0)
    assert composed([4.0, 0.0]) == 0.0
    assert not Budget(100.0).allows([1e-200])


def test_a_budget_that_a_whole_run_would_exceed_is_refused_before_the_first_upload(
    tmp_path: Path,
) -> None:
    pytest.importorskip("dp_accounting")
    site = site_with(tmp_path, "epsilon = 1")
    assert refused(site, plan_of(dp="epsilon=2", rounds=50)).rule == "epsilon"
    assert Account(tmp_path / NAME / FILE).uploads() == []


def test_a_yearly_budget_comes_back_after_a_year_but_not_by_the_calendar(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    policy, plan = 'epsilon = 1\nperiod = "year"', plan_of(dp="epsilon=1", rounds=1)
    ask(site_with(tmp_path, policy, NIGHT), plan, ROUND)
    other = replace(plan, run="next")
    for days in (-30, 1, 364):  # the clock was set back; not yet; not yet
        site = site_with(tmp_path, policy, NIGHT + dt.timedelta(days=days))
        assert refused(site, other, ROUND).rule == "epsilon"
    ask(site_with(tmp_path, policy, NIGHT + dt.timedelta(days=366)), other, ROUND)


def test_uploads_without_noise_spend_every_budget(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    ask(site_with(tmp_path), plan_of(), ROUND)
    error = refused(site_with(tmp_path, "epsilon = 100"), replace(plan_of(dp="epsilon=1"), run="b"))
    assert error.rule == "epsilon"
    assert "infinite, because there were uploads without noise" in str(error)


def test_only_the_operator_begins_a_new_account(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    plan = plan_of(dp="epsilon=1", rounds=1)
    ask(site_with(tmp_path, "epsilon = 1"), plan, ROUND)
    site = site_with(tmp_path)
    assert refused(site, replace(plan, run="b"), ROUND).rule == "epsilon"
    site.policy.account().begin_anew(NIGHT, "the customers of another country")
    ask(site, replace(plan, run="b"), ROUND)
    kinds = [entry["kind"] for entry in Account(tmp_path / NAME / FILE).journal.read()]
    assert kinds == ["upload", "new data", "upload"]


def test_two_sites_with_the_same_data_can_share_an_account(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    policy = f'epsilon = 1\njournal = "{tmp_path / "shared.jsonl"}"'
    plan = plan_of(dp="epsilon=1", rounds=1)
    ask(site_with(tmp_path / "here", policy), plan, ROUND)
    there = site_with(tmp_path / "there", policy)
    assert refused(there, replace(plan, run="b"), ROUND).rule == "epsilon"
    assert refused(there, plan, ROUND).rule == "dp"  # the same question, but another upload


# What is written, and when ---------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def test_no_upload_leaves_without_its_line_wherever_the_site_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site dies at each of its writes in turn; after a restart the question is repeated."""
    pytest.importorskip("dp_accounting")
    plan = plan_of(dp="epsilon=1", rounds=1)
    for step in itertools.count():
        place = tmp_path / str(step)
        place.mkdir()
        with monkeypatch.context() as patch:
            left = _kill_at_write(patch, step)
            try:
                first = ask(site_with(place), plan, ROUND)
            except Killed:
                first = None
            if left:  # it was not killed: fewer writes than steps
                break
        again = ask(site_with(place), plan, ROUND)
        account = Account(place / NAME / FILE).uploads()
        assert len(account) == 1, f"killed at write {step}: {len(account)} uploads counted"
        assert first is None
        sent, _ = read_tensors(next((place / NAME / "memory" / "a-run").glob("sent-*")))
        assert all(torch.equal(sent[name], tensor) for name, tensor in again.tensors.items())
    assert step >= 5


def _kill_at_write(patch: pytest.MonkeyPatch, step: int) -> list[int]:
    """Raise at the step-th replace, fsync or truncate; the list is emptied when that happens."""
    import os

    left, count = [step], itertools.count()
    for name in ("replace", "fsync"):
        real = getattr(os, name)

        def wrapped(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            if next(count) == step:
                left.clear()
                raise Killed
            return real(*args, **kwargs)

        patch.setattr(os, name, wrapped)
    return left


def test_a_tampered_journal_stops_the_site(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    plan = plan_of(dp="epsilon=1", rounds=5)
    site = site_with(tmp_path)
    for number in (1, 2, 3):
        ask(site, plan, ROUND, number)
    file = tmp_path / NAME / FILE
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[2]]))
    with pytest.raises(UserError, match="line 2 does not follow"):
        site_with(tmp_path).check_files()
    told: list[str] = []
    packed = Parcel({"kind": PREPARE, "plan": plan.to_json()}).pack()
    answer = site_with(tmp_path).reply(*packed, told.append)
    assert answer.error == "failed while it worked on 'prepare'; the site's log has the reason"
    assert "from a backup" in told[-1]


def test_a_run_over_its_budget_goes_on_without_the_site(tmp_path: Path) -> None:
    """Two sites have no policy, the third has spent its budget: the server hears the rule."""
    pytest.importorskip("dp_accounting")
    data = federation()
    sites = sites_of(data, tmp_path)
    (tmp_path / "client-2").mkdir()
    (tmp_path / "client-2" / POLICY).write_text("epsilon = 0.5")
    wires = Wires(sites)
    wires.gated = True
    plan = plan_for(data, "fedavg", dp="epsilon=1")
    summary = coordinate(plan, wires, tmp_path / "run", 2).go()
    reasons = {trouble["reason"] for trouble in summary["troubles"]}
    assert "refused by the site's policy: epsilon" in reasons
    assert not Account(tmp_path / "client-2" / FILE).uploads()
