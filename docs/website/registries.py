"""The pages of methods, datasets, partitions, backbones and metrics.

They show what `polyphily methods show NAME --json`, `polyphily datasets --json` and so on print.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from typing import Any

import click
import typer
from click.testing import CliRunner

from polyphily.cli import app
from polyphily.core.method import METHODS
from polyphily.core.search import Search
from website.markdown import cell, escape, table, title
from website.navigation import DOCS

FOLDER = "reference/methods"


def printed(*words: str) -> Any:
    """Return what a command prints with --json."""
    result = CliRunner().invoke(_command(), [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@cache
def _command() -> click.Command:
    return typer.main.get_command(app)


# Methods ------------------------------------------------------------------------------------------


def methods() -> dict[str, str]:
    """Return a page on all methods, and one for each of them."""
    listed = printed("methods")
    rows = [
        (f"[{row['name']}]({row['name']}.md)", cell(row["summary"]), row["evaluated"])
        for row in listed
    ]
    index = (
        "# Methods\n\n`polyphily methods` lists them, and `polyphily methods show NAME` prints "
        "what the page of a method shows. *Global* methods are evaluated with the model that the "
        "server sends, *personal* ones with each client's own model.\n\n"
    )
    pages = {f"{FOLDER}/index.md": index + table(("method", "what it does", "evaluated"), rows)}
    for row in listed:
        name = row["name"]
        pages[f"{FOLDER}/{name}.md"] = method(printed("methods", "show", name), row["summary"])
    return pages


def method(facts: dict[str, Any], summary: str) -> str:
    """Return the page of a method."""
    name = facts["name"]
    doc = inspect.cleandoc(METHODS.find(name).__doc__ or "")
    paragraphs = [_paragraph(part) for part in doc.split("\n\n")]
    model = (
        "the model the server sends"
        if facts["evaluated"] == "global"
        else "each client's own model"
    )
    parts = [
        f"# {name}",
        f"*{escape(_without_files(facts['citation']))}*" if facts["citation"] else "",
        escape(summary[:1].upper() + summary[1:]),
        f"```sh\npolyphily run {name} --dataset cora --clients 10\n```",
        "## What it computes",
        *paragraphs,
        _equations(name),
        f"Evaluated: {facts['evaluated']}, {model}. The best round is chosen per "
        f"{facts['selection']}.",
        "## Hyperparameters",
        _hyperparameters(facts["hyperparameters"], METHODS.find(name).search_ranges()),
    ]
    if facts["left_open"]:
        parts += ["## Open in the paper, and what is done here"]
        parts += ["\n".join(f"- {escape(sentence)}" for sentence in facts["left_open"])]
    parts += ["## Backbones", ", ".join(f"`{backbone}`" for backbone in facts["backbones"])]
    secure = facts["secure_aggregation"]
    answer = (
        "Works: the server needs only sums of uploads."
        if secure["possible"]
        else (f"Refused: {escape(secure['why_not'])}.")
    )
    parts += ["## Sent by each site", _tensors(facts["uploaded"])]
    parts += ["## Sent to each site", _tensors(facts["downloaded"])]
    parts += ["## Secure aggregation", answer, _more(name)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _without_files(citation: str) -> str:
    """Return a citation without a page of this repository, to which there is a link below."""
    return "The library's own method" if citation.startswith("Polyphily, docs/") else citation


def _paragraph(text: str) -> str:
    """Return a paragraph of a docstring as Markdown; formulas are indented and stay as they are."""
    if all(line.startswith("    ") for line in text.splitlines()):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    return escape(" ".join(text.split()))


def _hyperparameters(rows: list[dict[str, Any]], ranges: Mapping[str, Search]) -> str:
    if not rows:
        return "None."
    lines = []
    for row in rows:
        name = f"`{row['name']}`" + (
            "" if row["symbol"] == row["name"] else f" {cell(row['symbol'])}"
        )
        meaning = (
            row["meaning"],
            f"One of: {', '.join(row['choices'])}." if row["choices"] else "",
            f"Default: `{row['default']}`" if row["default"] != "" else "Default: none",
            *[f"{form}: `{row[form]}`" for form in ("paper", "code") if row[form] is not None],
            f"--tune: {ranges[row['name']]}" if row["search"] else "",
        )
        lines.append((name.strip(), cell("\n".join(filter(None, meaning)))))
    return "Set with `--set name=value`.\n\n" + table(("name", "meaning"), lines)


def _tensors(rows: list[dict[str, str]]) -> str:
    """Return a list of tensors with the same meaning, each with its name and shape."""
    if not rows:
        return "Nothing."
    parts = []
    for (meaning, rounds, server, treatment), tensors in groupby(
        rows, lambda r: (r["meaning"] or r["role"], r["rounds"], r["server"], r.get("dp", ""))
    ):
        text = f"**{escape(meaning[:1].upper() + meaning[1:])}**, {escape(rounds)}."
        if server:
            text += f" At the server: {escape(server)}. With `--dp`: {escape(treatment)}."
        shapes = [(f"`{row['name']}`", cell(row["shape"])) for row in tensors]
        parts += [text, table(("tensor", "shape"), shapes)]
    return "\n\n".join(parts)


def _equations(name: str) -> str:
    """Return the first two columns of the table in docs/equations, if there is one."""
    file = DOCS / "equations" / f"{name}.md"
    if not file.exists():
        return ""
    rows = re.findall(
        r"^\| *([^|]+?) *\| *((?:\\\||[^|])+?) *\|", file.read_text("utf-8"), flags=re.M
    )
    shown = [
        row for row in rows if row[0].startswith(("Eq", "Sec", "Alg", "Def", "Fig", "App", "Table"))
    ]
    more = (
        f"where each is in the code: [{title(file.read_text('utf-8'))}](../../equations/{name}.md)."
    )
    return f"{table(('where', 'what it says'), shown)}\nThe tests, and {more}"


def _more(name: str) -> str:
    """Return links to the other pages on a method."""
    known = {
        f"baselines/{name}.md": "The paper, the authors' code, and this library",
        f"reproduction/{name}.md": "The paper's tables and figures, published and reproduced",
        f"{name}.md": "The method in detail",
    }
    lines = [f"- [{text}](../../{page})" for page, text in known.items() if (DOCS / page).exists()]
    return "\n".join(["## More", "", *lines]) if lines else ""


def equations() -> dict[str, str]:
    """Return the page above the pages in docs/equations."""
    files = sorted((DOCS / "equations").glob("*.md"))
    lines = [f"- [{title(file.read_text('utf-8'))}]({file.name})" for file in files]
    text = (
        "# Equations of the papers\n\nA page for each paper: every equation, where it is in the "
        "code, whether the two match, and the test that compares them.\n\n"
    )
    return {"equations/index.md": text + "\n".join(lines) + "\n"}


# The other registries -----------------------------------------------------------------------------


def datasets() -> dict[str, str]:
    """Return the page of datasets."""
    parts = [
        "# Datasets",
        "`polyphily datasets` also says which files are present. Others are downloaded from their "
        "sources when they are first used, into the folder `POLYPHILY_DATA`. Options follow the "
        "name, as in `csbm:nodes=200`. Your own files are described in [Bringing your own data]"
        "(../data.md).",
    ]
    found = printed("datasets")
    for kind in dict.fromkeys(row["kind"] for row in found):
        parts.append(f"## {kind[:1].upper()}{kind[1:]}")
        listed = [row for row in found if row["kind"] == kind]
        numbers = ("nodes", "edges", "features", "classes")
        cells = [
            (
                f"`{row['name']}`",
                *[f"{row[key]:,}" if row[key] else "any" for key in numbers],
                row["metric"],
            )
            for row in listed
        ]
        parts.append(table(("dataset", *numbers, "metric"), cells, right=numbers))
        for row in listed:
            source = re.sub(r"(https?://[^\s;,)]+)", r"<\1>", row["source"])
            text = f"- `{row['name']}`: {escape(row['title'])}. {escape(row['citation'])}."
            text = text.replace("..", ".") + f" Source: {source}."
            text += "".join(
                f"\n    - `{option}`: {escape(meaning)}"
                for option, meaning in row["options"].items()
            )
            parts.append(text)
    return {"reference/datasets.md": "\n\n".join(parts) + "\n"}


def partitions() -> dict[str, str]:
    """Return the page of partitions."""
    rows = [(f"`{row['name']}`", cell(row["summary"])) for row in printed("partitions")]
    text = (
        "# Partitions\n\nWays to divide one graph among clients, for `--partition`. Options follow "
        "the name, as in `dirichlet:alpha=0.5`.\n\n"
    )
    return {"reference/partitions.md": text + table(("partition", "what it does; options"), rows)}


def backbones() -> dict[str, str]:
    """Return the page of backbones."""
    rows = [
        (f"`{row['name']}`", cell(row["summary"]), cell(row["citation"]))
        for row in printed("backbones")
    ]
    text = "# Backbones\n\nNetworks by name, for `--backbone`. A method may not support all.\n\n"
    return {"reference/backbones.md": text + table(("backbone", "what it is", "citation"), rows)}


def metrics() -> dict[str, str]:
    """Return the page of metrics."""
    rows = [
        (
            f"`{row['name']}`",
            cell(row["summary"]),
            str(row["classes"] or "any"),
            "yes" if row["selects"] else "no",
        )
        for row in printed("metrics")
    ]
    text = (
        "# Metrics\n\nAll of them are computed after every round. The last column says whether "
        "`--metric` can take the metric to select the best round on validation. "
        "[Scores, rare classes and decisions](../scores.md) explains them.\n\n"
    )
    heading = ("metric", "what it does", "classes", "selects")
    return {"reference/metrics.md": text + table(heading, rows)}
