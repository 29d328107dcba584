"""The record of a round and the summary of a run, for every engine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyphily.core.method import VIEWS, Method
from polyphily.core.sampling import Sampling
from polyphily.core.settings import Settings
from polyphily.runs.assessment import below_baseline
from polyphily.runtime.machine import peak_memory_mb, versions
from polyphily.runtime.tracker import Tracker
from polyphily.version import __version__


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that stand in its summary besides the scores.

    Attributes:
        method: what was trained.
        settings: with every setting filled in.
        network: the network that was trained, by name (`Backbone.describe`).
        data: of the data: dataset, partition, split, classes, clients, seeds, notes.
        engine: what trained it.
        selection: whose validation score picked the best round.
        setup_seconds: what it took before the first round.
        privacy: what was promised and what was spent, where anything was asked for.
        more: what only this engine can tell.
        remarks: of the method on how the run ended, and warnings.
        baselines: scores of the trivial predictor for each seed, by split; none if unknown.
        decisions: of each seed, the section `decision`; none if unknown.
    """

    method: Method
    settings: Settings
    network: str
    data: Mapping[str, Any]
    engine: str
    selection: str
    setup_seconds: float
    privacy: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    baselines: Sequence[Mapping[str, Any]] = ()
    decisions: Sequence[Mapping[str, Any]] = ()


def summarise(
    facts: RunFacts, tracker: Tracker, records: Sequence[Mapping[str, Any]], rounds: int
) -> dict[str, Any]:
    """Return the content of `summary.json`.

    Args:
        facts: about the run.
        tracker: its scores.
        records: of its rounds.
        rounds: how many are complete.
    """
    method, settings, seeds = facts.method, facts.settings, facts.data["seeds"]
    runs = []
    for s, seed in enumerate(seeds):
        views = {view: tracker.moments(view, s) for view in VIEWS}
        baseline = {"baseline": facts.baselines[s]} if facts.baselines else {}
        runs.append({"seed": seed, **views[method.view], "views": views, **baseline})
    scores = [{k: v for k, v in run.items() if k != "seed"} for run in runs]
    for run, decision in zip(runs, facts.decisions, strict=False):
        run["decision"] = decision  # thresholds have no mean over seeds
    refused = [
        sum(len(r["refused"]) for r in record.get("per_seed", [record])) for record in records
    ]

    def median(name: str) -> float:
        return float(statistics.median(record[name] for record in records))

    data = dict(facts.data)
    warm_up = _warm_up(method, [run["best_val"]["round"] for run in runs], rounds)
    remarks = [*facts.remarks, *_lost(runs, settings.metric or "accuracy")]
    notes = [*data.pop("notes", []), *remarks]
    notes += [warm_up["note"]] if warm_up.get("note") else []
    return {
        "polyphily": __version__,
        "method": method.name,
        "hyperparameters": dataclasses.asdict(method),
        **data,
        "rounds": rounds,
        "epochs": settings.epochs,
        "backbone": settings.backbone,
        "network": facts.network,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if v is not None},
        "device": settings.device,
        "engine": facts.engine,
        **facts.more,
        **_shortcuts(settings),
        "evaluated": method.evaluated,
        "selection": {"by": facts.selection, "metric": settings.metric},
        **(scores[0] if len(runs) == 1 else mean_of(scores, spread=True)),
        **({"per_seed": runs} if len(runs) > 1 else {}),
        **({"decision": facts.decisions[0]} if len(runs) == len(facts.decisions) == 1 else {}),
        "seconds_per_round_median": median("seconds"),
        "seconds_evaluation_median": median("seconds_evaluation"),
        "setup_seconds": facts.setup_seconds,
        "peak_memory_mb": peak_memory_mb(),
        "bytes_up_per_round": median("bytes_up"),
        "bytes_down_per_round": median("bytes_down"),
        **({"stages": stages} if (stages := _stages(records)) else {}),
        "refused_updates": sum(refused),
        **facts.privacy,
        **({"warm_up": warm_up} if warm_up else {}),
        **({"remarks": remarks} if remarks else {}),
        "notes": notes,
        "versions": versions(),
    }


def add_judgement(
    summary: dict[str, Any],
    baseline: Mapping[str, Any],
    decision: Mapping[str, Any],
    remarks: Sequence[str],
) -> None:
    """Add to the summary of a run with one seed what its server could not know.

    Args:
        summary: of the run, which is changed.
        baseline: scores of the trivial predictor, by split.
        decision: the section `decision`.
        remarks: of the method, and warnings; they replace those of the server.
    """
    summary |= {"baseline": baseline, "decision": decision}
    summary["remarks"] = [*remarks, *_lost([summary], summary["selection"]["metric"])]
    summary["notes"] = [*summary["notes"], *summary["remarks"]]


def _lost(runs: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """Return a note if a run does not beat the trivial predictor; runs are those of its seeds."""
    if any("baseline" not in run for run in runs):
        return []
    scores = [run["best_val"]["test"] for run in runs]
    note = below_baseline(scores, [run["baseline"]["test"] for run in runs], metric)
    return [note] if note else []


def _warm_up(method: Method, best: Sequence[int | list[int]], rounds: int) -> dict[str, Any]:
    """Return what the summary says about a method's warm-up; nothing if it has none.

    Args:
        method: what was trained.
        best: the best round of each seed, or of each of its clients.
        rounds: how many are complete.
    """
    length = method.rounds_before_it_acts()
    if length == 0:
        return {}
    last = [max(found) if isinstance(found, list) else found for found in best]
    within = [round_ <= length for round_ in last]
    note = ""
    if rounds <= length:
        note = f"{method.name} has not begun: it acts after round {length}, the run has {rounds}"
    elif any(within):
        seeds = f" in {sum(within)} of {len(within)} seeds" if len(within) > 1 else ""
        note = f"the best round lies in the warm-up{seeds}: {method.name} acts after round {length}"
    return {"rounds": length, "best_round_within": any(within), "note": note}


def _shortcuts(settings: Settings) -> dict[str, Any]:
    """Return how exact products were, and what a step saw of a client's graph if not all."""
    chosen = Sampling.of(settings)
    drawn = chosen and {"neighbours": list(chosen.fanouts), "train_nodes": chosen.batch or None}
    exact = settings.precision if settings.dtype == "float32" else settings.dtype
    return {"precision": exact, "sampling": drawn}


def stage_of(method: Method, round_: int) -> dict[str, str]:
    """Return the entry of a round's record that names its stage; none if a method has one only."""
    name = method.stage(round_ - 1)
    return {"stage": name} if name else {}


def _stages(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what each stage of a run took, in order; nothing if it has one only."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if "stage" in record:
            empty = {"name": record["stage"], "rounds": 0, "seconds": 0.0}
            stage = found.setdefault(record["stage"], {**empty, "bytes_up": 0, "bytes_down": 0})
            stage["rounds"] += 1
            for name in ("seconds", "bytes_up", "bytes_down"):
                stage[name] += record[name]
    return list(found.values())


def record_of(round_: Mapping[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a round, from what it came to in each federation of a run."""
    if len(runs) == 1:
        return {**round_, **{k: v for k, v in runs[0].items() if k != "seed"}}
    shared = {k: [run[k] for run in runs] for k in runs[0] if k in ("failed", "refused")}
    means: dict[str, Any] = mean_of(
        [{k: v for k, v in run.items() if k not in shared and k != "seed"} for run in runs]
    )
    return {**round_, **means, **shared, "per_seed": list(runs)}


def mean_of(values: Sequence[Any], *, spread: bool = False) -> Any:
    """Return the mean of equal structures, number by number; with `spread`, `…_std` beside metrics.

    Lists of equal length are averaged element by element; of unequal length they become empty.
    A metric that some lack (no area under the curve where a split has one class) is averaged over
    those that have it.
    """
    first = values[0]
    if isinstance(first, Mapping):
        merged: dict[str, Any] = {}
        for key in dict.fromkeys(key for value in values for key in value):
            entries = [value[key] for value in values if key in value]
            merged[key] = mean_of(entries, spread=spread)
            numbers = [e for e in entries if isinstance(e, int | float)]
            if spread and key != "round" and len(numbers) == len(entries) > 1:
                merged[f"{key}_std"] = statistics.stdev(numbers)
        return merged
    if isinstance(first, list):
        if len({len(value) for value in values}) > 1:
            return []
        return [mean_of(entries) for entries in zip(*values, strict=True)]
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None
