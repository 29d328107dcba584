"""The cost of every method: a round of it against a round of FedAvg."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyphily.bench.stages import Span, first_round_again, more_if_quick, spans, turns
from polyphily.bench.timing import Loader, Record, make_simulation, note, time_rounds
from polyphily.core.method import METHODS
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation, load

FEDAVG, SAME, OWN = "fedavg", "fedavg on the same backbone", "method"
LIMIT, LIMITS = 25, {"fediih": 60, "fedtad": 60}  # rounds of FedAvg that a round may cost


@dataclass
class _References:
    """Simulations of FedAvg, by backbone; all methods are timed beside them."""

    federation: Federation
    device: str
    known: dict[str | None, Simulation] = field(default_factory=dict)

    def on(self, backbone: str | None = None) -> Simulation:
        """Return FedAvg on a backbone; None: on that which it takes by default."""
        if backbone not in self.known:
            options = {"device": self.device} | ({"backbone": backbone} if backbone else {})
            self.known[backbone] = make_simulation([self.federation], FEDAVG, options)
        return self.known[backbone]


def costs(
    device: str, rounds: int = 7, get: Loader = load, methods: Sequence[str] | None = None
) -> Iterator[Record]:
    """Time a round of every method on Cora with 10 clients, in turn with rounds of FedAvg.

    Args:
        device: "cpu" or "cuda".
        rounds: the number of timed rounds; quick ones are timed more often.
        get: loads the federation.
        methods: their names; None: all that are registered.
    """
    federation = get("cora", partition="louvain-capped", clients=10)
    references = _References(federation, device)
    for name in sorted(METHODS) if methods is None else methods:
        for span in spans(name, rounds):
            yield _cost(federation, name, span, references, device, rounds)


def _cost(
    federation: Federation,
    name: str,
    span: Span,
    references: _References,
    device: str,
    rounds: int,
) -> Record:
    base = _start_of_memory(device)
    simulation = make_simulation([federation], name, {"device": device}, span.hyperparameters)
    before = {OWN: first_round_again(simulation)} if span.again else {}
    began = time.perf_counter()
    simulation.advance()
    if device != "cpu":
        torch.cuda.synchronize(device)
    first = time.perf_counter() - began
    while simulation.round < span.start:
        simulation.advance()
    memory = _peak_of_memory(device, base)
    common = references.on()
    backbone = simulation.settings.backbone
    engines: dict[str, Callable[[], object]] = {FEDAVG: common.advance}
    if backbone != common.settings.backbone:
        engines[SAME] = references.on(backbone).advance
    engines[OWN] = simulation.advance
    timed, warm_up = turns(span, device, rounds)
    if not span.again:
        timed = more_if_quick(simulation, timed, warm_up, first)
    seconds = time_rounds(engines, timed, before=before, warm_up=warm_up)
    median = {engine: statistics.median(found) for engine, found in seconds.items()}
    last = simulation.round - 1
    server = simulation.servers[0]
    return {
        "method": name,
        "stage": span.label,
        "from_round": span.start + 1,
        "backbone": backbone,
        "median_ms": 1000 * median[OWN],
        "first_ms": 1000 * first,
        "fedavg_ms": 1000 * median[FEDAVG],
        "ratio": median[OWN] / median[FEDAVG],
        "ratio_on_same_backbone": median[OWN] / median.get(SAME, median[FEDAVG]),
        "megabytes_up": server.upload_contract(last).bytes / 1e6,
        "megabytes_down": server.download_contract(last).bytes / 1e6,
        "memory_gb": memory,
        "note": note(simulation) if not span.again else "",
    }


def _start_of_memory(device: str) -> int:
    """Return the GPU memory in use now, and begin to look for its peak."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_of_memory(device: str, base: int) -> float | None:
    """Return the peak of GPU memory above `base`, in GB; None on a CPU."""
    return None if device == "cpu" else (torch.cuda.max_memory_allocated(device) - base) / 1e9


# The table ---------------------------------------------------------------------------------------


def costs_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the costs as a Markdown table, with a line on the largest."""
    cuda = any(row["memory_gb"] is not None for row in rows)
    columns = ["method, 10 clients", "backbone", "ms", "FedAvg rounds", "on the same backbone"]
    columns += ["first round, ms", "MB up", "MB down", *(["GB"] if cuda else []), ""]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * (len(columns) - 3) + "---|",
    ]
    for row in rows:
        cells = [
            _name(row),
            row["backbone"],
            f"{row['median_ms']:.2f}",
            f"{row['ratio']:.1f}×",
            f"{row['ratio_on_same_backbone']:.1f}×",
            f"{row['first_ms']:.0f}",
            f"{row['megabytes_up']:.3f}",
            f"{row['megabytes_down']:.3f}",
            *([f"{row['memory_gb']:.2f}"] if cuda else []),
            row["note"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _verdict(rows)


def _name(row: Mapping[str, Any]) -> str:
    parts = [row["method"], row["stage"]]
    if row["from_round"] > 1 and not row["stage"]:
        parts.append(f"from round {row['from_round']}")
    return ", ".join(part for part in parts if part)


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which methods cost more rounds of FedAvg than they should."""
    above = [
        f"{_name(row)} ({row['ratio']:.1f})"
        for row in rows
        if row["ratio"] > LIMITS.get(row["method"], LIMIT)
    ]
    others = ", ".join(f"{limit} for {name}" for name, limit in LIMITS.items())
    text = f"A round should cost at most {LIMIT} rounds of FedAvg ({others})."
    return f"{text} More is taken by: {', '.join(above)}." if above else f"{text} All of these do."
