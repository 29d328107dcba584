"""The settings of Sphinx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

from polyphily import __version__

project = "Polyphily"
author = "The Polyphily authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False
default_role = "code"  # docstrings have code between single backticks
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # attributes of the same name in several classes
INDENT = "    "
BREAK = "\u200b"  # a place where a line may break
LONG_WORD = 28  # of so many characters; a phone has room for about 40

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "Polyphily"
html_static_path = [str(Path(__file__).parent / "style.css")]
html_css_files = ["style.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "Polyphily"},
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_center": [],
    "footer_end": [],
    "show_prev_next": True,
    "show_toc_level": 2,
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
}


def _plain_docstring(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Write a docstring as reStructuredText.

    Docstrings are plain text with code between backticks. `w_` or `|x|` in the text is no
    reference, and indented lines behind a colon are code.
    """
    is_code = False
    for i, line in enumerate(lines):
        is_code = is_code and (line.startswith(INDENT) or not line)
        if is_code or line.lstrip().startswith(">>>"):
            continue
        head, text = _field(line)
        parts = re.split(r"(`[^`]*`)", text)
        parts = [p if p.startswith("`") else re.sub(r"([|*]|_(?=\W|$))", r"\\\1", p) for p in parts]
        lines[i] = head + "".join(parts)
        following = lines[i + 1 : i + 3]
        if text.endswith(":") and not head and len(following) == 2 and not following[0]:
            is_code = following[1].startswith(INDENT)
            lines[i] += ":" * is_code


def _field(line: str) -> tuple[str, str]:
    """Divide a line such as `:param x: text` behind the field; a directive has no text."""
    if line.lstrip().startswith(".. "):
        return line, ""
    found = re.match(r"(\s*:[^:]+:)(.*)$", line)
    return (found[1], found[2]) if found else ("", line)


def _short_signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str
) -> tuple[str, str] | None:
    """Write a default that a dataclass computes as `...`; Sphinx cannot read `<factory>`."""
    if not signature or "<factory>" not in signature:
        return None
    return signature.replace("<factory>", "..."), returned


def _finish(app: Any, doctree: nodes.document) -> None:
    """Mark code with long words, let headings of columns break, write dashes for ` -- `."""
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > LONG_WORD:
            code["classes"].append("long")
    for head in doctree.findall(nodes.thead):
        for text in list(head.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(text.replace(",", "," + BREAK)))
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- ") and isinstance(text.parent, nodes.paragraph):
            text.parent.replace(text, nodes.Text(" – " + text[4:]))


def setup(app: Any) -> None:
    """Connect the above with Sphinx."""
    app.connect("doctree-read", _finish)
    app.connect("autodoc-process-docstring", _plain_docstring, priority=900)
    app.connect("autodoc-process-signature", _short_signature)
