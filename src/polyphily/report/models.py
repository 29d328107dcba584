"""The parts of a page about trained models: collaboration, confusion, bytes sent by tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from polyphily.report.blocks import Figure, round_digits, subsample
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run

CELLS = 120_000  # maximum number of entries in all collaboration matrices of a page
MAX_RESIDUAL = 0.2  # fitted collaboration weights with a larger residual are not shown


def collaboration_figure(run_set: RunSet) -> Figure | None:
    """Show the collaboration weights of clients, round by round; None if no run has any."""
    kept = {
        id(run): [r for r in run.collaboration if (r["residual"] or 0) < MAX_RESIDUAL]
        for run in run_set.runs
    }
    cells = sum(len(run.clients) ** 2 for run in run_set.runs if kept[id(run)])
    if not cells:
        return None
    most = max(2, CELLS // cells)
    largest = max(len(frames) for frames in kept.values())
    kinds: set[str] = set()

    def panel(run: Run) -> dict[str, Any] | None:
        frames = kept[id(run)]
        if not frames:
            return None
        kinds.update(frame["kind"] for frame in frames)
        chosen = [frames[i] for i in subsample(range(len(frames)), min(most, largest))]
        return {
            "rows": run.clients,
            "columns": run.clients,
            "frames": [
                {
                    "name": f"round {frame['round']}",
                    "values": [[round(v, 3) for v in row] for row in frame["weights"]],
                }
                for frame in chosen
            ],
            "unit": "weight of the column's model in the row's",
            "high": max(
                2 / len(run.clients),  # equal shares lie in the middle of the scale
                *(value for frame in chosen for row in frame["weights"] for value in row),
            ),
        }

    choices, panels = run_set.panels_by_run(panel)
    source = {
        frozenset({"learned"}): "The weights are those that the server uses.",
        frozenset({"fitted"}): "The weights are fitted to the models sent and received.",
    }.get(frozenset(kinds), "The weights are those that the server uses, or fitted.")
    return Figure(
        "collaboration",
        "matrix",
        "Collaboration weights",
        f"{source} If all rows are equal, all clients receive the same model.",
        panels,
        choices,
        half=True,
    )


def confusion_figure(run_set: RunSet) -> Figure | None:
    """Show the confusion matrix of each run; None if no run has one."""

    def panel(run: Run) -> dict[str, Any] | None:
        counts = run.evidence.get("confusion_at_best")
        if not counts:
            return None
        names = [str(name) for name in run.summary["classes"]]
        shares = [[round_digits(100 * v / max(sum(row), 1)) for v in row] for row in counts]
        return {
            "rows": names,
            "columns": names,
            "values": shares,
            "counts": counts,
            "unit": "% of the row's class predicted as the column's",
            "high": 100,
        }

    choices, panels = run_set.panels_by_run(panel)
    if not any(panels.values()):
        return None
    return Figure(
        "confusion",
        "matrix",
        "Confusion matrix",
        "Test nodes of all clients; models of the best validation round of the first seed.",
        panels,
        choices,
        half=True,
    )


def traffic_figure(run_set: RunSet) -> Figure | None:
    """Show the bytes of each tensor that a client sends; None if no run sends any."""

    def panel(run: Run) -> dict[str, Any] | None:
        rounds = run.evidence.get("sent", [])
        names = list(dict.fromkeys(t["name"] for entry in rounds for t in entry["tensors"]))
        if not names:
            return None
        sizes = [{t["name"]: t["bytes"] for t in entry["tensors"]} for entry in rounds]
        series = [
            {
                "name": f"round {entry['round']}",
                "slot": slot,
                "values": [own.get(name, 0) for name in names],
            }
            for slot, (entry, own) in enumerate(zip(rounds, sizes, strict=True))
        ]
        if all(a == b for a, b in pairwise(sizes)):
            series = [{**series[0], "name": "every round"}]
        shapes = {
            t["name"]: " × ".join(map(str, t["shape"])) or "one number"
            for entry in rounds
            for t in entry["tensors"]
        }
        return {
            "x": "bytes per client and round",
            "names": names,
            "notes": [shapes[name] for name in names],
            "series": series,
            "format": "bytes",
        }

    choices, panels = run_set.panels_by_run(panel)
    if not any(panels.values()):
        return None
    return Figure(
        "traffic",
        "bars",
        "Upload size by tensor",
        "All tensors that a client sends, as declared by the method. Nothing else is sent.",
        panels,
        choices,
        half=True,
    )
