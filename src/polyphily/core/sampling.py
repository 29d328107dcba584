"""Neighbour sampling, for clients whose graphs are too large to train on as a whole.

A training step sees a batch of each client's train nodes. Layer by layer it also sees some
neighbours of the nodes that it has, drawn without replacement. Any backbone that reaches no further
than it has layers runs on such a `Batch`. Sums over drawn neighbours are scaled by the degree in
the whole graph over the number drawn. So the sums of a convolution are unbiased, and exact if all
neighbours are drawn. Models are evaluated on the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyphily.core.budget import OFF
from polyphily.core.links import Reading, all_link_weights, links_of, sums
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.directions import INWARD, OUTWARD
from polyphily.graphs.graph import Graph
from polyphily.nn.backbones import BACKBONES
from polyphily.nn.draws import Draws
from polyphily.nn.operators import Operators
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, multiply
from polyphily.nn.stacked import AttentionPattern, GraphView
from polyphily.nn.subgraphs import WeightedAttention

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort
    from polyphily.core.method import Method

T = TypeVar("T")


@dataclass(frozen=True)
class Sampling:
    """The part of each client's graph that a training step sees.

    Attributes:
        fanouts: the number of neighbours drawn per node, from the train nodes outwards; None for
            all of them.
        batch: the number of train nodes drawn; 0 for all of them.
    """

    fanouts: tuple[int | None, ...]
    batch: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Sampling | None:
        """Return the sampling that the settings ask for; None if a step sees everything.

        Raises:
            UserError: if the number of fanouts is not the number of layers.
        """
        fanouts = settings.fanouts()
        if fanouts is None and not settings.batch:
            return None
        assert settings.layers is not None
        chosen: tuple[int | None, ...] = fanouts or (None,)
        if len(chosen) == 1:
            chosen *= settings.layers
        if len(chosen) != settings.layers:
            raise UserError(
                f"--sample {settings.sample}: the network has {settings.layers} layers; give one "
                "number for each of them, or one for all"
            )
        return cls(chosen, settings.batch)

    def most_nodes(self, graph: Graph) -> int:
        """Return the largest number of nodes of a client that a step can see."""
        assert graph.masks is not None
        seen = wide = min(self.batch or graph.num_nodes, int(graph.masks.train.sum()))
        for fanout in self.fanouts:
            wide = graph.num_nodes if fanout is None else wide * fanout
            seen += wide
        return min(seen, graph.num_nodes)

    def draw(self, cohort: Cohort, draws: Draws) -> Batch:
        """Draw a batch of every client, from the client's own random stream."""
        near = cohort.cached("neighbours", Neighbours.of)
        seeds = self._train_nodes(cohort, draws)
        known = torch.zeros(cohort.num_nodes, dtype=torch.bool, device=cohort.device)
        known[seeds] = True
        frontier, found = seeds, []  # the frontier: nodes whose neighbours are drawn next
        for fanout in self.fanouts:
            found.append(near.drawn(frontier, fanout, draws, cohort.segments))
            known_before = known.clone()
            known[found[-1][1]] = True
            frontier = (known & ~known_before).nonzero().view(-1)
        rows, cols, weight, entries = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Batch(cohort, known.nonzero().view(-1), seeds, rows, cols, weight, entries)

    def _train_nodes(self, cohort: Cohort, draws: Draws) -> Tensor:
        """Draw the train nodes of a batch, ascending."""
        if not self.batch:
            return cohort.train_nodes
        segments = cohort.train_segments
        lots = draws.uniform(1, segments.pointers).view(-1)
        kept = lowest(lots, segments.owner, segments.counts, self.batch)
        return cohort.train_nodes[kept]


def check_sampling(method: Method, settings: Settings) -> None:
    """Check that a method and its backbone can be trained on samples, if the settings ask for it.

    Raises:
        UserError: if they cannot, with the backbones that can.
    """
    if settings.sample == OFF and not settings.batch:
        return
    flag = "--sample" if settings.sample != OFF else "--batch"
    reason = method.needs_whole_graph()
    if reason:
        raise UserError(f"{flag}: {method.name} needs whole graphs in every step: {reason}")
    Sampling.of(settings)
    if settings.backbone is not None and not BACKBONES.find(settings.backbone).local_reach:
        supported = method.supported_backbones()
        near = [name for name in supported if BACKBONES.find(name).local_reach]
        raise UserError(
            f"{flag}: {settings.backbone} reaches further than it has layers; "
            f"use one of {', '.join(near)}"
        )


def lowest(lots: Tensor, owner: Tensor, counts: Tensor, number: int) -> Tensor:
    """Return the indices of the `number` entries with the lowest lots of each owner, ascending.

    Args:
        lots: a number in [0, 1) for each entry.
        owner: the owner of each entry, ascending.
        counts: the number of entries of each owner.
        number: how many entries each owner keeps at most.
    """
    order = (owner + lots).argsort()  # sorts by owner, then by lot
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(lots), device=lots.device) - starts[owner]
    return order[rank < number].sort().values


@dataclass(frozen=True)
class Neighbours:
    """The adjacency of a cohort's nodes in CSR form, without a transpose.

    Attributes:
        crow: where the neighbours of each node begin.
        col: the neighbours that a node receives from.
        value: the weights of edges; None if all are 1.
        row_sums: the sum of the weights of each row; None if all are 1.
        col_sums: the sum of the weights of each column; None if all are 1.
    """

    crow: Tensor
    col: Tensor
    value: Tensor | None = None
    row_sums: Tensor | None = None
    col_sums: Tensor | None = None

    @classmethod
    def of(cls, cohort: Cohort) -> Neighbours:
        """Return the adjacency of a cohort."""
        starts, size = cohort.segments.pointers, cohort.num_nodes
        if not cohort.is_plain:
            rows, cols, weights = links_of(cohort.graphs, starts, cohort.reading)
            crow = np.concatenate([[0], np.bincount(rows, minlength=size)]).cumsum(dtype=np.int32)
            return cls(
                torch.from_numpy(crow).to(cohort.device),
                torch.from_numpy(cols.astype(np.int32)).to(cohort.device),
                *(
                    torch.from_numpy(values).to(cohort.device, cohort.dtype)
                    for values in (weights, sums(rows, weights, size), sums(cols, weights, size))
                ),
            )
        counts = [np.bincount(g.edges[0], minlength=g.num_nodes) for g in cohort.graphs]
        crow = np.concatenate([[0], *counts]).cumsum(dtype=np.int32)
        col = [
            (g.edges[1] + start).astype(np.int32)
            for g, start in zip(cohort.graphs, starts, strict=False)
        ]
        return cls(
            torch.from_numpy(crow).to(cohort.device),
            torch.from_numpy(np.concatenate(col)).to(cohort.device),
        )

    def drawn(
        self, nodes: Tensor, fanout: int | None, draws: Draws, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw neighbours of nodes.

        Returns:
            Rows, columns, how many neighbours each stands for, and their places in `col`.

        Args:
            nodes: the nodes, ascending.
            fanout: the largest number of neighbours drawn per node; None for all.
            draws: the clients' random streams.
            segments: the nodes of each client.
        """
        entries, owner, counts = _entries(self.crow, nodes)
        if fanout is None:
            kept = torch.arange(len(owner), device=owner.device)
        else:
            borders = torch.searchsorted(nodes, _borders(segments))
            # Each client draws one number for every neighbour of its nodes.
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[borders]
            lots = draws.uniform(1, ends.tolist()).view(-1)
            kept = lowest(lots, owner, counts, fanout)
        taken = counts if fanout is None else counts.clamp(max=fanout)
        weight = (counts / taken.clamp(min=1))[owner[kept]]
        taken_entries = entries[kept]
        return nodes[owner[kept]], self.col[taken_entries].long(), weight, taken_entries


def _link_values(cohort: Cohort, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a reading's links at the cohort's `Neighbours`, 0 where there is none.

    Sums over rows and columns follow.
    """
    values = all_link_weights(cohort.graphs, reading)
    if not cohort.is_plain:
        drawn = all_link_weights(cohort.graphs, cohort.reading) > 0
        assert not values[~drawn].any(), "edges are drawn in one direction only"
        values = values[drawn]
    rows, cols, weights = links_of(cohort.graphs, cohort.segments.pointers, reading)
    size = cohort.num_nodes
    found = (values, sums(rows, weights, size), sums(cols, weights, size))
    at, by_row, by_col = (torch.from_numpy(part).to(cohort.device, cohort.dtype) for part in found)
    return at, by_row, by_col


def _borders(segments: Segments) -> Tensor:
    return torch.tensor(segments.pointers, device=segments.device)


def _entries(crow: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries of some rows of a CSR matrix.

    Returns:
        Where each entry lies in the matrix, which of `rows` it is in, and the length of each row.
    """
    first = crow[rows].long()
    counts = crow[rows + 1].long() - first
    owner = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    number = torch.arange(len(owner), device=crow.device) - starts[owner]
    return first[owner] + number, owner, counts


def _matrix(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> SparseMatrix:
    """Return the pattern of coordinates that are sorted by row, computed on their device."""
    sorted_cols, permutation = torch.sort(cols, stable=True)

    def pointers(ascending: Tensor, size: int) -> Tensor:
        steps = torch.arange(size + 1, device=ascending.device)
        return torch.searchsorted(ascending, steps, out_int32=True)

    return SparseMatrix(
        shape=shape,
        crow=pointers(rows, shape[0]),
        col=cols.int(),
        crow_t=pointers(sorted_cols, shape[1]),
        col_t=rows[permutation].int(),
        permutation=permutation,
    )


class Batch:
    """The part of a cohort that a training step sees; a `TrainingGraph`.

    Its nodes are the drawn train nodes and all neighbours drawn around them. The outermost nodes
    have no neighbours here, so a network's output is meant for the drawn train nodes only. These
    are `train_nodes`.

    Args:
        cohort: the cohort that was sampled.
        nodes: the nodes that are seen, ascending.
        seeds: the drawn train nodes, ascending.
        rows: the target of each drawn edge.
        cols: the source of each drawn edge.
        weight: how many edges of its target each drawn edge stands for.
        entries: where each drawn edge is among those of the cohort's `Neighbours`.
    """

    sampling: Sampling | None = None  # a batch is not sampled again
    changes = False

    def __init__(
        self,
        cohort: Cohort,
        nodes: Tensor,
        seeds: Tensor,
        rows: Tensor,
        cols: Tensor,
        weight: Tensor,
        entries: Tensor,
    ) -> None:
        self.whole, self.nodes = cohort, nodes
        self.keys, self.federations, self.blocks = cohort.keys, cohort.federations, cohort.blocks
        self.classes, self.num_features = cohort.classes, cohort.num_features
        self.device, self.dtype, self.mixed = cohort.device, cohort.dtype, cohort.mixed
        self.segments = self._segments(nodes)
        self.train_segments = self._segments(seeds)
        # place[v] is the row of node v in this batch; undefined for nodes that are not in it
        place = torch.empty(cohort.num_nodes, dtype=torch.int64, device=cohort.device)
        place[nodes] = torch.arange(len(nodes), device=cohort.device)
        self.train_nodes, self.train_labels = place[seeds], cohort.labels[seeds]
        rows, cols = place[rows], place[cols]
        order = (rows * len(nodes) + cols).argsort()
        self.edges = _matrix(rows[order], cols[order], (len(nodes), len(nodes)))
        self.weight, self.entries = weight[order].to(cohort.dtype), entries[order]
        self._kept: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.whole)

    def _segments(self, nodes: Tensor) -> Segments:
        """Return how many of some nodes of the cohort, given ascending, each client has."""
        borders = torch.searchsorted(nodes, _borders(self.whole.segments))
        return Segments(tuple((borders[1:] - borders[:-1]).tolist()), self.device)

    @property
    def forward_only(self) -> Batch:
        return self

    def sample(self, draws: Draws) -> Batch:
        return self

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def constant(self, values: tuple[float, ...]) -> Tensor:
        return self.whole.constant(values)  # the cohort outlives the step

    def cached(self, key: Hashable, make: Callable[[Batch], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make(self)
        kept: T = self._kept[key]
        return kept

    def cached_per_graph(self, key: Hashable, make: Callable[[Graph], T]) -> list[T]:
        """Refuse: what is computed from whole graphs does not fit the nodes of a sample."""
        raise TypeError(
            "a sampled batch has no whole graphs: a method that uses `cached_per_graph` in a "
            "training step must say so in `needs_whole_graph`, a backbone by `local_reach = False`"
        )

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        x = self.whole.x
        if isinstance(x, Tensor):
            return x[self.nodes]
        assert x.value is not None
        entries, rows, _ = _entries(x.crow, self.nodes)
        taken = _matrix(rows, x.col[entries].long(), (len(self.nodes), x.shape[1]))
        return taken.with_value(x.value[entries])

    @cached_property
    def x_pointers(self) -> tuple[int, ...]:
        return self.segments.pointers_into(self.x)

    @cached_property
    def labels(self) -> Tensor:
        return self.whole.labels[self.nodes]

    @cached_property
    def num_train(self) -> Tensor:
        return self.train_segments.counts.to(self.dtype)

    @cached_property
    def train_onehot(self) -> Tensor:
        return torch.nn.functional.one_hot(self.train_labels, self.classes).to(self.dtype)

    @property
    def class_weights(self) -> Tensor:
        return self.whole.class_weights

    @cached_property
    def degrees(self) -> Tensor:
        """The number of neighbours of every node in the whole graph."""
        return self.whole.degrees[self.nodes]

    @cached_property
    def link_weights(self) -> Tensor | None:
        weights = self.whole.link_weights
        if weights is None:
            return None
        near = self.whole.cached("neighbours", Neighbours.of)
        assert near.value is not None
        return near.value[self.entries]

    @cached_property
    def _operators(self) -> Operators:
        """The operators of edges that have weights, or of one direction."""
        near = self.whole.cached("neighbours", Neighbours.of)
        assert near.value is not None
        assert near.row_sums is not None
        assert near.col_sums is not None
        return Operators(
            self.segments,
            self.edges,
            self.edges_with_loops,
            near.value[self.entries],
            near.row_sums[self.nodes],
            near.col_sums[self.nodes],
            self.weight,
        )

    def _part(self, reading: Reading) -> Operators:
        """Return the operators of those drawn edges that are links of a reading."""
        values, row_sums, col_sums = self.whole.cached(
            ("links", reading), lambda cohort: _link_values(cohort, reading)
        )
        own = values[self.entries]
        kept = own.nonzero().view(-1)
        shape = (len(self.nodes), len(self.nodes))
        edges = _matrix(self.edges.row[kept], self.edges.col_long[kept], shape)
        return Operators(
            self.segments,
            edges,
            edges,
            own[kept],
            row_sums[self.nodes],
            col_sums[self.nodes],
            self.weight[kept],
        )

    @cached_property
    def relations(self) -> tuple[SparseMatrix, ...]:
        return tuple(self._part(reading).mean for reading in self.whole.relation_readings)

    @cached_property
    def inward(self) -> Operators:
        return self._part(Reading(INWARD, self.whole.edge_weights))

    @cached_property
    def outward(self) -> Operators:
        return self._part(Reading(OUTWARD, self.whole.edge_weights))

    @cached_property
    def _loops(self) -> tuple[SparseMatrix, Tensor]:
        """The pattern with self-loops, and how many edges each entry stands for."""
        size = len(self.nodes)
        nodes = torch.arange(size, device=self.device)
        rows = torch.cat([self.edges.row, nodes])
        cols = torch.cat([self.edges.col_long, nodes])
        order = (rows * size + cols).argsort()
        weight = torch.cat([self.weight, self.weight.new_ones(size)])[order]
        return _matrix(rows[order], cols[order], (size, size)), weight

    @cached_property
    def edges_with_loops(self) -> SparseMatrix:
        return self._loops[0]

    @cached_property
    def attention(self) -> AttentionPattern:
        """The drawn edges, weighted by how many each stands for."""
        if not self.whole.is_plain:
            return self._operators.attention
        return WeightedAttention(*self._loops)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """An unbiased estimate of (D+I)^-1/2 (A+I) (D+I)^-1/2."""
        if not self.whole.is_plain:
            return self._operators.gcn
        pattern, weight = self._loops
        scale = (self.degrees + 1).rsqrt()
        return pattern.with_value(weight * scale[pattern.row] * scale[pattern.col_long])

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """An unbiased estimate of (D+I)^-1 (A+I)."""
        if not self.whole.is_plain:
            return self._operators.random_walk
        pattern, weight = self._loops
        return pattern.with_value(weight * (self.degrees + 1).reciprocal()[pattern.row])

    @cached_property
    def mean(self) -> SparseMatrix:
        """The mean over the neighbours drawn."""
        if not self.whole.is_plain:
            return self._operators.mean
        scale = self.degrees.clamp(min=1).reciprocal()
        return self.edges.with_value(self.weight * scale[self.edges.row])


class WholeGraph(GraphView):
    """A cohort's graph for passes without gradient.

    Its operators are the adjacency and a scale per node, without values at edges and without
    transposes. Only graph attention builds the cohort's own pattern.

    Args:
        cohort: the cohort.
    """

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self._cohort = cohort

    @property
    def _near(self) -> Neighbours:
        return self._cohort.cached("neighbours", Neighbours.of)

    @property
    def _row_sums(self) -> Tensor:
        sums = self._near.row_sums
        return self.degrees if sums is None else sums

    @property
    def _col_sums(self) -> Tensor:
        sums = self._near.col_sums
        return self.degrees if sums is None else sums

    @cached_property
    def gcn(self) -> ScaledAdjacency:
        left, right = ((s + 1).rsqrt().unsqueeze(1) for s in (self._row_sums, self._col_sums))
        return ScaledAdjacency(self._near, left, right, loops=True)

    @cached_property
    def random_walk(self) -> ScaledAdjacency:
        scale = (self._row_sums + 1).reciprocal().unsqueeze(1)
        return ScaledAdjacency(self._near, scale, None, loops=True)

    @cached_property
    def mean(self) -> ScaledAdjacency:
        sums = self._row_sums
        scale = torch.where(sums > 0, sums, 1).reciprocal().unsqueeze(1)
        return ScaledAdjacency(self._near, scale, None, loops=False)


@dataclass(frozen=True)
class ScaledAdjacency:
    """diag(left) (A [+ I]) diag(right), for products without gradient; a `Propagation`."""

    near: Neighbours
    left: Tensor
    right: Tensor | None
    loops: bool

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Return the product with a dense matrix."""
        assert not (torch.is_grad_enabled() and dense.requires_grad), "no gradient passes here"
        dense = dense if self.right is None else dense * self.right
        near = self.near
        value = None if near.value is None else near.value.to(dense.dtype)
        product = multiply(near.crow, near.col, value, len(self.left), dense)
        if self.loops:
            product += dense
        return product.mul_(self.left)
