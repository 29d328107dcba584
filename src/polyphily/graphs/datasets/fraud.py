"""Readers of graphs of people and of transactions, from the public tables that FedHERO uses.

Both are natural federations. FedHERO (appendix A) says that people are linked by similar spending
and payment, that transactions are linked if they occur close to one another, and that transactions
of different products form different subgraphs. All other choices are described below. Features are
standardised over the whole table (mean 0, standard deviation 1). Missing values are replaced by the
mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets.assembly import build, collect, read_table
from polyphily.graphs.datasets.info import Request
from polyphily.graphs.graph import Collection, Graph, IntArray

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]

NEIGHBOURS = 20
REACH = 10
JITTER = 1e-5  # standard deviation of the noise on features of standard deviation 1
CHUNK_ROWS = 50_000
LINKS = ("time", "card")
# 371 columns of the full table: amount, distances, counts, time deltas, Vesta's features.
TRANSACTION_FEATURE = re.compile(r"TransactionAmt|dist\d+|[CDV]\d+")


@dataclass(frozen=True)
class CreditTable:
    """The columns of one published form of the credit data.

    Attributes:
        label: the column to predict.
        default: the value of that column for a person who did not pay.
        education: the column that defines the clients.
        dropped: columns that are no features.
        behaviour: prefixes of the columns on spending and payment.
    """

    label: str
    default: int
    education: str
    dropped: tuple[str, ...]
    behaviour: tuple[str, ...]


CREDIT_TABLES = (
    CreditTable(
        label="NoDefaultNextMonth",  # NIFTY's
        default=0,
        education="EducationLevel",
        dropped=("Single",),
        behaviour=("Max", "Months", "MostRecent", "Total", "History"),
    ),
    *(
        CreditTable(
            label=label,  # UCI's, in its two spellings
            default=1,
            education="EDUCATION",
            dropped=("ID",),
            behaviour=("PAY_", "BILL_AMT"),
        )
        for label in ("default payment next month", "default.payment.next.month")
    ),
)
KNOWN_EDUCATION = (1, 2, 3)  # UCI's codes 0, 4, 5 and 6 mean 'other' or unknown


def read_credit(request: Request) -> Collection:
    """Read people who pay or do not pay their next credit card bill, one client per education.

    FedHERO does not define its clients. Here a client holds the people of one level of education.
    The small levels without a meaning form one client, `education-0`. The edges are those of
    NIFTY's file `credit_edges.txt` if it lies beside the table. Otherwise, or with the option
    `neighbours`, they lead to the people of the same client who are nearest in spending and
    payment.
    """
    (path,) = request.paths
    table = read_table(path)
    form = next((form for form in CREDIT_TABLES if form.label in table.columns), None)
    if form is None:
        labels = ", ".join(f"'{form.label}'" for form in CREDIT_TABLES)
        raise UserError(f"{path}: no label column: one of {labels} is expected")
    _require(path, table, (form.education,))
    skipped = {form.label, *form.dropped}
    columns = [name for name in table if name not in skipped and not name.startswith("Unnamed")]
    labels = (table[form.label] == form.default).to_numpy().astype(np.int64)
    features = standardise(table[columns])
    education = table[form.education].to_numpy()
    client = np.where(np.isin(education, KNOWN_EDUCATION), education, 0).astype(np.int64)

    published = path.with_name("credit_edges.txt")
    if "neighbours" in request.options or not published.is_file():
        wanted = _positive(request, "neighbours", NEIGHBOURS)
        alike = [name.startswith(form.behaviour) for name in columns]
        edges = nearest(features[:, alike], client, wanted)
    else:
        edges = read_table(published, sep=r"\s+", header=None).to_numpy(np.int64).T
    ids = table["ID"].to_numpy() if "ID" in table else None
    whole = build(request, features, edges, labels, node_ids=ids)
    return _federate(request, whole, client, "education")


def read_ieee_fraud(request: Request) -> Collection:
    """Read transactions, genuine or fraudulent, one client per product code.

    The nodes are the transactions with an entry in the identity table. The features are their
    numeric columns. This agrees with the 144,233 nodes and 371 features in FedHERO's table. Within
    a product each transaction is linked to the `reach` next ones in time, or with `link=card` to
    the next ones that share card, address and device. FedHERO does not say how close in time linked
    transactions are; its 28 million edges correspond to `reach=195`.
    """
    link = request.options.get("link", LINKS[0])
    if link not in LINKS:
        raise unknown("value of link", link, LINKS)
    reach = _positive(request, "reach", REACH)
    transactions, identity = request.paths
    table, device_of = _transactions(transactions, identity)
    columns = [name for name in table if TRANSACTION_FEATURE.fullmatch(name)]
    codes, client = np.unique(table["ProductCD"].to_numpy(str), return_inverse=True)
    group = client if link == "time" else _card_numbers(table, device_of)
    edges = following(group, table["TransactionDT"].to_numpy(), reach)
    ids, labels = table["TransactionID"].to_numpy(), table["isFraud"].to_numpy(np.int64)
    features = standardise(table[columns])
    whole = build(request, features, edges, labels, node_ids=ids)
    return _federate(request, whole, client, "product", [code.lower() for code in codes])


def standardise(table: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Scale columns to mean 0 and standard deviation 1. Constant and missing values become 0."""
    values = np.array(table, dtype=np.float32)
    for column in values.T:
        known = np.isfinite(column)
        if known.any():
            column -= column[known].mean(dtype=np.float64)
            deviation = column[known].std(dtype=np.float64)
            column /= deviation if deviation > 0 else 1.0
        column[~known] = 0
    return values


def following(group: IntArray, moment: npt.NDArray[Any], reach: int) -> IntArray:
    """Link each element to the `reach` next ones of its group in the order of `moment`.

    >>> following(np.array([0, 1, 0, 0]), np.array([3, 1, 1, 2]), 1).tolist()
    [[2, 3], [3, 0]]
    """
    order = np.lexsort((moment, group))
    pairs = []
    for step in range(1, min(reach, len(order) - 1) + 1):
        ahead, behind = order[:-step], order[step:]
        same = group[ahead] == group[behind]
        pairs.append(np.stack([ahead[same], behind[same]]))
    return np.concatenate(pairs, axis=1) if pairs else np.empty((2, 0), dtype=np.int64)


def nearest(points: npt.NDArray[np.floating], group: IntArray, count: int) -> IntArray:
    """Link each point to the `count` nearest ones of its group.

    Many points are equal. A little noise keeps them from all having the same few neighbours.
    """
    from scipy.spatial import cKDTree

    points = points + np.random.default_rng(0).normal(0, JITTER, points.shape)
    pairs = []
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        near = min(count + 1, len(members))  # a point is its own nearest neighbour
        _, found = cKDTree(points[members]).query(points[members], k=range(1, near + 1))
        pairs.append(np.stack([np.repeat(members, near), members[found.ravel()]]))
    return np.concatenate(pairs, axis=1)


def _federate(
    request: Request, whole: Graph, client: IntArray, prefix: str, names: list[str] | None = None
) -> Collection:
    """Return a collection of one graph per client. Edges between clients are removed."""
    graphs = [
        whole.subgraph(
            np.flatnonzero(client == number),
            f"{prefix}-{names[number] if names else number}",
        )
        for number in np.unique(client)
    ]
    return collect(request, graphs, natural=True)


def _transactions(transactions: Path, identity: Path) -> tuple[pd.DataFrame, pd.Series]:
    """Read the transactions that have an identity, and the device of each by its id.

    The table of transactions has 590,540 rows and is read in chunks.
    """
    import pandas as pd

    devices = read_table(identity, usecols=lambda name: name in {"TransactionID", "DeviceInfo"})
    _require(identity, devices, ("TransactionID", "DeviceInfo"))
    device_of = devices.set_index("TransactionID")["DeviceInfo"]
    needed = ("TransactionID", "isFraud", "TransactionDT", "ProductCD", "card1", "addr1")
    header = read_table(transactions, nrows=0)
    _require(transactions, header, needed)
    features = [name for name in header if TRANSACTION_FEATURE.fullmatch(name)]
    pieces = read_table(
        transactions,
        usecols=[*needed, *features],
        dtype=dict.fromkeys(features, np.float32),
        chunksize=CHUNK_ROWS,
    )
    known = [piece[piece["TransactionID"].isin(device_of.index)] for piece in pieces]
    return pd.concat(known, ignore_index=True), device_of


def _card_numbers(table: pd.DataFrame, device_of: pd.Series) -> IntArray:
    """Number the groups of equal product, card, address and device. Missing values are equal."""
    keys = [table[name] for name in ("ProductCD", "card1", "addr1")]
    keys.append(table["TransactionID"].map(device_of))
    numbers: IntArray = table.groupby(keys, dropna=False, sort=False).ngroup().to_numpy(np.int64)
    return numbers


def _require(path: Path, table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    absent = [name for name in columns if name not in table.columns]
    if absent:
        raise UserError(f"{path}: the column {', '.join(absent)} is missing")


def _positive(request: Request, option: str, default: int) -> int:
    text = request.options.get(option, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{request.info.name}: {option} is a whole number from 1, not '{text}'")
    return int(text)
