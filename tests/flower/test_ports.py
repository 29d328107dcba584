"""The two ports of the server: who gets through, with which key, and as one process per site.

Sites' connections and Flower's SuperLink are the real ones, without a network between them.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node

from polyphily.flower import admission, executor, flwr_internals, keys, superlink
from polyphily.flower.app import GridTransport
from polyphily.flower.deployment import Bundle, Deployment, read_secret
from polyphily.flower.flwr_internals import SECRET, ConnectionRefused, FleetConnection
from polyphily.flower.keys import KeyPair
from polyphily.flower.register import Journal
from polyphily.flower.superlink import FLEET, LARGEST, LARGEST_ENVELOPE, Doorkeeper, fleet_only
from polyphily.flower.wire import Parcel

PUBLIC, INNER = 9443, 9444


class InProcess(httpx.BaseTransport):
    """A network of one process."""

    def __init__(self, app: Any, address: str = "10.0.0.1") -> None:
        self.app, self.address = app, address

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> httpx.Response:
            inner = httpx.ASGITransport(self.app, client=(self.address, 1))
            sent = httpx.Request(
                request.method, request.url, headers=request.headers, content=request.read()
            )
            reply = await inner.handle_async_request(sent)
            return httpx.Response(
                reply.status_code, headers=reply.headers, content=await reply.aread()
            )

        return asyncio.run(answer())


class Served:
    """A server's folder with sites a and b, and its SuperLink behind the doorkeeper."""

    def __init__(self, place: Path) -> None:
        self.own = Deployment.create(place / "server", ["a", "b"], "127.0.0.1", PUBLIC, INNER)
        path = self.own.path
        files = (path / name for name in ("ca.crt", "server.crt", "server.key", "flower/state.db"))
        self.flower = flwr_internals.superlink_app(self.own.control, *files, ["true"])
        self.lines: list[str] = []
        self.nodes = flwr_internals.Nodes(self.flower)
        self.doorkeeper = Doorkeeper(
            self.own.register, self.nodes, Journal(path), self.lines.append
        )
        self.secret = superlink.write_secret(self.own)
        self.app = fleet_only(self.flower, PUBLIC, self.secret, self.doorkeeper)

    def http(self, port: int, **headers: str) -> httpx.Client:
        address = f"https://127.0.0.1:{port}"
        return httpx.Client(transport=InProcess(self.app), base_url=address, headers=headers)

    def pair(self, site: str) -> KeyPair:
        return Bundle(self.own.path / "bundles" / site).pair()

    def key(self, site: str) -> bytes:
        return keys.public_pem(self.pair(site)[1])

    def connection(
        self, site: str, seat: str, pair: KeyPair | None = None, address: str = "10.0.0.1"
    ) -> FleetConnection:
        certificate = (self.own.path / "ca.crt").read_bytes()
        found = FleetConnection(f"127.0.0.1:{PUBLIC}", certificate, pair or self.pair(site), seat)
        found._client._client = httpx.Client(transport=InProcess(self.app, address))
        return found

    def events(self) -> list[tuple[str, str]]:
        return [(e["event"], e.get("site", "")) for e in Journal(self.own.path).events()]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(flwr_internals, "PAUSE", 0.0)
    return Served(tmp_path)


# Doors -----------------------------------------------------------------------------------------


def routes(app: Any) -> list[tuple[str, str]]:
    """Every method and path that Flower serves."""
    paths = app.openapi()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def test_no_route_of_flowers_is_open_but_the_fleet_api_to_sites(served: Served) -> None:
    found = routes(served.flower)
    assert len(found) > 50
    with (
        served.http(PUBLIC) as outside,
        served.http(INNER) as inside,
        served.http(INNER, **{SECRET: "0" * 64}) as guessing,
    ):
        for method, path in [*found, ("get", "/docs"), ("get", "/openapi.json")]:
            is_fleet = path.startswith(FLEET)
            status = outside.request(method, path, content=b"x").status_code
            assert status == (401 if is_fleet else 404), path
            for client in (inside, guessing):
                status = client.request(method, path, content=b"x").status_code
                assert status == (404 if is_fleet else 401), path


def test_the_secret_opens_the_inner_door_only(served: Served) -> None:
    proto = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
    with served.http(INNER, **{SECRET: read_secret(served.own)}, **proto) as client:
        assert client.get("/health").status_code < 400
        assert client.post("/v1/runtime/acquire-task").status_code not in (401, 404)
    with served.http(PUBLIC, **{SECRET: served.secret}) as client:
        assert client.get("/health").status_code == 404


@pytest.mark.parametrize("path", ["//v1/fleet/", "/v1/fleet/../control/start-run", "/v1/fleet"])
def test_tricks_with_paths_lead_nowhere(served: Served, path: str) -> None:
    async def status() -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "server": ("127.0.0.1", PUBLIC), "headers": [(b"content-length", b"0")],
            "query_string": b"", "http_version": "1.1", "scheme": "https", "client": ("x", 1),
        }  # fmt: skip
        await served.app(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(status()) in (401, 404)


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("push-object", LARGEST, 401),
        ("push-object", LARGEST + 1, 413),
        ("push-object", None, 413),
        ("push-messages", LARGEST_ENVELOPE + 1, 413),
    ],
)
def test_large_requests_are_refused_unread(
    served: Served, path: str, length: int | None, status: int
) -> None:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": FLEET + path, "server": ("", PUBLIC), "headers": headers}
    asyncio.run(served.app(scope, None, send))  # there is nothing to read from
    assert sent[0]["status"] == status


def test_websockets_are_closed(served: Served) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(served.app({"type": "websocket"}, None, send))
    assert sent[0]["type"] == "websocket.close"


def test_the_secret_is_new_each_time_and_for_one_user_only(served: Served) -> None:
    first = read_secret(served.own)
    superlink.write_secret(served.own)
    assert read_secret(served.own) != first
    assert served.own.secret_file.stat().st_mode & 0o777 == 0o600
    if os.getuid() == 0 and shutil.which("setpriv"):
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command = [*nobody, "cat", served.own.secret_file, served.own.path / "ca.key"]
        tried = subprocess.run(command, capture_output=True, text=True)
        assert tried.stdout == ""
        assert tried.stderr.count("Permission denied") == 2


def test_a_token_goes_through_a_pipe_and_not_into_the_process_list(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; print(sys.stdin.readline().strip(), sys.argv, file=open('told', 'w'))"
    launches: list[Callable[[str], subprocess.Popen[bytes]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYPHILY_SERVER", str(served.own.path))
    monkeypatch.setattr(flwr_internals, "send_with_every_request", lambda *_: None)
    monkeypatch.setattr(
        flwr_internals,
        "execute_runs",
        lambda address, file, parent, launch: launches.append(launch),
    )
    monkeypatch.setattr(
        executor, "command", lambda *more: [sys.executable, "-c", program, *map(str, more)]
    )
    executor.main(["1"])
    process = launches[0]("the-token")
    assert process.wait(30) == 0
    told = Path("told").read_text()
    assert told.startswith("the-token ")
    assert "the-token" not in told.removeprefix("the-token ")
    assert "the-token" not in str(process.args)


# Keys ------------------------------------------------------------------------------------------


def test_a_registered_site_connects_and_leaves(served: Served) -> None:
    with served.connection("a", "one") as site:
        assert site.receive() is None
        assert served.events() == [("connected", "a")]
    assert served.events() == [("connected", "a"), ("left", "a")]


def test_a_stranger_is_told_that_he_is_not_known(served: Served) -> None:
    key = keys.new_key()
    with pytest.raises(ConnectionRefused, match="does not know this key"):
        served.connection("a", "one", (key, key.public_key())).__enter__()
    assert served.events() == []


def test_a_revoked_key_is_refused_at_the_next_message(served: Served) -> None:
    with served.connection("a", "one") as a, served.connection("b", "two") as b:
        assert a.receive() is None
        admission.revoke(served.own, "a")
        with pytest.raises(ConnectionRefused, match="revoked"):
            a.receive()
        with pytest.raises(ConnectionRefused, match="revoked"):
            served.connection("a", "three").__enter__()
        assert b.receive() is None
    assert served.events().count(("refused", "a")) == 1, "told once"


def test_a_site_that_is_taken_out_of_the_configuration_is_refused(served: Served) -> None:
    with served.connection("a", "one") as a:
        config = served.own.path / "config.toml"
        config.write_text(config.read_text().replace('"a", ', ""))
        with pytest.raises(ConnectionRefused, match=r"config\.toml"):
            a.receive()


def test_a_site_is_admitted_and_gets_a_new_key_while_the_server_runs(
    served: Served, tmp_path: Path
) -> None:
    with served.connection("a", "one"):  # the server is at work
        folder = tmp_path / "c"
        request = admission.init_site(folder, "c", f"127.0.0.1:{PUBLIC}")
        pair = Bundle(folder).pair()
        with pytest.raises(ConnectionRefused, match="does not know"):
            served.connection("c", "x", pair).__enter__()
        admission.accept(folder, admission.admit(served.own, request))
        with served.connection("c", "x", pair) as c:
            assert c.receive() is None
            answer = admission.rotate(served.own, admission.rotate_site(folder))
            with pytest.raises(ConnectionRefused, match="replaced"):
                c.receive()
        admission.accept(folder, answer)
        with served.connection("c", "y", Bundle(folder).pair()) as c:
            assert c.receive() is None


def test_a_register_that_is_being_edited_stays_as_it_was(served: Served) -> None:
    with served.connection("a", "one") as a:
        config = served.own.path / "config.toml"
        whole = config.read_text()
        config.write_text(whole[:9])
        assert a.receive() is None
        key = keys.new_key()
        with pytest.raises(ConnectionRefused, match="does not know"):
            served.connection("a", "x", (key, key.public_key())).__enter__()
        config.write_text(whole)
        assert a.receive() is None


# Seats -----------------------------------------------------------------------------------------


def test_the_latest_process_of_a_site_has_its_seat(served: Served) -> None:
    """A copy of a site's folder does not take turns with the original."""
    with served.connection("a", "original") as original:
        assert original.receive() is None
        with served.connection("a", "copy", address="10.6.6.6") as copy:
            for _ in range(2):
                with pytest.raises(ConnectionRefused, match=r"another process.*10\.6\.6\.6"):
                    original.receive()
                assert copy.receive() is None
            with pytest.raises(ConnectionRefused, match="another process"):
                served.connection("a", "original").__enter__()  # it does not come back by itself
            assert copy.receive() is None
            assert ("replaced", "a") in served.events()
            line = next(line for line in served.lines if "was ended" in line)
            assert "10.6.6.6" in line
            assert "server revoke" in line
        original.__exit__()
    assert served.events().count(("left", "a")) == 1, "who has lost the seat cannot give it up"


def test_a_site_that_was_killed_connects_again_at_once(served: Served) -> None:
    served.connection("a", "before").__enter__()  # and is never closed
    with served.connection("a", "after") as again:
        assert again.receive() is None


def test_the_same_process_connects_again_without_a_word(served: Served) -> None:
    served.connection("a", "one").__enter__()
    with served.connection("a", "one") as again:
        assert again.receive() is None
        assert served.events() == [("connected", "a")]


def test_nobody_takes_a_seat_without_the_key(served: Served) -> None:
    """Public keys are known to all sites; only a signature makes a claim."""
    with served.connection("a", "one") as a:
        thief = served.connection("b", "two")
        recorded: list[httpx.Request] = []
        thief._client._client.event_hooks["request"].append(recorded.append)
        with thief:
            pass
        headers = dict(recorded[0].headers)
        headers["flwr-public-key"] = base64.b64encode(served.key("a")).decode()
        with served.http(PUBLIC) as client:
            for path in ("activate-node", "deactivate-node", "pull-messages"):
                reply = client.post(FLEET + path, headers=headers, content=recorded[0].content)
                assert reply.status_code in (400, 401, 409), path
        assert a.receive() is None, "its seat is still its own"
    assert ("replaced", "a") not in served.events()


def test_an_old_signature_is_worth_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supernode import node_auth_http_interceptor as module

    real = module.now
    monkeypatch.setattr(module, "now", lambda: real() - dt.timedelta(hours=1))
    with pytest.raises(ConnectionRefused, match="not signed"):
        served.connection("a", "one").__enter__()


def test_after_a_restart_of_the_server_a_site_goes_on(served: Served) -> None:
    with served.connection("a", "one") as a:
        served.doorkeeper._seats.clear()
        assert a.receive() is None
        copy = served.connection("a", "two")
        copy.node_id = a.node_id
        with pytest.raises(ConnectionRefused, match="another process"):
            copy.receive()


# Answers ---------------------------------------------------------------------------------------


def push(node: int, sender: int, count: int = 1) -> PushMessagesRequest:
    message = MessageProto(metadata=Metadata(src_node_id=sender, reply_to_message_id="x" * 64))
    return PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[message] * count,
        message_object_trees=[ObjectTree()] * count,
    )


def test_a_site_cannot_answer_in_another_sites_name(served: Served) -> None:
    """Flower checks who sends a reply, but not in whose name."""
    with served.connection("a", "one") as a, served.connection("b", "two") as b:
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            a._client.PushMessages(push(a.node_id, b.node_id))
        assert ("forged", "a") in served.events()
        for request in (push(a.node_id, a.node_id, 0), push(a.node_id, a.node_id, 2)):
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                a._client.PushMessages(request)


def test_a_site_gets_its_own_messages_only(served: Served) -> None:
    with served.connection("a", "one") as a, served.connection("b", "two") as b:
        request = PullMessagesRequest(node=Node(node_id=b.node_id))
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            a._client.PullMessages(request)


class EmptyGrid:
    """A grid whose sites never answer."""

    def __init__(self, found: dict[bytes, int]) -> None:
        self.found, self.pushed = found, 0

    def get_nodes(self) -> list[Any]:
        return [type("N", (), {"node_id": n, "public_key": k})() for k, n in self.found.items()]

    def push_messages(self, messages: Any) -> list[str]:
        self.pushed += 1
        return [str(self.pushed)]

    def pull_messages(self, numbers: Any) -> list[Any]:
        return []


def test_a_site_that_is_revoked_during_a_run_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyphily.flower import app

    monkeypatch.setattr(app, "POLL", 0.01)
    monkeypatch.setattr(app, "Message", lambda *_, **__: None)
    grid = EmptyGrid({served.key("a"): 1, served.key("b"): 2})
    transport = GridTransport(grid, served.own.public_keys(), served.own.register)  # type: ignore[arg-type]
    began = time.monotonic()
    answers = transport.ask({"a": Parcel({"kind": "x"})}, timeout=60)
    assert transport.online() == {"a", "b"}
    admission.revoke(served.own, "a")
    ((site, answer),) = answers
    assert site == "a"
    assert "revoked" in answer.error
    assert time.monotonic() - began < 30
    assert set(transport.sites.values()) == {"b"}
