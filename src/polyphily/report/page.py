"""The page as one HTML file: text, tables, and figures that a script draws from numbers."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from polyphily.report.blocks import Content, Entries, Figure, Item, Section, Table
from polyphily.runs.folder import clean, write_text
from polyphily.version import __version__

PAGE = "report.html"
LONG = 60  # cells with more characters may break their lines
SORTED = 3  # tables with as many rows can be sorted by a click on a heading
# The page fetches nothing; this policy makes the browser refuse any request.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write(content: Content, file: Path) -> None:
    write_text(file, render(content))


def render(content: Content, *, version: str | None = None) -> str:
    """Return the HTML of a page. It needs no other file and no network.

    Args:
        content: what it shows.
        version: of a page that `polyphily watch` serves. Its script asks for news.
    """
    live = version is not None
    policy = f"{POLICY}; connect-src 'self'" if live else POLICY
    script = f"<script>\n{_asset('live.js')}</script>\n" if live else ""
    status = '<div class="live" role="status"></div>\n' if live else ""
    sections = content.sections
    links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections)
    facts = "".join(
        f'<div><dt>{escape(fact.label)}</dt><dd class="value">{escape(fact.value)}</dd>'
        f'<dd class="note">{escape(fact.note)}</dd></div>'
        for fact in content.facts
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in content.notes)
    figures = {
        item.id: {
            "kind": item.kind,
            "title": item.title,
            "choices": [{"name": c.name, "options": c.options} for c in item.choices],
            "panels": item.panels,
        }
        for section in sections
        for item in section.items
        if isinstance(item, Figure)
    }
    return f"""<!doctype html>
<html lang="en"{f' data-version="{escape(version)}"' if version else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(content.title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
<header class="top"><div class="wrap">
<div class="over"><span class="brand">polyphily</span>
<button type="button" class="theme" title="Light or dark">light / dark</button></div>
{status}<h1>{escape(content.title)}</h1>
<p class="subtitle">{escape(content.subtitle)}</p>
<dl class="facts">{facts}</dl>
</div></header>
<nav aria-label="Sections"><div class="wrap">{links}</div></nav>
<main class="wrap">
{"".join(map(_section, sections))}
<div class="notes">{notes}</div>
</main>
<footer class="wrap">Made by polyphily {__version__}.</footer>
<script type="application/json" id="figures">{_embedded(figures)}</script>
<script>
{_asset("charts.js")}</script>
{script}</body>
</html>
"""


def _section(section: Section) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    points = "".join(f"<li>{escape(point)}</li>" for point in section.points)
    listed = f'<ul class="points">{points}</ul>' if points else ""
    items = "".join(map(_item, section.items))
    return (
        f'<section id="{section.id}"><h2>{escape(section.title)}</h2>{lead}{listed}'
        f'<div class="items">{items}</div></section>\n'
    )


def _item(item: Item) -> str:
    if isinstance(item, Figure):
        return _figure(item)
    return _table(item) if isinstance(item, Table) else _entries(item)


def _figure(figure: Figure) -> str:
    buttons = "".join(
        f'<button type="button" data-save="{kind}" title="Save as {kind.upper()}">'
        f"{kind.upper()}</button>"
        for kind in ("svg", "png")
    )
    width = " class=half" if figure.half else ""
    return (
        f'<figure{width} data-figure="{figure.id}">'
        f'<div class="head"><h3>{escape(figure.title)}</h3><div class="save">{buttons}</div></div>'
        '<div class="controls"></div><div class="canvas"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
    )


def _table(table: Table) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        classes = ["word"] * (column < table.text_columns) + ["long"] * (len(text) > LONG)
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        if tag == "th" and len(table.rows) >= SORTED:
            attribute += ' data-sort tabindex="0" title="Sort"'
        return f"<{tag}{attribute}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(table.columns))
    body = "".join(
        f"<tr{' class=strong' if r in table.strong else ''}>"
        f"{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>"
        for r, row in enumerate(table.rows)
    )
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="table"><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{caption}</div>\n"
    )


def _entries(entries: Entries) -> str:
    title = f"<h3>{escape(entries.title)}</h3>" if entries.title else ""
    pairs = "".join(
        f"<div{' class=long' if len(value) > LONG // 2 else ''}>"
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in entries.pairs.items()
    )
    return f'<div class="entries">{title}<dl>{pairs}</dl></div>\n'


def _embedded(data: object) -> str:
    """Return JSON that is safe inside a script element, whatever characters it contains."""
    text = json.dumps(clean(data), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("polyphily.report").joinpath("assets", name).read_text(encoding="utf-8")
