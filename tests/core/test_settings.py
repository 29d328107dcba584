"""Every bound of the settings, the range of epochs, suggestions, and what recipes fill in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyphily.core.metrics import METRICS, register_metric
from polyphily.core.recipes import Recipe, fill
from polyphily.core.settings import Settings, choices, from_mapping, names, parse_threshold
from polyphily.errors import UserError
from polyphily.nn.backbones import BACKBONES

# name: (values on or within the bounds, values beyond them)
BOUNDS: dict[str, tuple[list[float], list[float]]] = {
    "rounds": ([1, 10_000], [0, -1]),
    "hidden": ([1, 512], [0, -64]),
    "layers": ([1, 64], [0, 65]),
    "heads": ([1, 1024], [0, 1025]),
    "hops": ([1, 1024], [0, 1025]),
    "dropout": ([0.0, 0.5, 0.999], [-0.1, 1.0, 1.5]),
    "input_dropout": ([0.0, 0.5, 0.999], [-0.1, 1.0, 1.5]),
    "label_inputs": ([0.0, 0.5, 0.999], [-0.1, 1.0, 1.5]),
    "lr": ([1e-12, 0.01, 10.0], [0.0, -0.01]),
    "weight_decay": ([0.0, 5e-4, 2.0], [-1e-9]),
    "momentum": ([0.0, 0.9, 0.9999], [-0.1, 1.0]),
    "clip": ([0.0, 1.0, 1e9], [-1.0]),
    "participation": ([1e-9, 0.5, 1.0], [0.0, -0.5, 1.01]),
    "failures": ([0.0, 0.5, 0.999], [-0.1, 1.0]),
    "evaluate_every": ([1, 50], [0, -1]),
    "scored_clients": ([1, 500], [0, -1]),
    "patience": ([0, 20], [-1]),
    "threads": ([0, 1, 1024], [-1, 1025]),
    "batch": ([0, 1, 4096], [-1]),
}
CHOICES = {
    "engine": ["stacked", "sequential", "flower"],
    "selection": ["method", "federation", "client"],
    "dtype": ["float32", "float64"],
    "precision": ["float32", "tf32", "bf16"],
    "optimizer": ["adam", "adamw", "sgd"],
    "norms": ["shared", "home"],
    "readout": ["last", "jump"],
    "class_weights": ["none", "balanced"],
    "direction": ["both", "in", "out", "separate"],
    "metric": [
        "accuracy",
        "f1_macro",
        "f1_weighted",
        "auc",
        "auprc",
        "f1",
        "balanced_accuracy",
        "recall_at_precision_0.9",
    ],
}
OPEN = {f.name for f in dataclasses.fields(Settings) if f.default is None}


def refusal(**values: Any) -> str:
    """The message that refuses these values; empty where they are taken."""
    try:
        from_mapping(values)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (good, _) in BOUNDS.items() for value in good]
)
def test_values_up_to_the_bounds_are_taken(name: str, value: float) -> None:
    assert getattr(from_mapping({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (_, bad) in BOUNDS.items() for value in [*bad, math.nan, -math.inf]],
)
def test_values_beyond_the_bounds_are_refused_by_name(name: str, value: float) -> None:
    message = refusal(**{name: value})
    what = "out of bounds, give " if math.isfinite(value) else "not a "
    assert message.startswith(f"{name.replace('_', '-')}: {value} is {what}")


@pytest.mark.parametrize(("name", "choices"), CHOICES.items())
def test_choices_are_taken_and_others_refused_with_a_suggestion(
    name: str, choices: list[str]
) -> None:
    for choice in choices:
        assert getattr(from_mapping({name: choice}), name) == choice
        near = choice + "x"
        if near not in choices:
            message = refusal(**{name: near})
            assert message.startswith(f"unknown {name} '{near}': did you mean '")
    assert f"Known: {', '.join(sorted(choices))}" in refusal(**{name: "zzz"})


@pytest.mark.parametrize(("name", "known"), CHOICES.items())
def test_words_may_be_written_in_any_case(name: str, known: list[str]) -> None:
    for choice in known:
        assert getattr(from_mapping({name: choice.capitalize()}), name) == choice


def test_the_metrics_to_choose_from_are_those_that_select() -> None:
    assert choices()["metric"] == tuple(CHOICES["metric"])
    with METRICS.restored():
        register_metric("calibration", selects=False)(lambda predictions: predictions.labels)
        register_metric("recall")(lambda predictions: predictions.labels)
        assert choices()["metric"] == (*CHOICES["metric"], "recall")
        assert from_mapping({"metric": "recall"}).metric == "recall"
        assert "unknown metric 'calibration'" in refusal(metric="calibration")
    assert "unknown metric 'recall'" in refusal(metric="recall")


def test_every_number_has_a_bound_and_every_word_a_choice() -> None:
    """A new setting cannot be added unchecked; those listed are checked where they are used."""
    elsewhere = {"epochs", "backbone", "device", "keep_optimizer", "dp", "secure_aggregation"}
    elsewhere |= {"memory", "sample", "positive", "threshold_rule", "loss", "edge_weights"}
    elsewhere |= {"relations", "robust", "attack", "attackers", "on_disk", "degree_inputs"}
    assert set(BOUNDS) | set(CHOICES) | elsewhere == names()


def test_the_defaults_are_within_bounds() -> None:
    Settings().check()
    assert from_mapping({}) == Settings()


@pytest.mark.parametrize("name", sorted(OPEN))
def test_what_is_left_open_is_taken(name: str) -> None:
    assert getattr(from_mapping({name: None}), name) is None


# Epochs ----------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_epochs_are_a_number_or_a_range(low: int, more: int) -> None:
    assert Settings(epochs=low).epoch_range() == (low, low)
    assert Settings(epochs=str(low)).epoch_range() == (low, low)
    assert Settings(epochs=f"{low}-{low + more}").epoch_range() == (low, low + more)
    assert from_mapping({"epochs": f"{low} - {low + more}"}).epoch_range() == (low, low + more)


@pytest.mark.parametrize(
    "epochs",
    [0, -1, "0", "-3", "5-1", "0-3", "1-5-7", "", "-", "three", "1.5", 2.5, "1-b", "1–5", True],
)
def test_other_epochs_are_refused(epochs: Any) -> None:
    message = refusal(epochs=epochs)
    assert message == f"epochs: '{epochs}' is neither a positive number nor a range such as 1-5"


def test_a_range_needs_both_ends() -> None:
    assert refusal(epochs="3-")


# Names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"), [("round", "rounds"), ("drop_out", "dropout"), ("Epoch", "epochs")]
)
def test_a_wrong_name_brings_the_nearest(wrong: str, right: str) -> None:
    message = refusal(**{wrong: 1})
    assert message.startswith(f"unknown setting '{wrong}': did you mean '{right}'?")


def test_settings_cannot_be_changed_in_passing() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().rounds = 5  # type: ignore[misc]


# Users' mistakes that are not out of bounds ----------------------------------------------------


@pytest.mark.parametrize("name", BOUNDS)
def test_text_for_a_number_is_a_users_error(name: str) -> None:
    assert name.replace("_", "-") in refusal(**{name: "many"})


@pytest.mark.parametrize("name", CHOICES)
def test_a_number_for_a_word_is_a_users_error(name: str) -> None:
    assert name.replace("_", "-") in refusal(**{name: 3})


@pytest.mark.parametrize(
    "name", ["rounds", "hidden", "layers", "heads", "hops", "evaluate_every", "patience"]
)
def test_fractions_of_whole_things_are_refused(name: str) -> None:
    assert refusal(**{name: 2.5})


@pytest.mark.parametrize("name", sorted(names() - OPEN - {"epochs"}))
def test_none_is_refused_where_no_recipe_fills_it(name: str) -> None:
    assert refusal(**{name: None})


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_infinite_rates_are_refused(name: str) -> None:
    assert refusal(**{name: math.inf})


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("heads", 2000, "1024"),
        ("hops", 2000, "1024"),
        ("dropout", 0.9995, "0.999"),
        ("momentum", 0.99995, "0.9999"),
    ],
)
def test_a_refusal_names_the_bound_that_was_crossed(name: str, value: float, bound: str) -> None:
    message = refusal(**{name: value}).partition("give ")[2]
    assert not message or bound in message


# Recipes ---------------------------------------------------------------------------------------

kinds = st.sampled_from(["homophilic", "heterophilic", "synthetic", "fraud", "files", "other"])


@given(kinds, st.sampled_from([None, *BACKBONES]), st.sampled_from(["accuracy", "auc"]))
def test_a_filled_setting_leaves_nothing_open(kind: str, backbone: str | None, metric: str) -> None:
    filled = fill(Settings(backbone=backbone), kind, metric)
    assert all(getattr(filled, name) is not None for name in names())
    assert filled.backbone in BACKBONES
    assert filled.backbone == backbone or backbone is None
    assert filled.metric == metric
    filled.check()
    assert fill(filled, "other", "auc") == filled


@given(kinds)
def test_what_the_user_says_wins(kind: str) -> None:
    asked = Settings(
        backbone="mlp",
        hidden=7,
        layers=4,
        dropout=0.0,
        input_dropout=0.25,
        optimizer="sgd",
        lr=0.5,
        weight_decay=0.125,
        keep_optimizer=False,
        metric="auc",
        on_disk=True,
        rounds=3,
    )
    assert fill(asked, kind, "accuracy") == asked


def test_recipes_are_for_backbones_that_exist_and_settings_that_are_open() -> None:
    assert {f.name for f in dataclasses.fields(Recipe)} == OPEN - {"backbone", "metric", "on_disk"}
    for backbone in BACKBONES.values():
        for defaults in backbone.defaults.values():
            assert set(defaults) <= {f.name for f in dataclasses.fields(Recipe)}


# Rare classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("Macro-F1", "f1_macro"),
        ("recall@precision=0.75", "recall_at_precision_0.75"),
        ("balanced-accuracy", "balanced_accuracy"),
    ],
)
def test_metrics_are_taken_in_any_spelling(written: str, kept: str) -> None:
    assert from_mapping({"metric": written}).metric == kept
    assert from_mapping({"metric": kept}).metric == kept  # as a run folder holds it


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("f1", ("f1", 0.0)),
        ("precision=0.9", ("precision", 0.9)),
        ("Precision=0.75", ("precision", 0.75)),
        ("0.5", ("fixed", 0.5)),
    ],
)
def test_rules_for_thresholds(text: str, rule: tuple[str, float]) -> None:
    assert parse_threshold(text) == rule
    assert parse_threshold(from_mapping({"threshold_rule": text}).threshold_rule) == rule


@pytest.mark.parametrize(
    "text", ["f2", "f1=0.5", "precision", "precision=1", "0", "1.5", "nan", ""]
)
def test_other_rules_for_thresholds_are_refused(text: str) -> None:
    message = refusal(threshold_rule=text)
    assert message.startswith(f"--threshold-rule {text}: write f1, precision=0.9, or a number")


def test_the_exponent_of_the_focal_loss() -> None:
    assert Settings().focal() == 0
    assert from_mapping({"loss": "focal"}).focal() == 2
    assert from_mapping({"loss": "Focal=0.5"}).focal() == 0.5


@pytest.mark.parametrize("text", ["focal=0", "focal=-1", "focal=11", "focal=x", "hinge", "nan"])
def test_other_losses_are_refused(text: str) -> None:
    assert refusal(loss=text).startswith(f"--loss {text}: write cross-entropy, or focal=2")
