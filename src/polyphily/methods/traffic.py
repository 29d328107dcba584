"""What a method sends, read off a real round on a tiny federation, to the last tensor."""

from __future__ import annotations

import numpy as np

from polyphily.core.local import Message
from polyphily.core.method import Method
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation, train_locally
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import load

FEATURES, HIDDEN, CLASSES = 13, 11, 5  # sizes that can be told apart in a shape
_NAMES = {FEATURES: "features", HIDDEN: "hidden", CLASSES: "classes"}


def trace(method: Method) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(uploaded, downloaded): name and shape of every tensor of one client in the second round."""
    federation = load([_tiny_graph(seed) for seed in range(2)])
    settings = Settings(rounds=2, epochs=1, hidden=HIDDEN, backbone="gcn")
    simulation = Simulation(method, [federation], fill(settings, "files", "accuracy"))
    simulation.advance()
    clients = range(len(federation))
    down = method.download(simulation.states[0], clients)
    up, _, _ = train_locally(
        method,
        simulation.network,
        simulation.cohort,
        down,
        simulation.memory,
        simulation.optimizer,
        [1] * len(federation),
        1,
    )
    return _rows(up), _rows(down)


def _tiny_graph(seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    nodes = 40
    return Graph.build(
        rng.normal(size=(nodes, FEATURES)).astype(np.float32),
        rng.integers(0, nodes, size=(2, 120)),
        np.arange(nodes) % CLASSES,
        name=f"client-{seed}",
    )


def _rows(message: Message) -> list[dict[str, str]]:
    return [{"name": name, "shape": _shape(tuple(t.shape[1:]))} for name, t in message.items()]


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(_NAMES.get(size, str(size)) for size in shape) or "one number"
