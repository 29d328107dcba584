"""Pseudo-graphs at the server: a generator of node features, and the graph of their likeness.

Everything that the clients' models read of a pseudo-graph is computed on its device, and the host
waits for none of it, so that a server's round can be recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.messages import Message
from polyphily.graphs.graph import Graph
from polyphily.nn.backbones import Backbone
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import AttentionPattern, GraphView, StackedGraph

WIDTHS = (64, 128, 256)  # of the generator's hidden layers


def pseudo_labels(nodes: int, classes: int, device: torch.device | None = None) -> Tensor:
    """Return the labels of pseudo-nodes: equally many of each class, and the rest of the last."""
    places = torch.arange(nodes, device=device)
    return (places // max(nodes // classes, 1)).clamp(max=classes - 1)


# The generator -----------------------------------------------------------------------------------


def as_drawn(numbers: Any, like: Tensor) -> Tensor:
    """Return a copy of the server's random numbers with the type and on the device of a tensor.

    Args:
        numbers: an array, or in a recorded round a tensor, which must not be changed.
        like: the tensor.
    """
    return torch.as_tensor(numbers).to(like.device, like.dtype, copy=True)


def new_generator(
    noise: int, classes: int, features: int, rng: np.random.Generator, like: Tensor
) -> Message:
    """Draw a generator's parameters as PyTorch does; each has a leading axis of one."""

    def uniform(bound: float, *shape: int) -> Tensor:
        return as_drawn(rng.uniform(-bound, bound, (1, *shape)), like)

    params = {"embedding": as_drawn(rng.standard_normal((1, classes, classes)), like)}
    widths = (classes + noise, *WIDTHS, features)
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = 1 / math.sqrt(inputs)
        params[f"weight{layer}"] = uniform(bound, inputs, outputs)
        params[f"bias{layer}"] = uniform(bound, outputs)
    return params


def generate(params: Mapping[str, Tensor], z: Tensor, labels: Tensor) -> Tensor:
    """Return the features of pseudo-nodes: a tanh MLP of noise and a label's embedding."""
    x = torch.cat([params["embedding"][0, labels], z], dim=1)
    for layer in range(len(WIDTHS) + 1):
        x = x if layer == 0 else x.tanh()
        x = x @ params[f"weight{layer}"][0] + params[f"bias{layer}"][0]
    return x


def likeness_penalty(z: Tensor, x: Tensor) -> Tensor:
    """Compute exp(-mean over pairs of ||z_u - z_v||² |x_u - x_v|), both as means over entries.

    The mean is over all ordered pairs, also of a node with itself. `pdist` has every other pair
    once.
    """
    apart = F.pdist(z).square() / z.shape[1]
    total = 2 * (apart * F.pdist(x, p=1)).sum() / x.shape[1]
    return (-total / len(x) ** 2).exp()


# The graph ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """A block-diagonal matrix: one dense block for every copy of a graph, or one for all.

    Attributes:
        block: `[nodes, nodes]`, or `[copies, nodes, nodes]`.
    """

    block: Tensor

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Return the product with the rows of all copies, `[copies · nodes, d]`."""
        rows = dense.reshape(-1, self.block.shape[-1], dense.shape[1])
        return (self.block @ rows).reshape(dense.shape)


@dataclass(frozen=True)
class DenseAttention:
    """The `AttentionPattern` of copies of a graph, over all pairs of nodes of a copy.

    Attributes:
        joined: whether attention runs from a node (column) to another (row), `[nodes, nodes]`.
    """

    joined: Tensor

    def at_rows(self, x: Tensor) -> Tensor:
        """Return `x` at the target of every pair, `[copies · nodes, …] -> [pairs, …]`."""
        return self._copies(x).unsqueeze(2).expand(self._pairs(x)).flatten(0, 2)

    def at_cols(self, x: Tensor) -> Tensor:
        """Return `x` at the source of every pair, `[copies · nodes, …] -> [pairs, …]`."""
        return self._copies(x).unsqueeze(1).expand(self._pairs(x)).flatten(0, 2)

    def softmax(self, score: Tensor) -> Tensor:
        """Normalise scores over the sources of each target; zero for pairs that are not joined."""
        apart = ~self.joined.unsqueeze(2)
        pairs = score.view(-1, *self.joined.shape, score.shape[1])
        return pairs.masked_fill(apart, -torch.inf).softmax(dim=2).view(score.shape)

    def with_value(self, value: Tensor) -> Blocks:
        """Return the matrix that has these values at the pairs."""
        return Blocks(value.reshape(-1, *self.joined.shape))

    def _copies(self, x: Tensor) -> Tensor:
        return x.view(-1, len(self.joined), *x.shape[1:])

    def _pairs(self, x: Tensor) -> tuple[int, ...]:
        return (len(x) // len(self.joined), *self.joined.shape, *x.shape[1:])


class Nearest:
    """The graph that joins every pseudo-node to its nearest by cosine, in both directions.

    Args:
        x: features of the pseudo-nodes, `[nodes, features]`; no gradient reaches the choice.
        neighbours: how many others a node is joined to; 0: self-loops only.
    """

    def __init__(self, x: Tensor, neighbours: int) -> None:
        unit = F.normalize(x.detach(), dim=1)
        likeness = (unit @ unit.T).fill_diagonal_(-torch.inf)
        near = likeness.topk(min(neighbours, len(x) - 1), dim=1).indices
        chosen = torch.zeros_like(likeness).scatter_(1, near, 1)
        self.adjacency = torch.maximum(chosen, chosen.T)

    @cached_property
    def degrees(self) -> Tensor:
        return self.adjacency.sum(dim=1)

    @cached_property
    def with_loops(self) -> Tensor:
        """A + I."""
        return self.adjacency.clone().fill_diagonal_(1)

    @cached_property
    def gcn(self) -> Blocks:
        """(D+I)^-1/2 (A+I) (D+I)^-1/2."""
        scale = (self.degrees + 1).rsqrt()
        return Blocks(scale.unsqueeze(1) * self.with_loops * scale)

    @cached_property
    def random_walk(self) -> Blocks:
        """(D+I)^-1 (A+I)."""
        return Blocks(self.with_loops / (self.degrees + 1).unsqueeze(1))

    @cached_property
    def mean(self) -> Blocks:
        """D^-1 A: the mean over neighbours, zero for a node without any."""
        return Blocks(self.adjacency / self.degrees.clamp(min=1).unsqueeze(1))

    @cached_property
    def attention(self) -> DenseAttention:
        return DenseAttention(self.with_loops > 0)

    @cached_property
    def cohort(self) -> Cohort:
        """The same graph as sparse matrices, built on the host."""
        adjacency = self.adjacency
        graph = Graph(
            features=np.zeros((len(adjacency), 0), dtype=np.float32),
            edges=np.stack(adjacency.cpu().numpy().nonzero()),
            labels=np.zeros(len(adjacency), dtype=np.int64),
            name="pseudo-graph",
        )
        return Cohort([graph], [(0, 0)], 1, device=adjacency.device, dtype=adjacency.dtype)


class PseudoGraph(GraphView):
    """Copies of a pseudo-graph, one for each of several stacked models.

    Gradients reach the features, not the choice of edges. What backbones with weighted edges read
    (`gcn`, `random_walk`, `mean`, `attention`) is dense and on the device. Other members come from
    a `Cohort` of the copies, which the host builds when one of them is read: a round in which that
    happens cannot be recorded. On a CPU attention comes from there, too: it is faster over edges
    than over all pairs of nodes.

    Args:
        x: features of the pseudo-nodes, `[nodes, features]`.
        nearest: their edges.
        segments: the nodes of every copy (`copies`).
    """

    def __init__(self, x: Tensor, nearest: Nearest, segments: Segments) -> None:
        self.nearest, self._segments = nearest, segments
        self._x = x.repeat(len(segments), 1)

    @cached_property
    def graph(self) -> StackedGraph:  # type: ignore[override]  # built when it is first read
        return self.nearest.cohort.repeated(len(self._segments))

    @property
    def segments(self) -> Segments:
        return self._segments

    @property
    def gcn(self) -> Blocks:
        return self.nearest.gcn

    @property
    def random_walk(self) -> Blocks:
        return self.nearest.random_walk

    @property
    def mean(self) -> Blocks:
        return self.nearest.mean

    @property
    def attention(self) -> AttentionPattern:
        return (self.graph if self.device.type == "cpu" else self.nearest).attention

    @property
    def device(self) -> torch.device:
        return self._x.device

    @property
    def dtype(self) -> torch.dtype:
        return self._x.dtype

    @property
    def num_nodes(self) -> int:
        return self._segments.rows

    @property
    def num_features(self) -> int:
        return self._x.shape[1]

    @property
    def x(self) -> Tensor:
        return self._x

    @property
    def x_pointers(self) -> tuple[int, ...]:
        return self._segments.pointers


_kept: WeakKeyDictionary[Backbone, dict[Segments, Segments]] = WeakKeyDictionary()


def copies(network: Backbone, nodes: int, models: int, device: torch.device) -> Segments:
    """Return the nodes of copies of a graph, the same object for as long as the network exists.

    Segments copy tensors from the host to the device on first use. A recorded round finds them
    there, always at the same addresses.
    """
    kept = _kept.setdefault(network, {})
    found = Segments((nodes,) * models, device)
    return kept.setdefault(found, found)
