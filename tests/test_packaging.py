"""The package: its version, its dependencies and their reasons, its extras, its constraints."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import polyphily

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS = {"": PROJECT["dependencies"], **EXTRAS}
OWN = "polyphily"
# Packages whose modules have another name.
DISTRIBUTIONS = {"google": "protobuf", "mlflow": "mlflow-skinny", "sknetwork": "scikit-network"}


def requirements(*groups: str) -> dict[str, Requirement]:
    """Return the requirements of these groups by name, without the package itself."""
    found = [Requirement(text) for group in groups or GROUPS for text in GROUPS[group]]
    return {canonicalize_name(one.name): one for one in found if one.name != OWN}


def page() -> str:
    return (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


# The version ----------------------------------------------------------------------------------


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    text = (ROOT / hatch["version"]["path"]).read_text(encoding="utf-8")
    assert f'__version__ = "{polyphily.__version__}"' in text


def test_files_that_repeat_the_version_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [polyphily.__version__]
    app = ROOT / "src" / "polyphily" / "flower" / "fab" / "pyproject.toml"
    assert tomllib.loads(app.read_text("utf-8"))["project"]["version"] == polyphily.__version__


def test_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    tested = set(re.findall(r'python: "(3\.\d+)"', workflow))
    prefix = "Programming Language :: Python :: 3."
    named = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if one.startswith(prefix)}
    assert named == tested
    assert PROJECT["requires-python"] == f">={min(named, key=lambda v: int(v[2:]))}"
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "src" / "polyphily" / "py.typed").exists()


# Dependencies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(requirements()))
def test_every_dependency_has_a_reason(name: str) -> None:
    rows = [line.split("|") for line in page().split("## Bounds")[0].splitlines() if "|" in line]
    named = {canonicalize_name(word) for row in rows for word in re.findall(r"[\w-]+", row[1])}
    assert name in named, f"{name} has no line in docs/dependencies.md"


def test_an_upper_bound_has_a_reason() -> None:
    bounds = page().split("## Bounds")[1]
    for name, one in requirements().items():
        for upper in (str(part) for part in one.specifier if part.operator != ">="):
            assert upper.startswith("<"), f"{one}: only lower and upper bounds are used"
            assert f"`{name}{upper}`" in bounds


def test_every_package_that_is_imported_is_declared() -> None:
    declared, found = requirements().keys(), set()
    for path in (ROOT / "src").rglob("*.py"):
        for module in imported(path.read_text(encoding="utf-8")):
            found.add(module)
            name = canonicalize_name(DISTRIBUTIONS.get(module, module))
            assert name in declared, f"{path}: {module}"
    assert {"torch", "click", "flwr", "dp_accounting"} <= found


def imported(text: str) -> set[str]:
    """Return the top-level names of the packages that a module imports from elsewhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    roots = {name.partition(".")[0] for name in found}
    return roots - sys.stdlib_module_names - {OWN, "polyphily_flower"}


# Constraints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "-oldest", "-newest"])
def test_constraints_fit_the_bounds(suffix: str) -> None:
    pins = constraints(suffix)
    groups = ("", "all", *every_extra("test"), *(["dev"] if not suffix else []))
    for name, one in requirements(*dict.fromkeys(groups)).items():
        assert name in pins, f"{name} is not in constraints{suffix}.txt"
        assert one.specifier.contains(pins[name])


def test_the_oldest_are_the_lower_bounds() -> None:
    pins = constraints("-oldest")
    for name, one in requirements("", *every_extra("test")).items():
        (lower,) = [part.version for part in one.specifier if part.operator == ">="]
        held_higher = {"cryptography", "protobuf", "hatchling"}  # flwr, or no such release
        if name not in held_higher:
            assert re.match(rf"{re.escape(lower)}(\.0)*$", pins[name]), f"{name}: {lower}"


def constraints(suffix: str) -> dict[str, str]:
    text = (ROOT / f"constraints{suffix}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): pin for name, _, pin in (x.partition("==") for x in lines)}


def every_extra(name: str) -> list[str]:
    """Return an extra and the extras that it includes."""
    inner = [extra for text in EXTRAS[name] for extra in sorted(Requirement(text).extras)]
    return [name, *(deeper for extra in inner for deeper in every_extra(extra))]


# Extras ---------------------------------------------------------------------------------------


def test_the_trial_of_the_wheel_tries_every_extra() -> None:
    path = ROOT / "tests" / "wheel_trial.py"
    spec = importlib.util.spec_from_file_location("wheel_trial", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TRIALS.keys() == EXTRAS.keys() - {"all", "docs", "test", "dev"}


def test_readme_names_every_extra() -> None:
    said = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Installation")[2]
    for name in EXTRAS.keys() - {"docs", "test", "dev"}:  # these are for developers, by make
        assert f"`{name}`" in said
