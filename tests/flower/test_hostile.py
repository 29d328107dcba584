"""A site that sends anything at all: the run goes on with the others, and nobody else is named."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.errors import PolyphilyError
from polyphily.flower.deployment import Deployment
from polyphily.flower.joining import EVENTS, Answer, refusing
from polyphily.flower.wire import (
    FINISH,
    HELLO,
    KEYS,
    MEASURE,
    PREPARE,
    REVEAL,
    ROUND,
    Parcel,
    WireError,
)
from polyphily.graphs.checked import DEPTH, parse_json, plain

BAD, HONEST = "client-1", ("client-0", "client-2")
Change = Callable[[Parcel], Answer]
"""A function that turns a site's honest reply into another answer."""
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@contextmanager
def deployed() -> Iterator[tuple[Deployment, dict[str, Any], Path]]:
    """A server's folder and three sites."""
    with TemporaryDirectory() as place:
        data = federation()
        names = [graph.name for graph in data.clients]
        own = Deployment.create(Path(place) / "server", names, "127.0.0.1", 1, 2)
        yield own, sites_of(data, Path(place)), Path(place)


def conduct(kind: str, change: Change, **given: Any) -> tuple[dict[str, Any], Wires, str]:
    """Run with a site that changes its answers to a kind of message; return all that is known.

    With `normalize` "standard" sites are asked for statistics, too.
    """

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | Answer:
        return change(reply) if name == BAD and asked.facts["kind"] == kind else reply

    with deployed() as (own, sites, _):
        asked = {"rounds": 2, "hidden": 4, "min_sites": 2, "timeout": 5.0, "repeats": 0}
        name = own.new_run("fedavg", asked | {"normalize": "standard", **given}, {})
        wires = Wires(sites, twist)
        summary = own.conduct(name, wires)
        return summary, wires, (own.run_folder(name).path / EVENTS).read_text(encoding="utf-8")


def assert_harmless(kind: str, change: Change) -> list[dict[str, Any]]:
    """The run completes with the honest sites, and only the bad one is named, if anyone is."""
    summary, wires, events = conduct(kind, change)
    assert summary["rounds"] == 2
    assert set(HONEST) <= set(summary["clients"])
    assert math.isfinite(summary["final"]["test"]["accuracy"])
    troubles = summary["troubles"]
    assert {trouble["site"] for trouble in troubles} <= {BAD}
    named = [json.loads(line) for line in events.splitlines()]
    shown = {e["site"] for e in named if e["event"] in ("refused", "late", "left out")}
    assert shown == {trouble["site"] for trouble in troubles}
    assert all(text.isprintable() and len(text) < 3000 for text in events.splitlines())
    assert all(len(trouble["reason"]) <= 300 for trouble in troubles)
    assert wires.dismissed.keys() <= {BAD}
    return troubles


# JSON ------------------------------------------------------------------------------------------

NASTY = {
    "huge whole number": "1" + "0" * 400,
    "64 bits and more": str(1 << 64),
    "largest float": "1.7e308",
    "overflow": "1e400",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "negative": "-1",
    "true": "true",
    "null": "null",
    "text": '"7"',
    "empty text": '""',
    "escapes": '"\\u001b[2J\\u0007\\u202egone"',
    "lone surrogate": '"\\ud800"',
    "a megabyte": '"' + "x" * (1 << 20) + '"',
    "many numbers": "[" + "0," * 10_000 + "0]",
    "nested": "[" * 100_000 + "]" * 100_000,
    "nested a little": "[" * (DEPTH + 1) + "]" * (DEPTH + 1),
    "nested objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "twice": '{"a": 1, "a": 2}',
    "nothing": "[]",
    "object": "{}",
    "pieces": "[[], [1, [2]], {}]",
}
ASKED = (HELLO, MEASURE, PREPARE, ROUND, FINISH)


def with_raw(facts: Any, name: str, raw: str) -> str:
    """Facts as JSON with raw text in place of an entry."""
    return json.dumps({**facts, name: "@@@"}).replace('"@@@"', raw)


@pytest.mark.parametrize("what", NASTY)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (HELLO, "width"),
        (HELLO, "classes"),
        (MEASURE, "statistics"),
        (PREPARE, "counts"),
        (ROUND, "loss"),
        (ROUND, "trained"),
        (ROUND, "note"),
        (FINISH, "received"),
    ],
)
def test_the_corpus_of_facts(kind: str, name: str, what: str) -> None:
    def change(reply: Parcel) -> Answer:
        return Answer(with_raw(reply.facts, name, NASTY[what]), reply.pack()[1])

    troubles = assert_harmless(kind, change)
    harmless = {("loss", "negative"), ("loss", "64 bits and more")}
    if name != "note" and (name, what) not in harmless:
        assert troubles, "it was accepted"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (NASTY["huge whole number"], "a number of 401 digits"),
        (NASTY["nested"], "nested more than"),
        ("Infinity", "Infinity where a finite number belongs"),
        (NASTY["twice"], "twice in an object"),
        (NASTY["lone surrogate"], "surrogates not allowed"),
        ("true", "'loss' is not a finite number"),
        ('"0.5"', "'loss' is not a finite number"),
        ("1e31", "out of bounds"),
    ],
)
def test_a_refusal_says_why(raw: str, words: str) -> None:
    def change(reply: Parcel) -> Answer:
        return Answer(with_raw(reply.facts, "loss", raw), reply.pack()[1])

    first, *_ = assert_harmless(ROUND, change)
    assert words in first["reason"]
    assert (first["site"], first["what"]) == (BAD, "refused")


def test_text_of_a_site_is_one_harmless_line() -> None:
    """In events, from which the terminal reads, and in the summary."""
    nasty = "\x1b]0;owned\x07\x1b[31mall is\nwell\x00" + "y" * 5000

    def change(reply: Parcel) -> Answer:
        return Answer(error=nasty)

    first, *_ = assert_harmless(ROUND, change)
    assert first["reason"].startswith("all is wellyyy")

    def note(reply: Parcel) -> Answer:
        return Answer(with_raw(reply.facts, "note", json.dumps(nasty)), reply.pack()[1])

    _, _, events = conduct(ROUND, note)
    notes = [e for e in map(json.loads, events.splitlines()) if e["event"] == "note"]
    assert notes[0]["text"].startswith(f"{BAD}: all is wellyyy")
    assert len(notes[0]["text"]) < 300


def test_a_text_of_many_values_is_refused_before_it_is_parsed() -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 8,388,608 values"):
        parse_json("[" + "[]," * (1 << 23) + "[]]")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80e6  # the text itself


def test_a_full_disk_is_no_site_s_fault() -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    blamed: list[str] = []
    with pytest.raises(OSError, match="no space"), refusing(blamed.append):
        fail()
    assert blamed == []


@given(st.text(), st.integers(2, 50))
def test_plain_text_is_printable_and_bounded(text: str, limit: int) -> None:
    found = plain(text, limit)
    assert found.isprintable()
    assert len(found) <= limit
    assert plain(found, limit) == found


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [here] if here else []
    if isinstance(value, dict | list):
        for key, entry in inner:
            more = isinstance(entry, dict | list)
            found += paths(entry, (*here, key)) if more else [(*here, key)]
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return copy


@st.composite
def changed_facts(draw: st.DrawFn) -> tuple[str, Change]:
    """An entry of the facts, at any depth, replaced by a nasty value; or the text damaged."""
    kind = draw(st.sampled_from(ASKED))
    raw = draw(st.sampled_from(list(NASTY.values())) | st.integers().map(str))
    position = draw(st.integers(0, 10_000))
    how = draw(st.sampled_from(["replace", "replace", "replace", "cut", "flip", "drop"]))

    def change(reply: Parcel) -> Answer:
        text, blob = reply.pack()
        facts = json.loads(text)
        if how == "cut":
            return Answer(text[: position % len(text)], blob)
        if how == "flip":
            k = position % len(text)
            return Answer(text[:k] + chr(33 + position % 90) + text[k + 1 :], blob)
        if how == "drop":
            facts.pop(sorted(facts)[position % len(facts)])
            return Answer(json.dumps(facts), blob)
        path = paths(facts)[position % len(paths(facts))]
        return Answer(json.dumps(replaced(facts, path, "@@@")).replace('"@@@"', raw), blob)

    return kind, change


@MANY
@given(changed_facts())
def test_any_change_of_facts_is_harmless(example: tuple[str, Change]) -> None:
    assert_harmless(*example)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
                    max_leaves=20))  # fmt: skip
def test_what_is_sound_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value)
    try:
        assert parse_json(text) == value
    except UnicodeEncodeError:
        assert "\\ud" in text


# Tensors ---------------------------------------------------------------------------------------


def blob_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(dtype: str, shape: list[int], size: int) -> bytes:
    return blob_of({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, b"0" * size)


BLOBS = {
    "nothing": b"",
    "dtype F4": one("F4", [2], 1),
    "dtype E8M0": one("F8_E8M0", [1], 1),
    "dtype unheard of": one("XX", [1], 1),
    "complex": one("C64", [1], 8),
    "unsigned": one("U64", [1], 8),
    "bfloat16": one("BF16", [1], 2),
    "no elements": one("F32", [0, 1 << 60], 0),
    "overflow of sizes": one("F32", [1 << 62, 1 << 62, 0], 0),
    "2^63 rows of nothing": one("F32", [1 << 63, 0], 0),
    "2^60 elements": one("F32", [1 << 60], 4),
    "negative": one("F32", [-1], 4),
    "many axes": one("F32", [1] * 5000, 4),
    "long name": blob_of({"x" * 900_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
    "deep header": blob_of(b"[" * 10_000),
    "header of 2^60 bytes": struct.pack("<Q", 1 << 60),
    "pickle": b"\x80\x04\x95\x00\x00\x00\x00",
}


@pytest.mark.parametrize("what", BLOBS)
def test_the_corpus_of_tensors(what: str) -> None:
    troubles = assert_harmless(ROUND, lambda reply: Answer(reply.pack()[0], BLOBS[what]))
    assert [trouble["round"] for trouble in troubles] == [1, 2]


@pytest.mark.parametrize("what", BLOBS)
def test_unreadable_tensors_raise_nothing_but_a_wire_error(what: str) -> None:
    with suppress(WireError):
        Parcel.unpack("{}", BLOBS[what])


@st.composite
def changed_tensors(draw: st.DrawFn) -> Change:
    """Bytes changed, cut or added; or the header's numbers; or the values of the tensors."""
    how = draw(st.sampled_from(["flip", "cut", "add", "header", "values"]))
    position, byte = draw(st.integers(0, 10_000)), draw(st.integers(0, 255))
    factor = draw(st.floats(width=32) | st.sampled_from([1e6, -1e6, 1e38, 0.0, 1e-30]))
    number = draw(st.integers(-5, 1 << 63))

    def change(reply: Parcel) -> Answer:
        text, blob = reply.pack()
        if how == "flip":
            k = position % min(len(blob), 600)
            return Answer(text, blob[:k] + bytes([byte]) + blob[k + 1 :])
        if how == "cut":
            return Answer(text, blob[: position % (len(blob) + 1)])
        if how == "add":
            return Answer(text, blob + bytes([byte]) * position)
        if how == "values":
            names = list(reply.tensors)
            chosen = names if byte % 2 else names[position % len(names) :][:1]
            spoilt = {n: reply.tensors[n] * factor for n in chosen}
            return Answer(*Parcel(reply.facts, {**reply.tensors, **spoilt}).pack())
        (length,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + length])
        places = [path for path in paths(header) if not isinstance(path[-1], str)]
        changed = replaced(header, places[position % len(places)], number)
        return Answer(text, blob_of(changed, blob[8 + length :]))

    return change


@MANY
@given(changed_tensors())
def test_any_change_of_tensors_is_harmless(change: Change) -> None:
    assert_harmless(ROUND, change)


# Secure aggregation ----------------------------------------------------------------------------


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from([KEYS, ROUND, REVEAL]), changed_facts())
def test_under_secure_aggregation_nobody_else_is_named(
    kind: str, example: tuple[str, Change]
) -> None:
    """A site can spoil a sum, which shows nobody who did. It cannot raise anything else."""
    data = federation(4)
    plan = plan_for(data, "fedavg", rounds=2, secure_aggregation=True)

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | Answer:
        return example[1](reply) if name == BAD and asked.facts["kind"] == kind else reply

    with TemporaryDirectory() as place:
        wires = Wires(sites_of(data, Path(place)), twist)
        coordinator = coordinate(plan, wires, Path(place) / "run", 3)
        try:
            assert coordinator.go()["rounds"] == 2
        except PolyphilyError:
            assert len(coordinator.records) < 2
        assert {trouble["site"] for trouble in coordinator.troubles} <= {BAD}
