"""Help pages: readable in 80 columns, for every command."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import click
import pytest
import typer

from commands import Answer, Cli, caller
from polyphily.cli import app, options
from polyphily.cli.help import PANELS, WIDEST
from polyphily.core.settings import Settings


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


TREE = typer.main.get_command(app)
assert isinstance(TREE, click.Group)
ALL = list(commands(TREE))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")
    return caller(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_text_has_room_in_80_columns(command: tuple[str, ...], cli: Cli) -> None:
    answer: Answer = cli(*command, "--help")
    assert answer.status == 0
    lines = [line.rstrip() for line in answer.out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  --help, -h") for line in lines)
    begins = [len(line) - len(line.lstrip()) for line in lines if line.startswith("     ")]
    assert max(begins, default=0) <= WIDEST + 4  # where the lines of a long text begin


def test_every_option_is_named_with_its_value_and_default(cli: Cli) -> None:
    said = " ".join(cli("run", "--help").out.split())
    assert "--rounds N Communication rounds. [100]" in said
    assert "--secure-aggregation" in said
    assert "--no-secure-aggregation" in said
    assert '--optimizer TEXT "adam", "adamw" or "sgd". [by data]' in said
    assert "METHOD The method's name; `polyphily methods` lists them. [polyphony]" in said
    assert "[required]" in cli("methods", "show", "--help").out
    docs = options.attribute_docs(Settings)
    for name, kind in get_type_hints(Settings).items():
        if bool not in (kind, *get_args(kind)):  # the names of flags have two lines
            assert docs[name][1:].rstrip(".") in said


def test_settings_are_below_headings(cli: Cli) -> None:
    known = {field.name for field in dataclasses.fields(Settings)}
    assert {name for names in options.PANELS.values() for name in names} <= known
    lines = cli("run", "--help").out.splitlines()
    for panel in ("Arguments", "Options", "Data", "Training", *options.PANELS):
        assert panel in lines


def test_commands_are_below_headings_in_order(cli: Cli) -> None:
    said = cli("--help").out
    assert isinstance(TREE, click.Group)
    listed = [name for names in PANELS.values() for name in names]
    assert set(listed) == set(TREE.commands)
    places = [said.index(f"\n{panel}\n") for panel in PANELS]
    assert places == sorted(places)
    rows = [line.split()[0] for line in said.splitlines() if line[:2] == "  " and line[2:3] != " "]
    assert [row for row in rows if row in listed] == listed
