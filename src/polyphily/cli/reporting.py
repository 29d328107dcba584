"""`polyphily report` and `plot`: the page of runs, and figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.errors import PolyphilyError, UserError

if TYPE_CHECKING:
    from polyphily.graphs.loading import Federation
    from polyphily.heterogeneity.inspection import Inspection
    from polyphily.report.figures import Look
    from polyphily.report.runs import Run
    from polyphily.runs.run import Execution

MOST_NODES = 25_000  # of a federation that is measured at the end of a run without being asked

Folders = Annotated[
    list[Path], typer.Argument(help="Run folders, or folders with runs in them.", metavar="RUN…")
]


def add_to(app: typer.Typer) -> None:
    app.command("report")(report)
    app.command("plot")(plot)


def report(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page. [dim]\\[report.html with the runs][/dim]"),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Measure clients and models where the run folder does not hold that yet.",
        ),
    ] = True,
) -> None:
    """Make one page of one run, or of several side by side."""
    from polyphily.cli import terminal
    from polyphily.report import runs

    found = runs.find(folders)
    if measure:
        found = _measured(found, terminal.notes)
    place = folders[0] if len(folders) == 1 else Path()
    file = write_page(found, out or place / "report.html")
    terminal.out.print(f"report: {file}", soft_wrap=True, markup=False)
    if open_:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())


def write_page(found: Sequence[Run], file: Path) -> Path:
    from polyphily.report import page
    from polyphily.report.content import content

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        page.write(content(found), file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
    return file


def _measured(found: Sequence[Run], notes: Callable[[Sequence[str]], None]) -> list[Run]:
    """The runs with what their folders lacked; where data are not at hand, as they are."""
    from polyphily.cli.inspecting import progress
    from polyphily.cli.training import restored
    from polyphily.graphs.loading import SAVED
    from polyphily.report import evidence
    from polyphily.report.runs import Run

    known: dict[Any, Inspection] = {}
    renewed = []
    for run in found:
        kept = run.evidence
        complete = {"inspection", "confusion_at_best"} <= kept.keys()
        if complete and kept["round"] == run.summary["rounds"]:
            renewed.append(run)
            continue
        if not (run.path / SAVED).exists():  # a run across sites
            notes([f"{run.path.name}: its graphs are not here: clients and models are not shown"])
            renewed.append(run)
            continue
        try:
            with progress() as tell:
                tell(f"reading {run.path}")
                execution = restored(run.path)
                key = (run.data, run.seeds[0])
                if key not in known:
                    known[key] = inspection_of(execution.federations[0], tell)
                tell(f"looking at the models of {run.path.name}")
                fresh = evidence.gather(execution, known[key])
            evidence.write(run.path, {"commit": kept.get("commit"), **fresh})
            renewed.append(Run.read(run.path))
        except PolyphilyError as error:
            notes([f"{run.path.name}: clients and models are not shown: {error}"])
            renewed.append(run)
        except OSError as error:
            notes([f"{run.path.name}: cannot keep what was measured: {error.strerror}"])
            renewed.append(run)
    return renewed


def inspection_of(federation: Federation, tell: Callable[[str], None]) -> Inspection:
    """The clients, measured; what the partition lost is `polyphily inspect`'s to say."""
    from polyphily.heterogeneity.inspection import inspect

    return inspect(federation, None, lambda what: tell(f"measuring {what}"))


# At the end of a run -----------------------------------------------------------------------------


class Pages:
    """Keeps what a page needs as runs end, and writes the page."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.folders: list[Path] = []
        self._inspection: Inspection | None = None
        self._inspected: Federation | None = None

    def add(self, execution: Execution) -> None:
        """Takes in a run that has ended."""
        if not self.wanted:
            return
        assert execution.folder
        folder = execution.folder.path
        self.folders.append(folder)
        self._safely(lambda: self._gather(execution, folder))

    def write(self, file: Path) -> Path | None:
        """The page of all runs taken in, if it could be made."""
        if not self.folders:
            return None
        from polyphily.report.runs import Run

        page: Path | None = self._safely(
            lambda: write_page([Run.read(folder) for folder in self.folders], file)
        )
        return page

    def _gather(self, execution: Execution, folder: Path) -> None:
        from polyphily.cli.inspecting import progress
        from polyphily.report import evidence

        assert execution.folder
        if execution.simulation.round != len(execution.folder.records()):
            return  # trained elsewhere: the models are not in this process
        federation = execution.federations[0]
        if self._inspected is not federation:
            self._inspected, self._inspection = federation, None
            if sum(graph.num_nodes for graph in federation.clients) <= MOST_NODES:
                with progress() as tell:
                    self._inspection = inspection_of(federation, tell)
        found = evidence.gather(execution, self._inspection)
        evidence.write(folder, {"commit": evidence.commit(), **found})

    def _safely(self, work: Callable[[], Any]) -> Any:
        """A page that cannot be made must not turn a run that went well into a failure."""
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
            help="convergence, homophily, spectral-kl, client-scale, sensitivity, ablation, "
            "high-frequency or inertia."
        ),
    ],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders with runs in them.", metavar="[RUN…]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The file: .pdf, .svg or .png.")] = Path(
        "figure.pdf"
    ),
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="convergence: rounds, seconds or megabytes; sensitivity: the name that is varied.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option("--score", help="convergence: test, val or loss. [dim]\\[test][/dim]"),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="inertia: what is divided. [dim]\\[cora][/dim]"),
    ] = None,
    width: Annotated[
        float,
        typer.Option("--width", help="In inches; 3.3 is a column, 6.8 a page.", min=1, max=40),
    ] = 3.3,
) -> None:
    """Make a figure for a paper.

    Of runs: convergence, homophily, spectral-kl, client-scale, sensitivity, ablation. Of data,
    without runs: high-frequency (csbm graphs of rising homophily) and inertia (a graph divided
    among more and more clients).
    """
    from polyphily.cli import terminal
    from polyphily.report import figures, runs

    look = figures.Look(width, against, score)
    if figure in figures.OF_DATA:
        drawn = _plot_data(figure, folders, dataset, look)
    else:
        draw = figures.find(figure)
        if dataset:
            raise UserError(f"--dataset: {figure} is a figure of runs, which have their data")
        if not folders:
            raise UserError(f"{figure} is a figure of runs: polyphily plot {figure} RUN…")
        found = runs.find(folders)
        if figure in figures.MEASURED:
            found = _measured(found, terminal.notes)
        drawn = draw(found, look)
    figures.save(drawn, out)
    terminal.out.print(f"written: {out}", soft_wrap=True, markup=False)


def _plot_data(figure: str, folders: list[Path] | None, dataset: str | None, look: Look) -> Any:
    from polyphily.cli.inspecting import progress
    from polyphily.report import data_figures

    if folders or look.against or look.score:
        raise UserError(f"{figure} is a figure of data: it takes no runs, --against or --score")
    with progress() as tell:
        if figure == "inertia":
            return data_figures.inertia(look, dataset or "cora", tell)
        if dataset:
            raise UserError("--dataset: high-frequency is drawn of csbm graphs alone")
        return data_figures.high_frequency(look, tell)
