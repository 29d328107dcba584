"""FedGNN's network: a GCN whose last layer sees matched nodes of other clients, too."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from polyphily.methods.fedgnn.matching import Slots
from polyphily.nn.backbones import GCN
from polyphily.nn.layers import GCNConv, matmul
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import GraphOperators, GraphView, StackedGraph


class Expanded(GraphView):
    """A graph in which node v has m_v further neighbours, all with one constant embedding.

    Args:
        graph: the graph.
        slots: the nodes that have matches.
        means: the mean embedding of the matches of each slot, `[K, slots, width]`.
        matches: how many there are, `[K, slots]`.
    """

    def __init__(self, graph: StackedGraph, slots: Slots, means: Tensor, matches: Tensor) -> None:
        super().__init__(graph)
        self.nodes, self.means = slots.members.transposed, means
        self.further = (self.nodes @ matches.reshape(-1, 1)).view(-1)

    @cached_property
    def sizes(self) -> Tensor:
        """d_v + 1 + m_v."""
        return self.degrees + 1 + self.further

    @cached_property
    def within(self) -> SparseMatrix:
        """The normalised A + I of the expanded graph, at the client's own nodes."""
        scale, pattern = self.sizes.rsqrt(), self.edges_with_loops
        return pattern.with_value(scale[pattern.row] * scale[pattern.col_long])

    def from_elsewhere(self, weight: Tensor) -> Tensor:
        """Return what the further neighbours send: m_v / (d_v + 1 + m_v) times their mean.

        A node with the same neighbours is taken to have the same degree.
        """
        sent = torch.bmm(self.means, weight).flatten(0, 1)
        return (self.further / self.sizes).unsqueeze(1) * (self.nodes @ sent)


class ExpandedConv(GCNConv):
    """A graph convolution that takes the further neighbours of an `Expanded` graph in."""

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperators) -> Tensor:
        if not isinstance(graph, Expanded):
            return super().forward(x, graph)
        own = graph.within @ matmul(x, self.weight, graph)
        return own + graph.from_elsewhere(self.weight) + graph.segments.expand(self.bias)


class ExpandedGCN(GCN):
    """A GCN whose last layer is an `ExpandedConv`; on other graphs it is a plain GCN."""

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return ExpandedConv(inputs, outputs) if last else super().layer(inputs, outputs, last)

    def describe(self) -> str:
        return f"{self.name} with matched neighbours"
