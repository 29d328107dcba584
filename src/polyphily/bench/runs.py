"""Whole runs against bare rounds, and methods that add a term against FedAvg."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyphily.bench.timing import Loader, Record, make_simulation, time_rounds
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation, load
from polyphily.runs.run import Execution

GCN = {"backbone": "gcn", "hidden": 64, "epochs": 3, "input_dropout": 0.0}
CLIENTS = (10, 20)
ROUND, RUN = "a round of FedAvg", "a round of its run"
LIMITS = {RUN: 1.1, "fedprox": 1.3, "scaffold": 1.3, "local": 1.0}  # in rounds of FedAvg
ENDLESS = 1_000_000  # rounds of a run that is only timed


def runs(device: str, rounds: int = 30, get: Loader = load) -> Iterator[Record]:
    """Time rounds of a run and of some methods in turn with bare rounds of FedAvg, on Cora.

    A round of a run has all that `polyphily run` does: scores of both views, the record, the best
    models and checkpoints.

    Args:
        device: "cpu" or "cuda".
        rounds: the number of timed rounds.
        get: loads the federations.
    """
    for clients in CLIENTS:
        federation = get("cora", partition="louvain-capped", clients=clients)
        with tempfile.TemporaryDirectory() as folder:
            yield from _rows(federation, {**GCN, "device": device}, rounds, Path(folder) / "run")


def _rows(
    federation: Federation, options: Mapping[str, Any], rounds: int, folder: Path
) -> Iterator[Record]:
    settings = from_mapping({**options, "rounds": ENDLESS})
    execution = Execution(create("fedavg"), [federation], settings, folder)
    assert execution.folder
    execution.folder.create(execution.config(), [federation])
    engines: dict[str, Callable[[], object]] = {
        ROUND: make_simulation([federation], "fedavg", options).advance,
        RUN: execution.advance,
    }
    for name in LIMITS:
        if name != RUN:
            engines[name] = make_simulation([federation], name, options).advance
    seconds = time_rounds(engines, rounds)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    for name, limit in LIMITS.items():
        yield {
            "clients": len(federation),
            "what": name,
            "ms": 1000 * median[name],
            "fedavg_ms": 1000 * median[ROUND],
            "ratio": median[name] / median[ROUND],
            "limit": limit,
        }


def runs_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| Cora, GCN-64, 3 epochs | clients | ms | FedAvg, ms | ratio | at most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['what']} | {row['clients']} | {row['ms']:.2f} | {row['fedavg_ms']:.2f} | "
        f"**{row['ratio']:.2f}** | {row['limit']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)
