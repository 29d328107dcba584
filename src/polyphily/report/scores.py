"""The parts of a page that show scores: tables with ranks, scores by client, learning curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyphily.report.blocks import (
    Choice,
    Figure,
    Section,
    Table,
    round_digits,
    subsample,
    to_percent,
)
from polyphily.report.ranks import rank_items
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run
from polyphily.report.words import (
    WARM_UP,
    duration,
    in_warm_up,
    percent,
    short_number,
    size,
    span,
)
from polyphily.runs.assessment import baseline_name

AGAINST = ("rounds", "seconds", "megabytes")
UNITS = {"loss": "loss", "epsilon": "epsilon spent by a client"}  # curves that are not in percent


def result_section(run_set: RunSet) -> Section:
    if run_set.single:
        return Section("result", "Result", items=(_moments(run_set.runs[0]),))
    table = _comparison(run_set) if len(run_set.settings) == 1 else _grid(run_set)
    complete = all(run.finished for run in run_set.runs)
    ranks, notes = rank_items(run_set) if complete else ((), ())
    return Section("result", "Result", items=(table, *ranks, _strip(run_set)), points=notes)


def _moments(run: Run) -> Table:
    """Return the scores of both views at three moments, as the terminal shows them."""
    rows: list[tuple[str, ...]] = []
    strong = set()
    names = [run.metric] if run.metric == "accuracy" else [run.metric, "accuracy"]
    names.append("f1_macro")
    for view in ("received", "trained"):
        for moment, title in (
            ("best_val", "best validation"),
            ("last5", "last 5"),
            ("final", "last"),
        ):
            scores = run.summary["views"][view][moment]
            if view == run.view and moment == "best_val":
                strong.add(len(rows))
            test = scores["test"]
            rows.append(
                (
                    view,
                    title,
                    with_deviation(scores["val"], run.metric),
                    *[with_deviation(test, name) for name in names],
                    percent(test.get(f"{run.metric}_client_mean")),
                    span(test.get(f"{run.metric}_per_client", [])),
                )
            )
    if trivial := run.summary.get("baseline"):
        rows.append(
            (
                "no model",
                "",
                with_deviation(trivial["val"], run.metric),
                *[with_deviation(trivial["test"], name) for name in names],
                percent(trivial["test"].get(f"{run.metric}_client_mean")),
                span(trivial["test"].get(f"{run.metric}_per_client", [])),
            )
        )
    legend = (
        f"In percent. {run.method} is evaluated in the view {run.view}. Received is the model that "
        "the server sends back, trained is the client's model after local training."
    )
    if trivial:  # the server of a deployment does not know it
        legend += " No model: every node gets the most frequent train label of its client."
    columns = ("view", "round", f"val {run.metric}")
    tests = [f"test {name.replace('f1_macro', 'macro F1')}" for name in names]
    return Table(
        (*columns, *tests, "client mean", "client range"),
        tuple(rows),
        legend,
        text_columns=2,
        strong=frozenset(strong),
    )


def _comparison(run_set: RunSet) -> Table:
    """Return a table of runs on the same data, with ranks."""
    ranks = rank([run.score for run in run_set.runs])
    by_client = mean_ranks([run.per_client for run in run_set.runs])
    by_seed = mean_ranks([run.scores_by_seed for run in run_set.runs])
    several = (
        all(len(run.seeds) > 1 for run in run_set.runs)
        and len({*map(str, (r.seeds for r in run_set.runs))}) == 1
    )
    rows = []
    for i, (label, run) in enumerate(zip(run_set.labels, run_set.runs, strict=True)):
        cells = [
            label,
            run.view,
            with_deviation(run.test, run.metric) + WARM_UP * in_warm_up(run.summary),
            short_number(ranks[i]),
            *([short_number(by_seed[i])] if several else []),
            percent(run.test.get(f"{run.metric}_client_mean")),
            short_number(by_client[i]),
            span(run.per_client),
            duration(run.summary["seconds_per_round_median"]),
            size(run.summary["bytes_up_per_round"]),
        ]
        rows.append(tuple(cells))
    metric = run_set.runs[0].metric
    seeds = ("rank by seed",) if several else ()
    return Table(
        (
            "method",
            "view",
            f"test {metric}",
            "rank",
            *seeds,
            "client mean",
            "rank by client",
            "client range",
            "time per round",
            "upload per round",
        ),
        tuple(rows),
        "In percent, at the best validation round. Rank by client: methods are ranked at each "
        "client, and the ranks are averaged. 1 is best; ties share the mean of their ranks. "
        "Uploads are those of all clients together." + _warm_up(run_set),
        text_columns=2,
        strong=frozenset(i for i, value in enumerate(ranks) if value == 1),
    )


def _warm_up(run_set: RunSet) -> str:
    """Return the explanation of the mark of warm-ups, if a run has it."""
    if not any(in_warm_up(run.summary) for run in run_set.runs):
        return ""
    return f" {WARM_UP}: the best round is one in which the method had not begun; see the notes."


def _grid(run_set: RunSet) -> Table:
    """Return a table of methods by data, with mean ranks if methods share data."""
    groups = run_set.by_data()
    names = list(run_set.slots)
    columns = {data: dict(members) for data, members in groups.items()}
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for members in columns.values():
        known = [name for name in names if name in members]
        for name, value in zip(known, rank([members[n].score for n in known]), strict=True):
            if value is not None:
                ranks[name].append(value)
    ranked = any(len(members) > 1 for members in columns.values())
    rows: list[tuple[str, ...]] = []
    strong = set()
    means = {name: statistics.fmean(values) for name, values in ranks.items() if values}
    for name in names:
        cells = [
            with_deviation(m[name].test, m[name].metric) + WARM_UP * in_warm_up(m[name].summary)
            if name in m
            else "–"
            for m in columns.values()
        ]
        if ranked and means.get(name) == min(means.values()):
            strong.add(len(rows))
        rows.append((name, *cells, *([short_number(means.get(name))] if ranked else [])))
    return Table(
        ("", *columns, *(["mean rank"] if ranked else [])),
        tuple(rows),
        "Test scores in percent, at the best validation round." + _warm_up(run_set),
        strong=frozenset(strong),
    )


def _strip(run_set: RunSet) -> Figure:
    """Show the score of every client as a dot, with a row per run."""
    panels = {}
    for data, members in run_set.by_data().items():
        rows = [
            {
                "name": label,
                "slot": run_set.slots[label],
                "values": to_percent(run.per_client),
                "labels": run.clients,
                "mean": to_percent([run.test.get(f"{run.metric}_client_mean")])[0],
            }
            for label, run in members
        ]
        panels[run_set.key(data)] = {
            "x": f"test {members[0][1].metric} of a client, %",
            "rows": rows,
        }
    return Figure(
        "spread",
        "strip",
        "Score of each client",
        "Each dot is a client, the bar is their unweighted mean. A method that is good on average "
        "can be poor for some clients.",
        panels,
        run_set.data_choice(),
    )


def rank(values: Sequence[float | None]) -> list[float | None]:
    """Rank values in descending order; ties share the mean of their ranks, None has no rank.

    >>> rank([0.5, 0.7, None, 0.7])
    [3.0, 1.5, None, 1.5]
    """
    known = [value for value in values if value is not None]
    return [
        None
        if value is None
        else 1 + sum(other > value for other in known) + (known.count(value) - 1) / 2
        for value in values
    ]


def mean_ranks(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean rank of each row over all columns without missing values.

    >>> mean_ranks([[0.9, 0.1, 0.5], [0.8, 0.2, None]])
    [1.5, 1.5]
    """
    if not rows or len({len(row) for row in rows}) > 1:
        return [None] * len(rows)
    columns = [rank(column) for column in zip(*rows, strict=True) if None not in column]
    if not columns:
        return [None] * len(rows)
    return [
        statistics.fmean(value for value in ranks if value is not None)
        for ranks in zip(*columns, strict=True)
    ]


def convergence_section(run_set: RunSet) -> Section:
    metrics = list(dict.fromkeys(run.metric for run in run_set.runs))
    curves: dict[str, Callable[[Run, Mapping[str, Any]], float | None]] = {
        f"{split} {metric}": lambda run, record, s=split, m=metric: (  # type: ignore[misc]
            record.get(run.view, {}).get(s, {}).get(m)
        )
        for metric in metrics
        for split in ("test", "val")
    }
    curves["loss"] = lambda _, record: record.get("loss")
    if any("dp" in run.summary for run in run_set.runs):
        curves["epsilon"] = lambda _, record: record.get("epsilon")
    panels: dict[str, Any] = {}
    for data, members in run_set.by_data().items():
        for name, value in curves.items():
            for against in AGAINST:
                series = [
                    {
                        "name": label,
                        "slot": run_set.slots[label],
                        **curve(run, value, against, name),
                    }
                    for label, run in members
                ]
                panels[run_set.key(data, name, against)] = {
                    "x": "MB sent and received" if against == "megabytes" else against,
                    "y": UNITS.get(name, f"{name}, %"),
                    "series": [s for s in series if s["x"]],
                    **_baseline(members[0][1], name),
                }
    several = any(len(run.seeds) > 1 for run in run_set.runs)
    band = " The band is one standard deviation over seeds." if several else ""
    figure = Figure(
        "convergence",
        "lines",
        "Learning curves",
        "Each method is shown in the view that it is evaluated in. Seconds are those of training, "
        f"without evaluation; megabytes are those of all clients together.{band}",
        panels,
        (*run_set.data_choice(), Choice("score", tuple(curves)), Choice("against", AGAINST)),
    )
    return Section("convergence", "Convergence", items=(figure,))


def _baseline(run: Run, curve: str) -> dict[str, Any]:
    """Return the entry of a panel with the score of the trivial predictor, if it is known."""
    split, _, metric = curve.partition(" ")
    value = run.baseline(split) if metric == run.metric else None
    if value is None:
        return {}
    return {"baseline": {"name": baseline_name(metric), "y": round_digits(100 * value)}}


def curve(
    run: Run,
    value: Callable[[Run, Mapping[str, Any]], float | None],
    against: str,
    name: str,
) -> dict[str, list[float]]:
    """Return a score over rounds, seconds or megabytes, with a band of one deviation over seeds."""
    scale = 1 if name in UNITS else 100
    x: list[float] = {
        "rounds": [float(r["round"]) for r in run.records],
        "seconds": run.seconds,
        "megabytes": run.megabytes,
    }[against]
    if against == "megabytes" and not any(x):
        return {"x": [], "y": []}  # nothing is sent
    found: dict[str, list[float]] = {"x": [], "y": [], "lo": [], "hi": []}
    known = [i for i, record in enumerate(run.records) if value(run, record) is not None]
    for i in subsample(known):
        record = run.records[i]
        seeds = [value(run, own) for own in record.get("per_seed", [record])]
        values = [scale * v for v in seeds if v is not None]
        mean = statistics.fmean(values)
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        found["x"].append(round_digits(x[i]))
        for key, y in (("y", mean), ("lo", mean - deviation), ("hi", mean + deviation)):
            found[key].append(round_digits(y))
    if found["lo"] == found["y"]:
        del found["lo"], found["hi"]
    return found


def with_deviation(scores: Mapping[str, Any], metric: str, digits: int = 2) -> str:
    text, deviation = percent(scores.get(metric), digits), scores.get(f"{metric}_std")
    return text if deviation is None else f"{text} ± {percent(deviation, digits)}"
