"""The search: ranges, equal budgets, validation only, and going on after a stop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import polyphily
from cases import small_federation
from polyphily.core.local import Local
from polyphily.core.method import METHODS, check_effects, create, parameter, register
from polyphily.core.search import Choices, Range
from polyphily.core.settings import SEARCHED, from_mapping
from polyphily.errors import TrainingError, UserError
from polyphily.graphs.loading import Federation
from polyphily.methods.fedavg import FedAvg
from polyphily.runs import runner, searching
from polyphily.runs.folder import TUNING
from polyphily.runs.orders import Order, TuneRequest
from polyphily.runs.sampler import Sampler
from polyphily.runs.searching import (
    GRID,
    Standing,
    rate_grid,
    read_trials,
    search,
    search_space,
)
from polyphily.runs.trials import RateScores, Searched, SearchTrial
from polyphily.runtime.network import complete

TINY = {"rounds": 2, "backbone": "gcn"}
OPTIMUM = 3.0


@pytest.fixture(scope="module")
def federation() -> Federation:
    return small_federation((40, 30))


@pytest.fixture
def toys() -> Iterator[None]:
    """Register methods whose validation score depends on a hyperparameter."""
    with METHODS.restored():

        @register("planted", cite="none")
        @dataclass(frozen=True)
        class Planted(FedAvg):
            """Adds noise that grows with the distance of `lift` from the optimum."""

            lift: float = parameter(0.05, "…", search=Range(0.01, 10.0, log=True))

            def predict(self, local: Local) -> Tensor:
                logits = super().predict(local)
                noise = torch.sin(1e4 * torch.arange(logits.numel())).view_as(logits)
                return logits + 3 * abs(math.log10(self.lift / OPTIMUM)) * noise

        @register("explosive", cite="none")
        @dataclass(frozen=True)
        class Explosive(FedAvg):
            """Sends numbers that are not finite if `charge` is above 2."""

            charge: int = parameter(1, "…", search=Range(1, 4))

            def loss(self, local: Local) -> Tensor:
                return super().loss(local) * (math.inf if self.charge > 2 else 1.0)

        @register("picky", cite="none")
        @dataclass(frozen=True)
        class Picky(FedAvg):
            """Has a hyperparameter that some values of another make idle."""

            kind: str = parameter("a", "…", choices=("a", "b"), search=Choices("a", "b"))
            depth: int = parameter(1, "…", search=Range(1, 9))

            def without_effect(self) -> dict[str, str]:
                return {"depth": "kind is b"} if self.kind == "b" else {}

        yield


def plain(found: Searched) -> list[dict[str, Any]]:
    """Return the trials without their seconds."""
    return [{k: v for k, v in t.to_dict().items() if k != "seconds"} for t in found.trials]


# What is searched --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS))
@given(data=st.data())
@hypothesis_settings(max_examples=8, deadline=None)
def test_every_point_of_every_method_is_valid(name: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([{}, {"paper": True}]))
    space = search_space(name, form, {})
    point = {}
    for entry, found in space.items():
        if isinstance(found, Choices):
            point[entry] = data.draw(st.sampled_from(found.values))
        elif found.whole:
            point[entry] = data.draw(st.integers(int(found.low), int(found.high)))
        else:
            point[entry] = data.draw(st.floats(found.low, found.high))
    hyper = {n: v for n, v in point.items() if n not in SEARCHED}
    method = create(name, {**form, **hyper})
    check_effects(method, hyper)
    chosen = from_mapping({n: v for n, v in point.items() if n in SEARCHED})
    filled = complete(chosen, method, "homophilic", "accuracy")
    from polyphily.runtime.network import build_network

    build_network(method, filled, 6, 3, 0)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_sampler_stays_within_the_ranges_and_repeats_nothing(name: str) -> None:
    space = search_space(name, {}, {})
    start = create(name)
    defaults = {n: getattr(start, n, None) for n in space}
    defaults |= {"epochs": 3, "hidden": 64, "layers": 2, "dropout": 0.123456}
    sampler, seen = Sampler(space, defaults, 0), []
    for i in range(12):
        point = sampler.ask()
        assert all(point[n] in space[n] for n in space)
        assert point not in seen
        assert i or point == defaults == sampler._asked.params  # type: ignore[union-attr]
        seen.append(point)
        sampler.tell(None if i % 5 == 4 else i / 12)


def test_what_is_set_is_not_searched() -> None:
    assert set(search_space("fedprox", {}, {})) == {"mu", *SEARCHED}
    assert set(search_space("fedprox", {"mu": 1}, {"hidden": 8})) == {"epochs", "layers", "dropout"}
    assert "layers" not in search_space("fedavg", {}, {"sample": "5,5"})


def test_what_is_idle_or_off_in_the_chosen_form_is_not_searched() -> None:
    assert "epsilon1" not in search_space("gcfl", {}, {})
    assert "epsilon1" in search_space("gcfl", {"paper": "on"}, {})
    assert "leash" in search_space("fedgsp", {}, {})
    assert "leash" not in search_space("fedgsp", {"paper": "on"}, {})


def test_an_order_takes_what_its_search_chose() -> None:
    def trial(number: int, score: float) -> SearchTrial:
        pair = RateScores(0.1 * (number + 1), 0.0, {"received": [score]}, {"received": [1]})
        return SearchTrial(number, {"mu": float(number)}, {"hidden": 8 + number}, (pair,))

    found = Searched("fedprox", "received", "accuracy", [trial(0, 0.5), trial(1, 0.7)], {}, 2)
    order = Order("fedprox", {"weighting": "train"}, {}, (0,), {"rounds": 2}, tune=TuneRequest(2))
    chosen = runner.tuned(order, found)
    assert chosen.hyperparameters == {"weighting": "train", "mu": 1.0}
    assert chosen.settings == {"rounds": 2, "hidden": 9, "lr": 0.2, "weight_decay": 0.0}
    assert chosen.tune is None


def test_a_score_of_zero_is_better_than_a_failure() -> None:
    pair = RateScores(0.1, 0.0, {"received": [0.0]}, {"received": [1]})
    trials = [SearchTrial(0, {}, {}, failure="it diverged"), SearchTrial(1, {}, {}, (pair,))]
    assert Searched("fedprox", "received", "accuracy", trials, {}, 2).best.number == 1


def test_an_order_with_a_search_is_another_request() -> None:
    plain = Order("fedprox", {}, {}, (0,), {})
    orders = [
        plain,
        replace(plain, tune=TuneRequest(2)),
        replace(plain, tune=TuneRequest(3)),
        replace(plain, tune=TuneRequest(2), hyperparameters={"mu": 0.01}),
    ]
    assert len({json.dumps(order.request()) for order in orders}) == len(orders)


def test_values_that_have_no_effect_are_dropped_from_a_trial(
    toys: None, federation: Federation
) -> None:
    fixed = {**TINY, "epochs": 1, "hidden": 8, "layers": 2, "dropout": 0.5}
    found = search("picky", [federation], fixed, trials=12, rates={"lr": (0.01,)})
    kinds = {trial.hyperparameters["kind"] for trial in found.trials}
    assert kinds == {"a", "b"}
    for trial in found.trials:
        assert ("depth" in trial.hyperparameters) == (trial.hyperparameters["kind"] == "a")


# Rates -------------------------------------------------------------------------------------------


def test_the_grid_of_rates() -> None:
    def grid(rates: dict[str, Any], **settings: Any) -> list[tuple[float, float]]:
        filled = complete(from_mapping(settings), create("fedavg"), "synthetic", "accuracy")
        return rate_grid(rates, settings, filled)

    assert set(grid({})) == set(GRID)
    assert grid({})[0] == (0.01, 0.0)
    assert set(grid({}, lr=0.5)) == {(0.5, 0.0), (0.5, 5e-4)}
    assert grid({}, lr=0.5, weight_decay=0.1) == [(0.5, 0.1)]
    assert (0.3, 0.0) in grid({}, optimizer="sgd")
    assert grid({"lr": (0.1, 0.2)}) == [(0.1, 0.0), (0.2, 0.0)]
    with pytest.raises(UserError, match="lr"):
        grid({"lr": (-1.0,)})


def test_one_trial_tries_the_rates_alone(federation: Federation) -> None:
    found = search("fedprox", [federation], TINY, trials=1, rates={"lr": (1e-9, 0.05)})
    (trial,) = found.trials
    assert trial.values == {}
    assert [pair.lr for pair in trial.rates] == [1e-9, 0.05]
    scores = [pair.score(found.view) for pair in trial.rates]
    assert found.options == {"lr": [1e-9, 0.05][scores.index(max(scores))], "weight_decay": 0.0}  # type: ignore[type-var]


# The search --------------------------------------------------------------------------------------


def test_a_planted_optimum_is_found(toys: None) -> None:
    federation = polyphily.load("csbm:nodes=120,features=16", clients=2, seed=0)
    fixed = {**TINY, "rounds": 8, "epochs": 3, "hidden": 16, "layers": 2, "dropout": 0.1}
    found = search("planted", [federation], fixed, trials=12, rates={"lr": (0.03,)})
    assert len(found.trials) == 12
    default = found.trials[0].score(found.view)
    assert default is not None
    assert found.score > default + 0.1
    assert abs(math.log10(found.hyperparameters["lift"] / OPTIMUM)) < 0.5


def test_the_first_trial_has_the_defaults_and_every_method_gets_as_many(
    federation: Federation,
) -> None:
    for name in ("local", "fedprox", "s2fgl"):
        found = search(name, [federation], TINY, trials=3, rates={"lr": (0.01,)})
        assert len(found.trials) == 3
        first = found.trials[0]
        assert first.hyperparameters == {n: getattr(create(name), n) for n in first.hyperparameters}
        assert first.settings == {"epochs": 3, "hidden": 64, "layers": 2, "dropout": 0.5}


def test_a_trial_is_a_run(federation: Federation) -> None:
    federations = [federation, small_federation((40, 30), seed=1)]
    found = search("fedprox", federations, TINY, trials=3)
    for trial in found.trials:
        for pair in trial.rates:
            rates = {"lr": pair.lr, "weight_decay": pair.weight_decay}
            summary = polyphily.run("fedprox", federations, **TINY, **trial.values, **rates).summary
            for view, scores in pair.val.items():
                runs = [run["views"][view]["best_val"] for run in summary["per_seed"]]
                assert list(scores) == pytest.approx([run["val"]["accuracy"] for run in runs])
                assert list(pair.round[view]) == [run["round"] for run in runs]


def test_test_labels_change_nothing_and_are_not_kept(
    federation: Federation, tmp_path: Path
) -> None:
    def scrambled(other: Federation) -> Federation:
        clients = []
        for graph in other.clients:
            assert graph.masks is not None
            moved = (graph.labels + 1) % len(other.classes)
            labels = np.where(graph.masks.test, moved, graph.labels)
            clients.append(replace(graph, labels=labels))
        return replace(other, clients=tuple(clients))

    first = search("fedprox", [federation], TINY, trials=4, folder=tmp_path)
    second = search("fedprox", [scrambled(federation)], TINY, trials=4)
    assert plain(first) == plain(second)
    assert "test" not in (tmp_path / TUNING).read_text(encoding="utf-8")


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search("fedprox", [federation], TINY, trials=8)
    search("fedprox", [federation], TINY, trials=8, folder=tmp_path)
    file = tmp_path / TUNING
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 9
    file.write_text("\n".join(lines[:5]) + "\n" + lines[5][:30], encoding="utf-8")  # a kill
    trained = []
    train = searching._Study._train
    monkeypatch.setattr(
        searching._Study, "_train", lambda *given: trained.append(given[1]) or train(*given)
    )
    resumed = search("fedprox", [federation], TINY, trials=8, folder=tmp_path)
    assert trained == [4, 5, 6, 7]
    assert plain(resumed) == plain(whole)
    assert read_trials(tmp_path) == list(resumed.trials)
    trained.clear()
    more = search("fedprox", [federation], TINY, trials=9, folder=tmp_path)
    assert trained == [8]
    assert plain(more)[:8] == plain(whole)


def test_trials_of_another_search_are_set_aside(federation: Federation, tmp_path: Path) -> None:
    search("fedavg", [federation], TINY, trials=2, folder=tmp_path)
    before = (tmp_path / TUNING).read_text(encoding="utf-8")
    found = search("fedavg", [federation], {**TINY, "rounds": 3}, trials=2, folder=tmp_path)
    assert "another search" in found.notes[0]
    assert (tmp_path / f"{TUNING}.before-1").read_text(encoding="utf-8") == before
    assert len(read_trials(tmp_path)) == 2


def test_fewer_trials_if_there_are_fewer_different_ones(federation: Federation) -> None:
    fixed = {**TINY, "hidden": 8, "layers": 2, "dropout": 0.5}
    found = search("fedavg", [federation], fixed, trials=9, rates={"lr": (0.01,)})
    assert sorted(trial.settings["epochs"] for trial in found.trials) == [1, 2, 3, 4, 5]
    assert "5 of 9 trials" in found.notes[0]
    nothing = search("fedavg", [federation], {**fixed, "epochs": 1}, trials=9)
    assert [trial.values for trial in nothing.trials] == [{}]
    assert "1 of 9 trials" in nothing.notes[0]


# Failures ----------------------------------------------------------------------------------------


def test_a_trial_that_fails_is_kept_and_the_rest_goes_on(
    toys: None, federation: Federation, tmp_path: Path
) -> None:
    fixed = {**TINY, "epochs": 1, "hidden": 8, "layers": 2, "dropout": 0.5}
    found = search("explosive", [federation], fixed, trials=4, folder=tmp_path)
    failed = {trial.hyperparameters["charge"] for trial in found.trials if trial.failure}
    assert failed == {3, 4}
    assert found.hyperparameters["charge"] in (1, 2)
    assert [bool(t.failure) for t in found.ranked()] == [False, False, True, True]
    kept = [json.loads(line) for line in (tmp_path / TUNING).read_text("utf-8").splitlines()]
    assert sum("finite" in line.get("failed", "") for line in kept) == 2
    assert plain(search("explosive", [federation], fixed, trials=4, folder=tmp_path)) == plain(
        found
    )
    with pytest.raises(TrainingError, match="every trial failed"):
        search("explosive", [federation], fixed, {"charge": 4}, trials=2)


def test_rates_that_diverge_leave_the_others_alone(federation: Federation) -> None:
    fixed = {**TINY, "optimizer": "sgd", "rounds": 12}
    wide = search("fedavg", [federation], fixed, trials=1, rates={"lr": (0.1, 1e30, 0.2)})
    (trial,) = wide.trials
    assert [bool(pair.failure) for pair in trial.rates] == [False, True, False]
    alone = search("fedavg", [federation], fixed, trials=1, rates={"lr": (0.1, 0.2)})
    assert plain(alone)[0]["rates"] == [r for r in plain(wide)[0]["rates"] if "failed" not in r]
    assert wide.settings["lr"] in (0.1, 0.2)


def test_a_request_that_is_impossible_is_refused_at_once(federation: Federation) -> None:
    with pytest.raises(UserError, match="heads"):
        search("fedavg", [federation], {"rounds": 2, "backbone": "gat", "hidden": 9}, trials=3)
    with pytest.raises(UserError, match="unknown method"):
        search("fedavgg", [federation], TINY, trials=3)


def test_lack_of_memory_is_a_failed_trial(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = searching._Study._train

    def starved(study: Any, number: int, *rest: Any) -> Any:
        if number == 1:
            raise torch.OutOfMemoryError("too large")
        return train(study, number, *rest)

    monkeypatch.setattr(searching._Study, "_train", starved)
    found = search("fedavg", [federation], TINY, trials=3, rates={"lr": (0.01,)})
    assert [trial.failure for trial in found.trials] == ["", "there was not enough memory", ""]


def test_rates_that_do_not_fit_into_memory_together_train_in_several_passes(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"lr": (0.01, 0.03, 0.1)}
    once: list[int] = []
    passes: list[int] = []

    def keep(found: list[int]) -> Any:
        return lambda number, execution: found.append(len(execution.federations))

    whole = search("fedavg", [federation], TINY, trials=2, rates=rates, trained=keep(once))
    joined = searching.stacked

    def scarce(method: Any, federations: Any, settings: Any, pairs: Any, **rest: Any) -> Any:
        if len(pairs) > 1:
            raise torch.OutOfMemoryError("too large")
        return joined(method, federations, settings, pairs, **rest)

    monkeypatch.setattr(searching, "stacked", scarce)
    parts = search("fedavg", [federation], TINY, trials=2, rates=rates, trained=keep(passes))
    assert plain(parts) == plain(whole)
    assert (once, passes) == ([3, 3], [1] * 6)


# Requests and progress ---------------------------------------------------------------------------


def test_what_the_user_may_ask_for() -> None:
    assert TuneRequest.parse(["20"]) == TuneRequest(20)
    assert TuneRequest.parse(["lr=0.1,0.2"]) == TuneRequest(1, {"lr": (0.1, 0.2)})
    both = TuneRequest(5, {"lr": (0.1,), "weight_decay": (0.0,)})
    assert TuneRequest.parse(["weight-decay=0", "5", "lr=0.1"]) == both
    for wrong in (["0"], ["-3"], ["x"], ["1.5"], [""], ["3", "4"], ["lr=x"], ["mu=1"]):
        with pytest.raises(UserError):
            TuneRequest.parse(wrong)
    for number in (0, -1, 2.5, True):
        with pytest.raises(UserError):
            TuneRequest(number)  # type: ignore[arg-type]
    for rates in ({"mu": (1.0,)}, {"lr": ()}):
        with pytest.raises(UserError):
            TuneRequest(3, rates)


def test_progress_is_reported(federation: Federation) -> None:
    seen: list[Standing] = []
    found = search(
        "fedavg", [federation], TINY, trials=2, rates={"lr": (0.01,)}, report=seen.append
    )
    assert [(s.trial, s.trials, s.round, s.rounds) for s in seen] == [
        (trial, 2, round_, 2) for trial in (1, 2) for round_ in (0, 1, 2)
    ]
    assert seen[0].best is None
    assert seen[-1].best == found.trials[0].score(found.view)
    assert plain(search("fedavg", [federation], TINY, trials=2, rates={"lr": (0.01,)})) == plain(
        found
    )
