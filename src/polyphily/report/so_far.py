"""Runs that are not finished: their summary so far, from the records of their rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyphily.core.method import VIEW_OF, VIEWS
from polyphily.report import evidence
from polyphily.report.runs import HYPERPARAMETERS, Run, read_config
from polyphily.runs.folder import RunFolder
from polyphily.runs.summary import mean_of

LAST = 5  # evaluations in the mean "last 5"
TROUBLES = ("late", "refused", "left out")  # events of a deployed run that the summary lists
Records = Sequence[Mapping[str, Any]]


def run_so_far(path: Path, records: Records, events: Records = ()) -> Run | None:
    """Return a run as far as it has come; None as long as no round is scored.

    Args:
        path: the run folder.
        records: of its rounds.
        events: of a deployed run.
    """
    start, config = RunFolder(path).read_start(), read_config(path)
    if not start or not any(view in record for record in records for view in VIEWS):
        return None
    summary = summary_so_far(config, start, records, events)
    return Run(path, summary, config, list(map(dict, records)), evidence.read(path), finished=False)


def summary_so_far(
    config: Mapping[str, Any], start: Mapping[str, Any], records: Records, events: Records = ()
) -> dict[str, Any]:
    """Return what is known of the summary of an unfinished run.

    The best round is that with the best validation score of all clients together, also where the
    clients of a finished run have a best round each.
    """
    metric, own = config.get("metric", "accuracy"), VIEW_OF[start["evaluated"]]
    seeds = start["seeds"]
    runs = []
    for s, seed in enumerate(seeds):
        views = {view: _moments(records, view, metric, s) for view in VIEWS}
        runs.append({"seed": seed, **views[own], "views": views})
    scores = [{k: v for k, v in run.items() if k != "seed"} for run in runs]
    several = len(seeds) > 1
    found = {
        **start,
        "method": config["method"],
        "hyperparameters": {
            name.removeprefix(HYPERPARAMETERS): value
            for name, value in config.items()
            if name.startswith(HYPERPARAMETERS)
        },
        "rounds": records[-1]["round"],
        "epochs": config["epochs"],
        "backbone": config.get("backbone", ""),
        "selection": {"by": "federation", "metric": metric},
        **(mean_of(scores, spread=True) if several else scores[0]),
        **({"per_seed": runs} if several else {}),
        "seconds_per_round_median": _median(records, "seconds"),
        "bytes_up_per_round": _median(records, "bytes_up"),
        "bytes_down_per_round": _median(records, "bytes_down"),
    }
    if "troubles" in start:
        found["troubles"] = [
            {
                "round": e.get("round", 0),
                "site": e["site"],
                "what": e["event"],
                "reason": e["reason"],
            }
            for e in events
            if e["event"] in TROUBLES
        ]
    if config.get("dp", "off") != "off" and (epsilon := records[-1].get("epsilon")) is not None:
        found["dp"] = {"epsilon": epsilon}
    return found


def _moments(records: Records, view: str, metric: str, seed: int) -> dict[str, Any]:
    """Return the scores of a view at the best, the last five and the last evaluation."""
    scored = [
        {"round": record["round"], **own[view]}
        for record in records
        if view in (own := record["per_seed"][seed] if "per_seed" in record else record)
    ]
    if not scored:
        return {
            moment: {"round": None, "val": {}, "test": {}}
            for moment in ("final", "last5", "best_val")
        }

    def validation(scores: Mapping[str, Any]) -> float:
        value: float | None = scores["val"].get(metric)
        return -1.0 if value is None else value

    last5 = {split: mean_of([s[split] for s in scored[-LAST:]]) for split in ("val", "test")}
    return {"final": scored[-1], "last5": last5, "best_val": max(scored, key=validation)}


def _median(records: Records, name: str) -> float:
    return float(statistics.median(record[name] for record in records))
