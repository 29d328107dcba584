"""Partitions: what holds for every one of them, what each promises, and the file."""

from __future__ import annotations

import itertools
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.csbm import sample
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, Masks
from polyphily.graphs.partitions import PARTITIONS, Partition, communities, partition
from polyphily.graphs.random import derive, generator

DISJOINT = ["louvain", "louvain-capped", "metis", "dirichlet", "random"]  # and take any number
MANY = settings(max_examples=60, deadline=None)


def graph_of(labels: IntArray, edges: IntArray) -> Graph:
    return Graph.build(np.zeros((len(labels), 1), np.float32), edges, labels)


@st.composite
def graphs(draw: st.DrawFn, most: int = 60) -> Graph:
    """Graphs of any density, some edgeless, some with isolated or unlabelled nodes."""
    nodes = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = rng.integers(nodes, size=(2, draw(st.integers(0, 4 * nodes))))
    return graph_of(rng.integers(UNLABELLED, 4, size=nodes), edges)


def blocks(sizes: list[int], seed: int = 0) -> Graph:
    """Dense random blocks without edges between them: Louvain finds exactly these."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *sizes])
    edges = [
        start + rng.integers(size, size=(2, 20 * size))
        for start, size in zip(starts, sizes, strict=False)
    ]
    return graph_of(np.repeat(np.arange(len(sizes)), sizes), np.concatenate(edges, axis=1))


@pytest.fixture(scope="module")
def block_model() -> Graph:
    return sample(600, 1, 1.0, 8.0, 0.9, generator(0, "test"))


def same(left: list[IntArray], right: list[IntArray]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@MANY
@given(graphs(), st.sampled_from(DISJOINT), st.integers(0, 5), st.data())
def test_every_node_has_one_client(graph: Graph, name: str, seed: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, graph.num_nodes))
    parts = partition(graph, name, clients, seed)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(graph.num_nodes))
    assert same(parts, partition(graph, name, clients, seed))


@MANY
@given(graphs(), st.integers(0, 5), st.data())
def test_overlapping_clients_are_halves(graph: Graph, seed: int, data: st.DataObject) -> None:
    if graph.num_nodes < 5:
        return
    clients = 5 * data.draw(st.integers(1, graph.num_nodes // 5))
    parts = partition(graph, "metis-overlap", clients, seed)
    whole = partition(graph, "metis", clients // 5, seed)
    assert len(parts) == clients
    for client, part in enumerate(parts):
        assert len(part) == max(1, len(whole[client // 5]) // 2)
        assert (np.diff(part) > 0).all()
        assert np.isin(part, whole[client // 5]).all()
    assert same(parts, partition(graph, "metis-overlap", clients, seed))


@settings(max_examples=30, deadline=None)
@given(graphs(), st.integers(0, 5), st.integers(1, 10))
def test_louvain_min_keeps_every_node(graph: Graph, seed: int, least: int) -> None:
    found = communities(graph, seed)
    kept = [group for group in found if len(group) >= least]
    if not kept:
        with pytest.raises(UserError, match=f"has {least} nodes: the largest has"):
            partition(graph, "louvain-min", None, seed, min_nodes=least)
        return
    parts = partition(graph, "louvain-min", None, seed, min_nodes=least)
    assert len(parts) == len(kept)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(graph.num_nodes))
    assert all(np.isin(group, part).all() for group, part in zip(kept, parts, strict=True))
    assert same(parts, partition(graph, "louvain-min", len(kept), seed, min_nodes=least))


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "natural"])
def test_clients_have_induced_edges_and_seeds_differ(name: str, block_model: Graph) -> None:
    options: dict[str, Any] = {"min_nodes": 20} if name == "louvain-min" else {}
    clients = None if name == "louvain-min" else 10
    parts = partition(block_model, name, clients, 0, **options)
    for part in parts:
        inside = np.isin(block_model.edges, part).all(axis=0)
        own = part[block_model.subgraph(part).edges]
        assert np.array_equal(own, block_model.edges[:, inside])
    assert not same(parts, partition(block_model, name, clients, 1, **options))


def test_louvain_finds_blocks_and_keeps_them_whole() -> None:
    sizes = [30, 40, 50, 60, 70]
    parts = partition(blocks(sizes), "louvain", 5, 0)
    assert [len(part) for part in parts] == sizes


def test_louvain_deals_small_communities_first_to_the_smallest_client() -> None:
    # ascending 10 20 30 40 50: clients 0 and 1 take 10 and 20, then 30 -> 0, 40 -> 1, 50 -> 0
    parts = partition(blocks([50, 40, 30, 20, 10]), "louvain", 2, 0)
    assert [len(part) for part in parts] == [90, 60]


def test_louvain_halves_the_largest_where_communities_are_few() -> None:
    parts = partition(blocks([80, 30]), "louvain", 4, 0)
    assert sorted(len(part) for part in parts) == [20, 20, 30, 40]


def test_louvain_capped_deals_as_written() -> None:
    # n = 120, K = 2: target 60, cap 50, limit 70. Pieces 50 30 (of 80) and 40: client 0 takes 50,
    # 40 does not fit and goes to client 1, where 30 reaches the limit; nor does it fit client 0.
    # The smallest, client 1, takes it.
    parts = partition(blocks([80, 40]), "louvain-capped", 2, 0, delta=10)
    assert [len(part) for part in parts] == [50, 70]
    assert np.array_equal(parts[0], np.arange(50))


def test_louvain_capped_gives_a_client_that_was_not_reached_half_of_the_largest() -> None:
    # Twenty pieces of 9, target 30: five clients take 4 pieces each, the sixth finds none left.
    parts = partition(blocks([9] * 20), "louvain-capped", 6, 0)
    assert sorted(len(part) for part in parts) == [18, 18, 36, 36, 36, 36]


@pytest.mark.parametrize("clients", [2, 3, 7, 20])
def test_louvain_capped_is_nearly_balanced(clients: int, block_model: Graph) -> None:
    sizes = [len(part) for part in partition(block_model, "louvain-capped", clients, 0, delta=5)]
    assert max(sizes) <= block_model.num_nodes // clients + 2 * 5 + clients


def test_louvain_min_says_how_many_clients_there_are() -> None:
    graph = blocks([60, 70, 10])
    assert [len(part) for part in partition(graph, "louvain-min", 2, 0)] in ([70, 70], [60, 80])
    with pytest.raises(UserError, match="has 2 clients, not 3: ask for 2"):
        partition(graph, "louvain-min", 3, 0)


def test_metis_cuts_few_edges(block_model: Graph) -> None:
    def kept(name: str) -> int:
        parts = partition(block_model, name, 5, 0)
        return sum(block_model.subgraph(part).num_edges for part in parts)

    assert kept("metis") > 1.5 * kept("random")


def test_random_is_balanced(block_model: Graph) -> None:
    assert {len(part) for part in partition(block_model, "random", 7, 0)} == {85, 86}


@pytest.mark.parametrize(("alpha", "low", "high"), [("0.01", 0.9, 1.0), (1000, 0.25, 0.3)])
def test_dirichlet_alpha_sets_the_skew(alpha: object, low: float, high: float) -> None:
    labels = np.repeat(np.arange(20), 500)
    graph = graph_of(labels, np.zeros((2, 0), np.int64))
    parts = partition(graph, "dirichlet", 4, 0, alpha=alpha)
    counts = np.array([np.bincount(labels[part], minlength=20) for part in parts])
    assert low <= np.mean(counts.max(axis=0) / 500) <= high


@MANY
@given(graphs(), st.integers(0, 5), st.floats(1e-3, 1e3), st.data())
def test_dirichlet_fills_every_client(
    graph: Graph, seed: int, alpha: float, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, graph.num_nodes))
    least = data.draw(st.integers(1, graph.num_nodes // clients))
    parts = partition(graph, "dirichlet", clients, seed, alpha=alpha, min_nodes=least)
    assert min(map(len, parts)) >= least
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(graph.num_nodes))


def test_dirichlet_shares_unlabelled_nodes_evenly() -> None:
    graph = graph_of(np.full(100, UNLABELLED), np.zeros((2, 0), np.int64))
    assert {len(part) for part in partition(graph, "dirichlet", 10, 0)} == {10}


GOLDEN = {
    "louvain": "127d8d24ad94d29b",
    "louvain-capped": "510123475c6687c8",
    "louvain-min": "f24e1d36ed6d06c7",
    "metis": "4ec00472aa5eb068",
    "metis-overlap": "719925ebb92e4556",
    "dirichlet": "42e807dfb8ff82c6",
    "random": "6d9f8f5b4ef28947",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_partitions_stay_what_they_were(name: str) -> None:
    if name.startswith("metis") and not sys.platform.startswith("linux"):
        pytest.skip("METIS draws from the C library")
    rng = np.random.default_rng(7)
    graph = graph_of(rng.integers(3, size=300), rng.integers(300, size=(2, 600)))
    clients = None if name == "louvain-min" else 5
    options: dict[str, Any] = {"min_nodes": 20} if name == "louvain-min" else {}
    parts = partition(graph, name, clients, 3, **options)
    assert Partition.of(name, parts).sha256[:16] == GOLDEN[name]


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("louvian", 2, {}, "did you mean 'louvain'"),
        ("natural", 2, {}, "one graph per client"),
        ("random", None, {}, "needs the number of clients"),
        ("random", 0, {}, "1 or more, got 0"),
        ("random", 11, {}, "into 11 clients: it has 10 nodes"),
        ("louvain-min", 0, {}, "1 or more, got 0"),
        ("metis-overlap", 6, {}, "not a multiple of 5"),
        ("random", 2, {"delta": 3}, "no option 'delta' .it has none"),
        ("dirichlet", 2, {"delta": 3}, "no option 'delta' .its options: alpha, min_nodes"),
        ("dirichlet", 2, {"alpha": "much"}, "option 'alpha' must be a number, got 'much'"),
        ("dirichlet", 2, {"alpha": 0}, "option 'alpha' must be at least 0.001"),
        ("dirichlet", 2, {"alpha": 1e9}, "option 'alpha' must be at most 1e"),
        ("dirichlet", 2, {"min_nodes": 6}, "too few for 2 clients of at least 6"),
        ("louvain-capped", 2, {"delta": 2.5}, "option 'delta' must be a whole number"),
        ("louvain-capped", 2, {"delta": "nan"}, "option 'delta' must be a number"),
    ],
)
def test_requests_that_cannot_be_met(
    name: str, clients: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        partition(blocks([10]), name, clients, 0, **options)


def test_an_empty_graph_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="no nodes"):
        partition(
            graph_of(np.zeros(0, np.int64), np.zeros((2, 0), np.int64)), "louvain-min", None, 0
        )


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [("sknetwork.clustering", "louvain", "scikit-network"), ("pymetis", "metis", "pymetis")],
)
def test_a_missing_package_is_named(
    module: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{package}.*polyphily\[partition\].*--partition FILE"):
        partition(blocks([10]), name, 2, 0)


def test_streams_are_apart_from_each_other_and_from_numpy() -> None:
    purposes, seeds = ["a", "b"], [0, 1, 2]
    draws = [generator(seed, p).random() for seed, p in itertools.product(seeds, purposes)]
    plain = [np.random.default_rng(seed).random() for seed in seeds]
    assert len({*draws, *plain}) == len(draws) + len(plain)
    assert 0 <= derive(0, "a") < 2**63
    assert derive(0, "a") == derive(0, "a") != derive(1, "a")
    with pytest.raises(UserError, match="seed must be 0 or more"):
        generator(-1, "a")


# The file -----------------------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    """The contents of a sound file, with some replaced, or left out where None."""
    sound = {
        "client_ptr": np.array([0, 2, 5]),
        "client_nodes": np.array([0, 3, 1, 2, 3]),
        "train_mask": np.array([1, 0, 1, 0, 0], dtype=bool),
        "val_mask": np.array([0, 1, 0, 0, 0], dtype=bool),
        "test_mask": np.array([0, 0, 0, 1, 0], dtype=bool),
    }
    return {key: value for key, value in (sound | changes).items() if value is not None}


@given(graphs(), st.booleans(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_saved_partition_comes_back(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, split: bool, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("partition") / "file.npz"
    parts = partition(graph, "random", data.draw(st.integers(1, graph.num_nodes)), 0)
    masks = [Masks(part % 3 == 0, part % 3 == 1, part % 3 == 2) for part in parts]
    saved = Partition.of("random", parts, masks if split else None)
    saved.save(path)
    loaded = Partition.load(path)
    assert (loaded.name, loaded.sha256, loaded.clients) == ("random", saved.sha256, len(parts))
    for client, part in enumerate(parts):
        assert np.array_equal(loaded.nodes_of(client), part)
        own = loaded.masks_of(client)
        assert (own is not None) == split
        assert own is None or np.array_equal(own.val, masks[client].val)
    loaded.check_fits(graph.num_nodes)


def test_a_file_holds_plain_arrays_and_the_same_bytes(tmp_path: Path) -> None:
    made = Partition("überlappend", **arrays())
    made.save(tmp_path / "a.npz")
    made.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert set(file.files) == {*arrays(), "sha256", "name"}
        assert file["client_ptr"].dtype == file["client_nodes"].dtype == np.int64
        assert str(file["name"]) == "überlappend"
        assert str(file["sha256"]) == made.sha256


def test_the_hash_is_of_the_arrays_alone() -> None:
    made = Partition("a", **arrays())
    assert made.sha256 == "e71dd16f5d95570b884ee7bba8666ee772f7a40b33a71414dc5d0c0482bc3733"
    assert Partition("b", **arrays(client_ptr=np.array([0, 2, 5], ">i4"))).sha256 == made.sha256
    assert Partition("a", **arrays(val_mask=np.zeros(5, bool))).sha256 != made.sha256
    none = dict.fromkeys(["train_mask", "val_mask", "test_mask"])
    assert Partition("a", **arrays(**none)).sha256 != made.sha256


def test_another_tools_file_may_lack_masks_name_and_hash(tmp_path: Path) -> None:
    path = tmp_path / "theirs.npz"
    np.savez(path, client_ptr=np.array([0, 1, 3], np.int32), client_nodes=np.array([4, 2, 0]))
    loaded = Partition.load(path)
    assert loaded.name == "theirs"
    assert loaded.masks_of(0) is None
    assert loaded.nodes_of(1).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_ptr": None}, "no array client_ptr"),
        ({"client_nodes": None}, "no array client_nodes"),
        ({"client_ptr": np.array([0.0, 2.0, 5.0])}, "client_ptr must be one-dimensional and of"),
        ({"client_nodes": np.zeros((5, 1), int)}, "client_nodes must be one-dimensional"),
        ({"client_nodes": np.array(["a"] * 5)}, "client_nodes must be one-dimensional"),
        ({"client_ptr": np.array([0])}, "client_ptr must rise from 0"),
        ({"client_ptr": np.array([1, 2, 5])}, "client_ptr must rise from 0"),
        ({"client_ptr": np.array([0, 2, 4])}, "client_ptr must rise from 0 to .* 5"),
        ({"client_ptr": np.array([0, 6, 5])}, "client_ptr must rise from 0"),
        ({"client_ptr": np.array([0, 2, 2, 5])}, "client 1 has no nodes"),
        ({"client_nodes": np.array([0, -3, 1, 2, 3])}, "must be 0 or more, got -3"),
        ({"client_nodes": np.array([0, 3, 2, 1, 2])}, "client 1 has node 2 twice"),
        ({"val_mask": None}, "it has train_mask, test_mask but not all"),
        ({"val_mask": np.zeros(4, bool)}, r"val_mask must be boolean of shape \(5,\)"),
        ({"val_mask": np.zeros(5, int)}, "val_mask must be boolean"),
        ({"val_mask": np.ones(5, bool)}, "masks overlap"),
        ({"sha256": np.array("0" * 64)}, "do not match its sha256"),
        ({"client_nodes": np.array([{}] * 5)}, "no .npz file of plain arrays"),
    ],
)
def test_a_bad_file_is_named_and_explained(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays(**changes))
    with pytest.raises(UserError, match=rf"bad\.npz.*{message}"):
        Partition.load(path)


@pytest.mark.parametrize("content", [b"", b"node,client\n0,1\n", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.npz.*no \.npz file"):
        Partition.load(path)


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    Partition("a", **arrays()).save(path)
    sound = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("client_nodes.npy").header_offset
    sound[at + 200] ^= 0xFF
    path.write_bytes(sound)
    with pytest.raises(UserError, match=r"bad\.npz"):
        Partition.load(path)


def test_a_plain_array_file_and_a_missing_one(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(UserError, match=r"one\.npy.*no \.npz file"):
        Partition.load(tmp_path / "one.npy")
    with pytest.raises(UserError, match=r"cannot read .*none\.npz.*No such file"):
        Partition.load(tmp_path / "none.npz")
    with pytest.raises(UserError, match="cannot read"):
        Partition.load(tmp_path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "a.npz", tmp_path / "file" / "a.npz"):
        with pytest.raises(UserError, match=r"cannot write .*a\.npz"):
            Partition("a", **arrays()).save(path)


def test_node_ids_must_fit_the_graph() -> None:
    made = Partition("a", **arrays())
    made.check_fits(4)
    with pytest.raises(UserError, match="names node 3, but the graph has 3 nodes"):
        made.check_fits(3)
