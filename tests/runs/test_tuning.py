"""Several rates in one pass are separate runs, and validation chooses among them."""

from __future__ import annotations

import pytest

import polyphily
from cases import small_federation, usual_backbone
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.errors import UserError
from polyphily.runs.tuning import parse_rates, side_by_side, tune

SETTINGS = {"rounds": 4, "epochs": 2, "backbone": "gcn", "hidden": 8}
RATES = [(0.001, 0.0), (0.1, 0.0), (0.1, 0.1)]


@pytest.mark.parametrize("name", ["fedavg", "fedath", "fedgsp", "scaffold"])
def test_trials_in_one_pass_are_separate_runs_to_the_bit(name: str) -> None:
    federation = small_federation()
    settings = {**SETTINGS, "backbone": usual_backbone(create(name))}
    trials, _ = side_by_side(create(name), [federation], from_mapping(settings), RATES)
    for trial, (lr, decay) in zip(trials, RATES, strict=True):
        alone = polyphily.run(name, federation, lr=lr, weight_decay=decay, **settings).summary
        for view, moments in trial.moments.items():
            assert moments[0] == alone["views"][view]["best_val"]


def test_some_clients_absent_keep_their_federations_rates() -> None:
    federation = small_federation()
    chosen = {**SETTINGS, "participation": 0.5, "rounds": 6}
    trials, _ = side_by_side(create("fedavg"), [federation], from_mapping(chosen), RATES)
    for trial, (lr, decay) in zip(trials, RATES, strict=True):
        alone = polyphily.run("fedavg", federation, lr=lr, weight_decay=decay, **chosen).summary
        moments = trial.moments["received"][0]
        assert moments["val"]["accuracy"] == pytest.approx(
            alone["views"]["received"]["best_val"]["val"]["accuracy"]
        )


def test_validation_chooses() -> None:
    wishes = {"lr": (1e-9, 0.05), "weight_decay": (0.0,)}
    found = tune(create("fedavg"), [small_federation((60, 60))], from_mapping(SETTINGS), wishes)
    scores = [trial.score("received", "accuracy") for trial in found.trials]
    assert found.best is found.trials[scores.index(max(scores))]
    assert [(trial.lr, trial.weight_decay) for trial in found.trials] == [(1e-9, 0), (0.05, 0)]


def test_what_is_not_asked_for_keeps_its_default() -> None:
    found = tune(
        create("fedavg"), [small_federation()], from_mapping(SETTINGS), {"weight_decay": (0.0, 0.1)}
    )
    assert {trial.lr for trial in found.trials} == {0.01}


def test_wishes_that_cannot_be() -> None:
    assert parse_rates(["weight-decay=0,1e-3"]) == {"weight_decay": (0.0, 0.001)}
    with pytest.raises(UserError, match="rate to tune"):
        parse_rates(["dropout=0.5"])
    with pytest.raises(UserError, match="write values"):
        parse_rates(["lr=fast"])
    with pytest.raises(UserError, match="lr"):
        tune(create("fedavg"), [small_federation()], from_mapping(SETTINGS), {"lr": (-1.0,)})
