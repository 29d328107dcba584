"""The round loop: who takes part, what is refused, what is counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch

import polyphily
from cases import assert_close, assert_same_bits, simulate, small_federation
from polyphily.core.local import Local
from polyphily.core.messages import Message, model_part
from polyphily.core.method import create
from polyphily.core.optimizers import STEPS
from polyphily.engines.backends import Answers, _join, _room
from polyphily.engines.simulation import Simulation
from polyphily.errors import TrainingError, UserError
from polyphily.graphs.loading import Federation
from polyphily.methods.fedavg import FedAvg
from polyphily.runtime.client import Trained
from polyphily.runtime.server import RoundPlan


@dataclass(frozen=True)
class Poisoned(FedAvg):
    """FedAvg in which some clients' updates become NaN from a round on."""

    clients: tuple[int, ...] = (1,)
    start: int = 1

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if local.round_index < self.start:
            return sent
        spoiled = torch.tensor([key[1] in self.clients for key in local.cohort.keys])
        name = "model/convs.0.weight"
        sent[name] = torch.where(spoiled.view(-1, 1, 1), torch.nan, sent[name])
        return sent


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_a_client_that_sends_nan_is_left_out_and_named(engine: str) -> None:
    federation = small_federation()
    simulation = simulate(Poisoned(), federation, 1, engine=engine)
    before = {n: t.clone() for n, t in simulation.memory.items()}
    report = simulation.advance()
    assert report.refused == [[1]]
    mean = model_part(simulation.states[0])["convs.1.weight"]
    model = model_part(simulation.memory)["convs.1.weight"]
    others = [0, 2, 3]
    sizes = torch.tensor([federation.clients[k].num_nodes for k in others]).double()
    expected = torch.einsum("k,kio->io", sizes / sizes.sum(), model[others])
    torch.testing.assert_close(mean, expected)
    for name, value in simulation.memory.items():
        assert torch.equal(value[1], before[name][1]), "a refused client keeps its memory"
    assert all(t.isfinite().all() for t in simulation.tensors().values())


def test_all_clients_non_finite_is_an_error_that_keeps_the_last_good_model() -> None:
    simulation = simulate(Poisoned(clients=(0, 1, 2, 3), start=2), small_federation(), 2)
    good = {n: t.clone() for n, t in simulation.tensors().items()}
    with pytest.raises(TrainingError, match=r"round 3.*every client"):
        simulation.advance()
    assert simulation.round == 2
    assert_same_bits(good, simulation.tensors())


def test_a_diverging_learning_rate_is_caught() -> None:
    simulation = simulate("fedavg", small_federation(), 0, optimizer="sgd", lr=1e200)
    with pytest.raises(TrainingError, match="not finite"):
        simulation.advance()


@pytest.mark.parametrize(("share", "count"), [(1.0, 8), (0.3, 2), (0.01, 1), (0.5, 4)])
def test_participation_selects_a_share_anew_each_round(share: float, count: int) -> None:
    simulation = simulate("fedavg", small_federation((5,) * 8), 0, participation=share)
    rounds = [simulation.advance().selected[0] for _ in range(6)]
    assert all(len(chosen) == count for chosen in rounds)
    assert (len({tuple(chosen) for chosen in rounds}) > 1) == (share < 1)
    again = simulate("fedavg", small_federation((5,) * 8), 0, participation=share)
    assert [again.advance().selected[0] for _ in range(6)] == rounds


def test_failures_take_a_share_of_the_selected_and_leave_their_memory() -> None:
    simulation = simulate("fedavg", small_federation((5,) * 8), 1, failures=0.25)
    before = {n: t.clone() for n, t in simulation.memory.items()}
    report = simulation.advance()
    failed = report.failed[0]
    assert len(failed) == 2
    for name, value in simulation.memory.items():
        assert torch.equal(value[failed], before[name][failed])
    assert report.bytes_up[0] == report.bytes_down[0] // 8 * 6 + 6 * 8


def test_bytes_are_those_of_the_tensors() -> None:
    simulation = simulate("fedavg", small_federation(), 0, dtype="float32")
    report = simulation.advance()
    parameters = 6 * 8 + 8 + 8 * 3 + 3
    assert report.bytes_down == [4 * 4 * parameters]
    assert report.bytes_up == [4 * 4 * (parameters + 1)]


def test_uneven_epochs_stop_each_client_after_its_own_steps() -> None:
    federation = small_federation()
    simulation = simulate("local", federation, 0, epochs="1-6")
    steps = simulation.clients.steps(simulation.round)
    assert len(set(steps)) > 1
    simulation.advance()
    for k, count in enumerate(steps):
        alone = simulate("local", federation, 1, epochs=count)
        for name, value in simulation.memory.items():
            torch.testing.assert_close(value[k], alone.memory[name][k])


def test_kept_moments_change_the_next_round() -> None:
    federation = small_federation()
    kept = simulate("local", federation, 2, keep_optimizer=True, epochs=3)
    fresh = simulate("local", federation, 2, keep_optimizer=False, epochs=3)
    longer = simulate("local", federation, 1, keep_optimizer=False, epochs=6)
    for name, value in model_part(kept.memory).items():
        torch.testing.assert_close(value, model_part(longer.memory)[name])
        assert not torch.allclose(value, model_part(fresh.memory)[name])


def test_a_stopped_client_takes_no_part() -> None:
    simulation = simulate("local", small_federation(), 1)
    simulation.stopped = {2}
    before = simulation.memory["model/convs.0.weight"].clone()
    assert simulation.advance().selected == [[0, 1, 3]]
    moved = (simulation.memory["model/convs.0.weight"] != before).flatten(1).any(dim=1)
    assert moved.tolist() == [True, True, False, True]


def test_groups_that_fit_into_memory_train_to_the_same_numbers() -> None:
    federation = small_federation((9, 12, 7, 20, 5))
    chosen = {"dropout": 0.5, "keep_optimizer": True}
    whole = simulate("scaffold", federation, 3, **chosen)
    assert whole.groups.split(range(5)) == [range(5)]
    tight = simulate("scaffold", federation, 0, **chosen)
    tight.groups.budget = 2 * tight.groups._bytes_to_train[0]
    assert len(tight.groups.split(range(5))) > 1
    for _ in range(3):
        tight.advance()
    assert_close(whole.tensors(), tight.tensors(), 1e-12)
    for view in ("received", "trained"):
        found, expected = (s.predict(getattr(s, view)()) for s in (tight, whole))
        torch.testing.assert_close(found, expected)
    assert "x" not in vars(tight.cohort), "all clients' features were laid side by side"


@pytest.mark.parametrize(("room", "sizes"), [(0.5, [5, 5, 5]), (2.1, [10, 5]), (3.1, [15])])
def test_federations_that_do_not_fit_the_cache_train_one_after_the_other(
    room: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    federations = [small_federation((9, 12, 7, 20, 5), seed=seed) for seed in range(3)]
    chosen = {"dropout": 0.5, "keep_optimizer": True}
    alone = simulate("scaffold", federations[1], 3, **chosen)
    each = sum(alone.groups._bytes_to_train)
    monkeypatch.setattr("polyphily.engines.memory.cache_size", lambda: int(room * each))
    found = simulate("scaffold", federations, 3, **chosen)
    assert [len(group) for group in found.groups.split(range(15))] == sizes
    relative = 0.0 if len(sizes) == 3 else 1e-12  # beside others, last digits may differ
    own = {n: t[5:10] for n, t in found.memory.items()}
    assert_close(alone.memory, own, relative)
    assert_close(alone.states[0], found.states[1], relative)
    assert alone.groups.split(range(5)) == [range(5)], "one federation is never divided"


def test_consecutive_parts_are_joined_without_a_copy() -> None:
    whole = torch.arange(12.0).view(6, 2)
    joined = _join([whole[1:3], whole[3:4], whole[4:]])
    assert joined.data_ptr() == whole[1:].data_ptr()
    assert torch.equal(joined, whole[1:])
    for parts in ([whole[:2], whole[3:]], [whole[2:], whole[:2]], [whole[:2], whole[2:].clone()]):
        joined = _join(parts)
        assert torch.equal(joined, torch.cat(parts))
        assert joined.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("keep", [True, False])
def test_parameters_and_moments_of_all_groups_are_in_one_tensor(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[Message] = []

    def noted(memory: Message, clients: int) -> Message:
        rooms.append(_room(memory, clients))
        return rooms[-1]

    monkeypatch.setattr("polyphily.engines.backends._room", noted)
    monkeypatch.setattr("polyphily.engines.memory.cache_size", lambda: 1)
    federations = [small_federation(seed=seed) for seed in range(2)]
    simulation = simulate("fedavg", federations, 2, keep_optimizer=keep)
    assert any("mean" in name for name in rooms[1]) is keep
    for name, place in rooms[1].items():
        if name != STEPS:  # counted anew
            assert simulation.memory[name].data_ptr() == place.data_ptr(), name


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8e9), ("500 mb", 5e8), ("1.5g", 1.5e9), ("20000", 2e4)]
)
def test_the_memory_of_training_may_be_bounded(text: str, size: float) -> None:
    simulation = simulate("fedavg", small_federation((9, 12, 7)), 0, memory=text)
    assert simulation.groups.budget == size


@pytest.mark.parametrize("text", ["much", "0GB", "-1GB", "8PB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write 8GB"):
        polyphily.Settings(memory=text).check()


def test_a_round_in_which_nobody_answers_changes_nothing() -> None:
    simulation = simulate("fedavg", small_federation((6, 7)), 1, participation=0.5, failures=0.9)
    before = {n: t.clone() for n, t in simulation.tensors().items()}
    report = simulation.advance()
    assert report.failed == report.selected
    assert report.bytes_up == [0]
    assert report.loss == [None]
    assert_same_bits(before, simulation.tensors())


def test_numbers_too_large_for_a_sum_are_finite_all_the_same() -> None:
    huge = torch.full((2, 4), 3e38)
    huge[1, 2] = torch.inf
    answers = Answers.of(Trained({"w": huge}, {}, torch.zeros(2)))
    assert answers.look()[0] == [True, False]


@pytest.mark.parametrize("method", ["fedproto", "s2fgl"])
def test_a_federation_that_nobody_answered_runs_beside_one_that_was(method: str) -> None:
    """Its server has no prototypes yet, the other one has."""
    federations = [small_federation(seed=seed) for seed in (1, 2)]
    made = create(method, {"warm_up": 0, "ramp": 1} if method == "s2fgl" else {})

    def run(own: list[Federation], silent: int) -> Simulation:
        simulation = simulate(made, own, 0)
        usual = simulation.servers[silent].plan

        def plan(round_index: int, stopped: Collection[int] = ()) -> RoundPlan:
            found = usual(round_index, stopped)
            return found if round_index else RoundPlan(found.asked, found.asked, [])

        simulation.servers[silent].plan = plan  # type: ignore[method-assign]
        for _ in range(3):
            simulation.advance()
        return simulation

    together, alone = run(federations, 1), run(federations[1:], 0)
    rows = slice(together.starts[1], together.starts[2])
    assert_close({n: t[rows] for n, t in together.memory.items()}, alone.memory, 1e-9)
    assert_close(together.states[1], alone.states[0], 1e-9)
