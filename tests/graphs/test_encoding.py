"""Encodings: statistics of train nodes, the rules learned from them, and their use on new nodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polyphily.errors import UserError
from polyphily.graphs import files
from polyphily.graphs.columns import (
    EMPTY,
    WORDS,
    Column,
    agree_columns,
    columns_of,
    comparable,
    convert,
)
from polyphily.graphs.encoding import Encoding, choose_normalization, learn_encodings
from polyphily.graphs.files.client import RawColumn
from polyphily.graphs.files.schema import Scale
from polyphily.graphs.graph import Graph, Masks
from polyphily.graphs.loading import load, same_width, whole_graph
from polyphily.graphs.prepared import load_seeds
from polyphily.graphs.rules import BUCKETS, MAX_WIDTH, ArrayRule, Rule, bucket_of
from polyphily.graphs.statistics import COUNTED, VOCABULARY, Counts, Moments, Statistics

NAN = math.nan
Table = tuple[RawColumn, ...]


def number(name: str, values: Sequence[float], kind: str = "number") -> RawColumn:
    return RawColumn(name, kind, np.array(values, dtype=np.float64))


def category(name: str, values: Sequence[str | None]) -> RawColumn:
    texts = tuple(sorted({value for value in values if value is not None}))
    codes = [-1 if value is None else texts.index(value) for value in values]
    return RawColumn(name, "category", np.array(codes, dtype=np.int64), texts)


def nodes(count: int, train: Sequence[int]) -> Masks:
    mask = np.isin(np.arange(count), train)
    return Masks(mask, np.zeros(count, dtype=np.bool_), ~mask)


def client(raw: Table | npt.NDArray[Any], train: Sequence[int], name: str = "a") -> Graph:
    """Return a graph without edges, with a table or an array and with a split."""
    table = raw if isinstance(raw, tuple) else None
    count = len(raw[0].values) if isinstance(raw, tuple) else len(raw)
    x = np.zeros((count, 0)) if isinstance(raw, tuple) else raw
    edges, labels = np.zeros((2, 0), dtype=np.int64), np.arange(count) % 2
    graph = Graph.build(x, edges, labels, masks=nodes(count, train), name=name)
    return replace(graph, table=table)


def learn(raw: Table, normalize: str = "standard") -> Encoding:
    """Learn an encoding from all nodes of a table."""
    count = len(raw[0].values)
    (found,), _ = learn_encodings([client(raw, range(count))], normalize)
    return found


def dense(features: Any) -> npt.NDArray[np.float32]:
    return features.toarray() if sp.issparse(features) else features


# Statistics ------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float64, (12, 3), elements=st.floats(-1e6, 1e6) | st.just(NAN)),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_moments_of_parts_merge_to_those_of_the_whole(
    values: npt.NDArray[np.float64], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), 12]
    parts = [Moments.of(values[a:b]) for a, b in pairwise(bounds)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    there = ~np.isnan(values)
    np.testing.assert_array_equal(merged.count, there.sum(axis=0))
    np.testing.assert_array_equal(merged.missing, (~there).sum(axis=0))
    for column in range(3):
        known = values[there[:, column], column]
        if len(known):
            scale = 1 + abs(known).max()
            assert abs(merged.mean[column] - known.mean()) < 1e-12 * scale
            assert abs(merged.squares[column] - len(known) * known.var()) < 1e-9 * scale**2


@pytest.mark.parametrize("mean", [0.0, 1e6, 1e9])
def test_the_deviation_is_exact_far_from_zero(mean: float) -> None:
    values = np.tile([mean - 1.0, mean + 1.0], 5000)[:, None]
    parts = [Moments.of(part) for part in np.array_split(values, 7)]
    found = parts[0]
    for part in parts[1:]:
        found = found.merge(part)
    assert found.mean[0] == pytest.approx(mean, rel=1e-14)
    assert found.std[0] == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1, -3e30])
def test_a_column_with_one_value_is_not_divided_by_rounding_errors(value: float) -> None:
    values = np.full((1001, 1), value)
    found = Moments.of(values[:400]).merge(Moments.of(values[400:]))
    assert found.std.tolist() == [1.0]


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(5, 2, (100, 4))
    monkeypatch.setattr("polyphily.graphs.statistics.BLOCK", 7)
    found = Moments.of(values)
    np.testing.assert_allclose(found.mean, values.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.std, values.std(axis=0), rtol=1e-13)


def test_counts_keep_the_most_frequent_values() -> None:
    often = [f"v{i:04d}" for i in range(COUNTED) for _ in range(2)]
    column = category("c", [*often, "rare", "long" * 100, None])
    counts = Counts.of(column)
    assert len(counts.values) == COUNTED
    assert "rare" not in counts.values
    assert (counts.rest, counts.missing) == (2, 1)


def test_ties_are_broken_by_the_text_and_not_by_the_order_of_clients() -> None:
    values = [f"v{i:03d}" for i in range(VOCABULARY + 1)]
    one, two = Counts.of(category("c", values[60:])), Counts.of(category("c", values[:60]))
    assert one.merge(two).vocabulary() == two.merge(one).vocabulary()
    assert one.merge(two).vocabulary() == (tuple(values[:VOCABULARY]), True)


def test_statistics_survive_json_to_the_bit() -> None:
    table = (number("x", [0.1, 1 / 3, NAN, 1e300 / 1e280]), category("c", ["a", "b", None, "a"]))
    found = Statistics.of(table, np.ones(4, dtype=np.bool_), columns_of(table))
    again = Statistics.from_json(json.loads(json.dumps(found.to_json())), numbers=1, categories=1)
    assert again.to_json() == found.to_json()
    assert found.to_json()["categories"] == [{"values": {"a": 2, "b": 1}, "rest": 0, "missing": 1}]


GOOD: dict[str, Any] = {
    "count": [3],
    "mean": [1.5],
    "squares": [2.0],
    "missing": [0],
    "categories": [{"values": {"a": 3}, "rest": 0, "missing": 0}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"count": [-1]},
        {"count": [1.5]},
        {"count": [True]},
        {"count": [1 << 60]},
        {"count": [1, 2]},
        {"mean": [math.inf]},
        {"mean": [10**400]},
        {"mean": [1e39]},
        {"mean": ["1"]},
        {"squares": [-1.0]},
        {"squares": [1e200]},
        {"missing": None},
        {"categories": []},
        {"categories": [[]]},
        {"categories": [{"values": {"a": -1}, "rest": 0, "missing": 0}]},
        {"categories": [{"values": {"a" * 300: 1}, "rest": 0, "missing": 0}]},
        {"categories": [{"values": dict.fromkeys(map(str, range(1001)), 1), "rest": 0}]},
        {"categories": [{"values": ["a"], "rest": 0, "missing": 0}]},
    ],
)
def test_statistics_that_are_not_valid_are_refused(change: dict[str, Any]) -> None:
    assert Statistics.from_json(GOOD, numbers=1, categories=1)
    with pytest.raises(UserError, match="its statistics"):
        Statistics.from_json(GOOD | change, numbers=1, categories=1, where="its statistics")


@pytest.mark.parametrize("data", [None, [], "text", {}, 3])
def test_anything_else_than_statistics_is_refused(data: Any) -> None:
    with pytest.raises(UserError, match="the statistics"):
        Statistics.from_json(data, numbers=0, categories=0)


# Rules -----------------------------------------------------------------------------------------


def bank() -> Table:
    return (
        number("age", [20, 40, NAN, 60]),
        number("member", [1, 0, 1, NAN], "boolean"),
        number("since", [100, 200, 300, 400], "date"),
        category("channel", ["web", "atm", None, "web"]),
    )


def test_features_and_their_names() -> None:
    encoding = learn(bank())
    assert encoding.names == (
        *("age", "age missing", "member", "member missing", "since"),
        *("channel=atm", "channel=web", "channel missing"),
    )
    assert encoding.width == 8
    age = math.sqrt(800 / 3)  # of 20, 40 and 60
    since = math.sqrt(12500)
    expected = [
        [-20 / age, 0, 1, 0, -150 / since, 0, 1, 0],
        [0, 0, 0, 0, -50 / since, 1, 0, 0],
        [0, 1, 1, 0, 50 / since, 0, 0, 1],
        [20 / age, 0, 2 / 3, 1, 150 / since, 0, 1, 0],
    ]
    found = encoding.apply(bank())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_without_scaling_numbers_stay_and_dates_are_scaled() -> None:
    found = dense(learn(bank(), "none").apply(bank()))
    assert found[:, 0].tolist() == [20, 40, 40, 60]
    assert found[:, 4].mean() == pytest.approx(0, abs=1e-6)
    assert found[:, 4].std() == pytest.approx(1)


def test_rows_are_divided_by_the_sum_of_their_magnitudes() -> None:
    plain, row = learn(bank(), "none").apply(bank()), learn(bank(), "row").apply(bank())
    np.testing.assert_allclose(row, plain / abs(plain).sum(axis=1, keepdims=True), rtol=1e-6)


def test_declared_scales_and_values_are_used_as_they_are() -> None:
    age = replace(number("age", [20, 40, NAN]), scale=Scale(30.0, 10.0))
    channel = replace(category("channel", ["web", "app", None]), categories=("atm", "web"))
    for normalize in ("none", "standard"):
        encoding = learn((age, channel), normalize)
        assert encoding.names == (
            *("age", "age missing"),
            *("channel=atm", "channel=web", "channel other", "channel missing"),
        )
        assert encoding.apply((age, channel)).tolist() == [
            [-1, 0, 0, 1, 0, 0],
            [1, 0, 0, 0, 1, 0],
            [0, 1, 0, 0, 0, 1],
        ]


def test_only_the_most_frequent_values_have_a_feature() -> None:
    values = [f"v{i:03d}" for i in range(VOCABULARY) for _ in range(2)] + ["rare"]
    encoding = learn((category("c", values),))
    assert encoding.width == VOCABULARY + 1
    assert encoding.names[-1] == "c other"
    new = (category("c", ["v007", "rare", "never seen"]),)
    assert dense(encoding.apply(new)).argmax(axis=1).tolist() == [7, VOCABULARY, VOCABULARY]


def test_values_that_training_did_not_have_are_zeros() -> None:
    encoding = learn((category("c", ["a", "b"]),))
    assert encoding.apply((category("c", ["new", None, "b"]),)).tolist() == [[0, 0], [0, 0], [0, 1]]


def test_missing_numbers_that_training_did_not_have_are_the_mean() -> None:
    encoding = learn((number("x", [1, 3]),), "none")
    assert encoding.names == ("x",)
    assert encoding.apply((number("x", [NAN, 5]),)).tolist() == [[2], [5]]


def test_sparse_and_dense_features_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table = (
        number("x", [NAN, *rng.normal(size=199)]),
        *(category(f"c{i}", [None, *(f"v{v}" for v in rng.integers(0, 90, 199))]) for i in (0, 1)),
    )
    encoding = learn(table)
    assert not encoding.dense
    found = encoding.apply(table)
    assert sp.issparse(found)
    assert found.dtype == np.float32
    monkeypatch.setattr(Encoding, "dense", True)
    np.testing.assert_array_equal(dense(found), encoding.apply(table))


@given(
    st.permutations(range(8)),
    hnp.arrays(np.float64, 8, elements=st.floats(-1e9, 1e9) | st.just(NAN)),
    st.lists(st.sampled_from(["a", "b", "new", None]), min_size=8, max_size=8),
)
def test_other_than_train_nodes_change_no_rule(
    order: list[int], values: npt.NDArray[np.float64], texts: list[str | None]
) -> None:
    train, rest = order[:5], order[5:]
    table = (
        number("x", [1, 2, NAN, 4, 5, 6, 7, 8]),
        category("c", ["a", "b", "a", None, "b", "a", "c", "c"]),
    )
    x, own = table[0].values.copy(), [None if c < 0 else "abc"[c] for c in table[1].values]
    x[rest] = values[rest]
    changed = [texts[i] if i in rest else own[i] for i in range(8)]
    other = (number("x", x.tolist()), category("c", changed))
    assert learn_encodings([client(table, train)]) == learn_encodings([client(other, train)])


@given(
    st.lists(st.just(NAN) | st.integers(10**6, 10**6 + 9), min_size=12, max_size=12),
    st.lists(st.sampled_from(["a", "b", None]), min_size=12, max_size=12),
    st.integers(1, 4),
)
def test_clients_together_learn_what_one_client_with_all_nodes_learns(
    values: list[float], texts: list[str | None], count: int
) -> None:
    table = (number("x", values), category("c", texts))
    parts = [[i for i in range(12) if i % count == k] for k in range(count)]
    graphs = [
        client(tuple(column.take(np.array(part)) for column in table), range(len(part)), f"{k}")
        for k, part in enumerate(parts)
    ]
    found, _ = learn_encodings(graphs, "standard")
    assert all(encoding is found[0] for encoding in found)
    (whole,), _ = learn_encodings([client(table, range(12))], "standard")
    assert found[0].names == whole.names
    np.testing.assert_allclose(
        dense(found[0].apply(table)), dense(whole.apply(table)), rtol=1e-5, atol=1e-6
    )


# Arrays ----------------------------------------------------------------------------------------


def test_arrays_are_scaled_by_the_train_nodes_of_all_clients() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e6, 1, (30, 3)).astype(np.float32), rng.normal(3, 2, (20, 3))]
    graphs = [client(x.astype(np.float32), range(10), str(k)) for k, x in enumerate(parts)]
    found, _ = learn_encodings(graphs, "standard")
    together = np.concatenate([graph.features[:10] for graph in graphs]).astype(np.float64)
    for graph in graphs:
        expected = (graph.features - together.mean(axis=0)) / together.std(axis=0)
        np.testing.assert_allclose(found[0].encode(graph).features, expected, rtol=1e-5)


def test_arrays_stay_as_they_are_unless_they_are_scaled() -> None:
    graph = client(np.ones((3, 2), dtype=np.float32), [0])
    (encoding,), how = learn_encodings([graph])
    assert how == "none"
    assert encoding.encode(graph).features is graph.features
    assert encoding.names == ("0", "1")
    assert not encoding.is_learned


def test_sparse_arrays_are_not_scaled() -> None:
    graph = client(np.ones((3, 2), dtype=np.float32), [0])
    graph = replace(graph, features=sp.csr_array(graph.features))
    with pytest.raises(UserError, match="would make sparse features dense"):
        learn_encodings([graph], "standard")


# New nodes -------------------------------------------------------------------------------------


def test_columns_are_found_by_name_and_others_are_ignored() -> None:
    encoding, table = learn(bank()), bank()
    shuffled = (number("income", [1, 2, 3, 4]), *reversed(table))
    np.testing.assert_array_equal(encoding.apply(shuffled), encoding.apply(table))
    assert encoding.ignored(shuffled) == ("income",)
    assert encoding.ignored(table) == ()


def test_a_new_node_changes_no_feature_of_other_nodes() -> None:
    encoding, table = learn(bank()), bank()
    outlier = (
        number("age", [*table[0].values, 1e9]),
        number("member", [*table[1].values, 1], "boolean"),
        number("since", [*table[2].values, 1e6], "date"),
        replace(table[3], values=np.array([*table[3].values, 0])),
    )
    np.testing.assert_array_equal(encoding.apply(outlier)[:4], encoding.apply(table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, "lacks 'age'"),
        ({"age": category("age", ["old"] * 4)}, "'age' is a column of the kind category, but the "),
        ({"channel": number("channel", [1, 2, 3, 4])}, r"\[nodes.kinds\] channel = \"category\""),
        ({"since": number("since", [1, 2, 3, 4])}, "the kind date is expected"),
        (
            {"member": number("member", [0, 1, 2, 0])},
            "has other values than 0 and 1, but the kind boolean",
        ),
        (
            {"age": number("age", [1e300, 0, 0, 0])},
            "'age', node 0: the value is too large once scaled",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    change: dict[str, RawColumn | None], message: str
) -> None:
    columns = {column.name: column for column in bank()} | change
    with pytest.raises(UserError, match=message):
        learn(bank()).apply(tuple(column for column in columns.values() if column is not None))


def test_columns_that_fit_are_taken() -> None:
    """Numbers 0 and 1 fit booleans, booleans fit numbers, and no value at all fits every kind."""
    encoding = learn(bank())
    new = (
        number("age", [1, 0], "boolean"),
        number("member", [1, 0]),
        category("since", [None, None]),
        number("channel", [NAN, NAN]),
    )
    found = encoding.apply(new)
    assert found[:, encoding.names.index("channel missing")].tolist() == [1, 1]
    assert found[:, encoding.names.index("since")].tolist() == [0, 0]
    assert found[:, encoding.names.index("member")].tolist() == [1, 0]


def test_arrays_and_tables_of_numbers_fit_each_other() -> None:
    table = (number("x", [1, 2]), number("y", [3, 5]))
    array = np.array([[1, 3], [2, 5]], dtype=np.float32)
    by_name, by_place = learn(table), learn_encodings([client(array, [0, 1])], "standard")[0][0]
    np.testing.assert_array_equal(by_name.apply(array), by_name.apply(table))
    np.testing.assert_array_equal(by_place.apply(table), by_place.apply(array))
    for encoding in (by_name, by_place):
        with pytest.raises(UserError, match="3"):
            encoding.apply(np.ones((2, 3), dtype=np.float32))
    with pytest.raises(UserError, match="'y' has missing values"):
        by_place.apply((table[0], number("y", [3, NAN])))


# At home ---------------------------------------------------------------------------------------


def test_at_home_nothing_of_one_client_reaches_another() -> None:
    first = client(bank(), [0, 1], "a")
    others = [
        client(bank(), [2, 3], "b"),
        client(
            (
                number("age", [1e6, NAN, 7, 8]),
                number("member", [1, 1, 1, 1], "boolean"),
                number("since", [1, 2, 3, 4], "date"),
                category("channel", ["fax", "post", "pigeon", "owl"]),
            ),
            [0, 1, 2],
            "b",
        ),
    ]
    found = [learn_encodings([first, other], mode="home")[0] for other in others]
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
    assert len({encoding.names for pair in found for encoding in pair}) == 1


def test_at_home_a_client_scales_by_its_own_train_nodes() -> None:
    graphs = [client((number("x", x),), [0, 1], str(k)) for k, x in enumerate([[1, 3], [10, 30]])]
    found, _ = learn_encodings(graphs, "standard", "home")
    for encoding, graph in zip(found, graphs, strict=True):
        assert encoding.names == ("x", "x missing")
        assert encoding.encode(graph).features.tolist() == [[-1, 0], [1, 0]]
    arrays = [client(np.array([[1.0], [3.0]]) * 10**k, [0, 1], str(k)) for k in range(2)]
    for encoding, graph in zip(learn_encodings(arrays, "standard", "home")[0], arrays, strict=True):
        assert encoding.encode(graph).features.tolist() == [[-1], [1]]


def test_at_home_categories_are_hashed_or_declared() -> None:
    plain = category("c", ["a", "b", None])
    declared = replace(plain, categories=("b", "z"))
    hashed = Encoding.at_home(columns_of((plain,)), "none")
    assert hashed.width == BUCKETS + 1
    found = hashed.apply((plain,))
    assert found.argmax(axis=1).tolist() == [bucket_of("c", "a"), bucket_of("c", "b"), BUCKETS]
    assert found.sum(axis=1).tolist() == [1, 1, 1]
    listed = Encoding.at_home(columns_of((declared,)), "none")
    assert listed.names == ("c=b", "c=z", "c other", "c missing")
    assert listed.apply((plain,)).argmax(axis=1).tolist() == [2, 0, 3]


def test_the_hash_is_the_same_on_every_machine_and_depends_on_the_column() -> None:
    assert [bucket_of("channel", v) for v in ("web", "atm", "branch")] == [29, 11, 28]
    many = range(2000)
    assert len({bucket_of("channel", str(v)) for v in many}) == BUCKETS
    assert sum(bucket_of("a", str(v)) == bucket_of("b", str(v)) for v in many) < 150


def test_an_open_encoding_is_not_applied() -> None:
    encoding = Encoding.at_home((Column("x", "number"),), "none")
    assert not encoding.is_complete
    with pytest.raises(ValueError, match="'x' has no mean yet"):
        encoding.apply((number("x", [1]),))


# What clients agree on -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "agreed"),
    [
        (("number", "number"), "number"),
        (("number", "boolean"), "number"),
        (("boolean", "number"), "number"),
        ((EMPTY, "category"), "category"),
        (("date", EMPTY), "date"),
        ((EMPTY, EMPTY), "number"),
        ((EMPTY, "boolean", "number"), "number"),
        ((WORDS, "boolean"), "boolean"),
        ((WORDS, "category"), "category"),
        ((WORDS, WORDS, EMPTY), "category"),
    ],
)
def test_kinds_that_fit_are_agreed_on(kinds: Sequence[str], agreed: str) -> None:
    clients = {str(k): [Column("x", kind)] for k, kind in enumerate(kinds)}
    assert agree_columns(clients) == (Column("x", agreed),)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([Column("x", "category")], "its kind is number at 'north' and category at 'south'"),
        ([Column("y", "number")], "'x' only at 'north'; 'y' only at 'south'"),
        ([], "'x' only at 'north'"),
        ([Column("x", "number", scale=(1.0, 1.0))], r"declare different scales \(\[nodes.scale\]"),
    ],
)
def test_columns_that_differ_are_refused(theirs: list[Column], message: str) -> None:
    ours = [Column("x", "number", scale=(0.0, 1.0))]
    with pytest.raises(UserError, match=message):
        agree_columns({"north": ours, "south": theirs}, "sites")


def test_declarations_of_one_client_hold_for_all() -> None:
    declared = Column("c", "category", ("a", "b"))
    for clients in ([declared, Column("c", "category")], [Column("c", EMPTY), declared]):
        assert agree_columns(dict(zip("xy", ([c] for c in clients), strict=True))) == (declared,)


def test_a_column_without_values_fits_every_kind() -> None:
    empty = number("x", [NAN, NAN])
    assert columns_of((empty,)) == (Column("x", EMPTY),)
    words = category("x", ["Yes", None])
    assert columns_of((words,)) == (Column("x", WORDS),)
    assert convert(words, "boolean").values.tolist() == pytest.approx([1, NAN], nan_ok=True)
    assert convert(empty, "category").missing.all()
    assert convert(category("x", [None]), "date").missing.all()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ((number("x", [1, 2]),), "none"),
        ((number("x", [1, 2]), number("y", [0, 1], "boolean")), "none"),
        ((number("x", [1, NAN]),), "standard"),
        ((number("x", [1, 2], "date"),), "standard"),
        ((category("x", ["a", "b"]),), "standard"),
    ],
)
def test_the_usual_normalization(table: Table, expected: str) -> None:
    assert learn_encodings([client(table, [0, 1])])[1] == expected
    assert choose_normalization(4) == "none"


def test_equal_rows_of_tables_are_found() -> None:
    one = (number("x", [0.0, 1, NAN]), category("c", ["a", "b", None]))
    two = (category("c", [None, "z", "b", "a"]), number("x", [NAN, 9, 1, -0.0]))
    ours, theirs = ({row.tobytes() for row in comparable(table)} for table in (one, two))
    assert ours < theirs
    assert len(theirs - ours) == 1


# JSON ------------------------------------------------------------------------------------------


@given(st.floats(-1e30, 1e30), st.floats(1e-30, 1e30), st.booleans(), st.text(max_size=5))
def test_encodings_survive_json_to_the_bit(mean: float, std: float, flag: bool, text: str) -> None:
    rules = (
        Rule("x", "number", mean, std, scaled=flag, missing=flag),
        Rule("y", "date"),
        Rule("c", "category", values=("a", text + "b"), other=flag, missing=True),
        Rule("h", "category", buckets=8),
    )
    array = ArrayRule(2, True, (mean, 0.1), (std, 1.0))
    for own in (rules, array, ArrayRule(3), ArrayRule(3, True)):
        encoding = Encoding(own, row=flag, padding=2)
        assert Encoding.from_json(json.loads(json.dumps(encoding.to_json()))) == encoding


RULE = {"name": "x", "kind": "number", "missing": False, "mean": 1.0, "std": 2.0, "scaled": True}
CATEGORY = {"name": "c", "kind": "category", "missing": False, "values": ["a"], "other": False}


@pytest.mark.parametrize(
    "columns",
    [
        [RULE | {"kind": "colour"}],
        [RULE | {"std": 0.0}],
        [RULE | {"std": math.nan}],
        [RULE | {"mean": 10**400}],
        [RULE | {"mean": "1"}],
        [RULE | {"name": 3}],
        [RULE | {"name": "x" * 5000}],
        [RULE, RULE],
        [{}],
        [CATEGORY],
        [CATEGORY | {"buckets": 1 << 40}],
        [CATEGORY | {"buckets": 8}],
        [CATEGORY | {"buckets": 0, "values": ["a", "a"]}],
        [CATEGORY | {"buckets": 0, "values": [1]}],
        [CATEGORY | {"buckets": 0, "values": "a"}],
        [CATEGORY | {"buckets": 1 << 17, "values": [], "name": str(i)} for i in range(9)],
        None,
        {},
    ],
)
def test_encodings_that_are_not_valid_are_refused(columns: Any) -> None:
    with pytest.raises(UserError, match="the model"):
        Encoding.from_json({"columns": columns, "row": False, "padding": 0}, "the model")


@pytest.mark.parametrize(
    "array",
    [
        {"width": MAX_WIDTH + 1, "scaled": False},
        {"width": -1, "scaled": False},
        {"width": 2, "scaled": True, "mean": [1.0], "std": [1.0]},
        {"width": 1, "scaled": True, "mean": [1.0], "std": [-1.0]},
        {"width": 1, "scaled": 1, "mean": [1.0], "std": [1.0]},
    ],
)
def test_arrays_that_are_not_valid_are_refused(array: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the encoding, array"):
        Encoding.from_json({"array": array, "row": False, "padding": 0})


@pytest.mark.parametrize(
    "column",
    [
        {"name": "x", "kind": "colour"},
        {"name": "x"},
        {"name": "x", "kind": "number", "scale": [1.0]},
        {"name": "x", "kind": "number", "scale": [1.0, 0.0]},
        {"name": "x", "kind": "category", "categories": [1]},
        "x",
    ],
)
def test_columns_that_are_not_valid_are_refused(column: Any) -> None:
    with pytest.raises(UserError, match="column 3"):
        Column.from_json(column, "column 3")


def test_columns_survive_json() -> None:
    for column in (
        Column("x", "number", scale=(0.1, 2.0)),
        Column("c", "category", ("a", "b")),
        Column("e", EMPTY),
    ):
        assert Column.from_json(json.loads(json.dumps(column.to_json()))) == column


# Federations of tables -------------------------------------------------------------------------


def write_bank(folder: Path, count: int, seed: int, values: Sequence[str], gaps: float) -> None:
    """Write the tables of a client, with categories, dates and a share of missing values."""
    rng = np.random.default_rng(seed)
    lines = ["id,label,age,channel,opened"]
    for i in range(count):
        age = "" if rng.random() < gaps else f"{rng.normal(40, 9):.2f}"
        channel = (
            "" if rng.random() < gaps else values[min(int(rng.exponential(2)), len(values) - 1)]
        )
        lines.append(f"{i},{'no' if i % 3 else 'yes'},{age},{channel},20{10 + i % 9}-03-1{i % 9}")
    folder.mkdir(parents=True)
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    ends = rng.integers(0, count, (3 * count, 2))
    edges = "\n".join(f"{a},{b}" for a, b in ends)
    (folder / "edges.csv").write_text(f"source,target\n{edges}\n")


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data") / "banks"
    for k, name in enumerate(("east", "north", "west")):
        write_bank(place / name, 30 + k, k, [f"v{k}{i}" for i in range(9)], 0.15)
    return place


def test_tables_are_encoded_by_all_clients_together(banks: Path) -> None:
    federation = load(banks)
    encoding = federation.encodings[0]
    assert all(own is encoding for own in federation.encodings)
    assert federation.request["normalize"] == "standard"
    assert "encoding" not in federation.request
    note = f"3 columns encoded as {encoding.width} features: 1 number, 1 date, 1 category; "
    assert any(text.startswith(note) for text in federation.notes)
    ages = []
    for graph, raw in zip(federation.clients, files.read(banks).graphs, strict=True):
        assert graph.table is None
        assert graph.num_features == encoding.width
        assert raw.table is not None
        assert graph.masks is not None
        ages.append(next(c for c in raw.table if c.name == "age").values[graph.masks.train])
    rule = next(rule for rule in encoding.rules if rule.name == "age")  # type: ignore[union-attr]
    assert rule.mean == pytest.approx(np.nanmean(np.concatenate(ages)))
    assert rule.std == pytest.approx(np.nanstd(np.concatenate(ages)))


@pytest.mark.parametrize("options", [{}, {"encoding": "home"}, {"normalize": "none", "seed": 3}])
def test_a_federation_of_tables_is_made_again_from_its_request(
    options: dict[str, Any], banks: Path
) -> None:
    federation = load(banks, **options)
    again = load(**federation.request, seed=federation.seed)  # type: ignore[arg-type]
    assert again.encodings == federation.encodings
    for ours, theirs in zip(federation.clients, again.clients, strict=True):
        np.testing.assert_array_equal(dense(ours.features), dense(theirs.features))


@pytest.mark.parametrize("encoding", ["agreed", "home"])
def test_one_table_is_divided_among_clients(encoding: str, banks: Path) -> None:
    federation = load(banks / "west", partition="random", clients=2, encoding=encoding)
    whole = whole_graph(federation)
    assert whole is not None
    for k, graph in enumerate(federation.clients):
        part = federation.partition.nodes_of(k)
        assert graph.num_features == whole.num_features == federation.encodings[k].width
        if encoding == "agreed":
            np.testing.assert_array_equal(graph.features, whole.features[part])


def test_clients_with_the_same_table_share_one_split(banks: Path) -> None:
    (graph,) = files.read(banks / "west").graphs
    order = np.random.default_rng(0).permutation(graph.num_nodes)
    federation = load([graph, graph.subgraph(order, "other")])
    assert any("share one split" in note for note in federation.notes)
    first, second = (client.masks for client in federation.clients)
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first.train[order], second.train)
    assert graph.table is not None
    changed = (replace(graph.table[0], values=graph.table[0].values + 1), *graph.table[1:])
    other = replace(graph, table=changed, name="changed")
    assert not any("share one split" in note for note in load([graph, other]).notes)


def test_seeds_have_equally_many_features(banks: Path) -> None:
    federations = load_seeds({"dataset": str(banks), "split": "0.2,0.4,0.4"}, [0, 1, 2])
    widths = [federation.encodings[0].width for federation in federations]
    assert len(set(widths)) > 1
    padded = same_width(federations)
    for federation, wide in zip(federations, padded, strict=True):
        assert len({id(encoding) for encoding in wide.encodings}) == 1
        assert wide.encodings[0].width == max(widths)
        for ours, theirs in zip(federation.clients, wide.clients, strict=True):
            width = ours.num_features
            np.testing.assert_array_equal(theirs.features[:, :width], ours.features)
            assert not theirs.features[:, width:].any()
    raw = files.read(banks).graphs[0]
    np.testing.assert_array_equal(
        padded[1].encodings[0].encode(raw).features, padded[1].clients[0].features
    )


def test_seeds_are_normalised_alike(tmp_path: Path) -> None:
    """Whether train nodes have missing values depends on the seed, the normalisation does not."""
    rows = "\n".join(f"{i},{'ab'[i % 2]},{'' if i == 7 else i}" for i in range(20))
    (tmp_path / "nodes.csv").write_text(f"id,label,x\n{rows}\n")
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    alone = {seed: load(tmp_path, seed=seed).request["normalize"] for seed in range(8)}
    assert set(alone.values()) == {"none", "standard"}
    seeds = [
        next(s for s, how in alone.items() if how == wanted) for wanted in ("standard", "none")
    ]
    for order in (seeds, seeds[::-1]):
        found = {f.request["normalize"] for f in load_seeds({"dataset": tmp_path}, order)}
        assert found == {alone[order[0]]}


def test_statistics_stay_at_home_under_privacy_unless_asked_for(banks: Path) -> None:
    federations = [
        load_seeds({"dataset": str(banks), **more}, [0], private=private)[0]
        for private, more in ((True, {}), (False, {}), (True, {"encoding": "agreed"}))
    ]
    assert [federation.exchanged for federation in federations] == [False, True, True]
    assert not load("csbm:nodes=20", clients=2).exchanged
    assert load("csbm:nodes=20", clients=2, normalize="standard").exchanged


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="unknown encoding 'hom': did you mean 'home'"):
        load("csbm:nodes=20", clients=2, encoding="hom")
