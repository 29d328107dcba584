"""Readers of the file formats of datasets. They keep features sparse and unpickle nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.datasets.assembly import (
    build,
    collect,
    compressed_rows,
    edges_of,
    flags,
    flags_at,
    geom_gcn_masks,
    load_npz,
    read_table,
)
from polyphily.graphs.datasets.facebook import read_facebook, read_genius
from polyphily.graphs.datasets.fraud import read_credit, read_ieee_fraud
from polyphily.graphs.datasets.info import Request
from polyphily.graphs.datasets.planetoid import read_planetoid
from polyphily.graphs.graph import SPARSE_BELOW, Collection, Features, Graph, IntArray, Masks

YEAR_CLASSES = 5


def read_npz(request: Request) -> Collection:
    """Read Coauthor or Amazon: one archive with adjacency and features as CSR arrays."""
    (path,) = request.paths
    return collect(request, [_npz_graph(request, path)], natural=False)


def read_syn_cora(request: Request) -> Collection:
    """Read one level of homophily, or every level as a client."""
    several = len(request.files) > 1
    graphs = [
        _npz_graph(request, path, f"homophily-{level}" if several else "")
        for level, (path,) in request.files.items()
    ]
    return collect(request, graphs, natural=several)


def _npz_graph(request: Request, path: Path, name: str = "") -> Graph:
    with load_npz(path) as archive:
        words = compressed_rows(archive, "attr_").astype(np.float32)
        adjacency = compressed_rows(archive, "adj_")
        labels = archive["labels"]
    words.sum_duplicates()
    words.data[words.data > 0] = 1  # binary, as in torch_geometric
    return build(request, words, edges_of(adjacency), labels, name=name)


def read_twitch(request: Request) -> Collection:
    """Read one graph per country. There are no edges between countries."""
    graphs = []
    for country, (path,) in request.files.items():
        with load_npz(path) as archive:
            features, edges, target = archive["features"], archive["edges"], archive["target"]
        graphs.append(build(request, _thin(features), edges.T, target, name=country))
    widths = {graph.name: graph.num_features for graph in graphs}
    if len(set(widths.values())) > 1:
        raise UserError(
            "twitch: the countries' files do not belong together, because their numbers of "
            f"features differ ({widths}). Take all six from one source: {request.info.source}"
        )
    return collect(request, graphs, natural=True)


def _thin(features: npt.NDArray[np.generic]) -> Features:
    """Convert features with few non-zero entries to sparse before a float32 copy is made."""
    thin = np.count_nonzero(features) < SPARSE_BELOW * features.size
    return sp.csr_array(features) if thin else features.astype(np.float32)


def read_geom_gcn(request: Request) -> Collection:
    """Read WebKB or Wikipedia: a line per node with all its features."""
    return _geom_gcn(request, _positions_of_ones)


def read_actor(request: Request) -> Collection:
    """Read Actor: a line per node with the numbers of the words that occur."""
    return _geom_gcn(request, lambda line: np.array(line.split(b","), dtype=np.int64))


def _positions_of_ones(line: bytes) -> IntArray:
    """Return the positions of the ones in a comma-separated row of zeros and ones.

    >>> _positions_of_ones(b"0,1,0,1").tolist()
    [1, 3]
    """
    characters = np.frombuffer(line, dtype=np.uint8)
    ones = characters[::2] == ord("1")
    if not (ones | (characters[::2] == ord("0"))).all():
        raise ValueError("a feature is neither 0 nor 1")
    return np.flatnonzero(ones)


def _geom_gcn(request: Request, words_of: Callable[[bytes], IntArray]) -> Collection:
    nodes, edges, *splits = request.paths
    numbers, words, labels = [], [], []
    with nodes.open("rb") as file:
        next(file)
        for line in file:
            number, listed, label = line.split(b"\t")
            numbers.append(int(number))
            words.append(words_of(listed))
            labels.append(int(label))
    order = np.argsort(numbers)
    column = np.concatenate([words[i] for i in order])
    start = np.concatenate([[0], np.cumsum([len(words[i]) for i in order])])
    ones = np.ones(len(column), dtype=np.float32)
    shape = (len(numbers), request.info.features)
    features = compressed_rows({"data": ones, "indices": column, "indptr": start, "shape": shape})
    features.sum_duplicates()
    features.data[:] = 1
    pairs = np.loadtxt(edges, dtype=np.int64, skiprows=1).T
    masks = geom_gcn_masks(splits)
    graph = build(request, features, pairs, np.array(labels)[order], masks)
    return collect(request, [graph], natural=False)


def read_heterophilous(request: Request) -> Collection:
    """Read a graph of Platonov et al. (2023): one archive."""
    (path,) = request.paths
    with load_npz(path) as archive:
        masks = _rows_of_masks(*(archive[f"{role}_masks"] for role in ("train", "val", "test")))
        graph = build(
            request, archive["node_features"], archive["edges"].T, archive["node_labels"], masks
        )
    return collect(request, [graph], natural=False)


def read_wikics(request: Request) -> Collection:
    """Read WikiCS: one JSON file."""
    (path,) = request.paths
    data = json.loads(path.read_text(encoding="utf-8"))
    features = np.array(data["features"], dtype=np.float32)
    source = np.repeat(np.arange(len(features)), [len(targets) for targets in data["links"]])
    target = np.concatenate([np.array(targets, dtype=np.int64) for targets in data["links"]])
    train, val = data["train_masks"], data["val_masks"]
    masks = _rows_of_masks(train, val, [data["test_mask"]] * len(train))
    graph = build(request, features, np.stack([source, target]), data["labels"], masks)
    return collect(request, [graph], natural=False)


def _rows_of_masks(
    train: Iterable[npt.ArrayLike], val: Iterable[npt.ArrayLike], test: Iterable[npt.ArrayLike]
) -> tuple[Masks, ...]:
    return tuple(
        Masks(flags(a), flags(b), flags(c)) for a, b, c in zip(train, val, test, strict=True)
    )


def read_flickr(request: Request) -> Collection:
    """Read Flickr: arrays, and JSON files of classes and roles."""
    adjacency_path, features_path, class_path, role_path = request.paths
    with load_npz(adjacency_path) as archive:
        edges = edges_of(compressed_rows(archive))
    features = np.load(features_path, mmap_mode="r", allow_pickle=False)
    label_of = json.loads(class_path.read_text(encoding="utf-8"))
    labels = np.array([label_of[str(node)] for node in range(len(features))])
    roles = json.loads(role_path.read_text(encoding="utf-8"))
    masks = Masks(*(flags_at(roles[role], len(labels)) for role in ("tr", "va", "te")))
    graph = build(request, features, edges, labels, (masks,))
    return collect(request, [graph], natural=False)


def read_arxiv(request: Request) -> Collection:
    """Read papers with their subjects, split by the year of publication."""
    *_, train, val, test, names = request.paths
    features, edges, labels, _ = _arxiv_tables(request)
    masks = Masks(*(flags_at(_integers(path)[:, 0], len(labels)) for path in (train, val, test)))
    graph = build(request, features, edges, labels, (masks,))
    return collect(request, [graph], natural=False, classes=read_table(names).iloc[:, 1])


def read_arxiv_year(request: Request) -> Collection:
    """Read papers with their years: class k holds the years in [q_k, q_k+1) between quintiles.

    The split of ogbn-arxiv is by year as well, so it cannot be used for this task.
    """
    features, edges, _, years = _arxiv_tables(request)
    quintiles = np.quantile(years, np.arange(1, YEAR_CLASSES) / YEAR_CLASSES)
    labels = np.searchsorted(quintiles, years, side="right")
    graph = build(request, features, edges, labels)
    return collect(request, [graph], natural=False)


def _arxiv_tables(request: Request) -> tuple[Features, IntArray, IntArray, IntArray]:
    edges, features, labels, years = request.paths[:4]
    values = read_table(features, header=None, dtype=np.float32).to_numpy()
    return values, _integers(edges).T, _integers(labels)[:, 0], _integers(years)[:, 0]


def _integers(path: Path) -> IntArray:
    values: IntArray = read_table(path, header=None, dtype=np.int64).to_numpy()
    return values


def read_csbm(request: Request) -> Collection:
    """Draw graphs from the contextual stochastic block model."""
    from polyphily.graphs.csbm import sample_federation

    options: dict[str, Any] = dict(request.options)
    return sample_federation(clients=request.clients, seed=request.seed, **options)


def read_payments(request: Request) -> Collection:
    """Draw the payments of several banks."""
    from polyphily.graphs.payments import sample_federation

    options: dict[str, Any] = dict(request.options)
    return sample_federation(clients=request.clients, seed=request.seed, **options)


READERS: Mapping[str, Callable[[Request], Collection]] = {
    "actor": read_actor,
    "arxiv-year": read_arxiv_year,
    "credit": read_credit,
    "csbm": read_csbm,
    "facebook100": read_facebook,
    "flickr": read_flickr,
    "genius": read_genius,
    "geom-gcn": read_geom_gcn,
    "heterophilous": read_heterophilous,
    "ieee-fraud": read_ieee_fraud,
    "npz": read_npz,
    "ogbn-arxiv": read_arxiv,
    "payments": read_payments,
    "planetoid": read_planetoid,
    "syn-cora": read_syn_cora,
    "twitch": read_twitch,
    "wikics": read_wikics,
}
