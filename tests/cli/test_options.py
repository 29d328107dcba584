"""Checks of flags before any work is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyphily.cli.options import check_output
from polyphily.errors import UserError


def test_an_output_is_checked_by_its_ending_and_its_folder(tmp_path: Path) -> None:
    check_output("--out", tmp_path / "new" / "deep" / "x.HTML", (".html",))
    with pytest.raises(UserError, match=r"--out x.tex: the file must end in .md, .csv or .html"):
        check_output("--out", Path("x.tex"), (".md", ".csv", ".html"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is no folder"):
        check_output("--out", tmp_path / "file" / "deep" / "x.md", (".md",))


def test_a_folder_that_may_not_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path.name} may not be written to"):
        check_output("--write", tmp_path / "new" / "x.md", (".md",))
