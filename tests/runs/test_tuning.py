"""Several rates in one pass are separate runs."""

from __future__ import annotations

import pytest

import polyphily
from cases import small_federation, usual_backbone
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.errors import UserError
from polyphily.runs.orders import parse_rates
from polyphily.runs.tuning import side_by_side

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


def test_wishes_that_cannot_be() -> None:
    assert parse_rates(["weight-decay=0,1e-3"]) == {"weight_decay": (0.0, 0.001)}
    with pytest.raises(UserError, match="rate to tune"):
        parse_rates(["dropout=0.5"])
    with pytest.raises(UserError, match="write values"):
        parse_rates(["lr=fast"])
