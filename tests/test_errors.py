"""Messages for people: the nearest name, the known ones, the command that helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyphily.errors import (
    PolyphilyError,
    TrainingError,
    UserError,
    missing_package,
    unknown,
)

METHODS = ["scaffold", "fedavg", "local", "fedprox"]
words = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=10)


def test_statuses_tell_a_users_mistake_from_a_run_that_failed() -> None:
    assert UserError.exit_status == 2
    assert TrainingError.exit_status == PolyphilyError.exit_status == 1
    assert issubclass(UserError, PolyphilyError)
    assert issubclass(TrainingError, PolyphilyError)


@pytest.mark.parametrize(
    ("given_name", "nearest"),
    [("fedavgg", "fedavg"), ("FedProx", "fedprox"), ("SCAFOLD", "scaffold"), ("loca", "local")],
)
def test_the_nearest_name_is_suggested_whatever_its_case(given_name: str, nearest: str) -> None:
    message = str(unknown("method", given_name, METHODS))
    assert message.startswith(f"unknown method '{given_name}': did you mean '{nearest}'?")


def test_no_suggestion_where_nothing_is_near() -> None:
    message = str(unknown("method", "xyz", METHODS))
    assert message == "unknown method 'xyz'. Known: fedavg, fedprox, local, scaffold"


@given(words, st.sets(words, max_size=8))
def test_the_error_names_what_was_asked_and_all_that_is_known(name: str, known: set[str]) -> None:
    error = unknown("thing", name, iter(known))
    message = str(error)
    assert isinstance(error, UserError)
    assert f"unknown thing '{name}'" in message
    assert message.endswith(f"Known: {', '.join(sorted(known))}")
    if "did you mean" in message:
        assert message.partition("did you mean '")[2].partition("'")[0] in known


@given(st.sets(words, min_size=1, max_size=8).flatmap(lambda s: st.sampled_from(sorted(s))), words)
def test_a_name_in_the_wrong_case_is_always_recognised(name: str, other: str) -> None:
    assert f"did you mean '{name}'?" in str(unknown("thing", name.upper(), {name, other}))


def test_a_missing_package_brings_its_command() -> None:
    error = missing_package("pymetis", "partition", "partition 'metis'", "Or use 'louvain'.")
    assert isinstance(error, UserError)
    message = str(error)
    assert "partition 'metis' needs the package 'pymetis'" in message
    assert "pip install 'polyphily[partition]'." in message
    assert message.endswith(" Or use 'louvain'.")
    assert str(missing_package("a", "b", "c")).endswith("'polyphily[b]'.")
