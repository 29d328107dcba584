"""Search ranges: what may be declared, and what all methods declare."""

from __future__ import annotations

from typing import Any

import pytest

from polyphily.core.method import METHODS, parameter
from polyphily.core.recipes import fill
from polyphily.core.search import Choices, Range, Search
from polyphily.core.settings import SEARCHED, Settings


def test_a_range_knows_its_members() -> None:
    assert 3 in Range(1, 5)
    assert 3.5 not in Range(1, 5)
    assert 0.5 in Range(0.1, 0.9)
    assert 1.0 not in Range(0.1, 0.9)
    assert True not in Range(1, 5)
    assert "a" not in Range(1, 5)
    assert Range(1, 5).size == 5
    assert 64 in Choices(32, 64)
    assert 64.0 not in Choices(32, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Range(1.0, 1.0),
        lambda: Range(2, 1),
        lambda: Range(0.0, 1.0, log=True),
        lambda: Range(0.0, float("inf")),
        lambda: Choices(1),
        lambda: Choices(1, 1),
    ],
)
def test_ranges_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wrong()


@pytest.mark.parametrize(
    ("default", "search", "reason"),
    [
        (0.5, Range(0.6, 0.9), "outside"),
        (0.5, Range(1, 9), "type float"),
        (5, Range(1.0, 9.0), "type int"),
        (0.5, Range(0.0, 0.9), "above 0"),
        (2, Choices(0, 2), "leave out 0"),
        (2, Choices(1.0, 2.0), "type int"),
        (True, Choices(True, False), "switch"),
        ("a", Choices("a", "c"), "among the choices"),
        ("a", Range(1, 2), "type str"),
    ],
)
def test_a_range_must_suit_its_hyperparameter(default: Any, search: Search, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        parameter(default, "words", choices=("a", "b"), search=search)


def test_a_hyperparameter_keeps_its_range() -> None:
    field = parameter(0.5, "words", search=Range(0.1, 0.9))
    assert field.metadata["search"] == Range(0.1, 0.9)
    assert parameter(0.5, "words").metadata["search"] is None


def test_a_papers_value_lies_in_the_range_unless_it_turns_a_part_off() -> None:
    for name, cls in METHODS.items():
        for entry, search in cls.search_ranges().items():
            metadata = cls.hyperparameters()[entry].metadata
            for form in ("paper", "code"):
                assert not metadata[form] or metadata[form] in search, (name, entry)


def test_methods_with_numbers_of_their_own_declare_ranges() -> None:
    without = {name for name, cls in METHODS.items() if not cls.search_ranges()}
    assert without == {"fedavg", "fednova", "fedper", "fedsage", "local"}
    assert max(len(cls.search_ranges()) for cls in METHODS.values()) <= 4


def test_settings_that_are_searched_hold_their_defaults() -> None:
    for name, search in SEARCHED.items():
        assert getattr(fill(Settings(), "files", "accuracy"), name) in search
