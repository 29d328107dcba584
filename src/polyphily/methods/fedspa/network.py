"""FedSPA's network (SFPD): separate channels for same-class and other-class neighbours.

An edge is homophilic or heterophilic if both labels are known, and unknown otherwise. In each
layer the parameters of the two channels are those whose names end in `_hom` and `_het`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn

from polyphily.methods.fedspa.edges import EdgeKinds, KindSums, edge_kinds
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import (
    Linear,
    glorot,
    matmul,
    mixed_channels,
    mixture,
    products,
    zeros,
)
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

CHANNELS = ("hom", "het")


def channel_of(parameter: str) -> str | None:
    """Return the channel that owns a parameter: "hom", "het", or None if neither does."""
    ending = parameter.rpartition("_")[2]
    return ending if ending in CHANNELS else None


def _pair(inputs: int, width: int, outputs: int, tied: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """Create a parameter `[inputs, width]` for each channel; they start equal if `tied`."""
    hom = glorot((inputs, width), inputs, outputs)
    het = hom.detach().clone() if tied else glorot((inputs, width), inputs, outputs)
    return hom, nn.Parameter(het)


def summed_first(x: Tensor | SparseMatrix, graph: StackedGraph) -> TypeGuard[Tensor]:
    """Return whether to sum over neighbours before the weights: for constant dense inputs.

    On a GPU a kernel of its own sums products.
    """
    return x is graph.x and isinstance(x, Tensor) and not x.is_cuda


def neighbour_sums(graph: StackedGraph) -> Tensor:
    """Return the sums of features over all neighbours, computed once."""

    def sums(whole: StackedGraph) -> Tensor:
        assert isinstance(whole.x, Tensor)
        return whole.edges @ whole.x

    return graph.cached("neighbour sums", sums)


class PlainDecoupledConv(nn.Module):
    """Equation 6 alone: z_v W_self + sum_hom z_u W_hom + sum_het z_u W_het + sum_unk z_u W_v + b.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        normalise: "gcn", the weights of Kipf and Welling, so that equal weights give a GCN layer;
            "mean", one over the node's degree, so that W_hom = W_het gives a GraphSAGE layer; or
            "sum", as printed.
        tied: whether weights start equal, W_self (with "gcn") as well as the two channels.
    """

    def __init__(self, inputs: int, outputs: int, normalise: str, tied: bool) -> None:
        super().__init__()
        self.normalise = normalise
        self.weight_hom, self.weight_het = _pair(inputs, outputs, outputs, tied)
        self.weight_self = glorot((inputs, outputs), inputs, outputs)
        if tied and normalise == "gcn":
            self.weight_self = nn.Parameter(self.weight_hom.detach().clone())
        self.harmoniser = Linear(inputs, 1)
        self.bias = zeros(outputs)

    def forward(self, x: Tensor | SparseMatrix, graph: StackedGraph, kinds: KindSums) -> Tensor:
        own = matmul(x, self.weight_self, graph)
        hom = matmul(x, self.weight_hom, graph)
        het = matmul(x, self.weight_het, graph)
        alpha = self.harmoniser(x, graph).sigmoid()  # equation 5
        degrees = graph.degrees.unsqueeze(1)
        if self.normalise == "gcn":
            scale = (degrees + 1).rsqrt()
            out = scale * (scale * own + kinds.sum(scale * hom, scale * het, alpha))
        elif self.normalise == "mean":
            out = own + kinds.sum(hom, het, alpha) / degrees.clamp(min=1)
        else:
            out = own + kinds.sum(hom, het, alpha)
        return out + graph.segments.expand(self.bias)


class ACMDecoupledConv(nn.Module):
    """Equation 6 in the low-pass and the high-pass channel of an ACM layer.

    With s_v the typed sum over neighbours in equation 6, and a W_self, W_hom and W_het each:

        L_v = relu((z_v W_self + s_v) / (d_v + 1)),  H_v = relu((d_v z_v W_self - s_v) / (d_v + 1)),

    and M = relu(z W_self); L, H and M are mixed as in ACM-GCN. If W_self = W_hom = W_het, as at the
    start if `tied`, this is the layer of ACM-GCN. `normalise = "sum"` omits the division by
    d_v + 1: the sums of equation 6 as printed, and D - A for the high-pass channel.

    The paper names ACM-GCN and equation 6, but not how they are combined. This is our reading.
    """

    def __init__(self, inputs: int, outputs: int, normalise: str, tied: bool) -> None:
        super().__init__()
        self.normalise = normalise
        self.weight_hom, self.weight_het = _pair(inputs, 2 * outputs, outputs, tied)  # [low, high]
        self.weight_self = glorot((inputs, 3 * outputs), inputs, outputs)  # [low, high, identity]
        if tied:
            with torch.no_grad():
                self.weight_self[:, :, : 2 * outputs] = self.weight_hom
        self.harmoniser = Linear(inputs, 1)
        self.attend = glorot((outputs, 3), outputs, 1)
        self.mix = glorot((3, 3), 3, 3)

    nonnegative = True  # so are the channels and their weights

    def forward(self, x: Tensor | SparseMatrix, graph: StackedGraph, kinds: KindSums) -> Tensor:
        width = self.weight_hom.shape[2]
        if summed_first(x, graph):
            alpha = self.harmoniser(x, graph).sigmoid()  # equation 5
            channels = (self.weight_hom, self.weight_het)
            near = kinds.sum_inputs(x, neighbour_sums(graph), alpha, *channels, graph.segments)
            pair = matmul(x, self.weight_self[:, :, :width], graph)
            own = matmul(x, self.weight_self[:, :, width:], graph)
        else:
            harmoniser = self.harmoniser
            assert harmoniser.bias is not None
            weights = (self.weight_hom, self.weight_het, self.weight_self, harmoniser.weight)
            hom, het, mine, share = products(x, weights, graph)
            alpha = (share + graph.segments.expand(harmoniser.bias)).sigmoid()
            near = kinds.sum(hom, het, alpha)
            pair, own = torch.split(mine, [width, width // 2], dim=1)
        scales = graph.cached(("decoupled scales", self.normalise), self._scales)
        return mixed_channels(own, pair, near, scales, self.attend, self.mix, graph.segments)

    def _scales(self, graph: StackedGraph) -> Tensor:
        """Return the factors of s_v, in L_v and H_v, and of z_v W_self in H_v, `[N, 2]`."""
        degrees = graph.degrees
        by = 1 / (degrees + 1) if self.normalise == "mean" else torch.ones_like(degrees)
        return torch.stack([by, by * degrees], dim=1)


class AttentionDecoupledConv(nn.Module):
    """The layer of the authors' code, in which a channel owns attention vectors, not weights.

    L, H and M are those of ACM-GCN. Messages: the sums of L and of H over homophilic, heterophilic
    and unknown neighbours, and M. A message's score is its product with the channel's vector; an
    unknown one has alpha times the homophilic score plus 1 - alpha times the heterophilic one,
    where alpha is the harmoniser's output for that message. The seven are mixed as ACM-GCN mixes
    three.

    Two points differ from the code. There alpha weights the heterophilic vector, which changes the
    sign in the harmoniser. And its score of the unknown H multiplies the heterophilic message by
    mistake.
    """

    def __init__(self, inputs: int, outputs: int, normalise: str, tied: bool) -> None:
        super().__init__()
        self.normalise = normalise
        self.weight_low = glorot((inputs, outputs), inputs, outputs)
        self.weight_high = glorot((inputs, outputs), inputs, outputs)
        self.weight_self = glorot((inputs, outputs), inputs, outputs)
        self.attend_hom, self.attend_het = _pair(outputs, 2, 1, tied)  # [low, high]
        self.attend_self = glorot((outputs, 1), outputs, 1)
        self.harmoniser = Linear(outputs, 1)
        self.mix = glorot((7, 7), 7, 7)

    def forward(self, x: Tensor | SparseMatrix, graph: StackedGraph, kinds: EdgeKinds) -> Tensor:
        low = matmul(x, self.weight_low, graph)
        high = matmul(x, self.weight_high, graph)
        smooth = graph.random_walk @ torch.cat([low, high], dim=1)
        smooth_low, smooth_high = smooth.chunk(2, dim=1)
        passed = torch.cat([smooth_low.relu(), (high - smooth_high).relu()], dim=1)
        degrees = graph.degrees.clamp(min=1).unsqueeze(1)
        product = graph.segments.matmul

        def bands(edges: SparseMatrix) -> tuple[Tensor, ...]:
            near = edges @ passed
            return (near / degrees if self.normalise == "mean" else near).chunk(2, dim=1)

        unknown = torch.stack([self.attend_hom, self.attend_het], dim=3).unbind(2)
        messages: list[Tensor] = []
        scores: list[Tensor] = []
        for edges, attend in ((kinds.het, self.attend_het), (kinds.hom, self.attend_hom)):
            for band, vector in zip(bands(edges), attend.unbind(2), strict=True):
                messages.append(band)
                scores.append(product(band, vector.unsqueeze(2)))
        for band, vectors in zip(bands(kinds.unknown), unknown, strict=True):
            hom, het = product(band, vectors).chunk(2, dim=1)
            alpha = self.harmoniser(band, graph).sigmoid()
            messages.append(band)
            scores.append(alpha * hom + (1 - alpha) * het)
        own = matmul(x, self.weight_self, graph).relu()
        messages.append(own)
        scores.append(product(own, self.attend_self))
        return mixture(messages, scores, self.mix, graph.segments)


def train_kinds(graph: StackedGraph) -> EdgeKinds:
    """Return the kinds of edges that follow from all train labels."""
    return graph.cached("edge kinds", lambda whole: edge_kinds(whole, whole.labels))


class Decoupled(Backbone):
    """Layers of one of the kinds above with ReLU and dropout between them.

    Args:
        kind: the backbone whose layers are decoupled.
        shape: the size of the network.
        layer: makes a layer of (inputs, outputs).
    """

    def __init__(self, kind: str, shape: Shape, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__(shape)
        self.kind = kind
        self.convs = nn.ModuleList(layer(inputs, outputs) for inputs, outputs in shape.widths())

    def describe(self) -> str:
        return f"SFPD in {self.kind}"

    def forward(
        self, graph: StackedGraph, draws: Draws | None = None, kinds: KindSums | None = None
    ) -> Output:
        """Compute the output; `kinds` follow from all train labels unless given."""
        if kinds is None:
            kinds = train_kinds(graph)
        *hidden, last = self.convs
        x = self.drop_input(graph, draws)
        embedding = None
        for conv in hidden:
            embedding = conv(x, graph, kinds)
            if not getattr(conv, "nonnegative", False):
                embedding = embedding.relu()
            x = self.drop(embedding, graph, draws)
        logits = last(x, graph, kinds)
        return Output(logits, logits if embedding is None else embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"convs.{len(self.convs) - 1}.")
