"""Figures in Python: `polyphily.plot` draws runs, and a notebook shows the picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyphily.errors import UserError
from polyphily.graphs.loading import load
from polyphily.heterogeneity.inspection import inspect
from polyphily.report.evidence import round_floats
from polyphily.report.figures import MEASURED, OF_DATA, find_figure
from polyphily.report.runs import DATA, Run, read_runs
from polyphily.report.style import SUFFIXES, Look, save, style
from polyphily.runs.folder import RunFolder


@dataclass(frozen=True)
class Picture:
    """A figure, which a notebook shows.

    Attributes:
        name: the name of the figure.
        figure: the figure of matplotlib, to be changed or saved.
    """

    name: str
    figure: Any

    def save(self, file: str | Path) -> Path:
        """Write the picture as .pdf, .svg or .png, and return the path."""
        path = Path(file).expanduser()
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path}: a figure is written as {', '.join(SUFFIXES)}")
        save(self.figure, path)
        return path

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        with style():
            self.figure.savefig(text, format="svg", bbox_inches="tight", pad_inches=0.02)
        return text.getvalue()

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return f"Picture({self.name}, {width:.1f} x {height:.1f} in)"


def plot(
    figure: str,
    runs: str | Path | Sequence[str | Path],
    *,
    against: str | None = None,
    score: str | None = None,
    base: str | None = None,
    width: float = 4.5,
) -> Picture:
    """Draw a figure of runs, as `polyphily plot` does.

    Args:
        figure: its name, such as "convergence" or "gain" (docs/gallery shows all of them).
        runs: run folders, or folders with runs in them.
        against: what the horizontal axis shows.
        score: "test", "val" or "loss", for convergence.
        base: the method that gains are measured from; local or fedavg unless given.
        width: in inches; 3.3 is a column of a paper, 6.8 a page.

    Raises:
        UserError: for unknown names, and for runs that lack what the figure shows.
    """
    if figure in OF_DATA:
        raise UserError(f"{figure} is a figure of data: polyphily plot {figure} draws it")
    draw = find_figure(figure)
    folders = [runs] if isinstance(runs, str | Path) else runs
    found = read_runs([Path(folder).expanduser() for folder in folders])
    if figure in MEASURED:
        found = measure_clients(found)
    return Picture(figure, draw(found, Look(width, against, score, base)))


def measure_clients(runs: Sequence[Run]) -> list[Run]:
    """Measure the clients of runs whose folders lack that; nothing is written.

    Runs on the same data share one measurement. A run whose data cannot be read stays as it is.
    """
    known: dict[Any, dict[str, Any]] = {}
    found = []
    for run in runs:
        key = (run.data, run.seeds[0])
        if "inspection" in run.evidence:
            known.setdefault(key, run.evidence["inspection"])
        elif key not in known:
            data = {n: run.config[n] for n in DATA if n in run.config and n != "split"}
            saved = RunFolder(run.path).partition_file(run.seeds[0], first=True)
            try:
                federation = load(**{**data, "partition": saved}, seed=run.seeds[0])
                known[key] = round_floats(inspect(federation).to_dict())
            except UserError:
                found.append(run)
                continue
        found.append(replace(run, evidence={**run.evidence, "inspection": known[key]}))
    return found
