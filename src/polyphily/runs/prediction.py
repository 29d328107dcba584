"""Predictions of saved models, for graphs that may be new, whole or in blocks.

A model brings the encoding of the columns and the decision. Nothing is computed from the
distribution of the graph that is predicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.core.local import Local
from polyphily.core.messages import Message
from polyphily.core.settings import AUTO, Settings
from polyphily.errors import UserError
from polyphily.graphs import conversion, files
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.files.client import listed
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, Masks
from polyphily.nn.backbones import Backbone
from polyphily.runs.models import BEST, SavedModel
from polyphily.runtime.client import Clients, cohort_of
from polyphily.runtime.edges import prediction_notes
from polyphily.runtime.machine import check_device, free_memory, matmul_precision
from polyphily.runtime.network import optimizer_of

if TYPE_CHECKING:
    import pandas as pd

ACTIVATIONS = 14  # numbers per node and hidden unit that exist at the same time (acm-gcn)
PER_EDGE = 40  # bytes of an entry of the operators: rows, columns, values, and the transpose
SPANS = ("seconds", "seconds_evaluation")  # of a round, for all seeds together


@dataclass(frozen=True)
class Predictions:
    """What a model says about the nodes of a graph.

    Attributes:
        ids: of the nodes, in the order of the graph.
        classes: the names of the classes.
        probabilities: of each class, float64 `[n, C]`, calibrated if the model has a temperature.
        above: which nodes are above the threshold for the positive class; None without one.
        notes: remarks for the user, such as columns that were ignored.
    """

    ids: npt.NDArray[np.generic]
    classes: tuple[str, ...]
    probabilities: npt.NDArray[np.float64]
    above: npt.NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> npt.NDArray[np.str_]:
        """The name of the most probable class of every node."""
        found: npt.NDArray[np.str_] = np.array(self.classes)[self.probabilities.argmax(axis=1)]
        return found

    def table(self) -> pd.DataFrame:
        """Return a row per node: id, class, probability of each class, whether above threshold."""
        import pandas as pd

        columns: dict[str, Any] = {"id": self.ids, "class": self.labels}
        for c, name in enumerate(self.classes):
            columns[f"probability {name}"] = self.probabilities[:, c]
        if self.above is not None:
            columns["above_threshold"] = self.above
        return pd.DataFrame(columns)

    def frame(self) -> pd.DataFrame:
        """Return the probabilities with a row per node id and a column per class."""
        import pandas as pd

        index = pd.Index(self.ids, name="id")
        return pd.DataFrame(self.probabilities, index=index, columns=list(self.classes))


def predict(
    model: SavedModel,
    graph: Any,
    *,
    client: str | None = None,
    device: str = "cpu",
    memory: str = AUTO,
) -> Predictions:
    """Predict the classes of a graph's nodes.

    Args:
        model: what predicts.
        graph: the graph, raw, as it was given to training: a `Graph`, a path, or what
            `polyphily.load` takes as a graph. It may have other nodes and edges than the graph
            that the model was trained on. It needs no labels. Its labels are those that are
            known, or the train nodes' only if it has a split. Networks that use known labels see
            them: those with labels as inputs, FedSPA's, and unifilter. Others ignore them.
        client: the client whose encoding and decision are used, for a global model.
        device: where to compute.
        memory: what the computation may use, such as "8GB". A graph that needs more is predicted
            in blocks. "auto" is half of what is free.

    Raises:
        UserError: if the graph does not fit the model, or does not fit into memory.
    """
    own = model.for_client(client)
    found, notes = read_graph(graph, own)
    encoding = own.encoding or Encoding.at_home(own.width, "none")
    if not encoding.is_complete:
        raise UserError(
            "the clients kept the scales of their columns to themselves (encoding home), so that "
            "this file lacks them: predict with the model of a site"
        )
    raw = found.features if found.table is None else found.table
    if extra := encoding.ignored(raw):
        notes = (*notes, f"columns that were not trained with are ignored: {listed(extra)}")
    notes = (*notes, *prediction_notes(own.settings, found))
    encoded = encoding.encode(found)
    return replace(predict_encoded(own, encoded, device=device, memory=memory), notes=notes)


def predict_encoded(
    model: SavedModel, graph: Graph, *, device: str = "cpu", memory: str = AUTO
) -> Predictions:
    """Predict the nodes of a graph whose features are encoded already, such as a federation's."""
    logits = class_scores(model, graph, device=device, memory=memory).double()
    decision = model.decision
    chances = torch.softmax(logits, dim=1) if decision is None else decision.probabilities(logits)
    above = None if decision is None else decision.above(chances, model.classes)
    ids = np.arange(graph.num_nodes) if graph.node_ids is None else graph.node_ids
    return Predictions(
        ids, model.classes, chances.numpy(), None if above is None else above.numpy()
    )


# The graph ---------------------------------------------------------------------------------------


def read_graph(graph: Any, model: SavedModel) -> tuple[Graph, tuple[str, ...]]:
    """Return a graph with labels in the order of a model's classes, and notes for the user.

    If there are several graphs at a path, it is the one with the name of the model's client.
    """
    if isinstance(graph, Graph):
        return _checked_labels(graph, model), ()
    if not isinstance(graph, str | Path):
        return _checked_labels(conversion.as_graph(graph, model.classes), model), ()
    path = Path(graph).expanduser()
    kinds = None if model.encoding is None else model.encoding.kinds
    collection = files.read(path, labels="optional", kinds=kinds)
    names = [found.name for found in collection.graphs]
    if len(names) == 1:
        (found,) = collection.graphs
    elif model.client in names:
        found = collection.graphs[names.index(model.client)]
    else:
        raise UserError(f"{path}: holds {len(names)} graphs ({listed(names)}): give one")
    index = {name: i for i, name in enumerate(model.classes)}
    if strange := [name for name in collection.classes if name not in index]:
        raise UserError(
            f"{path}: has labels that the model does not know: {listed(strange)}. "
            f"It knows {listed(model.classes, 50)}. Leave labels empty where they are unknown"
        )
    # The last entry is for unlabelled nodes, whose label -1 indexes from the end.
    position = np.array([*(index[name] for name in collection.classes), UNLABELLED])
    return replace(found, labels=position[found.labels]), collection.notes


def _checked_labels(graph: Graph, model: SavedModel) -> Graph:
    if int(graph.labels.max(initial=UNLABELLED)) >= len(model.classes):
        raise UserError(
            f"graph '{graph.name}' has the label {graph.labels.max()}, but the model knows "
            f"{len(model.classes)} classes, from 0: {listed(model.classes, 50)}"
        )
    return graph


def _with_known_labels(graph: Graph) -> Graph:
    """Return the graph with a split whose train nodes are those with a label that is known."""
    empty = np.zeros(graph.num_nodes, dtype=np.bool_)
    split = graph.masks or next(iter(graph.own_masks), None)
    labelled = graph.labels != UNLABELLED
    known = labelled if split is None else split.train & labelled
    return replace(graph, masks=Masks(known, empty, empty), own_masks=())


# Class scores ------------------------------------------------------------------------------------


def class_scores(
    model: SavedModel, graph: Graph, *, device: str = "cpu", memory: str = AUTO
) -> Tensor:
    """Return the logits of every node of an encoded graph, on the host, `[n, C]`.

    Raises:
        UserError: if the width does not fit, or if the graph does not fit into memory and the
            method cannot predict in blocks.
    """
    check_device(device)
    model.check_weights()
    if graph.num_features != model.width:
        raise UserError(
            f"graph '{graph.name}' has {graph.num_features} features, but the model was trained "
            f"with {model.width}"
        )
    known = _with_known_labels(graph)
    method, network = model.make_method(), model.module
    free = free_memory(torch.device(device))
    limit = Settings(memory=memory).memory_limit()
    needed = bytes_to_predict(known, network, known.num_nodes, known.edges.shape[1])
    if needed <= (limit or free // 2):
        return _whole(model, known, device)
    reach = method.reach(network)
    if reach is not None:
        return _in_blocks(model, known, device, limit or free // 2, reach)
    if limit is None and needed <= free:
        return _whole(model, known, device)
    raise UserError(
        f"{model.method} with {model.network or model.backbone} predicts whole graphs only, and "
        f"this one needs about {_size(needed)}; {_size(limit or free)} "
        f"{'are allowed (--memory)' if limit else 'are free'}"
    )


def bytes_to_predict(graph: Graph, network: Backbone, nodes: int, edges: int) -> int:
    """Return a rough estimate of the memory for a part of a graph with some nodes and edges."""
    parts = [part for part in network.modules() if isinstance(part, Backbone)]
    hidden = max(part.shape.hidden for part in parts)  # those of a choir run one after another
    features: Any = graph.features
    if sp.issparse(features):
        per_node = PER_EDGE * features.nnz / max(graph.num_nodes, 1)
    else:
        per_node = 8.0 * graph.num_features
    return int(nodes * (per_node + 4 * ACTIVATIONS * hidden) + edges * PER_EDGE)


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _whole(model: SavedModel, graph: Graph, device: str) -> Tensor:
    settings, method = model.settings, model.make_method()
    cohort = cohort_of(
        settings, [graph], [(model.seed, model.number)], len(model.classes), device=device
    )
    clients = Clients(
        method,
        model.module.to(cohort.device),
        cohort,
        optimizer_of(settings),
        settings.epoch_range(),
    )
    with matmul_precision(settings.precision):
        return clients.predict(with_model(clients, model)).cpu()


def with_model(clients: Clients, model: SavedModel) -> Local:
    """Return a single client with a saved model."""

    def stacked(message: Message) -> Message:
        return {n: t.unsqueeze(0).to(clients.cohort.device) for n, t in message.items()}

    return clients.with_params(
        stacked(model.params), stacked(model.received), stacked(model.memory), model.round
    )


def _in_blocks(model: SavedModel, graph: Graph, device: str, limit: int, reach: int) -> Tensor:
    """Predict blocks of nodes, each within the nodes that its predictions depend on.

    One hop more than the network reaches is taken along, so that all nodes which it reaches have
    their degrees.
    """
    found: Tensor | None = None
    for targets, around in blocks(graph, model.module, limit, reach + 1):
        part = graph.subgraph(around)
        logits = _whole(model, part, device)[: len(targets)]
        if found is None:
            found = logits.new_empty(graph.num_nodes, logits.shape[1])
        found[torch.from_numpy(targets)] = logits
    assert found is not None
    return found


def blocks(
    graph: Graph, network: Backbone, limit: int, hops: int
) -> Iterator[tuple[IntArray, IntArray]]:
    """Divide the nodes of a graph into blocks whose neighbourhoods fit into memory.

    Args:
        graph: the graph.
        network: that will run on them.
        limit: the memory, in bytes.
        hops: how far a neighbourhood goes.

    Yields:
        The nodes of a block; and these nodes followed by all others within `hops`.

    Raises:
        UserError: if the neighbourhood of a single node is too large.
    """
    adjacency = graph.adjacency()
    degrees = np.diff(adjacency.indptr)
    # An order in which neighbours are close to each other, so that neighbourhoods overlap.
    order = sp.csgraph.reverse_cuthill_mckee(sp.csr_matrix(adjacency), symmetric_mode=True)
    waiting = [order.astype(np.int64)]
    seen = np.zeros(graph.num_nodes, dtype=np.bool_)
    while waiting:
        targets = waiting.pop()
        around = _ball(adjacency.indptr, adjacency.indices, targets, hops, seen)
        needed = bytes_to_predict(graph, network, len(around), int(degrees[around].sum()))
        if needed <= limit:
            yield targets, around
        elif len(targets) > 1:
            middle = len(targets) // 2
            waiting += [targets[middle:], targets[:middle]]
        else:
            raise UserError(
                f"node {targets[0]} has {len(around):,} nodes within {hops} hops, which need about "
                f"{_size(needed)}: give more --memory (it is {_size(limit)} now)"
            )


def _ball(
    indptr: npt.NDArray[Any],
    indices: npt.NDArray[Any],
    nodes: IntArray,
    hops: int,
    seen: npt.NDArray[np.bool_],
) -> IntArray:
    """Return nodes followed by all others within some hops; `seen` is all False before and after.

    The cost is that of the part that is reached, not of the graph.
    """
    parts = [nodes]
    seen[nodes] = True
    for _ in range(hops):
        rim = parts[-1]
        counts = indptr[rim + 1] - indptr[rim]
        first = np.repeat(indptr[rim] - (np.cumsum(counts) - counts), counts)
        near = indices[first + np.arange(len(first))]
        near = np.unique(near[~seen[near]]).astype(np.int64)
        if not len(near):
            break
        seen[near] = True
        parts.append(near)
    found = np.concatenate(parts)
    seen[found] = False
    return found


# Files -------------------------------------------------------------------------------------------


def check_out(file: Path) -> None:
    """Raise a `UserError` unless a file name ends in .csv or .parquet."""
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"--out {file}: end the name in .parquet or .csv")


def write(table: pd.DataFrame, file: Path) -> None:
    """Write predictions as Parquet or CSV, by the ending of the file name."""
    check_out(file)
    writers = {".parquet": table.to_parquet, ".csv": table.to_csv}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writers[file.suffix.lower()](file, index=False)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


# Runs --------------------------------------------------------------------------------------------


class WithModels(ABC):
    """What a run in memory and a run in a folder have in common: models, scores, predictions.

    Attributes:
        summary: as in `summary.json`; empty if there is none.
        records: of the rounds, as in `metrics.jsonl`.
    """

    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @abstractmethod
    def model(
        self, client: str | None = None, *, seed: int | None = None, which: str = BEST
    ) -> SavedModel:
        """Return a model."""

    def _own_graph(self, source: Any, seed: int | None) -> Graph | None:
        """Return the encoded graph of a client of the run; None if `source` is something else."""
        return None

    @property
    def history(self) -> pd.DataFrame:
        """The rounds: a row per round and seed.

        Scores are in columns such as `received/val/accuracy`: view, split and metric.
        """
        import pandas as pd

        seeds = self.summary.get("seeds") or [0]
        return pd.DataFrame([row for record in self.records for row in rows_of(record, seeds[0])])

    def predictions(
        self,
        source: Any,
        client: str | None = None,
        *,
        seed: int | None = None,
        which: str = BEST,
        device: str = "cpu",
        memory: str = AUTO,
    ) -> Predictions:
        """Predict the nodes of a graph.

        Args:
            source: a new graph: a `Graph`, a path, or what `polyphily.load` takes as a graph. For
                a `Result` also a client that was trained, by position or name.
            client: the client whose model predicts, where clients have models of their own; of a
                global model it is whose encoding and decision are used.
            seed: which of several runs; the first unless given.
            which: the model of the "best" validation round or the "last" one.
            device: where to compute.
            memory: what the computation may use, such as "8GB".
        """
        own = self._own_graph(source, seed)
        if own is None:
            model = self.model(client, seed=seed, which=which)
            return predict(model, source, device=device, memory=memory)
        model = self.model(client or own.name, seed=seed, which=which)
        return predict_encoded(model, own, device=device, memory=memory)

    def predict(
        self, source: Any, client: str | None = None, **options: Any
    ) -> npt.NDArray[np.str_]:
        """Return the class name of every node, in the order of the graph; see `predictions`."""
        return self.predictions(source, client, **options).labels

    def predict_proba(self, source: Any, client: str | None = None, **options: Any) -> pd.DataFrame:
        """Return the probabilities: a row per node id, a column per class; see `predictions`."""
        return self.predictions(source, client, **options).frame()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({headline(self.summary)})"


def headline(summary: Mapping[str, Any]) -> str:
    """Return method, data and main score of a run in a few words."""
    if not summary:
        return "no summary"
    clients = len(summary.get("clients", ()))
    words = f"{summary['method']} on {summary['dataset']}, {clients} clients"
    seeds = len(summary.get("seeds", ()))
    words += f", {seeds} seeds" if seeds > 1 else ""
    metric = summary["selection"]["metric"]
    score = summary["best_val"]["test"].get(metric)
    if score is None:
        return f"{words}, {summary['rounds']} rounds"
    return f"{words}, {summary['rounds']} rounds: test {metric} {score:.3f} at best validation"


def rows_of(record: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Return the record of a round as flat rows, one per seed."""
    runs = record.get("per_seed") or [{"seed": seed, **record}]
    shared = {k: v for k, v in record.items() if k in ("round", "stage", *SPANS)}
    return [{"seed": run["seed"], **shared, **_flat(run)} for run in runs]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        elif not isinstance(value, list | tuple):
            found[prefix + name] = value
    return found
