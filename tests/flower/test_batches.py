"""Messages to many sites are sent in batches; one that Flower does not take is sent again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from flower import grid
from polyphily.flower import app
from polyphily.flower.app import batched
from polyphily.flower.joining import Answer
from polyphily.flower.wire import HELLO, Parcel


@dataclass
class Site:
    """Says its name."""

    name: str

    def reply(self, text: str, blob: bytes, report: Callable[[str], None]) -> Answer:
        return Answer(*Parcel({"site": self.name}).pack())


def test_a_list_is_cut_into_parts() -> None:
    assert list(batched(list("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(batched([], 2)) == []


def test_every_site_gets_its_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"site-{k}" for k in range(40)]
    transport = grid.transport({name: Site(name) for name in names}, monkeypatch)  # type: ignore[misc]
    sizes: list[int] = []
    push = transport.grid.push_messages

    def some_fail(messages: Iterable[Message]) -> list[str | None]:
        found = list(messages)
        sizes.append(len(found))
        if len(sizes) == 1:  # the first of the first batch is not taken
            return [None, *push(found[1:])]
        return list(push(found))

    monkeypatch.setattr(transport.grid, "push_messages", some_fail)
    asked = {name: Parcel({"kind": HELLO, "to": name}) for name in names}
    answers = dict(transport.ask(asked, 10.0))
    assert {name: json.loads(answer.text)["site"] for name, answer in answers.items()} == {
        name: name for name in names
    }
    assert sizes == [app.BATCH, app.BATCH, 40 - 2 * app.BATCH, 1]
    to = [(name, parcel.facts["to"]) for name, parcel, _ in transport.grid.exchanges]  # type: ignore[attr-defined]
    assert sorted(to) == sorted((name, name) for name in names)
