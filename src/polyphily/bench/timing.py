"""Timing of several engines in turn, so that other load on the machine affects all alike."""

from __future__ import annotations

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyphily.bench.geometric import make_loop
from polyphily.core.method import create
from polyphily.core.metrics import Evaluator
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation
from polyphily.runtime.network import complete

WARM_UP = 3  # untimed rounds, in which kernels are loaded and CUDA graphs recorded
PLAIN = "torch_geometric"


@dataclass(frozen=True)
class Timing:
    """The timing of an engine.

    Attributes:
        seconds: the time of every timed round.
        accuracy: of the global model on all test nodes after the last round.
        note: a remark on how the rounds were run.
    """

    seconds: tuple[float, ...]
    accuracy: float
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        return float(np.quantile(self.seconds, 0.95))


Loader = Callable[..., Federation]
Record = dict[str, Any]


def make_simulation(
    federations: Sequence[Federation],
    method: str,
    options: Mapping[str, Any],
    hyperparameters: Mapping[str, Any] | None = None,
) -> Simulation:
    first = federations[0]
    chosen = create(method, hyperparameters)
    settings = from_mapping(dict(options))
    filled = complete(settings, chosen, first.kind, first.metric, dense=first.dense)
    return Simulation(chosen, federations, filled)


def accuracy(simulation: Simulation) -> float:
    graphs, classes = simulation.cohort.graphs, simulation.cohort.classes
    evaluator = Evaluator(graphs, classes, simulation.device)
    scores = evaluator.scores(simulation.predict(simulation.received()))[:, 1, 0].cpu().numpy()
    return float(np.average(scores, weights=evaluator.counts[:, 1]))


def time_rounds(
    engines: Mapping[str, Callable[[], object]],
    rounds: int,
    every: Mapping[str, int] | None = None,
    before: Mapping[str, Callable[[], object]] | None = None,
    warm_up: int = WARM_UP,
) -> dict[str, tuple[float, ...]]:
    """Time engines round by round, one after the other.

    Args:
        engines: the functions that run a round, by name.
        rounds: the number of timed rounds.
        every: engines that run in every n-th turn only, because they are slow.
        before: what some engines do before each of their rounds, without being timed.
        warm_up: the number of rounds before them that are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(warm_up + rounds):
        for name, advance in engines.items():
            if turn >= warm_up and turn % (every or {}).get(name, 1):
                continue
            if before and name in before:
                before[name]()
            _wait()
            began = time.perf_counter()
            advance()
            _wait()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return {name: tuple(found) for name, found in seconds.items()}


def _wait() -> None:
    """Wait for the GPU if there is one in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def peak_resident() -> int:
    """Return the peak resident size of this process in bytes.

    On Linux, `ru_maxrss` of a new process may be that of the process which started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        if found:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compare(
    federation: Federation,
    *,
    method: str = "fedavg",
    options: Mapping[str, Any],
    rounds: int = 20,
    sequential: bool = True,
    plain: bool = True,
) -> dict[str, Timing]:
    """Time the stacked and the sequential engine, and for FedAvg on GCN a torch_geometric loop.

    Timed rounds begin when the method acts, after its warm-up: on a GPU the first such round is
    recorded, which is not timed.
    """
    stacked = make_simulation([federation], method, options)
    engines: dict[str, Callable[[], object]] = {"stacked": stacked.advance}
    scores: dict[str, Callable[[], float]] = {"stacked": lambda: accuracy(stacked)}
    if sequential:
        single = make_simulation([federation], method, {**options, "engine": "sequential"})
        engines["sequential"] = single.advance
        scores["sequential"] = lambda: accuracy(single)
    if plain and method == "fedavg":
        loop = make_loop(federation, stacked.method, stacked.settings)
        if loop is not None:
            engines[PLAIN], scores[PLAIN] = loop.advance, loop.accuracy
    for advance in engines.values():
        for _ in range(stacked.method.rounds_before_it_acts()):
            advance()
    seconds = time_rounds(engines, rounds)
    notes = {"stacked": note(stacked)}
    return {name: Timing(seconds[name], scores[name](), notes.get(name, "")) for name in engines}


def note(simulation: Simulation) -> str:
    """Return a remark on how a simulation runs its rounds."""
    if simulation.device.type != "cuda":
        return "" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    if simulation.obstacle is None:
        return "one CUDA graph a round"
    return f"no CUDA graph: {simulation.obstacle}"
