"""Partitions: how one graph is divided among clients, and the file that stores a partition.

`partition` returns the node ids of every client. The graph of a client is the induced subgraph, so
edges between clients are lost. Equal requests with equal seeds give equal partitions: the result
depends neither on threads nor on the order in which a sort leaves equal items. Two libraries limit
this. scikit-network compares modularity gains in 32-bit floats, which a processor with fused
multiply-add may round differently, and METIS draws from the C library's `rand`. To use a partition
on another machine, or with other software, copy its file.

To add a partition, decorate a function with `register_partition`.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError, missing_package
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, Masks
from polyphily.graphs.limits import PARTITION, check_npz
from polyphily.graphs.options import Bounds, Option, declared_options, read_options
from polyphily.graphs.random import derive, generator
from polyphily.registry import Registry

NATURAL = "natural"
OVERLAP = 5  # clients that share one METIS part, each with a half of its nodes


# The registry -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartitionMethod:
    """A way to divide one graph among clients.

    Attributes:
        name: the name it is registered under.
        description: one line for `polyphily partitions`.
        function: returns the node ids of every client from (graph, clients, seed, **options).
        options: what the function takes beside these three, by name.
        finds_clients: whether the function finds the number of clients itself. Then it is called
            with `clients=None` unless the user gives a number.
    """

    name: str
    description: str
    function: Callable[..., Sequence[IntArray]]
    options: Mapping[str, Option]
    finds_clients: bool = False

    @property
    def summary(self) -> str:
        """The description, followed by the names of the options."""
        return "; ".join(filter(None, (self.description, ", ".join(self.options))))


PARTITIONS: Registry[PartitionMethod] = Registry("partition", "partitions", dashes=True)
F = TypeVar("F", bound=Callable[..., Sequence[IntArray]])


def register_partition(
    name: str, description: str = "", *, finds_clients: bool = False
) -> Callable[[F], F]:
    """Make a partition available by name, in `polyphily.load` and on the command line.

    The decorated function is called with the graph, the number of clients and the seed, followed by
    its options as keyword arguments. It returns one array of node ids per client. A node may be at
    several clients, or at none. Options are the function's further parameters. Each needs a type
    (bool, int, float or str) and may have bounds:

        @register_partition("stripes", "consecutive nodes, in stripes")
        def stripes(graph, clients, seed, *, width: Annotated[int, Bounds(1)] = 10):
            owner = np.arange(graph.num_nodes) // width % clients
            return [np.flatnonzero(owner == k) for k in range(clients)]

    Other packages name the module with such a function as an entry point in the group
    `polyphily.partitions`.

    Args:
        name: what users write.
        description: one line; the first line of the function's docstring unless given.
        finds_clients: whether the function finds the number of clients itself.
    """

    def add(function: F) -> F:
        line = description or (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        options = declared_options(function, skip=3)
        key = PARTITIONS.key(name)
        PARTITIONS.add(key, PartitionMethod(key, line, function, options, finds_clients))
        return function

    return add


def partition(
    graph: Graph, name: str, clients: int | None, seed: int, **options: object
) -> list[IntArray]:
    """Divide a graph and return the nodes of every client in ascending order.

    Args:
        graph: the graph to divide.
        name: a name in `PARTITIONS`, other than `natural`.
        clients: how many; may be None for a partition that finds the number itself.
        seed: any whole number from 0.
        options: options of the partition by name, as numbers or as text.

    Raises:
        UserError: for a request that cannot be met, or a partition that returns no valid clients.
    """
    method = PARTITIONS.find(name)
    if method.name == NATURAL:
        _natural(graph, clients, seed)
    if not graph.num_nodes:
        raise UserError(f"'{graph.name}' has no nodes to divide among clients")
    if clients is not None or not method.finds_clients:
        _check_clients(graph, method.name, clients)
    settings = read_options(f"partition '{method.name}'", method.options, options)
    parts = method.function(graph, clients, seed, **settings)
    return _checked_parts(parts, method.name, graph, clients)


def _check_clients(graph: Graph, name: str, clients: int | None) -> None:
    if clients is None:
        raise UserError(f"partition '{name}' needs the number of clients, for example 10")
    if clients < 1:
        raise UserError(f"the number of clients must be 1 or more, got {clients}")
    if clients > graph.num_nodes:
        raise UserError(
            f"cannot divide '{graph.name}' into {clients} clients: it has {graph.num_nodes} nodes. "
            "Ask for at most one client per node."
        )


def _checked_parts(
    parts: Sequence[npt.ArrayLike], name: str, graph: Graph, clients: int | None
) -> list[IntArray]:
    """Return the sorted node ids of every client, once they are known to be valid."""
    where = f"partition '{name}' of '{graph.name}'"
    found = []
    for client, part in enumerate(parts):
        nodes = np.asarray(part)
        if nodes.ndim != 1 or nodes.dtype.kind not in "iu" or not len(nodes):
            what = "no nodes" if not nodes.size else f"{nodes.dtype} of shape {nodes.shape}"
            raise UserError(
                f"{where} returned {what} for client {client}: every client needs a "
                "one-dimensional array of one or more node ids"
            )
        nodes = np.sort(nodes.astype(np.int64))
        if nodes[0] < 0 or nodes[-1] >= graph.num_nodes:
            outside = nodes[0] if nodes[0] < 0 else nodes[-1]
            raise UserError(
                f"{where} gave node {outside} to client {client}, but the graph has "
                f"{graph.num_nodes} nodes (0 to {graph.num_nodes - 1})"
            )
        if (np.diff(nodes) == 0).any():
            twice = nodes[int(np.argmax(np.diff(nodes) == 0))]
            raise UserError(f"{where} gave node {twice} to client {client} twice")
        found.append(nodes)
    if not found or (clients is not None and len(found) != clients):
        asked = "at least 1 is needed" if clients is None else f"{clients} were asked for"
        raise UserError(f"{where} returned {len(found)} clients, but {asked}")
    return found


# Helpers ------------------------------------------------------------------------------------------


def _groups(assignment: IntArray, count: int) -> list[IntArray]:
    """Return the positions that hold 0, 1, …, count - 1, each in ascending order."""
    order = np.argsort(assignment, kind="stable")
    sizes = np.bincount(assignment, minlength=count)
    return np.split(order, np.cumsum(sizes)[:-1])


def _split_largest(parts: Sequence[IntArray], count: int) -> list[IntArray]:
    """Halve the largest part until there are at least `count` non-empty parts.

    Parts are returned in the order of their first nodes.
    """
    heap = [(-len(part), int(part[0]), part) for part in parts if len(part)]
    heapq.heapify(heap)
    while len(heap) < count:
        largest = heapq.heappop(heap)[2]
        for half in np.array_split(largest, 2):
            heapq.heappush(heap, (-len(half), int(half[0]), half))
    return [part for _, _, part in sorted(heap, key=lambda entry: entry[1])]


def _missing(package: str, algorithm: str) -> UserError:
    instead = "A partition file (--partition FILE) needs no further package."
    return missing_package(package, "partition", f"partitioning by {algorithm}", instead)


def communities(graph: Graph, seed: int) -> list[IntArray]:
    """Find Louvain communities (Newman modularity, resolution 1), ordered by their first nodes.

    In a graph without edges every node is a community.
    """
    try:
        from sknetwork.clustering import Louvain
    except ImportError:
        raise _missing("scikit-network", "Louvain") from None
    if not graph.num_edges:
        return np.split(np.arange(graph.num_nodes), graph.num_nodes)
    # The library's sorting by size is not stable: communities of equal size could change places.
    louvain = Louvain(
        shuffle_nodes=True, sort_clusters=False, random_state=derive(seed, "louvain") % 2**32
    )
    labels = louvain.fit_predict(sp.csr_matrix(graph.adjacency(), dtype=np.float64))
    _, compact = np.unique(labels, return_inverse=True)
    groups = _groups(compact.astype(np.int64), int(compact.max()) + 1)
    return sorted(groups, key=lambda group: int(group[0]))


# The partitions -----------------------------------------------------------------------------------


@register_partition("louvain", "Louvain communities, each to the smallest client (FLGo)")
def _louvain(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Assign communities as FLGo does (FedSPA, S2FGL): small ones first, to the smallest client."""
    pieces = _split_largest(communities(graph, seed), clients)
    dealt: list[list[IntArray]] = [[] for _ in range(clients)]
    smallest = [(0, client) for client in range(clients)]
    for piece in sorted(pieces, key=len):  # stable: equal sizes stay in the order of first nodes
        size, client = smallest[0]
        dealt[client].append(piece)
        heapq.heapreplace(smallest, (size + len(piece), client))
    return [np.concatenate(pieces) for pieces in dealt]


@register_partition("louvain-capped", "Louvain communities cut to about n/K nodes (OpenFGL)")
def _louvain_capped(
    graph: Graph, clients: int, seed: int, *, delta: Annotated[int, Bounds(0)] = 20
) -> list[IntArray]:
    """Assign communities as OpenFGL does (FedATH), after cutting them to floor(n/K) - delta nodes.

    Large pieces go first, to the client in turn if it stays below floor(n/K) + delta. The turn
    passes when a piece does not fit. A client that has floor(n/K) nodes drops out. If no client has
    room, the smallest takes the piece. A client without any piece takes half of the largest client.
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
    """Return the next client in turn with fewer than `below` nodes, or the smallest of all."""
    for _ in range(len(turn)):
        if sizes[turn[0]] < below:
            return turn[0]
        turn.rotate(-1)
    return int(np.argmin(sizes))


@register_partition(
    "louvain-min",
    "one client per Louvain community of min_nodes or more (FedHERO)",
    finds_clients=True,
)
def _louvain_min(
    graph: Graph, clients: int | None, seed: int, *, min_nodes: Annotated[int, Bounds(1)] = 50
) -> list[IntArray]:
    """Make a client of every community of `min_nodes` or more; merge small ones in at random."""
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


@register_partition("metis", "balanced METIS parts with few edges between them (FED-PUB)")
def _metis(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Cut the graph by k-way METIS into balanced parts (FED-PUB, FedGSP, FedHERO)."""
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


@register_partition(
    "metis-overlap", "five random halves of every METIS part, overlapping (FED-PUB)"
)
def _metis_overlap(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Draw five random halves of each of `clients / 5` METIS parts, as FED-PUB does."""
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


@register_partition("dirichlet", "label skew from a Dirichlet distribution")
def _dirichlet(
    graph: Graph,
    clients: int,
    seed: int,
    *,
    alpha: Annotated[float, Bounds(1e-3, 1e6)] = 0.5,
    min_nodes: Annotated[int, Bounds(1)] = 1,
) -> list[IntArray]:
    """Divide every class among the clients in proportions drawn from Dirichlet(alpha).

    Labels are used for this simulation only. Unlabelled nodes are divided evenly. A client with
    fewer than `min_nodes` nodes takes random ones from the largest client, one at a time.
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
    """Move random nodes from the largest part to every part with fewer than `least`."""
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


@register_partition("random", "nodes divided evenly at random")
def _random(graph: Graph, clients: int, seed: int) -> list[IntArray]:
    """Divide the nodes into random parts whose sizes differ by at most one."""
    return np.array_split(generator(seed, "random").permutation(graph.num_nodes), clients)


@register_partition(NATURAL, "the clients' own graphs, as the data come")
def _natural(graph: Graph, clients: int | None, seed: int) -> list[IntArray]:
    """Refuse to divide one graph."""
    raise UserError(
        f"'{graph.name}' is one graph, but partition 'natural' is for data that come as one "
        "graph per client. Choose another partition, or give one graph per client."
    )


# The file -----------------------------------------------------------------------------------------

_MASKS = ("train_mask", "val_mask", "test_mask")
_LABELS = ("name", "sha256")  # texts in a file, beside its arrays


@dataclass(frozen=True, eq=False)
class Partition:
    """The node ids of every client and, once it has been drawn, the split.

    Attributes:
        name: how the partition was made, or the name of the file that it was read from.
        client_ptr: int64 `[K + 1]`; client k holds `client_nodes[client_ptr[k]:client_ptr[k + 1]]`.
        client_nodes: int64, the node ids of all clients, concatenated.
        train_mask, val_mask, test_mask: bool, aligned with `client_nodes`; all three or none.
        unknown: names of arrays in the file that are not used.
    """

    name: str
    client_ptr: IntArray
    client_nodes: IntArray
    train_mask: BoolArray | None = None
    val_mask: BoolArray | None = None
    test_mask: BoolArray | None = None
    unknown: tuple[str, ...] = ()

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
        """Return a partition from every client's node ids and, aligned with them, its masks."""
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
        """The number of clients."""
        return len(self.client_ptr) - 1

    def nodes_of(self, client: int) -> IntArray:
        """Return the node ids of a client."""
        return self.client_nodes[self._slice(client)]

    def masks_of(self, client: int) -> Masks | None:
        """Return the masks of a client; None if no split has been drawn."""
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
        """The hash of the arrays in a fixed byte order, equal on every platform."""
        digest = hashlib.sha256()
        for key, array in self._arrays().items():
            digest.update(f"{key}:{len(array)}:".encode())
            digest.update(array.astype("u1" if array.dtype == bool else "<i8").tobytes())
        return digest.hexdigest()

    def check_fits(self, num_nodes: int) -> None:
        """Raise a `UserError` unless every node id is one of a graph with `num_nodes` nodes."""
        largest = int(self.client_nodes.max())
        if largest >= num_nodes:
            raise UserError(
                f"partition '{self.name}' does not fit the graph: it names node {largest}, but "
                f"the graph has {num_nodes} nodes (0 to {num_nodes - 1}). Was it made for other "
                "data, or before the data were cleaned?"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays, the name and the hash as .npz. Equal partitions give equal bytes.

        The file is written under another name and renamed once it is complete.
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
            with contextlib.suppress(OSError):  # it no longer exists after a rename
                unfinished.unlink()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read and check a partition file of this library or of another tool.

        The arrays `client_ptr` and `client_nodes` are required. The masks, `sha256` and `name` may
        be missing. Other arrays are refused if there are no masks, because they may be meant as
        such; otherwise they are named in `unknown`.
        """
        arrays = _read_arrays(Path(path))
        try:
            absent = {"client_ptr", "client_nodes"} - arrays.keys()
            if absent:
                raise UserError(f"it has no array {' and no array '.join(sorted(absent))}")
            unknown = sorted(arrays.keys() - {"client_ptr", "client_nodes", *_MASKS, *_LABELS})
            if unknown and not arrays.keys() & set(_MASKS):
                raise UserError(
                    f"it has arrays that are not known: {', '.join(unknown)}. If they are the "
                    f"split, call them {', '.join(_MASKS)}; otherwise remove them"
                )
            train, val, test = (arrays.get(key) for key in _MASKS)
            found = cls(
                str(arrays.get("name", Path(path).stem)),
                arrays["client_ptr"],
                arrays["client_nodes"],
                train,
                val,
                test,
                tuple(unknown),
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
        check_npz(Path(path), PARTITION)
        with np.load(path, allow_pickle=False) as archive:
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
