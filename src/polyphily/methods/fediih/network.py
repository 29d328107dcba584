"""FedIIH's network: a DisenGCN, and the variational model of its hidden features.

The model has three levels. The encodings z^q of a client's nodes are drawn around the client's
centre a^q, the centres around the federation's α^q, and the edges from the encodings:

    a^q ~ N(α^q, 1/4),    z_v^q ~ N(a^q, 1/4),    P(v, w are joined) = sigmoid(z_v · z_w).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.core.cohort import TrainingGraph
from polyphily.nn.backbones import Shape
from polyphily.nn.disengcn import DisenGCN, in_double
from polyphily.nn.draws import Draws
from polyphily.nn.layers import glorot, zeros
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import flat
from polyphily.nn.stacked import StackedGraph

CENTRE, SPREAD, SPREAD_BIAS = "centre", "spread", "spread_bias"
VARIANCE = 0.25  # of encodings around a centre, and of centres around α
HALF_STEP = 2.0**-33  # draws are multiples of 2^-32 from 0: moves them off 0


class VariationalGNN(DisenGCN):
    """A DisenGCN with the parameters of the variational model.

    `spread` and `spread_bias` project an encoding to its log-variance, factor by factor; `centre`
    is a^q. They do not take part in predictions.
    """

    def __init__(self, shape: Shape, factors: int, iterations: int) -> None:
        super().__init__(shape, factors, iterations)
        self.spread = glorot((factors, self.width, self.width), self.width, self.width)
        start = torch.full((1, factors, self.width), math.log(VARIANCE))
        self.spread_bias = nn.Parameter(start)
        self.centre = zeros(factors, self.width)

    def describe(self) -> str:
        return f"{super().describe()} with a variational model"


def encode(
    network: DisenGCN,
    params: Mapping[str, Tensor],
    embedding: Tensor,
    graph: StackedGraph,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """Return means and log-variances of the encodings of all nodes, each `[N, factors · width]`.

    Without a projection both are the same map of the hidden features, as in the authors' code.
    """
    mean = embedding
    for _ in range(1 if network.shape.layers <= 2 else 2):
        mean = network.convolve(mean, graph, draws)
    if SPREAD not in params:
        return mean, mean
    segments = graph.segments
    projected = [
        segments.matmul(part, weight)
        for part, weight in zip(
            torch.split(mean, network.width, dim=1), params[SPREAD].unbind(dim=1), strict=True
        )
    ]
    return mean, torch.cat(projected, dim=1) + segments.expand(flat(params[SPREAD_BIAS]))


# The evidence lower bound ------------------------------------------------------------------------


def divergence(mean: Tensor, logvar: Tensor, centre: Tensor) -> Tensor:
    """Compute KL(N(mean, e^logvar) ‖ N(centre, 1/4)) of every entry."""
    second = (mean - centre).square() + in_double(torch.exp, logvar)
    return (second / VARIANCE - logvar + math.log(VARIANCE) - 1) / 2


def distance_of_centres(centre: Tensor, alpha: Tensor) -> Tensor:
    """Compute KL(N(a, 1/4) ‖ N(α, 1/4)) - log N(a; 0, 1) of every entry."""
    log_density = -(centre.square() + math.log(2 * math.pi)) / 2
    return (centre - alpha).square() / (2 * VARIANCE) - log_density


def sampled(mean: Tensor, logvar: Tensor, segments: Segments, draws: Draws) -> Tensor:
    """Draw an encoding of every node from N(mean, e^logvar)."""
    uniform = draws.uniform(mean.shape[1], segments.pointers)
    noise: Tensor = torch.special.ndtri(uniform + HALF_STEP)
    return mean + noise.to(mean.dtype) * in_double(torch.exp, logvar / 2)


def partners(segments: Segments, times: int, draws: Draws) -> Tensor:
    """Draw `times` partners of every node among the nodes of its client, `[times, N]`.

    All nodes of a client look as many places ahead, in a circle, by a number that is drawn. Every
    pair (v, w) is equally likely, and no node is drawn twice, so that gradients are sums in a fixed
    order.
    """
    one_each = tuple(range(len(segments) + 1))
    start = segments.starts[:-1].long()
    ahead = (draws.uniform(times, one_each) * segments.counts.unsqueeze(1)).long()
    owner, size = segments.owner, segments.counts[segments.owner]
    first = start[owner]
    place = torch.arange(segments.rows, device=segments.device) - first
    return first + (place + ahead[owner].T) % size


def reconstruction(
    z: Tensor, graph: TrainingGraph, edges: Segments, others: Tensor, *, balanced: bool
) -> Tensor:
    """Estimate each client's cross-entropy of all pairs of nodes, from its edges and from `others`.

    A pair with the score l = z_v · z_w costs softplus(l), less l if it is joined. The mean of
    softplus(l) over all pairs is estimated from those drawn. If `balanced`, edges cost
    softplus(-l), and the means over edges and over the pairs drawn have equal weight.

    Args:
        z: encodings, `[N, width]`.
        graph: whose edges are reconstructed.
        edges: the edges of each client.
        others: partners of every node, `[times, N]`.
        balanced: whether the edges weigh as much as all pairs together.
    """
    drawn = torch.stack([(z * z[other]).sum(dim=1) for other in others])
    pairs = graph.segments.mean(in_double(F.softplus, drawn).mean(dim=0))
    joined = graph.edges.products(z, z)
    if balanced:
        return (edges.mean(in_double(F.softplus, -joined)) + pairs) / 2
    return pairs - edges.sum(joined) / graph.segments.counts.to(joined.dtype).square()
