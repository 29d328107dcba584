"""A site's connection to the server: Flower's Fleet API, answered by Polyphily's own code.

Flower's SuperNode runs whatever app the server sends. This node accepts messages only and answers
them with the code that is installed at the site, so that a server cannot run its own code beside a
private graph. The graph stays in memory between rounds, and no process is started per message.
"""

from __future__ import annotations

import fcntl
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from polyphily.errors import UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import Bundle, quiet_flower, require_flower
from polyphily.flower.site import Site
from polyphily.runs.folder import write_text

if TYPE_CHECKING:
    from polyphily.flower.keys import KeyPair

POLL, RETRY = 0.5, 2.0  # seconds between two looks for messages, and between two connections
REFUSALS = 3  # refusals in a row after which a site gives up
NODE = "node-id"  # file in the bundle: the site's node number at the server
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
    waiting, refusals = False, 0
    unsent: Unsent = []
    with _locked(bundle):
        while True:
            if check_server(bundle):
                waiting = False
                try:
                    _answer_messages(bundle, keys, site, report, unsent)
                except flwr_internals.ConnectionFailed as error:
                    refusals = 0
                    report(f"lost the server: {error}; trying again")
                except flwr_internals.ConnectionRefused:
                    refusals += 1  # it may not have noticed that an earlier connection is over
                    if refusals == REFUSALS:
                        raise _refused(bundle) from None
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


def _refused(bundle: Bundle) -> UserError:
    return UserError(
        f"the server at {':'.join(map(str, bundle.address))} refused the key of '{bundle.name}'. "
        "Either it does not know this key (is the bundle from another server?), or the same site "
        "is connected from elsewhere"
    )


def _answer_messages(
    bundle: Bundle, keys: KeyPair, site: Site, report: Report, unsent: Unsent
) -> NoReturn:
    """Connect and answer messages until the connection breaks.

    Args:
        bundle: the site's folder.
        keys: of the site.
        site: answers the messages.
        report: called with a line of text for everything that happens.
        unsent: the reply during which an earlier connection broke; filled if this one breaks.

    Raises:
        ConnectionFailed, ConnectionRefused: when the connection breaks, or never comes about.
    """
    from polyphily.flower.app import make_reply

    host, port = bundle.address
    certificate = bundle.certificate.read_bytes()
    _end_old_connection(bundle, keys)
    with flwr_internals.fleet_connection(f"{host}:{port}", certificate, keys) as connection:
        write_text(bundle.path / NODE, f"{connection.node_id}\n")
        report("connected")
        while True:
            if unsent:
                try:
                    connection.send(*unsent[0])
                except flwr_internals.ReplyRejected as error:
                    report(f"the server did not accept the answer: {error}")
                unsent.clear()
            try:
                received = connection.receive()
            except flwr_internals.MessageLost as error:
                report(f"the server withdrew a message: {error}")
                received = None
            if received is None:
                time.sleep(POLL)
                continue
            message, run = received
            began = time.monotonic()
            reply = make_reply(site, message, report)
            unsent.append((reply, run, time.monotonic() - began))


def _end_old_connection(bundle: Bundle, keys: KeyPair) -> None:
    """Tell the server that this site's earlier connection is over, if there was one.

    Otherwise Flower would refuse the site until that connection has missed two heartbeats, which
    takes a minute.
    """
    import httpx

    file = bundle.path / NODE
    if not file.exists():
        return
    host, port = bundle.address
    with suppress(httpx.HTTPError, ValueError):
        node_id = int(file.read_text(encoding="ascii"))
        certificate = bundle.certificate.read_bytes()
        flwr_internals.deactivate_node(f"{host}:{port}", certificate, keys, node_id)
