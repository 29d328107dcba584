from __future__ import annotations

import builtins
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.files import read
from polyphily.graphs.graph import UNLABELLED, Graph

HEAD = "id,label,age\n"
NODES = "id,label,age,height\na,red,1,0.5\nb,blue,2,1.5\nc,,3,-2e1\n"
EDGES = "source,target\na,b\nb,c\n"
SPLIT = "id,label,split,age\na,red,train,1\nb,blue,val,2\nc,red,test,3\nd,,,4\n"


def write_csv(folder: Path, nodes: str | bytes = NODES, edges: str | bytes = EDGES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("nodes.csv", nodes), ("edges.csv", edges)):
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return folder


def write_parquet(folder: Path, nodes: dict[str, Any], edges: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(nodes), folder / "nodes.parquet")
    pq.write_table(pa.table(edges), folder / "edges.parquet")
    return folder


def arrays(**changed: Any) -> dict[str, Any]:
    graph = {
        "x": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "edge_index": np.array([[0, 1], [1, 2]]),
        "y": np.array([4, 0, -1]),
    }
    return {name: array for name, array in (graph | changed).items() if array is not None}


def write_npz(path: Path, **changed: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays(**changed))
    return path


def write_pt(path: Path, **changed: Any) -> Path:
    torch.save({k: torch.as_tensor(v) for k, v in arrays(**changed).items()}, path)
    return path


def numbers(graph: Graph) -> Any:
    """Return the features of a graph, or the values of its table if it is not encoded yet."""
    if graph.table is None:
        return graph.features
    return np.stack([column.values for column in graph.table], axis=1)


def failure(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


def assert_same(one: Graph, other: Graph) -> None:
    assert sp.issparse(one.features) == sp.issparse(other.features)
    np.testing.assert_array_equal(numbers(one), numbers(other))
    np.testing.assert_array_equal(one.edges, other.edges)
    np.testing.assert_array_equal(one.labels, other.labels)
    assert len(one.own_masks) == len(other.own_masks)
    for ours, theirs in zip(one.own_masks, other.own_masks, strict=True):
        for part in ("train", "val", "test"):
            np.testing.assert_array_equal(getattr(ours, part), getattr(theirs, part))


class TestFormats:
    def test_csv_folder(self, tmp_path: Path) -> None:
        collection = read(write_csv(tmp_path / "north"))
        (graph,) = collection.graphs
        assert (collection.name, graph.name) == ("north", "north")
        assert collection.natural
        assert collection.notes == ()
        assert collection.classes == ("blue", "red")
        assert graph.labels.tolist() == [1, 0, UNLABELLED]
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == ["a", "b", "c"]
        assert graph.features.shape == (3, 0)
        np.testing.assert_array_equal(numbers(graph), [[1, 0.5], [2, 1.5], [3, -20]])
        assert graph.edges.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
        assert graph.masks is None
        assert graph.own_masks == ()

    def test_many_clients_of_every_format(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "west")
        write_parquet(
            tmp_path / "east",
            {"id": [1, 2], "label": ["red", None], "height": [1.0, 2.0], "age": [1, 2]},
            {"source": [1], "target": [2]},
        )
        write_npz(tmp_path / "south.npz")
        write_pt(tmp_path / "north.pt")
        write_npz(tmp_path / "central" / "graph.npz")
        (tmp_path / ".hidden").mkdir()
        collection = read(tmp_path)
        assert [g.name for g in collection.graphs] == ["central", "east", "north", "south", "west"]
        assert collection.classes == ("0", "4", "blue", "red")
        assert all(numbers(graph).shape[1] == 2 for graph in collection.graphs)

    @pytest.mark.parametrize("write", [write_npz, write_pt])
    def test_single_array_file(self, tmp_path: Path, write: Any) -> None:
        path = write(tmp_path / f"north.{'npz' if write is write_npz else 'pt'}")
        collection = read(path)
        (graph,) = collection.graphs
        assert (collection.name, graph.name) == ("north", "north")
        assert collection.classes == ("0", "4")
        assert graph.labels.tolist() == [1, 0, UNLABELLED]
        assert collection.notes == ()
        assert graph.node_ids is None

    @pytest.mark.parametrize("ids", [[7, 3, 5], ["b", "a", "c"]])
    def test_array_file_with_node_ids(self, tmp_path: Path, ids: list[Any]) -> None:
        collection = read(write_npz(tmp_path / "north.npz", node_ids=np.array(ids)))
        assert collection.graphs[0].node_ids is not None
        assert collection.graphs[0].node_ids.tolist() == ids
        assert collection.notes == ()

    def test_folder_named_by_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(write_csv(tmp_path / "site.v2"))
        assert read(Path()).graphs[0].name == "site.v2"

    def test_csv_with_byte_order_mark_crlf_blank_lines_spaces_and_quotes(
        self, tmp_path: Path
    ) -> None:
        nodes = (
            '\ufeff\r\nid, label,age\r\n\r\na, red ,1\r\n"b, 1",blue, 2 \r\n\r\n"c""d",red,3\r\n'
        )
        edges = '\ufeffsource, target\r\na, a\r\n"b, 1","c""d"\r\n'
        (graph,) = read(write_csv(tmp_path, nodes, edges)).graphs
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == ["a", "b, 1", 'c"d']
        assert graph.labels.tolist() == [1, 0, 1]
        np.testing.assert_array_equal(numbers(graph), [[1], [2], [3]])
        assert graph.num_edges == 1

    def test_line_breaks_in_cells(self, tmp_path: Path) -> None:
        ids = [f"n{i}\n{i}" for i in range(400_000)]
        nodes = HEAD + "".join(f'"{name}",red,1\n' for name in ids)
        (graph,) = read(write_csv(tmp_path, nodes, "source,target\n")).graphs
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == ids

    def test_no_edges(self, tmp_path: Path) -> None:
        (graph,) = read(write_csv(tmp_path, edges="source,target\n")).graphs
        assert graph.edges.shape == (2, 0)

    def test_boolean_and_integer_features(self, tmp_path: Path) -> None:
        nodes = "id,label,member,active,n\n1,a,true,False,3\n2,b, false ,TRUE,4\n"
        edges = "source,target\n1,2\n"
        (by_csv,) = read(write_csv(tmp_path / "csv", nodes, edges)).graphs
        table = {"id": [1, 2], "label": ["a", "b"], "member": [True, False]}
        table |= {"active": [False, True], "n": [3, 4]}
        (by_parquet,) = read(
            write_parquet(tmp_path / "parquet", table, {"source": [1], "target": [2]})
        ).graphs
        np.testing.assert_array_equal(numbers(by_csv), [[1, 0, 3], [0, 1, 4]])
        assert_same(by_csv, by_parquet)

    def test_narrow_tensors(self, tmp_path: Path) -> None:
        path = tmp_path / "north.pt"
        write_pt(path, x=torch.ones(3, 2, dtype=torch.bfloat16), y=torch.tensor([0, 1, 1]).byte())
        np.testing.assert_array_equal(read(path).graphs[0].features, np.ones((3, 2)))

    def test_missing_pyarrow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name.startswith("pyarrow"):
                raise ImportError(name)
            return real(name, *rest)

        write_csv(tmp_path / "north")
        write_npz(tmp_path / "south.npz")
        monkeypatch.setattr(builtins, "__import__", without)
        message = failure(tmp_path / "north")
        assert "polyphily[files]" in message
        assert ".npz need no further package" in message
        assert read(tmp_path / "south.npz").graphs


class TestIds:
    def test_integers_stay_integers(self, tmp_path: Path) -> None:
        nodes = "id,label,f\n30,a,1\n-4,b,2\n"
        (graph,) = read(write_csv(tmp_path, nodes, "source,target\n-4,30\n")).graphs
        assert graph.node_ids is not None
        assert graph.node_ids.dtype == np.int64
        assert graph.node_ids.tolist() == [30, -4]

    def test_leading_zeros_are_text(self, tmp_path: Path) -> None:
        nodes = "id,label,f\n007,a,1\n7,b,2\n"
        (graph,) = read(write_csv(tmp_path, nodes, "source,target\n007,7\n")).graphs
        assert graph.node_ids is not None
        assert graph.node_ids.tolist() == ["007", "7"]
        assert graph.num_edges == 1

    def test_text_nodes_and_integer_edges_match(self, tmp_path: Path) -> None:
        nodes = {"id": ["1", "2", "x"], "label": ["a", "b", "a"], "f": [1.0, 2.0, 3.0]}
        edges = {"source": pa.array([1], pa.int32()), "target": pa.array([2], pa.uint64())}
        (graph,) = read(write_parquet(tmp_path, nodes, edges)).graphs
        assert graph.edges.tolist() == [[0, 1], [1, 0]]

    def test_formats_mix_within_a_client(self, tmp_path: Path) -> None:
        write_parquet(
            tmp_path, {"id": [1, 2], "label": [0, 1], "f": [1, 2]}, {"source": [1], "target": [1]}
        )
        (tmp_path / "edges.parquet").unlink()
        (tmp_path / "edges.csv").write_text("source,target\n2,1\n")
        assert read(tmp_path).graphs[0].num_edges == 1


class TestLabels:
    def test_union_of_vocabularies(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a", "id,label,f\n1,10,0\n2,9,0\n", "source,target\n")
        write_csv(tmp_path / "b", "id,label,f\n1,100,0\n2,10,0\n", "source,target\n")
        collection = read(tmp_path)
        assert collection.classes == ("9", "10", "100")
        assert [g.labels.tolist() for g in collection.graphs] == [[1, 0], [2, 1]]

    def test_one_word_makes_the_order_textual(self, tmp_path: Path) -> None:
        write_csv(tmp_path, "id,label,f\n1,10,0\n2,9,0\n3,other,0\n", "source,target\n")
        assert read(tmp_path).classes == ("10", "9", "other")

    def test_whole_floats_are_integers(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a", "id,label,f\n1,1.0,0\n2,,0\n", "source,target\n")
        write_csv(tmp_path / "b", "id,label,f\n1,1,0\n2,2,0\n", "source,target\n")
        write_parquet(
            tmp_path / "c",
            {"id": [1, 2, 3], "label": [2.0, None, float("nan")], "f": [0, 0, 0]},
            {"source": [1], "target": [2]},
        )
        collection = read(tmp_path)
        assert collection.classes == ("1", "2")
        assert [g.labels.tolist() for g in collection.graphs] == [[0, -1], [0, 1], [1, -1, -1]]

    @pytest.mark.parametrize("text", ["NaN", "nan", "NAN"])
    def test_a_label_nan_is_missing(self, text: str, tmp_path: Path) -> None:
        write_csv(
            tmp_path / "a", f"id,label,f\n1,1.0,0\n2,{text},0\n3,{text},0\n", "source,target\n"
        )
        write_parquet(
            tmp_path / "b",
            {"id": [1, 2], "label": ["2", text], "f": [0, 0]},
            {"source": pa.array([], pa.int64()), "target": pa.array([], pa.int64())},
        )
        collection = read(tmp_path)
        assert collection.classes == ("1", "2")
        assert [g.labels.tolist() for g in collection.graphs] == [[0, -1, -1], [1, -1]]
        assert f"a: 2 labels '{text}' read as missing" in collection.notes

    def test_names_that_only_look_missing_are_classes(self, tmp_path: Path) -> None:
        write_csv(tmp_path, "id,label,f\n1,none,0\n2,NA,0\n3,nano,0\n", "source,target\n")
        assert read(tmp_path).classes == ("NA", "nano", "none")

    def test_negative_numbers_are_labels(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a", "id,label,f\n1,1,0\n2,-1,0\n3,,0\n", "source,target\n")
        collection = read(tmp_path)
        assert collection.classes == ("-1", "1")
        assert collection.graphs[0].labels.tolist() == [1, 0, UNLABELLED]

    def test_categories(self, tmp_path: Path) -> None:
        label = pa.array(["b", "a", None]).dictionary_encode()
        write_parquet(
            tmp_path,
            {"id": [1, 2, 3], "label": label, "f": [1, 2, 3]},
            {"source": [1], "target": [2]},
        )
        assert read(tmp_path).graphs[0].labels.tolist() == [1, 0, -1]


class TestSplits:
    def test_split_column(self, tmp_path: Path) -> None:
        nodes = "id,label,split,f\n1,a,train,0\n2,a,VALID,0\n3,a,validation,0\n4,a,test,0\n5,,,0\n"
        (graph,) = read(write_csv(tmp_path, nodes, "source,target\n")).graphs
        (masks,) = graph.own_masks
        assert graph.masks is None
        assert masks.train.tolist() == [True, False, False, False, False]
        assert masks.val.tolist() == [False, True, True, False, False]
        assert masks.test.tolist() == [False, False, False, True, False]

    def test_masks_with_one_missing(self, tmp_path: Path) -> None:
        path = write_npz(
            tmp_path / "a.npz",
            train_mask=np.array([True, False, False]),
            test_mask=np.array([0, 1, 0], dtype=np.uint8),
        )
        (masks,) = read(path).graphs[0].own_masks
        assert masks.val.tolist() == [False] * 3
        assert masks.test.tolist() == [False, True, False]

    def test_some_clients_without(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north", SPLIT)
        write_csv(tmp_path / "south", HEAD + "a,red,1\nb,blue,2\nc,,3\n")
        message = failure(tmp_path)
        assert "has a split" in message
        assert "'north'" in message
        assert "'south'" in message


class TestNotes:
    def test_self_loops_and_repeats(self, tmp_path: Path) -> None:
        edges = "source,target\na,a\na,b\nb,a\na,b\na,b\nc,c\nc,c\n"
        collection = read(write_csv(tmp_path / "north", edges=edges))
        assert collection.notes == ("north: 3 self-loops removed, 2 repeated edges merged",)
        assert collection.graphs[0].num_edges == 1

    def test_everything_ignored_is_named(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north", edges="source,target,since\na,b,0.5\n")
        (tmp_path / "north" / "README.md").write_text("hello")
        write_npz(tmp_path / "south.npz", edge_attr=np.ones(2), y=np.array([1, 2, 3]))
        (tmp_path / "licence.txt").write_text("hello")
        stray, north, south = read(tmp_path).notes
        assert "'licence.txt'" in stray
        assert north.startswith("north: ")
        assert "'since' of edges.csv" in north
        assert "'README.md'" in north
        assert south.startswith("south: 'edge_attr' of south.npz ignored")
        assert "order of north's columns" in south


class TestFeatureColumns:
    def test_reordered_to_the_first_client(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a", "id,label,x,y\n1,p,1,2\n", "source,target\n")
        write_csv(tmp_path / "b", "y,id,x,label\n4,1,3,p\n", "source,target\n")
        first, second = read(tmp_path).graphs
        np.testing.assert_array_equal(numbers(first), [[1, 2]])
        np.testing.assert_array_equal(numbers(second), [[3, 4]])

    def test_different_columns(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north")
        write_csv(tmp_path / "south", NODES.replace("height", "weight"))
        message = failure(tmp_path)
        assert "'height' only in client 'north'" in message
        assert "'weight' only in client 'south'" in message

    def test_different_widths(self, tmp_path: Path) -> None:
        write_npz(tmp_path / "north.npz")
        write_npz(tmp_path / "south.npz", x=np.ones((3, 5)))
        message = failure(tmp_path)
        for part in ("'north'", "'south'", "2 features", "5"):
            assert part in message

    def test_wide_rows(self, tmp_path: Path) -> None:
        width = 45_000
        header = ",".join(f"f{i}" for i in range(width))
        cells = ",".join(["-0." + "1" * 57] * width)
        nodes = f"id,label,{header}\n1,a,{cells}\n2,b,{cells}\n"
        (graph,) = read(write_csv(tmp_path, nodes, "source,target\n1,2\n")).graphs
        assert numbers(graph).shape == (2, width)


TEN = HEAD + "".join(f"n{i},red,{i}.5\n" for i in range(10))
FLAGS = HEAD + "a,red,true\nb,red,false\n"
NODE_FAULTS = {
    "not a number": (TEN + "b,blue,tall\n", "line 12", "'age'", "'tall'", '["tall"]', "90 %"),
    "underscore": (TEN + "b,blue,1_0\n", "line 12", "'age'", "'1_0'"),
    "decimal comma": (TEN + 'b,blue,"12,5"\n', "line 12", "'12,5'", 'decimal = ","'),
    "decimal commas": (
        HEAD.replace(",", ";") + "a;red;1\nb;blue;12,5\nc;red;-,5e1\n",
        "line 3",
        "'age'",
        "'12,5'",
        'decimal = ","',
        "thousands",
    ),
    "infinite": (HEAD + "a,red,-inf\n", "line 2", "'age'", "infinite"),
    "too large": (HEAD + "a,red,1e39\n", "line 2", "'age'", "1e39", "too large"),
    "far too large": (HEAD + "a,red,1e999\n", "line 2", "'age'", "1e999", "too large"),
    "infinite beside a blank": (HEAD + "a,red, \nb,red,inf\n", "line 3", "'age'", "infinite"),
    "quoted newline before": (
        HEAD + 'a,"r\ned",1\n' + TEN.removeprefix(HEAD) + "b,blue,?\n",
        "line 14",
        "'age'",
        "'?'",
    ),
    "flag then number": (FLAGS + "c,red,2\n", "line 4", "'age'", "'2' is not a boolean"),
    "not a date": (
        TEN.replace(".5", "-01-01").replace(",red,", ",red,200") + "b,red,2001-02-30\n",
        "line 12",
        "'2001-02-30' is not a date",
    ),
    "date and text": (
        TEN.replace(".5", "-01-01").replace(",red,", ",red,200") + "b,red,soon\n",
        "line 12",
        "'soon' is not a date",
    ),
    "short row": (HEAD + "a,red,1\nb,blue\n", "line 3", "2 cells", "3 columns"),
    "long row": (HEAD + "a,red,1\nb,blue,2,3\n", "line 3", "4 cells", "3 columns"),
    "duplicate id": (HEAD + "a,red,1\nb,red,2\na,blue,2\n", "line 4", "'id'", "'a'", "line 2"),
    "empty id": (HEAD + "a,red,1\n,blue,2\n", "line 3", "'id'", "empty"),
    "no label column": ("id,age\na,1\n", "line 1", "'label'", "'age'"),
    "no id column": ("label;key;age\na;1;1\n", "line 1", "'id'", "'key'", "semicolon"),
    "no feature column": ("id,label\na,red\n", "no feature column"),
    "duplicate column": ("id,label,age,age\na,red,1,1\n", "line 1", "'age'"),
    "nameless column": (",id,label,age\n0,a,red,1\n", "line 1", "column 1", "index=False"),
    "no rows": (HEAD, "no nodes"),
    "empty file": ("", "empty"),
    "blank file": ("\n\n", "empty"),
    "unknown split": ("id,label,split,f\na,r,train,1\nb,r,dev,1\n", "line 3", "'split'", "'dev'"),
    "no train": ("id,label,split,f\na,r,val,1\n", "'split'", "no train node"),
    "unlabelled train": ("id,label,split,f\na,r,train,1\nb,,test,1\n", "line 3", "'label'", "'b'"),
    "not UTF-8 text": (b"id,label,age\na,red,1\nb,bl\xfc,2\n", "line 3", "'label'", "UTF-8"),
    "not UTF-8 number": (b"id,label,age\na,red,1\nb,red,\xbd\n", "line 3", "'age'", "UTF-8"),
    "not UTF-8 header": (b"id,label,\xe5ge\na,red,1\n", "line 1", "column 3", "UTF-8"),
    "UTF-16": (HEAD.encode("utf-16"), "line 1", "UTF-8"),
    "endless cell": (HEAD + 'a,red,1\nb,"' + "x" * 200_000, "line 3", "CSV"),
}
EDGE_FAULTS = {
    "unknown source": ("source,target\na,b\nz,b\n", "line 3", "'source'", "'z'"),
    "unknown target": ("source,target\na,b\n\nb,z\n", "line 4", "'target'", "'z'"),
    "empty end": ("source,target\na,\n", "line 2", "'target'", "empty"),
    "missing column": ("from,to\na,b\n", "line 1", "'source', 'target'", "'from', 'to'"),
    "ragged": ("source,target\na,b\na\n", "line 3", "1 cell, but"),
    "empty file": ("", "empty"),
    "duplicate column": ("source,target,source\na,b,a\n", "line 1", "'source'"),
}


class TestCsvFaults:
    @pytest.mark.parametrize("fault", NODE_FAULTS)
    def test_nodes(self, tmp_path: Path, fault: str) -> None:
        nodes, *parts = NODE_FAULTS[fault]
        message = failure(write_csv(tmp_path / "north", nodes, "source,target\n"))
        for part in (str(tmp_path / "north" / "nodes.csv"), *parts):
            assert part in message
        assert "edges.csv" not in message
        message.encode()

    @pytest.mark.parametrize("fault", EDGE_FAULTS)
    def test_edges(self, tmp_path: Path, fault: str) -> None:
        edges, *parts = EDGE_FAULTS[fault]
        message = failure(write_csv(tmp_path / "north", edges=edges))
        for part in (str(tmp_path / "north" / "edges.csv"), *parts):
            assert part in message


PARQUET_NODES: dict[str, Any] = {"id": [1, 2, 3], "label": ["a", "b", "a"], "age": [1.0, 2.0, 3.0]}
PARQUET_EDGES: dict[str, Any] = {"source": [1, 2], "target": [2, 3]}
PARQUET_FAULTS = {
    "too large": ({"age": [1.0, -1e300, 1.0]}, {}, "nodes", "row 2", "'age'", "too large"),
    "numbers as text": ({"age": ["1", "2", "3"]}, {}, "nodes", "'age'", "string"),
    "lists": ({"age": [[1], [2], [3]]}, {}, "nodes", "row 1", "'age'", "list"),
    "list label": ({"label": [[1], [2], [3]]}, {}, "nodes", "'label'"),
    "duplicate id": ({"id": [1, 2, 1]}, {}, "nodes", "row 3", "'id'", "'1'", "row 1"),
    "null id": ({"id": [1, None, 3]}, {}, "nodes", "row 2", "'id'", "empty"),
    "unknown split": ({"split": ["train", "x", None]}, {}, "nodes", "row 2", "'split'", "'x'"),
    "index": ({"__index_level_0__": [1, 2, 3]}, {}, "nodes", "index=False"),
    "no rows": ({"id": [], "label": [], "age": pa.array([], pa.float32())}, {}, "nodes"),
    "unknown end": ({}, {"target": [2, 9]}, "edges", "row 2", "'target'", "'9'"),
    "null end": ({}, {"source": [None, 1]}, "edges", "row 1", "'source'", "empty"),
}


class TestParquetFaults:
    @pytest.mark.parametrize("fault", PARQUET_FAULTS)
    def test_cells(self, tmp_path: Path, fault: str) -> None:
        nodes, edges, stem, *parts = PARQUET_FAULTS[fault]
        write_parquet(tmp_path / "north", PARQUET_NODES | nodes, PARQUET_EDGES | edges)
        message = failure(tmp_path)
        for part in (str(tmp_path / "north" / f"{stem}.parquet"), *parts):
            assert part in message

    def test_missing_column(self, tmp_path: Path) -> None:
        write_parquet(tmp_path, PARQUET_NODES, {"source": [1], "to": [2]})
        message = failure(tmp_path)
        assert "edges.parquet" in message
        assert "'target'" in message

    def test_duplicate_column(self, tmp_path: Path) -> None:
        write_parquet(tmp_path, PARQUET_NODES, PARQUET_EDGES)
        table = pa.table(PARQUET_NODES)
        pq.write_table(table.append_column("age", table["age"]), tmp_path / "nodes.parquet")
        assert "several columns are named 'age'" in failure(tmp_path)

    @pytest.mark.parametrize("keep", [0, 3, 200, -1])
    def test_truncated(self, tmp_path: Path, keep: int) -> None:
        path = write_parquet(tmp_path, PARQUET_NODES, PARQUET_EDGES) / "nodes.parquet"
        path.write_bytes(path.read_bytes()[:keep])
        message = failure(tmp_path)
        assert str(path) in message
        assert "empty" in message or "damaged" in message

    def test_bad_text(self, tmp_path: Path) -> None:
        bad = pa.array([b"\xff", b"b", b"c"]).view(pa.string())
        write_parquet(tmp_path, PARQUET_NODES | {"label": bad}, PARQUET_EDGES)
        assert "'label'" in failure(tmp_path)

    def test_folder_name_is_no_column(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "site=3", PARQUET_NODES, PARQUET_EDGES)
        assert numbers(read(tmp_path / "site=3").graphs[0]).shape[1] == 1


ARRAY_FAULTS = {
    "x not 2-d": ({"x": np.ones(3)}, "x has shape (3,)"),
    "x without columns": ({"x": np.ones((3, 0))}, "x has shape (3, 0)"),
    "x complex": ({"x": np.ones((3, 2), dtype=np.complex64)}, "x has dtype complex64"),
    "x nan": ({"x": np.array([[1.0], [np.nan], [2.0]])}, "x[1, 0]", "NaN"),
    "x infinite": ({"x": np.array([[1.0, -np.inf]] * 3)}, "x[0, 1]", "infinite"),
    "x too large": ({"x": np.array([[1.0], [2.0], [1e39]])}, "x[2, 0]", "too large"),
    "edges transposed": ({"edge_index": np.ones((5, 2), dtype=int)}, "shape (5, 2)", "[2, edges]"),
    "edges float": ({"edge_index": np.ones((2, 3))}, "edge_index has dtype float64"),
    "edge outside": ({"edge_index": np.array([[0, 1], [1, 3]])}, "[:, 1]", "[1, 3]", "0 to 2"),
    "edge negative": ({"edge_index": np.array([[0, -1], [1, 2]])}, "[:, 1]", "[-1, 2]"),
    "y float": ({"y": np.ones(3)}, "y has dtype float64"),
    "y length": ({"y": np.ones(4, dtype=int)}, "y has shape (4,)", "3 rows"),
    "no y": ({"y": None}, "no array 'y'", "'x', 'edge_index'"),
    "ids length": ({"node_ids": np.arange(2)}, "node_ids has shape (2,)", "3 rows"),
    "ids float": ({"node_ids": np.ones(3)}, "node_ids has dtype float64"),
    "ids twice": ({"node_ids": np.array([8, 9, 8])}, "node_ids has '8' 2 times"),
    "mask length": ({"train_mask": np.ones(2, dtype=bool)}, "train_mask has shape (2,)"),
    "mask float": ({"val_mask": np.ones(3)}, "val_mask has dtype float64"),
    "mask indices": ({"test_mask": np.array([0, 1, 2])}, "test_mask", "0 and 1"),
    "mask unlabelled": ({"train_mask": np.ones(3, dtype=bool)}, "node 2", "no label"),
    "no train": ({"test_mask": np.array([True, False, False])}, "no train node"),
    "overlap": (
        {"train_mask": np.array([1, 1, 0]), "test_mask": np.array([0, 1, 0])},
        "node 1",
        "more than one",
    ),
}


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


class TestArrayFaults:
    @pytest.mark.parametrize("fault", ARRAY_FAULTS)
    @pytest.mark.parametrize("suffix", ["npz", "pt"])
    def test_arrays(self, tmp_path: Path, fault: str, suffix: str) -> None:
        changed, *parts = ARRAY_FAULTS[fault]
        path = tmp_path / f"north.{suffix}"
        (write_npz if suffix == "npz" else write_pt)(path, **changed)
        message = failure(tmp_path)
        for part in (str(path), *parts):
            assert part in message

    @pytest.mark.parametrize("suffix", ["npz", "pt"])
    @pytest.mark.parametrize("keep", [0, 10, 300, -30])
    def test_truncated(self, tmp_path: Path, suffix: str, keep: int) -> None:
        path = tmp_path / f"north.{suffix}"
        (write_npz if suffix == "npz" else write_pt)(path)
        path.write_bytes(path.read_bytes()[:keep])
        message = failure(path)
        assert str(path) in message
        assert "damaged" in message

    def test_damaged_inside(self, tmp_path: Path) -> None:
        path = tmp_path / "north.npz"
        np.savez_compressed(path, **arrays(x=np.random.default_rng(0).random((3, 200))))
        data = bytearray(path.read_bytes())
        data[100:400] = bytes(300)
        path.write_bytes(data)
        assert "damaged" in failure(path)

    def test_single_array(self, tmp_path: Path) -> None:
        path = tmp_path / "north.npz"
        with path.open("wb") as file:
            np.save(file, np.ones(3))
        assert "single array" in failure(path)

    @pytest.mark.parametrize("content", [{"x": Bomb()}, Bomb(), {"x": torch.ones(2), "s": Bomb()}])
    def test_nothing_is_unpickled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
    ) -> None:
        monkeypatch.chdir(tmp_path)
        torch.save(content, tmp_path / "north.pt")
        assert "refused" in failure(tmp_path / "north.pt")
        np.savez(tmp_path / "south.npz", x=np.array([Bomb()], dtype=object))
        assert "plain arrays" in failure(tmp_path / "south.npz")
        (tmp_path / "south.npz").write_bytes(pickle.dumps(Bomb()))
        assert "plain arrays" in failure(tmp_path / "south.npz")
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize(
        ("content", "part"),
        [
            ([torch.ones(2)], "holds a list"),
            ({"x": 3}, "'x' is not the name of a tensor"),
            ({0: torch.ones(2)}, "'0' is not the name of a tensor"),
            ({"x": torch.eye(3).to_sparse()}, "'x' is not a dense tensor"),
        ],
    )
    def test_not_a_dict_of_tensors(self, tmp_path: Path, content: object, part: str) -> None:
        torch.save(content, tmp_path / "north.pt")
        message = failure(tmp_path / "north.pt")
        assert "north.pt" in message
        assert part in message


class TestFolderFaults:
    def test_no_such_path(self, tmp_path: Path) -> None:
        assert str(tmp_path / "nowhere") in failure(tmp_path / "nowhere")

    def test_no_clients(self, tmp_path: Path) -> None:
        (tmp_path / "readme.txt").write_text("hello")
        message = failure(tmp_path)
        assert "no client found" in message
        assert "'readme.txt'" in message

    @pytest.mark.parametrize("stem", ["nodes", "edges"])
    def test_missing_table(self, tmp_path: Path, stem: str) -> None:
        write_csv(tmp_path / "north")
        (tmp_path / "north" / f"{stem}.csv").rename(tmp_path / "north" / "other.csv")
        for path in (tmp_path, tmp_path / "north"):
            message = failure(path)
            for part in (str(tmp_path / "north"), f"no {stem}.csv", "'other.csv'"):
                assert part in message

    def test_empty_client_folder(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north")
        (tmp_path / "south").mkdir()
        assert "south: no nodes.csv" in failure(tmp_path)

    def test_two_tables_of_nodes(self, tmp_path: Path) -> None:
        write_csv(tmp_path)
        pq.write_table(pa.table(PARQUET_NODES), tmp_path / "nodes.parquet")
        assert "both nodes.csv and nodes.parquet" in failure(tmp_path)

    def test_two_graphs_in_a_folder(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north")
        write_npz(tmp_path / "north" / "graph.npz")
        assert "'graph.npz'" in failure(tmp_path)

    def test_two_clients_of_one_name(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "north")
        write_npz(tmp_path / "north.npz")
        assert "2 clients are named 'north'" in failure(tmp_path)

    def test_a_table_alone(self, tmp_path: Path) -> None:
        assert "folder" in failure(write_csv(tmp_path) / "nodes.csv")

    def test_nodes_is_a_folder(self, tmp_path: Path) -> None:
        write_csv(tmp_path)
        (tmp_path / "nodes.csv").unlink()
        (tmp_path / "nodes.csv").mkdir()
        assert "no nodes.csv" in failure(tmp_path)

    def test_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "north.npz").symlink_to(tmp_path / "gone")
        assert "north.npz" in failure(tmp_path)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    nodes = draw(st.integers(1, 6))
    width = draw(st.integers(1, 3))
    count = draw(st.integers(0, 8))
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    labels = draw(st.lists(st.integers(-1, 12), min_size=nodes, max_size=nodes))
    graph: dict[str, Any] = {
        "x": np.array(
            draw(st.lists(number, min_size=nodes * width, max_size=nodes * width)), np.float32
        ).reshape(nodes, width),
        "edge_index": np.array(
            draw(st.lists(st.integers(0, nodes - 1), min_size=2 * count, max_size=2 * count)), int
        ).reshape(2, count),
        "y": np.array(labels),
    }
    if draw(st.booleans()) and max(labels) >= 0:
        part = np.array(draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes)))
        part[graph["y"] < 0] = 3
        part[graph["y"].argmax()] = 0
        graph |= {f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))}
    return graph


def tables(graph: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    nodes: dict[str, Any] = {
        "id": [f"n{i}" for i in range(len(graph["y"]))],
        "label": [None if label < 0 else str(label) for label in graph["y"]],
    }
    if "train_mask" in graph:
        words = np.full(len(graph["y"]), None, dtype=object)
        for word in ("train", "val", "test"):
            words[graph[f"{word}_mask"]] = word
        nodes["split"] = words.tolist()
    nodes |= {f"f{j}": column for j, column in enumerate(graph["x"].T)}
    source, target = (
        pa.array([f"n{i}" for i in ends], pa.string()) for ends in graph["edge_index"]
    )
    return nodes, {"source": source, "target": target}


def as_csv(columns: dict[str, Any]) -> str:
    table = pa.table(columns)
    rows = (
        ["" if cell is None else str(cell) for cell in row.values()] for row in table.to_pylist()
    )
    return "\n".join(",".join(row) for row in [table.column_names, *rows]) + "\n"


@given(graph=graphs())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_format_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, graph: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("clients")
    nodes, edges = tables(graph)
    collections = [
        read(write_csv(root / "csv", as_csv(nodes), as_csv(edges))),
        read(write_parquet(root / "parquet", nodes, edges)),
        read(write_npz(root / "one.npz", **graph)),
        read(write_pt(root / "two.pt", **graph)),
    ]
    classes = sorted({label for label in graph["y"].tolist() if label >= 0})
    labels = [classes.index(label) if label >= 0 else UNLABELLED for label in graph["y"].tolist()]
    for collection in collections:
        assert collection.classes == tuple(map(str, classes))
        (read_back,) = collection.graphs
        assert read_back.labels.tolist() == labels
        np.testing.assert_array_equal(numbers(read_back), graph["x"])
        assert_same(read_back, collections[0].graphs[0])
