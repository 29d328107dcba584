"""Rounds between a server and sites, all in this process: parity, faults, going on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flower.federations import (
    Twist,
    Wires,
    coordinate,
    federation,
    plan_for,
    settings_for,
    sites_of,
)
from polyphily.core.method import METHODS, create
from polyphily.errors import TrainingError
from polyphily.flower.joining import EVENTS, Answer, Policy, gather
from polyphily.flower.site_files import SiteState
from polyphily.flower.wire import FINISH, PREPARE, ROUND, Parcel
from polyphily.runs.folder import RunFolder
from polyphily.runs.models import BEST, LAST, SavedModel
from polyphily.runs.run import Execution


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / EVENTS).read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def model(place: Path, site: str, which: str = LAST) -> dict[str, torch.Tensor]:
    return SavedModel.load(SiteState(place / site, "a-run").model(which)).params


def assert_equal_models(first: Path, second: Path, names: list[str]) -> None:
    """To rounding: how memory is aligned may change the last bit; a step of training is 1e-2."""
    for name in names:
        ours, theirs = model(first, name), model(second, name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert float((value - theirs[key]).abs().max()) <= 1e-6, f"{name}: {key}"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_equals_the_simulation(method: str, tmp_path: Path) -> None:
    """Last and best models of every client and all scores, dropout and all."""
    data = federation()
    plan = plan_for(data, method)
    summary = coordinate(plan, Wires(sites_of(data, tmp_path)), tmp_path / "run", 3).go()
    expected = Execution(create(method), [data], settings_for(method), None).go(None)
    for graph in data.clients:
        key = "global" if "global" in expected.models else graph.name
        for which, suffix in ((LAST, ""), (BEST, "-best")):
            ours = model(tmp_path, graph.name, which)
            theirs = expected.models[key + suffix]
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)
    for view in ("received", "trained"):
        for moment in ("final", "last5", "best_val"):
            ours, theirs = (s["views"][view][moment] for s in (summary, expected.summary))
            assert _alike(ours, theirs)
    assert summary["bytes_up_per_round"] == expected.summary["bytes_up_per_round"]
    assert summary["bytes_down_per_round"] == expected.summary["bytes_down_per_round"]


def _alike(first: object, second: object) -> bool:
    """Equal structures, numbers to rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_alike(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    return first == pytest.approx(second)


def test_the_run_folder_is_that_of_a_simulation(tmp_path: Path) -> None:
    data = federation()
    plan = plan_for(data, "fedavg")
    coordinate(plan, Wires(sites_of(data, tmp_path)), tmp_path / "run").go()
    execution = Execution(create("fedavg"), [data], settings_for("fedavg"), tmp_path / "other")
    execution.folder.create(execution.config(), [data])  # type: ignore[union-attr]
    execution.go(None)
    ours, theirs = tmp_path / "run", tmp_path / "other"
    first, second = (json.loads((f / "summary.json").read_text()) for f in (ours, theirs))
    assert second.keys() - first.keys() == {"baseline", "decision"}  # the server sees no labels
    lines = [(f / "metrics.jsonl").read_text().splitlines() for f in (ours, theirs)]
    for left, right in zip(*lines, strict=True):
        assert json.loads(left).keys() == json.loads(right).keys()
    assert {p.name for p in (ours / "models").iterdir()} == {
        p.name for p in (theirs / "models").iterdir()
    }


def test_the_server_keeps_nothing_of_a_personal_model(tmp_path: Path) -> None:
    data = federation()
    sites = sites_of(data, tmp_path)
    coordinate(plan_for(data, "fedper"), Wires(sites), tmp_path / "run").go()
    assert list((tmp_path / "run" / "models").iterdir()) == []
    private = set(model(tmp_path, "client-0"))
    state, _ = RunFolder(tmp_path / "run").load_checkpoint() or ({}, {})
    shared = {name.rpartition("/")[2] for name in state if name.startswith("state/")}
    assert private - shared  # the head
    assert private & shared  # the rest


def poisoned(asked: Parcel, reply: Parcel, what: str) -> Parcel | Answer:
    first = next(iter(reply.tensors))
    changed = dict(reply.tensors)
    if what == "nan":
        changed[first] = torch.full_like(changed[first], torch.nan)
        return Parcel(reply.facts, changed)
    if what == "shape":
        changed[first] = changed[first][:, :1]
        return Parcel(reply.facts, changed)
    if what == "type":
        changed[first] = changed[first].to(torch.float64)
        return Parcel(reply.facts, changed)
    if what == "names":
        return Parcel(reply.facts, {**changed, "extra": torch.ones(1, 2)})
    if what == "lacks":
        changed.pop(first)
        return Parcel(reply.facts, changed)
    if what == "round":
        return Parcel({**reply.facts, "round": asked.facts["round"] + 1}, changed)
    if what == "run":
        return Parcel({**reply.facts, "run": "another"}, changed)
    if what == "size":
        return Parcel({**reply.facts, "filler": "x" * (2 << 20)}, changed)
    if what == "loss":
        return Parcel({**reply.facts, "loss": None}, changed)
    if what == "scores":
        return Parcel({**reply.facts, "trained": [[2.0] * 4] * 2}, changed)
    if what == "pickle":
        return Answer(json.dumps(dict(reply.facts)), b"\x80\x04\x95\x00\x00\x00\x00")
    return Answer(error="ValueError: it went wrong")


WORDS = {
    "nan": "not finite",
    "shape": "has the shape",
    "type": "has the type",
    "names": "has undeclared extra",
    "lacks": "lacks",
    "round": "answered round 3, not 2",
    "run": "answered run 'another'",
    "size": "bytes where at most",
    "loss": "'loss' is not a finite number",
    "scores": "scores of the trained model are not valid",
    "pickle": "unreadable message",
    "raise": "it went wrong",
}


@pytest.mark.parametrize("what", sorted(WORDS))
def test_a_bad_answer_is_refused_by_name_and_the_rest_goes_on(what: str, tmp_path: Path) -> None:
    """The outcome is that of a run in which the site did not answer that round."""
    data = federation()
    plan = plan_for(data, "fedavg", dropout=0.0, input_dropout=0.0)

    def at_round_two(bad: bool) -> Twist:
        def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | Answer | None:
            if name != "client-1" or asked.facts["kind"] != ROUND or asked.facts["round"] != 2:
                return reply
            return poisoned(asked, reply, what) if bad else None

        return twist

    wires = Wires(sites_of(data, tmp_path / "bad"), at_round_two(True))
    summary = coordinate(plan, wires, tmp_path / "bad" / "run", 2).go()
    assert summary["rounds"] == 3
    (trouble,) = summary["troubles"]
    assert (trouble["site"], trouble["round"], trouble["what"]) == ("client-1", 2, "refused")
    assert WORDS[what] in trouble["reason"]
    assert [e["site"] for e in events(tmp_path / "bad" / "run", "refused")] == ["client-1"]
    assert summary["refused_updates"] == 1
    silent = Wires(sites_of(data, tmp_path / "silent"), at_round_two(False))
    other = coordinate(plan, silent, tmp_path / "silent" / "run", 2).go()
    assert other["troubles"][0]["what"] == "late"
    names = [graph.name for graph in data.clients]
    assert_equal_models(tmp_path / "bad", tmp_path / "silent", names)


@pytest.mark.parametrize("method", ["fedper", "scaffold", "fedspa", "moon"])
def test_a_late_answer_leaves_no_trace_at_the_site(method: str, tmp_path: Path) -> None:
    """A site that trained in vain goes on from where the server last accepted it."""
    data = federation()
    plan = plan_for(data, method)

    def lost(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        late = name == "client-2" and asked.facts["kind"] == ROUND and asked.facts["round"] == 2
        return None if late else reply

    wires = Wires(sites_of(data, tmp_path / "late"), lost)
    coordinate(plan, wires, tmp_path / "late" / "run", 2).go()

    class Away(Wires):
        """The same, but that the message never reached the site."""

        def ask(self, messages, timeout):  # type: ignore[no-untyped-def]
            kept = {
                name: message
                for name, message in messages.items()
                if lost(name, message, message) is not None
            }
            return super().ask(kept, timeout)

    coordinate(plan, Away(sites_of(data, tmp_path / "away")), tmp_path / "away" / "run", 2).go()
    assert_equal_models(
        tmp_path / "late", tmp_path / "away", [graph.name for graph in data.clients]
    )


def test_too_few_answers_repeat_the_round_and_ask_only_the_missing(tmp_path: Path) -> None:
    data = federation()
    plan = plan_for(data, "fedavg")
    tries = []

    def once(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        if name == "client-0" and asked.facts["kind"] == ROUND and asked.facts["round"] == 2:
            tries.append(name)
            return None if len(tries) == 1 else reply
        return reply

    wires = Wires(sites_of(data, tmp_path), once)
    summary = coordinate(plan, wires, tmp_path / "run", 3).go()
    assert summary["troubles"] == []
    assert len(tries) == 2
    (repeat,) = events(tmp_path / "run", "repeat")
    assert repeat["sites"] == ["client-0"]
    plain = coordinate(plan, Wires(sites_of(data, tmp_path / "b")), tmp_path / "b" / "run", 3)
    assert plain.go()["final"] == summary["final"]


def test_a_run_without_enough_answers_ends_with_the_last_good_model(tmp_path: Path) -> None:
    data = federation()

    def gone(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        over = asked.facts["kind"] == ROUND and asked.facts["round"] == 3
        return None if over and name != "client-0" else reply

    wires = Wires(sites_of(data, tmp_path), gone)
    with pytest.raises(TrainingError, match=r"round 3: 1 of 3 sites .* of round 2"):
        coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run", 2).go()
    rounds = [asked.facts["round"] for _, asked in wires.asked if asked.facts["kind"] == ROUND]
    assert rounds.count(3) == 3 + 2  # all, then the two that were missing
    two = plan_for(data, "fedavg", rounds=2)
    coordinate(two, Wires(sites_of(data, tmp_path / "b")), tmp_path / "b" / "run", 2).go()
    files = [(f / "models" / "global.safetensors") for f in (tmp_path / "run", tmp_path / "b/run")]
    ours, theirs = (SavedModel.load(file).params for file in files)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
@pytest.mark.parametrize("selection", ["method", "federation"])
def test_a_round_does_not_win_because_a_site_is_missing(
    method: str, selection: str, tmp_path: Path
) -> None:
    """Without the third site, which scores low, round 3 looks best. All keep a full round."""
    data = federation()
    plan = plan_for(data, method, rounds=5, selection=selection)
    weak = "client-2"

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        if asked.facts["kind"] not in (ROUND, FINISH):
            return reply
        number = asked.facts["round"]
        if name == weak and asked.facts["kind"] == ROUND and number in (3, 4):
            return None
        facts = dict(reply.facts)
        for view, of in (("trained", number), ("received", number - (reply.tensors != {}))):
            if view in facts:
                score = 0.1 if name == weak else 0.9 if of == 3 else 0.5 + of / 100
                facts[view] = [[score] * len(row) for row in facts[view]]
        return Parcel(facts, reply.tensors)

    summary = coordinate(plan, Wires(sites_of(data, tmp_path), twist), tmp_path / "run", 2).go()
    per_client = summary["selection"]["by"] == "client"
    best = summary["best_val"]["round"]
    full = {"received": [1, 4, 5], "trained": [1, 2, 5]}[create(method).view]
    assert best == [3, 3, 1] if per_client else best in full
    if not per_client:
        assert "unscored" not in summary["best_val"]
        rounds = {g.name: SavedModel.load(SiteState(tmp_path / g.name, "a-run").model(BEST)).round
                  for g in data.clients}  # fmt: skip
        assert set(rounds.values()) == {best}
    records = RunFolder(tmp_path / "run").records()
    marks = [record.get("unscored_trained", []) for record in records]
    assert marks == [[], [], [2], [2], []]
    assert [r.get("unscored_received", []) for r in records] == [[], [2], [2], [], []]


class Cut(Exception):
    """The server is killed."""


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "scaffold", "fedgsp"])
@pytest.mark.parametrize("moment", [(ROUND, 1), (ROUND, 2), (FINISH, 3)])
def test_a_killed_server_goes_on_to_the_same_models(
    method: str, moment: tuple[str, int], tmp_path: Path
) -> None:
    """Cut off after some sites had answered: they are ahead, and are set back."""
    data = federation()
    plan = plan_for(data, method)

    def cut(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if name == "client-2" and (asked.facts["kind"], asked.facts["round"]) == moment:
            raise Cut
        return reply

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        return cut(name, asked, reply) if "round" in asked.facts else reply

    sites = sites_of(data, tmp_path / "cut")
    with pytest.raises(Cut):
        coordinate(plan, Wires(sites, twist), tmp_path / "cut" / "run", 3).go()
    sites = sites_of(data, tmp_path / "cut")  # new processes, old folders
    summary = coordinate(plan, Wires(sites), tmp_path / "cut" / "run", 3).go()
    whole = coordinate(plan, Wires(sites_of(data, tmp_path / "b")), tmp_path / "b" / "run", 3).go()
    assert_equal_models(tmp_path / "cut", tmp_path / "b", [g.name for g in data.clients])
    assert _alike(summary["views"], whole["views"])
    records = [
        (f / "metrics.jsonl").read_text().splitlines()
        for f in (tmp_path / "cut" / "run", tmp_path / "b" / "run")
    ]
    assert len(records[0]) == len(records[1]) == 3


def test_sites_that_do_not_come_are_named(tmp_path: Path) -> None:
    data = federation()
    sites = sites_of(data, tmp_path)
    sites.pop("client-1")
    policy = Policy(3, join_timeout=0.2)
    with pytest.raises(TrainingError, match=r"2 of 3 sites joined .* Missing: client-1"):
        gather(Wires(sites), [g.name for g in data.clients], policy, lambda *_, **__: None)


def test_nothing_but_the_contract_and_scores_leaves_a_site(tmp_path: Path) -> None:
    """Replies hold the method's upload and a handful of numbers: no feature, edge or label."""
    data = federation()
    seen: list[Parcel] = []

    def note(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        seen.append(reply)
        return reply

    coordinate(
        plan_for(data, "fedavg"), Wires(sites_of(data, tmp_path), note), tmp_path / "run"
    ).go()
    words = {"kind", "run", "round", "seconds", "note", "received", "trained", "loss"}
    for reply in seen:
        assert reply.facts.keys() <= words | {"counts"}
    network = plan_for(data, "fedavg").network()
    sizes = {f"model/{n}": tuple(p.shape) for n, p in network.named_parameters()}
    uploads = [reply.tensors for reply in seen if reply.facts["kind"] == ROUND]
    assert len(uploads) == 9
    for upload in uploads:
        shapes = {name: tuple(t.shape) for name, t in upload.items() if name in sizes}
        assert shapes == sizes
        extra = sum(np.prod(t.shape) for name, t in upload.items() if name not in sizes)
        assert extra <= 1  # the number of train nodes


def test_a_site_that_missed_the_preparation_is_asked_again(tmp_path: Path) -> None:
    """A site that is killed at this moment must not end the run."""
    data = federation()
    lost: list[str] = []

    def lose_one(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        if asked.facts["kind"] == PREPARE and name == "client-1" and not lost:
            lost.append(name)
            return None
        return reply

    wires = Wires(sites_of(data, tmp_path), lose_one)
    summary = coordinate(plan_for(data, "fedavg"), wires, tmp_path / "run", 3).go()
    assert lost == ["client-1"]
    assert summary["rounds"] == plan_for(data, "fedavg").settings.rounds
    (repeated,) = events(tmp_path / "run", "repeat")
    assert repeated["sites"] == ["client-1"]
