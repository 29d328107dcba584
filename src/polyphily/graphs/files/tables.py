"""Reading tables from CSV and parquet by pyarrow, with messages that locate faults."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from polyphily.errors import UserError, missing_package
from polyphily.graphs.files.client import count, listed, number_fault

SUFFIXES = (".csv", ".parquet")
MIXED = "mixes numbers with true and false: use 0 and 1"
NOT_UTF8 = "not UTF-8 text: save the file as UTF-8"


def arrow() -> Any:
    """Import pyarrow with the modules used here."""
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise missing_package(
            "pyarrow",
            "files",
            "reading CSV and parquet graphs",
            "Graphs as .npz need no further package.",
        ) from None
    return pa


@dataclass(frozen=True)
class Table:
    """A table as pyarrow chunked arrays. Missing values of text columns are ''.

    Attributes:
        path: the file.
        columns: the columns by name.
        ignored: columns of the file that were not asked for.
    """

    path: Path
    columns: dict[str, Any]
    ignored: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    def place(self, row: int) -> str:
        """Return where a user finds a row: its line in a CSV file, or its number."""
        if self.path.suffix == ".csv":
            return f"line {self._record(row).line}"
        return f"row {row + 1}"

    def value(self, row: int, column: str) -> object:
        """Return a cell as it is written in the file."""
        if self.path.suffix == ".csv":
            return self._record(row).cells[_names(self.path).index(column)]
        return self.columns[column][row].as_py()

    def fault(self, row: int, column: str, what: str) -> UserError:
        """Return an error that names the file, the row and the column."""
        return UserError(f"{self.path}, {self.place(row)}, column '{column}': {what}")

    def _record(self, row: int) -> Record:
        return next(islice(_records(self.path), row + 1, None))


def read_table(
    path: Path, text: Sequence[str], *, optional: Sequence[str] = (), numbers: bool = False
) -> Table:
    """Read a CSV or a parquet file.

    Args:
        path: the file.
        text: required columns, read as text whatever their type.
        optional: columns read as text if they exist.
        numbers: whether all other columns are read as well, which must be numeric.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    reader = _read_csv if path.suffix == ".csv" else _read_parquet
    names, columns = reader(path, text, optional, numbers)
    return Table(path, columns, tuple(name for name in names if name not in columns))


def _read_parquet(
    path: Path, text: Sequence[str], optional: Sequence[str], numbers: bool
) -> tuple[list[str], dict[str, Any]]:
    pa = arrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_names(path, path, names, text)
            table = file.read(columns=None if numbers else list(text))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged, or not a parquet file: {error}") from error
    columns = {
        name: _as_text(path, name, table[name])
        if name in (*text, *optional)
        else _as_number(path, name, table[name])
        for name in table.column_names
    }
    return names, columns


def _as_text(path: Path, name: str, column: Any) -> Any:
    pa = arrow()
    if pa.types.is_floating(column.type):
        column = pa.compute.if_else(pa.compute.is_nan(column), None, column)
    try:
        column = column.cast(pa.string())
        column.validate(full=True)
    except pa.ArrowException as error:
        raise UserError(
            f"{path}, column '{name}': neither text nor whole numbers: {error}"
        ) from error
    return column.fill_null("")


def _as_number(path: Path, name: str, column: Any) -> Any:
    kind = arrow().types
    tests = (kind.is_boolean, kind.is_integer, kind.is_floating, kind.is_decimal, kind.is_null)
    if any(test(column.type) for test in tests):
        return column
    row = next((i for i, cell in enumerate(column.to_pylist()) if number_fault(cell)), 0)
    first = column[row].as_py() if len(column) else None
    raise UserError(
        f"{path}, row {row + 1}, column '{name}': "
        f"{number_fault(first) or f'{first!r} is stored as {column.type}: store numbers'}"
    )


def _read_csv(
    path: Path, text: Sequence[str], optional: Sequence[str], numbers: bool
) -> tuple[list[str], dict[str, Any]]:
    pa = arrow()
    header, first = [*islice(_records(path), 2), None, None][:2]
    if header is None:
        raise UserError(f"{path}: the file is empty")
    names = _names(path)
    _check_names(path, f"{path}, line {header.line}", names, text)
    kinds = dict.fromkeys(names, "number" if numbers else "ignored")
    for name, cell in zip(names, first.cells if first else (), strict=False):
        if numbers and _is_flag(cell):
            kinds[name] = "flag"
    kinds |= {name: "text" for name in names if name in (*text, *optional)}
    types = {"text": pa.string(), "number": pa.float32(), "flag": pa.string()}
    wanted = {name: types[kind] for name, kind in kinds.items() if kind in types}
    try:
        table = pa.csv.read_csv(
            path,
            pa.csv.ReadOptions(
                column_names=names,
                skip_rows=header.last_line,
                block_size=max(1 << 22, 256 * len(names)),
            ),
            pa.csv.ParseOptions(newlines_in_values=True),
            pa.csv.ConvertOptions(
                column_types=wanted, include_columns=list(wanted), null_values=[]
            ),
        )
        columns = {name: _trimmed(table[name], kinds[name]) for name in wanted}
    except (pa.ArrowException, OSError) as error:
        raise _first_fault(path, names, kinds) or UserError(
            f"{path}: cannot be read as CSV: {error}"
        ) from error
    return names, columns


def _trimmed(column: Any, kind: str) -> Any:
    if kind == "number":
        return column
    pa = arrow()
    column = pa.compute.utf8_trim_whitespace(column)
    return column.cast(pa.bool_()) if kind == "flag" else column


def _check_names(path: Path, place: object, names: Sequence[str], required: Sequence[str]) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1 and name]
    if repeated:
        raise UserError(f"{place}: several columns are named {listed(repeated)}: rename them")
    for number, name in enumerate(names, start=1):
        if not name or re.fullmatch(r"__index_level_\d+__", name):
            raise UserError(
                f"{place}, column {number} ('{name}'): the column has no name: name it or, if it "
                "is a data frame's index, write the file with index=False"
            )
    missing = [name for name in required if name not in names]
    if missing:
        hint = ", separated by commas" if path.suffix == ".csv" else ""
        raise UserError(
            f"{place}: no column {listed(missing)}. Columns found: {listed(names)}; "
            f"needed: {listed(required)}{hint}"
        )


class Record(NamedTuple):
    """A row of a CSV file with its first and last line. Invalid bytes are kept as escapes."""

    line: int
    last_line: int
    cells: list[str]


def _records(path: Path) -> Iterator[Record]:
    """Yield the rows of a CSV file that are not blank, the header first."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file)
        line = 1
        try:
            for cells in reader:
                if cells:
                    yield Record(line, reader.line_num, cells)
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}, line {line}: cannot be read as CSV: {error}") from error


def _names(path: Path) -> list[str]:
    header = next(_records(path))
    for number, cell in enumerate(header.cells, start=1):
        if not _is_utf8(cell):
            raise UserError(f"{path}, line {header.line}, column {number}: {NOT_UTF8}")
    return [cell.strip() for cell in header.cells]


def _first_fault(path: Path, names: Sequence[str], kinds: dict[str, str]) -> UserError | None:
    """Read a CSV file row by row and return the first fault, which pyarrow does not locate."""
    for record in islice(_records(path), 1, None):
        place = f"{path}, line {record.line}"
        if len(record.cells) != len(names):
            return UserError(
                f"{place}: {count(len(record.cells), 'cell')}, but the header names {len(names)} "
                f"columns ({listed(names)}): complete the row, or quote cells that hold a comma"
            )
        for name, cell in zip(names, record.cells, strict=True):
            if fault := _cell_fault(cell, kinds[name]):
                return UserError(f"{place}, column '{name}': {fault}")
    return None


def _cell_fault(cell: str, kind: str) -> str | None:
    if not _is_utf8(cell):
        return NOT_UTF8
    if kind in ("text", "ignored"):
        return None
    if kind == "number":
        return MIXED if _is_flag(cell) else number_fault(cell)
    return None if _is_flag(cell) or cell.strip() in ("0", "1") else number_fault(cell) or MIXED


def _is_flag(cell: str) -> bool:
    return cell.strip().lower() in ("true", "false")


def _is_utf8(cell: str) -> bool:
    return cell.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in cell)
