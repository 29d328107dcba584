"""What recipes fill in for a backbone: by kind of data, for all kinds, and the depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import polyphily
from polyphily.core.recipes import DENSE, USUAL, fill
from polyphily.core.settings import SEARCHED, Settings
from polyphily.nn.backbones import BACKBONES, GCN, Backbone, register_backbone
from polyphily.runs.searching import read_trials
from polyphily.testing.examples import small_federation

KINDS = ("homophilic", "heterophilic", "synthetic", "fraud", "files")


@pytest.fixture
def deep_gcn() -> Iterator[type[Backbone]]:
    @register_backbone("deep-gcn")
    class DeepGCN(GCN):
        """A GCN that serves best with five layers, on fraud with three and a rate of its own."""

        defaults: ClassVar = {"all": {"layers": 5}, "fraud": {"layers": 3, "lr": 0.25}}

    yield DeepGCN
    del BACKBONES._entries["deep-gcn"]


def filled(kind: str, *, dense: bool = False, **options: Any) -> Settings:
    return fill(Settings(**options), kind, "accuracy", dense=dense)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_usual_depth_is_two(kind: str, dense: bool) -> None:
    for name in {"gcn", "mlp", "gat", "acm-gcn", "gpr-gnn", "unifilter", "disengcn"}:
        assert filled(kind, dense=dense, backbone=name).layers == 2
    assert filled(kind, dense=dense).layers == 2


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["res-gcn", "res-sage", "res-gat", "res-acm"])
def test_residual_backbones_are_deeper_whatever_the_data(name: str, dense: bool) -> None:
    usual = fill(Settings(backbone="gcn"), "files", "accuracy", dense=dense)
    for kind in KINDS:
        found = filled(kind, dense=dense, backbone=name)
        assert found == replace(usual, backbone=name, layers=5)
        assert filled(kind, dense=dense, backbone=name, layers=2).layers == 2


@pytest.mark.usefixtures("deep_gcn")
def test_defaults_for_all_kinds_hold_for_every_kind_without_its_own() -> None:
    for kind in KINDS:
        deep = filled(kind, backbone="deep-gcn")
        assert (deep.layers, deep.lr) == ((3, 0.25) if kind == "fraud" else (5, USUAL.lr))
        assert filled(kind, backbone="deep-gcn", layers=7).layers == 7


@pytest.mark.usefixtures("deep_gcn")
def test_defaults_for_all_kinds_leave_those_of_dense_features() -> None:
    deep = filled("files", dense=True, backbone="deep-gcn")
    assert (deep.layers, deep.input_dropout) == (5, DENSE.input_dropout)
    own = filled("fraud", dense=True, backbone="deep-gcn")
    assert (own.layers, own.input_dropout) == (3, USUAL.input_dropout)


@pytest.mark.usefixtures("deep_gcn")
def test_a_run_has_the_depth_of_its_backbone(tmp_path: Path) -> None:
    options = {"rounds": 1, "hidden": 4, "backbone": "deep-gcn"}
    done = polyphily.run("fedavg", small_federation(), **options, out=tmp_path / "run")
    assert done.summary["settings"]["layers"] == 5
    assert sum(name.endswith("weight") for name in done.models["global"]) == 5
    assert "layers = 5" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.usefixtures("deep_gcn")
def test_one_number_of_neighbours_serves_all_layers_of_a_backbone() -> None:
    options = {"rounds": 1, "hidden": 4, "backbone": "deep-gcn"}
    summary = polyphily.run("fedavg", small_federation(), **options, sample="2").summary
    assert summary["sampling"]["neighbours"] == [2] * 5
    with pytest.raises(polyphily.UserError, match="the network has 5 layers"):
        polyphily.run("fedavg", small_federation(), **options, sample="2,2")


@pytest.mark.usefixtures("deep_gcn")
def test_a_search_keeps_a_depth_that_is_not_among_those_searched(tmp_path: Path) -> None:
    assert 5 not in SEARCHED["layers"]
    options = {"rounds": 1, "hidden": 4, "backbone": "deep-gcn"}
    found = polyphily.tune("fedavg", small_federation(), 3, out=tmp_path, **options)
    assert found.trials[0].settings == {"epochs": 3, "dropout": USUAL.dropout}
    assert set(found.space) == {"epochs", "dropout"}
    header = (tmp_path / "tuning.jsonl").read_text().splitlines()[0]
    assert '"layers": 5' in header
    assert len(read_trials(tmp_path)) == 3


def test_a_search_tries_the_usual_depth_first_and_then_others() -> None:
    options = {"rounds": 1, "hidden": 4, "backbone": "gcn", "epochs": 1, "dropout": 0.0}
    found = polyphily.tune("fedavg", small_federation(), 2, **options)
    assert [trial.settings for trial in found.trials] == [{"layers": 2}, {"layers": 3}]
