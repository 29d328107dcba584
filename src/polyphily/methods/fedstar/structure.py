"""Structure encodings: what a node's surroundings look like, whatever its features are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.graphs.graph import Graph
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.walks import return_probabilities


@dataclass(frozen=True)
class Encodings:
    """s_v = [DSE; RWSE]: the one-hot degree, and the return probabilities of random walks.

    Attributes:
        degrees: width of DSE; the last entry stands for this degree and all above.
        steps: width of RWSE: walks of 1 to this many steps.
    """

    degrees: int
    steps: int

    @property
    def width(self) -> int:
        return self.degrees + self.steps

    def of(self, graph: StackedGraph) -> Tensor:
        """Return s_v of all nodes, `[N, width]`, each from the client's own graph."""
        return graph.cached(
            self,
            lambda whole: torch.cat(
                whole.cached_per_graph(self, lambda own: self._of_client(own, whole.device))
            ).to(whole.dtype),
        )

    def _of_client(self, graph: Graph, device: torch.device) -> Tensor:
        walks = return_probabilities(graph, self.steps, device)
        counts = np.bincount(graph.edges[0], minlength=graph.num_nodes).clip(max=self.degrees)
        onehot = F.one_hot(torch.from_numpy(counts).to(device), self.degrees + 1)
        return torch.cat([onehot[:, 1:].double(), walks], dim=1)  # no entry for degree 0
