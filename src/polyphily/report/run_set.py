"""The runs that a page shows, with their names and colours."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from polyphily.report.blocks import SEPARATOR, Choice
from polyphily.report.runs import Run, labels, settings


class RunSet:
    """Runs with their names and colours, grouped by the data that they were trained on.

    Attributes:
        runs: the runs, in the order given.
        labels: the name of each run.
        settings: a name for each data setting, by `Run.data`.
        slots: the colour of each label, the same in all figures.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.labels = labels(runs)
        self.settings = settings(runs)
        self.slots = {label: slot for slot, label in enumerate(dict.fromkeys(self.labels))}

    @property
    def single(self) -> bool:
        return len(self.runs) == 1

    def by_data(self) -> dict[str, list[tuple[str, Run]]]:
        """Return the (label, run) pairs of each data setting."""
        found: dict[str, list[tuple[str, Run]]] = {name: [] for name in self.settings.values()}
        for label, run in zip(self.labels, self.runs, strict=True):
            found[self.settings[run.data]].append((label, run))
        return found

    def data_choice(self, known: Container[str] | None = None) -> tuple[Choice, ...]:
        """Return the choice among data settings; empty if all runs share one.

        Args:
            known: if given, only these settings can be chosen.
        """
        if len(self.settings) < 2:
            return ()
        names = [name for name in self.settings.values() if known is None or name in known]
        return (Choice("data", tuple(names)),)

    def key(self, data: str, *options: str) -> str:
        """Return the key of a panel: the data setting (if there are several) and the options."""
        return SEPARATOR.join([data, *options] if len(self.settings) > 1 else options)

    def inspections(self) -> dict[str, dict[str, Any]]:
        """Return the inspection of each data setting for which a run has one."""
        found = {}
        for name, members in self.by_data().items():
            known = [r.evidence["inspection"] for _, r in members if "inspection" in r.evidence]
            if known:
                found[name] = known[0]
        return found

    def panels_by_run(
        self, panel: Callable[[Run], Mapping[str, Any] | None]
    ) -> tuple[tuple[Choice, ...], dict[str, Any]]:
        """Return the choice of a run, and the panel of every run that has one.

        The choice is empty if fewer than two runs have a panel.
        """
        several = len(self.settings) > 1
        found: dict[str, Any] = {}
        for label, run in zip(self.labels, self.runs, strict=True):
            made = panel(run)
            if made is not None:
                found[f"{label} · {self.settings[run.data]}" if several else label] = made
        choices = (Choice("run", tuple(found)),) if len(found) > 1 else ()
        return choices, found if choices else {"": next(iter(found.values()), None)}
