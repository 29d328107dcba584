"""The tables of the studies in Markdown, from the files that `trials` writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.core.method import VIEWS
from polyphily.papers import tables
from polyphily.studies import (
    ABLATION,
    BASELINE,
    FEDAVG,
    LOCAL,
    METHOD,
    Cell,
    Row,
    Study,
    studies,
)
from polyphily.studies.trials import file_of, request

LEVEL = 0.05  # significance level of the paired t-test
DESCRIPTIONS = {
    "received": "the model the server sends",
    "trained": "the clients' models after training",
}


@dataclass(frozen=True)
class Outcome:
    """The trial of a row that validation selected, in one cell and one view.

    Attributes:
        row: the row.
        val: mean validation score of the trial over seeds, in percent.
        test: its test scores at the best validation round of every seed, in percent.
        rate: its learning rate and weight decay.
    """

    row: Row
    val: float
    test: tuple[float, ...]
    rate: tuple[float, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test)

    @property
    def std(self) -> float:
        return statistics.stdev(self.test) if len(self.test) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}"


@dataclass(frozen=True)
class Comparison:
    """The difference between a method and FedAvg on the same backbone, paired by seed."""

    difference: float
    p: float
    deviation: float

    @classmethod
    def of(cls, method: Outcome, baseline: Outcome) -> Comparison:
        from scipy.stats import ttest_rel

        pairs = list(zip(method.test, baseline.test, strict=True))
        difference = statistics.fmean(a - b for a, b in pairs)
        same = len({round(a - b, 9) for a, b in pairs}) == 1
        p = 1.0 if same else float(ttest_rel(method.test, baseline.test).pvalue)
        return cls(difference, p, baseline.std)

    @property
    def higher(self) -> bool:
        """True if the difference is positive in the digits that are shown."""
        return round(self.difference, 2) > 0

    @property
    def verdict(self) -> str:
        if self.p < LEVEL:
            return "better" if self.difference > 0 else "worse"
        return "level"

    def __str__(self) -> str:
        return f"{self.difference:+.2f} (p {self.p:.2f})"


def outcomes(study: Study, cell: Cell, folder: Path, view: str) -> dict[str, Outcome]:
    """Return the results of a cell by the keys of its rows.

    Results of rows whose definition has changed since they were run are left out.
    """
    path = file_of(folder, study, cell)
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {}
    for row in study.rows:
        entry = kept.get(row.key)
        if entry is not None and entry["request"] == request(study, cell, row):
            found[row.key] = _best_trial(study, row, entry["scores"][view])
    return found


def _best_trial(study: Study, row: Row, scores: dict[str, Any]) -> Outcome:
    vals = [statistics.fmean(seeds) for seeds in scores["val"]]
    trial = max(range(len(vals)), key=vals.__getitem__)
    test = tuple(100 * value for value in scores["test"][trial])
    return Outcome(row, 100 * vals[trial], test, study.rates[trial])


def best(found: dict[str, Outcome], study: Study, roles: Sequence[str]) -> Outcome | None:
    """Return the row with the best validation score among those with the given roles."""
    rows = [found[row.key] for row in study.rows if row.role in roles and row.key in found]
    return max(rows, key=lambda outcome: outcome.val, default=None)


def of_role(found: dict[str, Outcome], study: Study, role: str) -> Outcome | None:
    return best(found, study, [role])


def compare(found: dict[str, Outcome], study: Study) -> Comparison | None:
    method, baseline = of_role(found, study, METHOD), of_role(found, study, BASELINE)
    return Comparison.of(method, baseline) if method and baseline else None


def headline(study: Study) -> str:
    """Return the view in which the method is evaluated."""
    from polyphily.core.method import METHODS, VIEW_OF

    return VIEW_OF[METHODS.find(study.method).evaluated]


def digest(folder: Path, chosen: Sequence[Study] | None = None) -> list[dict[str, Any]]:
    """Return all comparisons in the methods' own views, as `heterogeneity.results` reads them."""
    found = []
    for study in chosen or studies().values():
        view = headline(study)
        for cell in study.cells:
            comparison = compare(outcomes(study, cell, folder, view), study)
            if comparison is not None:
                found.append(
                    {
                        "method": study.method,
                        "setting": cell.title,
                        "dataset": cell.dataset.partition(":")[0],
                        "view": view,
                        "metric": cell.metric,
                        "difference": round(comparison.difference, 3),
                        "p": float(f"{comparison.p:.3g}"),
                        "verdict": comparison.verdict,
                    }
                )
    return found


# Markdown ----------------------------------------------------------------------------------------


def page(folder: Path, chosen: Sequence[Study] | None = None) -> str:
    """Return the whole page."""
    wanted = list(chosen or studies().values())
    parts = [_INTRODUCTION, _summary(wanted, folder)]
    parts += [_section(study, folder) for study in wanted]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Which methods help, where, and by how much

<!-- Written by `polyphily study --write`; do not edit. -->

Every row of every cell had the same trials (learning rates and weight decays, in
`src/polyphily/studies/studies.toml`) on the same five seeds, each with its own partition, split,
initial weights and draws. Validation alone chose the trial and the round; the figures are test
scores in percent, weighted by clients' test nodes, mean ± standard deviation over seeds. No run saw
a test label. *Best* is the best of the backbones by validation. The difference is that of a method
and FedAvg **on the same backbone**, seed by seed, with the p-value of a paired t-test; *better* and
*worse* are differences with p < 0.05. Published figures are from the papers' own tables; they rest
on other splits and settings, and stand there for orientation."""


def _summary(wanted: Sequence[Study], folder: Path) -> str:
    rows = [
        ["study", "view", "cells", "higher mean", "better", "level", "worse", "mean difference"]
    ]
    for study in wanted:
        for view in (headline(study), *(v for v in VIEWS if v != headline(study))):
            found = [
                comparison
                for cell in study.cells
                if (comparison := compare(outcomes(study, cell, folder, view), study))
            ]
            if not found:
                continue
            verdicts = [comparison.verdict for comparison in found]
            mean = statistics.fmean(comparison.difference for comparison in found)
            rows.append(
                [
                    study.name,
                    view,
                    f"{len(found)} of {len(study.cells)}",
                    str(sum(comparison.higher for comparison in found)),
                    *(str(verdicts.count(word)) for word in ("better", "level", "worse")),
                    f"{mean:+.2f}",
                ]
            )
    if len(rows) == 1:
        return "No study has run yet."
    return "## Against FedAvg on the same backbone\n\n" + _grid(rows)


def _section(study: Study, folder: Path) -> str:
    first = headline(study)
    parts = [f"## {study.name}: {study.title}"]
    for view in (first, *(v for v in VIEWS if v != first)):
        own = " (the method's own view)" if view == first else ""
        table = _table(study, folder, view)
        if table:
            parts.append(f"### {view.capitalize()}: {DESCRIPTIONS[view]}{own}\n\n{table}")
    parts += _own_settings(study)
    if study.findings:
        parts.append("What was found and tried:\n\n" + "\n".join(f"- {x}" for x in study.findings))
    missing = [cell.title for cell in study.cells if not outcomes(study, cell, folder, first)]
    if missing:
        parts.append("Not run yet: " + ", ".join(missing) + ".")
    return "\n\n".join(parts)


def _own_settings(study: Study) -> list[str]:
    """Return a sentence for each dataset whose cells have settings of their own."""
    found = {}
    for cell in study.cells:
        parts = [] if cell.normalize == "none" else [f"features normalised by {cell.normalize}"]
        parts += [f"{name} {value}" for name, value in cell.settings.items()]
        if parts:
            found[cell.dataset] = f"All rows of {cell.dataset}: {', '.join(parts)}."
    return list(found.values())


def _table(study: Study, folder: Path, view: str) -> str:
    ablations = [row for row in study.rows if row.role == ABLATION]
    head = [
        "cell",
        "FedAvg, published",
        f"{study.method}, published",
        "Local, best",
        "FedAvg, best",
        next(row.label for row in study.rows if row.role == BASELINE),
        study.method,
        "difference",
        "",
        *(row.label for row in ablations),
    ]
    rows = [head]
    for cell in study.cells:
        found = outcomes(study, cell, folder, view)
        if not found:
            continue
        comparison = compare(found, study)
        rows.append(
            [
                cell.title,
                _published(study, cell, "fedavg"),
                _published(study, cell, study.method),
                _with_backbone(best(found, study, [LOCAL])),
                _with_backbone(best(found, study, [FEDAVG, BASELINE])),
                _text(of_role(found, study, BASELINE)),
                _text(of_role(found, study, METHOD)),
                "–" if comparison is None else str(comparison),
                "" if comparison is None else comparison.verdict,
                *(_text(found.get(row.key)) for row in ablations),
            ]
        )
    return _grid(rows) if len(rows) > 1 else ""


def _text(outcome: Outcome | None) -> str:
    return "–" if outcome is None else str(outcome)


def _with_backbone(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    return f"{outcome} ({outcome.row.backbone or outcome.row.label.rpartition(' ')[2]})"


def _published(study: Study, cell: Cell, method: str) -> str:
    table = tables.paper(study.paper).table(cell.table)
    if cell.metric != table.protocol_of(cell.dataset).metric:
        return "–"
    for figure in table.figures:
        where = (figure.dataset, figure.partition, figure.clients)
        if where == (cell.dataset, cell.partition, cell.clients) and figure.method == method:
            return "–" if figure.mean is None else f"{figure.mean:.2f}"
    return "–"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])
