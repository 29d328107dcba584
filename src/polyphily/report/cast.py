"""Runs with the names and colours that they have throughout a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyphily.report.blocks import BETWEEN, Choice
from polyphily.report.runs import Run, labels, settings


class Cast:
    """Runs with their names and colours, by the data that they were trained on.

    Attributes:
        runs: in the order given.
        labels: what each is called.
        settings: the names of the data, by what identifies them.
        slots: which colour a label has; the same label has the same everywhere.
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
        """(label, run) of all runs on each of the data."""
        found: dict[str, list[tuple[str, Run]]] = {name: [] for name in self.settings.values()}
        for label, run in zip(self.labels, self.runs, strict=True):
            found[self.settings[run.data]].append((label, run))
        return found

    def data_choice(self) -> tuple[Choice, ...]:
        return (Choice("data", tuple(self.settings.values())),) if len(self.settings) > 1 else ()

    def key(self, data: str, *options: str) -> str:
        return BETWEEN.join([data, *options] if len(self.settings) > 1 else options)

    def inspections(self) -> dict[str, dict[str, Any]]:
        """The measures of each of the data, where some run has them."""
        found = {}
        for name, members in self.by_data().items():
            known = [r.evidence["inspection"] for _, r in members if "inspection" in r.evidence]
            if known:
                found[name] = known[0]
        return found

    def each(
        self, panel: Callable[[Run], Mapping[str, Any] | None]
    ) -> tuple[tuple[Choice, ...], dict[str, Any]]:
        """A panel for every run that has one, and the choice among them: data and run are one."""
        many = len(self.settings) > 1
        found: dict[str, Any] = {}
        for label, run in zip(self.labels, self.runs, strict=True):
            made = panel(run)
            if made is not None:
                found[f"{label} · {self.settings[run.data]}" if many else label] = made
        choices = (Choice("run", tuple(found)),) if len(found) > 1 else ()
        return choices, found if choices else {"": next(iter(found.values()), None)}


def only(choices: tuple[Choice, ...], present: Mapping[str, Any]) -> tuple[Choice, ...]:
    """A choice of data without those that nothing is known of."""
    return tuple(
        Choice(c.name, tuple(option for option in c.options if option in present)) for c in choices
    )
