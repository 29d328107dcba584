"""What the server's operator tells Flower: start a run, stop it, how is it. Over loopback only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.errors import TrainingError, UserError
from polyphily.flower.deployment import Deployment, quiet_flower, require_flower
from polyphily.runs.folder import RunFolder, write_text

FAB = Path(__file__).parent / "fab"
FLOWER = "flower.json"  # in a run folder: the number that Flower gave the run, and which process


@dataclass(frozen=True)
class RunState:
    """How Flower sees a run.

    Attributes:
        over: whether it is finished, well or not.
        well: whether it completed.
        words: as Flower says it.
    """

    over: bool
    well: bool
    words: str


@contextmanager
def _client(own: Deployment) -> Iterator[Any]:
    require_flower()
    quiet_flower()
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=own.control,
        insecure=False,
        root_certificates=(own.path / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    except httpx.TransportError:
        raise UserError(
            f"no server answers at {own.control}: polyphily server start {own.path}"
        ) from None
    except httpx.HTTPStatusError as error:
        raise TrainingError(f"Flower refused: {error.response.text.strip()[:500]}") from None
    finally:
        client.close()


def start(own: Deployment, folder: RunFolder) -> None:
    """Hands a laid-out run to Flower, for the first time or again."""
    with _client(own) as client:
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = build_fab_from_disk(FAB)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        reply = client.StartRun(
            StartRunRequest(
                fab=fab_to_proto(fab),
                override_config=user_config_to_proto({"run": folder.path.name}),
            )
        )
    if not reply.HasField("run_id"):
        raise TrainingError("Flower did not start the run")
    if old := _started(folder):
        with suppress(TrainingError):
            _stop(own, int(old["run_id"]))
    entry = {"run_id": str(reply.run_id), "instance": own.instance}
    write_text(folder.path / FLOWER, json.dumps(entry) + "\n")


def _started(folder: RunFolder) -> dict[str, str] | None:
    """Flower's number for a run and the server process it was given to, if it ever was."""
    file = folder.path / FLOWER
    if not file.exists():
        return None
    entry: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return entry


def state(own: Deployment, folder: RunFolder) -> RunState:
    """How a run stands. One whose server process is gone is over, whatever Flower believes."""
    from flwr.common.constant import Status, SubStatus
    from flwr.proto.control_pb2 import ListRunsRequest

    entry = _started(folder)
    if entry is None:
        return RunState(True, False, "never started")
    number = int(entry["run_id"])
    with _client(own) as client:
        runs = client.ListRuns(ListRunsRequest(run_id=number)).run_dict
    if number in runs and runs[number].status.status == Status.FINISHED:
        sub_status = runs[number].status.sub_status
        return RunState(True, sub_status == SubStatus.COMPLETED, sub_status)
    if number not in runs or entry["instance"] != own.instance:
        return RunState(True, False, "cut short: the server ended")
    return RunState(False, False, runs[number].status.status)


def stop(own: Deployment, folder: RunFolder) -> None:
    entry = _started(folder)
    assert entry is not None
    _stop(own, int(entry["run_id"]))


def _stop(own: Deployment, number: int) -> None:
    from flwr.proto.control_pb2 import StopRunRequest

    with _client(own) as client:
        client.StopRun(StopRunRequest(run_id=number))


def nodes(own: Deployment) -> dict[str, str]:
    """Every site's status: registered, online or offline."""
    from flwr.proto.control_pb2 import ListNodesRequest

    keys = own.public_keys()
    with _client(own) as client:
        found = client.ListNodes(ListNodesRequest()).nodes_info
    known = {keys[node.public_key]: str(node.status) for node in found if node.public_key in keys}
    return {site: known.get(site, "unknown") for site in own.sites}
