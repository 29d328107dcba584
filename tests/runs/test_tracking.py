"""Logging to trackers: what arrives is what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyphily.errors import UserError
from polyphily.runs.tracking import SINKS, ClientScores, Log, check_trackers, scalars
from report.stories import DATA, call


class Memory:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []

    def log(self, values: Any, step: int) -> None:
        self.steps.append((step, dict(values)))

    def close(self, failed: bool) -> None: ...


def test_a_log_sends_rounds_and_the_outcome() -> None:
    sink = Memory()
    log = Log([sink])
    record = {"loss": None, "seconds": 0.5, "trained": {"val": {"accuracy": 0.5, "auc": None}}}
    log.round({"round": 7, **record})
    summary = {"best_val": {"test": {"accuracy": 0.25}}}
    assert log.finish(summary) is summary
    assert sink.steps == [
        (7, {"cost/seconds": 0.5, "trained/val/accuracy": 0.5}),
        (7, {"best_val/test/accuracy": 0.25}),
    ]


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from polyphily.runs.folder import RunFolder

    out = tmp_path / "r"
    assert (
        call("run", "fedavg", *DATA, "--rounds", "3", "--track", "tensorboard", "--out", out) == 0
    )
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    records = RunFolder(out).records()
    assert set(scalars(records[0])) <= set(events.Tags()["scalars"])
    for name in ("loss", "received/test/accuracy"):
        logged = events.Scalars(name)
        assert [event.step for event in logged] == [1, 2, 3]
        wanted = [scalars(record)[name] for record in records]
        assert [event.value for event in logged] == pytest.approx(wanted, rel=1e-6)
    for client in range(3):
        logged = events.Scalars(f"clients test accuracy/client-{client}")
        wanted = [r["received"]["test"]["accuracy_per_client"][client] for r in records]
        assert [event.value for event in logged] == pytest.approx(wanted, rel=1e-6)


def test_scores_of_clients_have_one_group_and_names_that_trackers_take() -> None:
    known = ClientScores(["bank north/1", "b:2", "c"], "trained", "auc")
    scores = {"val": {"auc": 0.5, "auc_per_client": [0.25, None, 0.75]}}
    record = {"round": 1, "trained": scores, "received": {"val": {"auc_per_client": [1, 1, 1]}}}
    assert scalars(record, known) == {
        "trained/val/auc": 0.5,
        "clients val auc/bank-north-1": 0.25,
        "clients val auc/c": 0.75,
    }


def test_mlflow_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    assert call("run", "fedavg", *DATA, "--rounds", "3", "--track", "mlflow", "--out", "r") == 0
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'polyphily'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "fedavg"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]


def test_wandb_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert call("run", "fedavg", *DATA, "--rounds", "3", "--track", "wandb", "--out", "r") == 0
    (file,) = Path("r").rglob("*.wandb")
    assert b"received/test/accuracy" in file.read_bytes()


def test_an_unknown_tracker_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert (
        call("run", "fedavg", *DATA, "--rounds", "1", "--track", "tensorbored", "--out", out) == 2
    )
    assert "did you mean 'tensorboard'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", SINKS)
def test_an_absent_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyphily.runs.tracking.find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"polyphily\[{name}\]"):
        check_trackers([name])
