"""The pages of the site, in the order of `nav.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = DOCS.parent
START = "index.md"


@dataclass(frozen=True)
class Entry:
    """A page of a section.

    Attributes:
        page: its path on the site, with the suffix .md.
        source: the file that it is made of, from the root of the repository; "" if it is made from
            the library.
        about: a sentence on it, for the page of the section.
        made: the name of what makes the page, and further pages below it, from the library.
        below: pages that belong to this one.
    """

    page: str
    source: str = ""
    about: str = ""
    made: str = ""
    below: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the site: its folder, title, introduction and pages."""

    name: str
    title: str
    text: str
    entries: tuple[Entry, ...]

    @property
    def page(self) -> str:
        """The path of the section's own page."""
        return f"{self.name}/index.md"


def read(docs: Path = DOCS) -> list[Section]:
    """Return the sections of `nav.toml`, without optional pages that are absent."""
    with (HERE / "nav.toml").open("rb") as file:
        sections = tomllib.load(file)["section"]
    return [
        Section(
            section["name"],
            section["title"],
            " ".join(section["text"].split()),
            tuple(entry for given in section["pages"] for entry in _entries(given, docs)),
        )
        for section in sections
    ]


def _entries(given: Mapping[str, Any], docs: Path) -> Iterator[Entry]:
    """Yield the entries that a table of `nav.toml` stands for: none, one, or one for each file."""
    if "files" in given:
        for path in sorted(docs.glob(given["files"])):
            name = path.relative_to(docs)
            yield Entry(str(name.with_suffix(".md")), source=f"docs/{name}")
        return
    page = given["page"]
    source = given.get("source", f"docs/{page}")
    if given.get("optional") and not (docs / page).exists():
        return
    yield Entry(
        page,
        source="" if "made" in given else source,
        about=given.get("about", ""),
        made=given.get("made", ""),
        below=tuple(e for child in given.get("below", ()) for e in _entries(child, docs)),
    )


def flat(entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """Yield entries and all those below them."""
    for entry in entries:
        yield entry
        yield from flat(entry.below)
