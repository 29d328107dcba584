"""The audit log of a site, and the commands that show it and the policy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Cli, caller
from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.core.method import METHODS
from polyphily.errors import UserError
from polyphily.flower.audit_log import AuditLog
from polyphily.flower.joining import Answer
from polyphily.flower.masks import MASKED
from polyphily.flower.site import Site
from polyphily.flower.site_policy import POLICY
from polyphily.flower.wire import PREPARE, ROUND, Parcel

NAME = "client-0"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


class Listening(Wires):
    """Keeps the answers of the first site."""

    gated = True

    def ask(self, messages: Any, timeout: float) -> Any:
        for name, answer in super().ask(messages, timeout):
            if name == NAME:
                self.__dict__.setdefault("heard", []).append(answer)
            yield name, answer


def run(place: Path, method: str = "fedavg", **given: Any) -> list[Answer]:
    """Run two rounds; return what the server heard from the first site."""
    data = federation()
    wires = Listening(sites_of(data, place))
    coordinate(plan_for(data, method, rounds=2, epochs=1, **given), wires, place / "run", 3).go()
    found: list[Answer] = wires.__dict__["heard"]
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_log_has_what_the_server_got_byte_for_byte(method: str, tmp_path: Path) -> None:
    heard, entries = run(tmp_path, method), AuditLog(tmp_path / NAME).read()
    assert len(heard) == len(entries)
    for answer, entry in zip(heard, entries, strict=True):
        content = answer.text.encode() + answer.blob
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["bytes"] == len(content)
        parcel = Parcel.unpack(answer.text, answer.blob)
        assert entry["names"] == sorted(parcel.facts)
        assert (entry["kind"], entry["run"]) == (parcel.facts["kind"], "a-run")
        assert {row["name"] for row in entry["tensors"]} == parcel.tensors.keys()
        for row in entry["tensors"]:
            tensor = parcel.tensors[row["name"]]
            assert row["shape"] == list(tensor.shape)
            assert row["norm"] == pytest.approx(float(torch.linalg.vector_norm(tensor.double())))


def test_the_log_has_what_is_sent_after_masks(tmp_path: Path) -> None:
    run(tmp_path, secure_aggregation=True)
    entries = AuditLog(tmp_path / NAME).read()
    names = {row["name"] for entry in entries for row in entry["tensors"]}
    assert names == {MASKED}
    assert {entry["kind"] for entry in entries} >= {"keys", "share", "reveal"}


def test_errors_and_refusals_are_logged_with_the_reason_that_stayed(tmp_path: Path) -> None:
    site = sites_of(federation(), tmp_path)[NAME]
    site.folder.mkdir(parents=True)
    (site.folder / POLICY).write_text("rounds = 2")
    plan = plan_for(federation(), "fedavg", rounds=9)
    site.reply(*Parcel({"kind": PREPARE, "plan": plan.to_json()}).pack(), lambda text: None)
    site.reply("{", b"", lambda text: None)
    refusal, unread = AuditLog(site.folder).read()
    assert refusal["sent"] == "refused by the site's policy: rounds"
    assert "9 rounds, 2 is the most" in refusal["reason"]
    assert refusal["run"] == "a-run"
    assert unread["sent"].startswith("unreadable message")
    assert "9" not in refusal["sent"]


def test_nothing_leaves_if_the_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites_of(federation(), tmp_path)[NAME]
    plan = plan_for(federation(), "fedavg")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyphily.flower.journal.Journal._append", full)
    told: list[str] = []
    packed = Parcel({"kind": PREPARE, "plan": plan.to_json()}).pack()
    answer = site.reply(*packed, told.append)
    assert answer == Answer(error="failed: the site cannot write its audit log")
    assert any("No space left" in line for line in told)


def test_a_log_that_was_changed_stops_the_site(tmp_path: Path, cli: Cli) -> None:
    run(tmp_path)
    file = AuditLog(tmp_path / NAME).journal.file
    assert cli("site", "log", tmp_path / NAME, "--verify").status == 0
    file.write_text(file.read_text().replace('"round": 2', '"round": 1', 1))
    told = cli("site", "log", tmp_path / NAME, "--verify")
    assert told.status == 2
    assert "was changed by something other than polyphily" in told.err
    site = sites_of(federation(), tmp_path)[NAME]
    packed = Parcel({"kind": "hello"}).pack()
    answer = site.reply(*packed, lambda text: None)
    assert answer == Answer(error="failed: the site cannot write its audit log")


def test_an_older_copy_of_the_journal_of_uploads_is_noticed(tmp_path: Path, cli: Cli) -> None:
    """The journal and its head fit each other; the audit log knows of a later upload."""
    sites = sites_of(federation(), tmp_path)
    plan = plan_for(federation(), "fedavg")
    journal = sites[NAME].policy.account().journal
    down = plan.server().download([0])
    copies = []
    for number in (1, 2):
        facts = {"kind": ROUND, "plan": plan.to_json(), "round": number, "base": 0, "best": 0}
        assert not sites[NAME].reply(*Parcel(facts, down).pack(), lambda text: None).error
        copies.append([(file, file.read_bytes()) for file in (journal.file, journal.head)])
    assert cli("site", "log", NAME, "--verify").status == 0
    for file, content in copies[0]:
        file.write_bytes(content)
    with pytest.raises(UserError, match="lacks uploads that"):
        sites_of(federation(), tmp_path)[NAME].check_files()
    assert cli("site", "log", NAME, "--verify").status == 2
    for file, _ in copies[0]:
        file.unlink()
    assert "lacks uploads that" in cli("site", "log", NAME, "--verify").err


# The commands ----------------------------------------------------------------------------------


def test_the_log_fits_a_terminal(tmp_path: Path, cli: Cli) -> None:
    run(tmp_path, "fedspa")
    site = sites_of(federation(), tmp_path)[NAME]
    site.reply(*Parcel({"kind": ROUND, "plan": {"run": "x" * 80}}).pack(), lambda text: None)
    shown = cli("site", "log", NAME, "--last", "0").out
    assert max(map(len, shown.splitlines())) <= 80
    assert "model/" in shown
    assert "norm" in shown
    assert "reason, which stayed here" in shown
    only = cli("site", "log", NAME, "--run", "a-run").out
    assert "round 2 of a-run" in only
    assert "x" * 80 not in only
    entries = json.loads(cli("site", "log", NAME, "--json", "--last", "2").out)
    assert [entry["kind"] for entry in entries] == ["close", "round"]
    verified = cli("site", "log", NAME, "--verify").out
    assert "audit.jsonl: 6 lines, none changed or removed" in verified
    assert "journal.jsonl: 2 lines, none changed or removed" in verified


def test_the_policy_command_writes_checks_and_accounts(tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("dp_accounting")
    (tmp_path / NAME).mkdir()
    first = cli("site", "policy", NAME)
    assert "written: " in first.out
    file = tmp_path / NAME / POLICY
    file.write_text('methods = ["fedavg"]\nepsilon = 4\nhours = "00:00-23:59"\n')
    run(tmp_path, dp="epsilon=2")
    found = cli("site", "policy", NAME, "--json").json()
    assert found["uploads"] == {"all": 2, "day": 2, "year": 2, "without_noise": 0}
    assert found["budgets"][0]["spent"] == pytest.approx(2)
    assert found["rules"]["hours"] == "00:00-23:59"
    shown = cli("site", "policy", NAME).out
    assert "budget: epsilon 4 at delta 1e-05 for ever; spent: 2" in shown
    assert "spent by uploads with noise: epsilon 2 at delta 1e-05" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert cli("site", "policy", NAME, "--new-data", " ").status == 2
    anew = cli("site", "policy", NAME, "--new-data", "other customers", "--json").json()
    assert anew["uploads"]["all"] == 0
    file.write_text("rounds = -1\n")
    wrong = cli("site", "policy", NAME)
    assert wrong.status == 2
    assert "rounds = -1: give a whole number from 1" in wrong.err
    assert cli("site", "policy", "nowhere").status == 2


def test_a_site_does_not_start_with_files_that_it_cannot_use(tmp_path: Path) -> None:
    run(tmp_path)
    own = sites_of(federation(), tmp_path)[NAME]
    own.check_files()
    (own.folder / POLICY).write_text("rounds = 'x'")
    with pytest.raises(Exception, match="whole number"):
        Site(NAME, own.graph, own.folder).check_files()
