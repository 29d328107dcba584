"""Registries: names, plug-ins that work and that do not, and what can be registered."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
from torch import Tensor

import polyphily
from builders import random_graph, random_graphs
from commands import Cli, caller
from polyphily.core.method import METHODS
from polyphily.core.metrics import METRICS, Predictions, register_metric
from polyphily.errors import UserError
from polyphily.graphs.datasets import DATASETS, DatasetInfo, Request, is_present, register_dataset
from polyphily.graphs.graph import Collection, Graph, IntArray
from polyphily.graphs.options import Bounds
from polyphily.graphs.partitions import PARTITIONS, partition, register_partition
from polyphily.nn.backbones import BACKBONES
from polyphily.registry import PluginWarning, Registry

REGISTRIES: dict[str, Registry[Any]] = {
    registry.group: registry for registry in (METHODS, BACKBONES, METRICS, PARTITIONS, DATASETS)
}
SMALL: dict[str, Any] = {"rounds": 2, "hidden": 4, "backbone": "mlp"}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Undo every registration of a test."""
    with ExitStack() as stack:
        for registry in REGISTRIES.values():
            stack.enter_context(registry.restored())
        yield


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# Names -----------------------------------------------------------------------------------------


def test_a_cell_of_a_notebook_can_be_run_again() -> None:
    registry: Registry[Any] = Registry("thing", "things")

    def define(module: str) -> Any:
        def thing() -> None: ...

        thing.__module__ = module
        return thing

    registry.add("thing", define("__main__"))
    again = registry.add("thing", define("__main__"))
    assert registry.find("thing") is again
    with pytest.raises(ValueError, match="registered already"):
        registry.add("thing", define("their_package"))


def test_names_are_found_in_any_case() -> None:
    registry: Registry[int] = Registry("thing", "things")
    registry.add("One_Two", 12)
    assert registry["one_two"] == registry.find(" ONE_TWO ") == 12
    message = refusal(registry.find, "one-two")
    assert message.startswith("unknown thing 'one-two': did you mean 'one_two'?")


def test_with_dashes_underscores_are_accepted_in_their_place() -> None:
    registry: Registry[int] = Registry("thing", "things", dashes=True)
    registry.add("one_two", 12)
    assert list(registry) == ["one-two"]
    assert registry.find("One_Two") == registry.find("one-two") == 12


def test_a_name_is_registered_once() -> None:
    registry: Registry[object] = Registry("thing", "things")
    entry = object()
    registry.add("one", entry)
    registry.add("one", entry)  # a module that is imported twice
    with pytest.raises(ValueError, match="a thing named 'one' is registered already"):
        registry.add("ONE", object())


@pytest.mark.parametrize("name", ["", "two words", "-x", "a/b", "a:b", "naïve"])
def test_names_that_cannot_be_typed_are_refused(name: str) -> None:
    registry: Registry[int] = Registry("thing", "things")
    with pytest.raises(ValueError, match="is no name for a thing"):
        registry.add(name, 1)


def test_registrations_inside_a_block_are_undone() -> None:
    registry: Registry[int] = Registry("thing", "things")
    registry.add("one", 1)
    with registry.restored():
        registry.add("two", 2)
        assert dict(registry) == {"one": 1, "two": 2}
    assert dict(registry) == {"one": 1}


# Plug-ins --------------------------------------------------------------------------------------

WORKING = {
    "polyphily.metrics": """
from polyphily.core.metrics import register_metric
@register_metric("theirs")
def theirs(predictions):
    return predictions.averages[0]
""",
    "polyphily.partitions": """
import numpy as np
from polyphily.graphs.partitions import register_partition
@register_partition("theirs", "every K-th node")
def theirs(graph, clients, seed):
    return [np.arange(k, graph.num_nodes, clients) for k in range(clients)]
""",
    "polyphily.datasets": """
from polyphily.graphs.datasets import DatasetInfo, register_dataset
@register_dataset(DatasetInfo("theirs", "Theirs", "heterophilic", 0, 0, 0, 2))
def theirs(request):
    raise NotImplementedError
""",
    "polyphily.backbones": """
from polyphily.nn.backbones import BACKBONES
BACKBONES.add("theirs", BACKBONES["mlp"])
""",
    "polyphily.methods": """
from polyphily.core.method import METHODS
METHODS.add("theirs", METHODS["fedavg"])
""",
}


def plug_in(monkeypatch: pytest.MonkeyPatch, registry: Registry[Any], points: list[Any]) -> None:
    """Install entry points of a registry's group."""
    monkeypatch.setattr(
        "polyphily.registry.entry_points",
        lambda *, group: points if group == registry.group else [],
    )
    monkeypatch.setattr(registry, "_loaded", False)


@pytest.mark.parametrize("group", REGISTRIES)
def test_a_broken_plug_in_is_skipped_and_its_package_named(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = REGISTRIES[group]
    own = set(registry)
    module = f"plug_in_{registry.kind}"
    (tmp_path / f"{module}.py").write_text(WORKING[group])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)

    def fail() -> None:
        registry.add("half", next(iter(registry.values())))
        raise ImportError("no module named 'jax'\nfor a long reason")

    broken = SimpleNamespace(name="mine", load=fail, dist=SimpleNamespace(name="acme-graphs"))
    good = EntryPoint("theirs", module, group)
    plug_in(monkeypatch, registry, [good, broken])
    with pytest.warns(PluginWarning) as caught:
        assert set(registry) == {*own, "theirs"}
    assert [str(warning.message) for warning in caught] == [
        f"{registry.kind} plug-in 'mine' of the package 'acme-graphs' is skipped: "
        "ImportError: no module named 'jax'"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.find("Theirs") is registry["theirs"]


def test_a_run_works_beside_a_broken_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="mine", load=lambda: 1 / 0, dist=None)
    plug_in(monkeypatch, METRICS, [point])
    federation = polyphily.load("csbm:nodes=30,features=4", clients=2)
    with pytest.warns(PluginWarning, match="'mine' of the package 'an unknown package'"):
        polyphily.run("fedavg", federation, **SMALL)


# Partitions ------------------------------------------------------------------------------------


def stripes(
    graph: Graph,
    clients: int,
    seed: int,
    *,
    width: Annotated[int, Bounds(1)] = 1,
    shuffle: bool = False,
    order: str = "up",
) -> list[IntArray]:
    """Divide nodes into stripes.

    Some more words.
    """
    owner = np.arange(graph.num_nodes) // width % clients
    if shuffle:
        owner = np.random.default_rng(seed).permutation(owner)
    if order == "down":
        owner = owner[::-1]
    return [np.flatnonzero(owner == k) for k in range(clients)]


@pytest.fixture
def graph() -> Graph:
    return random_graph(40, name="one")


def test_another_partition_divides_a_graph_and_trains(graph: Graph) -> None:
    register_partition("My_Stripes")(stripes)
    federation = polyphily.load(graph, partition="my-stripes:width=4,order=down", clients=3)
    assert federation.partition.name == "my-stripes"
    assert federation.partition.nodes_of(0).tolist() == [
        n for n in range(40) if (39 - n) // 4 % 3 == 0
    ]
    assert federation.request["partition"] == "my-stripes:width=4,order=down"
    again = polyphily.load(**{**federation.request, "dataset": graph})  # type: ignore[arg-type]
    assert again.partition.sha256 == federation.partition.sha256
    assert len(polyphily.load(graph, partition="MY_STRIPES:shuffle=on")) == 10
    assert len(polyphily.run("fedavg", federation, **SMALL).summary["clients"]) == 3


def test_a_partition_is_described_by_its_docstring_and_options() -> None:
    register_partition("stripes")(stripes)
    assert PARTITIONS["stripes"].description == "Divide nodes into stripes"
    assert PARTITIONS["stripes"].summary == "Divide nodes into stripes; width, shuffle, order"
    register_partition("others", "in words")(stripes)
    assert PARTITIONS["others"].description == "in words"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "option 'width' must be at least 1, got 0"),
        ({"width": "two"}, "option 'width' must be a number, got 'two'"),
        ({"shuffle": "maybe"}, "option 'shuffle' must be on or off, got 'maybe'"),
        ({"wide": 3}, "partition 'stripes' has no option 'wide' (its options: order, shuffle"),
    ],
)
def test_options_are_checked_by_their_types(
    options: dict[str, Any], words: str, graph: Graph
) -> None:
    register_partition("stripes")(stripes)
    assert words in refusal(partition, graph, "stripes", 3, 0, **options)


def test_an_option_without_a_default_must_be_given(graph: Graph) -> None:
    @register_partition("chosen")
    def chosen(graph, clients, seed, first: int):  # type: ignore[no-untyped-def]
        return [[first]] * clients

    assert "partition 'chosen' needs the option 'first'" in refusal(
        partition, graph, "chosen", 2, 0
    )
    assert [part.tolist() for part in partition(graph, "chosen", 2, 0, first="7")] == [[7], [7]]


def no_types(graph, clients, seed, width):  # type: ignore[no-untyped-def]
    return []


def any_options(graph, clients, seed, **options: int):  # type: ignore[no-untyped-def]
    return []


def odd_type(graph, clients, seed, sizes: list[int] | None = None):  # type: ignore[no-untyped-def]
    return []


@pytest.mark.parametrize("function", [no_types, any_options, odd_type])
def test_a_parameter_without_a_plain_type_is_no_option(function: Any) -> None:
    with pytest.raises(TypeError, match="is no option: name every option and give it a type"):
        register_partition("wrong")(function)
    assert "wrong" not in PARTITIONS


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[0, 1], []], "returned no nodes for client 1"),
        ([[0, 1], [2, 40]], "gave node 40 to client 1, but the graph has 40 nodes (0 to 39)"),
        ([[-1, 1], [2]], "gave node -1 to client 0"),
        ([[0, 1], [2, 3, 2]], "gave node 2 to client 1 twice"),
        ([[0.5], [1]], "returned float64 of shape (1,) for client 0"),
        ([[[0, 1]], [2]], "returned int64 of shape (1, 2) for client 0"),
        ([[0, 1]], "returned 1 clients, but 2 were asked for"),
        ([], "returned 0 clients, but 2 were asked for"),
    ],
)
def test_what_a_partition_returns_is_checked(parts: Any, words: str, graph: Graph) -> None:
    register_partition("wrong")(lambda graph, clients, seed: parts)
    message = refusal(polyphily.load, graph, partition="wrong", clients=2)
    assert message.startswith("partition 'wrong' of 'one' ")
    assert words in message


def test_a_partition_may_find_the_number_of_clients(graph: Graph) -> None:
    @register_partition("labels", finds_clients=True)
    def by_label(graph: Graph, clients: int | None, seed: int) -> list[IntArray]:
        """Make a client of every class."""
        return [np.flatnonzero(graph.labels == c) for c in np.unique(graph.labels)]

    federation = polyphily.load(graph, partition="labels")
    assert len(federation) == 3
    assert "clients" not in federation.request


# Datasets --------------------------------------------------------------------------------------


def info(name: str = "their_data", **changes: Any) -> DatasetInfo:
    given = {"nodes": 40, "edges": 0, "features": 6, "classes": 3, **changes}
    return DatasetInfo(name, "Their data", "heterophilic", **given)


def test_another_dataset_is_loaded_and_trained(tmp_path: Path) -> None:
    requests = []

    @register_dataset(info(options={"size": "number of nodes"}, default_clients=4))
    def read_theirs(request: Request) -> Graph:
        requests.append(request)
        return random_graph(int(request.options.get("size", 40)))

    assert is_present("their-data")
    federation = polyphily.load("Their_Data:size=60", clients=5, root=tmp_path, seed=3)
    assert len(federation) == 5
    assert federation.dataset == "their-data:size=60"
    assert federation.kind == "heterophilic"
    assert federation.classes == ("0", "1", "2")
    assert sum(client.num_nodes for client in federation.clients) == 60
    assert (requests[0].root, requests[0].seed, requests[0].clients) == (tmp_path, 3, 5)
    assert len(polyphily.load("their-data")) == 4
    assert polyphily.run("fedavg", federation, **SMALL).summary["dataset"] == federation.dataset
    again = polyphily.load(**federation.request, seed=3)  # type: ignore[arg-type]
    assert again.partition.sha256 == federation.partition.sha256


def test_options_of_every_dataset_work_for_another_one() -> None:
    register_dataset(info())(lambda request: random_graph(40, density=0.02))
    largest = polyphily.load("their-data:component=largest", partition="random", clients=2)
    assert sum(client.num_nodes for client in largest.clients) < 40
    message = refusal(polyphily.load, "their-data:part=largest")
    assert "unknown option of their-data 'part'" in message


def test_options_of_another_dataset_may_be_paths_with_capitals(tmp_path: Path) -> None:
    register_dataset(info(options={"file": "a file"}))(
        lambda request: random_graph(40, name=request.options["file"])
    )
    spec = f"their-data:file={tmp_path}/Data.npz"
    assert polyphily.load(spec).dataset == spec


def test_several_graphs_are_clients() -> None:
    register_dataset(info())(lambda request: random_graphs([20, 30]))
    assert [client.num_nodes for client in polyphily.load("their-data").clients] == [20, 30]


def test_a_collection_brings_its_own_classes() -> None:
    collection = Collection("x", (random_graph(40),), ("a", "b", "c"))
    register_dataset(info())(lambda request: collection)
    federation = polyphily.load("their-data", partition="random", clients=2)
    assert federation.classes == ("a", "b", "c")
    assert federation.dataset == "their-data"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType: it must return a Graph, a list of graphs or a Collection"),
        ([], "returned no graph"),
        ([random_graph(20), "graph"], "returned a str among its graphs"),
        (random_graph(40, classes=5), "a label of 'graph' is 4, but there are 3 classes (0 to 2)"),
    ],
)
def test_what_a_dataset_returns_is_checked(returned: Any, words: str) -> None:
    register_dataset(info())(lambda request: returned)
    message = refusal(polyphily.load, "their-data")
    assert "dataset 'their-data'" in message
    assert words in message


def test_a_file_that_another_dataset_does_not_find_is_named(tmp_path: Path) -> None:
    register_dataset(info(source="https://example.org"))(
        lambda request: Graph.build(*np.load(request.root / "theirs.npz").values())
    )
    message = refusal(polyphily.load, "their-data", root=tmp_path)
    assert message.startswith("their-data: a file cannot be read")
    assert "theirs.npz" in message
    assert "Official source: https://example.org" in message


def test_a_kind_of_data_that_does_not_exist_is_refused() -> None:
    wrong = DatasetInfo("theirs", "Theirs", "homophillic", 1, 1, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind 'homophillic' is none of homophilic, heterophilic"):
        register_dataset(wrong)


# Metrics ---------------------------------------------------------------------------------------


def recall_of_one(predictions: Predictions) -> Tensor:
    return predictions.confusion[:, 1, 1] / predictions.confusion[:, 1].sum(dim=1)


def test_another_metric_is_reported_and_selects() -> None:
    register_metric("recall", title="recall", classes=2)(recall_of_one)
    federation = polyphily.load("csbm:nodes=60,features=8", clients=3)
    summary = polyphily.run("fedavg", federation, **SMALL, metric="Recall").summary
    assert summary["selection"]["metric"] == "recall"
    scores = summary["best_val"]["test"]
    assert 0 <= scores["recall"] <= 1
    assert len(scores["recall_per_client"]) == 3
    assert list(scores)[:12:3] == ["accuracy", "f1_macro", "f1_weighted", "auc"]
    plain = polyphily.run("fedavg", federation, **SMALL).summary
    assert plain["final"]["test"]["accuracy"] == summary["final"]["test"]["accuracy"]


def test_a_metric_for_two_classes_is_refused_for_three() -> None:
    register_metric("recall", classes=2)(recall_of_one)
    federation = polyphily.load(random_graphs([20, 20]))
    message = refusal(polyphily.run, "fedavg", federation, **SMALL, metric="recall")
    assert message == "metric recall needs two classes, graphs has 3"


# The command line ------------------------------------------------------------------------------


def test_what_is_registered_is_at_hand_on_the_command_line(cli: Cli) -> None:
    register_partition("stripes")(stripes)
    register_dataset(info())(lambda request: random_graph(40))
    register_metric("recall")(recall_of_one)
    flags = ["--dataset", "their_data", "--partition", "stripes:width=2", "--clients", "3"]
    knobs = ["--metric", "recall", "--rounds", "1", "--hidden", "4", "--no-report"]
    answer = cli("run", "fedavg", *flags, *knobs, "--out", "mine")
    assert answer.status == 0, answer.err
    assert "their-data" in [row["name"] for row in cli("datasets", "--json").json()]
    rows = {row["name"]: row["summary"] for row in cli("partitions", "--json").json()}
    assert rows["stripes"] == "Divide nodes into stripes; width, shuffle, order"
