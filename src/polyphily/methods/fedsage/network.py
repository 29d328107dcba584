"""FedSage+'s network: NeighGen, which generates neighbours, and GraphSAGE on a mended graph.

Every node has `slots` places for generated neighbours. A gate says which of them exist: the first
ones, as many as NeighGen counts. Generated nodes are leaves, joined to their node in both
directions, so that real nodes hear them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.graphs.random import generator
from polyphily.methods.fedsage.leaves import Products, filled
from polyphily.methods.fedsage.slots import Slots, slots_of
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
Choice = Callable[[Tensor], Slots]  # from counts


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

    def forward(self, z: Tensor, rows: Segments) -> Tensor:
        """Return `[rows, P · F]` from noisy embeddings `[rows, …]`, without dropout."""
        return self._dense(self.last, self.hidden(z, rows), rows).tanh()

    def hidden(self, z: Tensor, rows: Segments, drop: Drop | None = None) -> Tensor:
        """Return the input of the last layer, `[rows, …]`."""
        hidden = self._dense(self.second, self._dense(self.first, z, rows).relu(), rows).relu()
        return drop(hidden) if drop else hidden

    def _dense(self, linear: Linear, x: Tensor, rows: Segments) -> Tensor:
        assert linear.bias is not None
        return rows.matmul(x, linear.weight) + rows.expand(linear.bias)


@dataclass(frozen=True)
class Generated:
    """The output of NeighGen before the generator's last layer.

    Attributes:
        z: embedding of every node.
        count: predicted number of lost neighbours of every node.
        slots: the slots to fill, if any.
        hidden: the input of the last layer at each of the slots' nodes, `[n, …]`.
    """

    z: Tensor
    count: Tensor
    slots: Slots | None = None
    hidden: Tensor | None = None

    def features(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the features in the slots, `[A, F]`, given NeighGen's parameters."""
        assert self.slots is not None
        assert self.hidden is not None
        return filled(self.hidden, params, self.slots)


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

    def forward(
        self,
        graph: StackedGraph,
        draws: Draws | None = None,
        choose: Choice | None = None,
        source: Tensor | None = None,
    ) -> Generated:
        """Count lost neighbours of all nodes, and prepare the features of some.

        Random numbers are drawn for all nodes, so that they do not depend on the choice.

        Args:
            graph: what is seen.
            draws: random numbers; without them the noise is always the same.
            choose: returns the slots to fill, given the counts; None: there are none.
            source: for each node, the node whose embedding its neighbours are generated from; by
                default itself.
        """
        pointers, p = graph.segments.pointers, self.shape.dropout
        first, second = self.encoder
        x = first(graph.x, graph).relu()
        z = second(x if draws is None else draws.dropout(x, p, pointers), graph).relu()
        count = self.count(z, graph).relu().view(-1)
        if choose is None:
            return Generated(z, count)
        slots = choose(count)
        nodes = slots.nodes if source is None else source[slots.nodes]
        if draws is None:
            noise = graph.cached(
                ("fedsage+ noise", z.shape[1]), lambda whole: _fixed_noise(whole, z)
            )[nodes]
        else:
            noise = normal(draws, z.shape[1], pointers, nodes).to(z.dtype)

        def drop(x: Tensor) -> Tensor:
            if draws is None or p == 0:
                return x
            every = x.new_ones(graph.num_nodes, x.shape[1])
            return x * draws.dropout(every, p, pointers)[nodes]

        noisy = z.index_select(0, nodes) + noise
        return Generated(z, count, slots, self.generator.hidden(noisy, slots.node_rows, drop))


def normal(
    draws: Draws, width: int, pointers: tuple[int, ...] | range, rows: Tensor | None = None
) -> Tensor:
    """Draw from N(0, 1) for all rows, and return some or all, `[rows, width]` in float64."""
    drawn = draws.uniform(width, pointers)
    found: Tensor = torch.special.ndtri((drawn if rows is None else drawn[rows]) + 2.0**-33)
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
        leaves: features of the generated nodes, `[A, F]`, or the first layer's products of them.
        slots: the slots that these are in.
        gate: which slots of every node exist, `[N, P]`.
        edges: the edges between real nodes; an entry is 0 where an end is hidden.
        degrees: the number of real neighbours of every node.
    """

    leaves: Tensor | Products
    slots: Slots
    gate: Tensor
    edges: SparseMatrix
    degrees: Tensor

    @classmethod
    def whole(
        cls, graph: StackedGraph, features: Tensor, gate: Tensor, slots: Slots | None = None
    ) -> Mended:
        """Mend a graph of which no node is hidden.

        Args:
            graph: the graph.
            features: those of the generated nodes, `[A, F]`.
            gate: which slots exist, `[N, P]`.
            slots: the slots of these nodes; by default those that are computed for this gate.
        """
        return cls(features, slots or slots_of(graph, gate), gate, graph.edges, graph.degrees)

    @property
    def neighbours(self) -> Tensor:
        """The number of real and generated neighbours, at least 1, as a column."""
        return (self.degrees + self.gate.sum(dim=1)).clamp(min=1).unsqueeze(1)


class MendedSAGE(GraphSAGE):
    """GraphSAGE in which real nodes hear their generated neighbours, and these hear their node."""

    def forward(
        self, graph: StackedGraph, draws: Draws | None = None, mended: Mended | None = None
    ) -> Output:
        if mended is None:
            return super().forward(graph, draws)
        *hidden, last = (cast(SAGEConv, conv) for conv in self.convs)
        x, leaves, slots = self.drop_input(graph, draws), mended.leaves, mended.slots
        embedding = None
        for conv in hidden:
            if isinstance(leaves, Tensor):
                weights = (conv.weight_near, conv.weight_self)
                leaves = Products(*(slots.rows.matmul(leaves, weight) for weight in weights))
            near, bias = matmul(x, conv.weight_near, graph), graph.segments.expand(conv.bias)
            embedding = (self._node(conv, x, near, leaves.near, graph, mended) + bias).relu()
            leaves = (leaves.own + slots.at_node(near + bias)).relu()
            x = self.drop(embedding, graph, draws)
            if draws is not None and self.shape.dropout > 0:
                leaves = leaves * self._kept(leaves, graph, draws, mended)
        assert isinstance(leaves, Tensor)
        near = matmul(x, last.weight_near, graph)
        heard = slots.rows.matmul(leaves, last.weight_near)
        logits = self._node(last, x, near, heard, graph, mended) + graph.segments.expand(last.bias)
        return Output(logits, logits if embedding is None else embedding)

    def _kept(self, like: Tensor, graph: StackedGraph, draws: Draws, mended: Mended) -> Tensor:
        """Draw dropout for all slots, so that it does not depend on which of them exist."""
        number = mended.gate.shape[1]
        pointers = tuple(number * start for start in graph.segments.pointers)
        every = like.new_ones(pointers[-1], like.shape[1])
        return draws.dropout(every, self.shape.dropout, pointers)[mended.slots.place]

    def _node(
        self,
        conv: SAGEConv,
        x: Tensor | SparseMatrix,
        near: Tensor,
        leaves: Tensor,
        graph: StackedGraph,
        mended: Mended,
    ) -> Tensor:
        """Return x W_self + mean over real and generated neighbours of x_u W_near.

        The products x_u W_near are given: `near` of real ones, `leaves` of generated ones.
        """
        mean = (mended.edges @ near + mended.slots.heard(leaves)) / mended.neighbours
        return matmul(x, conv.weight_self, graph) + mean


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
            mended = self.mend(graph, dict(self.neighgen.named_parameters()))
        output: Output = self.classifier(graph, draws, mended)
        return output

    def mend(self, graph: StackedGraph, params: Mapping[str, Tensor]) -> Mended:
        """Give the nodes of a whole graph their generated neighbours; no gradient goes through.

        Args:
            graph: the graph.
            params: NeighGen's parameters.
        """
        source = graph.cached("fedsage+ shuffle", _shuffle) if self.shuffled else None

        def choose(count: Tensor) -> Slots:
            return slots_of(graph, self.gate(count))

        with torch.no_grad():
            generated: Generated = functional_call(
                self.neighgen, dict(params), (graph, None, choose, source)
            )
            features = generated.features(params)
        return Mended.whole(graph, features, self.gate(generated.count), generated.slots)

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
