"""`polyphily bench`: the time of a round, and the least time the machine allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyphily.errors import UserError

PARTS = ("speed", "methods", "scale", "seeds", "precision", "large")


def add_to(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    dataset: Annotated[str, typer.Option("--dataset", help="The dataset.")] = "cora",
    partition: Annotated[
        str, typer.Option("--partition", help="The partition.")
    ] = "louvain-capped",
    clients: Annotated[str, typer.Option("--clients", help="Numbers of clients: 10,20.")] = "10,20",
    method: Annotated[str, typer.Option("--method", help="The method.")] = "fedavg",
    backbone: Annotated[str, typer.Option("--backbone", help="The backbone.")] = "gcn",
    hidden: Annotated[int, typer.Option("--hidden", help="Width of hidden layers.", min=1)] = 64,
    epochs: Annotated[int, typer.Option("--epochs", help="Local steps per round.", min=1)] = 3,
    rounds: Annotated[int, typer.Option("--rounds", help="Timed rounds.", min=1)] = 20,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.", min=1)] = 1,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help=f"Run parts of the suite: {','.join(PARTS)} or all.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the records of the suite.")] = Path(
        "performance"
    ),
    write: Annotated[
        Path | None, typer.Option("--write", help="Write all records to this file, as Markdown.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time rounds of the stacked engine, the sequential one and a plain torch_geometric loop.

    The engines take turns in one process, so that other load on the machine affects all alike.
    The least time follows from the machine's measured bandwidth and matrix rate and the bytes and
    operations of a round.
    """
    import torch

    from polyphily.runtime.machine import check_device
    from polyphily.runtime.machine import threads as use_threads

    check_device(device)
    with use_threads(threads):
        if suite is not None or write is not None:
            _suite(suite, device, out, write)
            return
        from polyphily.bench.suite import record
        from polyphily.graphs.loading import load

        options = {"backbone": backbone, "hidden": hidden, "epochs": epochs, "device": device}
        records = [
            record(
                load(dataset, partition=partition, clients=number),
                method,
                {**options, "input_dropout": 0.0},
                rounds,
            )
            for number in _numbers(clients)
        ]
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    where = torch.cuda.get_device_name(device) if device != "cpu" else f"{threads} CPU threads"
    console = Console(highlight=False)
    console.print(
        f"[bold]{method}[/bold] on {dataset}, {backbone}-{hidden}, {epochs} epochs, {where}"
    )
    from polyphily.cli.listings import show

    rows = [
        {
            "clients": timed["clients"],
            "engine": name,
            "median": f"{times['median_ms']:.2f} ms",
            "p95": f"{times['p95_ms']:.2f} ms",
            "ratio": f"{times['ratio']:.1f}",
            "accuracy": f"{100 * times['accuracy']:.1f} %",
        }
        for timed in records
        for name, times in timed["engines"].items()
    ]
    show(rows, False, {name: name for name in rows[0]})
    for timed in records:
        if roof := timed.get("roofline"):
            console.print(
                f"[dim]{timed['clients']} clients: {roof['megabytes']:.0f} MB and "
                f"{roof['megaflops']:.0f} MFLOP take {roof['least_ms']:.2f} ms at the least; "
                f"{100 * roof['reached']:.0f} % of that speed is reached[/dim]"
            )


def _suite(wanted: str | None, device: str, out: Path, write: Path | None) -> None:
    """Run parts of the suite, add them to the records in `out`, and write all records."""
    from polyphily.bench import suite
    from polyphily.runs.folder import write_text

    kind = device.partition(":")[0]
    file = out / f"{kind}.json"
    records: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts = PARTS if wanted == "all" else tuple(filter(None, (wanted or "").split(",")))
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--suite {part}: the parts are {', '.join(PARTS)}, all")
    console = Console(stderr=True, highlight=False)
    for part in parts:
        console.print(f"[dim]{part}[/dim]")
        records |= {"device": kind, "machine": suite.machine(device)}
        if part in ("speed", "methods"):
            records[part] = list(getattr(suite, part)(device))
        elif part == "large":
            names = ("fedavg", "fedspa", "fedgsp", "fedath")
            records[part] = [suite.large(device, name) for name in names]
        else:
            records[part] = getattr(suite, part)(device)
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(records, indent=1) + "\n")
    texts = [
        suite.summary(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(out.glob("*.json"))
    ]
    page = "\n\n".join([_INTRODUCTION, *texts]) + "\n"
    if write is None:
        typer.echo(page)
    else:
        write_text(write, page)


_INTRODUCTION = """# How fast a round is

<!-- Written by `polyphily bench --suite … --write`; do not edit. -->

A round is broadcast, local training of all clients, and aggregation, without scoring; medians of
rounds that the engines take in turn, in one process. *torch_geometric* is a plain loop over clients
(`src/polyphily/bench/geometric.py`), with the same network, epochs, optimiser and dropout. *Least*
is what the machine's measured copy bandwidth and matrix rate allow for the bytes and operations of
a round. Accuracies after the timed rounds stand in the order of the engines."""


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--clients {text}: write numbers such as 10,20") from None
