"""Sites with tables agree on the encoding that a simulation of the same tables learns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("pyarrow")

from flower.federations import Twist, Wires, plan_for
from flower.grid import Grid, transport
from polyphily.core.method import create
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.errors import TrainingError, UserError
from polyphily.flower.agreeing import agree_encoding
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.deployment import PLAN, Deployment, complete_for_sites
from polyphily.flower.joining import Answer, Policy, gather
from polyphily.flower.loopback import free_port
from polyphily.flower.plan import Plan, Schema, agree
from polyphily.flower.site import Site
from polyphily.flower.site_files import SiteState
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import HELLO, MEASURE, Parcel
from polyphily.graphs.columns import Column
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.loading import Federation, load
from polyphily.graphs.rules import BUCKETS
from polyphily.runs.models import LAST, SavedModel
from polyphily.testing.comparing import difference

SITES = {"north": ("web", "atm"), "south": ("web", "app", "fax"), "west": ("atm", "branch")}
NUMBERS = "id,label,age,income,split"
EQUAL = 1e-9  # relative to a tensor's largest entry


def write_site(folder: Path, site: str, *, plain: bool = False, gaps: bool = True) -> None:
    """Write the tables of a site, with categories of its own, dates and missing values."""
    rng = np.random.default_rng(list(SITES).index(site))
    count = 40 + 8 * list(SITES).index(site)
    lines = [NUMBERS if plain else f"{NUMBERS},channel,member,opened"]
    for i in range(count):
        label, split = rng.choice(["no", "yes"]), ("train", "train", "val", "test")[i % 4]
        age = "" if gaps and rng.random() < 0.2 else f"{rng.normal(40 + 10 * (label == 'yes')):.3f}"
        cells = [f"c{i}", label, age, f"{rng.normal(1e6):.2f}", split]
        if not plain:
            channel = "" if gaps and rng.random() < 0.2 else rng.choice(SITES[site])
            opened = f"20{rng.integers(10, 25)}-0{rng.integers(1, 10)}-1{rng.integers(0, 10)}"
            cells += [channel, rng.choice(["true", "false"]), opened]
        lines.append(",".join(map(str, cells)))
    ends = rng.integers(0, count, (80, 2))
    folder.mkdir(parents=True)
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    edges = "\n".join(f"c{a},c{b}" for a, b in ends)
    (folder / "edges.csv").write_text(f"source,target\n{edges}\n")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for site in SITES:
        write_site(tmp_path / "tables" / site, site)
    return tmp_path / "tables"


def sites_at(tables: Path, place: Path) -> dict[str, Site]:
    return {
        name: Site(name, SiteGraph.read(tables / name), place / name)
        for name in sorted(p.stem for p in tables.iterdir())
    }


def deployed(
    tables: Path, place: Path, monkeypatch: pytest.MonkeyPatch, **entries: Any
) -> tuple[Plan, Deployment, str, Grid]:
    """Run three rounds of FedAvg through the code of a deployment."""
    deployment = Deployment.create(
        place / "server", list(SITES), "127.0.0.1", free_port(), free_port()
    )
    settings = {"rounds": 3, "epochs": 2, "hidden": 8, "backbone": "gcn", "dtype": "float64"}
    name = deployment.new_run("fedavg", {**settings, **entries}, {})
    bundles = deployment.path / "bundles"
    channel = transport(sites_at(tables, bundles), monkeypatch)
    deployment.conduct(name, channel)
    assert isinstance(channel.grid, Grid)
    file = deployment.run_folder(name).path / PLAN
    return Plan.from_json(json.loads(file.read_text())), deployment, name, channel.grid


def simulated(data: Federation) -> Simulation:
    method = create("fedavg")
    given = Settings(rounds=3, epochs=2, hidden=8, backbone="gcn", dtype="float64")
    settings = complete_for_sites(given, method, dense=data.dense, classes=2)
    simulation = Simulation(method, [data], settings)
    for _ in range(3):
        simulation.advance()
    return simulation


@pytest.mark.parametrize(
    ("entries", "normalize"),
    [
        ({}, "standard"),
        ({"normalize": "none"}, "none"),
        ({"normalize": "row"}, "row"),
        ({"encoding": "home"}, "standard"),
    ],
)
def test_flower_equals_the_simulation(
    entries: dict[str, str],
    normalize: str,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, deployment, name, grid = deployed(tables, tmp_path, monkeypatch, **entries)
    data = load(tables, **entries)  # type: ignore[arg-type]
    assert plan.normalize == data.request["normalize"] == normalize
    home = "encoding" in entries
    assert (plan.encoding == data.encodings[0]) == (not home)
    models = [
        SavedModel.load(SiteState(deployment.path / "bundles" / site, name).model(LAST))
        for site in SITES
    ]
    assert tuple(model.encoding for model in models) == data.encodings
    asked = {parcel.facts["kind"] for _, parcel, _ in grid.exchanges}
    assert (MEASURE in asked) == (not home)
    checkpoint = ServerCheckpoint.load(deployment.run_folder(name))
    assert checkpoint is not None
    assert difference(checkpoint.state, simulated(data).states[0], EQUAL) is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"normalize": "rows"}, "did you mean 'row'"),
        ({"encoding": "hom"}, "did you mean 'home'"),
        ({"encoding": "agreed", "dp": "epsilon=8"}, "'agreed' sends statistics"),
    ],
)
def test_wishes_are_checked_before_the_sites_are_asked(
    entries: dict[str, str], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting")
    deployment = Deployment.create(
        tmp_path / "server", list(SITES), "127.0.0.1", free_port(), free_port()
    )
    with pytest.raises(UserError, match=message):
        deployment.new_run("fedavg", entries, {})


def test_a_run_that_continues_asks_for_no_statistics(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, deployment, name, _ = deployed(tables, tmp_path, monkeypatch)
    channel = transport(sites_at(tables, deployment.path / "bundles"), monkeypatch)
    deployment.conduct(name, channel)
    assert isinstance(channel.grid, Grid)
    assert MEASURE not in {asked.facts["kind"] for _, asked, _ in channel.grid.exchanges}
    plans = [asked.facts["plan"] for _, asked, _ in channel.grid.exchanges if "plan" in asked.facts]
    assert plans
    assert all(Plan.from_json(own) == plan for own in plans)


# Without a deployment --------------------------------------------------------------------------


def agreed(
    sites: Mapping[str, Site],
    twist: Twist | None = None,
    *,
    normalize: str | None = None,
    mode: str | None = None,
    min_sites: int = 1,
    **given: Any,
) -> tuple[Plan, Wires, list[dict[str, Any]]]:
    """Let the sites agree; return the plan, the messages and the events."""
    wires, events = Wires(sites, twist), list[dict[str, Any]]()
    policy = Policy(min_sites, timeout=5)

    def emit(event: str, **facts: Any) -> None:
        events.append({"event": event, **facts})

    joined = gather(wires, list(sites), policy, emit)
    schema = agree({site: facts["schema"] for site, facts in joined.items()}, ["no", "yes"])
    example = plan_for(load("csbm:nodes=20,features=2", clients=2), "fedavg", **given)
    draft = dataclasses.replace(example, schema=schema, sites=tuple(joined))
    return agree_encoding(draft, normalize, mode, wires, policy, emit), wires, events


@pytest.mark.parametrize("given", [{"dp": "epsilon=8"}, {"secure_aggregation": True}])
def test_under_privacy_nothing_but_names_and_kinds_is_sent(
    given: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    sent: list[Parcel] = []

    def keep(site: str, asked: Parcel, reply: Parcel) -> Parcel:
        sent.append(reply)
        return reply

    plan, wires, _ = agreed(sites_at(tables, tmp_path), keep, **given)
    assert {asked.facts["kind"] for _, asked in wires.asked} == {HELLO}
    texts = "".join(parcel.pack()[0] for parcel in sent)
    assert "channel" in texts
    assert not any(value in texts for values in SITES.values() for value in values)
    assert plan.encoding is not None
    assert not plan.encoding.is_complete
    assert sum(name.startswith("channel#") for name in plan.encoding.names) == BUCKETS
    with pytest.raises(UserError, match="'agreed' sends statistics"):
        agreed(sites_at(tables, tmp_path), mode="agreed", **given)


@pytest.mark.parametrize("given", [{"dp": "epsilon=8"}, {"secure_aggregation": True}])
def test_a_site_sends_no_statistics_in_a_private_run(
    given: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    """Even if the server asks."""
    sites = sites_at(tables, tmp_path)
    plan, *_ = agreed(sites, **given)
    with pytest.raises(UserError, match="sends no statistics"):
        sites["north"].answer(Parcel({"kind": MEASURE, "plan": plan.to_json()}))


@pytest.mark.parametrize(
    ("statistics", "reason"),
    [
        (None, "is not an object"),
        ({}, "no entry 'mean'"),
        ({"mean": [0.0]}, "'mean' has 1 entries, not 4"),
        ({"mean": [math.inf] * 4}, "Infinity where a finite number belongs"),
        ({"count": [10**300] * 4}, "a number of 301 digits"),
        ({"count": [-1] * 4}, "'count' is not a number from 0 on"),
        ({"count": [True] * 4}, "'count' is not a number from 0 on"),
        ({"count": [1 << 40] * 4}, "number of train nodes is 1.1e+12, more than 10000 times"),
        ({"mean": [1e37] * 4}, "mean or deviation of its column 1 is more than 10000 times"),
        ({"squares": [1e60] * 4}, "mean or deviation of its column 1 is more than 10000 times"),
        ({"squares": [-1.0] * 4}, "out of bounds"),
        ({"categories": [{"values": {"x" * 9999: 1}, "rest": 0, "missing": 0}]}, "characters"),
    ],
)
def test_statistics_that_are_not_valid_are_refused_and_the_others_go_on(
    statistics: dict[str, Any] | None, reason: str, tables: Path, tmp_path: Path
) -> None:
    def spoil(site: str, asked: Parcel, reply: Parcel) -> Parcel | Answer:
        if site != "south" or asked.facts["kind"] != MEASURE:
            return reply
        found = dict(reply.facts["statistics"]) | statistics if statistics else statistics
        text = json.dumps({**reply.facts, "statistics": found})  # with Infinity, as Python writes
        return Answer(text, reply.pack()[1])

    plan, wires, events = agreed(sites_at(tables, tmp_path), spoil)
    assert plan.sites == ("north", "west")
    assert [e["site"] for e in events if e["event"] == "left out"] == ["south"]
    assert reason in next(e["reason"] for e in events if e["event"] == "left out")
    assert reason in wires.dismissed["south"]
    assert wires.dismissed.keys() == {"south"}
    assert plan.encoding is not None
    assert "channel=fax" not in plan.encoding.names
    with pytest.raises(TrainingError, match=r"2 of 3 sites sent the statistics.*south: "):
        agreed(sites_at(tables, tmp_path), spoil, min_sites=3)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": "age"},
        {"columns": [{"name": "age", "kind": "colour"}]},
        {"columns": [{"name": "other", "kind": "number"}]},
        {"width": 1 << 40},
        {"width": -1},
    ],
)
def test_a_hello_that_is_not_valid_is_refused(
    change: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    def spoil(site: str, asked: Parcel, reply: Parcel) -> Parcel:
        return Parcel({**reply.facts, **change}) if site == "south" else reply

    plan, wires, events = agreed(sites_at(tables, tmp_path), spoil)
    assert plan.sites == ("north", "west")
    assert [e["site"] for e in events if e["event"] == "refused"] == ["south"]
    assert wires.dismissed.keys() == {"south"}


def test_plain_numbers_stay_as_they_are(tmp_path: Path) -> None:
    for site in SITES:
        write_site(tmp_path / "tables" / site, site, plain=True, gaps=False)
    plan, *_ = agreed(sites_at(tmp_path / "tables", tmp_path))
    assert plan.normalize == "none"
    assert plan.encoding is not None
    assert plan.encoding.names == ("age", "income")
    assert plan.encoding == load(tmp_path / "tables").encodings[0]


@pytest.mark.parametrize("normalize", ["none", "standard"])
def test_arrays_are_scaled_alike_at_all_sites(normalize: str, tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k, site in enumerate(SITES):
        part = np.arange(20) % 3
        np.savez(
            folder / f"{site}.npz",
            x=rng.normal(10**k, 3, (20, 4)).astype(np.float32),
            y=np.arange(20) % 2,
            edge_index=rng.integers(0, 20, (2, 30)),
            **{f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))},
        )
    sites = {s: Site(s, SiteGraph.read(folder / f"{s}.npz"), tmp_path / s) for s in SITES}
    for site in sites.values():
        names = dataclasses.replace(site.graph.schema, classes=("no", "yes"))
        site.graph = dataclasses.replace(site.graph, schema=names)
    plan, wires, _ = agreed(sites, normalize=normalize)
    assert plan.encoding == load(folder, normalize=normalize).encodings[0]
    asked = {parcel.facts["kind"] for _, parcel in wires.asked}
    assert asked == ({HELLO} if normalize == "none" else {HELLO, MEASURE})


def test_kinds_that_do_not_fit_are_named() -> None:
    ours = Schema(("x",), 1, ("no",), (Column("x", "number"),))
    theirs = dataclasses.replace(ours, columns=(Column("x", "category"),))
    with pytest.raises(UserError, match="sites differ in column 'x': its kind is number at"):
        agree({"north": ours, "south": theirs})


def test_an_array_beside_tables_has_columns_of_numbers() -> None:
    table = Schema(("x", "y"), 2, ("no",), (Column("x", "number"), Column("y", "boolean")))
    array = Schema((), 2, ("no",))
    for schemas in ({"a": table, "b": array}, {"a": array, "b": table}):
        found = agree(schemas)
        assert found.columns == (Column("x", "number"), Column("y", "number"))
        assert (found.features, found.width) == (("x", "y"), 2)


def test_plans_survive_json(tables: Path, tmp_path: Path) -> None:
    plan, *_ = agreed(sites_at(tables, tmp_path))
    text = json.dumps(plan.to_json(), allow_nan=False)
    assert Plan.from_json(json.loads(text)) == plan
    old = json.loads(text)
    del old["encoding"], old["schema"]["columns"]
    assert Plan.from_json(old).encoding is None
    bad = json.loads(text)
    bad["encoding"]["columns"][0]["std"] = 0
    with pytest.raises(UserError, match="column 0"):
        Plan.from_json(bad)


def test_a_plan_of_an_earlier_version_that_scaled_is_not_continued(
    tables: Path, tmp_path: Path
) -> None:
    sites = sites_at(tables, tmp_path)
    plan, *_ = agreed(sites)
    old = dataclasses.replace(plan, encoding=None)
    with pytest.raises(UserError, match="start a new run"):
        sites["north"].answer(Parcel({"kind": "prepare", "plan": old.to_json()}))


def test_the_site_encodes_as_the_plan_says(tables: Path, tmp_path: Path) -> None:
    sites = sites_at(tables, tmp_path)
    plan, *_ = agreed(sites)
    assert isinstance(plan.encoding, Encoding)
    counts = sites["north"].answer(Parcel({"kind": "prepare", "plan": plan.to_json()}))
    assert counts.facts["counts"] == [10, 10]
