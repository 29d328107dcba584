"""Reading tables from CSV and parquet by pyarrow, with messages that locate faults."""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyphily.errors import Faults, FileFaults, UserError, missing_package
from polyphily.graphs.files.client import count, listed
from polyphily.graphs.files.schema import TableSchema
from polyphily.graphs.graph import BoolArray, IntArray
from polyphily.graphs.limits import DATA, Unpacking

CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SUFFIXES = (*CSV_SUFFIXES, ".parquet")
MISSING = ("", "na", "n/a", "nan", "null", "none")  # in lower case
TRUE, FALSE = ("true", "yes"), ("false", "no")  # in lower case
TEXT = "string"  # the type of pyarrow
WIDE = 1000  # columns of a CSV file from which all are read as numbers, or all as text
NOT_UTF8 = "not UTF-8 text: save the file as UTF-8"
LOCATED = FileFaults.SHOWN  # faults of a table that are located
LEADING_ZERO = re.compile(rb'[,;|\t\r\n] *"?0[0-9]')
UNPACKING = (OSError, EOFError, zlib.error)  # errors of a damaged gzip file


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


class Fault(NamedTuple):
    """A fault in a cell: its row and column, and a message or a function of the cell's text."""

    row: int
    column: str
    what: str | Callable[[str], str]


@dataclass
class Table:
    """A table as pyarrow chunked arrays, and the faults found in it so far.

    Attributes:
        path: the file.
        names: all columns of the file.
        columns: the columns that were read, by name.
        delimiter: what separates cells; empty for a parquet file.
        unpacked_limit: the number of bytes that a compressed file may unpack to.
        ragged: the number of rows that have too few or too many cells. They are left out.
        general: faults that no row shows.
        faults: the first faulty cells of each column.
        num_faults: the number of faulty cells.
        undecodable: rows with text that is not UTF-8, by column. They have no other fault.
        codes: a value with a leading zero, such as 007, by column that was read as whole numbers.
    """

    path: Path
    names: list[str]
    columns: dict[str, Any]
    delimiter: str = ""
    unpacked_limit: int = 0
    ragged: int = 0
    general: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    undecodable: dict[str, IntArray] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)

    @property
    def is_csv(self) -> bool:
        return bool(self.delimiter)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    @property
    def unused(self) -> list[str]:
        """Columns of the file that were not read."""
        return [name for name in self.names if name not in self.columns]

    def add_general(self, what: str) -> None:
        """Record a fault that no row shows."""
        self.general.append(f"{self.path}, {what}")

    def add_fault(self, row: int, column: str, what: str | Callable[[str], str]) -> None:
        """Record a faulty cell."""
        self.faults.append(Fault(row, column, what))
        self.num_faults += 1

    def add_faults(
        self, faulty: BoolArray | IntArray, column: str, what: str | Callable[[str], str]
    ) -> None:
        """Record the cells of a column that have the same fault.

        Args:
            faulty: a mask over the rows, or their positions.
            column: the name of the column.
            what: the message, or a function that makes it from the text of the cell.
        """
        rows = np.flatnonzero(faulty) if faulty.dtype == np.bool_ else faulty
        if column in self.undecodable:
            rows = np.setdiff1d(rows, self.undecodable[column])
        self.faults += [Fault(row, column, what) for row in rows[:LOCATED].tolist()]
        self.num_faults += len(rows)

    def error(self) -> FileFaults | None:
        """Return an error with all faults, each with its line and column; None without faults."""
        total = self.num_faults + self.ragged + len(self.general)
        if not total:
            return None
        position = {name: i for i, name in enumerate(self.names)}
        wanted = sorted(self.faults, key=lambda fault: (fault.row, position[fault.column]))
        wanted = wanted[:LOCATED]
        if not self.is_csv:
            messages = [self._message(fault, f"row {fault.row + 1}", None) for fault in wanted]
        else:
            messages = [message for _, message in sorted(self._located(wanted), key=_line)]
        shown = tuple([*self.general, *messages][:LOCATED])
        return FileFaults([Faults(str(self.path), shown, total)])

    def place(self, row: int) -> str:
        """Return where a user finds a row: its line in a CSV file, or its number."""
        if not self.is_csv:
            return f"row {row + 1}"
        return f"line {self._record(row).line}"

    def value(self, row: int, column: str) -> str:
        """Return a cell as it is written in the file."""
        if self.is_csv:
            return self._record(row).cells[self.names.index(column)]
        value = self.columns[column][row].as_py()
        return "" if value is None else str(value)

    def _located(self, wanted: Sequence[Fault]) -> Iterator[tuple[int, str]]:
        """Yield line and message of the faulty cells and of the first rows of a wrong length."""
        of_row: dict[int, list[Fault]] = {}
        for fault in wanted:
            of_row.setdefault(fault.row, []).append(fault)
        row, ragged = 0, min(self.ragged, LOCATED)
        for record in self._data_records():
            if len(record.cells) != len(self.names):
                if ragged:
                    yield record.line, self._ragged(record)
                    ragged -= 1
            else:
                for fault in of_row.pop(row, ()):
                    cell = record.cells[self.names.index(fault.column)]
                    yield record.line, self._message(fault, f"line {record.line}", cell)
                row += 1
            if not of_row and not ragged:
                return

    def _message(self, fault: Fault, place: str, cell: str | None) -> str:
        what = fault.what
        if callable(what):
            what = what(self.value(fault.row, fault.column) if cell is None else cell)
        return f"{self.path}, {place}, column '{fault.column}': {what}"

    def _ragged(self, record: Record) -> str:
        return (
            f"{self.path}, line {record.line}: {count(len(record.cells), 'cell')}, but the header "
            f"names {len(self.names)} columns ({listed(self.names)}): complete the row, or quote "
            f"cells that hold a {_spoken(self.delimiter)}"
        )

    def fitting_rows(self) -> bytes:
        """Return the CSV file without header and rows of a wrong length, and count the latter."""
        text, self.ragged = io.StringIO(newline=""), 0
        writer = csv.writer(text, delimiter=self.delimiter)
        for record in self._data_records():
            if len(record.cells) == len(self.names):
                writer.writerow(record.cells)
            else:
                self.ragged += 1
        return text.getvalue().encode(errors="surrogateescape")

    def _record(self, row: int) -> Record:
        fitting = (r for r in self._data_records() if len(r.cells) == len(self.names))
        return next(islice(fitting, row, None))

    def _data_records(self) -> Iterator[Record]:
        return islice(_records(self.path, self.delimiter, self.unpacked_limit), 1, None)


def _line(located: tuple[int, str]) -> int:
    return located[0]


def _spoken(delimiter: str) -> str:
    return {",": "comma", ";": "semicolon", "|": "'|'"}.get(delimiter, "tab")


def is_csv(path: Path) -> bool:
    """Return whether a file is a CSV file by its name."""
    return path.name.endswith(CSV_SUFFIXES)


def read_table(
    path: Path,
    schema: TableSchema,
    *,
    required: Sequence[str],
    text: Sequence[str],
    others: Callable[[Sequence[str]], Iterable[str]],
) -> Table:
    """Read a CSV or a parquet file.

    Columns that are not read as text have the type of a parquet file; in a CSV file they are
    numbers, booleans or dates if all cells are, otherwise text.

    Args:
        path: the file.
        schema: delimiter, decimal point and texts for missing values.
        required: columns that must exist.
        text: columns that are read as text, whatever their type, if they exist.
        others: returns which of the file's columns are read as well.

    Raises:
        UserError: if the file cannot be read as a table, or lacks a column.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    DATA.check_file(path)
    if is_csv(path):
        return _read_csv(path, schema, required, text, others)
    return _read_parquet(path, required, text, others)


def _read_parquet(
    path: Path,
    required: Sequence[str],
    text: Sequence[str],
    others: Callable[[Sequence[str]], Iterable[str]],
) -> Table:
    pa = arrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_names(str(path), names, required)
            texts = [name for name in names if name in text]
            table = _bounded(path, file, list(dict.fromkeys([*texts, *others(names)])))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged, or not a parquet file: {error}") from error
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name in texts:
        columns[name] = _as_text(path, name, columns[name])
    return Table(path, names, columns)


def _bounded(path: Path, file: Any, columns: list[str]) -> Any:
    """Read columns of a parquet file, unless they are too large.

    The metadata give the number of values, and the size of a column with every repeated text stored
    once. How long the texts are together is found without writing them out.
    """
    found = file.metadata
    groups = [found.row_group(i) for i in range(found.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    stored = sum(int(chunk.total_uncompressed_size) for chunk in chunks)
    numbers = 8 * sum(int(chunk.num_values) for chunk in chunks)
    DATA.check(path, max(stored, numbers), "unpacks to")
    if found.num_rows * stored > DATA.bytes():  # otherwise every row could hold all that is stored
        DATA.check(path, _length_of_texts(path, file.schema_arrow, columns), "unpacks to")
    return file.read(columns=columns)


def _length_of_texts(path: Path, schema: Any, columns: list[str]) -> int:
    """Return the number of bytes of all texts in columns of a parquet file."""
    pa = arrow()
    texts = [name for name in columns if _is_text(schema.field(name).type)]
    total = 0
    with pa.parquet.ParquetFile(path, read_dictionary=texts) as file:
        for column in file.read(columns=texts).columns:
            for chunk in column.chunks:
                lengths = pa.compute.binary_length(chunk.dictionary)
                total += pa.compute.sum(lengths.take(chunk.indices)).as_py() or 0
    return total


def _is_text(kind: Any) -> bool:
    types = arrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


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


def _read_csv(
    path: Path,
    schema: TableSchema,
    required: Sequence[str],
    text: Sequence[str],
    others: Callable[[Sequence[str]], Iterable[str]],
) -> Table:
    pa = arrow()
    delimiter = schema.delimiter or _sniffed(path, schema)
    header = next(_records(path, delimiter, schema.unpacked_limit), None)
    if header is None:
        raise UserError(f"{path}: the file is empty")
    names = _names(path, header)
    _check_names(f"{path}, line {header.line}", names, required, delimiter)
    texts = [name for name in names if name in text]
    typed = [name for name in others(names) if name not in texts]
    texts += [name for name in typed if schema.kind(name)]
    types = dict.fromkeys(texts, TEXT)
    table = Table(path, names, {}, delimiter, schema.unpacked_limit)
    wanted = [*texts, *(name for name in typed if name not in types)]
    try:
        found = _parsed(table, schema, header.last_line, wanted, types)
        clocks = [entry.name for entry in found.schema if pa.types.is_time(entry.type)]
        if clocks:  # times are kept as they are written
            again = _parsed(table, schema, header.last_line, clocks, dict.fromkeys(clocks, TEXT))
        whole = [entry.name for entry in found.schema if pa.types.is_integer(entry.type)]
        if whole and _has_leading_zeros(table):
            written = _parsed(table, schema, header.last_line, whole, dict.fromkeys(whole, TEXT))
            table.codes = _first_codes(written)
    except (pa.ArrowException, *UNPACKING) as error:
        raise UserError(f"{path}: cannot be read as CSV: {error}") from error
    for name, column in zip(found.column_names, found.columns, strict=True):
        written = again[name] if name in clocks else column
        table.columns[name] = _checked_text(table, name, written)
    for name in texts:
        table.columns[name] = pa.compute.utf8_trim_whitespace(table.columns[name])
    return table


def _parsed(
    table: Table, schema: TableSchema, skipped: int, wanted: Sequence[str], types: dict[str, str]
) -> Any:
    """Return columns of a CSV file as a pyarrow table, without rows of a wrong length.

    Args:
        table: the file and its columns.
        schema: how cells are written.
        skipped: the lines of the header.
        wanted: the columns to return.
        types: the types of some of them. The types of others are found from all their cells.
    """
    pa = arrow()
    if len(wanted) > WIDE and len(types) < len(wanted):  # finding the types would take minutes
        try:
            return _parsed(table, schema, skipped, wanted, dict.fromkeys(wanted, "double") | types)
        except pa.ArrowInvalid:
            types = dict.fromkeys(wanted, TEXT)

    def read(stream: Any, skipped: int) -> Any:
        return pa.csv.read_csv(
            stream,
            pa.csv.ReadOptions(
                column_names=table.names,
                skip_rows=skipped,
                block_size=max(1 << 22, 256 * len(table.names)),
            ),
            pa.csv.ParseOptions(delimiter=table.delimiter, newlines_in_values=True),
            pa.csv.ConvertOptions(
                column_types=types,
                include_columns=wanted,
                null_values=["NaN", *_cases(MISSING), *schema.missing],
                true_values=_cases(TRUE),
                false_values=_cases(FALSE),
                decimal_point=schema.decimal,
                check_utf8=False,
            ),
        )

    try:
        with _opened(table.path, schema.unpacked_limit) as stream:
            return read(stream, skipped)
    except pa.ArrowInvalid:
        rows = table.fitting_rows()
        if not table.ragged:
            raise
        if not rows:
            return pa.table({name: pa.array([], pa.string()) for name in wanted})
        return read(pa.BufferReader(rows), 0)


def _has_leading_zeros(table: Table) -> bool:
    """Return whether a cell of a file may begin like 007."""
    with _opened(table.path, table.unpacked_limit) as stream:
        return any(LEADING_ZERO.search(piece) for piece in iter(lambda: stream.read(1 << 22), b""))


def _first_codes(written: Any) -> dict[str, str]:
    """Return the first value with a leading zero of each column that has one."""
    pc = arrow().compute
    found = {}
    for name, column in zip(written.column_names, written.columns, strict=True):
        coded = pc.filter(column, pc.match_substring_regex(column, "^ *0[0-9]"))
        if len(coded):
            found[name] = coded[0].as_py().strip()
    return found


def _checked_text(table: Table, name: str, column: Any) -> Any:
    """Return a column with valid text. Other bytes are faults."""
    pa = arrow()
    if not pa.types.is_string(column.type):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        cells = column.cast(pa.binary()).to_pylist()
        faulty = np.array([not _is_utf8(cell.decode(errors="surrogateescape")) for cell in cells])
        table.add_faults(faulty, name, NOT_UTF8)
        table.undecodable[name] = np.flatnonzero(faulty)
        column = pa.chunked_array([[cell.decode(errors="replace") for cell in cells]], pa.string())
    return column


def _cases(words: Iterable[str]) -> list[str]:
    """Return words as they are usually written. Others are found among texts (`columns.py`).

    >>> _cases(["no"])
    ['NO', 'No', 'no']
    """
    return sorted({form for word in words for form in (word, word.upper(), word.capitalize())})


def _opened(path: Path, limit: int) -> Any:
    """Open a CSV file as bytes, unpacked if its name ends in .gz."""
    if path.suffix == ".gz":
        advice = "set unpacked_gb in schema.toml"
        return io.BufferedReader(Unpacking(path, limit, advice), 1 << 20)
    return path.open("rb")


def _sniffed(path: Path, schema: TableSchema) -> str:
    """Return the delimiter that gives the header the most columns, a comma if none does."""
    if path.name.removesuffix(".gz").endswith(".tsv"):
        return "\t"

    def columns(delimiter: str) -> int:
        try:
            header = next(_records(path, delimiter, schema.unpacked_limit), None)
        except UserError:  # such as a header that is one cell of many letters
            return 0
        return len(header.cells) if header else 0

    return max((",", ";", "\t", "|"), key=columns)


def _check_names(
    place: str, names: Sequence[str], required: Sequence[str], delimiter: str = ""
) -> None:
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
        hint = f", separated by a {_spoken(delimiter)}" if delimiter else ""
        raise UserError(
            f"{place}: no column {listed(missing)}. Columns found: {listed(names)}{hint}; needed: "
            f"{listed(required)}. Other names are mapped in schema.toml, in this folder or above"
            f"{_mapping(missing)}"
        )


def _mapping(names: Sequence[str]) -> str:
    """Return the lines of schema.toml that map usual names of columns.

    >>> _mapping(["id", "label"])
    ': nodes.id = "…", nodes.label = "…"'
    """
    tables = {"id": "nodes", "label": "nodes", "source": "edges", "target": "edges"}
    lines = [f'{tables[name]}.{name} = "…"' for name in names if name in tables]
    return ": " * bool(lines) + ", ".join(lines)


class Record(NamedTuple):
    """A row of a CSV file with its first and last line. Invalid bytes are kept as escapes."""

    line: int
    last_line: int
    cells: list[str]


def _records(path: Path, delimiter: str, limit: int) -> Iterator[Record]:
    """Yield the rows of a CSV file that are not blank, the header first."""
    with (
        _opened(path, limit) as stream,
        io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        reader = csv.reader(file, delimiter=delimiter)
        line = 1
        try:
            for cells in reader:
                if cells:
                    yield Record(line, reader.line_num, cells)
                line = reader.line_num + 1
        except (csv.Error, *UNPACKING) as error:
            raise UserError(f"{path}, line {line}: cannot be read as CSV: {error}") from error


def _names(path: Path, header: Record) -> list[str]:
    for number, cell in enumerate(header.cells, start=1):
        if not _is_utf8(cell):
            raise UserError(f"{path}, line {header.line}, column {number}: {NOT_UTF8}")
    return [cell.strip() for cell in header.cells]


def _is_utf8(cell: str) -> bool:
    return cell.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in cell)
