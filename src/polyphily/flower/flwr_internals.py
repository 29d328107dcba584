"""Everything of flwr that is used here and is not its public API.

Public are `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. The rest may change with any version
of flwr, so it is used in this file only. Most imports are inside functions: flwr is an optional
dependency, and its SuperLink alone takes two seconds to import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Message

    from polyphily.flower.keys import KeyPair


def is_installed() -> bool:
    """Return whether a version of flwr with these internals is installed."""
    return find_spec("flwr") is not None and find_spec("flwr.supercore") is not None


# Control API: start, stop and list runs ----------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        over: whether the run has ended.
        well: whether it ended with success.
        words: the state as text.
    """

    over: bool
    well: bool
    words: str


@contextmanager
def control_client(address: str, certificate: bytes) -> Iterator[Any]:
    """Connect to the Control API of a SuperLink."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    finally:
        client.close()


def start_run(client: Any, app: Path, config: Mapping[str, str]) -> int | None:
    """Start a run of the Flower app in a folder; return its number, None if it did not start."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content = build_fab_from_disk(app)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    reply = client.StartRun(
        StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
    )
    return int(reply.run_id) if reply.HasField("run_id") else None


def find_run(client: Any, number: int) -> RunState | None:
    """Return the state of a run as Flower sees it; None if Flower does not know the run."""
    from flwr.common.constant import Status, SubStatus
    from flwr.proto.control_pb2 import ListRunsRequest

    runs = client.ListRuns(ListRunsRequest(run_id=number)).run_dict
    if number not in runs:
        return None
    status = runs[number].status
    if status.status == Status.FINISHED:
        return RunState(True, status.sub_status == SubStatus.COMPLETED, status.sub_status)
    return RunState(False, False, status.status)


def stop_run(client: Any, number: int) -> None:
    from flwr.proto.control_pb2 import StopRunRequest

    client.StopRun(StopRunRequest(run_id=number))


def node_statuses(client: Any) -> dict[bytes, str]:
    """Return the status of every registered node, by public key."""
    from flwr.proto.control_pb2 import ListNodesRequest

    nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {node.public_key: str(node.status) for node in nodes}


# Fleet API: a site's connection ------------------------------------------------------------------


class ReplyRejected(Exception):
    """The server did not accept a site's reply."""


class FleetConnection:
    """An active connection of a site to the SuperLink. Flower sends heartbeats meanwhile.

    Args:
        callbacks: what `http_request_response` of flwr yields.
    """

    def __init__(self, callbacks: tuple[Any, ...]) -> None:
        self.node_id: int
        self.node_id, self._receive, self._send, _, _, *objects = callbacks
        self._pull, self._push, self._confirm = objects

    def receive(self) -> tuple[Message, int] | None:
        """Return the next message and the number of its run; None if there is no message.

        Flower sends an envelope first. The content is pulled in pieces and put together here.
        """
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        if (found := self._receive()) is None:
            return None
        envelope, tree = found
        run = envelope.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            lambda name: self._pull(run, name),
            lambda name: self._confirm(run, name),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = envelope.metadata.message_id
        return message, run

    def send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply that took some seconds to compute.

        Raises:
            ReplyRejected: if the server does not accept it.
        """
        import httpx
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
        from flwr.supercore.run import RunNotRunningException

        reply.metadata.__dict__["_message_id"] = reply.object_id
        try:
            with no_object_id_recompute():
                names, session = self._send(reply, get_object_tree(reply), seconds)
                push_objects(
                    get_all_nested_objects(reply),
                    lambda name, content: self._push(run, session, name, content),
                    object_ids_to_push=names,
                )
        except (httpx.HTTPStatusError, RunNotRunningException, ObjectPushError) as error:
            raise ReplyRejected(str(error)) from None


@contextmanager
def fleet_connection(address: str, certificate: bytes, keys: KeyPair) -> Iterator[FleetConnection]:
    """Connect a site to the SuperLink.

    Flower's function logs and swallows exceptions that are raised once the connection is active.

    Raises:
        SystemExit: if the connection is refused.
    """
    from flwr.supernode.fleet_http_connection import http_request_response

    with http_request_response(address, False, certificate, keys, max_retries=2) as callbacks:
        yield FleetConnection(callbacks)


def deactivate_node(address: str, certificate: bytes, keys: KeyPair, node_id: int) -> None:
    """Tell the SuperLink that a site's connection is over."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    with FleetHttpClient.from_server_address(
        address,
        False,
        certificate,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(*keys),
        ],
    ) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


# SuperLink ---------------------------------------------------------------------------------------


def superlink_app(
    control_address: str, authority: Path, certificate: Path, key: Path, database: Path
) -> Any:
    """Create the SuperLink as an ASGI app. Only nodes with a registered key can connect.

    Args:
        control_address: host and port of the Control API.
        authority: certificate of the authority that signed the server's.
        certificate: the server's certificate.
        key: the server's private key.
        database: file for Flower's state.
    """
    from flwr.common.constant import ISOLATION_MODE_SUBPROCESS, TRANSPORT_TYPE_GRPC_RERE
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
    from flwr.superlink.main import create_app

    host, _, port = control_address.rpartition(":")
    config = SuperLinkLifespanConfig(
        control_address=control_address,
        health_server_address=None,
        host=host,
        port=int(port),
        insecure=False,
        certificates=(authority.read_bytes(), certificate.read_bytes(), key.read_bytes()),
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(authority),
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        database=str(database),
        isolation=ISOLATION_MODE_SUBPROCESS,
        runtime_dependency_install=False,
    )
    return create_app(config, SuperLinkLifespan)


def register_nodes(app: Any, names: Mapping[bytes, str]) -> None:
    """Register the public keys of the sites, with their names, unless they are known already."""
    from flwr.common.constant import (
        HEARTBEAT_DEFAULT_INTERVAL,
        NOOP_ACCOUNT_NAME,
        NOOP_FLWR_AID,
    )

    state = app.state.linkstate_factory.state()
    for key, name in names.items():
        if state.get_node_id_by_public_key(key) is None:
            state.create_node(
                NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=name
            )


# Messages ----------------------------------------------------------------------------------------


def error_codes() -> Any:
    """Return the class of the codes that an error message can have."""
    from flwr.common.constant import ErrorCode

    return ErrorCode
