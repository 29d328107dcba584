"""DisenGCN: neighbourhood routing divides the neighbours of a node among factors (Ma et al. 2019).

Hidden features are `factors` blocks of equal width. Routing has no parameters: a neighbour is
counted in each factor by how much it resembles the node there, compared with the other factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.nn.backbones import Backbone, Output, Shape, register_backbone
from polyphily.nn.draws import Draws
from polyphily.nn.layers import Linear
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph


@register_backbone("disengcn", cite="Ma et al., ICML 2019")
class DisenGCN(Backbone):
    """Disentangled graph convolutional network: a projection, routing layers, a linear classifier.

    The projection and the classifier count as layers. There is at least one routing layer.
    Parameters of a layer start uniformly in ±1/sqrt(n), n being the hidden width.

    Args:
        shape: `hidden` is the width of all factors together, rounded up to a multiple of them.
        factors: number of factors.
        iterations: routing steps in each layer.
    """

    local_reach = False  # a routed sum takes all neighbours of a node, not some that are drawn
    weighted_edges = False

    def __init__(self, shape: Shape, factors: int = 2, iterations: int = 6) -> None:
        super().__init__(shape)
        self.factors, self.iterations = factors, iterations
        self.width = -(-shape.hidden // factors)
        self.project = Linear(shape.features, self.embedding_width)
        self.head = Linear(self.embedding_width, shape.classes)
        bound = 1 / math.sqrt(self.embedding_width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def embedding_width(self) -> int:
        return self.factors * self.width

    @property
    def depth(self) -> int:
        """The number of routing layers."""
        return max(self.shape.layers - 2, 1)

    @property
    def reach(self) -> int:
        return self.depth

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        x = F.leaky_relu(self.project(self.drop_input(graph, draws), graph))
        x = self.drop(x, graph, draws)
        for _ in range(self.depth):
            x = self.convolve(x, graph, draws)
        return Output(self.head(x, graph), x)

    def convolve(self, x: Tensor, graph: StackedGraph, draws: Draws | None) -> Tensor:
        """Return the output of a routing layer, after activation and dropout."""
        routed = route(torch.split(x, self.width, dim=1), graph.edges, self.iterations)
        return self.drop(F.leaky_relu(torch.cat(routed, dim=1)), graph, draws)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("head.")


def route(factors: Sequence[Tensor], edges: SparseMatrix, iterations: int) -> list[Tensor]:
    """Route the neighbours of every node to factors.

    With x^q of unit length and u = x at first, each iteration computes for every edge w -> v

        p^q = softmax over q of x_w^q · u_v^q,    u_v^q = unit(x_v^q + sum_w p^q x_w^q).

    No tensor has a row of features for each edge.

    Args:
        factors: x^q of every factor, `[nodes, width]`.
        edges: the entry (v, w) is the edge w -> v.
        iterations: how often.
    """
    x = [unit(factor) for factor in factors]
    u = x
    for _ in range(iterations):
        alike = torch.stack([edges.products(u_q, x_q) for u_q, x_q in zip(u, x, strict=True)])
        shares = in_double(lambda scores: scores.softmax(dim=0), alike)
        u = [unit(x_q + edges.with_value(p) @ x_q) for p, x_q in zip(shares, x, strict=True)]
    return u


def in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function in float64 and return its value in the type of `x`.

    Kernels round exponentials at the end of a vector differently from the others. Repeated routing
    amplifies the difference, and a client's features would depend on who else is stacked.
    """
    return function(x.double()).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """Scale rows to unit length; rows of zeros, where all was dropped, stay zero."""
    scaled: Tensor = _Unit.apply(x)  # type: ignore[no-untyped-call]
    return scaled


class _Unit(torch.autograd.Function):
    """y = x / |x|, whose gradient is (g - y (y · g)) / |x|.

    In this form the gradient is exactly zero if a row has a single entry left after dropout, where
    that of the quotient is a rounding error times 1 / |x|. It is zero for rows of zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = x.norm(dim=1, keepdim=True)
        inverse = torch.where(length > 0, 1 / length, 0)
        y = x / torch.where(length > 0, length, 1)
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, inverse = ctx.saved_tensors
        found: Tensor = (grad - y * (y * grad).sum(dim=1, keepdim=True)) * inverse
        return found
