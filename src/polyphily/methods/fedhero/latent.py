"""Latent graphs of the k nearest: neighbours of every node, with learned edge weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from polyphily.methods.fedhero.distances import FeatureDistances
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import full

Weigh: TypeAlias = Callable[[Tensor, Neighbours], Tensor]
"""(similarities `[N, k]`, neighbours) -> edge weights `[N, k]`."""

Term: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(weights of edges, squared distances of their features) -> a term of a sum over edges."""


# From similarities to edge weights ---------------------------------------------------------------


def similarity_weights(score: Tensor, near: Neighbours) -> Tensor:
    """Weight an edge by its similarity; negative similarities become 0."""
    return score.relu()


def binary_weights(score: Tensor, near: Neighbours) -> Tensor:
    """Weight every edge by 1, Eq. (4), with the gradient of the similarity."""
    return straight_through(near.filled.to(score.dtype), score)


def straight_through(value: Tensor, score: Tensor) -> Tensor:
    """Return `value` with the gradient of `score`."""
    return value + (score - score.detach())


# The graph ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentPropagation:
    """A linear map of node features: own · x plus the sum over neighbours of near · x."""

    neighbours: Neighbours
    own: Tensor | None
    near: Tensor

    def __matmul__(self, dense: Tensor, /) -> Tensor:
        near = self.neighbours.weighted_sum(self.near, dense)
        return near if self.own is None else torch.addcmul(near, self.own, full(dense))


@dataclass(frozen=True)
class LatentGraph:
    """Neighbours with non-negative weights; implements `polyphily.nn.stacked.GraphOperators`.

    The graph is directed, so that every operator is normalised by row. Operators that include a
    node itself treat it as a neighbour of weight one.

    Attributes:
        neighbours: of every node.
        weight: of every edge, `[N, k]`.
        segments: the nodes of each client.
    """

    neighbours: Neighbours
    weight: Tensor
    segments: Segments

    @cached_property
    def gcn(self) -> LatentPropagation:
        """(D+I)^-1 (A+I)."""
        own = (1 + self.weight.sum(dim=1, keepdim=True)).reciprocal()
        return LatentPropagation(self.neighbours, own, self.weight * own)

    @property
    def random_walk(self) -> LatentPropagation:
        """(D+I)^-1 (A+I)."""
        return self.gcn

    @cached_property
    def mean(self) -> LatentPropagation:
        """D^-1 A; zero for a node without neighbours."""
        degree = self.weight.sum(dim=1, keepdim=True)
        scale = torch.where(degree > 0, degree, 1).reciprocal()
        return LatentPropagation(self.neighbours, None, self.weight * scale)

    @property
    def edges(self) -> Tensor:
        """The number of edges of every node, `[N]`."""
        return self.neighbours.filled.sum(dim=1)

    def sum_over_edges(
        self, term: Term, between: FeatureDistances, known: Tensor | None = None
    ) -> Tensor:
        """Compute each node's sum over its edges, `[N]`.

        Args:
            term: of weights and distances `[N, k]`.
            between: computes the distances.
            known: the distances, if they have been computed before.
        """
        distance = between(self.neighbours.index) if known is None else known
        return term(self.weight, distance).sum(dim=1)
