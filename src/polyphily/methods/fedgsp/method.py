"""FedGSP: clients share low-frequency and complement high-frequency properties of their spectra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Rounds,
    Sizes,
    State,
    Uploads,
    as_model,
    model,
    model_part,
    statistic,
    with_prefix,
)
from polyphily.core.method import Method, parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.methods.fedgsp.collaboration import (
    COMPARED,
    SCALES,
    alternate,
    only_others,
    uniform_self_weight,
)
from polyphily.methods.fedgsp.directions import client_directions
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.sparse import flat
from polyphily.nn.unifilter import UniFilter

COEFFICIENTS = "coefficients"
HOMOPHILY, HETEROPHILY = "homophily", "heterophily"  # the vectors p and q
STRENGTH, LAST, HEARD, KNOWN = "strength", "last/", "heard", "known"
EXCHANGE, QUIET = "exchange", "quiet"  # rounds in which vectors are sent, and those after
FOREVER = 1_000_000_000  # more rounds than any run has


@register("fedgsp", cite="Yu, Homophily Heterogeneity Matters in Graph Federated Learning, 2025")
@dataclass(frozen=True)
class FedGSP(Method):
    """Personal models: coefficients averaged order by order, the MLP once, each by its own W.

    Clients train a UniFilter: Z = sum_k W^k ∘ (tau H^k + (1-tau) U^k), and an MLP on Z. They send
    the first t right singular vectors of each basis, p^k of H^k and q^k of U^k. (The paper sends
    left ones, whose length differs between clients.) For every order, and for the MLP with
    p = [p^0 … p^K], the server alternates R, S and W to minimise

        sum_ij (||R p_i - R p_j||^2 - ||S q_i - S q_j||^2) w_ij + gamma w_ij^2,

    with the rows of W, and the diagonals of R and S, on the simplex. The bases are static, and so
    are the vectors: the server solves when new vectors arrive and keeps W otherwise.

    Three defaults depart from the paper: the spans of the vectors are compared, distances between
    different clients are scaled to one range, and a proximal term keeps a client's coefficients
    near those that it received.

    A client that does not answer is represented by the model that it sent last. A client whose
    vectors the server does not have receives the plain mean of the models that were sent.
    """

    evaluated = "personal"
    selection = "client"
    backbone = "unifilter"

    order: int = parameter(10, "highest order of the bases", symbol="K")
    tau: float = parameter(0.95, "share of the homophily bases in the mixture", symbol="τ")
    vectors: int = parameter(3, "singular vectors that are sent of each basis", symbol="t")
    gamma: float = parameter(1.0, "weight of w_ij^2: the larger, the more even is W", symbol="γ")
    sharing: float = parameter(
        1.0, "weight of the homophily distances; 1 in the paper, 0 turns sharing off"
    )
    complementing: float = parameter(
        1.0, "weight of the heterophily distances; 1 in the paper, 0 turns complementing off"
    )
    compare: str = parameter(
        "subspace",
        "what of two clients is compared: the span of their singular vectors, or the vectors one "
        "by one, which depend on sign and order",
        choices=tuple(COMPARED),
        paper="vectors",
    )
    scale: str = parameter(
        "others",
        "what is brought to one range before the W step: others, distances of each kind between "
        "different clients (0 to 1/M, and 0 to oneself); terms, all distances of each kind; range, "
        "t_ij; none (W is almost even)",
        choices=tuple(SCALES),
        paper="none",
    )
    floor: float = parameter(
        1.0,
        "share of the mean e_l that is added to each: bounds the attention of dimensions on which "
        "clients agree",
        paper=0.0,
    )
    leash: float = parameter(
        0.2,
        "weight of the proximal term ||W - W_received||^2 / 2 on the coefficients of the filter",
        symbol="μ",
        paper=0.0,
    )
    strengths: str = parameter(
        "spectral",
        "spectral: the W of the method; control: every client has the mean self-weight of that W, "
        "and the others share the rest equally",
        choices=("spectral", "control"),
    )
    sweeps: int = parameter(20, "alternations of R, S and W at most, when new vectors arrive")
    exchange: int = parameter(
        15,
        "rounds, from the first, in which clients send their singular vectors",
        paper=FOREVER,
    )
    coefficients: str = parameter(
        "feature",
        "one coefficient per order and feature, or one per order",
        symbol="W^k",
        choices=("feature", "order"),
    )
    coefficient_lr: float = parameter(
        0.05, "learning rate of the coefficients; that of the MLP is the run's"
    )
    coefficient_weight_decay: float = parameter(
        0.0, "weight decay of the coefficients; that of the MLP is the run's"
    )

    @property
    def kinds(self) -> dict[str, float]:
        """The vectors that are used, and the weight of each kind in the objective."""
        signed = {HOMOPHILY: self.sharing, HETEROPHILY: -self.complementing}
        return {name: weight for name, weight in signed.items() if weight}

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return ("unifilter",)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in self.supported_backbones():
            raise ValueError(f"fedgsp trains a unifilter, not '{backbone}'")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            per_feature = self.coefficients == "feature"
            return UniFilter(shape, self.order, self.tau, per_feature=per_feature)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return True

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        alone = Individually("the server mixes the clients' models differently for each of them")
        models = model(sizes, alone)
        if self.exchange < 1:
            return (models,)
        shape = (self.order + 1, self.vectors * sizes.features)
        rounds = Rounds(1, self.exchange if self.exchange < FOREVER else None)
        vectors = [
            statistic(name, shape, alone, rounds=rounds, meaning=f"right singular vectors {symbol}")
            for name, symbol in ((HOMOPHILY, "p"), (HETEROPHILY, "q"))
            if name in self.kinds
        ]
        return (models, *vectors)

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes, meaning="the client's own mixture of all models"),)

    # At the clients --------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return EXCHANGE if round_index < self.exchange else QUIET

    def needs_whole_graph(self) -> str:
        return "its bases are computed once, from all edges"

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """Compute the vectors p^0 … p^K and q^0 … q^K of every client, `[clients, K+1, t F]`."""
        if not self.kinds:
            return {}
        found = client_directions(cohort, self.order, self.vectors)
        both = zip((HOMOPHILY, HETEROPHILY), found.unbind(dim=1), strict=True)
        return {name: vectors.contiguous() for name, vectors in both if name in self.kinds}

    def loss(self, local: Local) -> Tensor:
        """Compute the cross-entropy of train nodes, Eq. (3) and (4), and the proximal term."""
        cohort = local.cohort
        output: Output = functional_call(local.network, local.params, (cohort, local.draws, True))
        error = F.cross_entropy(output.logits, cohort.train_labels, reduction="none")
        loss = local.train_mean(error)
        if self.leash:
            received = model_part(local.received)[COEFFICIENTS]
            loss = loss + self.leash / 2 * local.drift({COEFFICIENTS: received})
        return loss

    def optimizer_for(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        """Return the run's optimiser for the MLP, and another rate and decay for coefficients."""
        if parameter != COEFFICIENTS:
            return run
        return replace(run, lr=self.coefficient_lr, weight_decay=self.coefficient_weight_decay)

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if local.phase == EXCHANGE:
            sent |= {name: local.memory[name] for name in self.kinds}
        return sent

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        inputs = shared["linears.0.weight"]
        length = self.vectors * inputs.shape[0]
        return {
            **{LAST + n: t.expand(clients, *t.shape).clone() for n, t in shared.items()},
            **{n: inputs.new_zeros(clients, self.order + 1, length) for n in self.kinds},
            STRENGTH: inputs.new_full((clients, self.order + 2, clients), 1 / clients),
            HEARD: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
            KNOWN: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        here = list(uploads.clients)
        after = dict(state)
        for name, value in uploads.model.items():
            after[LAST + name] = _with_rows(state[LAST + name], here, value)
        answered = torch.ones(len(here), dtype=torch.bool, device=state[HEARD].device)
        after[HEARD] = _with_rows(state[HEARD], here, answered)
        if all(name in uploads.tensors for name in self.kinds):
            for name in self.kinds:
                after[name] = _with_rows(state[name], here, uploads[name])
            after[KNOWN] = _with_rows(state[KNOWN], here, answered)
            news = (*self.kinds, HEARD, KNOWN)
            if any(not torch.equal(after[n], state[n]) for n in news):
                after[STRENGTH] = self.strength_of_all(after)
        else:  # no new vectors
            known = state[KNOWN].view(-1, 1, 1)
            after[STRENGTH] = torch.where(known, state[STRENGTH], _even(after[HEARD], state))
        return after

    def strength_of_all(self, state: State) -> Tensor:
        """Compute W of every order and of the MLP, `[M, K+2, M]`; row i makes client i's model."""
        found = _even(state[HEARD], state).clone()
        known = state[KNOWN].nonzero().view(-1)
        if len(known) == 0:
            return found
        # Many steps on small matrices: a CPU is faster, and all orders are solved together.
        shape = (len(known), self.order + 1, self.vectors, -1)
        vectors = {n: state[n][known].double().cpu().view(shape) for n in self.kinds}
        each = {n: v.transpose(0, 1).unsqueeze(2) for n, v in vectors.items()}
        orders, mlp = self.solve(each, len(known)), self.solve(vectors, len(known))  # Eq. (18)
        found[known] = 0
        solved = torch.cat([orders.expand(self.order + 1, -1, -1), mlp.unsqueeze(0)])
        found[known.unsqueeze(1), :, known] = solved.permute(1, 2, 0).to(found)
        return found

    def solve(self, vectors: Mapping[str, Tensor], clients: int) -> Tensor:
        """Solve Eq. (7) for W, starting from equal weights of the others, `[…, M, M]`.

        Args:
            vectors: of each kind that is used, `[…, M, orders, t, F]`.
            clients: M.
        """
        example = next(iter(vectors.values()), torch.empty(clients, 0, 0, 0).double())
        strength = alternate(
            [(w, COMPARED[self.compare].of(vectors[name])) for name, w in self.kinds.items()],
            only_others(clients, example).expand(*example.shape[:-4], -1, -1),
            gamma=self.gamma,
            floor=self.floor,
            scale=SCALES[self.scale],
            sweeps=self.sweeps,
        )
        return strength if self.strengths == "spectral" else uniform_self_weight(strength)

    def collaboration(self, state: State) -> Tensor:
        """Return W of the MLP."""
        return state[STRENGTH][:, -1]

    def download(self, state: State, clients: Sequence[int]) -> Message:
        """Mix the models last sent for each client, Eq. (17) and (19)."""
        rows = _rows(state[STRENGTH], clients)
        last = with_prefix(state, LAST)
        mlp = rows[:, -1]
        mixed = {n: (mlp @ flat(t)).view(len(rows), *t.shape[1:]) for n, t in last.items()}
        mixed[COEFFICIENTS] = torch.einsum("ikj,jkf->ikf", rows[:, :-1], last[COEFFICIENTS])
        return as_model(mixed)


def _even(heard: Tensor, state: State) -> Tensor:
    """Return the W that gives every client the plain mean of the models that were sent."""
    share = heard.to(state[STRENGTH].dtype)
    return (share / share.sum()).expand_as(state[STRENGTH])


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor; no copy if these are all."""
    return tensor if list(rows) == list(range(len(tensor))) else tensor[list(rows)]


def _with_rows(tensor: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return the tensor with some rows replaced; the values themselves if these are all."""
    if list(rows) == list(range(len(tensor))):
        return values
    changed = tensor.clone()
    changed[list(rows)] = values
    return changed
