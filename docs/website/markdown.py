"""Reading and changing Markdown: links, titles, blocks of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

SHELL = ("sh", "bash", "console", "shell")
COMMANDS = ("polyphily", "python", "pip", "make", "torchrun", "PYTHONPATH=src", "$")
INDENT = "    "


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        code: its text, without fence and indentation.
        language: the first word behind the fence; "sh" for an indented block of commands, and ""
            for other indented text.
        title: the title behind the fence, as in ```python title="src/polyphily/version.py".
        lines: its first line and the line behind it, fence included, from 0.
    """

    code: str
    language: str
    title: str
    lines: tuple[int, int]


def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(text: str) -> list[Block]:
    """Return the fenced and the indented blocks of code of a page."""
    found = []
    for token in _tokens(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        language, _, rest = token.info.strip().partition(" ")
        if token.type == "code_block" and token.content.split()[0] in COMMANDS:
            language = "sh"
        titled = re.search(r'title="([^"]*)"', rest)
        place = (token.map[0], token.map[1])
        found.append(Block(token.content, language, titled[1] if titled else "", place))
    return found


def links(text: str) -> Iterator[str]:
    """Yield the targets of all links and images of a page."""
    for token in _tokens(text):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield unquote(str(target))


def relink(text: str, change: Callable[[str], str]) -> str:
    """Return a page with other targets of its relative links."""
    for target in sorted(set(links(text)), key=len, reverse=True):
        if not re.match(r"[a-z]+:|#", target) and (new := change(target)) != target:
            text = re.sub(rf"\]\({re.escape(target)}(?=[)\s])", lambda _, new=new: f"]({new}", text)
    return text


def name_links(text: str, named: Callable[[str], str]) -> str:
    """Return a page in which links that show the name of a file show the title of its page.

    Args:
        text: the page.
        named: returns the title of the page that a relative link leads to; "" if there is none.

    >>> name_links("See [data.md](data.md#tables) and [the data](data.md).", lambda _: "Data")
    'See [Data](data.md#tables) and [the data](data.md).'
    """

    def shown(found: re.Match[str]) -> str:
        return f"[{named(found[2]) or found[1]}]({found[2]}{found[3] or ''})"

    return re.sub(r"\[([\w./-]+\.md)\]\(([^)#\s]+)(#[^)\s]*)?\)", shown, text)


def title(text: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"a page without a title: {text[:60]!r}")
    return found[1].strip()


def first_sentence(text: str) -> str:
    """Return the first sentence below the title of a page.

    >>> first_sentence("# A page\\n\\nIt has two\\nsentences. This is one.")
    'It has two sentences.'
    """
    body = text[text.index("# ") :].partition("\n")[2].strip()
    paragraph = " ".join(body.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0]


def escape(text: str) -> str:
    """Escape plain text, in which only code between backticks is marked, for Markdown.

    >>> escape("w_k * `a_b` [K]")
    'w\\\\_k \\\\* `a_b` \\\\[K\\\\]'
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        p if p.startswith("`") else re.sub(r"([*_\[\]<>|$\\])", r"\\\1", p) for p in parts
    )


def cell(text: str) -> str:
    """Escape plain text for a cell of a table."""
    parts = re.split(r"(`[^`]*`)", escape(text))
    return "<br>".join(
        "".join(p.replace("|", "\\|") if p.startswith("`") else p for p in parts).splitlines()
    )


def table(
    heading: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[str, ...] = ()
) -> str:
    """Return a table; its cells are Markdown already. Columns of numbers are aligned right."""
    rule = tuple("---:" if name in right else "---" for name in heading)
    lines = [heading, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def highlighted(text: str) -> str:
    """Return a page in which blocks of commands are fenced as shell, and titles are shown."""
    lines = text.split("\n")
    for block in reversed(blocks(text)):
        start, end = block.lines
        if lines[start].startswith(INDENT) and block.language == "sh":
            code = [line.removeprefix(INDENT) for line in lines[start:end]]
            while not code[-1].strip():
                code.pop()
            lines[start:end] = ["```sh", *code, "```", ""]
        elif block.title:
            lines[start] = f"```{{code-block}} {block.language}\n:caption: {block.title}\n"
    return "\n".join(lines)
