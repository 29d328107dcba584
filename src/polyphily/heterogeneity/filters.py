"""The spectral response of a trained filter: its factor on a signal of frequency λ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

FloatArray = npt.NDArray[np.float64]
Bases = Callable[[sp.csr_array, FloatArray], Iterator[tuple[FloatArray, FloatArray]]]

FREQUENCIES = np.linspace(0, 2, 41)
COLUMNS = 256  # number of features whose bases are in memory at a time
MOMENTS = 64  # number of Chebyshev moments, for a resolution of 0.05 in frequency
NEGLIGIBLE = 1e-3  # energy densities below this share of their mean count as zero


def polynomial_response(
    coefficients: FloatArray, frequencies: FloatArray = FREQUENCIES
) -> FloatArray:
    """Compute g(λ) = sum_k γ_k (1-λ)^k for each row of coefficients γ, as in GPR-GNN.

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
    """Compute the response of UniFilter, z = sum_k w_k (τ P^k x + (1-τ) u_k), at each frequency.

    The heterophily basis u_k is a polynomial of P times x that depends on x, so every feature has
    its own filter. The result is their joint effect on the energy of the features at a frequency;
    see `observed_response`. The mean of the polynomials would be meaningless: at frequencies where
    a feature has no energy, its polynomial is arbitrary and can be large.

    Args:
        bases: returns the pairs (P^k x, u_k) for k = 0, 1, … from P and x.
        propagation: P of one client.
        features: x of that client.
        coefficients: w, `[K+1, F]` or `[K+1, 1]`.
        tau: τ.
        frequencies: where to evaluate g.
    """
    width = features.shape[1]
    weights = np.broadcast_to(coefficients, (len(coefficients), width))

    def filtered() -> Iterator[tuple[FloatArray, FloatArray]]:
        for start in range(0, width, COLUMNS):
            columns = slice(start, start + COLUMNS)
            part: Any = features[:, columns]
            x = np.asarray(part.toarray() if sp.issparse(part) else part, dtype=np.float64)
            z = np.zeros_like(x)
            for w, (near, far) in zip(weights[:, columns], bases(propagation, x), strict=True):
                z += w * (tau * near + (1 - tau) * far)
            yield x, z

    return observed_response(propagation, filtered(), frequencies)


def observed_response(
    propagation: sp.csr_array,
    signals: Iterable[tuple[FloatArray, FloatArray]],
    frequencies: FloatArray = FREQUENCIES,
    moments: int = MOMENTS,
) -> FloatArray:
    """Compute g(λ) = sum_f x_f^T E(λ) z_f / sum_f x_f^T E(λ) x_f, the best-fitting factor at λ.

    E(λ) projects on frequencies around λ, by the kernel polynomial method with Jackson damping. Its
    window is about π / `moments` wide. NaN where the signals have no energy.

    Args:
        propagation: P = I - L, with eigenvalues in [-1, 1].
        signals: pairs of signals x_f, as columns, and the same signals filtered, z_f.
        frequencies: where to evaluate g.
        moments: the number of Chebyshev polynomials of P.
    """
    found = np.zeros((2, moments))
    for before, after in signals:
        last, now = propagation @ before, before  # T_-1 = T_1
        for m in range(moments):
            found[:, m] += np.vdot(now, after), np.vdot(now, before)
            last, now = now, 2 * (propagation @ now) - last
    order, turn = np.arange(moments), np.pi / (moments + 1)
    damping = (moments - order + 1) * np.cos(turn * order) + np.sin(turn * order) / np.tan(turn)
    found *= damping * np.where(order == 0, 1, 2)
    angles = np.arccos(np.clip(1 - frequencies, -1, 1))
    passed, energy = found @ np.cos(order[:, None] * angles)
    present = energy > NEGLIGIBLE * found[1, 0]  # the mean of the density over angles
    response: FloatArray = np.full_like(energy, np.nan)
    np.divide(passed, energy, out=response, where=present)
    return response
