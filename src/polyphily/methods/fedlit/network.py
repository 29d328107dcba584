"""FedLit's network: a projection of features, a channel of convolutions per link type, a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyphily.methods.fedlit.links import assign, degrees_of, links_of, typed_graph
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws, scrambled, shifted
from polyphily.nn.layers import Linear, glorot, zeros
from polyphily.nn.stacked import StackedGraph

PROJECT, CHANNELS, CENTROIDS = "project.", "channels.", "centroids"


class LinkTypeNetwork(Backbone):
    """h = W x + b; z = sum over types of their channels at v; logits from z.

    Args:
        shape: `layers` counts the convolutions of a channel.
        types: T, how many link types there are.
        embedding: of links, "symmetric" or "ordered".
        own: whether z also has a path from h without links.
        centroids: whether links are typed by centroids; otherwise their types are random.
    """

    def __init__(
        self, shape: Shape, types: int, *, embedding: str, own: bool, centroids: bool
    ) -> None:
        super().__init__(shape)
        self.types, self.embedding, self.by_centroids = types, embedding, centroids
        self.project = Linear(shape.features, shape.hidden)
        self.channels = Channels(self, types, own=own)
        self.centroids = zeros(types, 2 * shape.hidden)

    def describe(self) -> str:
        return f"gcn with {self.types} link types"

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        h = self.project(self.drop_input(graph, draws), graph)
        output: Output = self.channels(h, self.types_of(h, self.centroids, graph), graph, draws)
        return output

    def types_of(self, h: Tensor, centroids: Tensor, graph: StackedGraph) -> Tensor:
        """Return the type of every link."""
        if not self.by_centroids:
            return random_types(graph, self.types)
        links = links_of(graph)
        return assign(links.embed(h.detach(), self.embedding), centroids, links.segments)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"{CHANNELS}head.")


class Channels(nn.Module):
    """A channel per link type, and the classifier of their sum.

    A channel is a linear map, then convolutions over the links of its type with ReLU and dropout.
    All channels start equal, so that it does not matter how a client numbers its types first.

    Args:
        backbone: whose sizes and dropout it has.
        types: T.
        own: whether there is a path without links.
    """

    def __init__(self, backbone: Backbone, types: int, *, own: bool) -> None:
        super().__init__()
        shape, self.drop, self.types = backbone.shape, backbone.drop, types
        width = shape.hidden
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for _ in range(1 + shape.layers):
            alike = glorot((1, width, width), width, width).detach()
            self.weights.append(nn.Parameter(alike.repeat(1, types, 1, 1)))
            self.biases.append(zeros(types, width))
        self.own = Linear(width, width) if own else None
        self.head = Linear(width, shape.classes)

    def forward(
        self, h: Tensor, types: Tensor, graph: StackedGraph, draws: Draws | None = None
    ) -> Output:
        """Return the output for projected features and the types of all links."""
        typed = typed_graph(graph, types, self.types)
        first, *convolutions = zip(self.weights, self.biases, strict=True)
        x = self._linear(h.unsqueeze(1).expand(-1, self.types, -1), *first, graph)
        for weight, bias in convolutions:
            near = typed @ self._linear(x, weight, None, graph).flatten(0, 1)
            x = (near.view(x.shape) + graph.segments.expand(bias)).relu()
            x = self.drop(x, graph, draws)
        present = (degrees_of(typed) > 0).view(-1, self.types, 1)
        z = (x * present).sum(dim=1)
        if self.own is not None:
            z = z + self.drop(self.own(h, graph).relu(), graph, draws)
        return Output(self.head(z, graph), z)

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, graph: StackedGraph
    ) -> Tensor:
        """Multiply each client's rows of each type by the client's matrix of that type."""
        segments = graph.segments
        products = [segments.matmul(x[:, t], weight[:, t]) for t in range(self.types)]
        out = torch.stack(products, dim=1)
        return out if bias is None else out + segments.expand(bias)


def random_types(graph: StackedGraph, types: int) -> Tensor:
    """Return a type for each link by a hash of its number at its client, for an ablation."""
    links = links_of(graph).segments
    place = torch.arange(links.rows, device=graph.device) - links.starts.long()[links.owner]
    return shifted(scrambled(place.int()), 16).long() * types >> 16
