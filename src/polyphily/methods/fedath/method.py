"""FedATH: an edge evaluator splits each graph; only the GNN on its causal part is shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import with_prefix
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.graphs.random import derive
from polyphily.methods.fedath.losses import hsic, negative_entropy
from polyphily.methods.fedath.network import (
    BIASED,
    CAUSAL,
    EVALUATOR,
    EVALUATORS,
    DualGNN,
)
from polyphily.methods.fedavg import FedAvg
from polyphily.nn import backbones
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape
from polyphily.nn.subgraphs import Subgraph

SHARED = {
    "causal": (CAUSAL,),
    "causal+evaluator": (CAUSAL, EVALUATOR),
    "causal+biased": (CAUSAL, BIASED),
    "all": (CAUSAL, BIASED, EVALUATOR),
}


@register(
    "fedath",
    cite="Fu et al., Less is More: Federated Graph Learning with Alleviating Topology "
    "Heterogeneity from A Causal Perspective, ICML 2025",
)
@dataclass(frozen=True)
class FedATH(FedAvg):
    """L = CE(H_c) + negative entropy(H_b) + lambda · HSIC(H_c, H_b), causal GNN averaged.

    H_c is the output of the causal GNN on edges weighted ω, H_b that of the biased GNN on edges
    weighted 1 - ω, with ω from the edge evaluator. Evaluator and biased GNN stay with the client.
    The paper's GNNs are GCNs. Here they may be any backbone that reads edge weights.

    The global causal GNN is evaluated with the client's own evaluator, because the paper calls
    that GNN the result. (The authors' code evaluates the trained model.)
    """

    independence: float = parameter(
        0.1, "weight of the HSIC; the paper tunes it in {0.001, 0.1, 7, 10}", symbol="λ"
    )
    hsic: str = parameter(
        "alignment",
        "what the trace is divided by: (N-1)^2 as in the paper (pairs), N as in the authors' code "
        "(nodes), or the two norms, a value in [0, 1] that small logits cannot lower (alignment)",
        choices=("pairs", "nodes", "alignment"),
        paper="pairs",
    )
    entropy: str = parameter(
        "mean",
        "negative entropy as a mean over nodes, as a sum (authors' code), or as Eq. 9 is printed",
        choices=("mean", "sum", "printed"),
    )
    use_entropy: bool = parameter(True, "whether the entropy loss is used (Tables 3 and 4)")
    use_independence: bool = parameter(True, "whether the HSIC loss is used (Tables 3 and 4)")
    share: str = parameter(
        "causal", "what is averaged; the paper: causal (Tables 5 and 6)", choices=tuple(SHARED)
    )
    evaluator: str = parameter(
        "mlp",
        "edge scores by an MLP on the endpoints' features (paper), or on a GCN's outputs (code)",
        symbol="Φ",
        choices=tuple(EVALUATORS),
    )
    evaluator_width: int = parameter(
        16, "hidden width of the evaluator; not stated in the paper, 512 in the authors' code"
    )
    symmetric: bool = parameter(True, "whether both directions get their mean score", paper=False)
    unit_features: bool = parameter(
        True, "whether the evaluator sees features of unit length", paper=False
    )
    initial_score: float = parameter(
        4.0, "initial bias of edge scores: 4 keeps all edges at first (ω = 0.98)", paper=0.0
    )
    evaluator_lr: float = parameter(
        0.001, "learning rate of the evaluator; 0: that of the GNNs", paper=0.0
    )
    joint: bool = parameter(
        False,
        "whether the biased GNN's losses train the evaluator too: Eq. 12 over all parameters; "
        "the authors' code stops them at 1 - ω",
    )

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return tuple(name for name, backbone in BACKBONES.items() if backbone.weighted_edges)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in self.supported_backbones():
            raise ValueError(f"fedath weights edges, which '{backbone}' does not read")
        causal = backbones.build(backbone, shape, seed)
        biased = backbones.build(backbone, shape, derive(seed, "biased GNN"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "edge evaluator"))
            evaluator = EVALUATORS[self.evaluator](
                shape,
                self.evaluator_width,
                self.initial_score,
                symmetric=self.symmetric,
                unit=self.unit_features,
            )
        return DualGNN(causal, biased, evaluator)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return parameter.startswith(SHARED[self.share])

    # At the clients --------------------------------------------------------------------------

    def needs_whole_graph(self) -> str:
        return "its losses compare the two GNNs at all nodes"

    def loss(self, local: Local) -> Tensor:
        """Compute Eq. 12.

        H_c depends on the causal GNN and on Φ, H_b on the biased GNN. So the gradient is that of
        CE + λ HSIC with H_b fixed for the first two, and of entropy + λ HSIC with H_c fixed for
        the last. These are both updates of Algorithm 1, which computes H_c and H_b once per epoch.
        """
        causal, biased = self.represent(local)
        segments = local.cohort.segments
        loss = local.cross_entropy(causal)  # Eq. 8
        if self.use_entropy and biased is not None:
            loss = loss + negative_entropy(biased, segments, self.entropy)
        if self.use_independence and biased is not None:
            loss = loss + self.independence * hsic(causal, biased, segments, self.hsic)
        return loss

    def represent(self, local: Local) -> tuple[Tensor, Tensor | None]:
        """Compute H_c, and H_b if a loss needs it, Eq. 7."""
        network, cohort, draws = local.network, local.cohort, local.draws
        assert isinstance(network, DualGNN)
        score: Tensor = functional_call(
            network.evaluator, with_prefix(local.params, EVALUATOR), (cohort, draws)
        )
        causal: Output = functional_call(
            network.causal,
            with_prefix(local.params, CAUSAL),
            (Subgraph(cohort, score.sigmoid()), draws),
        )
        if not (self.use_entropy or self.use_independence):
            return causal.logits, None
        rest = (-score if self.joint else -score.detach()).sigmoid()
        biased: Output = functional_call(
            network.biased, with_prefix(local.params, BIASED), (Subgraph(cohort, rest), draws)
        )
        return causal.logits, biased.logits

    def optimizer_for(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        if self.evaluator_lr and parameter.startswith(EVALUATOR):
            return replace(run, lr=self.evaluator_lr)
        return run
