"""Flower's grid between a server and sites in this process, without a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from polyphily.flower import app
from polyphily.flower.app import GridTransport, make_reply, raw_parts
from polyphily.flower.site import Site
from polyphily.flower.wire import Parcel


@dataclass(frozen=True)
class Node:
    """A site as Flower lists it."""

    node_id: int
    public_key: bytes


class Grid:
    """Hands messages to sites; each travels as the bytes that Flower makes of it, both ways.

    Attributes:
        exchanges: every message with the reply to it, by the site's name.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.exchanges: list[tuple[str, Parcel, Parcel]] = []
        self._replies: dict[str, Message] = {}

    def get_nodes(self) -> Iterator[Node]:
        return (Node(k, site.name.encode()) for k, site in enumerate(self.sites))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            site = self.sites[message.metadata.dst_node_id]
            asked = through_bytes(message)
            name = str(len(self.exchanges))
            asked.metadata.__dict__["_message_id"] = name  # as the SuperLink numbers messages
            reply = through_bytes(make_reply(site, asked, lambda _: None))
            assert not reply.has_error(), reply.error.reason
            self.exchanges.append((site.name, read(asked), read(reply)))
            self._replies[name] = reply
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in names]


def through_bytes(message: Message) -> Message:
    """Return a message made of the bytes of another."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    copy = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(copy, Message)
    return copy


def read(message: Message) -> Parcel:
    return Parcel.unpack(*raw_parts(message.content))


def transport(sites: Mapping[str, Site], monkeypatch: pytest.MonkeyPatch) -> GridTransport:
    """Return the transport of a deployed server, to sites in this process."""
    monkeypatch.setattr(app, "POLL", 0.0)  # replies are there at once
    for name in ("_run_id", "_task_id", "_node_id"):  # Flower sets them when it starts an app
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = Grid(list(sites.values()))
    return GridTransport(grid, {name.encode(): name for name in sites})  # type: ignore[arg-type]
