"""A board: several methods on several federations, with ranks, tests and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from polyphily.report.grids import Grid
from polyphily.report.ranking import LEVEL, Ranking, ranking
from polyphily.report.words import WARM_UP, in_warm_up, percent

BEST, SECOND = "¹", "²"
COSTS = "s/round: seconds of a round for one seed; MB/round: sent up and down."
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Board:
    """Summaries of runs, by method and cell.

    A cell is what methods share: data, partition, number of clients. Scores are test scores at the
    best validation round, in each method's own view.

    Attributes:
        methods: the names, in the order given.
        cells: the names, in the order given.
        summaries: of the runs that ended, by (cell, method).
        failures: why a run did not end, by (cell, method).
    """

    methods: Sequence[str]
    cells: Sequence[str]
    summaries: Mapping[tuple[str, str], Summary]
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def scores(self, cell: str, method: str) -> list[float | None]:
        """Return the test score of every seed; empty if the run did not end."""
        summary = self.summaries.get((cell, method))
        if summary is None:
            return []
        metric = summary["selection"]["metric"]
        runs = summary.get("per_seed", [summary])
        return [run["best_val"]["test"].get(metric) for run in runs]

    def mean(self, cell: str, method: str) -> float | None:
        known = [score for score in self.scores(cell, method) if score is not None]
        return statistics.fmean(known) if known else None

    def deviation(self, cell: str, method: str) -> float | None:
        """Return the standard deviation over seeds; None for a single seed."""
        known = [score for score in self.scores(cell, method) if score is not None]
        return statistics.stdev(known) if len(known) > 1 else None

    @cached_property
    def ranking(self) -> Ranking | None:
        """Methods ranked over all seeds of all cells; None if they have no block in common."""
        seeds = {
            cell: max((len(self.scores(cell, m)) for m in self.methods), default=0)
            for cell in self.cells
        }
        table: dict[str, list[float | None]] = {
            method: [
                score
                for cell in self.cells
                for score in (self.scores(cell, method) or [None] * seeds[cell])
            ]
            for method in self.methods
        }
        try:
            return ranking(table)
        except ValueError:
            return None

    # The tables ------------------------------------------------------------------------------

    def grid(self) -> Grid:
        """Return one table of scores, ranks and costs."""
        scores, ranks = self.score_grid(self.cells), self.rank_grid()
        rows = [[*a, *b[1:]] for a, b in zip(scores.rows, ranks.rows, strict=True)]
        return Grid(scores.title, [*scores.columns, *ranks.columns[1:]], rows)

    @property
    def ordered(self) -> Sequence[str]:
        """The methods, the best mean rank first."""
        return self.ranking.methods if self.ranking else self.methods

    def score_grid(self, cells: Sequence[str]) -> Grid:
        """Return the scores in some of the cells."""
        rows = [[m, *[self._cell(cell, m) for cell in cells]] for m in self.ordered]
        title = "Test scores in %, mean ± standard deviation over seeds"
        return Grid(title, ["method", *cells], rows)

    def rank_grid(self) -> Grid:
        """Return mean ranks, tests and costs."""
        found, rows = self.ranking, []
        for method in self.ordered:
            place = found.methods.index(method) if found else 0
            rank = f"{found.ranks[place]:.2f}" if found else "–"
            rows.append([method, rank, _p_value(found, place), *self._costs(method)])
        columns = ["method", "mean rank", "p against first", "s/round", "MB/round"]
        return Grid("Ranks and costs over all cells", columns, rows)

    def _cell(self, cell: str, method: str) -> str:
        if (cell, method) in self.failures:
            return "failed"
        known = [score for score in self.scores(cell, method) if score is not None]
        if not known:
            return "–"
        deviation = f" ± {percent(statistics.stdev(known))}" if len(known) > 1 else ""
        means = sorted(
            {m for name in self.methods if (m := self.mean(cell, name)) is not None}, reverse=True
        )
        place = means.index(statistics.fmean(known))
        mark = (BEST, SECOND)[place] if place < 2 and len(means) > 1 else ""
        late = WARM_UP if in_warm_up(self.summaries[cell, method]) else ""
        return percent(statistics.fmean(known)) + deviation + mark + late

    def _costs(self, method: str) -> list[str]:
        """Return the mean over cells of seconds of a round (one seed) and megabytes sent."""
        found = [s for (_, name), s in self.summaries.items() if name == method]
        if not found:
            return ["–", "–"]
        seconds = [s["seconds_per_round_median"] / len(s["seeds"]) for s in found]
        sent = [(s["bytes_up_per_round"] + s["bytes_down_per_round"]) / 1e6 for s in found]
        return [f"{statistics.fmean(seconds):.3f}", f"{statistics.fmean(sent):.2f}"]

    def notes(self) -> list[str]:
        """Return what a reader of the whole table needs to know."""
        marks = f"{BEST} best, {SECOND} second best mean of a cell, at the best validation round."
        late = [s["warm_up"]["note"] for s in self.summaries.values() if in_warm_up(s)]
        warm_ups = [f"{WARM_UP} {note}." for note in dict.fromkeys(late)]
        return [marks, *warm_ups, *self.rank_notes(), COSTS]

    def rank_notes(self) -> list[str]:
        """Return what a reader of ranks and tests needs to know."""
        lines = []
        found = self.ranking
        if found is None:
            lines.append("No ranks: no seed of a cell has a score of every method.")
        elif found.blocks == 1:
            lines.append(
                "One seed of one cell: no test can tell a difference from chance. Give several "
                "seeds (--seeds 0-4) or federations."
            )
        else:
            lines.append(
                f"Ranks are means over {found.blocks} blocks (seeds of cells). Mean ranks that "
                f"differ by less than {found.difference:.2f} do not differ significantly "
                f"(Nemenyi, {LEVEL:g}); {_friedman(found.friedman)}. The p-value is that of "
                f"Wilcoxon's signed-rank test against {found.methods[0]}, corrected by Holm. Seeds "
                "of one cell are not independent data, so that p-values are optimistic."
            )
            if (least := 2.0 ** (1 - found.blocks)) > LEVEL:
                lines.append(
                    f"With {found.blocks} blocks no p-value can be below {least:.2g}: give more "
                    "seeds or federations for a test at the usual level of 0.05."
                )
        tuned = sorted({s["tuning"]["trials"] for s in self.summaries.values() if "tuning" in s})
        if tuned:
            number = " to ".join(str(n) for n in dict.fromkeys((tuned[0], tuned[-1])))
            lines.append(f"Tuned: {number} trials for each method and cell, by validation alone.")
        lines += [f"{m} on {c} failed: {why}" for (c, m), why in self.failures.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        found = self.ranking
        rows = [
            {
                "cell": cell,
                "method": method,
                "metric": summary["selection"]["metric"],
                "seeds": list(summary["seeds"]),
                "test": self.scores(cell, method),
                "mean": self.mean(cell, method),
                "seconds_per_round": summary["seconds_per_round_median"] / len(summary["seeds"]),
                "bytes_up_per_round": summary["bytes_up_per_round"],
                "bytes_down_per_round": summary["bytes_down_per_round"],
            }
            for (cell, method), summary in self.summaries.items()
        ]
        failed = [{"cell": c, "method": m, "why": why} for (c, m), why in self.failures.items()]
        ranks = found and {
            "methods": list(found.methods),
            "mean_ranks": list(found.ranks),
            "blocks": found.blocks,
            "critical_difference": None if math.isnan(found.difference) else found.difference,
            "friedman_p": None if math.isnan(found.friedman) else found.friedman,
            "p_against_first": list(found.p_values),
        }
        return {"rows": rows, "ranking": ranks, "failed": failed}


def _p_value(found: Ranking | None, place: int) -> str:
    if found is None or place == 0 or found.blocks < 2:
        return "–"
    return f"{found.p_values[place]:.3f}"


def _friedman(p: float) -> str:
    return "Friedman's test does not apply" if math.isnan(p) else f"Friedman's p is {p:.3f}"
