"""The columns of tables: what clients must agree on before values are encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError, unknown
from polyphily.graphs.checked import TEXT, Reader
from polyphily.graphs.graph import Features

if TYPE_CHECKING:
    from polyphily.graphs.files.client import RawColumn

KINDS = ("number", "boolean", "date", "category")
EMPTY = "empty"  # stands for the kind of a column without any value
WORDS = "words"  # stands for the kind of a category whose values are words such as yes and no
FITS = {  # the kinds that values of a kind can be converted to
    **{kind: (kind,) for kind in KINDS},
    "boolean": ("boolean", "number"),
    WORDS: ("category", "boolean"),
    EMPTY: KINDS,
}
ORDER = ("date", "category", "boolean", "number")  # in which kinds are tried
MAX_COLUMNS = 1 << 17  # what a schema or a recipe from the network may have


@dataclass(frozen=True)
class Column:
    """A column of a table without its values: all that clients must agree on.

    Attributes:
        name: the name of the column.
        kind: one of `KINDS`, or `EMPTY` or `WORDS`, which stand for several of them.
        categories: the values that `schema.toml` declares for a category; empty if it declares
            none.
        scale: the mean and the standard deviation that `schema.toml` declares.
    """

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the column as JSON."""
        declared: dict[str, Any] = {"categories": list(self.categories)} if self.categories else {}
        if self.scale is not None:
            declared["scale"] = list(self.scale)
        return {"name": self.name, "kind": self.kind, **declared}

    @classmethod
    def from_json(cls, data: Any, where: str = "a column") -> Column:
        """Read a column and check it.

        Raises:
            UserError: naming the place and what is wrong.
        """
        found = Reader(data, where)
        kind = found.text("kind", TEXT)
        if kind not in FITS:
            raise unknown(f"kind of column in {where}", kind[:TEXT], FITS)
        scale = found.floats("scale", 2) if found.has("scale") else None
        if scale is not None and not scale[1] > 0:
            raise UserError(f"{where}: a declared standard deviation is not above 0")
        return cls(
            found.text("name"),
            kind,
            found.texts("categories", MAX_COLUMNS) if found.has("categories") else (),
            None if scale is None else (scale[0], scale[1]),
        )


def columns_of(table: Sequence[RawColumn]) -> tuple[Column, ...]:
    """Return the columns of a table without their values."""
    return tuple(
        Column(
            column.name,
            _open_kind(column),
            column.categories,
            None if column.scale is None else (column.scale[0], column.scale[1]),
        )
        for column in table
    )


def _open_kind(column: RawColumn) -> str:
    """Return the kind of a column, or what stands for several kinds that it fits."""
    from polyphily.graphs.files.columns import as_kind

    if len(column.values) and column.missing.all():
        return EMPTY
    if column.kind == "category" and as_kind(column, "boolean") is not None:
        return WORDS
    return column.kind


def agree_columns(
    clients: Mapping[str, Sequence[Column]], what: str = "clients"
) -> tuple[Column, ...]:
    """Return the columns that all clients share, in the order of the first client.

    A column without values fits every kind, booleans fit numbers, and categories that are all
    words such as yes and no fit booleans.

    Args:
        clients: the columns by client.
        what: how clients are called in messages.

    Raises:
        UserError: if names, kinds or declarations differ, with the clients and the columns.
    """
    tables = {name: {c.name: c for c in columns} for name, columns in clients.items()}
    first = next(iter(tables))
    for other in tables:
        _check_names(what, (first, list(tables[first])), (other, list(tables[other])))
    return tuple(
        _agree_column({client: columns[name] for client, columns in tables.items()}, what)
        for name in tables[first]
    )


def _check_names(what: str, one: tuple[str, list[str]], two: tuple[str, list[str]]) -> None:
    from polyphily.graphs.files.client import listed

    (first, ours), (second, theirs) = one, two
    pairs = ((first, ours, set(theirs)), (second, theirs, set(ours)))
    lone = [(owner, [n for n in names if n not in other]) for owner, names, other in pairs]
    only = [f"{listed(names)} only at '{owner}'" for owner, names in lone if names]
    if only:
        raise UserError(
            f"{what} '{first}' and '{second}' have different feature columns: {'; '.join(only)}. "
            f"Give all {what} the same columns"
        )


def _agree_column(clients: Mapping[str, Column], what: str) -> Column:
    """Return what all clients agree on for one column."""
    name = next(iter(clients.values())).name
    present = {_natural(column.kind) for column in clients.values()} - {EMPTY} or {"number"}
    fitting = (
        kind
        for kind in sorted(present, key=ORDER.index)
        if all(kind in FITS[column.kind] for column in clients.values())
    )
    kind = next(fitting, None)
    if kind is None:
        owners = {_natural(c.kind): client for client, c in clients.items() if c.kind != EMPTY}
        found = " and ".join(f"{kind} at '{client}'" for kind, client in owners.items())
        raise UserError(
            f"{what} differ in column '{name}': its kind is {found}. Declare it in schema.toml, "
            f'for example [nodes.kinds] {name} = "category"'
        )
    categories = {column.categories for column in clients.values()} - {()}
    scales = {column.scale for column in clients.values()} - {None}
    for noun, several in (
        ("values ([nodes.categories])", len(categories) > 1),
        ("scales ([nodes.scale])", len(scales) > 1),
    ):
        if several:
            raise UserError(
                f"{what} declare different {noun} of column '{name}' in schema.toml: declare the "
                "same"
            )
    return Column(name, kind, next(iter(categories), ()), next(iter(scales), None))


def _natural(kind: str) -> str:
    return "category" if kind == WORDS else kind


def convert(column: RawColumn, kind: str) -> RawColumn:
    """Return a column as one of another kind that it fits.

    Numbers that are all 0 or 1 fit booleans, too.

    Raises:
        UserError: if it does not fit.
    """
    from polyphily.graphs.files.columns import as_kind

    found = as_kind(column, kind)
    if found is not None:
        return found
    reason = f"is a column of the kind {column.kind}"
    if (column.kind, kind) == ("number", "boolean"):
        odd = ~(np.isin(column.values, (0.0, 1.0)) | column.missing)
        if not odd.any():
            return replace(column, kind=kind)
        reason = "has other values than 0 and 1"
    raise UserError(
        f"column '{column.name}' {reason}, but the kind {kind} is expected: correct the values, or "
        f'declare the kind in schema.toml: [nodes.kinds] {column.name} = "{kind}"'
    )


def conform(table: Sequence[RawColumn], columns: Sequence[Column]) -> tuple[RawColumn, ...]:
    """Return a table with agreed columns in their order and kinds. Other columns are left out.

    Raises:
        UserError: if columns are missing or have another kind, with their names.
    """
    return conform_kinds(table, [(column.name, column.kind) for column in columns])


def conform_kinds(
    table: Sequence[RawColumn], wanted: Sequence[tuple[str, str]]
) -> tuple[RawColumn, ...]:
    from polyphily.graphs.files.client import listed

    own = {column.name: column for column in table}
    lacking = [name for name, _ in wanted if name not in own]
    if lacking:
        raise UserError(
            f"the table lacks {listed(lacking)}: it needs the columns that were trained with "
            f"(it has {listed(own, 50) or 'none'})"
        )
    return tuple(convert(own[name], kind) for name, kind in wanted)


def named_columns(features: Features, names: Iterable[str]) -> tuple[RawColumn, ...]:
    """Return an array of features as columns of numbers with names."""
    from polyphily.graphs.files.client import RawColumn

    x: Any = features.toarray() if sp.issparse(features) else features  # type: ignore[union-attr]
    return tuple(
        RawColumn(name, "number", x[:, i].astype(np.float64)) for i, name in enumerate(names)
    )


def comparable(table: Sequence[RawColumn]) -> npt.NDArray[np.uint64]:
    """Return numbers `[n, columns]` that are equal where the values of a table are equal.

    The columns are in the order of their names, so that tables of several clients can be compared.
    """
    found = np.zeros((len(table[0].values) if table else 0, len(table)), dtype=np.uint64)
    for i, column in enumerate(sorted(table, key=lambda column: column.name)):
        if column.kind == "category":
            codes = [digest_of(column.name, text) for text in column.texts]
            found[:, i] = np.array([*codes, 0], dtype=np.uint64)[column.values]
        else:
            values = np.where(column.missing, np.nan, column.values + 0.0)  # -0 becomes 0
            found[:, i] = values.view(np.uint64)
    return found


def digest_of(name: str, value: str) -> int:
    """Return a hash of a column's name and a value, the same on every machine."""
    text = f"{len(name)} {name} {value}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=b"polyphily category").digest()
    return int.from_bytes(digest, "big")
