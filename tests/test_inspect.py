"""`polyphily inspect`: on datasets, on a site's files, on a run; tables, JSON, errors."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from builders import random_graphs
from cases import federation_of
from commands import Cli, caller
from polyphily.cli import inspecting
from polyphily.graphs.loading import load
from polyphily.heterogeneity.advice import advise
from polyphily.heterogeneity.inspection import inspect

TINY = ["--dataset", "csbm:nodes=120,features=8", "--clients", "3"]
WANTED = {
    "nodes",
    "edges",
    "classes",
    "edge_homophily",
    "node_homophily",
    "adjusted_homophily",
    "label_informativeness",
    "high_frequency_area",
    "structure_inertia_score",
}
PAIRS = {"spectral_kl", "neighbour_divergence", "label_divergence"}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command in this process, in a folder of its own."""
    return caller(tmp_path, monkeypatch, capsys)


def write_site(folder: Path, *, labels: str = "ab", nodes: int = 30) -> None:
    """Write a folder with a client's nodes and edges; every third node has no label."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(folder.name))
    rows = ["id,label,x,y"]
    for node in range(nodes):
        label = labels[node % len(labels)] if node % 3 else ""
        x, y = rng.standard_normal(2)
        rows.append(f"{node},{label},{x:.3f},{y:.3f}")
    (folder / "nodes.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ends = [f"{a},{b}" for a, b in rng.integers(0, nodes, (3 * nodes, 2)) if a != b]
    (folder / "edges.csv").write_text("\n".join(["source,target", *ends]) + "\n", encoding="utf-8")


def test_json_has_the_promised_keys(cli: Cli) -> None:
    found = cli("inspect", *TINY, "--json").json()
    assert found["graph"] is None  # csbm makes the clients' graphs
    assert len(found["clients"]) == 3
    for client in found["clients"]:
        assert client.keys() >= WANTED
    assert found["pairs"].keys() >= PAIRS
    for matrix in found["pairs"].values():
        assert np.array(matrix).shape == (3, 3)
    assert found["advice"][0]["text"]
    federation = load("csbm:nodes=120,features=8", clients=3)
    assert [c["edges"] for c in found["clients"]] == [g.num_edges for g in federation.clients]


@pytest.mark.data
def test_a_partitioned_graph_has_the_whole(
    cli: Cli, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    found = cli("inspect", "--dataset", "cora", "--partition", "random", "--clients", "4", "--json")
    whole = found.json()["graph"]
    assert whole.keys() >= WANTED
    assert (whole["nodes"], whole["edges"], whole["classes"]) == (2708, 5278, 7)
    assert round(whole["adjusted_homophily"], 2) == 0.77
    lost = found.json()["lost"]
    kept = sum(client["edges"] for client in found.json()["clients"])
    assert lost["edges"] == 5278 - kept
    train = sum(client["train"] for client in found.json()["clients"])
    assert whole["train"] == train


def test_the_same_twice_and_another_seed(cli: Cli) -> None:
    first, again = (cli("inspect", *TINY, "--json").out for _ in range(2))
    assert first == again
    assert cli("inspect", *TINY, "--seed", "1", "--json").out != first


def test_file_is_what_json_prints(cli: Cli, tmp_path: Path) -> None:
    answer = cli("inspect", *TINY, "--out", "found", "--json")
    assert (tmp_path / "found" / "inspect.json").read_text(encoding="utf-8") == answer.out
    answer = cli("inspect", *TINY, "--out", "found")
    assert "inspect.json" in answer.out


def test_a_sites_own_folder(cli: Cli, tmp_path: Path) -> None:
    for name in ("north", "south-1"):
        write_site(tmp_path / "sites" / name)
    by_argument = cli("inspect", "sites", "--json").json()
    by_flag = cli("inspect", "--dataset", "./sites", "--json").json()
    assert by_argument == by_flag
    assert [client["name"] for client in by_argument["clients"]] == ["north", "south-1"]
    assert by_argument["clients"][0]["labelled"] == 20
    assert any("unlabelled" in note for note in by_argument["notes"])


def test_a_single_site(cli: Cli, tmp_path: Path) -> None:
    write_site(tmp_path / "alone")
    answer = cli("inspect", "alone")
    assert answer.status == 0
    assert "1 client " in answer.out
    assert "between clients" not in answer.out
    assert "nothing to compare" in answer.out


def test_a_single_graph_of_ones_own_divided(cli: Cli, tmp_path: Path) -> None:
    write_site(tmp_path / "mine", nodes=60)
    found = cli("inspect", "mine", "--partition", "random", "--clients", "2", "--json").json()
    assert found["graph"]["nodes"] == 60
    assert [client["nodes"] for client in found["clients"]] == [30, 30]
    kept = sum(client["edges"] for client in found["clients"])
    assert found["lost"]["edges"] == found["graph"]["edges"] - kept > 0


def test_a_run_folder(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "fedavg", *TINY, "--rounds", "2", "--out", "here").status == 0
    before = {f: f.read_bytes() for f in sorted((tmp_path / "here").rglob("*")) if f.is_file()}
    found = cli("inspect", "here", "--json").json()
    plain = cli("inspect", *TINY, "--json").json()
    assert found["clients"] == plain["clients"]
    assert plain["trained"] is None
    trained = found["trained"]
    assert (trained["method"], trained["round"], trained["view"]) == ("fedavg", 2, "received")
    assert np.array(trained["embedding_divergence"]).shape == (3, 3)
    assert trained["heterogeneity"] > 0
    shown = cli("inspect", "here")
    assert "fedavg" in shown.out
    assert "Try" not in shown.out  # the run is there already
    after = {f: f.read_bytes() for f in sorted((tmp_path / "here").rglob("*")) if f.is_file()}
    assert before == after


def test_a_run_of_fedgsp_has_filters(cli: Cli) -> None:
    assert cli("run", "fedgsp", *TINY, "--rounds", "2", "--out", "here").status == 0
    trained = cli("inspect", "here", "--json").json()["trained"]
    assert trained["network"] == "unifilter"
    assert np.array(trained["responses"]).shape == (3, len(trained["frequencies"]))
    assert "filter response" in cli("inspect", "here").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["nowhere"]),
        ([".", "--dataset", "cora"], ["not both"]),
        (["--dataset", "corra"], ["corra", "did you mean"]),
        (["--dataset", "csbm", "--split", "half"], ["half"]),
        (["--dataset", "csbm:nodes=20", "--partition", "louvian"], ["louvian"]),
    ],
)
def test_mistakes_are_told(cli: Cli, arguments: list[str], words: list[str]) -> None:
    answer = cli("inspect", *arguments)
    assert answer.status == 2
    assert "Traceback" not in answer.err
    assert all(word in answer.err for word in words)


def test_a_run_has_its_own_data(cli: Cli) -> None:
    assert cli("run", "local", *TINY, "--rounds", "1", "--out", "here").status == 0
    answer = cli("inspect", "here", "--clients", "5")
    assert answer.status == 2
    assert "--clients" in answer.err


def test_out_that_cannot_be_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    answer = cli("inspect", *TINY, "--out", "taken")
    assert answer.status == 2
    assert "taken" in answer.err


@pytest.mark.parametrize("width", [80, 160])
def test_tables_fit_the_terminal(width: int) -> None:
    federation = federation_of(random_graphs([80, 70, 90], density=0.2))
    found = inspect(federation)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    inspecting.show(found, advise(found), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    row = next(line for line in lines if line.startswith("client-1"))
    assert row.split()[1:3] == ["70", f"{federation.clients[1].num_edges:,}"]


def test_many_clients_are_shown_in_part() -> None:
    federation = federation_of(random_graphs([12] * 40, density=0.4))
    found = inspect(federation)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    inspecting.show(found, advise(found), console)
    assert isinstance(console.file, io.StringIO)
    shown = [line for line in console.file.getvalue().splitlines() if line.startswith("client-")]
    assert len(shown) == inspecting.MOST_ROWS
    assert "10 more" in console.file.getvalue()
