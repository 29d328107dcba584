"""The code in the documentation: its Python runs, its command lines parse."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from website.markdown import SHELL, Block, blocks

from polyphily.cli import app
from polyphily.core.method import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCKS = {str(page.relative_to(ROOT)): blocks(page.read_text(encoding="utf-8")) for page in PAGES}
ELSEWHERE = {  # pages whose Python other tests run
    "docs/edges.md": "tests/test_edges.py",  # and compares what is printed
    "docs/extending.md": "tests/test_extending.py",  # as installed packages
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def python(page: str) -> list[Block]:
    """Return the Python of a page that is not copied from the code of the library."""
    return [block for block in BLOCKS[page] if block.language == "python" and not block.title]


def small(code: str) -> str:
    """Return code with fewer rounds, trials, epochs and nodes, so that it runs in a second.

    >>> small('run("fedavg", rounds=20)')
    'run("fedavg", rounds=2)'
    """
    return re.sub(
        r"\b(rounds|trials|tune|epochs|nodes)=(\d+)",
        lambda found: f"{found[1]}={min(int(found[2]), 60 if found[1] == 'nodes' else 2)}",
        code,
    )


def files(page: str) -> dict[str, str]:
    """Return the files that a page prints below a line such as `sites/schema.toml`: by name."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = {}
    for block in BLOCKS[page]:
        above = " ".join(lines[max(0, block.lines[0] - 2) : block.lines[0]]).strip()
        if named := re.fullmatch(r"`(\S+/\S+)`:", above):
            found[named[1]] = block.code
    return found


def command_lines() -> list[tuple[str, str]]:
    """Return the lines of all blocks of commands, with their pages."""
    found = []
    for page, inside in BLOCKS.items():
        for block in inside:
            if block.language in SHELL:
                lines = block.code.replace("\\\n", " ").splitlines()
                found += [(page, line.strip()) for line in lines if line.strip()]
    return found


def words_of(line: str) -> list[str]:
    """Return the words of a command line, without prompt, comment, variables and launcher.

    Brackets around options that may be left out are removed.
    """
    line = re.sub(r"\[(-[^\]]*)\]", r"\1", line.removeprefix("$ "))
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if words[:1] in (["torchrun"], ["python"]) and "-m" in words:
        module = words[words.index("-m") + 1 :]
        return module if module[0] == "polyphily" else words
    return words


@cache
def command_line() -> Any:
    """Return the command line; making it takes a while."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line, without running it."""
    rest = [word for word in words if word not in ("-h", "--help", "--version")]
    command = command_line()
    context = None
    while rest:
        context = command.make_context(command.name, list(rest), parent=context)
        at = next((i for i, word in enumerate(rest) if not word.startswith("-")), None)
        if at is None or not hasattr(command, "resolve_command"):
            return dict(context.params)
        _, command, rest = command.resolve_command(context, rest[at:])
    if hasattr(command, "resolve_command") or "--help" in words:
        return {}
    return dict(command.make_context(command.name, [], parent=context).params)


def check(line: str) -> None:
    """Check a command line: its command exists, and so do all its options and methods."""
    words = words_of(line)
    if not words:
        return
    first, *rest = words
    if first == "polyphily":
        asked = parse(rest)
        named = asked.get("methods") or [asked.get("method") or asked.get("name")]
        for name in filter(None, named if rest[:1] in (["run"], ["compare"], ["methods"]) else []):
            assert name == "METHOD" or name.lower() in {*METHODS, "all", "fedavgm"}, name
    elif first == "make":
        rule = rf"^([\w-]+ )*{rest[0]}( [\w-]+)*:"
        assert re.search(rule, (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif first == "source":
        assert rest == [".venv/bin/activate"]  # of `make install`
    elif first == "pip":
        for extra in re.findall(r"\[(.*)\]", line):
            assert set(extra.split(",")) <= EXTRAS.keys()
    elif words[:3] == ["python", "-m", "timeit"]:
        for statement in rest[2:]:
            if " " in statement:
                ast.parse(textwrap.dedent(statement))
    elif first == "python":
        script = (ROOT / rest[0]).read_text(encoding="utf-8")
        for flag in (word for word in rest[1:] if word.startswith("--")):
            assert f'"{flag}"' in script, f"{rest[0]} has no {flag}"
    else:
        raise AssertionError(f"no test knows how to check '{first}'")


@pytest.mark.parametrize("page", [page for page in BLOCKS if python(page)])
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in ELSEWHERE:
        assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
        return
    monkeypatch.chdir(tmp_path)
    for name, text in files(page).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in python(page):
        code = "\n" * (block.lines[0] + 1) + small(block.code)  # with the line numbers of the page
        exec(compile(code, page, "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "block"),
    [(page, block) for page, inside in BLOCKS.items() for block in inside if block.title],
)
def test_code_with_the_name_of_a_file_is_in_that_file(page: str, block: Block) -> None:
    text = (ROOT / block.title).read_text(encoding="utf-8")
    inside = {textwrap.indent(block.code, " " * n) for n in (0, 4, 8)}
    assert any(code in text for code in inside), f"{page} shows code that {block.title} lacks"


@pytest.mark.parametrize(
    ("page", "block"),
    [(page, b) for page, inside in BLOCKS.items() for b in inside if b.language == "toml"],
)
def test_toml_can_be_read(page: str, block: Block) -> None:
    assert tomllib.loads(block.code)


@pytest.mark.parametrize("page", sorted({page for page, _ in command_lines()}))
def test_the_command_lines_of_a_page_parse(page: str) -> None:
    for line in (line for of, line in command_lines() if of == page):
        try:
            check(line)
        except Exception as error:
            pytest.fail(f"{page}: {line}\n{error}")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("polyphily run fedavg --round 3", "No such option"),
        ("polyphily runs", "No such command"),
        ("polyphily demo x", "unexpected"),
        ("polyphily methods shows", "No such command"),
        ("polyphily compare --round", "No such option"),
        ("polyphily run fedaverage", "fedaverage"),
        ("torchrun -m polyphily run fedavg --round 3", "No such option"),
        ("PYTHONPATH=src python benchmarks/blocks.py --nonsense", "--nonsense"),
        ("pip install 'polyphily[nonsense]'", "nonsense"),
        ("make nonsense", "None"),
        ("poliphily run", "poliphily"),
    ],
)
def test_a_wrong_command_line_would_be_found(line: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        check(line)


def test_right_command_lines_are_read_as_meant() -> None:
    assert parse(["run", "fedavg", "--rounds", "3"])["rounds"] == 3
    assert list(parse(["compare", "fedavg", "local", "--json"])["methods"]) == ["fedavg", "local"]
    assert parse(["methods", "show", "moon"])["name"] == "moon"
    for words in (["methods"], ["methods", "--json"], ["datasets"], ["demo", "--rounds", "2"], []):
        parse(words)
    assert len(command_lines()) > 100
