"""S2FGL: a repository of class prototypes (NLIR) and alignment of graph frequencies (FGMA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.local import Local
from polyphily.core.messages import (
    AFTER_FIRST,
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    count,
    model_part,
    statistic,
    to_each,
)
from polyphily.core.method import parameter, register
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.s2fgl.centrality import most_central
from polyphily.methods.s2fgl.losses import frequency_gap, kl_divergence, log_similarity_shares
from polyphily.methods.s2fgl.repository import SAMPLING, build_repository, draw_clients
from polyphily.methods.s2fgl.spectrum import extremes, projections, unit
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import StackedGraph

PROTOTYPES, COUNTS, REPOSITORY = "prototypes", "counts", "repository"
ANCHORS, GLOBAL_LOG_SHARES = "anchors", "global log shares"  # constants of a round: NLIR,
GLOBAL_BASIS, GLOBAL_PROJECTIONS = "global basis", "global projections"  # and FGMA
STRENGTH, PLAIN, ALIGNED = "strength", "plain", "aligned"


@register("s2fgl", cite="Tan et al., S2FGL: Spatial Spectral Federated Graph Learning, ICML 2025")
@dataclass(frozen=True)
class S2FGL(FedAvg):
    """L = CE + lambda1 · L_FKD + lambda2 · L_FGMA (Eq. 13), both against the received global model.

    NLIR: each client sends, per class, the mean embedding of its most central nodes. The server
    makes several prototypes per class out of them, each from some of the clients: the repository.
    L_FKD compares the similarities of local and global embeddings to the repository. FGMA: L_FGMA
    compares local and global embeddings projected on the lowest and highest frequencies of their
    own similarity graphs. The first round is plain cross-entropy: there is no repository yet.

    At the start of a round the local model is the global one, so that both terms slow training down
    like proximal terms. By default they begin after a warm-up, which the paper does not have.
    """

    nlir: bool = parameter(True, "whether the repository of prototypes is used")
    fgma: bool = parameter(True, "whether frequencies are aligned")
    lambda1: float = parameter(
        5.0, "weight of L_FKD; the paper tries 1 to 100, its code has 5", symbol="λ1"
    )
    lambda2: float = parameter(
        0.05,
        "weight of L_FGMA; the paper tries 0.01 to 1, its code has 1, which slows training down",
        symbol="λ2",
    )
    warm_up: int = parameter(20, "rounds without either term", paper=0)
    ramp: int = parameter(10, "rounds over which both weights then grow", paper=0)
    centrality: str = parameter(
        "paper",
        "how nodes are selected: by Eq. 3-5, or by the released code's form of it, which prefers "
        "train nodes (meant for alpha 0.85)",
        symbol="Λ^SALC",
        choices=("paper", "code"),
    )
    alpha: float = parameter(
        0.15, "restart probability of PageRank; 0.85 in the released code", symbol="α"
    )
    selected: float = parameter(1 / 3, "share of nodes that make prototypes", symbol="K/n")
    labels: str = parameter(
        "predicted",
        "class of a selected node outside the train mask: as the client's model predicts, or none "
        "(train nodes only); not stated in the paper",
        choices=("predicted", "train"),
    )
    replicas: int = parameter(4, "prototypes per class in the repository")
    client_share: float = parameter(
        0.7, "share of clients behind each prototype; 0.7 in the released code", symbol="α %"
    )
    sampling: str = parameter(
        "holders",
        "which clients are drawn for each prototype: from those that have the class (holders), "
        "from all for every class (paper), or from all once for all classes (released code)",
        symbol="N_c^k",
        choices=SAMPLING,
        paper="class",
    )
    temperature: float = parameter(
        0.2,
        "cosines are divided by it before the softmax; at 1 L_FKD has little effect",
        paper=1.0,
    )
    divergence: str = parameter(
        "local||global",
        "order of the KL divergence in L_FKD: as Eq. 8 prints it, or as the released code has it",
        choices=("local||global", "global||local"),
    )
    neighbours: int = parameter(3, "nearest neighbours in the similarity graph", symbol="k_sim")
    eigenvectors: int = parameter(10, "eigenvectors at each end of the spectrum", symbol="k_eig")
    spectral_share: float = parameter(
        0.2, "share of nodes, the most central ones, that FGMA aligns", paper=1.0
    )
    refresh: str = parameter(
        "round",
        "when the local similarity graph is computed: every step, or once per round, when it is "
        "the global model's (as good as every step on Cora, at a quarter of the cost)",
        choices=("step", "round"),
        paper="step",
    )
    tie_break: float = parameter(
        1e-4, "slope on the Laplacian's diagonal that tells equal eigenvalues apart", paper=0.0
    )

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.nlir:
            return super().uploads(sizes)
        alone = Individually(
            "each prototype of the repository comes from some of the clients, not from all"
        )
        shape = (sizes.classes, sizes.embedding)
        meaning = "mean embedding of the most central nodes of each class"
        return (
            *super().uploads(sizes),
            statistic(PROTOTYPES, shape, alone, meaning=meaning),
            count(COUNTS, shape[:1], alone, meaning="how many nodes these are"),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.nlir:
            return super().downloads(sizes)
        shape = (self.replicas, sizes.classes, sizes.embedding)
        meaning = "several prototypes of each class"
        repository = statistic(REPOSITORY, shape, rounds=AFTER_FIRST, meaning=meaning)
        return (*super().downloads(sizes), repository)

    # The schedule ----------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return PLAIN if self.strength(round_index) == 0 else ALIGNED

    def strength(self, round_index: int) -> float:
        """Return the factor of both terms: 0 in the first round and during warm-up, then to 1."""
        if round_index < max(self.warm_up, 1):
            return 0.0
        return min(1.0, (round_index - self.warm_up + 1) / max(self.ramp, 1))

    def _strength(self, round_index: int) -> npt.NDArray[np.float32]:
        return np.asarray(self.strength(round_index), dtype=np.float32)

    def needs_whole_graph(self) -> str | None:
        if not (self.nlir or self.fgma):
            return None
        return "embeddings of all nodes are aligned with the global model's"

    # The most central nodes (Eq. 3-5) --------------------------------------------------------

    def top_nodes(
        self, graph: StackedGraph, share: float, least: int = 1
    ) -> tuple[Tensor, Segments]:
        """Return the given share of each client's nodes with the largest centrality."""
        return most_central(graph, self.centrality, self.alpha, share, least)

    def spectral_nodes(self, graph: StackedGraph) -> tuple[Tensor, Segments]:
        """Return the nodes of FGMA: more than `eigenvectors`, if a client has as many."""
        return self.top_nodes(graph, self.spectral_share, self.eigenvectors + 1)

    # Local training --------------------------------------------------------------------------

    def prepare_round(self, local: Local) -> Message:
        """Compute what both terms need of the received model."""
        if local.phase == PLAIN or not (self.nlir or self.fgma):
            return {}
        constants: Message = {STRENGTH: local.given(self._strength)}
        h = local.frozen(model_part(local.received)).embedding
        if self.nlir and REPOSITORY in local.received:
            anchors = unit(local.received[REPOSITORY].flatten(1, 2)).transpose(1, 2).contiguous()
            constants[ANCHORS] = anchors
            constants[GLOBAL_LOG_SHARES] = self.log_shares(local.cohort, h, anchors)
        if self.fgma:
            nodes, rows = self.spectral_nodes(local.cohort)
            constants[GLOBAL_BASIS] = self.basis(local, h[nodes], rows)
            constants[GLOBAL_PROJECTIONS] = projections(h[nodes], constants[GLOBAL_BASIS], rows)
        return constants

    def loss(self, local: Local) -> Tensor:
        """Compute Eq. 13."""
        output = local.forward()
        loss = local.cross_entropy(output.logits)
        if ANCHORS in local.constants:
            strength = self.lambda1 * local.constants[STRENGTH]
            loss = loss + strength * self.distillation(local, output.embedding)
        if GLOBAL_BASIS in local.constants:
            strength = self.lambda2 * local.constants[STRENGTH]
            loss = loss + strength * self.frequency_alignment(local, output.embedding)
        return loss

    def distillation(self, local: Local, h: Tensor) -> Tensor:
        """Compute L_FKD (Eq. 8), the mean over all nodes of a client."""
        ours = self.log_shares(local.cohort, h, local.constants[ANCHORS])
        theirs = local.constants[GLOBAL_LOG_SHARES]
        first, second = (ours, theirs) if self.divergence == "local||global" else (theirs, ours)
        return kl_divergence(first, second, local.cohort.segments)

    def log_shares(self, graph: StackedGraph, h: Tensor, anchors: Tensor) -> Tensor:
        """Compute log sigma(phi(h_u, H)) of every node."""
        return log_similarity_shares(h, anchors, graph.segments, self.temperature)

    def frequency_alignment(self, local: Local, h: Tensor) -> Tensor:
        """Compute L_FGMA (Eq. 12)."""
        nodes, rows = self.spectral_nodes(local.cohort)
        v, b = local.constants[GLOBAL_BASIS], local.constants[GLOBAL_PROJECTIONS]
        near = h[nodes]
        u = v if self.refresh == "round" else self.basis(local, near, rows)
        return frequency_gap(near, u, v, b, rows)

    def basis(self, local: Local, h: Tensor, rows: Segments) -> Tensor:
        """Compute the extreme eigenvectors of the similarity graphs of `h` (Eq. 9-11)."""

        def find(h: Tensor) -> Tensor:
            return extremes(h, rows, self.neighbours, self.eigenvectors, self.tie_break)

        return local.on_host(find, h.detach())

    def upload(self, local: Local) -> Message:
        return {**super().upload(local), **(self.prototypes(local) if self.nlir else {})}

    def prototypes(self, local: Local) -> Message:
        """Compute the mean embedding of the selected nodes of each class (Eq. 6), and their number.

        The released code reads the true class of every selected node. Here only train labels are
        used, and the model's predictions elsewhere. The model is the one that is sent, without
        dropout.
        """
        cohort = local.cohort
        nodes, rows = self.top_nodes(cohort, self.selected)
        output = local.frozen(local.params)
        known = cohort.labels[nodes]
        label = torch.where(known < 0, output.logits[nodes].argmax(dim=1), known)
        member = F.one_hot(label, cohort.classes).to(cohort.dtype)
        if self.labels == "train":
            member = member * (known >= 0).unsqueeze(1)
        counts = rows.sum(member)
        total = projections(output.embedding[nodes], member, rows)
        return {PROTOTYPES: total / counts.clamp(min=1).unsqueeze(2), COUNTS: counts}

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if self.nlir:
            prototypes, counts = uploads[PROTOTYPES], uploads[COUNTS]
            drawn = draw_clients(
                prototypes,
                counts,
                rng,
                replicas=self.replicas,
                share=self.client_share,
                sampling=self.sampling,
            )
            after[REPOSITORY] = build_repository(prototypes, counts, drawn)
        return after

    def download(self, state: State, clients: Sequence[int]) -> Message:
        repository = {n: t for n, t in state.items() if n == REPOSITORY}
        return {**super().download(state, clients), **to_each(repository, clients)}
