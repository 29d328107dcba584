"""FedSage+'s network: NeighGen, which generates neighbours, and GraphSAGE on a mended graph.

Every node has `slots` places for generated neighbours. A gate says which of them exist: the first
ones, as many as NeighGen counts. Generated nodes are leaves, joined to their node in both
directions, so that real nodes hear them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Backbone, GraphSAGE, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import Linear, SAGEConv, matmul
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

ENCODER_WIDTH = JUDGE_WIDTH = 32
MENDING = (1 << 31) - 1  # the number of no round: its draws are the noise of mending
CLASSIFIER, NEIGHGEN, JUDGE = "classifier.", "neighgen.", "judge."
GENERATOR = "generator."  # inside NeighGen

Drop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Widths:
    """The widths of NeighGen.

    Attributes:
        slots: P, the most neighbours that a node is given.
        embedding: width of z.
        first: width of the generator's first hidden layer.
        second: width of its second.
    """

    slots: int
    embedding: int
    first: int
    second: int


# NeighGen ----------------------------------------------------------------------------------------


class FeatureGenerator(nn.Module):
    """x̃ = tanh(W3 drop(relu(W2 relu(W1 (z + noise))))): the features of P neighbours."""

    def __init__(self, widths: Widths, features: int) -> None:
        super().__init__()
        self.first = Linear(widths.embedding, widths.first)
        self.second = Linear(widths.first, widths.second)
        self.last = Linear(widths.second, widths.slots * features)

    def forward(self, z: Tensor, rows: Segments, drop: Drop | None = None) -> Tensor:
        """Return `[rows, P · F]` from noisy embeddings `[rows, …]`."""
        hidden = self._dense(self.second, self._dense(self.first, z, rows).relu(), rows).relu()
        return self._dense(self.last, drop(hidden) if drop else hidden, rows).tanh()

    def _dense(self, linear: Linear, x: Tensor, rows: Segments) -> Tensor:
        assert linear.bias is not None
        return rows.matmul(x, linear.weight) + rows.expand(linear.bias)


@dataclass(frozen=True)
class Generated:
    """The output of NeighGen for every node: embedding, count, and features `[N, P, F]`."""

    z: Tensor
    count: Tensor
    features: Tensor


class NeighGen(nn.Module):
    """An encoder, a regression of the number of lost neighbours, and a generator of features."""

    def __init__(self, shape: Shape, widths: Widths) -> None:
        super().__init__()
        self.shape, self.widths = shape, widths
        self.encoder = nn.ModuleList(
            [SAGEConv(shape.features, ENCODER_WIDTH), SAGEConv(ENCODER_WIDTH, widths.embedding)]
        )
        self.count = Linear(widths.embedding, 1)
        assert self.count.bias is not None
        nn.init.ones_(self.count.bias)  # one neighbour each at first, so that no ReLU starts dead
        self.generator = FeatureGenerator(widths, shape.features)

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Generated:
        """Generate neighbours of all nodes; without `draws` the noise is always the same."""
        segments = graph.segments

        def drop(x: Tensor) -> Tensor:
            if draws is None:
                return x
            return draws.dropout(x, self.shape.dropout, segments.pointers)

        first, second = self.encoder
        z = second(drop(first(graph.x, graph).relu()), graph).relu()
        count = self.count(z, graph).relu().view(-1)
        noise = (
            graph.cached(("fedsage+ noise", z.shape[1]), lambda whole: _fixed_noise(whole, z))
            if draws is None
            else normal(draws, z.shape[1], segments.pointers).to(z.dtype)
        )
        features = self.generator(z + noise, segments, drop)
        return Generated(z, count, features.view(len(z), self.widths.slots, -1))


def normal(draws: Draws, width: int, pointers: tuple[int, ...] | range) -> Tensor:
    """Draw from N(0, 1), `[rows, width]` in float64."""
    found: Tensor = torch.special.ndtri(draws.uniform(width, pointers) + 2.0**-33)
    return found


def _fixed_noise(graph: StackedGraph, like: Tensor) -> Tensor:
    assert isinstance(graph, Cohort)
    draws = graph.draws(MENDING)
    return normal(draws, like.shape[1], graph.segments.pointers).to(like.dtype)


def gate(count: Tensor, slots: int, counting: str) -> Tensor:
    """Return which slots of a node exist, 1 or 0, `[N, P]`."""
    whole = (count.detach() + (0.5 if counting == "nearest" else 0.0)).floor()
    number = torch.arange(1, slots + 1, device=count.device)
    return (number <= whole.unsqueeze(1)).to(count.dtype)


# GraphSAGE on a mended graph ---------------------------------------------------------------------


@dataclass(frozen=True)
class Mended:
    """Generated neighbours beside a graph.

    Attributes:
        features: of the generated nodes, `[N, P, F]`.
        gate: which of them exist, `[N, P]`.
        edges: the edges between real nodes; an entry is 0 where an end is hidden.
        degrees: the number of real neighbours of every node.
        rows: the generated nodes of each client.
    """

    features: Tensor
    gate: Tensor
    edges: SparseMatrix
    degrees: Tensor
    rows: Segments

    @classmethod
    def whole(cls, graph: StackedGraph, features: Tensor, gate: Tensor) -> Mended:
        """Mend a graph of which no node is hidden."""
        return cls(features, gate, graph.edges, graph.degrees, slot_rows(graph, gate.shape[1]))

    def heard(self, slots: Tensor) -> Tensor:
        """Sum over the generated neighbours of every node, `[N · P, …] -> [N, …]`."""
        return (self.gate.unsqueeze(2) * slots.view(*self.gate.shape, -1)).sum(dim=1)

    @property
    def neighbours(self) -> Tensor:
        """The number of real and generated neighbours, at least 1, as a column."""
        return (self.degrees + self.gate.sum(dim=1)).clamp(min=1).unsqueeze(1)


def slot_rows(graph: StackedGraph, slots: int) -> Segments:
    """Return the slots of each client: P for every node."""
    return graph.cached(
        ("fedsage+ slots", slots),
        lambda whole: Segments(tuple(slots * n for n in whole.segments.sizes), whole.device),
    )


class MendedSAGE(GraphSAGE):
    """GraphSAGE in which real nodes hear their generated neighbours, and these hear their node."""

    def forward(
        self, graph: StackedGraph, draws: Draws | None = None, mended: Mended | None = None
    ) -> Output:
        if mended is None:
            return super().forward(graph, draws)
        *hidden, last = (cast(SAGEConv, conv) for conv in self.convs)
        x, slots = self.drop_input(graph, draws), mended.features.flatten(0, 1)
        embedding = None
        for conv in hidden:
            near = matmul(x, conv.weight_near, graph)
            embedding = self._node(conv, x, near, slots, graph, mended).relu()
            own = mended.rows.matmul(slots, conv.weight_self) + mended.rows.expand(conv.bias)
            places = mended.gate.shape[1]
            slots = (own.view(-1, places, near.shape[1]) + near.unsqueeze(1)).relu().flatten(0, 1)
            x = self.drop(embedding, graph, draws)
            if draws is not None:
                slots = draws.dropout(slots, self.shape.dropout, mended.rows.pointers)
        near = matmul(x, last.weight_near, graph)
        logits = self._node(last, x, near, slots, graph, mended)
        return Output(logits, logits if embedding is None else embedding)

    def _node(
        self,
        conv: SAGEConv,
        x: Tensor | SparseMatrix,
        near: Tensor,
        slots: Tensor,
        graph: StackedGraph,
        mended: Mended,
    ) -> Tensor:
        """Return x W_self + mean over real and generated neighbours of x_u W_near + b."""
        heard = graph.segments.matmul(mended.heard(slots), conv.weight_near)
        mean = (mended.edges @ near + heard) / mended.neighbours
        return matmul(x, conv.weight_self, graph) + mean + graph.segments.expand(conv.bias)


# All together ------------------------------------------------------------------------------------


class MendingNetwork(Backbone):
    """A GraphSAGE classifier on the graph that the client's own NeighGen mends.

    The judge is the classifier that NeighGen is trained with; it is not used afterwards.

    Args:
        shape: the size of the classifier.
        widths: those of NeighGen.
        counting: how counts become whole: "nearest" or "floor".
        shuffled: whether nodes are given the neighbours of other nodes (an ablation).
    """

    def __init__(self, shape: Shape, widths: Widths, counting: str, *, shuffled: bool) -> None:
        super().__init__(shape)
        self.widths, self.counting, self.shuffled = widths, counting, shuffled
        self.classifier = MendedSAGE(shape)
        self.neighgen = NeighGen(shape, widths)
        self.judge = MendedSAGE(replace(shape, hidden=JUDGE_WIDTH, layers=2, input_dropout=0.0))

    def describe(self) -> str:
        return "sage on graphs mended by NeighGen"

    def forward(
        self, graph: StackedGraph, draws: Draws | None = None, mended: Mended | None = None
    ) -> Output:
        """Classify the nodes of the mended graph, which is mended first unless it is given."""
        if mended is None:
            with torch.no_grad():
                mended = self.mend(graph, self.neighgen(graph))
        output: Output = self.classifier(graph, draws, mended)
        return output

    def mend(self, graph: StackedGraph, generated: Generated) -> Mended:
        """Give the nodes of a whole graph their generated neighbours."""
        features = generated.features
        if self.shuffled:
            features = features[graph.cached("fedsage+ shuffle", _shuffle)]
        return Mended.whole(graph, features, self.gate(generated.count))

    def gate(self, count: Tensor) -> Tensor:
        return gate(count, self.widths.slots, self.counting)

    def is_classifier(self, parameter: str) -> bool:
        own = parameter.removeprefix(CLASSIFIER)
        return own != parameter and self.classifier.is_classifier(own)


def _shuffle(graph: StackedGraph) -> Tensor:
    """Draw another node of the same client for every node."""
    assert isinstance(graph, Cohort)
    found = [
        start + torch.from_numpy(generator(seed, f"fedsage+/shuffle/{client}").permutation(size))
        for (seed, client), start, size in zip(
            graph.keys, graph.segments.pointers, graph.segments.sizes, strict=False
        )
    ]
    return torch.cat(found).to(graph.device)


# Losses of generated neighbours ------------------------------------------------------------------


def count_errors(count: Tensor, wanted: Tensor) -> Tensor:
    """Return the smooth L1 error of every count."""
    return F.smooth_l1_loss(count, wanted, reduction="none")


def feature_errors(
    generated: Tensor, exists: Tensor, targets: Tensor, present: Tensor | None, distance: str
) -> Tensor:
    """Return sum_p min_k ||x̃_p - x_k||^2 over the generated neighbours that exist, `[rows]`.

    Args:
        generated: x̃, `[rows, P, F]`.
        exists: 1 for the slots that count, `[rows, P]`.
        targets: x, `[rows, k, F]`.
        present: which targets there are, at least one per row, `[rows, k]`; None: all.
        distance: "sum" over features, or "mean" over features and slots.
    """
    products = torch.bmm(generated, targets.transpose(1, 2))
    squares = generated.square().sum(2, keepdim=True) + targets.square().sum(2).unsqueeze(1)
    gaps = (squares - 2 * products).clamp(min=0)
    if present is not None:
        gaps = gaps.masked_fill(~present.unsqueeze(1), torch.inf)
    total = (gaps.amin(dim=2) * exists).sum(dim=1)
    slots, width = generated.shape[1:]
    return total / (slots * width) if distance == "mean" else total
