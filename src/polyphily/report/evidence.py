"""Evidence for a page beyond scores: inspection, confusion, tensors sent, collaboration weights.

Most of it needs the graphs. It is computed while they are loaded and saved in the run folder, so
that the page can be made on a machine without the data.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.core.messages import Message, model_part
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import UNLABELLED
from polyphily.heterogeneity.advice import advise
from polyphily.heterogeneity.inspection import Inspection
from polyphily.nn.sparse import flat
from polyphily.runs.folder import clean, write_text
from polyphily.runs.run import Execution

EVIDENCE, COLLABORATION = "evidence.json", "collaboration.jsonl"
FRAMES = 40  # approximate number of rounds at which collaboration weights are recorded
BLOCK = 4_000_000  # numbers converted to double precision at a time
DIGITS = 5  # significant digits that are saved
FloatArray = npt.NDArray[np.float64]


def gather(execution: Execution, inspection: Inspection | None) -> dict[str, Any]:
    """Collect what needs the graphs or the models of a run, for its first seed.

    Args:
        execution: the run, after its last round.
        inspection: the inspection of its federation; None leaves it out.
    """
    simulation = execution.simulation
    found: dict[str, Any] = {
        "round": simulation.round,
        "seed": execution.federations[0].seed,
        "view": execution.view,
        "confusion_at_best": confusion(execution).tolist(),
        "sent": sent(simulation),
    }
    if inspection is not None:
        found["inspection"] = round_floats(inspection.to_dict())
        found["advice"] = [vars(entry) for entry in advise(inspection)]
    return found


def write(folder: Path, evidence: Mapping[str, Any]) -> None:
    write_text(folder / EVIDENCE, json.dumps(clean(evidence), allow_nan=False) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Read what `write` wrote; empty if there is no file."""
    file = folder / EVIDENCE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def confusion(execution: Execution) -> npt.NDArray[np.int64]:
    """Count the test nodes of the first federation by class (row) and predicted class.

    The models are those of the best validation round, like those of the scores.
    """
    simulation = execution.simulation
    predicted = simulation.predict(execution.best()).argmax(dim=1).cpu().numpy()
    federation = simulation.federations[0]
    size = len(federation.classes)
    found = np.zeros((size, size), dtype=np.int64)
    for start, graph in zip(simulation.cohort.segments.pointers, federation.clients, strict=False):
        assert graph.masks is not None
        nodes = np.flatnonzero(graph.masks.test & (graph.labels != UNLABELLED))
        np.add.at(found, (graph.labels[nodes], predicted[start + nodes]), 1)
    return found


def sent(simulation: Simulation) -> list[dict[str, Any]]:
    """Return what a client sends, tensor by tensor, in the first round and the last."""
    last = max(simulation.round - 1, 0)
    found = []
    for round_index in sorted({0, last}):
        contract = simulation.servers[0].upload_contract(round_index)
        tensors = [
            {
                "name": name,
                "shape": list(shape),
                "bytes": math.prod(shape) * contract.dtype.itemsize,
            }
            for name, shape in contract.shapes.items()
        ]
        found.append({"round": round_index + 1, "tensors": tensors})
    return found


# Collaboration weights ---------------------------------------------------------------------------


class Collaboration:
    """A callback that records the weight of each client's model in the other clients' models.

    It is called with the record of every round. A line of `collaboration.jsonl` has:

    - `weights`: row i holds the weights of all models in client i's next model.
    - `kind`: "learned" if the server computes such weights, "fitted" if they were fitted to the
      models sent and received (`mixing`).
    - `residual`: what the fit does not explain.

    Args:
        execution: the run; the file is in its folder.
        trained_in: the simulation that trains the run, if it is not its own.
        federation: the index of the run's first federation in that simulation.
    """

    def __init__(
        self, execution: Execution, trained_in: Simulation | None = None, federation: int = 0
    ) -> None:
        self.simulation, self.federation = trained_in or execution.simulation, federation
        self.file = execution.folder.path / COLLABORATION if execution.folder else None
        self.last = execution.settings.rounds
        self.every = max(1, self.last // FRAMES)

    def __call__(self, record: Mapping[str, Any]) -> None:
        number = record["round"]
        if number != 1 and number != self.last and number % self.every:
            return
        found = collaboration(self.simulation, self.federation)
        if found is not None and self.file:
            line = json.dumps(clean({"round": number, **round_floats(found)}), allow_nan=False)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def collaboration(simulation: Simulation, federation: int = 0) -> dict[str, Any] | None:
    """Return the collaboration weights of one federation; None if the server sends no model."""
    clients = range(len(simulation.federations[federation]))
    server = simulation.servers[federation]
    learned = server.collaboration()
    if learned is not None:
        return {"kind": "learned", "residual": 0.0, "weights": to_array(learned).tolist()}
    received = model_part(server.download(clients))
    fit = mixing(simulation.trained_models(federation), received)
    if fit is None:
        return None
    weights, residual = fit
    return {"kind": "fitted", "residual": residual, "weights": weights.tolist()}


def mixing(sent: Message, received: Message) -> tuple[FloatArray, float] | None:
    """Fit weights A, with rows that sum to one, such that received_i ≈ sum_j A_ij sent_j.

    Least squares over all parameters that occur in both messages; the solution of minimum norm if
    there are several.

    Args:
        sent: the parameters of each client's trained model, `[K, …]`.
        received: the parameters of the model that each client receives, `[K, …]`.

    Returns:
        The weights `[K, K]`, and the residual relative to the distances of all models from the
        mean of those sent; None if no parameter occurs in both messages.
    """
    names = [name for name in received if name in sent]
    if not names:
        return None
    size = len(sent[names[0]])
    # Models are taken relative to the mean of those sent. The rows of the minimum-norm solution
    # then sum to zero; adding 1 / K, the weights of the mean, makes them sum to one.
    gram, cross, total = np.zeros((size, size)), np.zeros((size, size)), 0.0
    for name in names:
        step = max(1, BLOCK // size)
        ups, downs = (torch.split(flat(tensors[name]), step, dim=1) for tensors in (sent, received))
        for up, down in zip(ups, downs, strict=True):
            mean = up.double().mean(dim=0)
            up, down = up - mean, down - mean
            gram += to_array(up @ up.T)
            cross += to_array(down @ up.T)
            total += float(down.square().sum())
    weights = cross @ np.linalg.pinv(gram, rcond=1e-9, hermitian=True)
    unexplained = total - 2 * (weights * cross).sum() + (weights @ gram * weights).sum()
    scale = total + np.trace(gram)
    return weights + 1 / size, float(np.sqrt(max(unexplained, 0.0) / scale)) if scale else 0.0


def to_array(tensor: Tensor) -> FloatArray:
    """Convert a tensor to a NumPy array in double precision."""
    found: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return found


# Provenance --------------------------------------------------------------------------------------


def commit() -> str | None:
    """Return the commit of the running source, with `+` if changed; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).parents[1].as_posix()):
            return None  # installed somewhere inside another project's checkout
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return None


def round_floats(value: Any) -> Any:
    """Round all floats in a nested structure to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: round_floats(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [round_floats(entry) for entry in value]
    return value
