"""The documentation site: its navigation, its links, and the pages made from the library."""

from __future__ import annotations

import doctest
import re
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from website import navigation
from website.__main__ import loaded_from_elsewhere
from website.markdown import blocks, highlighted, links, relink, title
from website.staging import BrokenLink, _target, stage

import polyphily
from polyphily import extend
from polyphily.cli import app
from polyphily.core.method import METHODS
from polyphily.graphs.datasets import DATASETS
from polyphily.nn.backbones import BACKBONES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = re.compile(r"\[[\w./-]+\.md\]\([^)#\s]*[)#]")
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pages of the site."""
    folder = tmp_path_factory.mktemp("pages")
    stage(folder)
    return folder


@cache
def anchors(page: Path) -> set[str]:
    """Return the names by which links lead to headings of a page."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    for block in blocks(text):
        lines[slice(*block.lines)] = [""] * (block.lines[1] - block.lines[0])
    headings = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    found = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if re.match(r"[a-z]+:", target):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def test_the_navigation_names_every_page_once() -> None:
    sections = navigation.read()
    entries = [entry for section in sections for entry in navigation.flat(section.entries)]
    there = {str(path.relative_to(ROOT)) for path in WRITTEN} - {"README.md", "docs/index.md"}
    there |= {str(path.relative_to(ROOT)) for path in (DOCS / "tutorials").glob("*.py")}
    named = Counter(entry.source for entry in entries if entry.source)
    assert set(named) == there | {"CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"}
    assert set(named.values()) == {1}
    assert max(Counter(entry.page for entry in entries).values()) == 1
    assert [section.name for section in sections] == [
        *("tutorials", "how-to", "explanation", "reference", "results", "security", "extending")
    ]


def test_tutorials_are_in_the_order_of_their_table() -> None:
    table = (DOCS / "tutorials/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+\.py)\]", table, re.MULTILINE)
    (section,) = [section for section in navigation.read() if section.name == "tutorials"]
    named = [Path(entry.source).name for entry in section.entries]
    assert [name for name in named if name.endswith(".py")] == listed
    assert listed[0] == "chameleon.py"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_the_links_of_the_site_lead_somewhere(staged: Path) -> None:
    pages = sorted(staged.rglob("*.md"))
    assert len(pages) > 100
    wrong = {str(page.relative_to(staged)): broken(page) for page in pages}
    assert not {page: targets for page, targets in wrong.items() if targets}


def test_a_broken_link_is_an_error() -> None:
    with pytest.raises(BrokenLink, match=r"docs/data.md links to nowhere.md"):
        _target("nowhere.md", "docs/data.md", "data.md", {}, {})
    with pytest.raises(BrokenLink, match=r"the folder docs/figures"):
        _target("figures", "docs/data.md", "data.md", {}, {})


def test_links_out_of_docs_become_pages_or_files(staged: Path) -> None:
    page = (staged / "predict.md").read_text(encoding="utf-8")
    assert "](files/src/polyphily/nn/plain.py)" in page
    source = (ROOT / "src/polyphily/nn/plain.py").read_bytes()
    assert (staged / "files/src/polyphily/nn/plain.py").read_bytes() == source
    assert "](docs/" not in (staged / "contributing.md").read_text(encoding="utf-8")
    assert "](tutorials/pyg.md)" in (staged / "pyg.md").read_text(encoding="utf-8")


def test_there_is_a_page_for_every_method_with_what_leaves_a_site(staged: Path) -> None:
    for name in METHODS:
        page = (staged / "reference/methods" / f"{name}.md").read_text(encoding="utf-8")
        assert "## Sent by each site" in page
        for parameter in METHODS.find(name).hyperparameters():
            assert f"| `{parameter}`" in page, (name, parameter)
    fedspa = (staged / "reference/methods/fedspa.md").read_text(encoding="utf-8")
    assert "`high_frequency_area`" in fedspa
    assert "| Eq. 4 |" in fedspa
    local = (staged / "reference/methods/local.md").read_text(encoding="utf-8")
    assert "## Sent by each site\n\nNothing." in local


def test_every_option_of_every_command_is_named(staged: Path) -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        page = (staged / "reference/commands" / f"{name}.md").read_text(encoding="utf-8")
        below = getattr(command, "commands", {})
        for one in [command, *below.values()]:
            for parameter in one.params:
                for option in parameter.opts if parameter.param_type_name == "option" else ():
                    assert option in page, (name, option)
        for child in below:
            assert f"## polyphily {name} {child}" in page


def test_datasets_backbones_and_the_python_interface_are_complete(staged: Path) -> None:
    def text(page: str) -> str:
        return (staged / "reference" / page).read_text(encoding="utf-8")

    assert all(f"| `{name}` |" in text("datasets.md") for name in DATASETS)
    assert all(f"| `{name}` |" in text("backbones.md") for name in BACKBONES)
    assert all(f":: polyphily.{name}\n" in text("api.md") for name in polyphily.__all__)
    for name in extend.__all__:
        assert f"polyphily.extend.{name}\n" in text("extend.md") or name in polyphily.__all__


def test_no_page_has_a_path_of_this_machine(staged: Path) -> None:
    for page in staged.rglob("*.md"):
        assert str(Path.home()) not in page.read_text(encoding="utf-8")
        assert str(ROOT) not in page.read_text(encoding="utf-8")


def test_a_tutorial_becomes_a_page_of_text_and_code(staged: Path) -> None:
    page = (staged / "tutorials/pyg.md").read_text(encoding="utf-8")
    script = (DOCS / "tutorials/pyg.py").read_text(encoding="utf-8")
    assert title(page).startswith("From a torch_geometric")
    code = "\n".join(block.code for block in blocks(page) if block.language == "python")
    kept = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    assert [line for line in code.splitlines() if line.strip()] == kept
    assert (staged / "tutorials/pyg.py").read_text(encoding="utf-8") == script


def test_commands_are_highlighted_and_files_are_named() -> None:
    page = "# P\n\n    polyphily demo\n    make test\n\nText.\n\n    a formula\n\n"
    page += '```python title="a.py"\nx\n```\n'
    shown = highlighted(page)
    assert "```sh\npolyphily demo\nmake test\n```" in shown
    assert "    a formula" in shown
    assert "```{code-block} python\n:caption: a.py\n\nx\n```" in shown


def test_only_links_are_rewritten() -> None:
    page = "[a](a.md#x) [b](a.md.txt) ![c](a.md) `](a.md)` [w](https://a.md) [h](#a.md)"
    changed = relink(page, lambda target: f"new/{target}")
    assert "[a](new/a.md#x) [b](new/a.md.txt) ![c](new/a.md)" in changed
    assert changed.endswith("[w](https://a.md) [h](#a.md)")


def test_links_that_show_a_file_name_show_the_title_of_its_page(staged: Path) -> None:
    page = (staged / "deploy.md").read_text(encoding="utf-8")
    assert "[security.md](" in (DOCS / "deploy.md").read_text(encoding="utf-8")
    assert "[Security](security.md)" in page
    shown = [found for page in staged.rglob("*.md") for found in NAMES.findall(page.read_text())]
    assert not shown


def test_what_pages_load_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://x.org">x</a><img src="x.png">', "utf-8")
    assert loaded_from_elsewhere(tmp_path) == []
    (tmp_path / "bad.html").write_text('<script async src="https://x.org/a.js">', "utf-8")
    (tmp_path / "font.css").write_text("@font-face{src:url(//x.org/f.woff2)}", "utf-8")
    found = loaded_from_elsewhere(tmp_path)
    assert found == ["bad.html: https://x.org/a.js", "font.css: //x.org/f.woff2"]


@pytest.mark.parametrize("name", ["markdown", "tutorials", "commands"])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(f"website.{name}"))
    assert result.attempted
    assert not result.failed


def test_pictures_load_nothing_from_elsewhere() -> None:
    pictures = sorted(DOCS.rglob("*.svg"))
    assert DOCS / "demo.svg" in pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        assert not re.search(r"(url\(\W?|(href|src)=\W)https?:", text), picture.name
