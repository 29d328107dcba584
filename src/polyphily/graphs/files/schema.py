"""The file `schema.toml`: which columns of a client's tables mean what."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polyphily.errors import Faults, FileFaults, UserError, toml_fault, unknown
from polyphily.graphs.limits import TEXT

FILE = "schema.toml"
KINDS = ("number", "boolean", "date", "category")
UNPACKED_LIMIT = 4 << 30  # bytes that a compressed file may unpack to
DELIMITERS = {",": ",", ";": ";", "|": "|", "\t": "\t", "tab": "\t"}


class Scale(NamedTuple):
    """A declared mean and standard deviation of a number or date column."""

    mean: float
    std: float


@dataclass(frozen=True)
class TableSchema:
    """What `schema.toml` says about the tables of nodes and edges. The defaults mean no file.

    Attributes:
        path: the file; None if there is none.
        id: the column of the nodes' ids.
        label: the column of the labels.
        split: the column of the split.
        features: the feature columns to use; None for all columns without another role.
        ignore: columns of the nodes that are not used.
        kinds: declared kinds of feature columns: "number", "boolean", "date" or "category".
        categories: declared values of category columns.
        scale: declared mean and standard deviation of number and date columns; of a date in days
            since 1970-01-01.
        source: the column of the edges' sources.
        target: the column of the edges' targets.
        weight: the column of the edges' weights.
        type: the column of the edges' types.
        directed: whether edges have a direction.
        edges_ignore: columns of the edges that are not used.
        delimiter: what separates the cells of CSV files; None to find it from the header.
        decimal: the decimal point of numbers in CSV files.
        missing: further texts that mean a missing value.
        unpacked_limit: the number of bytes that a compressed file may unpack to.
        expected: kinds of columns that are not declared, such as those that a model was trained on.
        named: columns that the file names for a role, which must exist.
    """

    path: Path | None = None
    id: str = "id"
    label: str = "label"
    split: str = "split"
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: Mapping[str, Scale] = field(default_factory=dict)
    source: str = "source"
    target: str = "target"
    weight: str = "weight"
    type: str = "type"
    directed: bool = False
    edges_ignore: tuple[str, ...] = ()
    delimiter: str | None = None
    decimal: str = "."
    missing: tuple[str, ...] = ()
    unpacked_limit: int = UNPACKED_LIMIT
    expected: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()

    def kind(self, column: str) -> str | None:
        """Return the declared or expected kind of a feature column; None if there is none."""
        declared = self.kinds.get(column, "category" if column in self.categories else None)
        return declared or self.expected.get(column)


def read_schema(path: Path) -> TableSchema:
    """Read a `schema.toml`.

    Raises:
        FileFaults: with all faults of the file.
    """
    TEXT.check_file(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file: {toml_fault(error)}") from error
    reader = _Reader(path)
    schema = reader.schema(content)
    if reader.faults:
        messages = tuple(reader.faults)
        raise FileFaults([Faults(str(path), messages, len(messages))])
    return schema


class _Reader:
    """Checks the entries of a `schema.toml` and collects the faults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []

    def schema(self, content: dict[str, Any]) -> TableSchema:
        read = {
            "delimiter": self._delimiter,
            "decimal": self._decimal,
            "missing": self._texts,
            "unpacked_gb": self._limit,
        }
        values = self._entries("", content, read, tables=("nodes", "edges"))
        if "unpacked_gb" in values:
            values["unpacked_limit"] = values.pop("unpacked_gb")
        nodes = self._table("nodes", content)
        values |= self._entries(
            "nodes.",
            nodes,
            dict.fromkeys(("id", "label", "split"), self._text)
            | {"features": self._texts, "ignore": self._texts},
            tables=("kinds", "categories", "scale"),
        )
        edges = self._table("edges", content)
        roles = dict.fromkeys(("source", "target", "weight", "type"), self._text)
        found = self._entries(
            "edges.", edges, {**roles, "directed": self._flag, "ignore": self._texts}
        )
        if "ignore" in found:
            found["edges_ignore"] = found.pop("ignore")
        named = {f"nodes.{role}" for role in ("id", "label", "split") if role in values}
        named |= {f"edges.{role}" for role in roles if role in found}
        readers = {"kinds": self._kind, "categories": self._values, "scale": self._scale}
        for name, read_one in readers.items():
            given = self._table(f"nodes.{name}", nodes)
            kept = {c: read_one(f"nodes.{name}.{c}", value) for c, value in given.items()}
            values[name] = {column: value for column, value in kept.items() if value is not None}
        schema = TableSchema(path=self.path, named=frozenset(named), **values, **found)
        self._check_agreement(schema)
        return schema

    def _entries(
        self, prefix: str, table: dict[str, Any], read: dict[str, Any], tables: Iterable[str] = ()
    ) -> dict[str, Any]:
        values = {}
        for key, value in table.items():
            if key in read:
                values[key] = read[key](prefix + key, value)
            elif key not in tables:
                self._fault(prefix + key, self._unknown(prefix, key, [*read, *tables]))
        return {key: value for key, value in values.items() if value is not None}

    def _unknown(self, prefix: str, key: str, known: list[str]) -> str:
        if prefix and key in ("delimiter", "decimal", "missing", "unpacked_gb"):
            return f"write '{key}' at the top of the file, before [nodes] and [edges]"
        return str(unknown("key", key, known))

    def _table(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        value = content.get(name.rpartition(".")[2], {})
        if isinstance(value, dict):
            return value
        self._fault(name, f"{value!r} is not a table: write [{name}]")
        return {}

    def _check_agreement(self, schema: TableSchema) -> None:
        for column in schema.categories.keys() & schema.kinds.keys():
            if schema.kinds[column] != "category":
                self._fault(
                    f"nodes.categories.{column}",
                    f"the column is declared a {schema.kinds[column]}: declare it a category, or "
                    "remove its categories",
                )
        for column in schema.scale:
            if schema.kind(column) in ("category", "boolean"):
                self._fault(
                    f"nodes.scale.{column}",
                    f"a {schema.kind(column)} has no scale: remove the entry, or declare the "
                    "column a number or a date",
                )
        for column in schema.ignore:
            declared = schema.kind(column) or column in schema.scale
            if declared or column in (schema.features or ()):
                self._fault("nodes.ignore", f"'{column}' is also declared as a feature: choose one")
        features, roles_of_nodes = schema.features or (), (schema.id, schema.label, schema.split)
        for column in sorted({c for c in features if features.count(c) > 1}):
            self._fault("nodes.features", f"'{column}' is listed twice: remove one")
        for column in {*features, *schema.kinds, *schema.categories, *schema.scale}:
            if column in roles_of_nodes:
                self._fault(
                    "nodes", f"'{column}' is the column of ids, labels or splits, not a feature"
                )
        for name, roles in (("nodes", ("id", "label", "split")), ("edges", ("source", "target"))):
            columns = [getattr(schema, role) for role in roles]
            if len(set(columns)) < len(columns):
                self._fault(name, f"{', '.join(roles)} must be different columns")

    def _fault(self, key: str, what: str) -> None:
        self.faults.append(f"{self.path}, {key}: {what}")

    def _text(self, key: str, value: Any) -> str | None:
        if isinstance(value, str) and value.strip():
            return value.strip()
        self._fault(key, f'{value!r} is not the name of a column: write it in quotes ("")')
        return None

    def _texts(self, key: str, value: Any) -> tuple[str, ...] | None:
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(entry.strip() for entry in value)
        self._fault(key, f'{value!r} is not a list of texts: write ["a", "b"]')
        return None

    def _values(self, key: str, value: Any) -> tuple[str, ...] | None:
        texts = self._texts(key, value)
        if texts is None:
            return None
        if not texts or len(set(texts)) < len(texts) or "" in texts:
            self._fault(key, "the values must be one or more different texts, none empty")
            return None
        return texts

    def _flag(self, key: str, value: Any) -> bool | None:
        if isinstance(value, bool):
            return value
        self._fault(key, f"{value!r} is neither true nor false")
        return None

    def _kind(self, key: str, value: Any) -> str | None:
        if value in KINDS:
            return str(value)
        self._fault(key, f"{value!r} is not a kind of column. Known: {', '.join(KINDS)}")
        return None

    def _scale(self, key: str, value: Any) -> Scale | None:
        if isinstance(value, dict) and set(value) == {"mean", "std"}:
            mean, std = value["mean"], value["std"]
            if all(map(_is_number, (mean, std))) and std > 0:
                return Scale(float(mean), float(std))
        self._fault(key, "write { mean = 40, std = 15 }, with a positive std")
        return None

    def _delimiter(self, key: str, value: Any) -> str | None:
        if isinstance(value, str) and value in DELIMITERS:
            return DELIMITERS[value]
        self._fault(key, f'{value!r} is not one of ",", ";", "|" and "tab"')
        return None

    def _decimal(self, key: str, value: Any) -> str | None:
        if value in (".", ","):
            return str(value)
        self._fault(key, f'{value!r} is not "." or ","')
        return None

    def _limit(self, key: str, value: Any) -> int | None:
        if _is_number(value) and value > 0:
            return int(value * (1 << 30))
        self._fault(key, f"{value!r} is not a positive number of gigabytes")
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def declared_columns(schema: TableSchema) -> Iterator[tuple[str, str]]:
    """Yield the key and name of every node column that a schema names beyond the roles."""
    for column in schema.features or ():
        yield "nodes.features", column
    for key in ("kinds", "categories", "scale"):
        for column in getattr(schema, key):
            yield f"nodes.{key}", column
