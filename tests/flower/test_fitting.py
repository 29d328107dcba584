"""Sites whose data do not fit are left out and told why; the others train."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower.federations import Wires, federation, settings_for, sites_of
from polyphily.core.method import METHODS, create
from polyphily.errors import UserError
from polyphily.flower.deployment import CONFIG, Deployment
from polyphily.flower.fitting import PROBES, _bytes_of, _numbers, choose_sites, reason_against_size
from polyphily.flower.joining import EVENTS, Policy
from polyphily.flower.plan import Schema
from polyphily.flower.site import Site
from polyphily.flower.wire import HELLO, Parcel
from polyphily.graphs.columns import Column

NORTH = Schema(("age", "income"), 2, ("good", "bad"))


@pytest.fixture
def own(tmp_path: Path) -> Deployment:
    names = [graph.name for graph in federation().clients]
    return Deployment.create(tmp_path / "server", names, "example.org", 9443, 9444)


def with_schema(sites: dict[str, Site], name: str, **changes: Any) -> dict[str, Site]:
    graph = sites[name].graph
    sites[name].graph = replace(graph, schema=replace(graph.schema, **changes))
    return sites


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("client-1", {"width": 9}, "have 8 and 9 features"),
        ("client-0", {"width": 9}, "have 8 and 9 features"),
        ("client-1", {"classes": ("0", "1", "2")}, "'2' only at 'client-1'"),
        ("client-2", {"classes": ()}, "different labels"),
        ("client-0", {"width": 1 << 20}, "make a model of 805 MB, more than max_model (512 MB)"),
    ],
)
def test_a_site_that_does_not_fit_is_left_out_and_told(
    name: str, changes: dict[str, Any], words: str, own: Deployment, tmp_path: Path
) -> None:
    wires = Wires(with_schema(sites_of(federation(), tmp_path), name, **changes))
    run = own.new_run("fedavg", {"rounds": 2, "min_sites": 2}, {})
    summary = own.conduct(run, wires)
    others = [site for site in own.sites if site != name]
    assert summary["clients"] == others
    (trouble,) = summary["troubles"]
    assert (trouble["site"], trouble["what"], trouble["round"]) == (name, "left out", 0)
    assert words in trouble["reason"]
    assert words in wires.dismissed[name]
    assert wires.dismissed.keys() == {name}
    asked = {(site, m.facts["kind"]) for site, m in wires.asked}
    assert {kind for site, kind in asked if site == name} == {"hello", "dismiss"}
    events = map(json.loads, (own.run_folder(run).path / EVENTS).read_text().splitlines())
    assert [e["site"] for e in events if e["event"] == "left out"] == [name]


def test_all_sites_are_needed_unless_the_server_says_otherwise(
    own: Deployment, tmp_path: Path
) -> None:
    wires = Wires(with_schema(sites_of(federation(), tmp_path), "client-1", width=9))
    with pytest.raises(UserError, match=r"2 of 3 sites fit together, 3 are needed \(client-1: "):
        own.conduct(own.new_run("fedavg", {"rounds": 2}, {}), wires)


def test_a_huge_width_costs_the_server_nothing(own: Deployment, tmp_path: Path) -> None:
    """All sites agree on it here, so that only the limit is in the way."""

    def boast(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if asked.facts["kind"] != HELLO:
            return reply
        schema = Schema((), 1 << 20, tuple(reply.facts["classes"]))
        return Parcel({**reply.facts, "width": schema.width, "digest": schema.digest})

    wires = Wires(sites_of(federation(), tmp_path), boast)
    run = own.new_run("fedavg", {"rounds": 2, "min_sites": 1}, {})
    tracemalloc.start()
    with pytest.raises(UserError, match="0 of 3 sites fit together"):
        own.conduct(run, wires)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_size_of_a_model_is_known_before_it_is_built(method: str) -> None:
    instance, settings = create(method), settings_for(method)
    for width in (PROBES[0], 500):
        built = 4 * max(_numbers(instance, settings, max(width, PROBES[-1]), 3))
        assert _bytes_of(instance, settings, width, 3) == pytest.approx(built)


def test_the_limit_on_models_can_be_off() -> None:
    huge = create("fedavg"), settings_for("fedavg"), 1 << 20, 3
    assert "more than max_model" in reason_against_size(*huge, Policy(1, max_model=1.0))
    assert reason_against_size(*huge, Policy(1, max_model=float("inf"))) == ""


def test_most_sites_decide_and_in_a_tie_the_first_one() -> None:
    other = Schema(("age", "town"), 2, ("good", "bad"))
    schema, left_out = choose_sites({"a": other, "b": NORTH, "c": NORTH})
    assert schema.features == NORTH.features
    assert list(left_out) == ["a"]
    schema, left_out = choose_sites({"a": other, "b": NORTH})
    assert schema.features == other.features
    assert "'town' only at 'a'" in left_out["b"]


def test_the_server_s_list_of_classes_decides_before_the_majority() -> None:
    odd = replace(NORTH, classes=("good", "ugly"))
    schema, left_out = choose_sites({"a": odd, "b": odd, "c": NORTH}, ["bad", "good"])
    assert schema.classes == ("bad", "good")
    assert list(left_out) == ["a", "b"]
    assert "lacks: 'ugly'" in left_out["a"]
    with pytest.raises(UserError, match="labels that are in the server's list"):
        choose_sites({"a": odd, "b": odd}, ["bad", "good"])


def test_kinds_of_columns_are_decided_by_most() -> None:
    def table(kind: str) -> Schema:
        return Schema(("age",), 1, ("0", "1"), (Column("age", kind),))

    sites = {
        "a": table("category"),
        "b": table("number"),
        "c": table("empty"),
        "d": table("number"),
    }
    schema, left_out = choose_sites(sites)
    assert schema.columns == (Column("age", "number"),)
    assert list(left_out) == ["a"]
    assert "differ in column 'age'" in left_out["a"]


@given(st.lists(st.sampled_from(["ab", "abc", "xy"]), min_size=3, max_size=8))
def test_the_largest_group_wins(labels: list[str]) -> None:
    sites = {f"s{k}": replace(NORTH, classes=tuple(own)) for k, own in enumerate(labels)}
    schema, left_out = choose_sites(sites)
    sizes = {own: labels.count(own) for own in labels}
    assert len(sites) - len(left_out) == max(sizes.values())
    assert all(sites[s].classes != tuple(sorted(schema.classes)) for s in left_out)


def test_the_server_s_own_list_cannot_name_a_site_twice(own: Deployment) -> None:
    file = own.path / CONFIG
    text = file.read_text().replace('"client-1"', '"client-0"')
    file.write_text(text)
    with pytest.raises(UserError, match="name each site once in 'sites'"):
        own.config()
