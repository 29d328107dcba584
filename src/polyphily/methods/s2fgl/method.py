"""S2FGL: a repository of class prototypes (NLIR) and alignment of graph frequencies (FGMA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
from polyphily.core.search import Range
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.s2fgl.centrality import most_central
from polyphily.methods.s2fgl.losses import frequency_gap, kl_divergence, log_similarity_shares
from polyphily.methods.s2fgl.repository import SAMPLING, build_repository, draw_clients
from polyphily.methods.s2fgl.spectrum import extremes, projections, unit
from polyphily.nn import backbones
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import StackedGraph

PROTOTYPES, COUNTS, REPOSITORY = "prototypes", "counts", "repository"
ANCHORS, GLOBAL_LOG_SHARES = "anchors", "global log shares"  # constants of a round: NLIR,
GLOBAL_BASIS, GLOBAL_PROJECTIONS = "global basis", "global projections"  # and FGMA
STRENGTH, PLAIN, ALIGNED = "strength", "plain", "aligned"

# Hyperparameters that nothing but one of the terms uses.
OF_NLIR = (
    *("selected", "labels", "replicas", "client_share"),
    *("sampling", "temperature", "divergence"),
)
OF_FGMA = ("neighbours", "eigenvectors", "spectral_share", "refresh", "tie_break")


@register("s2fgl", cite="Tan et al., S2FGL: Spatial Spectral Federated Graph Learning, ICML 2025")
@dataclass(frozen=True)
class S2FGL(FedAvg):
    """L = CE + lambda1 · L_FKD + lambda2 · L_FGMA (Eq. 13), both against the received global model.

    NLIR: each client sends, per class, the mean embedding of its most central nodes. The server
    makes several prototypes per class out of them, each from some of the clients: the repository.
    L_FKD compares the similarities of local and global embeddings to the repository. FGMA: L_FGMA
    compares local and global embeddings projected on the lowest and highest frequencies of their
    own similarity graphs. The first round is plain cross-entropy: there is no repository yet.

    An embedding is the input of the network's last layer. With `head=linear` that layer is a linear
    classifier behind all convolutions, so that both terms reach all of them.

    At the start of a round the local model is the global one, so that both terms slow training down
    like proximal terms. By default they begin after a warm-up, which the paper does not have.
    """

    left_open: ClassVar[Sequence[str]] = (
        "λ1 and λ2 have no values, only ranges that were tried (1 to 100, 0.01 to 1). Here: 5, the "
        "product of two factors in the authors' code, and 0.05.",
        "k_sim and k_eig have no values. Here: 3 and 10, as in the authors' code.",
        "Each global prototype comes from 'α percent' of the clients, without a value. Here: 70 %, "
        "as in the authors' code, rounded down, and at least one client.",
        "Selected nodes are 'categorized' by class, but some have no label. Here: train labels, "
        "and the client's predictions elsewhere (labels=train: train nodes only).",
        "Which layer the feature vectors h come from is not stated. Here: the input of the linear "
        "classifier behind all convolutions, as in the authors' code (head=linear).",
        "What the first round does without a repository is not stated. Here: both terms begin in "
        "the second round, as in the authors' code.",
        "A class that no drawn client has leaves Eq. 7 undefined. Here: a prototype of zeros, "
        "whose cosine with every vector is 0.",
        "S of Eq. 9 is not symmetric, so that its Laplacian need not have orthogonal eigenvectors. "
        "Here: the mean of S and its transpose.",
        "Equal eigenvalues leave their eigenvectors undetermined, and Eq. 12 compares them in "
        "pairs. Here: the solver's order (tie_break above 0 determines them).",
        "Whether gradients go through eigenvectors is not stated. Here: they do not, as in the "
        "authors' code.",
        "How the server averages models is not stated. Here: weighted by the number of nodes.",
    )

    nlir: bool = parameter(True, "whether the repository of prototypes is used")
    fgma: bool = parameter(True, "whether frequencies are aligned")
    lambda1: float = parameter(
        5.0,
        "weight of L_FKD; the paper tries 1 to 100, its code has 5",
        symbol="λ1",
        search=Range(1.0, 100.0, log=True),
    )
    lambda2: float = parameter(
        0.05,
        "weight of L_FGMA; the paper tries 0.01 to 1, its code has 1, which slows training down",
        symbol="λ2",
        code=1.0,
        search=Range(0.01, 1.0, log=True),
    )
    head: str = parameter(
        "none",
        "what classifies: the last layer of the backbone (none), or a linear layer behind all of "
        "them, as in the authors' code (linear)",
        choices=("none", "linear"),
        paper="linear",
    )
    warm_up: int = parameter(20, "rounds without either term", paper=0)
    ramp: int = parameter(10, "rounds over which both weights then grow", paper=0)
    centrality: str = parameter(
        "paper",
        "how nodes are selected: by Eq. 3-5, or by the released code's form of it, which prefers "
        "train nodes (meant for alpha 0.85)",
        symbol="Λ^SALC",
        choices=("paper", "code"),
        code="code",
    )
    alpha: float = parameter(0.15, "restart probability of PageRank", symbol="α", code=0.85)
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
        code="replica",
    )
    temperature: float = parameter(
        0.2,
        "cosines are divided by it before the softmax; at 1 L_FKD has little effect",
        paper=1.0,
        search=Range(0.1, 1.0, log=True),
    )
    divergence: str = parameter(
        "local||global",
        "order of the KL divergence in L_FKD: as Eq. 8 prints it, or as the released code has it",
        choices=("local||global", "global||local"),
        code="global||local",
    )
    neighbours: int = parameter(3, "nearest neighbours in the similarity graph", symbol="k_sim")
    eigenvectors: int = parameter(10, "eigenvectors at each end of the spectrum", symbol="k_eig")
    spectral_share: float = parameter(
        0.2, "share of nodes, the most central ones, that FGMA aligns", paper=1.0, code=0.2
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

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        known = backbones.BACKBONES.items()
        return tuple(n for n, cls in known if not (self.head == "linear" and cls.headless))

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        return backbones.build(backbone, shape, seed, linear_head=self.head == "linear")

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

    @property
    def first_round(self) -> int:
        """The first round with either term; in round 0 there is no repository yet."""
        return max(self.warm_up, 1)

    def phase(self, round_index: int) -> str:
        return PLAIN if self.strength(round_index) == 0 else ALIGNED

    def strength(self, round_index: int) -> float:
        """Return the factor of both terms: 0 in the first round and during warm-up, then to 1."""
        if round_index < self.first_round:
            return 0.0
        return min(1.0, (round_index - self.warm_up + 1) / max(self.ramp, 1))

    def _strength(self, round_index: int) -> npt.NDArray[np.float32]:
        return np.asarray(self.strength(round_index), dtype=np.float32)

    def needs_symmetric_edges(self) -> str:
        return "its spectra are those of a symmetric matrix"

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

    # For people ------------------------------------------------------------------------------

    @property
    def distils(self) -> bool:
        """True if L_FKD is in the loss."""
        return self.nlir and self.lambda1 != 0

    @property
    def aligns(self) -> bool:
        """True if L_FGMA is in the loss."""
        return self.fgma and self.lambda2 != 0

    def rounds_before_it_acts(self) -> int:
        return self.first_round if self.distils or self.aligns else 0

    def without_effect(self) -> Mapping[str, str]:
        idle: dict[str, str] = {}
        for switch, weight, others, acts in (
            ("nlir", "lambda1", OF_NLIR, self.distils),
            ("fgma", "lambda2", OF_FGMA, self.aligns),
        ):
            if not getattr(self, switch):
                idle[weight] = f"{switch} is off; set {switch}=on"
            if not getattr(self, weight):
                idle[switch] = f"{weight} is 0; set {weight} above 0"
            if not acts:
                reason = f"its term is not in the loss; set {switch}=on and {weight} above 0"
                idle |= dict.fromkeys(others, reason)
        if not (self.distils or self.aligns):
            reason = "no term is in the loss; set nlir=on or fgma=on, and its weight above 0"
            idle |= dict.fromkeys(("warm_up", "ramp"), reason)
        selects = (self.distils and self.selected < 1) or (self.aligns and self.spectral_share < 1)
        if not selects:
            reason = "no nodes are selected; set nlir=on with selected below 1, or fgma=on with "
            idle |= dict.fromkeys(("centrality", "alpha"), reason + "spectral_share below 1")
        if self.distils and self.client_share >= 1:
            reason = "every prototype comes from all clients; set client_share below 1"
            idle |= dict.fromkeys(("sampling", "replicas"), reason)
        return idle
