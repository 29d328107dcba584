"""`polyphily check`: what is printed, the faults, JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from commands import Cli, caller

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
NODES = "id,label,age,job,joined,active\n" + "".join(
    f"{i},{label},{20 + i},{'a cook' if i % 2 else ''},2020-01-0{i},yes\n"
    for i, label in enumerate(2 * ["honest", "honest", "honest", "fraud"], start=1)
)
EDGES = "source,target,weight,since\n1,2,0.5,3\n2,3,4,3\n"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command in this process, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    return caller(tmp_path, monkeypatch, capsys)


def write(folder: Path, nodes: str = NODES, edges: str = EDGES) -> None:
    folder.mkdir(parents=True)
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text(edges)


def test_what_is_found(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "my sites" / "north")
    write(tmp_path / "my sites" / "south")
    answer = cli("check", "my sites")
    assert answer.status == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    north, south, end = answer.out.strip().split("\n\n")
    for client in (north, south):
        for part in (
            "8 nodes, 8 labelled; the split is drawn",
            "fraud 25.0%, honest 75.0%",
            "2 edges, without direction, weights 0.5 to 4",
            "not used: since",
        ):
            assert part in client
        rows = [" ".join(line.split()) for line in client.splitlines()]
        assert "age number – 21 to 28" in rows
        assert "job category 50.0% 1: a cook" in rows
        assert "joined date – 2020-01-01 to 2020-01-08" in rows
        assert "active boolean – 100.0% true" in rows
    assert end == "No faults. Next: polyphily compare --dataset 'my sites'"


def test_one_graph_is_divided_next(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "north")
    end = cli("check", "north").out.splitlines()[-1]
    assert end.startswith("No faults. Next: polyphily compare --dataset north --partition ")


def test_json(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "north")
    found = cli("check", "north", "--json").json()
    assert (found["faults"], found["count"]) == ([], 0)
    (client,) = found["clients"]
    assert client["classes"] == {"fraud": 2, "honest": 6}
    assert [column["kind"] for column in client["columns"]] == [
        "number",
        "category",
        "date",
        "boolean",
    ]


def test_faults(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "sites" / "north", NODES + "8,honest,x,,,\n")
    write(tmp_path / "sites" / "south", edges=EDGES + "1,99,1,1\n")
    answer = cli("check", "sites")
    assert answer.status == 2
    assert "2 faults:" in answer.err
    assert "north/nodes.csv, line 10, column 'id'" in answer.err
    assert "south/edges.csv, line 4, column 'target'" in answer.err
    as_json = cli("check", "sites", "--json")
    found = json.loads(as_json.out)
    assert (as_json.status, found["count"], len(found["faults"])) == (2, 2, 2)


def test_schema(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "north", NODES.replace("label", "is_fraud"))
    assert cli("check", "north").status == 2
    (tmp_path / "map.toml").write_text('[nodes]\nlabel = "is_fraud"\nignore = ["job"]\n')
    answer = cli("check", "north", "--schema", "map.toml")
    assert answer.status == 0
    assert "a cook" not in answer.out
    assert "cp map.toml north/schema.toml && polyphily compare --dataset north" in answer.out
    assert cli("check", "north", "--schema", "none.toml").status == 2


def test_arrays(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", x=np.ones((3, 5)), edge_index=np.array([[0], [1]]), y=[0, 1, 1])
    answer = cli("check", "g.npz")
    assert "5 features in an array" in answer.out


def blocks() -> dict[str, str]:
    """Return the blocks of the page by the words in front of them."""
    found = re.findall(
        r"^(\S[^\n]*):\n\n```\w*\n(.*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return {words.strip("`"): block for words, block in found}


def test_the_example_of_the_page(cli: Cli, tmp_path: Path) -> None:
    page = blocks()
    for name, text in page.items():
        if name.startswith("sites/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    answer = cli("check", "sites")
    printed = "\n".join(line.rstrip() for line in answer.out.splitlines())
    assert printed == page["polyphily check sites` prints"].rstrip()
    (shown,) = (block for words, block in page.items() if words.endswith("were to `s9"))
    for name, old, new in (("north/nodes", "n4,,", "n3,,"), ("south/edges", "s3;s2", "s3;s9")):
        path = tmp_path / "sites" / f"{name}.csv"
        path.write_text(path.read_text().replace(old, new))
    assert cli("check", "sites").err == shown
