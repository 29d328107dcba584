"""Flower's SuperLink on two ports: the Fleet API for the sites, everything else for loopback only.

Flower serves all its APIs on one port, and everybody who reaches the Control API can run any code
on the server and at every site. So only the Fleet API is served to the outside. The other APIs are
served on a port that this machine alone can reach, and only to requests with a secret, which is in
a file that nobody but the server's own user can read.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyphily.errors import UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import ENVIRONMENT, Deployment, quiet_flower, require_flower
from polyphily.flower.flwr_internals import REFUSED, SEAT, SECRET, claimed_key, is_signed
from polyphily.flower.register import Journal, Register
from polyphily.runs.folder import write_text

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
Headers = Mapping[bytes, bytes]
Say = Callable[[str], None]
FLEET = "/v1/fleet/"
ACTIVATE, DEACTIVATE = f"{FLEET}activate-node", f"{FLEET}deactivate-node"
PUSH = f"{FLEET}push-messages"
LARGEST = 64 << 20  # largest request, in bytes; Flower splits larger contents
LARGEST_ENVELOPE = 4 << 20  # of the message without its content
EXPIRY = 60.0  # seconds between two looks for certificates that have ended
WATCH = 1.0  # seconds between two looks at the register and the certificate


class Refusal(Exception):
    """A request that is not served: its HTTP status, and a reason for the site."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def fleet_only(app: App, public_port: int, secret: str, doorkeeper: Doorkeeper) -> App:
    """Wrap the app so that sites reach the Fleet API only, and others need the secret.

    Args:
        app: the SuperLink.
        public_port: the port for sites.
        secret: what requests to the other port must carry.
        doorkeeper: decides which sites are served.
    """

    async def guarded(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":  # start and end of the server
            await app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        is_fleet = path.startswith(FLEET)
        try:
            if scope["server"][1] != public_port:
                given = headers.get(SECRET.encode(), b"")
                if is_fleet or not hmac.compare_digest(given, secret.encode()):
                    raise Refusal(404 if is_fleet else 401)
            else:
                if not is_fleet:
                    raise Refusal(404)
                largest = LARGEST_ENVELOPE if path == PUSH else LARGEST
                if int(headers.get(b"content-length", largest + 1)) > largest:
                    raise Refusal(413)
                address = str((scope.get("client") or ("unknown",))[0])
                await asyncio.to_thread(doorkeeper.check, path, headers, address)
                if path == PUSH:
                    content = await _read(receive)
                    await asyncio.to_thread(doorkeeper.check_reply, headers, content)
                    receive = _again(content, receive)
        except Refusal as refusal:
            await _refuse(send, refusal)
            return
        await app(scope, receive, send)

    return guarded


async def _read(receive: Any) -> bytes:
    """Read the content of a request."""
    parts, more = [], True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            raise Refusal(400)
        parts.append(event.get("body", b""))
        more = event.get("more_body", False)
    return b"".join(parts)


def _again(content: bytes, receive: Any) -> Any:
    """Return a function that gives the content of a request once more."""
    events = deque([{"type": "http.request", "body": content, "more_body": False}])

    async def replay() -> Any:
        return events.popleft() if events else await receive()

    return replay


async def _refuse(send: Any, refusal: Refusal) -> None:
    reason = refusal.reason.encode("ascii", "replace")
    headers = [(REFUSED.encode(), reason)] if reason else []
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


# Sites -----------------------------------------------------------------------------------------


@dataclass
class Seat:
    """The process that speaks for a site.

    Attributes:
        holder: drawn by that process; empty for Flower's own SuperNode, which draws none.
        address: from which it has connected.
        since: time of the connection.
        former: processes that have lost the seat to another.
    """

    holder: str
    address: str
    since: float
    former: deque[str] = field(default_factory=lambda: deque(maxlen=100))


class Doorkeeper:
    """Decides which requests of sites are served: by their key, and one process per site.

    Args:
        register: of the sites.
        nodes: of the SuperLink.
        journal: of the server.
        say: prints a line for the operator.
    """

    def __init__(
        self, register: Register, nodes: flwr_internals.Nodes, journal: Journal, say: Say
    ) -> None:
        self.register, self.nodes, self.journal, self.say = register, nodes, journal, say
        self._seats: dict[bytes, Seat] = {}
        self._lock = threading.Lock()
        self._known: set[bytes] = set()  # keys that Flower knows and that are valid
        self._version, self._next_look = -1, 0.0
        self._told: set[tuple[bytes, str]] = set()  # refusals that are in the journal already

    def update(self) -> None:
        """Register new keys with Flower, and disconnect sites whose key is not valid any more.

        A register that cannot be read, because somebody is editing it, stays as it was.
        """
        with suppress(UserError, OSError, ValueError):
            self.register.refresh()
            if self.register.version == self._version and time.time() < self._next_look:
                return
            self._version, self._next_look = self.register.version, time.time() + EXPIRY
            active = {entry.pem: entry.name for entry in self.register.active()}
            self.nodes.register(active)
            for key in self._known - active.keys():
                self.nodes.disconnect(key)
                self._seats.pop(key, None)
            self._known = set(active)

    def watch(self) -> None:
        """Take note of changes of the register, although no site sends anything."""
        with self._lock:
            self.update()

    def check(self, path: str, headers: Headers, address: str) -> None:
        """Check the key and the seat of a request, before Flower checks the signature.

        A seat changes hands only after the signature was checked here.

        Raises:
            Refusal: if the request is not served.
        """
        key, holder = claimed_key(headers), headers.get(SEAT.encode(), b"").decode("latin-1")
        with self._lock:
            self.update()
            if reason := self._refusal(key):
                self._tell_refused(key, reason, address, headers)
                raise Refusal(401, reason)
            seat = self._seats.get(key)
            if seat is not None and holder in seat.former:
                raise Refusal(409, _lost(self.register.name_of(key), seat))
            if path == ACTIVATE:
                self._take_seat(key, holder, address, headers)
            elif seat is None:
                if is_signed(headers):  # the server was restarted
                    self._seats[key] = Seat(holder, address, time.time())
            elif seat.holder != holder:
                raise Refusal(409, _lost(self.register.name_of(key), seat))
            elif path == DEACTIVATE and is_signed(headers):
                self._leave(key)

    def check_reply(self, headers: Headers, content: bytes) -> None:
        """Check that a site answers in its own name; Flower does not.

        Raises:
            Refusal: if it does not.
        """
        key = claimed_key(headers)
        if flwr_internals.sender_of_reply(content) != self.nodes.number(key):
            name = self.register.name_of(key)
            if is_signed(headers):
                self._tell("forged", f"{name} sent an answer in another site's name", site=name)
            raise Refusal(400)

    def _refusal(self, key: bytes) -> str:
        try:
            return self.register.refusal(key) if key else "the request has no key"
        except (UserError, OSError, ValueError):
            return "" if key in self._known else "the server does not know this key"

    def _tell_refused(self, key: bytes, reason: str, address: str, headers: Headers) -> None:
        name = self.register.name_of(key)
        if name and (key, reason) not in self._told and is_signed(headers):
            self._told.add((key, reason))
            self._tell("refused", f"{name} was refused: {reason}", site=name, address=address)

    def _take_seat(self, key: bytes, holder: str, address: str, headers: Headers) -> None:
        """Give a site's seat to the process that connects; the latest one has it."""
        if not is_signed(headers):
            raise Refusal(401, "the request is not signed with the site's key")
        name, old = self.register.name_of(key), self._seats.get(key)
        seat = Seat(holder, address, time.time(), old.former if old else deque(maxlen=100))
        self._seats[key] = seat
        if old is None:
            self._tell("connected", f"{name} connected from {address}", site=name, address=address)
        elif old.holder != holder:
            seat.former.append(old.holder)
            self._tell(
                "replaced",
                f"{name} connected from {address}, and its connection from {old.address} was "
                f"ended. If {name} has not been restarted, somebody else has its key: "
                f"polyphily server revoke {self.register.path} {name}",
                site=name,
                address=address,
                before=old.address,
            )
        if holder or (old and old.holder):  # Flower itself allows one of its SuperNodes only
            self.nodes.disconnect(key)  # otherwise Flower refuses while the old connection is open

    def _leave(self, key: bytes) -> None:
        del self._seats[key]
        name = self.register.name_of(key)
        self._tell("left", f"{name} left", site=name)

    def _tell(self, event: str, line: str, **facts: Any) -> None:
        self.journal.write(event, **facts)
        self.say(line)


def _lost(name: str, seat: Seat) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(seat.since))
    return f"another process has connected with the key of '{name}' at {when} from {seat.address}"


# The server ------------------------------------------------------------------------------------


def serve(deployment: Deployment, ready: Callable[[], None], say: Say = print) -> None:
    """Serve until interrupted.

    Args:
        deployment: the server's folder.
        ready: called once connections are accepted.
        say: prints a line for the operator.
    """
    from polyphily.flower import executor
    from polyphily.flower.keys import check_modes

    require_flower()
    path = deployment.path
    public = (path / name for name in ("config.toml", "ca.crt", "server.crt", "sites", "flower"))
    check_modes(path / "server.key", *public)
    check_modes(path / "ca.key")  # it is not read here, and need not be in this folder
    quiet_flower()
    os.environ["FLWR_HOME"] = str(path / "flower")
    os.environ[ENVIRONMENT] = str(path)
    os.umask(0o077)
    import uvicorn

    config = deployment.config()
    sockets = [
        _listen("0.0.0.0", int(config["port"])),
        _listen("127.0.0.1", int(config["control_port"])),
    ]
    secret = write_secret(deployment)
    app = flwr_internals.superlink_app(
        deployment.control,
        path / "ca.crt",
        path / "server.crt",
        path / "server.key",
        path / "flower" / "state.db",
        executor.command(os.getpid()),
    )
    register, nodes = Register(path), flwr_internals.Nodes(app)
    doorkeeper = Doorkeeper(register, nodes, Journal(path), say)
    doorkeeper.update()
    server = uvicorn.Server(
        uvicorn.Config(
            fleet_only(app, int(config["port"]), secret, doorkeeper),
            log_level="warning",
            ssl_keyfile=str(path / "server.key"),
            ssl_certfile=str(path / "server.crt"),
            timeout_graceful_shutdown=2,
            server_header=False,
        )
    )
    write_text(deployment.instance_file, f"{uuid.uuid4().hex}\n")
    asyncio.run(_serve(server, sockets, ready, doorkeeper, path))


def write_secret(deployment: Deployment) -> str:
    """Draw a new secret for this machine's commands and write it with mode 0600."""
    from polyphily.flower.keys import write_private

    secret = secrets.token_hex(32)
    deployment.secret_file.unlink(missing_ok=True)
    write_private(deployment.secret_file, f"{secret}\n".encode("ascii"))
    return secret


async def _serve(
    server: Any,
    sockets: list[socket.socket],
    ready: Callable[[], None],
    doorkeeper: Doorkeeper,
    path: Path,
) -> None:
    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.05)
        ready()
        loaded = _modified(path / "server.crt")
        while True:
            await asyncio.sleep(WATCH)
            await asyncio.to_thread(doorkeeper.watch)
            if (found := _modified(path / "server.crt")) != loaded:
                loaded = found
                with suppress(OSError):  # new connections get the new certificate
                    server.config.ssl.load_cert_chain(path / "server.crt", path / "server.key")
                    doorkeeper.say("the server's certificate was renewed")

    watching = asyncio.create_task(watch())
    await server.serve(sockets=sockets)
    watching.cancel()


def _modified(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} cannot be used: {error.strerror}. Is the server running already? "
            "To use another port, change it in config.toml (and in the sites' site.toml)"
        ) from None
    return listener
