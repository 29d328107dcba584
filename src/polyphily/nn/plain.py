"""Networks for a single graph, in torch and torch_geometric alone.

They compute what Polyphily's backbones compute, for one client and without dropout. An exported
model is a folder with `model.safetensors`, `model.json` and this file as `module.py`:

    from module import load
    model = load(folder)
    x = model.encode(x)
    edge_index, edge_weight, edge_type = model.prepare(edge_index, num_nodes=len(x))
    logits = model(x, edge_index, edge_weight)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv, GraphConv, MessagePassing, SimpleConv
from torch_geometric.utils import coalesce, remove_self_loops, scatter, softmax, to_undirected

# Edges -------------------------------------------------------------------------------------------


class Weighted(NamedTuple):
    """Edges `[2, E]`, sources in the first row and targets in the second, and numbers for them."""

    ends: Tensor
    weight: Tensor


class Links:
    """Edges along which targets receive from sources, normalised as layers need them.

    A is their matrix: entry (v, u) is the weight of the edge from u to v.

    Args:
        index: `[2, E]`, without self-loops.
        weight: `[E]`.
        nodes: the number of nodes.
        loops: whether nodes receive from themselves, too, where a layer has A + I below.
    """

    def __init__(self, index: Tensor, weight: Tensor, nodes: int, *, loops: bool = True) -> None:
        self.index, self.weight, self.nodes, self.loops = index, weight, nodes, loops

    @cached_property
    def with_loops(self) -> Weighted:
        """A + I."""
        if not self.loops:
            return Weighted(self.index, self.weight)
        every = torch.arange(self.nodes, device=self.index.device)
        index = torch.cat([self.index, torch.stack([every, every])], dim=1)
        return Weighted(index, torch.cat([self.weight, self.weight.new_ones(self.nodes)]))

    @cached_property
    def gcn(self) -> Weighted:
        """R^-1/2 (A+I) C^-1/2 with the sums R over rows and C over columns of A + I."""
        (source, target), weight = self.with_loops
        received = self._inverse(weight, target).sqrt()
        sent = self._inverse(weight, source).sqrt()
        return Weighted(self.with_loops.ends, weight * received[target] * sent[source])

    @cached_property
    def random_walk(self) -> Weighted:
        """R^-1 (A+I)."""
        (_, target), weight = self.with_loops
        scale = self._inverse(weight, target)
        return Weighted(self.with_loops.ends, weight * scale[target])

    @cached_property
    def mean(self) -> Weighted:
        """The mean over neighbours, zero for a node without any."""
        target = self.index[1]
        return Weighted(self.index, self.weight * self._inverse(self.weight, target)[target])

    def _inverse(self, weight: Tensor, at: Tensor) -> Tensor:
        """Return one over the sum of the weights at every node, and 0 for the sum of nothing."""
        sums: Tensor = scatter(weight, at, dim_size=self.nodes, reduce="sum")
        return torch.where(sums > 0, sums, torch.inf).reciprocal()


class Graph:
    """A graph as networks see it: edges in the directions and relations that they need.

    Args:
        links: the edges of all relations, in the chosen direction.
        inward: the edges along which a node receives from those that point to it.
        outward: the edges along which it receives from those that it points to.
        relations: the edges of each relation.
        shown: the known labels as one-hot rows, zero for other nodes, `[N, classes]`.
        labels: the known labels, -1 for other nodes, `[N]`.
    """

    def __init__(
        self,
        links: Links,
        inward: Links,
        outward: Links,
        relations: Sequence[Links],
        shown: Tensor,
        labels: Tensor,
    ) -> None:
        self.links, self.inward, self.outward = links, inward, outward
        self.relations, self.shown, self.labels = relations, shown, labels


# Layers ------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """x W + b, without edges."""

    def forward(self, x: Tensor, graph: Any = None) -> Tensor:
        return super().forward(x)


class Convolution(nn.Module):
    """Â x W + b: the graph convolution of Kipf and Welling, or a mean over neighbours."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.conv = GCNConv(inputs, outputs, bias=bias, normalize=False)

    def forward(self, x: Tensor, links: Links) -> Tensor:
        out: Tensor = self.conv(x, *(links.mean if self.mean else links.gcn))
        return out


class SAGE(nn.Module):
    """x W_root + mean(x_u) W_rel + b: GraphSAGE, also with weights of edges."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = GraphConv(inputs, outputs, aggr="add")

    def forward(self, x: Tensor, links: Links) -> Tensor:
        out: Tensor = self.conv(x, *links.mean)
        return out


class Attention(GATConv):  # type: ignore[misc]
    """Graph attention; the logarithm of an edge's weight is added to its score."""

    # torch_geometric replaces `GATConv.propagate` when the first GATConv is made. Explainers would
    # then find the replacement here, which ignores their masks.
    propagate = MessagePassing.propagate

    def __init__(
        self, inputs: int, outputs: int, heads: int, *, average: bool, bias: bool = True
    ) -> None:
        super().__init__(
            inputs, outputs, heads=heads, concat=not average, bias=bias, add_self_loops=False
        )

    def forward(self, x: Tensor, links: Links) -> Tensor:
        index, weight = links.with_loops
        out: Tensor = super().forward(x, index, weight.log())
        return out

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        dim_size: int | None,
    ) -> Tensor:
        scores = F.leaky_relu(alpha_j + alpha_i, self.negative_slope) + edge_attr.unsqueeze(1)
        weights: Tensor = softmax(scores, index, ptr, dim_size)
        return weights


class ChannelMixing(nn.Module):
    """Adaptive channel mixing (Luan et al. 2022): low-pass, high-pass and identity channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.low, self.high, self.own = (nn.Linear(inputs, outputs, bias=False) for _ in range(3))
        self.attend = nn.Parameter(torch.zeros(outputs, 3))
        self.mix = nn.Parameter(torch.zeros(3, 3))
        self.propagate = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, links: Links) -> Tensor:
        low, high = self.low(x), self.high(x)
        near = self.propagate(torch.cat([low, high], dim=1), *links.random_walk)
        near_low, near_high = near.chunk(2, dim=1)
        channels = (near_low.relu(), (high - near_high).relu(), self.own(x).relu())
        scores = [c @ self.attend[:, i : i + 1] for i, c in enumerate(channels)]
        weights = (torch.cat(scores, dim=1).sigmoid() @ self.mix / 3).softmax(dim=1)
        return 3 * sum((weights[:, i : i + 1] * c for i, c in enumerate(channels)), x.new_zeros(()))


class Directed(nn.Module):
    """Dir-GNN (Rossi et al. 2023): x W + b + (conv_in(x) + conv_out(x)) / 2."""

    def __init__(self, inputs: int, outputs: int, conv_in: nn.Module, conv_out: nn.Module) -> None:
        super().__init__()
        self.own = Linear(inputs, outputs)
        self.conv_in, self.conv_out = conv_in, conv_out

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        near = (self.conv_in(x, graph.inward) + self.conv_out(x, graph.outward)) / 2
        out: Tensor = self.own(x) + near
        return out


class Relational(nn.Module):
    """R-GCN (Schlichtkrull et al. 2018): x W + b + sum_r mean_r(x) W_r, W_r = sum_b a_rb V_b."""

    def __init__(self, inputs: int, outputs: int, relations: int, bases: int) -> None:
        super().__init__()
        count = min(bases, relations)
        self.own = Linear(inputs, outputs)
        self.bases = nn.Parameter(torch.zeros(count, inputs, outputs))
        self.shares = nn.Parameter(torch.zeros(relations, count)) if count < relations else None
        self.propagate = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        weights: Tensor = self.bases
        if self.shares is not None:
            weights = torch.einsum("rb,bio->rio", self.shares, self.bases)
        out: Tensor = self.own(x)
        for links, weight in zip(graph.relations, weights, strict=True):
            out = out + self.propagate(x @ weight, *links.mean)
        return out


class Shape(NamedTuple):
    """The size of a network; see `polyphily.nn.backbones.Shape`."""

    features: int
    classes: int
    hidden: int
    layers: int
    heads: int = 4
    hops: int = 10
    separate: bool = False
    relations: int = 1
    readout: str = "last"
    bases: int = 8


def convolution(kind: str, inputs: int, outputs: int, shape: Shape, *, last: bool) -> nn.Module:
    """Build a convolution of some kind, or one for each direction."""
    if kind in ("mlp", "gpr-gnn"):
        return Linear(inputs, outputs)
    if kind == "acm":
        return ChannelMixing(inputs, outputs)
    if kind == "rgcn":
        relations = shape.relations * (2 if shape.separate else 1)
        return Relational(inputs, outputs, relations, shape.bases)

    def make(*, own: bool) -> nn.Module:
        if kind == "gat":
            width = outputs if last else max(outputs // shape.heads, 1)
            return Attention(inputs, width, shape.heads, average=last, bias=own)
        if kind == "sage" and own:
            return SAGE(inputs, outputs)
        return Convolution(inputs, outputs, bias=own, mean=kind == "sage")

    if shape.separate:
        return Directed(inputs, outputs, make(own=False), make(own=False))
    return make(own=True)


def convolve(conv: nn.Module, x: Tensor, graph: Graph) -> Tensor:
    """Apply a layer to the edges that it reads."""
    reads_graph = isinstance(conv, Directed | Relational)
    out: Tensor = conv(x, graph if reads_graph else graph.links)
    return out


# Networks ----------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers of one kind with ReLU between them; gpr-gnn propagates what they return."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        shape = Shape(**sizes)
        widths = [shape.features, *[shape.hidden] * (shape.layers - 1), shape.classes]
        self.convs = nn.ModuleList(
            convolution(kind, a, b, shape, last=i == shape.layers - 1)
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.gamma = None
        if kind == "gpr-gnn":
            self.gamma = nn.Parameter(torch.zeros(shape.hops + 1))
            self.propagate = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        for depth, conv in enumerate(self.convs):
            x = convolve(conv, x.relu() if depth else x, graph)
        if self.gamma is None:
            return x
        logits = self.gamma[0] * x
        for step in range(1, len(self.gamma)):
            x = self.propagate(x, *graph.links.gcn)
            logits = logits + self.gamma[step] * x
        return logits


class Block(nn.Module):
    """relu(conv(n) + n W), n = LayerNorm(h)."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden
        self.norm = nn.LayerNorm(width)
        self.conv = convolution(kind, width, width, shape, last=False)
        own = kind in ("gcn", "gat") and not shape.separate
        self.own = Linear(width, width, bias=False) if own else None

    def forward(self, h: Tensor, graph: Graph) -> Tensor:
        n = self.norm(h)
        out = convolve(self.conv, n, graph)
        return (out if self.own is None else out + self.own(n)).relu()


class Residual(nn.Module):
    """A linear input, residual blocks, a normalisation and a linear classifier."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        shape = Shape(**sizes)
        self.input = Linear(shape.features, shape.hidden)
        self.blocks = nn.ModuleList(Block(kind, shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = Linear(shape.hidden, shape.classes)
        jump = shape.readout == "jump"
        self.jump = nn.Parameter(torch.zeros(shape.layers + 1)) if jump else None

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        levels = [self.input(x)]
        for block in self.blocks:
            levels.append(levels[-1] + block(levels[-1], graph))
        embedding: Tensor = self.norm(levels[-1])
        if self.jump is not None:
            normed = torch.stack([self.norm(h) for h in levels])
            embedding = (self.jump.softmax(dim=0).view(-1, 1, 1) * normed).sum(dim=0)
        out: Tensor = self.head(embedding)
        return out


class DisenGCN(nn.Module):
    """A projection, neighbourhood routing among factors (Ma et al. 2019), a linear classifier."""

    def __init__(
        self, features: int, classes: int, width: int, factors: int, iterations: int, depth: int
    ) -> None:
        super().__init__()
        self.width, self.iterations, self.depth = width, iterations, depth
        self.project = Linear(features, factors * width)
        self.head = Linear(factors * width, classes)
        self.propagate = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        h = F.leaky_relu(self.project(x))
        for _ in range(self.depth):
            h = F.leaky_relu(self._routed(h, graph.links.index))
        out: Tensor = self.head(h)
        return out

    def _routed(self, h: Tensor, index: Tensor) -> Tensor:
        source, target = index
        x = [_unit(part) for part in torch.split(h, self.width, dim=1)]
        u = x
        for _ in range(self.iterations):
            scores = [(u_q[target] * x_q[source]).sum(dim=1) for u_q, x_q in zip(u, x, strict=True)]
            shares = torch.stack(scores).double().softmax(dim=0).to(h.dtype)
            near = [self.propagate(x_q, index, p) for x_q, p in zip(x, shares, strict=True)]
            u = [_unit(x_q + n) for x_q, n in zip(x, near, strict=True)]
        return torch.cat(u, dim=1)


def _unit(x: Tensor) -> Tensor:
    """Scale rows to unit length; rows of zeros stay zero."""
    length = x.norm(dim=1, keepdim=True)
    return x / torch.where(length > 0, length, 1)


class UniFilter(nn.Module):
    """A learned mixture of homophily and heterophily bases, then an MLP (Huang et al. 2024).

    The homophily of the graph is taken from the edges between nodes whose labels are known.
    """

    unknown_homophily = 0.75
    smallest_cosine = 1e-6
    exhausted = 1e-5

    def __init__(
        self, widths: Sequence[Sequence[int]], order: int, tau: float, *, per_feature: bool
    ) -> None:
        super().__init__()
        self.order, self.tau = order, tau
        coefficients = widths[0][0] if per_feature else 1
        self.coefficients = nn.Parameter(torch.zeros(order + 1, coefficients))
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in widths)
        self.propagate = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        z = self._mixture(x, graph)
        for depth, linear in enumerate(self.linears):
            z = z.relu() if depth else z
            out = linear(z)
            z = out + z if out.shape[1] == z.shape[1] else out
        return z

    def _mixture(self, x: Tensor, graph: Graph) -> Tensor:
        links = graph.links
        plain = Links(
            links.index, x.new_ones(links.index.shape[1]).double(), links.nodes, loops=False
        )
        cosine = (torch.pi / 2 * (1 - self._homophily(graph))).cos()
        c = cosine.clamp(min=self.smallest_cosine)
        near = x.double()
        u = v = self._normalised(near)
        before, total = torch.zeros_like(v), u
        mixed = self.coefficients[0] * (self.tau * near + (1 - self.tau) * u).to(x.dtype)
        for k in range(1, self.order + 1):
            near = self.propagate(near, *plain.gcn)
            step = self.propagate(v, *plain.gcn)
            for earlier in (v, before):
                step = step - (step * earlier).sum(dim=0) * earlier
            before, v = v, self._normalised(step, self.exhausted)
            a = ((k - 1) * c + 1) / k
            u = self._normalised(total / k + (a * (a - c * c)).clamp(min=0).sqrt() / c * v)
            total = total + u
            basis = (self.tau * near + (1 - self.tau) * u).to(x.dtype)
            mixed = mixed + self.coefficients[k] * basis
        return mixed

    def _homophily(self, graph: Graph) -> Tensor:
        source, target = graph.labels[graph.links.index]
        seen = ((source >= 0) & (target >= 0)).double()
        same = seen * (source == target)
        share = same.sum() / seen.sum().clamp(min=1)
        return torch.where(seen.sum() > 0, share, self.unknown_homophily)

    @staticmethod
    def _normalised(x: Tensor, negligible: float = 0.0) -> Tensor:
        norm = (x * x).sum(dim=0).sqrt()
        return x * torch.where(norm > negligible, 1 / norm, 0)


class LinearHead(nn.Module):
    """A network whose output passes ReLU and a linear classifier."""

    def __init__(self, trunk: Mapping[str, Any], hidden: int, classes: int) -> None:
        super().__init__()
        self.trunk = build(trunk)
        self.head = Linear(hidden, classes)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        out: Tensor = self.head(self.trunk(x, graph).relu())
        return out


class Choir(nn.Module):
    """Networks side by side, the voices: the logarithm of the mean of their probabilities.

    Args:
        voices: the networks.
        labelled: the numbers of the voices that have known labels among their inputs.
        own: how many voices follow that are a client's own versions of the first ones.
        mixed: whether voices have weights in the mean.
    """

    least = 1e-6  # weight of a voice

    def __init__(
        self,
        voices: Sequence[Mapping[str, Any]],
        labelled: Sequence[int] = (),
        *,
        own: int = 0,
        mixed: bool = False,
    ) -> None:
        super().__init__()
        self.voices = nn.ModuleList(map(build, voices))
        self.own = nn.ModuleList(map(build, voices[:own]))
        self.labelled = frozenset(labelled)
        parts = len(self.voices) + len(self.own)
        even = torch.full((parts,), 1 / parts)
        self.mix = nn.Parameter(even) if mixed else None

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        shown = torch.cat([x, graph.shown], dim=1) if self.labelled else x
        said = torch.stack(
            [
                voice(shown if v in self.labelled else x, graph).log_softmax(dim=1)
                for voices in (self.voices, self.own)
                for v, voice in enumerate(voices)
            ]
        )
        if self.mix is None:
            return said.logsumexp(dim=0) - math.log(len(said))
        weights = self.mix.clamp(min=self.least).log().view(-1, 1, 1)
        return (said + weights).logsumexp(dim=0)


NETWORKS: dict[str, Any] = {
    **dict.fromkeys(("mlp", "gcn", "sage", "gat", "gpr-gnn", "acm", "rgcn"), Stack),
    **dict.fromkeys(("res-gcn", "res-sage", "res-gat", "res-acm"), Residual),
    "disengcn": DisenGCN,
    "unifilter": UniFilter,
    "linear head": LinearHead,
    "choir": Choir,
}


def build(spec: Mapping[str, Any]) -> nn.Module:
    """Build a network from its description, as it stands in `model.json`."""
    sizes = {name: value for name, value in spec.items() if name != "kind"}
    cls = NETWORKS[spec["kind"]]
    if cls in (Stack, Residual):
        sizes["kind"] = spec["kind"].removeprefix("res-")
    network: nn.Module = cls(**sizes)
    return network


def _degree_columns(neighbours: Tensor, bins: int) -> Tensor:
    """Return which power of two the number of neighbours is, and its logarithm."""
    logs = (1 + neighbours.double()).log2()
    marks = F.one_hot(logs.long().clamp(max=bins - 1), bins)
    return torch.cat([marks, logs.unsqueeze(1) / bins], dim=1)


# The model ---------------------------------------------------------------------------------------


class Model(nn.Module):
    """A network with the way in which it reads a graph.

    Args:
        network: its description, for `build`.
        classes: the number of classes.
        direction: which edges a node receives along: "both", "in", "out" or "separate".
        weighted: whether weights of edges are used.
        relations: the number of types of edges that are told apart; 0: they are not.
        label_inputs: whether known labels are among the inputs of the network.
        degree_inputs: the number of bins in the columns that tell how many neighbours a node has;
            0 if there are no such inputs.
        scaling: of an array of features: "mean" and "std" of its columns (None: as they are),
            whether the magnitudes of a "row" sum to one, and the number of columns of "padding".
            None if features were encoded from the columns of a table.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        network: Mapping[str, Any],
        classes: int,
        direction: str = "both",
        *,
        weighted: bool = True,
        relations: int = 0,
        label_inputs: bool = False,
        degree_inputs: int = 0,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.network = build(network)
        self.scaling = scaling
        for name in ("mean", "std"):
            values = (scaling or {}).get(name)
            found = None if values is None else torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, found, persistent=False)
        self.classes, self.direction, self.weighted = classes, direction, weighted
        self.relations, self.label_inputs = relations, label_inputs
        self.degree_inputs = degree_inputs

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_type: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of every node, `[N, classes]`.

        Args:
            x: features, `[N, features]`, encoded as in training (see `encode`).
            edge_index: `[2, E]`, without self-loops and repeated edges, and with both directions of
                every edge if `direction` is "both" (see `prepare`).
            edge_weight: positive weights, `[E]`.
            edge_type: the types of edges, `[E]`.
            labels: labels of the nodes whose class is known, -1 for others, `[N]`. Most networks do
                not use them.
        """
        graph = self._graph(x, edge_index, edge_weight, edge_type, labels)
        if self.degree_inputs:
            columns = _degree_columns(self._degrees(edge_index, x.shape[0]), self.degree_inputs)
            x = torch.cat([x, columns.to(x.dtype)], dim=1)
        inputs = torch.cat([x, graph.shown], dim=1) if self.label_inputs else x
        out: Tensor = self.network(inputs, graph)
        return out

    @property
    def uses_labels(self) -> bool:
        """True if labels that are known change the output."""
        return self.label_inputs or any(
            isinstance(part, UniFilter) or (isinstance(part, Choir) and bool(part.labelled))
            for part in self.modules()
        )

    def _degrees(self, edge_index: Tensor, nodes: int) -> Tensor:
        """Return the number of each node's neighbours, whatever the direction of the edges."""
        if self.direction != "both":  # an edge and its reverse are one neighbour
            ends = torch.cat([edge_index, edge_index.flip(0)], dim=1)
            pairs = torch.unique(ends[0] * nodes + ends[1])
            edge_index = torch.stack([pairs // nodes, pairs % nodes])
        ones = torch.ones_like(edge_index[0])
        found: Tensor = scatter(ones, edge_index[0], dim_size=nodes, reduce="sum")
        return found

    def _graph(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_type: Tensor | None,
        labels: Tensor | None,
    ) -> Graph:
        nodes = x.shape[0]
        weight = x.new_ones(edge_index.shape[1])
        if self.weighted and edge_weight is not None:
            weight = edge_weight.to(x.dtype)
        outgoing = edge_index.flip(0)
        if labels is None:
            labels = edge_index.new_full((nodes,), -1)
        known = (labels >= 0).unsqueeze(1)
        shown = F.one_hot(labels.clamp(min=0), self.classes).to(x.dtype) * known
        used = outgoing if self.direction == "out" else edge_index
        ways = (edge_index, outgoing) if self.direction == "separate" else (used,)
        relations = [
            Links(way, weight if edge_type is None else weight * (edge_type == r), nodes)
            for way in ways
            for r in range(self.relations)
        ]
        return Graph(
            Links(used, weight, nodes),
            Links(edge_index, weight, nodes, loops=False),
            Links(outgoing, weight, nodes, loops=False),
            relations,
            shown,
            labels,
        )

    def encode(self, x: Tensor) -> Tensor:
        """Scale an array of raw features as in training.

        Raises:
            ValueError: if the model was trained on a table. The rules of its columns are in
                `model.json`, and `polyphily.load_model(…).encoding` applies them.
        """
        if self.scaling is None:
            raise ValueError("the features were columns of a table: see 'encoding' in model.json")
        found = x.float()
        if self.mean is not None and self.std is not None:
            found = ((x.double() - self.mean) / self.std).float()
        found = F.pad(found, (0, self.scaling["padding"]))
        if self.scaling["row"]:
            total = found.abs().sum(dim=1, keepdim=True)
            found = found / torch.where(total > 0, total, 1)
        return found.to(next(self.parameters()).dtype)

    def prepare(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_type: Tensor | None = None,
        *,
        num_nodes: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Bring edges into the form that `forward` takes.

        Self-loops and edges of weight 0 are removed. The weights of repeated edges are added. If
        `direction` is "both", reverse edges are added, and the weight of a pair is the mean of both
        directions. Types are kept if the network tells them apart.

        Args:
            edge_index: `[2, E]`.
            edge_weight: `[E]`, at least 0.
            edge_type: `[E]`.
            num_nodes: the number of nodes.
        """
        weighted = edge_weight is not None and self.weighted
        weight = torch.ones(edge_index.shape[1], device=edge_index.device)
        if edge_weight is not None:
            weight = edge_weight.float()
        kept = weight > 0
        found, values = remove_self_loops(edge_index[:, kept], weight[kept])
        found, values = coalesce(found, values, num_nodes=num_nodes, reduce="sum")
        both = self.direction == "both"
        if both:
            found, values = to_undirected(found, values, num_nodes=num_nodes, reduce="mean")
        if edge_type is None or not self.relations:
            return found, values if weighted else None, None
        count = self.relations
        ends, types = remove_self_loops(edge_index[:, kept], edge_type[kept])
        if both:
            ends, types = torch.cat([ends, ends.flip(0)], dim=1), torch.cat([types, types])
        pairs = found[0] * num_nodes + found[1]  # ascending
        keys = ((ends[0] * num_nodes + ends[1]) * count + types).unique()
        pair = torch.searchsorted(pairs, keys // count)
        return found[:, pair], values[pair] if weighted else None, keys % count


def load(folder: str | Path) -> Model:
    """Load an exported model from its folder."""
    from safetensors.torch import load_file

    folder = Path(folder)
    facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = Model(**facts["model"])
    state = load_file(folder / "model.safetensors")
    model.network.to(next(iter(state.values())).dtype)
    model.load_state_dict(state)
    return model.eval()
