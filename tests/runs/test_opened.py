"""Runs opened in Python: history, models and predictions, in memory and from folders."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import polyphily
from flower.federations import graph_arrays
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import Federation, load
from polyphily.runs.folder import RunFolder
from polyphily.runs.opened import load_model, open_run

SMALL = {"rounds": 3, "epochs": 1, "hidden": 8, "backbone": "gcn"}


def tiny(seed: int = 0) -> Federation:
    return load("csbm:nodes=60,features=8", clients=3, seed=seed)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> polyphily.Result:
    return polyphily.run("fedavg", tiny(), out=tmp_path_factory.mktemp("r") / "run", **SMALL)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> polyphily.Result:
    folder = tmp_path_factory.mktemp("s") / "run"
    return polyphily.run("fedper", [tiny(3), tiny(5)], out=folder, **SMALL)


def reopened(result: polyphily.Result) -> polyphily.Run:
    assert result.folder
    return polyphily.open_run(result.folder)


def new_graph() -> Graph:
    graph = tiny(9).clients[0]
    return replace(graph, labels=np.full(graph.num_nodes, UNLABELLED), masks=None)


def test_a_run_is_opened_with_all_that_it_left(done: polyphily.Result) -> None:
    run = reopened(done)
    assert run.config["method"] == "fedavg"
    assert run.summary["best_val"] == done.summary["best_val"]
    assert run.models == ["global", "global-best"]
    assert run.model().which == "best"
    assert run.model(which="last").round == 3


def test_history_has_a_row_for_every_round_and_seed(
    done: polyphily.Result, seeds: polyphily.Result
) -> None:
    for result in (done, seeds):
        for history in (result.history, reopened(result).history):
            used = result.summary["seeds"]
            assert history[["round", "seed"]].to_numpy().tolist() == [
                [r, s] for r in (1, 2, 3) for s in used
            ]
            final = result.summary.get("per_seed", [result.summary])
            for view in ("received", "trained"):
                for metric in ("accuracy", "auc"):
                    found = history[history["round"] == 3][f"{view}/test/{metric}"].tolist()
                    expected = [own["views"][view]["final"]["test"][metric] for own in final]
                    assert found == pytest.approx(expected)
            assert (history["seconds"] > 0).all()
            assert history["loss"].notna().all()


def test_a_short_text_says_what_it_is(done: polyphily.Result, seeds: polyphily.Result) -> None:
    score = done.summary["best_val"]["test"]["accuracy"]
    expected = (
        "(fedavg on csbm:nodes=60,features=8, 3 clients, 3 rounds: "
        f"test accuracy {score:.3f} at best validation)"
    )
    assert repr(done) == f"Result{expected}"
    assert repr(reopened(done)) == f"Run{expected}"
    assert ", 3 clients, 2 seeds, 3 rounds: " in repr(seeds)
    assert len(repr(done.model())) < 120


def test_clients_of_the_run_are_predicted_by_place_name_or_graph(done: polyphily.Result) -> None:
    data = done._federations[0]
    for source in (1, -2, "client-1", data.clients[1]):
        np.testing.assert_array_equal(done.predict(source), done.predict(1))
        table = done.predict_proba(source)
        assert table.columns.tolist() == list(data.classes)
        assert len(table) == data.clients[1].num_nodes
        np.testing.assert_allclose(table.sum(axis=1), 1)
        best = np.array(data.classes)[table.to_numpy().argmax(axis=1)]
        np.testing.assert_array_equal(done.predict(source), best)
    for wrong, message in ((3, "no client 3: there are 3"), ("client-9", "unknown client")):
        with pytest.raises(UserError, match=message):
            done.predict(wrong)


def test_new_graphs_are_predicted_alike_in_memory_and_from_the_folder(
    done: polyphily.Result, seeds: polyphily.Result, tmp_path: Path
) -> None:
    graph = new_graph()
    np.savez(tmp_path / "new.npz", **graph_arrays(graph))
    for result, options in (
        (done, {}),
        (done, {"client": "client-2"}),
        (done, {"which": "last"}),
        (seeds, {"client": "client-2", "seed": 5}),
    ):
        found = [
            run.predict_proba(source, **options)
            for run in (result, reopened(result))
            for source in (graph, tmp_path / "new.npz", str(tmp_path / "new.npz"))
        ]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
    with pytest.raises(UserError, match="every client has its own model"):
        seeds.predict(graph)
    with pytest.raises(UserError, match="no run with seed 4"):
        seeds.predict(0, seed=4)


def test_data_of_torch_geometric_are_predicted(done: polyphily.Result) -> None:
    graph = new_graph()
    np.testing.assert_array_equal(done.predict_proba(graph.to_pyg()), done.predict_proba(graph))


# Folders -----------------------------------------------------------------------------------------


def test_runs_of_a_comparison_are_listed(tmp_path: Path) -> None:
    polyphily.compare(["local", "fedavg"], tiny(), out=tmp_path / "all", **SMALL)
    with pytest.raises(UserError, match=r"holds 2 runs: give one of them: .*fedavg.*local"):
        open_run(tmp_path / "all")
    assert load_model(tmp_path / "all" / "fedavg").method == "fedavg"
    assert load_model(tmp_path / "all" / "local", "client-1").client == "client-1"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="there is no run"):
        open_run(tmp_path)
    RunFolder(tmp_path / "begun").create({"method": "fedavg"}, [])
    (tmp_path / "begun" / "metrics.jsonl").touch()
    run = open_run(tmp_path / "begun")
    assert repr(run) == f"Run({tmp_path / 'begun'}: no summary, models none)"
    assert run.history.empty
    with pytest.raises(UserError, match=re.escape("there is no model: has the run ended?")):
        run.model()


def test_history_has_scores_without_a_folder() -> None:
    result = polyphily.run("fedavg", polyphily.load("csbm:nodes=60", clients=2), rounds=2)
    assert result.history["received/test/accuracy"].notna().all()
