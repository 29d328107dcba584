"""The tables of the studies in Markdown, from the files that `trials` writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyphily.core.method import VIEWS, create
from polyphily.papers import tables
from polyphily.report.words import WARM_UP
from polyphily.studies import (
    ABLATION,
    BASELINE,
    FEDAVG,
    LOCAL,
    METHOD,
    PAPER_FORM,
    Cell,
    Row,
    Study,
    studies,
)
from polyphily.studies.trials import file_of, request

LEVEL = 0.05  # significance level of the paired t-test
TIE = 0.05  # trials whose mean validation scores differ by less, in points, are tied
TIED, UNCLEAR = "≈", "unclear"  # the mark of a tie; the verdict if tied trials disagree
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
        rounds: the best validation round of every seed (the last one, if each client has its own);
            empty if it was not stored.
        tied: the outcomes of other trials whose validation score is as good (`TIE`).
    """

    row: Row
    val: float
    test: tuple[float, ...]
    rate: tuple[float, float]
    rounds: tuple[int, ...] = ()
    tied: tuple[Outcome, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test)

    @property
    def std(self) -> float:
        return statistics.stdev(self.test) if len(self.test) > 1 else 0.0

    @property
    def in_warm_up(self) -> int:
        """The number of seeds whose best round is one in which the method had not begun."""
        length = create(self.row.method, dict(self.row.set)).rounds_before_it_acts()
        return sum(round_ <= length for round_ in self.rounds)

    @property
    def candidates(self) -> tuple[Outcome, ...]:
        """This outcome and those tied with it."""
        return (self, *self.tied)

    def __str__(self) -> str:
        text = f"{self.mean:.2f} ± {self.std:.2f}"
        if self.tied:
            text += f" {TIED} {', '.join(f'{other.mean:.2f}' for other in self.tied)}"
        if self.in_warm_up:
            text += f" {WARM_UP} {self.in_warm_up}/{len(self.rounds)}"
        return text


@dataclass(frozen=True)
class Comparison:
    """The difference between a method and a baseline, paired by seed.

    Attributes:
        difference: of the trials that validation selected, in points.
        p: the p-value of a paired t-test of it.
        deviation: of the baseline over seeds.
        clear: whether all trials that are tied on validation give the same verdict.
    """

    difference: float
    p: float
    deviation: float
    clear: bool = True

    @classmethod
    def of(cls, method: Outcome, baseline: Outcome) -> Comparison:
        found = [cls._pair(a, b) for a in method.candidates for b in baseline.candidates]
        return replace(found[0], clear=len({one.verdict for one in found}) == 1)

    @classmethod
    def _pair(cls, method: Outcome, baseline: Outcome) -> Comparison:
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
        if not self.clear:
            return UNCLEAR
        if self.p < LEVEL:
            return "better" if self.difference > 0 else "worse"
        return "level"

    def __str__(self) -> str:
        return f"{self.difference:+.2f} (p {self.p:.2f}) {self.verdict}"


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
    trials = [
        Outcome(
            row,
            100 * statistics.fmean(scores["val"][i]),
            tuple(100 * value for value in scores["test"][i]),
            rate,
            tuple(int(np.max(found)) for found in scores["round"][i]) if "round" in scores else (),
        )
        for i, rate in enumerate(study.rates)
    ]
    first = max(trials, key=lambda trial: trial.val)
    others = [trial for trial in trials if trial is not first]
    return replace(first, tied=tuple(o for o in others if first.val - o.val < TIE))


def best(found: dict[str, Outcome], study: Study, roles: Sequence[str]) -> Outcome | None:
    """Return the row with the best validation score among those with the given roles."""
    rows = [found[row.key] for row in study.rows if row.role in roles and row.key in found]
    return max(rows, key=lambda outcome: outcome.val, default=None)


def of_role(found: dict[str, Outcome], study: Study, role: str) -> Outcome | None:
    return best(found, study, [role])


def compare(
    found: dict[str, Outcome],
    study: Study,
    role: str = METHOD,
    against: Sequence[str] = (BASELINE,),
) -> Comparison | None:
    """Compare the row of a role with the best of other rows; None if one has not run."""
    method, baseline = of_role(found, study, role), best(found, study, against)
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
            rows = outcomes(study, cell, folder, view)
            comparison = compare(rows, study)
            against = compare(rows, study, against=(FEDAVG, BASELINE))
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
                        "against_best": round(against.difference, 3) if against else None,
                        "gain": study.gain,
                    }
                )
    return found


# Markdown ----------------------------------------------------------------------------------------


def page(folder: Path, chosen: Sequence[Study] | None = None) -> str:
    """Return the whole page."""
    wanted = list(chosen or studies().values())
    parts = [_INTRODUCTION, _short(wanted, folder), _summary(wanted, folder), _READING]
    parts = list(filter(None, parts))
    parts += [_section(study, folder) for study in wanted]
    if chosen is None:
        from polyphily.studies import contest  # which builds on this module

        parts += filter(None, [contest.section(folder)])
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Which methods help, where, and by how much

<!-- Written by `polyphily study --write`; do not edit. -->

Methods made for clients that differ, against FedAvg on the same backbone, with the same trials and
the same five seeds. A cell is a dataset, a partition and a number of clients. Validation selects,
test reports."""

_READING = f"""## How to read the tables

- Scores are test scores in percent, weighted by clients' test nodes, mean ± standard deviation over
  seeds. No run saw a test label. "–" stands for a row that has not run.
- Every row of every cell had the same trials (learning rates and weight decays, in
  `src/polyphily/studies/studies.toml`) on the same five seeds, each with its own partition, split,
  initial weights and draws. Validation alone chose the trial and the round.
- *Received* is the model that the server sends, *trained* are the clients' models after training.
  One of them is the method's own view, in which it is evaluated.
- The *paper's form* is the method as printed (`--set paper=on`), under the same protocol. *Best* is
  the best of the backbones by validation.
- Differences are those of a row and FedAvg, on the same backbone or on the best one, seed by seed,
  with the p-value of a paired t-test. *Better* and *worse* are differences with p < {LEVEL}.
  Nothing is corrected for the number of cells.
- {TIED} is followed by the test means of trials that validate within {TIE} points of the chosen
  one: a tie, in which chance chose. A verdict is *{UNCLEAR}* if tied trials disagree about it.
- {WARM_UP} says in how many seeds the best round is one in which the method had not begun. Rows
  that ran before rounds were stored have no such mark.
- Published figures are from the papers' own tables. They rest on other splits and settings, and
  stand there for orientation."""


def _short(wanted: Sequence[Study], folder: Path) -> str:
    """Return what the methods gain over all cells in their own view, by default and as printed."""
    cells = [
        (study, outcomes(study, cell, folder, headline(study)))
        for study in wanted
        for cell in study.cells
    ]
    parts = []
    for role, form in ((METHOD, "By default"), (PAPER_FORM, "As printed in their papers")):
        same = [one for study, found in cells if (one := compare(found, study, role))]
        most = [
            one
            for study, found in cells
            if (one := compare(found, study, role, (FEDAVG, BASELINE)))
        ]
        if not same:
            continue
        better, level, worse, unclear = (
            sum(one.verdict == word for one in same)
            for word in ("better", "level", "worse", UNCLEAR)
        )
        parts.append(
            f"{form} the methods are better in {better} of {len(same)} cells, level in {level}, "
            f"worse in {worse}, and {unclear} are unclear. The mean difference is "
            f"{statistics.fmean(one.difference for one in same):+.1f} points, and "
            f"{statistics.fmean(one.difference for one in most):+.1f} to FedAvg on its best "
            "backbone."
        )
    return " ".join(parts)


def _summary(wanted: Sequence[Study], folder: Path) -> str:
    words = ("better", "level", "worse", UNCLEAR)
    means = ("mean difference", "mean difference to FedAvg, best")
    rows = [["study", "view", "form", "cells", "higher mean", *words, *means]]
    for study in wanted:
        for view in _views(study):
            cells = [outcomes(study, cell, folder, view) for cell in study.cells]
            for role, form in ((METHOD, "default"), (PAPER_FORM, "paper")):
                same = [one for found in cells if (one := compare(found, study, role))]
                if not same:
                    continue
                most = [compare(found, study, role, (FEDAVG, BASELINE)) for found in cells]
                verdicts = [one.verdict for one in same]
                rows.append(
                    [
                        study.name,
                        view,
                        form,
                        f"{len(same)} of {len(study.cells)}",
                        str(sum(one.higher for one in same)),
                        *(str(verdicts.count(word)) for word in words),
                        f"{statistics.fmean(one.difference for one in same):+.2f}",
                        f"{statistics.fmean(one.difference for one in most if one):+.2f}",
                    ]
                )
    if len(rows) == 1:
        return "No study has run yet."
    return "## Against FedAvg on the same backbone\n\n" + grid(rows)


def _views(study: Study) -> tuple[str, ...]:
    """Return both views, the method's own first."""
    first = headline(study)
    return (first, *(view for view in VIEWS if view != first))


def _section(study: Study, folder: Path) -> str:
    first = headline(study)
    parts = [f"## {study.name}: {study.title}"]
    for view in _views(study):
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
        f"{study.method}, paper's form",
        study.method,
        "paper's form against the same backbone",
        f"{study.method} against the same backbone",
        f"{study.method} against FedAvg, best",
        *(row.label for row in ablations),
    ]
    rows = [head]
    for cell in study.cells:
        found = outcomes(study, cell, folder, view)
        if not found:
            continue
        rows.append(
            [
                cell.title,
                _published(study, cell, "fedavg"),
                _published(study, cell, study.method),
                _with_backbone(best(found, study, [LOCAL])),
                _with_backbone(best(found, study, [FEDAVG, BASELINE])),
                text_of(of_role(found, study, BASELINE)),
                text_of(of_role(found, study, PAPER_FORM)),
                text_of(of_role(found, study, METHOD)),
                text_of(compare(found, study, PAPER_FORM)),
                text_of(compare(found, study)),
                text_of(compare(found, study, against=(FEDAVG, BASELINE))),
                *(text_of(found.get(row.key)) for row in ablations),
            ]
        )
    return grid(rows) if len(rows) > 1 else ""


def text_of(found: Outcome | Comparison | None) -> str:
    return "–" if found is None else str(found)


def _with_backbone(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    return f"{outcome} ({outcome.row.backbone or outcome.row.label.rpartition(' ')[2]})"


def _published(study: Study, cell: Cell, method: str) -> str:
    table = tables.paper(study.paper).table(cell.table)
    if cell.metric != table.protocol_of(cell.dataset).metric:
        return "–"
    for entry in table.entries:
        where = (entry.dataset, entry.partition, entry.clients)
        if where == (cell.dataset, cell.partition, cell.clients) and entry.method == method:
            return "–" if entry.mean is None else f"{entry.mean:.2f}"
    return "–"


def grid(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])
