"""The names of flwr that are not public and are used here, as the pinned version has them.

A test fails for every name that a new version of flwr has moved or changed. Then look at its use in
flwr_internals.py, and at the new form.
"""

from __future__ import annotations

import ast
import enum
import inspect
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import polyphily
from polyphily.flower import flwr_internals

PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.clientapp"}
PRIVATE = {
    "flwr.app.message:remove_content_from_message": "(message)",
    "flwr.cli.build:build_fab_from_disk": "(app)",
    "flwr.common.constant:ErrorCode": (
        "constants NODE_UNAVAILABLE MESSAGE_UNAVAILABLE REPLY_MESSAGE_UNAVAILABLE "
        "CLIENT_APP_RAISED_EXCEPTION"
    ),
    "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": "30",
    "flwr.common.constant:ISOLATION_MODE_SUBPROCESS": "'subprocess'",
    "flwr.common.constant:NOOP_ACCOUNT_NAME": "'none'",
    "flwr.common.constant:NOOP_FLWR_AID": "'<id:none>'",
    "flwr.common.constant:SYSTEM_TIME_TOLERANCE": "5",
    "flwr.common.constant:Status": "constants FINISHED",
    "flwr.common.constant:SubStatus": "constants COMPLETED",
    "flwr.common.constant:TIMESTAMP_HEADER": "'flwr-timestamp'",
    "flwr.common.constant:TIMESTAMP_TOLERANCE": "300",
    "flwr.common.constant:TRANSPORT_TYPE_GRPC_RERE": "'grpc-rere'",
    "flwr.common.serde:fab_to_proto": "(fab)",
    "flwr.common.serde:message_from_proto": "(message_proto)",
    "flwr.common.serde:message_to_proto": "(message)",
    "flwr.common.serde:user_config_to_proto": "(user_config)",
    "flwr.proto.control_pb2:ListNodesRequest": "message ",
    "flwr.proto.control_pb2:ListNodesResponse": "message nodes_info",
    "flwr.proto.control_pb2:ListRunsRequest": "message run_id",
    "flwr.proto.control_pb2:ListRunsResponse": "message run_dict",
    "flwr.proto.control_pb2:StartRunRequest": "message fab override_config",
    "flwr.proto.control_pb2:StartRunResponse": "message run_id",
    "flwr.proto.control_pb2:StopRunRequest": "message run_id",
    "flwr.proto.fleet_pb2:ActivateNodeRequest": "message public_key heartbeat_interval",
    "flwr.proto.fleet_pb2:ActivateNodeResponse": "message node_id",
    "flwr.proto.fleet_pb2:DeactivateNodeRequest": "message node_id",
    "flwr.proto.fleet_pb2:PullMessagesRequest": "message node message_ids",
    "flwr.proto.fleet_pb2:PullMessagesResponse": "message messages_list message_object_trees",
    "flwr.proto.fleet_pb2:PushMessagesRequest": (
        "message node messages_list message_object_trees clientapp_runtime_list"
    ),
    "flwr.proto.fleet_pb2:PushMessagesResponse": "message objects_to_push session_id",
    "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest": "message node heartbeat_interval",
    "flwr.proto.message_pb2:Metadata": "message src_node_id run_id",
    "flwr.proto.node_pb2:Node": "message node_id",
    "flwr.proto.node_pb2:NodeInfo": "message node_id public_key status",
    "flwr.server.superlink.linkstate:LinkState.create_node": (
        "(self, owner_aid, owner_name, public_key, heartbeat_interval, location=, name=)"
    ),
    "flwr.server.superlink.linkstate:LinkState.deactivate_node": "(self, node_id)",
    "flwr.server.superlink.linkstate:LinkState.get_node_id_by_public_key": "(self, public_key)",
    "flwr.server.superlink.linkstate:LinkStateFactory.state": "(self)",
    "flwr.supercore.constant:FLEET_HTTP_PUBLIC_KEY_HEADER": "'flwr-public-key'",
    "flwr.supercore.constant:FLEET_HTTP_SIGNATURE_HEADER": "'flwr-signature'",
    "flwr.supercore.constant:TaskType": "enum SERVER_APP",
    "flwr.supercore.control:ControlHttpClient": (
        "(base_url, interceptors=, verify=, timeout=, retry_invoker=)"
    ),
    "flwr.supercore.control:ControlHttpClient.ListNodes": "(self, request)",
    "flwr.supercore.control:ControlHttpClient.ListRuns": "(self, request)",
    "flwr.supercore.control:ControlHttpClient.StartRun": "(self, request)",
    "flwr.supercore.control:ControlHttpClient.StopRun": "(self, request)",
    "flwr.supercore.control:ControlHttpClient.close": "(self)",
    "flwr.supercore.fab:Fab": "(hash_str, content, verifications)",
    "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects": "(obj)",
    "flwr.supercore.inflatable.inflatable_object:get_object_tree": "(obj)",
    "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute": "()",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_confirm_message_received_fn_protobuf": (  # noqa: E501
        "(confirm_message_received_protobuf, node, run_id)"
    ),
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_pull_object_fn_protobuf": (
        "(pull_object_protobuf, node, run_id)"
    ),
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_push_object_fn_protobuf": (
        "(push_object_protobuf, node, run_id, session_id)"
    ),
    "flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree": (
        "(object_tree, pull_object_fn, confirm_object_received_fn, return_type=, "
        "max_concurrent_pulls=, max_time=, max_tries_per_object=, initial_backoff=, "
        "backoff_cap=)"
    ),
    "flwr.supercore.inflatable.inflatable_utils:push_objects": (
        "(objects, push_object_fn, object_ids_to_push=, keep_objects=, max_concurrent_pushes=)"
    ),
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "(component_name)",
    "flwr.supercore.logger:FLOWER_LOGGER": "logger flwr",
    "flwr.supercore.logger:mirror_output_to_queue": "(log_queue)",
    "flwr.supercore.logger:restore_output": "()",
    "flwr.supercore.protobuf.client:ProtobufClient": (
        "(base_url, interceptors=, verify=, timeout=, retry_invoker=)"
    ),
    "flwr.supercore.protobuf.client:ProtobufClient.from_server_address": (
        "(server_address, insecure, root_certificates, interceptors, retry_invoker=)"
    ),
    "flwr.supercore.protobuf.client:ProtobufClientInterceptor.intercept": (
        "(self, context, call_next)"
    ),
    "flwr.supercore.protobuf.client:ProtobufRequestContext": "(rpc_method, message, request)",
    "flwr.supercore.superexec.executor:LaunchResult": "(status, message=)",
    "flwr.supercore.superexec.executor:LaunchResult.accepted": "()",
    "flwr.supercore.superexec.executor:SubprocessExecutor": "()",
    "flwr.supercore.superexec.executor:SubprocessExecutor.get_eligible_capacity": (
        "(self, supported_task_types, insecure=, root_certificates_path=)"
    ),
    "flwr.supercore.superexec.executor:SubprocessExecutor.launch": "(self, spec)",
    "flwr.supercore.superexec.executor:SubprocessExecutor.reconcile": "(self)",
    "flwr.supercore.superexec.run_superexec:get_executor": (
        "(executor_type, executor_config=, insecure=, root_certificates_path=)"
    ),
    "flwr.supercore.superexec.run_superexec:run_superexec": (
        "(runtime_api_address, insecure, root_certificates_path=, superexec_auth_secret=, "
        "plugin_config=, parent_pid=, health_server_address=, runtime_dependency_install=, "
        "executor_type=, executor_config=)"
    ),
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan": "(config, state_factory)",
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan._start_superexec_if_needed": "(self)",
    "flwr.superlink.config_loader:SuperLinkLifespanConfig": (
        "(control_address, health_server_address, host, port, insecure, certificates, "
        "superexec_auth_secret, authn_plugin, event_log_plugin, fleet_event_log_plugin, "
        "enable_event_log, artifact_provider, enable_supernode_auth, fleet_api_type, "
        "fleet_api_address, simulation, ssl_ca_certfile, ssl_certfile, ssl_keyfile, "
        "database, isolation, runtime_dependency_install)"
    ),
    "flwr.superlink.config_loader:load_control_authn_plugin": "()",
    "flwr.superlink.main:create_app": "(config=, superlink_lifespan_class=)",
    "flwr.superlink.runtime:run_serverapp": (
        "(runtime_api_address, log_queue, token, insecure, certificates=, parent_pid=, "
        "runtime_dependency_install=)"
    ),
    "flwr.supernode.fleet_http_client:FleetHttpClient": (
        "(base_url, interceptors=, verify=, timeout=, retry_invoker=)"
    ),
    "flwr.supernode.fleet_http_client:FleetHttpClient.ActivateNode": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.ConfirmMessageReceived": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.DeactivateNode": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.PullMessages": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.PullObject": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.PushMessages": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.PushObject": "(self, request)",
    "flwr.supernode.fleet_http_client:FleetHttpClient.SendNodeHeartbeat": "(self, request)",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": (
        "(private_key, public_key)"
    ),
}


def form(value: Any, expected: str) -> str:
    """Describe what a name stands for: parameters, fields, members, or the value itself."""
    if hasattr(value, "DESCRIPTOR"):
        fields = {field.name for field in value.DESCRIPTOR.fields}
        return " ".join(["message", *(n for n in expected.split()[1:] if n in fields)])
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    if inspect.isclass(value) and issubclass(value, Exception):
        return "exception"
    if expected.startswith(("enum", "constants")):
        kind = "enum" if issubclass(value, enum.Enum) else "constants"
        return " ".join([kind, *(n for n in expected.split()[1:] if hasattr(value, n))])
    if not callable(value):
        return repr(value)
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(value).parameters.values()
    names = [f"{marks.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '='}" for p in found]
    return f"({', '.join(names)})"


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_of_flwr_is_as_it_was(name: str) -> None:
    module, _, path = name.partition(":")
    value: Any = import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    assert form(value, PRIVATE[name]) == PRIVATE[name].strip()


def imports(file: Path) -> set[tuple[str, str]]:
    """The module and the name of everything that a file imports from flwr."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            found |= {(str(node.module), alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {(a.name, "") for a in node.names if a.name.split(".")[0] == "flwr"}
    return found


def test_only_one_file_uses_what_is_not_public() -> None:
    package = Path(str(polyphily.__file__)).parent
    adapter = Path(flwr_internals.__file__)
    for file in package.rglob("*.py"):
        used = {f"{m}:{n}" for m, n in imports(file) if m not in PUBLIC}
        if file == adapter:
            assert used <= PRIVATE.keys(), "add them to the table above"
            assert used
        else:
            assert not used, file
            assert 'import_module("flwr' not in file.read_text(encoding="utf-8")


def test_the_table_has_no_name_that_is_not_used() -> None:
    text = Path(flwr_internals.__file__).read_text(encoding="utf-8")
    exempt = {"Metadata", "NodeInfo", "ProtobufRequestContext"}  # only their fields are named
    for name in PRIVATE:
        last = name.rpartition(":")[2].rpartition(".")[2]
        assert last in text or last.endswith("Response") or last in exempt, name
