"""Layouts of array files: torch_geometric, gnn-benchmark, heterophilous graphs; several splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from polyphily.errors import FileFaults, UserError
from polyphily.graphs.datasets import read as read_dataset
from polyphily.graphs.files import read
from polyphily.graphs.graph import UNLABELLED

X = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
Y = np.array([1, 0, 1])
PAIRS = np.array([[0, 1], [1, 2]])


def parts(prefix: str, matrix: Any) -> dict[str, Any]:
    """Return the parts of a sparse matrix under the names of gnn-benchmark."""
    rows = sp.csr_array(matrix)
    names = ("data", "indices", "indptr")
    return {f"{prefix}_{name}": getattr(rows, name) for name in names} | {
        f"{prefix}_shape": np.array(rows.shape)
    }


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def failure(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


ADJACENCY = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]])
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch_geometric": {"x": X, "edge_index": PAIRS.T, "y": Y},
    "two-dimensional y": {"x": X, "edge_index": PAIRS.T, "y": Y[:, None]},
    "heterophilous": {"node_features": X, "edges": PAIRS, "node_labels": Y},
    "edges [2, m]": {"features": X, "edges": np.array([[0, 1, 1], [1, 2, 0]]), "labels": Y},
    "gnn-benchmark": parts("adj", ADJACENCY) | parts("attr", X) | {"labels": Y},
    "dense attributes": parts("adj", ADJACENCY) | {"attr_matrix": X, "labels": Y},
    "names as labels": {"x": X, "edge_index": PAIRS.T, "y": np.array(["1", "0", "1"])},
}


class TestLayouts:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_same_graph(self, layout: str, tmp_path: Path) -> None:
        collection = read(save(tmp_path / "north.npz", **LAYOUTS[layout]))
        (graph,) = collection.graphs
        features = graph.features
        np.testing.assert_array_equal(features.toarray() if sp.issparse(features) else features, X)
        assert graph.edges.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
        assert collection.classes == ("0", "1")
        assert graph.labels.tolist() == [1, 0, 1]
        assert graph.edge_weights is None
        assert graph.arcs is None

    def test_layout_is_noted(self, tmp_path: Path) -> None:
        collection = read(save(tmp_path / "north.npz", **LAYOUTS["gnn-benchmark"]))
        assert collection.notes == ("north: read from 'attr_*', 'adj_*', 'labels'",)
        collection = read(save(tmp_path / "south.npz", **LAYOUTS["torch_geometric"]))
        assert collection.notes == ()

    def test_two_edges_of_two(self, tmp_path: Path) -> None:
        pairs = np.array([[0, 1], [0, 2]])  # [2, m] would be (0, 0) and (1, 2)
        path = save(tmp_path / "a.npz", node_features=X, edges=pairs, node_labels=Y)
        assert read(path).graphs[0].edges.tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]

    @pytest.mark.parametrize("name", ["photo", "minesweeper"])
    def test_real_files(self, name: str, real_data: Path, tmp_path: Path) -> None:
        files = {"photo": "amazon_electronics_photo.npz", "minesweeper": "minesweeper.npz"}
        (path,) = real_data.rglob(files[name])
        dataset = {"photo": "amazon-photo", "minesweeper": "minesweeper"}[name]
        (expected,) = read_dataset(dataset, root=real_data, seed=0, clients=None).graphs
        (graph,) = read(path).graphs
        np.testing.assert_array_equal(graph.edges, expected.edges)
        np.testing.assert_array_equal(graph.labels, expected.labels)
        assert abs(graph.features - expected.features).max() == 0
        assert len(graph.own_masks) == len(expected.own_masks)
        for ours, theirs in zip(graph.own_masks, expected.own_masks, strict=True):
            np.testing.assert_array_equal(ours.train, theirs.train)
            np.testing.assert_array_equal(ours.test, theirs.test)


class TestMasks:
    TRAIN = np.array([[True, False, False], [False, True, False]])
    TEST = np.array([[False, False, True], [False, False, True]])

    @pytest.mark.parametrize("transposed", [False, True])
    def test_several(self, transposed: bool, tmp_path: Path) -> None:
        masks = {"train_masks": self.TRAIN, "test_masks": self.TEST}
        masks = {name: mask.T if transposed else mask for name, mask in masks.items()}
        (graph,) = read(save(tmp_path / "a.npz", **LAYOUTS["heterophilous"], **masks)).graphs
        assert [own.train.tolist() for own in graph.own_masks] == self.TRAIN.tolist()
        assert [own.test.tolist() for own in graph.own_masks] == self.TEST.tolist()
        assert not any(own.val.any() for own in graph.own_masks)

    def test_one_test_mask_for_all(self, tmp_path: Path) -> None:
        masks = {"train_mask": self.TRAIN, "test_mask": self.TEST[0]}
        (graph,) = read(save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], **masks)).graphs
        assert [own.test.tolist() for own in graph.own_masks] == [self.TEST[0].tolist()] * 2

    def test_every_split_is_checked(self, tmp_path: Path) -> None:
        masks = {"train_mask": np.stack([self.TRAIN[0], np.zeros(3, dtype=bool)])}
        path = save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], **masks)
        assert "train_mask[1]: the split has no train node" in failure(path)

    def test_different_numbers(self, tmp_path: Path) -> None:
        masks = {"train_mask": self.TRAIN, "test_mask": np.zeros((4, 3), dtype=bool)}
        assert "have 2, 1, 4 splits" in failure(
            save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], **masks)
        )


class TestEdges:
    def test_weights_and_types(self, tmp_path: Path) -> None:
        more = {"edge_weight": np.array([2.0, 0.5]), "edge_type": np.array([7, 3])}
        (graph,) = read(save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], **more)).graphs
        assert graph.edge_weights is not None
        assert graph.edge_weights.tolist() == [2, 2, 0.5, 0.5]
        assert graph.relations == ("3", "7")
        assert graph.edge_types is not None
        assert graph.edge_types.tolist() == [2, 2, 1, 1]

    def test_weights_of_a_matrix(self, tmp_path: Path) -> None:
        arrays = LAYOUTS["gnn-benchmark"] | parts("adj", 3.0 * ADJACENCY)
        (graph,) = read(save(tmp_path / "a.npz", **arrays)).graphs
        assert graph.edge_weights is not None
        assert graph.edge_weights.tolist() == [3] * 4

    def test_direction(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], directed=np.array(True))
        (graph,) = read(path).graphs
        assert graph.arcs is not None
        assert graph.arcs.tolist() == [True, False, True, False]
        path = save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"])
        (tmp_path / "schema.toml").write_text("[edges]\ndirected = true\n")
        assert read(path).graphs[0].arcs is not None

    @pytest.mark.parametrize(
        ("more", "part"),
        [
            ({"edge_weight": np.array([1.0, -1.0])}, "edge_weight[1] is -1.0"),
            ({"edge_weight": np.array([1.0, np.nan])}, "edge_weight[1] is nan"),
            ({"edge_weight": np.ones(3)}, "edge_weight has shape (3,), but there are 2 edges"),
            ({"edge_type": np.ones(2)}, "edge_type has dtype float64"),
            ({"edge_type": np.ones(3, dtype=int)}, "edge_type has shape (3,)"),
        ],
    )
    def test_faults(self, more: dict[str, Any], part: str, tmp_path: Path) -> None:
        assert part in failure(save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], **more))


class TestFaults:
    def test_all_are_listed(self, tmp_path: Path) -> None:
        arrays = {"x": X, "edge_index": np.array([[0, 9], [8, 1]]), "y": np.ones(3)}
        with pytest.raises(FileFaults) as caught:
            read(save(tmp_path / "a.npz", **arrays))
        assert caught.value.count == 3
        for part in ("edge_index[:, 0]", "edge_index[:, 1]", "y has dtype float64"):
            assert part in str(caught.value)

    def test_two_arrays_of_one_role(self, tmp_path: Path) -> None:
        arrays = LAYOUTS["torch_geometric"] | {"features": X}
        assert "has both 'x', 'features'" in failure(save(tmp_path / "a.npz", **arrays))

    @pytest.mark.parametrize(
        "changed",
        [
            {"attr_indptr": np.array([0, 9, 9, 9])},
            {"attr_indices": np.array([0, 5, 0])},
            {"attr_data": np.array(["a", "b", "c"])},
            {"attr_shape": np.array([3])},
        ],
    )
    def test_broken_matrix(self, changed: dict[str, Any], tmp_path: Path) -> None:
        message = failure(save(tmp_path / "a.npz", **LAYOUTS["gnn-benchmark"] | changed))
        assert "not the parts of a sparse matrix" in message

    def test_matrix_of_other_nodes(self, tmp_path: Path) -> None:
        arrays = LAYOUTS["gnn-benchmark"] | parts("adj", np.eye(4))
        assert "adj_shape is (4, 4), but there are 3 nodes" in failure(
            save(tmp_path / "a.npz", **arrays)
        )

    def test_objects_beside_the_graph_are_not_unpickled(self, tmp_path: Path) -> None:
        names = np.array(["a", "b", None], dtype=object)
        path = save(tmp_path / "a.npz", **LAYOUTS["torch_geometric"], node_names=names)
        assert read(path).graphs[0].num_nodes == 3
        path = save(tmp_path / "b.npz", **LAYOUTS["torch_geometric"] | {"y": names})
        assert "plain arrays" in failure(path)


def test_labels_are_optional(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, edge_index=PAIRS.T, train_mask=np.array([1, 0, 0]))
    assert "no array 'y'" in failure(path)
    collection = read(path, labels="optional")
    assert collection.graphs[0].labels.tolist() == [UNLABELLED] * 3
    assert collection.graphs[0].own_masks == ()
