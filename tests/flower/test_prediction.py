"""Models of sites: they predict what those of a simulation do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.core.method import create
from polyphily.errors import UserError
from polyphily.flower.site_files import SiteState
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import load
from polyphily.runs.decision import decide
from polyphily.runs.models import SavedModel
from polyphily.runs.opened import load_model, open_run
from polyphily.runs.prediction import class_scores
from polyphily.runs.run import Execution


@pytest.mark.parametrize("method", ["fedavg", "fedper", "polyphony"])
def test_sites_and_simulation_predict_new_nodes_alike(method: str, tmp_path: Path) -> None:
    """From the bundles of sites, from the server's folder, and from a simulation."""
    data = load("csbm:nodes=120,features=8", clients=3)  # enough validation nodes to decide on
    plan = plan_for(data, method)
    coordinate(plan, Wires(sites_of(data, tmp_path)), tmp_path / "server", 3).go()
    simulated = Execution(create(method), [data], plan.settings, None).go()
    graph = data.clients[0]
    rng = np.random.default_rng(0)
    fresh = rng.normal(size=(4, graph.num_features)).astype(np.float32)
    links = np.stack([graph.num_nodes + np.arange(4), np.arange(4)])
    new = Graph.build(
        np.concatenate([graph.features, fresh]),
        np.concatenate([graph.edges, links], axis=1),
        np.concatenate([graph.labels, np.full(4, UNLABELLED)]),
    )
    for which in ("best", "last"):
        expected = simulated.predictions(new, "client-1", which=which).probabilities
        site = open_run(tmp_path / "client-1").predictions(new, which=which).probabilities
        np.testing.assert_allclose(site, expected, rtol=0, atol=1e-5)
        if method == "fedavg":
            shared = load_model(tmp_path / "server", which=which)
            theirs = load_model(tmp_path / "client-1", which=which)
            assert shared.params.keys() == theirs.params.keys()
            assert all((theirs.params[n] == t).all() for n, t in shared.params.items())
    if method != "fedavg":
        with pytest.raises(UserError, match="the models of this run are at its sites"):
            load_model(tmp_path / "server")


def test_a_site_decides_on_its_own_validation_nodes(tmp_path: Path) -> None:
    data = federation()
    coordinate(plan_for(data, "fedavg"), Wires(sites_of(data, tmp_path)), tmp_path / "run").go()
    graph = data.clients[2]
    assert graph.masks is not None
    best, last = (
        SavedModel.load(SiteState(tmp_path / "client-2", "a-run").model(which))
        for which in ("best", "last")
    )
    val = graph.masks.val
    logits, labels = class_scores(best, graph)[val], torch.from_numpy(graph.labels[val])
    assert best.decision == decide(logits, labels, best.classes)
    assert last.decision is None
    assert (best.client, best.number, best.which) == ("client-2", 2, "best")
