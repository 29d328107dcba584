"""A cohort: clients that live in one process, their graphs packed into one block-diagonal graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.core.sampling import Sampling, WholeGraph
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, alike
from polyphily.nn.draws import Draws, Streams
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix

FULL = 0.2  # share of stored entries above which features are dense on a GPU

Key: TypeAlias = tuple[int, int]
T = TypeVar("T")


class Cohort:
    """The graphs of `K` clients as one graph, for training.

    Only train labels are here: `labels` is -1 everywhere else, so that no training code can look at
    a label that it must not see. Evaluation has its own copy (`metrics.Evaluator`).

    Args:
        graphs: the clients' graphs, each with its masks drawn.
        keys: (seed, client) of every client; names the client's random streams.
        classes: number of classes.
        federations: which federation each client belongs to, where several are stacked, in
            ascending order; by default those of one seed are one.
        device: where the tensors live.
        dtype: of features and weights.
        mixed: whether losses are computed under autocast, in bfloat16 where that does no harm.
        sampling: what a training step sees of the graphs; None: everything.
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
    ) -> None:
        self.graphs = alike(graphs)
        self.keys = tuple(keys)
        if federations is None:
            runs = groupby(seed for seed, _ in self.keys)
            federations = [s for s, (_, run) in enumerate(runs) for _ in run]
        self.federations = tuple(federations)
        self.classes = classes
        self.device = torch.device(device)
        self.dtype = dtype
        self.mixed, self.sampling = mixed, sampling
        self.segments = Segments(tuple(graph.num_nodes for graph in self.graphs), self.device)
        self._taken: dict[tuple[int, ...], Cohort] = {}
        self._latest: tuple[int, ...] = ()  # of those that are not of consecutive clients
        self._kept: dict[Hashable, Any] = {}
        shared: dict[int, dict[Hashable, Any]] = {id(graph): {} for graph in self.graphs}
        self._own = tuple(shared[id(graph)] for graph in self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    @property
    def num_nodes(self) -> int:
        return self.segments.rows

    @property
    def num_features(self) -> int:
        return self.graphs[0].num_features

    def take(self, clients: Sequence[int]) -> Cohort:
        """The cohort of some of these clients, in the order given.

        Cohorts of consecutive clients are kept: an engine that trains in groups asks again. Of
        others the latest is: where some have stopped for good, the rest go on together.
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
        )
        taken._own = tuple(self._own[k] for k in wanted)
        if wanted != tuple(range(wanted[0], wanted[0] + len(wanted))):
            self._taken.pop(self._latest, None)
            self._latest = wanted
        self._taken[wanted] = taken
        return taken

    def repeated(self, times: int) -> Cohort:
        """These clients several times over, every time as federations of their own."""
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
        )
        found._own = self._own * times
        return found

    @cached_property
    def forward_only(self) -> Cohort:
        """This cohort for passes without gradient, where training never needs the whole graph."""
        return self if self.sampling is None else WholeGraph.of(self)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The clients of each federation that is stacked here."""
        lengths = [len(list(run)) for _, run in groupby(self.federations)]
        ends = [0, *np.cumsum(lengths).tolist()]
        return tuple(slice(a, b) for a, b in pairwise(ends))

    def constant(self, values: tuple[float, ...]) -> Tensor:
        """Numbers as a tensor of the cohort's, copied to the device once."""
        return self.once(
            ("constant", values),
            lambda cohort: torch.tensor(values, dtype=cohort.dtype, device=cohort.device),
        )

    def once(self, key: Hashable, make: Callable[[Cohort], T]) -> T:
        """What `make` computes from this cohort, computed on first use and kept: node statistics,
        propagated features, kinds of edges. Anything per node belongs here; what a client must keep
        from round to round belongs in its memory.
        """
        if key not in self._kept:
            self._kept[key] = make(self)
        kept: T = self._kept[key]
        return kept

    def of_each(self, key: Hashable, make: Callable[[Graph], T]) -> list[T]:
        """What `make` computes from each client's graph, kept as long as the client is around: a
        cohort taken from this one, whoever is in it, does not compute it again.
        """
        for own, graph in zip(self._own, self.graphs, strict=True):
            if key not in own:
                own[key] = make(graph)
        return [own[key] for own in self._own]

    def draws(self, round_index: int | Tensor) -> Draws:
        """The random draws of a round; the number may be a tensor on the cohort's device."""
        return self._streams.of_round(round_index)

    @cached_property
    def _streams(self) -> Streams:
        return Streams(self.keys, self.device)

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        """Features: dense `[N, F]`, or sparse and block-diagonal `[N, K·F]`."""
        if sp.issparse(self.graphs[0].features) and not self._better_dense:
            width = self.num_features
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
        """Whether sparse features are full enough for a GPU to do better with all entries."""
        if self.device.type != "cuda":
            return False
        found: list[Any] = [graph.features for graph in self.graphs]
        stored = sum(features.nnz for features in found)
        return bool(stored > FULL * self.num_nodes * self.num_features)

    @cached_property
    def x_pointers(self) -> tuple[int, ...]:
        """Where each client's stored feature entries begin (rows when dense)."""
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
        """Train nodes by client: `train_segments.sum(values_at_train_nodes)`."""
        owner = self.segments.owner[self.train_nodes]
        return Segments(tuple(owner.bincount(minlength=len(self)).tolist()), self.device)

    @cached_property
    def num_train(self) -> Tensor:
        return torch.tensor(self.train_segments.sizes, device=self.device, dtype=self.dtype)

    @cached_property
    def train_onehot(self) -> Tensor:
        """One-hot labels of the train nodes, `[train nodes, classes]`."""
        return torch.nn.functional.one_hot(self.train_labels, self.classes).to(self.dtype)

    @cached_property
    def edges(self) -> SparseMatrix:
        """The adjacency pattern (all ones, no self-loop). Symmetric."""
        return self._pattern(loops=False)

    @cached_property
    def edges_with_loops(self) -> SparseMatrix:
        return self._pattern(loops=True)

    @cached_property
    def degrees(self) -> Tensor:
        counts = self.edges.crow[1:] - self.edges.crow[:-1]
        return counts.to(self.dtype)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """(D+I)^-1/2 (A+I) (D+I)^-1/2."""
        scale = (self.degrees + 1).rsqrt()
        pattern = self.edges_with_loops
        return pattern.with_value(scale[pattern.row] * scale[pattern.col_long])

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """(D+I)^-1 (A+I)."""
        pattern = self.edges_with_loops
        return pattern.with_value((self.degrees + 1).reciprocal()[pattern.row])

    @cached_property
    def mean(self) -> SparseMatrix:
        """D^-1 A: the mean over neighbours, zero for a node without any."""
        return self.edges.with_value(self.degrees.clamp(min=1).reciprocal()[self.edges.row])

    def _pattern(self, *, loops: bool) -> SparseMatrix:
        starts = self.segments.pointers
        ends: list[IntArray] = [g.edges + starts[k] for k, g in enumerate(self.graphs)]
        edges = np.concatenate(ends, axis=1)
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
