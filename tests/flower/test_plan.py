"""What sites agree on, what a plan from the network may say, what an upload must look like."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower.federations import federation, plan_for
from polyphily.core.messages import Contract
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.flower.plan import Plan, Schema, agree, check_for_flower
from polyphily.flower.wire import Parcel, WireError, check_upload, limit_of

NORTH = Schema(("age", "income"), 2, ("good", "bad"))


def test_columns_are_taken_in_the_first_sites_order_and_classes_sorted() -> None:
    south = Schema(("income", "age"), 2, ("bad", "good"))
    assert agree({"north": NORTH, "south": south}) == Schema(("age", "income"), 2, ("bad", "good"))
    assert NORTH.digest == south.digest


def test_numbers_as_classes_are_sorted_as_numbers() -> None:
    many = Schema((), 2, tuple(str(n) for n in (10, 9, 2)))
    assert agree({"a": many}).classes == ("2", "9", "10")


@pytest.mark.parametrize(
    ("south", "words"),
    [
        (
            Schema(("age", "rent"), 2, ("good", "bad")),
            "'income' only at 'north'; 'rent' only at 's",
        ),
        (Schema(("age", "income"), 2, ("Good", "bad")), "'good' only at 'north'; 'Good' only at"),
        (Schema((), 3, ("good", "bad")), "have 2 and 3 features"),
    ],
)
def test_a_difference_is_refused_with_the_names(south: Schema, words: str) -> None:
    assert south.digest != NORTH.digest
    with pytest.raises(UserError, match="sites 'north' and 'south'") as caught:
        agree({"north": NORTH, "south": south})
    assert words in str(caught.value)


def test_a_site_may_lack_labels_that_the_server_lists() -> None:
    poor = Schema(("age", "income"), 2, ("good",))
    assert agree({"a": NORTH, "b": poor}, ["bad", "good"]).classes == ("bad", "good")
    with pytest.raises(UserError, match=r"site 'a' has labels that the server's list .*'bad'"):
        agree({"a": NORTH}, ["good"])


def test_a_plan_survives_its_journey() -> None:
    plan = plan_for(federation(), "fedspa", epochs="1-3")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../etc"},
        {"run": "a/b"},
        {"run": ""},
        {"method": "os.system"},
        {"hyperparameters": {"no": 1}},
        {"settings": {"rounds": -1}},
        {"settings": {"no_such_setting": 1}},
        {"settings": 3},
        {"schema": {}},
        {"seed": "x"},
        {"sites": None},
        {"sites": ["client-0", "client-1", "client-1"]},
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict) -> None:
    data = plan_for(federation(), "fedavg").to_json()
    with pytest.raises(UserError):
        Plan.from_json(json.loads(json.dumps(data | change)))


@pytest.mark.parametrize(
    "knob", [{"participation": 0.5}, {"failures": 0.1}, {"patience": 3}, {"evaluate_every": 2}]
)
def test_knobs_of_simulations_are_refused(knob: dict) -> None:
    check_for_flower(Settings())
    with pytest.raises(UserError, match="is for simulations"):
        check_for_flower(Settings(**knob))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


whole = st.integers(-(1 << 63), 1 << 63)


@given(
    facts=st.dictionaries(names, whole | st.text() | st.booleans(), max_size=4),
    shapes=st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3), max_size=4),
)
def test_a_parcel_survives_its_journey(facts: dict, shapes: dict) -> None:
    shapes = {n: s for n, s in shapes.items() if n != "__metadata__"}
    tensors = {name: torch.randn(1, *shape) for name, shape in shapes.items()}
    parcel = Parcel.unpack(*Parcel(facts, tensors).pack())
    assert parcel.facts == facts
    assert parcel.tensors.keys() == tensors.keys()
    assert all(torch.equal(parcel.tensors[n], t) for n, t in tensors.items())


@given(text=st.text(max_size=20), blob=st.binary(max_size=64))
def test_what_is_no_parcel_is_refused_and_nothing_else_happens(text: str, blob: bytes) -> None:
    try:
        found = Parcel.unpack(text, blob)
    except WireError:
        return
    assert isinstance(found.facts, dict)


def test_a_contract_is_kept_or_the_breach_is_named() -> None:
    good = {"a": torch.ones(1, 2, 3), "n": torch.ones(1)}
    contract = Contract({"a": (2, 3), "n": ()}, torch.float32)
    check_upload(contract, good)
    assert limit_of(contract) >= 7 * 4
    for bad, words in (
        ({"a": good["a"]}, "lacks n"),
        ({**good, "z": good["n"]}, "has undeclared z"),
        ({**good, "a": torch.ones(1, 3, 2)}, "a has the shape 3 × 2, not 2 × 3"),
        ({**good, "a": torch.ones(2, 2, 3)}, "a has 2 rows, not one"),
        ({**good, "n": torch.ones(1, dtype=torch.int64)}, "n has the type"),
        ({**good, "n": torch.tensor([torch.inf])}, "n holds numbers that are not finite"),
    ):
        with pytest.raises(WireError, match=words):
            check_upload(contract, bad)
