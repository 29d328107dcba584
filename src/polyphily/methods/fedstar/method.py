"""FedStar: a channel that encodes structure alone is shared; the feature channel is private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedstar.network import GIN, LAYERS, STRUCTURE, TwoChannels
from polyphily.methods.fedstar.structure import Encodings
from polyphily.nn.backbones import Backbone, Shape


@register(
    "fedstar",
    cite="Tan et al., Federated Learning on Non-IID Graphs via Structural Knowledge Sharing, "
    "AAAI 2023",
)
@dataclass(frozen=True)
class FedStar(FedAvg):
    """s_v = [one-hot degree; return probabilities]; the channel that encodes s is averaged.

    h⁰ = W_x x, g⁰ = W_s s; h^l = drop(relu(conv([h^{l-1}; g^{l-1}]))), g^l = tanh(GCN(g^{l-1})); a
    head on [h^L; g^L]. Cross-entropy trains both channels. Only W_s and the GCN layers travel.
    Each client is evaluated with its own feature channel and the averaged structure channel.
    """

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The paper classifies graphs. Here the head is applied to every node, without pooling. "
        "The linear map before the pooling and the one after it are then one map, so one is kept.",
        "The server's mean is weighted by a client's train graphs: by its train nodes here.",
        "The paper's networks have 3 layers of width 64: --layers 3 --hidden 64.",
        "The degree encoding has no entry for a node without neighbours: all its entries are 0.",
        "The sums of GIN grow with a node's degree, and large graphs have hubs: by default the "
        "feature channel has the layers of the backbone.",
    )

    weighting: str = parameter(
        "train",
        "what a client's weight n_i counts: its nodes, its train nodes, or one each",
        symbol="n_i",
        choices=("nodes", "train", "uniform"),
    )
    share: str = parameter(
        "structure",
        "what is averaged: the structure channel, nothing, or all of the network",
        choices=("structure", "none", "all"),
    )
    convolution: str = parameter(
        "backbone",
        "layers of the feature channel: those of the backbone, or gin",
        choices=("backbone", GIN),
        paper=GIN,
    )
    degrees: int = parameter(
        16,
        "width of the degree encoding; its last entry stands for all higher degrees; 0: none",
        search=Range(4, 32),
    )
    steps: int = parameter(
        16,
        "longest random walk whose return probability is encoded; 0: none",
        symbol="k",
        search=Range(4, 32),
    )

    def __post_init__(self) -> None:
        if min(self.degrees, self.steps) < 0 or self.degrees + self.steps == 0:
            raise UserError("fedstar: 'degrees' and 'steps' are 0 or more, and one of them above 0")

    def without_effect(self) -> Mapping[str, str]:
        if self.share == "none":
            return {"weighting": "nothing is averaged; set share=structure as well"}
        return {}

    def needs_symmetric_edges(self) -> str:
        return "its encodings are those of random walks that go both ways"

    def needs_whole_graph(self) -> str:
        return "the structure encodings are those of whole graphs"

    def supported_backbones(self) -> Sequence[str]:
        if self.convolution == GIN:
            return ("gcn",)  # the structure channel is a GCN
        return tuple(name for name in LAYERS if name != GIN)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        layer = GIN if self.convolution == GIN else backbone
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TwoChannels(shape, Encodings(self.degrees, self.steps), layer)

    def shares(self, network: Backbone, parameter: str) -> bool:
        if self.share == "all":
            return True
        return self.share == "structure" and parameter.startswith(STRUCTURE)
