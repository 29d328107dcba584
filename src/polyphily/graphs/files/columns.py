"""The kinds of feature columns: numbers, booleans, dates and categories, with missing values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.graphs.files.client import FLOAT32_OVERFLOW, RawColumn, number_fault
from polyphily.graphs.files.schema import TableSchema
from polyphily.graphs.files.tables import FALSE, MISSING, TRUE, Table, arrow
from polyphily.graphs.graph import BoolArray, IntArray

MOSTLY = 0.9  # the share of values of one kind from which other values are faults
SOME = 0.1  # the share of numbers in a category column from which a note tells of it
LETTERS = {"t": "f", "y": "n"}  # short booleans, which count only if both occur
DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}([.]\d{1,9})?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
ZONE = r"(Z|:\d{2}[+-]\d{2}(:?\d{2})?|[.]\d+[+-]\d{2}(:?\d{2})?)$"
COMPACT_DATE = r"^(\d{4})(\d{2})(\d{2})$"

Floats = npt.NDArray[np.float64]


def read_column(table: Table, name: str, schema: TableSchema) -> tuple[RawColumn, list[str]]:
    """Return a feature column of a table and notes on it. Faulty cells are added to the table.

    The kind is the one that `schema` declares, or that of all values. Values of another kind than
    nearly all others are faults.
    """
    pa, column, kind = arrow(), table.columns[name], schema.kind(name)
    of = pa.types
    stored = column.type
    if of.is_dictionary(stored):
        column = column.cast(stored.value_type)
        kind = kind or "category"
        stored = column.type
    if of.is_null(stored):
        return _empty(name, kind or "number", len(column)), []
    if of.is_integer(stored) or of.is_floating(stored) or of.is_decimal(stored):
        if kind in (None, "number"):
            return _numbers(table, name, column), _code_notes(table, name)
        return _from_texts(table, name, _whole_texts(column), kind, schema)
    if of.is_boolean(stored) and kind in (None, "boolean", "number"):
        return RawColumn(name, kind or "boolean", _floats(column)), []
    if (of.is_date(stored) or of.is_timestamp(stored)) and kind in (None, "date"):
        return RawColumn(name, "date", _days(column)), []
    try:
        column = column.cast(pa.string())
        column.validate(full=True)
    except pa.ArrowException:
        table.add_fault(0, name, f"is stored as {stored}: store numbers or text, or ignore it")
        return _empty(name, kind or "number", len(column)), []
    return _from_texts(table, name, column, kind, schema)


def parse_numbers(column: Any, schema: TableSchema) -> Floats:
    """Return a column as numbers, with NaN for all that are missing or no number."""
    of = arrow().types
    if not (of.is_string(column.type) or of.is_large_string(column.type)):
        if any(test(column.type) for test in (of.is_integer, of.is_floating, of.is_decimal)):
            return _floats(column)
        column = column.cast(arrow().string())
    texts = Texts.of(column, MISSING)
    return texts.spread(_parsed_numbers(texts, _are_numbers(texts, schema.decimal), schema.decimal))


@dataclass(frozen=True)
class Texts:
    """The distinct values of a text column that are not missing, and each row's position in them.

    Attributes:
        values: the distinct texts, as a pyarrow array.
        codes: positions in `values`, -1 for missing.
    """

    values: Any
    codes: IntArray

    @classmethod
    def of(cls, column: Any, missing: Iterable[str]) -> Texts:
        """Return the texts of a column, without spaces around them and without `missing`."""
        pa = arrow()
        pc = pa.compute
        encoded = column.dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):  # of no chunk
            return cls(pa.array([], pa.string()), np.zeros(0, dtype=np.int64))
        trimmed = pc.utf8_trim_whitespace(encoded.dictionary)
        words = pa.array(list(missing), pa.string())
        kept = pc.filter(trimmed, pc.invert(pc.is_in(pc.utf8_lower(trimmed), value_set=words)))
        values = pc.unique(kept)
        position = pc.fill_null(pc.index_in(trimmed, value_set=values), -1)
        renumbered = np.append(position.to_numpy(zero_copy_only=False).astype(np.int64), -1)
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return cls(values, renumbered[codes])

    @cached_property
    def counts(self) -> IntArray:
        """The number of rows with each value."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    def share(self, chosen: BoolArray) -> float:
        """Return the share of rows that have one of the chosen values, among those with any."""
        return float(self.counts[chosen].sum() / max(self.counts.sum(), 1))

    def matches(self, pattern: str) -> BoolArray:
        """Return which values match a pattern."""
        found = arrow().compute.match_substring_regex(self.values, pattern)
        matched: BoolArray = found.to_numpy(zero_copy_only=False).astype(np.bool_)
        return matched

    def among(self, words: Iterable[str]) -> BoolArray:
        """Return which values are one of some words, in any case."""
        pa = arrow()
        found = pa.compute.is_in(
            pa.compute.utf8_lower(self.values), value_set=pa.array(list(words), pa.string())
        )
        matched: BoolArray = found.to_numpy(zero_copy_only=False).astype(np.bool_)
        return matched

    def rows(self, chosen: BoolArray) -> BoolArray:
        """Return which rows have one of the chosen values."""
        found: BoolArray = np.append(chosen, False)[self.codes]
        return found

    def spread(self, values: Floats) -> Floats:
        """Return numbers for the rows from numbers for the values; NaN if missing."""
        spread: Floats = np.append(values, np.nan)[self.codes]
        return spread


def _from_texts(
    table: Table, name: str, column: Any, kind: str | None, schema: TableSchema
) -> tuple[RawColumn, list[str]]:
    texts = Texts.of(column, [*MISSING, *(word.lower() for word in schema.missing)])
    if not len(texts.values):
        return _empty(name, kind or "number", len(texts.codes)), []
    numbers = _are_numbers(texts, schema.decimal)
    dates = texts.matches(DATE)
    notes: list[str] = []
    if kind is None:
        kind, notes = _inferred(table, name, texts, numbers, dates, schema)
    if kind == "number":
        fitting, values = numbers, _parsed_numbers(texts, numbers, schema.decimal)
    elif kind == "boolean":
        fitting, values = _booleans(texts)
    elif kind == "date":
        fitting, values = _parsed_dates(texts, dates | texts.matches(COMPACT_DATE))
    else:
        return RawColumn(name, kind, texts.codes, tuple(texts.values.to_pylist())), notes
    if kind == "number":
        fitting = fitting & ~(abs(values) >= FLOAT32_OVERFLOW)
    if not fitting.all():
        share = texts.share(fitting)
        table.add_faults(texts.rows(~fitting), name, _Misfit(name, kind, share, schema))
    return RawColumn(name, kind, texts.spread(values)), notes


def _inferred(
    table: Table,
    name: str,
    texts: Texts,
    numbers: BoolArray,
    dates: BoolArray,
    schema: TableSchema,
) -> tuple[str, list[str]]:
    """Return the kind of a column by its texts, and notes."""
    if texts.share(numbers) >= MOSTLY:
        if numbers.all() and not table.is_csv:
            first = texts.rows(numbers).argmax()
            table.add_fault(
                int(first),
                name,
                lambda cell: (
                    f"'{cell}' is a number stored as a string, as are all values: store numbers, "
                    f'or declare the kind in schema.toml: [nodes.kinds] {_key(name)} = "number" '
                    'or "category"'
                ),
            )
        return "number", []
    if texts.share(dates) >= MOSTLY:
        return "date", []
    words = _booleans(texts)[0]
    if words.all() or ((words | numbers).all() and (words & ~numbers).any()):
        return "boolean", []
    share = texts.share(numbers)
    with_comma = _are_numbers(texts, ",")
    if schema.decimal == "." and texts.share(with_comma) >= MOSTLY:
        first = texts.rows(with_comma & ~numbers).argmax()
        table.add_fault(
            int(first),
            name,
            lambda cell: (
                f"'{cell.strip()}' is a number with a comma, as are most values: write into "
                'schema.toml: decimal = "," (if the comma separates thousands, remove it), or '
                f'[nodes.kinds] {_key(name)} = "category"'
            ),
        )
        return "category", []
    if share < SOME:
        return "category", []
    return "category", [f"column '{name}' read as categories, although {share:.0%} are numbers"]


def _key(name: str) -> str:
    """Return a column's name as a key of a TOML file.

    >>> _key("age"), _key("net income")
    ('age', '"net income"')
    """
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else '"' + name.replace('"', '\\"') + '"'


@dataclass(frozen=True)
class _Misfit:
    """Makes the message for a value that is not of its column's kind."""

    name: str
    kind: str
    share: float
    schema: TableSchema

    def __call__(self, cell: str) -> str:
        cell = cell.strip()
        reason = number_fault(cell.replace(self.schema.decimal, ".")) or ""
        if self.kind == "number" and reason and "not a number" not in reason:
            return reason
        declared = self.schema.kind(self.name)
        expected = f"'{cell}' is not a {self.kind}"
        if declared:
            return f"{expected}, which schema.toml declares the column to be: correct one of them"
        hint = ""
        if self.kind == "number" and self.schema.decimal == "." and re.search(r"\d,\d", cell):
            hint = ', decimal = ","'
        return (
            f"{expected}, but {_percent(self.share)} of the column are: correct it, or write into "
            f'schema.toml: missing = ["{cell}"]{hint}, or [nodes.kinds] {_key(self.name)} = '
            '"category"'
        )


def _percent(share: float) -> str:
    """Return a share below 1 in per cent, rounded down.

    >>> _percent(0.9999)
    '99 %'
    """
    return f"{int(share * 100)} %"


def _are_numbers(texts: Texts, decimal: str) -> BoolArray:
    point = re.escape(decimal)
    return texts.matches(rf"^[+-]?(\d+({point}\d*)?|{point}\d+)([eE][+-]?\d+)?$") | texts.matches(
        r"^[+-]?(?i:inf|infinity)$"
    )


def _parsed_numbers(texts: Texts, chosen: BoolArray, decimal: str) -> Floats:
    pa = arrow()
    values = np.full(len(texts.values), np.nan)
    written = pa.compute.filter(texts.values, pa.array(chosen))
    if decimal != ".":
        written = pa.compute.replace_substring(written, decimal, ".")
    values[chosen] = written.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values


def _booleans(texts: Texts) -> tuple[BoolArray, Floats]:
    """Return which values are booleans, and their values. A column of 0 and 1 alone is none."""
    true, false = list(TRUE), list(FALSE)
    present = (
        {text.lower() for text in texts.values.to_pylist()} if len(texts.values) < 50 else set()
    )
    for yes, no in LETTERS.items():
        if {yes, no} <= present:
            true.append(yes)
            false.append(no)
    on, off = texts.among([*true, "1"]), texts.among([*false, "0"])
    return on | off, np.where(on, 1.0, np.where(off, 0.0, np.nan))


def _parsed_dates(texts: Texts, chosen: BoolArray) -> tuple[BoolArray, Floats]:
    """Return which values are dates, and their days since 1970-01-01. No zone means UTC."""
    pa = arrow()
    pc = pa.compute
    days = np.full(len(texts.values), np.nan)
    written = pc.replace_substring_regex(texts.values, COMPACT_DATE, r"\1-\2-\3")
    written = pc.replace_substring_regex(written, r"([.]\d{6})\d+", r"\1")  # microseconds
    zoned = texts.matches(ZONE) & texts.matches(r":")
    for part, zone in ((chosen & ~zoned, None), (chosen & zoned, "UTC")):
        selected = pc.filter(written, pa.array(part))
        kind = pa.timestamp("us", zone)
        try:
            days[part] = _days(selected.cast(kind))
        except pa.ArrowInvalid:  # the 30th of February: find such values one by one
            days[part] = [_day(text) for text in selected.to_pylist()]
    return chosen & ~np.isnan(days), days


def _day(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return np.nan
    naive = moment.replace(tzinfo=None) - (moment.utcoffset() or datetime.min - datetime.min)
    return (naive - datetime(1970, 1, 1)).total_seconds() / DAY["s"]


def _days(column: Any) -> Floats:
    """Return dates or timestamps as days since 1970-01-01, NaN if missing."""
    pa = arrow()
    if pa.types.is_date(column.type):
        return _floats(column.cast(pa.date32()).cast(pa.int32()))
    return _floats(column.cast(pa.int64())) / DAY[column.type.unit]


def _code_notes(table: Table, name: str) -> list[str]:
    """Return a note if whole numbers are written like codes."""
    if name not in table.codes:
        return []
    return [
        f"column '{name}' read as numbers, although it has values such as {table.codes[name]}: if "
        f'they are codes, write into schema.toml: [nodes.kinds] {_key(name)} = "category"'
    ]


def _numbers(table: Table, name: str, column: Any) -> RawColumn:
    values = _floats(column)
    faulty = abs(values) >= FLOAT32_OVERFLOW
    if faulty.any():
        table.add_faults(faulty, name, lambda cell: str(number_fault(cell)))
    return RawColumn(name, "number", values)


def _floats(column: Any) -> Floats:
    """Return a column of numbers or booleans as float64, NaN if missing."""
    values = column.cast(arrow().float64(), safe=False).to_numpy(**_copied(column))
    floats: Floats = np.asarray(values, dtype=np.float64)
    return floats


def _copied(column: Any) -> dict[str, bool]:
    """Return the argument that a plain array needs to be copied if it must be."""
    return {} if isinstance(column, arrow().ChunkedArray) else {"zero_copy_only": False}


def _whole_texts(column: Any) -> Any:
    """Return numbers as text; whole numbers that are stored as floats without `.0`."""
    pa = arrow()
    if pa.types.is_floating(column.type):
        column = pa.compute.if_else(pa.compute.is_nan(column), None, column)
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            return column.cast(pa.string())
    return column.cast(pa.string())


def _empty(name: str, kind: str, rows: int) -> RawColumn:
    if kind == "category":
        return RawColumn(name, kind, np.full(rows, -1, dtype=np.int64))
    return RawColumn(name, kind, np.full(rows, np.nan))


def as_kind(column: RawColumn, kind: str) -> RawColumn | None:
    """Return a column as one of another kind, if no value is lost; None otherwise.

    A column without any value can be of every kind, booleans can be numbers, and categories that
    are all boolean words can be booleans.
    """
    if column.kind == kind:
        return column
    if column.missing.all():
        return _empty(column.name, kind, len(column.values))
    if (column.kind, kind) == ("boolean", "number"):
        return RawColumn(column.name, kind, column.values)
    if (column.kind, kind) == ("category", "boolean"):
        on, off = ({*TRUE, *LETTERS}, {*FALSE, *LETTERS.values()})
        words = [text.lower() for text in column.texts]
        if all(word in on | off for word in words):
            values = np.array([*(float(word in on) for word in words), np.nan])
            return RawColumn(column.name, kind, values[column.values])
    return None
