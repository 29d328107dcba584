"""Pseudo-graphs at the server: a generator of node features, and the graph of their likeness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.messages import Message
from polyphily.graphs.graph import Graph, canonical_edges
from polyphily.nn.stacked import GraphView

WIDTHS = (64, 128, 256)  # of the generator's hidden layers


def pseudo_labels(nodes: int, classes: int) -> Tensor:
    """Return the labels of pseudo-nodes: equally many of each class, and the rest of the last."""
    return (torch.arange(nodes) // max(nodes // classes, 1)).clamp(max=classes - 1)


# The generator -----------------------------------------------------------------------------------


def new_generator(
    noise: int, classes: int, features: int, rng: np.random.Generator, like: Tensor
) -> Message:
    """Draw a generator's parameters as PyTorch does; each has a leading axis of one."""

    def uniform(bound: float, *shape: int) -> Tensor:
        return torch.from_numpy(rng.uniform(-bound, bound, (1, *shape))).to(like)

    embedding = torch.from_numpy(rng.standard_normal((1, classes, classes))).to(like)
    params = {"embedding": embedding}
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
    """Compute exp(-mean over pairs of ||z_u - z_v||² |x_u - x_v|), both as means over entries."""
    apart = (z.unsqueeze(1) - z).square().mean(dim=2)
    return (-(apart * torch.cdist(x, x, p=1) / x.shape[1]).mean()).exp()


# The graph ---------------------------------------------------------------------------------------


def join_nearest(x: Tensor, neighbours: int) -> Cohort:
    """Join every pseudo-node to its nearest by cosine, in both directions.

    Args:
        x: features of the pseudo-nodes, `[nodes, features]`.
        neighbours: how many others a node is joined to; 0: self-loops only.
    """
    nodes = len(x)
    graph = Graph(
        features=np.zeros((nodes, 0), dtype=np.float32),
        edges=canonical_edges(_nearest(x.detach(), neighbours), nodes),
        labels=np.zeros(nodes, dtype=np.int64),
        name="pseudo-graph",
    )
    return Cohort([graph], [(0, 0)], 1, device=x.device, dtype=x.dtype)


class PseudoGraph(GraphView):
    """Copies of a pseudo-graph, one for each of several stacked models.

    Gradients reach the features, not the choice of edges.

    Args:
        x: features of the pseudo-nodes, `[nodes, features]`.
        joined: their edges, from `join_nearest`.
        models: number of copies.
    """

    def __init__(self, x: Tensor, joined: Cohort, models: int) -> None:
        super().__init__(joined.repeated(models) if models > 1 else joined)
        self._x = x.repeat(models, 1)

    @property
    def x(self) -> Tensor:
        return self._x

    @property
    def x_pointers(self) -> tuple[int, ...]:
        return self.segments.pointers

    @property
    def num_features(self) -> int:
        return self._x.shape[1]


def _nearest(x: Tensor, neighbours: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the edges from each node to the others that are nearest by cosine, `[2, edges]`."""
    unit = F.normalize(x, dim=1)
    likeness = (unit @ unit.T).fill_diagonal_(-torch.inf)
    near = likeness.topk(min(neighbours, len(x) - 1), dim=1).indices.cpu().numpy()
    return np.stack([np.repeat(np.arange(len(x)), near.shape[1]), near.ravel()])
