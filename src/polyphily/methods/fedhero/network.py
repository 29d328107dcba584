"""FedHERO's networks: convolutions on the given graph and on a latent one, mixed layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyphily.methods.fedhero.latent import LatentGraph, Weigh
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.methods.fedhero.sampled import SampledGraph, evaluation_words, pair_words
from polyphily.methods.fedhero.structure import StructureLearner
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import ACMConv, GATConv, GCNConv, Linear, SAGEConv
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import GraphOperators, StackedGraph

CONVOLUTIONS: dict[str, type[nn.Module]] = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "acm-gcn": ACMConv,
    "gat": GCNConv,
    "mlp": GCNConv,
}
"""The convolution on the latent graph, by backbone. "gat" and "mlp" choose the local one only:
the weights of the latent graph are learned already."""


class WithLatent(Output):
    """A network's output, and the latent graph that it was computed on."""

    latent: LatentGraph | SampledGraph


class DualChannel(Backbone):
    """A structure learner, and two channels of convolutions: base class of both networks.

    Args:
        kind: the backbone whose convolutions are used.
        shape: the size of the network.
        learner: finds and scores latent neighbours.
        k: latent neighbours of a node, at most.
        alpha: weight of the local channel.
        weigh: turns similarities into edge weights; None if every pair of nodes is drawn as an
            edge with its similarity as probability, whatever `k` is.
        dual: whether the given graph has convolutions of its own, or those of the latent graph.
    """

    def __init__(
        self,
        kind: str,
        shape: Shape,
        learner: StructureLearner,
        *,
        k: int,
        alpha: float,
        weigh: Weigh | None,
        dual: bool,
    ) -> None:
        super().__init__(shape)
        self.kind, self.k, self.alpha, self.weigh, self.dual = kind, k, alpha, weigh, dual
        self.learner = learner
        self.add_convolutions()

    def describe(self) -> str:
        return f"dual channel of {self.kind}"

    def add_convolutions(self) -> None:
        """Create the layers of the network."""
        raise NotImplementedError

    def add_channels(self, widths: Sequence[tuple[int, int]], heads: Sequence[int]) -> None:
        """Create the convolutions of both channels.

        Args:
            widths: (inputs, outputs) of every layer.
            heads: attention heads of every layer.
        """
        latent = CONVOLUTIONS[self.kind]
        self.global_convs = nn.ModuleList(latent(*width) for width in widths)
        self.local_convs = nn.ModuleList()
        if self.dual:
            self.local_convs.extend(
                _local_conv(self.kind, *width, h) for width, h in zip(widths, heads, strict=True)
            )

    def forward(
        self,
        graph: StackedGraph,
        draws: Draws | None = None,
        near: Neighbours | None = None,
        words: Tensor | None = None,
    ) -> WithLatent:
        """Compute the output.

        Args:
            graph: the clients' graphs.
            draws: the random draws of the round; None in evaluation.
            near: latent neighbours; searched unless given.
            words: of the draws of Bernoulli edges (`pair_words`); drawn unless given.
        """
        latent = self.latent_graph(graph, draws, near, words)
        output = WithLatent(*self.propagate(graph, latent, draws))
        output.latent = latent
        return output

    def latent_graph(
        self,
        graph: StackedGraph,
        draws: Draws | None,
        near: Neighbours | None,
        words: Tensor | None,
    ) -> LatentGraph | SampledGraph:
        """Connect the nodes by the learner's similarity: to the k nearest, or at random."""
        if self.weigh is not None:
            near, score = self.learner(graph, self.k, near)
            return LatentGraph(near, self.weigh(score, near), graph.segments)
        if words is None and draws is not None:
            words = pair_words(draws, len(graph.segments))
        elif words is None:
            words = evaluation_words(graph)
        return SampledGraph(self.learner.pairs(graph), words, graph.segments)

    def propagate(self, graph: StackedGraph, latent: GraphOperators, draws: Draws | None) -> Output:
        """Compute the output on both graphs."""
        raise NotImplementedError

    def mixed(
        self, z: Tensor | SparseMatrix, layer: int, graph: StackedGraph, latent: GraphOperators
    ) -> Tensor:
        """Compute alpha f_loc(z, A) + (1 - alpha) f_g(z, Ã), Eq. (5)."""
        local_convs = self.local_convs if self.dual else self.global_convs
        given: Tensor = local_convs[layer](z, graph)
        other: Tensor = self.global_convs[layer](z, latent)
        return torch.lerp(other, given, self.alpha)


class PlainDualChannel(DualChannel):
    """The backbone itself, twice: convolutions take the features and return the logits."""

    def add_convolutions(self) -> None:
        shape = self.shape
        self.add_channels(shape.widths(), [shape.heads] * (shape.layers - 1) + [1])

    def propagate(self, graph: StackedGraph, latent: GraphOperators, draws: Draws | None) -> Output:
        z: Tensor | SparseMatrix = self.drop_input(graph, draws)
        embedding, last = None, len(self.global_convs) - 1
        for layer in range(last):
            embedding, z = self.activate(self.mixed(z, layer, graph, latent), graph, draws)
        logits = self.mixed(z, last, graph, latent)
        return Output(logits, logits if embedding is None else embedding)

    def is_classifier(self, parameter: str) -> bool:
        return f"_convs.{len(self.global_convs) - 1}." in parameter


class JumpingDualChannel(DualChannel):
    """The paper's network: a projection, convolutions, and a classifier on all layers' outputs."""

    def add_convolutions(self) -> None:
        shape, hidden, layers = self.shape, self.shape.hidden, self.shape.layers
        self.projection = Linear(shape.features, hidden)
        self.add_channels([(hidden, hidden)] * layers, [shape.heads] * layers)
        self.classifier = nn.ModuleDict(
            {
                "ego": Linear(shape.features, shape.classes, bias=False),
                "layers": Linear((layers + 1) * hidden, shape.classes),
            }
        )

    @property
    def embedding_width(self) -> int:
        return (self.shape.layers + 1) * self.shape.hidden

    def propagate(self, graph: StackedGraph, latent: GraphOperators, draws: Draws | None) -> Output:
        x = self.drop_input(graph, draws)
        z = self.drop(self.projection(x, graph).relu(), graph, draws)  # Z^0 = f_0(X)
        outputs = [z]
        for layer in range(len(self.global_convs)):
            z = self.drop(self.mixed(z, layer, graph, latent).relu(), graph, draws)
            outputs.append(z)
        embedding = torch.cat(outputs, dim=1)
        # f_c(concat(X, Z^0, …, Z^L)), Eq. (6): one product for X, which may be sparse, and one
        # for the rest.
        logits = self.classifier["ego"](x, graph) + self.classifier["layers"](embedding, graph)
        return Output(logits, embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("classifier.")


def _local_conv(kind: str, inputs: int, outputs: int, heads: int) -> nn.Module:
    """Create a convolution of the local channel; heads are concatenated."""
    if kind == "mlp":
        return Linear(inputs, outputs)
    if kind != "gat":
        return CONVOLUTIONS[kind](inputs, outputs)
    if outputs % heads:
        raise ValueError(f"gat: hidden ({outputs}) must be a multiple of heads ({heads})")
    return GATConv(inputs, outputs // heads, heads, average=False)
