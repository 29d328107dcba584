"""Latent graphs of Bernoulli edges: every pair of nodes, drawn with its score as probability.

A client of n nodes has n² such pairs. They are drawn in blocks of rows whenever they are needed,
also in the backward pass, from a hash of the pair. No n x n matrix is ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyphily.core.cohort import Cohort
from polyphily.methods.fedhero.distances import FeatureDistances
from polyphily.methods.fedhero.latent import Term, straight_through
from polyphily.methods.fedhero.search import Block, row_blocks
from polyphily.nn.draws import Draws, scrambled, shifted
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import full
from polyphily.nn.stacked import StackedGraph

EVALUATION = (1 << 31) - 1  # the number of no round: its draws are those of evaluation
DIGITS = 24  # of a random number, in base 2: as many as float32 holds

PairScores: TypeAlias = Callable[[Block], Tensor]
"""A block of pairs -> their scores `[rows, nodes]`, with gradients."""


def pair_words(draws: Draws, clients: int) -> Tensor:
    """Draw the two words of each client that decide which pairs are edges, `[clients, 2]`."""
    numbers = draws.uniform(2, range(clients + 1))
    return (numbers * 2.0**32 - 2.0**31).int()


def evaluation_words(graph: StackedGraph) -> Tensor:
    """Return the words of evaluation: they depend on seed and client, not on the round."""
    assert isinstance(graph, Cohort), "latent edges are drawn among all nodes of a client"
    return graph.cached(
        "fedhero: draws of evaluation",
        lambda cohort: pair_words(cohort.draws(EVALUATION), len(cohort)),
    )


@dataclass(frozen=True)
class SampledPropagation:
    """The mean of node features over drawn neighbours, and over the node itself with `loops`.

    It is zero for a node that has nothing to average.
    """

    graph: SampledGraph
    loops: bool

    def __matmul__(self, dense: Tensor, /) -> Tensor:
        x = full(dense)
        counted = torch.cat([x, x.new_ones(len(x), 1)], dim=1)  # the last column sums to degrees
        total = self.graph.by_rows(lambda block: self.graph.drawn(block) @ counted[block.nodes])
        if self.loops:
            total = total + counted
        near, degree = total[:, :-1], total[:, -1:]
        return near / torch.where(degree > 0, degree, 1)


@dataclass(frozen=True)
class SampledGraph:
    """Ã_uv ~ Bernoulli(a_uv) for all pairs; implements `polyphily.nn.stacked.GraphOperators`.

    Operators are normalised as those of `LatentGraph` are. A node is never its own neighbour.

    Attributes:
        scores: a_uv of a block of pairs.
        words: what the random numbers of each client are hashed from, `[K, 2]`.
        segments: the nodes of each client.
    """

    scores: PairScores
    words: Tensor
    segments: Segments

    def drawn(self, block: Block) -> Tensor:
        """Draw a block of Ã, 0 or 1; the gradient is that of the probability."""
        chance = self.scores(block).clamp(0, 1)
        chance.diagonal(block.diagonal).zero_()
        edges = (self.noise(block) < chance).to(chance.dtype)
        return straight_through(edges, chance)

    def noise(self, block: Block) -> Tensor:
        """Compute uniform numbers in [0, 1) for a block, hashes of client, row and column."""
        first, second = self.words[block.client]
        count = block.nodes.stop - block.nodes.start
        nodes = torch.arange(count, device=self.words.device, dtype=torch.int32)
        rows = nodes[block.diagonal : block.diagonal + block.rows.stop - block.rows.start]
        number = scrambled(rows.unsqueeze(1) * count + nodes + first)
        return shifted(scrambled(number ^ second), 32 - DIGITS) * 2.0**-DIGITS

    def by_rows(self, compute: Callable[[Block], Tensor]) -> Tensor:
        """Compute something block by block, `[N, …]`, and again in the backward pass."""

        def in_full(block: Block) -> Tensor:
            with torch.autocast(self.words.device.type, enabled=False):
                return compute(block)

        return torch.cat(
            [
                checkpoint(in_full, block, use_reentrant=False, preserve_rng_state=False)
                for block in row_blocks(self.segments, self.words)
            ]
        )

    @property
    def gcn(self) -> SampledPropagation:
        """(D+I)^-1 (A+I)."""
        return SampledPropagation(self, loops=True)

    @property
    def random_walk(self) -> SampledPropagation:
        """(D+I)^-1 (A+I)."""
        return self.gcn

    @property
    def mean(self) -> SampledPropagation:
        """D^-1 A; zero for a node without neighbours."""
        return SampledPropagation(self, loops=False)

    @property
    def edges(self) -> Tensor:
        """The number of edges of every node, `[N]`."""
        with torch.no_grad():
            return self.by_rows(lambda block: self.drawn(block).sum(dim=1))

    def sum_over_edges(
        self, term: Term, between: FeatureDistances, known: Tensor | None = None
    ) -> Tensor:
        """Compute each node's sum over its edges, `[N]`, as `LatentGraph` does."""
        return self.by_rows(
            lambda block: term(self.drawn(block), between.of_block(block)).sum(dim=1)
        )
