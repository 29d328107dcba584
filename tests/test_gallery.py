"""The gallery: its page says what its script does, and every picture is there."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from polyphily.report.figures import FIGURES

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
LARGEST = 150_000  # bytes of a picture


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(GALLERY / "make.py"))


def test_the_page_is_written_from_the_commands(made: dict[str, Any]) -> None:
    assert (GALLERY / "index.md").read_text(encoding="utf-8") == made["page"]()


def test_every_picture_is_there_and_small(made: dict[str, Any]) -> None:
    files = {entry.file for entry in made["ENTRIES"]}
    assert files == set(GALLERY.glob("*.svg"))
    assert max(file.stat().st_size for file in files) <= LARGEST


def test_commands_name_figures_that_exist_and_write_the_picture(made: dict[str, Any]) -> None:
    for entry in made["ENTRIES"]:
        words = shlex.split(entry.command)
        assert words[-1] == f"docs/gallery/{entry.file.name}"
        if words[1] == "plot":
            assert words[2] in FIGURES
            assert f"runs/gallery/{entry.training}" in entry.command
    assert {entry.training for entry in made["ENTRIES"]} - {None} == set(made["TRAINING"])


def test_commands_are_folded_before_flags_and_still_the_same(made: dict[str, Any]) -> None:
    commands = [command for _, command in made["TRAINING"].values()]
    for command in [*commands, *(entry.command for entry in made["ENTRIES"])]:
        first, *lines, last = made["_code"](command).splitlines()
        assert (first, last) == ("```sh", "```")
        assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
        assert all(line.startswith("    --") for line in lines[1:])
        assert max(map(len, lines)) <= made["WIDTH"] + 10  # a flag that is longer is not cut


def test_unknown_pictures_are_named(made: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="no picture gian"):
        made["main"](["gian"])
