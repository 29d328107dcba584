"""A site by itself: its files, its memory, its predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flower.federations import Wires, coordinate, federation, graph_arrays, plan_for, sites_of
from polyphily.core.method import METHODS
from polyphily.errors import UserError
from polyphily.flower.plan import Schema
from polyphily.flower.site import Site
from polyphily.flower.site_files import KEPT, SiteState
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import Parcel, WireError
from polyphily.graphs.graph import Graph
from polyphily.runs.models import BEST, LAST, SavedModel
from polyphily.runs.prediction import predict, with_model

NODES = "id,label,age,income\n1,good,0.5,1\n2,bad,0.1,2\n3,,0.2,3\n4,good,0.4,4\n"
EDGES = "source,target\n1,2\n1,4\n2,3\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "bank"
    folder.mkdir()
    (folder / "nodes.csv").write_text(NODES)
    (folder / "edges.csv").write_text(EDGES)
    return folder


def test_a_graph_tells_its_own_people_what_it_is(table: Path) -> None:
    found = SiteGraph.read(table)
    assert found.schema.features == ("age", "income")
    facts = found.summary()
    assert facts["labels"] == {"bad": 1, "good": 2}
    assert (facts["nodes"], facts["edges"], facts["labelled"]) == (4, 3, 3)
    assert facts["homophily"] == pytest.approx(1 / 2)  # of 1-2 and 1-4; node 3 has no label


def test_columns_and_labels_follow_the_agreement(table: Path) -> None:
    found = SiteGraph.read(table)
    age, income = found.schema.columns
    wanted = Schema(("income", "age"), 2, ("good", "other", "bad"), (income, age))
    graph = found.aligned(wanted)
    assert graph.table is not None
    assert [column.name for column in graph.table] == ["income", "age"]
    assert graph.table[0].values.tolist() == [1, 2, 3, 4]
    assert graph.labels.tolist() == [0, 2, -1, 0]
    with pytest.raises(UserError, match="missing 'rent', not agreed on 'income'"):
        found.aligned(replace(wanted, features=("age", "rent")))
    with pytest.raises(UserError, match="labels that were not agreed on: 'bad'"):
        found.aligned(replace(wanted, classes=("good",)))


def test_two_graphs_are_one_too_many(tmp_path: Path, table: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "nodes.csv").write_text(NODES)
    (other / "edges.csv").write_text(EDGES)
    with pytest.raises(UserError, match="holds 2 graphs"):
        SiteGraph.read(tmp_path)


@pytest.mark.parametrize("kind", ["eval", "", None, 3])
def test_only_known_messages_are_answered(kind: object, tmp_path: Path) -> None:
    site = next(iter(sites_of(federation(), tmp_path).values()))
    with pytest.raises(WireError, match="does not know"):
        site.answer(Parcel({"kind": kind}))


@pytest.mark.parametrize("facts", [{}, {"round": 1}, {"round": 1, "base": -1, "best": 0}])
def test_a_round_without_its_numbers_is_refused(facts: dict, tmp_path: Path) -> None:
    data = federation()
    site = next(iter(sites_of(data, tmp_path).values()))
    plan = plan_for(data, "fedavg").to_json()
    with pytest.raises(WireError, match="has no number"):
        site.answer(Parcel({"kind": "round", "plan": plan, **facts}))


def test_a_site_that_is_not_in_the_plan_does_not_train(tmp_path: Path) -> None:
    data = federation()
    site = next(iter(sites_of(data, tmp_path).values()))
    plan = plan_for(data, "fedavg")
    others = replace(plan, sites=("somebody", "else"))
    with pytest.raises(UserError, match="is not part of run"):
        site.answer(Parcel({"kind": "prepare", "plan": others.to_json()}))


def test_files_of_old_rounds_are_dropped(tmp_path: Path) -> None:
    data = federation()
    sites = sites_of(data, tmp_path)
    coordinate(plan_for(data, "fedper", rounds=12), Wires(sites), tmp_path / "run").go()
    kept = sorted(p.name for p in SiteState(tmp_path / "client-0", "a-run").memories.glob("round*"))
    assert len(kept) == KEPT + 1
    assert kept[-1] == "round-000012.safetensors"


def test_a_site_that_lost_its_memory_begins_anew_and_says_so(tmp_path: Path) -> None:
    data = federation()
    site = sites_of(data, tmp_path)["client-0"]
    plan = plan_for(data, "local", rounds=5)
    facts = {"kind": "round", "plan": plan.to_json(), "round": 5, "base": 4, "best": 0}
    reply = site.answer(Parcel(facts))
    assert reply.facts["note"] == "no memory of round 4 here: begun anew"


@pytest.fixture(scope="module", params=sorted(METHODS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of each method."""
    place = tmp_path_factory.mktemp(request.param)
    data = federation()
    coordinate(plan_for(data, request.param), Wires(sites_of(data, place)), place / "run").go()
    return place


def _trainer(place: Path, which: str) -> tuple[SavedModel, Graph]:
    file = SiteState(place / "client-0", "a-run").model(which)
    return SavedModel.load(file), federation().clients[0]


@pytest.mark.parametrize("which", [LAST, BEST])
def test_predictions_are_those_of_the_trained_model(trained: Path, which: str) -> None:
    """As the site scored it when it trained, although the labels are hidden now.

    Polyphony has the labels of train nodes among its inputs: these are known.
    """
    saved, graph = _trainer(trained, which)
    hidden = {**graph_arrays(graph), "y": np.full(graph.num_nodes, -1)}
    plan = plan_for(federation(), saved.method)
    if saved.method == "polyphony":
        split = sites_of(federation(), trained)["client-0"]._prepare(plan)
        labels = split.clients.cohort.labels.numpy()
        hidden["y"] = labels
    np.savez(trained / "graph.npz", **hidden)
    table = predict(saved, trained / "graph.npz").table()
    assert len(table) == graph.num_nodes
    assert np.allclose(table.filter(like="probability").sum(axis=1), 1)
    site = Site("client-0", sites_of(federation(), trained)["client-0"].graph, trained / "client-0")
    trainer = site._prepare(plan)
    expected = trainer.clients.predict(with_model(trainer.clients, saved)).argmax(dim=1).numpy()
    assert (table["class"].to_numpy() == expected.astype(str)).all()


def test_predictions_reach_nodes_that_were_added_since(trained: Path) -> None:
    saved, graph = _trainer(trained, LAST)
    more = graph.num_nodes + 3
    rng = np.random.default_rng(0)
    fresh = rng.normal(size=(3, graph.num_features)).astype(np.float32)
    links = np.array([[more - 3, more - 2, more - 1], [0, 1, 2]])
    np.savez(
        trained / "larger.npz",
        x=np.concatenate([graph.features, fresh]),
        edge_index=np.concatenate([graph.edges, links], axis=1),
        y=np.concatenate([graph.labels, [-1, -1, -1]]),
    )
    table = predict(saved, trained / "larger.npz").table()
    assert len(table) == more
    assert set(table["class"]) <= {"0", "1"}
