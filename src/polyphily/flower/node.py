"""A site's connection to the server: Flower's Fleet API, answered by Polyphily's own code.

Flower's SuperNode runs the app that the server sends. A site that guards its graph must not: this
node takes messages only, and answers them with the code that is installed at the site. The graph
stays in memory from round to round, which also spares the start of a process for every message.
"""

from __future__ import annotations

import fcntl
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from polyphily.errors import UserError
from polyphily.flower.deployment import Bundle, quiet_flower, require_flower
from polyphily.flower.site import Site
from polyphily.runs.folder import write_text

POLL = 0.5
NODE = "node-id"  # where the site's number at the server is kept
Report = Callable[[str], None]


def check_server(bundle: Bundle) -> bool:
    """Whether the server can be reached; that it is the right one is a condition.

    Raises:
        UserError: where the server is another one, or speaks no TLS.
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
    except ssl.SSLError as error:
        raise UserError(
            f"{host}:{port} does not speak TLS as the server of this bundle does: {error.reason}. "
            "Nothing was sent to it"
        ) from None
    except OSError:
        return False


def join(bundle: Bundle, site: Site, report: Report) -> None:
    """Answers the server's messages until interrupted; waits where it is away."""
    require_flower()
    quiet_flower()
    pair = bundle.pair()
    waiting = False
    with _alone(bundle):
        while True:
            if not check_server(bundle):
                if not waiting:
                    report(f"waiting for the server at {':'.join(map(str, bundle.address))}")
                    waiting = True
                time.sleep(2)
                continue
            waiting = False
            _stay(bundle, site, pair, report)
            report("disconnected; trying again")
            time.sleep(2)


@contextmanager
def _alone(bundle: Bundle) -> Iterator[None]:
    """One process per bundle: two would take each other's messages."""
    with (bundle.path / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"site '{bundle.name}' takes part already, from this bundle") from None
        yield


def _stay(bundle: Bundle, site: Site, pair: Any, report: Report) -> None:
    """One connection, from activation until it breaks."""
    import httpx
    from flwr.supernode.fleet_http_connection import http_request_response

    host, port = bundle.address
    _sign_off(bundle, pair)
    try:
        with http_request_response(
            f"{host}:{port}", False, bundle.certificate.read_bytes(), pair, max_retries=2
        ) as connection:
            write_text(bundle.path / NODE, f"{connection[0]}\n")
            report("connected")
            while True:
                if not _one_message(connection, site, report):
                    time.sleep(POLL)
    except httpx.HTTPError as error:
        report(f"lost the server: {error}")
    except SystemExit:
        raise UserError(
            f"the server at {host}:{port} refused the key of '{bundle.name}'. Either it does not "
            "know this key (is the bundle from another server?), or the same site is connected "
            "from elsewhere"
        ) from None


def _sign_off(bundle: Bundle, pair: Any) -> None:
    """Tells the server that an earlier connection of this site is over, if it was cut short.

    Flower would turn the site away until that connection's heartbeat is missed twice, a minute.
    """
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    file = bundle.path / NODE
    if not file.exists():
        return
    host, port = bundle.address
    with (
        FleetHttpClient.from_server_address(
            f"{host}:{port}",
            False,
            bundle.certificate.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(*pair),
            ],
        ) as client,
        suppress(httpx.HTTPError, ValueError),
    ):
        number = int(file.read_text(encoding="ascii"))
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))


def _one_message(connection: Any, site: Site, report: Report) -> bool:
    """Takes a message, if there is one, and answers it."""
    import httpx
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPushError,
        pull_and_inflate_object_from_tree,
        push_objects,
    )
    from flwr.supercore.run import RunNotRunningException

    from polyphily.flower.app import answer_with

    _, receive, send, _, _, pull, push, confirm = connection
    if (found := receive()) is None:
        return False
    envelope, tree = found
    run = envelope.metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree, lambda name: pull(run, name), lambda name: confirm(run, name), return_type=Message
    )
    message.metadata.__dict__["_message_id"] = envelope.metadata.message_id
    began = time.monotonic()
    reply = answer_with(site, message, report)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    try:
        with no_object_id_recompute():
            names, session = send(reply, get_object_tree(reply), time.monotonic() - began)
            push_objects(
                get_all_nested_objects(reply),
                lambda name, content: push(run, session, name, content),
                object_ids_to_push=names,
            )
    except (httpx.HTTPStatusError, RunNotRunningException, ObjectPushError) as error:
        report(f"the server did not take the answer: {error}")
    return True
