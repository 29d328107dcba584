"""Predictions for new graphs: whole and in blocks, from tables, with encodings and decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyphily
from polyphily.core.method import create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Graph, Masks
from polyphily.nn.backbones import BACKBONES
from polyphily.runs.decision import Decision
from polyphily.runs.models import SavedModel
from polyphily.runs.prediction import (
    _ball,
    blocks,
    bytes_to_predict,
    class_scores,
    predict,
    write,
)

RING = 80  # nodes; a long ring has neighbourhoods that are far from the whole


def ring(*, weighted: bool = False, directed: bool = False, typed: bool = False) -> Graph:
    """A ring with a few chords and dead ends, a third of whose labels are known."""
    rng = np.random.default_rng(3)
    nodes = np.arange(RING)
    edges = np.stack([nodes, (nodes + 1) % RING])
    chords = np.stack([nodes[::9], (nodes[::9] + 4) % RING])
    edges = np.concatenate([edges, chords], axis=1)[:, :-1]
    size = edges.shape[1]
    labels = np.where(nodes % 3 == 0, rng.integers(0, 2, RING), UNLABELLED)
    return Graph.build(
        rng.normal(size=(RING, 5)).astype(np.float32),
        edges,
        labels,
        edge_weights=rng.uniform(0.5, 2, size) if weighted else None,
        directed=directed,
        edge_types=rng.integers(0, 2, size) if typed else None,
        relations=("x", "y") if typed else (),
    )


def model_of(backbone: str, method: str = "fedavg", seed: int = 0, **options: Any) -> SavedModel:
    """A model with random parameters."""
    chosen: dict[str, Any] = {"hidden": 8, "layers": 2, "hops": 3, "backbone": backbone, **options}
    settings = fill(Settings(**chosen), "files", "accuracy", dense=True)
    model = SavedModel(method, {}, settings, 5, ("no", "yes"), {}, network=backbone)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        n: p.detach()[0] + 0.5 * (n != "mix") * torch.randn(p.shape[1:], generator=generator)
        for n, p in model.module.named_parameters()
    }
    return replace(model, tensors=tensors)


LOCAL = sorted(
    name for name in BACKBONES if (model_of(name).module.reach is not None and name != "rgcn")
)


def limit_for(model: SavedModel, graph: Graph, share: float = 0.4) -> str:
    """A memory that holds a part of a graph."""
    whole = bytes_to_predict(graph, model.module, graph.num_nodes, graph.edges.shape[1])
    return f"{int(share * whole)}B"


def test_most_backbones_can_be_predicted_in_blocks() -> None:
    assert {"gcn", "sage", "gat", "gpr-gnn", "acm-gcn", "mlp", "res-gcn", "choir"} <= set(LOCAL)
    assert model_of("unifilter").module.reach is None


@pytest.mark.parametrize("backbone", LOCAL)
def test_blocks_are_predicted_as_the_whole(backbone: str) -> None:
    model, graph = model_of(backbone), ring()
    limit = limit_for(model, graph)
    found, whole = (predict(model, graph, memory=m).probabilities for m in (limit, "1GB"))
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)
    exact = model_of(backbone, dtype="float64")
    whole = class_scores(exact, graph)
    found = class_scores(exact, graph, memory=limit)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("backbone", "options", "parts"),
    [
        ("gcn", {}, {"weighted": True}),
        ("gat", {}, {"weighted": True}),
        ("sage", {"direction": "in"}, {"directed": True}),
        ("gcn", {"direction": "separate"}, {"directed": True, "weighted": True}),
        ("rgcn", {"relations": "x,y"}, {"typed": True}),
        ("res-acm", {"label_inputs": 0.5}, {}),
        ("gcn", {"label_inputs": 0.5, "dtype": "float64"}, {"weighted": True}),
        ("gcn", {"sample": "4,4"}, {}),
        ("sage", {"degree_inputs": True}, {"weighted": True}),
    ],
)
def test_blocks_keep_weights_directions_types_and_labels(
    backbone: str, options: dict[str, Any], parts: dict[str, bool]
) -> None:
    model, graph = model_of(backbone, **options), ring(**parts)
    whole = class_scores(model, graph)
    found = class_scores(model, graph, memory=limit_for(model, graph))
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    plain = replace(graph, edge_weights=None, arcs=None, labels=np.full(RING, UNLABELLED))
    if parts != {"typed": True} and options != {"sample": "4,4"}:  # the parts matter at all
        assert not torch.allclose(class_scores(model, plain), whole, atol=1e-3)


def test_polyphonys_voices_see_labels_in_blocks() -> None:
    model, graph = model_of("choir", "polyphony"), ring()
    whole = class_scores(model, graph)
    found = class_scores(model, graph, memory=limit_for(model, graph, 0.6))
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    hidden = replace(graph, labels=np.full(RING, UNLABELLED))
    assert not torch.allclose(class_scores(model, hidden), whole, atol=1e-3)


@pytest.mark.parametrize("backbone", LOCAL)
def test_no_output_depends_on_nodes_out_of_reach(backbone: str) -> None:
    model, graph = model_of(backbone), ring()
    reach = model.module.reach
    assert reach is not None
    features = np.array(graph.features)
    features[0] += 1
    moved = class_scores(model, replace(graph, features=features)) - class_scores(model, graph)
    touched = set(np.flatnonzero(moved.abs().sum(dim=1).numpy() > 1e-6).tolist())
    adjacency = graph.adjacency()
    near = _ball(adjacency.indptr, adjacency.indices, np.array([0]), reach, np.zeros(RING, bool))
    assert 0 in touched
    assert touched <= set(near.tolist())


def test_blocks_cover_all_nodes_once_and_fit() -> None:
    model, graph = model_of("gcn"), ring()
    limit = bytes_to_predict(graph, model.module, 25, 60)
    found = list(blocks(graph, model.module, limit, 3))
    assert len(found) > 3
    assert sorted(np.concatenate([targets for targets, _ in found]).tolist()) == list(range(RING))
    for targets, around in found:
        assert np.array_equal(around[: len(targets)], targets)
        assert len(set(around.tolist())) == len(around)
        edges = graph.subgraph(around).edges.shape[1]
        assert bytes_to_predict(graph, model.module, len(around), edges) <= limit


@given(nodes=st.integers(1, 12), hops=st.integers(0, 4), data=st.data())
def test_a_ball_is_what_walks_of_its_length_reach(
    nodes: int, hops: int, data: st.DataObject
) -> None:
    ends = st.integers(0, nodes - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), max_size=20))
    start = np.array(data.draw(st.lists(ends, min_size=1, unique=True)))
    matrix = np.eye(nodes, dtype=np.int64)
    for a, b in pairs:
        matrix[a, b] = matrix[b, a] = 1
    expected = np.flatnonzero(np.linalg.matrix_power(matrix, hops)[start].sum(axis=0))
    sparse, seen = sp.csr_array(matrix), np.zeros(nodes, dtype=np.bool_)
    found = _ball(sparse.indptr, sparse.indices, start, hops, seen)
    assert np.array_equal(found[: len(start)], start)
    assert np.array_equal(np.sort(found), expected)
    assert not seen.any()


def test_what_does_not_fit_is_refused_with_the_memory_needed() -> None:
    graph = ring()
    far = model_of("unifilter", "fedgsp")
    with pytest.raises(UserError, match=r"fedgsp .* whole graphs only.*MB.*--memory"):
        class_scores(far, graph, memory="1KB")
    with pytest.raises(UserError, match=r"node \d+ has \d+ nodes within 3 hops.*--memory"):
        class_scores(model_of("gcn"), graph, memory="1KB")
    with pytest.raises(UserError, match="is no size"):
        class_scores(far, graph, memory="much")


@pytest.mark.parametrize("method", ["fedspa", "fedhero", "adafgl"])
def test_methods_with_networks_of_their_own_predict_whole_graphs(method: str) -> None:
    backbone = create(method).supported_backbones()[0]
    model = model_of(create(method).backbone or backbone, method)
    assert model.make_method().reach(model.module) is None


# Graphs ------------------------------------------------------------------------------------------


def nodes_of(graph: Graph) -> pd.DataFrame:
    columns = {f"f{i}": graph.features[:, i] for i in range(graph.num_features)}
    return pd.DataFrame({"id": [f"n{i}" for i in range(graph.num_nodes)], **columns})


def write_table(place: Path, nodes: pd.DataFrame, graph: Graph) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    nodes.to_csv(place / "nodes.csv", index=False)
    once = graph.edges[:, graph.edges[0] < graph.edges[1]]
    names = np.array([f"n{i}" for i in range(graph.num_nodes)])
    ends = pd.DataFrame({"source": names[once[0]], "target": names[once[1]]})
    ends.to_csv(place / "edges.csv", index=False)
    return place


def test_a_table_needs_no_label_column(tmp_path: Path) -> None:
    model, graph = model_of("gcn"), ring()
    place = write_table(tmp_path / "bank", nodes_of(graph), graph)
    found = predict(model, place)
    hidden = replace(graph, labels=np.full(RING, UNLABELLED))
    np.testing.assert_allclose(found.probabilities, predict(model, hidden).probabilities, atol=1e-6)
    assert found.ids.tolist() == [f"n{i}" for i in range(RING)]
    assert found.table().columns.tolist() == ["id", "class", "probability no", "probability yes"]
    assert found.above is None


def test_labels_are_known_by_name(tmp_path: Path) -> None:
    model, graph = model_of("gcn", label_inputs=0.5), ring()
    words = {UNLABELLED: "", 0: "no", 1: "yes"}
    table = nodes_of(graph).assign(label=[words[c] for c in graph.labels.tolist()])
    found = predict(model, write_table(tmp_path / "bank", table, graph))
    np.testing.assert_allclose(found.probabilities, predict(model, graph).probabilities, atol=1e-6)
    only = table.assign(label=table["label"].where(table["label"] == "yes", ""))
    found = predict(model, write_table(tmp_path / "yes", only, graph))  # one of two classes
    labels = np.where(graph.labels == 1, 1, UNLABELLED)
    expected = predict(model, replace(graph, labels=labels)).probabilities
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    strange = table.assign(label=table["label"].replace("yes", "maybe"))
    with pytest.raises(UserError, match="labels that the model does not know: 'maybe'"):
        predict(model, write_table(tmp_path / "other", strange, graph))
    with pytest.raises(UserError, match="has the label 2, but the model knows 2 classes"):
        predict(model, replace(graph, labels=graph.labels + 1))


def test_labels_outside_the_train_nodes_of_a_split_are_not_seen() -> None:
    model, graph = model_of("gcn", label_inputs=0.5), ring()
    known = graph.labels != UNLABELLED
    train = known & (np.arange(RING) % 2 == 0)
    masks = Masks(train, known & ~train, np.zeros(RING, dtype=np.bool_))
    expected = predict(model, replace(graph, labels=np.where(train, graph.labels, UNLABELLED)))
    for found in (replace(graph, masks=masks), replace(graph, own_masks=(masks,))):
        np.testing.assert_array_equal(predict(model, found).probabilities, expected.probabilities)


def test_one_of_several_graphs_is_the_clients(tmp_path: Path) -> None:
    graph = ring()
    for name in ("north", "south"):
        write_table(tmp_path / name, nodes_of(graph), graph)
    model = model_of("gcn")
    with pytest.raises(UserError, match=r"holds 2 graphs \('north', 'south'\): give one"):
        predict(model, tmp_path)
    assert len(predict(replace(model, client="south"), tmp_path)) == RING


def test_another_width_is_refused() -> None:
    graph = ring()
    with pytest.raises(UserError, match="has 4 features, but 5 were trained with"):
        predict(model_of("gcn"), replace(graph, features=graph.features[:, :4]))


# Encodings and decisions -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[polyphily.Result, Path]:
    """Three banks with categories and missing values, and a run on them."""
    place = tmp_path_factory.mktemp("banks")
    rng = np.random.default_rng(0)
    for name in ("east", "north", "south"):
        graph = replace(ring(), labels=np.zeros(RING, dtype=np.int64))
        kinds = rng.choice(["web", "atm", "desk"], RING)
        age = rng.normal(40, 15, RING).round(1).astype(object)
        age[::11] = None
        bad = (kinds == "web") & (rng.random(RING) < 0.8)
        table = nodes_of(graph)[["id"]].assign(
            label=np.where(bad, "bad", "good"), age=age, channel=kinds
        )
        write_table(place / name, table, graph)
    data = polyphily.load(place)
    return polyphily.run("fedavg", data, rounds=8, hidden=8, backbone="gcn"), place


def test_an_outlier_changes_nothing_but_its_neighbours(
    trained: tuple[polyphily.Result, Path], tmp_path: Path
) -> None:
    result, place = trained
    nodes = pd.read_csv(place / "north" / "nodes.csv").drop(columns="label")
    before = result.predict_proba(write_table(tmp_path / "a", nodes, ring()))
    odd = pd.DataFrame({"id": ["odd"], "age": [1e7], "channel": ["never seen"]})
    write_table(tmp_path / "b", pd.concat([nodes, odd]), ring())
    after = result.predict_proba(tmp_path / "b")
    assert after.index.tolist() == [*before.index, "odd"]
    assert (after.iloc[:-1] == before).all(axis=None)  # to the bit
    ends = pd.read_csv(tmp_path / "b" / "edges.csv")
    joined = pd.concat([ends, pd.DataFrame({"source": ["odd"], "target": ["n7"]})])
    joined.to_csv(tmp_path / "b" / "edges.csv", index=False)
    near = result.predict_proba(tmp_path / "b").iloc[:-1]
    moved = set(near.index[(near != before).any(axis=1)])
    assert "n7" in moved
    hops = _hops(ends, "n7", 2)
    assert moved <= hops


def _hops(edges: pd.DataFrame, node: str, hops: int) -> set[str]:
    found = {node}
    for _ in range(hops):
        touching = edges[edges["source"].isin(found) | edges["target"].isin(found)]
        found |= {*touching["source"], *touching["target"]}
    return found


def test_a_table_is_encoded_as_in_training(
    trained: tuple[polyphily.Result, Path], tmp_path: Path
) -> None:
    """Columns in another order and one more of them give the same predictions, with a note."""
    result, place = trained
    own = result.predict_proba("north")
    nodes = pd.read_csv(place / "north" / "nodes.csv")
    mixed = nodes[["channel", "id", "label", "age"]].assign(more=1.0)
    found = result.predictions(write_table(tmp_path / "north", mixed, ring()), "north")
    assert any("more" in note for note in found.notes)
    np.testing.assert_allclose(found.probabilities, own.to_numpy(), atol=1e-6)
    with pytest.raises(UserError, match="channel"):
        result.predict(write_table(tmp_path / "x", nodes.drop(columns="channel"), ring()))


def test_temperature_and_threshold_are_the_models() -> None:
    graph = ring()
    plain = model_of("gcn")
    logits = class_scores(plain, graph).double()
    middle = torch.softmax(logits / 2, dim=1)[:, 0].median().item() + 1e-6
    model = replace(plain, decision=Decision(2.0, "no", middle, "f1"))
    found = predict(model, graph)
    expected = torch.softmax(logits / 2, dim=1).numpy()
    np.testing.assert_allclose(found.probabilities, expected, rtol=0, atol=1e-12)
    assert found.above is not None
    np.testing.assert_array_equal(found.above, expected[:, 0] >= middle)
    table = found.table()
    assert table.columns.tolist()[-1] == "above_threshold"
    assert 0 < table["above_threshold"].sum() < RING
    assert (table["class"] == predict(plain, graph).table()["class"]).all()


def test_a_clients_decision_is_used_for_the_client(
    trained: tuple[polyphily.Result, Path],
) -> None:
    result, place = trained
    model = result.model()
    assert set(model.decisions) == {"east", "north", "south"}
    assert model.decision is not None
    cold = replace(model, decisions={**model.decisions, "north": Decision(9.0, "bad", 0.4, "f1")})
    tables = [predict(cold, place / "north", client=c).probabilities for c in ("north", None)]
    assert tables[0].max() < tables[1].max()


def test_own_scales_need_the_name_of_their_client(tmp_path: Path) -> None:
    """With `encoding="home"` every client has its own means."""
    rng = np.random.default_rng(0)
    graphs = [
        replace(
            ring(),
            features=(10.0**k * rng.normal(k, 1, (RING, 5))).astype(np.float32),
            labels=rng.integers(0, 2, RING),
            name=name,
        )
        for k, name in enumerate(("north", "south"))
    ]
    data = polyphily.load(graphs, normalize="standard", encoding="home")
    result = polyphily.run("fedavg", data, rounds=1, hidden=8, backbone="gcn", out=tmp_path / "r")
    run = polyphily.open_run(tmp_path / "r")
    with pytest.raises(UserError, match=r"a client's name \(--client\): north, south"):
        run.predict(graphs[0])
    for graph in graphs:
        own = result.predict_proba(graph.name)
        hidden = replace(graph, own_masks=(), masks=None)
        found = run.predict_proba(hidden, graph.name)
        np.testing.assert_allclose(found, own, atol=1e-6)


# Files -------------------------------------------------------------------------------------------


def test_predictions_are_written_as_asked(tmp_path: Path) -> None:
    table = predict(model_of("gcn"), ring()).table()
    for name, read in (("p.parquet", pd.read_parquet), ("deep/p.csv", pd.read_csv)):
        write(table, tmp_path / name)
        pd.testing.assert_frame_equal(read(tmp_path / name), table, check_dtype=False)
    with pytest.raises(UserError, match=r"end the name in \.parquet or \.csv"):
        write(table, tmp_path / "p.txt")
