"""The leaderboard: equal trials, selection by validation, and its pages."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyphily
from polyphily.core.method import METHODS, create, register
from polyphily.errors import OutOfMemory, UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.runs import searching
from polyphily.studies import Cell, heat_map
from polyphily.studies.leaderboard import (
    TRAINED,
    Entrant,
    Leaderboard,
    alike,
    costs,
    file_of,
    leaderboard,
    run_rows,
    standings,
)
from polyphily.studies.standings import Standings

SPLIT = "0.6,0.2,0.2:client"


def small(**changes: Any) -> Leaderboard:
    cells = tuple(
        Cell(f"csbm:nodes=40,features=6,degree={degree}", "natural", 2, SPLIT) for degree in (2, 5)
    )
    settings = {"rounds": 2, "hidden": 8, "epochs": 1, "selection": "federation"}
    board = replace(leaderboard(), cells=cells, settings=settings, seeds=(0, 1), trials=2)
    return replace(board, **{"rates": ((0.01, 0.0), (0.05, 0.0)), **changes})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Leaderboard, Path]:
    board, folder = small(), tmp_path_factory.mktemp("leaderboard")
    run_rows(board, board.cells, board.entrants(["local", "fedavg", "fedspa"]), folder)
    return board, folder


def test_every_method_has_a_row_and_as_many_trials() -> None:
    board = leaderboard()
    rows = board.entrants()
    assert {row.method for row in rows} >= set(METHODS)
    assert {sum(board.shares(row).values()) for row in rows} == {board.trials}
    four = replace(board, trials=4)
    assert four.shares(Entrant("fedavg")) == {"gpr-gnn": 2, "acm-gcn": 2}
    assert four.shares(Entrant("fedgsp")) == {None: 4}
    assert replace(board, trials=1).shares(Entrant("fedavg")) == {"gpr-gnn": 1}


def test_forms_that_have_a_row_are_other_models() -> None:
    for name in leaderboard().forms:
        assert asdict(create(name)) != asdict(create(name, {"paper": True})), name


def test_the_cells_cover_the_papers_and_two_natural_federations() -> None:
    cells = leaderboard().cells
    assert len(cells) == 12
    for paper in ("FedSPA", "FedGSP", "FedHERO", "S2FGL", "FedATH"):
        assert any(paper in cell.table for cell in cells), paper
    assert {"twitch", "facebook100"} <= {c.dataset for c in cells if c.partition == "natural"}


def test_finished_rows_are_not_repeated_and_changed_ones_are(
    results: tuple[Leaderboard, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    board, folder = results
    row = board.entrants(["local"])
    run_rows(board, board.cells[:1], row, folder)
    assert capsys.readouterr().out == ""
    other = replace(board, settings={**board.settings, "rounds": 1})
    assert "local" not in standings(other, row, folder)
    before = file_of(folder, board.cells[0]).read_text()
    run_rows(other, board.cells[:1], row, folder)
    assert "local" in capsys.readouterr().out
    file_of(folder, board.cells[0]).write_text(before)


def test_validation_alone_selects(results: tuple[Leaderboard, Path], tmp_path: Path) -> None:
    board, folder = results
    file = file_of(folder, board.cells[0])
    data = json.loads(file.read_text())
    scores = standings(board, board.entrants(["fedavg"]), folder)["fedavg"][board.cells[0].title]
    pairs = [pair for trial in data["rows"]["fedavg"]["trials"] for pair in trial["rates"]]
    assert scores.val == max(50 * sum(pair["val"]["received"]) for pair in pairs)
    for pair in pairs:  # a test score of 1 where validation does not choose
        if 50 * sum(pair["val"]["received"]) < scores.val:
            pair["test"]["received"] = [1.0, 1.0]
    copy = file_of(tmp_path, board.cells[0])
    copy.parent.mkdir()
    copy.write_text(json.dumps(data))
    again = standings(board, board.entrants(["fedavg"]), tmp_path)["fedavg"]
    assert again[board.cells[0].title] == scores


def test_scores_are_those_of_a_run_with_the_chosen_values(
    results: tuple[Leaderboard, Path],
) -> None:
    board, folder = results
    cell = board.cells[1]
    found = standings(board, board.entrants(["fedspa"]), folder)["fedspa"][cell.title]
    federation = polyphily.load(cell.dataset, clients=cell.clients, split=cell.split, seed=1)
    options = {**board.settings, **found.values, "backbone": found.backbone, "metric": cell.metric}
    lr, decay = found.rate
    run = polyphily.run("fedspa", federation, lr=lr, weight_decay=decay, **options)
    assert found.test[1] == pytest.approx(
        100 * run.summary["best_val"]["test"][cell.metric], abs=1e-3
    )


def test_fedavg_has_a_row_for_each_view(results: tuple[Leaderboard, Path]) -> None:
    board, folder = results
    rows = Standings(board, board.entrants(["local", "fedavg", "fedspa"]), folder)
    assert {"fedavg", "fedavg" + TRAINED} <= set(rows.scores)
    title = board.cells[0].title
    local = rows.scores["local"][title].mean  # personal models: compared with the trained ones
    base = rows.scores["fedavg" + TRAINED][title].mean
    assert rows.differences("local")[title] == pytest.approx(local - base)
    spa = rows.scores["fedspa"][title].mean - rows.scores["fedavg"][title].mean
    assert rows.differences("fedspa")[title] == pytest.approx(spa)


def test_costs_are_those_of_the_defaults(results: tuple[Leaderboard, Path]) -> None:
    board, folder = results
    found = costs(board, board.entrants(["local", "fedavg", "fedspa"]), folder)
    assert found["fedavg"].rounds == 1
    assert found["local"].megabytes == 0
    federation = polyphily.load(board.cells[0].dataset, clients=2, split=SPLIT, seed=0)
    options = {**board.settings, "backbone": board.backbones[0]}
    summary = polyphily.run("fedavg", federation, **options).summary
    sent = (summary["bytes_up_per_round"] + summary["bytes_down_per_round"]) / 1e6
    assert found["fedavg"].megabytes == pytest.approx(sent, abs=1e-4)
    alone = costs(board, board.entrants(["fedspa"]), folder)["fedspa"]
    assert alone == found["fedspa"]


def test_rows_of_another_device_are_named_and_their_times_not_compared(
    results: tuple[Leaderboard, Path], tmp_path: Path
) -> None:
    board, folder = results
    rows = board.entrants(["local", "fedavg"])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    whole = Standings(board, rows, tmp_path)
    assert set(whole.devices) == {"cpu"}
    assert "trained on" not in whole.markdown()
    for cell in board.cells:
        file = file_of(tmp_path, cell)
        data = json.loads(file.read_text())
        for label, row in data["rows"].items():
            assert row["device"] == "cpu"
            if label != "local":
                del row["device"]  # as in rows of earlier versions, which were trained on a GPU
        file.write_text(json.dumps(data))
    mixed = Standings(board, board.entrants(["local", "fedavg", "fedspa"]), tmp_path)
    first, second = (cell.title for cell in board.cells)
    text = f"Rows were trained on a GPU, but on a CPU {first}: local; {second}: local."
    assert text in mixed.markdown()
    assert mixed.costs["local"].rounds is None
    assert mixed.costs["local"].megabytes == whole.costs["local"].megabytes
    assert mixed.costs["fedspa"].rounds is not None


def test_pages(results: tuple[Leaderboard, Path]) -> None:
    board, folder = results
    board = replace(board, findings=("It says <this>.",))
    rows = Standings(board, board.entrants(["local", "fedavg", "fedspa"]), folder)
    text = rows.text(".md")
    assert "Every method had 2 trials" in text
    assert "- It says <this>." in text
    for label in ("local", "fedavg", "fedavg" + TRAINED, "fedspa", "fedspa, paper's form"):
        assert f"| {label} |" in text
    page = rows.text(".html")
    assert "It says &lt;this&gt;." in page
    assert "data-sort" in page
    assert rows.text(".csv").startswith("method,mean rank,")
    assert r"\toprule" in rows.text(".tex")
    assert "Nothing has run yet" in Standings(board, board.entrants(), folder / "none").text(".md")


def test_a_cell_with_many_gaps_does_not_enter_the_ranks(
    results: tuple[Leaderboard, Path], tmp_path: Path
) -> None:
    board, folder = results
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rows = board.entrants(["local", "fedavg", "fedspa"])
    whole = Standings(board, rows, tmp_path)
    assert whole.ranked == whole.titles
    assert "have not run" not in whole.markdown()
    file = file_of(tmp_path, board.cells[0])
    data = json.loads(file.read_text())
    del data["rows"]["local"]
    file.write_text(json.dumps(data))
    gap = Standings(board, rows, tmp_path)
    assert gap.ranked == gap.titles[1:]
    assert gap.rank("local") is not None
    tested = len(gap.titles) - 1
    assert gap.ranking is not None
    assert gap.ranking.blocks == tested * len(board.seeds)
    text = gap.markdown()
    assert f"1 of {len(gap.scores) * len(gap.titles)} entries have not run yet" in text
    assert f"leave out {gap.titles[0]}" in text


def test_the_page_is_written_from_the_committed_results() -> None:
    docs = Path(__file__).parents[2] / "docs"
    if not docs.exists():
        pytest.skip("without docs/")
    board = leaderboard()
    found = Standings(board, board.entrants(), docs / "results")
    for suffix in (".md", ".html"):  # write them again if the page's style changes
        assert found.text(suffix) == (docs / f"leaderboard{suffix}").read_text("utf-8")


def test_the_picture_has_the_differences_to_fedavg(
    results: tuple[Leaderboard, Path], tmp_path: Path
) -> None:
    board, folder = results
    rows = Standings(board, board.entrants(["local", "fedavg", "fedspa"]), folder)
    axes = heat_map.draw(rows).axes[0]
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert set(labels) == {"local", "fedspa", "fedspa, paper's form"}
    shown = axes.images[0].get_array()
    own = list(rows.differences("local").values())
    assert shown[labels.index("local")].tolist() == pytest.approx([sum(own) / 2, *own])
    assert shown[:, 0].tolist() == sorted(shown[:, 0], reverse=True)
    with pytest.raises(UserError, match="nothing to draw"):
        heat_map.draw(Standings(board, board.entrants(["fedavg"]), tmp_path))


def test_a_plugin_is_added_by_name(tmp_path: Path) -> None:
    with METHODS.restored():

        @register("mine", cite="me")
        @dataclass(frozen=True)
        class Mine(FedAvg):
            pass

        board = small(trials=1, backbones=("gcn",))
        run_rows(board, board.cells[:1], board.entrants(["mine"]), tmp_path)
        assert "mine" in standings(board, board.entrants(["mine"]), tmp_path)


def test_a_row_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = small(trials=1)
    cell = replace(board.cells[0], split="0.8,0,0.2:client")  # nothing to validate on
    run_rows(board, [cell], board.entrants(["local", "fedavg"]), tmp_path)
    said = capsys.readouterr().out
    assert "local: " in said
    assert "fedavg: " in said
    assert not file_of(tmp_path, cell).exists()


def test_a_row_whose_trial_lacked_memory_is_run_again_and_shown_nowhere(
    results: tuple[Leaderboard, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, cell, row = results[0], results[0].cells[0], results[0].entrants(["local"])
    said: list[str] = []
    train = searching._Study._train

    def scarce(study: Any, number: int, *rest: Any) -> Any:
        if "acm-gcn" in str(study.settings):
            raise torch.OutOfMemoryError
        return train(study, number, *rest)

    monkeypatch.setattr(searching._Study, "_train", scarce)
    run_rows(board, [cell], row, tmp_path, report=said.append)
    assert "not enough memory; call the command again" in said[0]
    assert not file_of(tmp_path, cell).exists()
    monkeypatch.undo()
    run_rows(board, [cell], row, tmp_path, report=said.append)
    assert "local" in standings(board, row, tmp_path)
    # A file of an earlier version may hold such a row.
    found = json.loads(file_of(tmp_path, cell).read_text("utf-8"))
    found["rows"]["local"]["trials"][1] |= {"rates": [], "failed": str(OutOfMemory())}
    file_of(tmp_path, cell).write_text(json.dumps(found), encoding="utf-8")
    assert "local" not in standings(board, row, tmp_path)
    run_rows(board, [cell], row, tmp_path, report=said.append)
    assert "local" in standings(board, row, tmp_path)


def test_a_row_that_needs_several_passes_is_the_same_row(
    results: tuple[Leaderboard, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, folder = results
    row, cell = board.entrants(["local"]), board.cells[0]
    joined = searching.stacked

    def scarce(method: Any, federations: Any, settings: Any, pairs: Any, **rest: Any) -> Any:
        if len(pairs) > 1:
            raise torch.OutOfMemoryError
        return joined(method, federations, settings, pairs, **rest)

    monkeypatch.setattr(searching, "stacked", scarce)
    run_rows(board, [cell], row, tmp_path, report=lambda _: None)
    found, known = (standings(board, row, at)["local"][cell.title] for at in (tmp_path, folder))
    assert found == known
    found, known = (costs(board, row, at)["local"] for at in (tmp_path, folder))
    assert found.megabytes == known.megabytes


def test_several_processes_find_the_same(results: tuple[Leaderboard, Path], tmp_path: Path) -> None:
    board, folder = results
    rows = board.entrants(["local", "fedavg"])
    run_rows(board, board.cells[:1], rows, tmp_path, report=lambda _: None, processes=2)
    assert standings(board, rows, tmp_path) == {
        label: {title: score for title, score in cells.items() if title == board.cells[0].title}
        for label, cells in standings(board, rows, folder).items()
    }


def test_rows_that_are_one_model_are_named(tmp_path: Path) -> None:
    board = small()
    rows = board.entrants(["fedavg", "fednova", "local"])
    run_rows(board, board.cells, rows, tmp_path, report=lambda _: None)
    (found,) = alike(board, rows, tmp_path)
    assert found.rows == ("fedavg", "fednova")  # all clients take equally many steps
    assert found.compared == 8  # two cells, two networks, two rates
    assert found.same >= 0.9 * found.compared
    page = Standings(board, rows, tmp_path).markdown()
    assert f"fedavg and fednova ({found.same} of 8 trainings)" in page
