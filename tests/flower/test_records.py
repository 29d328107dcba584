"""A parcel as the content of a Flower message: few objects, and nothing of another form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from polyphily.flower import app
from polyphily.flower.app import BLOB, FACTS, JSON, TENSORS, raw_parts, to_records
from polyphily.flower.wire import ROUND, Parcel, WireError


def objects(content: RecordDict) -> int:
    """Return how many objects Flower sends for this content, beside the message itself."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return len(get_all_nested_objects(content))


@pytest.mark.parametrize(("small", "number"), [(1 << 20, 2), (100, 5)])
def test_a_small_parcel_is_sent_as_few_objects(
    small: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SMALL", small)
    parcel = Parcel({"kind": ROUND}, {"weight": torch.arange(100.0)})
    content = to_records(parcel)
    assert objects(content) == number
    found = Parcel.unpack(*raw_parts(content))
    assert found.facts == parcel.facts
    assert torch.equal(found.tensors["weight"], parcel.tensors["weight"])


def other_forms() -> dict[str, RecordDict]:
    def array(stype: str) -> ArrayRecord:
        return ArrayRecord({BLOB: Array(dtype="uint8", shape=(1,), stype=stype, data=b"x")})

    def facts(**entries: Any) -> ConfigRecord:
        return ConfigRecord({{"text": JSON, "blob": BLOB}[name]: e for name, e in entries.items()})

    return {
        "nothing": RecordDict(),
        "no bytes": RecordDict({FACTS: facts(text="{}")}),
        "no text": RecordDict({FACTS: facts(blob=b"")}),
        "a number for text": RecordDict({FACTS: facts(text=1, blob=b"")}),
        "text for bytes": RecordDict({FACTS: facts(text="{}", blob="x")}),
        "several bytes": RecordDict({FACTS: facts(text="{}", blob=[b"x"])}),
        "an array of another type": RecordDict({FACTS: facts(text="{}"), TENSORS: array("numpy")}),
        "facts that are arrays": RecordDict({FACTS: array(BLOB)}),
        "metrics": RecordDict({FACTS: MetricRecord({JSON: 1, BLOB: 2})}),
    }


@pytest.mark.parametrize("name", other_forms())
def test_other_forms_are_refused(name: str) -> None:
    with pytest.raises(WireError, match="does not have the form"):
        raw_parts(other_forms()[name])
