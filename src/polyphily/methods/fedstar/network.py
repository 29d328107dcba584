"""FedStar's network: a channel for features and a channel for structure, which it feeds on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyphily.methods.fedstar.structure import Encodings
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import ACMConv, GCNConv, Linear, SAGEConv, zeros
from polyphily.nn.stacked import StackedGraph

STRUCTURE = "structure."
GIN = "gin"


class GINConv(nn.Module):
    """Graph isomorphism convolution (Xu et al. 2019): relu((x_v + sum of x_u) W + b) W' + b'."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = Linear(inputs, outputs, bias=False)
        self.bias = zeros(outputs)
        self.second = Linear(outputs, outputs)

    def forward(self, x: Tensor, graph: StackedGraph) -> Tensor:
        near = graph.edges_with_loops @ self.first(x, graph)
        out: Tensor = self.second((near + graph.segments.expand(self.bias)).relu(), graph)
        return out


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "acm-gcn": ACMConv,
    GIN: GINConv,
}


class StructureChannel(nn.Module):
    """g⁰ = W_s s, g^l = tanh(GCN(g^{l-1})): sees no features."""

    def __init__(self, inputs: int, shape: Shape) -> None:
        super().__init__()
        self.embed = Linear(inputs, shape.hidden)
        self.convs = nn.ModuleList(GCNConv(shape.hidden, shape.hidden) for _ in range(shape.layers))

    def forward(self, s: Tensor, graph: StackedGraph) -> list[Tensor]:
        """Return g⁰ to g^L."""
        found: list[Tensor] = [self.embed(s, graph)]
        for conv in self.convs:
            found.append(conv(found[-1], graph).tanh())
        return found


class TwoChannels(Backbone):
    """h^l = drop(relu(conv([h^{l-1}; g^{l-1}]))), then a head on [h^L; g^L].

    Args:
        shape: the size; `layers` counts the convolutions of each channel.
        encodings: the input of the structure channel.
        layer: the convolution of the feature channel, a name in `LAYERS`.
    """

    def __init__(self, shape: Shape, encodings: Encodings, layer: str) -> None:
        super().__init__(shape)
        self.encodings, self.layer = encodings, layer
        width = shape.hidden
        self.embed = Linear(shape.features, width)
        self.convs = nn.ModuleList(LAYERS[layer](2 * width, width) for _ in range(shape.layers))
        self.structure = StructureChannel(encodings.width, shape)
        self.join = Linear(2 * width, width)
        self.head = Linear(width, shape.classes)

    def describe(self) -> str:
        return f"feature channel {self.layer}, structure channel gcn"

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        *below, top = self.structure(self.encodings.of(graph), graph)
        h = self.embed(self.drop_input(graph, draws), graph)
        for conv, g in zip(self.convs, below, strict=True):
            h = self.drop(conv(joined(h, g), graph).relu(), graph, draws)
        embedding = self.join(joined(h, top), graph).relu()
        return Output(self.head(self.drop(embedding, graph, draws), graph), embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("head.")


def joined(h: Tensor, g: Tensor) -> Tensor:
    """Return [h; g]."""
    return torch.cat([h, g], dim=1)
