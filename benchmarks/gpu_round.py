"""Show where the time of a recorded round on a GPU goes.

    python benchmarks/gpu_round.py --partitions folder

For FedAvg and S2FGL on Cora with 20 clients it prints the time of a round, of its three recorded
pieces, the number of kernels and those that take longest. First it compares three rounds with the
same rounds in plain torch. To compare two versions of the library, run it with each in PYTHONPATH.
Without Cora or a partitioner, random graphs of the same size take the place of the data.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch.profiler import ProfilerActivity, profile

import polyphily
from polyphily.bench.timing import make_simulation
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation
from polyphily.graphs.prepared import load_prepared
from polyphily.nn import kernels

CLIENTS, NODES, WORDS, WORDS_OF_A_NODE = 20, 135, 1433, 18
OPTIONS = {"backbone": "gcn", "hidden": 64, "epochs": 3, "input_dropout": 0.0, "device": "cuda"}
WARM_UP = 5  # rounds that are not timed: kernels are compiled, graphs recorded
COMPARED, TOLERANCE = 3, 1e-5  # rounds against plain torch; largest difference of weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=Path, help="folder of partition files")
    parser.add_argument("--split", default="0.2,0.4,0.4:stratified", help="of the partition file")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "s2fgl"])
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of each method")
    args = parser.parse_args()
    federation = cora(args.partitions, args.split)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, Triton: {kernels.TRITON}, {federation.dataset}")
    print(f"library: {Path(polyphily.__file__).parent}")
    alike = [compare(federation, optimizer) for optimizer in ("sgd", "adam")]
    for method in args.methods:
        measure(federation, method, args.rounds)
    if not alike[0]:  # Adam turns differences of tiny gradients into ones of whole steps
        raise SystemExit("the kernels differ from plain torch")


def cora(partitions: Path | None, split: str) -> Federation:
    """Load Cora; random graphs of its size if it is not there."""
    where = {"partition": "louvain-capped", "clients": CLIENTS, "split": split, "seed": 0}
    try:
        return load_prepared(partitions, dataset="cora", **where)
    except UserError as error:
        print(f"random graphs in place of Cora: {str(error).splitlines()[0][:100]}")
    federation = polyphily.load(f"csbm:nodes={NODES},degree=4,features=8", clients=CLIENTS)
    rng = np.random.default_rng(0)
    graphs = []
    for graph in federation.clients:
        rows = np.repeat(np.arange(NODES), WORDS_OF_A_NODE)
        cols = np.concatenate(
            [rng.choice(WORDS, WORDS_OF_A_NODE, replace=False) for _ in range(NODES)]
        )
        values = np.full(len(rows), 1 / WORDS_OF_A_NODE, dtype=np.float32)
        words = sp.csr_array((values, (rows, cols)), shape=(NODES, WORDS))
        graphs.append(replace(graph, features=words))
    return replace(federation, clients=graphs)


def compare(federation: Federation, optimizer: str) -> bool:
    """Run rounds with the kernels and in plain torch; print and judge how far weights differ."""
    found = []
    for usable in (kernels.TRITON, False):
        before, kernels.TRITON = kernels.TRITON, usable
        rates = {"lr": 0.1 if optimizer == "sgd" else 0.01}
        simulation = make_simulation(
            [federation], "fedavg", {**OPTIONS, **rates, "optimizer": optimizer}
        )
        losses = [simulation.advance().loss[0] for _ in range(COMPARED)]
        found.append((simulation.tensors(), losses))
        kernels.TRITON = before
    (ours, losses), (plain, others) = found
    apart = torch.cat([(ours[n] - plain[n]).abs().flatten() for n in ours])
    beyond = (apart > TOLERANCE).double().mean().item()
    print(
        f"{optimizer}, kernels against plain torch after {COMPARED} rounds: largest difference "
        f"{apart.max().item():.1e}, beyond {TOLERANCE}: {100 * beyond:.4f} %, losses {losses[-1]} "
        f"and {others[-1]}"
    )
    return beyond == 0


def measure(federation: Federation, method: str, rounds: int) -> None:
    simulation = make_simulation([federation], method, OPTIONS)
    acts = simulation.method.rounds_before_it_acts()
    early = [timed(simulation) for _ in range(max(acts, 1))]
    warm_up = [timed(simulation) for _ in range(WARM_UP)]
    seconds = [timed(simulation) for _ in range(rounds)]
    obstacle = simulation.obstacle
    print(f"\n{method}: {'recorded' if obstacle is None else f'not recorded: {obstacle}'}")
    if len(early) > 1:
        slow = {n: round(1000 * s, 1) for n, s in enumerate(early) if s > 2 * median(early)}
        print(f"  rounds 1 to {acts}: median {1000 * median(early):.3f} ms; slow ones: {slow}")
    print(f"  the next {WARM_UP}: {[round(1000 * s, 1) for s in warm_up]} ms")
    slow = {n: round(1000 * s, 2) for n, s in enumerate(seconds) if s > 2 * median(seconds)}
    print(
        f"  a round: median {1000 * median(seconds):.3f} ms, p95 "
        f"{1000 * float(np.quantile(seconds, 0.95)):.3f}, max {1000 * max(seconds):.3f}; "
        f"slower than twice the median: {slow}"
    )
    pieces(simulation)
    busiest(simulation)


def timed(simulation: Simulation) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    simulation.advance()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def pieces(simulation: Simulation, times: int = 100) -> None:
    """Print the time of each recorded piece, replayed again and again."""
    phase = simulation.method.phase(simulation.round)
    recording = getattr(simulation.backend, "_recordings", {}).get(phase)
    if recording is None:
        return
    for name in ("clients", "servers"):
        replay = getattr(recording, name)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            replay(simulation.round)
        end.record()
        end.synchronize()
        print(f"  {name}' part: {1000 * start.elapsed_time(end) / times:.0f} us on the device")


def busiest(simulation: Simulation, rounds: int = 10, most: int = 20) -> None:
    """Print the number of kernels of a round, and those that take longest."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            simulation.advance()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in found.events() if event.device_type == cuda]
    calls, total = Counter[str](), Counter[str]()
    for event in events:
        calls[event.name] += 1
        total[event.name] += event.time_range.elapsed_us()
    spent = sum(total.values()) / rounds
    print(f"  kernels, copies and fills: {len(events) / rounds:.0f} a round, {spent:.0f} us")
    for name, microseconds in total.most_common(most):
        short = name if len(name) <= 90 else name[:60] + " … " + name[-27:]
        print(f"    {microseconds / rounds:7.1f} us  {calls[name] / rounds:5.1f} x  {short}")


if __name__ == "__main__":
    main()
