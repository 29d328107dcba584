"""Layers whose parameters have a leading client axis: one pass computes `K` models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.nn import kernels
from polyphily.nn.channels import mixed_in_blocks, pays
from polyphily.nn.sparse import SparseMatrix, is_shared

if TYPE_CHECKING:
    from polyphily.nn.segments import Segments
    from polyphily.nn.stacked import (
        AttendedOperators,
        GraphOperators,
        Propagation,
        StackedGraph,
    )


def glorot(shape: tuple[int, ...], fan_in: int, fan_out: int) -> nn.Parameter:
    """Draw one client's parameter uniformly from ±sqrt(6/(fan_in+fan_out))."""
    bound = math.sqrt(6 / (fan_in + fan_out))
    return nn.Parameter(torch.empty(1, *shape).uniform_(-bound, bound))


def zeros(*shape: int) -> nn.Parameter:
    """Return one client's parameter of zeros."""
    return nn.Parameter(torch.zeros(1, *shape))


def matmul(x: Tensor | SparseMatrix, weight: Tensor, graph: GraphOperators) -> Tensor:
    """Return each client's rows of `x` times that client's `weight`, `[K, inputs, outputs]`."""
    if not isinstance(x, SparseMatrix):
        return graph.segments.matmul(x, weight)
    if is_shared(weight):
        return x.folded(weight.shape[1]) @ weight[0]
    return x @ weight.reshape(-1, weight.shape[2])


def products(
    x: Tensor | SparseMatrix, weights: Sequence[Tensor], graph: GraphOperators
) -> Sequence[Tensor]:
    """Return the products with several weights."""
    if isinstance(x, SparseMatrix):  # weights are larger than products: no need to join them
        return [matmul(x, weight, graph) for weight in weights]
    joint = matmul(x, torch.cat(list(weights), dim=2), graph)
    return torch.split(joint, [weight.shape[2] for weight in weights], dim=1)


def matmul_both(
    x: Tensor | SparseMatrix, one: Tensor, two: Tensor, graph: GraphOperators
) -> Tensor:
    """Return two products side by side."""
    if isinstance(x, SparseMatrix):  # weights are larger than products: join the products
        return torch.cat(list(products(x, (one, two), graph)), dim=1)
    return matmul(x, torch.cat([one, two], dim=2), graph)


def propagate(operator: Propagation, x: Tensor, bias: Tensor | None, segments: Segments) -> Tensor:
    """Return the product with an operator, plus the bias of each row's client if there is one."""
    if bias is None:
        return operator @ x
    if isinstance(operator, SparseMatrix):
        return operator.plus(x, bias, segments)
    return operator @ x + segments.expand(bias)


class Linear(nn.Module):
    """x W + b."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = glorot((inputs, outputs), inputs, outputs)
        self.bias = zeros(outputs) if bias else None

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperators) -> Tensor:
        out = matmul(x, self.weight, graph)
        return out if self.bias is None else out + graph.segments.expand(self.bias)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + 1e-5) · w + b over the features of a node (Ba et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width))
        self.bias = zeros(width)

    def forward(self, x: Tensor, graph: GraphOperators) -> Tensor:
        if kernels.holds_rows(x):
            return kernels.layer_norm(x, self.weight, self.bias, graph.segments)
        expand = graph.segments.expand
        return F.layer_norm(x, x.shape[1:]) * expand(self.weight) + expand(self.bias)


class GCNConv(nn.Module):
    """Graph convolution (Kipf and Welling 2017): Â x W + b, Â = (D+I)^-1/2 (A+I) (D+I)^-1/2.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        own: whether there is a bias.
    """

    bias: nn.Parameter

    def __init__(self, inputs: int, outputs: int, *, own: bool = True) -> None:
        super().__init__()
        self.own = own
        self.weight = glorot((inputs, outputs), inputs, outputs)
        self.register_parameter("bias", zeros(outputs) if own else None)

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperators) -> Tensor:
        return propagate(graph.gcn, matmul(x, self.weight, graph), self.bias, graph.segments)


class SAGEConv(nn.Module):
    """GraphSAGE, mean aggregator (Hamilton et al. 2017): x W_self + mean(x_u) W_near + b.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        own: whether there are W_self and b.
    """

    weight_self: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inputs: int, outputs: int, *, own: bool = True) -> None:
        super().__init__()
        self.own, shape = own, (inputs, outputs)
        self.register_parameter("weight_self", glorot(shape, inputs, outputs) if own else None)
        self.weight_near = glorot(shape, inputs, outputs)
        self.register_parameter("bias", zeros(outputs) if own else None)

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperators) -> Tensor:
        near = graph.mean @ matmul(x, self.weight_near, graph)
        if not self.own:
            return near
        return matmul(x, self.weight_self, graph) + near + graph.segments.expand(self.bias)


class GATConv(nn.Module):
    """Graph attention (Velickovic et al. 2018), self-loops included, LeakyReLU slope 0.2.

    Args:
        inputs: width of the input.
        outputs: width of the output of each head.
        heads: number of heads.
        average: whether heads are averaged (in the last layer) or concatenated.
        own: whether there is a bias.
    """

    bias: nn.Parameter

    def __init__(
        self, inputs: int, outputs: int, heads: int, *, average: bool, own: bool = True
    ) -> None:
        super().__init__()
        self.own = own
        self.heads, self.outputs, self.average = heads, outputs, average
        self.weight = glorot((inputs, heads * outputs), inputs, heads * outputs)
        self.attend_source = glorot((heads, outputs), heads, outputs)
        self.attend_target = glorot((heads, outputs), heads, outputs)
        width = outputs if average else heads * outputs
        self.register_parameter("bias", zeros(width) if own else None)

    def forward(self, x: Tensor | SparseMatrix, graph: AttendedOperators) -> Tensor:
        expand, edges = graph.segments.expand, graph.attention
        z = matmul(x, self.weight, graph).view(-1, self.heads, self.outputs)
        source = (z * expand(self.attend_source)).sum(dim=2)
        target = (z * expand(self.attend_target)).sum(dim=2)
        score = F.leaky_relu(edges.at_rows(target) + edges.at_cols(source), 0.2)
        attention = edges.softmax(score)
        out = torch.stack(
            [edges.with_value(attention[:, h]) @ z[:, h] for h in range(self.heads)], dim=1
        )
        out = out.mean(dim=1) if self.average else out.flatten(1)
        return out + expand(self.bias) if self.own else out


class DirectedConv(nn.Module):
    """Dir-GNN (Rossi et al. 2023): x W + b + (1-α) conv_in(x) + α conv_out(x), α = 1/2.

    One convolution receives from in-neighbours, the other from out-neighbours. Neither has
    self-loops.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        make: builds one of the two convolutions, without a bias and without a path for the node
            itself.
    """

    alpha = 0.5

    def __init__(self, inputs: int, outputs: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.own = Linear(inputs, outputs)
        self.conv_in, self.conv_out = make(), make()

    def forward(self, x: Tensor | SparseMatrix, graph: StackedGraph) -> Tensor:
        near = torch.lerp(
            self.conv_in(x, graph.inward), self.conv_out(x, graph.outward), self.alpha
        )
        own: Tensor = self.own(x, graph)
        return own + near


class RelationalConv(nn.Module):
    """R-GCN (Schlichtkrull et al. 2018): x W + b + sum_r mean_r(x) W_r.

    mean_r is the mean over the neighbours of relation r. If there are many relations, their
    weights are W_r = sum_b a_rb V_b with fewer bases V_b than relations.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        relations: the number of relations, each direction counted if they are separate.
        bases: the number of bases; with no more relations than that, each has its own weights.
    """

    def __init__(self, inputs: int, outputs: int, relations: int, bases: int) -> None:
        super().__init__()
        self.relations = relations
        self.own = Linear(inputs, outputs)
        count = min(bases, relations)
        self.bases = glorot((count, inputs, outputs), inputs, outputs)
        self.shares = glorot((relations, count), relations, count) if count < relations else None

    def forward(self, x: Tensor | SparseMatrix, graph: StackedGraph) -> Tensor:
        out: Tensor = self.own(x, graph)
        for mean, weight in zip(graph.relations, self._weights(), strict=True):
            out = out + mean @ matmul(x, weight, graph)
        return out

    def _weights(self) -> Sequence[Tensor]:
        """Return the weights of every relation, `[K, inputs, outputs]` each."""
        if self.shares is None:
            return self.bases.unbind(dim=1)
        return torch.einsum("krb,kbio->rkio", self.shares, self.bases).unbind()


class ACMConv(nn.Module):
    """Adaptive channel mixing (Luan et al. 2022): low-pass, high-pass and identity channels.

    L = relu(Â x W_L), H = relu((I-Â) x W_H), M = relu(x W_M) with Â = (D+I)^-1 (A+I);
    weights = softmax(sigmoid([L a_L, H a_H, M a_M]) W_mix / 3); the output is 3 times the mixture.
    """

    channels = 3

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight_low = glorot((inputs, outputs), inputs, outputs)
        self.weight_high = glorot((inputs, outputs), inputs, outputs)
        self.weight_self = glorot((inputs, outputs), inputs, outputs)
        self.attend = glorot((outputs, self.channels), outputs, 1)
        self.mix = glorot((self.channels, self.channels), self.channels, self.channels)

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperators) -> Tensor:
        pair = matmul_both(x, self.weight_low, self.weight_high, graph)
        own = matmul(x, self.weight_self, graph)
        near = graph.random_walk @ pair
        return mixed_channels(own, pair, near, None, self.attend, self.mix, graph.segments)


def mixed_channels(
    own: Tensor,
    pair: Tensor,
    near: Tensor,
    scales: Tensor | None,
    attend: Tensor,
    mix: Tensor,
    segments: Segments,
) -> Tensor:
    """Compute the channels of an ACM layer and return 3 times their mixture.

    With [l, h] = pair and [l', h'] = near, the channels are

        L = relu(l'), H = relu(h - h'), M = relu(own),

    or with scales b and c

        L = relu(b (l + l')), H = relu(c h - b h'), M = relu(own).

    Their weights are softmax(sigmoid([L a_L, H a_H, M a_M]) W_mix / 3).

    Args:
        own: each node's own message for the identity channel, `[nodes, width]`.
        pair: its own messages for the low-pass and the high-pass channel, `[nodes, 2 · width]`.
        near: the messages of its neighbours for these two, `[nodes, 2 · width]`.
        scales: b and c of every node, `[nodes, 2]`, without gradient.
        attend: a_L, a_H and a_M of every client, `[clients, width, 3]`.
        mix: W_mix of every client, `[clients, 3, 3]`.
        segments: the nodes of each client.
    """
    if all(map(kernels.available, (own, pair, near))):
        return kernels.mixed_channels(own, pair, near, scales, attend, mix, segments)
    if len({x.dtype for x in (own, pair, near, attend, mix)}) == 1 and pays(own, segments):
        return mixed_in_blocks(own, pair, near, scales, attend, mix, segments)
    (low, high), (near_low, near_high) = pair.chunk(2, dim=1), near.chunk(2, dim=1)
    if scales is None:
        low, high = near_low, high - near_high
    else:
        by, times = scales.chunk(2, dim=1)
        low, high = by * (low + near_low), times * high - by * near_high
    messages = (low.relu(), high.relu(), own.relu())
    vectors = torch.split(attend, 1, dim=2)
    scores = [segments.matmul(m, a) for m, a in zip(messages, vectors, strict=True)]
    return mixture(messages, scores, mix, segments)


def mixture(
    messages: Sequence[Tensor], scores: Sequence[Tensor], mix: Tensor, segments: Segments
) -> Tensor:
    """Return n · sum_i w_i message_i for n messages, w = softmax(sigmoid(scores) W_mix / n)."""
    mixed = segments.matmul(torch.cat(list(scores), dim=1).sigmoid(), mix) / len(messages)
    weights = torch.split(len(messages) * mixed.softmax(dim=1), 1, dim=1)
    first, *others = (w * m for w, m in zip(weights, messages, strict=True))
    for other in others:
        first = first + other
    return first
