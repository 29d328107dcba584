"""A cohort: the clients of one process, with their graphs as one block-diagonal graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.core.labels import LabelledFeatures, LabelsHidden
from polyphily.core.links import (
    Reading,
    all_link_weights,
    any_weights,
    check_relations,
    links_of,
    sums,
)
from polyphily.core.objective import balanced_weights
from polyphily.core.sampling import Sampling, WholeGraph
from polyphily.graphs.directions import BOTH, INWARD, OUTWARD, SEPARATE
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, alike
from polyphily.graphs.imbalance import train_counts
from polyphily.nn.draws import Draws, Streams
from polyphily.nn.operators import Operators
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import AttentionPattern, StackedGraph

FULL = 0.2  # share of stored entries above which features are made dense on a GPU

Key: TypeAlias = tuple[int, int]
T = TypeVar("T")


class TrainingGraph(StackedGraph, Protocol):
    """The stacked graph that a training step sees: a `Cohort`, or what a step sees of one.

    A `Batch` sampled from a cohort has its clients, in the same order, and fewer of their nodes.
    `LabelsHidden` has fewer train nodes.
    """

    def __len__(self) -> int:
        """Return the number of clients."""
        ...

    @property
    def keys(self) -> tuple[Key, ...]:
        """(seed, client) of every client."""
        ...

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The clients of each federation, if several are stacked."""
        ...

    @property
    def classes(self) -> int:
        """The number of classes."""
        ...

    @property
    def mixed(self) -> bool:
        """True if losses are computed under autocast to bfloat16."""
        ...

    @property
    def sampling(self) -> Sampling | None:
        """The sampling of `sample`; None if a step sees everything."""
        ...

    @property
    def changes(self) -> bool:
        """True if every training step sees something else (`sample`)."""
        ...

    @property
    def train_labels(self) -> Tensor:
        """The labels of `train_nodes`."""
        ...

    @property
    def num_train(self) -> Tensor:
        """The number of train nodes of each client, `[K]`, in `dtype`."""
        ...

    @property
    def train_onehot(self) -> Tensor:
        """One-hot labels of the train nodes, `[train nodes, classes]`."""
        ...

    @property
    def class_weights(self) -> Tensor:
        """Balanced weights of the classes, by the train labels of the cohort, `[K, classes]`."""
        ...

    @property
    def forward_only(self) -> StackedGraph:
        """The same graph for passes without gradient."""
        ...

    def sample(self, draws: Draws) -> TrainingGraph:
        """Return what the next training step sees."""
        ...

    def constant(self, values: tuple[float, ...]) -> Tensor:
        """Return numbers as a tensor, copied to the device once."""
        ...

    def cached(self, key: Hashable, make: Callable[[TrainingGraph], T]) -> T: ...


class Cohort:
    """The graphs of `K` clients as one graph, for training; a `TrainingGraph`.

    Only train labels are here: `labels` is -1 everywhere else, so that training code cannot read
    labels of other nodes. Evaluation has its own copy (`metrics.Evaluator`).

    Args:
        graphs: the clients' graphs, each with its masks drawn.
        keys: (seed, client) of every client; names the client's random streams.
        classes: number of classes.
        federations: the federation of each client if several are stacked, in ascending order;
            by default the clients of one seed form one.
        device: where the tensors live.
        dtype: the type of features and weights.
        mixed: whether losses are computed under autocast to bfloat16.
        sampling: what a training step sees of the graphs; None if it sees everything.
        label_inputs: the share of train labels that a training step hides if labels are inputs
            (`polyphily.core.labels`); 0 if they are not.
        direction: which neighbours the operators receive from if edges have a direction
            (`polyphily.core.links`); "separate" receives from all.
        edge_weights: whether weights of edges are used where there are any. If some clients'
            edges have weights and others' have none, the latter have weight 1.
        relation_names: the relations that `relations` tells apart; empty: all edges are of one.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        keys: Sequence[Key],
        classes: int,
        *,
        federations: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        mixed: bool = False,
        sampling: Sampling | None = None,
        label_inputs: float = 0.0,
        direction: str = BOTH,
        edge_weights: bool = True,
        relation_names: Sequence[str] = (),
    ) -> None:
        self.graphs = alike(graphs)
        self.direction, self.edge_weights = direction, edge_weights
        self.relation_names = tuple(relation_names)
        check_relations(self.graphs, self.relation_names)
        self.keys = tuple(keys)
        if federations is None:
            runs = groupby(seed for seed, _ in self.keys)
            federations = [s for s, (_, run) in enumerate(runs) for _ in run]
        self.federations = tuple(federations)
        self.classes = classes
        self.device = torch.device(device)
        self.dtype = dtype
        self.mixed, self.sampling, self.label_inputs = mixed, sampling, label_inputs
        self.segments = Segments(tuple(graph.num_nodes for graph in self.graphs), self.device)
        self._taken: dict[tuple[int, ...], Cohort] = {}
        self._latest: tuple[int, ...] = ()  # the non-contiguous one in `_taken`
        self._kept: dict[Hashable, Any] = {}
        # One cache per graph: a graph that occurs twice is worked on once.
        shared: dict[int, dict[Hashable, Any]] = {id(graph): {} for graph in self.graphs}
        self._own = tuple(shared[id(graph)] for graph in self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    @property
    def num_nodes(self) -> int:
        return self.segments.rows

    @property
    def num_features(self) -> int:
        """The width of `x` for one client."""
        return self.graphs[0].num_features + (self.classes if self.label_inputs else 0)

    @property
    def changes(self) -> bool:
        return self.sampling is not None or self.label_inputs > 0

    def take(self, clients: Sequence[int]) -> Cohort:
        """Return the cohort of some of these clients, in the order given.

        Cohorts of consecutive clients are cached, because an engine that trains in groups takes
        them in every round. Non-contiguous cohorts: only the most recent one is cached.
        """
        wanted = tuple(clients)
        if wanted == tuple(range(len(self))):
            return self
        if wanted in self._taken:
            return self._taken[wanted]
        taken = Cohort(
            [self.graphs[k] for k in wanted],
            [self.keys[k] for k in wanted],
            self.classes,
            federations=[self.federations[k] for k in wanted],
            device=self.device,
            dtype=self.dtype,
            mixed=self.mixed,
            sampling=self.sampling,
            label_inputs=self.label_inputs,
            direction=self.direction,
            edge_weights=self.edge_weights,
            relation_names=self.relation_names,
        )
        taken._own = tuple(self._own[k] for k in wanted)  # shares what is cached per graph
        if wanted != tuple(range(wanted[0], wanted[0] + len(wanted))):
            self._taken.pop(self._latest, None)
            self._latest = wanted
        self._taken[wanted] = taken
        return taken

    def repeated(self, times: int) -> Cohort:
        """Return a cohort of these clients several times over, each time as new federations."""
        count = len(self.blocks)
        found = Cohort(
            self.graphs * times,
            self.keys * times,
            self.classes,
            federations=[i * count + s for i in range(times) for s in self.federations],
            device=self.device,
            dtype=self.dtype,
            mixed=self.mixed,
            sampling=self.sampling,
            label_inputs=self.label_inputs,
            direction=self.direction,
            edge_weights=self.edge_weights,
            relation_names=self.relation_names,
        )
        found._own = self._own * times
        return found

    @cached_property
    def forward_only(self) -> StackedGraph:
        """This graph for passes without gradient.

        If training is on samples, this saves the memory of the operators of the whole graph.
        """
        return self if self.sampling is None else WholeGraph(self)

    def sample(self, draws: Draws) -> TrainingGraph:
        """Return what the next training step sees: this cohort, or a part of it."""
        if self.label_inputs:
            return LabelsHidden(self, self.labelled_features, draws, self.label_inputs)
        return self if self.sampling is None else self.sampling.draw(self, draws)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The clients of each federation, if several are stacked."""
        lengths = [len(list(run)) for _, run in groupby(self.federations)]
        ends = [0, *np.cumsum(lengths).tolist()]
        return tuple(slice(a, b) for a, b in pairwise(ends))

    def constant(self, values: tuple[float, ...]) -> Tensor:
        """Return numbers as a tensor, copied to the device once."""
        return self.cached(
            ("constant", values),
            lambda cohort: torch.tensor(values, dtype=cohort.dtype, device=cohort.device),
        )

    def cached(self, key: Hashable, make: Callable[[Cohort], T]) -> T:
        """Return `make(cohort)`, computed on first use and kept with this cohort.

        Use it for values per node, such as node statistics, propagated features or kinds of edges.
        State that a client carries from round to round belongs in its memory instead.
        """
        if key not in self._kept:
            self._kept[key] = make(self)
        kept: T = self._kept[key]
        return kept

    def cached_per_graph(self, key: Hashable, make: Callable[[Graph], T]) -> list[T]:
        """Return `make` of each client's graph, computed on first use.

        Cohorts taken from this one share these values.
        """
        for own, graph in zip(self._own, self.graphs, strict=True):
            if key not in own:
                own[key] = make(graph)
        return [own[key] for own in self._own]

    def draws(self, round_index: int | Tensor) -> Draws:
        """Return the random draws of a round; its number may be a tensor on the device."""
        return self._streams.of_round(round_index)

    @cached_property
    def _streams(self) -> Streams:
        return Streams(self.keys, self.device)

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        """Features: dense `[N, F]`, or sparse and block-diagonal `[N, K·F]`.

        If labels are inputs, those of all train nodes are among them.
        """
        return self.labelled_features.seen() if self.label_inputs else self.plain_x

    @cached_property
    def labelled_features(self) -> LabelledFeatures:
        """Features with columns for the labels of train nodes."""
        return LabelledFeatures(self, self.plain_x, self.classes)

    @cached_property
    def plain_x(self) -> Tensor | SparseMatrix:
        """Features without labels."""
        if sp.issparse(self.graphs[0].features) and not self._better_dense:
            width = self.graphs[0].num_features
            blocks = [sp.csr_array(graph.features) for graph in self.graphs]
            for block in blocks:
                block.sort_indices()
            rows = np.repeat(
                np.arange(self.num_nodes), np.concatenate([np.diff(b.indptr) for b in blocks])
            )
            cols = np.concatenate(
                [b.indices.astype(np.int64) + k * width for k, b in enumerate(blocks)]
            )
            return SparseMatrix.from_coordinates(
                rows,
                cols,
                np.concatenate([b.data for b in blocks]),
                (self.num_nodes, len(self) * width),
                dtype=self.dtype,
                device=self.device,
            )
        found: list[Any] = [graph.features for graph in self.graphs]
        dense = np.concatenate([f.toarray() if sp.issparse(f) else f for f in found])
        return torch.from_numpy(dense).to(self.device, self.dtype)

    @property
    def _better_dense(self) -> bool:
        """True if sparse features have so many entries that a GPU is faster on dense ones."""
        if self.device.type != "cuda":
            return False
        found: list[Any] = [graph.features for graph in self.graphs]
        stored = sum(features.nnz for features in found)
        return bool(stored > FULL * self.num_nodes * self.graphs[0].num_features)

    @cached_property
    def x_pointers(self) -> tuple[int, ...]:
        """The first stored feature entry of each client (the first row if `x` is dense)."""
        return self.segments.pointers_into(self.x)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of train nodes, -1 elsewhere."""
        parts = []
        for graph in self.graphs:
            assert graph.masks is not None, f"{graph.name}: no split was drawn"
            parts.append(np.where(graph.masks.train, graph.labels, UNLABELLED))
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    @cached_property
    def train_nodes(self) -> Tensor:
        return torch.nonzero(self.labels != UNLABELLED).view(-1)

    @cached_property
    def train_labels(self) -> Tensor:
        return self.labels[self.train_nodes]

    @cached_property
    def train_segments(self) -> Segments:
        """The train nodes of each client: `train_segments.sum(values_at_train_nodes)`."""
        owner = self.segments.owner[self.train_nodes]
        return Segments(tuple(owner.bincount(minlength=len(self)).tolist()), self.device)

    @cached_property
    def num_train(self) -> Tensor:
        """The number of train nodes of each client, `[K]`, in `dtype`."""
        return torch.tensor(self.train_segments.sizes, device=self.device, dtype=self.dtype)

    @cached_property
    def train_onehot(self) -> Tensor:
        """One-hot labels of the train nodes, `[train nodes, classes]`."""
        return torch.nn.functional.one_hot(self.train_labels, self.classes).to(self.dtype)

    @cached_property
    def class_weights(self) -> Tensor:
        """Balanced weights of the classes at each client, `[K, classes]`."""
        weights = balanced_weights(train_counts(self.graphs, self.classes))
        return torch.from_numpy(weights).to(self.device, self.dtype)

    @cached_property
    def edges(self) -> SparseMatrix:
        """The adjacency pattern: all ones, symmetric, no self-loops."""
        return self._pattern(loops=False)

    @cached_property
    def edges_with_loops(self) -> SparseMatrix:
        """The pattern A + I."""
        return self._pattern(loops=True)

    @property
    def attention(self) -> AttentionPattern:
        """The edges for graph attention."""
        return self.edges_with_loops if self.is_plain else self._operators.attention

    @cached_property
    def degrees(self) -> Tensor:
        """The number of neighbours of every node, in `dtype`."""
        counts = [np.bincount(g.edges[0], minlength=g.num_nodes) for g in self.graphs]
        return torch.from_numpy(np.concatenate(counts)).to(self.device, self.dtype)

    @cached_property
    def reading(self) -> Reading:
        """The way in which the operators read the edges."""
        direction = BOTH if self.direction == SEPARATE else self.direction
        return Reading(direction, self.edge_weights)

    @cached_property
    def is_plain(self) -> bool:
        """True if the operators read all edges, with weight 1."""
        return self.reading.is_plain(self.graphs)

    @cached_property
    def link_weights(self) -> Tensor | None:
        if not (self.edge_weights and any_weights(self.graphs)):
            return None
        return self._tensor(all_link_weights(self.graphs, Reading(BOTH)))

    @cached_property
    def relation_readings(self) -> tuple[Reading, ...]:
        """The way in which the edges of each of `relations` are read."""
        directions = (INWARD, OUTWARD) if self.direction == SEPARATE else (self.direction,)
        names = self.relation_names or (None,)
        return tuple(Reading(d, self.edge_weights, name) for d in directions for name in names)

    @cached_property
    def relations(self) -> tuple[SparseMatrix, ...]:
        return tuple(self.operators(each, loops=False).mean for each in self.relation_readings)

    @cached_property
    def inward(self) -> Operators:
        return self.operators(Reading(INWARD, self.edge_weights), loops=False)

    @cached_property
    def outward(self) -> Operators:
        return self.operators(Reading(OUTWARD, self.edge_weights), loops=False)

    @cached_property
    def _operators(self) -> Operators:
        """The operators of edges that have weights, or of one direction."""
        return self.operators(self.reading, loops=True)

    def operators(self, reading: Reading, *, loops: bool) -> Operators:
        """Build the operators of some links; with `loops` nodes receive from themselves, too."""
        rows, cols, weights = links_of(self.graphs, self.segments.pointers, reading)
        edges = self._matrix(np.stack([rows, cols]), loops=False)
        return Operators(
            self.segments,
            edges,
            self._matrix(np.stack([rows, cols]), loops=True) if loops else edges,
            self._tensor(weights),
            self._tensor(sums(rows, weights, self.num_nodes)),
            self._tensor(sums(cols, weights, self.num_nodes)),
        )

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device, self.dtype)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """(D+I)^-1/2 (A+I) (D+I)^-1/2."""
        if not self.is_plain:
            return self._operators.gcn
        scale = (self.degrees + 1).rsqrt()
        pattern = self.edges_with_loops
        return pattern.with_value(scale[pattern.row] * scale[pattern.col_long])

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """(D+I)^-1 (A+I)."""
        if not self.is_plain:
            return self._operators.random_walk
        pattern = self.edges_with_loops
        return pattern.with_value((self.degrees + 1).reciprocal()[pattern.row])

    @cached_property
    def mean(self) -> SparseMatrix:
        """D^-1 A: the mean over neighbours, zero for a node without any."""
        if not self.is_plain:
            return self._operators.mean
        return self.edges.with_value(self.degrees.clamp(min=1).reciprocal()[self.edges.row])

    def _pattern(self, *, loops: bool) -> SparseMatrix:
        """Build A, or A + I, from the clients' edges."""
        starts = self.segments.pointers
        ends: list[IntArray] = [g.edges + starts[k] for k, g in enumerate(self.graphs)]
        return self._matrix(np.concatenate(ends, axis=1), loops=loops)

    def _matrix(self, edges: IntArray, *, loops: bool) -> SparseMatrix:
        """Build the pattern of sorted edges between the cohort's nodes, or that plus I."""
        if loops:
            nodes = np.arange(self.num_nodes)
            edges = np.concatenate([edges, np.stack([nodes, nodes])], axis=1)
            edges = edges[:, np.lexsort((edges[1], edges[0]))]
        return SparseMatrix.from_coordinates(
            edges[0],
            edges[1],
            None,
            (self.num_nodes, self.num_nodes),
            dtype=self.dtype,
            device=self.device,
        )
