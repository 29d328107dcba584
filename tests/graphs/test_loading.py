"""Loading a federation: where graphs come from, how they are divided, split and scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp

from builders import random_graph, random_graphs
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Collection, Graph, Masks
from polyphily.graphs.loading import FROM_FILE, Federation, load
from polyphily.graphs.partitions import PARTITIONS, Partition, partition
from polyphily.graphs.splits import default_split

TINY = "csbm:nodes=60,features=8"
WAYS = {
    "louvain": 4,
    "louvain-capped": 4,
    "louvain-min:min_nodes=12": None,
    "metis": 4,
    "metis-overlap": 5,
    "dirichlet:alpha=0.3": 4,
    "random": 4,
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return replace(random_graph(120, density=0.04, name="one"), masks=None)


def dense(graph: Graph) -> npt.NDArray[np.float32]:
    features = graph.features
    return features.toarray() if sp.issparse(features) else features


def edge_set(graph: Graph, names: npt.NDArray[np.int64]) -> set[tuple[int, int]]:
    return set(zip(*names[graph.edges].tolist(), strict=True))


def parts_of(masks: Masks | None) -> npt.NDArray[np.bool_]:
    assert masks is not None
    return np.stack([masks.train, masks.val, masks.test])


def assert_same(first: Federation, second: Federation) -> None:
    """The same graphs, masks and names."""
    assert first.partition.sha256 == second.partition.sha256
    assert first.classes == second.classes
    assert first.split == second.split
    for ours, theirs in zip(first.clients, second.clients, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(dense(ours), dense(theirs))
        np.testing.assert_array_equal(ours.edges, theirs.edges)
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        np.testing.assert_array_equal(parts_of(ours.masks), parts_of(theirs.masks))


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments, **options)  # type: ignore[arg-type]
    return str(caught.value)


def write_site(folder: Path, nodes: int, seed: int, *, split: str | None = None) -> Path:
    """A client's CSV files: classes cat and dog, two features, a path of edges."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    words = split.split(",") if split else []
    head = "id,label,split,age,weight" if split else "id,label,age,weight"
    rows = [
        ",".join(
            [f"n{i}", ("cat", "dog")[i % 2]]
            + ([words[i % len(words)]] if split else [])
            + [f"{value:.3f}" for value in rng.random(2)]
        )
        for i in range(nodes)
    ]
    (folder / "nodes.csv").write_text("\n".join([head, *rows]) + "\n")
    edges = [f"n{i},n{i + 1}" for i in range(nodes - 1)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return folder


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for k, name in enumerate(["north", "south", "west"]):
        write_site(tmp_path / "sites" / name, 10 + k, k)
    return tmp_path / "sites"


# Graphs that are clients already ---------------------------------------------------------------


def test_a_synthetic_federation_is_natural() -> None:
    federation = load(TINY, clients=3, seed=5)
    assert len(federation) == 3
    assert federation.kind == "synthetic"
    assert federation.dataset == TINY
    assert federation.partition.name == "natural"
    assert federation.split == "0.6,0.2,0.2"
    assert federation.seed == 5
    assert [g.num_nodes for g in federation.clients] == [60, 60, 60]
    for k, client in enumerate(federation.clients):
        assert client.num_features == 8
        np.testing.assert_array_equal(federation.partition.nodes_of(k), np.arange(60) + 60 * k)
        assert parts_of(client.masks).sum(axis=1).tolist() == [36, 12, 12]
    assert "3 clients by natural, 180 nodes, 2 classes" in repr(federation)


def test_the_dataset_has_a_usual_number_of_clients() -> None:
    assert len(load("csbm:nodes=20,features=4")) == 10


def test_seeds_draw_different_federations_and_the_same_seed_the_same() -> None:
    first, again, other = (load(TINY, clients=3, seed=seed) for seed in (1, 1, 2))
    assert_same(first, again)
    assert first.partition.sha256 != other.partition.sha256
    assert not np.array_equal(dense(first.clients[0]), dense(other.clients[0]))


def test_folders_of_csv_are_clients(sites: Path) -> None:
    federation = load(sites)
    assert [g.name for g in federation.clients] == ["north", "south", "west"]
    assert [g.num_nodes for g in federation.clients] == [10, 11, 12]
    assert federation.classes == ("cat", "dog")
    assert federation.kind == "files"
    assert federation.partition.name == "natural"
    assert federation.split == "0.6,0.2,0.2"
    assert federation.clients[0].num_edges == 9


def test_the_split_of_a_sites_own_files_is_taken_unless_another_is_asked_for(
    tmp_path: Path,
) -> None:
    words = "train,train,val,test"
    for k in range(2):
        write_site(tmp_path / "own" / f"site-{k}", 8, k, split=words)
    federation = load(tmp_path / "own")
    assert federation.split == "own"
    for client in federation.clients:
        assert client.masks is not None
        assert np.flatnonzero(client.masks.train).tolist() == [0, 1, 4, 5]
        assert np.flatnonzero(client.masks.val).tolist() == [2, 6]
        assert np.flatnonzero(client.masks.test).tolist() == [3, 7]
    other = load(tmp_path / "own", split="0.5,0.25,0.25")
    assert other.split == "0.5,0.25,0.25"
    assert other.partition.sha256 != federation.partition.sha256


def test_clients_that_are_there_already_are_not_divided_again(sites: Path) -> None:
    assert load(sites, clients=3, partition="natural").partition.name == "natural"
    assert "3 clients already" in refusal(sites, clients=4)
    assert "one graph per client already" in refusal(sites, partition="louvain")


def test_a_single_graph_of_ones_own_is_a_client_or_is_divided(tmp_path: Path) -> None:
    site = write_site(tmp_path / "north", 40, 0)
    for way in (None, "natural"):
        assert [g.name for g in load(site, partition=way).clients] == ["north"]
    load(site, seed=1).partition.save(tmp_path / "split.npz")
    again = load(site, partition=tmp_path / "split.npz")
    assert [g.name for g in again.clients] == ["north"]
    assert again.partition.sha256 == load(site, seed=1).partition.sha256
    divided = load(site, partition="random", clients=3)
    assert [g.name for g in divided.clients] == ["client-0", "client-1", "client-2"]
    assert len(load(site, partition="random")) == 10
    assert load(site, clients=3).partition.name == "louvain"
    assert load(site, clients=1).partition.name == "natural"
    assert "1 client already" in refusal(site, clients=3, partition="natural")


def test_a_global_split_needs_one_graph(sites: Path) -> None:
    for dataset in (sites, TINY):
        assert "global split needs one graph" in refusal(dataset, split="0.6,0.2,0.2:global")


# One graph, divided ----------------------------------------------------------------------------


def test_every_way_to_divide_is_tried_here() -> None:
    assert {way.partition(":")[0] for way in WAYS} == PARTITIONS.keys() - {"natural"}


@pytest.mark.parametrize(("way", "clients"), WAYS.items())
def test_one_graph_is_divided(graph: Graph, way: str, clients: int | None) -> None:
    federation = load(graph, partition=way, clients=clients, seed=3)
    name, _, options = way.partition(":")
    assert federation.partition.name == name
    assert len(federation) == (clients or federation.partition.clients)
    assert federation.split == str(default_split("graphs", name))
    expected = partition(
        graph, name, clients, 3, **dict(item.split("=") for item in options.split(",") if item)
    )
    everything = edge_set(graph, np.arange(graph.num_nodes))
    for k, (client, nodes) in enumerate(zip(federation.clients, expected, strict=True)):
        assert client.name == f"client-{k}"
        np.testing.assert_array_equal(federation.partition.nodes_of(k), nodes)
        np.testing.assert_array_equal(dense(client), dense(graph)[nodes])
        np.testing.assert_array_equal(client.labels, graph.labels[nodes])
        inside = set(nodes.tolist())
        kept = {(u, v) for u, v in everything if u in inside and v in inside}
        assert edge_set(client, nodes) == kept
        np.testing.assert_array_equal(
            parts_of(client.masks), parts_of(federation.partition.masks_of(k))
        )
    held = np.concatenate([federation.partition.nodes_of(k) for k in range(len(federation))])
    if name != "metis-overlap":
        assert sorted(held.tolist()) == list(range(graph.num_nodes))


def test_names_of_many_clients_sort_as_the_clients_do(graph: Graph) -> None:
    names = [client.name for client in load(graph, partition="random", clients=11).clients]
    assert names == sorted(names)
    assert names[0] == "client-00"


def test_louvain_is_the_usual_partition_and_ten_the_usual_number_of_clients(graph: Graph) -> None:
    assert load(graph, clients=10).partition.name == "louvain"
    assert len(load(graph, partition="random")) == 10


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("louvian", "did you mean 'louvain'"),
        ("natural", "these data are 1 client already"),
        ("dirichlet:alpha", "write option=value"),
        ("dirichlet:beta=1", "no option 'beta'"),
        ("metis-overlap", "multiple of 5"),
        ("no-such-file.npz", "cannot read partition file"),
    ],
)
def test_a_way_that_does_not_exist_is_refused(graph: Graph, way: str, message: str) -> None:
    assert message in refusal(graph, partition=way, clients=4)


def test_a_partitions_name_wins_over_a_file_of_that_name(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random").write_text("not a partition")
    assert load(graph, partition="random", clients=2).partition.name == "random"


def test_more_clients_than_nodes_are_refused(graph: Graph) -> None:
    assert "120 nodes" in refusal(graph, clients=121)


# Partition files -------------------------------------------------------------------------------


@pytest.fixture
def parts(graph: Graph) -> list[npt.NDArray[np.int64]]:
    return np.array_split(np.random.default_rng(0).permutation(graph.num_nodes - 20), 3)


def test_a_partition_file_brings_nodes_and_masks(
    graph: Graph, parts: list[npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    masks = []
    for nodes in parts:
        which = np.arange(len(nodes)) % 4
        masks.append(Masks(which == 0, which == 1, which == 2))
    saved = Partition.of("by hand", parts, masks)
    saved.save(tmp_path / "mine.npz")
    for way in (tmp_path / "mine.npz", str(tmp_path / "mine.npz")):
        federation = load(graph, partition=way)
        assert federation.partition.name == "by hand"
        assert federation.partition.sha256 == saved.sha256
        assert federation.split == FROM_FILE
        for client, nodes, own in zip(federation.clients, parts, masks, strict=True):
            np.testing.assert_array_equal(dense(client), dense(graph)[nodes])
            np.testing.assert_array_equal(parts_of(client.masks), parts_of(own))
    other = load(graph, partition=tmp_path / "mine.npz", split="0.5,0.25,0.25:client", clients=3)
    assert other.split == "0.5,0.25,0.25:client"
    np.testing.assert_array_equal(other.partition.client_nodes, saved.client_nodes)
    sizes = [parts_of(client.masks).sum(axis=1).tolist() for client in other.clients]
    assert sizes == [[17, 8, 9], [16, 8, 9], [16, 8, 9]]


def test_a_partition_file_without_masks_gets_a_split(
    graph: Graph, parts: list[npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    Partition.of("by hand", parts).save(tmp_path / "mine.npz")
    federation = load(graph, partition=tmp_path / "mine.npz", seed=1)
    assert federation.split == str(default_split("graphs", "by hand"))
    assert all(parts_of(client.masks).any(axis=1).all() for client in federation.clients)
    other = load(graph, partition=tmp_path / "mine.npz", seed=2)
    assert other.partition.sha256 != federation.partition.sha256
    np.testing.assert_array_equal(other.partition.client_nodes, federation.partition.client_nodes)


def test_a_partition_file_that_does_not_fit_is_refused(
    graph: Graph, parts: list[npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    file = tmp_path / "mine.npz"
    Partition.of("by hand", parts).save(file)
    assert "partition file has 3 clients" in refusal(graph, partition=file, clients=4)
    assert "does not fit the graph" in refusal(random_graph(99), partition=file)
    file.write_bytes(b"nothing of the kind")
    assert "no .npz file" in refusal(graph, partition=file)


def test_a_partition_file_of_natural_clients_brings_masks(sites: Path, tmp_path: Path) -> None:
    first = load(sites, seed=3)
    first.partition.save(tmp_path / "split.npz")
    again = load(sites, partition=tmp_path / "split.npz", seed=8)
    assert again.partition.sha256 == first.partition.sha256
    assert again.split == FROM_FILE
    assert load(sites, partition=tmp_path / "split.npz", split="5-fold").split == "5-fold"
    load(TINY, clients=3).partition.save(tmp_path / "other.npz")
    message = refusal(sites, partition=tmp_path / "other.npz")
    assert "[60, 60, 60]" in message
    assert "[10, 11, 12]" in message


def test_a_client_that_the_file_leaves_without_a_train_node_is_named(
    graph: Graph, parts: list[npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    masks = [Masks(np.ones(len(n), bool), *np.zeros((2, len(n)), bool)) for n in parts[:2]]
    masks.append(Masks(*np.zeros((3, len(parts[2])), bool)))
    Partition.of("by hand", parts, masks).save(tmp_path / "mine.npz")
    assert "client 'client-2' has no train node" in refusal(graph, partition=tmp_path / "mine.npz")


# Splits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", ":stratified", ":client"])
def test_ratios_are_drawn_per_client(kind: str) -> None:
    federation = load(TINY, clients=3, split=f"0.5,0.2,0.3{kind}")
    assert federation.split == f"0.5,0.2,0.3{kind}"
    for client in federation.clients:
        masks = parts_of(client.masks)
        assert masks.sum(axis=1).tolist() == [30, 12, 18]
        assert masks.sum(axis=0).max() == 1


def test_a_global_split_is_the_same_however_the_graph_is_divided(graph: Graph) -> None:
    drawn = []
    for way in ("random", "louvain"):
        federation = load(graph, partition=way, clients=3, split="0.5,0.25,0.25:global")
        whole = np.zeros((3, graph.num_nodes), bool)
        for k, client in enumerate(federation.clients):
            whole[:, federation.partition.nodes_of(k)] = parts_of(client.masks)
        drawn.append(whole)
    assert drawn[0].sum(axis=1).tolist() == [60, 30, 30]
    np.testing.assert_array_equal(*drawn)


def test_a_global_split_leaves_no_client_without_a_train_node(graph: Graph) -> None:
    federation = load(graph, partition="random", clients=60, split="0.02,0.49,0.49:global")
    assert all(parts_of(client.masks)[0].any() for client in federation.clients)


def test_folds_rotate_with_the_seed(graph: Graph) -> None:
    graphs = random_graphs([20, 25])
    tested = np.zeros(20, dtype=int)
    for seed in range(5):
        federation = load(graphs, split="5-fold", seed=seed)
        tested += parts_of(federation.clients[0].masks)[2]
    assert tested.tolist() == [1] * 20


def test_own_masks_are_chosen_by_the_seed_and_asked_for_only_where_there_are_any() -> None:
    graphs = []
    for k, one in enumerate(random_graphs([12, 12])):
        own = [np.arange(12) % 3 == (part + k) % 3 for part in range(3)]
        graphs.append(replace(one, own_masks=(Masks(*own), Masks(*own[::-1]))))
    for seed in range(3):
        for client, one in zip(load(graphs, seed=seed).clients, graphs, strict=True):
            np.testing.assert_array_equal(parts_of(client.masks), parts_of(one.own_masks[seed % 2]))
    bare = [replace(one, masks=None) for one in random_graphs([12, 12])]
    assert "has none" in refusal(bare, split="own")


def test_masks_set_on_graphs_in_memory_are_their_own_split() -> None:
    graphs = random_graphs([12, 12])
    for client, one in zip(load(graphs).clients, graphs, strict=True):
        np.testing.assert_array_equal(parts_of(client.masks), parts_of(one.masks))


def test_a_graphs_own_split_is_kept_when_it_is_divided() -> None:
    (one,) = random_graphs([60])
    which = np.arange(60) % 4
    own = replace(one, masks=None, own_masks=(Masks(which == 0, which == 1, which == 2),))
    federation = load(own, partition="random", clients=4)
    assert federation.split == "own"
    for k, client in enumerate(federation.clients):
        nodes = federation.partition.nodes_of(k)
        np.testing.assert_array_equal(
            parts_of(client.masks), parts_of(own.own_masks[0].take(nodes))
        )
    assert not federation.notes
    drawn = load(own, partition="random", clients=4, split="0.6,0.2,0.2")
    assert drawn.split == "0.6,0.2,0.2"
    first = federation.partition.nodes_of(0)
    bare = own.own_masks[0].train & ~np.isin(np.arange(60), first)
    few = replace(own, own_masks=(Masks(bare, which == 1, which == 2),))
    again = load(few, partition="random", clients=4)
    assert any("no train node in the data's own split" in note for note in again.notes)
    assert int(again.clients[0].masks.train.sum()) == 1


def test_a_registered_dataset_says_that_its_own_split_is_not_used(real_data: Path) -> None:
    notes = load("cornell", partition="louvain", clients=5, root=real_data).notes
    assert any("split of their own" in note and "0.6,0.2,0.2:client" in note for note in notes)
    asked = load("cornell", partition="louvain", clients=5, split="own", root=real_data)
    assert asked.split == "own"


def test_arrays_of_a_partition_file_that_are_not_known_are_named(
    graph: Graph, parts: list[npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    arrays = {
        "client_ptr": np.cumsum([0, *map(len, parts)]),
        "client_nodes": np.concatenate(parts),
    }
    nodes = np.arange(len(arrays["client_nodes"])) % 3
    shares = {name: nodes == i for i, name in enumerate(("train", "val", "test"))}
    np.savez(tmp_path / "theirs.npz", **arrays, **shares)
    message = refusal(graph, partition=tmp_path / "theirs.npz")
    assert "test, train, val" in message
    assert "train_mask" in message
    masks = {f"{name}_mask": mask for name, mask in shares.items()}
    np.savez(tmp_path / "more.npz", **arrays, **masks, weights=np.ones(3))
    federation = load(graph, partition=tmp_path / "more.npz")
    assert "the partition file has arrays that are not used: weights" in federation.notes


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("0.5,0.5", "cannot read split"),
        ("0.5,0.3,0.3", "sum to 1"),
        ("0,0.5,0.5", "nothing to train on"),
        ("0.6,0.2,0.2:clients", "did you mean 'client'"),
        ("2-fold", "3 folds or more"),
        ("", "cannot read split"),
    ],
)
def test_a_split_that_cannot_be_is_refused(split: str, message: str) -> None:
    assert message in refusal(TINY, clients=3, split=split)


def test_a_client_without_labels_is_named() -> None:
    north, south = random_graphs([12, 15])
    south = replace(south, labels=np.full(15, UNLABELLED), name="south")
    message = refusal([north, south])
    assert "client 'south' has no train node" in message
    assert "15 nodes, 0 of them labelled" in message


# Features --------------------------------------------------------------------------------------


def test_features_are_left_alone_unless_asked(graph: Graph) -> None:
    federation = load(graph, partition="random", clients=2)
    for k, client in enumerate(federation.clients):
        np.testing.assert_array_equal(
            client.features, graph.features[federation.partition.nodes_of(k)]
        )


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_are_scaled_to_sum_to_one(sparse: bool) -> None:
    one = random_graph(40, sparse=sparse)
    x = abs(dense(one))
    x[3] = 0
    one = replace(one, features=sp.csr_array(x) if sparse else x)
    federation = load(one, partition="random", clients=2, normalize="row")
    for k, client in enumerate(federation.clients):
        raw = x[federation.partition.nodes_of(k)]
        total = raw.sum(axis=1, keepdims=True)
        assert sp.issparse(client.features) == sparse
        assert client.features.dtype == np.float32
        np.testing.assert_allclose(dense(client), raw / np.where(total == 0, 1, total), rtol=1e-6)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("encoding", [None, "agreed", "home"])
def test_columns_are_standardised_by_train_nodes(divided: bool, encoding: str | None) -> None:
    """The mean and deviation are those of the train nodes: of all clients, or each client's own."""
    graphs = [
        replace(one, features=(dense(one) * (1 + k) + 50 * k).astype(np.float32))
        for k, one in enumerate(random_graphs([40, 50]))
    ]
    graphs[0].features[:, 2] = 7  # a column without spread stays finite
    dataset = graphs[1] if divided else graphs
    clients = 2 if divided else None
    found = load(dataset, clients=clients, normalize="standard", encoding=encoding)
    raw = load(dataset, clients=clients).clients
    trained = [dense(g)[parts_of(g.masks)[0]].astype(np.float64) for g in raw]
    for k, client in enumerate(found.clients):
        own = trained[k] if encoding == "home" else np.concatenate(trained)
        spread = own.std(axis=0)
        expected = (dense(raw[k]) - own.mean(axis=0)) / np.where(spread == 0, 1, spread)
        assert dense(client).dtype == np.float32
        np.testing.assert_allclose(dense(client), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found.encodings[k].apply(dense(raw[k])), dense(client))
    assert len(set(found.encodings)) == (2 if encoding == "home" else 1)


def test_sparse_features_are_not_standardised() -> None:
    message = refusal(random_graphs([20, 20], sparse=True), normalize="standard")
    assert "sparse" in message
    assert "'row'" in message


def test_large_features_are_noted_unless_they_are_scaled() -> None:
    graphs = [replace(g, features=g.features * 1000) for g in random_graphs([20, 20])]
    assert any("--normalize standard" in note for note in load(graphs).notes)
    assert load(graphs, normalize="standard").notes == ()
    assert load(random_graphs([20, 20])).notes == ()


# Names and paths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cira"}, "did you mean 'cora'"),
        ({"dataset": "csbm:gaps=0.4"}, "gaps"),
        ({"dataset": TINY, "normalize": "rows"}, "did you mean 'row'"),
        ({"dataset": "./nowhere"}, "nowhere: no such file or folder"),
        ({"dataset": "nowhere.npz"}, "nowhere.npz: no such file or folder"),
        ({"dataset": Path("cora")}, "cora: no such file or folder"),
        ({"dataset": []}, "no graph"),
    ],
)
def test_what_does_not_exist_is_refused(
    options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(options.pop("dataset"), **options)


def test_a_datasets_name_wins_over_a_folder_of_that_name(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sites.parent)
    sites.rename(sites.parent / "csbm")
    assert load("csbm", clients=2).kind == "synthetic"
    assert load("./csbm").kind == "files"
    assert load(Path("csbm")).kind == "files"
    (sites.parent / "csbm").rename(sites.parent / "hospitals")
    assert load("hospitals").kind == "files"


def test_case_and_underscores_do_not_matter() -> None:
    assert_same(load(TINY.upper(), clients=2), load(TINY, clients=2))
    one = random_graph(60, density=0.1)
    first = load(one, partition="Louvain_Capped:delta=3", clients=3)
    assert_same(first, load(one, partition="louvain-capped:delta=3", clients=3))


# Graphs in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [True, False])
def test_one_graph_is_one_client_unless_it_is_to_be_divided(graph: Graph, listed: bool) -> None:
    given = [graph] if listed else graph
    for options in ({}, {"partition": "natural"}, {"clients": 1}):
        federation = load(given, **options)
        assert [client.name for client in federation.clients] == ["one"]
        assert federation.clients[0].num_nodes == graph.num_nodes
        assert federation.partition.name == "natural"
        assert_same(load(**{**federation.request, "dataset": given}), federation)  # type: ignore[arg-type]
    assert len(load(given, clients=3)) == 3
    assert len(load(given, partition="random")) == 10


def test_what_is_no_graph_is_refused(graph: Graph) -> None:
    assert "a dict is not a graph" in refusal([graph, {}])


def test_a_collection_of_several_graphs_is_natural_even_if_it_does_not_say_so() -> None:
    collection = Collection("mine", tuple(random_graphs([20, 30])), ("a", "b", "c"))
    assert [client.num_nodes for client in load(collection).clients] == [20, 30]


def test_several_graphs_in_memory_are_clients(graph: Graph) -> None:
    graphs = random_graphs([20, 30])
    federation = load(graphs)
    assert [client.name for client in federation.clients] == ["client-0", "client-1"]
    assert federation.classes == ("0", "1", "2")
    assert federation.partition.client_ptr.tolist() == [0, 20, 50]
    collection = Collection("mine", tuple(graphs), ("a", "b", "c"), natural=True)
    assert load(collection).classes == ("a", "b", "c")


def test_graphs_that_share_a_name_become_clients_with_names_of_their_own() -> None:
    graphs = [random_graph(20, seed=seed, name="graph") for seed in range(3)]
    assert [g.name for g in load(graphs).clients] == ["client-0", "client-1", "client-2"]
    assert [g.name for g in graphs] == ["graph"] * 3


# The request that makes a federation again -----------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 3},
        {"clients": 3, "split": "5-fold", "seed": 7},
        {"clients": 2, "split": "0.5,0.2,0.3:client", "normalize": "standard"},
    ],
)
def test_a_synthetic_federation_is_made_again_from_its_request(options: dict[str, object]) -> None:
    federation = load(TINY, **options)  # type: ignore[arg-type]
    assert_same(load(**federation.request, seed=federation.seed), federation)  # type: ignore[arg-type]


def test_a_federation_from_files_is_made_again_from_anywhere(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sites.parent)
    federation = load("sites", normalize="row")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_same(load(**federation.request), federation)  # type: ignore[arg-type]


@pytest.mark.parametrize(("way", "clients"), WAYS.items())
def test_a_divided_graph_is_divided_again(graph: Graph, way: str, clients: int | None) -> None:
    federation = load(graph, partition=way, clients=clients, seed=2)
    request = {**federation.request, "dataset": graph}
    assert_same(load(**request, seed=2), federation)  # type: ignore[arg-type]


def test_the_request_of_louvain_min_holds_for_other_seeds(graph: Graph) -> None:
    requests = [load(graph, partition="louvain-min:min_nodes=12", seed=s) for s in range(4)]
    assert len({len(federation) for federation in requests}) > 1
    for federation in requests:
        again = load(**{**requests[0].request, "dataset": graph}, seed=federation.seed)  # type: ignore[arg-type]
        assert_same(again, federation)


def test_a_federation_from_a_partition_file_is_made_again_beside_that_file(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(graph, partition="random", clients=3).partition.save(tmp_path / "mine.npz")
    federation = load(graph, partition=tmp_path / "mine.npz")
    federation.partition.save(tmp_path / "partition.npz")
    monkeypatch.chdir(tmp_path)
    assert_same(load(**{**federation.request, "dataset": graph}), federation)  # type: ignore[arg-type]


# Real data -------------------------------------------------------------------------------------


@pytest.mark.data
def test_cora_is_divided_as_in_openfgl(real_data: Path) -> None:
    federation = load("cora", partition="louvain-capped", clients=10, root=real_data)
    assert federation.kind == "homophilic"
    assert federation.split == "0.2,0.4,0.4:stratified"
    assert sum(client.num_nodes for client in federation.clients) == 2708
    assert max(client.num_nodes for client in federation.clients) <= 270 + 20
    assert len(federation.classes) == 7
    assert not federation.dense
    train = sum(int(parts_of(client.masks)[0].sum()) for client in federation.clients)
    assert 0.15 < train / 2708 <= 0.2
    assert_same(load(**federation.request, root=real_data), federation)  # type: ignore[arg-type]
    assert "2708 nodes" in refusal("cora", clients=2709, root=real_data)


@pytest.mark.parametrize(
    "split", ["0.6,0.2,0.2:client", "0.2,0.4,0.4", "5-fold", "0.3,0.3,0.4:global"]
)
def test_where_clients_share_nodes_no_label_that_is_scored_is_trained_on(
    split: str,
) -> None:
    graph = random_graph(120, seed=4)
    federation = load(graph, partition="metis-overlap", clients=10, split=split)
    layout = federation.partition
    roles: dict[int, set[str]] = {}
    for k, client in enumerate(federation.clients):
        for name, mask in zip(("train", "val", "test"), parts_of(client.masks), strict=True):
            for node in layout.nodes_of(k)[mask].tolist():
                roles.setdefault(node, set()).add(name)
    assert all("train" not in found or found == {"train"} for found in roles.values())
    assert {name for found in roles.values() for name in found} == {"train", "val", "test"}
    told = any("clients share nodes" in note for note in federation.notes)
    assert told is not split.endswith(":global")
    again = load(graph, partition="metis-overlap", clients=10, split=federation.split)
    assert_same(again, federation)


def test_a_partition_file_whose_clients_know_each_others_labels_is_noted(tmp_path: Path) -> None:
    graph = random_graph(60, seed=5)
    nodes = np.arange(60)
    first = Masks(nodes < 20, (nodes >= 20) & (nodes < 40), nodes >= 40)
    second = Masks(nodes >= 50, (nodes >= 20) & (nodes < 50), nodes < 20)
    Partition.of("mine", [nodes, nodes], [first, second]).save(tmp_path / "mine.npz")
    notes = load(graph, partition=tmp_path / "mine.npz").notes
    words = "validation or test nodes of one client and train nodes of another"
    assert f"30 nodes are {words}" in notes


@pytest.mark.data
def test_no_level_of_syn_cora_trains_on_what_another_tests(real_data: Path) -> None:
    federation = load("syn-cora:homophily=all", split="5-fold", root=real_data)
    trained, tested = (
        {
            (row.tobytes(), label)
            for graph in federation.clients
            for row, label in zip(
                graph.features[getattr(graph.masks, name)].toarray(),
                graph.labels[getattr(graph.masks, name)].tolist(),
                strict=True,
            )
        }
        for name in ("train", "test")
    )
    assert len(federation) == 11
    assert len(tested) <= 298  # not the 1,490 of eleven different splits
    assert len(trained & tested) <= 9  # nodes of one level with equal features


def test_clients_with_the_same_nodes_share_one_split(tmp_path: Path) -> None:
    """Else a client's test label would be another's train label."""
    first = random_graph(60, seed=1)
    other = replace(random_graph(60, seed=2), labels=first.labels)
    twin = replace(other, features=first.features)
    masks = [graph.masks for graph in load([first, twin], split="0.6,0.2,0.2").clients]
    assert masks[0] is not None
    assert masks[1] is not None
    for name in ("train", "val", "test"):
        assert np.array_equal(getattr(masks[0], name), getattr(masks[1], name))
    shared = load([first, twin], normalize="standard")
    assert any("same nodes" in note for note in shared.notes)
    shared.partition.save(tmp_path / "mine.npz")
    given = load([first, twin], partition=tmp_path / "mine.npz")
    assert not any("same nodes" in note for note in given.notes)  # whose split that is, who knows
    order = np.random.default_rng(0).permutation(60)
    for features in (first.features, sp.csr_array(first.features)):
        one = replace(first, features=features)
        mixed = replace(twin, features=features[order], labels=first.labels[order])
        shuffled = load([one, mixed], split="5-fold").clients
        for name in ("train", "val", "test"):
            plain, moved = (getattr(graph.masks, name) for graph in shuffled)
            assert np.array_equal(plain[order], moved)
            assert plain.any()
    other_label = replace(mixed, labels=np.roll(mixed.labels, 1))
    assert not any("same nodes" in note for note in load([one, other_label]).notes)
    apart = load([first, other], split="0.6,0.2,0.2")
    assert apart.clients[0].masks is not None
    assert apart.clients[1].masks is not None
    assert not np.array_equal(apart.clients[0].masks.train, apart.clients[1].masks.train)
    assert not any("same nodes" in note for note in apart.notes)


@pytest.mark.parametrize("own", [None, np.array([f"user {v}" for v in range(120)])])
def test_parts_of_a_divided_graph_know_the_ids_of_the_whole(
    graph: Graph, own: npt.NDArray[np.str_] | None
) -> None:
    federation = load(replace(graph, node_ids=own), partition="metis-overlap", clients=5)
    ids = np.arange(120) if own is None else own
    for k, member in enumerate(federation.clients):
        assert member.node_ids is not None
        np.testing.assert_array_equal(member.node_ids, ids[federation.partition.nodes_of(k)])


def test_graphs_that_are_not_divided_get_no_ids(graph: Graph) -> None:
    assert all(member.node_ids is None for member in load([graph, graph]).clients)
