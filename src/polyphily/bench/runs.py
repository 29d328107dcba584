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
ROUND, RUN, UNSCORED = "a round of FedAvg", "a round of its run", "a round of its run, not scored"
LIMITS = {  # in rounds of FedAvg
    RUN: 1.1,
    UNSCORED: 1.1,
    "fedprox": 1.3,
    "scaffold": 1.3,
    "local": 1.0,
}
ENDLESS = 1_000_000  # rounds of a run that is only timed


def runs(device: str, rounds: int = 30, get: Loader = load) -> Iterator[Record]:
    """Time rounds of a run and of some methods in turn with bare rounds of FedAvg, on Cora.

    A round of a run has all that `polyphily run` does: scores of both views, the record, the best
    models and checkpoints. It is timed once more without scores, as with `--evaluate-every`.

    Args:
        device: "cpu" or "cuda".
        rounds: the number of timed rounds.
        get: loads the federations.
    """
    for clients in CLIENTS:
        federation = get("cora", partition="louvain-capped", clients=clients)
        with tempfile.TemporaryDirectory() as folder:
            yield from _rows(federation, {**GCN, "device": device}, rounds, Path(folder))


def _run(federation: Federation, options: Mapping[str, Any], folder: Path) -> Execution:
    """Return an endless run of FedAvg that writes into a folder."""
    settings = from_mapping({**options, "rounds": ENDLESS})
    execution = Execution(create("fedavg"), [federation], settings, folder)
    assert execution.folder
    execution.folder.create(execution.config(), [federation])
    return execution


def _rows(
    federation: Federation, options: Mapping[str, Any], rounds: int, folder: Path
) -> Iterator[Record]:
    seldom = {**options, "evaluate_every": ENDLESS}
    engines: dict[str, Callable[[], object]] = {
        ROUND: make_simulation([federation], "fedavg", options).advance,
        RUN: _run(federation, options, folder / "run").advance,
        UNSCORED: _run(federation, seldom, folder / "unscored").advance,
    }
    for name in LIMITS:
        if name not in engines:
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
