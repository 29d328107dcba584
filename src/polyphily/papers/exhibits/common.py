"""Runs that exhibits share: by a paper's protocol, of what can be run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyphily.errors import TrainingError, UserError
from polyphily.graphs.datasets import is_present
from polyphily.papers.exhibits import Wanted
from polyphily.papers.exhibits.drawing import Series
from polyphily.papers.plan import FORMS as FORM_NAMES
from polyphily.papers.plan import Job, by_protocol, key_of, registered
from polyphily.papers.tables import MOMENTS, Entry, Paper, Table

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation
    from polyphily.graphs.loading import Federation

FORMS: Mapping[str, dict[str, Any]] = {
    "paper": {"paper": True},
    "default": {},
    "code": {"code": True},
}
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
