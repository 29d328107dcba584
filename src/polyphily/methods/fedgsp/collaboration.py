"""Collaboration strengths of FedGSP (Section V-B): who takes how much of whose model.

All functions take problems stacked in front: `[…, M, d]`, `[…, M, M]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

ROUNDING = 1e-10  # share of a number that may be rounding error
TINY = 1e-10  # added to e_l before a division
SMALLEST = torch.finfo(torch.float64).tiny  # norm of a zero vector, for a division
SETTLED = 1e-9  # largest change of W at which the alternation has converged


# What the clients sent ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """Clients as points, their vectors concatenated: the paper's p_i and q_i.

    Attributes:
        x: one row per client, `[…, M, d]`.
    """

    x: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Points:
        """Make points of vectors `[…, M, orders, t, F]`."""
        return cls(vectors.flatten(-3))

    @property
    def dimensions(self) -> int:
        return self.x.shape[-1]

    def spread(self, laplacian: Tensor) -> Tensor:
        """Compute e_l = p_l^T L p_l of every dimension, Eq. (11), `[…, d]`."""
        return (self.x * (laplacian @ self.x)).sum(dim=-2)

    def distances(self, focus: Tensor) -> Tensor:
        """Compute ||R p_i - R p_j||^2 of all pairs, R = diag(focus)."""
        scaled = focus.unsqueeze(-2) * self.x
        return _distances(scaled @ scaled.mT)


@dataclass(frozen=True)
class Angles(Points):
    """Clients as points that are compared by angles, as in the authors' code.

    Attributes:
        count: t. A client has t vectors, each over all orders: `x` is `[…, M, t · orders · F]`.
    """

    count: int

    @classmethod
    def of(cls, vectors: Tensor) -> Angles:
        """Make points of vectors `[…, M, orders, t, F]`."""
        return cls(vectors.transpose(-3, -2).flatten(-3), vectors.shape[-2])

    def distances(self, focus: Tensor) -> Tensor:
        """Compute 1 - cos(mean angle) of all pairs.

        The angles are those between the vectors of R p_i and of R p_j, matched greedily: the
        nearest two first, then the nearest two of the rest.
        """
        *stacked, clients, _ = self.x.shape
        t = self.count
        rows = (focus.unsqueeze(-2) * self.x).reshape(*stacked, clients * t, self.dimensions // t)
        rows = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=SMALLEST)
        cosines = (rows @ rows.mT).view(*stacked, clients, t, clients, t)
        left = cosines.transpose(-3, -2).flatten(-2)  # […, M, M, t t]
        total = left.new_zeros(left.shape[:-1])
        place = torch.arange(t * t, device=left.device)
        for _ in range(t):
            nearest, at = left.max(dim=-1, keepdim=True)
            total += nearest.squeeze(-1).clamp(-1, 1).arccos()
            used = (place // t == at // t) | (place % t == at % t)
            left = left.masked_fill(used, -torch.inf)
        found: Tensor = 1 - (total / t).cos()
        found.diagonal(dim1=-2, dim2=-1).zero_()
        return found


@dataclass(frozen=True)
class Subspaces:
    """Clients as the spans of their vectors: P_i = V_i^T V_i replaces p_i, a feature a dimension.

    Singular vectors are comparable between clients only up to sign, order and, if singular values
    are close, rotation. Their span does not depend on these.

    Attributes:
        v: the vectors of all clients, orthonormal or zero, `[…, orders, M t, F]`.
        count: t.
    """

    v: Tensor
    count: int

    @classmethod
    def of(cls, vectors: Tensor) -> Subspaces:
        """Make subspaces of vectors `[…, M, orders, t, F]`."""
        return cls(vectors.movedim(-4, -3).flatten(-3, -2), vectors.shape[-2])

    @property
    def dimensions(self) -> int:
        return self.v.shape[-3] * self.v.shape[-1]

    @cached_property
    def products(self) -> Tensor:
        return self.v @ self.v.mT

    def spread(self, laplacian: Tensor) -> Tensor:
        """Compute e_l = sum_ij L_ij <P_i[l], P_j[l]> of every order and feature."""
        wide = laplacian.repeat_interleave(self.count, -1).repeat_interleave(self.count, -2)
        weighted = self.products * wide.unsqueeze(-3)
        return (self.v * (weighted @ self.v)).sum(dim=-2).flatten(-2)

    def distances(self, focus: Tensor) -> Tensor:
        """Compute ||R P_i - R P_j||_F^2 of all pairs, summed over orders."""
        *stacked, orders, rows, features = self.v.shape
        focus = focus.view(*stacked, orders, 1, features)
        products = self.products * ((focus.square() * self.v) @ self.v.mT)
        pairs = products.view(*stacked, orders, rows // self.count, self.count, -1, self.count)
        return _distances(pairs.sum(dim=(-5, -3, -1)))


Clients: TypeAlias = Points | Subspaces
COMPARED: dict[str, type[Clients]] = {"subspace": Subspaces, "vectors": Points, "angles": Angles}


def _distances(products: Tensor) -> Tensor:
    """Compute the squared distances of all pairs from their inner products."""
    squares = products.diagonal(dim1=-2, dim2=-1)
    both = squares.unsqueeze(-1) + squares.unsqueeze(-2)
    found = both - 2 * products
    found = torch.where(found > ROUNDING * both, found, 0)
    found.diagonal(dim1=-2, dim2=-1).zero_()
    return found


# The range of distances --------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """How distances are brought to one range: factor · (distance - offset) between two clients.

    The distance of a client to itself stays 0.
    """

    factor: Tensor
    offset: Tensor

    def of(self, distances: Tensor) -> Tensor:
        moved = distances - self.offset
        return self.factor * moved.diagonal_scatter(
            torch.zeros_like(moved.diagonal(dim1=-2, dim2=-1)), dim1=-2, dim2=-1
        )


def between_others(x: Tensor) -> Range:
    """Bring distances between different clients to [0, 1/M]: oneself is as near as the nearest."""
    own = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    nearest = x.masked_fill(own, torch.inf).amin(dim=(-2, -1), keepdim=True)
    farthest = x.amax(dim=(-2, -1), keepdim=True)
    return Range(_reciprocal(farthest - nearest, farthest) / x.shape[-1], nearest)


def up_to_one(x: Tensor) -> Range:
    """Bring all distances to [0, 1]: oneself is nearer than all others."""
    farthest = x.amax(dim=(-2, -1), keepdim=True)
    return Range(_reciprocal(farthest, farthest), torch.zeros_like(farthest))


def unscaled(x: Tensor) -> Range:
    one = x.new_ones(*x.shape[:-2], 1, 1)
    return Range(one, torch.zeros_like(one))


SCALES: dict[str, Callable[[Tensor], Range]] = {
    "others": between_others,
    "terms": up_to_one,
    "none": unscaled,
}


def _reciprocal(x: Tensor, whole: Tensor) -> Tensor:
    """Compute 1 / x; 0 where x is nothing but rounding error of `whole`."""
    return torch.where(x > ROUNDING * whole, 1 / x, 0)


# The objective -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One kind of vectors in the objective: how far w_ij t_ij depends on it.

    Attributes:
        weight: of the kind, positive or negative.
        clients: what they sent of the kind.
        range: of the distances.
        floor: f, added to every e_l, `[…, 1]`; None if all dimensions count equally.
    """

    weight: float
    clients: Clients
    range: Range
    floor: Tensor | None

    @classmethod
    def of(
        cls,
        weight: float,
        clients: Clients,
        start: Tensor,
        *,
        scale: str,
        floor: float,
        learnt: bool,
    ) -> Term:
        """Fix the constants of a term: range and floor are those of the first W.

        Args:
            weight: of the kind in t_ij.
            clients: what they sent of it.
            start: the first W, `[…, M, M]`.
            scale: a name in `SCALES`.
            floor: f as a share of the mean of e.
            learnt: whether R follows W, or weighs all dimensions equally.
        """
        f = floor * spread(clients, start).mean(dim=-1, keepdim=True) + TINY if learnt else None
        plain = cls(weight, clients, unscaled(start), f)
        first = clients.distances(plain.focus(start))
        return cls(weight, clients, SCALES[scale](first), f)

    def focus(self, strength: Tensor) -> Tensor:
        """Compute r on the simplex with r_l proportional to 1 / (e_l + f), Eq. (11) and (12)."""
        if self.floor is None:
            d = self.clients.dimensions
            return strength.new_full((*strength.shape[:-2], d), 1 / d)
        inverse = (spread(self.clients, strength) + self.floor).reciprocal()
        return inverse / inverse.sum(dim=-1, keepdim=True)

    def distances(self, strength: Tensor) -> Tensor:
        """Compute the weighted distances with the R of this W."""
        return self.weight * self.range.of(self.clients.distances(self.focus(strength)))


def spread(clients: Clients, strength: Tensor) -> Tensor:
    """Compute e_l of every dimension, with the Laplacian of the symmetrised W."""
    both = (strength + strength.mT) / 2
    return clients.spread(torch.diag_embed(both.sum(dim=-1)) - both).clamp(min=0)


def nearest_on_simplex(t: Tensor, gamma: float) -> Tensor:
    """Minimise sum_j (t_ij w_ij + gamma w_ij^2) on the simplex for each row, Eq. (14) to (16).

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
    return w / w.sum(dim=-1, keepdim=True)  # removes rounding error


# The alternation ---------------------------------------------------------------------------------


def alternate(
    terms: Sequence[Term], start: Tensor, *, gamma: float, sweeps: int
) -> tuple[Tensor, Tensor]:
    """Alternate R, S and W of Eq. (7) until W converges.

    R and S follow from W alone, so that only W is kept. When a step turns back on the last one and
    is not shorter, only half of each step is taken from then on, then a quarter, and so on: this
    ends cycles. A descent, in which every step lowers one objective, does not turn back.

    Args:
        terms: the kinds of vectors in the objective.
        start: the first W.
        gamma: weight of w_ij^2.
        sweeps: alternations at most.

    Returns:
        W `[…, M, M]`, and which of the problems have converged `[…]`.
    """
    fixed = sum((term.distances(start) for term in terms if term.floor is None), 0 * start)
    learnt = [term for term in terms if term.floor is not None]
    if not learnt:
        return nearest_on_simplex(fixed, gamma), start.new_ones(start.shape[:-2]) > 0
    strength, last, share = start, torch.zeros_like(start), start.new_ones(*start.shape[:-2], 1, 1)
    for _ in range(sweeps):
        t = sum((term.distances(strength) for term in learnt), fixed)
        best = nearest_on_simplex(t, gamma)
        step = best - strength
        turned = _total(step * last) < 0
        share = torch.where(turned & (_total(step**2) >= _total(last**2)), share / 2, share)
        strength, last = torch.lerp(strength, best, share), step
        settled = step.abs().amax(dim=(-2, -1)) < SETTLED
        if bool(settled.all()):
            break
    return strength, settled


def _total(x: Tensor) -> Tensor:
    return x.sum(dim=(-2, -1), keepdim=True)


def only_others(clients: int, like: Tensor) -> Tensor:
    """Return the first W: all other clients equally, `[clients, clients]`."""
    strength = like.new_full((clients, clients), 1 / max(clients - 1, 1))
    return strength.fill_diagonal_(float(clients == 1))


def uniform_self_weight(strength: Tensor) -> Tensor:
    """Replace every row of W by the mean self-weight and equal weights of the others."""
    size = strength.shape[-1]
    own = strength.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    others = ((1 - own) / max(size - 1, 1)).expand_as(strength)
    return torch.where(torch.eye(size, dtype=torch.bool, device=own.device), own, others)
