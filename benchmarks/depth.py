"""Trials behind the depth and the readout of residual backbones: FedAvg's validation score.

    python benchmarks/depth.py --out depth.jsonl
    python benchmarks/depth.py --out depth.jsonl --layers 5 --readouts jump
    python benchmarks/depth.py --out depth.jsonl --table

Every line of the file is a network on a cell: the validation score of each learning rate and seed
(received view, best validation round). All rates and seeds of a line train in one pass. Lines that
are there already are not repeated. The table takes the rate with the best mean over seeds. Means
over cells are of those with all depths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.prepared import load_prepared
from polyphily.runs.tuning import side_by_side

RATES = (0.003, 0.01)
BY_CLIENT = "0.6,0.2,0.2:client"
CELLS: dict[str, dict[str, Any]] = {
    "wisconsin louvain 5": {
        "dataset": "wisconsin",
        "partition": "louvain",
        "clients": 5,
        "split": BY_CLIENT,
    },
    "cora louvain 10": {
        "dataset": "cora",
        "partition": "louvain",
        "clients": 10,
        "split": BY_CLIENT,
    },
    "chameleon, one of twins, metis 5": {
        "dataset": "chameleon:twins=one",
        "partition": "metis",
        "clients": 5,
        "split": "5-fold",
    },
    "actor metis 5": {
        "dataset": "actor",
        "partition": "metis",
        "clients": 5,
        "split": "5-fold",
        "normalize": "row",
    },
    "minesweeper louvain 10": {
        "dataset": "minesweeper",
        "partition": "louvain",
        "clients": 10,
        "split": BY_CLIENT,
    },
    "csbm": {"dataset": "csbm"},
}
LARGE = ("actor metis 5", "minesweeper louvain 10", "csbm")  # with one rate only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--backbones", nargs="+", default=["res-gcn", "res-acm"])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--readouts", nargs="+", default=["last"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--partitions", type=Path, help="folder of partition files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of the file alone")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.out.read_text().splitlines()]))
        return
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    known = [json.loads(line)["trial"] for line in lines]
    for cell in args.cells:
        run_cell(cell, args, known)


def run_cell(cell: str, args: argparse.Namespace, known: list[dict[str, Any]]) -> None:
    """Train what is missing of a cell."""
    todo = [
        {"cell": cell, "backbone": backbone, "layers": layers, "readout": readout}
        for readout in args.readouts
        for layers in args.layers
        for backbone in args.backbones
    ]
    todo = [trial for trial in todo if trial not in known]
    if not todo:
        return
    seeds = args.seeds[:1] if cell == "csbm" else args.seeds  # 28,000 nodes
    federations = [load_prepared(args.partitions, seed=seed, **CELLS[cell]) for seed in seeds]
    metric = federations[0].metric
    rates = [(lr, 0.0) for lr in ((0.01,) if cell in LARGE else RATES)]
    fixed = {"rounds": args.rounds, "evaluate_every": 2, "device": args.device}
    cohort = None
    for trial in todo:
        began = time.perf_counter()
        own = {name: value for name, value in trial.items() if name != "cell"}
        trials, execution = side_by_side(
            create("fedavg"), federations, from_mapping({**fixed, **own}), rates, cohort
        )
        cohort = execution.simulation.cohort
        val = {
            str(found.lr): [moment["val"][metric] for moment in found.moments["received"]]
            for found in trials
        }
        seconds = round(time.perf_counter() - began, 1)
        line = {"trial": trial, "metric": metric, "val": val, "seconds": seconds}
        print(trial, {lr: round(100 * statistics.fmean(v), 2) for lr, v in val.items()}, seconds)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def table(lines: list[dict[str, Any]]) -> str:
    """Return the scores as a table in Markdown, a row for each backbone on each cell."""
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        trial = line["trial"]
        jump = ", jump" if trial["readout"] == "jump" else ""
        best = max(statistics.fmean(val) for val in line["val"].values())
        row = scores.setdefault((trial["backbone"], trial["cell"]), {})
        row[f"{trial['layers']}{jump}"] = 100 * best
    columns = sorted({column for row in scores.values() for column in row})
    columns.sort(key=lambda column: "jump" in column)
    depths = [column for column in columns if "jump" not in column]
    for backbone in sorted({backbone for backbone, _ in scores}):
        rows = [r for (b, _), r in scores.items() if b == backbone and r.keys() >= set(depths)]
        if rows:
            means = {column: statistics.fmean(row[column] for row in rows) for column in depths}
            scores[backbone, f"mean ({len(rows)} cells)"] = means
    found = [f"| backbone | cell | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for (backbone, cell), row in sorted(scores.items(), key=lambda item: item[0][0]):
        best = max(row.values())
        shown = ["" if c not in row else f"{row[c]:.2f}" for c in columns]
        marked = [f"**{s}**" if s == f"{best:.2f}" else s for s in shown]
        found.append(f"| {backbone} | {cell} | {' | '.join(marked)} |")
    return "\n".join(found)


if __name__ == "__main__":
    main()
