"""Small trained federations for the tests of the audit."""

from __future__ import annotations

from typing import Any

from polyphily.core.method import Method, create
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import load
from polyphily.runtime.network import complete

HOMOPHILIC = "csbm:nodes=150,features=8,homophily=0.9,gap=0,degree=6"
UNINFORMATIVE = "csbm:nodes=150,features=8,homophily=0.5,gap=0,degree=6"


def trained(
    method: str | Method,
    rounds: int = 2,
    data: str = HOMOPHILIC,
    *,
    values: dict[str, Any] | None = None,
    **settings: Any,
) -> Simulation:
    """Train two clients of 150 nodes each for some rounds."""
    federation = load(data, clients=2)
    chosen = create(method, values) if isinstance(method, str) else method
    wanted = Settings(**{"rounds": rounds, "hidden": 16, **settings})
    simulation = Simulation(
        chosen, [federation], complete(wanted, chosen, federation.kind, "accuracy")
    )
    for _ in range(rounds):
        simulation.advance()
    return simulation
