"""FED-PUB's proxy: one random graph, on which the models of all clients are compared."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.random import generator
from polyphily.nn.operators import Operators
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import GraphView

BLOCKS, BLOCK, INSIDE = 5, 100, 0.1  # blocks, nodes of each, probability of an edge inside


@lru_cache(maxsize=2)
def proxy_graph(features: int, seed: int) -> Graph:
    """Draw a stochastic block model without edges between blocks; features are N(0, 1)."""
    rng = generator(seed, "fedpub/proxy")
    block = np.arange(BLOCKS * BLOCK) // BLOCK
    pairs = np.triu(rng.random((len(block), len(block))) < INSIDE, 1)
    edges = np.stack(np.nonzero(pairs & (block[:, None] == block)))
    x = rng.standard_normal((len(block), features), dtype=np.float32)
    return Graph.build(x, edges, np.full(len(block), UNLABELLED), name="proxy")


class Proxy(GraphView):
    """The proxy graph once for every client of a cohort, with features that are stored once.

    Args:
        cohort: the clients.
        seed: of the proxy graph.
    """

    def __init__(self, cohort: TrainingGraph, seed: int) -> None:
        graph = proxy_graph(cohort.num_features, seed)
        copies = Cohort(
            [graph] * len(cohort),
            cohort.keys,
            cohort.classes,
            device=cohort.device,
            dtype=cohort.dtype,
        )
        super().__init__(copies)
        self._copies = copies
        self._segments = CommonInput(copies.segments.sizes, copies.device)
        self._x = torch.from_numpy(np.asarray(graph.features)).to(cohort.device, cohort.dtype)

    @property
    def segments(self) -> Segments:
        return self._segments

    @property
    def inward(self) -> Operators:
        return self._copies.inward.on(self._segments)

    @property
    def outward(self) -> Operators:
        return self._copies.outward.on(self._segments)

    @property
    def x(self) -> Tensor:
        """The features of one copy."""
        return self._x


class CommonInput(Segments):
    """Segments whose products also take rows that all clients have in common."""

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        if len(x) == self.rows:
            return super().matmul(x, weight)
        return torch.matmul(x, weight).flatten(0, 1)
