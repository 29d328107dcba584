"""`polyphily bench`: the time of a round, and the least time the machine allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from polyphily.cli import completion, options
from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.graphs.loading import Federation

TABLES = ("speed", "methods", "runs", "costs", "plain", "clients")  # each is a list of records
ON_DATASETS = ("speed", "methods", "runs", "costs", "plain", "seeds", "precision")
PARTS = (*TABLES[:-1], "scale", "seeds", "precision", "large", "clients")


def add_to(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    dataset: Annotated[
        str,
        typer.Option("--dataset", help="The dataset.", autocompletion=completion.datasets()),
    ] = "cora",
    partition: Annotated[
        str,
        typer.Option(
            "--partition", help="The partition.", autocompletion=completion.of("partitions")
        ),
    ] = "louvain-capped",
    clients: Annotated[str, typer.Option("--clients", help="Numbers of clients: 10,20.")] = "10,20",
    method: Annotated[
        str,
        typer.Option("--method", help="The method.", autocompletion=completion.of("methods")),
    ] = "fedavg",
    backbone: Annotated[
        str,
        typer.Option("--backbone", help="The backbone.", autocompletion=completion.of("backbones")),
    ] = "gcn",
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
    partitions: Annotated[
        Path | None,
        typer.Option("--partitions", help="Folder of partition files; missing ones are written."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write all records to this file, as Markdown.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Time few rounds in the suite, for a first impression.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="Time these methods only, in --suite large: fedavg,fedspa."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            help="Compare --suite costs with this record; methods a fifth slower fail the check.",
        ),
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
    if write is not None:
        options.check_output("--write", write, (".md",))
    recorded = None if check is None else _recorded_costs(check, suite)
    with use_threads(threads):
        if suite is not None or write is not None:
            chosen = None if methods is None else methods.split(",")
            found = _suite(suite, device, out, write, partitions, chosen, quick=quick)
            if recorded is not None:
                _compare(recorded, found["costs"], device, partitions, quick=quick)
            return
        from polyphily.bench.suite import record

        get = _loader(partitions)
        settings = {"backbone": backbone, "hidden": hidden, "epochs": epochs, "device": device}
        records = [
            record(
                get(dataset, partition=partition, clients=number),
                method,
                {**settings, "input_dropout": 0.0},
                rounds,
            )
            for number in _numbers(clients)
        ]
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    where = (
        torch.cuda.get_device_name(device)
        if device != "cpu"
        else f"{threads} CPU thread{'s' * (threads > 1)}"
    )
    console = Console(highlight=False)
    console.print(
        f"[bold]{method}[/bold] on {dataset}, {backbone}-{hidden}, {epochs} epochs, {where}"
    )
    from polyphily.cli.listings import show

    rows = [
        {
            "clients": timed["clients"],
            "engine": name,
            "median": _time(times["median_ms"]),
            "p95": _time(times["p95_ms"]),
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


def _time(milliseconds: float) -> str:
    """Write a time with two digits in milliseconds, or in seconds if it is long.

    >>> _time(27.083), _time(40887.5)
    ('27.08 ms', '40.9 s')
    """
    from polyphily.report.words import duration

    return f"{milliseconds:.2f} ms" if milliseconds < 1000 else duration(milliseconds / 1000)


def _recorded_costs(file: Path, suite: str | None) -> list[dict[str, Any]]:
    """Return the costs of methods in a record, such as docs/performance/cpu.json."""
    if "costs" not in (suite or "").split(",") and suite != "all":
        raise UserError("--check compares the costs of methods: add --suite costs")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--check {file}: cannot read a record there ({error})") from None
    rows: list[dict[str, Any]] = found.get("costs", []) if isinstance(found, dict) else []
    if not rows:
        raise UserError(f"--check {file}: it has no costs of methods; write some: --suite costs")
    return rows


def _compare(
    recorded: list[dict[str, Any]],
    found: list[dict[str, Any]],
    device: str,
    partitions: Path | None,
    *,
    quick: bool,
) -> None:
    """Print the methods that are slower than recorded; exit with status 1 if there are any."""
    from polyphily.bench import suite
    from polyphily.bench.check import slower_methods

    few = {"rounds": suite.QUICK["costs"]} if quick else {}
    slow = slower_methods(
        recorded,
        found,
        lambda names: suite.costs(device, get=_loader(partitions), methods=names, **few),
    )
    console = Console(stderr=True, highlight=False)
    for each in slow:
        console.print(f"slower than recorded: {each}")
    if slow:
        raise typer.Exit(1)
    console.print("no method is a fifth slower than recorded")


def _suite(
    wanted: str | None,
    device: str,
    out: Path,
    write: Path | None,
    partitions: Path | None,
    methods: list[str] | None = None,
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """Run parts of the suite, add them to the records in `out`, and write all records."""
    from polyphily.bench import suite
    from polyphily.bench.check import origin
    from polyphily.runs.folder import write_text

    kind = device.partition(":")[0]
    file = out / f"{kind}.json"
    records: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts = PARTS if wanted == "all" else tuple(filter(None, (wanted or "").split(",")))
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--suite {part}: the parts are {', '.join(PARTS)}, all")
    console = Console(stderr=True, highlight=False)

    def keep(part: str) -> None:
        records.setdefault("origin", {})[part] = {**origin(), "quick": quick}
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(records, indent=1) + "\n")

    for part in parts:
        console.print(f"[dim]{part}[/dim]")
        known = None if part == "speed" else records.get("machine")  # which has the least times
        records |= {"device": kind, "machine": suite.machine(device, known)}
        if part == "large":
            size = suite.QUICK_LARGE if quick else {}
            known_rows = {} if methods is None else _by_method(records.get(part, []))
            for name in methods or (suite.WHOLE if quick else suite.large_methods()):
                console.print(f"[dim]  {name}[/dim]")
                row = suite.large(device, name, **size)
                known_rows[name] = {**row, "commit": origin()["commit"]}
                records[part] = list(known_rows.values())
                keep(part)  # each takes a minute or more
        else:
            given: dict[str, Any] = {"rounds": suite.QUICK[part]} if quick else {}
            given |= {"get": _loader(partitions)} if part in ON_DATASETS else {}
            given |= {"sizes": suite.QUICK_SIZES} if quick and part == "clients" else {}
            measure: Any = suite.many_clients if part == "clients" else getattr(suite, part)
            found = measure(device, **given)
            records[part] = list(found) if part in TABLES else found
            keep(part)
    if records.get("clients"):
        from polyphily.bench.many import plot

        plot(records["clients"], out / f"clients-{kind}.svg")
    texts = [
        suite.summary(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(out.glob("*.json"))
    ]
    page = "\n\n".join([_INTRODUCTION, *texts, _MEASURED]) + "\n"
    if write is None:
        typer.echo(page)
    else:
        write_text(write, page)
    return records


def _by_method(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in rows}


def _loader(partitions: Path | None) -> Callable[..., Federation]:
    """Return a function that loads a federation, by a partition file if there is a folder."""
    from polyphily.graphs.prepared import load_prepared

    def get(dataset: str, *, seed: int = 0, **where: Any) -> Federation:
        return load_prepared(partitions, dataset=dataset, seed=seed, **where)

    return get


_INTRODUCTION = """# How fast a round is

<!-- Written by `polyphily bench --suite … --write`; do not edit. -->

A round is broadcast, local training of all clients, and aggregation, without scoring. Times are
medians. [How it was measured](#how-it-was-measured) explains the tables."""

_MEASURED = """## How it was measured

Engines and methods that are compared take turns round by round in one process, so that other load
on the machine slows all of them.

- **A round of FedAvg** (`--suite speed`). *torch_geometric* is a plain loop over clients
  (`src/polyphily/bench/geometric/`), with the same network, epochs, optimiser and dropout.
  *Least* is what the machine's measured copy bandwidth and matrix rate allow for the bytes and
  operations of a round, and *reached* is the share of it. Accuracies after the timed rounds are
  in the order stacked, sequential, torch_geometric.
- **What a run adds** (`--suite runs`). A round of `polyphily run` also scores both views and
  writes the record, the best models and checkpoints. The row *not scored* has everything but the
  scores: a forward pass for each of the two views takes the rest (`--evaluate-every 5` scores in
  every fifth round only). *At most* is the ratio that we aim at.
- **All methods** (`--suite costs`). Every method trains with its defaults and on its own default
  backbone, on Cora divided among 10 clients (louvain-capped). Compare the ratios, not the
  milliseconds, because other load on the machine makes both slower. *FedAvg rounds* is the ratio
  to FedAvg on its default backbone, and the next column that to FedAvg on the method's backbone.
  A method with stages is timed in each of them, and one with a warm-up after it. If the first
  round does other work than the second, it is timed in a row of its own, again and again from the
  initial state. The column *first round* is that of a new run, once, with everything that is
  computed only once. *MB* are sent by and to one client in a round, as the method declares it.
  *GB* is the peak of GPU memory in the rounds before those that are timed.
- **Plain loops of other methods** (`--suite plain`). OpenFGL itself was not run. The loops of
  FedGTA, FED-PUB and FedSage+ were written for this page from the methods' equations. One client
  trains after the other, with torch_geometric layers on dense features and an Adam of its own. It
  loads and returns a state dictionary, and the server mixes these name by name. Losses are
  vectorised over the nodes of a client. FedSage+ hides nodes and adds generated ones by building
  new edge lists. Tests compare the loops with the engine (`tests/bench/test_geometric.py`): with
  the same start and the same draws, and without dropout, all weights agree to 1e-4 after two
  rounds, for FedSage+ in each stage. All networks have 64 hidden units and take 3 steps a round;
  the first rounds of FedSage+ take 5. Each loop starts from torch_geometric's own initial
  weights, so that accuracies after few rounds differ.
- **Many clients** (`--suite clients`). Clients of 50 to 100 nodes, of which 200 are drawn in a
  round, train FedAvg on GCN-64 with `--on-disk` ([distributed.md](distributed.md#many-clients))
  and, where that is possible, in memory. *Peak* is that of a process of its own, with torch
  loaded, which trains as many rounds. The more clients there are, the more of those drawn take
  part for the first time, and their first states have to be computed. `clients-cpu.svg` in
  `docs/performance/` plots both.
- **Large graphs** (`--suite large`). FedAvg, three methods that need whole graphs, and all that
  can train on samples of neighbours (`polyphily methods show` says which do), here on whole
  graphs, too. Networks have 64 hidden units and take 3 steps a round: GCN, but ACM-GCN for
  FedSPA, UniFilter for FedGSP and SAGE for FedSage. Each method has a process of its own with all
  cores; *GB* is its peak, with the graphs. `--methods fedavg,fedspa` times some of them again.

## Measure again

The records are in `docs/performance/`, one file for each kind of device:

    polyphily bench --suite costs,plain --out docs/performance --write docs/performance.md

To see whether a method has become a fifth slower than its record (exit status 1):

    polyphily bench --suite costs --check docs/performance/cpu.json

`--quick` times few rounds. A record names the versions and the commit that it was made with
(`origin`). `--device cuda` adds those of a GPU. `--partitions FOLDER` stores partitions in files,
and reads them where the partitioners are not installed."""


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--clients {text}: write numbers such as 10,20") from None
