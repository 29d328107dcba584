"""The leaderboard as a page: scores, ranks, differences to FedAvg and costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from polyphily.core.method import METHODS
from polyphily.report.blocks import Content, Fact, Section, Table
from polyphily.report.grids import Grid, to_csv, to_latex, to_markdown
from polyphily.report.ranking import LEVEL, Ranking, holm, ranking
from polyphily.studies.leaderboard import (
    TRAINED,
    Entrant,
    Leaderboard,
    Score,
    alike,
    costs,
    devices,
    standings,
)

BEST, SECOND = "¹", "²"
CHOICES = (
    "In how many cells validation chose which network, and the defaults. A round with the defaults "
    "takes so many rounds of FedAvg (median over cells; all seeds and rates at once, other load on "
    "the machine not excluded); megabytes are those of all clients, up and down."
)
SUFFIXES = (".md", ".html", ".csv", ".tex")
FEDAVG = "fedavg"
GAPS = 0.1  # a cell in which more than this share of the rows is missing does not enter the ranks
BASES = (FEDAVG, FEDAVG + TRAINED)  # what rows are compared with, in the same view


class Standings:
    """All rows of the leaderboard, the best mean rank first.

    Args:
        board: what is compared.
        entrants: the rows.
        folder: the folder of the results.
    """

    def __init__(self, board: Leaderboard, entrants: Sequence[Entrant], folder: Path) -> None:
        self.board = board
        self.titles = [cell.title for cell in board.cells]
        self.scores = standings(board, entrants, folder)
        self.costs = costs(board, entrants, folder)
        self.alike = alike(board, entrants, folder)
        self.devices = devices(board, entrants, folder)
        self.views = {entrant.label: METHODS.find(entrant.method)().view for entrant in entrants}
        self.views[FEDAVG + TRAINED] = "trained"
        self.ranked = [t for t in self.titles if self._missing(t) <= GAPS * len(self.scores)]
        self.full = [n for n, row in self.scores.items() if all(t in row for t in self.ranked)]
        self.ranking: Ranking | None = None
        if self.ranked and len(self.full) > 1:
            self.ranking = ranking(
                {
                    name: [s for t in self.ranked for s in self.scores[name][t].test]
                    for name in self.full
                }
            )

    def _missing(self, title: str) -> int:
        """Return how many rows have not run in a cell."""
        return sum(title not in row for row in self.scores.values())

    @property
    def labels(self) -> list[str]:
        """The rows, the best mean rank first; those with missing cells last."""
        ranked = list(self.ranking.methods) if self.ranking else self.full
        return ranked + sorted(name for name in self.scores if name not in ranked)

    def rank(self, label: str) -> float | None:
        found = self.ranking
        return found.ranks[found.methods.index(label)] if found and label in self.full else None

    def differences(self, label: str) -> dict[str, float]:
        """Return the mean difference to FedAvg in the same view, by cell, in points."""
        base = self.scores.get(BASES[self.views[label] == "trained"], {})
        own = self.scores[label]
        return {t: own[t].mean - base[t].mean for t in self.titles if t in own and t in base}

    def p_values(self) -> dict[str, float]:
        """Return the p-value of every full row's difference to FedAvg over the ranked cells.

        They are those of Wilcoxon's signed-rank test on the means of cells, corrected by Holm.
        """
        from scipy.stats import wilcoxon

        raw = {}
        for label in self.full:
            by_cell = self.differences(label)
            found = np.array([by_cell[title] for title in self.ranked if title in by_cell])
            if label not in BASES and 0 < len(found) == len(self.ranked):
                raw[label] = float(wilcoxon(found).pvalue) if np.any(found != 0) else 1.0
        return dict(zip(raw, holm(list(raw.values())).tolist(), strict=True)) if raw else {}

    # Tables ----------------------------------------------------------------------------------

    def score_grid(self) -> Grid:
        """Return test scores with the best and second best of every cell marked, and mean ranks."""
        rows = []
        for label in self.labels:
            rank = self.rank(label)
            shown = [self._score(label, title) for title in self.titles]
            rows.append([label, "–" if rank is None else f"{rank:.1f}", *shown])
        title = "Test scores in %, mean ± standard deviation over seeds"
        return Grid(title, ["method", "mean rank", *self.titles], rows)

    def _score(self, label: str, title: str) -> str:
        score = self.scores[label].get(title)
        if score is None:
            return "–"
        means = sorted({row[title].mean for row in self.scores.values() if title in row})[::-1]
        place = means.index(score.mean)
        mark = (BEST, SECOND)[place] if place < 2 < len(means) else ""
        return f"{score.mean:.1f} ± {score.deviation:.1f}{mark}"

    def fedavg_grid(self) -> Grid:
        """Return the differences to FedAvg in the same view."""
        p_values, rows = self.p_values(), []
        for label in self.labels:
            found = self.differences(label)
            if label in BASES or not found:
                continue
            higher = f"{sum(value > 0 for value in found.values())} of {len(found)}"
            p = f"{p_values[label]:.3f}" if label in p_values else "–"
            mean = f"{statistics.fmean(found.values()):+.2f}"
            each = [f"{found[t]:+.1f}" if t in found else "–" for t in self.titles]
            rows.append([label, self.views[label], mean, higher, p, *each])
        title = "Difference to FedAvg in the same view, in points"
        columns = ["method", "view", "mean", "higher", "p", *self.titles]
        return Grid(title, columns, rows)

    def choice_grid(self) -> Grid:
        """Return what validation chose, and what a round costs."""
        rows = []
        for label in self.labels:
            own: Mapping[str, Score] = self.scores[label]
            names = [score.backbone or "own" for score in own.values()]
            shown = ", ".join(f"{n} {names.count(n)}" for n in dict.fromkeys(sorted(names)))
            first = f"{sum(score.first for score in own.values())} of {len(own)}"
            rows.append([label, shown, first, *self._cost(label)])
        columns = ["method", "network", "defaults", "FedAvg rounds", "MB/round"]
        return Grid("Choices and costs", columns, rows)

    def _cost(self, label: str) -> list[str]:
        found = self.costs.get(FEDAVG if label in BASES else label)
        if found is None:
            return ["–", "–"]
        rounds = "–" if found.rounds is None else f"{found.rounds:.1f}"
        return [rounds, f"{found.megabytes:.2f}"]

    # Words -----------------------------------------------------------------------------------

    def introduction(self) -> list[str]:
        """Return what is compared, and what is missing."""
        lines = [
            "All methods on the same cells: a dataset, a partition and a number of clients. Every "
            "method had equally many trials, and validation alone chose among them. Scores are on "
            "test nodes. Rows named *paper's form* have the method as printed in its paper; the "
            "other rows have the defaults of this library.",
        ]
        missing = sum(map(self._missing, self.titles))
        if missing:
            out = [title for title in self.titles if title not in self.ranked]
            text = f"{missing} of {len(self.scores) * len(self.titles)} entries have not run yet"
            if out and self.ranked:
                text += f"; ranks and p-values leave out {' and '.join(out)}"
            lines.append(f"**{text}.**")
        return lines

    def protocol(self) -> list[str]:
        """Return how the scores were made, a paragraph each."""
        board = self.board
        rates = ", ".join(f"{lr:g}/{decay:g}" for lr, decay in board.rates)
        lines = [
            f"Every method had {board.trials} trials in every cell. A trial is a point of the "
            "method's own hyperparameters and of the settings that all methods have. The first "
            "trial has the defaults; the others are drawn by Optuna's TPE sampler. Methods that "
            f"can train {' and '.join(board.backbones)} share their trials evenly among them; the "
            "others have a network of their own. With so few trials a method with many "
            "hyperparameters is searched less well than one with few.",
            f"Each trial trains {len(board.rates)} pairs of learning rate and weight decay "
            f"({rates}) for seeds {', '.join(map(str, board.seeds))}, "
            f"{board.settings['rounds']} rounds. Validation chose trial, pair and round. A method "
            "is scored in its own view: with the model that the server sends, or with the "
            "clients' models after training.",
        ]
        if len(self.devices) > 1:
            lines.append(self._mixed())
        if self.alike:
            pairs = [
                f"{' and '.join(pair.rows)} ({pair.same} of {pair.compared} trainings)"
                for pair in self.alike
            ]
            lines.append(
                "Some rows are the same model here, with the same scores in nearly every training: "
                f"{'; '.join(pairs)}."
            )
        return lines

    def _mixed(self) -> str:
        """Say which rows were trained on the device that fewer were trained on."""
        (most, _), *others = sorted(self.devices.items(), key=lambda item: -len(item[1]))
        names = {"cpu": "a CPU", "cuda": "a GPU"}
        told = []
        for kind, rows in others:
            by_cell: dict[str, list[str]] = {}
            for label, title in rows:
                by_cell.setdefault(title, []).append(label)
            each = "; ".join(f"{title}: {', '.join(by_cell[title])}" for title in by_cell)
            told.append(f"on {names.get(kind, kind)} {each}")
        return (
            f"Rows were trained on {names.get(most, most)}, but {' and '.join(told)}. Random draws "
            "differ between the two, and times are compared on the same device only."
        )

    def _marks(self) -> str:
        """Return what the marks and ranks in the table of scores mean."""
        text = f"{BEST} best, {SECOND} second best mean of a cell."
        found = self.ranking
        if found is not None and found.blocks > 1:
            text += (
                f" Ranks are means over {found.blocks} blocks (seeds of cells). Ranks that differ "
                f"by less than {found.difference:.1f} do not differ significantly (Nemenyi, "
                f"{LEVEL:g}). Seeds of one cell are not independent, so that this is optimistic."
            )
        return text

    def cells_grid(self) -> Grid:
        """Return the cells and where they come from."""
        rows = [[c.title, c.split, c.metric, c.table] for c in self.board.cells]
        return Grid("The cells", ["cell", "split", "score", "protocol"], rows)

    # Files -----------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return the page docs/leaderboard.md."""
        parts = [
            "# Leaderboard",
            "<!-- Written by `polyphily study leaderboard --write`; do not edit. -->",
            *self.introduction(),
        ]
        if not self.scores:
            return "\n\n".join([*parts, "Nothing has run yet."]) + "\n"
        if self.board.findings:
            parts += ["## What it says", "\n".join(f"- {x}" for x in self.board.findings)]
        for heading, lead, grid in self._tables():
            parts += [f"## {heading}", lead, to_markdown(grid)]
        parts += ["## How it was run", *self.protocol()]
        parts.append(
            "[The same with tables that can be sorted](leaderboard.html). "
            "`polyphily study leaderboard --methods NAME` adds a method of your own. "
            "[performance.md](performance.md) has costs by stage, measured one method at a time."
        )
        return "\n\n".join(parts) + "\n"

    def _tables(self) -> list[tuple[str, str, Grid]]:
        """Return the tables, each with a heading and a sentence that explains it."""
        scores, against = self.score_grid(), self.fedavg_grid()
        test = "The p-value is that of Wilcoxon's signed-rank test over the cells, Holm-corrected."
        return [
            ("Scores", f"{scores.title}. {self._marks()}", scores),
            ("Against FedAvg", f"{against.title}. {test}", against),
            ("Choices and costs", CHOICES, self.choice_grid()),
            ("Cells", "Splits, scores, and the protocols they follow.", self.cells_grid()),
        ]

    def page(self) -> Content:
        """Return the page with tables that a reader can sort."""
        sections = [
            Section(
                heading.lower().replace(" ", "-"),
                heading,
                lead + " Click on a heading to sort." * (heading == "Scores"),
                (Table(tuple(grid.columns), tuple(tuple(map(str, r)) for r in grid.rows)),),
            )
            for heading, lead, grid in self._tables()
        ]
        facts = (
            Fact("methods and forms", str(len(self.scores))),
            Fact("cells", str(len(self.titles))),
            Fact("trials of each", str(self.board.trials)),
            Fact("seeds", str(len(self.board.seeds))),
        )
        if self.board.findings:
            says = Section("says", "What it says", points=tuple(self.board.findings))
            sections.insert(0, says)
        subtitle = "Federated graph learning, every method with equally many trials"
        notes = tuple(line.replace("*", "") for line in [*self.introduction(), *self.protocol()])
        return Content("Leaderboard", subtitle, facts, tuple(sections), notes)

    def text(self, suffix: str) -> str:
        """Return the leaderboard as the file type says: .md, .csv, .tex or .html."""
        from polyphily.report.page import render

        if suffix == ".csv":
            return to_csv([self.score_grid()])
        if suffix == ".tex":
            return to_latex(self.score_grid())
        return render(self.page()) if suffix == ".html" else self.markdown()
