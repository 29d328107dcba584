"""Federations and simulations that tests of methods and engines build on."""

from __future__ import annotations

from torch import Tensor

from polyphily.engines.simulation import Simulation
from polyphily.testing.comparing import assert_close, assert_same_bits
from polyphily.testing.examples import (
    SIZES,
    federation_of,
    simulate,
    small_federation,
    usual_backbone,
)
from polyphily.testing.examples import (
    with_other_labels_outside_training as with_noise_outside_training,
)

__all__ = [
    "SIZES",
    "assert_close",
    "assert_same_bits",
    "federation_of",
    "simulate",
    "small_federation",
    "usual_backbone",
    "weights_of",
    "with_noise_outside_training",
]


def weights_of(simulation: Simulation) -> dict[str, Tensor]:
    """Return everything that training produced: what servers and clients hold."""
    return simulation.tensors()
