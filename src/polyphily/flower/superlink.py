"""Flower's SuperLink with two doors: the sites' door leads to the Fleet API and nowhere else.

Flower serves everything on one port, and whoever reaches its Control API may start a run of any
code on the server and at every site. So the other APIs are served on a port of this machine's own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from polyphily.errors import UserError
from polyphily.flower.deployment import ENVIRONMENT, Deployment, quiet_flower, require_flower
from polyphily.runs.folder import write_text

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
FLEET = "/v1/fleet/"
LARGEST = 64 << 20  # bytes of one request; Flower cuts what is larger into pieces


def fleet_only(app: App, public_port: int) -> App:
    """The app as the outside sees it: on the public port, only what sites need."""

    async def guarded(scope: Scope, receive: Any, send: Any) -> None:
        outside = scope["type"] == "http" and scope["server"][1] == public_port
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if outside and not scope["path"].startswith(FLEET):
            await _refuse(send, 404)
            return
        if outside and int(dict(scope["headers"]).get(b"content-length", LARGEST + 1)) > LARGEST:
            await _refuse(send, 413)
            return
        await app(scope, receive, send)

    return guarded


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(own: Deployment, ready: Callable[[], None]) -> None:
    """Serves until it is interrupted."""
    require_flower()
    quiet_flower()
    os.environ["FLWR_HOME"] = str(own.path / "flower")
    os.environ[ENVIRONMENT] = str(own.path)
    import uvicorn
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.main import create_app

    config = own.config()
    doors = [
        _listen("0.0.0.0", int(config["port"])),
        _listen("127.0.0.1", int(config["control_port"])),
    ]
    app = create_app(_lifespan(own), SuperLinkLifespan)
    _register(app.state.linkstate_factory.state(), own)
    server = uvicorn.Server(
        uvicorn.Config(
            fleet_only(app, int(config["port"])),
            log_level="warning",
            ssl_keyfile=str(own.path / "server.key"),
            ssl_certfile=str(own.path / "server.crt"),
            timeout_graceful_shutdown=2,
        )
    )
    write_text(own.instance_file, f"{uuid.uuid4().hex}\n")
    asyncio.run(_serve(server, doors, ready))


async def _serve(server: Any, doors: list[socket.socket], ready: Callable[[], None]) -> None:
    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.05)
        ready()

    announcing = asyncio.create_task(announce())
    await server.serve(sockets=doors)
    announcing.cancel()


def _listen(host: str, port: int) -> socket.socket:
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        raise UserError(
            f"port {port} cannot be used: {error.strerror}. Is the server running already? "
            "Another port: change it in config.toml (and in the sites' site.toml)"
        ) from None
    return door


def _lifespan(own: Deployment) -> Any:
    from flwr.common.constant import ISOLATION_MODE_SUBPROCESS, TRANSPORT_TYPE_GRPC_RERE
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin

    files = [own.path / name for name in ("ca.crt", "server.crt", "server.key")]
    authority, certificate, key = (file.read_bytes() for file in files)
    return SuperLinkLifespanConfig(
        control_address=own.control,
        health_server_address=None,
        host="127.0.0.1",
        port=int(own.config()["control_port"]),
        insecure=False,
        certificates=(authority, certificate, key),
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
        ssl_ca_certfile=str(files[0]),
        ssl_certfile=str(files[1]),
        ssl_keyfile=str(files[2]),
        database=str(own.path / "flower" / "state.db"),
        isolation=ISOLATION_MODE_SUBPROCESS,
        runtime_dependency_install=False,
    )


def _register(state: Any, own: Deployment) -> None:
    """Makes the sites' keys known; nobody else's are."""
    from flwr.common.constant import (
        HEARTBEAT_DEFAULT_INTERVAL,
        NOOP_ACCOUNT_NAME,
        NOOP_FLWR_AID,
    )

    for key, site in own.public_keys().items():
        if state.get_node_id_by_public_key(key) is None:
            state.create_node(
                NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=site
            )
