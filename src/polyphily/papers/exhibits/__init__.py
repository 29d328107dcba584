"""Figures of the papers, and their tables that are computed from data.

A file for each paper has its exhibits, each a function that runs or measures what it needs and
returns tables and a drawing. Nothing here imports torch before an exhibit is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyphily.errors import unknown
from polyphily.graphs.datasets import is_present
from polyphily.papers.plan import Choice, registered
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    from polyphily.papers.runner import Train

RUNS = "runs"


@dataclass(frozen=True)
class Wanted:
    """The user's request.

    Attributes:
        choice: datasets, methods, clients, seeds, rounds, quick, device.
        forms: the forms of the paper's method: "paper", "default", "code".
        set: hyperparameters of the paper's method that the user changed.
        out: the folder of runs and files.
        train: trains a run and returns its summary, as `papers.runner.run` calls it.
    """

    choice: Choice
    forms: tuple[str, ...]
    set: Mapping[str, Any]
    out: Path
    train: Train


@dataclass(frozen=True)
class Made:
    """An exhibit that was made.

    Attributes:
        grids: its numbers.
        notes: how they were obtained, and what the paper leaves open.
        draw: returns the matplotlib figure; None if there is nothing to draw.
    """

    grids: Sequence[Grid]
    notes: Sequence[str] = ()
    draw: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Exhibit:
    """A figure or a computed table of a paper.

    Attributes:
        name: as printed: "figure-2b", or "I" for a table.
        title: what it shows.
        make: makes it.
        datasets: the datasets that it needs; one of them is enough if `any_dataset`.
        methods: the methods that it needs; those not in the library are left out, and said.
        any_dataset: whether an exhibit with several datasets can be made of those present.
        illustration: whether it is a drawing of an idea, with nothing to compute.
    """

    name: str
    title: str
    make: Callable[[Wanted], Made] | None = None
    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    any_dataset: bool = True
    illustration: bool = False

    def state(self) -> str:
        """Return "runs", or what is missing: "needs data NAME", "needs method NAME"."""
        if self.illustration:
            return "an illustration: nothing to run"
        absent = [name for name in self.datasets if not is_present(name)]
        if absent and (not self.any_dataset or len(absent) == len(self.datasets)):
            return f"needs data {', '.join(absent)}"
        missing = [name for name in self.methods if name not in registered()]
        parts = [f"needs data {', '.join(absent)} for the rest"] if absent else []
        parts += [f"needs method {', '.join(missing)} for the rest"] if missing else []
        return "; ".join([RUNS, *parts])


def exhibits(paper: str) -> dict[str, Exhibit]:
    """Return the exhibits of a paper by name, in printed order."""
    module = import_module(f"polyphily.papers.exhibits.{paper}")
    found: Sequence[Exhibit] = module.EXHIBITS
    return {exhibit.name: exhibit for exhibit in found}


def find_exhibit(paper: str, name: str) -> Exhibit:
    """Return an exhibit by its printed name: "figure-2b", "2b" or "fig. 2b"."""
    known = exhibits(paper)
    wanted = name.lower().replace("fig. ", "figure-").replace("figure ", "figure-")
    for candidate in (wanted, f"figure-{wanted}"):
        for exhibit in known.values():
            if exhibit.name.lower() == candidate:
                return exhibit
    raise unknown(f"figure of {paper}", name, known)
