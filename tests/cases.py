"""Federations and simulations that tests of methods and engines build on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from builders import random_graphs
from polyphily.core.method import Method, create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation, load

SIZES = (17, 9, 24, 9)


def federation_of(graphs: Sequence[Graph], seed: int = 0) -> Federation:
    return load(list(graphs), seed=seed, split="0.5,0.25,0.25:client")


def small_federation(
    sizes: Sequence[int] = SIZES, *, seed: int = 0, sparse: bool = False
) -> Federation:
    return federation_of(random_graphs(sizes, seed=seed, sparse=sparse, density=0.2), seed=seed)


def simulate(
    method: str | Method,
    federations: Federation | Sequence[Federation],
    rounds: int = 0,
    **settings: object,
) -> Simulation:
    """A simulation after some rounds; float64 and without dropout unless told otherwise."""
    chosen = {"dtype": "float64", "dropout": 0.0, "input_dropout": 0.0, "hidden": 8, "lr": 0.05}
    chosen |= {"backbone": "gcn", "optimizer": "adam", "weight_decay": 1e-3, "epochs": 2}
    chosen["keep_optimizer"] = False
    chosen |= {"rounds": max(rounds, 1), **settings}
    if isinstance(method, str):
        method = create(method)
    if isinstance(federations, Federation):
        federations = [federations]
    filled = fill(Settings(**chosen), "files", "accuracy")  # type: ignore[arg-type]
    simulation = Simulation(method, federations, filled)
    for _ in range(rounds):
        simulation.advance()
    return simulation


def weights_of(simulation: Simulation) -> dict[str, Tensor]:
    """Everything training produced: what servers and clients hold."""
    return simulation.tensors()


def assert_close(
    first: dict[str, Tensor], second: dict[str, Tensor], relative: float = 1e-9
) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        scale = max(float(value.double().abs().max()), 1e-6) if value.numel() else 1.0
        gap = float((value.double() - second[name].double()).abs().max()) if value.numel() else 0.0
        assert gap <= relative * scale, f"{name}: {gap / scale:.2e} apart"


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not different


def with_noise_outside_training(graph: Graph, classes: int, seed: int = 0) -> Graph:
    """The graph with every label outside the train mask replaced by another one."""
    assert graph.masks is not None
    rng = np.random.default_rng(seed)
    shift = rng.integers(1, classes, graph.num_nodes)
    other = (np.maximum(graph.labels, 0) + shift) % classes
    labels = np.where(graph.masks.train, graph.labels, other)
    return Graph(graph.features, graph.edges, labels, graph.masks, name=graph.name)
