"""Statistics of train nodes, from which the rules of an encoding are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.checked import TEXT, Reader
from polyphily.graphs.columns import Column, conform
from polyphily.graphs.graph import BoolArray, Features, Graph, IntArray

if TYPE_CHECKING:
    from polyphily.graphs.files.client import RawColumn

    Raw: TypeAlias = tuple[RawColumn, ...] | Features

Doubles: TypeAlias = npt.NDArray[np.float64]

VOCABULARY = 100  # values of a category that get a feature of their own, the most frequent ones
COUNTED = 1000  # distinct values of a category that a client counts, the most frequent ones
BLOCK = 1 << 16  # rows of an array that are computed with at a time
LARGEST = 1e38  # of means in statistics from the network; float32 ends just above


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over train nodes, for each of several columns of numbers.

    Attributes:
        count: number of values, `[c]`.
        mean: their mean.
        squares: the sum of their squared distances from the mean.
        missing: number of nodes without a value.
    """

    count: IntArray
    mean: Doubles
    squares: Doubles
    missing: IntArray

    @classmethod
    def empty(cls, width: int) -> Moments:
        """Return the moments of no nodes."""
        zeros, nothing = np.zeros(width), np.zeros(width, dtype=np.int64)
        return cls(nothing, zeros, zeros, nothing)

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Moments:
        """Compute the moments of the columns of an array; NaN is a missing value."""
        found = cls.empty(values.shape[1])
        for start in range(0, len(values), BLOCK):
            found = found.merge(cls._of_block(values[start : start + BLOCK].astype(np.float64)))
        return found

    @classmethod
    def _of_block(cls, values: Doubles) -> Moments:
        there = ~np.isnan(values)
        count = there.sum(axis=0)
        divisor = np.maximum(count, 1)
        mean = np.where(there, values, 0.0).sum(axis=0) / divisor
        away = np.where(there, values - mean, 0.0)
        # The second term corrects the rounding error of the mean.
        squares = (away**2).sum(axis=0) - away.sum(axis=0) ** 2 / divisor
        return cls(count, mean, np.maximum(squares, 0.0), len(values) - count)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of nodes (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        return Moments(
            count,
            # Exact if one side is empty: its mean is 0 and must not be mixed in.
            np.where(self.count == 0, other.mean, self.mean + apart * share),
            self.squares + other.squares + apart**2 * self.count * share,
            self.missing + other.missing,
        )

    @property
    def std(self) -> Doubles:
        """The standard deviation, and 1 for a column with a single value."""
        variance = self.squares / np.maximum(self.count, 1)
        # Below this bound the deviation is rounding error of equal values.
        epsilon = np.finfo(np.float64).eps
        bound = self.count * epsilon * variance + (self.count * self.mean * epsilon) ** 2
        return np.where(variance <= bound, 1.0, np.sqrt(variance))


@dataclass(frozen=True)
class Counts:
    """How often the train nodes have each value of a category.

    Attributes:
        values: the counts by value: the `COUNTED` most frequent ones of each client.
        rest: number of nodes with another value.
        missing: number of nodes without a value.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    rest: int = 0
    missing: int = 0

    @classmethod
    def of(cls, column: RawColumn) -> Counts:
        """Count the values of a column."""
        absent = column.missing
        found = np.bincount(column.values[~absent], minlength=len(column.texts)).tolist()
        short = {t: n for t, n in zip(column.texts, found, strict=True) if n and len(t) <= TEXT}
        kept = dict(_most_frequent(short, COUNTED))
        return cls(kept, sum(found) - sum(kept.values()), int(absent.sum()))

    def merge(self, other: Counts) -> Counts:
        """Return the counts of both sets of nodes."""
        values = dict(self.values)
        for text, number in other.values.items():
            values[text] = values.get(text, 0) + number
        return Counts(values, self.rest + other.rest, self.missing + other.missing)

    def vocabulary(self) -> tuple[tuple[str, ...], bool]:
        """Return the values that get a feature, sorted, and whether there are other values."""
        kept = _most_frequent(self.values, VOCABULARY)
        more = self.rest > 0 or len(kept) < len(self.values)
        return tuple(sorted(text for text, _ in kept)), more


def _most_frequent(values: Mapping[str, int], limit: int) -> list[tuple[str, int]]:
    return sorted(values.items(), key=lambda item: (-item[1], item[0]))[:limit]


@dataclass(frozen=True, eq=False)
class Statistics:
    """What the rules are learned from: moments and counts of a client's train nodes.

    Attributes:
        numbers: of the columns that are no categories, in their order.
        categories: of the categories, in their order.
    """

    numbers: Moments
    categories: tuple[Counts, ...] = ()

    @classmethod
    def of(cls, raw: Raw, train: BoolArray, columns: Sequence[Column] = ()) -> Statistics:
        """Compute the statistics of a client's train nodes.

        Args:
            raw: the client's table, or an array of features.
            train: which nodes are train nodes.
            columns: those that were agreed on, for a table.
        """
        nodes = np.flatnonzero(train)
        if not isinstance(raw, tuple):
            check_dense(raw)
            return cls(Moments.of(raw[nodes]))
        table = [column.take(nodes) for column in conform(raw, columns)]
        numbers = [column.values for column in table if column.kind != "category"]
        moments = Moments.empty(0)
        if numbers:
            moments = Moments.of(np.stack(numbers, axis=1))
        return cls(moments, tuple(Counts.of(c) for c in table if c.kind == "category"))

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the train nodes of both."""
        pairs = zip(self.categories, other.categories, strict=True)
        return Statistics(
            self.numbers.merge(other.numbers), tuple(one.merge(two) for one, two in pairs)
        )

    @staticmethod
    def merged(parts: Sequence[Statistics]) -> Statistics:
        """Return the statistics of several clients together. Their order matters to the bit."""
        return reduce(Statistics.merge, parts)

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        numbers = self.numbers
        return {
            "count": numbers.count.tolist(),
            "mean": numbers.mean.tolist(),
            "squares": numbers.squares.tolist(),
            "missing": numbers.missing.tolist(),
            "categories": [
                {"values": dict(c.values), "rest": c.rest, "missing": c.missing}
                for c in self.categories
            ],
        }

    @classmethod
    def from_json(
        cls, data: Any, *, numbers: int, categories: int, where: str = "the statistics"
    ) -> Statistics:
        """Read statistics that came over the network and check them.

        Args:
            data: what `to_json` returned.
            numbers: number of columns that are no categories.
            categories: number of categories.
            where: what is read, for messages.

        Raises:
            UserError: naming the place and what is wrong.
        """
        found = Reader(data, where)
        mean = np.array(found.floats("mean", numbers))
        squares = np.array(found.floats("squares", numbers))
        if (abs(mean) > LARGEST).any() or (squares < 0).any() or (squares > LARGEST**2).any():
            raise UserError(f"{where}: means or squares are out of bounds")
        counts = found.items("categories", categories)
        return cls(
            Moments(
                np.array(found.counts("count", numbers), dtype=np.int64),
                mean,
                squares,
                np.array(found.counts("missing", numbers), dtype=np.int64),
            ),
            tuple(_read_counts(Reader(c, f"{where}, category {i}")) for i, c in enumerate(counts)),
        )


def _read_counts(found: Reader) -> Counts:
    values = found.get("values", dict)
    if len(values) > COUNTED or not all(isinstance(t, str) and len(t) <= TEXT for t in values):
        raise UserError(
            f"{found.where}: more than {COUNTED} values, or values of more than {TEXT} characters"
        )
    reader = Reader(values, found.where)
    return Counts(
        {text: reader.count(text) for text in values}, found.count("rest"), found.count("missing")
    )


def train_statistics(graph: Graph, columns: Sequence[Column] | int) -> Statistics:
    """Return the statistics of the train nodes of a client's graph."""
    assert graph.masks is not None
    if graph.table is not None and not isinstance(columns, int):
        return Statistics.of(graph.table, graph.masks.train, columns)
    return Statistics.of(graph.features, graph.masks.train)


def check_dense(features: Features) -> None:
    """Raise a UserError for sparse features, which scaling would make dense."""
    if sp.issparse(features):
        raise UserError(
            "normalize 'standard' would make sparse features dense: use 'row' or 'none'"
        )
