"""Residual backbones: blocks of a normalisation and a convolution, each added to its input.

A linear layer maps features to the hidden width. Every block computes

    h <- h + dropout(relu(conv(n) + n W_s)),   n = LayerNorm(h),

then a last normalisation and a linear classifier follow. `layers` is the number of blocks. W_s is
a path for the node's own features beside GCN and GAT, which average them with those of neighbours.
GraphSAGE and ACM have such a path already. The bias is that of the convolution.

With the readout "jump" the classifier reads all levels h_0, …, h_layers, the input of the first
block and the output of each, in place of the last one alone:

    z = sum_l s_l LayerNorm(h_l),   s = softmax(a).

The logits a are parameters, zero at first, so that all levels begin with the same weight. One scale
and shift of the normalisation serve all levels: as the weights sum to one, z is the same as with
levels normalised without parameters, scaled and shifted once.

Normalising the input of a residual block follows Platonov et al. 2023, the linear path inside it
Luo et al. 2024. The former have a perceptron of two layers behind each convolution. The latter
normalise behind the convolution and do not add the input itself. Networks that classify from all
layers are those of Xu et al. 2018, who join, pool or attend to them. Softmax weights of normalised
layers, the same for all nodes, follow Peters et al. 2018.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyphily.errors import UserError
from polyphily.nn.backbones import Backbone, Output, Shape, register_backbone
from polyphily.nn.draws import Draws
from polyphily.nn.layers import ACMConv, GATConv, GCNConv, LayerNorm, Linear, SAGEConv, zeros
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

    The embedding is the output of the last normalisation, or with the readout "jump" the weighted
    sum of the normalised levels. It is the classifier's input.

    Attributes:
        own_path: whether a block has a linear path beside its convolution.
    """

    own_path = False
    readouts = ("last", "jump")
    defaults: ClassVar = {"all": {"layers": 5}}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width = shape.hidden
        own_path = self.own_path and not shape.separate  # convolutions have one if it is
        self.input = Linear(shape.features, width)
        self.blocks = nn.ModuleList(
            Block(self.block_convolution(width), width, own_path=own_path)
            for _ in range(shape.layers)
        )
        self.norm = LayerNorm(width)
        self.jump = zeros(shape.layers + 1) if shape.readout == "jump" else None
        self.head = Linear(width, shape.classes)

    @abstractmethod
    def block_convolution(self, width: int) -> nn.Module:
        """Build the convolution of a block; its `forward` takes features and the graph."""

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        h = self.input(self.drop_input(graph, draws), graph)
        levels = [h]
        for block in self.blocks:
            h = h + self.drop(block(h, graph), graph, draws)
            levels = [h] if self.jump is None else [*levels, h]  # what the readout needs
        embedding = self._read(levels, graph)
        return Output(self.head(embedding, graph), embedding)

    def _read(self, levels: Sequence[Tensor], graph: StackedGraph) -> Tensor:
        """Return the last level normalised, or the weighted sum of all levels normalised."""
        found: Tensor
        found, *others = (self.norm(h, graph) for h in levels)
        if self.jump is None:
            return found
        weights = graph.segments.expand(self.jump.softmax(dim=1))
        found = weights[:, :1] * found
        for level, z in enumerate(others, start=1):
            found = found + weights[:, level : level + 1] * z
        return found

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("head.")


@register_backbone("res-gcn", cite=CITATION)
class ResidualGCN(Residual):
    """Residual, normalised blocks of graph convolutions, each with a linear path beside it."""

    own_path = True
    separable = True

    def block_convolution(self, width: int) -> nn.Module:
        return self.convolution(width, width, lambda own: GCNConv(width, width, own=own))


@register_backbone("res-sage", cite=CITATION)
class ResidualSAGE(Residual):
    """Residual, normalised blocks of GraphSAGE with the mean aggregator."""

    separable = True

    def block_convolution(self, width: int) -> nn.Module:
        return self.convolution(width, width, lambda own: SAGEConv(width, width, own=own))


@register_backbone("res-gat", cite=CITATION)
class ResidualGAT(Residual):
    """Residual, normalised blocks of graph attention, each with a linear path beside it.

    `hidden` is the width of all heads together.
    """

    own_path = True
    separable = True

    def block_convolution(self, width: int) -> nn.Module:
        heads = self.shape.heads
        if width % heads:
            raise UserError(
                f"res-gat: hidden ({width}) must be a multiple of heads ({heads}); "
                "change --hidden or --heads"
            )
        return self.convolution(
            width,
            width,
            lambda own: GATConv(width, width // heads, heads, average=False, own=own),
        )


@register_backbone("res-acm", cite=CITATION)
class ResidualACM(Residual):
    """Residual, normalised blocks of ACM: low-pass, high-pass and identity channels."""

    def block_convolution(self, width: int) -> nn.Module:
        return ACMConv(width, width)
