"""FedGSP: clients share low-frequency and complement high-frequency properties of their spectra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, as_model, model_part
from polyphily.core.method import Method, State, Uploads, parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.sparse import flat
from polyphily.nn.unifilter import UniFilter, client_directions

COEFFICIENTS = "coefficients"
HOMOPHILY, HETEROPHILY = "homophily", "heterophily"  # the vectors p and q
STRENGTH, LAST, HEARD, KNOWN = "strength", "last/", "heard", "known"
EXCHANGE, QUIET = "exchange", "quiet"  # rounds in which vectors are sent, and those after
ROUNDING = 1e-10  # share of a number that may be rounding
TINY = 1e-10  # added to e_l, so that it can be divided by
SETTLED = 1e-9  # largest change of W by which the alternation counts as settled


# Collaboration strengths (Section V-B) -----------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """Clients as points, their vectors laid end to end: the paper's p_i and q_i.

    Attributes:
        x: one row per client, `[…, M, d]`; here and below, problems may be stacked in front.
    """

    x: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Points:
        """From `[…, M, orders, t, F]`."""
        return cls(vectors.flatten(-3))

    def spread(self, laplacian: Tensor) -> Tensor:
        """e_l = p_l^T L p_l of every dimension, Eq. (12), `[…, d]`."""
        return (self.x * (laplacian @ self.x)).sum(dim=-2)

    def distances(self, focus: Tensor) -> Tensor:
        """||R p_i - R p_j||^2 of all pairs, R = diag(focus)."""
        return _distances((focus.unsqueeze(-2) * self.x) @ (focus.unsqueeze(-2) * self.x).mT)


@dataclass(frozen=True)
class Subspaces:
    """Clients as the spans of their vectors: P_i = V_i^T V_i stands for p_i, a feature for a dim.

    Singular vectors are comparable between clients only up to sign, order and, where singular
    values are close, rotation. Their span is not touched by any of these.

    Attributes:
        v: the vectors of all clients, orthonormal or zero, `[…, orders, M t, F]`.
        count: t.
    """

    v: Tensor
    count: int

    @classmethod
    def of(cls, vectors: Tensor) -> Subspaces:
        """From `[…, M, orders, t, F]`."""
        return cls(vectors.movedim(-4, -3).flatten(-3, -2), vectors.shape[-2])

    @cached_property
    def products(self) -> Tensor:
        return self.v @ self.v.mT

    def spread(self, laplacian: Tensor) -> Tensor:
        """e_l = sum_ij L_ij <P_i[l], P_j[l]> of every order and feature, `[…, orders F]`."""
        wide = laplacian.repeat_interleave(self.count, -1).repeat_interleave(self.count, -2)
        weighted = self.products * wide.unsqueeze(-3)
        return (self.v * (weighted @ self.v)).sum(dim=-2).flatten(-2)

    def distances(self, focus: Tensor) -> Tensor:
        """||R P_i R - R P_j R||^2 of all pairs, in Frobenius' norm, summed over orders."""
        *stacked, orders, rows, features = self.v.shape
        focus = focus.view(*stacked, orders, 1, features)
        products = ((focus.square() * self.v) @ self.v.mT).square()
        pairs = products.view(*stacked, orders, rows // self.count, self.count, -1, self.count)
        return _distances(pairs.sum(dim=(-5, -3, -1)))


def _distances(products: Tensor) -> Tensor:
    """Squared distances of all pairs, from their inner products."""
    squares = products.diagonal(dim1=-2, dim2=-1)
    both = squares.unsqueeze(-1) + squares.unsqueeze(-2)
    found = both - 2 * products
    found = torch.where(found > ROUNDING * both, found, 0)
    found.diagonal(dim1=-2, dim2=-1).zero_()
    return found


def attention(clients: Points | Subspaces, strength: Tensor, floor: float) -> Tensor:
    """r on the simplex with r_l proportional to 1/e_l, Eq. (11) and (12).

    L is the Laplacian of the symmetrised W. `floor` times the mean of e is added to every e_l.

    Args:
        clients: what they sent of one kind.
        strength: W, `[…, M, M]`.
        floor: 0 is the paper's form, in which a dimension on which all clients agree takes it all.
    """
    both = (strength + strength.mT) / 2
    e = clients.spread(torch.diag_embed(both.sum(dim=-1)) - both).clamp(min=0)
    inverse = (e + floor * e.mean(dim=-1, keepdim=True) + TINY).reciprocal()
    return inverse / inverse.sum(dim=-1, keepdim=True)


def nearest_on_simplex(t: Tensor, gamma: float) -> Tensor:
    """Each row's minimiser of sum_j (t_ij w_ij + gamma w_ij^2) on the simplex, Eq. (14) to (16).

    w_ij = (h_ij - b_i)_+, and Newton's method finds b_i from below: f(b) = mean_j (b-h_ij)_+ - b is
    convex and piecewise linear, so that it ends in at most M steps.
    """
    size = t.shape[-1]
    h = 1 / size - t / (2 * gamma) + t.sum(dim=-1, keepdim=True) / (2 * size * gamma)
    b = torch.zeros_like(h[..., :1])
    for _ in range(size):
        value = (b - h).clamp(min=0).mean(dim=-1, keepdim=True) - b
        slope = (h < b).to(h.dtype).mean(dim=-1, keepdim=True) - 1
        b = b - value / slope
    w = (h - b).clamp(min=0)
    return w / w.sum(dim=-1, keepdim=True)  # rounding only


def same_for_everybody(strength: Tensor) -> Tensor:
    """W with its mean self-weight for each client and the rest of a row shared out equally."""
    size = strength.shape[-1]
    own = strength.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    alike = ((1 - own) / max(size - 1, 1)).expand_as(strength)
    return torch.where(torch.eye(size, dtype=torch.bool, device=own.device), own, alike)


# The method --------------------------------------------------------------------------------------


@register("fedgsp", cite="Yu, Homophily Heterogeneity Matters in Graph Federated Learning, 2025")
@dataclass(frozen=True)
class FedGSP(Method):
    """Personal models: coefficients averaged order by order, the MLP once, each by its own W.

    Clients train a UniFilter, Z = sum_k W^k ∘ (tau H^k + (1-tau) U^k) and an MLP on Z, whatever the
    backbone asked for; two classes have two logits, as everywhere here. They send the first t
    right singular vectors of each basis, p^k of H^k and q^k of U^k; the paper's left ones have a
    length that differs between clients. For every order, and for the MLP with p = [p^0 … p^K], the
    server alternates R, S and W to minimise

        sum_ij (||R p_i - R p_j||^2 - ||S q_i - S q_j||^2) w_ij + gamma w_ij^2,

    rows of W, and the diagonals of R and S, on the simplex. The bases are static, so the vectors
    are: the server solves when it hears from new clients and keeps W otherwise. By default the
    spans of the vectors are compared, distances between different clients are brought to the same
    range, and a client's coefficients are kept near the mixture that it received; the paper has
    none of the three.

    A client that does not answer is present by the model that it sent last. One whose vectors the
    server does not have receives the plain mean of the models that were sent.
    """

    evaluated = "personal"
    selection = "client"
    averaged = "the server mixes the clients' models anew for each of them"

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
        choices=("subspace", "vectors"),
        paper="vectors",
    )
    scale: str = parameter(
        "others",
        "what is brought to one range before the W step: others, distances of each kind between "
        "different clients (0 to 1/M; oneself is like the nearest pair); terms, all distances of "
        "each kind; range, t_ij; none (W is all but even)",
        choices=("others", "terms", "range", "none"),
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
        "weight of ||W - W_received||^2 / 2 in a client's loss: coefficients of the filter stay "
        "near the mixture that it was given",
        symbol="μ",
        paper=0.0,
    )
    strengths: str = parameter(
        "spectral",
        "spectral: the W of the method; control: everybody has the mean self-weight of that W, and "
        "the rest is shared out equally",
        choices=("spectral", "control"),
    )
    sweeps: int = parameter(20, "alternations of R, S and W at most, when new vectors came")
    exchange: int = parameter(
        15,
        "rounds, from the first, in which clients send their singular vectors",
        paper=1_000_000_000,
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

    # At the clients --------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return EXCHANGE if round_index < self.exchange else QUIET

    def whole_graph(self) -> str:
        return "its bases are computed once, from all edges"

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            per_feature = self.coefficients == "feature"
            return UniFilter(shape, self.order, self.tau, per_feature=per_feature)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return True

    @property
    def _kinds(self) -> dict[str, float]:
        """Which vectors matter, and the weight of each kind in the objective."""
        signed = {HOMOPHILY: self.sharing, HETEROPHILY: -self.complementing}
        return {name: weight for name, weight in signed.items() if weight}

    def remember(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """The vectors p^0 … p^K and q^0 … q^K of every client, `[clients, K+1, t F]`."""
        if not self._kinds:
            return {}
        found = client_directions(cohort, self.order, self.vectors)
        kinds = zip((HOMOPHILY, HETEROPHILY), found.unbind(dim=1), strict=True)
        return {name: vectors.contiguous() for name, vectors in kinds if name in self._kinds}

    def loss(self, local: Local) -> Tensor:
        """Cross-entropy, Eq. (3) and (4), computed at train nodes alone; and the leash."""
        cohort = local.cohort
        output: Output = functional_call(local.network, local.params, (cohort, local.draws, True))
        error = F.cross_entropy(output.logits, cohort.train_labels, reduction="none")
        loss = local.train_mean(error)
        if self.leash:
            received = model_part(local.received)[COEFFICIENTS]
            loss = loss + self.leash / 2 * local.drift({COEFFICIENTS: received})
        return loss

    def optimizer_of(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        """Coefficients and MLP have a learning rate and a decay each."""
        if parameter != COEFFICIENTS:
            return run
        return replace(run, lr=self.coefficient_lr, weight_decay=self.coefficient_weight_decay)

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if local.phase == EXCHANGE:
            sent |= {name: local.memory[name] for name in self._kinds}
        return sent

    # At the server ---------------------------------------------------------------------------

    def open(self, shared: Message, clients: int) -> State:
        inputs = shared["linears.0.weight"]
        length = self.vectors * inputs.shape[0]
        return {
            **{LAST + n: t.expand(clients, *t.shape).clone() for n, t in shared.items()},
            **{n: inputs.new_zeros(clients, self.order + 1, length) for n in self._kinds},
            STRENGTH: inputs.new_full((clients, self.order + 2, clients), 1 / clients),
            HEARD: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
            KNOWN: torch.zeros(clients, dtype=torch.bool, device=inputs.device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        here = list(uploads.clients)
        after = dict(state)
        for name, value in uploads.model.items():
            after[LAST + name] = _with_rows(state[LAST + name], here, value)
        everybody = torch.ones(len(here), dtype=torch.bool, device=state[HEARD].device)
        after[HEARD] = _with_rows(state[HEARD], here, everybody)
        if all(name in uploads.tensors for name in self._kinds):
            for name in self._kinds:
                after[name] = _with_rows(state[name], here, uploads[name])
            after[KNOWN] = _with_rows(state[KNOWN], here, everybody)
            news = (*self._kinds, HEARD, KNOWN)
            if any(not torch.equal(after[n], state[n]) for n in news):
                after[STRENGTH] = self._collaboration(after)
        else:  # nobody's vectors are new
            known = state[KNOWN].view(-1, 1, 1)
            after[STRENGTH] = torch.where(known, state[STRENGTH], _even(after[HEARD], state))
        return after

    def _collaboration(self, state: State) -> Tensor:
        """W of every order and of the MLP, `[M, K+2, M]`: row i is how client i's model is made."""
        found = _even(state[HEARD], state).clone()
        known = state[KNOWN].nonzero().view(-1)
        if len(known) == 0:
            return found
        # Small problems of many steps: a CPU is the faster place, and all orders step together.
        shape = (len(known), self.order + 1, self.vectors, -1)
        vectors = {n: state[n][known].double().cpu().view(shape) for n in self._kinds}
        each = {n: v.transpose(0, 1).unsqueeze(2) for n, v in vectors.items()}
        orders, mlp = self.solve(each, len(known)), self.solve(vectors, len(known))  # Eq. (18)
        found[known] = 0
        solved = torch.cat([orders.expand(self.order + 1, -1, -1), mlp.unsqueeze(0)])
        found[known.unsqueeze(1), :, known] = solved.permute(1, 2, 0).to(found)
        return found

    def solve(self, vectors: Message, clients: int) -> Tensor:
        """W of Eq. (7) by alternation, from equal weights of the others, `[…, M, M]`.

        R and S follow from W alone, so W is all there is to keep. Eq. (12) gives S as the minimiser
        of the term that the objective wants large; it is kept as the paper states it.

        Args:
            vectors: of each kind that matters, `[…, M, orders, t, F]`.
            clients: M.
        """
        form = Points if self.compare == "vectors" else Subspaces
        sent = {name: form.of(tensor) for name, tensor in vectors.items()}
        example = next(iter(vectors.values()), torch.empty(clients, 0, 0, 0).double())
        strength = example.new_full((clients, clients), 1 / max(clients - 1, 1))
        strength = strength.fill_diagonal_(float(clients == 1))
        strength = strength.expand(*example.shape[:-4], -1, -1)
        for _ in range(self.sweeps):
            t = torch.zeros_like(strength)
            for name, weight in self._kinds.items():
                distance = sent[name].distances(attention(sent[name], strength, self.floor))
                t += weight * self._scaled(distance)
            renewed = nearest_on_simplex(_unit_range(t) if self.scale == "range" else t, self.gamma)
            change = float((renewed - strength).abs().max())
            strength = renewed
            if change < SETTLED:
                break
        return same_for_everybody(strength) if self.strengths == "control" else strength

    def _scaled(self, distance: Tensor) -> Tensor:
        if self.scale == "others":
            return _between_others(distance)
        return _unit_range(distance) if self.scale == "terms" else distance

    def download(self, state: State, clients: Sequence[int]) -> Message:
        """Each client's own mixture of the models last sent, Eq. (17) and (19)."""
        rows = _rows(state[STRENGTH], clients)
        last = {n.removeprefix(LAST): t for n, t in state.items() if n.startswith(LAST)}
        mlp = rows[:, -1]
        mixed = {n: (mlp @ flat(t)).view(len(rows), *t.shape[1:]) for n, t in last.items()}
        mixed[COEFFICIENTS] = torch.einsum("ikj,jkf->ikf", rows[:, :-1], last[COEFFICIENTS])
        return as_model(mixed)


def _even(heard: Tensor, state: State) -> Tensor:
    """W that gives everybody the plain mean of the models that were sent."""
    share = heard.to(state[STRENGTH].dtype)
    return (share / share.sum()).expand_as(state[STRENGTH])


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor if list(rows) == list(range(len(tensor))) else tensor[list(rows)]


def _with_rows(tensor: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    if list(rows) == list(range(len(tensor))):
        return values
    changed = tensor.clone()
    changed[list(rows)] = values
    return changed


def _unit_range(x: Tensor) -> Tensor:
    spread = x.amax(dim=(-2, -1), keepdim=True) - x.amin(dim=(-2, -1), keepdim=True)
    return x / torch.where(spread > 0, spread, 1)


def _between_others(x: Tensor) -> Tensor:
    """Distances of different clients from 0 to 1/M; the diagonal is 0, like the nearest pair."""
    own = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    nearest = x.masked_fill(own, torch.inf).amin(dim=(-2, -1), keepdim=True)
    more = (x - nearest).masked_fill(own, 0)
    return _unit_range(torch.where(more > ROUNDING * x, more, 0)) / x.shape[-1]
