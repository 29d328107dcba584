"""`polyphily methods`, `datasets`, `partitions` and `backbones`: what there is."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

methods = typer.Typer(help="The methods, and what each shares.", invoke_without_command=True)


def add_to(app: typer.Typer) -> None:
    app.add_typer(methods, name="methods")
    app.command("datasets")(datasets)
    app.command("partitions")(partitions)
    app.command("backbones")(backbones)


@methods.callback()
def list_methods(context: typer.Context, as_json: AsJson = False) -> None:
    """List the methods."""
    if context.invoked_subcommand:
        return
    from polyphily.core.method import load_all

    found = load_all()
    rows = [
        {
            "name": name,
            "summary": what_it_does(cls),
            "evaluated": cls.evaluated,
            "citation": cls.cite,
        }
        for name, cls in sorted(found.items())
    ]
    show(rows, as_json, {"name": "method", "summary": "what it does", "evaluated": "evaluated"})


@methods.command("show")
def show_method(
    name: Annotated[str, typer.Argument(help="The method's name.")], as_json: AsJson = False
) -> None:
    """Citation, hyperparameters, and exactly what leaves a site and comes back."""
    from polyphily.core.method import find
    from polyphily.methods.traffic import trace
    from polyphily.privacy.differential import treatment

    cls = find(name)
    up, down = trace(cls())
    up = [{**row, "dp": treatment(cls, row["name"])} for row in up]
    refusal = cls.averaged if isinstance(cls.averaged, str) else None
    parameters = [
        {
            "name": field.name,
            "symbol": field.metadata.get("symbol", ""),
            "default": field.default,
            "paper": field.metadata.get("paper"),
            "meaning": field.metadata.get("doc", ""),
            "choices": list(field.metadata.get("choices", ())),
        }
        for field in cls.hyperparameters().values()
    ]
    facts = {
        "name": cls.name,
        "description": " ".join((cls.__doc__ or "").split()),
        "citation": cls.cite,
        "evaluated": cls.evaluated,
        "selection": cls.selection,
        "hyperparameters": parameters,
        "uploaded": up,
        "downloaded": down,
        "secure_aggregation": {"possible": refusal is None, "why_not": refusal},
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{cls.name}[/bold]  [dim]{cls.cite}[/dim]")
    console.print(_paragraphs(cls.__doc__), markup=False)
    console.print(
        f"\n[bold]Evaluated[/bold] {cls.evaluated}: "
        + ("the model the server sends" if cls.evaluated == "global" else "each client's own model")
        + f"; best round chosen per {cls.selection}"
    )
    departs = any(p["paper"] is not None for p in parameters)
    hint = "; --set paper=on takes the paper's values" if departs else ""
    console.print(f"\n[bold]Hyperparameters[/bold] (--set name=value{hint})")
    if parameters:
        rows = [_in_words(p) for p in parameters]
        console.print(_table(rows, {name: name for name in ("name", "value", "meaning")}))
    else:
        console.print("  none")
    for title, rows in (("Leaves a site", up), ("Comes back", down)):
        console.print(f"\n[bold]{title}[/bold], each round (backbone gcn, 2 layers)")
        if rows:
            dp = {"dp": "with --dp"} if rows is up else {}
            console.print(_table(rows, {"name": "tensor", "shape": "shape", **dp}))
        else:
            console.print("  nothing")
    answer = f"no: {refusal}" if refusal else "yes: the server can do with sums of uploads"
    console.print(f"\n[bold]Secure aggregation[/bold] {answer}")


def datasets(as_json: AsJson = False) -> None:
    """List the datasets: statistics, origin, and whether the files are there."""
    from polyphily.graphs.datasets import DATASETS, data_root, is_present

    rows: list[dict[str, Any]] = [
        {
            "name": info.name,
            "title": info.title,
            "kind": info.kind,
            "nodes": info.nodes,
            "edges": info.edges,
            "features": info.features,
            "classes": info.classes,
            "metric": info.metric,
            "natural": info.natural,
            "clients": info.default_clients,
            "options": dict(info.options),
            "present": is_present(info.name),
            "source": info.source,
            "citation": info.citation,
        }
        for info in DATASETS.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [
        {
            **row,
            **{k: f"{row[k]:,}" if row[k] else "any" for k in ("nodes", "edges", "features")},
            "present": "yes" if row["present"] else "no",
            "source": place(row["source"]),
        }
        for row in rows
    ]
    console = Console(highlight=False)
    columns = ("name", "nodes", "edges", "features", "classes", "present", "source")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        members = [row for row in shown if row["kind"] == kind]
        console.print(_table(members, {"name": kind} | {name: name for name in columns[1:]}))
        console.print()
    console.print(f"[dim]files are kept in {data_root()} (POLYPHILY_DATA)[/dim]", soft_wrap=True)


def partitions(as_json: AsJson = False) -> None:
    """List the ways to divide one graph among clients."""
    from polyphily.graphs.partitions import PARTITIONS

    rows = [{"name": name, "summary": words} for name, words in PARTITIONS.items()]
    show(rows, as_json, {"name": "partition", "summary": "how"})


def backbones(as_json: AsJson = False) -> None:
    """List the backbones."""
    from polyphily.nn.backbones import BACKBONES

    rows = [
        {"name": name, "summary": first_line(cls.__doc__), "citation": getattr(cls, "citation", "")}
        for name, cls in BACKBONES.items()
    ]
    show(rows, as_json, {"name": "backbone", "summary": "what it is", "citation": "citation"})


def what_it_does(cls: type) -> str:
    """The first line of a method's module, which is written for people; else of the class."""
    import sys

    words = first_line(sys.modules[cls.__module__].__doc__) or first_line(cls.__doc__)
    _, colon, rest = words.partition(": ")
    return rest if colon else words


def place(source: str) -> str:
    """A web address's host; other words as they are.

    >>> place("https://example.org/data.zip")
    'example.org'
    """
    found = re.search(r"https?://(?:www\.)?([^/\s]+)", source)
    return found[1] if found else source


def first_line(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0]


def _paragraphs(doc: str | None) -> str:
    """A docstring without its line breaks but those between paragraphs: terminals differ in width.

    >>> _paragraphs("One\\n    two.\\n\\n    Three.")
    'One two.\\n\\nThree.'
    """
    import inspect

    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(doc or "").split("\n\n"))


def _in_words(parameter: dict[str, Any]) -> dict[str, str]:
    """A hyperparameter as a row for people: symbol, the paper's value and choices where it has."""

    def number(value: Any) -> str:
        return str(float(f"{value:.4g}")) if isinstance(value, float) else str(value)

    p = parameter
    paper = [] if p["paper"] is None else [f"paper: {number(p['paper'])}"]
    choices = [f"one of: {', '.join(p['choices'])}"] if p["choices"] else []
    return {
        "name": " ".join(dict.fromkeys([p["name"], p["symbol"]])).strip(),
        "value": "\n".join([number(p["default"]), *paper]),
        "meaning": "\n".join([p["meaning"], *choices]),
    }


def show(rows: list[dict[str, Any]], as_json: bool, columns: dict[str, str]) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console(highlight=False).print(_table(rows, columns))


def _table(rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    widths = {"nodes": 9, "edges": 10, "features": 8, "classes": 7}
    for key, title in columns.items():
        table.add_column(
            title,
            justify="right" if key in widths else "left",
            no_wrap=key in ("name", "present", *widths),
            min_width=widths.get(key, 16 if "nodes" in columns and key == "name" else None),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*[str(row[key]).replace("[", "\\[") for key in columns])
    return table
