"""The hash-chained journal of a site: what is kept, repaired, and refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.flower.journal import Journal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "site" / "journal.jsonl"


def journal(file: Path) -> Journal:
    return Journal(file, "everything")


def filled(file: Path, lines: int = 5) -> list[bytes]:
    own = journal(file)
    for number in range(lines):
        own.append({"what": "upload", "number": number})
    return file.read_bytes().splitlines(keepends=True)


def test_entries_come_back_in_order(file: Path) -> None:
    filled(file)
    assert [entry["number"] for entry in journal(file).read()] == [0, 1, 2, 3, 4]
    assert file.stat().st_mode & 0o777 == 0o600


def test_two_processes_append_to_one_chain(file: Path) -> None:
    first, second = journal(file), journal(file)
    for number in range(6):
        (first, second)[number % 2].append({"number": number})
    assert [entry["number"] for entry in journal(file).read()] == list(range(6))


def test_a_line_is_on_the_disk_before_append_returns(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def look(descriptor: int) -> None:
        real(descriptor)
        synced.append(file.read_bytes())

    monkeypatch.setattr(os, "fsync", look)
    journal(file).append({"number": 7})
    assert json.loads(synced[-1])["number"] == 7


def test_a_full_disk_leaves_no_half_entry(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file, 2)
    own = journal(file)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match="No space left"):
            own.append({"number": 2})
    own.append({"number": 3})
    assert len(journal(file).read()) in (3, 4)  # whether the line that failed is there or not


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_kill_at_any_byte_of_the_last_line_is_repaired(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The head is written last, so a kill inside of a line finds it at the line before."""
    file = tmp_path_factory.mktemp("kill") / "journal.jsonl"
    filled(file, 3)
    head = journal(file).head.read_bytes()
    journal(file).append({"number": 3})
    lines = file.read_bytes().splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(lines[3]) - 1))
    file.write_bytes(b"".join(lines[:3]) + lines[3][:cut])
    journal(file).head.write_bytes(head)
    own = journal(file)
    assert len(own.read()) == 3
    own.append({"number": 30})
    assert [entry["number"] for entry in journal(file).read()] == [0, 1, 2, 30]


def test_a_kill_between_line_and_head_is_repaired(file: Path) -> None:
    filled(file, 1)
    journal(file).head.unlink()
    assert len(journal(file).read()) == 1
    filled(file, 3)
    head = journal(file).head.read_bytes()
    journal(file).append({})
    journal(file).head.write_bytes(head)
    assert len(journal(file).read()) == 5
    journal(file).append({})
    assert len(journal(file).read()) == 6


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_other_change_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A byte changed, a line removed, doubled or moved: reading and appending refuse."""
    file = tmp_path_factory.mktemp("tamper") / "journal.jsonl"
    lines = filled(file)
    how = data.draw(st.sampled_from(["byte", "remove", "double", "swap", "truncate"]))
    at = data.draw(st.integers(0, 4))
    if how == "byte":
        line = bytearray(lines[at])
        place = data.draw(st.integers(0, len(line) - 1))
        line[place] ^= 1 << data.draw(st.integers(0, 6))
        lines[at] = bytes(line)
    elif how == "remove":
        del lines[at]
    elif how == "double":
        lines.insert(at, lines[at])
    elif how == "swap":
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    else:
        lines = lines[:at]
    file.write_bytes(b"".join(lines))
    for use in (lambda: journal(file).read(), lambda: journal(file).append({})):
        with pytest.raises(UserError, match="was changed by something other than polyphily") as no:
            use()
        assert "backup" in str(no.value)
        assert "everything is lost" in str(no.value)


def test_a_missing_head_or_file_is_refused(file: Path) -> None:
    filled(file)
    head = journal(file).head
    content = head.read_bytes()
    head.unlink()
    with pytest.raises(UserError, match=r"journal\.head is missing"):
        journal(file).read()
    head.write_bytes(content)
    file.unlink()
    with pytest.raises(UserError, match="lacks lines"):
        journal(file).append({})
