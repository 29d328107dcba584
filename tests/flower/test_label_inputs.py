"""`--label-inputs` at a site: which labels of a file its model sees when it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from flower.federations import Wires, coordinate, federation, graph_arrays, plan_for, sites_of
from polyphily.core.method import METHODS
from polyphily.flower.site import Site
from polyphily.flower.site_files import SiteState
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.runs.models import LAST, SavedModel
from polyphily.runs.prediction import predict, with_model

NEW = 3  # nodes that were added since training


def train(place: Path, method: str = "fedavg", **options: object) -> Path:
    """Train three sites; return the file of the first site's last model."""
    data = federation()
    plan = plan_for(data, method, rounds=2, **options)
    coordinate(plan, Wires(sites_of(data, place)), place / "run").go()
    return SiteState(place / "client-0", "a-run").model(LAST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("labels"), label_inputs=0.5)


@pytest.fixture
def graph() -> Graph:
    return federation().clients[0]


def predicted(model: Path, place: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the class probabilities of every node in a file."""
    np.savez(place / "graph.npz", **arrays)
    return predict(SavedModel.load(model), place / "graph.npz").probabilities


def split(graph: Graph) -> dict[str, np.ndarray]:
    """Return a graph's split as arrays of a file."""
    masks = graph.masks
    assert masks is not None
    return {"train_mask": masks.train, "val_mask": masks.val, "test_mask": masks.test}


def larger(graph: Graph, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return a graph with new nodes, the i-th of which is joined to the i-th node."""
    rng = np.random.default_rng(0)
    fresh = rng.normal(size=(NEW, graph.num_features)).astype(np.float32)
    links = np.stack([graph.num_nodes + np.arange(NEW), np.arange(NEW)])
    return {
        "x": np.concatenate([graph.features, fresh]),
        "edge_index": np.concatenate([graph.edges, links], axis=1),
        "y": np.concatenate([labels, np.full(NEW, UNLABELLED)]),
    }


def moved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.abs(first - second).max(axis=1) > 1e-6)


def reached(graph: Graph, nodes: np.ndarray, hops: int = 2) -> set[int]:
    """Return the nodes within some hops of others, these included."""
    found = set(nodes.tolist())
    for _ in range(hops):
        found |= set(graph.edges[1][np.isin(graph.edges[0], list(found))].tolist())
    return found


def test_labels_in_the_file_change_what_is_predicted_near_them(
    model: Path, graph: Graph, tmp_path: Path
) -> None:
    arrays = graph_arrays(graph)
    known = predicted(model, tmp_path, arrays)
    changed = moved(known, predicted(model, tmp_path, {**arrays, "y": 1 - graph.labels}))
    assert len(changed) > graph.num_nodes / 2
    one = graph.labels.copy()
    one[7] = 1 - one[7]
    near = moved(known, predicted(model, tmp_path, {**arrays, "y": one}))
    assert set(near.tolist()) - {7}
    assert set(near.tolist()) <= reached(graph, np.array([7]))


def test_a_node_without_a_label_is_seen_without_one(
    model: Path, graph: Graph, tmp_path: Path
) -> None:
    """An unknown label is not the same as either class."""
    arrays, tables = graph_arrays(graph), []
    for label in (UNLABELLED, 0, 1):
        labels = graph.labels.copy()
        labels[7] = label
        tables.append(predicted(model, tmp_path, {**arrays, "y": labels}))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert len(moved(tables[first], tables[second]))


def test_new_nodes_are_predicted_from_the_labels_of_their_neighbours(
    model: Path, graph: Graph, tmp_path: Path
) -> None:
    labels = graph.labels.copy()
    before = predicted(model, tmp_path, larger(graph, labels))
    assert len(before) == graph.num_nodes + NEW
    labels[1] = 1 - labels[1]  # the neighbour of the second new node
    after = predicted(model, tmp_path, larger(graph, labels))
    assert graph.num_nodes + 1 in moved(before, after)


def test_a_graph_without_any_label_is_predicted(model: Path, graph: Graph, tmp_path: Path) -> None:
    found = predicted(model, tmp_path, larger(graph, np.full(graph.num_nodes, UNLABELLED)))
    assert np.isfinite(found).all()
    assert len(moved(found, predicted(model, tmp_path, larger(graph, graph.labels))))


def test_labels_outside_the_train_nodes_of_a_split_are_not_seen(
    model: Path, graph: Graph, tmp_path: Path
) -> None:
    arrays, parts = graph_arrays(graph), split(graph)
    before = predicted(model, tmp_path, {**arrays, **parts})
    outside = np.where(parts["train_mask"], graph.labels, 1 - graph.labels)
    after = predicted(model, tmp_path, {**arrays, **parts, "y": outside})
    assert np.array_equal(before, after)
    inside = np.where(parts["train_mask"], 1 - graph.labels, graph.labels)
    assert len(moved(before, predicted(model, tmp_path, {**arrays, **parts, "y": inside})))
    without = predicted(model, tmp_path, arrays)  # all labels are known
    assert len(moved(before, without))


# Methods in general ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {"label_inputs": 0.5}), *((name, {}) for name in sorted(METHODS))],
)
def test_a_file_with_the_split_of_training_is_predicted_as_the_site_did(
    method: str, options: dict[str, float], graph: Graph, tmp_path: Path
) -> None:
    file = train(tmp_path, method, **options)
    saved, data = SavedModel.load(file), federation()
    own = sites_of(data, tmp_path)["client-0"].graph
    plan = plan_for(data, method, rounds=2, **options)
    trainer = Site("client-0", own, tmp_path / "client-0")._prepare(plan)
    view = with_model(trainer.clients, saved)
    expected = trainer.clients.predict(view).softmax(dim=1).numpy()
    found = predicted(file, tmp_path, {**graph_arrays(graph), **split(graph)})
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "used"),
    [
        *((name, False) for name in ("fedavg", "fedper", "local", "fedhero", "fedath", "s2fgl")),
        ("fedspa", True),  # tells kinds of edges by known labels
        ("fedgsp", True),  # its backbone estimates homophily from them
    ],
)
def test_only_networks_that_use_known_labels_see_those_in_a_file(
    method: str, used: bool, graph: Graph, tmp_path: Path
) -> None:
    file = train(tmp_path, method)
    arrays = graph_arrays(graph)
    unknown = predicted(file, tmp_path, {**arrays, "y": np.full(graph.num_nodes, UNLABELLED)})
    assert bool(len(moved(unknown, predicted(file, tmp_path, arrays)))) == used
