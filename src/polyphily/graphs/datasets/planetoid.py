"""Reader of Cora, CiteSeer and PubMed from the Planetoid files, which are Python 2 pickles."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp

from polyphily.graphs.datasets.assembly import (
    build,
    collect,
    compressed_rows,
    flags_at,
    geom_gcn_masks,
)
from polyphily.graphs.datasets.info import Request
from polyphily.graphs.graph import Collection, Masks

VALIDATION_NODES = 500

# All names that the pickles may use. A matrix is rebuilt from its arrays after a check.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("__builtin__", "list"): list,
    ("collections", "defaultdict"): collections.defaultdict,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("scipy.sparse.csr", "csr_matrix"): SimpleNamespace,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler of arrays, lists and dictionaries that refuses all that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module}.{name} from a data file")
        return _ALLOWED[module, name]


def load_pickle(path: Path) -> Any:
    """Read a Planetoid file: an array, a dictionary of lists, or a sparse matrix."""
    with path.open("rb") as file:
        try:
            loaded = _Unpickler(file, encoding="latin1").load()
        except (AttributeError, TypeError, MemoryError) as error:  # from a damaged file
            raise pickle.UnpicklingError(str(error)) from error
    if isinstance(loaded, SimpleNamespace):
        state = vars(loaded)
        return compressed_rows({**state, "shape": state["_shape"]})
    return loaded


def read_planetoid(request: Request) -> Collection:
    """Read a graph with the public split, or with Geom-GCN's ten if their files are chosen."""
    _, tx, allx, y, ty, ally, graph = (load_pickle(path) for path in request.paths[:7])
    test = np.loadtxt(request.paths[7], dtype=np.int64)
    nodes = int(test.max()) + 1

    # Row r of tx and ty belongs to node test[r]. CiteSeer's numbering has gaps, which are nodes
    # without features and label. They get the row of zeros at the end, and so class 0.
    row = np.full(nodes, allx.shape[0] + tx.shape[0])
    row[: allx.shape[0]] = np.arange(allx.shape[0])
    row[test] = allx.shape[0] + np.arange(len(test))
    features = sp.vstack([allx, tx, sp.csr_array((1, tx.shape[1]))], format="csr")[row]
    labels = np.concatenate([ally, ty, np.zeros((1, ty.shape[1]))]).argmax(axis=1)[row]

    source = np.repeat(list(graph), [len(targets) for targets in graph.values()])
    target = np.concatenate([np.asarray(targets) for targets in graph.values()])
    public = Masks(
        flags_at(np.arange(len(y)), nodes),
        flags_at(len(y) + np.arange(VALIDATION_NODES), nodes),
        flags_at(test, nodes),
    )
    masks = geom_gcn_masks(request.paths[8:]) or (public,)
    built = build(request, features, np.stack([source, target]), labels, masks)
    return collect(request, [built], natural=False)
