"""Rounds of the stacked engine against plain torch_geometric loops of the same methods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyphily.bench.geometric import Loop, backbone_of_loop, make_loop
from polyphily.bench.stages import Span, first_round_again, more_if_quick, spans, turns
from polyphily.bench.timing import (
    PLAIN,
    Loader,
    Record,
    accuracy,
    make_simulation,
    note,
    time_rounds,
)
from polyphily.core.method import create
from polyphily.graphs.loading import Federation, load

STACKED = "stacked"
CASES = (("cora", "louvain-capped", 10), ("cora", "louvain-capped", 20), ("pubmed", "metis", 10))
METHODS = ("fedgta", "fedpub", "fedsage+")
LONG_FIRST_ROUND = ("fedsage+", CASES[0])  # timed by itself, once: it takes many steps


def plain(device: str, rounds: int = 3, get: Loader = load) -> Iterator[Record]:
    """Compare rounds of FedGTA, FED-PUB and FedSage+ with plain loops over clients.

    Args:
        device: "cpu" or "cuda".
        rounds: the number of timed rounds; quick ones are timed more often.
        get: loads the federations.
    """
    for case in CASES:
        dataset, partition, clients = case
        federation = get(dataset, partition=partition, clients=clients)
        for name in METHODS:
            first = (name, case) == LONG_FIRST_ROUND
            wanted = [span for span in spans(name, rounds) if first or not span.again]
            yield from _records(federation, name, wanted, device, rounds)


def _records(
    federation: Federation, name: str, wanted: Sequence[Span], device: str, rounds: int
) -> Iterator[Record]:
    """Time the stages of a method one after the other."""
    longer = {key: value for span in wanted for key, value in span.hyperparameters.items()}
    options = {"hidden": 64, "epochs": 3, "input_dropout": 0.0, "device": device}
    backbone = backbone_of_loop(create(name))
    simulation = make_simulation([federation], name, {**options, "backbone": backbone}, longer)
    loop = make_loop(federation, simulation.method, simulation.settings)
    assert loop is not None
    for span in wanted:
        last = span is wanted[-1]
        before: dict[str, Callable[[], object]] = {}
        if span.again:
            before = {STACKED: first_round_again(simulation), PLAIN: _first_round_of(loop)}
        start = simulation.method.rounds_before_it_acts() if last else span.start
        for engine in (simulation, loop):
            while engine.round < start:
                engine.advance()
        timed, warm_up = turns(span, device, rounds)
        if not span.again:
            began = time.perf_counter()
            simulation.advance()
            loop.advance()
            timed = more_if_quick(simulation, timed, warm_up, time.perf_counter() - began)
        engines = {STACKED: simulation.advance, PLAIN: loop.advance}
        seconds = time_rounds(engines, timed, before=before, warm_up=warm_up)
        median = {engine: statistics.median(found) for engine, found in seconds.items()}
        yield {
            "dataset": federation.dataset,
            "partition": federation.partition.name,
            "clients": len(federation),
            "method": name,
            "stage": span.label,
            "stacked_ms": 1000 * median[STACKED],
            "plain_ms": 1000 * median[PLAIN],
            "ratio": median[PLAIN] / median[STACKED],
            "accuracies": [accuracy(simulation), loop.accuracy()] if last else [],
            "note": note(simulation) if not span.again else "",
        }


def _first_round_of(loop: Loop) -> Callable[[], None]:
    """Return a function after which a loop runs its first round; its networks stay trained."""

    def restart() -> None:
        loop.round = 0

    return restart


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison with plain loops as a Markdown table."""
    lines = [
        "| method | data | clients | stacked, ms | torch_geometric | ratio | accuracy |  |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {', '.join(filter(None, (row['method'], row['stage'])))} | {row['dataset']}, "
        f"{row['partition']} | {row['clients']} | {row['stacked_ms']:.2f} | "
        f"{row['plain_ms']:.1f} | **{row['ratio']:.1f}×** | "
        f"{' / '.join(f'{100 * score:.1f}' for score in row['accuracies'])} | {row['note']} |"
        for row in rows
    ]
    return "\n".join(lines)
