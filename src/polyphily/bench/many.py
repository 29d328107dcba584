"""The cost of a round against the number of clients, with a fixed number drawn in each."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polyphily.bench.timing import Record, make_simulation, peak_resident, time_rounds
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.engines.drawn import DrawnSimulation, scored_clients
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation, load
from polyphily.graphs.mapped import MappedGraphs
from polyphily.runtime.network import complete

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
IN_MEMORY = 10_000  # the most clients whose states and graphs are also kept in memory
DRAWN = 200
DATA = "csbm:nodes=50-100,features=64"
GCN = {"backbone": "gcn", "hidden": 64, "epochs": 3}
DISK, MEMORY = "on disk", "in memory"


def many_clients(
    device: str, rounds: int = 15, sizes: Sequence[int] = SIZES, drawn: int = DRAWN
) -> Iterator[Record]:
    """Time rounds of federations of several sizes in turn, and measure the memory of each."""
    with tempfile.TemporaryDirectory(prefix="polyphily-") as folder:
        root, most = Path(folder), max(sizes)
        simulations = {
            (size, where): _simulate(size, most, where, drawn, device, root)
            for size in sizes
            for where in _kinds(size)
        }
        seconds = time_rounds(
            {f"{size} {where}": s.advance for (size, where), s in simulations.items()}, rounds
        )
        for size, where in list(simulations):
            del simulations[size, where]
            task = (size, most, where, drawn, device, root, rounds)
            yield {
                "clients": size,
                "where": where,
                "drawn": drawn,
                "median_ms": 1000 * statistics.median(seconds[f"{size} {where}"]),
                "memory_mb": _peak(*task) / 1e6,
            }


def _kinds(size: int) -> tuple[str, ...]:
    return (DISK, MEMORY) if size <= IN_MEMORY else (DISK,)


def _simulate(size: int, most: int, where: str, drawn: int, device: str, root: Path) -> Simulation:
    """Return a simulation of the first clients of a federation of `most`, whose files all share."""
    whole = load(DATA, clients=most, on_disk=True, root=root)
    assert isinstance(whole.clients, MappedGraphs)
    federation = replace(whole, clients=MappedGraphs(whole.clients.folder, size))
    options = {**GCN, "device": device, "participation": drawn / size}
    if where == DISK:
        return make_drawn(federation, "fedavg", options)
    return make_simulation([federation.some(range(size))], "fedavg", options)


def make_drawn(federation: Federation, method: str, options: Mapping[str, Any]) -> DrawnSimulation:
    """Return a simulation with the states of clients in a temporary folder."""
    chosen, asked = create(method), from_mapping({"on_disk": True, **options})
    settings = complete(asked, chosen, federation.kind, federation.metric, dense=True)
    members = [scored_clients(federation, settings)]
    return DrawnSimulation(chosen, [federation], settings, members=members)


def _peak(*task: Any) -> int:
    """Return the peak of a new process that trains some rounds."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_train, *task).result()


def _train(
    size: int, most: int, where: str, drawn: int, device: str, root: Path, rounds: int
) -> int:
    torch.set_num_threads(1)
    simulation = _simulate(size, most, where, drawn, device, root)
    for _ in range(rounds):
        simulation.advance()
    return peak_resident()


def clients_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as Markdown."""
    first = rows[0]
    head = f"FedAvg, GCN-64, {first['drawn']} clients drawn"
    lines = [
        f"| {head} | on disk, ms | peak, MB | in memory, ms | peak, MB |",
        "|---|" + "---:|" * 4,
    ]
    for size in dict.fromkeys(row["clients"] for row in rows):
        cells = [f"{size:,} clients"]
        for where in (DISK, MEMORY):
            found = [row for row in rows if row["clients"] == size and row["where"] == where]
            cells += [f"{row['median_ms']:.0f} | {row['memory_mb']:,.0f}" for row in found] or [
                " | "
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot time and memory of a round over the number of clients."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(
        axes, ("median_ms", "memory_mb"), ("ms per round", "peak memory, MB"), strict=True
    ):
        for where, marker in ((DISK, "o"), (MEMORY, "s")):
            own = [row for row in rows if row["where"] == where]
            sizes, values = [row["clients"] for row in own], [row[key] for row in own]
            axis.plot(sizes, values, marker=marker, label=where)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel(f"clients ({rows[0]['drawn']} drawn in a round)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    with rc_context({"svg.hashsalt": "polyphily"}):  # the same figure is the same file
        figure.savefig(file, metadata={"Date": None})
