"""`polyphily methods`, `datasets`, `partitions`, `backbones` and `metrics`: lists of them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding

from polyphily.cli import completion, tables

if TYPE_CHECKING:
    from polyphily.core.search import Search

NUMBERS = ("classes", "clients", "median", "p95", "ratio", "accuracy")
UNBROKEN = ("name", "value", "engine", "selects", "evaluated")  # columns that do not wrap

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

methods = typer.Typer(
    help="List the methods, or show what one of them sends.", invoke_without_command=True
)


def add_to(app: typer.Typer) -> None:
    app.add_typer(methods, name="methods")
    app.command("datasets")(datasets)
    app.command("partitions")(partitions)
    app.command("backbones")(backbones)
    app.command("metrics")(metrics)


@methods.callback()
def list_methods(context: typer.Context, as_json: AsJson = False) -> None:
    """List the methods."""
    if context.invoked_subcommand:
        return
    from polyphily.core.method import METHODS

    rows = [
        {
            "name": name,
            "summary": method_summary(cls),
            "evaluated": cls.evaluated,
            "citation": cls.cite,
        }
        for name, cls in sorted(METHODS.items())
    ]
    show(rows, as_json, {"name": "method", "summary": "what it does", "evaluated": "evaluated"})


@methods.command("show")
def show_method(
    name: Annotated[
        str,
        typer.Argument(help="The method's name.", autocompletion=completion.of("methods")),
    ],
    as_json: AsJson = False,
) -> None:
    """Show a method's citation, its hyperparameters, and every tensor sent by and to a site."""
    from polyphily.core.declarations import (
        backbone_of,
        describe,
        example_network,
        example_sizes,
    )
    from polyphily.core.messages import Role
    from polyphily.core.method import METHODS
    from polyphily.engines.drawn import reason_against_drawing
    from polyphily.privacy.differential import TREATMENTS

    cls = METHODS.find(name)
    method = cls()
    whole = method.needs_whole_graph()
    all_clients = reason_against_drawing(method, example_network(method))
    up, down = describe(method)
    up = [{**row, "dp": TREATMENTS[Role(row["role"])]} for row in up]
    refusal = method.reason_against_sums(example_sizes(method))
    ranges = cls.search_ranges()
    parameters = [
        {
            "name": field.name,
            "symbol": field.metadata.get("symbol", ""),
            "default": field.default,
            "paper": field.metadata.get("paper"),
            "code": field.metadata.get("code"),
            "meaning": field.metadata.get("doc", ""),
            "choices": list(field.metadata.get("choices", ())),
            "search": search.to_dict() if (search := ranges.get(field.name)) else None,
        }
        for field in cls.hyperparameters().values()
    ]
    facts = {
        "name": cls.name,
        "description": " ".join((cls.__doc__ or "").split()),
        "citation": cls.cite,
        "evaluated": cls.evaluated,
        "selection": cls.selection,
        "backbone": cls.backbone,
        "backbones": list(method.supported_backbones()),
        "hyperparameters": parameters,
        "left_open": list(cls.left_open),
        "uploaded": up,
        "downloaded": down,
        "secure_aggregation": {"possible": refusal is None, "why_not": refusal},
        "sampling": {"possible": whole is None, "why_not": whole},
        "on_disk": {"possible": all_clients is None, "why_not": all_clients},
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{cls.name}[/bold]\n[dim]{escape(cls.cite)}[/dim]\n")
    console.print(_paragraphs(cls.__doc__), markup=False)
    console.print(
        f"\n[bold]Evaluated[/bold] {cls.evaluated}: "
        + ("the model the server sends" if cls.evaluated == "global" else "each client's own model")
        + f"; best round chosen per {cls.selection}"
    )
    hint = "; --set paper=on takes the paper's values" if cls.paper_form() else ""
    hint += ", code=on those of its authors' code" if cls.code_form() else ""
    console.print(f"\n[bold]Hyperparameters[/bold] (--set name=value{hint})")
    if parameters:
        rows = [_hyperparameter_row(p, ranges.get(p["name"])) for p in parameters]
        columns = {"name": "name", "value": "value", "meaning": "meaning"}
        _print_rows(console, rows, columns, indent=2)
    else:
        console.print("  none")
    if cls.left_open:
        console.print("\n[bold]Open in the paper[/bold], and what is done here")
        for sentence in cls.left_open:
            console.print(_indented(escape(f"- {sentence}")))
    console.print(f"\n[bold]Backbones[/bold] {', '.join(method.supported_backbones())}")
    for title, rows in (("Sent by each site", up), ("Sent to each site", down)):
        console.print(f"\n[bold]{title}[/bold] (backbone {backbone_of(method)}, 2 layers)")
        for (heading, treatment), tensors in _by_declaration(rows, refusal).items():
            console.print(_indented(escape(heading)))
            _print_rows(console, tensors, {"name": "", "shape": ""}, indent=4, header=False)
            if treatment:
                console.print(_indented(f"[dim]{escape(treatment)}[/dim]", 4))
        if not rows:
            console.print("  nothing")
    answer = f"no: {refusal}" if refusal else "yes: the server needs only sums of uploads"
    console.print(f"\n[bold]Secure aggregation[/bold] {escape(answer)}")
    answer = (
        f"whole graphs only: {whole}. Clients train in turn if memory is short, and every client's "
        "graph must fit by itself"
        if whole
        else "yes: steps can be on samples (--sample, --batch)"
    )
    console.print(f"[bold]Large graphs[/bold] {escape(answer)}")
    answer = f"no: {all_clients}" if all_clients else "yes: a round's cost follows those drawn"
    console.print(f"[bold]Clients on disk[/bold] {escape(answer)}")


def _by_declaration(
    rows: list[dict[str, str]], refusal: str | None
) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Group tensors by their meaning and rounds, and by what the server and --dp do with them.

    `refusal`, the reason against secure aggregation, is left out: it is printed once, at the end.
    """
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        heading = f"{row['meaning'] or row['role']}, {row['rounds']}"
        server = row["server"].removesuffix(f": {refusal}")
        treatment = f"at the server: {server}; with --dp: {row['dp']}" if server else ""
        groups.setdefault((heading, treatment), []).append(row)
    return groups


def datasets(as_json: AsJson = False) -> None:
    """List the datasets: statistics, source, and whether the files are present."""
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
    columns = [tables.label("dataset")]
    columns += [tables.Column(name) for name in ("nodes", "edges", "features", "classes")]
    shown: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        shown += [(kind, "", "", "", "", "")]
        shown += [
            (
                f"  {row['name']}",
                *[f"{row[k]:,}" if row[k] else "any" for k in ("nodes", "edges", "features")],
                str(row["classes"]),
                "present" if row["present"] else host(row["source"]),
            )
            for row in rows
            if row["kind"] == kind
        ]
    console = Console(highlight=False)
    styles = ["" if row[1] else "bold" for row in shown]
    tables.print_table(console, [*columns, tables.label("files")], shown, styles=styles)
    console.print(
        f"[dim]files: present in {data_root()} (POLYPHILY_DATA), or where they come from[/dim]",
        soft_wrap=True,
    )


def partitions(as_json: AsJson = False) -> None:
    """List the ways to divide one graph among clients."""
    from polyphily.graphs.partitions import PARTITIONS

    rows = [{"name": name, "summary": entry.summary} for name, entry in PARTITIONS.items()]
    show(rows, as_json, {"name": "partition", "summary": "what it does; options"})


def backbones(as_json: AsJson = False) -> None:
    """List the backbones."""
    from polyphily.nn.backbones import BACKBONES

    rows = [
        {"name": name, "summary": summary(cls.__doc__), "citation": cls.citation}
        for name, cls in BACKBONES.items()
    ]
    show(rows, as_json, {"name": "backbone", "summary": "what it is", "citation": "citation"})


def metrics(as_json: AsJson = False) -> None:
    """List the metrics that are computed after every round."""
    from polyphily.core.metrics import METRICS

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": metric.title,
            "summary": summary(metric.function.__doc__),
            "classes": metric.classes,
            "selects": metric.selects,
        }
        for name, metric in METRICS.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [
        {**row, "classes": row["classes"] or "any", "selects": "yes" if row["selects"] else "no"}
        for row in rows
    ]
    columns = {"name": "metric", "summary": "what it does", "classes": "classes"}
    show(shown, False, columns | {"selects": "--metric"})
    Console(highlight=False).print(
        "[dim]classes: the number of classes that the data must have; --metric: whether the "
        "metric can select the best round on validation[/dim]"
    )


def method_summary(cls: type) -> str:
    """Return the first paragraph of the docstring of a method's module; else that of its class."""
    import sys

    text = summary(sys.modules[cls.__module__].__doc__) or summary(cls.__doc__)
    _, colon, rest = text.partition(": ")
    return rest if colon else text


def host(source: str) -> str:
    """Return the host of a web address, and other text unchanged.

    >>> host("https://example.org/data.zip")
    'example.org'
    """
    found = re.search(r"https?://(?:www\.)?([^/\s]+)", source)
    return found[1] if found else source


def summary(doc: str | None) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return _paragraphs(doc).partition("\n")[0]


def _paragraphs(doc: str | None) -> str:
    """Join the lines of each paragraph of a docstring, so that they wrap at the terminal's width.

    >>> _paragraphs("One\\n    two.\\n\\n    Three.")
    'One two.\\n\\nThree.'
    """
    import inspect

    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(doc or "").split("\n\n"))


def _hyperparameter_row(parameter: dict[str, Any], search: Search | None) -> dict[str, str]:
    """Return the cells of a hyperparameter: name, default, meaning, choices and search range."""

    def number(value: Any) -> str:
        return str(float(f"{value:.4g}")) if isinstance(value, float) else str(value)

    p = parameter
    choices = f"one of: {', '.join(p['choices'])}" if p["choices"] else ""
    tuned = f"--tune: {search}" if search else ""
    forms = [f"{form}: {number(p[form])}" for form in ("paper", "code") if p[form] is not None]
    return {
        "name": " ".join(dict.fromkeys([p["name"], p["symbol"]])).strip(),
        "value": number(p["default"]),
        "meaning": "\n".join(filter(None, (p["meaning"], choices, *forms, tuned))),
    }


def show(rows: list[dict[str, Any]], as_json: bool, columns: dict[str, str]) -> None:
    """Print rows as JSON or as a table; `columns` are the keys to show and their headings."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_rows(Console(highlight=False), rows, columns)


def _indented(content: RenderableType, columns: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, columns), expand=False)


def _print_rows(
    console: Console,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    *,
    indent: int = 0,
    header: bool = True,
) -> None:
    """Print a table. Columns of numbers are aligned at the right, and names do not wrap."""
    kinds = [
        tables.Column(title, right=key in NUMBERS, wraps=key not in (*NUMBERS, *UNBROKEN))
        for key, title in columns.items()
    ]
    cells = [[str(row[key]) for key in columns] for row in rows]
    tables.print_table(console, kinds, cells, header=header, indent=indent)
