"""Residual backbones: blocks of a normalisation and a convolution, each added to its input.

A linear layer maps features to the hidden width. Every block computes

    h <- h + dropout(relu(conv(n) + n W_s)),   n = LayerNorm(h),

then a last normalisation and a linear classifier follow. `layers` is the number of blocks. W_s is
a path for the node's own features beside GCN and GAT, which average them with those of neighbours.
GraphSAGE and ACM have such a path already. The bias is that of the convolution.

Normalising the input of a residual block follows Platonov et al. 2023, the linear path inside it
Luo et al. 2024. The former have a perceptron of two layers behind each convolution. The latter
normalise behind the convolution and do not add the input itself.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from polyphily.errors import UserError
from polyphily.nn.backbones import Backbone, Output, Shape, register_backbone
from polyphily.nn.draws import Draws
from polyphily.nn.layers import ACMConv, GATConv, GCNConv, LayerNorm, Linear, SAGEConv
from polyphily.nn.stacked import StackedGraph

CITATION = "after Platonov et al., ICLR 2023, and Luo et al., NeurIPS 2024"


class Block(nn.Module):
    """relu(conv(n) + n W_s), n = LayerNorm(h): what a block adds to h, before dropout.

    Args:
        conv: a convolution from the hidden width to the same width.
        width: the hidden width.
        own_path: whether there is a path n W_s beside the convolution.
    """

    def __init__(self, conv: nn.Module, width: int, *, own_path: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.conv = conv
        self.own = Linear(width, width, bias=False) if own_path else None

    def forward(self, h: Tensor, graph: StackedGraph) -> Tensor:
        n = self.norm(h, graph)
        out: Tensor = self.conv(n, graph)
        return (out if self.own is None else out + self.own(n, graph)).relu()


class Residual(Backbone):
    """A linear input, `layers` residual blocks, a normalisation and a linear classifier.

    The embedding is the output of the last normalisation, which is the classifier's input.

    Attributes:
        own_path: whether a block has a linear path beside its convolution.
    """

    own_path = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width = shape.hidden
        self.input = Linear(shape.features, width)
        self.blocks = nn.ModuleList(
            Block(self.convolution(width), width, own_path=self.own_path)
            for _ in range(shape.layers)
        )
        self.norm = LayerNorm(width)
        self.head = Linear(width, shape.classes)

    @abstractmethod
    def convolution(self, width: int) -> nn.Module:
        """Build the convolution of a block; its `forward` takes features and the graph."""

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        h = self.input(self.drop_input(graph, draws), graph)
        for block in self.blocks:
            h = h + self.drop(block(h, graph), graph, draws)
        embedding = self.norm(h, graph)
        return Output(self.head(embedding, graph), embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("head.")


@register_backbone("res-gcn", cite=CITATION)
class ResidualGCN(Residual):
    """Residual, normalised blocks of graph convolutions, each with a linear path beside it."""

    own_path = True

    def convolution(self, width: int) -> nn.Module:
        return GCNConv(width, width)


@register_backbone("res-sage", cite=CITATION)
class ResidualSAGE(Residual):
    """Residual, normalised blocks of GraphSAGE with the mean aggregator."""

    def convolution(self, width: int) -> nn.Module:
        return SAGEConv(width, width)


@register_backbone("res-gat", cite=CITATION)
class ResidualGAT(Residual):
    """Residual, normalised blocks of graph attention, each with a linear path beside it.

    `hidden` is the width of all heads together.
    """

    own_path = True

    def convolution(self, width: int) -> nn.Module:
        heads = self.shape.heads
        if width % heads:
            raise UserError(
                f"res-gat: hidden ({width}) must be a multiple of heads ({heads}); "
                "change --hidden or --heads"
            )
        return GATConv(width, width // heads, heads, average=False)


@register_backbone("res-acm", cite=CITATION)
class ResidualACM(Residual):
    """Residual, normalised blocks of ACM: low-pass, high-pass and identity channels."""

    def convolution(self, width: int) -> nn.Module:
        return ACMConv(width, width)
