"""Seconds and memory to read and check a client of large tables, as one process with one thread.

    python benchmarks/reading.py --nodes 1000000 --edges 3000000

It writes nodes.csv (id, label and twelve columns of all kinds, some values missing) and edges.csv
(source, target, weight, type) into a temporary folder, then reads them in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

THREADS = {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}


def write(folder: Path, nodes: int, edges: int, faults: int) -> None:
    """Write the tables of a client, with a number of faulty cells."""
    rng = np.random.default_rng(0)

    def pick(values: list[str]) -> pa.Array:
        return pa.array(values).take(pa.array(rng.integers(len(values), size=nodes)))

    def gaps(column: pa.Array, share: float) -> pa.Array:
        return pc.if_else(pa.array(rng.random(nodes) < share), None, column)

    ids = pc.binary_join_element_wise(
        pa.array(["c"] * nodes), pc.cast(pa.array(np.arange(nodes) + 10_000_000), pa.string()), ""
    )
    days = pa.array((rng.integers(14_000, 20_000, nodes)).astype("datetime64[D]"))
    seconds = pa.array(rng.integers(1_500_000_000, 1_700_000_000, nodes).astype("datetime64[s]"))
    columns = {
        "id": ids,
        "label": gaps(pick(["fraud", *["honest"] * 30]), 0.2),
        "age": gaps(pa.array(rng.integers(18, 95, nodes)), 0.02),
        "income": gaps(pa.array(rng.normal(40_000, 9_000, nodes).round(2)), 0.1),
        "balance": pa.array(rng.normal(0, 5_000, nodes).round(2)),
        "score": pa.array(rng.random(nodes)),
        "accounts": pa.array(rng.integers(1, 9, nodes)),
        "online": pick(["true", "false"]),
        "opened": gaps(days, 0.01),
        "last_seen": pc.strftime(seconds, format="%Y-%m-%dT%H:%M:%S"),
        "channel": pick(["branch", "web", "app", "phone"]),
        "city": pick([f"city {i}" for i in range(500)]),
        "job": gaps(pick([f"job {i}" for i in range(60)]), 0.15),
        "name": pc.binary_join_element_wise(pick(["Ann", "Bob", "Cem"]), ids, " "),
    }
    if faults:
        bad = np.zeros(nodes, dtype=bool)
        bad[rng.choice(nodes, faults, replace=False)] = True
        text = pc.cast(columns["balance"], pa.string())
        columns["balance"] = pc.if_else(pa.array(bad), "unknown", text)
    ends = [ids.take(pa.array(rng.integers(nodes, size=edges))) for _ in range(2)]
    relation = pa.array(["card", "wire", "cash"]).take(pa.array(rng.integers(3, size=edges)))
    amounts = pa.array(rng.exponential(80, edges).round(2) + 0.01)
    pa.csv.write_csv(pa.table(columns), folder / "nodes.csv")
    table = {"source": ends[0], "target": ends[1], "weight": amounts, "type": relation}
    pa.csv.write_csv(pa.table(table), folder / "edges.csv")


def measure(folder: Path) -> None:
    """Read and check the tables and print what it took."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    from polyphily.errors import UserError
    from polyphily.graphs.files.survey import survey

    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    try:
        (client,) = survey(folder).clients
        found = f"{client.nodes:,} nodes, {client.edges:,} edges, {len(client.columns)} columns"
    except UserError as error:
        found = str(error).partition(":\n")[0]
    wall = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(f"{found}: {wall:.1f} s ({processor:.1f} s of one core), {used.ru_maxrss / 1e6:.2f} GB")


def main() -> None:
    """Write the tables and measure reading them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=3_000_000)
    parser.add_argument("--faults", type=int, default=0, help="faulty cells among the nodes")
    parser.add_argument("--read", type=Path, help="only read this folder")
    arguments = parser.parse_args()
    if arguments.read:
        measure(arguments.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.nodes, arguments.edges, arguments.faults)
        sizes = [(Path(folder) / f"{stem}.csv").stat().st_size for stem in ("nodes", "edges")]
        print("nodes.csv {:.0f} MB, edges.csv {:.0f} MB".format(*(s / 1e6 for s in sizes)))
        command = [sys.executable, __file__, "--read", folder]
        subprocess.run(command, check=True, env=os.environ | THREADS)


if __name__ == "__main__":
    main()
