"""FedIIH: models are mixed factor by factor, by the similarity of the clients' encodings."""

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
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    model,
    rows_of,
    statistic,
    with_prefix,
    with_rows,
)
from polyphily.core.method import Method, parameter, register
from polyphily.core.search import Choices, Range
from polyphily.methods.fedath.network import edge_segments
from polyphily.methods.fediih.network import (
    CENTRE,
    VARIANCE,
    VariationalGNN,
    distance_of_centres,
    divergence,
    encode,
    partners,
    reconstruction,
    sampled,
)
from polyphily.methods.fediih.server import mixed, similarity, strengths
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.disengcn import DisenGCN
from polyphily.nn.sparse import flat

MEAN, LOGVAR, ALPHA = "mean", "logvar", "alpha"
LAST, STRENGTH, HEARD = "last/", "strength", "heard"


@register(
    "fediih",
    cite="Yu et al., Modeling Inter-Intra Heterogeneity for Graph Federated Learning, AAAI 2025",
)
@dataclass(frozen=True)
class FedIIH(Method):
    """Personal models: the slice of factor q is mixed by β^q = softmax_j(τ (1 - JS^q_ij / ln 2)).

    Clients train a DisenGCN, whose hidden features are Q factors: W, b project the features, V, c
    classify. Its hidden features are encoded as a Gaussian for every node. JS^q compares the mean
    encodings of two clients, and c is averaged plainly. A hierarchical variational model of the
    encodings (see `network`) is trained beside it:

        L = CE + λ (BCE of the edges + sum_q [KL(N(mean^q, e^logvar^q) ‖ N(a^q, 1/4))
                    + KL(N(a^q, 1/4) ‖ N(α^q, 1/4)) - log N(a^q; 0, 1)]),

    each term a mean over entries. a^q stays with the client, α^q = sum_i m_i^q / (M + 1/4) comes
    from the server, m_i^q being the mean encoding of client i. With paper=on the cross-entropy
    trains V, c only, and the rest of L trains W, b.

    A client that does not answer is represented by what it sent last. One that has never answered
    receives the plain mean.
    """

    evaluated = "personal"
    selection = "client"
    backbone = "disengcn"
    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "Mean and log-variance of an encoding are the same function where both are routed without "
        "parameters, as in the authors' code: the log-variance is a linear map of the mean, factor "
        "by factor, which travels with W and b.",
        "Algorithm 1 trains W, b with the evidence lower bound alone, so that labels never reach "
        "them; by default the cross-entropy trains them, too.",
        "In the authors' code nothing that is sent or evaluated depends on the variational model: "
        "code=on leaves it out.",
        "The authors' code adds log N(a; 0, 1) to what is minimised; here it is subtracted.",
        "All pairs of nodes take quadratic memory: pairs are drawn in each step, and their mean "
        "estimates the mean over all pairs without bias.",
        "How the terms of the bound are scaled is not stated: each is a mean over nodes, pairs or "
        "entries, as in the authors' code.",
        "α before the first round and the first a^q are not stated: 0.",
        "Whether the mean encodings are sent with dropout is not stated: without.",
        "1 - JS / ln 2 is meant to lie in [0, 1], but JS between Gaussians has no upper bound: it "
        "is used as printed.",
        "The number of factors is chosen for each dataset in {1, 2, 4, 6, 8, 10}: 2, the value for "
        "Cora and CiteSeer.",
    )

    factors: int = parameter(
        2,
        "number of latent factors, which share the hidden width",
        symbol="Q",
        search=Choices(2, 4, 8),
    )
    iterations: int = parameter(6, "routing steps in each layer", symbol="T")
    temperature: float = parameter(
        10.0,
        "factor of similarities before the softmax",
        symbol="τ",
        search=Range(1.0, 50.0, log=True),
    )
    encoder: str = parameter(
        "both",
        "what trains W and b: the cross-entropy and the evidence lower bound (both), the bound "
        "alone (bound), or the cross-entropy alone, without a variational model (labels)",
        choices=("both", "bound", "labels"),
        paper="bound",
        code="labels",
    )
    bound: float = parameter(
        0.1,
        "weight of the negative bound",
        symbol="λ",
        paper=1.0,
        search=Range(0.01, 1.0, log=True),
    )
    edges: str = parameter(
        "balanced",
        "weight of the edges among all pairs of nodes: half of the sum (balanced), or their share "
        "(plain)",
        choices=("balanced", "plain"),
        paper="plain",
    )
    pairs: int = parameter(4, "pairs that are drawn for each node in a step")
    weights: str = parameter(
        "factors",
        "β of each factor (factors); one β from the mean similarity over factors (averaged); all "
        "clients have the mean self-weight, and the others share the rest equally (control); the "
        "plain mean (even)",
        choices=("factors", "averaged", "control", "even"),
    )

    @property
    def variational(self) -> bool:
        """True if there is a variational model."""
        return self.encoder != "labels"

    def without_effect(self) -> Mapping[str, str]:
        idle = {}
        if not self.variational:
            reason = "there is no variational model; set encoder=both or encoder=bound as well"
            idle = dict.fromkeys(("bound", "edges", "pairs"), reason)
        if self.weights == "even":
            idle["temperature"] = "clients are not compared; set weights=factors as well"
        return idle

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return ("disengcn",)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in self.supported_backbones():
            raise ValueError(f"fediih trains a disengcn, not '{backbone}'")
        if self.factors < 1:
            raise ValueError(f"fediih: factors must be at least 1, not {self.factors}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind = VariationalGNN if self.variational else DisenGCN
            return kind(shape, self.factors, self.iterations)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return parameter != CENTRE

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        alone = Individually("the server mixes the clients' models differently for each of them")
        shape = (self.factors, sizes.embedding // self.factors)
        return (
            model(sizes, alone),
            statistic(MEAN, shape, alone, meaning="mean over nodes of the encodings' means"),
            statistic(LOGVAR, shape, alone, meaning="mean over nodes of their log-variances"),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        models = model(sizes, meaning="the client's own mixture of all models")
        if not self.variational:
            return (models,)
        shape = (self.factors, sizes.embedding // self.factors)
        return (models, statistic(ALPHA, shape, meaning="the federation's centre of each factor"))

    # At the clients --------------------------------------------------------------------------

    def needs_symmetric_edges(self) -> str:
        return "the edges that it reconstructs lead both ways"

    def needs_whole_graph(self) -> str:
        return "routing takes all neighbours of a node, and encodings are summed over all nodes"

    def loss(self, local: Local) -> Tensor:
        output = local.forward()
        logits, hidden = output.logits, output.embedding
        if not self.variational:
            return local.cross_entropy(logits)
        if self.encoder == "bound":
            assert isinstance(local.network, DisenGCN)
            head = with_prefix(local.params, "head.")
            logits = functional_call(local.network.head, head, (hidden.detach(), local.cohort))
        return local.cross_entropy(logits) + self.bound * self.negative_bound(local, hidden)

    def negative_bound(self, local: Local, hidden: Tensor) -> Tensor:
        """Compute each client's negative evidence lower bound, `[K]`."""
        cohort, draws, network = local.cohort, local.draws, local.network
        assert isinstance(network, DisenGCN)
        assert draws is not None
        segments, centre = cohort.segments, local.params[CENTRE]
        mean, logvar = encode(network, local.params, hidden, cohort, draws)
        error = reconstruction(
            sampled(mean, logvar, segments, draws),
            cohort,
            cohort.cached("fediih/edges by client", edge_segments),
            partners(segments, self.pairs, draws),
            balanced=self.edges == "balanced",
        )
        nodes = divergence(mean, logvar, segments.expand(flat(centre)))
        centres = distance_of_centres(centre, local.received[ALPHA])
        inner = segments.mean(nodes.mean(dim=1)) + flat(centres).mean(dim=1)
        return error + self.factors * inner  # a sum over factors of means over their entries

    def upload(self, local: Local) -> Message:
        """Send W, b, V, c and the mean over nodes of the encodings."""
        network, graph = local.network, local.cohort.forward_only
        assert isinstance(network, DisenGCN)
        with torch.no_grad():
            hidden = local.frozen(local.params).embedding
            found = encode(network, local.params, hidden, graph)
        shape = (len(local.cohort), self.factors, network.width)
        mean, logvar = (graph.segments.mean(values).view(shape) for values in found)
        return {**super().upload(local), MEAN: mean, LOGVAR: logvar}

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        bias = shared["project.bias"]
        nothing = bias.new_zeros(clients, self.factors, len(bias) // self.factors)
        return {
            **{LAST + n: t.expand(clients, *t.shape).clone() for n, t in shared.items()},
            MEAN: nothing,
            LOGVAR: nothing.clone(),
            # [receiver, factor, sender]; the last "factor" is what belongs to none
            STRENGTH: bias.new_full((clients, self.factors + 1, clients), 1 / clients),
            HEARD: torch.zeros(clients, dtype=torch.bool, device=bias.device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        here = uploads.clients
        sent = {LAST + name: value for name, value in uploads.model.items()}
        sent |= {MEAN: uploads[MEAN], LOGVAR: uploads[LOGVAR]}
        sent[HEARD] = torch.ones(len(here), dtype=torch.bool, device=state[HEARD].device)
        after = {n: with_rows(state[n], here, value) for n, value in sent.items()}
        alike, heard = similarity(after[MEAN], after[LOGVAR]), after[HEARD]
        beta = strengths(alike, heard, self.temperature, self.weights)
        plain = strengths(alike[:1], heard, self.temperature, "even")
        after[STRENGTH] = torch.cat([beta, plain]).transpose(0, 1).contiguous()
        return {**state, **after}

    def collaboration(self, state: State) -> Tensor:
        """Return the mean of β over factors."""
        return state[STRENGTH][:, :-1].mean(dim=1)

    def download(self, state: State, clients: Sequence[int]) -> Message:
        rows = rows_of(state[STRENGTH], clients)
        beta, plain = rows[:, :-1], rows[:, -1]
        last = with_prefix(state, LAST)
        sent = as_model({n: mixed(n, values, beta, plain) for n, values in last.items()})
        if self.variational:
            alpha = state[MEAN].sum(dim=0) / (state[HEARD].sum() + VARIANCE)
            sent[ALPHA] = alpha.expand(len(clients), *alpha.shape)
        return sent
