"""Flower's SuperLink on two ports: the Fleet API for the sites, everything else for loopback only.

Flower serves all its APIs on one port, and everybody who reaches the Control API can run any code
on the server and at every site. So only the Fleet API is served to the outside. The other APIs are
served on a port that this machine alone can reach.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from polyphily.errors import UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import ENVIRONMENT, Deployment, quiet_flower, require_flower
from polyphily.runs.folder import write_text

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
FLEET = "/v1/fleet/"
LARGEST = 64 << 20  # largest request, in bytes; Flower splits larger contents


def fleet_only(app: App, public_port: int) -> App:
    """Wrap the app so that the public port serves the Fleet API only, and no huge requests."""

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


def serve(deployment: Deployment, ready: Callable[[], None]) -> None:
    """Serve until interrupted; call `ready` once connections are accepted."""
    require_flower()
    quiet_flower()
    path = deployment.path
    os.environ["FLWR_HOME"] = str(path / "flower")
    os.environ[ENVIRONMENT] = str(path)
    import uvicorn

    config = deployment.config()
    sockets = [
        _listen("0.0.0.0", int(config["port"])),
        _listen("127.0.0.1", int(config["control_port"])),
    ]
    app = flwr_internals.superlink_app(
        deployment.control,
        path / "ca.crt",
        path / "server.crt",
        path / "server.key",
        path / "flower" / "state.db",
    )
    flwr_internals.register_nodes(app, deployment.public_keys())
    server = uvicorn.Server(
        uvicorn.Config(
            fleet_only(app, int(config["port"])),
            log_level="warning",
            ssl_keyfile=str(path / "server.key"),
            ssl_certfile=str(path / "server.crt"),
            timeout_graceful_shutdown=2,
        )
    )
    write_text(deployment.instance_file, f"{uuid.uuid4().hex}\n")
    asyncio.run(_serve(server, sockets, ready))


async def _serve(server: Any, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.05)
        ready()

    announcing = asyncio.create_task(announce())
    await server.serve(sockets=sockets)
    announcing.cancel()


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
