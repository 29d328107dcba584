"""`--degree-inputs`: networks see how many neighbours a node has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import polyphily
from cases import assert_close, simulate, small_federation
from polyphily.core.messages import model_part
from polyphily.core.method import METHODS
from polyphily.core.settings import from_mapping
from polyphily.graphs.degrees import COLUMNS, with_degrees
from polyphily.graphs.graph import Graph, Masks
from polyphily.runtime.client import cohort_of
from polyphily.testing.examples import FEATURES, with_clients

DEGREES = {"degree_inputs": True}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_as_if_degrees_were_features(method: str, sparse: bool) -> None:
    federation = small_federation(sparse=sparse)
    by_hand = with_clients(federation, [with_degrees(graph) for graph in federation.clients])
    asked, given = simulate(method, federation, 2, **DEGREES), simulate(method, by_hand, 2)
    for found, wanted in zip(asked.states, given.states, strict=True):
        assert_close(found, wanted)
    assert_close(asked.memory, given.memory)
    torch.testing.assert_close(asked.predict(asked.trained()), given.predict(given.trained()))


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_degrees_have_weights_that_are_trained(engine: str) -> None:
    before, after = (
        simulate("fedavg", small_federation(), rounds, engine=engine, backbone="gcn", **DEGREES)
        for rounds in (0, 2)
    )
    first, last = (model_part(s.states[0])["convs.0.weight"] for s in (before, after))
    assert last.shape[0] == FEATURES + COLUMNS
    used = first[FEATURES:] != last[FEATURES:]
    assert used.any(dim=1).sum() >= 2  # columns that no node has are not trained


def test_a_graph_that_occurs_several_times_is_widened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds and rates that train in one pass have the same graphs."""
    made: list[Graph] = []

    def counted(graph: Graph) -> Graph:
        made.append(graph)
        return with_degrees(graph)

    monkeypatch.setattr("polyphily.runtime.client.with_degrees", counted)
    first, second, _ = small_federation((9, 12, 7)).clients
    keys = [(0, 0), (0, 1), (1, 0)]
    cohort = cohort_of(from_mapping(DEGREES), [first, second, first], keys, 3)
    assert [id(graph) for graph in made] == [id(first), id(second)]
    assert cohort.graphs[0] is cohort.graphs[2]


def hubs(seed: int) -> Graph:
    """Return a graph whose classes differ in nothing but the number of neighbours."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, 60)
    hub = np.flatnonzero(labels)
    ends = np.stack([draw.choice(hub, 600), draw.integers(0, 60, 600)])
    train, val, test = np.split(draw.permutation(60), [30, 40])
    masks = Masks(*(np.isin(np.arange(60), part) for part in (train, val, test)))
    graph = Graph.build(np.ones((60, 3)), ends, labels, masks=masks)
    return replace(graph, name=f"client-{seed}")


def test_they_tell_classes_apart_that_features_do_not() -> None:
    federation = polyphily.load([hubs(seed) for seed in range(3)])
    options: dict[str, Any] = {"rounds": 15, "backbone": "sage", "hidden": 16, "lr": 0.03}
    scores = [
        polyphily.run("fedavg", federation, degree_inputs=asked, **options).summary["best_val"][
            "test"
        ]["accuracy"]
        for asked in (False, True)
    ]
    assert scores[0] < 0.75
    assert scores[1] > 0.9
