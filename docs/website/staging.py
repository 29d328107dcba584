"""Staging: all pages of the site as Markdown in one folder, for Sphinx to build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from website import api, commands, markdown, navigation, registries, tutorials
from website.navigation import DOCS, ROOT, START, Section

MAKERS: dict[str, Callable[[], dict[str, str]]] = {
    "api": api.pages,
    "backbones": registries.backbones,
    "commands": commands.pages,
    "datasets": registries.datasets,
    "equations": registries.equations,
    "extend": api.plugin_pages,
    "methods": registries.methods,
    "metrics": registries.metrics,
    "partitions": registries.partitions,
}
FOLDERS = {"docs/equations": "equations/index.md", "docs": START, "docs/results": "results.md"}


class BrokenLink(Exception):
    """A link to a file that does not exist."""


def stage(out: Path) -> None:
    """Write all pages, and the files that they link to, into a folder.

    Raises:
        BrokenLink: for a link to a file that does not exist, with its page.
    """
    sections = navigation.read()
    pages: dict[str, str] = {}
    sources: dict[str, str] = {f"docs/{START}": START, "README.md": START}
    for section in sections:
        for entry in navigation.flat(section.entries):
            if entry.source:
                pages[entry.page] = _read(ROOT / entry.source)
                sources[entry.source] = entry.page
    pages[START] = _read(DOCS / START)
    made = {
        entry.page: MAKERS[entry.made]()
        for section in sections
        for entry in navigation.flat(section.entries)
        if entry.made
    }
    titles = {source: markdown.title(pages[page]) for source, page in sources.items()}
    copied: dict[str, Path] = {}
    for source, page in sources.items():
        if page in pages and source != "README.md":
            folder = PurePosixPath(source).parent
            named = markdown.name_links(
                pages[page], lambda target, f=folder: titles.get(os.path.normpath(f / target), "")
            )
            pages[page] = markdown.highlighted(
                markdown.relink(
                    named,
                    lambda target, s=source, p=page: _target(target, s, p, sources, copied),
                )
            )
    for group in made.values():
        pages |= group
    for section in sections:
        pages[section.page] = _section_page(section, pages)
        for entry in navigation.flat(section.entries):
            below = [child.page for child in entry.below]
            below += [page for page in made.get(entry.page, ()) if page != entry.page]
            pages[entry.page] += _toctree(below)
    pages[START] += _toctree([section.page for section in sections], "Start here <self>")
    for page, text in pages.items():
        _write(out / page, text)
    for place, file in copied.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / place)


def _read(file: Path) -> str:
    """Return the Markdown of a page; that of a script is made of its cells."""
    text = file.read_text(encoding="utf-8")
    return tutorials.page(text, file.name) if file.suffix == ".py" else text


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _target(
    target: str, source: str, page: str, sources: dict[str, str], copied: dict[str, Path]
) -> str:
    """Return the target of a link on the site, from its target in the repository.

    Links to pages lead to pages. Other files are copied to the site, so that they can be
    downloaded.

    Args:
        target: as written in the page.
        source: the file of the page in the repository.
        page: the path of the page on the site.
        sources: the page that each file of the repository became.
        copied: files to copy, by their paths on the site; this adds to them.
    """
    path, sharp, anchor = target.partition("#")
    named = os.path.normpath(PurePosixPath(source).parent / path)
    file = ROOT / named
    if not file.exists():
        raise BrokenLink(f"{source} links to {target}, which does not exist: mend the link")
    is_script = named.endswith(".py") and named == source
    if file.is_dir():
        place = FOLDERS.get(named) or sources.get(f"{named}/README.md", "")
        if not place:
            raise BrokenLink(f"{source} links to the folder {named}: link to a page in it")
    elif named in sources and not is_script:
        place = sources[named]
    else:
        place = named.removeprefix("docs/")
        if place == named or file.suffix == ".html":  # pages of the site have this suffix
            place = f"files/{place}"
        copied[place] = file
    return os.path.relpath(place, PurePosixPath(page).parent) + sharp + anchor


def _section_page(section: Section, pages: dict[str, str]) -> str:
    """Return the page of a section: its introduction, and a list of its pages."""
    lines = []
    for entry in section.entries:
        about = entry.about or markdown.first_sentence(pages[entry.page])
        link = os.path.relpath(entry.page, section.name)
        lines.append(f"- [{markdown.title(pages[entry.page])}]({link})\\\n  {about}")
    listed = "\n".join(lines)
    tree = _toctree([entry.page for entry in section.entries])
    return f"# {section.title}\n\n{section.text}\n\n{listed}\n{tree}"


def _toctree(pages: list[str], *first: str) -> str:
    """Return the block that puts pages below another in the navigation, behind other entries."""
    if not pages:
        return ""
    listed = "\n".join([*first, *(f"/{page.removesuffix('.md')}" for page in pages)])
    return f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
