"""Loading a federation: the clients' graphs with their splits, and how they were obtained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError, unknown
from polyphily.graphs import conversion, datasets, files, imbalance, splits
from polyphily.graphs import noise as disturbances
from polyphily.graphs.columns import comparable
from polyphily.graphs.encoding import NORMALIZATIONS, Encoding, learn_encodings
from polyphily.graphs.graph import (
    UNLABELLED,
    BoolArray,
    Collection,
    Graph,
    IntArray,
    Masks,
    relations_of,
)
from polyphily.graphs.mapped import MappedGraphs, client_name, graphs_folder, write_graphs
from polyphily.graphs.partitions import NATURAL, PARTITIONS, Partition, partition
from polyphily.graphs.rules import ArrayRule, padded

if TYPE_CHECKING:
    from torch_geometric.data import Data

SAVED = "partition.npz"  # the file of a run folder that stores the partition
FROM_FILE = "as in the partition file"
IN_MEMORY = "graphs"  # the dataset's name of graphs that were not read from a file
MANY = 20_000  # clients from which on graphs that are drawn at random are kept in files
FEW = 1000  # of their graphs show how often classes occur
USUAL_CLIENTS = 10  # of a graph that is no dataset of the registry


@dataclass(frozen=True)
class Federation:
    """The graphs of all clients, with their splits.

    Attributes:
        dataset: the name or path of the data.
        kind: "homophilic", "heterophilic", "synthetic", "fraud" or "files".
        clients: each client's graph, with its masks; `MappedGraphs` if they are on disk.
        classes: names of the labels.
        partition: the nodes of each client and the masks, as saved in a run folder. If the graphs
            are on disk, of the first client alone (`some`).
        split: how the masks were drawn, as text.
        seed: the seed of partition and split, and of the run's initial parameters.
        metric: the metric that selects a model on validation.
        metric_reason: why it is not accuracy, if the data have no metric of their own.
        notes: remarks for the user on how the data were read.
        request: the arguments of `load` that create this federation again.
        encodings: how each client's columns became features; one object if clients agree.
    """

    dataset: str
    kind: str
    clients: Sequence[Graph]
    classes: tuple[str, ...]
    partition: Partition
    split: str
    seed: int
    metric: str = "accuracy"
    metric_reason: str = ""
    notes: tuple[str, ...] = ()
    request: Mapping[str, str | int] = field(default_factory=dict, compare=False)
    encodings: tuple[Encoding, ...] = ()

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def on_disk(self) -> bool:
        """True if graphs are read from files as they are needed."""
        return isinstance(self.clients, MappedGraphs)

    def some(self, clients: Sequence[int]) -> Federation:
        """Return the federation of some of these clients, with their graphs in memory."""
        graphs, layout = self.clients, self.partition
        if isinstance(graphs, MappedGraphs):
            own = graphs.partition(clients)
            encodings = self.encodings[:1] * len(clients)
        else:
            masks = [layout.masks_of(k) for k in clients]
            own = Partition.of(
                layout.name,
                [layout.nodes_of(k) for k in clients],
                [found for found in masks if found is not None] or None,
            )
            encodings = tuple(self.encodings[k] for k in clients if self.encodings)
        chosen = tuple(graphs[k] for k in clients)
        return replace(self, clients=chosen, partition=own, encodings=encodings)

    @property
    def exchanged(self) -> bool:
        """True if columns are encoded by statistics that several clients have exchanged."""
        learned = any(encoding.is_learned for encoding in self.encodings)
        return learned and len(self) > 1 and self.request.get("encoding") != "home"

    @property
    def relations(self) -> tuple[str, ...]:
        """The types of edges that some clients have."""
        return relations_of(self.clients)

    @property
    def dense(self) -> bool:
        """True if the features of all clients are dense, not a sparse bag of words."""
        return not any(sp.issparse(graph.features) for graph in self.clients)

    def to_pyg(self, *, sparse: bool = False) -> list[Data]:
        """Convert the clients' graphs to torch_geometric `Data`; `load` takes the list again.

        Args:
            sparse: whether sparse features stay sparse (`torch.sparse_csr` tensors).
        """
        return [conversion.to_pyg(graph, self.classes, sparse=sparse) for graph in self.clients]

    def __repr__(self) -> str:
        if isinstance(self.clients, MappedGraphs):
            nodes = self.clients.num_nodes
        else:
            nodes = sum(graph.num_nodes for graph in self.clients)
        clients = "1 client" if len(self) == 1 else f"{len(self)} clients"
        return (
            f"Federation({self.dataset}, {clients} by {self.partition.name}, "
            f"{nodes:,} nodes, {len(self.classes)} classes, split {self.split}, seed {self.seed})"
        )


def load(
    dataset: str | Path | Graph | Sequence[Any] | Collection | Any,
    *,
    partition: str | Path | None = None,
    clients: int | None = None,
    seed: int = 0,
    split: str | None = None,
    normalize: str | None = None,
    encoding: str | None = None,
    noise: str | None = None,
    root: Path | None = None,
    on_disk: bool | None = None,
) -> Federation:
    """Load a federation by name, from files, or from graphs in memory.

    Args:
        dataset: one of

            - a dataset's name (`polyphily datasets` lists them), with options as in `csbm:gap=0.4`;
            - a folder or file of graphs;
            - a graph: a `Graph`, a torch_geometric `Data`, a networkx graph (node attributes x and
              y or label), or a tuple (scipy adjacency, features, labels). It is one client, unless
              `partition` or `clients` asks to divide it;
            - a list of graphs, or a torch_geometric dataset: one client for each graph.
        partition: how one graph is divided (`polyphily partitions` lists the names; options as in
            `dirichlet:alpha=0.1`), or a partition file. `natural` keeps one graph per client.
        clients: the number of clients; the dataset's usual number unless given.
        seed: the seed of partition, split and noise.
        split: "0.6,0.2,0.2" (add ":client" or ":global"), "5-fold" or "own". Unless given, the
            masks of the partition file, the split in the data (for a dataset of the registry
            that is divided: the split of the papers), or the split of the papers.
        normalize: "none" leaves numbers as they are, "row" divides the features of a node by their
            sum, "standard" scales columns by the mean and standard deviation of the train nodes.
            Unless given, "standard" for tables with categories, dates or missing values, otherwise
            "none".
        encoding: "agreed" encodes and scales the columns of all clients alike, by the train nodes
            of all. "home" exchanges no statistics: each client scales by its own train nodes, and
            categories have the values that `schema.toml` declares, or are hashed. "agreed" unless
            given.
        noise: noise on the clients' graphs, such as "edges=0.1,features=0.1,labels=0.1".
        root: the folder of the datasets; `$POLYPHILY_DATA` or a cache folder unless given.
        on_disk: whether graphs that are drawn at random (csbm) are written to files, one at a time,
            and read from there as they are needed. Unless given, from `MANY` clients on.

    Raises:
        UserError: for unknown names, unreadable files and requests that cannot be met.
    """
    if normalize not in (None, *NORMALIZATIONS):
        raise unknown("normalization", str(normalize), NORMALIZATIONS)
    if kept_on_disk(dataset, clients, on_disk):
        assert isinstance(dataset, str)
        return _load_on_disk(
            dataset, partition, clients, seed, split, normalize, noise, root or datasets.data_root()
        )
    collection, kind, metric, usual = _collect(dataset, seed, clients, root)
    graphs = collection.graphs
    several = len(graphs) > 1
    # A single graph that is a client already is divided if the user asks for it.
    whole = collection.natural and partition is None and clients in (None, 1)
    name, options, saved = _partition_request(partition, natural=several or whole)
    natural = several or (collection.natural if name == NATURAL else whole)
    if not natural and clients is None and saved is None and not _finds_clients(name):
        clients = usual
    wanted = splits.parse_split(split) if split is not None else None
    if natural:
        drawn = _natural(graphs, saved, clients, wanted, seed)
    else:
        short = collection.name.partition(":")[0].replace("_", "-")
        own = kind == "files" and graphs[0].own_masks
        usual_split = splits.parse_split("own") if own else splits.default_split(short, name)
        drawn = _divide(graphs[0], name, options, saved, clients, wanted, usual_split, seed)
    raw, layout, text = drawn
    for graph in raw:
        _check_masks(graph)
    encodings, normalize = learn_encodings(raw, normalize, encoding)
    members = [own.encode(graph) for own, graph in zip(encodings, raw, strict=True)]
    disturbance = disturbances.parse_noise(noise)
    members = disturbances.disturb(members, disturbance, len(collection.classes), seed)
    reason = ""
    if metric == imbalance.USUAL:
        metric, reason = imbalance.usual_metric(members, collection.classes)
    return Federation(
        dataset=collection.name,
        kind=kind,
        clients=tuple(members),
        classes=collection.classes,
        partition=layout,
        split=text,
        seed=seed,
        metric=metric,
        metric_reason=reason,
        notes=(
            *collection.notes,
            *_unknown_arrays_note(saved),
            *([] if natural or wanted else _own_split_note(graphs[0], layout, text, seed)),
            *_twin_note(raw, text),
            *_overlap_note(layout, text),
            *_encoding_note(encodings[0], encoding),
            *_scale_note(members, normalize),
        ),
        request={
            "dataset": collection.name,
            "partition": SAVED if saved is not None else _written(name, options),
            **({} if _finds_clients(name) else {"clients": len(members)}),
            **({} if text == FROM_FILE else {"split": text}),
            "normalize": normalize,
            **({"encoding": "home"} if encoding == "home" and encodings[0].is_learned else {}),
            **({"noise": str(disturbance)} if disturbance else {}),
        },
        encodings=encodings,
    )


def kept_on_disk(dataset: Any, clients: int | None, on_disk: bool | None = None) -> bool:
    """Return whether `load` keeps the graphs of a dataset in files."""
    if not isinstance(dataset, str) or _is_path(dataset):
        return False
    drawn = datasets.DATASETS.key(dataset.partition(":")[0]) == "csbm"
    return drawn and ((clients or 0) >= MANY if on_disk is None else on_disk)


def _load_on_disk(
    dataset: str,
    partition: str | Path | None,
    clients: int | None,
    seed: int,
    split: str | None,
    normalize: str | None,
    noise: str | None,
    root: Path,
) -> Federation:
    """Draw the graphs of a synthetic federation into files, or find them there."""
    from polyphily.graphs.csbm import CLASSES, population

    for flag, value, known in (
        ("partition", partition, (None, NATURAL)),
        ("normalize", normalize, (None, "none", "row")),
        ("noise", noise, (None,)),
    ):
        if value not in known:
            raise UserError(
                f"--{flag} {value} needs the graphs of all clients in memory, and these are on "
                "disk: leave it out, or add --no-on-disk"
            )
    info, options = datasets.parse_dataset(dataset)
    if kept := set(options) & set(datasets.SUBGRAPHS):
        raise UserError(f"{kept.pop()} is no option of graphs on disk: leave it out")
    chosen = splits.parse_split(split or "0.6,0.2,0.2")
    drawn = population(clients=clients, seed=seed, **options)
    encoding = Encoding.at_home(drawn.features, normalize or "none")

    def finished(client: int) -> Graph:
        graph = drawn.graph(client)
        graph = graph.with_masks(splits.draw_one(chosen, graph, seed, client))
        _check_masks(graph)
        return encoding.encode(graph)

    request: dict[str, str | int] = {
        "dataset": info.name + ":" * bool(options) + ",".join(f"{k}={options[k]}" for k in options),
        "partition": NATURAL,
        "clients": drawn.clients,
        "split": str(chosen),
        "normalize": normalize or "none",
    }
    folder = graphs_folder(root, {**request, "seed": seed})
    if not folder.exists():
        write_graphs(folder, map(finished, range(drawn.clients)))
    graphs = MappedGraphs(folder)
    metric, reason = imbalance.usual_metric(graphs[:FEW], CLASSES)
    return Federation(
        dataset=str(request["dataset"]),
        kind=info.kind,
        clients=graphs,
        classes=CLASSES,
        partition=graphs.partition([0]),
        split=str(chosen),
        seed=seed,
        metric=metric,
        metric_reason=reason,
        notes=(drawn.note, f"graphs are read from {folder} as they are needed"),
        request=request,
        encodings=(encoding,),
    )


def whole_graph(federation: Federation, root: Path | None = None) -> Graph | None:
    """Read again the graph that was divided among the clients; None if there was none.

    Its train, validation and test nodes are those of the clients.
    """
    layout = federation.partition
    if layout.name == NATURAL or federation.dataset == IN_MEMORY:
        return None
    collection, *_ = _collect(federation.dataset, federation.seed, len(federation), root)
    graph = collection.graphs[0]
    masks = Masks(*[np.zeros(graph.num_nodes, dtype=np.bool_) for _ in range(3)])
    for k, client in enumerate(federation.clients):
        assert client.masks is not None
        nodes = layout.nodes_of(k)
        for name in ("train", "val", "test"):
            getattr(masks, name)[nodes[getattr(client.masks, name)]] = True
    graph = graph.with_masks(masks)
    if federation.encodings and federation.request.get("encoding") != "home":
        return federation.encodings[0].encode(graph)
    how = str(federation.request.get("normalize", "none"))
    (own,), _ = learn_encodings([graph], how, "home")
    return own.encode(graph)


def with_split(graph: Graph, split: str | None, seed: int) -> Graph:
    """Return one client's graph with its split, as `load` draws it for a single client."""
    wanted = splits.parse_split(split) if split else None
    (found,), _, _ = _natural([graph], None, None, wanted, seed)
    _check_masks(found)
    return found


def _check_masks(graph: Graph) -> None:
    assert graph.masks is not None
    train, labelled = graph.masks.train, graph.labels != UNLABELLED
    if not train.any():
        raise UserError(
            f"client '{graph.name}' has no train node "
            f"({graph.num_nodes} nodes, {int(labelled.sum())} of them labelled): "
            "label some of its nodes, choose another --split, or remove the client"
        )
    chosen = train | graph.masks.val | graph.masks.test
    if (chosen & ~labelled).any():
        node = int(np.flatnonzero(chosen & ~labelled)[0])
        raise UserError(
            f"client '{graph.name}': node {node} is in a mask but has no label. "
            "Was the partition file made for other data?"
        )


def _written(name: str, options: Mapping[str, str]) -> str:
    """Return a partition's name with its options, as a user writes them."""
    return name + ":" * bool(options) + ",".join(f"{k}={v}" for k, v in options.items())


def _collect(
    dataset: str | Path | Graph | Sequence[Any] | Collection | Any,
    seed: int,
    clients: int | None,
    root: Path | None,
) -> tuple[Collection, str, str, int]:
    """Return the graphs with their kind, selecting metric and usual number of clients."""
    if isinstance(dataset, Collection):
        return dataset, "files", "accuracy", USUAL_CLIENTS
    if not isinstance(dataset, str | Path):
        return _in_memory(conversion.convert(dataset)), "files", "accuracy", USUAL_CLIENTS
    if _is_path(dataset):
        path = Path(dataset).expanduser()
        collection = replace(files.read(path), name=str(path.resolve()))
        return collection, "files", "accuracy", USUAL_CLIENTS
    name, colon, options = str(dataset).partition(":")
    try:
        info = datasets.DATASETS.find(name)
    except UserError as error:
        raise UserError(f"{error}. For graphs of your own, give the path: ./{name}") from None
    collection = datasets.read(str(dataset), root=root, seed=seed, clients=clients)
    if info.reader is None:  # only options of other packages may depend on the case of letters
        options = options.lower()
    return (
        replace(collection, name=info.name + colon + options),
        info.kind,
        info.metric,
        info.default_clients,
    )


def _in_memory(given: conversion.Converted) -> Collection:
    """Return a collection of graphs that are not read from files."""
    graphs = tuple(_with_own_masks(graph) for graph in given.graphs)
    count = 1 + max(int(graph.labels.max(initial=0)) for graph in graphs)
    classes = given.classes or tuple(map(str, range(count)))
    if len({graph.name for graph in graphs}) < len(graphs):
        graphs = tuple(replace(g, name=client_name(k, len(graphs))) for k, g in enumerate(graphs))
    return Collection(IN_MEMORY, graphs, classes, natural=True, notes=given.notes)


def _finds_clients(name: str) -> bool:
    """Return whether a partition finds the number of clients itself."""
    return name in PARTITIONS and PARTITIONS[name].finds_clients


def _with_own_masks(graph: Graph) -> Graph:
    """Return a graph in memory with its masks, if any, as the split that comes with the data."""
    if graph.masks is None or graph.own_masks:
        return graph
    return replace(graph, own_masks=(graph.masks,))


def _is_path(dataset: str | Path) -> bool:
    """Return whether a dataset is given as a path. A registered name is none."""
    if isinstance(dataset, Path):
        return True
    if datasets.DATASETS.key(dataset.partition(":")[0]) in datasets.DATASETS:
        return False
    if any(mark in dataset for mark in ("/", "\\")) or dataset.startswith((".", "~")):
        return True
    return dataset.endswith((".npz", ".pt")) or Path(dataset).exists()


def _partition_request(
    text: str | Path | None, *, natural: bool
) -> tuple[str, dict[str, str], Partition | None]:
    """Return the partition's name and options, or the partition that a file holds."""
    if text is None:
        return (NATURAL if natural else "louvain"), {}, None
    name, _, rest = str(text).partition(":")
    known = not isinstance(text, Path) and PARTITIONS.key(name) in PARTITIONS
    if not known and (isinstance(text, Path) or str(text).endswith(".npz") or Path(text).is_file()):
        saved = Partition.load(Path(text).expanduser())
        return saved.name, {}, saved
    name = PARTITIONS.find(name).name
    options = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign:
            raise UserError(f"'{item}' in partition '{text}' is no option: write option=value")
        options[key.strip()] = value.strip()
    if natural and name != NATURAL:
        raise UserError(
            f"partition '{name}' divides one graph, but these data are one graph per client "
            "already: leave --partition out, or give a partition file"
        )
    return name, options, None


def _natural(
    graphs: Sequence[Graph],
    saved: Partition | None,
    clients: int | None,
    wanted: splits.Split | None,
    seed: int,
) -> tuple[list[Graph], Partition, str]:
    """Return the clients' graphs with their splits, for data that are not divided."""
    if clients is not None and clients != len(graphs):
        count = "1 client" if len(graphs) == 1 else f"{len(graphs)} clients"
        raise UserError(f"--clients {clients} does not fit: these data are {count} already")
    ends = np.cumsum([0, *[graph.num_nodes for graph in graphs]])
    masks: list[Masks] | None = None
    text = FROM_FILE
    if saved is not None:
        if saved.client_ptr.tolist() != ends.tolist():
            raise UserError(
                f"partition '{saved.name}' does not fit: it is for clients of "
                f"{np.diff(saved.client_ptr).tolist()} nodes, these have {np.diff(ends).tolist()}"
            )
        masks = _saved_masks(saved)
    if wanted is not None or masks is None:
        if wanted is None:
            _check_own_splits(graphs)
        split = wanted or splits.parse_split("own" if graphs[0].own_masks else "0.6,0.2,0.2")
        if split.kind == "global":
            raise UserError(
                "a global split needs one graph to divide, but these data are one graph per client "
                "already: use ':client' or ':stratified' in place of ':global'"
            )
        twins = same_nodes(graphs)
        masks, text = splits.draw(split, graphs[:1] if twins else graphs, seed), str(split)
        if twins:
            masks = [masks[0].take(position) for position in twins]
    members = [graph.with_masks(own) for graph, own in zip(graphs, masks, strict=True)]
    nodes = [np.arange(a, b) for a, b in pairwise(ends)]
    return members, Partition.of(NATURAL, nodes, masks), text


def _check_own_splits(graphs: Sequence[Graph]) -> None:
    """Refuse clients of which only some have a split, unless the user asks for another one."""
    with_one = [graph.name for graph in graphs if graph.own_masks]
    without = [graph.name for graph in graphs if not graph.own_masks]
    if with_one and without:
        raise UserError(
            f"client '{with_one[0]}' has a split of its own, and client '{without[0]}' has none: "
            "give all clients one, or none, or choose a --split such as 0.6,0.2,0.2"
        )


def same_nodes(graphs: Sequence[Graph]) -> list[IntArray] | None:
    """Return the positions of each graph's nodes in the first graph, if all have equal nodes.

    Nodes are equal if their features and labels are; their order may differ. Such graphs need a
    common split. Otherwise a test node of one client could be a train node of another, which would
    reveal its label. None if the graphs differ, or there is only one.
    """
    first = graphs[0]
    if len(graphs) < 2 or any(_summary(graph) != _summary(first) for graph in graphs):
        return None
    contents = [_contents(graph) for graph in graphs]
    orders = [np.argsort(content, kind="stable") for content in contents]
    wanted = contents[0][orders[0]]
    pairs = list(zip(contents, orders, strict=True))
    if not all(np.array_equal(content[order], wanted) for content, order in pairs):
        return None
    return [orders[0][np.argsort(order)] for order in orders]


def _summary(graph: Graph) -> tuple[object, ...]:
    """Return values that are quick to compare and differ between almost all graphs."""
    names = () if graph.table is None else tuple(sorted(column.name for column in graph.table))
    width = graph.features.shape[1]
    return graph.num_nodes, width, names, np.sort(graph.labels).tobytes()


def _contents(graph: Graph) -> npt.NDArray[np.bytes_]:
    """Return a digest of every node's features and label."""
    features: Any = graph.features
    if graph.table is not None:
        rows = [row.tobytes() for row in comparable(graph.table)]
    elif sp.issparse(features):
        features = sp.csr_array(features, copy=True)
        features.sum_duplicates()
        features.eliminate_zeros()
        bounds = list(pairwise(features.indptr.tolist()))
        rows = [features.indices[a:b].tobytes() + features.data[a:b].tobytes() for a, b in bounds]
    else:
        rows = [row.tobytes() for row in np.ascontiguousarray(features + 0.0)]  # -0 becomes 0
    labelled = zip(rows, graph.labels.tolist(), strict=True)
    digests = [hashlib.sha256(row + b"%d" % label).digest()[:16].hex() for row, label in labelled]
    return np.array(digests, dtype="S32")


def _twin_note(graphs: Sequence[Graph], split: str) -> tuple[str, ...]:
    if split == FROM_FILE or same_nodes(graphs) is None:
        return ()
    return (
        "all clients have the same nodes, so they share one split: no test label of one client "
        "is a train label of another",
    )


def _divide(
    graph: Graph,
    name: str,
    options: dict[str, str],
    saved: Partition | None,
    clients: int | None,
    wanted: splits.Split | None,
    usual: splits.Split,
    seed: int,
) -> tuple[list[Graph], Partition, str]:
    """Divide one graph among clients and return their graphs with their splits."""
    if saved is not None:
        saved.check_fits(graph.num_nodes)
        if clients is not None and clients != saved.clients:
            raise UserError(
                f"--clients {clients} does not fit: the partition file has {saved.clients} clients"
            )
        parts = [saved.nodes_of(k) for k in range(saved.clients)]
    else:
        parts = partition(graph, name, clients, seed, **options)
    split = wanted or usual
    masks = _saved_masks(saved) if saved is not None and wanted is None else None
    graph = graph.with_ids()
    members = [graph.subgraph(part, client_name(k, len(parts))) for k, part in enumerate(parts)]
    text = FROM_FILE
    if masks is None:
        text = str(split)
        if split.kind == "global" or _overlapping(parts):
            draw = splits.draw_global if split.kind == "global" else _drawn_whole
            whole = draw(split, graph, seed)
            masks = [
                splits.ensure_train(whole.take(part), member, seed, k)
                for k, (part, member) in enumerate(zip(parts, members, strict=True))
            ]
            trained = _trained(parts, masks, graph.num_nodes)
            masks = [
                Masks(own.train, own.val & ~trained[part], own.test & ~trained[part])
                for part, own in zip(parts, masks, strict=True)
            ]
        else:
            masks = splits.draw(split, members, seed)
    members = [member.with_masks(own) for member, own in zip(members, masks, strict=True)]
    return members, Partition.of(name, parts, masks), text


def _own_split_note(graph: Graph, layout: Partition, text: str, seed: int) -> tuple[str, ...]:
    """Return a note for the user on what became of the split that came with a divided graph."""
    if not graph.own_masks or text == FROM_FILE:
        return ()
    if text != "own":
        return (
            f"the data have a split of their own; the papers' {text} is drawn (or: --split own)",
        )
    train = graph.own_masks[seed % len(graph.own_masks)].train
    without = sum(not train[layout.nodes_of(k)].any() for k in range(layout.clients))
    if without == 0:
        return ()
    count = "one client has" if without == 1 else f"{without} clients have"
    return (f"{count} no train node in the data's own split and got one of their other nodes",)


def _unknown_arrays_note(saved: Partition | None) -> tuple[str, ...]:
    if saved is None or not saved.unknown:
        return ()
    return (f"the partition file has arrays that are not used: {', '.join(saved.unknown)}",)


def _overlapping(parts: Sequence[IntArray]) -> bool:
    """Return whether a node is at more than one client, so that one split must serve all."""
    return len(np.unique(np.concatenate(parts))) < sum(map(len, parts))


def _drawn_whole(split: splits.Split, graph: Graph, seed: int) -> Masks:
    return splits.draw(split, [graph], seed)[0]


def _trained(parts: Sequence[IntArray], masks: Sequence[Masks], nodes: int) -> BoolArray:
    """Return which nodes of the whole graph are train nodes of a client."""
    trained = np.zeros(nodes, dtype=np.bool_)
    for part, own in zip(parts, masks, strict=True):
        trained[part[own.train]] = True
    return trained


def _overlap_note(layout: Partition, split: str) -> tuple[str, ...]:
    """Return a note for the user if clients share nodes."""
    parts = [layout.nodes_of(k) for k in range(layout.clients)]
    masks = _saved_masks(layout)
    if layout.name == NATURAL or masks is None or not _overlapping(parts):
        return ()
    if split != FROM_FILE:
        if splits.parse_split(split).kind == "global":
            return ()
        return (
            "clients share nodes, so the split was drawn over the whole graph: no test label of "
            "one client is a train label of another",
        )
    trained = _trained(parts, masks, 1 + int(np.concatenate(parts).max()))
    known = sum(
        int((trained[part] & (own.val | own.test)).sum())
        for part, own in zip(parts, masks, strict=True)
    )
    note = f"{known:,} nodes are validation or test nodes of one client and train nodes of another"
    return (note,) if known else ()


def _saved_masks(saved: Partition) -> list[Masks] | None:
    found = [saved.masks_of(k) for k in range(saved.clients)]
    return [masks for masks in found if masks is not None] or None


def _encoding_note(encoding: Encoding, mode: str | None) -> tuple[str, ...]:
    """Return a note for the user on what became of the columns of a table."""
    if isinstance(encoding.rules, ArrayRule) or all(
        rule.kind == "number" and not (rule.missing or rule.scaled) for rule in encoding.rules
    ):
        return ()
    own = "; each client by its own train nodes" if mode == "home" else ""
    return (encoding.describe() + own,)


def same_width(federations: Sequence[Federation]) -> list[Federation]:
    """Return federations of several seeds with equally many features.

    Train nodes differ between seeds, and with them the values of categories that have a feature.
    Narrower federations get further features, which are always 0.
    """
    widths = [federation.clients[0].num_features for federation in federations]
    found = []
    for federation, width in zip(federations, widths, strict=True):
        more = max(widths) - width
        tables = federation.encodings and not isinstance(federation.encodings[0].rules, ArrayRule)
        if not more or not tables:
            found.append(federation)
            continue
        wider = {id(e): replace(e, padding=e.padding + more) for e in federation.encodings}
        clients = [replace(g, features=padded(g.features, more)) for g in federation.clients]
        encodings = tuple(wider[id(e)] for e in federation.encodings)
        found.append(replace(federation, clients=tuple(clients), encodings=encodings))
    return found


def _scale_note(graphs: Sequence[Graph], normalize: str) -> tuple[str, ...]:
    """Return a note for the user if dense features are so large that training would suffer."""
    dense = [g.features for g in graphs if not sp.issparse(g.features) and g.features.size]
    largest = max((float(abs(features).max()) for features in dense), default=0.0)
    if normalize != "none" or largest <= 100:
        return ()
    return (f"features reach {largest:,.0f}: consider --normalize standard",)
