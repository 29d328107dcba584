"""Readers of Facebook100 and genius: MATLAB files as the LINKX benchmark ships them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.io
import scipy.sparse as sp

from polyphily.graphs.datasets.assembly import build, collect, edges_of
from polyphily.graphs.datasets.info import Request
from polyphily.graphs.graph import UNLABELLED, Collection, Graph, IntArray
from polyphily.graphs.limits import DATA

GENDER = 1  # column of the table of users; 0 is missing
OTHERS = (0, 2, 3, 4, 5, 6)  # status, major, second major, dorm, year, high school


def read_facebook(request: Request) -> Collection:
    """Read one university, or several as clients, with gender as label.

    A user is described by a one in every other column, for the value that it has there; "missing"
    is a value, too. Universities that are read together share one vocabulary: the values that any
    of them has. A value stands for the same column everywhere, but the codes of dorms are each
    university's own.
    """
    tables = {path.parents[1].name: _read_mat(path) for path in request.paths}
    users = [np.asarray(table["local_info"], dtype=np.int64) for table in tables.values()]
    values = [np.unique(np.concatenate([own[:, column] for own in users])) for column in OTHERS]
    graphs = [
        _university(request, name, table, own, values)
        for (name, table), own in zip(tables.items(), users, strict=True)
    ]
    return collect(request, graphs, natural=len(graphs) > 1)


def _university(
    request: Request, name: str, table: dict[str, Any], users: IntArray, values: list[IntArray]
) -> Graph:
    features = sp.hstack(
        [_one_hot(users[:, column], known) for column, known in zip(OTHERS, values, strict=True)],
        format="csr",
    )
    labels = np.where(users[:, GENDER] > 0, users[:, GENDER] - 1, UNLABELLED)
    return build(request, features, edges_of(sp.csr_array(table["A"])), labels, name=name)


def _one_hot(column: IntArray, values: IntArray) -> sp.csr_array:
    """Return a matrix with a one in every row, at the position of its value."""
    ones = np.ones(len(column), dtype=np.float32)
    place = np.searchsorted(values, column)
    return sp.csr_array((ones, (np.arange(len(column)), place)), shape=(len(column), len(values)))


def read_genius(request: Request) -> Collection:
    """Read genius: users of a site, labelled by whether their account was marked."""
    (path,) = request.paths
    table = _read_mat(path)
    features: npt.NDArray[np.float32] = np.asarray(table["node_feat"], dtype=np.float32)
    labels = np.asarray(table["label"]).ravel().astype(np.int64)
    graph = build(request, features, np.asarray(table["edge_index"], dtype=np.int64), labels)
    return collect(request, [graph], natural=False)


def _read_mat(path: Path) -> dict[str, Any]:
    """Read the arrays of a MATLAB file; objects and functions in it are refused."""
    for name, shape, kind in scipy.io.whosmat(path):
        if kind != "sparse":
            DATA.check(path, 8 * math.prod(shape), f"its array '{name}' declares")
    found: dict[str, Any] = scipy.io.loadmat(path)
    kept = {name: value for name, value in found.items() if not name.startswith("__")}
    for name, value in kept.items():
        if not sp.issparse(value) and value.dtype.kind not in "biufU":
            raise ValueError(f"'{name}' is no plain array")
    return kept
