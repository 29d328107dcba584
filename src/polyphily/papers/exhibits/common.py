"""Shared by exhibits: runs by a paper's protocol, what can be run here, and drawings of scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyphily.errors import TrainingError, UserError
from polyphily.graphs.datasets import is_present
from polyphily.papers.exhibits import Wanted
from polyphily.papers.plan import FORMS as FORM_NAMES
from polyphily.papers.plan import Job, by_protocol, key_of, registered
from polyphily.papers.tables import MOMENTS, Entry, Paper, Table
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation
    from polyphily.graphs.loading import Federation

FORMS: Mapping[str, dict[str, Any]] = {
    "paper": {"paper": True},
    "default": {},
    "code": {"code": True},
}
NARROW, SQUARE, WIDE = 3.3, 4.7, 6.3  # inches: one panel, two beside each other, three
MANY = 5  # remarks that are printed; others are counted
T = TypeVar("T")


# What is run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A method with hyperparameters: a line of a figure.

    Attributes:
        label: what the legend says.
        method: the name of the method.
        set: hyperparameters that differ from the defaults.
        settings: settings of the run that differ from the protocol's.
    """

    label: str
    method: str
    set: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def forms_of(method: str, wanted: Wanted, **also: Any) -> dict[str, Line]:
    """Return the paper's method in each wanted form, by the form's name.

    Args:
        method: the name of the paper's method.
        wanted: has the forms, and what the user set.
        **also: hyperparameters that the figure sets.
    """
    switches = [f"{name}={value}" for name, value in also.items()]
    return {
        FORM_NAMES[form]: Line(
            ", ".join([method, *switches, FORM_NAMES[form]]),
            method,
            {**FORMS[form], **wanted.set, **also},
        )
        for form in wanted.forms
    }


def lines_of(own: str, methods: Sequence[str], wanted: Wanted) -> list[Line]:
    """Return the chosen methods that the library has, the paper's own in each wanted form."""
    found: list[Line] = []
    for method in chosen("methods", methods, wanted.choice.methods):
        if method == own:
            found += forms_of(own, wanted).values()
        elif method in registered():
            found.append(Line(method, method))
    if not found:
        raise UserError(f"the library has none of these methods: {', '.join(methods)}")
    return found


def datasets_of(names: Sequence[str], wanted: Wanted) -> list[str]:
    """Return the chosen datasets whose files are present."""
    asked = chosen("only", names, wanted.choice.datasets)
    found = [name for name in asked if is_present(name)]
    if not found:
        raise UserError(
            f"the data are not present: {', '.join(asked)}. `polyphily datasets` says where they "
            "come from."
        )
    return found


def cells_of(printed: Mapping[str, Sequence[int]], wanted: Wanted) -> dict[str, list[int]]:
    """Return the chosen numbers of clients of each chosen dataset whose files are present.

    Args:
        printed: the figure's numbers of clients, by dataset.
        wanted: what the user asked for.
    """
    names = datasets_of(list(printed), wanted)
    numbers = sorted({number for name in names for number in printed[name]})
    kept = chosen("clients", numbers, wanted.choice.clients)
    found = {name: [number for number in printed[name] if number in kept] for name in names}
    return {name: clients for name, clients in found.items() if clients}


def lacking(methods: Sequence[str]) -> list[str]:
    """Return a note on the methods that the library does not have; none if it has all."""
    names = [name for name in methods if name not in registered()]
    return [f"Not in the library, and left out: {', '.join(names)}."] if names else []


def absent(datasets: Iterable[str]) -> list[str]:
    """Return a note on the datasets that are not present; none if all are."""
    names = [name for name in datasets if not is_present(name)]
    return [f"Data not present, and left out: {', '.join(names)}."] if names else []


def left_out(methods: Sequence[str] = (), datasets: Iterable[str] = ()) -> list[str]:
    """Return notes on the methods and datasets of a figure that cannot be shown here."""
    return [*lacking(methods), *absent(datasets)]


def methods_of(paper: Paper, table: Table) -> tuple[str, ...]:
    """Return the methods of a table's rows, in printed order."""
    return tuple(dict.fromkeys(paper.variant(entry.method).method for entry in table.entries))


def chosen(flag: str, printed: Sequence[T], given: Sequence[T] | None) -> list[T]:
    """Return those of the figure's values that the user chose: all unless some are given."""

    def names(value: T) -> set[Any]:
        return {value, value.partition(":")[0]} if isinstance(value, str) else {value}

    found = [value for value in printed if given is None or names(value) & set(given)]
    if not found:
        raise UserError(f"--{flag}: the figure has {', '.join(map(str, printed))}")
    return found


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A run of an exhibit.

    Attributes:
        job: what was run.
        folder: its run folder.
        summary: the summary; None if training failed.
    """

    job: Job
    folder: Path
    summary: dict[str, Any] | None

    @property
    def score(self) -> tuple[float | None, float | None]:
        """Mean and standard deviation over seeds of the protocol's test score, in percent."""
        from polyphily.papers.runner import outcome

        return (None, None) if self.summary is None else outcome(self.job, self.summary)

    def clients(self, view: str | None = None) -> list[list[float | None]]:
        """Return the test scores of each seed's clients, in percent, at the protocol's moment.

        Args:
            view: "received" or "trained"; the protocol's unless given.
        """
        summary, protocol = self.summary or {}, self.job.protocol
        name = f"{protocol.metric}_per_client"
        return [
            [_percent(v) for v in run["views"][view or self.view][protocol.moment]["test"][name]]
            for run in summary.get("per_seed", [summary] if summary else [])
        ]

    @property
    def view(self) -> str:
        """The view that the protocol reports."""
        from polyphily.core.method import VIEW_OF

        own = VIEW_OF[(self.summary or {}).get("evaluated", "global")]
        return own if self.job.protocol.view == "own" else self.job.protocol.view

    def curve(self) -> Series:
        """Return the test score over rounds, with its deviation over seeds."""
        from polyphily.runs.folder import RunFolder

        protocol, points = self.job.protocol, []
        name = protocol.metric + ("_client_mean" if protocol.over == "clients" else "")
        for record in RunFolder(self.folder).records():
            runs = record.get("per_seed", [record])
            found = [run.get(self.view, {}).get("test", {}).get(name) for run in runs]
            if values := [100 * value for value in found if value is not None]:
                points.append((record["round"], *mean_and_deviation(values)))
        return Series.of(points)

    def simulation(self) -> Simulation:
        """Return the clients and servers after the last round, on the CPU."""
        from polyphily.core.method import create
        from polyphily.core.settings import from_mapping
        from polyphily.runs.folder import RunFolder
        from polyphily.runs.run import Execution

        saved = RunFolder(self.folder).load_checkpoint()
        assert saved is not None, f"{self.folder}: the run has no checkpoint"
        method = create(self.job.method, self.job.hyperparameters)
        settings = from_mapping(self.job.settings | {"device": "cpu"})
        execution = Execution(method, self.federations(), settings, None)
        execution.adopt(*saved, self.folder)
        return execution.simulation

    def federations(self) -> list[Federation]:
        """Load the data of each seed."""
        from polyphily.papers.runner import federations_of

        return federations_of(self.job)


@dataclass(frozen=True)
class Bench:
    """The runs of an exhibit, by the protocol of one of the paper's tables.

    Attributes:
        exhibit: the folder of its runs, under `wanted.out`.
        table: has the protocol.
        wanted: what the user asked for.
        remarks: on runs that failed, or that are scored before the method acts.
    """

    exhibit: str
    table: Table
    wanted: Wanted
    remarks: list[str] = field(default_factory=list)

    def notes(self, *datasets: str, rounds: bool = False, scores: bool = True) -> list[str]:
        """Return which score is reported, with what seeds, and the remarks.

        Args:
            *datasets: the datasets that were run.
            rounds: whether the scores of all rounds are shown.
            scores: whether scores are shown; otherwise something else is measured.
        """
        from polyphily.papers.report import changes, reported

        found = []
        for protocol in map(self.table.protocol_of, datasets):
            text = f"Scores: {reported(protocol)}; mean and standard deviation over"
            text = text.replace(MOMENTS[protocol.moment], "after every round") if rounds else text
            seeds = ", ".join(map(str, self.wanted.choice.seeds_of(protocol)))
            found.append(f"{text if scores else 'Mean over'} seeds {seeds}.")
            if changed := changes(protocol, self.wanted.choice):
                found.append(f"Not the paper's protocol: {', '.join(changed)}.")
        remarks = list(dict.fromkeys(self.remarks))
        more = [f"{len(remarks) - MANY} more remarks of this kind."] if remarks[MANY:] else []
        return [*dict.fromkeys(found), *remarks[:MANY], *more]

    def job(
        self, line: Line, dataset: str, partition: str, clients: int | None, **data: Any
    ) -> Job:
        """Return a run: the protocol with the user's changes.

        Args:
            line: the method.
            dataset: its name in this library.
            partition: its name in this library.
            clients: their number; None if the partition decides.
            **data: arguments of `load` that differ from the protocol's.
        """
        return by_protocol(
            self.table.protocol_of(dataset),
            Entry(dataset, partition, clients, line.label),
            self.wanted.choice,
            line.method,
            line.set,
            settings=line.settings,
            data=data,
        )

    def run(
        self, line: Line, dataset: str, partition: str, clients: int | None, **data: Any
    ) -> Ran:
        """Make a run, or read it if it is finished; the arguments are those of `job`.

        A finished run of another exhibit or table with the same request is used, too.
        """
        from polyphily.papers import runner
        from polyphily.runs.folder import safe_name

        job, out = self.job(line, dataset, partition, clients, **data), self.wanted.out
        cell = " ".join([job.entry.cell, *[f"{name}={value}" for name, value in data.items()]])
        own = out / self.exhibit / safe_name(cell) / safe_name(line.label)
        folder = runner.finished_runs(out).get(key_of(job.request()), own)
        try:
            ran = Ran(job, folder, runner.run(job, folder, self.wanted.train))
            remark = runner.remark(job, ran.summary or {})
        except TrainingError as error:
            ran, remark = Ran(job, folder, None), f"failed: {error}"
        if remark:
            self.remarks.append(f"{cell}, {line.label}: {remark.rstrip('.')}.")
        return ran

    def curves(
        self, lines: Sequence[Line], dataset: str, partition: str, clients: int
    ) -> dict[str, Series]:
        """Run the lines, and return the test score over rounds of each by its label."""
        return {line.label: self.run(line, dataset, partition, clients).curve() for line in lines}

    def scores(
        self,
        lines: Sequence[Line],
        dataset: str,
        partition: str,
        points: Mapping[float, Mapping[str, Any]],
    ) -> dict[str, Series]:
        """Run the lines at every point, and return the scores of each by its label.

        Args:
            lines: the methods.
            dataset: its name.
            partition: its name.
            points: arguments of `job` (clients and others) by their place on the axis.
        """
        found: dict[str, list[tuple[float, float | None, float | None]]] = {}
        for place, data in points.items():  # runs that share their data follow each other
            for line in lines:
                score = self.run(line, dataset, partition, **data).score
                found.setdefault(line.label, []).append((place, *score))
        return {label: Series.of(own) for label, own in found.items()}


def growth(score: float | None, base: float | None) -> float | None:
    """Return how far a score is above another; None if one of them is missing."""
    return None if score is None or base is None else score - base


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation (n - 1), which is 0 for a single value."""
    import statistics

    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


# Drawings -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Points of a line.

    Attributes:
        x: places.
        y: values; NaN if there is none.
        spread: deviations of the values.
    """

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float | None, float | None]]) -> Series:
        """Return the series of points (x, y, deviation)."""
        known = [(x, math.nan if y is None else y, spread or 0.0) for x, y, spread in points]
        return cls(*([point[i] for point in known] for i in range(3)))

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        return zip(self.x, self.y, self.spread, strict=True)


Panels = Mapping[str, Mapping[str, Series]]
"""The lines of each panel: title, then label."""


def series_grid(title: str, panels: Panels, panel: str, x: str, y: str) -> Grid:
    """Return the points of all lines as a table."""
    rows = [
        (name, label, at, None if math.isnan(value) else value, spread)
        for name, lines in panels.items()
        for label, series in lines.items()
        for at, value, spread in series
    ]
    return Grid(title, (panel, "line", x, y, "deviation"), rows)


def draw_lines(
    panels: Panels, x: str, y: str, *, markers: bool = True, log: bool = False, even: bool = False
) -> Any:
    """Draw a panel for each entry, with a line for each label.

    Args:
        panels: the lines.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        markers: whether points are marked and have error bars; otherwise the deviation is a band.
        log: whether the horizontal axes are logarithmic.
        even: whether marked points are equally far apart, whatever their x.
    """
    from polyphily.report.figures import MARKERS, style

    with style():
        from matplotlib.ticker import MaxNLocator

        figure, all_axes = panel_axes(len(panels))
        slots = _slots(panels)
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            places = sorted({at for series in lines.values() for at in series.x})
            for label, series in lines.items():
                look = {"label": label, **_look(slots[label])}
                if markers:
                    look |= {"marker": MARKERS[slots[label] % len(MARKERS)], "capsize": 1.5}
                    at = [places.index(value) for value in series.x] if even else series.x
                    axes.errorbar(at, series.y, series.spread, elinewidth=0.7, **look)
                    continue
                axes.plot(series.x, series.y, **look)
                low = [value - spread for _, value, spread in series]
                high = [value + spread for _, value, spread in series]
                axes.fill_between(series.x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if log:
                axes.set_xscale("log")
                axes.minorticks_off()
            elif markers:
                ticks = range(len(places)) if even else places
                axes.set_xticks(ticks, [f"{value:g}" for value in places])
            else:
                axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set(xlabel=x, ylabel=y, title=title)
        _add_legend(figure, all_axes)
    return figure


def draw_bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    ticks: Mapping[str, Sequence[str]],
    x: str,
    y: str,
    spreads: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> Any:
    """Draw a panel for each entry, with groups of bars at ticks and a colour for each label.

    Args:
        panels: the heights of each label's bars, one per tick.
        ticks: the names of each panel's groups.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        spreads: the deviations of the heights, if they are drawn.
    """
    from polyphily.report.figures import style

    with style():
        figure, all_axes = panel_axes(len(panels))
        slots = _slots(panels)
        for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
            breadth = 0.8 / len(bars)
            for i, (label, heights) in enumerate(bars.items()):
                places = [at + (i - (len(bars) - 1) / 2) * breadth for at in range(len(heights))]
                colour = _look(slots[label])["color"]
                errors = spreads[title][label] if spreads else None
                caps = {"elinewidth": 0.7, "capsize": 1.5}
                look = {"color": colour, "label": label, "yerr": errors, "error_kw": caps}
                axes.bar(places, heights, 0.9 * breadth, **look)
            axes.axhline(0, color="#444444", linewidth=0.6)
            axes.grid(visible=False, axis="x")
            axes.set_xticks(range(len(ticks[title])), ticks[title])
            axes.set(xlabel=x, ylabel=y, title=title)
        _add_legend(figure, all_axes)
    return figure


@dataclass(frozen=True)
class Heat:
    """Values of a heat map.

    Attributes:
        values: a list for each row, from the top; NaN is left blank.
        rows: the names of the rows.
        columns: the names of the columns.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[Any]
    columns: Sequence[Any]


def draw_heat(
    panels: Mapping[str, Heat],
    x: str,
    y: str,
    bar: str,
    *,
    least: float = 0.0,
    signed: bool = False,
    digits: int = 1,
) -> Any:
    """Draw a heat map for each panel, all with one scale of colours.

    Args:
        panels: the heat maps by title.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        bar: the label of the scale.
        least: the value of the palest colour, unless signed.
        signed: whether colours tell positive from negative values.
        digits: decimals of the numbers in the cells, if there is room for numbers.
    """
    import numpy as np

    from polyphily.report.figures import style

    known = np.concatenate([np.ravel(heat.values) for heat in panels.values()])
    most = float(np.nanmax(np.abs(known), initial=0.0)) or 1.0
    with style():
        figure, all_axes = panel_axes(len(panels), 0.9)
        for axes, (title, heat) in zip(all_axes, panels.items(), strict=True):
            image = show_heat(axes, heat, most, least=least, signed=signed, digits=digits)
            axes.set(xlabel=x, ylabel=y, title=title)
        scale = figure.colorbar(image, ax=all_axes, shrink=0.8)
        scale.set_label(bar)
        scale.outline.set_linewidth(0)
    return figure


def show_heat(
    axes: Any,
    heat: Heat,
    most: float,
    *,
    least: float = 0.0,
    signed: bool = False,
    digits: int = 1,
) -> Any:
    """Draw a heat map; return the image, for a scale.

    Args:
        axes: where it is drawn.
        heat: the values.
        most: the value of the strongest colour.
        least: the value of the palest colour, unless signed.
        signed: whether colours tell positive from negative values.
        digits: decimals of the numbers in the cells, if there is room for numbers.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    from polyphily.report.figures import RAMP

    values = np.asarray(heat.values, dtype=float)
    ramp = LinearSegmentedColormap.from_list("polyphily", RAMP)
    colours, low, pale = ("RdBu", -most, 0.0) if signed else (ramp, least, least)
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=most, aspect="auto")
    axes.grid(visible=False)
    if len(heat.columns) <= 20:
        axes.set_xticks(range(len(heat.columns)), heat.columns)
        axes.set_yticks(range(len(heat.rows)), heat.rows)
    if values.size <= 30:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                text = f"{value:{'+' if signed else ''}.{digits}f}"
                colour = "white" if abs(value - pale) > 0.6 * (most - pale) else "#222222"
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)
    return image


def panel_axes(
    count: int, ratio: float = 0.72, width: float | None = None
) -> tuple[Any, list[Any]]:
    """Create a figure with `count` panels.

    Args:
        count: the number of panels.
        ratio: height of the panels relative to their width.
        width: of the figure, which decides how many panels are beside each other: `NARROW`,
            `SQUARE` or `WIDE`; chosen by their number unless given.
    """
    from polyphily.report.figures import Look, axes_grid

    usual = {1: NARROW, 4: SQUARE}.get(count, WIDE)
    return axes_grid(count, Look(width=width or usual), ratio)


def _add_legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """Add a legend above the panels, and as much height as it takes."""
    from polyphily.report.figures import legend

    legend(figure, all_axes)
    for added in figure.legends:
        height = added.get_window_extent().height / figure.dpi
        figure.set_figheight(figure.get_figheight() + height)


def _slots(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Number the labels of all panels, so that a label looks the same in each."""
    labels = dict.fromkeys(label for entries in panels.values() for label in entries)
    return {label: slot for slot, label in enumerate(labels)}


def _look(slot: int) -> dict[str, Any]:
    """Return the colour of a slot, and the dashes that tell slots of one colour apart."""
    from polyphily.report.figures import COLOURS

    dashes = ("-", "--", ":")[slot // len(COLOURS) % 3]
    return {"color": COLOURS[slot % len(COLOURS)], "linestyle": dashes}
