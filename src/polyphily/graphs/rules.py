"""The rules of an encoding: how one column of a table, or an array, becomes features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError, unknown
from polyphily.graphs.checked import TEXT, Reader
from polyphily.graphs.columns import KINDS, MAX_COLUMNS, Column, digest_of
from polyphily.graphs.graph import Features, IntArray
from polyphily.graphs.statistics import BLOCK, Counts, check_dense

if TYPE_CHECKING:
    from polyphily.graphs.files.client import RawColumn

BUCKETS = 32  # features of a category whose values are hashed
MAX_WIDTH = 1 << 20  # features of a recipe from a file or from the network


@dataclass(frozen=True)
class Rule:
    """How one column of a table becomes features.

    Attributes:
        name: the name of the column.
        kind: one of `KINDS`.
        mean: what a missing number is replaced by, and the centre of the scale. None if every
            client uses its own, which is not filled in yet.
        std: the unit of the scale, or 1.
        scaled: whether `mean` is subtracted and the difference divided by `std`.
        values: the values of a category with a feature each.
        other: whether other values of a category have a feature.
        buckets: number of features that the values of a category are hashed to; 0: no hash.
        missing: whether there is a feature that marks missing values.
    """

    name: str
    kind: str
    mean: float | None = None
    std: float = 1.0
    scaled: bool = False
    values: tuple[str, ...] = ()
    other: bool = False
    buckets: int = 0
    missing: bool = False

    @property
    def is_category(self) -> bool:
        """True if the features are ones and zeros, at most one of them one."""
        return self.kind == "category"

    @property
    def width(self) -> int:
        """The number of features."""
        main = (self.buckets or len(self.values) + self.other) if self.is_category else 1
        return main + self.missing

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        if not self.is_category:
            main = [self.name]
        elif self.buckets:
            main = [f"{self.name}#{bucket}" for bucket in range(self.buckets)]
        else:
            main = [f"{self.name}={value}" for value in self.values]
            main += [f"{self.name} other"] * self.other
        return (*main, *([f"{self.name} missing"] * self.missing))

    def positions(self, column: RawColumn) -> IntArray:
        """Return which feature of a category is one at each node, or -1 for none."""
        main = self.width - self.missing
        if self.buckets:
            places = [bucket_of(self.name, text, self.buckets) for text in column.texts]
        else:
            known = {value: i for i, value in enumerate(self.values)}
            otherwise = main - 1 if self.other else -1
            places = [known.get(text, otherwise) for text in column.texts]
        # The last entry is for missing values, whose code -1 indexes from the end.
        table = np.array([*places, main if self.missing else -1], dtype=np.int64)
        found: IntArray = table[column.values]
        return found

    def numbers(self, column: RawColumn) -> npt.NDArray[np.float32]:
        """Return the feature of a column of numbers, booleans or dates."""
        if self.mean is None:
            raise ValueError(f"column '{self.name}' has no mean yet: complete the encoding first")
        values = np.where(column.missing, self.mean, column.values)
        if self.scaled:
            values = (values - self.mean) / self.std
        with np.errstate(over="ignore"):
            found: npt.NDArray[np.float32] = values.astype(np.float32)
        wrong = ~np.isfinite(found)
        if wrong.any():
            # Without the value: at a site, this text is sent to the server.
            once_scaled = " once scaled" if self.scaled else ""
            raise UserError(
                f"column '{self.name}', node {int(wrong.argmax())}: the value is too large"
                f"{once_scaled}: correct it"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        facts: dict[str, Any] = {"name": self.name, "kind": self.kind, "missing": self.missing}
        if self.is_category:
            return facts | {
                "values": list(self.values),
                "other": self.other,
                "buckets": self.buckets,
            }
        return facts | {"mean": self.mean, "std": self.std, "scaled": self.scaled}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Rule:
        """Read a rule and check it."""
        found = Reader(data, where)
        name, kind = found.text("name"), found.text("kind", TEXT)
        if kind not in KINDS:
            raise unknown(f"kind of column in {where}", kind[:TEXT], KINDS)
        missing = found.flag("missing")
        if kind == "category":
            buckets = found.count("buckets")
            values = found.texts("values", MAX_COLUMNS)
            if buckets > MAX_COLUMNS or (buckets and values) or len(set(values)) < len(values):
                raise UserError(f"{where}: the values of '{name[:TEXT]}' are not valid")
            return cls(
                name,
                kind,
                values=values,
                other=found.flag("other"),
                buckets=buckets,
                missing=missing,
            )
        (std,) = found.floats("std")
        if not std > 0:
            raise UserError(f"{where}: the deviation of '{name[:TEXT]}' is not above 0")
        mean = None if found.get("mean", object) is None else found.floats("mean")[0]
        return cls(name, kind, mean, std, found.flag("scaled"), missing=missing)


def bucket_of(name: str, value: str, buckets: int = BUCKETS) -> int:
    """Return the feature that a value of a category is hashed to, the same on every machine.

    >>> bucket_of("channel", "web") == bucket_of("channel", "web")
    True
    """
    return digest_of(name, value) % buckets


@dataclass(frozen=True)
class ArrayRule:
    """How an array of features is scaled, column by column.

    Attributes:
        width: number of columns.
        scaled: whether columns are scaled.
        mean: of every column. None if columns are not scaled, or if every client uses its own,
            which is not filled in yet.
        std: of every column; None if `mean` is.
    """

    width: int
    scaled: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def apply(self, features: Features) -> Features:
        """Return the features in their scale."""
        if features.shape[1] != self.width:
            raise UserError(
                f"the graph has {features.shape[1]} features, but {self.width} were trained with: "
                "give the same features in the same order"
            )
        if not self.scaled:
            return features
        if self.mean is None or self.std is None:
            raise ValueError("the columns have no means yet: complete the encoding first")
        check_dense(features)
        mean, std = np.array(self.mean), np.array(self.std)
        found = np.empty(features.shape, dtype=np.float32)
        for start in range(0, len(found), BLOCK):
            rows = slice(start, start + BLOCK)
            found[rows] = (features[rows].astype(np.float64) - mean) / std
        if not np.isfinite(found).all():
            node, column = np.argwhere(~np.isfinite(found))[0].tolist()
            raise UserError(f"node {node}, feature {column}: the value is too large: correct it")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        own = [None if part is None else list(part) for part in (self.mean, self.std)]
        return {"width": self.width, "scaled": self.scaled, "mean": own[0], "std": own[1]}

    @classmethod
    def from_json(cls, data: Any, where: str) -> ArrayRule:
        """Read a rule and check it."""
        found = Reader(data, where)
        width, scaled = found.count("width"), found.flag("scaled")
        if width > MAX_WIDTH:
            raise UserError(f"{where}: {width:,} features are more than {MAX_WIDTH:,}")
        if not scaled or found.get("mean", object) is None:
            return cls(width, scaled)
        mean, std = found.floats("mean", width), found.floats("std", width)
        if not min(std, default=1.0) > 0:
            raise UserError(f"{where}: a deviation is not above 0")
        return cls(width, scaled, mean, std)


def number_rule(column: Column, normalize: str, *, missing: bool) -> Rule:
    """Return the rule of a column of numbers, booleans or dates, its mean open or declared."""
    scaled = column.kind == "date" or (column.kind == "number" and normalize == "standard")
    if column.scale is None or column.kind == "boolean":
        return Rule(column.name, column.kind, scaled=scaled, missing=missing)
    mean, std = column.scale
    return Rule(column.name, column.kind, mean, std, scaled=True, missing=missing)


def category_rule(column: Column, counts: Counts) -> Rule:
    missing = counts.missing > 0
    if column.categories:
        known = set(column.categories)
        other = counts.rest > 0 or any(value not in known for value in counts.values)
        return Rule(column.name, "category", values=column.categories, other=other, missing=missing)
    values, other = counts.vocabulary()
    return Rule(column.name, "category", values=values, other=other, missing=missing)


# Features ---------------------------------------------------------------------------------------


def assemble(rules: Sequence[Rule], table: Sequence[RawColumn], *, dense: bool) -> Features:
    """Return the features of a table whose columns are in the order of the rules."""
    nodes, width = len(table[0].values) if table else 0, sum(rule.width for rule in rules)
    found = _Dense(nodes, width) if dense else _Sparse(nodes, width)
    start = 0
    for rule, column in zip(rules, table, strict=True):
        if rule.is_category:
            place = rule.positions(column)
            rows = np.flatnonzero(place >= 0)
            found.mark(rows, start + place[rows])
        else:
            found.put(start, rule.numbers(column))
            if rule.missing:
                rows = np.flatnonzero(column.missing)
                found.mark(rows, np.full(len(rows), start + 1))
        start += rule.width
    return found.features()


class _Dense:
    """Features that are put together in a dense array."""

    def __init__(self, nodes: int, width: int) -> None:
        self.values = np.zeros((nodes, width), dtype=np.float32)

    def put(self, column: int, values: npt.NDArray[np.float32]) -> None:
        self.values[:, column] = values

    def mark(self, rows: IntArray, columns: IntArray) -> None:
        self.values[rows, columns] = 1.0

    def features(self) -> Features:
        return self.values


class _Sparse:
    """Features that are put together as positions and values."""

    def __init__(self, nodes: int, width: int) -> None:
        self.shape = (nodes, width)
        self.parts: list[tuple[IntArray, IntArray, npt.NDArray[np.float32]]] = []

    def put(self, column: int, values: npt.NDArray[np.float32]) -> None:
        rows = np.flatnonzero(values)
        self.parts.append((rows, np.full(len(rows), column), values[rows]))

    def mark(self, rows: IntArray, columns: IntArray) -> None:
        self.parts.append((rows, columns, np.ones(len(rows), dtype=np.float32)))

    def features(self) -> Features:
        rows, columns, values = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        return sp.csr_array((values, (rows, columns)), shape=self.shape)


def padded(features: Features, columns: int) -> Features:
    """Return features with further columns of zeros."""
    if sp.issparse(features):
        rows = sp.csr_array(features)
        shape = (rows.shape[0], rows.shape[1] + columns)
        return sp.csr_array((rows.data, rows.indices, rows.indptr), shape=shape)
    return np.pad(features, ((0, 0), (0, columns)))


def row_normalized(features: Features) -> Features:
    """Return features divided by the sum of their magnitudes, per node."""
    total = np.asarray(abs(features).sum(axis=1), dtype=np.float32).reshape(-1, 1)
    scale = 1 / np.where(total == 0, 1, total)
    if sp.issparse(features):
        return sp.csr_array(sp.csr_array(features).multiply(scale), dtype=np.float32)
    scaled: Features = features * scale
    return scaled
