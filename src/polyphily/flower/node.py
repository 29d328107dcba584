"""A site's connection to the server: Flower's Fleet API, answered by Polyphily's own code.

Flower's SuperNode runs whatever app the server sends. This node accepts messages only and answers
them with the code that is installed at the site, so that a server cannot run its own code beside a
private graph. The graph stays in memory between rounds, and no process is started per message.
"""

from __future__ import annotations

import fcntl
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from polyphily.errors import UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import Bundle, quiet_flower, require_flower
from polyphily.flower.site import Site
from polyphily.graphs.checked import plain

if TYPE_CHECKING:
    from polyphily.flower.keys import KeyPair

POLL, RETRY = 0.5, 2.0  # seconds between two looks for messages, and between two connections
EXPIRED = 10  # OpenSSL's number for a certificate that has expired
Report = Callable[[str], None]
Unsent: TypeAlias = list[tuple[Any, int, float]]
"""At most one reply that is still to be sent, with the number of its run and its seconds."""


def check_server(bundle: Bundle) -> bool:
    """Return whether the server can be reached.

    Raises:
        UserError: if another server answers, or one without TLS.
    """
    host, port = bundle.address
    context = ssl.create_default_context(cafile=str(bundle.certificate))
    try:
        with (
            socket.create_connection((host, port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == EXPIRED:
            raise UserError(
                f"the certificate of the server at {host}:{port} has expired. Its operator can "
                "renew it: polyphily server renew. Nothing was sent to it"
            ) from None
        raise UserError(
            f"{host}:{port} is not the server of this bundle: {error.verify_message}. "
            "Nothing was sent to it"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
        return False  # it ended in the middle of the handshake
    except ssl.SSLError as error:
        raise UserError(
            f"{host}:{port} does not speak TLS as the server of this bundle does: {error.reason}. "
            "Nothing was sent to it"
        ) from None
    except OSError:
        return False


def join(bundle: Bundle, site: Site, report: Report) -> None:
    """Answer the server's messages until interrupted.

    While the server cannot be reached, the site tries to connect again and again.

    Args:
        bundle: the site's folder.
        site: answers the messages.
        report: called with a line of text for everything that happens.
    """
    require_flower()
    quiet_flower()
    keys = bundle.pair()
    seat = secrets.token_hex(16)  # tells this process from others with the same key
    waiting = False
    unsent: Unsent = []
    with _locked(bundle):
        while True:
            if check_server(bundle):
                waiting = False
                _answer_messages(bundle, keys, seat, site, report, unsent)
                report("disconnected; trying again")
            elif not waiting:
                report(f"waiting for the server at {':'.join(map(str, bundle.address))}")
                waiting = True
            time.sleep(RETRY)


@contextmanager
def _locked(bundle: Bundle) -> Iterator[None]:
    """Refuse a second process with the same bundle: each would take messages of the other."""
    with (bundle.path / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"site '{bundle.name}' takes part already, from this bundle") from None
        yield


def _answer_messages(
    bundle: Bundle, keys: KeyPair, seat: str, site: Site, report: Report, unsent: Unsent
) -> None:
    """Connect and answer messages until the connection breaks.

    Args:
        bundle: the site's folder.
        keys: of the site.
        seat: names this process.
        site: answers the messages.
        report: called with a line of text for everything that happens.
        unsent: the reply during which an earlier connection broke; filled if this one breaks.

    Raises:
        UserError: if the server refuses this site, which trying again does not change.
    """
    from polyphily.flower.app import make_reply

    host, port = bundle.address
    address, certificate = f"{host}:{port}", bundle.certificate.read_bytes()
    try:
        with flwr_internals.FleetConnection(address, certificate, keys, seat) as connection:
            report("connected")
            while True:
                if unsent:
                    _send(connection, unsent, report)
                try:
                    received = connection.receive()
                except flwr_internals.MessageGone:  # as after `server stop`
                    report("the server has withdrawn a message")
                    received = None
                if received is None:
                    time.sleep(POLL)
                    continue
                message, run = received
                reply = make_reply(site, message, report)
                unsent.append((reply, run, 0.0))  # the time would tell the size of the graph
    except flwr_internals.ConnectionRefused as error:
        raise UserError(
            f"the server at {address} refused the key of '{bundle.name}': {plain(error)}. If "
            "somebody else may have the key, tell the server's operator, who can revoke it"
        ) from None
    except Exception as error:  # whatever Flower's client raises: the site goes on
        report(f"lost the server: {plain(error) or type(error).__name__}")


def _send(connection: flwr_internals.FleetConnection, unsent: Unsent, report: Report) -> None:
    """Send the reply that is waiting. It stays there if the connection breaks."""
    try:
        connection.send(*unsent[0])
    except flwr_internals.ReplyRejected as error:
        report(f"the server did not accept the answer: {plain(error)}")
    unsent.clear()
