"""What a page shows beyond scores: data measured, errors by class, what was sent, who helped whom.

Most of it needs the graphs, so it is gathered while they are at hand and kept in the run folder: a
page can then be made where the data are not.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.core.local import Message, model_part
from polyphily.engines.simulation import Simulation, train_locally
from polyphily.graphs.graph import UNLABELLED
from polyphily.heterogeneity.advice import advise
from polyphily.heterogeneity.inspection import Inspection
from polyphily.nn.sparse import flat
from polyphily.report.trained import STRENGTH
from polyphily.runs.folder import clean, write_text
from polyphily.runs.run import Execution

EVIDENCE, COLLABORATION = "evidence.json", "collaboration.jsonl"
FRAMES = 40  # rounds at which collaboration is recorded, about
BLOCK = 4_000_000  # numbers in double precision at a time
DIGITS = 5  # significant digits that are kept
FloatArray = npt.NDArray[np.float64]


def gather(execution: Execution, inspection: Inspection | None) -> dict[str, Any]:
    """Everything that needs the graphs or the models of a run, of its first seed.

    Args:
        execution: after its last round.
        inspection: its federation, measured; None leaves that out.
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
        found["inspection"] = shortened(inspection.to_dict())
        found["advice"] = [vars(entry) for entry in advise(inspection)]
    return found


def write(folder: Path, evidence: Mapping[str, Any]) -> None:
    write_text(folder / EVIDENCE, json.dumps(clean(evidence), allow_nan=False) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """What `write` wrote; nothing where there is none."""
    file = folder / EVIDENCE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def confusion(execution: Execution) -> npt.NDArray[np.int64]:
    """Test nodes of the first federation by class (row) and predicted class.

    By the models of the best validation round, to which the scores belong.
    """
    simulation = execution.simulation
    guess = simulation.predict(execution.best()).argmax(dim=1).cpu().numpy()
    federation = simulation.federations[0]
    size = len(federation.classes)
    found = np.zeros((size, size), dtype=np.int64)
    for start, graph in zip(simulation.cohort.segments.pointers, federation.clients, strict=False):
        assert graph.masks is not None
        nodes = np.flatnonzero(graph.masks.test & (graph.labels != UNLABELLED))
        np.add.at(found, (graph.labels[nodes], guess[start + nodes]), 1)
    return found


def sent(simulation: Simulation) -> list[dict[str, Any]]:
    """What leaves the first client in a round, tensor by tensor, in the first round and the last.

    One local step is taken to see it; nothing of it is kept.
    """
    last = max(simulation.round - 1, 0)
    cohort = simulation.cohort.take([0])
    received = simulation.method.download(simulation.states[0], [0])
    memory = {name: value[:1] for name, value in simulation.memory.items()}
    found = []
    for round_index in sorted({0, last}):
        upload, _, _ = train_locally(
            simulation.method,
            simulation.network,
            cohort,
            received,
            memory,
            simulation.optimizer,
            [1],
            round_index,
        )
        tensors = [
            {
                "name": name,
                "shape": list(value.shape[1:]),
                "bytes": value[0].numel() * value.element_size(),
            }
            for name, value in upload.items()
        ]
        found.append({"round": round_index + 1, "tensors": tensors})
    return found


# Who learns from whom ----------------------------------------------------------------------------


class Collaboration:
    """Records, as rounds go by, how much of each client's model goes into each other's.

    A line of `collaboration.jsonl` has `weights`, row i being what client i's next model is made
    of; `kind`, "learned" where the server keeps such weights itself and "fitted" where they were
    found from the models sent and sent back (`mixing`); and `residual`, what the fit leaves out.

    Args:
        execution: the run, whose folder is written to.
        trained_in: the simulation that it is trained in, where that is not its own.
        federation: the place of the run's first federation there.
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
            line = json.dumps(clean({"round": number, **shortened(found)}), allow_nan=False)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def collaboration(simulation: Simulation, federation: int = 0) -> dict[str, Any] | None:
    """Who learns from whom in one federation; None where no model is sent back."""
    clients = range(len(simulation.federations[federation]))
    state = simulation.states[federation]
    if STRENGTH in state:
        learned = state[STRENGTH].reshape(len(clients), -1, len(clients))[:, -1]
        return {"kind": "learned", "residual": 0.0, "weights": _numbers(learned).tolist()}
    rows = [simulation.starts[federation] + k for k in clients]
    trained = simulation.collect(model_part(simulation.memory), rows)
    back = model_part(simulation.method.download(state, clients))
    found = mixing(trained, back)
    if found is None:
        return None
    weights, residual = found
    return {"kind": "fitted", "residual": residual, "weights": weights.tolist()}


def mixing(sent: Message, back: Message) -> tuple[FloatArray, float] | None:
    """A whose rows sum to one with back_i close to sum_j A_ij sent_j, and what is left unexplained.

    Least squares over all parameters that are in both; where models sent are alike, the shortest
    solution. The rest is relative to how far models lie from the mean of those sent.

    Args:
        sent: parameters of each client's trained model, `[K, …]`.
        back: those of the model that each is sent, `[K, …]`.
    """
    names = [name for name in back if name in sent]
    if not names:
        return None
    size = len(sent[names[0]])
    gram, cross, length = np.zeros((size, size)), np.zeros((size, size)), 0.0
    for name in names:
        step = max(1, BLOCK // size)
        ups, downs = (torch.split(flat(tensors[name]), step, dim=1) for tensors in (sent, back))
        for up, down in zip(ups, downs, strict=True):
            mean = up.double().mean(dim=0)
            up, down = up - mean, down - mean
            gram += _numbers(up @ up.T)
            cross += _numbers(down @ up.T)
            length += float(down.square().sum())
    moved = cross @ np.linalg.pinv(gram, rcond=1e-9, hermitian=True)
    rest = length - 2 * (moved * cross).sum() + (moved @ gram * moved).sum()
    scale = length + np.trace(gram)
    return moved + 1 / size, float(np.sqrt(max(rest, 0.0) / scale)) if scale else 0.0


def _numbers(tensor: Tensor) -> FloatArray:
    found: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return found


# Provenance --------------------------------------------------------------------------------------


def commit() -> str | None:
    """The commit of the source that is running, where it runs from a checkout; `+` if changed."""
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


def shortened(value: Any) -> Any:
    """Floats in any structure with as many digits as a page can show."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: shortened(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(entry) for entry in value]
    return value
