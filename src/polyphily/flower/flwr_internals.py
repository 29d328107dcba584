"""Everything of flwr that is used here and is not its public API.

Public are `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. The rest may change with any version
of flwr, so it is used in this file only. Most imports are inside functions: flwr is an optional
dependency, and its SuperLink alone takes two seconds to import.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Message

    from polyphily.flower.keys import KeyPair

TRIES, WAIT = 3, 0.5  # calls to a server that cannot be reached, and seconds between the first two
CONTENT_TIMEOUT = 120.0  # seconds for the content of a message to arrive at the SuperLink
_BUSY = (502, 503, 504)  # HTTP statuses after which a call is repeated


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


class ConnectionFailed(Exception):
    """The server cannot be reached, or no longer knows this connection."""


class ConnectionRefused(Exception):
    """The server refused a site's key."""


class MessageLost(Exception):
    """The server withdrew a message, or its content cannot be had."""


class ReplyRejected(Exception):
    """The server did not accept a site's reply."""


class FleetConnection:
    """An active connection of a site to the SuperLink, with heartbeats in a thread.

    Flower's own connection (`http_request_response`) is not used: where it cannot go on, it sends
    SIGINT to its process, raises a BaseException, or exits the process after five seconds.

    Args:
        client: flwr's client of the Fleet API.
        node_id: the site's number at the server.
    """

    def __init__(self, client: Any, node_id: int) -> None:
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.heartbeat import HeartbeatSender

        self.client, self.node_id = client, node_id
        self._node = Node(node_id=node_id)
        self._forgotten = False  # whether the server no longer knows this connection
        self.heartbeats = HeartbeatSender(self._send_heartbeat)

    def _send_heartbeat(self) -> bool:
        """Send a heartbeat; return False if it must be sent again soon."""
        import httpx
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        request = SendNodeHeartbeatRequest(
            node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            self._forgotten |= not self.client.SendNodeHeartbeat(request).success
        except httpx.HTTPStatusError as error:
            if error.response.status_code in _BUSY:
                return False
            self._forgotten = True
        except (httpx.HTTPError, ValueError, RuntimeError):  # RuntimeError: the client is closed
            return False
        return True

    def receive(self) -> tuple[Message, int] | None:
        """Return the next message and the number of its run; None if there is no message.

        Flower sends an envelope first. The content is pulled in pieces and put together here.

        Raises:
            ConnectionFailed: if the server does not answer.
            MessageLost: if there is a message whose content cannot be had.
        """
        from flwr.app import Message
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        if self._forgotten:
            raise ConnectionFailed("the server no longer knows this connection")
        found = self._call(self.client.PullMessages, PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        try:
            envelope = message_from_proto(found.messages_list[0])
            run = envelope.metadata.run_id
            pull = make_pull_object_fn_protobuf(
                lambda request: self._call(self.client.PullObject, request), self._node, run
            )
            confirm = make_confirm_message_received_fn_protobuf(
                lambda request: self._call(self.client.ConfirmMessageReceived, request),
                self._node,
                run,
            )
            tree = found.message_object_trees[0]
            message = pull_and_inflate_object_from_tree(
                tree, pull, confirm, return_type=Message, max_time=CONTENT_TIMEOUT
            )
        except ConnectionFailed:
            raise
        except Exception as error:  # whatever flwr raises for content that it cannot use
            raise MessageLost(_words(error)) from None
        message.metadata.__dict__["_message_id"] = envelope.metadata.message_id
        return message, run

    def send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply that took some seconds to compute.

        Raises:
            ConnectionFailed: if the server does not answer.
            ReplyRejected: if the server does not accept it.
        """
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_push_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        reply.metadata.__dict__["_message_id"] = reply.object_id
        try:
            with no_object_id_recompute():
                envelope = remove_content_from_message(reply) if reply.has_content() else reply
                request = PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(envelope)],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
                found = self._call(self.client.PushMessages, request)
                push_objects(
                    get_all_nested_objects(reply),
                    make_push_object_fn_protobuf(
                        lambda request: self._call(self.client.PushObject, request),
                        self._node,
                        run,
                        found.session_id,
                    ),
                    object_ids_to_push=set(found.objects_to_push),
                )
        except ConnectionFailed:
            raise
        except Exception as error:  # whatever flwr raises for a reply that nobody waits for
            raise ReplyRejected(_words(error)) from None

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Call the server; repeat the call a few times if the server cannot be reached."""
        import httpx

        for attempt in range(TRIES):
            try:
                return method(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status == 401:
                    raise ConnectionFailed("the server no longer accepts this connection") from None
                if status not in _BUSY:
                    raise
                reason = f"the server answered {status}"
            except (httpx.HTTPError, ValueError, RuntimeError) as error:
                reason = _words(error)
            time.sleep(WAIT * (attempt + 1))
        raise ConnectionFailed(reason)


def _words(error: Exception) -> str:
    """Return the first line of an error; httpx adds a second with a link."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def fleet_connection(address: str, certificate: bytes, keys: KeyPair) -> Iterator[FleetConnection]:
    """Connect a site to the SuperLink.

    Raises:
        ConnectionRefused: if the server does not accept the key.
        ConnectionFailed: if the server cannot be reached.
    """
    import httpx
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    with _fleet_client(address, certificate, keys) as client:
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(keys[1]), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            node_id = int(client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise ConnectionFailed(_words(error)) from None
            raise ConnectionRefused(_words(error)) from None
        except (httpx.HTTPError, ValueError) as error:
            raise ConnectionFailed(_words(error)) from None
        connection = FleetConnection(client, node_id)
        connection.heartbeats.start()
        try:
            yield connection
        finally:
            with suppress(RuntimeError):  # it has stopped already
                connection.heartbeats.stop()
            with suppress(httpx.HTTPError, ValueError, RuntimeError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


def _fleet_client(address: str, certificate: bytes, keys: KeyPair) -> Any:
    """Return flwr's client of the Fleet API, which signs its requests with a site's key."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    return FleetHttpClient.from_server_address(
        address,
        False,
        certificate,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(*keys),
        ],
    )


def deactivate_node(address: str, certificate: bytes, keys: KeyPair, node_id: int) -> None:
    """Tell the SuperLink that a site's connection is over."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    with _fleet_client(address, certificate, keys) as client:
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
