"""How well runs did: tables with ranks, every client as a dot, curves over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyphily.report.blocks import Choice, Figure, Item, Section, Table, digits, percents, thinned
from polyphily.report.cast import Cast
from polyphily.report.runs import Run
from polyphily.report.words import duration, percent, short_number, size, span

AGAINST = ("rounds", "seconds", "megabytes")
UNITS = {"loss": "loss", "epsilon": "epsilon spent by a client"}  # of what is not a percentage


def result(cast: Cast) -> Section:
    if cast.single:
        return Section("result", "Result", items=(_moments(cast.runs[0]),))
    items: list[Item] = []
    if len(cast.settings) == 1:
        items.append(_comparison(cast))
    else:
        items.append(_grid(cast))
    items.append(_strip(cast))
    return Section("result", "Result", items=tuple(items))


def _moments(run: Run) -> Table:
    """Both views at three moments, as the terminal shows them."""
    rows: list[tuple[str, ...]] = []
    strong = set()
    names = [run.metric] if run.metric == "accuracy" else [run.metric, "accuracy"]
    names.append("f1_macro")
    for view in ("received", "trained"):
        for moment, words in (
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
                    words,
                    with_deviation(scores["val"], run.metric),
                    *[with_deviation(test, name) for name in names],
                    percent(test.get(f"{run.metric}_client_mean")),
                    span(test.get(f"{run.metric}_per_client", [])),
                )
            )
    columns = ("view", "round", f"val {run.metric}")
    tests = [f"test {name.replace('f1_macro', 'macro F1')}" for name in names]
    return Table(
        (*columns, *tests, "client mean", "client range"),
        tuple(rows),
        f"In percent. {run.view.capitalize()} is how {run.method} is evaluated: received is the "
        "model the server sends back, trained the client's after local training.",
        words=2,
        strong=frozenset(strong),
    )


def _comparison(cast: Cast) -> Table:
    """Methods side by side on the same data, with ranks."""
    ranks = rank([run.score for run in cast.runs])
    by_client = mean_ranks([run.per_client for run in cast.runs])
    by_seed = mean_ranks([run.scores_by_seed for run in cast.runs])
    several = (
        all(len(run.seeds) > 1 for run in cast.runs)
        and len({*map(str, (r.seeds for r in cast.runs))}) == 1
    )
    rows = []
    for i, (label, run) in enumerate(zip(cast.labels, cast.runs, strict=True)):
        cells = [
            label,
            run.view,
            with_deviation(run.test, run.metric),
            short_number(ranks[i]),
            *([short_number(by_seed[i])] if several else []),
            percent(run.test.get(f"{run.metric}_client_mean")),
            short_number(by_client[i]),
            span(run.per_client),
            duration(run.summary["seconds_per_round_median"]),
            size(run.summary["bytes_up_per_round"]),
        ]
        rows.append(tuple(cells))
    metric = cast.runs[0].metric
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
            "a round",
            "sent a round",
        ),
        tuple(rows),
        "In percent, at the best validation round. Rank by client: each client ranks the methods, "
        "and ranks are averaged; 1 is best, ties share.",
        words=2,
        strong=frozenset(i for i, value in enumerate(ranks) if value == 1),
    )


def _grid(cast: Cast) -> Table:
    """Labels by data, with the mean rank over the data where several methods met."""
    groups = cast.by_data()
    names = list(cast.slots)
    columns = {data: dict(members) for data, members in groups.items()}
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for members in columns.values():
        known = [name for name in names if name in members]
        for name, value in zip(known, rank([members[n].score for n in known]), strict=True):
            if value is not None:
                ranks[name].append(value)
    met = any(len(members) > 1 for members in columns.values())
    rows: list[tuple[str, ...]] = []
    strong = set()
    means = {name: statistics.fmean(values) for name, values in ranks.items() if values}
    for name in names:
        cells = [
            with_deviation(m[name].test, m[name].metric) if name in m else "–"
            for m in columns.values()
        ]
        if met and means.get(name) == min(means.values()):
            strong.add(len(rows))
        rows.append((name, *cells, *([short_number(means.get(name))] if met else [])))
    return Table(
        ("", *columns, *(["mean rank"] if met else [])),
        tuple(rows),
        "Test scores in percent, at the best validation round.",
        strong=frozenset(strong),
    )


def _strip(cast: Cast) -> Figure:
    """Every client's score as a dot, a row per run."""
    panels = {}
    for data, members in cast.by_data().items():
        rows = [
            {
                "name": label,
                "slot": cast.slots[label],
                "values": percents(run.per_client),
                "labels": run.clients,
                "mean": percents([run.test.get(f"{run.metric}_client_mean")])[0],
            }
            for label, run in members
        ]
        panels[cast.key(data)] = {"x": f"test {members[0][1].metric} of a client, %", "rows": rows}
    return Figure(
        "spread",
        "strip",
        "How clients fare",
        "A dot is a client, the bar their plain mean. A method that is good on average can leave "
        "some clients behind.",
        panels,
        cast.data_choice(),
    )


def rank(values: Sequence[float | None]) -> list[float | None]:
    """1 for the largest; ties share the mean of their places; None has no rank.

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
    """Each row's rank in the mean over columns; columns where a row has nothing are left out.

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


def convergence(cast: Cast) -> Section:
    metrics = list(dict.fromkeys(run.metric for run in cast.runs))
    curves: dict[str, Callable[[Run, Mapping[str, Any]], float | None]] = {
        f"{split} {metric}": lambda run, record, s=split, m=metric: (  # type: ignore[misc]
            record.get(run.view, {}).get(s, {}).get(m)
        )
        for metric in metrics
        for split in ("test", "val")
    }
    curves["loss"] = lambda _, record: record.get("loss")
    if any("dp" in run.summary for run in cast.runs):
        curves["epsilon"] = lambda _, record: record.get("epsilon")
    panels: dict[str, Any] = {}
    for data, members in cast.by_data().items():
        for name, value in curves.items():
            for against in AGAINST:
                series = [
                    {"name": label, "slot": cast.slots[label], **curve(run, value, against, name)}
                    for label, run in members
                ]
                panels[cast.key(data, name, against)] = {
                    "x": "MB sent and received" if against == "megabytes" else against,
                    "y": UNITS.get(name, f"{name}, %"),
                    "series": [s for s in series if s["x"]],
                }
    several = any(len(run.seeds) > 1 for run in cast.runs)
    band = " The band is one standard deviation over seeds." if several else ""
    figure = Figure(
        "convergence",
        "lines",
        "Round by round",
        "Each method in the view it is evaluated in; time is that of training without evaluation, "
        f"traffic that of all clients together.{band}",
        panels,
        (*cast.data_choice(), Choice("score", tuple(curves)), Choice("against", AGAINST)),
    )
    return Section("convergence", "Convergence", items=(figure,))


def curve(
    run: Run,
    value: Callable[[Run, Mapping[str, Any]], float | None],
    against: str,
    name: str,
) -> dict[str, list[float]]:
    """A score over rounds, seconds or megabytes, with a band of one deviation over seeds."""
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
    for i in thinned(known):
        record = run.records[i]
        seeds = [value(run, own) for own in record.get("per_seed", [record])]
        values = [scale * v for v in seeds if v is not None]
        mean = statistics.fmean(values)
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        found["x"].append(digits(x[i]))
        for key, y in (("y", mean), ("lo", mean - deviation), ("hi", mean + deviation)):
            found[key].append(digits(y))
    if found["lo"] == found["y"]:
        del found["lo"], found["hi"]
    return found


def with_deviation(scores: Mapping[str, Any], metric: str, digits: int = 2) -> str:
    text, deviation = percent(scores.get(metric), digits), scores.get(f"{metric}_std")
    return text if deviation is None else f"{text} ± {percent(deviation, digits)}"
