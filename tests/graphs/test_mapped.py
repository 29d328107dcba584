"""Graphs in memory-mapped files: equal to those in memory, and read one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs import mapped
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import kept_on_disk, load
from polyphily.graphs.mapped import MappedGraphs, write_graphs

CSBM = "csbm:nodes=12-20,features=4"


@pytest.mark.parametrize(
    "options", [{}, {"split": "5-fold", "seed": 3}, {"split": "0.5,0.2,0.3:stratified"}]
)
def test_graphs_on_disk_are_those_in_memory(options: dict[str, object], tmp_path: Path) -> None:
    disk = load(CSBM, clients=11, on_disk=True, root=tmp_path, **options)  # type: ignore[arg-type]
    memory = load(CSBM, clients=11, on_disk=False, **options)  # type: ignore[arg-type]
    assert disk.on_disk
    assert not memory.on_disk
    assert disk.request == memory.request
    assert (disk.classes, disk.metric, disk.kind) == (memory.classes, memory.metric, memory.kind)
    for a, b in zip(disk.clients, memory.clients, strict=True):
        assert a.name == b.name
        assert a.masks is not None
        assert b.masks is not None
        for part in ("train", "val", "test"):
            assert np.array_equal(getattr(a.masks, part), getattr(b.masks, part))
        for part in ("features", "edges", "labels"):
            x, y = getattr(a, part), getattr(b, part)
            assert x.dtype == y.dtype, part
            assert np.array_equal(x, y), part


def test_some_clients_have_their_graphs_and_partition(tmp_path: Path) -> None:
    disk = load(CSBM, clients=11, on_disk=True, root=tmp_path).some([2, 7])
    memory = load(CSBM, clients=11, on_disk=False).some([2, 7])
    assert [graph.name for graph in disk.clients] == ["client-02", "client-07"]
    assert disk.partition.sha256 == memory.partition.sha256
    assert disk.encodings == memory.encodings


def test_files_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(CSBM, clients=5, on_disk=True, root=tmp_path)
    monkeypatch.setattr(mapped, "_write", None)
    load(CSBM, clients=5, on_disk=True, root=tmp_path)
    with pytest.raises(TypeError):  # other graphs are drawn
        load(CSBM, clients=5, on_disk=True, root=tmp_path, seed=1)


def test_graphs_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    graphs = load(CSBM, clients=5, on_disk=True, root=tmp_path).clients
    assert isinstance(graphs, MappedGraphs)
    before = graphs[-1].features
    graphs.release()
    assert np.array_equal(graphs[4].features, before)
    assert [graph.name for graph in graphs[1:3]] == ["client-1", "client-2"]
    with pytest.raises(IndexError):
        graphs[5]


def test_many_clients_are_on_disk_unless_asked_otherwise() -> None:
    assert kept_on_disk("csbm:nodes=50", 20_000)
    assert not kept_on_disk("csbm:nodes=50", 19_999)
    assert not kept_on_disk("csbm", 20_000, on_disk=False)
    assert not kept_on_disk("cora", 20_000, on_disk=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"normalize": "standard"}, "normalize"), ({"noise": "edges=0.1"}, "noise")],
)
def test_what_needs_all_graphs_is_refused(
    options: dict[str, str], word: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--{word} .* needs the graphs of all clients in memory"):
        load(CSBM, clients=5, on_disk=True, root=tmp_path, **options)  # type: ignore[arg-type]


def test_a_graph_that_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    good = load(CSBM, clients=1).clients[0]
    sparse = Graph(sp.csr_array(good.features), good.edges, good.labels, good.masks, name="bag")
    with pytest.raises(UserError, match="'bag' cannot be kept on disk: it has sparse features"):
        write_graphs(tmp_path / "graphs", [good, sparse])
    assert not list(tmp_path.iterdir())


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    write_graphs(tmp_path / "graphs", load(CSBM, clients=2).clients)
    (tmp_path / "graphs" / "features.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"cannot be read .*: remove the folder"):
        MappedGraphs(tmp_path / "graphs")
