"""Runs in folders, opened in Python: configuration, scores, models and predictions."""

from __future__ import annotations

import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any

from polyphily.errors import UserError
from polyphily.graphs.files.client import listed
from polyphily.runs.folder import CONFIG, METRICS, SUMMARY, RunFolder
from polyphily.runs.models import BEST, ModelFile, SavedModel, choose_model
from polyphily.runs.prediction import WithModels

MODELS = "models"
ENDING = ".safetensors"


class Run(WithModels):
    """A run in a folder: of `polyphily run`, of a comparison or sweep, or of a site.

    Args:
        folder: the run folder, or at a site the folder with the models of the run.

    Attributes:
        folder: the run folder.
        config: what was asked for, as in `config.toml`; empty at a site.
        summary: as in `summary.json`; empty at a site, and before the run has ended.
        records: of the rounds, as in `metrics.jsonl`.
        models: the names of the models.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = RunFolder(folder)
        self.summary: dict[str, Any] = files.read_summary() or {}
        self.records: list[dict[str, Any]] = files.records()

    @cached_property
    def config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @cached_property
    def _files(self) -> list[Path]:
        place = self.folder / MODELS
        found = (place if place.is_dir() else self.folder).glob(f"*{ENDING}")
        return sorted(found, key=lambda file: file.stem)

    @property
    def models(self) -> list[str]:
        return [file.stem for file in self._files]

    def model(
        self, client: str | None = None, *, seed: int | None = None, which: str = BEST
    ) -> SavedModel:
        """Return a model.

        Args:
            client: the client's name; None for the global model, or the only one.
            seed: which of several runs; the first unless given.
            which: "best" (of the best validation round) or "last".
        """
        found = [ModelFile.read(file) for file in self._files]
        place = str(self.folder)
        if not found and self.summary.get("engine") == "flower":
            raise UserError(f"{place}: the models of this run are at its sites")
        chosen = choose_model(found, client=client, seed=seed, which=which, place=place)
        return SavedModel.load(chosen.path).for_client(client)

    def __repr__(self) -> str:
        if not self.summary:
            return f"Run({self.folder}: no summary, models {listed(self.models) or 'none'})"
        return super().__repr__()


def open_run(folder: str | Path) -> Run:
    """Open a run folder.

    Args:
        folder: a run folder (of `polyphily run`, or one of the runs of a comparison or a sweep),
            or at a site the folder of the models of a run (`BUNDLE/models/RUN`), or the bundle
            if there was a single run.

    Raises:
        UserError: if there is no run. If there are several, they are listed.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if _is_run(path):
        return Run(path)
    runs = runs_in(path)
    if len(runs) == 1:
        return Run(runs[0])
    if runs:
        raise UserError(
            f"{path} holds {len(runs)} runs: give one of them: {listed(map(str, runs), 20)}"
        )
    raise UserError(f"{path}: there is no run: neither {SUMMARY} nor a model is in it")


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders within a folder, such as those of a comparison."""
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            found += [entry] if _is_run(entry) else runs_in(entry)
    return found


def _is_run(path: Path) -> bool:
    """Return whether a folder is that of a run, or holds models of one."""
    if (path / SUMMARY).exists() or (path / METRICS).exists():
        return True
    return path.name != "memory" and any(
        (path / f"{name}{ENDING}").exists() for name in ("best", "last")
    )


def load_model(
    place: str | Path, client: str | None = None, *, seed: int | None = None, which: str = BEST
) -> SavedModel:
    """Load a model from its file, or from the folder of a run.

    Args:
        place: a model file, or a folder that `open_run` takes.
        client: the client whose model it is, or whose encoding and decision are used.
        seed: which of several runs; the first unless given.
        which: "best" or "last", in a folder.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        return open_run(path).model(client, seed=seed, which=which)
    return SavedModel.load(path).for_client(client)
