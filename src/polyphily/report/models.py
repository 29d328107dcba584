"""What was learned and sent: who learns from whom, confusion, bytes by tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from polyphily.report.blocks import Figure, digits, thinned
from polyphily.report.cast import Cast
from polyphily.report.runs import Run

CELLS = 120_000  # numbers in all collaboration matrices of a page at most
UNEXPLAINED = 0.2  # of a fit of collaboration weights, from which it is not shown


def collaboration(cast: Cast) -> Figure | None:
    kept = {
        id(run): [r for r in run.collaboration if (r["residual"] or 0) < UNEXPLAINED]
        for run in cast.runs
    }
    cells = sum(len(run.clients) ** 2 for run in cast.runs if kept[id(run)])
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
        chosen = [frames[i] for i in thinned(range(len(frames)), min(most, largest))]
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
            "unit": "share of the row's model that is the column's",
            "high": max(
                2 / len(run.clients),  # equal shares lie in the middle of the scale
                *(value for frame in chosen for row in frame["weights"] for value in row),
            ),
        }

    choices, panels = cast.each(panel)
    source = {
        frozenset({"learned"}): "Weights are the server's own.",
        frozenset({"fitted"}): "Weights are found from the models sent and sent back.",
    }.get(frozenset(kinds), "Weights are the server's own, or found from the models sent.")
    return Figure(
        "collaboration",
        "matrix",
        "Whose model goes into whose",
        f"{source} Equal rows: everybody receives the same model.",
        panels,
        choices,
        half=True,
    )


def confusion(cast: Cast) -> Figure | None:
    def panel(run: Run) -> dict[str, Any] | None:
        counts = run.evidence.get("confusion_at_best")
        if not counts:
            return None
        names = [str(name) for name in run.summary["classes"]]
        shares = [[digits(100 * v / max(sum(row), 1)) for v in row] for row in counts]
        return {
            "rows": names,
            "columns": names,
            "values": shares,
            "counts": counts,
            "unit": "% of the row's class taken for the column's",
            "high": 100,
        }

    choices, panels = cast.each(panel)
    if not any(panels.values()):
        return None
    return Figure(
        "confusion",
        "matrix",
        "Classes mistaken for each other",
        "Test nodes of all clients, the models of the best validation round, first seed.",
        panels,
        choices,
        half=True,
    )


def traffic(cast: Cast) -> Figure | None:
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
            "x": "bytes of one client, a round",
            "names": names,
            "notes": [shapes[name] for name in names],
            "series": series,
            "format": "bytes",
        }

    choices, panels = cast.each(panel)
    if not any(panels.values()):
        return None
    return Figure(
        "traffic",
        "bars",
        "Bytes by tensor",
        "Read off a real step of the first client. Nothing else leaves it.",
        panels,
        choices,
        half=True,
    )
