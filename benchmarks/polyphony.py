"""Trials behind the defaults of Polyphony: validation and test scores of its forms and of others.

    python benchmarks/polyphony.py --out polyphony.jsonl
    python benchmarks/polyphony.py --out polyphony.jsonl --table

Every line of the file is a row on a cell with one seed: for each learning rate and view, the
validation score of the best round and the test score there. The rates of a line train in one pass.
Lines that are there already are not repeated, so that the command can be stopped at any time. The
table chooses rate, round and the best of the other rows by validation, and compares every row with
Polyphony over all pairs of cell and seed that both have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.prepared import load_prepared
from polyphily.runs.tuning import side_by_side

BY_CLIENT, FEW = "0.6,0.2,0.2:client", "0.2,0.4,0.4:global"
SYNTHETIC = "csbm:homophily=0.25,gap=0.3,degree=5,nodes=500"


@dataclass(frozen=True)
class Cell:
    """A partitioned dataset, and how long it is trained."""

    dataset: str
    partition: str
    clients: int | None = None
    split: str = BY_CLIENT
    metric: str = "accuracy"
    rounds: int = 60
    rates: Sequence[float] = (0.003, 0.01)


CELLS = {
    "texas": Cell("texas", "louvain", 3),
    "cornell": Cell("cornell", "louvain", 5),
    "wisconsin": Cell("wisconsin", "louvain", 5),
    "chameleon": Cell("chameleon:twins=one", "metis", 5),
    "cora": Cell("cora", "metis", 10, FEW),
    "citeseer": Cell("citeseer", "metis", 10, FEW),
    "cora-louvain": Cell("cora", "louvain", 10),
    "csbm": Cell(SYNTHETIC, "natural", 10, rounds=32, rates=(0.01,)),
    "minesweeper": Cell("minesweeper", "louvain", 10, metric="auc", rates=(0.01,)),
    "tolokers": Cell("tolokers", "metis", 10, FEW, metric="auc", rates=(0.01,)),
    "photo": Cell("amazon-photo", "louvain-capped", 10, "0.2,0.4,0.4:stratified", rates=(0.01,)),
    "actor": Cell("actor", "metis", 5, "5-fold", rates=(0.01,)),
    "squirrel": Cell("squirrel:twins=one", "metis", 5, "5-fold", rates=(0.01,)),
    "syn-cora": Cell("syn-cora:homophily=all", "natural", 11, "5-fold", rates=(0.01,)),
    "facebook100": Cell("facebook100", "natural", rounds=40, rates=(0.01,)),
    "twitch": Cell("twitch", "natural", metric="auc", rounds=40, rates=(0.01,)),
}


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters and settings."""

    method: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def views(self) -> tuple[str, ...]:
        return ("received",) if self.method == "polyphony" else ("received", "trained")


LABELS = {"backbone": "res-acm", "label_inputs": 0.5, "norms": "home"}
OTHERS = {
    "Local, acm-gcn": Row("local", settings={"backbone": "acm-gcn"}),
    "FedAvg, gpr-gnn": Row("fedavg", settings={"backbone": "gpr-gnn"}),
    "FedAvg, acm-gcn": Row("fedavg", settings={"backbone": "acm-gcn"}),
    "FedAvg, res-acm": Row("fedavg", settings={"backbone": "res-acm"}),
    "FedAvg, res-acm, labels, norms at home": Row("fedavg", settings=LABELS),
}
FORMS = {
    "polyphony": Row("polyphony"),
    "own mix": Row("polyphony", {"mixing": "own"}),
    "one mix for all": Row("polyphony", {"mixing": "federation"}),
    "labels of all voices": Row("polyphony", {"labels": "all"}),
    "labels of residual voices": Row("polyphony", {"labels": "residual"}),
    "no labels": Row("polyphony", {"labels": "none"}),
    "norms shared": Row("polyphony", {"private": "none"}),
    "the federation's renditions only": Row("polyphony", {"renditions": "shared"}),
    "own renditions count half": Row("polyphony", {"own_share": 0.5}),
    "also trained together": Row("polyphony", {"together": 1.0}),
    "80 % of labels hidden": Row("polyphony", {"hidden_share": 0.8}),
    "small clients hold nodes out": Row("polyphony", {"mixing": "own", "fewest": 0, "held": 0.2}),
    "degrees as inputs": Row("polyphony", settings={"degree_inputs": True}),
    "three blocks": Row("polyphony", settings={"layers": 3}),
    "without gpr-gnn": Row("polyphony", {"voices": "acm-gcn,res-acm"}),
}
ROWS = OTHERS | FORMS
BEST = "best of the others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7, 8, 9])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--partitions", type=Path, help="folder of partition files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the tables of the file alone")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    found = [json.loads(line) for line in lines]
    if args.table:
        print(tables(found))
        return
    known = {(line["cell"], line["row"], line["seed"]) for line in found}
    for seed in args.seeds:
        for cell in args.cells:
            todo = [row for row in args.rows if (cell, row, seed) not in known]
            if todo:
                run(cell, todo, seed, args)


def run(name: str, rows: Sequence[str], seed: int, args: argparse.Namespace) -> None:
    """Train rows of a cell with one seed, and append a line for each."""
    cell = CELLS[name]
    federation = load_prepared(
        args.partitions,
        dataset=cell.dataset,
        partition=cell.partition,
        clients=cell.clients,
        split=cell.split,
        seed=seed,
    )
    fixed = {
        "rounds": cell.rounds,
        "evaluate_every": 3,
        "selection": "federation",
        "metric": cell.metric,
        "device": args.device,
    }
    for label in rows:
        row, began = ROWS[label], time.perf_counter()
        trials, _ = side_by_side(
            create(row.method, row.hyperparameters),
            [federation],
            from_mapping({**fixed, **row.settings}),
            [(rate, 0.0) for rate in cell.rates],
        )
        scores = {
            view: [
                [trial.moments[view][0][part][cell.metric] for part in ("val", "test")]
                for trial in trials
            ]
            for view in row.views
        }
        seconds = round(time.perf_counter() - began, 1)
        line = {"cell": name, "row": label, "seed": seed, "scores": scores, "seconds": seconds}
        print(name, seed, label, scores, seconds, flush=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


Scores = dict[tuple[str, int], tuple[float, float]]  # by cell and seed: validation, test


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Return two tables in Markdown: scores by cell, and differences to Polyphony."""
    found: dict[str, Scores] = {}
    for line in lines:
        tried = [100 * v for scores in line["scores"].values() for s in scores for v in s]
        best = max(zip(tried[::2], tried[1::2], strict=True), key=itemgetter(0))
        found.setdefault(line["row"], {})[line["cell"], line["seed"]] = best
    complete = set.intersection(*(set(found.get(row, {})) for row in OTHERS))
    found[BEST] = {
        key: max((found[row][key] for row in OTHERS), key=itemgetter(0)) for key in complete
    }
    order = [row for row in (*OTHERS, BEST, *FORMS) if found.get(row)]
    cells = [cell for cell in CELLS if any(cell == c for row in order for c, _ in found[row])]
    text = [f"| | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    text += [
        f"| {row} | {' | '.join(shown(found[row], cell) for cell in cells)} |" for row in order
    ]
    text += ["", "| row minus polyphony | pairs | validation | test |", "|---|---|---|---|"]
    own = found.get("polyphony", {})
    for row in order:
        pairs = [(found[row][key], own[key]) for key in found[row] if key in own]
        if row != "polyphony" and len(pairs) > 1:
            parts = [difference([a[i] - b[i] for a, b in pairs]) for i in (0, 1)]
            text.append(f"| {row} | {len(pairs)} | {parts[0]} | {parts[1]} |")
    return "\n".join(text)


def shown(scores: Scores, cell: str) -> str:
    """Return mean validation and test score of a cell, and the number of seeds."""
    own = [both for (name, _), both in scores.items() if name == cell]
    if not own:
        return "–"
    val, test = (statistics.fmean(both[i] for both in own) for i in (0, 1))
    return f"{val:.1f} / {test:.1f} ({len(own)})"


def difference(values: Sequence[float]) -> str:
    """Return the mean of differences with its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
