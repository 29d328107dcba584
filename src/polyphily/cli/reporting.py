"""`polyphily report` and `plot`: the page of runs, and figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options
from polyphily.errors import PolyphilyError, UserError

if TYPE_CHECKING:
    from polyphily.graphs.loading import Federation
    from polyphily.heterogeneity.inspection import Inspection
    from polyphily.report.runs import Run
    from polyphily.report.style import Look
    from polyphily.runs.run import Execution

MOST_NODES = 25_000  # larger federations are measured by `polyphily report` only

Folders = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders, or folders with runs in them.",
        metavar="RUN…",
        autocompletion=completion.run_folder,
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


def add_to(app: typer.Typer) -> None:
    app.command("report")(report)
    app.command("plot")(plot)


def report(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page. [dim]\\[report.html beside the runs][/dim]"),
    ] = None,
    open_: Open = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Measure clients and models if the run folder lacks that.",
        ),
    ] = True,
) -> None:
    """Write a page about one run, or about several side by side."""
    from polyphily.cli import terminal
    from polyphily.report import runs

    if out is not None:
        options.check_output("--out", out, (".html", ".htm"))
    found = runs.read_runs(folders)
    if measure:
        found = _measure_missing(found)
    folder = folders[0] if len(folders) == 1 else Path()
    file = write_page(found, out or folder / "report.html")
    terminal.print_line(f"report: {file}")
    if open_:
        open_page(file)


def open_page(file: Path) -> None:
    """Open a page in the browser."""
    import webbrowser

    webbrowser.open(file.resolve().as_uri())


def write_page(found: Sequence[Run], file: Path) -> Path:
    """Write the page about some runs, and return its path."""
    from polyphily.report import page
    from polyphily.report.content import content

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        page.write(content(found), file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
    return file


def _measure_missing(found: Sequence[Run]) -> list[Run]:
    """Measure clients and models of runs whose folders lack that, and store it there.

    Returns:
        The runs, read again. Those whose data or models cannot be read are returned as they are.
    """
    from polyphily.cli.inspecting import progress
    from polyphily.cli.terminal import notes
    from polyphily.cli.training import restore
    from polyphily.graphs.loading import SAVED
    from polyphily.report import evidence
    from polyphily.report.runs import Run

    inspections: dict[Any, Inspection] = {}  # runs on the same data share one
    updated = []
    for run in found:
        updated.append(run)
        stored = run.evidence
        complete = {"inspection", "confusion_at_best"} <= stored.keys()
        if complete and stored["round"] == run.summary["rounds"]:
            continue
        if not (run.path / SAVED).exists():  # a deployed run
            notes([f"{run.path.name}: its graphs are not here: clients and models are not shown"])
            continue
        try:
            with progress() as report:
                report(f"reading {run.path}")
                execution = restore(run.path)
                key = (run.data, run.seeds[0])
                if key not in inspections:
                    inspections[key] = inspect_clients(execution.federations[0], report)
                report(f"measuring the models of {run.path.name}")
                measured = evidence.gather(execution, inspections[key])
            evidence.write(run.path, {"commit": stored.get("commit"), **measured})
            updated[-1] = Run.read(run.path)
        except PolyphilyError as error:
            notes([f"{run.path.name}: clients and models are not shown: {error}"])
        except OSError as error:
            notes([f"{run.path.name}: cannot store what was measured: {error.strerror}"])
    return updated


def inspect_clients(federation: Federation, report: Callable[[str], None]) -> Inspection:
    """Measure the clients, but not what the partition lost (see `polyphily inspect`)."""
    from polyphily.heterogeneity.inspection import inspect

    return inspect(federation, None, lambda what: report(f"measuring {what}"))


# At the end of a run -----------------------------------------------------------------------------


class Pages:
    """Stores what the page needs when runs end, and writes one page about all of them.

    A failure is printed as a note: it must not turn a successful run into a failed one.

    Args:
        wanted: whether there is to be a page at all.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.folders: list[Path] = []
        self._inspection: Inspection | None = None
        self._inspected: Federation | None = None

    def add(self, execution: Execution) -> None:
        """Add a run that has ended."""
        if not self.wanted:
            return
        assert execution.folder
        folder = execution.folder.path
        self.folders.append(folder)
        self._try(lambda: self._gather(execution, folder))

    def write(self, file: Path) -> Path | None:
        """Write the page and return its path; None if there is nothing to write, or it failed."""
        if not self.folders:
            return None
        from polyphily.report.runs import Run

        page: Path | None = self._try(
            lambda: write_page([Run.read(folder) for folder in self.folders], file)
        )
        return page

    def _gather(self, execution: Execution, folder: Path) -> None:
        from polyphily.cli.inspecting import progress
        from polyphily.report import evidence

        assert execution.folder
        if execution.simulation.round != len(execution.folder.records()):
            return  # trained in other processes, which have the models
        federation = execution.federations[0]
        if self._inspected is not federation:
            self._inspected, self._inspection = federation, None
            if sum(graph.num_nodes for graph in federation.clients) <= MOST_NODES:
                with progress() as report:
                    self._inspection = inspect_clients(federation, report)
        measured = evidence.gather(execution, self._inspection)
        evidence.write(folder, {"commit": evidence.commit(), **measured})

    def _try(self, work: Callable[[], Any]) -> Any:
        from polyphily.cli import terminal

        try:
            return work()
        except Exception as error:
            terminal.notes([f"no report: {type(error).__name__}: {error}"])
            return None


# Figures for papers ------------------------------------------------------------------------------


def plot(
    figure: Annotated[
        str,
        typer.Argument(
            help="convergence, cost, critical-difference, client-spread, gain, homophily, spectra, "
            "spectral-kl, collaboration, client-scale, sensitivity, ablation, high-frequency or "
            "inertia.",
            autocompletion=completion.of("figures"),
        ),
    ],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders, or folders with runs in them.",
            metavar="[RUN…]",
            autocompletion=completion.run_folder,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The file: .pdf, .svg or .png.")] = Path(
        "figure.pdf"
    ),
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="convergence, cost: rounds, seconds or megabytes; sensitivity: the name that is "
            "varied; gain, homophily, spectra: a measure, such as 'adjusted homophily'.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option("--score", help="convergence: test, val or loss. [dim]\\[test][/dim]"),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="gain: the method that gains are measured from. [dim]\\[local, else fedavg][/dim]",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="inertia: the graph. [dim]\\[cora][/dim]"),
    ] = None,
    width: Annotated[
        float,
        typer.Option(
            "--width", help="Width in inches; 3.3 is a column, 6.8 a page.", min=1, max=40
        ),
    ] = 3.3,
) -> None:
    """Draw a figure for a paper.

    Most are figures of runs; docs/gallery shows each with its command. Figures of data, without
    runs: high-frequency (csbm graphs of rising homophily) and inertia (a graph divided among more
    and more clients).
    """
    from polyphily.cli import terminal
    from polyphily.report import figures, runs, style

    options.check_output("--out", out, style.SUFFIXES)
    look = style.Look(width, against, score, base)
    if figure in figures.OF_DATA:
        drawn = _plot_data(figure, folders, dataset, look)
    else:
        draw = figures.find_figure(figure)
        if base and figure != "gain":
            raise UserError(f"--base is for gain, not for {figure}")
        if dataset:
            raise UserError(f"--dataset: {figure} is a figure of runs, which have their own data")
        if not folders:
            raise UserError(f"{figure} is a figure of runs: polyphily plot {figure} RUN…")
        found = runs.read_runs(folders)
        if figure in figures.MEASURED:
            found = _measure_missing(found)
        drawn = draw(found, look)
    style.save(drawn, out)
    terminal.print_line(f"written: {out}")


def _plot_data(figure: str, folders: list[Path] | None, dataset: str | None, look: Look) -> Any:
    from polyphily.cli.inspecting import progress
    from polyphily.report import data_figures

    if folders or look.against or look.score or look.base:
        raise UserError(
            f"{figure} is a figure of data: it takes no runs, --against, --score or --base"
        )
    with progress() as report:
        if figure == "inertia":
            return data_figures.inertia(look, dataset or "cora", report)
        if dataset:
            raise UserError("--dataset: high-frequency is a figure of csbm graphs alone")
        return data_figures.high_frequency(look, report)
