"""The extras: those that errors name exist, and `all` has what commands of the library need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def test_extras_that_errors_name_exist() -> None:
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'missing_package\(\s*"[^"]+",\s*"([^"]+)"', sources))
    assert {"flower", "privacy", "plot"} <= named
    assert named <= EXTRAS.keys()


def test_make_install_has_what_server_dp_and_track_need() -> None:
    (everything,) = EXTRAS["all"]
    (listed,) = re.findall(r"polyphily\[(.*)\]", everything)
    assert {"partition", "files", "plot", "flower", "privacy", "tensorboard"} == {
        *listed.split(",")
    }
    assert "--editable '.[all]'" in (ROOT / "Makefile").read_text(encoding="utf-8")
