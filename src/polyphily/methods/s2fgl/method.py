"""S2FGL: a repository of class prototypes (NLIR) and alignment of graph frequencies (FGMA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, model_part
from polyphily.core.method import State, Uploads, parameter, register, to_each
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity.pagerank import FloatArray, received_from, sent_to, strongest
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.s2fgl.spectrum import extremes, projections, unit
from polyphily.nn.segments import Segments

PROTOTYPES, COUNTS, REPOSITORY = "prototypes", "counts", "repository"
ANCHORS, GLOBAL_LOG_SHARES = "anchors", "global log shares"  # constants of a round: NLIR,
GLOBAL_BASIS, GLOBAL_PROJECTIONS = "global basis", "global projections"  # and FGMA
STRENGTH, PLAIN, ALIGNED = "strength", "plain", "aligned"


@register("s2fgl", cite="Tan et al., S2FGL: Spatial Spectral Federated Graph Learning, ICML 2025")
@dataclass(frozen=True)
class S2FGL(FedAvg):
    """L = CE + lambda1 · L_FKD + lambda2 · L_FGMA (Eq. 13), both against the received global model.

    NLIR: each client sends, per class, the mean embedding of its most central nodes; the server
    makes a repository of several prototypes per class out of them, each from some of the clients.
    L_FKD compares where local and global embeddings lie relative to the repository. FGMA: L_FGMA
    compares local and global embeddings projected on the lowest and highest frequencies of their
    own similarity graphs. The first round is plain cross-entropy: there is no repository yet.

    At the start of a round the local model is the global one, so that both terms brake like
    proximal terms; by default they begin after a warm-up. The paper has none.
    """

    tallies = (*FedAvg.tallies, COUNTS)
    averaged = "each prototype of the repository comes from some of the clients, not from all"

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
        "which nodes stand for a client: Eq. 3-5, or the released code's form of it, which prefers "
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
        "class of a selected node outside the train mask: what the client's model predicts, or none"
        " (train nodes only). The paper does not say",
        choices=("predicted", "train"),
    )
    replicas: int = parameter(4, "prototypes per class in the repository")
    client_share: float = parameter(
        0.7, "share of clients behind each prototype; 0.7 in the released code", symbol="α %"
    )
    sampling: str = parameter(
        "holders",
        "whom each prototype's clients are drawn from: those that have the class; all, anew for "
        "every class (paper); all, once for all classes (released code)",
        symbol="N_c^k",
        choices=("holders", "class", "replica"),
        paper="class",
    )
    temperature: float = parameter(
        0.2,
        "cosines are divided by it before the softmax; at 1 L_FKD hardly acts",
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
        "when the local similarity graph is renewed: every step, or once per round, when it is the"
        " global model's (level with every step on Cora, at a quarter of the cost)",
        choices=("step", "round"),
        paper="step",
    )
    tie_break: float = parameter(
        1e-4, "slope on the Laplacian's diagonal that tells equal eigenvalues apart", paper=0.0
    )

    # The most central nodes ------------------------------------------------------------------

    def top_nodes(self, cohort: Cohort, share: float, least: int = 1) -> tuple[Tensor, Segments]:
        """The int(share · n) nodes of the largest centrality of each client, in node order."""

        def make(cohort: Cohort) -> tuple[Tensor, Segments]:
            scores = cohort.of_each(
                ("label centrality", self.centrality, self.alpha),
                lambda graph: label_centrality(graph, self.centrality, self.alpha),
            )
            chosen = []
            for score, start in zip(scores, cohort.segments.pointers, strict=False):
                count = min(max(int(share * len(score) + 1e-9), least), len(score))
                chosen.append(start + np.sort(np.argsort(-score, kind="stable")[:count]))
            rows = Segments(tuple(len(nodes) for nodes in chosen), cohort.device)
            return torch.from_numpy(np.concatenate(chosen)).to(cohort.device), rows

        return cohort.once(("s2fgl", self.centrality, self.alpha, share, least), make)

    def spectral_nodes(self, cohort: Cohort) -> tuple[Tensor, Segments]:
        """The nodes FGMA sees; more than `eigenvectors` of them where a client has as many."""
        return self.top_nodes(cohort, self.spectral_share, self.eigenvectors + 1)

    # Local training --------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return PLAIN if self.strength(round_index) == 0 else ALIGNED

    def strength(self, round_index: int) -> float:
        """The factor of both terms in a round: 0 in the first and during warm-up, then to 1."""
        if round_index < max(self.warm_up, 1):
            return 0.0
        return min(1.0, (round_index - self.warm_up + 1) / max(self.ramp, 1))

    def whole_graph(self) -> str | None:
        if not (self.nlir or self.fgma):
            return None
        return "embeddings of all nodes are aligned with the global model's"

    def begin(self, local: Local) -> Message:
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
        output = local.forward()
        loss = local.cross_entropy(output.logits)
        if ANCHORS in local.constants:
            strength = self.lambda1 * local.constants[STRENGTH]
            loss = loss + strength * self.distillation(local, output.embedding)
        if GLOBAL_BASIS in local.constants:
            strength = self.lambda2 * local.constants[STRENGTH]
            loss = loss + strength * self.frequency_gap(local, output.embedding)
        return loss

    def _strength(self, round_index: int) -> npt.NDArray[np.float32]:
        return np.asarray(self.strength(round_index), dtype=np.float32)

    def log_shares(self, cohort: Cohort, h: Tensor, anchors: Tensor) -> Tensor:
        """log sigma(phi(h_u, H)): how a node's similarity is shared out over the repository."""
        cosine = cohort.segments.matmul(unit(h), anchors)
        return (cosine / self.temperature).log_softmax(dim=1)

    def distillation(self, local: Local, h: Tensor) -> Tensor:
        """L_FKD (Eq. 8), the mean over all nodes of a client."""
        ours = self.log_shares(local.cohort, h, local.constants[ANCHORS])
        theirs = local.constants[GLOBAL_LOG_SHARES]
        first, second = (ours, theirs) if self.divergence == "local||global" else (theirs, ours)
        return local.cohort.segments.mean((first.exp() * (first - second)).sum(dim=1))

    def basis(self, local: Local, h: Tensor, rows: Segments) -> Tensor:
        def find(h: Tensor) -> Tensor:
            return extremes(h, rows, self.neighbours, self.eigenvectors, self.tie_break)

        return local.on_host(find, h.detach())

    def frequency_gap(self, local: Local, h: Tensor) -> Tensor:
        """L_FGMA (Eq. 12): the sum over m of MSE(u u^T h, v v^T h_g), u and v the m-th vectors.

        With unit vectors, a = u^T h, b = v^T h_g and s = u^T v, the squared Frobenius distance is
        |a - s b|^2 + (1 - s^2) |b|^2: no projected matrix is formed. No gradient through u.
        """
        nodes, rows = self.spectral_nodes(local.cohort)
        v, b = local.constants[GLOBAL_BASIS], local.constants[GLOBAL_PROJECTIONS]
        near = h[nodes]
        u = v if self.refresh == "round" else self.basis(local, near, rows)
        s = rows.sum(u * v).unsqueeze(2)
        a = projections(near, u, rows)
        gap = (a - s * b).square() + (1 - s.square()).clamp(min=0) * b.square()
        entries = rows.counts.to(h.dtype) * h.shape[1]
        return gap.sum(dim=(1, 2)) / entries

    def upload(self, local: Local) -> Message:
        return {**super().upload(local), **(self.prototypes(local) if self.nlir else {})}

    def prototypes(self, local: Local) -> Message:
        """Mean embedding of the selected nodes of each class (Eq. 6), and their number.

        The released code reads the true class of every selected node; here only train labels count,
        and the model's predictions elsewhere. The model is the one that is sent, without dropout.
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

    # The server ------------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if self.nlir:
            after[REPOSITORY] = self.repository(uploads[PROTOTYPES], uploads[COUNTS], rng)
        return after

    def repository(self, prototypes: Tensor, counts: Tensor, rng: np.random.Generator) -> Tensor:
        """`[replicas, C, d]` (Eq. 7): means weighted by counts, over the clients drawn for each.

        A class that nobody drawn has gets a vector of zeros: its cosine with anything is zero.
        """
        weight = self.drawn(prototypes, counts, rng) * counts.T
        total = weight.sum(dim=2)
        mean = torch.einsum("rcm,mcd->rcd", weight, prototypes)
        return mean / torch.where(total > 0, total, 1).unsqueeze(2)

    def drawn(self, prototypes: Tensor, counts: Tensor, rng: np.random.Generator) -> Tensor:
        """1 where a client takes part in a prototype, `[replicas, C, clients]`.

        Lots go to clients in the order of what they sent, so that their numbering changes nothing.
        """
        clients, classes = counts.shape
        shape = (self.replicas, 1 if self.sampling == "replica" else classes, clients)
        sent = torch.cat([counts, prototypes.flatten(1)], dim=1).double()
        order = (sent @ _spread(sent)).argsort(stable=True)
        lots = torch.as_tensor(rng.random(shape), device=counts.device)
        lots = lots[:, :, order.argsort()].expand(-1, classes, -1)
        eligible = torch.full_like(counts[0], clients)
        if self.sampling == "holders":
            holds = counts.T > 0
            lots = torch.where(holds, lots, 2.0)
            eligible = holds.sum(dim=1)
        number = (self.client_share * eligible + 1e-9).floor().clamp(min=1)
        rank = lots.argsort(dim=2).argsort(dim=2)
        return (rank < number.unsqueeze(1)).to(counts.dtype)

    def download(self, state: State, clients: Sequence[int]) -> Message:
        repository = {n: t for n, t in state.items() if n == REPOSITORY}
        return {**super().download(state, clients), **to_each(repository, clients)}


def _spread(like: Tensor) -> Tensor:
    """Fixed weights for the columns, by which hardly two rows have the same sum."""
    index = torch.arange(like.shape[1], device=like.device, dtype=like.dtype)
    return (index * index).cos()


def label_centrality(graph: Graph, form: str, alpha: float) -> FloatArray:
    """The structure-aware label centrality of every node (Eq. 3)."""
    assert graph.masks is not None, f"{graph.name}: no split was drawn"
    train = graph.masks.train
    if form == "paper":  # Eq. 4-5: tau = 1 for all nodes; self-loops where labels spread
        return strongest(graph, alpha) + received_from(graph, train, alpha, loops=True)
    # The released code: tau marks train nodes, no factor alpha in the first term, the transpose of
    # P in the second, no self-loops.
    return strongest(graph, alpha, train) / alpha + sent_to(graph, train, alpha)
