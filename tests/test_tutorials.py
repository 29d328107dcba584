"""The tutorials run, and what they show is true.

Tests change constants in the source, so that rounds and seeds are few. `make test-deploy` runs the
tutorial with processes as it is.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyphily.core.method import METHODS
from polyphily.testing import METHOD_CHECKS

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = ("banks", "chameleon", "method", "pyg", "report", "reproduce")
Tutorial = Callable[..., dict[str, Any]]


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tutorial:
    """Run a tutorial in an empty folder and return its variables."""

    def run(name: str, *changes: tuple[str, str], until: str = "") -> dict[str, Any]:
        """Run a tutorial.

        Args:
            name: of the file.
            changes: pieces of the source, and what stands in their place; each must occur.
            until: the heading before which it ends; at its end unless given.
        """
        source = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
        if until:
            source = source[: source.index(f"# %% [markdown]\n# ## {until}")]
        for before, after in changes:
            assert before in source, f"{name} has no {before}"
            source = source.replace(before, after)
        script, folder = tmp_path / f"{name}.py", tmp_path / "folder"
        script.write_text(source, encoding="utf-8")
        folder.mkdir()
        monkeypatch.chdir(folder)
        with METHODS.restored():
            return runpy.run_path(str(script))

    return run


def test_every_tutorial_is_a_notebook_with_short_cells() -> None:
    assert sorted(file.stem for file in TUTORIALS.glob("*.py")) == list(NAMES)
    for name in NAMES:
        source = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
        assert source.startswith("# %% [markdown]\n# # "), name
        cells = re.split(r"^# %%", source, flags=re.MULTILINE)[1:]
        for cell in cells:
            assert cell.count("\n") <= 32, f"{name}: a long cell: {cell[:200]}"
            if cell.startswith(" [markdown]"):
                lines = [line for line in cell.splitlines()[1:] if line]
                assert all(line.startswith("#") for line in lines), f"{name}: {cell[:200]}"


def test_scripts_become_notebooks() -> None:
    jupytext = pytest.importorskip("jupytext")
    for name in NAMES:
        file = TUTORIALS / f"{name}.py"
        kinds = [cell.cell_type for cell in jupytext.read(file).cells]
        lines = [
            line for line in file.read_text(encoding="utf-8").splitlines() if line[:4] == "# %%"
        ]
        assert kinds == ["markdown" if "[markdown]" in line else "code" for line in lines]
        assert kinds[0] == "markdown"


def test_from_data_to_probabilities(tutorial: Tutorial, tmp_path: Path) -> None:
    pyg = tutorial("pyg")
    probabilities = pyg["probabilities"]
    assert list(probabilities.columns) == ["red", "green", "blue"]
    assert probabilities.shape == (150, 3)
    assert abs(probabilities.sum(axis=1) - 1).max() < 1e-6
    assert pyg["right"].mean() > 0.7
    found = pyg["logits"].argmax(dim=1).numpy()
    assert (found == probabilities.to_numpy().argmax(axis=1)).all()
    scores = [pyg[name].summary["best_val"]["test"]["accuracy"] for name in ("alone", "together")]
    assert scores[1] > scores[0]
    explanation = pyg["explanation"]
    assert torch.count_nonzero(explanation.edge_mask) > 0
    assert not list((tmp_path / "folder").iterdir())  # it leaves no file


QUICK = (("ROUNDS = 20", "ROUNDS = 3"), ("SEEDS = (0, 1, 2)", "SEEDS = (0, 1)"))


def test_a_method_in_a_few_lines(tutorial: Tutorial, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(iter(METHOD_CHECKS))
    few = ("check_method(KeepSome)", f"METHOD_CHECKS[{first!r}](MethodCase(KeepSome()))")
    known = ("import check_method", "import METHOD_CHECKS, MethodCase")
    made = tutorial("method", *QUICK, few, known, ("nodes=200", "nodes=60"))
    assert set(made["found"].methods) == {"local", "fedavg", "fedper", "keep-some"}
    assert capsys.readouterr().out.count("keep 0.") == 4


@pytest.mark.long
def test_the_method_of_the_tutorial_passes_all_checks(tutorial: Tutorial) -> None:
    tutorial("method", *QUICK, ("nodes=200", "nodes=60"))


def test_few_labels_gain_most(tutorial: Tutorial) -> None:
    small = [("ROUNDS = 20", "ROUNDS = 8"), QUICK[1], ("nodes=200", "nodes=100")]
    read = tutorial("report", *small, until="The page")
    found = read["found"]
    gains = {
        cell: found.mean("fedavg", cell) - found.mean("local", cell) for cell in read["federations"]
    }
    assert max(gains, key=gains.__getitem__) == "few labels, alike"


@pytest.mark.long
def test_the_page_of_the_report_is_written(tutorial: Tutorial, tmp_path: Path) -> None:
    tutorial("report", *QUICK, ("nodes=200", "nodes=100"))
    assert (tmp_path / "folder" / "runs" / "report.html").stat().st_size > 10_000


def test_banks_rehearse(tutorial: Tutorial, capsys: pytest.CaptureFixture[str]) -> None:
    banks = tutorial("banks", ("ROUNDS = 10", "ROUNDS = 3"), until="The server")
    assert "No faults" in capsys.readouterr().out
    assert banks["together"].summary["clients"] == ["east", "north", "south"]
    assert set(banks["nodes"]["split"]) == {"train", "val", "test"}


@pytest.mark.long
@pytest.mark.deploy
def test_banks_get_what_they_rehearsed(tutorial: Tutorial) -> None:
    pytest.importorskip("flwr")
    banks = tutorial("banks", ("ROUNDS = 10", "ROUNDS = 3"))
    rehearsed = banks["together"].summary["best_val"]["test"]["auprc"]
    assert banks["deployed"] == pytest.approx(rehearsed, abs=1e-6)
    assert all(process.returncode is not None for process in banks["processes"].values())


@pytest.mark.data
def test_chameleon(
    tutorial: Tutorial, real_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    changes = [("ROUNDS = 30", "ROUNDS = 1"), QUICK[1], (', "fedper", "fedspa", "polyphony"]', "]")]
    found = tutorial("chameleon", *changes)["found"]
    assert set(found.methods) == {"local", "fedavg"}
    assert "points against local" in capsys.readouterr().out


@pytest.mark.data
def test_a_table_is_reproduced(
    tutorial: Tutorial, real_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    changes = [("ROUNDS = 40", "ROUNDS = 1"), ('SEEDS = "0,1"', 'SEEDS = "0"'), (",s2fgl", "")]
    table = tutorial("reproduce", *changes)["table"]
    assert [row["method"] for row in table["rows"] if row["forms"]] == ["fedavg"]
    assert "published" in capsys.readouterr().out
