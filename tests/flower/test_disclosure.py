"""Private runs: nothing leaves a site but what the plan declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from flower.grid import read, through_bytes, transport
from polyphily.core.declarations import example_sizes
from polyphily.core.method import METHODS, create
from polyphily.errors import UserError
from polyphily.flower import site as site_module
from polyphily.flower.app import MESSAGE_TYPE, make_reply, to_records
from polyphily.flower.disclosure import FACTS, LONGEST, Undeclared, public_text
from polyphily.flower.joining import Answer
from polyphily.flower.plan import Plan
from polyphily.flower.site import Site
from polyphily.flower.site_policy import POLICY
from polyphily.flower.wire import DISMISS, FINISH, HELLO, KINDS, MEASURE, PREPARE, ROUND, Parcel
from polyphily.graphs.loading import Federation

NAME = "client-0"
MODES: dict[str, dict[str, Any]] = {
    "dp": {"dp": "epsilon=50"},
    "secure": {"secure_aggregation": True},
    "both": {"dp": "epsilon=50", "secure_aggregation": True},
}
CASES = [
    (method, mode)
    for method in sorted(METHODS)
    for mode in MODES
    if mode == "dp" or not create(method).reason_against_sums(example_sizes(create(method)))
]


def smaller(data: Federation, nodes: int = 9) -> Federation:
    """The same federation, but the first client has fewer nodes."""
    first, *others = data.clients
    kept = torch.arange(first.num_nodes - nodes).numpy()
    return replace(data, clients=(first.subgraph(kept, first.name), *others))


class Recorder(Wires):
    """Keeps everything that leaves the first site, in order, as the server sees it."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        super().__init__(sites)
        self.gated = True
        self.heard: list[tuple[str, Answer]] = []

    def ask(self, messages: Mapping[str, Parcel], timeout: float) -> Iterator[tuple[str, Answer]]:
        for name, answer in super().ask(messages, timeout):
            if name == NAME:
                self.heard.append((str(messages[name].facts["kind"]), answer))
            yield name, answer


def told(kind: str, answer: Answer) -> object:
    """Everything in an answer but the declared numbers and the random texts of a protocol."""
    if answer.error:
        return kind, answer.error
    parcel = Parcel.unpack(answer.text, answer.blob)
    shown = {name: _without_chance(name, value) for name, value in parcel.facts.items()}
    kinds = {n: (tuple(t.shape), t.dtype) for n, t in parcel.tensors.items()}
    return kind, shown, kinds, len(answer.blob)


def _without_chance(name: str, value: Any) -> Any:
    """Replace keys, letters and shares, which are random, by their lengths; leave others out."""
    if name in ("keys", "letters", "shares"):
        return {n: _length(own) for n, own in value.items()}
    return None if name in ("attempt", "signature") else value


def _length(value: Any) -> int:
    # A signature in DER, or a share in base64, is a few bytes longer or shorter by chance.
    return round(len(json.dumps(value)) / 20)


@pytest.mark.parametrize(("method", "mode"), CASES)
def test_the_number_of_nodes_changes_nothing_but_declared_uploads(
    method: str, mode: str, tmp_path: Path
) -> None:
    """A whole run of two rounds, with every message there is, heard by the server."""
    if "dp" in MODES[mode]:
        pytest.importorskip("dp_accounting")
    heard = []
    for data in (federation(), smaller(federation())):
        place = tmp_path / str(len(heard))
        wires = Recorder(sites_of(data, place))
        plan = plan_for(federation(), method, rounds=2, epochs=1, **MODES[mode])
        for kind in (HELLO, MEASURE):
            message = {NAME: Parcel({"kind": kind, "plan": plan.to_json()})}
            list(wires.ask(message, 1.0))
        coordinate(plan, wires, place / "run", 3).go()
        heard.append(wires.heard)
    kinds = {kind for kind, _ in heard[0]}
    assert kinds >= {HELLO, MEASURE, PREPARE, ROUND, FINISH}
    if "secure_aggregation" in MODES[mode] and method != "local":
        assert kinds == {*KINDS} - {DISMISS}  # which is for sites that are left out
    first, second = ([told(*entry) for entry in own] for own in heard)
    if mode == "secure":  # scores by the plan's metric are declared; they are the site's own
        first, second = (_without_scores(own) for own in (first, second))
    assert first == second


def _without_scores(own: list[Any]) -> list[Any]:
    def shown(part: Any) -> Any:
        scores = ("received", "trained", "loss")
        return {n: v for n, v in part.items() if n not in scores} if "kind" in part else part

    return [tuple(shown(p) if isinstance(p, dict) else p for p in entry) for entry in own]


def test_a_policy_can_keep_scores_with_secure_aggregation(tmp_path: Path) -> None:
    data = federation()
    sites = sites_of(data, tmp_path)
    for site in sites.values():
        site.folder.mkdir(parents=True)
        (site.folder / POLICY).write_text("scores = false")
    wires = Recorder(sites)
    plan = plan_for(data, "fedavg", secure_aggregation=True)
    summary = coordinate(plan, wires, tmp_path / "run", 3).go()
    assert summary["troubles"] == []
    for kind, answer in wires.heard:
        facts = json.loads(answer.text)
        for name in ("received", "trained"):
            assert {v for split in facts.get(name, []) for v in split} <= {None}
        assert facts.get("loss") is None
        assert facts.get("seconds", 0) == 0
        if kind == PREPARE:
            assert facts["counts"] == [1, 1]


# Errors ----------------------------------------------------------------------------------------


def broken_reply(
    site: Site, plan: Plan, kind: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> tuple[str, list[str]]:
    """Return what the server hears and what the operator reads if something raises at the site."""
    lines: list[str] = []

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        for name in ("_reply", "_measure", "_hello"):
            patch.setattr(Site, name, fail)
        packed = Parcel({"kind": kind, "plan": plan.to_json(), "round": 1}).pack()
        answer = site.reply(*packed, lines.append)
    return answer.error, lines


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("kind", sorted({*KINDS} - {HELLO, DISMISS}))
def test_an_unexpected_error_says_nothing_in_a_private_run(
    kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites_of(federation(), tmp_path)[NAME]
    plan = plan_for(federation(), "fedavg", **MODES[mode])
    words = "mat1 and mat2 shapes cannot be multiplied (75x8 and 5x8)"
    for error in (RuntimeError(words), UserError(words), MemoryError(words)):
        sent, lines = broken_reply(site, plan, kind, monkeypatch, error)
        assert sent == f"failed while it worked on '{kind}'; the site's log has the reason"
        assert words in lines[-1]
        assert words in site.log.read()[-1]["reason"]


def test_before_there_is_a_plan_the_policy_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, error = plan_for(federation(), "fedavg"), RuntimeError("75 nodes")
    site = sites_of(federation(), tmp_path)[NAME]
    assert broken_reply(site, plan, HELLO, monkeypatch, error)[0] == "RuntimeError: 75 nodes"
    site.secure = True
    assert "75" not in broken_reply(site, plan, HELLO, monkeypatch, error)[0]
    assert site.answer(Parcel({"kind": HELLO})).facts["dense"] is True


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("shape", [(1, 3, 3), (1, 0), (5, 8, 8), (1,)])
def test_a_model_of_another_shape_tells_the_server_nothing(
    mode: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """As in an attack that was tried: the error named the number of nodes."""
    plan = plan_for(federation(), "fedavg", **MODES[mode])
    down = plan.server().download([0])
    name = next(iter(down))
    heard = []
    for data in (federation(), smaller(federation())):
        site = sites_of(data, tmp_path / str(len(heard)))[NAME]
        facts = {"kind": ROUND, "plan": plan.to_json(), "round": 1, "base": 0, "best": 0}
        packed = Parcel(facts, {**down, name: torch.zeros(shape)}).pack()
        heard.append(site.reply(*packed, lambda text: None).error)
    assert heard[0]
    assert heard[0] == heard[1]
    assert not any(str(federation().clients[0].num_nodes) in text for text in heard)


def test_a_fact_or_a_tensor_that_is_not_declared_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites_of(federation(), tmp_path)[NAME]
    plan = plan_for(federation(), "fedavg")
    asked = Parcel({"kind": PREPARE, "plan": plan.to_json()})
    extra = {"degrees": Parcel({"degrees": [3, 4]}), "x": Parcel({}, {"x": torch.zeros(1)})}
    for reply in extra.values():
        monkeypatch.setattr(Site, "_reply", lambda *args, reply=reply: reply)
        with pytest.raises(Undeclared):
            site.answer(asked)


def test_an_upload_that_is_not_declared_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    plan = plan_for(federation(), "fedavg", dp="epsilon=5")
    real = site_module.Prepared.train

    def more(self: Any, *args: Any) -> Any:
        upload, memory, loss = real(self, *args)
        return {**upload, "features": torch.zeros(1, 75, 8)}, memory, loss

    monkeypatch.setattr(site_module.Prepared, "train", more)
    site = sites_of(federation(), tmp_path)[NAME]
    facts = {"kind": ROUND, "plan": plan.to_json(), "round": 1, "base": 0, "best": 0}
    packed = Parcel(facts, plan.server().download([0])).pack()
    told: list[str] = []
    answer = site.reply(*packed, told.append)
    assert answer.error == "failed while it worked on 'round'; the site's log has the reason"
    assert "has undeclared features" in told[-1]
    assert not site.policy.account().uploads()


def test_every_kind_of_message_has_its_list() -> None:
    assert set(FACTS) == set(KINDS)


# Runs without privacy --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("/home/anna/bank/nodes.csv, line 3: no", "(a file), line 3: no"),
        ("cannot open '/srv/data set/x.npz'", "cannot open (a file)"),
        ("/srv/our banks/north/memory/a run: full", "(a file) run: full"),
        ("C:\\Users\\anna\\x.npz is damaged", "(a file) is damaged"),
        ("has undeclared model/convs.0.weight", "has undeclared model/convs.0.weight"),
        ("two\nlines\x1b[31m and\tmore", "two lines and more"),
        ("ratio 3/4 and/or 1e-5", "ratio 3/4 and/or 1e-5"),
    ],
)
def test_texts_for_the_server_have_one_line_and_no_paths(text: str, sent: str) -> None:
    folder = Path("/srv/our banks/north")
    assert public_text(UserError(text), ROUND, folder, private=False) == sent


def test_texts_for_the_server_are_bounded() -> None:
    assert len(public_text(RuntimeError("x" * 10**6), ROUND, Path("/a"), private=False)) == LONGEST


def test_over_flowers_grid_the_gate_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make_reply` sends what the gate lets through, byte for byte, and errors as errors."""
    from flwr.app import Message

    pytest.importorskip("dp_accounting")
    data = federation()
    sites = sites_of(data, tmp_path)
    transport(sites, monkeypatch)  # names this process to Flower
    plan = plan_for(data, "fedavg", dp="epsilon=5")

    def over_flower(parcel: Parcel) -> Message:
        message = through_bytes(Message(to_records(parcel), 0, MESSAGE_TYPE))
        message.metadata.__dict__["_message_id"] = "1"
        return through_bytes(make_reply(sites[NAME], message, lambda text: None))

    reply = over_flower(Parcel({"kind": PREPARE, "plan": plan.to_json()}))
    assert read(reply).facts["counts"] == [1, 1]
    facts = {"kind": ROUND, "plan": plan.to_json(), "round": 1, "base": 0, "best": 0}
    failed = over_flower(Parcel(facts, {"model/x": torch.zeros(1, 75)}))
    assert failed.has_error()
    assert failed.error.reason.startswith("the server's message lacks")
    assert [entry["what"] for entry in sites[NAME].log.read()] == ["answer", "error"]
