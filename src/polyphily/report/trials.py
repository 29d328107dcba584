"""The part of a page that shows the trials of searches (`--tune`)."""

from __future__ import annotations

from typing import Any

from polyphily.report.blocks import Figure, Section, Table, round_digits
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run, show
from polyphily.report.words import percent
from polyphily.runs.trials import SearchTrial, ranked

TOP = 5  # trials of a run in the table


def tuning_section(run_set: RunSet) -> Section | None:
    """Return the trials of all runs that were tuned; None if there are none."""
    tuned = [
        (label, run) for label, run in zip(run_set.labels, run_set.runs, strict=True) if run.trials
    ]
    if not tuned:
        return None
    several = len(run_set.settings) > 1
    names = [
        f"{label} · {run_set.settings[run.data]}" if several else label for label, run in tuned
    ]
    runs = [run for _, run in tuned]
    slots = [run_set.slots[label] for label, _ in tuned]
    counts = sorted({len(run.trials) for run in runs})
    number = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    word = "trial" if counts == [1] else "trials"
    lead = (
        f"Before {'the run' if len(runs) == 1 else 'every run'}, {number} {word} with several "
        "learning rates and decays each were trained. The best validation score chose the values "
        "of the run. No test score was looked at."
    )
    items = (_figure(names, runs, slots), _table(names, runs))
    return Section("tuning", "Tuning", lead, items if counts[-1] > 1 else items[1:])


def _figure(names: list[str], runs: list[Run], slots: list[int]) -> Figure:
    series: list[dict[str, Any]] = []
    for name, run, slot in zip(names, runs, slots, strict=True):
        scores = [(trial, trial.score(run.view)) for trial in run.trials]
        points = [
            [trial.number, round_digits(100 * score), _name(trial)]
            for trial, score in scores
            if score is not None
        ]
        series.append({"name": name, "slot": slot, "points": points})
    panel = {"x": "trial", "y": f"validation {runs[0].metric}, %", "series": series}
    return Figure(
        "trials",
        "points",
        "Validation by trial",
        "Each dot is a trial with its best learning rate and decay, the mean over seeds. Trial 0 "
        "has the defaults. Trials that failed are left out.",
        {"": panel},
    )


def _name(trial: SearchTrial) -> str:
    return "defaults" if trial.number == 0 else f"trial {trial.number}"


def _table(names: list[str], runs: list[Run]) -> Table:
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for name, run in zip(names, runs, strict=True):
        order = ranked(run.trials, run.view)
        shown = order[:TOP] + [t for t in order[TOP:] if t.number == 0]
        strong.add(len(rows))
        rows += [(name, *_row(trial, run.view)) for trial in shown]
    columns = ("run", "trial", "values", "validation", "learning rate", "weight decay")
    return Table(
        columns,
        tuple(rows),
        f"In percent: the best {TOP} trials of each run, and the defaults. All trials are in the "
        "file tuning.jsonl of the run folder.",
        text_columns=3,
        strong=frozenset(strong),
    )


def _row(trial: SearchTrial, view: str) -> tuple[str, ...]:
    pair = trial.best(view)
    values = ", ".join(f"{name} {show(value)}" for name, value in trial.values.items())
    return (
        "0, defaults" if trial.number == 0 else str(trial.number),
        f"failed: {trial.failure}" if trial.failure else values or "as in the run",
        percent(trial.score(view)),
        f"{pair.lr:g}" if pair else "–",
        f"{pair.weight_decay:g}" if pair else "–",
    )
