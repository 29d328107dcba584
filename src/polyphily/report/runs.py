"""Run folders as a report reads them, and names that tell runs apart."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from polyphily.core.method import VIEW_OF
from polyphily.errors import UserError
from polyphily.report import evidence
from polyphily.report.evidence import COLLABORATION
from polyphily.runs.folder import CONFIG, METRICS, SUMMARY, RunFolder
from polyphily.runs.searching import read_trials
from polyphily.runs.trials import SearchTrial

# The data that a run was trained on. Runs with the same data are compared with each other.
DATA = ("dataset", "partition", "clients", "split", "noise", "normalize", "encoding")
HYPERPARAMETERS = "set."
SET_ASIDE = ".before-"  # in the names of folders that were renamed to make room for another run
NOT_NAMED = ("method", "seeds", "engine", "device", "threads", "dtype")  # not part of a run's name


@dataclass(frozen=True)
class Run:
    """A run, from its folder.

    Attributes:
        path: the run folder.
        summary: the summary of the run; of an unfinished one, that of its rounds so far.
        config: the configuration, hyperparameters as `set.name`.
        records: one record per round.
        evidence: measurements of data and models (`evidence.gather`); empty if there are none.
    """

    path: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    records: list[dict[str, Any]]
    evidence: dict[str, Any]
    finished: bool = True

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a finished run."""
        folder = RunFolder(path)
        summary = folder.read_summary()
        if summary is None:
            done = len(folder.records())
            raise UserError(
                f"{path} is not finished ({done} rounds so far); continue it with: "
                f"{resume_command(path)}"
            )
        records = [r for r in folder.records() if r["round"] <= summary["rounds"]]
        return cls(path, summary, read_config(path), records, evidence.read(path))

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def metric(self) -> str:
        return str(self.summary["selection"]["metric"])

    @property
    def view(self) -> str:
        """The view that the method is evaluated in."""
        return VIEW_OF[self.summary["evaluated"]]

    @property
    def seeds(self) -> list[int]:
        return list(self.summary["seeds"])

    @property
    def clients(self) -> list[str]:
        return list(self.summary["clients"])

    @property
    def data(self) -> tuple[tuple[str, Any], ...]:
        """The identity of the data. The digest distinguishes partitions of the same name."""
        asked = [(name, self.config.get(name)) for name in DATA if name != "partition"]
        digest = self.summary["partition"]["sha256"]
        return (*asked, ("partition", self.summary["partition"]["name"]), ("sha256", digest))

    @property
    def test(self) -> dict[str, Any]:
        """Test scores at the best validation round, in the method's own view."""
        found: dict[str, Any] = self.summary["best_val"]["test"]
        return found

    @property
    def score(self) -> float | None:
        value: float | None = self.test.get(self.metric)
        return value

    @property
    def validation(self) -> float | None:
        """Validation score at the best validation round, in the method's own view."""
        value: float | None = self.summary["best_val"]["val"].get(self.metric)
        return value

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        value: float | None = self.test.get(f"{self.metric}_std")
        return value

    @property
    def per_client(self) -> list[float | None]:
        found: list[float | None] = self.test.get(f"{self.metric}_per_client", [])
        return found

    @property
    def scores_by_seed(self) -> list[float | None]:
        """The test score of every seed."""
        runs = self.summary.get("per_seed", [self.summary])
        return [run["best_val"]["test"].get(self.metric) for run in runs]

    @cached_property
    def seconds(self) -> list[float]:
        """Accumulated training time after each round, for all seeds together."""
        return list(accumulate(record["seconds"] for record in self.records))

    @cached_property
    def megabytes(self) -> list[float]:
        """Accumulated traffic of all clients of one federation after each round."""
        return list(accumulate((r["bytes_up"] + r["bytes_down"]) / 1e6 for r in self.records))

    @cached_property
    def trials(self) -> list[SearchTrial]:
        """The trials of the search before the run; empty if it was not tuned."""
        return read_trials(self.path)

    @cached_property
    def curves(self) -> dict[str, Any]:
        """Precision-recall and reliability curves of the first seed; empty if there are none."""
        return RunFolder(self.path).read_curves()

    @property
    def decision(self) -> dict[str, Any]:
        """The section `decision` of the summary, of the first seed; empty if there is none."""
        first = self.summary.get("per_seed", [self.summary])[0]
        found: dict[str, Any] = first.get("decision", {})
        return found

    def baseline(self, split: str = "test") -> float | None:
        """Return the score of the trivial predictor; None if it is unknown."""
        value: float | None = self.summary.get("baseline", {}).get(split, {}).get(self.metric)
        return value

    @cached_property
    def collaboration(self) -> list[dict[str, Any]]:
        """Collaboration weights by round (`evidence.Collaboration`).

        A resumed run can record a round twice; the last record counts.
        """
        found = {record["round"]: record for record in RunFolder(self.path).records(COLLABORATION)}
        return [found[r] for r in sorted(found) if r <= self.summary["rounds"]]


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run, hyperparameters as `set.name`."""
    entries = _read_toml(path / CONFIG)
    given = entries.pop("set", {})
    return entries | {HYPERPARAMETERS + name: value for name, value in given.items()}


def resume_command(path: Path) -> str:
    """Return the command that continues a run."""
    if (path / "request.json").exists():  # between sites; below the server's folder: runs/NAME
        return f"polyphily server resume {path.parent.parent} {path.name}"
    return f"polyphily run --resume {path}"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders and in folders below them, in the order of their start."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"no folder {path}")
        inside = [path] if is_run(path) else sorted(_runs_below(path), key=_start_time)
        if not inside:
            raise UserError(f"{path} holds no run: no folder in it has {CONFIG} and {METRICS}")
        finished = [p for p in inside if (p / SUMMARY).exists()]
        # If no run is finished, reading the first one raises an error that says so.
        for run in finished or inside[:1]:
            found.setdefault(run.resolve(), Run.read(run))
    return list(found.values())


def is_run(path: Path) -> bool:
    """Check for a run folder. A server's folder has a configuration too, but no models."""
    return (path / CONFIG).is_file() and (path / "models").is_dir()


def _runs_below(path: Path) -> list[Path]:
    found = [file.parent for file in path.rglob(CONFIG) if (file.parent / METRICS).exists()]
    return [run for run in found if SET_ASIDE not in run.name]


def _start_time(path: Path) -> float:
    return (path / CONFIG).stat().st_mtime


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None


# Names -------------------------------------------------------------------------------------------


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the entries of the configuration in which runs differ, except `NOT_NAMED`."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [
        name
        for name in names
        if name not in NOT_NAMED and len({str(run.config.get(name)) for run in runs}) > 1
    ]


def labels(runs: Sequence[Run]) -> list[str]:
    """Name each run by its method and the settings that distinguish it.

    Names are unique among runs on the same data only; `settings` names the data.
    """
    found = []
    for run in runs:
        alike = [r for r in runs if r.method == run.method and r.data == run.data]
        parts = [f"{option_name(name)} {show(run.config.get(name))}" for name in differing(alike)]
        if len(alike) > 1 and not parts:
            parts = [run.path.name]
        found.append(" ".join([run.method, ", ".join(parts)]).strip())
    return found


def settings(runs: Sequence[Run]) -> dict[tuple[tuple[str, Any], ...], str]:
    """Name each data setting that runs were trained on by what distinguishes it."""
    first = {run.data: run for run in reversed(runs)}
    kept = {data: first[data] for data in dict.fromkeys(run.data for run in runs)}
    names = [n for n in DATA if n in differing(list(kept.values()))]
    found: dict[tuple[tuple[str, Any], ...], str] = {}
    for data, run in kept.items():
        parts = [show(run.config.get(n)) + " clients" * (n == "clients") for n in names]
        text = ", ".join(parts) or str(run.summary["dataset"])
        while text in found.values():
            text += " ′"
        found[data] = text
    return found


def option_name(name: str) -> str:
    """Return the name of a configuration entry without the TOML table that it is in.

    >>> option_name("set.mu")
    'mu'
    """
    return name.removeprefix(HYPERPARAMETERS)


def show(value: Any) -> str:
    """Format a value of the configuration.

    >>> show(0.10), show([0, 1]), show(None), show(True)
    ('0.1', '0, 1', 'none', 'on')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return str(value)
