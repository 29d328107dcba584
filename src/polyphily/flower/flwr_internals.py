"""Everything of flwr that is used here and is not its public API.

Public are `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. The rest may change with any version
of flwr, so it is used in this file only. Most imports are inside functions: flwr is an optional
dependency, and its SuperLink alone takes two seconds to import.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Message

    from polyphily.flower.keys import KeyPair


def is_installed() -> bool:
    """Return whether a version of flwr with these internals is installed."""
    return find_spec("flwr") is not None and find_spec("flwr.supercore") is not None


# Control API: start, stop and list runs ----------------------------------------------------------

SECRET = "polyphily-secret"  # header: proves that a request comes from the server's own user


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
def control_client(address: str, certificate: bytes, secret: str) -> Iterator[Any]:
    """Connect to the Control API of a SuperLink."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=certificate,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            _Header(SECRET, secret),
        ],
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

SEAT = "polyphily-seat"  # header: the process that speaks for a site, drawn by that process
REFUSED = "polyphily-refused"  # header: why the server refuses a site, in plain words
HEARTBEAT = 20.0  # seconds between two signs of life; the server waits for 60
TRIES, PAUSE = 3, 1.0  # of a request, if the connection fails; seconds between them
CONTENT_TIMEOUT = 120.0  # seconds for the content of a message to be there; Flower waits two hours


class ConnectionRefused(Exception):
    """The server refuses a site, with the reason that it gave."""


class MessageGone(Exception):
    """A message cannot be read: its run has ended, or its content is missing."""


class ReplyRejected(Exception):
    """The server did not accept a site's reply."""


@dataclass(frozen=True)
class _Header:
    """An interceptor of Flower's HTTP client that adds a header to every request."""

    name: str
    value: str

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[self.name] = self.value
        return call_next(context)


class FleetConnection:
    """A connection of a site to the SuperLink; it sends heartbeats while it is open.

    Flower's own function for this ends the process by a signal if the server refuses a request,
    and logs and swallows exceptions.

    Args:
        address: host and port of the server.
        certificate: of the authority that signed the server's.
        keys: of the site.
        seat: names the process that speaks for the site.
    """

    def __init__(self, address: str, certificate: bytes, keys: KeyPair, seat: str) -> None:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        from polyphily.flower.keys import public_pem

        self._key = public_pem(keys[1])
        self._client = FleetHttpClient.from_server_address(
            address,
            False,
            certificate,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(*keys),
                _Header(SEAT, seat),
            ],
        )
        self.node_id = 0
        self._closed = threading.Event()

    def __enter__(self) -> FleetConnection:
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        request = ActivateNodeRequest(
            public_key=self._key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            self.node_id = int(self._call(self._client.ActivateNode, request).node_id)
        except BaseException:
            self._client.close()
            raise
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        import httpx
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        self._closed.set()
        with suppress(httpx.HTTPError, RuntimeError, ValueError):
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node_id))
        self._client.close()

    def receive(self) -> tuple[Message, int] | None:
        """Return the next message and the number of its run; None if there is no message.

        Flower sends an envelope first. The content is pulled in pieces and put together here.

        Raises:
            ConnectionRefused: if the server refuses the site.
            MessageGone: if the message cannot be read.
            httpx.TransportError: if the server cannot be reached.
        """
        import httpx
        from flwr.app import Message
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        reply = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node()))
        if not reply.messages_list:
            return None
        envelope = message_from_proto(reply.messages_list[0])
        run = envelope.metadata.run_id

        def call(method: Any) -> Any:
            return lambda request: self._call(method, request)

        try:
            message = pull_and_inflate_object_from_tree(
                reply.message_object_trees[0],
                make_pull_object_fn_protobuf(call(self._client.PullObject), self._node(), run),
                make_confirm_message_received_fn_protobuf(
                    call(self._client.ConfirmMessageReceived), self._node(), run
                ),
                return_type=Message,
                max_time=CONTENT_TIMEOUT,
            )
        except (httpx.TransportError, ConnectionRefused):
            raise
        except Exception as error:  # whatever Flower raises for content that it cannot use
            raise MessageGone(_first_line(error)) from None
        message.metadata.__dict__["_message_id"] = envelope.metadata.message_id
        return message, run

    def send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply that took some seconds to compute.

        Raises:
            ConnectionRefused: if the server refuses the site.
            ReplyRejected: if the server does not accept it.
            httpx.TransportError: if the server cannot be reached.
        """
        import httpx
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        reply.metadata.__dict__["_message_id"] = reply.object_id
        try:
            with no_object_id_recompute():
                tree = get_object_tree(reply)
                envelope = remove_content_from_message(reply) if reply.has_content() else reply
                pushed = self._call(
                    self._client.PushMessages,
                    PushMessagesRequest(
                        node=self._node(),
                        messages_list=[message_to_proto(envelope)],
                        message_object_trees=[tree],
                        clientapp_runtime_list=[seconds],
                    ),
                )
                push_objects(
                    get_all_nested_objects(reply),
                    make_push_object_fn_protobuf(
                        lambda request: self._call(self._client.PushObject, request),
                        self._node(),
                        run,
                        pushed.session_id,
                    ),
                    object_ids_to_push=set(pushed.objects_to_push),
                )
        except (httpx.TransportError, ConnectionRefused):
            raise
        except Exception as error:  # whatever Flower raises for a reply that nobody waits for
            raise ReplyRejected(_first_line(error)) from None

    def _node(self) -> Any:
        from flwr.proto.node_pb2 import Node

        return Node(node_id=self.node_id)

    def _call(self, method: Any, request: Any) -> Any:
        """Send a request, again if the connection fails.

        Raises:
            ConnectionRefused: if the server refuses the site.
            httpx.HTTPError: if the server does not answer, or not as it should.
        """
        import httpx

        for left in reversed(range(TRIES)):
            try:
                return method(request)
            except httpx.HTTPStatusError as error:
                if reason := error.response.headers.get(REFUSED):
                    raise ConnectionRefused(reason) from None
                if error.response.status_code < 502 or not left:
                    raise
            except httpx.TransportError:
                if not left:
                    raise
            if self._closed.wait(PAUSE):
                break
        raise ConnectionRefused("the connection was closed")

    def _send_heartbeats(self) -> None:
        import httpx
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        request = SendNodeHeartbeatRequest(
            node=self._node(), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        while not self._closed.wait(HEARTBEAT):
            with suppress(httpx.HTTPError, RuntimeError, ValueError):
                self._client.SendNodeHeartbeat(request)


def _first_line(error: Exception) -> str:
    """Return the first line of an error; httpx adds a second with a link."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# SuperLink ---------------------------------------------------------------------------------------

LOOK = 2.0  # seconds between two looks whether the executor of runs is alive


def superlink_app(
    control_address: str,
    authority: Path,
    certificate: Path,
    key: Path,
    database: Path,
    executor: Sequence[str],
) -> Any:
    """Create the SuperLink as an ASGI app. Only nodes with a registered key can connect.

    Args:
        control_address: host and port of the Control API.
        authority: certificate of the authority that signed the server's.
        certificate: the server's certificate.
        key: the server's private key.
        database: file for Flower's state.
        executor: command of the process that starts the processes of runs.
    """
    from flwr.common.constant import ISOLATION_MODE_SUBPROCESS, TRANSPORT_TYPE_GRPC_RERE
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
    from flwr.superlink.main import create_app

    class Lifespan(SuperLinkLifespan):
        def _start_superexec_if_needed(self) -> None:
            self.ending = threading.Event()
            self.superexec_process = self._start_executor()
            threading.Thread(target=self._keep_executor, daemon=True).start()

        def _start_executor(self) -> subprocess.Popen[bytes]:
            return subprocess.Popen(list(executor), start_new_session=True)

        def _keep_executor(self) -> None:
            """Start the executor again if it has ended: without it no run would ever start."""
            while not self.ending.wait(LOOK):
                process = self.superexec_process
                if process is not None and process.poll() is not None:
                    self.superexec_process = self._start_executor()

        def shutdown(self) -> None:
            self.ending.set()
            super().shutdown()

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
    return create_app(config, Lifespan)


class Nodes:
    """The nodes that a SuperLink knows, by public key.

    Args:
        app: of `superlink_app`.
    """

    def __init__(self, app: Any) -> None:
        self._state = app.state.linkstate_factory.state

    def register(self, names: Mapping[bytes, str]) -> None:
        """Register public keys, with the names of their sites, unless they are known already."""
        from flwr.common.constant import (
            HEARTBEAT_DEFAULT_INTERVAL,
            NOOP_ACCOUNT_NAME,
            NOOP_FLWR_AID,
        )

        state = self._state()
        for key, name in names.items():
            if state.get_node_id_by_public_key(key) is None:
                state.create_node(
                    NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=name
                )

    def disconnect(self, key: bytes) -> None:
        """Mark the node with a public key as offline."""
        state = self._state()
        number = state.get_node_id_by_public_key(key)
        if number is not None:
            state.deactivate_node(number)

    def number(self, key: bytes) -> int | None:
        found = self._state().get_node_id_by_public_key(key)
        return None if found is None else int(found)


def claimed_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the public key (PEM) that a request names; it is not verified."""
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    try:
        return base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
    except (KeyError, ValueError):
        return b""


def is_signed(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the sender of a request has the private key, as Flower checks it."""
    from flwr.common.constant import (
        SYSTEM_TIME_TOLERANCE,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
    )
    from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER

    from polyphily.flower.keys import parse_pem, verifies

    try:
        signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        stamp = headers[TIMESTAMP_HEADER.encode()]
        signed_at = dt.datetime.fromisoformat(stamp.decode("ascii"))
        age = (dt.datetime.now(dt.UTC) - signed_at).total_seconds()
        key = parse_pem(claimed_key(headers))
    except (KeyError, ValueError, TypeError):
        return False
    latest = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    return -SYSTEM_TIME_TOLERANCE < age < latest and verifies(key, stamp, signature)


def sender_of_reply(content: bytes) -> int | None:
    """Return the node that a pushed reply says it is from; None if there is not one reply."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        request = PushMessagesRequest.FromString(content)
    except DecodeError:
        return None
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return None
    return int(request.messages_list[0].metadata.src_node_id)


# Processes of runs -------------------------------------------------------------------------------


def send_with_every_request(name: str, value: str) -> None:
    """Add a header to all requests that Flower's code sends from this process."""
    from flwr.supercore.protobuf.client import ProtobufClient

    original = ProtobufClient.__init__

    def init(self: Any, *given: Any, interceptors: Sequence[Any] = (), **more: Any) -> None:
        original(self, *given, interceptors=(*interceptors, _Header(name, value)), **more)

    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def execute_runs(
    address: str, authority: Path, parent: int, launch: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    """Ask the SuperLink for runs, and launch a process for each, until the parent ends.

    Args:
        address: host and port of the SuperLink.
        authority: certificate of the authority that signed the server's.
        parent: number of the SuperLink's process.
        launch: starts the process of a run, which needs the token that is given.
    """
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor

    module: Any = import_module("flwr.supercore.superexec.run_superexec")
    children: list[subprocess.Popen[bytes]] = []

    class Executor(SubprocessExecutor):
        def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[Any], set[str]]:
            return {TaskType.SERVER_APP}, set()

        def launch(self, spec: Any) -> Any:
            children.append(launch(spec.token))
            return LaunchResult.accepted()

        def reconcile(self) -> None:
            children[:] = [child for child in children if child.poll() is None]

    module.get_executor = lambda *_, **__: Executor()
    module.run_superexec(
        runtime_api_address=address,
        insecure=False,
        root_certificates_path=str(authority),
        parent_pid=parent,
    )


def conduct_run(address: str, authority: Path, parent: int, token: str) -> None:
    """Run the server's part of the app for one run.

    Args:
        address: host and port of the SuperLink.
        authority: certificate of the authority that signed the server's.
        parent: number of the process that launched this one.
        token: of the run.
    """
    from flwr.supercore.logger import mirror_output_to_queue, restore_output
    from flwr.superlink.runtime import run_serverapp

    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)
    run_serverapp(
        runtime_api_address=address,
        log_queue=lines,
        token=token,
        insecure=False,
        certificates=authority.read_bytes(),
        parent_pid=parent,
        runtime_dependency_install=False,
    )
    restore_output()


# Log ---------------------------------------------------------------------------------------------


def logger() -> logging.Logger:
    """Return Flower's logger, after Flower has set it up."""
    if is_installed():
        from flwr.supercore.logger import FLOWER_LOGGER

        found: logging.Logger = FLOWER_LOGGER
        return found
    return logging.getLogger("flwr")


# Messages ----------------------------------------------------------------------------------------


def error_codes() -> Any:
    """Return the class of the codes that an error message can have."""
    from flwr.common.constant import ErrorCode

    return ErrorCode
