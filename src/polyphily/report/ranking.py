"""Comparing several methods over several data: mean ranks, critical difference, paired tests.

The scores are a table with a row for each method and a column for each block. A block is what the
methods share: one cell, or one seed of one cell. Higher scores are better. Only blocks that every
method has are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

FloatArray = npt.NDArray[np.float64]
LEVEL = 0.05  # significance level


@dataclass(frozen=True)
class Ranking:
    """Methods by their mean rank.

    Attributes:
        methods: the names, the best mean rank first.
        ranks: their mean ranks; 1 is best, ties share the mean of their ranks.
        blocks: the number of blocks that every method has.
        difference: Nemenyi's critical difference: mean ranks that are closer do not differ
            significantly. NaN if there are fewer than two methods or blocks.
        friedman: the p-value of Friedman's test that all methods rank alike; NaN if it does not
            apply.
        p_values: of Wilcoxon's signed-rank test of each method against the first one, corrected by
            Holm; the first has 1.
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    blocks: int
    difference: float
    friedman: float
    p_values: tuple[float, ...]

    def groups(self) -> list[tuple[int, int]]:
        """Return the first and last position of each largest group within the critical difference.

        These are the bars of a critical-difference diagram. A group has two methods at least, and
        none lies within another.
        """
        found: list[tuple[int, int]] = []
        for first, rank in enumerate(self.ranks):
            near = [i for i, other in enumerate(self.ranks) if other - rank <= self.difference]
            last = max((i for i in near if i >= first), default=first)
            if last > first and not any(a <= first and last <= b for a, b in found):
                found.append((first, last))
        return found


def ranking(scores: Mapping[str, Sequence[float | None]]) -> Ranking:
    """Rank methods over blocks.

    Args:
        scores: of each method, one per block; None where it has none.

    Raises:
        ValueError: if methods have different numbers of blocks, or no block in common.
    """
    names = list(scores)
    if len({len(row) for row in scores.values()}) != 1:
        raise ValueError("every method needs a score, or None, for each block")
    table = np.array(
        [[math.nan if value is None else value for value in scores[name]] for name in names],
        dtype=np.float64,
    )
    table = table[:, ~np.isnan(table).any(axis=0)]
    if table.shape[1] == 0:
        raise ValueError("no block has a score of every method")
    means = stats.rankdata(-table, axis=0).mean(axis=1)
    order = np.argsort(means, kind="stable")
    return Ranking(
        methods=tuple(names[i] for i in order),
        ranks=tuple(float(means[i]) for i in order),
        blocks=table.shape[1],
        difference=critical_difference(*table.shape),
        friedman=_friedman(table),
        p_values=tuple(against_first(table[order]).tolist()),
    )


def critical_difference(methods: int, blocks: int, level: float = LEVEL) -> float:
    """Compute Nemenyi's critical difference of mean ranks (Demšar 2006).

    >>> round(critical_difference(5, 30), 4)
    1.1136
    """
    if methods < 2 or blocks < 2:
        return math.nan
    quantile = float(stats.studentized_range.ppf(1 - level, methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))


def _friedman(table: FloatArray) -> float:
    if table.shape[0] < 3 or table.shape[1] < 2 or (table == table[:1]).all():
        return math.nan
    return float(stats.friedmanchisquare(*table).pvalue)


def against_first(table: FloatArray) -> FloatArray:
    """Return Holm's p-values of Wilcoxon's test of each row against the first; 1 for the first.

    Rows that equal the first in every block have a p-value of 1.
    """
    raw = np.ones(len(table))
    for i in range(1, len(table)):
        differences = table[i] - table[0]
        if np.any(differences != 0):
            raw[i] = stats.wilcoxon(differences, zero_method="zsplit").pvalue
    return np.concatenate([[1.0], holm(raw[1:])])


def holm(p_values: npt.ArrayLike) -> FloatArray:
    """Correct p-values for their number (Holm 1979).

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)
    factors = len(values) - np.arange(len(values))
    stepped = np.maximum.accumulate(values[order] * factors)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(stepped, 1)
    return corrected
