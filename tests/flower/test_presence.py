"""A dead site is not waited for in full, and it is asked again as it returns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.flower import app
from polyphily.flower.app import GridTransport
from polyphily.flower.joining import EVENTS, Answer, Policy
from polyphily.flower.presence import Presence
from polyphily.flower.wire import ROUND, Parcel


class Clocked(Wires):
    """Sites of which some are dead in some rounds; time passes as the server waits for them."""

    def __init__(self, sites: Mapping[str, Any], dead: Mapping[str, range]) -> None:
        super().__init__(sites)
        self.dead, self.number, self.waited = dead, 0, list[float]()

    def is_dead(self, name: str) -> bool:
        return self.number in self.dead.get(name, range(0))

    def online(self) -> set[str]:
        return {name for name in self.sites if not self.is_dead(name)}

    def ask(
        self,
        messages: Mapping[str, Parcel],
        timeout: float,
        grace: Mapping[str, float] | None = None,
    ) -> Iterator[tuple[str, Answer]]:
        facts = next(iter(messages.values())).facts
        rounds = facts["kind"] == ROUND
        if rounds:
            self.number = facts["round"]
        dead = [name for name in messages if self.is_dead(name)]
        alive = {name: message for name, message in messages.items() if name not in dead}
        yield from super().ask(alive, timeout)
        if rounds:
            brief = grace or {}
            self.waited.append(max((brief.get(name, timeout) for name in dead), default=0.0))


def run(tmp_path: Path, dead: range) -> Clocked:
    data = federation()
    wires = Clocked(sites_of(data, tmp_path), {"client-2": dead})
    plan = plan_for(data, "fedavg", rounds=8)
    waits = {"timeout": 100.0, "repeats": 0, "misses": 2, "grace": 5.0}
    coordinate(plan, wires, tmp_path / "run", 2, **waits).go()
    return wires


def test_after_two_misses_the_wait_is_short_and_an_answer_ends_that(tmp_path: Path) -> None:
    """Dead in rounds 2 to 5: two full waits, two short ones, none once it is back."""
    wires = run(tmp_path, range(2, 6))
    assert wires.waited == [0, 100, 100, 5, 5, 0, 0, 0]
    lines = (tmp_path / "run" / EVENTS).read_text().splitlines()
    late = [e["reason"] for e in map(json.loads, lines) if e["event"] == "late"]
    full = "no answer within 100 s"
    assert late == [full, "away: no answer", "away: no answer", "away: no answer"]


def presence(connected: set[str]) -> Presence:
    transport = SimpleNamespace(online=lambda: connected)
    return Presence(transport, Policy(1, misses=2, grace=5.0))  # type: ignore[arg-type]


def test_a_site_that_connects_anew_has_the_full_time_again() -> None:
    connected = {"a", "b"}
    found = presence(connected)
    for _ in range(2):
        assert found.grace(["a", "b"], 1) == {}
        found.note_silence(["b"])
    assert found.grace(["a", "b"], 1) == {"b": 5.0}  # connected all the time, but silent
    connected.remove("b")
    assert found.grace(["a", "b"], 1) == {"b": 5.0}
    connected.add("b")
    assert found.grace(["a", "b"], 1) == {}
    found.note_silence(["b"])
    assert found.grace(["a", "b"], 1) == {}


def test_an_answer_brings_a_site_back() -> None:
    found = presence({"a", "b"})
    for _ in range(5):
        found.note_silence(["b"])
    assert found.is_away("b")
    assert found.grace(["a", "b"], 2) == {}  # both are needed
    found.note_answer("b")
    assert not found.is_away("b")


# Over Flower's grid ----------------------------------------------------------------------------


@dataclass
class FakeGrid:
    """Flower's grid with sites that reply after some seconds, and a clock.

    Attributes:
        seconds: by site, until its reply; absent: never.
        garbled: sites whose replies Flower cannot parse.
    """

    seconds: Mapping[str, float]
    garbled: frozenset[str] = frozenset()
    now: float = 0.0
    sent: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    pulls: list[int] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=n, public_key=n.encode()) for n in ("a", "b", "c")]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        names = []
        for message in messages:
            names.append(str(len(self.sent)))
            self.sent[names[-1]] = message.metadata.dst_node_id, self.now, message.metadata.ttl
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        self.pulls.append(len(list(names)))
        found = []
        for name in list(names):
            site, at, _ = self.sent[name]
            if self.now >= at + self.seconds.get(site, 1e9):
                if site in self.garbled:
                    raise ValueError("no such object")
                metadata = SimpleNamespace(reply_to_message_id=name)
                error = SimpleNamespace(code=-1, reason=f"words of {site}")
                found.append(
                    SimpleNamespace(metadata=metadata, has_error=lambda: True, error=error)
                )
        return found


def ask(
    grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, grace: Mapping[str, float] | None = None
) -> dict[str, str]:
    def message(_: Any, node: str, __: str, *, ttl: float, group_id: str) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, ttl=ttl))

    monkeypatch.setattr(app, "time", grid)
    monkeypatch.setattr(app, "Message", message)
    transport = GridTransport(grid, {n.encode(): n for n in "abc"})  # type: ignore[arg-type]
    messages = {n: Parcel({"kind": ROUND, "round": 1}) for n in "abc"}
    return {site: answer.error for site, answer in transport.ask(messages, 100.0, grace)}


def test_the_grid_waits_for_those_away_only_while_it_waits_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = FakeGrid({"a": 1, "b": 2})
    assert ask(grid, monkeypatch).keys() == {"a", "b"}
    assert grid.now == pytest.approx(100, abs=0.5)
    grid = FakeGrid({"a": 1, "b": 2})
    assert ask(grid, monkeypatch, {"c": 5.0}).keys() == {"a", "b"}
    assert grid.now == pytest.approx(5, abs=0.5)
    grid = FakeGrid({"a": 1, "b": 40, "c": 20})
    assert ask(grid, monkeypatch, {"c": 5.0}).keys() == {"a", "b", "c"}  # it is back
    assert {site: ttl for site, _, ttl in grid.sent.values()} == {"a": 100, "b": 100, "c": 60}


def test_a_reply_that_flower_cannot_parse_is_that_of_its_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All replies that were fetched with it are lost; they are asked for again, one by one."""
    grid = FakeGrid({"a": 1, "b": 1, "c": 1}, frozenset("b"))
    found = ask(grid, monkeypatch)
    assert found == {
        "a": "words of a",
        "b": "Flower cannot read its message: ValueError: no such object",
        "c": "words of c",
    }
    assert set(grid.pulls) == {3, 1}


def test_a_broken_connection_to_the_superlink_is_nobody_s_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = FakeGrid({})

    def broken(names: Iterable[str]) -> list[Any]:
        raise ConnectionRefusedError("gone")

    monkeypatch.setattr(grid, "pull_messages", broken, raising=False)
    with pytest.raises(ConnectionRefusedError):
        ask(grid, monkeypatch)
