"""What a run uses of edges: refusals, notes, equal engines, and that it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyphily
from cases import assert_close, simulate, weights_of
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation
from polyphily.runs.prediction import bytes_to_predict
from polyphily.runtime.edges import edge_notes, prediction_notes
from polyphily.runtime.network import build_network, complete
from polyphily.testing.examples import (
    CLASSES,
    FEATURES,
    federation_of,
    random_graph,
    random_graphs,
    usual_backbone,
    with_edge_attributes,
)

SIZES = (17, 9, 24)


def attributed(**kinds: Any) -> Federation:
    """Clients whose edges have attributes, but for the last."""
    *most, last = random_graphs(SIZES, density=0.3)
    return federation_of([*(with_edge_attributes(g, **kinds) for g in most), last])


def filled(method: str, types: tuple[str, ...] | None = None, /, **settings: Any) -> Settings:
    """Return settings as they are filled in for data with these types of edges."""
    return complete(Settings(**settings), create(method), "files", "accuracy", relations=types)


def notes_of(method: str, data: Federation, **settings: Any) -> list[str]:
    own = filled(method, data.relations, **settings)
    return edge_notes(create(method), own, data.clients)


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedgsp", {"direction": "in"}, "fedgsp needs symmetric edges: its polynomial filters"),
        ("s2fgl", {"direction": "out"}, "s2fgl needs symmetric edges: its spectra"),
        ("fedavg", {"direction": "in", "backbone": "unifilter"}, "unifilter cannot read edges so"),
        (
            "fedavg",
            {"direction": "separate", "backbone": "acm-gcn"},
            "acm-gcn cannot read edges so; use gcn, sage, gat, res-gcn, res-sage, res-gat or rgcn",
        ),
        ("polyphony", {"direction": "separate"}, "choir cannot read edges so; leave it out"),
        ("fedavg", {"relations": "a", "backbone": "gcn"}, "gcn does not tell types of edges apart"),
    ],
)
def test_what_cannot_be_used_is_refused(method: str, settings: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        filled(method, **settings)
    assert words in str(caught.value)


def test_relations_must_be_those_of_the_data() -> None:
    assert filled("fedavg", ("a", "b"), backbone="rgcn").relations == "a,b"
    assert filled("fedavg", ("a", "b"), backbone="rgcn", relations="b").relations == "b"
    assert filled("fedavg", ("a", "b"), backbone="gcn").relations == ""
    with pytest.raises(UserError, match="unknown relation 'c'"):
        filled("fedavg", ("a", "b"), backbone="rgcn", relations="c")
    with pytest.raises(UserError, match="have no types"):
        filled("fedavg", (), backbone="rgcn", relations="c")


def test_the_network_has_weights_for_every_relation_and_direction() -> None:
    for direction, count in (("both", 2), ("separate", 4)):
        own = filled("fedavg", ("a", "b"), backbone="rgcn", direction=direction)
        network = build_network(create("fedavg"), own, FEATURES, CLASSES, 0)
        assert dict(network.named_parameters())["convs.0.bases"].shape[1] == count


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_off_for_methods_that_do_not_use_them(method: str) -> None:
    own = create(method)
    settings = filled(method, backbone=usual_backbone(own))
    if not own.weighted_edges:
        assert not settings.edge_weights
    elif settings.backbone == "gcn":
        assert settings.edge_weights


# Notes -------------------------------------------------------------------------------------------


def test_notes_say_what_is_not_used() -> None:
    data = attributed()
    plain = notes_of("fedavg", data, backbone="gcn")
    assert plain == [
        "edges of 'client-2' have no weights: each counts as 1",
        "edges have a direction, but nodes receive from both ends: --direction in, out or "
        "separate uses it",
        "edges have types ('family', 'trade', 'work'), but gcn does not tell them apart: "
        "--backbone rgcn does",
    ]
    assert notes_of("fedavg", data, backbone="rgcn", direction="separate") == [
        "edges of 'client-2' have no weights: each counts as 1",
        "edges of 'client-2' have no types: they are a relation of their own",
    ]
    spa = notes_of("fedspa", data)
    assert spa[0].startswith("edges have weights, but fedspa does not use them")
    assert "fedspa does not use it: it sums" in spa[1]
    assert spa[2].endswith("acm-gcn does not tell them apart")
    (weights, *_) = notes_of("fedavg", data, backbone="unifilter")
    assert "unifilter does not use them: each counts as 1; mlp, gcn" in weights
    left = notes_of("fedavg", data, backbone="rgcn", relations="family,untyped", direction="in")
    assert left[-1] == "--relations leaves out edges of 'trade', 'work'"


def test_there_are_no_notes_for_plain_edges() -> None:
    data = federation_of(random_graphs(SIZES, density=0.3))
    for backbone in ("gcn", "unifilter", "rgcn"):
        assert notes_of("fedavg", data, backbone=backbone) == []
    assert notes_of("fedavg", data, backbone="gcn", direction="in") == [
        "--direction in: no edges have a direction, so it has no effect"
    ]


def test_notes_are_in_the_summary() -> None:
    result = polyphily.run("fedavg", attributed(relations=()), rounds=1, backbone="gcn")
    assert any("have a direction" in note for note in result.summary["notes"])
    used = polyphily.run(
        "fedavg", attributed(relations=()), rounds=1, backbone="gcn", direction="in"
    )
    assert not any("direction" in note for note in used.summary["notes"])


# Engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_weighted_edges_alike(method: str) -> None:
    """Stacked equals sequential, in one direction if the method can."""
    own = create(method)
    backbone = usual_backbone(own)
    options = {"backbone": backbone, "edge_weights": own.weighted_edges}
    try:
        filled(method, direction="in", backbone=backbone)
        options["direction"] = "in"
    except UserError:
        assert own.needs_symmetric_edges() or backbone in ("unifilter", "disengcn")
    data = attributed(relations=())
    one, other = (
        simulate(method, data, rounds=2, engine=engine, **options)
        for engine in ("stacked", "sequential")
    )
    assert_close(weights_of(one), weights_of(other))


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gat", "res-gat", "rgcn"])
@pytest.mark.parametrize("more", [{}, {"label_inputs": 0.5}, {"sample": "3,3", "batch": 4}])
def test_separate_directions_train_alike(backbone: str, more: Any) -> None:
    data = attributed()
    names = ",".join(data.relations) if backbone == "rgcn" else ""
    settings = {"backbone": backbone, "direction": "separate", "relations": names, "layers": 2}
    one, other = (
        simulate("fedavg", data, rounds=2, engine=engine, **settings, **more)
        for engine in ("stacked", "sequential")
    )
    assert_close(weights_of(one), weights_of(other))


def test_seeds_side_by_side_equal_single_runs() -> None:
    data = [attributed(), federation_of(attributed().clients, seed=1)]
    settings = {"backbone": "rgcn", "direction": "separate", "relations": "family,trade,untyped"}
    both = simulate("fedavg", data, rounds=2, **settings)
    for seed, own in enumerate(data):
        alone = simulate("fedavg", own, rounds=2, **settings)
        assert_close(both.states[seed], alone.states[0])


# Does it matter? ---------------------------------------------------------------------------------

NODES, DEGREE = 150, 12


def random_edges(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return features of two kinds, 1 or -1, and arcs from random sources to random targets."""
    kind = rng.choice([-1.0, 1.0], NODES)
    return kind, rng.integers(0, NODES, (2, NODES * DEGREE // 2))


def by_direction(rng: np.random.Generator) -> Graph:
    """Return a graph in which a node's label is whether most of its in-neighbours are 1."""
    kind, edges = random_edges(rng)
    edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
    total = np.bincount(edges[1], kind[edges[0]], minlength=NODES)
    return Graph.build(kind[:, None], edges, total > 0, directed=True)


def by_weight(rng: np.random.Generator) -> Graph:
    """Return a graph in which the label is the sign of the weighted sum, and weights vary much."""
    kind, edges = random_edges(rng)
    edges = np.unique(np.sort(edges[:, edges[0] != edges[1]], axis=0), axis=1)
    weights = np.where(rng.random(edges.shape[1]) < 0.15, 10.0, 0.1)
    total = np.bincount(edges[1], kind[edges[0]] * weights, minlength=NODES)
    total += np.bincount(edges[0], kind[edges[1]] * weights, minlength=NODES)
    return Graph.build(kind[:, None], edges, total > 0, edge_weights=weights)


def by_type(rng: np.random.Generator) -> Graph:
    """Return a graph in which the label is the majority among neighbours of one type of two."""
    kind, edges = random_edges(rng)
    edges = np.unique(np.sort(edges[:, edges[0] != edges[1]], axis=0), axis=1)
    types = rng.integers(0, 2, edges.shape[1])
    own = edges[:, types == 0]
    total = np.bincount(own[1], kind[own[0]], minlength=NODES)
    total += np.bincount(own[0], kind[own[1]], minlength=NODES)
    return Graph.build(
        kind[:, None], edges, total > 0, edge_types=types, relations=("trust", "other")
    )


@pytest.mark.parametrize(
    ("make", "with_it", "without"),
    [
        (by_direction, {"direction": "in"}, {"direction": "both"}),
        (by_direction, {"direction": "separate"}, {"direction": "both"}),
        (by_weight, {}, {"edge_weights": False}),
        (by_type, {"backbone": "rgcn"}, {}),
    ],
    ids=["in", "separate", "weights", "types"],
)
def test_it_pays_where_only_it_carries_the_label(
    make: Callable[[np.random.Generator], Graph], with_it: Any, without: Any
) -> None:
    rng = np.random.default_rng(0)
    data = polyphily.load([make(rng) for _ in range(3)], split="0.6,0.2,0.2:client")
    usual = {"rounds": 15, "backbone": "sage", "hidden": 16, "lr": 0.03, "dropout": 0.0}
    used, unused = (
        polyphily.run("fedavg", data, **usual | own).summary["best_val"]["test"]["accuracy"]
        for own in (with_it, without)
    )
    assert used > unused + 0.1


# Prediction --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "gcn"},
        {"backbone": "gat", "direction": "in"},
        {"backbone": "gcn", "direction": "separate"},
        {"backbone": "rgcn", "direction": "separate"},
    ],
    ids=str,
)
def test_new_graphs_are_predicted_by_the_names_of_their_relations(
    settings: Any, tmp_path: Path
) -> None:
    data = federation_of([with_edge_attributes(g) for g in random_graphs(SIZES, density=0.3)])
    polyphily.run("fedavg", data, rounds=1, hidden=8, out=tmp_path / "run", **settings)
    run = polyphily.open_run(tmp_path / "run")
    new = replace(with_edge_attributes(random_graph(120, density=0.012, seed=5)), masks=None)
    whole = run.predict_proba(new).to_numpy()
    model = run.model()
    needed = bytes_to_predict(new, model.module, new.num_nodes, new.edges.shape[1])
    blocks = run.predict_proba(new, memory=f"{0.6e-3 * needed:.6f}kB").to_numpy()
    np.testing.assert_allclose(blocks, whole, atol=1e-6)
    # The same edges, with relations in another order.
    assert new.edge_types is not None
    bits = [(new.edge_types >> r) & 1 for r in range(3)]
    turned = replace(
        new, edge_types=bits[2] | bits[0] << 1 | bits[1] << 2, relations=("work", "family", "trade")
    )
    np.testing.assert_allclose(run.predict_proba(turned).to_numpy(), whole, atol=1e-6)
    ones = replace(new, edge_weights=np.ones_like(new.edge_weights))
    assert np.abs(run.predict_proba(ones).to_numpy() - whole).max() > 1e-4


def test_notes_say_if_edges_differ_from_those_of_training() -> None:
    settings = Settings(backbone="rgcn", direction="in", relations="family,trade")
    graph = with_edge_attributes(random_graph(20))
    assert prediction_notes(settings, graph) == [
        "edges of relations that were not trained with are left out: 'work'"
    ]
    undirected = with_edge_attributes(random_graph(20), directed=False, relations=("family",))
    (note,) = prediction_notes(settings, undirected)
    assert note.startswith("edges have no direction, but the model was trained with --direction in")
