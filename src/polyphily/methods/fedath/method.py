"""FedATH: an edge evaluator splits each graph; only the GNN on its causal part is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import with_prefix
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.search import Range
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

    left_open: ClassVar[Sequence[str]] = (
        "Eq. 2 weighs the clients equally, Eq. 4 and Algorithm 1 by their nodes: the latter is "
        "taken.",
        "The layers and the width of the edge evaluator's MLP are not stated: one hidden layer of "
        "16 with ReLU.",
        "How a graph with edge weights is normalised is not stated: self-loops have weight 1, and "
        "a node's degree is the sum of its weights.",
        "Eqs. 8 and 9 print an expectation and a sum over the same nodes, of a vector: both are "
        "read as the mean over nodes of a sum over classes (entropy=printed-sum is the sum over "
        "nodes).",
        "Eq. 9 prints log p without p before it, which is the cross-entropy to the uniform "
        "distribution and not an entropy; paper=on takes it as printed.",
        "Eq. 11 prints the factor (N-1)^2 where Eq. 10 has (N-1)^-2: the latter is taken. C is "
        "printed as I - 1/N: it is I minus the matrix whose entries are 1/N.",
        "Eq. 12 is one loss, but Algorithm 1 updates the causal GNN with CE + DEP and the biased "
        "GNN with ENT + DEP, without λ, and the edge evaluator not at all. The gradients of the "
        "GNNs are the same but for λ. paper=on follows Eq. 12: all three losses train the "
        "evaluator. joint=off keeps the biased GNN's losses from it, as the authors' code does.",
        "λ is tuned for each dataset in {0.001, 0.1, 7, 10}, and the values chosen are not "
        "printed: 0.1.",
        "The result is the global causal GNN, and with which edge weights it predicts is not "
        "stated: with those of the client's own evaluator.",
        "In Tables 3 and 4 the row with neither loss has FedAvg's figures: it is the method "
        "fedavg. FedATH without both losses keeps its evaluator, which the cross-entropy trains.",
    )

    independence: float = parameter(
        0.1,
        "weight of the HSIC; the paper tunes it in {0.001, 0.1, 7, 10}",
        symbol="λ",
        code=7.0,
        search=Range(1e-3, 10.0, log=True),
    )
    hsic: str = parameter(
        "alignment",
        "what the trace is divided by: (N-1)^2 as in the paper (pairs), N as in the authors' code "
        "(nodes), or the two norms, a value in [0, 1] that small logits cannot lower (alignment)",
        choices=("pairs", "nodes", "alignment"),
        paper="pairs",
        code="nodes",
    )
    entropy: str = parameter(
        "mean",
        "negative entropy as a mean over nodes or as a sum (authors' code); or Eq. 9 as printed, "
        "without p before log p, as a mean (printed) or as a sum (printed-sum)",
        choices=("mean", "sum", "printed", "printed-sum"),
        paper="printed",
        code="sum",
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
        code="gcn",
    )
    evaluator_width: int = parameter(
        16, "hidden width of the evaluator; not stated in the paper", code=512
    )
    symmetric: bool = parameter(True, "whether both directions get their mean score", paper=False)
    unit_features: bool = parameter(
        True, "whether the evaluator sees features of unit length", paper=False
    )
    initial_score: float = parameter(
        4.0, "initial bias of edge scores: 4 keeps all edges at first (ω = 0.98)", paper=0.0
    )
    evaluator_lr: float = parameter(
        0.001,
        "learning rate of the evaluator; 0: that of the GNNs",
        paper=0.0,
        search=Range(1e-4, 1e-2, log=True),
    )
    joint: bool = parameter(
        False,
        "whether the biased GNN's losses train the evaluator too: Eq. 12 over all parameters; "
        "the authors' code stops them at 1 - ω",
        paper=True,
        code=False,
    )

    @property
    def compares(self) -> bool:
        """True if the HSIC is part of the loss."""
        return self.use_independence and self.independence != 0

    @property
    def needs_biased(self) -> bool:
        """True if what predicts depends on the biased GNN.

        The entropy is a loss of the biased GNN alone. It reaches the causal GNN and the evaluator
        through the HSIC, or the evaluator through 1 - ω if `joint`.
        """
        return self.compares or (self.use_entropy and self.joint)

    def without_effect(self) -> Mapping[str, str]:
        idle = {}
        if not self.use_independence:
            idle["independence"] = "there is no HSIC; set use_independence=on as well"
        if not self.independence:
            idle["use_independence"] = "the HSIC's weight is 0; set independence as well"
        if not self.compares:
            idle["hsic"] = "there is no HSIC; set use_independence=on and an independence above 0"
            if not self.joint:
                idle["use_entropy"] = (
                    "the entropy trains the biased GNN only, and without HSIC nothing that "
                    "predicts depends on it; set joint=on as well"
                )
            if not self.use_entropy:
                idle["joint"] = "the biased GNN has no loss; set use_entropy=on as well"
        if not self.use_entropy:
            idle["entropy"] = "there is no entropy loss; set use_entropy=on as well"
        elif "use_entropy" in idle:
            idle["entropy"] = idle["use_entropy"]
        return idle

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

    def needs_symmetric_edges(self) -> str:
        return "an edge has one score, whichever way it leads"

    def needs_whole_graph(self) -> str:
        return "its losses compare the two GNNs at all nodes"

    def loss(self, local: Local) -> Tensor:
        """Compute Eq. 12.

        The causal GNN occurs in CE + λ HSIC only, the biased GNN in entropy + λ HSIC only, so that
        their gradients are those of the two updates in Algorithm 1, which computes H_c and H_b once
        per epoch. A biased GNN that changes no prediction is not trained (`needs_biased`).
        """
        causal, biased = self.represent(local)
        segments = local.cohort.segments
        loss = local.cross_entropy(causal)  # Eq. 8
        if biased is None:
            return loss
        if self.use_entropy:
            loss = loss + negative_entropy(biased, segments, self.entropy)
        if self.compares:
            loss = loss + self.independence * hsic(causal, biased, segments, self.hsic)
        return loss

    def represent(self, local: Local) -> tuple[Tensor, Tensor | None]:
        """Compute H_c, and H_b if it is needed, Eq. 7."""
        network, cohort, draws = local.network, local.cohort, local.draws
        assert isinstance(network, DualGNN)
        score: Tensor = functional_call(
            network.evaluator, with_prefix(local.params, EVALUATOR), (cohort, draws)
        )
        causal: Output = functional_call(
            network.causal,
            with_prefix(local.params, CAUSAL),
            (network.weighted(cohort, score), draws),
        )
        if not self.needs_biased:
            return causal.logits, None
        rest = network.weighted(cohort, -score if self.joint else -score.detach())  # 1 - ω
        biased: Output = functional_call(
            network.biased, with_prefix(local.params, BIASED), (rest, draws)
        )
        return causal.logits, biased.logits

    def optimizer_for(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        if self.evaluator_lr and parameter.startswith(EVALUATOR):
            return replace(run, lr=self.evaluator_lr)
        return run
