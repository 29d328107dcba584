"""What a round must move and compute, and what the machine can: the fraction that is reached."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from polyphily.engines.simulation import Simulation
from polyphily.nn.sparse import SparseMatrix

FLOAT, INDEX = 4, 4  # bytes


@dataclass(frozen=True)
class Work:
    """Of a round: bytes that memory must give and take, and floating-point operations."""

    bytes: float
    operations: float


@dataclass(frozen=True)
class Machine:
    """What was measured: bytes per second of a large copy (read and write), operations per second
    of a large float32 product."""

    bandwidth: float
    rate: float

    def seconds(self, work: Work) -> float:
        """The time that the work takes at the least."""
        return max(work.bytes / self.bandwidth, work.operations / self.rate)


def work_of(simulation: Simulation) -> Work:
    """A count for FedAvg on a GCN: every operand is read once and every result written once.

    For each step, forward and backward: X W1 through the stored features, both propagations, the
    hidden layer's product, and Adam over all weights (seven numbers each); a broadcast and an
    average of the weights at the ends of the round. Dropout, losses and scoring are left out.
    """
    cohort, settings = simulation.cohort, simulation.settings
    nodes, hidden = cohort.num_nodes, settings.hidden or 1
    classes, steps = cohort.classes, settings.epoch_range()[0]
    edges = cohort.edges_with_loops.nnz
    x = cohort.x
    stored = x.nnz if isinstance(x, SparseMatrix) else x.numel()
    per_entry = FLOAT + INDEX if isinstance(x, SparseMatrix) else FLOAT
    weights = len(cohort) * sum(p.numel() for p in simulation.network.parameters())
    first = stored * per_entry + FLOAT * nodes * hidden
    spread = [edges * (FLOAT + INDEX) + 2 * FLOAT * nodes * width for width in (hidden, classes)]
    second = FLOAT * nodes * (hidden + classes)
    step = 2 * (first + sum(spread) + second) + FLOAT * weights + 7 * FLOAT * weights
    forward = 2 * (stored * hidden + edges * (hidden + classes) + nodes * hidden * classes)
    return Work(
        bytes=steps * step + 3 * FLOAT * weights,
        operations=steps * (2 * forward + 2 * nodes * hidden * classes + 12 * weights),
    )


def measure(device: torch.device, seconds: float = 0.3) -> Machine:
    """The machine's copy bandwidth and matrix rate, on the threads that torch has now."""
    cuda = device.type == "cuda"
    large = 1 << (28 if cuda else 25)
    source = torch.ones(large, device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 1024
    matrix = torch.randn(side, side, device=device)
    copy = _best(lambda: target.copy_(source), device, seconds)
    product = _best(lambda: matrix @ matrix, device, seconds)
    return Machine(2 * FLOAT * large / copy, 2 * side**3 / product)


def _best(work: object, device: torch.device, seconds: float) -> float:
    """The shortest of several runs, after one that is not counted."""
    assert callable(work)
    best, until = float("inf"), time.perf_counter() + seconds
    work()
    while True:
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
