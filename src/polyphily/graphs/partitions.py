"""Cutting one graph into clients, as the literature does, and the file that keeps a partition.

`partition` gives every client its node ids; the client's graph is the induced subgraph, so edges
between clients are lost. The same request and seed give the same partition: nothing depends on
threads or on the order in which a sort leaves equal items. Two libraries set the limits of that
promise: scikit-network decides near-ties in 32-bit floats, which a processor with fused
multiply-add may round differently, and METIS draws from the C library's `rand`. To carry a
partition to another machine, or to compare with other software, pass on the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
import os
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError, missing_package, unknown
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, Masks
from polyphily.graphs.random import derive, generator

OVERLAP = 5  # clients that share one METIS part, each with a half of its nodes


def partition(
    graph: Graph, name: str, clients: int | None, seed: int, **options: object
) -> list[IntArray]:
    """The nodes of every client, ascending; no client is empty.

    Every node goes to exactly one client, except under `metis-overlap`.

    Args:
        graph: the graph to cut.
        name: one of `PARTITIONS`, not `natural`.
        clients: how many; may be None for `louvain-min`, which finds the number itself.
        seed: any whole number from 0.
        options: the method's own, by name; numbers or their text.

    Raises:
        UserError: for a request that cannot be met.
    """
    if name == "natural":
        raise UserError(
            f"'{graph.name}' is one graph, but partition 'natural' is for data that come as one "
            "graph per client. Choose another partition, or give one graph per client."
        )
    if name not in _METHODS:
        raise unknown("partition", name, PARTITIONS)
    if not graph.num_nodes:
        raise UserError(f"'{graph.name}' has no nodes to share out among clients")
    method = _METHODS[name]
    if clients is not None or not method.counts_clients:
        _check_clients(graph, name, clients)
    parts = method.function(graph, clients, seed, **_settings(name, method, options))
    return [np.sort(part) for part in parts]


def _check_clients(graph: Graph, name: str, clients: int | None) -> None:
    if clients is None:
        raise UserError(f"partition '{name}' needs the number of clients, for example 10")
    if clients < 1:
        raise UserError(f"the number of clients must be 1 or more, got {clients}")
    if clients > graph.num_nodes:
        raise UserError(
            f"cannot cut '{graph.name}' into {clients} clients: it has {graph.num_nodes} nodes. "
            "Ask for at most one client per node."
        )


# Options ------------------------------------------------------------------------------------------


def real(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number from a number or its text, within [low, high]."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"option '{name}' must be a number, got {value!r}")
    if number < low:
        raise UserError(f"option '{name}' must be at least {low:g}, got {value}")
    if number > high:
        raise UserError(f"option '{name}' must be at most {high:g}, got {value}")
    return number


def whole(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> int:
    """A whole number from a number or its text, within [low, high]."""
    number = real(name, value, low, high)
    if number != int(number):
        raise UserError(f"option '{name}' must be a whole number, got {value}")
    return int(number)


@dataclass(frozen=True)
class _Option:
    default: float
    read: Callable[[str, object], float]


@dataclass(frozen=True)
class _Method:
    description: str
    function: Callable[..., Sequence[IntArray]]
    options: Mapping[str, _Option] = field(default_factory=dict)
    counts_clients: bool = False  # finds the number of clients itself


def _settings(name: str, method: _Method, given: Mapping[str, object]) -> dict[str, Any]:
    for key in given:
        if key not in method.options:
            known = ", ".join(sorted(method.options))
            takes = f"its options: {known}" if known else "it has none"
            raise UserError(f"partition '{name}' has no option '{key}' ({takes})")
    return {
        key: option.read(key, given.get(key, option.default))
        for key, option in method.options.items()
    }


# Helpers ------------------------------------------------------------------------------------------


def _groups(assignment: IntArray, count: int) -> list[IntArray]:
    """The positions that hold 0, 1, …, count - 1, each ascending."""
    order = np.argsort(assignment, kind="stable")
    sizes = np.bincount(assignment, minlength=count)
    return np.split(order, np.cumsum(sizes)[:-1])


def _split_largest(parts: Sequence[IntArray], count: int) -> list[IntArray]:
    """At least `count` non-empty parts: the largest is halved until there are as many.

    Parts come back in the order of their first nodes.
    """
    heap = [(-len(part), int(part[0]), part) for part in parts if len(part)]
    heapq.heapify(heap)
    while len(heap) < count:
        largest = heapq.heappop(heap)[2]
        for half in np.array_split(largest, 2):
            heapq.heappush(heap, (-len(half), int(half[0]), half))
    return [part for _, _, part in sorted(heap, key=lambda entry: entry[1])]


def _missing(package: str, algorithm: str) -> UserError:
    instead = "A partition file (--partition FILE) needs nothing more."
    return missing_package(package, "partition", f"partitioning by {algorithm}", instead)


def communities(graph: Graph, seed: int) -> list[IntArray]:
    """Louvain communities (Newman modularity, resolution 1), in the order of their first nodes.

    A graph without edges has one community per node.
    """
    try:
        from sknetwork.clustering import Louvain
    except ImportError:
        raise _missing("scikit-network", "Louvain") from None
    if not graph.num_edges:
        return np.split(np.arange(graph.num_nodes), graph.num_nodes)
    # Sorting by size inside the library is not stable, so that equal sizes could come in any order.
    louvain = Louvain(
        shuffle_nodes=True, sort_clusters=False, random_state=derive(seed, "louvain") % 2**32
    )
    labels = louvain.fit_predict(sp.csr_matrix(graph.adjacency(), dtype=np.float64))
    _, compact = np.unique(labels, return_inverse=True)
    groups = _groups(compact.astype(np.int64), int(compact.max()) + 1)
    return sorted(groups, key=lambda group: int(group[0]))


# Methods ------------------------------------------------------------------------------------------


def _louvain(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """FLGo's dealing (FedSPA, S2FGL): small communities first, each to the smallest client."""
    pieces = _split_largest(communities(graph, seed), clients)
    dealt: list[list[IntArray]] = [[] for _ in range(clients)]
    smallest = [(0, client) for client in range(clients)]
    for piece in sorted(pieces, key=len):  # stable: equal sizes stay in the order of first nodes
        size, client = smallest[0]
        dealt[client].append(piece)
        heapq.heapreplace(smallest, (size + len(piece), client))
    return [np.concatenate(pieces) for pieces in dealt]


def _louvain_capped(graph: Graph, clients: int, seed: int, *, delta: int) -> list[IntArray]:
    """OpenFGL's dealing (FedATH): communities chopped to g = floor(n/K) - delta, then dealt.

    Large pieces go first, to the client in turn if it stays below floor(n/K) + delta. The turn
    passes when a piece does not fit; a client that has floor(n/K) nodes drops out. Where no client
    has room the smallest takes the piece. A client that none reached gets half of the largest.
    """
    target = graph.num_nodes // clients
    cap = max(1, target - delta)
    pieces = [
        community[start : start + cap]
        for community in communities(graph, seed)
        for start in range(0, len(community), cap)
    ]
    dealt: list[list[IntArray]] = [[] for _ in range(clients)]
    sizes = [0] * clients
    turn = deque(range(clients))
    for piece in sorted(pieces, key=len, reverse=True):
        client = _with_room(turn, sizes, target + delta - len(piece))
        dealt[client].append(piece)
        sizes[client] += len(piece)
        if sizes[client] >= target and client in turn:
            turn.remove(client)
    return _split_largest([np.sort(np.concatenate(own)) for own in dealt if own], clients)


def _with_room(turn: deque[int], sizes: Sequence[int], below: int) -> int:
    """The next client in turn with fewer than `below` nodes, or the smallest of all."""
    for _ in range(len(turn)):
        if sizes[turn[0]] < below:
            return turn[0]
        turn.rotate(-1)
    return int(np.argmin(sizes))


def _louvain_min(graph: Graph, clients: int | None, seed: int, *, min_nodes: int) -> list[IntArray]:
    """FedHERO's clients: the communities of `min_nodes` or more, small ones merged at random."""
    found = communities(graph, seed)
    merged = [[group] for group in found if len(group) >= min_nodes]
    if not merged:
        raise UserError(
            f"no Louvain community of '{graph.name}' has {min_nodes} nodes: the largest has "
            f"{max(map(len, found))}. Lower min_nodes, or choose another partition."
        )
    if clients not in (None, len(merged)):
        raise UserError(
            f"partition 'louvain-min' of '{graph.name}' with seed {seed} has {len(merged)} "
            f"clients, not {clients}: ask for {len(merged)}, or leave the number out."
        )
    small = [group for group in found if len(group) < min_nodes]
    hosts = generator(seed, "louvain-min").integers(len(merged), size=len(small))
    for group, host in zip(small, hosts, strict=True):
        merged[host].append(group)
    return [np.concatenate(groups) for groups in merged]


def _metis(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Balanced parts with few edges between them (FED-PUB, FedGSP, FedHERO): METIS, k-way."""
    try:
        import pymetis
    except ImportError:
        raise _missing("pymetis", "METIS") from None
    adjacency = graph.adjacency()
    index = pymetis.zero_copy_dtype()
    found = pymetis.part_graph(
        clients,
        adjacency=pymetis.CSRAdjacency(
            adjacency.indptr.astype(index), adjacency.indices.astype(index)
        ),
        recursive=False,
        options=pymetis.Options(seed=derive(seed, "metis") % 2**31),
    )
    assignment = np.asarray(found.vertex_part, dtype=np.int64)
    return _split_largest(_groups(assignment, clients), clients)


def _metis_overlap(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """FED-PUB's overlapping clients: five random halves of each of `clients / 5` METIS parts."""
    if clients % OVERLAP:
        raise UserError(
            f"partition 'metis-overlap' makes {OVERLAP} clients of every part: {clients} clients "
            f"is not a multiple of {OVERLAP}."
        )
    rng = generator(seed, "metis-overlap")
    return [
        rng.choice(part, size=max(1, len(part) // 2), replace=False)
        for part in _metis(graph, clients // OVERLAP, seed)
        for _ in range(OVERLAP)
    ]


def _dirichlet(
    graph: Graph, clients: int, seed: int, *, alpha: float, min_nodes: int
) -> list[IntArray]:
    """Label skew: each class is shared out in proportions drawn from Dirichlet(alpha).

    The labels shape the simulated clients and nothing else. Unlabelled nodes are shared out evenly.
    A client with fewer than `min_nodes` takes random nodes from the largest, one at a time.
    """
    if clients * min_nodes > graph.num_nodes:
        raise UserError(
            f"'{graph.name}' has {graph.num_nodes} nodes: too few for {clients} clients of at "
            f"least {min_nodes}. Ask for fewer clients, or lower min_nodes."
        )
    rng = generator(seed, "dirichlet")
    assignment = np.empty(graph.num_nodes, dtype=np.int64)
    for label in np.unique(graph.labels):
        members = rng.permutation(np.flatnonzero(graph.labels == label))
        skewed = label != UNLABELLED
        shares = rng.dirichlet(np.full(clients, alpha)) if skewed else np.full(clients, 1 / clients)
        ends = np.floor(np.cumsum(shares)[:-1] * len(members) + 1e-9).astype(np.int64)
        assignment[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return _topped_up(_groups(assignment, clients), min_nodes, rng)


def _topped_up(parts: Sequence[IntArray], least: int, rng: np.random.Generator) -> list[IntArray]:
    """The parts after each short of `least` nodes has taken random ones from the largest."""
    sizes = np.array([len(part) for part in parts])
    if sizes.min() >= least:
        return list(parts)
    piles = [rng.permutation(part).tolist() for part in parts]
    for taker in np.flatnonzero(sizes < least):
        while sizes[taker] < least:
            giver = int(np.argmax(sizes))
            piles[taker].append(piles[giver].pop())
            sizes[giver] -= 1
            sizes[taker] += 1
    return [np.array(pile, dtype=np.int64) for pile in piles]


def _random(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Clients of equal size, up to one node."""
    return np.array_split(generator(seed, "random").permutation(graph.num_nodes), clients)


_METHODS = {
    "louvain": _Method("Louvain communities, each to the smallest client (FLGo)", _louvain),
    "louvain-capped": _Method(
        "Louvain communities chopped to about n/K nodes (OpenFGL); delta",
        _louvain_capped,
        {"delta": _Option(20, partial(whole, low=0))},
    ),
    "louvain-min": _Method(
        "one client per Louvain community of min_nodes or more (FedHERO); min_nodes",
        _louvain_min,
        {"min_nodes": _Option(50, partial(whole, low=1))},
        counts_clients=True,
    ),
    "metis": _Method("balanced METIS parts with few edges between them (FED-PUB)", _metis),
    "metis-overlap": _Method(
        "five random halves of every METIS part, overlapping (FED-PUB)", _metis_overlap
    ),
    "dirichlet": _Method(
        "label skew from a Dirichlet distribution; alpha, min_nodes",
        _dirichlet,
        {
            "alpha": _Option(0.5, partial(real, low=1e-3, high=1e6)),
            "min_nodes": _Option(1, partial(whole, low=1)),
        },
    ),
    "random": _Method("nodes shared out evenly at random", _random),
}

PARTITIONS = {name: method.description for name, method in _METHODS.items()} | {
    "natural": "the clients' own graphs, as the data come"
}


# The file -----------------------------------------------------------------------------------------

_MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True, eq=False)
class Partition:
    """Which nodes each client holds and, where it has been drawn, the split.

    Attributes:
        name: how the partition was made, or the name of the file it came from.
        client_ptr: int64 `[K + 1]`; client k holds `client_nodes[client_ptr[k]:client_ptr[k + 1]]`.
        client_nodes: int64, the clients' node ids one after another.
        train_mask, val_mask, test_mask: bool, aligned with `client_nodes`; all three or none.
    """

    name: str
    client_ptr: IntArray
    client_nodes: IntArray
    train_mask: BoolArray | None = None
    val_mask: BoolArray | None = None
    test_mask: BoolArray | None = None

    def __post_init__(self) -> None:
        for key in ("client_ptr", "client_nodes"):
            object.__setattr__(self, key, _integers(key, getattr(self, key)))
        _check_clients_of_file(self.client_ptr, self.client_nodes)
        given = [key for key in _MASKS if getattr(self, key) is not None]
        if given and len(given) < len(_MASKS):
            raise UserError(f"it has {', '.join(given)} but not all of {', '.join(_MASKS)}")
        for key in given:
            object.__setattr__(self, key, _booleans(key, getattr(self, key), self.client_nodes))
        if given and np.sum([getattr(self, key) for key in _MASKS], axis=0).max() > 1:
            raise UserError("its masks overlap: a node is in more than one of train, val and test")

    @classmethod
    def of(
        cls, name: str, parts: Sequence[IntArray], masks: Sequence[Masks] | None = None
    ) -> Partition:
        """A partition from every client's nodes and, aligned with those, its masks."""
        ptr = np.cumsum([0, *map(len, parts)])
        if masks is None:
            return cls(name, ptr, np.concatenate(parts))
        return cls(
            name,
            ptr,
            np.concatenate(parts),
            np.concatenate([own.train for own in masks]),
            np.concatenate([own.val for own in masks]),
            np.concatenate([own.test for own in masks]),
        )

    @property
    def clients(self) -> int:
        return len(self.client_ptr) - 1

    def nodes_of(self, client: int) -> IntArray:
        return self.client_nodes[self._slice(client)]

    def masks_of(self, client: int) -> Masks | None:
        if self.train_mask is None or self.val_mask is None or self.test_mask is None:
            return None
        own = self._slice(client)
        return Masks(self.train_mask[own], self.val_mask[own], self.test_mask[own])

    def _slice(self, client: int) -> slice:
        return slice(int(self.client_ptr[client]), int(self.client_ptr[client + 1]))

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        keys = ("client_ptr", "client_nodes", *_MASKS)
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}

    @cached_property
    def sha256(self) -> str:
        """The hash of the arrays in a fixed byte order: the same on every platform."""
        digest = hashlib.sha256()
        for key, array in self._arrays().items():
            digest.update(f"{key}:{len(array)}:".encode())
            digest.update(array.astype("u1" if array.dtype == bool else "<i8").tobytes())
        return digest.hexdigest()

    def check_fits(self, num_nodes: int) -> None:
        """Raise a `UserError` unless every node id belongs to a graph of `num_nodes` nodes."""
        largest = int(self.client_nodes.max())
        if largest >= num_nodes:
            raise UserError(
                f"partition '{self.name}' does not fit the graph: it names node {largest}, but "
                f"the graph has {num_nodes} nodes (0 to {num_nodes - 1}). Was it made for other "
                "data, or before the data were cleaned?"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays, the name and the hash as .npz; equal partitions give equal bytes.

        The file appears under its name only once it is complete.
        """
        path = Path(path)
        contents: dict[str, Any] = {
            **self._arrays(),
            "sha256": np.array(self.sha256),
            "name": np.array(self.name),
        }
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(unfinished, "wb") as file:
                np.savez(file, **contents)
            os.replace(unfinished, path)
        except OSError as error:
            raise UserError(f"cannot write partition file '{path}': {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):  # gone after success
                unfinished.unlink()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read and check a partition file, of this library or of another tool.

        Required are `client_ptr` and `client_nodes`; the masks, `sha256` and `name` may be missing.
        """
        arrays = _read_arrays(Path(path))
        try:
            absent = {"client_ptr", "client_nodes"} - arrays.keys()
            if absent:
                raise UserError(f"it has no array {' and no array '.join(sorted(absent))}")
            found = cls(
                str(arrays.get("name", Path(path).stem)),
                arrays["client_ptr"],
                arrays["client_nodes"],
                *(arrays.get(key) for key in _MASKS),
            )
            if "sha256" in arrays and str(arrays["sha256"]) != found.sha256:
                raise UserError(
                    "its contents do not match its sha256: it was damaged, or edited without "
                    "renewing the hash. Make it again, or remove the array 'sha256'."
                )
        except UserError as error:
            raise UserError(f"partition file '{path}' cannot be used: {error}") from None
        return found


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file):
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}
    except OSError as error:
        raise UserError(f"cannot read partition file '{path}': {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError) as error:
        raise UserError(
            f"partition file '{path}' cannot be used: it is no .npz file of plain arrays ({error})"
        ) from None


def _integers(key: str, array: npt.NDArray[Any]) -> IntArray:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{key} must be one-dimensional and of whole numbers, got {array.dtype} of shape "
            f"{array.shape}"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _booleans(key: str, array: npt.NDArray[Any], nodes: IntArray) -> BoolArray:
    if array.dtype != np.bool_ or array.shape != nodes.shape:
        raise UserError(
            f"{key} must be boolean of shape {nodes.shape} like client_nodes, got {array.dtype} "
            f"of shape {array.shape}"
        )
    return np.ascontiguousarray(array)


def _check_clients_of_file(ptr: IntArray, nodes: IntArray) -> None:
    if len(ptr) < 2 or ptr[0] != 0 or ptr[-1] != len(nodes) or (np.diff(ptr) < 0).any():
        raise UserError(
            f"client_ptr must rise from 0 to the length of client_nodes, {len(nodes)}, and have "
            "at least two entries"
        )
    sizes = np.diff(ptr)
    if not sizes.all():
        raise UserError(f"client {int(np.argmin(sizes))} has no nodes")
    if nodes.min() < 0:
        raise UserError(f"client_nodes must be 0 or more, got {int(nodes.min())}")
    client = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((nodes, client))
    twice = (np.diff(nodes[order]) == 0) & (np.diff(client[order]) == 0)
    if twice.any():
        at = order[int(np.argmax(twice))]
        raise UserError(f"client {int(client[at])} has node {int(nodes[at])} twice")
