"""`polyphily inspect`: how clients differ, before training or after it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options
from polyphily.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from polyphily.graphs.loading import Federation
    from polyphily.heterogeneity.advice import Advice
    from polyphily.heterogeneity.inspection import Inspection, Profile, Trained

FILE, PAGE = "inspect.json", "inspect.html"
MOST_ROWS = 30  # of the table of clients

# Columns of the table of clients: heading, explanation, cell.
COLUMNS: tuple[tuple[str, str, Callable[[Profile], str]], ...] = (
    ("nodes", "", lambda p: f"{p.nodes:,}"),
    ("edges", "", lambda p: f"{p.edges:,}"),
    ("classes", "", lambda p: str(p.classes)),
    ("edge h", "share of edges that join equal labels", lambda p: number(p.edge_homophily)),
    ("node h", "the same, mean over nodes", lambda p: number(p.node_homophily)),
    ("adj h", "edge h beyond chance, at most 1", lambda p: number(p.adjusted_homophily)),
    ("LI", "what a neighbour's label tells, 0 to 1", lambda p: number(p.label_informativeness)),
    ("HFA", "how features change along edges, 0 to 2", lambda p: number(p.high_frequency_area)),
    (
        "SIS",
        "how strongly train labels reach nodes, a sum",
        lambda p: f"{p.structure_inertia_score:,.1f}",
    ),
)

# Rows of the table of pairs of clients: matrix, name, unit.
PAIRS = (
    ("label_divergence", "label divergence", "share, 0 to 1"),
    ("neighbour_divergence", "neighbour divergence", "share, 0 to 1"),
    ("feature_divergence", "feature divergence", "standard deviations"),
    ("spectral_wasserstein", "spectral Wasserstein", "on a scale of 0 to 2"),
    ("spectral_kl", "spectral KL", "nats"),
    ("similarity", "similarity", "share, 0 to 1"),
)


def add_to(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def _data_option(name: str) -> Any:
    return typer.Option(
        f"--{name}",
        help=options.DATA[name][1],
        metavar=options.METAVARS.get(name),
        rich_help_panel="Data",
        autocompletion=completion.of_option(name),
    )


def inspect(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder, or a folder or file of your graphs.",
            autocompletion=completion.run_folder,
        ),
    ] = None,
    dataset: Annotated[str | None, _data_option("dataset")] = None,
    partition: Annotated[str | None, _data_option("partition")] = None,
    clients: Annotated[int | None, _data_option("clients")] = None,
    split: Annotated[str | None, _data_option("split")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of partition, split and estimates.", rich_help_panel="Data", min=0),
    ] = None,
    normalize: Annotated[str | None, _data_option("normalize")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"Write {FILE} and a page into this folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Measure how clients differ, and name the methods that are made for it.

    Of a run folder, the models are measured too. All known labels are used, not only train labels.
    """
    from polyphily.heterogeneity.advice import advise
    from polyphily.runs.folder import CONFIG, clean

    flags = {"dataset": dataset, "partition": partition, "clients": clients, "split": split}
    flags |= {"seed": seed, "normalize": normalize}
    given = {name: value for name, value in flags.items() if value is not None}
    if folder and dataset:
        raise UserError("give a folder or --dataset, not both")
    with progress() as report:
        if folder and (folder / CONFIG).is_file():
            if given:
                names = ", ".join(f"--{name}" for name in given)
                raise UserError(f"{folder} is a run and has its own data: leave out {names}")
            inspection = _inspect_run(folder, report)
        else:
            if folder and not folder.exists():
                raise UserError(f"no folder or file {folder}")
            inspection = _inspect_data(folder or dataset or options.DEFAULT_DATASET, given, report)
    advice = advise(inspection)
    facts = {**inspection.to_dict(), "advice": [vars(entry) for entry in advice]}
    text = json.dumps(clean(facts), allow_nan=False)
    if out:
        _write(out, text)
        _write_page(out, json.loads(text))
    if as_json:
        typer.echo(text)
        return
    from rich.markup import escape

    from polyphily.cli import terminal

    show(inspection, advice, terminal.out)
    command = _next_command(advice, {"dataset": str(folder or ""), **given})
    if command and not inspection.trained:
        terminal.out.print(f"[bold]Try[/bold] {escape(command)}", soft_wrap=True)
    if out:
        for name in (FILE, PAGE):
            terminal.print_line(f"written: {out / name}")


# Measuring ---------------------------------------------------------------------------------------


def _inspect_data(
    dataset: str | Path, given: dict[str, Any], report: Callable[[str], None]
) -> Inspection:
    from polyphily.cli import terminal
    from polyphily.graphs.loading import load

    report("reading the data")
    federation = load(**(given | {"dataset": dataset}))
    terminal.notes(federation.notes)
    return _measure(federation, report)


def _measure(federation: Federation, report: Callable[[str], None]) -> Inspection:
    from polyphily.graphs.loading import whole_graph
    from polyphily.heterogeneity.inspection import inspect as measure

    return measure(federation, whole_graph(federation), lambda what: report(f"measuring {what}"))


def _inspect_run(folder: Path, report: Callable[[str], None]) -> Inspection:
    """Measure the data and the models of a run, without writing to its folder."""
    import dataclasses

    from polyphily.cli.training import restore
    from polyphily.report.trained import examine

    report("reading the run")
    execution = restore(folder)
    inspection = _measure(execution.federations[0], report)
    report("measuring the models")
    trained = examine(execution.simulation, execution.view)
    return dataclasses.replace(inspection, trained=trained)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a status line on standard error, if that is a terminal."""
    from polyphily.cli import terminal

    if not terminal.err.is_terminal:
        yield lambda _: None
        return
    with terminal.err.status("…") as status:
        yield status.update


def _write(folder: Path, text: str) -> None:
    from polyphily.runs.folder import write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, text + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def _write_page(folder: Path, facts: dict[str, Any]) -> None:
    from polyphily.report import page
    from polyphily.report.content import inspection_content

    advice = [entry["text"] for entry in facts["advice"]]
    page.write(inspection_content(facts, advice), folder / PAGE)


def _next_command(advice: Sequence[Advice], data: dict[str, Any]) -> str | None:
    """Return a command that compares the methods of the first piece of advice on this data."""
    if not advice[0].methods:
        return None
    methods = dict.fromkeys(["local", "fedavg", *advice[0].methods])
    flags = [text for name, value in data.items() if value for text in (f"--{name}", str(value))]
    return shlex.join(["polyphily", "compare", *methods, *flags])


# Showing -----------------------------------------------------------------------------------------


def number(value: float, digits: int = 2) -> str:
    """Return a number with some digits after the point, or a dash for NaN.

    >>> number(0.256), number(float("nan")), number(-0.001)
    ('0.26', '–', '0.00')
    """
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"


def show(inspection: Inspection, advice: Sequence[Advice], console: Console) -> None:
    """Print tables of clients and pairs, what the partition lost, the models, and the advice."""
    from rich.markup import escape
    from rich.padding import Padding

    count = len(inspection.clients)
    clients = "1 client" if count == 1 else f"{count} clients"
    console.print()
    console.print(
        f"[bold]{escape(inspection.dataset)}[/bold], {clients} ({inspection.partition}), "
        f"split {escape(inspection.split)}, seed {inspection.seed}"
    )
    _print_clients(inspection, console)
    legend = [f"{name}: {explanation}" for name, explanation, _ in COLUMNS if explanation]
    console.print(f"[dim]{'; '.join(legend)}[/dim]")
    if count > 1:
        console.print()
        _print_pairs(inspection, console)
        console.print(
            f"[dim]similar pairs (similarity 0.5 or more): "
            f"{number(100 * inspection.similarity_ratio, 0)} %, complementary: "
            f"{number(100 * inspection.complementarity_ratio, 0)} %[/dim]"
        )
    if inspection.lost:
        console.print()
        console.print("[bold]Lost by dividing the graph[/bold]")
        for line in _loss_lines(inspection):
            console.print(Padding(line, (0, 0, 0, 2), expand=False))
    if inspection.trained:
        console.print()
        console.print("[bold]The trained models[/bold]")
        for line in _model_lines(inspection.trained, inspection):
            console.print(Padding(escape(line), (0, 0, 0, 2), expand=False))
    console.print()
    console.print("[bold]Advice[/bold]")
    for entry in advice:
        console.print(Padding(f"• {escape(entry.text)}", (0, 0, 0, 2), expand=False))
    for note in inspection.notes:
        console.print(f"[dim]{escape(note)}[/dim]")


def _print_clients(inspection: Inspection, console: Console) -> None:
    from polyphily.cli.tables import Column, label, print_table

    whole = [inspection.graph] if inspection.graph else []
    clients = list(inspection.clients)
    if len(clients) > MOST_ROWS:
        clients = _some(clients)
    names = ["whole"] * len(whole) + [profile.name for profile in clients]
    rows = [
        [name, *[cell(profile) for *_, cell in COLUMNS]]
        for name, profile in zip(names, [*whole, *clients], strict=True)
    ]
    columns = [label("graph"), *[Column(name) for name, _, _ in COLUMNS]]
    styles = ["bold"] * len(whole) + [""] * len(clients)
    print_table(console, columns, rows, styles=styles)
    if hidden := len(inspection.clients) - len(clients):
        console.print(
            f"[dim]{len(clients)} clients from low to high homophily; {hidden} more in --json[/dim]"
        )


def _some(profiles: Sequence[Profile]) -> list[Profile]:
    """Select `MOST_ROWS` clients, evenly from the lowest adjusted homophily to the highest."""
    ordered = sorted(
        profiles,
        key=lambda p: (math.isnan(p.adjusted_homophily), p.adjusted_homophily),
    )
    steps = MOST_ROWS - 1
    return [ordered[round(i * (len(ordered) - 1) / steps)] for i in range(MOST_ROWS)]


def _print_pairs(inspection: Inspection, console: Console) -> None:
    import numpy as np

    from polyphily.cli.tables import Column, label, print_table, text
    from polyphily.heterogeneity.inspection import mean_of_pairs

    rows = []
    for key, name, unit in PAIRS:
        matrix = inspection.pairs[key]
        others = matrix[~np.eye(len(matrix), dtype=bool)]
        known = others[~np.isnan(others)]
        chance = inspection.pairs.get(f"{key}_chance")
        low, high = (known.min(), known.max()) if len(known) else (math.nan, math.nan)
        rows.append(
            (
                name,
                number(mean_of_pairs(matrix)),
                "" if chance is None else number(mean_of_pairs(chance)),
                number(float(low)),
                number(float(high)),
                unit,
            )
        )
    titles = ("mean", "chance", "smallest", "largest")
    columns = [label("between clients"), *map(Column, titles), text("unit")]
    print_table(console, columns, rows)


def _loss_lines(inspection: Inspection) -> list[str]:
    """Describe what the division of one graph among clients has lost."""
    lost, whole = inspection.lost, inspection.graph
    assert lost
    assert whole
    together = sum(p.structure_inertia_score for p in inspection.clients)
    return [
        f"edges: {lost.edges:,} of {whole.edges:,} ({_percent(lost.edges_share)}): "
        f"{_percent(lost.same_class_share)} of those within a class, "
        f"{_percent(lost.other_class_share)} of those between classes",
        f"label signal from other clients' train nodes: {_percent(lost.label_signal_share)}; "
        f"nodes left without a neighbour: {lost.isolated:,}",
        f"SIS: {whole.structure_inertia_score:,.1f} whole, {together:,.1f} over all clients",
    ]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def _model_lines(trained: Trained, inspection: Inspection) -> list[str]:
    """Describe how the models of the clients differ."""
    import numpy as np

    from polyphily.heterogeneity.inspection import mean_of_pairs

    lines = [
        f"{trained.method} ({trained.network}), {trained.view} models after round "
        f"{trained.round}, seed {trained.seed}",
        "distance of one class's embeddings between clients (sliced Wasserstein over their "
        f"spread): {number(mean_of_pairs(trained.embedding_divergence))} on average",
    ]
    per_class = trained.embedding_divergence_per_class
    if (~np.isnan(per_class)).any():
        worst = int(np.nanargmax(per_class))
        lines.append(
            f"largest distance: class {inspection.class_names[worst]}, {number(per_class[worst])}"
        )
    lines.append(
        f"weights between clients, {trained.collaboration} collaboration: H(G) "
        f"{trained.heterogeneity:.4g}, {_percent(trained.heterogeneity_relative)} of its scale"
    )
    if trained.responses is not None:
        assert trained.frequencies is not None
        at = [int(np.argmin(abs(trained.frequencies - f))) for f in (0, 0.5, 1, 1.5)]
        columns = [values[~np.isnan(values)] for values in trained.responses.T[at]]
        medians = [float(np.median(values)) if len(values) else math.nan for values in columns]
        responses = ", ".join(
            f"{number(median)} at {trained.frequencies[i]:g}"
            for median, i in zip(medians, at, strict=True)
        )
        lines.append(f"filter response, median of clients: {responses} (0 smooth, 2 rough)")
    return lines
