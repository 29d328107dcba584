"""The timings of `docs/performance.md`: each function returns the records of a table."""

from __future__ import annotations

import multiprocessing
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from polyphily.bench.costs import costs, costs_table
from polyphily.bench.loops import plain, plain_table
from polyphily.bench.many import clients_table, many_clients
from polyphily.bench.roofline import count_work, measure
from polyphily.bench.runs import runs, runs_table
from polyphily.bench.timing import (
    PLAIN,
    Loader,
    Record,
    accuracy,
    compare,
    make_simulation,
    peak_resident,
    time_rounds,
)
from polyphily.core.method import METHODS as REGISTERED
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation, load
from polyphily.runtime.machine import matmul_precision

GCN = {"backbone": "gcn", "hidden": 64, "epochs": 3, "input_dropout": 0.0}
SPEED = (
    ("cora", "louvain-capped", 10),
    ("cora", "louvain-capped", 20),
    ("cora", "metis", 50),
    ("chameleon", "metis", 10),
    ("minesweeper", "metis", 10),
)
METHODS = (
    ("fedspa", "acm-gcn"),
    ("fedgsp", "unifilter"),
    ("fedhero", "acm-gcn"),
    ("s2fgl", "acm-gcn"),
    ("fedath", "gcn"),
)
__all__ = [
    "costs",
    "large",
    "machine",
    "many_clients",
    "methods",
    "plain",
    "precision",
    "runs",
    "scale",
    "seeds",
    "speed",
]
QUICK = {
    "speed": 3,
    "methods": 2,
    "runs": 5,
    "costs": 2,
    "plain": 1,
    "scale": 2,
    "seeds": 3,
    "precision": 5,
    "clients": 2,
}  # timed rounds with --quick
QUICK_SIZES = (1_000, 3_000)  # numbers of clients
QUICK_LARGE = {"nodes": 20_000, "clients": 10, "rounds": 1}
WHOLE = ("fedavg", "fedspa", "fedgsp", "fedath")  # FedAvg, and methods that need whole graphs
BACKBONES = {"fedspa": "acm-gcn", "fedgsp": "unifilter", "fedsage": "sage"}  # others: gcn


def machine(device: str, known: Mapping[str, Any] | None = None) -> Record:
    """Describe and measure the machine.

    Args:
        device: "cpu" or "cuda".
        known: an earlier description; if it is of this machine, it is not measured again.
    """
    cuda = device != "cpu"
    description = {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if known and all(known.get(name) == value for name, value in description.items()):
        return dict(known)
    found = measure(torch.device(device))
    return {
        **description,
        "copy_gb_per_s": found.bandwidth / 1e9,
        "product_gflops": found.rate / 1e9,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def record(federation: Federation, method: str, options: Mapping[str, Any], rounds: int) -> Record:
    """Time a round on every engine; for FedAvg on a GCN add the roofline."""
    found = compare(federation, method=method, options=options, rounds=rounds)
    stacked = found["stacked"].median
    result: Record = {
        "dataset": federation.dataset,
        "partition": federation.partition.name,
        "clients": len(federation),
        "method": method,
        "engines": {
            name: {
                "median_ms": 1000 * timing.median,
                "p95_ms": 1000 * timing.p95,
                "ratio": timing.median / stacked,
                "accuracy": timing.accuracy,
                "note": timing.note,
            }
            for name, timing in found.items()
        },
    }
    if PLAIN in found:
        simulation = make_simulation([federation], method, options)
        work, roof = count_work(simulation), measure(simulation.device)
        result["roofline"] = {
            "megabytes": work.bytes / 1e6,
            "megaflops": work.operations / 1e6,
            "least_ms": 1000 * roof.seconds(work),
            "reached": roof.seconds(work) / stacked,
        }
    return result


def speed(device: str, rounds: int = 15, get: Loader = load) -> Iterator[Record]:
    """Compare a round of FedAvg on GCN-64 with the sequential engine and a torch_geometric loop."""
    for dataset, partition, clients in SPEED:
        federation = get(dataset, partition=partition, clients=clients)
        yield record(federation, "fedavg", {**GCN, "device": device}, rounds)


def methods(device: str, rounds: int = 6, get: Loader = load) -> Iterator[Record]:
    """Compare five methods on Cora with 20 clients with the sequential engine and with FedAvg."""
    federation = get("cora", partition="louvain-capped", clients=20)
    for name, backbone in METHODS:
        options = {"backbone": backbone, "hidden": 64, "epochs": 3, "device": device}
        found = compare(federation, method=name, options=options, rounds=rounds)
        plain = compare(federation, options=options, rounds=rounds, sequential=False, plain=False)
        stacked = found["stacked"].median
        yield {
            "method": name,
            "backbone": backbone,
            "median_ms": 1000 * stacked,
            "ratio_to_sequential": found["sequential"].median / stacked,
            "ratio_to_fedavg": stacked / plain["stacked"].median,
            "accuracies": {n: t.accuracy for n, t in found.items()},
            "note": found["stacked"].note,
        }


def scale(device: str, rounds: int = 5) -> Record:
    """Compare 1,000 clients of 100 nodes with 10 clients of 10,000 nodes."""
    simulations: dict[str, Simulation] = {}
    for clients, nodes in ((1000, 100), (10, 10_000)):
        federation = load(f"csbm:nodes={nodes},degree=10,features=64", clients=clients)
        simulations[f"{clients} x {nodes}"] = make_simulation(
            [federation], "fedavg", {**GCN, "device": device}
        )
    seconds = time_rounds({n: s.advance for n, s in simulations.items()}, rounds)
    many, few = (statistics.median(found) for found in seconds.values())
    return {"many_ms": 1000 * many, "few_ms": 1000 * few, "ratio": many / few}


def seeds(device: str, rounds: int = 10, get: Loader = load) -> Record:
    """Compare five seeds in one pass with one seed, in time and in the resulting weights."""
    federations = [
        get("cora", partition="louvain-capped", clients=20, seed=seed) for seed in range(5)
    ]
    options = {**GCN, "device": device}
    one = make_simulation(federations[:1], "fedavg", options)
    five = make_simulation(federations, "fedavg", options)
    seconds = time_rounds({"one": one.advance, "five": five.advance}, rounds)
    apart = max(
        float((five.memory[name][: len(value)] - value).abs().max())
        for name, value in one.memory.items()
        if value.is_floating_point()
    )
    single, together = (statistics.median(found) for found in seconds.values())
    ratio = together / single
    return {"one_ms": 1000 * single, "five_ms": 1000 * together, "ratio": ratio, "apart": apart}


def precision(device: str, rounds: int = 50, get: Loader = load) -> Record:
    """Compare the precisions of matrix products in time and accuracy, over five seeds."""
    federations = [
        get("cora", partition="louvain-capped", clients=20, seed=seed) for seed in range(5)
    ]
    found: Record = {}
    for name in ("float32", "bf16") if device == "cpu" else ("float32", "tf32", "bf16"):
        with matmul_precision(name):
            options = {**GCN, "device": device, "precision": name}
            simulation = make_simulation(federations, "fedavg", options)
            seconds = time_rounds({name: simulation.advance}, rounds)[name]
        found[name] = {
            "ms": 1000 * statistics.median(seconds),
            "accuracy": accuracy(simulation),
            "rounds": simulation.round,
        }
    return found


def large(
    device: str,
    method: str = "fedavg",
    *,
    nodes: int = 1_000_000,
    clients: int = 100,
    rounds: int = 2,
) -> Record:
    """Measure time and memory of a round with a million nodes and ten million edges.

    On a CPU, training can use 8 GB and all cores. It runs in a process of its own, since its memory
    is reported as the peak of the process.
    """
    if device == "cpu" and multiprocessing.parent_process() is None:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            task = partial(large, device, method, nodes=nodes, clients=clients, rounds=rounds)
            return pool.submit(task).result()
    each = nodes // clients
    federation = load(f"csbm:nodes={each},degree=20,features=128", clients=clients)
    options = {**GCN, "backbone": BACKBONES.get(method, "gcn"), "device": device}
    if device == "cpu":
        options["memory"] = "8GB"
    simulation = make_simulation([federation], method, options)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    reports = [simulation.advance() for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated(device) if device != "cpu" else peak_resident()
    return {
        "method": method,
        "nodes": sum(graph.num_nodes for graph in federation.clients),
        "edges": sum(graph.edges.shape[1] // 2 for graph in federation.clients),
        "clients": clients,
        "seconds": min(report.seconds for report in reports),
        "memory_gb": peak / 1e9,
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "accuracy": accuracy(simulation),
    }


def large_methods() -> list[str]:
    """Return the methods that are timed on a large graph: some, and all that train on samples."""
    sampled = [name for name in sorted(REGISTERED) if create(name).needs_whole_graph() is None]
    return list(dict.fromkeys([*WHOLE, *sampled]))


def _large_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each method, with its ratio to FedAvg if both were timed together."""
    fedavg = {row.get("commit"): row["seconds"] for row in rows if row["method"] == "fedavg"}
    lines = [
        "| method | nodes | edges | clients | threads | s | FedAvg rounds | GB |",
        "|---|" + "---:|" * 7,
    ]
    for row in rows:
        together = fedavg.get(row.get("commit"))
        ratio = f"{row['seconds'] / together:.1f}×" if together else ""
        lines.append(
            f"| {row['method']} | {row['nodes']:,} | {row['edges']:,} | {row['clients']} | "
            f"{row['threads'] or ''} | {row['seconds']:.2f} | {ratio} | {row['memory_gb']:.1f} |"
        )
    return "\n".join(lines)


def summary(records: Mapping[str, Any]) -> str:
    """Return the records of one machine as Markdown."""
    where = records["machine"]
    threads = _threads(where["threads"]) if records["device"] == "cpu" else ""
    parts = [
        f"## {where['device']}{threads}",
        f"With torch {where['torch']}. The machine copies {where['copy_gb_per_s']:,.0f} GB/s and "
        f"multiplies float32 matrices at {where['product_gflops']:,.0f} GFLOP/s (measured).",
    ]
    if rows := records.get("speed"):
        ratios = [row["engines"][PLAIN]["ratio"] for row in rows]
        parts.append(
            f"A round of FedAvg is {min(ratios):.1f} to {max(ratios):.1f} times as fast as a plain "
            "loop over clients in torch_geometric."
        )
    for name, heading, table in TABLES:
        if records.get(name):
            parts += [f"### {heading}", table(records[name])]
    if lines := _lines(records):
        parts += ["### Client sizes, seeds and precision", "\n".join(lines)]
    if rows := records.get("large"):
        parts += ["### Large graphs", _large_table(rows)]
    return "\n\n".join(parts)


def _lines(records: Mapping[str, Any]) -> list[str]:
    """Return a line for each record that is no table."""
    lines = []
    if found := records.get("scale"):
        lines.append(
            f"- 1,000 clients of 100 nodes: {found['many_ms']:.1f} ms a round; 10 clients of "
            f"10,000 nodes: {found['few_ms']:.1f} ms; ratio {found['ratio']:.2f}."
        )
    if found := records.get("seeds"):
        lines.append(
            f"- Cora, 20 clients: five seeds in one pass {found['five_ms']:.2f} ms a round, one "
            f"{found['one_ms']:.2f} ms; ratio {found['ratio']:.2f}; the first seed's weights and "
            f"moments are {found['apart']:.1e} from those of its own run."
        )
    if found := records.get("precision"):
        base = found["float32"]["accuracy"]
        text = ", ".join(
            f"{name} {own['ms']:.2f} ms and {100 * own['accuracy']:.2f} % "
            f"({100 * (own['accuracy'] - base):+.2f})"
            for name, own in found.items()
        )
        lines.append(
            f"- Cora, 20 clients, five seeds, {found['float32']['rounds']} rounds: {text}."
        )
    return lines


def _threads(count: int) -> str:
    return ", one thread" if count == 1 else f", {count} threads"


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "| FedAvg, GCN-64, 3 epochs | clients | stacked, ms (p95) | sequential | torch_geometric | "
        "ratio | least, ms | reached | accuracy |"
    )
    lines = [head, "|---|" + "---:|" * 8]
    for row in rows:
        engines, roof = row["engines"], row["roofline"]
        stacked = engines["stacked"]
        scores = [f"{100 * engine['accuracy']:.1f}" for engine in engines.values()]
        lines.append(
            f"| {row['dataset']}, {row['partition']} | {row['clients']} | "
            f"{stacked['median_ms']:.2f} ({stacked['p95_ms']:.2f}) | "
            f"{engines['sequential']['median_ms']:.1f} | {engines[PLAIN]['median_ms']:.1f} | "
            f"**{engines[PLAIN]['ratio']:.1f}×** | {roof['least_ms']:.3f} | "
            f"{100 * roof['reached']:.0f} % | {' / '.join(scores)} |"
        )
    return "\n".join(lines)


def _methods_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| Cora, 20 clients | backbone | ms | faster than sequential | cost against FedAvg |  |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row['method']} | {row['backbone']} | {row['median_ms']:.2f} | "
        f"{row['ratio_to_sequential']:.1f}× | {row['ratio_to_fedavg']:.1f}× | {row['note']} |"
        for row in rows
    ]
    return "\n".join(lines)


TABLES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("speed", "A round of FedAvg", _speed_table),
    ("methods", "Five methods", _methods_table),
    ("runs", "What a run adds", runs_table),
    ("costs", "All methods", costs_table),
    ("plain", "Plain loops of other methods", plain_table),
    ("clients", "Many clients", clients_table),
)  # the records that become tables, and their headings
