"""flower/ is transport: what clients and servers compute is in runtime/, for the simulation too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyphily
from polyphily.core.method import Method

ROOT = Path(polyphily.__file__).parent
HOOKS = {name for name, value in vars(Method).items() if callable(value) and name[0] != "_"}
HOOKS -= {"hyperparameters", "paper_form", "reason_against_sums", "supported_backbones"}
SHARED = {
    "receive",
    "remarks",
    "aggregate",
    "download",
    "downloads",
    "uploads",
    "train",
    "predict",
    "shares",
    "build",
}
"""Names that runtime objects, or other things, have as well."""


def calls(file: Path) -> set[str]:
    """The names of all methods that a file calls."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {func.attr for func in found if isinstance(func, ast.Attribute)}


@pytest.mark.parametrize("file", sorted((ROOT / "flower").glob("*.py")), ids=lambda f: f.stem)
def test_flower_calls_no_hook_of_a_method(file: Path) -> None:
    assert "init_client_state" in HOOKS - SHARED
    assert not calls(file) & (HOOKS - SHARED)


def definitions(room: str) -> set[str]:
    """Public functions and classes of a room."""
    found = set()
    for file in (ROOT / room).glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                found.add(node.name)
    return found


@pytest.mark.parametrize("room", ["engines", "runtime", "runs"])
def test_nothing_is_written_twice(room: str) -> None:
    """No function or class of flower/ has the name of one that the simulation drives."""
    assert definitions("flower") & definitions(room) <= {"run"}  # flower.loopback.run: --engine
