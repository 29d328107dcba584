"""FedLit: clients cluster their links into latent types; a channel of the GNN serves each type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import (
    MODEL,
    Declared,
    Individually,
    Mean,
    Message,
    Role,
    Sizes,
    State,
    Sum,
    Uploads,
    as_model,
    count,
    model,
    model_part,
    with_prefix,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.fedlit.links import degrees_of, kmeans, links_of, refine, typed_graph
from polyphily.methods.fedlit.match import greedy_match, in_order, mean_over_types
from polyphily.methods.fedlit.network import (
    CENTROIDS,
    CHANNELS,
    PROJECT,
    LinkTypeNetwork,
    random_types,
)
from polyphily.nn.backbones import Backbone, Output, Shape

FIRST, LATER = "first", "later"
NODES, LEFT = "train nodes by type", "steps left"
TYPED = (f"{CHANNELS}weights.", f"{CHANNELS}biases.")


@register(
    "fedlit",
    cite="Xie, Xiong and Yang, Federated Node Classification over Graphs with Latent Link-type "
    "Heterogeneity, WWW 2023",
)
@dataclass(frozen=True)
class FedLit(FedAvg):
    """Every link has a latent type; z_v is the sum over types of a GCN on the links of that type.

    E-step: the type of a link is argmax_t cos(e, c_t), e from the projected features of its ends.
    M-step: c_t is the mean e of its links; then a gradient step. The server matches the types of
    clients by their centroids and averages the channels of matched types.
    """

    backbone = "gcn"

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The code takes the first client's types as the server's in every round. Here it is the "
        "client with the most train nodes in the first round and the server's own centres "
        "afterwards, so that the order of clients does not matter.",
        "A link's embedding puts the end with the smaller node number first, which means nothing. "
        "Here it is [h_u + h_v || |h_u - h_v|] (embedding=ordered is the code's).",
        "How channels start is not stated. Here all start equal, because before the first match "
        "clients number their types as they like.",
        "How k-means starts is not stated. Here it starts from links that are least alike, by the "
        "cosine that assigns types later.",
        "A type without links has no mean. Here it keeps its centroid.",
        "A node without links has no channel and gets the bias of the classifier. Here there is a "
        "path without links, too (self_path=off is the code's form).",
    )

    weighting: str = parameter(
        "train",
        "what a client's weight counts for projection and classifier: train nodes, nodes, or one",
        choices=("nodes", "train", "uniform"),
    )
    types: int = parameter(4, "number of link types", symbol="T", search=Range(2, 8))
    iterations: int = parameter(1, "E- and M-steps before each gradient step", search=Range(1, 3))
    embedding: str = parameter(
        "symmetric",
        "embedding of a link: the same for both orders of its ends, or the ends in order",
        choices=("symmetric", "ordered"),
        paper="ordered",
    )
    self_path: bool = parameter(
        True, "whether a node's own features reach the classifier without links", paper=False
    )
    assignment: str = parameter(
        "em", "types of links: clusters, or random ones (an ablation)", choices=("em", "random")
    )
    align: bool = parameter(True, "whether the server matches types before it averages")

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return ("gcn",)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LinkTypeNetwork(
                shape,
                self.types,
                embedding=self.embedding,
                own=self.self_path,
                centroids=self.clusters,
            )

    @property
    def clusters(self) -> bool:
        """True if links are clustered: with one type there is nothing to find."""
        return self.assignment == "em" and self.types > 1

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        names = list(sizes.parameters)
        typed = [n for n in names if n.startswith(TYPED)]
        others = [n for n in names if n not in (*typed, CENTROIDS)]
        match = Individually("it matches the link types of each client by their centroids")
        return (
            model(sizes, Mean(WEIGHT), only=others, meaning="projection and classifier"),
            model(sizes, match, only=typed, meaning="a channel for each link type"),
            model(
                sizes, match, only=[CENTROIDS], role=Role.STATISTIC, meaning="centroids of links"
            ),
            count(NODES, (self.types,), match, meaning="train nodes with a link of each type"),
            count(WEIGHT, (), Sum(), meaning="weight of the client in the mean"),
        )

    # At the clients --------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return FIRST if round_index == 0 else LATER

    def needs_symmetric_edges(self) -> str:
        return "a link has one type, whichever way it leads"

    def needs_whole_graph(self) -> str:
        return "it clusters all links of a client"

    def prepare_round(self, local: Local) -> Message:
        """Return centroids, those received or, in the first round, of k-means; and steps left."""
        centroids = local.params[CENTROIDS].detach()
        if self.clusters and local.phase == FIRST:
            with torch.no_grad():
                links = links_of(local.cohort)
                e = links.embed(self._project(local), self.embedding)
                centroids = kmeans(e, self.types, links.segments)
        return {CENTROIDS: centroids, LEFT: local.cohort.constant(local.steps)}

    def train(self, local: Local) -> None:
        """Train by gradient steps all but the centroids, which every step computes anew."""
        del local.params[CENTROIDS]
        local.descend(self)
        local.params[CENTROIDS] = local.constants[CENTROIDS]

    def loss(self, local: Local) -> Tensor:
        network, cohort = local.network, local.cohort
        assert isinstance(network, LinkTypeNetwork)
        h = self._project(local)
        if self.clusters:
            with torch.no_grad():
                links = links_of(cohort)
                e = links.embed(h.detach(), self.embedding)
                before, left = local.constants[CENTROIDS], local.constants[LEFT]
                types, after = refine(e, before, links.segments, self.iterations)
                going = (left > 0).view(-1, 1, 1)  # others have taken all their steps
                local.constants |= {
                    CENTROIDS: torch.where(going, after, before),
                    LEFT: left - 1,
                }
        else:
            types = random_types(cohort, self.types)
        output: Output = functional_call(
            network.channels, with_prefix(local.params, CHANNELS), (h, types, cohort, local.draws)
        )
        return local.cross_entropy(output.logits)

    def _project(self, local: Local) -> Tensor:
        network, cohort = local.network, local.cohort
        assert isinstance(network, LinkTypeNetwork)
        x = network.drop_input(cohort, local.draws)
        h: Tensor = functional_call(
            network.project, with_prefix(local.params, PROJECT), (x, cohort)
        )
        return h

    def upload(self, local: Local) -> Message:
        return {**super().upload(local), NODES: self.nodes_by_type(local)}

    def nodes_by_type(self, local: Local) -> Tensor:
        """Count each client's train nodes that have a link of each type, `[K, T]`."""
        network, cohort = local.network, local.cohort
        assert isinstance(network, LinkTypeNetwork)
        h = functional_call(network.project, with_prefix(local.params, PROJECT), (cohort.x, cohort))
        types = network.types_of(h, local.params[CENTROIDS], cohort)
        typed = typed_graph(cohort, types, self.types)
        present = (degrees_of(typed) > 0).view(-1, self.types)
        return cohort.train_segments.sum(present[cohort.train_nodes].to(cohort.dtype))

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        sent, before = uploads.model, model_part(state)
        typed = {n for n in sent if n.startswith(TYPED)}
        others = {n: t for n, t in sent.items() if n not in typed and n != CENTROIDS}
        match = self.match(before[CENTROIDS], sent[CENTROIDS], uploads[WEIGHT])
        holds = in_order((uploads[NODES] > 0).to(before[CENTROIDS].dtype), match)
        centres = in_order(sent[CENTROIDS], match)
        found = centres.abs().sum(dim=2) > 0  # a client without links has none in the first round
        return {
            **state,
            **as_model(uploads.mean(others, uploads[WEIGHT])),
            **as_model(
                {n: mean_over_types(in_order(sent[n], match), holds, before[n]) for n in typed}
            ),
            MODEL + CENTROIDS: mean_over_types(centres, found.to(centres.dtype), before[CENTROIDS]),
        }

    def match(self, centres: Tensor, centroids: Tensor, weight: Tensor) -> Tensor:
        """Return which of each client's types is matched to each of the server's, `[K, T]`.

        Args:
            centres: the server's, zeros before the first round.
            centroids: the clients'.
            weight: the clients'; in the first round the heaviest one gives the server's types.
        """
        if not self.align:
            numbers = torch.arange(self.types, device=centroids.device)
            return numbers.expand(len(centroids), -1)
        known = centres.abs().sum() > 0
        heaviest = centroids.index_select(0, weight.argmax(dim=0, keepdim=True)).squeeze(0)
        return greedy_match(centroids, torch.where(known, centres, heaviest))

    # For people ------------------------------------------------------------------------------

    def without_effect(self) -> Mapping[str, str]:
        if self.clusters:
            return {}
        why = (
            "there is one link type: set types to 2 or more"
            if self.types == 1
            else "links have random types, which are not clustered: set assignment=em"
        )
        names = ["iterations", "embedding", "align", *(["assignment"] if self.types == 1 else [])]
        return dict.fromkeys(names, why)
