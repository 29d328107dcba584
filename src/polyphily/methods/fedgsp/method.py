"""FedGSP: clients share low-frequency and complement high-frequency properties of their spectra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

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
    rows_of,
    statistic,
    with_prefix,
    with_rows,
)
from polyphily.core.method import Method, parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.search import Range
from polyphily.methods.fedgsp.collaboration import (
    COMPARED,
    SCALES,
    Term,
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
ALTERNATED, UNSETTLED = "alternated", "unsettled"  # W as the alternation left it, and if it ended
EXCHANGE, QUIET = "exchange", "quiet"  # rounds in which vectors are sent, and those after
FOREVER = 1_000_000_000  # more rounds than any run has


@register("fedgsp", cite="Yu, Homophily Heterogeneity Matters in Graph Federated Learning, 2025")
@dataclass(frozen=True)
class FedGSP(Method):
    """Personal models: coefficients averaged order by order, the MLP once, each by its own W.

    Clients train a UniFilter: Z = sum_k W^k ∘ (tau H^k + (1-tau) U^k), and an MLP on Z. They send
    the first t right singular vectors of each basis, p^k of H^k and q^k of U^k. For every order,
    and for the MLP with p = [p^0 … p^K], the server minimises over W and r

        J = sum_ij w_ij t_ij + gamma sum_ij w_ij^2 + a c_P f ||r||^2,
        t_ij = a c_P (||R P_i - R P_j||^2 - n_P) - b c_Q (||S Q_i - S Q_j||^2 - n_Q),   t_ii = 0,

    with the rows of W, and the diagonal r of R, on the simplex. P_i and Q_i are the projections on
    the spans of the vectors, a is `sharing` and b is `complementing`. S weighs all features
    equally. The constants are those of the first W: c and n bring the distances between different
    clients to 0 … 1/M (`scale`), and f is `floor` times the mean over features l of
    e_l = sum_ij w_ij ||P_i[l] - P_j[l]||^2. R and W are minimised in turn, each exactly, so that J
    never rises. A client mixes the models by `self_weight` I + (1 - `self_weight`) W.

    As printed (`paper=on`), the alternation minimises no single function, because S minimises a
    term that the objective maximises, and W is 1/M to about 1e-12: the method averages plainly.
    `code=on` is what the authors' code computes, without its defects.

    The bases are static, and so are the vectors: the server continues the alternation in each round
    in which vectors arrive, until it has converged, and keeps W otherwise. A client that does not
    answer is represented by the model that it sent last. A client whose vectors the server does not
    have receives the plain mean of the models that were sent.
    """

    evaluated = "personal"
    selection = "client"
    backbone = "unifilter"
    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "As printed, t_ij is about 1e-12, because r and s are on the simplex of thousands of "
        "dimensions: W is 1/M, and the method is plain averaging.",
        "The first t left singular vectors have a length that differs between clients, so that "
        "Eq. (7) cannot be computed; the right ones are sent, of the centred bases, with the entry "
        "of the largest magnitude positive.",
        "Eq. (12) gives S as the minimiser of a term that Eq. (7) maximises; with paper=on it is "
        "computed as printed.",
        "Eq. (9) holds for a symmetric W, and W is not; the Laplacian is D - (W + W^T) / 2.",
        "Eq. (11) and (12) divide by zero where all clients agree; 1e-10 is added to e.",
        "The text calls w_i a column of W, and Eq. (17) uses a row; it is a row.",
        "Neither the first W nor the number of alternations is given; W starts from equal weights "
        "of the other clients, as in the authors' code, and alternates until it converges.",
        "The form of the coefficients W^k is not given; each order and feature has one, as in the "
        "authors' code.",
        "Eq. (4) prints one layer with ReLU; here ReLU follows each layer of the MLP but the last.",
        "The heterophily bases are in an appendix that is not public; they are those of UniFilter.",
    )

    order: int = parameter(10, "highest order of the bases", symbol="K")
    tau: float = parameter(
        0.95, "share of the homophily bases in the mixture", symbol="τ", search=Range(0.05, 0.99)
    )
    vectors: int = parameter(3, "singular vectors that are sent of each basis", symbol="t")
    gamma: float = parameter(
        1.0,
        "weight of w_ij^2: the larger, the more even is W",
        symbol="γ",
        search=Range(0.1, 10.0, log=True),
    )
    sharing: float = parameter(
        1.0,
        "weight of the homophily distances; 1 in the paper, 0 turns sharing off",
        code=1.2,
    )
    complementing: float = parameter(
        1.0,
        "weight of the heterophily distances; 1 in the paper, 0 turns complementing off",
        code=0.25,
    )
    self_weight: float = parameter(
        0.0, "share of its own model that a client keeps; the rest is mixed by W"
    )
    compare: str = parameter(
        "subspace",
        "what of two clients is compared: subspace, the span of their singular vectors; vectors, "
        "the vectors one by one, which depend on sign and order; angles, the cosine of the mean "
        "angle between vectors, the nearest matched first",
        choices=tuple(COMPARED),
        paper="vectors",
        code="angles",
    )
    attention: str = parameter(
        "homophily",
        "which vectors have learnt weights of their dimensions: homophily, R alone, and S is even; "
        "both, R and S",
        choices=("homophily", "both"),
        paper="both",
    )
    scale: str = parameter(
        "others",
        "what is brought to one range: others, distances of each kind between different clients (0 "
        "to 1/M, and 0 to oneself); terms, all distances of each kind (0 to 1); none",
        choices=tuple(SCALES),
        paper="none",
    )
    floor: float = parameter(
        1.0,
        "share of the mean e_l that is added to each: bounds the attention of dimensions on which "
        "clients agree",
        paper=0.0,
    )
    overall: str = parameter(
        "orders",
        "whose vectors make W of the MLP: orders, those of all orders; bases, those of the bases "
        "of the orders 1 to K side by side, which make W of order 0, too",
        choices=("orders", "bases"),
        code="bases",
    )
    leash: float = parameter(
        0.2,
        "weight of the proximal term ||W - W_received||^2 / 2 on the coefficients of the filter",
        symbol="μ",
        paper=0.0,
        search=Range(0.01, 2.0, log=True),
    )
    strengths: str = parameter(
        "spectral",
        "spectral: the W of the method; control: every client has the mean self-weight of that W, "
        "and the others share the rest equally",
        choices=("spectral", "control"),
    )
    sweeps: int = parameter(
        100, "alternations of R, S and W at most, in a round in which vectors arrive", code=1
    )
    exchange: int = parameter(
        15,
        "rounds, from the first, in which clients send their singular vectors",
        paper=FOREVER,
        code=15,
    )
    coefficients: str = parameter(
        "feature",
        "one coefficient per order and feature, or one per order",
        symbol="W^k",
        choices=("feature", "order"),
    )
    coefficient_lr: float = parameter(
        0.05,
        "learning rate of the coefficients; that of the MLP is the run's",
        search=Range(0.005, 0.2, log=True),
    )
    coefficient_weight_decay: float = parameter(
        0.0, "weight decay of the coefficients; that of the MLP is the run's"
    )

    @property
    def kinds(self) -> dict[str, float]:
        """The vectors that are used, and the weight of each kind in the objective."""
        signed = {HOMOPHILY: self.sharing, HETEROPHILY: -self.complementing}
        return {name: weight for name, weight in signed.items() if weight}

    @property
    def learnt(self) -> list[str]:
        """The vectors whose dimensions have learnt weights."""
        return [name for name in self.kinds if self.attention == "both" or name == HOMOPHILY]

    @property
    def joint(self) -> bool:
        """True if vectors of the bases side by side are sent."""
        return self.overall == "bases" and self.order > 0

    @property
    def problems(self) -> list[int]:
        """Which of the W that are solved makes order 0, …, order K and the MLP."""
        return [-1, *range(self.order), -1] if self.joint else list(range(self.order + 2))

    @property
    def rows_sent(self) -> int:
        """How many bases a client sends vectors of, of each kind (see `client_directions`)."""
        return 2 * self.order if self.joint else self.order + 1

    def without_effect(self) -> Mapping[str, str]:
        about_distances = ("compare", "attention", "scale", "floor", "overall", "vectors")
        about_w = (*about_distances, "gamma", "strengths", "sweeps")
        if not self.kinds:
            reason = "nothing is compared; set sharing or complementing above 0"
            return dict.fromkeys((*about_w, "exchange"), reason)
        if self.exchange < 1:
            reason = "no vectors are sent, and W is even; set exchange above 0"
            return dict.fromkeys((*about_w, "sharing", "complementing", "self_weight"), reason)
        if self.self_weight == 1:
            reason = "clients keep their own models; set self_weight below 1"
            return dict.fromkeys((*about_w, "sharing", "complementing"), reason)
        idle: dict[str, str] = {}
        if not self.learnt:
            reason = "no weights of dimensions are learnt; set sharing above 0 or attention=both"
            idle |= dict.fromkeys(("floor", "sweeps"), reason)
        if HETEROPHILY not in self.kinds:
            idle["attention"] = "heterophily is not compared; set complementing above 0"
        if self.order == 0:
            idle["overall"] = "there is one order; set order above 0"
        return idle

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
        shape = (self.rows_sent, self.vectors * sizes.features)
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

    def needs_symmetric_edges(self) -> str:
        return "its polynomial filters are those of a symmetric matrix"

    def needs_whole_graph(self) -> str:
        return "its bases are computed once, from all edges"

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """Compute the vectors p and q of every client and order, `[clients, K+1, t F]`."""
        if not self.kinds:
            return {}
        found = client_directions(cohort, self.order, self.vectors, joint=self.joint)
        both = zip((HOMOPHILY, HETEROPHILY), found.unbind(dim=1), strict=True)
        return {name: vectors.contiguous() for name, vectors in both if name in self.kinds}

    def loss(self, local: Local) -> Tensor:
        """Compute the cross-entropy of train nodes, Eq. (3) and (4), and the proximal term."""
        cohort = local.cohort
        output: Output = functional_call(local.network, local.params, (cohort, local.draws, True))
        loss = local.train_mean(local.train_errors(output.logits))
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
        matrices = len(set(self.problems))
        return {
            **{LAST + n: t.expand(clients, *t.shape).clone() for n, t in shared.items()},
            **{n: inputs.new_zeros(clients, self.rows_sent, length) for n in self.kinds},
            STRENGTH: inputs.new_full((clients, self.order + 2, clients), 1 / clients),
            ALTERNATED: inputs.new_zeros(matrices, clients, clients, dtype=torch.float64),
            UNSETTLED: torch.zeros(matrices, dtype=torch.bool, device=inputs.device),
            HEARD: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
            KNOWN: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        here = list(uploads.clients)
        after = dict(state)
        for name, value in uploads.model.items():
            after[LAST + name] = with_rows(state[LAST + name], here, value)
        answered = torch.ones(len(here), dtype=torch.bool, device=state[HEARD].device)
        after[HEARD] = with_rows(state[HEARD], here, answered)
        if all(name in uploads.tensors for name in self.kinds):
            for name in self.kinds:
                after[name] = with_rows(state[name], here, uploads[name])
            after[KNOWN] = with_rows(state[KNOWN], here, answered)
            news = (*self.kinds, HEARD, KNOWN)
            if any(not torch.equal(after[n], state[n]) for n in news):
                after |= self.solved(after, afresh=True)
            elif self.unsettled(state):
                after |= self.solved(after, afresh=False)
        else:  # no new vectors
            known = state[KNOWN].view(-1, 1, 1)
            after[STRENGTH] = torch.where(known, state[STRENGTH], _even(after[HEARD], state))
        return after

    def unsettled(self, state: State) -> int:
        """Return for how many orders, and the MLP, the alternation has not converged."""
        return int(state[UNSETTLED].sum()) if UNSETTLED in state else 0

    def solved(self, state: State, *, afresh: bool) -> State:
        """Alternate, and return the entries of the state that change.

        `strength` is W of every order and of the MLP, `[M, K+2, M]`; row i makes client i's model.
        """
        found = _even(state[HEARD], state).clone()
        known = state[KNOWN].nonzero().view(-1)
        if len(known) == 0:
            return {STRENGTH: found}
        # Many steps on small matrices: a CPU is faster, and all orders are solved together.
        shape = (len(known), self.rows_sent, self.vectors, -1)
        vectors = {n: state[n][known].double().cpu().view(shape) for n in self.kinds}
        own = self.order if self.joint else self.order + 1  # orders that have a W of their own
        each = {n: v[:, :own].transpose(0, 1).unsqueeze(2) for n, v in vectors.items()}
        whole = {n: v[:, own:] if self.joint else v for n, v in vectors.items()}
        square = (slice(None), known.unsqueeze(1), known)
        if afresh:
            start = only_others(len(known), torch.empty((), dtype=torch.float64))
            start = start.expand(own + 1, -1, -1)
        else:
            start = state[ALTERNATED][square].cpu()
        orders, settled = self.solve(each, start[:-1])
        mlp, settled_too = self.solve(whole, start[-1])  # Eq. (18)
        w = torch.cat([orders, mlp.unsqueeze(0)])
        found[known] = 0
        found[known.unsqueeze(1), :, known] = (
            self.mixture(w)[self.problems].permute(1, 2, 0).to(found)
        )
        alternated = torch.zeros_like(state[ALTERNATED])
        alternated[square] = w.to(alternated)
        unsettled = ~torch.cat([settled, settled_too.unsqueeze(0)]).to(found.device)
        return {STRENGTH: found, ALTERNATED: alternated, UNSETTLED: unsettled}

    def solve(self, vectors: Mapping[str, Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
        """Solve Eq. (7) for W; return it, and which problems have converged.

        Args:
            vectors: of each kind that is used, `[…, M, orders, t, F]`.
            start: the W to start from, `[…, M, M]`.
        """
        first = only_others(start.shape[-1], start).expand_as(start)
        terms = [
            Term.of(
                weight,
                COMPARED[self.compare].of(vectors[name]),
                first,
                scale=self.scale,
                floor=self.floor,
                learnt=name in self.learnt,
            )
            for name, weight in self.kinds.items()
        ]
        return alternate(terms, start, gamma=self.gamma, sweeps=self.sweeps)

    def mixture(self, strength: Tensor) -> Tensor:
        """Return the weights by which models are mixed, from W, `[…, M, M]`."""
        if self.strengths == "control":
            strength = uniform_self_weight(strength)
        own = torch.eye(strength.shape[-1], dtype=strength.dtype)
        return self.self_weight * own + (1 - self.self_weight) * strength

    def remarks(self, state: State) -> Sequence[str]:
        count = self.unsettled(state)
        if count == 0:
            return ()
        return (
            f"W had not converged for {count} of {len(state[UNSETTLED])} problems (orders and MLP) "
            "at the end of their exchange; a larger gamma settles it",
        )

    def collaboration(self, state: State) -> Tensor:
        """Return W of the MLP."""
        return state[STRENGTH][:, -1]

    def download(self, state: State, clients: Sequence[int]) -> Message:
        """Mix the models last sent for each client, Eq. (17) and (19)."""
        rows = rows_of(state[STRENGTH], clients)
        last = with_prefix(state, LAST)
        mlp = rows[:, -1]
        mixed = {n: (mlp @ flat(t)).view(len(rows), *t.shape[1:]) for n, t in last.items()}
        mixed[COEFFICIENTS] = torch.einsum("ikj,jkf->ikf", rows[:, :-1], last[COEFFICIENTS])
        return as_model(mixed)


def _even(heard: Tensor, state: State) -> Tensor:
    """Return the W that gives every client the plain mean of the models that were sent."""
    share = heard.to(state[STRENGTH].dtype)
    return (share / share.sum()).expand_as(state[STRENGTH])
