"""Kinds of columns, schema.toml, compressed files, faults listed together, and edges' columns."""

from __future__ import annotations

import csv
import gzip
import io
from datetime import UTC, date, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyphily.errors import FileFaults, UserError
from polyphily.graphs.files import read, read_clients
from polyphily.graphs.files.client import RawColumn
from polyphily.graphs.files.columns import as_kind
from polyphily.graphs.files.schema import Scale, TableSchema, read_schema
from polyphily.graphs.files.survey import survey
from polyphily.graphs.graph import UNLABELLED

EDGES = "source,target\n"


def write(folder: Path, nodes: str, edges: str = EDGES, schema: str = "", suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, text in (("nodes", nodes), ("edges", edges)):
        data = text.encode()
        path = folder / f"{stem}{suffix or '.csv'}"
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    if schema:
        (folder / "schema.toml").write_text(schema)
    return folder


def column_of(cells: list[str], tmp_path: Path, schema: str = "") -> RawColumn:
    """Return the column that is read from some cells."""
    rows = (f'{i},a,"{cell}"\n' for i, cell in enumerate(cells))
    folder = write(tmp_path / "north", "id,label,f\n" + "".join(rows), schema=schema)
    (client,) = read_clients(folder)[0].values()
    assert client.columns is not None
    return client.columns[0]


def texts(column: RawColumn) -> list[str | None]:
    """Return the values of a category column."""
    return [column.texts[code] if code >= 0 else None for code in column.values.tolist()]


def numbers(column: RawColumn) -> list[float | None]:
    """Return the values of another column."""
    return [None if np.isnan(value) else value for value in column.values.tolist()]


def failure(path: Path, **arguments: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read(path, **arguments)
    return caught.value


class TestKinds:
    @pytest.mark.parametrize(
        ("cells", "values"),
        [
            (["1", "-2.5", "+3e2"], [1, -2.5, 300]),
            (["1", "", "NA", "n/a", "NaN", "Null", "NONE"], [1, *[None] * 6]),
            ([" 1 ", " NA ", "+2", " "], [1, None, 2, None]),
            (["", "NA"], [None, None]),
            (["007", "8"], [7, 8]),
            (["0", "1"], [0, 1]),
        ],
    )
    def test_numbers(self, cells: list[str], values: list[float], tmp_path: Path) -> None:
        column = column_of(cells, tmp_path)
        assert (column.kind, column.texts) == ("number", ())
        assert column.values.dtype == np.float64
        assert numbers(column) == values

    @pytest.mark.parametrize(
        ("cells", "values"),
        [
            (["true", "FALSE", ""], [1, 0, None]),
            (["Yes", "no", "True", " NO "], [1, 0, 1, 0]),
            (["t", "F", "NA"], [1, 0, None]),
            (["y", "n"], [1, 0]),
            (["true", "0", "1"], [1, 0, 1]),
        ],
    )
    def test_booleans(self, cells: list[str], values: list[float], tmp_path: Path) -> None:
        column = column_of(cells, tmp_path)
        assert column.kind == "boolean"
        assert numbers(column) == values

    @pytest.mark.parametrize(
        ("cell", "day"),
        [
            ("1970-01-02", 1),
            ("1969-12-31", -1),
            ("1970-01-01T12:00", 0.5),
            ("1970-01-01 18:00:00", 0.75),
            ("1970-01-02T00:00:00Z", 1),
            ("1970-01-02T02:00:00+02:00", 1),
            ("1970-01-01T19:00:00.000-0500", 1),
            ("1970-01-01T00:00:00.500000000", 0.5 / 86_400),
            ("9999-12-31", (date(9999, 12, 31) - date(1970, 1, 1)).days),
        ],
    )
    @pytest.mark.parametrize("other", ["1970-01-01", "", " NA "])
    def test_dates(self, cell: str, day: float, other: str, tmp_path: Path) -> None:
        column = column_of([cell, other], tmp_path)
        assert column.kind == "date"
        np.testing.assert_allclose(column.values[0], day, rtol=0, atol=1e-11)
        assert numbers(column)[1] == (0 if other.startswith("1970") else None)

    @pytest.mark.parametrize(
        "cells",
        [
            ["atm", "web", "atm"],
            ["f", "f"],  # a letter alone is no boolean
            ["12:30", "9:15"],
            ["18-25", "65+"],
            ["yes", "no", "maybe"],
        ],
    )
    def test_categories(self, cells: list[str], tmp_path: Path) -> None:
        column = column_of(cells, tmp_path)
        assert column.kind == "category"
        assert texts(column) == cells

    def test_missing_categories(self, tmp_path: Path) -> None:
        column = column_of(["atm", "", " web ", "None", "web"], tmp_path)
        assert texts(column) == ["atm", None, "web", None, "web"]
        assert len(column.texts) == 2

    def test_times_keep_their_text(self, tmp_path: Path) -> None:
        assert texts(column_of(["12:30", "09:15"], tmp_path)) == ["12:30", "09:15"]

    def test_a_mixture_is_noted(self, tmp_path: Path) -> None:
        nodes = "id,label,size\n" + "".join(f"{i},a,{c}\n" for i, c in enumerate("12S3M"))
        (note,) = read(write(tmp_path / "north", nodes)).notes
        assert "column 'size' read as categories, although 60% are numbers" in note

    def test_parquet_types(self, tmp_path: Path) -> None:
        moment = datetime(1970, 1, 1, 12, tzinfo=UTC)
        columns = {
            "id": [1, 2, 3],
            "label": ["a", "b", None],
            "whole": pa.array([1, None, 3], pa.int16()),
            "float": [0.5, float("nan"), None],
            "flag": [True, None, False],
            "day": pa.array([date(1970, 1, 2), None, date(1969, 12, 31)]),
            "moment": pa.array([moment, None, moment], pa.timestamp("ms", "Europe/Berlin")),
            "text": ["x", "NA", None],
            "code": pa.array(["1", "2", None]).dictionary_encode(),
            "nothing": pa.nulls(3),
        }
        pq.write_table(pa.table(columns), tmp_path / "nodes.parquet")
        pq.write_table(pa.table({"source": [1], "target": [2]}), tmp_path / "edges.parquet")
        (client,) = read_clients(tmp_path)[0].values()
        assert client.columns is not None
        found = {column.name: column for column in client.columns}
        values = {
            "whole": ("number", [1, None, 3]),
            "float": ("number", [0.5, None, None]),
            "flag": ("boolean", [1, None, 0]),
            "day": ("date", [1, None, -1]),
            "moment": ("date", [0.5, None, 0.5]),
            "nothing": ("number", [None] * 3),
        }
        for name, (kind, expected) in values.items():
            assert (found[name].kind, numbers(found[name])) == (kind, expected), name
        assert texts(found["text"]) == ["x", None, None]
        assert texts(found["code"]) == ["1", "2", None]


class TestAgreement:
    def make(self, tmp_path: Path, **cells: list[str]) -> Path:
        for name, column in cells.items():
            rows = (f"{i},a,{cell}\n" for i, cell in enumerate(column))
            write(tmp_path / name, "id,label,f\n" + "".join(rows))
        return tmp_path

    @pytest.mark.parametrize(
        ("a", "b", "kind"),
        [
            (["1", "2"], ["", ""], "number"),
            (["", ""], ["x", "y"], "category"),
            (["true", "no"], ["0", "1"], "number"),
            (["t", "f"], ["f", "f"], "boolean"),
            (["", ""], ["2020-01-01", ""], "date"),
        ],
    )
    def test_kinds_that_fit(self, a: list[str], b: list[str], kind: str, tmp_path: Path) -> None:
        one, other = read(self.make(tmp_path, a=a, b=b)).graphs
        assert one.table
        assert other.table
        assert (one.table[0].kind, other.table[0].kind) == (kind, kind)

    def test_kinds_that_do_not_fit(self, tmp_path: Path) -> None:
        message = str(failure(self.make(tmp_path, a=["1", "2"], b=["x", "y"])))
        for part in ("column 'f'", "number in client 'a'", "category in client 'b'", "schema.toml"):
            assert part in message

    def test_values_survive_a_change_of_kind(self) -> None:
        column = RawColumn("f", "category", np.array([0, -1, 1]), ("F", "t"))
        changed = as_kind(column, "boolean")
        assert changed is not None
        assert numbers(changed) == [0, None, 1]
        assert as_kind(column, "number") is None
        assert as_kind(RawColumn("f", "number", np.array([1.0])), "category") is None

    def test_names_are_ignored(self, tmp_path: Path) -> None:
        names = [f"person {i}" for i in range(60)]
        nodes = "id,label,name,city\n" + "".join(f"{n},a,{n},c{len(n)}\n" for n in names)
        folder = write(tmp_path / "north", nodes)
        collection = read(folder)
        assert collection.feature_names == ("city",)
        assert "'name' ignored: nearly every value is different" in collection.notes[0]
        assert read(folder, labels="optional").feature_names == ("name", "city")
        (folder / "schema.toml").write_text('[nodes.kinds]\nname = "category"\n')
        assert read(folder).feature_names == ("name", "city")

    def test_names_are_judged_over_all_clients(self, tmp_path: Path) -> None:
        cities = [f"city {i % 100}" for i in range(1000)]
        folder = self.make(tmp_path, large=cities, small=[f"city {i}" for i in range(60)])
        assert read(folder).feature_names == ("f",)

    def test_few_different_texts_are_categories(self, tmp_path: Path) -> None:
        assert column_of([f"v{i}" for i in range(49)], tmp_path).kind == "category"


class TestFiles:
    NODES = "id;label;f\n1;a;0.5\n2;b;1.5\n"

    @pytest.mark.parametrize(
        ("suffix", "delimiter"),
        [
            *product([".csv", ".csv.gz"], [",", ";", "\t", "|"]),
            *product([".tsv", ".tsv.gz"], ["\t"]),
        ],
    )
    def test_delimiters(self, suffix: str, delimiter: str, tmp_path: Path) -> None:
        nodes = self.NODES.replace(";", delimiter)
        edges = delimiter.join(["source", "target"]) + "\n" + delimiter.join("12") + "\n"
        (graph,) = read(write(tmp_path / "north", nodes, edges, suffix=suffix)).graphs
        assert graph.table
        assert numbers(graph.table[0]) == [0.5, 1.5]
        assert graph.num_edges == 1

    @pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
    def test_codes_with_leading_zeros_are_noted(self, suffix: str, tmp_path: Path) -> None:
        nodes = 'id,label,branch,size,day\n1,a,12,0.5,0\n2,a,"007",10,0\n3,b, 01,0,1\n'
        folder = write(tmp_path / "north", nodes, suffix=suffix)
        (client,) = survey(folder).clients
        (note,) = (note for note in client.notes if "codes" in note)
        assert "column 'branch' read as numbers" in note
        assert "such as 007" in note
        assert 'branch = "category"' in note
        (folder / "schema.toml").write_text('[nodes.kinds]\nbranch = "number"\n')
        (client,) = survey(folder).clients
        assert not any("codes" in note for note in client.notes)

    def test_declared_delimiter_and_decimal_comma(self, tmp_path: Path) -> None:
        nodes = "id|label|a,b,c,d\n1|a|0,5\n2|a|-1,25e1\n"
        schema = 'delimiter = "|"\ndecimal = ","\n'
        folder = write(tmp_path / "north", nodes, "source|target\n", schema)
        (graph,) = read(folder).graphs
        assert graph.table
        assert graph.table[0].name == "a,b,c,d"
        assert numbers(graph.table[0]) == [0.5, -12.5]

    @pytest.mark.parametrize("limit", [1e-4, 2e-3])  # in the header, and after some blocks
    def test_too_much_to_unpack(self, limit: float, tmp_path: Path) -> None:
        nodes = "id,label,f\n" + "".join(f"{i},a,{'1' * 20}\n" for i in range(100_000))
        folder = write(tmp_path / "north", nodes, suffix=".csv.gz")
        (folder / "schema.toml").write_text(f"unpacked_gb = {limit}\n")
        message = str(failure(folder))
        assert f"nodes.csv.gz: unpacks to more than {limit} GB" in message
        assert "unpacked_gb" in message
        (folder / "schema.toml").write_text("unpacked_gb = 0.1\n")
        assert read(folder).graphs[0].num_nodes == 100_000

    @pytest.mark.parametrize("keep", [5, 60, -4])
    def test_damaged_gzip(self, keep: int, tmp_path: Path) -> None:
        rows = np.random.default_rng(0).random(200)
        nodes = "id,label,f\n" + "".join(f"{i},a,{x}\n" for i, x in enumerate(rows))
        path = write(tmp_path / "north", nodes, suffix=".csv.gz") / "nodes.csv.gz"
        path.write_bytes(path.read_bytes()[:keep])
        message = str(failure(tmp_path))
        assert str(path) in message
        assert "cannot be read" in message

    def test_lines_of_a_compressed_file(self, tmp_path: Path) -> None:
        nodes = "id,label,f\n1,a,1\n1,a,2\n"
        message = str(failure(write(tmp_path / "north", nodes, suffix=".csv.gz")))
        assert "nodes.csv.gz, line 3, column 'id'" in message


SCHEMA = """
missing = ["-", "?"]
[nodes]
id = "customer"
label = "fraud"
split = "part"
ignore = ["remark"]
[nodes.kinds]
branch = "category"
[nodes.categories]
channel = ["atm", "web"]
[nodes.scale]
income = { mean = 30000, std = 1.5e4 }
[edges]
source = "from"
target = "to"
weight = "amount"
type = "how"
directed = true
"""
BANK = (
    "customer,fraud,part,branch,channel,income,remark,label\n"
    "a,yes,train,001,atm,1000,x,5\nb,no,test,2,-,?,y,6\nc,?,,001,web,3,z,7\n"
)
PAYMENTS = "to,from,amount,how,since\nb,a,2.5,card,1\nc,b,1,wire,2\n"


class TestSchema:
    def test_everything_is_mapped(self, tmp_path: Path) -> None:
        collection = read(write(tmp_path / "north", BANK, PAYMENTS, SCHEMA))
        (graph,) = collection.graphs
        assert collection.classes == ("no", "yes")
        assert graph.labels.tolist() == [1, 0, UNLABELLED]
        assert graph.own_masks[0].train.tolist() == [True, False, False]
        assert collection.feature_names == ("branch", "channel", "income", "label")
        assert graph.table
        branch, channel, income, _ = graph.table
        assert texts(branch) == ["001", "2", "001"]
        assert (texts(channel), channel.categories) == (["atm", None, "web"], ("atm", "web"))
        assert (numbers(income), income.scale) == ([1000, None, 3], Scale(30000, 15000))
        assert graph.arcs is not None
        assert graph.edges.T[graph.arcs].tolist() == [[0, 1], [1, 2]]
        assert graph.edge_weights is not None
        assert graph.edge_weights.tolist() == [2.5, 2.5, 1, 1]
        assert graph.relations == ("card", "wire")
        assert graph.edge_types is not None
        assert graph.edge_types.tolist() == [1, 1, 2, 2]
        assert "'since' of edges.csv ignored" in collection.notes[0]

    def test_one_for_all_clients(self, tmp_path: Path) -> None:
        for name in ("north", "south"):
            write(tmp_path / name, BANK, PAYMENTS)
        (tmp_path / "schema.toml").write_text(SCHEMA)
        collection = read(tmp_path)
        assert len(collection.graphs) == 2
        assert not any("schema.toml" in note for note in collection.notes)
        assert read(tmp_path / "north").classes == ("no", "yes")

    def test_faults_of_a_common_file_are_listed_once(self, tmp_path: Path) -> None:
        for name in ("north", "south"):
            write(tmp_path / name, BANK, PAYMENTS)
        (tmp_path / "schema.toml").write_text("decimals = 1\n")
        assert "did you mean 'decimal'" in str(failure(tmp_path))
        assert len(str(failure(tmp_path)).splitlines()) == 1

    def test_given_by_the_caller(self, tmp_path: Path) -> None:
        path = tmp_path / "other.toml"
        path.write_text(SCHEMA)
        folder = write(tmp_path / "north", BANK, PAYMENTS)
        assert "no column 'id'" in str(failure(folder))
        assert read(folder, schema=path).classes == ("no", "yes")

    def test_features_select_columns(self, tmp_path: Path) -> None:
        schema = '[nodes]\nfeatures = ["b", "a"]\n'
        folder = write(tmp_path / "north", "id,label,a,b,c\n1,x,1,2,?\n", schema=schema)
        assert read(folder).feature_names == ("b", "a")

    def test_columns_that_do_not_exist(self, tmp_path: Path) -> None:
        schema = '[nodes]\nfeatures = ["agee"]\n[nodes.kinds]\njobb = "category"\n'
        nodes = "id,label,age,job\n1,x,1,2\n"
        error = failure(write(tmp_path / "north", nodes, schema=schema))
        assert isinstance(error, FileFaults)
        assert error.count == 2
        assert "did you mean 'age'" in error.faults[0]
        assert "did you mean 'job'" in error.faults[1]

    @pytest.mark.parametrize("role", ["weight", "type"])
    def test_named_edge_columns_must_exist(self, role: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "north", BANK, PAYMENTS, f'[edges]\n{role} = "value"\n')
        assert "edges.csv, line 1: no column 'source', 'target', 'value'" in str(failure(folder))

    def test_all_faults_are_listed(self, tmp_path: Path) -> None:
        path = tmp_path / "schema.toml"
        path.write_text(
            'delimeter = ";"\ndecimal = "x"\n[nodes]\nid = 3\nlable = "y"\nmissing = []\n'
            '[nodes.kinds]\na = "text"\n[nodes.categories]\nb = ["x", "x"]\n'
            "[nodes.scale]\nc = { mean = 1, std = 0 }\n[edges]\ndirected = 1\n"
        )
        with pytest.raises(FileFaults) as caught:
            read_schema(path)
        message = str(caught.value)
        assert caught.value.count == 9
        for part in (
            "delimeter: unknown key 'delimeter': did you mean 'delimiter'?",
            "decimal: 'x' is not",
            "nodes.id: 3 is not",
            "nodes.lable: unknown key 'lable': did you mean 'label'?",
            "nodes.missing: write 'missing' at the top",
            "nodes.kinds.a: 'text' is not a kind",
            "nodes.categories.b: the values must be",
            "nodes.scale.c: write { mean = 40",
            "edges.directed: 1 is neither",
        ):
            assert part in message

    @pytest.mark.parametrize(
        "text",
        [
            '[nodes]\nignore = ["a"]\n[nodes.kinds]\na = "number"\n',
            '[nodes.kinds]\na = "number"\n[nodes.categories]\na = ["x"]\n',
            '[nodes.kinds]\na = "category"\n[nodes.scale]\na = { mean = 1, std = 1 }\n',
            '[edges]\nsource = "target"\n',
            '[nodes]\nfeatures = ["a", "a"]\n',
            '[nodes]\nlabel = "y"\nfeatures = ["a", "y"]\n',
            '[nodes.kinds]\nid = "category"\n',
            "nodes = 3\n",
            "[nodes\n",
        ],
    )
    def test_contradictions(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "schema.toml"
        path.write_text(text)
        with pytest.raises(UserError, match=r"schema\.toml"):
            read_schema(path)

    def test_defaults_are_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "schema.toml"
        path.write_text("")
        assert read_schema(path) == TableSchema(path=path)

    def test_a_declared_kind_that_does_not_fit(self, tmp_path: Path) -> None:
        for kind in ("number", "boolean", "date"):
            schema = f'[nodes.kinds]\nf = "{kind}"\n'
            folder = write(tmp_path / kind, "id,label,f\n1,a,red\n", schema=schema)
            message = str(failure(folder))
            assert f"line 2, column 'f': 'red' is not a {kind}, which schema.toml" in message

    def test_declared_kinds(self, tmp_path: Path) -> None:
        kinds = {"number": "1", "boolean": "1", "date": "20200131", "category": "1"}
        for kind, cell in kinds.items():
            schema = f'[nodes.kinds]\nf = "{kind}"\n'
            assert column_of([cell, ""], tmp_path / kind, schema).kind == kind
        day = column_of(["20200131"], tmp_path, '[nodes.kinds]\nf = "date"\n').values[0]
        assert day == (date(2020, 1, 31) - date(1970, 1, 1)).days

    def test_expected_kinds(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "north", "id,code\n1,007\n")
        (graph,) = read(folder, labels="optional", kinds={"code": "category"}).graphs
        assert graph.table
        assert texts(graph.table[0]) == ["007"]


class TestLabels:
    def test_optional(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "north", "id,split,f\n1,test,3\n2,train,4\n")
        assert "no column 'label'" in str(failure(folder))
        collection = read(folder, labels="optional")
        (graph,) = collection.graphs
        assert graph.labels.tolist() == [UNLABELLED] * 2
        assert (collection.classes, graph.own_masks) == ((), ())
        assert "no column 'label'" in collection.notes[0]

    def test_used_if_present(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "north", "id,label,f\n1,a,3\n2,,4\n")
        assert read(folder, labels="optional").graphs[0].labels.tolist() == [0, UNLABELLED]


class TestEdges:
    NODES = "id,label,f\na,x,1\nb,y,2\nc,x,3\n"

    def test_weights_and_types(self, tmp_path: Path) -> None:
        edges = "source,target,weight,type\na,b,2,card\nb,a,4,wire\nb,c,0,card\na,b,1,card\n"
        collection = read(write(tmp_path / "north", self.NODES, edges))
        (graph,) = collection.graphs
        assert graph.edges.tolist() == [[0, 1], [1, 0]]
        assert graph.edge_weights is not None
        assert graph.edge_weights.tolist() == [3.5, 3.5]  # the mean of 2 + 1 and 4
        assert graph.edge_types is not None
        assert graph.edge_types.tolist() == [3, 3]
        assert graph.arcs is None
        assert "1 edge of weight 0 removed" in collection.notes[0]

    def test_ignored(self, tmp_path: Path) -> None:
        edges = "source,target,weight,type\na,b,heavy,card\n"
        schema = '[edges]\nignore = ["weight", "type"]\n'
        (graph,) = read(write(tmp_path / "north", self.NODES, edges, schema)).graphs
        assert graph.edge_weights is None
        assert graph.edge_types is None

    def test_bad_weights(self, tmp_path: Path) -> None:
        cells = ["1", "-2", "", "heavy", "inf", "1e400", "NaN", "0.5"]
        edges = "source,target,weight\n" + "".join(f"a,b,{cell}\n" for cell in cells)
        error = failure(write(tmp_path / "north", self.NODES, edges))
        assert isinstance(error, FileFaults)
        assert error.count == 6
        expected = [
            "'-2' is negative",
            "is empty",
            "'heavy' is not",
            "'inf'",
            "'1e400'",
            "is empty",
        ]
        for line, (fault, part) in enumerate(zip(error.faults, expected, strict=True), start=3):
            assert f"edges.csv, line {line}, column 'weight': {part}" in fault

    def test_relations_are_those_of_all_clients(self, tmp_path: Path) -> None:
        write(tmp_path / "a", self.NODES, "source,target,type\na,b,wire\n")
        write(tmp_path / "b", self.NODES, "source,target,type\na,b,card\n")
        write(tmp_path / "c", self.NODES, "source,target\na,b\n")
        a, b, c = read(tmp_path).graphs
        assert a.relations == b.relations == ("card", "wire")
        assert a.edge_types is not None
        assert b.edge_types is not None
        assert (a.edge_types[0], b.edge_types[0], c.edge_types) == (2, 1, None)

    def test_empty_and_too_many_types(self, tmp_path: Path) -> None:
        edges = "source,target,type\na,b,x\na,b,\n"
        message = str(failure(write(tmp_path / "a", self.NODES, edges)))
        assert "line 3, column 'type': is empty" in message
        edges = "source,target,type\n" + "".join(f"a,b,t{i}\n" for i in range(64))
        assert "has 64 types" in str(failure(write(tmp_path / "b", self.NODES, edges)))


class TestAllFaults:
    NODES = "id,label,split,f\na,x,train,1\na,x,dev,inf\n,x,val,3\nd,,test,4\ne,x,test\n"
    EDGES = "source,target,weight\na,b,1\nz,a,-1\na,,1,1\n"

    def test_of_both_tables(self, tmp_path: Path) -> None:
        error = failure(write(tmp_path / "north", self.NODES, self.EDGES))
        assert isinstance(error, FileFaults)
        places = [fault.removeprefix(f"{tmp_path}/north/").split(":")[0] for fault in error.faults]
        assert places == [
            "nodes.csv, line 3, column 'id'",
            "nodes.csv, line 3, column 'split'",
            "nodes.csv, line 3, column 'f'",
            "nodes.csv, line 4, column 'id'",
            "nodes.csv, line 6",
            "edges.csv, line 3, column 'weight'",
            "edges.csv, line 4",
        ]
        assert str(error).startswith("7 faults:\n  ")

    def test_of_all_clients(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write(tmp_path / name, "id,label,f\n1,x,inf\n")
        write(tmp_path / "c", "id,label,f\n1,x,1\n")
        (tmp_path / "d").mkdir()
        message = str(failure(tmp_path))
        assert "a/nodes.csv, line 2" in message
        assert "b/nodes.csv, line 2" in message
        assert "no nodes.csv" in message
        assert "no edges.csv" in message
        assert "/c/" not in message

    def test_first_twenty_of_each(self, tmp_path: Path) -> None:
        cells = ["inf"] * 500
        rows = "".join(f"{i},x,{cell}\n" for i, cell in enumerate(cells))
        write(tmp_path / "a", "id,label,f\n" + rows)
        error = failure(tmp_path)
        assert isinstance(error, FileFaults)
        assert (error.count, len(error.faults)) == (500, 20)
        lines = str(error).splitlines()
        assert lines[0] == "500 faults:"
        assert [f"line {i}," in line for i, line in enumerate(lines[1:21], start=2)] == [True] * 20
        assert lines[21].strip() == f"and 480 more in {tmp_path}/a/nodes.csv"
        write(tmp_path / "b", "id,label,f\n1,x,inf\n")
        lines = str(failure(tmp_path)).splitlines()
        assert len(lines) == 22
        assert "b/nodes.csv, line 2" in lines[-1]
        assert lines[-2].strip() == f"and 481 more in {tmp_path}/a/nodes.csv"

    def test_one_fault_is_one_line(self, tmp_path: Path) -> None:
        error = failure(write(tmp_path / "a", "id,label,f\n1,x,inf\n"))
        assert str(error).startswith(f"{tmp_path}/a/nodes.csv, line 2, column 'f': 'inf'")

    def test_rows_after_a_ragged_one_are_located(self, tmp_path: Path) -> None:
        nodes = 'id,label,f\n1,x,1\n2,x\n"3\n",x,inf\n4,x,1,1\n\n5,x,1e99\n'
        error = failure(write(tmp_path / "a", nodes))
        assert isinstance(error, FileFaults)
        assert [fault.split(",")[1] for fault in error.faults] == [
            " line 3: 2 cells",
            " line 4",
            " line 6: 4 cells",
            " line 8",
        ]

    def test_no_row_fits(self, tmp_path: Path) -> None:
        error = failure(write(tmp_path / "a", "id,label,f\n1,x\n2,x,3,4\n", "source,target\n1\n"))
        assert isinstance(error, FileFaults)
        assert [fault.split(",")[1] for fault in error.faults] == [
            " line 2: 2 cells",
            " line 3: 4 cells",
            " line 2: 1 cell",
        ]

    def test_a_ragged_row_that_is_not_text(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        folder = write(tmp_path / "a", "")
        (folder / "nodes.csv").write_bytes(b"id,label,f\n1,x,1\n2,\xff\n")
        assert "nodes.csv, line 3: 2 cells" in str(failure(folder))
        assert capfd.readouterr().err == ""

    def test_every_bad_text_is_found(self, tmp_path: Path) -> None:
        nodes = b"id,label,f,g\n1,x,\xff,1\n2,x,a,1\n3,\xfe,b,1\n"
        folder = write(tmp_path / "a", "")
        (folder / "nodes.csv").write_bytes(nodes)
        error = failure(folder)
        assert isinstance(error, FileFaults)
        assert ["line 2" in error.faults[0], "line 4" in error.faults[1]] == [True, True]
        assert error.count == 2


VALUES = {
    "number": st.floats(-1e6, 1e6).map(lambda x: round(x, 3)),
    "boolean": st.booleans(),
    "date": st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(
        lambda t: t.replace(microsecond=0)
    ),
    "category": st.sampled_from(["ab", "ü", "c d", 'q"q', "e;f", "x,y", "l\nm"]),
}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, tuple[str, list[Any]]]:
    rows = draw(st.integers(1, 8))
    columns = {}
    for i, kind in enumerate(
        draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    ):
        cell = st.none() | VALUES[kind]
        columns[f"{kind}{i}"] = (kind, draw(st.lists(cell, min_size=rows, max_size=rows)))
    return columns


def as_text(value: Any) -> str:
    if value is None:
        return "NA"
    return value.isoformat() if isinstance(value, datetime) else str(value)


@given(
    table=tables(),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    suffix=st.sampled_from([".csv", ".csv.gz"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tables_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    table: dict[str, tuple[str, list[Any]]],
    delimiter: str,
    suffix: str,
) -> None:
    folder = tmp_path_factory.mktemp("clients")
    rows = list(zip(*(cells for _, cells in table.values()), strict=True))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["id", "label", *table])
    writer.writerows([i, "a", *map(as_text, row)] for i, row in enumerate(rows))
    edges = delimiter.join(["source", "target"]) + "\n"
    write(folder / "csv", text.getvalue(), edges, suffix=suffix)
    (folder / "parquet").mkdir()
    columns = {name: pa.array(cells) for name, (_, cells) in table.items()}
    ids = {"id": range(len(rows)), "label": ["a"] * len(rows)}
    pq.write_table(pa.table({**ids, **columns}), folder / "parquet" / "nodes.parquet")
    (folder / "parquet" / "edges.csv").write_text(EDGES)
    for form in ("csv", "parquet"):
        (graph,) = read(folder / form).graphs
        assert graph.table
        for column, (name, (kind, cells)) in zip(graph.table, table.items(), strict=True):
            assert column.name == name
            if all(cell is None for cell in cells):
                assert column.missing.all()
                continue
            assert column.kind == kind
            if kind == "category":
                assert texts(column) == cells
                continue
            epoch, day = datetime(1970, 1, 1), timedelta(days=1)
            expected = [
                None if c is None else (c - epoch) / day if kind == "date" else float(c)
                for c in cells
            ]
            assert numbers(column) == expected


class TestSurvey:
    def test_what_was_found(self, tmp_path: Path) -> None:
        found = survey(write(tmp_path / "north", BANK, PAYMENTS, SCHEMA))
        (client,) = found.clients
        assert (client.nodes, client.edges, client.labelled) == (3, 2, 2)
        assert client.classes == {"no": 1, "yes": 1}
        assert client.split == {"train": 1, "val": 0, "test": 1}
        assert client.weights == (1.0, 2.5)
        assert client.directed
        assert client.relations == {"card": 1, "wire": 1}
        assert set(client.ignored) == {"remark", "since"}
        branch, channel, income, _ = client.columns
        assert (branch.categories, branch.common, branch.missing) == (2, ("001", "2"), 0)
        assert channel.missing == pytest.approx(1 / 3)
        assert (income.low, income.high) == (3, 1000)

    def test_dates_and_booleans(self, tmp_path: Path) -> None:
        nodes = "id,label,d,b\n1,x,2020-01-01,true\n2,y,2021-05-04T06:00:00,false\n"
        (client,) = survey(write(tmp_path / "north", nodes)).clients
        day, flag = client.columns
        assert (day.low, day.high) == ("2020-01-01", "2021-05-04T06:00:00")
        assert flag.true == 0.5

    def test_warnings(self, tmp_path: Path) -> None:
        write(tmp_path / "a", "id,label,f,g\n1,x,1,\n2,x,2,\n")
        write(tmp_path / "b", "id,label,f,g\n1,,1,2\n", "source,target\n")
        text = "\n".join(survey(tmp_path).warnings)
        assert "client 'b' has no labelled node" in text
        assert "all labels are 'x'" in text
        assert "client 'a' has no value in column 'g'" in text
