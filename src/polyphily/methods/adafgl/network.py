"""AdaFGL's network: the federated extractor, and the heads that each client trains alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyphily.methods.adafgl.propagation import prelu, signed_messages, signs_of
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.nn.backbones import Backbone, Output
from polyphily.nn.draws import Draws
from polyphily.nn.layers import Linear, glorot, matmul, zeros
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

EXTRACTOR, HEADS, ADAPTED = "extractor.", "heads.", "adapted"


class AdaptiveNetwork(Backbone):
    """An extractor and heads; the output is the extractor's.

    Attributes:
        extractor: the network that is federated.
        heads: what a client trains by itself; None if it fine-tunes the extractor.
        adapted: 1 in a model that has been adapted, 0 before: says which part predicts.
    """

    def __init__(self, extractor: Backbone, heads: Heads | None) -> None:
        super().__init__(extractor.shape)
        self.extractor, self.heads, self.adapted = extractor, heads, zeros(1)

    def describe(self) -> str:
        ending = "fine-tuned" if self.heads is None else "with adaptive propagation"
        return f"{self.extractor.describe()} {ending}"

    @property
    def embedding_width(self) -> int:
        return self.extractor.embedding_width

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        output: Output = self.extractor(graph, draws)
        return output

    def is_classifier(self, parameter: str) -> bool:
        own = parameter.removeprefix(EXTRACTOR)
        return parameter.startswith(EXTRACTOR) and self.extractor.is_classifier(own)


class Propagation(NamedTuple):
    """The smoothing matrix, pairs of nodes and U at these pairs, along which heads propagate."""

    smooth: SparseMatrix
    pairs: Neighbours
    alike: Tensor


class Perceptron(nn.Module):
    """An MLP on [X, ÂX, …, Â^hops X] with PReLU and dropout between its layers.

    Args:
        backbone: whose sizes and dropout it has.
        layers: how many.
        hops: how often its input is smoothed; 0: X alone.
    """

    def __init__(self, backbone: Backbone, layers: int, hops: int = 0) -> None:
        super().__init__()
        shape = backbone.shape
        self.drop, hidden, blocks = backbone.drop, shape.hidden, hops + 1
        self.first = glorot((shape.features, blocks * hidden), blocks * shape.features, hidden)
        self.bias, self.slope = zeros(hidden), nn.Parameter(torch.full((1, 1), 0.25))
        widths = [(hidden, hidden)] * (layers - 2) + [(hidden, shape.classes)]
        self.linears = nn.ModuleList(Linear(*width) for width in widths)

    def products(self, graph: StackedGraph) -> Tensor:
        """Return X times the first layer's weights of each hop, side by side."""
        return matmul(graph.x, self.first, graph)

    def forward(self, x: Tensor, graph: StackedGraph, draws: Draws | None) -> Tensor:
        """Return the output from what the first layer makes of the input, without its bias."""
        x, slope = x + graph.segments.expand(self.bias), graph.segments.expand(self.slope)
        for linear in self.linears:
            x = linear(self.drop(prelu(x, slope), graph, draws), graph)
        return x


class Heads(nn.Module):
    """The homophilous and the heterophilous propagation.

    Args:
        backbone: whose sizes and dropout the heads have.
        parts: which of "homophilous" and "heterophilous" there are.
        hops: how often features are smoothed.
        beta: the share of U in R.
        below: the signs of pairs below the mean, "distance" or "reversed".
        rows: how rows of S are scaled, "mean" or "sum".
    """

    def __init__(
        self,
        backbone: Backbone,
        parts: Sequence[str],
        *,
        hops: int,
        beta: float,
        below: str,
        rows: str,
    ) -> None:
        super().__init__()
        self.hops, self.beta, self.below, self.rows = hops, beta, below, rows
        self.smoothed = nn.ModuleDict()  # the MLPs on smoothed features
        if "homophilous" in parts:
            self.smoothed["homophilous"] = Perceptron(backbone, 2, hops)
        if "heterophilous" in parts:
            self.smoothed["global"] = Perceptron(backbone, 3, hops)
            self.smoothed["message"] = Perceptron(backbone, 3, hops)
            self.own = Perceptron(backbone, 3)

    def forward(
        self, graph: StackedGraph, along: Propagation, draws: Draws | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of every head: "homophilous", "own", "global" and "message"."""
        names = list(self.smoothed)
        inputs = self._smooth(graph, along.smooth).chunk(len(names), dim=1)
        logits = {
            name: self.smoothed[name](x, graph, draws)
            for name, x in zip(names, inputs, strict=True)
        }
        if "message" in logits:
            logits["own"] = self.own(self.own.products(graph), graph, draws)
            e = logits["message"]
            signs = signs_of(e, along.pairs, along.alike, graph.segments, self.beta, self.below)
            message = self.smoothed["message"]
            assert isinstance(message, Perceptron)
            slope = graph.segments.expand(message.slope)
            logits["message"] = signed_messages(e, along.pairs, signs, slope, self.rows)
        return logits

    def _smooth(self, graph: StackedGraph, smooth: SparseMatrix) -> Tensor:
        """Return [X, ÂX, Â²X, …] times the first weights of all MLPs, side by side.

        It is XW₀ + Â (XW₁ + Â (XW₂ + …)): what is propagated has the width of the MLPs.
        """
        products = [mlp.products(graph).chunk(self.hops + 1, dim=1) for mlp in self._mlps()]
        *first, total = (torch.cat(blocks, dim=1) for blocks in zip(*products, strict=True))
        for block in reversed(first):
            total = block + smooth @ total
        return total

    def _mlps(self) -> list[Perceptron]:
        return [mlp for mlp in self.smoothed.values() if isinstance(mlp, Perceptron)]
