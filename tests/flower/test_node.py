"""A site's connection: whatever fails, and wherever, the site says so in a line and goes on."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    DeactivateNodeResponse,
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient

from polyphily.errors import UserError
from polyphily.flower import flwr_internals, keys, node
from polyphily.flower.app import MESSAGE_TYPE, to_records
from polyphily.flower.joining import Answer
from polyphily.flower.wire import HELLO, Parcel

REQUEST = httpx.Request("POST", "https://server/v1/fleet")
FAULTS = ("refused", "timeout", "cut", 401, 403, 404, 500, 503, "not protobuf", "closed")


class Enough(BaseException):
    """The test is over."""


def fault(kind: str | int) -> Exception:
    if isinstance(kind, int):
        response = httpx.Response(kind, request=REQUEST)
        return httpx.HTTPStatusError(f"{kind}\nsee a link", request=REQUEST, response=response)
    return {
        "refused": httpx.ConnectError("connection refused"),
        "timeout": httpx.ReadTimeout(""),
        "cut": httpx.RemoteProtocolError("server disconnected"),
        "not protobuf": ValueError("Invalid protobuf response payload"),
        "closed": RuntimeError("the client has been closed"),
    }[kind]


class SuperLink:
    """Flower's client of the Fleet API, and a server behind it that fails when it is told to.

    It hands out one message after another. Once all faults are over, and two more messages were
    answered, it raises `Enough`.

    Args:
        faults: what becomes of the first calls, by number; None: nothing bad.
    """

    def __init__(self, faults: list[str | int | None]) -> None:
        self.faults, self.calls = faults, 0
        self.objects: dict[str, bytes] = {}
        self.missing: set[str] = set()
        self.answered = 0
        self._lock = threading.Lock()

    def _call(self) -> None:
        with self._lock:
            self.calls += 1
            kind = self.faults[self.calls - 1] if self.calls <= len(self.faults) else None
        if self.calls > len(self.faults) + 400:
            raise Enough("too many calls")
        if kind is not None:
            raise fault(kind)

    def ActivateNode(self, _: Any) -> Any:
        self._call()
        return ActivateNodeResponse(node_id=7)

    def DeactivateNode(self, _: Any) -> Any:
        self._call()
        return DeactivateNodeResponse()

    def SendNodeHeartbeat(self, _: Any) -> Any:
        return SendNodeHeartbeatResponse(success=True)

    def PullMessages(self, _: Any) -> Any:
        if self.answered >= 2:
            raise Enough
        self._call()
        message = Message(to_records(Parcel({"kind": HELLO})), 7, MESSAGE_TYPE, ttl=60)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects |= {n: o.deflate() for n, o in get_all_nested_objects(message).items()}
        return PullMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )

    def PullObject(self, request: Any) -> Any:
        self._call()
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, _: Any) -> Any:
        self._call()
        return ConfirmMessageReceivedResponse()

    def PushMessages(self, request: Any) -> Any:
        self._call()
        names = [request.message_object_trees[0].object_id]
        return PushMessagesResponse(objects_to_push=names, session_id="session")

    def PushObject(self, _: Any) -> Any:
        self._call()
        self.answered += self.calls > len(self.faults)
        return PushObjectResponse(stored=True)

    def close(self) -> None:
        pass


class Site:
    """Answers everything."""

    def reply(self, text: str, blob: bytes, report: Callable[[str], None]) -> Answer:
        asked = Parcel.unpack(text, blob)
        report(str(asked.facts["kind"]))
        return Answer(*Parcel({"kind": asked.facts["kind"]}).pack())


@contextmanager
def quickly(link: SuperLink) -> Iterator[None]:
    """Nothing waits; the server is `link`."""
    with (
        patch.object(FleetHttpClient, "from_server_address", lambda *_, **__: link),
        patch.object(node, "check_server", lambda _: True),
        patch.object(node, "RETRY", 0.0),
        patch.object(node, "POLL", 0.0),
        patch.object(flwr_internals, "PAUSE", 0.0),
        patch.object(TaskIdentity, "_run_id", 1),
        patch.object(TaskIdentity, "_task_id", 1),
        patch.object(TaskIdentity, "_node_id", 1),
    ):
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "ca.crt").write_text("none")
    key = keys.new_key()
    return SimpleNamespace(
        path=folder,
        name="north",
        address=("server", 1),
        certificate=folder / "ca.crt",
        pair=lambda: (key, key.public_key()),
    )


def joined(bundle: Any, link: SuperLink) -> list[str]:
    """The lines that a site prints until the test is over."""
    lines: list[str] = []
    with quickly(link), pytest.raises(Enough):
        node.join(bundle, Site(), lines.append)  # type: ignore[arg-type]
    return lines


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.none(), st.none(), st.sampled_from(FAULTS)), max_size=40))
def test_whatever_fails_the_site_goes_on(bundle: Any, faults: list[str | int | None]) -> None:
    link = SuperLink(faults)
    lines = joined(bundle, link)
    assert link.answered == 2
    assert all("\n" not in line and "Traceback" not in line for line in lines)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_stays_at_each_point_is_survived(bundle: Any, kind: str | int) -> None:
    """The same fault for long enough that no repeated call can hide it, at every point in turn."""
    for begin in range(12):
        link = SuperLink([None] * begin + [kind] * 10)
        joined(bundle, link)
        assert link.answered == 2


def test_a_reply_survives_a_broken_connection(bundle: Any) -> None:
    """The message is not handed out again: without its reply the server would wait in vain."""
    plain = SuperLink([])
    joined(bundle, plain)
    calls = (plain.calls - 2) // 2  # of one message and its reply
    for begin in (calls - 1, calls):  # the first call activates the connection
        link = SuperLink([None] * begin + ["cut"] * 3)
        lines = joined(bundle, link)
        assert sum(line.startswith("lost the server") for line in lines) == 1
        assert sum(line == HELLO for line in lines) == 2, "no message is answered in vain"


def test_a_refused_site_says_so(bundle: Any) -> None:
    link = SuperLink([])

    def refuse(_: Any) -> None:
        response = httpx.Response(
            401, headers={flwr_internals.REFUSED: "unknown key"}, request=REQUEST
        )
        raise httpx.HTTPStatusError("401", request=REQUEST, response=response)

    link.ActivateNode = refuse  # type: ignore[method-assign]
    with quickly(link), pytest.raises(UserError, match="refused the key of 'north': unknown key"):
        node.join(bundle, Site(), lambda _: None)  # type: ignore[arg-type]


def test_content_that_never_comes_is_not_waited_for(bundle: Any) -> None:
    class Stuck(SuperLink):
        def PullObject(self, request: Any) -> Any:
            if self.calls < 12:
                self._call()
                return PullObjectResponse(object_found=True, object_available=False)
            return super().PullObject(request)

    link = Stuck([])
    with patch.object(flwr_internals, "CONTENT_TIMEOUT", 0.01):
        lines = joined(bundle, link)
    assert any("withdrawn a message" in line for line in lines)
    assert link.answered == 2


@pytest.mark.parametrize("ends", ["at once", "after a byte"])
def test_a_server_that_ends_in_the_handshake_is_away(ends: str, tmp_path: Path) -> None:
    """Killed while a site connects: no mistake of an operator, and no reason to give up."""
    certificate = tmp_path / "ca.crt"
    certificate.write_bytes(keys.certificate_pem(keys.new_authority(keys.new_key())))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 if ends == "after a byte" else 1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        away = SimpleNamespace(address=("127.0.0.1", port), certificate=certificate)
        assert node.check_server(away) is False  # type: ignore[arg-type]
        thread.join()


def test_a_handshake_that_is_cut_is_not_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several errors are possible; the moment decides."""
    certificate = tmp_path / "ca.crt"
    certificate.write_bytes(keys.certificate_pem(keys.new_authority(keys.new_key())))
    away = SimpleNamespace(address=("127.0.0.1", 1), certificate=certificate)
    for error in (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, TimeoutError):

        def cut(*_: Any, error: type[OSError] = error, **__: Any) -> None:
            raise error("cut")

        monkeypatch.setattr(socket, "create_connection", cut)
        assert node.check_server(away) is False  # type: ignore[arg-type]
