"""`polyphily predict`, from the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from polyphily.cli import app
from polyphily.errors import UserError
from polyphily.graphs.loading import load

SETTINGS = ["--rounds", "3", "--epochs", "1", "--hidden", "8", "--no-report"]


def call(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(a) for a in arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two banks with tables, a run and a comparison on them."""
    folder = tmp_path_factory.mktemp("banks")
    data = load("csbm:nodes=60,features=4", clients=2, seed=0)
    for graph, name in zip(data.clients, ("north", "south"), strict=True):
        own = folder / "sites" / name
        own.mkdir(parents=True)
        nodes = pd.DataFrame(graph.features, columns=[f"f{i}" for i in range(4)])
        nodes.insert(0, "id", [f"{name}-{i}" for i in range(len(nodes))])
        nodes.insert(1, "label", np.array(["no", "yes"])[graph.labels])
        nodes.to_csv(own / "nodes.csv", index=False)
        ends = np.array(nodes["id"])[graph.edges[:, graph.edges[0] < graph.edges[1]]]
        pd.DataFrame({"source": ends[0], "target": ends[1]}).to_csv(own / "edges.csv", index=False)
    sites = folder / "sites"
    call("run", "fedper", "--dataset", sites, "--out", folder / "run", *SETTINGS)
    call("compare", "fedavg", "local", "--dataset", sites, "--out", folder / "both", *SETTINGS)
    unlabelled = folder / "new"
    unlabelled.mkdir()
    nodes = pd.read_csv(sites / "north" / "nodes.csv").drop(columns="label")
    new = nodes.iloc[[0]].assign(id="new")
    pd.concat([nodes, new]).to_csv(unlabelled / "nodes.csv", index=False)
    edges = pd.read_csv(sites / "north" / "edges.csv")
    edges.to_csv(unlabelled / "edges.csv", index=False)
    return folder


@pytest.mark.parametrize(
    ("model", "options", "out"),
    [
        ("run", ["--client", "north"], "p.csv"),
        ("run/models/south-best.safetensors", [], "p.parquet"),
        ("run", ["--client", "south", "--which", "last", "--memory", "1GB"], "p.csv"),
        ("both/fedavg", [], "deep/p.csv"),
        ("both/fedavg", ["--client", "north", "--seed", "0"], "p.csv"),
        ("both/local/models/north.safetensors", ["--client", "north"], "p.csv"),
    ],
)
def test_new_nodes_are_predicted(
    model: str, options: list[str], out: str, place: Path, tmp_path: Path
) -> None:
    file = tmp_path / out
    common = ["--graph", place / "new", "--out", file]
    said = call("predict", "--model", place / model, *common, *options)
    assert "61 predictions" in said
    table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    columns = ["id", "class", "probability no", "probability yes"]
    decided = "last" not in options and "north.safetensors" not in model
    assert table.columns.tolist()[:4] == columns
    if decided:
        assert table.columns.tolist()[4:] == ["above_threshold"]
    assert table["id"].iloc[-1] == "new"
    assert set(table["class"]) <= {"no", "yes"}
    np.testing.assert_allclose(table.filter(like="probability").sum(axis=1), 1)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("run", [], "every client has its own model"),
        ("run", ["--client", "west"], "unknown client 'west'"),
        ("both", [], "holds 2 runs: give one of them"),
        ("both/fedavg", ["--seed", "4"], "no run with seed 4"),
        ("both/fedavg", ["--which", "first"], "unknown kind of model 'first'"),
        ("both/fedavg", ["--out", "p.txt"], r"end the name in \.parquet or \.csv"),
        ("nowhere", [], "no model"),
        ("sites", [], "there is no run"),
        ("new/nodes.csv", [], "not a model file"),
    ],
)
def test_mistakes_are_told(
    model: str, options: list[str], message: str, place: Path, tmp_path: Path
) -> None:
    common = ["--graph", place / "new", "--out", tmp_path / "p.csv"]
    with pytest.raises(UserError, match=message):
        call("predict", "--model", place / model, *common, *options)
    assert not list(tmp_path.iterdir())
