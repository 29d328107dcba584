"""Rounds of several engines timed in turn: whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyphily.bench.geometric import Loop
from polyphily.core.method import create
from polyphily.core.metrics import Evaluator
from polyphily.core.recipes import fill
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation

WARM_UP = 3  # rounds that are not counted: kernels load, constants are computed, graphs recorded
PLAIN = "torch_geometric"


@dataclass(frozen=True)
class Timing:
    """Seconds of a round.

    Attributes:
        seconds: of every counted round.
        accuracy: of the global model on all test nodes afterwards.
        note: what to know about it.
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


def simulation_of(
    federations: Sequence[Federation], method: str, options: Mapping[str, Any]
) -> Simulation:
    first = federations[0]
    chosen = create(method)
    settings = from_mapping({"backbone": chosen.backbone, **options})
    filled = fill(settings, first.kind, first.metric, dense=first.dense)
    return Simulation(chosen, federations, filled)


def accuracy(simulation: Simulation) -> float:
    graphs, classes = simulation.cohort.graphs, simulation.cohort.classes
    evaluator = Evaluator(graphs, classes, simulation.device)
    scores = evaluator.scores(simulation.predict(simulation.received()))[:, 1, 0].cpu().numpy()
    return float(np.average(scores, weights=evaluator.counts[:, 1]))


def in_turn(
    engines: Mapping[str, Callable[[], None]], rounds: int, every: Mapping[str, int] | None = None
) -> dict[str, tuple[float, ...]]:
    """Times the engines round by round, one after the other.

    Args:
        engines: what to run, by name.
        rounds: counted rounds of each.
        every: a slow engine may run in every n-th turn only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(WARM_UP + rounds):
        for name, advance in engines.items():
            if turn >= WARM_UP and turn % (every or {}).get(name, 1):
                continue
            began = time.perf_counter()
            advance()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return {name: tuple(found) for name, found in seconds.items()}


def compare(
    federation: Federation,
    *,
    method: str = "fedavg",
    options: Mapping[str, Any],
    rounds: int = 20,
    sequential: bool = True,
    plain: bool = True,
) -> dict[str, Timing]:
    """The stacked engine, the sequential one, and a plain torch_geometric loop (FedAvg on GCN)."""
    stacked = simulation_of([federation], method, options)
    engines: dict[str, Callable[[], object]] = {"stacked": stacked.advance}
    scores: dict[str, Callable[[], float]] = {"stacked": lambda: accuracy(stacked)}
    if sequential:
        single = simulation_of([federation], method, {**options, "engine": "sequential"})
        engines["sequential"] = single.advance
        scores["sequential"] = lambda: accuracy(single)
    settings = stacked.settings
    if plain and method == "fedavg" and settings.backbone == "gcn" and settings.layers == 2:
        loop = Loop(
            federation,
            hidden=settings.hidden or 64,
            epochs=settings.epoch_range()[0],
            lr=settings.lr or 0.01,
            dropout=(settings.input_dropout or 0.0, settings.dropout or 0.0),
            device=settings.device,
        )
        engines[PLAIN], scores[PLAIN] = loop.advance, loop.accuracy

    def run(advance: Callable[[], object]) -> Callable[[], None]:
        def once() -> None:
            advance()

        return once

    seconds = in_turn({name: run(advance) for name, advance in engines.items()}, rounds)
    notes = {"stacked": _note(stacked)}
    return {name: Timing(seconds[name], scores[name](), notes.get(name, "")) for name in engines}


def _note(simulation: Simulation) -> str:
    if simulation.device.type != "cuda":
        return "" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    if simulation.obstacle is None:
        return "one CUDA graph a round"
    return f"no CUDA graph: {simulation.obstacle}"
