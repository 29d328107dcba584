"""How columns become features: rules that are learned on train nodes and kept with the model.

A table's column of numbers stays one feature, a column of categories becomes a feature for each of
its values, and missing values get a feature of their own. `Statistics` of the train nodes decide
means, deviations and values. Those of several clients are merged, so that all clients have the same
rules ("agreed"). Or every client uses its own means and deviations, and nothing is exchanged
("home"). Rules are never learned from the nodes to predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from polyphily.errors import UserError, unknown
from polyphily.graphs.checked import Reader
from polyphily.graphs.columns import (
    KINDS,
    MAX_COLUMNS,
    Column,
    agree_columns,
    columns_of,
    conform_kinds,
    convert,
    named_columns,
)
from polyphily.graphs.graph import SPARSE_BELOW, Features, Graph, compact
from polyphily.graphs.rules import (
    BUCKETS,
    MAX_WIDTH,
    ArrayRule,
    Rule,
    assemble,
    category_rule,
    number_rule,
    padded,
    row_normalized,
)
from polyphily.graphs.statistics import Statistics, train_statistics

if TYPE_CHECKING:
    from polyphily.graphs.files.client import RawColumn

    Raw: TypeAlias = tuple[RawColumn, ...] | Features

NORMALIZATIONS = {
    "none": "as they are",
    "row": "each node's features sum to one",
    "standard": "each column of numbers by the mean and standard deviation of the train nodes",
}
MODES = {
    "agreed": "one recipe for all clients, from the train nodes of all",
    "home": "means and deviations of each client's own train nodes; nothing is exchanged",
}


@dataclass(frozen=True)
class Encoding:
    """The rules that turn a client's table, or its array of features, into features.

    Attributes:
        rules: a rule per column of a table, or the rule of an array.
        row: whether the features of a node are then divided by the sum of their magnitudes.
        padding: number of further features, which are always 0. They make several federations
            equally wide.
    """

    rules: tuple[Rule, ...] | ArrayRule
    row: bool = False
    padding: int = 0

    # Making one ------------------------------------------------------------------------------

    @classmethod
    def learn(
        cls, statistics: Statistics, columns: Sequence[Column] | int, normalize: str
    ) -> Encoding:
        """Learn the rules from the statistics of all train nodes.

        Args:
            statistics: of the clients together.
            columns: the agreed columns of a table, or the width of an array.
            normalize: one of `NORMALIZATIONS`.
        """
        row = normalize == "row"
        if isinstance(columns, int):
            rule = ArrayRule(columns, scaled=normalize == "standard")
            return cls(rule, row).completed(statistics)
        numbers = iter(range(len(statistics.numbers.count)))
        counts = iter(statistics.categories)
        rules = []
        for column in columns:
            if column.kind == "category":
                rules.append(category_rule(column, next(counts)))
            else:
                missing = bool(statistics.numbers.missing[next(numbers)])
                rules.append(number_rule(column, normalize, missing=missing))
        return cls(tuple(rules), row).completed(statistics)

    @classmethod
    def at_home(cls, columns: Sequence[Column] | int, normalize: str) -> Encoding:
        """Return rules that need no statistics of other clients.

        Means and deviations are left open, unless they are declared: `completed` fills in those of
        a client. The values of a category are the declared ones, or they are hashed. Missing
        values always have a feature, because nobody says whether there are any.
        """
        row = normalize == "row"
        if isinstance(columns, int):
            return cls(ArrayRule(columns, scaled=normalize == "standard"), row)
        rules = (
            Rule(
                column.name,
                "category",
                values=column.categories,
                other=bool(column.categories),
                buckets=0 if column.categories else BUCKETS,
                missing=True,
            )
            if column.kind == "category"
            else number_rule(column, normalize, missing=True)
            for column in columns
        )
        return cls(tuple(rules), row)

    @property
    def is_complete(self) -> bool:
        """True if no mean is left open."""
        if isinstance(self.rules, ArrayRule):
            return not self.rules.scaled or self.rules.mean is not None
        return all(rule.is_category or rule.mean is not None for rule in self.rules)

    def completed(self, statistics: Statistics) -> Encoding:
        """Return the encoding with the means and deviations that are left open."""
        if self.is_complete:
            return self
        numbers = statistics.numbers
        mean, std = numbers.mean.tolist(), numbers.std.tolist()
        if isinstance(self.rules, ArrayRule):
            return replace(self, rules=replace(self.rules, mean=tuple(mean), std=tuple(std)))
        position = iter(range(len(mean)))
        rules = []
        for rule in self.rules:
            k = -1 if rule.is_category else next(position)
            if not rule.is_category and rule.mean is None:
                rule = replace(rule, mean=mean[k], std=std[k] if rule.scaled else 1.0)
            rules.append(rule)
        return replace(self, rules=tuple(rules))

    # What it is ------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features: of an array their positions."""
        if isinstance(self.rules, ArrayRule):
            found = tuple(map(str, range(self.rules.width)))
        else:
            found = tuple(name for rule in self.rules for name in rule.names)
        return found + tuple(f"padding {i}" for i in range(self.padding))

    @cached_property
    def width(self) -> int:
        """The number of features."""
        if isinstance(self.rules, ArrayRule):
            return self.rules.width + self.padding
        return sum(rule.width for rule in self.rules) + self.padding

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of a table's columns by name; empty for an array."""
        return {} if isinstance(self.rules, ArrayRule) else {r.name: r.kind for r in self.rules}

    @property
    def dense(self) -> bool:
        """True if the features of a table are stored in a dense array.

        This depends on the rules only, not on the values, so that it is the same at all clients.
        """
        if isinstance(self.rules, ArrayRule):
            return True
        filled = len(self.rules) + sum(r.missing for r in self.rules if not r.is_category)
        width = self.width - self.padding
        return width <= 64 or filled >= SPARSE_BELOW * width

    @property
    def is_learned(self) -> bool:
        """True if the rules depend on the values of train nodes."""
        return not isinstance(self.rules, ArrayRule) or self.rules.scaled

    # Using it --------------------------------------------------------------------------------

    def apply(self, raw: Raw) -> Features:
        """Return the features of nodes, dense or sparse float32 `[n, width]`.

        Args:
            raw: a table, whose columns are found by name, or an array of features. An array also
                fits a table's rules if all its columns are numbers, in their order. Columns that
                have no rule are ignored (`ignored`).

        Raises:
            UserError: if columns are missing or have another kind than in training.
        """
        if isinstance(self.rules, ArrayRule):
            features = self.rules.apply(self._as_array(raw, self.rules.width))
        else:
            table = conform_kinds(self._as_table(raw), [*self.kinds.items()])
            features = assemble(self.rules, table, dense=self.dense)
        if self.padding:
            features = padded(features, self.padding)
        return row_normalized(features) if self.row else features

    def encode(self, graph: Graph) -> Graph:
        """Return a graph with features in place of its raw columns or its array."""
        raw = graph.features if graph.table is None else graph.table
        return replace(graph, features=self.apply(raw), table=None)

    def ignored(self, raw: Raw) -> tuple[str, ...]:
        """Return the columns of a table that have no rule."""
        known = self.kinds
        return tuple(c.name for c in raw if c.name not in known) if isinstance(raw, tuple) else ()

    def _as_table(self, raw: Raw) -> tuple[RawColumn, ...]:
        if isinstance(raw, tuple):
            return raw
        if raw.shape[1] != len(self.kinds):
            raise UserError(
                f"the graph has {raw.shape[1]} features without names, but a table with "
                f"{len(self.kinds)} columns was trained with: give a table with these columns"
            )
        return named_columns(raw, self.kinds)

    @staticmethod
    def _as_array(raw: Raw, width: int) -> Features:
        if not isinstance(raw, tuple):
            return raw
        if len(raw) != width:
            raise UserError(
                f"the table has {len(raw)} feature columns, but {width} features were trained "
                "with: give the same features in the same order"
            )
        numbers = [convert(column, "number") for column in raw]
        for column in numbers:
            if column.missing.any():
                raise UserError(
                    f"column '{column.name}' has missing values, but there were none in training: "
                    "fill them in"
                )
        values = np.stack([c.values for c in numbers], axis=1).astype(np.float32)
        return compact(values)

    def describe(self) -> str:
        """Return a short sentence on what columns became, for the user."""
        if isinstance(self.rules, ArrayRule):
            return f"{self.rules.width} features scaled" if self.rules.scaled else ""
        parts = []
        for kind, plural in zip(KINDS, ("numbers", "booleans", "dates", "categories"), strict=True):
            number = sum(rule.kind == kind for rule in self.rules)
            if number:
                parts.append(f"{number} {kind if number == 1 else plural}")
        columns = "1 column" if len(self.rules) == 1 else f"{len(self.rules)} columns"
        gaps = sum(rule.missing for rule in self.rules)
        marked = f"; missing values of {gaps} are marked" if gaps else ""
        return f"{columns} encoded as {self.width} features: {', '.join(parts)}{marked}"

    # JSON ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as JSON; numbers are exact."""
        rules = self.rules
        if isinstance(rules, ArrayRule):
            own: dict[str, Any] = {"array": rules.to_json()}
        else:
            own = {"columns": [rule.to_json() for rule in rules]}
        return {**own, "row": self.row, "padding": self.padding}

    @classmethod
    def from_json(cls, data: Any, where: str = "the encoding") -> Encoding:
        """Read an encoding that came from a file or over the network, and check every part of it.

        Raises:
            UserError: naming the place and what is wrong.
        """
        found = Reader(data, where)
        rules: tuple[Rule, ...] | ArrayRule
        if found.has("array"):
            rules = ArrayRule.from_json(found.get("array", dict), f"{where}, array")
        else:
            items = found.items("columns")
            if len(items) > MAX_COLUMNS:
                raise UserError(f"{where}: more than {MAX_COLUMNS:,} columns")
            rules = tuple(
                Rule.from_json(item, f"{where}, column {i}") for i, item in enumerate(items)
            )
            if len({rule.name for rule in rules}) < len(rules):
                raise UserError(f"{where}: two columns have the same name")
        encoding = cls(rules, found.flag("row"), found.count("padding"))
        if encoding.width > MAX_WIDTH:
            raise UserError(f"{where}: more than {MAX_WIDTH:,} features")
        return encoding


def choose_normalization(
    columns: Sequence[Column] | int, statistics: Statistics | None = None
) -> str:
    """Return the normalisation of features if none is asked for.

    Arrays and tables of plain numbers stay as they are. Tables with dates, categories or missing
    values are scaled. Whether train nodes have missing values is known only with statistics.
    """
    if isinstance(columns, int):
        return "none"
    gaps = statistics is not None and bool(statistics.numbers.missing.any())
    return "standard" if gaps or any(c.kind in ("date", "category") for c in columns) else "none"


def learn_encodings(
    graphs: Sequence[Graph], normalize: str | None = None, mode: str | None = None
) -> tuple[tuple[Encoding, ...], str]:
    """Learn the encoding of every client's graph from its train nodes.

    Args:
        graphs: the clients' graphs, with their splits and with raw columns or arrays.
        normalize: one of `NORMALIZATIONS`; None to choose by the columns.
        mode: one of `MODES`; None is "agreed".

    Returns:
        The encodings, one object for all clients if they agree, and the normalisation.

    Raises:
        UserError: if columns of clients differ, or for unknown names.
    """
    for kind, given, known in (
        ("normalization", normalize, NORMALIZATIONS),
        ("encoding", mode, MODES),
    ):
        if given is not None and given not in known:
            raise unknown(kind, given, known)
    columns = _shared_columns(graphs, normalize)
    if columns is None:  # a width of its own for every array
        alone = [Encoding.at_home(graph.num_features, normalize or "none") for graph in graphs]
        return tuple(alone), normalize or "none"
    if mode == "home":
        how = normalize or choose_normalization(columns)
        template = Encoding.at_home(columns, how)
        if template.is_complete:
            return (template,) * len(graphs), how
        return tuple(template.completed(train_statistics(g, columns)) for g in graphs), how
    if isinstance(columns, int) and normalize != "standard":
        how = normalize or "none"
        return (Encoding.at_home(columns, how),) * len(graphs), how
    together = Statistics.merged([train_statistics(graph, columns) for graph in graphs])
    how = normalize or choose_normalization(columns, together)
    return (Encoding.learn(together, columns, how),) * len(graphs), how


def _shared_columns(
    graphs: Sequence[Graph], normalize: str | None
) -> tuple[Column, ...] | int | None:
    """Return the columns of all clients, or the width of their arrays; None if widths differ."""
    tables = {g.name: columns_of(g.table) for g in graphs if g.table is not None}
    if len(tables) == len(graphs):
        return agree_columns(tables)
    widths = {g.num_features for g in graphs}
    if tables or (len(widths) > 1 and normalize == "standard"):
        raise UserError(
            "some clients have tables with named columns and others arrays of features: give all "
            "the same form"
            if tables
            else f"clients have different numbers of features: {sorted(widths)}"
        )
    return widths.pop() if len(widths) == 1 else None
