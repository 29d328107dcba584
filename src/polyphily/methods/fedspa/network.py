"""Convolutions that treat same-class, other-class and unknown neighbours apart (FedSPA's SFPD).

An edge is homophilic or heterophilic where both labels are known, and unknown otherwise. In each
layer the parameters of the two channels are those whose names end in `_hom` and `_het`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyphily.nn import kernels
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.layers import Linear, glorot, matmul, mixed_channels, mixture, zeros
from polyphily.nn.sparse import SparseMatrix

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort
    from polyphily.nn.draws import Draws

CHANNELS = ("hom", "het")


def channel_of(parameter: str) -> str | None:
    """The channel that owns a parameter: "hom", "het", or None where neither does."""
    ending = parameter.rpartition("_")[2]
    return ending if ending in CHANNELS else None


HET, HOM, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class EdgeKinds:
    """The adjacency pattern with a kind for every edge, the same for its reverse.

    Attributes:
        edges: the pattern, symmetric, all ones.
        kind: of every entry, int8.
        moving: whether the kinds last a single step. On a GPU they stay zeros and ones at all edges
            then: how many edges there are of a kind is nothing that the host would have to wait
            for.
    """

    edges: SparseMatrix
    kind: Tensor
    moving: bool = False

    def of(self, kind: int) -> SparseMatrix:
        """The pattern of one kind."""
        chosen = self.kind == kind
        if self.moving and chosen.is_cuda:
            return mark(self.edges, chosen, torch.float32)
        return _select(self.edges, chosen)

    @cached_property
    def hom(self) -> SparseMatrix:
        return self.of(HOM)

    @cached_property
    def het(self) -> SparseMatrix:
        return self.of(HET)

    @cached_property
    def unknown(self) -> SparseMatrix:
        return self.of(UNKNOWN)

    def sum(self, hom: Tensor, het: Tensor, alpha: Tensor) -> Tensor:
        """Equation 6 without the node itself, for messages of the two channels.

        Equation 5 mixes parameters, theta_unk = alpha theta_hom + (1 - alpha) theta_het. For linear
        maps that is mixing what arrives at the centre node, which needs no weights per node.
        """
        if all(map(kernels.available, (hom, het, alpha))):
            edges = self.edges
            return kernels.sum_by_kind(edges.crow, edges.col, self.kind, hom, het, alpha)
        known = self.hom @ hom + self.het @ het
        return known + alpha * (self.unknown @ hom) + (1 - alpha) * (self.unknown @ het)


def edge_kinds(cohort: Cohort, labels: Tensor, *, moving: bool = False) -> EdgeKinds:
    """The kinds of a cohort's edges; `labels` are -1 where unknown (equation 4)."""
    of_row, of_col = labels[cohort.edges.row], labels[cohort.edges.col_long]
    known = (of_row >= 0) & (of_col >= 0)
    kind = torch.where(known, of_row == of_col, UNKNOWN).to(torch.int8)
    return EdgeKinds(cohort.edges, kind, moving)


def mark(edges: SparseMatrix, chosen: Tensor, dtype: torch.dtype) -> SparseMatrix:
    """Ones at some entries of a symmetric pattern, an edge with its reverse, zeros elsewhere."""
    value = chosen.to(dtype)
    return replace(edges, value=value, value_t=value)


def _select(edges: SparseMatrix, chosen: Tensor) -> SparseMatrix:
    """Some entries of a symmetric pattern, an edge with its reverse: symmetric, too."""
    before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
    crow = before[edges.crow.long()].int()
    col = edges.col[chosen]
    reverse = before[edges.permutation[chosen]]  # where each chosen entry's reverse has moved to
    return SparseMatrix(edges.shape, crow, col, crow, col, reverse)


def _pair(inputs: int, width: int, outputs: int, tied: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """The same parameter for both channels, `[inputs, width]`: equal at first, or not."""
    hom = glorot((inputs, width), inputs, outputs)
    het = hom.detach().clone() if tied else glorot((inputs, width), inputs, outputs)
    return hom, nn.Parameter(het)


class PlainDecoupledConv(nn.Module):
    """Equation 6 itself: z_v W_self + sum_hom z_u W_hom + sum_het z_u W_het + sum_unk z_u W_v + b.

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

    def forward(self, x: Tensor | SparseMatrix, cohort: Cohort, kinds: EdgeKinds) -> Tensor:
        own = matmul(x, self.weight_self, cohort)
        hom = matmul(x, self.weight_hom, cohort)
        het = matmul(x, self.weight_het, cohort)
        alpha = self.harmoniser(x, cohort).sigmoid()  # equation 5
        degrees = cohort.degrees.unsqueeze(1)
        if self.normalise == "gcn":
            scale = (degrees + 1).rsqrt()
            out = scale * (scale * own + kinds.sum(scale * hom, scale * het, alpha))
        elif self.normalise == "mean":
            out = own + kinds.sum(hom, het, alpha) / degrees.clamp(min=1)
        else:
            out = own + kinds.sum(hom, het, alpha)
        return out + cohort.segments.expand(self.bias)


class ACMDecoupledConv(nn.Module):
    """Equation 6 in the low-pass and the high-pass channel of an ACM layer.

    With s_v the typed sum over neighbours in equation 6, and a W_self, W_hom and W_het each:

        L_v = relu((z_v W_self + s_v) / (d_v + 1)),  H_v = relu((d_v z_v W_self - s_v) / (d_v + 1)),

    and M = relu(z W_self); L, H and M are mixed as in ACM-GCN. Where W_self = W_hom = W_het, as at
    the start where `tied`, this is the layer of ACM-GCN. `normalise = "sum"` leaves the division by
    d_v + 1 away: the sums of equation 6 as printed, and D - A for the high-pass channel.

    The paper names ACM-GCN and equation 6, not how they meet; this is our reading.
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

    def forward(self, x: Tensor | SparseMatrix, cohort: Cohort, kinds: EdgeKinds) -> Tensor:
        hom = matmul(x, self.weight_hom, cohort)
        het = matmul(x, self.weight_het, cohort)
        alpha = self.harmoniser(x, cohort).sigmoid()  # equation 5
        near = kinds.sum(hom, het, alpha)
        width = near.shape[1]
        pair, own = torch.split(matmul(x, self.weight_self, cohort), [width, width // 2], dim=1)
        scales = cohort.once(("decoupled scales", self.normalise), self._scales)
        return mixed_channels(own, pair, near, scales, self.attend, self.mix, cohort.segments)

    def _scales(self, cohort: Cohort) -> Tensor:
        """What s_v and z_v W_self are multiplied by in H_v; the former holds for L_v, too."""
        degrees = cohort.degrees
        by = 1 / (degrees + 1) if self.normalise == "mean" else torch.ones_like(degrees)
        return torch.stack([by, by * degrees], dim=1)


class AttentionDecoupledConv(nn.Module):
    """The layer of the authors' code, where a channel owns attention vectors instead of weights.

    L, H and M are those of ACM-GCN. Messages: the sums of L and of H over homophilic, heterophilic
    and unknown neighbours, and M. A message's score is its product with the channel's vector; an
    unknown one has alpha times the homophilic score plus 1 - alpha times the heterophilic one, with
    alpha the harmoniser's answer to that message. The seven are mixed as ACM-GCN mixes three.

    Not followed: the code's weight alpha is that of the heterophilic vector (a change of sign in
    the harmoniser), and its score of the unknown H multiplies the heterophilic message by mistake.
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

    def forward(self, x: Tensor | SparseMatrix, cohort: Cohort, kinds: EdgeKinds) -> Tensor:
        low = matmul(x, self.weight_low, cohort)
        high = matmul(x, self.weight_high, cohort)
        smooth = cohort.random_walk @ torch.cat([low, high], dim=1)
        smooth_low, smooth_high = smooth.chunk(2, dim=1)
        passed = torch.cat([smooth_low.relu(), (high - smooth_high).relu()], dim=1)
        degrees = cohort.degrees.clamp(min=1).unsqueeze(1)
        product = cohort.segments.matmul

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
            alpha = self.harmoniser(band, cohort).sigmoid()
            messages.append(band)
            scores.append(alpha * hom + (1 - alpha) * het)
        own = matmul(x, self.weight_self, cohort).relu()
        messages.append(own)
        scores.append(product(own, self.attend_self))
        return mixture(messages, scores, self.mix, cohort.segments)


class Decoupled(Backbone):
    """Layers of one of the kinds above with ReLU and dropout between them.

    Args:
        shape: the size of the network.
        layer: makes a layer of (inputs, outputs).
    """

    def __init__(self, shape: Shape, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__(shape)
        self.convs = nn.ModuleList(layer(inputs, outputs) for inputs, outputs in shape.widths())

    def forward(
        self, cohort: Cohort, draws: Draws | None = None, kinds: EdgeKinds | None = None
    ) -> Output:
        """`kinds` are those by all train labels unless given."""
        if kinds is None:
            kinds = cohort.once("edge kinds", lambda cohort: edge_kinds(cohort, cohort.labels))
        *hidden, last = self.convs
        x = self.drop_input(cohort, draws)
        embedding = None
        for conv in hidden:
            embedding = conv(x, cohort, kinds).relu()
            x = self.drop(embedding, cohort, draws)
        logits = last(x, cohort, kinds)
        return Output(logits, logits if embedding is None else embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"convs.{len(self.convs) - 1}.")
