"""FGGP's network: a backbone, and an edge predictor that scores pairs of nodes."""

from __future__ import annotations

from torch import Tensor, nn

from polyphily.methods.fggp.view import Candidates
from polyphily.nn.backbones import Backbone, Output
from polyphily.nn.draws import Draws
from polyphily.nn.layers import glorot, matmul
from polyphily.nn.stacked import StackedGraph

ENCODER, PREDICTOR = "encoder.", "predictor."


class EdgePredictor(nn.Module):
    """H = N (N X U1) U2, where N normalises the candidate graph; a pair's score is H_u · H_v.

    Args:
        features: width of the input.
        hidden: width of both layers.
        signed: whether scores may be negative; otherwise H = ReLU(…).
    """

    def __init__(self, features: int, hidden: int, *, signed: bool) -> None:
        super().__init__()
        self.signed = signed
        self.first = glorot((features, hidden), features, hidden)
        self.second = glorot((hidden, hidden), hidden, hidden)

    def forward(self, graph: StackedGraph, candidates: Candidates) -> Tensor:
        spread = candidates.normalised(candidates.known)
        h = graph.segments.matmul(spread @ matmul(graph.x, self.first, graph), self.second)
        h = spread @ h
        return h if self.signed else h.relu()


class WithPredictor(Backbone):
    """A backbone beside an edge predictor, which training alone uses."""

    def __init__(self, encoder: Backbone, *, signed: bool) -> None:
        super().__init__(encoder.shape)
        self.encoder = encoder
        self.predictor = EdgePredictor(encoder.shape.features, encoder.shape.hidden, signed=signed)

    def describe(self) -> str:
        return f"{self.encoder.describe()} with an edge predictor"

    @property
    def embedding_width(self) -> int:
        return self.encoder.embedding_width

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        output: Output = self.encoder(graph, draws)
        return output

    def is_classifier(self, parameter: str) -> bool:
        own = parameter.removeprefix(ENCODER)
        return parameter.startswith(ENCODER) and self.encoder.is_classifier(own)
