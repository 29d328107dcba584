"""`polyphily report`, `plot` and `audit`, and the pages that runs leave: as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyphily.runs.folder import read_tensors, save_tensors
from report.stories import DATA, call, compared


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: Any, rounds: int = 2) -> int:
    return call("run", "fedavg", *DATA, "--rounds", str(rounds), *arguments)


def test_a_run_ends_with_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "r") == 0
    assert capsys.readouterr().out.rstrip().endswith("report: r/report.html")
    page = Path("r/report.html").read_text(encoding="utf-8")
    assert "fedavg on csbm" in page
    assert "collaboration" in page


def test_json_stays_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "r", "--json") == 0
    assert json.loads(capsys.readouterr().out)["method"] == "fedavg"
    assert Path("r/report.html").exists()


def test_no_page_where_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "r", "--no-report") == 0
    assert not Path("r/report.html").exists()
    assert not Path("r/evidence.json").exists()
    assert "report:" not in capsys.readouterr().out


def test_a_page_that_cannot_be_made_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("polyphily.report.page.render", fail)
    assert run("--out", "r") == 0
    assert "no ink" in capsys.readouterr().err
    assert Path("r/summary.json").exists()


def test_report_measures_what_the_folder_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "r", "--no-report") == 0
    assert call("report", "r", "--no-measure") == 0
    assert "accuracy-homophily" not in Path("r/report.html").read_text(encoding="utf-8")
    assert call("report", "r", "--out", "page/one.html") == 0
    assert capsys.readouterr().out.rstrip().endswith("report: page/one.html")
    assert "accuracy-homophily" in Path("page/one.html").read_text(encoding="utf-8")


def test_large_data_are_measured_when_asked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyphily.cli.reporting.MOST_NODES", 10)
    assert run("--out", "r") == 0
    page = Path("r/report.html")
    assert "were not measured" in page.read_text(encoding="utf-8")
    assert "confusion_at_best" in json.loads(Path("r/evidence.json").read_text(encoding="utf-8"))
    assert call("report", "r") == 0
    assert "were not measured" not in page.read_text(encoding="utf-8")


def test_a_run_that_went_on_is_measured_again() -> None:
    assert run("--out", "r") == 0
    assert call("run", "--resume", "r", "--rounds", "3", "--no-report") == 0
    assert json.loads(Path("r/evidence.json").read_text(encoding="utf-8"))["round"] == 2
    assert call("report", "r") == 0
    found = json.loads(Path("r/evidence.json").read_text(encoding="utf-8"))
    assert found["round"] == 3
    assert found["commit"] is None or isinstance(found["commit"], str)


def test_what_an_older_version_kept_is_measured_again() -> None:
    assert run("--out", "r") == 0
    file = Path("r/evidence.json")
    kept = json.loads(file.read_text(encoding="utf-8"))
    wanted = kept.pop("confusion_at_best")
    file.write_text(json.dumps(kept), encoding="utf-8")
    assert call("report", "r") == 0
    assert json.loads(file.read_text(encoding="utf-8"))["confusion_at_best"] == wanted


def test_resuming_records_no_round_of_collaboration_twice() -> None:
    from polyphily.report.runs import Run

    assert run("--out", "r", rounds=3) == 0
    Path("r/checkpoint/state.safetensors").unlink()
    Path("r/summary.json").unlink()
    assert call("run", "--resume", "r") == 0
    frames = Run.read(Path("r")).collaboration
    assert [frame["round"] for frame in frames] == [1, 2, 3]


def test_the_page_can_be_made_where_the_data_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    site = Path("site")
    site.mkdir()
    rows = ["id,label,x,y", *[f"{n},{'ab'[n % 2]},{n % 3},{n % 5}" for n in range(40)]]
    (site / "nodes.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    edges = ["source,target", *[f"{n},{(n + 7) % 40}" for n in range(40)]]
    (site / "edges.csv").write_text("\n".join(edges) + "\n", encoding="utf-8")
    given = ["--dataset", "./site", "--partition", "random", "--clients", "2", "--hidden", "4"]
    assert call("run", "fedavg", *given, "--rounds", "2", "--out", "with") == 0
    assert call("run", "fedavg", *given, "--rounds", "2", "--out", "without", "--no-report") == 0
    shutil.rmtree(site)
    assert call("report", "with") == 0
    assert "accuracy-homophily" in Path("with/report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert call("report", "without") == 0
    assert "not shown" in capsys.readouterr().err
    assert "Convergence" in Path("without/report.html").read_text(encoding="utf-8")


def test_a_server_folder_has_runs_whose_graphs_are_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--out", "server/runs/r", "--no-report") == 0
    Path("server/config.toml").write_text("port = 9443\n", encoding="utf-8")
    Path("server/runs/r/partition.npz").unlink()
    assert call("report", "server") == 0
    assert "its graphs are not here" in capsys.readouterr().err
    assert "Convergence" in Path("server/report.html").read_text(encoding="utf-8")


def test_a_comparison_has_one_page_and_several_folders_one_in_place() -> None:
    folder = compared(Path("c"), "local", "fedavg", seeds="0", rounds=2)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "local · fedavg on csbm" in page
    assert call("report", "c/local", "c/fedavg") == 0
    assert Path("report.html").exists()


def test_report_opens_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--out", "r") == 0
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert call("report", "r", "--open") == 0
    assert opened == [Path("r/report.html").resolve().as_uri()]


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", "nowhere") == 2
    assert "no folder nowhere" in capsys.readouterr().err
    Path("empty").mkdir()
    assert call("report", "empty") == 2
    assert "holds no run" in capsys.readouterr().err


def test_models_of_another_version_are_named_and_the_page_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A network that has changed since: what needs the models says so, the page does without."""
    assert run("--out", "r", "--no-report") == 0
    file = Path("r/checkpoint/state.safetensors")
    tensors, facts = read_tensors(file)
    name = next(n for n in tensors if n.startswith("simulation/memory/") and "weight" in n)
    save_tensors(file, {**tensors, name: tensors[name][..., :-1]}, facts)
    for command in (["inspect", "r"], ["audit", "r"], ["run", "--resume", "r"]):
        capsys.readouterr()
        assert call(*command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "do not fit fedavg as it is now" in said
        assert "polyphily run --config r/config.toml" in said
    assert call("report", "r") == 0
    assert "clients and models are not shown" in capsys.readouterr().err
    assert "Convergence" in Path("r/report.html").read_text(encoding="utf-8")
    del tensors[name]
    save_tensors(file, tensors, facts)
    assert call("inspect", "r") == 2
    assert "is not there" in capsys.readouterr().err


def test_audit_compares_what_attackers_see(capsys: pytest.CaptureFixture[str]) -> None:
    compared(Path("c"), "local", "fedavg", seeds="0", rounds=2)
    capsys.readouterr()
    assert call("audit", "c", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    for method, first in (("local", 5), ("fedavg", 7)):
        names = [row["sees"] for row in rows if row["method"] == method]
        assert [name for name in names[:first] if " by class" not in name] == [
            "features",
            "labels",
            "model",
            "representations",
        ]
    by = {(row["method"], row["sees"]): row for row in rows}
    assert by["local", "model"]["auc"] is None
    assert by["local", "features"]["auc"] == by["fedavg", "features"]["auc"]
    assert by["fedavg", "update"]["tried"].startswith("cosine of embeddings without edges")
    assert by["fedavg", "update"]["unread"] == ["weight"]
    row = by["fedavg", "representations"]
    assert row["chance"] == 0.5
    assert 0.5 < row["chance_either_way"] < 0.6
    assert row["auc"] == pytest.approx(sum(c["auc"] for c in row["clients"]) / 3)
    assert call("audit", "c") == 0
    said = capsys.readouterr().out
    assert "chance" in said
    assert max(map(len, said.splitlines())) <= 80
