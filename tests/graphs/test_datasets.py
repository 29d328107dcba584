"""Datasets by name: the real ones where they are there, and files of each form written here."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
import urllib.error
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.csbm import population, sample_federation
from polyphily.graphs.datasets import DATASETS, data_root, fetch, is_present, read
from polyphily.graphs.datasets.fraud import following, nearest, standardise
from polyphily.graphs.datasets.reading import parse_dataset, without_twins
from polyphily.graphs.datasets.registry import CHECKSUMS
from polyphily.graphs.edges import canonical_edges
from polyphily.graphs.graph import UNLABELLED, Collection, Features, Graph, Masks

REAL = (
    *("cora", "citeseer", "pubmed", "coauthor-cs", "coauthor-physics", "amazon-photo"),
    *("amazon-computers", "minesweeper", "tolokers", "cornell", "texas", "wisconsin", "actor"),
    *("chameleon", "squirrel", "syn-cora", "twitch"),
    *("reed98", "amherst41", "johnshopkins55", "cornell5", "facebook100"),
)
DENSE = ("minesweeper", "tolokers")
ROLES = ("train", "val", "test")


def dense(features: Features) -> npt.NDArray[np.float32]:
    return features.toarray() if sp.issparse(features) else features


def real(name: str, root: Path) -> Collection:
    if not is_present(name, root):
        pytest.skip(f"{name} is not in {root}")
    return read(name, root=root)


def copy_raw(name: str, source: Path, target: Path) -> None:
    info, options = parse_dataset(name)
    for part in info.chosen(options).values():
        for file in part.files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, target / file)


# Names and options


def test_every_dataset_is_described() -> None:
    absent_here = ("wikics", "ogbn-arxiv", "arxiv-year", "roman-empire", "amazon-ratings")
    others = ("questions", "flickr", "credit", "ieee-fraud", "csbm", "payments", "penn94", "genius")
    others += ("chameleon-filtered", "squirrel-filtered")
    assert set(DATASETS) == {*REAL, *absent_here, *others}
    for name, info in DATASETS.items():
        assert info.name == name
        assert min(info.nodes, info.edges, info.features, info.classes) > 0
        assert info.title
        assert info.citation
        assert info.source
        assert "component" in info.options
        assert len(info.class_names) in (0, info.classes)


def test_listing_does_not_import_torch() -> None:
    code = (
        "import sys, polyphily.graphs.datasets as d; "
        "d.is_present('cora'); print(*({'torch', 'torch_geometric'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ["CoAuthor_CS", " coauthor-cs ", "COAUTHOR-CS"])
def test_names_are_forgiving(name: str) -> None:
    assert DATASETS.find(name) is DATASETS["coauthor-cs"]


def test_a_wrong_name_suggests_the_right_one() -> None:
    with pytest.raises(UserError, match="did you mean 'squirrel'"):
        read("squirel")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cora:slit=public", "unknown option of cora 'slit': did you mean 'split'"),
        ("texas:0.3", "write option=value"),
        ("cora:component=smallest", "unknown value of component"),
        ("squirrel:twins=both", "unknown value of twins"),
        ("cora:twins=one", "unknown option of cora 'twins'"),
        ("cora:split=all", "unknown value of split for cora"),
        ("syn-cora:0.35", "unknown value of homophily"),
        ("syn-cora:many", "unknown value of homophily"),
        ("syn-cora:0.3,homophily=0.4", "twice"),
        ("csbm:nods=3", "did you mean 'nodes'"),
        ("csbm:mu=strong", "must be a number"),
    ],
)
def test_wrong_options_are_the_users_mistake(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(spec, root=tmp_path)


@pytest.mark.parametrize("text", ["0.3", ".30", "homophily=0.3", "homophily = 0.30 "])
def test_levels_of_syn_cora_may_be_written_in_several_ways(text: str) -> None:
    info, options = parse_dataset(f"syn-cora:{text}")
    assert list(info.chosen(options)) == ["0.3"]


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path / "own"))
    assert data_root() == tmp_path / "own"
    monkeypatch.delenv("POLYPHILY_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "polyphily"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "polyphily"


def test_csbm_is_passed_on() -> None:
    own = set(inspect.signature(population).parameters) - {"clients", "seed"}
    assert set(DATASETS["csbm"].options) - {"component"} == own
    assert is_present("csbm")
    drawn = read("csbm:nodes=60-80,homophily=0.3,gap=0.2", seed=3, clients=4)
    again = sample_federation(clients=4, seed=3, nodes="60-80", homophily=0.3, gap=0.2)
    assert drawn.natural
    assert [graph.num_edges for graph in drawn.graphs] == [g.num_edges for g in again.graphs]


# Real files


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_known_statistics(name: str, real_data: Path) -> None:
    collection, info = real(name, real_data), DATASETS[name]
    graphs = collection.graphs
    assert sum(graph.num_nodes for graph in graphs) == info.nodes
    assert sum(graph.num_edges for graph in graphs) == info.edges
    assert {graph.num_features for graph in graphs} == {info.features}
    assert len(collection.classes) == info.classes
    labels = set(np.concatenate([graph.labels for graph in graphs])) - {UNLABELLED}
    assert labels == set(range(info.classes))
    assert collection.natural == info.natural
    for graph in graphs:
        assert sp.issparse(graph.features) == (name not in DENSE)
        assert graph.features.dtype == np.float32
        for masks in graph.own_masks:
            assert not (masks.train & masks.val | masks.train & masks.test).any()
            assert not (masks.val & masks.test).any()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("cora", 1),
        ("cora:split=geom-gcn", 10),
        ("texas", 10),
        ("tolokers", 10),
        ("amazon-photo", 0),
    ],
)
def test_own_splits(name: str, splits: int, real_data: Path) -> None:
    (graph,) = real(name, real_data).graphs
    assert len(graph.own_masks) == splits
    if name == "cora":
        masks = graph.own_masks[0]
        assert (masks.train.sum(), masks.val.sum(), masks.test.sum()) == (140, 500, 1000)


@pytest.mark.data
def test_twitch_is_a_federation_of_countries(real_data: Path) -> None:
    collection = real("twitch", real_data)
    assert [graph.name for graph in collection.graphs] == ["de", "en", "es", "fr", "pt", "ru"]
    assert collection.classes == ("general", "mature")


@pytest.mark.data
def test_twitch_countries_have_to_agree(real_data: Path, tmp_path: Path) -> None:
    real("twitch", real_data)
    copy_raw("twitch", real_data, tmp_path)
    odd = {"features": np.ones((3, 128)), "target": np.zeros(3, int), "edges": np.array([[0, 1]])}
    np.savez(tmp_path / "Twitch/RU/raw/RU.npz", **odd)
    with pytest.raises(UserError, match="'ru': 128"):
        read("twitch", root=tmp_path)


@pytest.mark.data
def test_syn_cora_has_the_homophily_asked_for(real_data: Path) -> None:
    for level in (0.0, 0.3, 1.0):
        (graph,) = real(f"syn-cora:{level}", real_data).graphs
        assert np.mean(graph.labels[graph.edges[0]] == graph.labels[graph.edges[1]]) == (
            pytest.approx(level, abs=0.01)
        )
    federation = real("syn-cora:all", real_data)
    assert federation.natural
    assert len({graph.name for graph in federation.graphs}) == 11


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "nodes", "edges"), [("cora", 2485, 5069), ("citeseer", 2120, 3679)]
)
def test_largest_component(name: str, nodes: int, edges: int, real_data: Path) -> None:
    whole = real(name, real_data).graphs[0]
    (graph,) = read(f"{name}:component=largest", root=real_data).graphs
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges)
    assert len(graph.own_masks) == len(whole.own_masks)
    assert len(graph.own_masks[0].train) == nodes


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("amazon-photo", ""),
        ("cora", "public"),
        ("citeseer", "geom-gcn"),
        ("citeseer", "public"),
        ("texas", ""),
        ("actor", ""),
        ("chameleon", ""),
        ("minesweeper", ""),
        ("twitch", "pt"),
    ],
)
def test_reading_equals_torch_geometric(
    name: str, part: str, real_data: Path, tmp_path: Path
) -> None:
    info = DATASETS[name]
    spec = f"{name}:{info.choice}={part}" if info.choice else name
    graphs = real(spec, real_data).graphs
    copy_raw(spec, real_data, tmp_path)
    graph = next(graph for graph in graphs if graph.name in (name, part))
    assert_equals_pyg(graph, info.parts[part].getter, info.parts[part].arguments, tmp_path)


def assert_equals_pyg(graph: Graph, getter: str, arguments: Any, root: Path) -> None:
    """The graph is what torch_geometric's own class makes of the same files."""
    datasets = importlib.import_module("torch_geometric.datasets")
    data = getattr(datasets, getter)(str(root / getter), **arguments)[0]
    np.testing.assert_array_equal(dense(graph.features), data.x.numpy())
    np.testing.assert_array_equal(graph.labels, data.y.numpy())
    np.testing.assert_array_equal(
        graph.edges, canonical_edges(data.edge_index.numpy(), graph.num_nodes)
    )
    for number, masks in enumerate(graph.own_masks):
        for role in ("train", "val", "test"):
            theirs = data[f"{role}_mask"].numpy()
            column = theirs[:, number] if theirs.ndim == 2 else theirs
            np.testing.assert_array_equal(getattr(masks, role), column)


@pytest.mark.data
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_physics_stays_sparse_from_file_to_graph(real_data: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from polyphily.graphs.datasets import read; "
        "read('coauthor-physics', root=Path(sys.argv[1])); assert 'torch' not in sys.modules; "
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line])"
    )
    if not is_present("coauthor-physics", real_data):
        pytest.skip("coauthor-physics is not there")
    command = [sys.executable, "-c", code, str(real_data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400 * 1024  # kB; the dense features alone would take 1,160 MB


# Files that are absent or damaged


def test_files_are_where_torch_geometric_puts_them(tmp_path: Path) -> None:
    datasets = importlib.import_module("torch_geometric.datasets")
    idle = dict.fromkeys(("_download", "_process", "load"), lambda self, *rest: None)
    checked = 0
    for info in DATASETS.values():
        for part in info.parts.values():
            if part.getter in ("", "ogb", "https", "linkx"):
                continue
            kind = type("Idle", (getattr(datasets, part.getter),), idle)
            dataset = kind(str(tmp_path / part.getter), **part.arguments)
            theirs = [str(Path(path).relative_to(tmp_path)) for path in dataset.raw_paths]
            assert list(part.files[: len(theirs)]) == theirs
            checked += 1
    assert checked > 20


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name",
    [
        *("cora", "pubmed:split=geom-gcn", "texas", "coauthor-cs", "twitch"),
        *("reed98", "facebook100", "genius", "squirrel-filtered"),
    ],
)
def test_without_network_the_message_says_what_belongs_where(name: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    info, options = parse_dataset(name)
    assert not is_present(name, root)
    with pytest.raises(UserError) as caught:
        read(name, root=root)
    message = str(caught.value)
    first = next(iter(info.chosen(options).values())).files[0]
    for wanted in (f"{info.name} could not be downloaded", str(root), first, info.source):
        assert wanted in message
    assert not list(root.iterdir())


@pytest.mark.parametrize("name", ["syn-cora", "credit", "ieee-fraud"])
def test_data_to_be_fetched_by_hand(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} must be downloaded by hand") as caught:
        read(name, root=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert DATASETS[name].source in str(caught.value)


PHOTO = "Amazon/Photo/raw/amazon_electronics_photo.npz"


def photo_download(monkeypatch: pytest.MonkeyPatch, fill: Callable[[Path], None]) -> None:
    """Has the class for Amazon write its file with `fill` in place of a download."""

    def download(self: Any) -> None:
        fill(Path(self.raw_paths[0]))

    monkeypatch.setattr("torch_geometric.datasets.Amazon.download", download)


def tiny_npz(path: Path) -> None:
    words = sp.csr_array(np.array([[2.0, 0, 0], [0, 1, 1]]))
    links = sp.csr_array(np.array([[1.0, 1], [0, 0]]))
    arrays = {
        f"{prefix}_{part}": getattr(matrix, part)
        for prefix, matrix in (("attr", words), ("adj", links))
        for part in ("data", "indices", "indptr", "shape")
    }
    np.savez(path, labels=np.array([0, 1]), **arrays)


def test_a_download_is_moved_into_place_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    photo_download(monkeypatch, tiny_npz)
    (graph,) = read("amazon-photo", root=tmp_path).graphs
    assert dense(graph.features).tolist() == [[1, 0, 0], [0, 1, 1]]
    assert graph.edges.tolist() == [[0, 1], [1, 0]]
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path(PHOTO)]
    photo_download(monkeypatch, lambda path: pytest.fail("downloaded again"))
    read("amazon-photo", root=tmp_path)


def test_a_broken_download_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def half(path: Path) -> None:
        path.write_bytes(b"PK half")
        raise ConnectionResetError("connection reset")

    photo_download(monkeypatch, half)
    with pytest.raises(UserError, match="connection reset"):
        read("amazon-photo", root=tmp_path)
    assert not list(tmp_path.iterdir())

    photo_download(monkeypatch, lambda path: path.write_bytes(b"<html>Not found</html>") and None)
    with pytest.raises(UserError, match="the downloaded files cannot be read"):
        read("amazon-photo", root=tmp_path)
    assert not is_present("amazon-photo", tmp_path)

    photo_download(monkeypatch, tiny_npz)
    assert read("amazon-photo", root=tmp_path).graphs[0].num_nodes == 2


# Facebook100, genius and filtered graphs


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test in place of those that were published."""
    monkeypatch.setattr("polyphily.graphs.datasets.reading.check_intact", lambda *args: None)


def university(path: Path, users: list[list[int]]) -> None:
    """Write a university in which the first user knows all others."""
    links = np.zeros((len(users), len(users)))
    links[0, 1:] = links[1:, 0] = 1
    path.parent.mkdir(parents=True)
    scipy.io.savemat(path, {"A": sp.csc_matrix(links), "local_info": np.array(users, np.uint16)})


@pytest.mark.usefixtures("own_files")
def test_universities_share_a_vocabulary(tmp_path: Path) -> None:
    # status, gender, major, second major, dorm, year, high school
    users = {
        "reed98": [[1, 2, 7, 0, 3, 2005, 9], [1, 0, 8, 0, 3, 2006, 9]],
        "amherst41": [[2, 1, 7, 4, 5, 2005, 0], [1, 1, 7, 0, 5, 2005, 9], [1, 2, 8, 0, 3, 0, 9]],
        "johnshopkins55": [[1, 1, 7, 0, 3, 2005, 9]],
        "cornell5": [[1, 2, 7, 0, 3, 2005, 9]],
    }
    for name, table in users.items():
        university(tmp_path / f"LINKXDataset/{name}/raw/data.mat", table)
    graphs = {graph.name: graph for graph in read("facebook100", root=tmp_path).graphs}
    assert list(graphs) == list(users)
    words = sorted(
        {
            (column, user[column])
            for table in users.values()
            for user in table
            for column in (0, 2, 3, 4, 5, 6)
        }
    )
    for name, table in users.items():
        wanted = [
            [float(user[column] == value) for column, value in words]  # in the order of columns
            for user in table
        ]
        assert dense(graphs[name].features).tolist() == wanted
    assert graphs["reed98"].labels.tolist() == [1, UNLABELLED]
    assert graphs["amherst41"].edges.tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]
    (alone,) = read("reed98", root=tmp_path).graphs
    assert alone.num_features == 1 + 2 + 1 + 1 + 2 + 1


def test_genius(tmp_path: Path) -> None:
    path = tmp_path / "LINKXDataset/genius/raw/data.mat"
    path.parent.mkdir(parents=True)
    table = {"edge_index": [[0, 1], [1, 2]], "node_feat": np.eye(3, 12), "label": [[0, 1, 0]]}
    scipy.io.savemat(path, table)
    (graph,) = read("genius", root=tmp_path).graphs
    assert graph.labels.tolist() == [0, 1, 0]
    assert graph.edges.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert dense(graph.features).tolist() == np.eye(3, 12).tolist()


def test_a_file_at_a_fixed_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    masks = {f"{role}_masks": np.eye(3, dtype=bool)[i : i + 1] for i, role in enumerate(ROLES)}
    links = np.array([[0, 1], [1, 2]])
    np.savez(buffer, node_features=np.eye(3), edges=links, node_labels=np.arange(3), **masks)
    asked: list[str] = []

    def answer(url: str, ends_at: str = "") -> io.BytesIO:
        asked.append(url)
        found = io.BytesIO(buffer.getvalue())
        found.geturl = lambda: ends_at or url  # type: ignore[attr-defined]
        return found

    insecure = partial(answer, ends_at="http://elsewhere.example/file")
    monkeypatch.setattr("urllib.request.urlopen", insecure)
    with pytest.raises(UserError, match="refused to download from http://elsewhere"):
        read("chameleon-filtered", root=tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", answer)
    (graph,) = read("chameleon-filtered", root=tmp_path).graphs
    assert graph.num_nodes == 3
    assert len(graph.own_masks) == 1
    assert all(url.startswith("https://") for url in asked)


def test_a_download_that_is_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.mat"
    path.write_bytes(b"something")
    with pytest.raises(UserError, match="is not the published file"):
        fetch._check_download(path, "0" * 64)
    fetch._check_download(path, hashlib.sha256(b"something").hexdigest())
    fetch._check_download(path, None)


@pytest.mark.data
@pytest.mark.parametrize(
    "file", ["Planetoid/Cora/raw/ind.cora.tx", "Planetoid/Cora/raw/ind.cora.test.index"]
)
def test_a_file_that_has_changed_is_not_used(file: str, real_data: Path, tmp_path: Path) -> None:
    real("cora", real_data)
    copy_raw("cora", real_data, tmp_path)
    read("cora", root=tmp_path)
    with (tmp_path / file).open("ab") as stream:
        stream.write(b"\n")
    with pytest.raises(UserError, match="is not the published file") as caught:
        read("cora", root=tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert "Delete it, and it is downloaded again" in str(caught.value)


@pytest.mark.data
def test_the_checksums_are_those_of_the_published_files(real_data: Path) -> None:
    """Every file with a checksum is one that a dataset reads, and those at hand have it."""
    used = {f for i in DATASETS.values() for part in i.parts.values() for f in part.sha256}
    assert set(CHECKSUMS) <= used
    assert len(used) >= 150
    for info in DATASETS.values():
        for part in info.parts.values():
            if part.sha256 and not fetch.missing([part], real_data):
                fetch.check_intact(info, [part], real_data)


def test_every_download_is_over_https() -> None:
    datasets = importlib.import_module("torch_geometric.datasets")
    for info in DATASETS.values():
        assert "http://" not in info.source
        for part in info.parts.values():
            getter = {"linkx": "LINKXDataset"}.get(part.getter, part.getter)
            kind = getattr(datasets, getter, None)
            addresses = [v for n, v in vars(kind).items() if n.endswith("url")] if kind else []
            addresses += [str(part.arguments["url"])] if "url" in part.arguments else []
            assert all(str(address).startswith("https://") for address in addresses), info.name
    with pytest.raises(UserError, match="only https is safe"):
        fetch._secure("http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip")


def broken_edge(arrays: dict[str, Any]) -> None:
    arrays["adj_indices"] = np.array([0, 7])


def broken_length(arrays: dict[str, Any]) -> None:
    arrays["labels"] = np.array([0, 1, 1])


def broken_label(arrays: dict[str, Any]) -> None:
    arrays["labels"] = np.array([0, 99])


def broken_absence(arrays: dict[str, Any]) -> None:
    del arrays["labels"]


def broken_pickle(arrays: dict[str, Any]) -> None:
    arrays["labels"] = np.array([0, {}], dtype=object)


@pytest.mark.parametrize(
    "damage", [broken_edge, broken_length, broken_label, broken_absence, broken_pickle]
)
def test_damaged_files_are_named_and_kept(
    damage: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = tmp_path / PHOTO
    path.parent.mkdir(parents=True)
    tiny_npz(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    damage(arrays)
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="cannot be read") as caught:
        read("amazon-photo", root=tmp_path)
    assert str(path.parent) in str(caught.value)
    assert path.exists()


class Malicious:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.victim),)


@pytest.mark.data
@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize("end", ["x", "graph"])
def test_a_malicious_pickle_is_refused(end: str, real_data: Path, tmp_path: Path) -> None:
    real("cora", real_data)
    copy_raw("cora", real_data, tmp_path)
    victim = tmp_path / "victim"
    path = tmp_path / f"Planetoid/Cora/raw/ind.cora.{end}"
    path.write_bytes(pickle.dumps(Malicious(victim)))
    with pytest.raises(UserError, match="refused to load"):
        read("cora", root=tmp_path)
    assert not victim.exists()


@pytest.mark.data
@pytest.mark.usefixtures("own_files")
def test_a_damaged_pickle_is_the_users_business(real_data: Path, tmp_path: Path) -> None:
    real("cora", real_data)
    copy_raw("cora", real_data, tmp_path)
    path = tmp_path / "Planetoid/Cora/raw/ind.cora.allx"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        read("cora", root=tmp_path)


# Forms of which no real file is at hand


def test_wikics(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    roles = rng.integers(0, 3, (20, 6))
    data = {
        "features": rng.normal(size=(6, 300)).tolist(),
        "labels": [0, 1, 2, 3, 9, 1],
        "links": [[1, 0], [0, 2], [], [4], [], [2]],
        "train_masks": (roles == 0).tolist(),
        "val_masks": (roles == 1).tolist(),
        "stopping_masks": (roles == 1).tolist(),
        "test_mask": [True, False, True, False, False, False],
    }
    path = tmp_path / "WikiCS/raw/data.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    (graph,) = read("wikics", root=tmp_path).graphs
    assert graph.num_edges == 4
    assert len(graph.own_masks) == 20
    assert_equals_pyg(graph, "WikiCS", {"is_undirected": True}, tmp_path)


def test_flickr(tmp_path: Path) -> None:
    raw = tmp_path / "Flickr/raw"
    raw.mkdir(parents=True)
    adjacency = sp.csr_array(np.array([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]]))
    sp.save_npz(raw / "adj_full.npz", adjacency)
    np.save(raw / "feats.npy", np.random.default_rng(0).normal(size=(4, 500)))
    (raw / "class_map.json").write_text(json.dumps({"2": 6, "0": 1, "1": 0, "3": 2}))
    (raw / "role.json").write_text(json.dumps({"tr": [0, 3], "va": [1], "te": [2]}))
    (graph,) = read("flickr", root=tmp_path).graphs
    assert graph.num_edges == 3
    assert_equals_pyg(graph, "Flickr", {}, tmp_path)


YEARS = np.repeat([2010, 2012, 2013, 2015, 2019], [2, 3, 1, 2, 2])


def write_arxiv(folder: Path) -> None:
    """A small folder of the form that ogb's archive has."""
    tables: dict[str, npt.NDArray[Any]] = {
        "raw/edge": np.array([[0, 1], [1, 0], [2, 9], [4, 4]]),
        "raw/node-feat": np.random.default_rng(0).normal(size=(10, 128)).round(3),
        "raw/node-label": np.arange(10)[:, None] % 40,
        "raw/node_year": YEARS[:, None],
        "split/time/train": np.arange(5)[:, None],
        "split/time/valid": np.array([[5], [6]]),
        "split/time/test": np.array([[7], [8], [9]]),
    }
    for name, values in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(values).to_csv(path, header=False, index=False)
    names = folder / "mapping/labelidx2arxivcategeory.csv.gz"
    names.parent.mkdir()
    lines = "".join(f"{i},arxiv cs {i}\n" for i in range(40))
    names.write_bytes(gzip.compress(f"label idx,arxiv category\n{lines}".encode()))


def test_arxiv(tmp_path: Path) -> None:
    write_arxiv(tmp_path / "ogbn_arxiv")
    collection = read("ogbn-arxiv", root=tmp_path)
    (graph,) = collection.graphs
    assert graph.edges.tolist() == [[0, 1, 2, 9], [1, 0, 9, 2]]
    assert graph.features.shape == (10, 128)
    assert collection.classes[3] == "arxiv cs 3"
    (masks,) = graph.own_masks
    assert [np.flatnonzero(m).tolist() for m in (masks.train, masks.val, masks.test)] == [
        [0, 1, 2, 3, 4],
        [5, 6],
        [7, 8, 9],
    ]


def test_arxiv_year_has_classes_of_quintiles(tmp_path: Path) -> None:
    write_arxiv(tmp_path / "ogbn_arxiv")
    (graph,) = read("arxiv-year", root=tmp_path).graphs
    bounds = np.quantile(YEARS, [0.2, 0.4, 0.6, 0.8])
    by_definition = [sum(bool(bound <= year) for bound in bounds) for year in YEARS]
    assert graph.labels.tolist() == by_definition
    assert graph.own_masks == ()


def test_arxiv_is_downloaded_by_ogb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(UserError, match=r"pip install 'polyphily\[ogb\]'"):
        read("ogbn-arxiv", root=tmp_path / "data")

    def download_url(url: str, folder: str) -> str:
        assert url == DATASETS["ogbn-arxiv"].source
        write_arxiv(tmp_path / "arxiv")
        return shutil.make_archive(f"{folder}/arxiv", "zip", tmp_path, "arxiv")

    url = types.ModuleType("ogb.utils.url")
    url.download_url = download_url  # type: ignore[attr-defined]
    url.extract_zip = lambda path, folder: zipfile.ZipFile(path).extractall(folder)  # type: ignore[attr-defined]
    for name in ("ogb", "ogb.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ogb.utils.url", url)
    assert read("ogbn-arxiv", root=tmp_path / "data").graphs[0].num_nodes == 10
    assert is_present("arxiv-year", tmp_path / "data")


# Credit and IEEE-CIS


def write_credit(root: Path, people: int = 120, spelling: str = "nifty") -> pd.DataFrame:
    rng = np.random.default_rng(1)
    education = rng.integers(0, 7, people)
    amounts = rng.lognormal(8, 1, (people, 6))
    default = rng.integers(0, 2, people)
    if spelling == "nifty":
        months = "MonthsWithZeroBalanceOverLast6Months"
        table = pd.DataFrame({"NoDefaultNextMonth": 1 - default, "Married": 1, "Single": 0})
        table = table.assign(Age=rng.integers(20, 70, people), EducationLevel=education % 4)
        table = table.assign(MaxBillAmountOverLast6Months=amounts[:, 0], TotalOverdueCounts=default)
        table[months] = rng.integers(0, 6, people)
    else:
        table = pd.DataFrame({"ID": np.arange(1, people + 1), "SEX": 1, "EDUCATION": education})
        table = table.assign(PAY_0=rng.integers(-2, 3, people), BILL_AMT1=amounts[:, 0])
        table = table.assign(PAY_AMT1=amounts[:, 1]).assign(**{spelling: default})
    (root / "credit").mkdir(parents=True)
    table.to_csv(root / "credit/credit.csv", index=False)
    return table


def test_credit_with_published_edges(tmp_path: Path) -> None:
    table = write_credit(tmp_path)
    same = np.flatnonzero(table["EducationLevel"] == 1)[:2]
    other = int(np.flatnonzero(table["EducationLevel"] == 2)[0])
    lines = [f"{same[0]:.6e} {same[1]:.6e}", f"{same[0]:.6e} {other:.6e}"]
    (tmp_path / "credit/credit_edges.txt").write_text("\n".join(lines))
    collection = read("credit", root=tmp_path)
    assert collection.natural
    assert collection.classes == ("pays", "defaults")
    assert [graph.name for graph in collection.graphs] == [f"education-{i}" for i in range(4)]
    assert [graph.num_edges for graph in collection.graphs] == [0, 1, 0, 0]  # one edge was cut
    labels = np.concatenate([graph.labels for graph in collection.graphs])
    assert labels.sum() == (table["NoDefaultNextMonth"] == 0).sum()
    assert {graph.num_features for graph in collection.graphs} == {len(table.columns) - 2}
    linked = read("credit:neighbours=3", root=tmp_path)
    assert all(graph.num_edges >= 1.5 * graph.num_nodes for graph in linked.graphs)


@pytest.mark.parametrize("label", ["default payment next month", "default.payment.next.month"])
def test_credit_in_the_form_of_uci(label: str, tmp_path: Path) -> None:
    table = write_credit(tmp_path, spelling=label)
    collection = read("credit:neighbours=2", root=tmp_path)
    assert [graph.name for graph in collection.graphs] == [f"education-{i}" for i in range(4)]
    for level, graph in enumerate(collection.graphs):
        members = table[table["EDUCATION"].isin([level] if level else [0, 4, 5, 6])]
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == members["ID"].tolist()
        assert graph.labels.tolist() == members[label].tolist()
        assert graph.num_features == len(table.columns) - 2
        degree = np.bincount(graph.edges[0], minlength=graph.num_nodes)
        assert degree.min() >= 2


def test_credit_without_its_columns(tmp_path: Path) -> None:
    (tmp_path / "credit").mkdir()
    path = tmp_path / "credit/credit.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="NoDefaultNextMonth"):
        read("credit", root=tmp_path)
    path.write_text("NoDefaultNextMonth,b\n1,2\n")
    with pytest.raises(UserError, match="column EducationLevel is missing"):
        read("credit", root=tmp_path)


def write_ieee(root: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(2)
    number = 200
    transactions = pd.DataFrame(
        {
            "TransactionID": 1000 + np.arange(number),
            "isFraud": rng.integers(0, 2, number),
            "TransactionDT": rng.permutation(number) * 10,
            "TransactionAmt": rng.lognormal(3, 1, number),
            "ProductCD": rng.choice(list("CHRSW"), number),
            "card1": rng.integers(0, 4, number),
            "addr1": rng.choice([1.0, np.nan], number),
            "P_emaildomain": "example.org",
            "dist1": np.where(rng.random(number) < 0.5, np.nan, 3.0),
            "C1": rng.normal(size=number),
            "D1": np.nan,
            "V1": rng.normal(size=number),
        }
    )
    with_identity = transactions[transactions["ProductCD"] != "W"]["TransactionID"]
    identity = pd.DataFrame({"TransactionID": with_identity, "id_01": 0.0, "DeviceInfo": "phone"})
    (root / "ieee-fraud").mkdir(parents=True)
    transactions.to_csv(root / "ieee-fraud/train_transaction.csv", index=False)
    identity.to_csv(root / "ieee-fraud/train_identity.csv", index=False)
    return transactions, identity


def test_ieee_fraud_links_what_follows_in_time(tmp_path: Path) -> None:
    transactions, _ = write_ieee(tmp_path)
    collection = read("ieee-fraud:reach=2", root=tmp_path)
    assert collection.natural
    assert [graph.name for graph in collection.graphs] == [f"product-{c}" for c in "chrs"]
    for graph in collection.graphs:
        members = transactions[transactions["ProductCD"] == graph.name[-1].upper()]
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == members["TransactionID"].tolist()
        assert graph.labels.tolist() == members["isFraud"].tolist()
        assert graph.num_features == 5  # TransactionAmt, dist1, C1, D1, V1
        assert np.isfinite(dense(graph.features)).all()
        assert graph.num_edges == 2 * graph.num_nodes - 3
        rank = np.argsort(np.argsort(members["TransactionDT"].to_numpy()))
        assert np.abs(rank[graph.edges[0]] - rank[graph.edges[1]]).max() == 2


def test_ieee_fraud_may_link_by_card(tmp_path: Path) -> None:
    transactions, _ = write_ieee(tmp_path)
    rows = transactions.set_index("TransactionID")
    for graph in read("ieee-fraud:link=card", root=tmp_path).graphs:
        assert graph.node_ids is not None
        ends = [rows.loc[graph.node_ids[end]] for end in graph.edges]
        assert (ends[0]["card1"].to_numpy() == ends[1]["card1"].to_numpy()).all()
        np.testing.assert_array_equal(ends[0]["addr1"], ends[1]["addr1"])


@pytest.mark.parametrize("spec", ["reach=0", "reach=many", "link=colour"])
def test_ieee_fraud_with_wrong_options(spec: str, tmp_path: Path) -> None:
    write_ieee(tmp_path)
    with pytest.raises(UserError):
        read(f"ieee-fraud:{spec}", root=tmp_path)


def test_ieee_fraud_without_its_columns(tmp_path: Path) -> None:
    transactions, _ = write_ieee(tmp_path)
    smaller = transactions.drop(columns="ProductCD")
    smaller.to_csv(tmp_path / "ieee-fraud/train_transaction.csv", index=False)
    with pytest.raises(UserError, match="column ProductCD is missing"):
        read("ieee-fraud", root=tmp_path)


def test_standardise() -> None:
    values = standardise([[1.0, 5, np.nan], [3, 5, np.nan], [np.nan, 5, np.nan]])
    assert values.tolist() == [[-1, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_following_caps_the_degree() -> None:
    group, moment = np.zeros(50, dtype=np.int64), np.arange(50)[::-1]
    pairs = following(group, moment, 3)
    assert np.abs(pairs[0] - pairs[1]).max() == 3
    assert np.bincount(pairs.ravel()).max() == 6
    assert following(group[:1], moment[:1], 3).shape == (2, 0)


def test_nearest_stays_within_the_group() -> None:
    points = np.array([[0.0], [0.1], [5.0], [0.05], [5.2]], dtype=np.float32)
    pairs = canonical_edges(nearest(points, np.array([0, 0, 0, 1, 1]), 1), 5)
    assert pairs.tolist() == [[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]]


def test_people_alike_in_everything_are_not_all_linked_to_the_same_few() -> None:
    pairs = canonical_edges(nearest(np.zeros((300, 5)), np.zeros(300, dtype=np.int64), 5), 300)
    assert np.bincount(pairs[0]).max() < 40


def test_of_twins_the_first_is_kept() -> None:
    """0 and 3 are twins, and so are 1 and 2, their neighbours; 6 and 7 have no neighbour."""
    ends = np.array([[0, 0, 3, 3, 4], [1, 2, 1, 2, 5]])
    features = np.arange(8, dtype=np.float32)[:, None]
    graph = without_twins(Graph.build(features, ends, np.zeros(8, dtype=np.int64)))
    assert features_of(graph) == [0, 1, 4, 5, 6, 7]
    assert graph.edges.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]


def features_of(graph: Graph) -> list[float]:
    assert isinstance(graph.features, np.ndarray)
    return graph.features[:, 0].tolist()


@pytest.mark.data
@pytest.mark.parametrize(("name", "nodes"), [("squirrel", 3307), ("chameleon", 1223)])
def test_graphs_of_web_pages_without_twins(name: str, nodes: int, real_data: Path) -> None:
    assert "twins=one" in real(name, real_data).notes[0]
    single = read(f"{name}:twins=one", root=real_data)
    assert single.notes == ()
    (graph,) = single.graphs
    assert graph.num_nodes == nodes
    assert len(graph.own_masks[0].train) == nodes


def test_masks_are_carried_into_the_component(tmp_path: Path) -> None:
    write_arxiv(tmp_path / "ogbn_arxiv")
    (graph,) = read("ogbn-arxiv:component=largest", root=tmp_path).graphs
    assert graph.num_nodes == 2
    assert isinstance(graph.own_masks[0], Masks)
    assert graph.own_masks[0].train.tolist() == [True, True]
