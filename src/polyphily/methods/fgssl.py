"""FGSSL: local models keep the class structure and the neighbourhoods of the received model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import TrainingGraph
from polyphily.core.local import Local
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import BACKBONES, Output
from polyphily.nn.draws import Draws
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.subgraphs import Subgraph

BLOCK = 1 << 20  # pairs of nodes that are compared at a time
ZERO = 1e-6  # length up to which a row counts as zero
VIEWS = ("weak_edges", "weak_features", "strong_edges", "strong_features")


@register(
    "fgssl", cite="Huang et al., Federated Graph Semantic and Structural Learning, IJCAI 2023"
)
@dataclass(frozen=True)
class FGSSL(FedAvg):
    """L = CE + lambda_C · L_C + lambda_D · L_D, both terms against the received model, the teacher.

    Every step draws two views of a client's graph. The local model sees the strong view, in which
    more edges and features are removed, and the teacher the weak one. CE is on the graph itself.

    L_C pulls the embedding of a train node to the teacher's embeddings of its class and pushes it
    away from those of other classes. L_D = KL(π^teacher || π^local), the mean over nodes, where
    π_i = softmax over the neighbours j of i of cos(o_i, o_j) / ω for logits o.
    """

    left_open: ClassVar[Sequence[str]] = (
        "The denominator of L_C is described as the positive and the negatives, but the authors' "
        "code has all keys in it. Here: as described (denominator=all: all keys).",
        "Whether embeddings are contrasted before or after their activation is not stated. Here: "
        "after it, at the input of the last layer; the authors' code takes them before it.",
        "Which views L_D compares is not stated. Here: those of L_C, as in unused functions of the "
        "authors' code, over all edges of the graph.",
        "λ_C, λ_D and ω are not known: the authors' code has 1.5 for a contrast of the local model "
        "with itself, and never adds L_D to the loss. Here: 0.1 and 1, chosen on Cora, and 0.5.",
        "An edge can be removed in one direction or in both. Here: in both.",
    )

    weighting: str = parameter(
        "nodes",
        "what a client's weight n_i counts: its nodes, its train nodes, or one each",
        symbol="n_i",
        choices=("nodes", "train", "uniform"),
        paper="train",
    )
    lambda_c: float = parameter(
        0.1,
        "weight of L_C, the contrast",
        symbol="λ_C",
        code=1.5,
        search=Range(0.05, 2.0, log=True),
    )
    lambda_d: float = parameter(
        1.0, "weight of L_D, the structure", symbol="λ_D", search=Range(0.1, 10.0, log=True)
    )
    denominator: str = parameter(
        "negatives",
        "keys in the denominator of L_C beside the positive: those of other classes, or all",
        choices=("negatives", "all"),
        code="all",
    )
    temperature: float = parameter(
        0.1, "cosines in L_C are divided by it", symbol="τ", search=Range(0.05, 1.0, log=True)
    )
    structure_temperature: float = parameter(
        0.5, "cosines in L_D are divided by it", symbol="ω", search=Range(0.1, 1.0)
    )
    teacher: str = parameter(
        "received",
        "whose output both terms compare with: the received model's, or the local model's own",
        choices=("received", "local"),
    )
    weak_edges: float = parameter(0.3, "share of edges that the weak view lacks")
    weak_features: float = parameter(0.3, "share of features that the weak view lacks")
    strong_edges: float = parameter(0.8, "share of edges that the strong view lacks")
    strong_features: float = parameter(0.5, "share of features that the strong view lacks")

    def supported_backbones(self) -> Sequence[str]:
        return tuple(name for name, cls in BACKBONES.items() if cls.weighted_edges)

    @property
    def compares(self) -> bool:
        """True if the loss has a term beside the cross-entropy."""
        return self.lambda_c != 0 or self.lambda_d != 0

    def needs_symmetric_edges(self) -> str:
        return "its views drop an edge in both directions"

    def needs_whole_graph(self) -> str | None:
        return "a step compares neighbours in views of the whole graph" if self.compares else None

    def loss(self, local: Local) -> Tensor:
        loss = super().loss(local)
        if local.draws is None or not self.compares:
            return loss
        cohort = local.cohort
        weak = random_view(cohort, local.draws, self.weak_edges, self.weak_features)
        strong = random_view(cohort, local.draws, self.strong_edges, self.strong_features)
        ours: Output = functional_call(local.network, local.params, (strong, local.draws))
        theirs = self.taught(local, weak)
        if self.lambda_c:
            nodes = cohort.train_nodes
            contrast = contrast_with(
                ours.embedding[nodes],
                theirs.embedding[nodes],
                cohort.train_labels,
                cohort.train_segments,
                self.temperature,
                self.denominator,
            )
            loss = loss + self.lambda_c * local.train_mean(contrast)
        if self.lambda_d:
            first, second = (
                log_neighbour_shares(output.logits, cohort.edges, self.structure_temperature)
                for output in (theirs, ours)
            )
            divergence = cohort.edges.sum_by_row(first.exp() * (first - second))
            loss = loss + self.lambda_d * cohort.segments.mean(divergence)
        return loss

    @torch.no_grad()
    def taught(self, local: Local, view: StackedGraph) -> Output:
        """Return the teacher's output on a view, without dropout and without gradient."""
        params = self.receive(local) if self.teacher == "received" else local.params
        output: Output = functional_call(local.network, params, (view,))
        return output

    def without_effect(self) -> Mapping[str, str]:
        idle: dict[str, str] = {}
        if not self.lambda_c:
            reason = "L_C is not in the loss; set lambda_c above 0"
            idle |= dict.fromkeys(("denominator", "temperature"), reason)
        if not self.lambda_d:
            idle["structure_temperature"] = "L_D is not in the loss; set lambda_d above 0"
        if not self.compares:
            reason = "there are no views; set lambda_c or lambda_d above 0"
            idle |= dict.fromkeys(("teacher", *VIEWS), reason)
        return idle


# The two terms -----------------------------------------------------------------------------------


def contrast_with(
    anchors: Tensor,
    keys: Tensor,
    labels: Tensor,
    rows: Segments,
    temperature: float,
    denominator: str,
) -> Tensor:
    """Compute the loss of every anchor against the keys of its client, `[rows]`.

    With s_ik = cos(anchor i, key k) / τ, P_i the keys of the anchor's class and N_i the others, it
    is the mean over p in P_i of -log(e^{s_ip} / D_ip). The denominator D_ip is e^{s_ip} plus the
    sum over N_i of e^{s_in} ("negatives"), or the sum over all keys ("all").

    Pairs are compared block by block, so that memory does not grow with their number. As keys have
    no gradient, the gradient of a block is computed with it, and no pair is kept for later.

    Args:
        anchors: embeddings that are trained, `[rows, d]`.
        keys: embeddings without gradient, `[rows, d]`.
        labels: the class of every row.
        rows: the rows of each client.
        temperature: τ.
        denominator: "negatives" or "all".
    """
    unit = unit_rows(anchors)
    padded, others = (F.pad(x, (0, 0, 0, 1)) for x in (unit.detach(), unit_rows(keys)))
    classes = F.pad(labels, (0, 1), value=-1)
    found = []
    buckets, home = rows.buckets
    for bucket in buckets:
        gather = bucket.gather.view(-1, bucket.size)
        columns = others[gather], classes[gather].unsqueeze(1)
        width = max(1, BLOCK // max(gather.numel(), 1))
        parts = [
            _with_slope(padded[block], classes[block], *columns, temperature, denominator)
            for block in torch.split(gather, width, dim=1)
        ]
        found.append([torch.cat(both, dim=1).flatten(0, 1) for both in zip(*parts, strict=True)])
    value, slope = (torch.cat(both)[home] for both in zip(*found, strict=True))
    return value + (slope * (unit - unit.detach())).sum(dim=1)


def _with_slope(
    anchors: Tensor,
    classes: Tensor,
    keys: Tensor,
    key_classes: Tensor,
    temperature: float,
    denominator: str,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of unit anchors of some clients, and its gradient in the anchors.

    Args:
        anchors: `[clients, anchors, d]`.
        classes: `[clients, anchors]`.
        keys: unit vectors, `[clients, keys, d]`.
        key_classes: `[clients, 1, keys]`; -1 for padding.
        temperature: τ.
        denominator: "negatives" or "all".
    """
    every = denominator == "all"
    score = (anchors @ keys.transpose(1, 2)).div_(temperature)
    same = classes.unsqueeze(2) == key_classes
    counted = key_classes >= 0 if every else (key_classes >= 0) & ~same
    nothing = -100 - 2 / temperature  # so far below every score that its exponential is 0 beside
    weight = score.masked_fill(~counted, nothing)
    peak = weight.amax(dim=2, keepdim=True)
    weight = weight.sub_(peak).exp_()
    mass = weight.sum(dim=2, keepdim=True)
    gap = peak + mass.log() - score  # log of the sum over counted keys, minus s_ip
    positive = same.to(score.dtype).div_(same.sum(dim=2, keepdim=True).clamp(min=1))
    value = ((gap if every else F.softplus(gap)) * positive).sum(dim=2)
    pull = positive if every else gap.sigmoid_().mul_(positive)  # minus the derivative in s_ip
    push = weight.mul_(pull.sum(dim=2, keepdim=True) / mass)  # that in the s_ik of counted keys
    return value, push.sub_(pull) @ keys / temperature


def log_neighbour_shares(logits: Tensor, edges: SparseMatrix, temperature: float) -> Tensor:
    """Compute log π_ij, the log-softmax over neighbours j of cos(o_i, o_j) / ω, at the edges ij."""
    unit = unit_rows(logits)
    score = edges.products(unit, unit) / temperature
    lowest = score.new_full((len(unit),), -torch.inf)
    score = score - lowest.scatter_reduce(0, edges.row, score.detach(), "amax")[edges.row]
    total = edges.sum_by_row(score.exp())
    # Without neighbours it is 0. No clamp: with one neighbour it is exactly 1, and the gradient of
    # clamp at its bound differs between versions of torch.
    total = torch.where(total > 0, total, 1)
    return score - edges.at_rows(total.log())


def unit_rows(x: Tensor) -> Tensor:
    """Scale rows to unit length; a row of zeros stays as it is, and so does its gradient."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.where(length > ZERO, length, 1)


# Views -------------------------------------------------------------------------------------------


class View(Subgraph):
    """A stacked graph without some of its edges and features.

    Args:
        graph: the whole graph.
        edges: 1 for the edges that are kept, 0 for the others, `[nnz]`.
        features: the same for the features of each client, `[K, F]`.
    """

    def __init__(self, graph: StackedGraph, edges: Tensor, features: Tensor) -> None:
        super().__init__(graph, edges)
        self.features = features

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        x = self.graph.x
        if isinstance(x, Tensor):
            return x * self.segments.expand(self.features)
        assert x.value is not None
        return x.with_value(x.value * self.features.flatten()[x.col_long])

    @cached_property
    def mean(self) -> SparseMatrix:
        """The mean over the neighbours that are left, zero for a node without any."""
        left = self.edges.sum_by_row(self.weight)
        left = torch.where(left > 0, left, 1)
        return self.edges.with_value(self.weight / left[self.edges.row])


def random_view(graph: TrainingGraph, draws: Draws, edges: float, features: float) -> View:
    """Draw a view that lacks these shares of edges and features; each client draws its own."""
    pairs = graph.cached("fgssl/pairs", _pairs)
    starts = graph.cached("fgssl/edges", lambda own: own.segments.pointers_into(own.edges))
    every = torch.ones(graph.edges.nnz, dtype=graph.dtype, device=graph.device)
    kept = draws.dropout(every, edges, starts).sign()[pairs]  # sign: kept ones are not scaled
    all_features = every.new_ones(len(graph), graph.num_features)
    columns = draws.dropout(all_features, features, range(len(graph) + 1)).sign()
    return View(graph, kept, columns)


def _pairs(graph: TrainingGraph) -> Tensor:
    """Return an entry for each edge that is the same in both directions."""
    entries = torch.arange(graph.edges.nnz, device=graph.device)
    return torch.minimum(entries, graph.edges.permutation)  # the pattern is symmetric
