"""A roofline model: the bytes and operations of a round, and the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from polyphily.engines.simulation import Simulation
from polyphily.nn.sparse import SparseMatrix

FLOAT, INDEX = 4, 4  # bytes


@dataclass(frozen=True)
class Work:
    """The bytes that a round moves to and from memory, and its floating-point operations."""

    bytes: float
    operations: float


@dataclass(frozen=True)
class Machine:
    """The measured speed of a machine.

    Attributes:
        bandwidth: bytes per second of a large copy, reads and writes together.
        rate: operations per second of a large float32 matrix product.
    """

    bandwidth: float
    rate: float

    def seconds(self, work: Work) -> float:
        """Return a lower bound on the time that the work takes."""
        return max(work.bytes / self.bandwidth, work.operations / self.rate)


def count_work(simulation: Simulation) -> Work:
    """Count the work of a round of FedAvg on a GCN.

    Every operand is read once and every result written once. A step has the product X W1 over the
    stored features, both propagations and the product of the hidden layer, forward and backward,
    and Adam over all weights (seven numbers each). A round adds the broadcast and the average of
    the weights. Dropout, losses and scoring are not counted.
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
    """Measure the copy bandwidth and the matrix rate with torch's present number of threads."""
    cuda = device.type == "cuda"
    large = 1 << (28 if cuda else 25)
    source = torch.ones(large, device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 1024
    matrix = torch.randn(side, side, device=device)
    copy = _shortest(lambda: target.copy_(source), device, seconds)
    product = _shortest(lambda: matrix @ matrix, device, seconds)
    return Machine(2 * FLOAT * large / copy, 2 * side**3 / product)


def _shortest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the shortest time of several calls, after a first call that is not timed."""
    best, until = float("inf"), time.perf_counter() + seconds
    work()
    while True:
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
