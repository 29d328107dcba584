"""Commands of the server's operator to Flower, over loopback: start, stop and list runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyphily.errors import TrainingError, UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import (
    Deployment,
    quiet_flower,
    read_secret,
    require_flower,
)
from polyphily.flower.flwr_internals import RunState
from polyphily.graphs.checked import plain
from polyphily.runs.folder import RunFolder, write_text

FAB = Path(__file__).parent / "fab"
FLOWER = "flower.json"  # in a run folder: Flower's number of the run, and the server process


@contextmanager
def _client(deployment: Deployment) -> Iterator[Any]:
    """Connect to the Control API of the running server; turn HTTP errors into ours."""
    require_flower()
    quiet_flower()
    import httpx

    certificate = (deployment.path / "ca.crt").read_bytes()
    try:
        secret = read_secret(deployment)
        with flwr_internals.control_client(deployment.control, certificate, secret) as client:
            yield client
    except httpx.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise UserError(
                f"what answers at {deployment.control} is not this server, or its certificate has "
                f"expired ({plain(error)}). To renew it: polyphily server renew {deployment.path}"
            ) from None
        raise UserError(
            f"no server answers at {deployment.control}: polyphily server start {deployment.path}"
        ) from None
    except httpx.HTTPStatusError as error:
        text = error.response.text or f"status {error.response.status_code}"
        raise TrainingError(f"Flower refused: {plain(text)}") from None


def start(deployment: Deployment, folder: RunFolder) -> None:
    """Have Flower start or resume the run of a run folder."""
    with _client(deployment) as client:
        number = flwr_internals.start_run(client, FAB, {"run": folder.path.name})
    if number is None:
        raise TrainingError("Flower did not start the run")
    if old := _started(folder):
        with suppress(TrainingError):
            _stop(deployment, int(old["run_id"]))
    entry = {"run_id": str(number), "instance": deployment.instance}
    write_text(folder.path / FLOWER, json.dumps(entry) + "\n")


def _started(folder: RunFolder) -> dict[str, str] | None:
    """Return Flower's number of a run and the server process it was given to; None if never."""
    file = folder.path / FLOWER
    if not file.exists():
        return None
    entry: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return entry


def state(deployment: Deployment, folder: RunFolder) -> RunState:
    """Return the state of a run.

    Flower may list a run as running whose server process has ended. Such a run is over.
    """
    entry = _started(folder)
    if entry is None:
        return RunState(True, False, "never started")
    with _client(deployment) as client:
        found = flwr_internals.find_run(client, int(entry["run_id"]))
    if found is None or (not found.over and entry["instance"] != deployment.instance):
        return RunState(True, False, "cut short: the server ended")
    return found


def stop(deployment: Deployment, folder: RunFolder) -> None:
    entry = _started(folder)
    assert entry is not None
    _stop(deployment, int(entry["run_id"]))


def _stop(deployment: Deployment, number: int) -> None:
    with _client(deployment) as client:
        flwr_internals.stop_run(client, number)


def nodes(deployment: Deployment) -> dict[str, str]:
    """Return every site's status: registered, online, offline or unknown."""
    with _client(deployment) as client:
        statuses = flwr_internals.node_statuses(client)
    names = deployment.public_keys()
    known = {names[key]: status for key, status in statuses.items() if key in names}
    return {site: known.get(site, "unknown") for site in deployment.sites}
