"""Runs in one pass leave what they would have left alone: every file, every number, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cases import simulate, small_federation
from polyphily.core.messages import Message
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.errors import Diverged
from polyphily.graphs.loading import Federation
from polyphily.runs.folder import CONFIG, RunFolder
from polyphily.runs.run import Execution
from polyphily.runs.together import Together

SETTINGS: dict[str, Any] = {"rounds": 6, "epochs": 2, "backbone": "gcn", "hidden": 8}
RATES = [(0.001, 0.0), (0.1, 0.0), (0.1, 0.1)]
COSTS = {"seconds", "seconds_evaluation", "seconds_per_round_median", "seconds_evaluation_median"}
COSTS |= {"setup_seconds", "peak_memory_mb"}


def executions(
    place: Path, method: str, federations: Sequence[Federation], **settings: Any
) -> list[Execution]:
    """A run with each of the rates, ready to go."""
    found = []
    for i, (lr, decay) in enumerate(settings.pop("rates", RATES)):
        chosen = from_mapping({**SETTINGS, **settings, "lr": lr, "weight_decay": decay})
        found.append(Execution(create(method), federations, chosen, place / str(i)))
        RunFolder(place / str(i)).create(found[-1].config(), federations)
    return found


def go(runs: Sequence[Execution]) -> list[Execution]:
    """All in one pass; those that have ended."""
    return [run for run, _ in Together(runs).go([lambda _: None] * len(runs))]


def without_costs(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in COSTS}


def raw(tensors: Message) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_same_folders(one: Path, other: Path) -> None:
    """Everything but what was measured of time and memory is equal."""
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (one, other)]
    assert files[0] == files[1]
    first, second = RunFolder(one), RunFolder(other)
    texts = [(folder / CONFIG).read_text(encoding="utf-8") for folder in (one, other)]
    assert texts[0] == texts[1]
    records = [list(map(without_costs, folder.records())) for folder in (first, second)]
    assert records[0] == records[1]
    summaries = [without_costs(folder.read_summary() or {}) for folder in (first, second)]
    assert summaries[0] == summaries[1]
    saved = [folder.load_checkpoint() for folder in (first, second)]
    assert saved[0] is not None
    assert saved[1] is not None
    assert without_costs(saved[0][1]) == without_costs(saved[1][1])
    assert raw(saved[0][0]) == raw(saved[1][0])
    for file in (one / "models").iterdir():
        assert file.read_bytes() == (other / "models" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"patience": 4, "rounds": 20}),
        ("fedavg", {"dp": "epsilon=8", "clip": 1.0}),
        ("fedgsp", {"patience": 4, "rounds": 20, "keep_optimizer": True, "backbone": "unifilter"}),
        ("fedper", {"selection": "client", "patience": 4, "rounds": 20, "evaluate_every": 2}),
        ("fedproto", {"participation": 0.5, "failures": 0.4, "epochs": "1-3"}),
        ("fedopt", {"backbone": "gat", "sample": "3,3"}),
        ("scaffold", {"patience": 4, "rounds": 20}),
    ],
)
def test_a_pass_leaves_the_folders_of_separate_runs(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    if "dp" in settings:
        pytest.importorskip("dp_accounting")
    federations = [small_federation(seed=seed) for seed in (0, 1)]
    for run in executions(tmp_path / "alone", method, federations, **settings):
        run.go()
    runs = executions(tmp_path / "together", method, federations, **settings)
    assert sorted(map(runs.index, go(runs))) == [0, 1, 2]
    for i in range(len(RATES)):
        assert_same_folders(tmp_path / "alone" / str(i), tmp_path / "together" / str(i))
    if "patience" in settings:  # one goes on after another has stopped
        assert len({len(run.reports) for run in runs}) > 1


def test_a_run_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    federations = [small_federation(seed=seed) for seed in (0, 1)]
    wild = {"rates": [(0.01, 0.0), (1e13, 0.0), (0.1, 0.0)], "optimizer": "sgd"}
    alone = executions(tmp_path / "alone", "fedavg", federations, **wild)
    alone[0].go()
    alone[2].go()
    with pytest.raises(Diverged):
        alone[1].go()
    assert alone[1].simulation.round > 0
    together = executions(tmp_path / "together", "fedavg", federations, **wild)
    assert sorted(map(together.index, go(together))) == [0, 2]
    for i in (0, 2):
        assert_same_folders(tmp_path / "alone" / str(i), tmp_path / "together" / str(i))
    saved = [RunFolder(tmp_path / name / "1").load_checkpoint() for name in ("alone", "together")]
    assert saved[0] is not None
    assert saved[1] is not None
    assert raw(saved[0][0]) == raw(saved[1][0])
    assert RunFolder(tmp_path / "together" / "1").read_summary() is None


def test_updates_that_are_refused_are_those_of_one_run(tmp_path: Path) -> None:
    wild = {"rates": [(0.01, 0.0), (1e12, 0.0), (0.1, 0.0)], "optimizer": "sgd"}
    for run in executions(tmp_path / "alone", "fedper", [small_federation()], **wild):
        run.go()
    runs = executions(tmp_path / "together", "fedper", [small_federation()], **wild)
    go(runs)
    for i in range(len(runs)):
        assert_same_folders(tmp_path / "alone" / str(i), tmp_path / "together" / str(i))
    refused = [sum(len(record["refused"]) for record in run.reports) for run in runs]
    assert refused[1] > 0
    assert refused[0] == refused[2] == 0


@pytest.mark.parametrize("method", ["fedper", "scaffold"])
def test_a_pass_that_was_stopped_goes_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyphily.runs.folder.SHARE", math.inf)  # a checkpoint every round
    federations = [small_federation(seed=seed) for seed in (0, 1)]
    settings = {"patience": 3, "rounds": 20, "selection": "client", "keep_optimizer": True}
    for run in executions(tmp_path / "alone", method, federations, **settings):
        run.go()
    runs = executions(tmp_path / "together", method, federations, **settings)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Together(runs).go([stop] * len(runs))
    resumed = [
        Execution(run.method, federations, run.settings, tmp_path / "together" / str(i))
        for i, run in enumerate(runs)
    ]
    assert [run.restore() for run in resumed] == [4, 4, 4]
    assert all(run.simulation.stopped for run in resumed)  # some of the clients
    assert len(go(resumed)) == len(runs)
    for i in range(len(RATES)):
        assert_same_folders(tmp_path / "alone" / str(i), tmp_path / "together" / str(i))


def test_the_time_of_a_round_is_shared_out(tmp_path: Path) -> None:
    runs = executions(tmp_path, "fedavg", [small_federation()])
    group = Together(runs)
    group.go([lambda _: None] * len(runs))
    for r, joint in enumerate(group.joint.reports):
        for name in ("seconds", "seconds_evaluation"):
            shares = [run.reports[r][name] for run in runs]
            assert sum(shares) == pytest.approx(joint[name])
            assert len(set(shares)) == 1


def test_only_what_fits_trains_in_one_group() -> None:
    federation = small_federation()
    alone = simulate("fedavg", federation)
    for room, memory in ((1, 1), (1, 1.9), (3, 3.5)):
        limited = simulate("fedavg", federation, memory=str(int(memory * needed(alone))))
        assert limited.groups.room == room


def needed(simulation: Simulation) -> int:
    """The least memory with which all clients train together, by bisection."""
    low, high = 1, 1 << 40
    while low < high:
        middle = (low + high) // 2
        simulation.groups.budget = middle
        if len(simulation.groups.split(range(simulation.starts[-1]))) == 1:
            high = middle
        else:
            low = middle + 1
    return low
