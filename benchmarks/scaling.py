"""Plot the time of a round over clients, nodes, edges and features, one changed at a time.

    python benchmarks/scaling.py --out scaling.svg [--device cuda]

Each point is the median over rounds of FedAvg on GCN-64 and csbm graphs. A line of slope one means
that the cost is proportional to the size.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import polyphily
from polyphily.bench.suite import GCN
from polyphily.bench.timing import WARM_UP, make_simulation

BASE = {"clients": 10, "nodes": 1000, "degree": 10, "features": 64}
STEPS = {
    "clients": (1, 3, 10, 30, 100),
    "nodes": (100, 300, 1000, 3000, 10_000),
    "degree": (2, 5, 10, 20, 50),
    "features": (8, 32, 128, 512),
}
LABELS = {"nodes": "nodes per client", "degree": "edges per node"}


def seconds(device: str, rounds: int, clients: int, **graph: int) -> float:
    options = ",".join(f"{name}={value}" for name, value in graph.items())
    federation = polyphily.load(f"csbm:{options}", clients=clients)
    simulation = make_simulation([federation], "fedavg", {**GCN, "device": device})
    found = [simulation.advance().seconds for _ in range(WARM_UP + rounds)]
    return statistics.median(found[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("scaling.svg"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figure, axes = plt.subplots(1, len(STEPS), figsize=(12, 3), layout="constrained", sharey=True)
    for axis, (name, values) in zip(axes, STEPS.items(), strict=True):
        cost = [
            1000 * seconds(args.device, args.rounds, **{**BASE, name: value}) for value in values
        ]
        axis.loglog(values, cost, marker="o")
        axis.set_xlabel(LABELS.get(name, name))
        axis.grid(alpha=0.3)
        print(name, dict(zip(values, (round(c, 2) for c in cost), strict=True)), flush=True)
    axes[0].set_ylabel("ms per round")
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
