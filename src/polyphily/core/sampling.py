"""Neighbour sampling, for clients whose graphs are too large to train on as a whole.

A step sees a batch of each client's train nodes and, layer by layer, some neighbours of what it
sees already, drawn without replacement. A `Batch` stands in a cohort's place: any backbone that
reaches as many steps as there are layers runs on it. Sums over drawn neighbours are scaled up by
degree over number drawn, with the degrees of the whole graph: what a convolution adds up is right
in the mean, and exact where all neighbours are drawn. Models are scored on the whole graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from polyphily.core.settings import OFF, Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.nn.draws import Draws
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, multiply
from polyphily.nn.subgraphs import WeightedAttention

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort
    from polyphily.core.method import Method

FAR = ("gpr-gnn",)  # backbones that reach further than their number of layers
T = TypeVar("T")


@dataclass(frozen=True)
class Sampling:
    """What a step sees of each client's graph.

    Attributes:
        fanouts: neighbours drawn of a node, from the train nodes outwards; None: all of them.
        batch: train nodes drawn; 0: all of them.
    """

    fanouts: tuple[int | None, ...]
    batch: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Sampling | None:
        """As the settings ask for it; None where a step sees everything."""
        fanouts = parse(settings.sample)
        if fanouts is None and not settings.batch:
            return None
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
        """As many nodes of a client as a step sees at most."""
        assert graph.masks is not None
        seen = wide = min(self.batch or graph.num_nodes, int(graph.masks.train.sum()))
        for fanout in self.fanouts:
            wide = graph.num_nodes if fanout is None else wide * fanout
            seen += wide
        return min(seen, graph.num_nodes)

    def draw(self, cohort: Cohort, draws: Draws) -> Cohort:
        """A batch of every client, by the client's own random numbers."""
        near = cohort.once("neighbours", Neighbours.of)
        seeds = self._train_nodes(cohort, draws)
        known = torch.zeros(cohort.num_nodes, dtype=torch.bool, device=cohort.device)
        known[seeds] = True
        frontier, found = seeds, []
        for fanout in self.fanouts:
            found.append(near.drawn(frontier, fanout, draws, cohort.segments))
            known_before = known.clone()
            known[found[-1][1]] = True
            frontier = (known & ~known_before).nonzero().view(-1)
        rows, cols, weight = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cast("Cohort", Batch(cohort, known.nonzero().view(-1), seeds, rows, cols, weight))

    def _train_nodes(self, cohort: Cohort, draws: Draws) -> Tensor:
        if not self.batch:
            return cohort.train_nodes
        segments = cohort.train_segments
        lots = draws.uniform(1, segments.pointers).view(-1)
        kept = lowest(lots, segments.owner, segments.counts, self.batch)
        return cohort.train_nodes[kept]


def parse(text: str) -> tuple[int, ...] | None:
    """Numbers of neighbours as a user writes them; None where it is off.

    >>> parse("15,10")
    (15, 10)
    """
    if text == OFF:
        return None
    if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*(,\s*0*[1-9][0-9]*\s*)*", text):
        raise UserError(
            f"--sample {text}: give the neighbours to draw in each layer, such as 10,10, or off"
        )
    return tuple(int(part) for part in text.split(","))


def check(method: Method, settings: Settings) -> None:
    """Raises a `UserError` where a method or a backbone cannot be trained on samples."""
    if Sampling.of(settings) is None:
        return
    flag = "--sample" if settings.sample != OFF else "--batch"
    if settings.backbone in FAR:
        raise UserError(
            f"{flag}: {settings.backbone} reaches further than it has layers; take gcn, sage, "
            "gat, acm-gcn or mlp"
        )
    reason = method.whole_graph()
    if reason:
        raise UserError(f"{flag}: {method.name} needs whole graphs in every step: {reason}")


def lowest(lots: Tensor, owner: Tensor, counts: Tensor, number: int) -> Tensor:
    """Which entries have one of the `number` lowest lots among those of their owner, ascending.

    Args:
        lots: in [0, 1).
        owner: of each entry, ascending.
        counts: how many entries each owner has.
        number: how many each owner keeps, at most.
    """
    order = (owner + lots).argsort()  # owner by owner, as the entries are
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(lots), device=lots.device) - starts[owner]
    return order[rank < number].sort().values


@dataclass(frozen=True)
class Neighbours:
    """The adjacency of a cohort's nodes in CSR form, without values and without a transpose."""

    crow: Tensor
    col: Tensor

    @classmethod
    def of(cls, cohort: Cohort) -> Neighbours:
        starts = cohort.segments.pointers
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

    def degrees(self, dtype: torch.dtype) -> Tensor:
        return (self.crow[1:] - self.crow[:-1]).to(dtype)

    def drawn(
        self, nodes: Tensor, fanout: int | None, draws: Draws, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Some neighbours of nodes: rows, columns, and what each stands for.

        Args:
            nodes: ascending.
            fanout: how many of a node at most; None: all.
            draws: the clients' random numbers.
            segments: the nodes of each client.
        """
        entries, owner, counts = _entries(self.crow, nodes)
        if fanout is None:
            kept = torch.arange(len(owner), device=owner.device)
        else:
            borders = torch.searchsorted(nodes, _borders(segments))
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[borders]
            lots = draws.uniform(1, ends.tolist()).view(-1)
            kept = lowest(lots, owner, counts, fanout)
        taken = counts if fanout is None else counts.clamp(max=fanout)
        weight = (counts / taken.clamp(min=1))[owner[kept]]
        return nodes[owner[kept]], self.col[entries[kept]].long(), weight


def _borders(segments: Segments) -> Tensor:
    return torch.tensor(segments.pointers, device=segments.device)


def _entries(crow: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the entries of some rows of a CSR matrix lie; which of the rows each is in; how many
    each row has."""
    first = crow[rows].long()
    counts = crow[rows + 1].long() - first
    owner = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    number = torch.arange(len(owner), device=crow.device) - starts[owner]
    return first[owner] + number, owner, counts


def _matrix(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> SparseMatrix:
    """A pattern from coordinates sorted by row, and its transpose, on their device."""
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
    """The part of a cohort that a step sees, in the cohort's place.

    Its nodes are the drawn train nodes and all that was drawn around them. The neighbourhoods of
    the outermost nodes are not there: what a network computes is right at the drawn train nodes,
    which are `train_nodes` here.

    Args:
        cohort: the whole.
        nodes: those that are seen, ascending.
        seeds: the drawn train nodes, ascending.
        rows: nodes to which messages go,
        cols: where they come from,
        weight: and how many neighbours each stands for.
    """

    sampling = None

    def __init__(
        self,
        cohort: Cohort,
        nodes: Tensor,
        seeds: Tensor,
        rows: Tensor,
        cols: Tensor,
        weight: Tensor,
    ) -> None:
        self.whole, self.nodes = cohort, nodes
        self.keys, self.federations, self.blocks = cohort.keys, cohort.federations, cohort.blocks
        self.classes, self.num_features = cohort.classes, cohort.num_features
        self.device, self.dtype, self.constant = cohort.device, cohort.dtype, cohort.constant
        self.segments = self._segments(nodes)
        self.train_segments = self._segments(seeds)
        place = torch.empty(cohort.num_nodes, dtype=torch.int64, device=cohort.device)
        place[nodes] = torch.arange(len(nodes), device=cohort.device)
        self.train_nodes, self.train_labels = place[seeds], cohort.labels[seeds]
        rows, cols = place[rows], place[cols]
        order = (rows * len(nodes) + cols).argsort()
        self.edges = _matrix(rows[order], cols[order], (len(nodes), len(nodes)))
        self.weight = weight[order].to(cohort.dtype)
        self._kept: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.whole)

    def _segments(self, nodes: Tensor) -> Segments:
        borders = torch.searchsorted(nodes, _borders(self.whole.segments))
        return Segments(tuple((borders[1:] - borders[:-1]).tolist()), self.device)

    @property
    def forward_only(self) -> Batch:
        return self

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def once(self, key: Hashable, make: Callable[[Cohort], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make(cast("Cohort", self))
        kept: T = self._kept[key]
        return kept

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

    @cached_property
    def degrees(self) -> Tensor:
        """In the whole graph."""
        near = self.whole.once("neighbours", Neighbours.of)
        return (near.crow[self.nodes + 1] - near.crow[self.nodes]).to(self.dtype)

    @cached_property
    def _loops(self) -> tuple[SparseMatrix, Tensor]:
        """The pattern with self-loops, and what each entry stands for."""
        size = len(self.nodes)
        nodes = torch.arange(size, device=self.device)
        rows = torch.cat([self.edges.row, nodes])
        cols = torch.cat([self.edges.col_long, nodes])
        order = (rows * size + cols).argsort()
        weight = torch.cat([self.weight, self.weight.new_ones(size)])[order]
        return _matrix(rows[order], cols[order], (size, size)), weight

    @cached_property
    def edges_with_loops(self) -> SparseMatrix:
        """The pattern, its softmax weighted by what each entry stands for (graph attention)."""
        return cast(SparseMatrix, WeightedAttention(*self._loops))

    @cached_property
    def gcn(self) -> SparseMatrix:
        """(D+I)^-1/2 (A+I) (D+I)^-1/2 in the mean over draws."""
        pattern, weight = self._loops
        scale = (self.degrees + 1).rsqrt()
        return pattern.with_value(weight * scale[pattern.row] * scale[pattern.col_long])

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """(D+I)^-1 (A+I) in the mean over draws."""
        pattern, weight = self._loops
        return pattern.with_value(weight * (self.degrees + 1).reciprocal()[pattern.row])

    @cached_property
    def mean(self) -> SparseMatrix:
        """The mean over the neighbours drawn."""
        scale = self.degrees.clamp(min=1).reciprocal()
        return self.edges.with_value(self.weight * scale[self.edges.row])


class WholeGraph:
    """A cohort for passes without gradient, its operators made of the adjacency and a scale per
    node: no values at edges, no transposes. Graph attention takes the cohort's own pattern."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort

    @classmethod
    def of(cls, cohort: Cohort) -> Cohort:
        return cast("Cohort", cls(cohort))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cohort, name)

    def __len__(self) -> int:
        return len(self.cohort)

    @property
    def _near(self) -> Neighbours:
        return self.cohort.once("neighbours", Neighbours.of)

    @cached_property
    def degrees(self) -> Tensor:
        return self._near.degrees(self.cohort.dtype)

    @cached_property
    def gcn(self) -> SparseMatrix:
        scale = (self.degrees + 1).rsqrt().unsqueeze(1)
        return cast(SparseMatrix, _Scaled(self._near, scale, scale, loops=True))

    @cached_property
    def random_walk(self) -> SparseMatrix:
        scale = (self.degrees + 1).reciprocal().unsqueeze(1)
        return cast(SparseMatrix, _Scaled(self._near, scale, None, loops=True))

    @cached_property
    def mean(self) -> SparseMatrix:
        scale = self.degrees.clamp(min=1).reciprocal().unsqueeze(1)
        return cast(SparseMatrix, _Scaled(self._near, scale, None, loops=False))


@dataclass(frozen=True)
class _Scaled:
    """diag(left) (A [+ I]) diag(right)."""

    near: Neighbours
    left: Tensor
    right: Tensor | None
    loops: bool

    def __matmul__(self, dense: Tensor) -> Tensor:
        assert not (torch.is_grad_enabled() and dense.requires_grad), "no gradient passes here"
        dense = dense if self.right is None else dense * self.right
        product = multiply(self.near.crow, self.near.col, None, len(self.left), dense)
        if self.loops:
            product += dense
        return product.mul_(self.left)
