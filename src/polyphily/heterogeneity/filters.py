"""The spectral response of a trained filter: what it does to a signal of frequency λ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

FloatArray = npt.NDArray[np.float64]
Bases = Callable[[sp.csr_array, FloatArray], Iterator[tuple[FloatArray, FloatArray]]]

FREQUENCIES = np.linspace(0, 2, 41)
FEATHER = 1e-9  # size of a signal that is carried along, against that of a column
COLUMNS = 256  # features whose bases are held at a time


def polynomial_response(
    coefficients: FloatArray, frequencies: FloatArray = FREQUENCIES
) -> FloatArray:
    """g(λ) = sum_k γ_k (1-λ)^k for each row of coefficients γ, as in GPR-GNN.

    >>> polynomial_response(np.array([[0.0, 1.0]]), np.array([0.0, 1.0, 2.0])).tolist()
    [[1.0, 0.0, -1.0]]
    """
    orders = np.arange(coefficients.shape[-1])
    response: FloatArray = coefficients @ (1 - frequencies) ** orders[:, None]
    return response


def basis_response(
    bases: Bases,
    propagation: sp.csr_array,
    features: npt.NDArray[np.float32] | sp.csr_array,
    coefficients: FloatArray,
    tau: float,
    frequencies: FloatArray = FREQUENCIES,
) -> FloatArray:
    """The response of UniFilter, sum_k w_k (τ P^k x + (1-τ) u_k) = g(L) x, at every frequency.

    The heterophily basis u_k is a polynomial of P times x that depends on x, so every feature has a
    filter of its own; this is their mean, weighted with |x_f|^2. It is read off the bases
    themselves: the graph is given one more node per frequency λ, with a loop of weight 1 - λ and a
    value so small that no inner product feels it. What the filter makes of that value is g(λ).

    Args:
        bases: pairs (P^k x, u_k) from P and x, for k = 0, 1, ….
        propagation: P, of one client.
        features: x of that client.
        coefficients: w, `[K+1, F]` or `[K+1, 1]`.
        tau: τ.
        frequencies: where to evaluate g.
    """
    nodes, width = features.shape
    extended = sp.csr_array(sp.block_diag([propagation, sp.diags_array(1 - frequencies)]))
    weights = np.broadcast_to(coefficients, (len(coefficients), width))
    total, energy = np.zeros(len(frequencies)), 0.0
    for start in range(0, width, COLUMNS):
        part: Any = features[:, start : start + COLUMNS]
        x = np.asarray(part.toarray() if sp.issparse(part) else part, dtype=np.float64)
        squares = (x * x).sum(axis=0)
        carried = FEATHER * np.sqrt(squares / max(nodes, 1))
        signal = np.concatenate([x, np.broadcast_to(carried, (len(frequencies), x.shape[1]))])
        passed = np.zeros((len(frequencies), x.shape[1]))
        own = weights[:, start : start + COLUMNS]
        for w, (near, far) in zip(own, bases(extended, signal), strict=True):
            passed += w * (tau * near[nodes:] + (1 - tau) * far[nodes:])
        gain = np.divide(passed, carried, out=np.zeros_like(passed), where=carried > 0)
        total += gain @ squares
        energy += float(squares.sum())
    return total / energy if energy else total
