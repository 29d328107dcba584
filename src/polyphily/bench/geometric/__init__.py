"""Methods as most code implements them: a loop over clients, each with torch_geometric models.

These are the baselines for the stacked engine. In a round every client in turn loads a state
dictionary, trains with an optimiser of its own and returns its state dictionary, and the server
mixes these name by name. The loops compute what the methods of this library compute, in the
methods' default forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polyphily.bench.geometric.fedavg import FedAvgLoop
from polyphily.bench.geometric.fedgta import FedGTALoop
from polyphily.bench.geometric.fedpub import FedPubLoop
from polyphily.bench.geometric.fedsage import FedSagePlusLoop
from polyphily.bench.geometric.training import Training
from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.graphs.loading import Federation
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedgta import FedGTA
from polyphily.methods.fedpub import FedPub
from polyphily.methods.fedsage import FedSagePlus


class Loop(Protocol):
    """A federation whose clients are trained one after the other.

    Attributes:
        round: the number of complete rounds.
    """

    round: int

    def advance(self) -> None:
        """Train one round."""

    def accuracy(self) -> float:
        """Return the accuracy of the models as the server sends them, on all test nodes."""


Build = Callable[[Federation, Training, Method], Loop]


def _fedavg(federation: Federation, training: Training, method: Method) -> Loop:
    return FedAvgLoop(federation, training)


def _fedgta(federation: Federation, training: Training, method: Method) -> Loop:
    assert isinstance(method, FedGTA)
    return FedGTALoop(federation, training, method)


def _fedpub(federation: Federation, training: Training, method: Method) -> Loop:
    assert isinstance(method, FedPub)
    return FedPubLoop(federation, training, method)


def _fedsage_plus(federation: Federation, training: Training, method: Method) -> Loop:
    assert isinstance(method, FedSagePlus)
    return FedSagePlusLoop(federation, training, method)


LOOPS: dict[type[Method], tuple[str, Build]] = {
    FedAvg: ("gcn", _fedavg),
    FedGTA: ("gcn", _fedgta),
    FedPub: ("gcn", _fedpub),
    FedSagePlus: ("sage", _fedsage_plus),
}


def backbone_of_loop(method: Method) -> str | None:
    """Return the backbone that a method's loop trains; None if there is no such loop."""
    found = LOOPS.get(type(method))
    return found[0] if found else None


def make_loop(federation: Federation, method: Method, settings: Settings) -> Loop | None:
    """Return the loop of a method; None if there is none for these settings.

    Args:
        federation: the clients.
        method: with its hyperparameters.
        settings: with every setting filled in.
    """
    found = LOOPS.get(type(method))
    if found is None or settings.backbone != found[0] or settings.layers != 2:
        return None
    return found[1](federation, Training.of(settings), method)


__all__ = [
    "FedAvgLoop",
    "FedGTALoop",
    "FedPubLoop",
    "FedSagePlusLoop",
    "Loop",
    "Training",
    "backbone_of_loop",
    "make_loop",
]
