"""Clients on disk: the same results as in memory, and runs that were cut off go on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from polyphily.core.declarations import example_network
from polyphily.core.method import METHODS, create
from polyphily.core.settings import from_mapping
from polyphily.engines.drawn import DrawnSimulation, kept_for_all
from polyphily.engines.states import STATES, ClientStates
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation, load
from polyphily.runs.run import Execution, run

SMALL: dict[str, Any] = {"rounds": 3, "epochs": 2, "hidden": 4, "participation": 0.4}


@cache
def federation(clients: int = 9, seed: int = 0) -> Federation:
    return load("csbm:nodes=24-30,features=5", clients=clients, seed=seed)


def is_refused(name: str) -> bool:
    return bool(kept_for_all(create(name), example_network(create(name))))


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in records]


def assert_equal(a: Any, b: Any) -> None:
    assert without_times(a.records) == without_times(b.records)
    assert a.saved.keys() == b.saved.keys()
    for name, model in a.saved.items():
        for entry, value in model.tensors.items():
            assert torch.equal(value, b.saved[name].tensors[entry]), (name, entry)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_run_on_disk_equals_one_in_memory(name: str) -> None:
    if is_refused(name):
        with pytest.raises(UserError, match=r"--on-disk: the server of .* keeps something for"):
            run(name, federation(), on_disk=True, **SMALL)
        return
    assert_equal(
        run(name, federation(), on_disk=True, **SMALL),
        run(name, federation(), on_disk=False, **SMALL),
    )


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_server_keeps_nothing_that_grows_with_the_clients(name: str) -> None:
    """Check that what `kept_for_all` says of the initial state holds after rounds, too."""
    if is_refused(name):
        pytest.skip("its server needs all clients")
    shapes = []
    for clients in (8, 16):
        options = {**SMALL, "rounds": 2, "participation": 4 / clients, "on_disk": True}
        execution = Execution(create(name), [federation(clients)], from_mapping(options), None)
        execution.advance_to_the_end()
        shapes.append({n: tuple(t.shape) for n, t in execution.simulation.states[0].items()})
    assert shapes[0] == shapes[1]


def test_several_seeds_run_on_disk_side_by_side() -> None:
    both = [federation(), federation(7, seed=3)]
    assert_equal(
        run("moon", both, on_disk=True, **SMALL), run("moon", both, on_disk=False, **SMALL)
    )


def test_moments_that_are_kept_are_on_disk() -> None:
    options = {**SMALL, "keep_optimizer": True, "optimizer": "adam"}
    assert_equal(
        run("fedper", federation(), on_disk=True, **options),
        run("fedper", federation(), on_disk=False, **options),
    )


def test_only_a_sample_is_scored_and_training_is_the_same() -> None:
    few = run("fedavg", federation(), on_disk=True, scored_clients=3, **SMALL)
    every = run("fedavg", federation(), on_disk=False, **SMALL)
    assert len(few.summary["clients"]) == few.summary["scored_clients"] == 3
    assert few.summary["partition"]["clients"] == 9
    assert [r["loss"] for r in few.records] == [r["loss"] for r in every.records]
    last, other = few.model(which="last").params, every.model(which="last").params
    assert all(torch.equal(value, other[name]) for name, value in last.items())


def test_a_round_reads_the_graphs_of_those_drawn_alone(tmp_path: Path) -> None:
    data = load("csbm:nodes=24,features=5", clients=30, on_disk=True, root=tmp_path)
    options = {**SMALL, "participation": 0.1, "scored_clients": 2}
    execution = Execution(create("moon"), [data], from_mapping(options), None)
    simulation = execution.simulation
    assert isinstance(simulation, DrawnSimulation)
    assert len(simulation.cohort) == 2
    asked: list[int] = []
    graphs = data.clients
    read = type(graphs).__getitem__

    class Counting(type(graphs)):  # type: ignore[misc]
        def __getitem__(self, client: Any) -> Any:
            asked.append(client)
            return read(self, client)

    graphs.__class__ = Counting
    drawn = simulation.advance().selected[0]
    assert asked == drawn
    assert len(drawn) == 3


def interrupted(folder: Path, name: str, saved: int, more: int) -> None:
    """Train some rounds, write a checkpoint, train more rounds, and end without another one."""
    options = from_mapping({**SMALL, "rounds": 6, "on_disk": True})
    execution = Execution(create(name), [federation()], options, folder)
    assert execution.folder
    execution.folder.create(execution.config(), execution.federations)
    for _ in range(saved):
        execution.folder.append(execution._one_round())
    if saved:
        execution.checkpoint()
    for _ in range(more):
        execution.folder.append(execution._one_round())


@pytest.mark.parametrize(("saved", "more"), [(2, 2), (2, 0), (0, 3)])
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(
    saved: int, more: int, tmp_path: Path
) -> None:
    interrupted(tmp_path / "cut", "scaffold", saved, more)
    options = {**SMALL, "rounds": 6, "on_disk": True}
    again = Execution(create("scaffold"), [federation()], from_mapping(options), tmp_path / "cut")
    assert again.restore() == saved
    assert_equal(again.go(), run("scaffold", federation(), out=tmp_path / "whole", **options))
    assert not list((tmp_path / "cut").rglob("undo-*"))


def test_states_that_are_half_written_are_undone(tmp_path: Path) -> None:
    example = {"a": torch.zeros(1, 3), "n": torch.zeros(1, dtype=torch.int64)}
    states = ClientStates(tmp_path, 5, example)

    def new(rows: Any) -> Any:
        return {"a": torch.full((len(rows), 3), -1.0), "n": torch.zeros(len(rows)).long()}

    def read(found: ClientStates) -> list[float]:
        return found.read(range(5), new, torch.device("cpu"))["a"][:, 0].tolist()

    states.write([1, 3], {"a": torch.ones(2, 3), "n": torch.tensor([4, 5])})
    assert states.read([3], new, torch.device("cpu"))["n"].tolist() == [5]
    states.commit(7)
    states.write([3, 4], {"a": torch.full((2, 3), 2.0), "n": torch.tensor([6, 7])})
    states.write([3], {"a": torch.full((1, 3), 3.0), "n": torch.tensor([8])})
    assert read(states) == [-1, 1, -1, 3, 2]
    with next(tmp_path.glob("undo-7.bin")).open("ab") as stream:
        stream.write(b"cut")  # a kill in the middle of a copy
    reopened = ClientStates(tmp_path, 5, example)
    reopened.roll_back(7)
    assert read(reopened) == [-1, 1, -1, 1, -1]


def test_the_file_grows_with_the_clients_that_were_drawn(tmp_path: Path) -> None:
    example = {"a": torch.zeros(1, 1 << 16)}
    states = ClientStates(tmp_path, 1000, example)
    states.write([10, 500], {"a": torch.ones(2, 1 << 16)})
    stored = (tmp_path / STATES).stat().st_blocks * 512
    assert stored < 4 << 20 < (tmp_path / STATES).stat().st_size


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    ClientStates(tmp_path, 5, {"a": torch.zeros(1, 3)})
    with pytest.raises(UserError, match="another run wrote it"):
        ClientStates(tmp_path, 6, {"a": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"attack": "noise"}, "--attack"),
        ({"patience": 2, "selection": "client"}, "--patience with --selection client"),
    ],
)
def test_what_needs_all_clients_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=f"--on-disk does not go with {word}"):
        run("fedavg", federation(), on_disk=True, **SMALL, **options)


def test_patience_ends_a_run_on_disk() -> None:
    options = {**SMALL, "rounds": 30, "patience": 2, "lr": 1e-9}
    found = run("fedavg", federation(), on_disk=True, scored_clients=4, **options)
    assert found.summary["rounds"] == 3
