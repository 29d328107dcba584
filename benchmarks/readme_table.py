"""Write the tables of README.md from the committed results.

    python benchmarks/readme_table.py --write

Speed is read from `docs/performance/*.json`, accuracy from `docs/results/`. Without `--write` the
tables are printed. `tests/test_readme.py` compares README.md with them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from polyphily.studies import BASELINE, FEDAVG, METHOD, PAPER_FORM, Study, studies
from polyphily.studies.results import UNCLEAR, Comparison, compare, headline, outcomes

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tables: benchmarks/readme_table.py --write -->", "<!-- end of tables -->"
DEVICES = {"cpu": "one CPU core", "cuda": "NVIDIA H200"}


def speed(folder: Path) -> str:
    """Return the table of rounds of FedAvg, stacked and as a plain torch_geometric loop."""
    found = {}
    for device in DEVICES:
        record = json.loads((folder / f"{device}.json").read_text(encoding="utf-8"))
        for row in record["speed"]:
            found.setdefault((row["dataset"], row["clients"]), {})[device] = row["engines"]
    head = ["a round of FedAvg", "clients"]
    for name in DEVICES.values():
        head += [name, "torch_geometric", "faster by"]
    rows = []
    for (dataset, clients), engines in found.items():
        if engines.keys() == DEVICES.keys():
            cells = [text for device in DEVICES for text in _times(engines[device])]
            rows.append([dataset, str(clients), *cells])
    return _table(head, rows)


def _times(engines: dict[str, dict[str, float]]) -> list[str]:
    ours, plain = engines["stacked"]["median_ms"], engines["torch_geometric"]["median_ms"]
    ratio = plain / ours
    return [f"{ours:.1f} ms", f"{plain:.0f} ms", f"**{ratio:.1f}×**"]


def accuracy(folder: Path) -> str:
    """Return the table of methods against FedAvg on the same backbone, in their own views."""
    head = ["method", "cells", "better", "level", "worse", UNCLEAR]
    head += ["mean difference", "to FedAvg on its best backbone", "as printed in the paper"]
    return _table(head, [_against_fedavg(study, folder) for study in studies().values()])


def _against_fedavg(study: Study, folder: Path) -> list[str]:
    view = headline(study)
    cells = [outcomes(study, cell, folder, view) for cell in study.cells]
    same = [one for rows in cells if (one := compare(rows, study, METHOD))]
    best = [
        one for rows in cells if (one := compare(rows, study, METHOD, against=(FEDAVG, BASELINE)))
    ]
    printed = [one for rows in cells if (one := compare(rows, study, PAPER_FORM))]
    verdicts = [one.verdict for one in same]
    counts = [str(verdicts.count(word)) for word in ("better", "level", "worse", UNCLEAR)]
    means = [_mean(found, len(same)) for found in (same, best, printed)]
    return [study.name, str(len(same)), *counts, *means]


def _mean(found: Sequence[Comparison], cells: int) -> str:
    """Return the mean difference, with the number of cells if some have not run."""
    if not found:
        return "–"
    mean = f"{statistics.fmean(one.difference for one in found):+.1f}"
    return mean if len(found) == cells else f"{mean} ({len(found)} cells)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def tables(root: Path = ROOT) -> tuple[str, str]:
    """Return both tables in Markdown."""
    return speed(root / "docs" / "performance"), accuracy(root / "docs" / "results")


def with_tables(readme: str, found: Sequence[str]) -> str:
    """Return the text of README.md with these tables in place of its own, in their order."""
    parts = readme.split(BEGIN)
    if len(parts) != len(found) + 1:
        raise SystemExit(f"README.md has {len(parts) - 1} places for {len(found)} tables")
    text = parts[0]
    for table, part in zip(found, parts[1:], strict=True):
        _, end, rest = part.partition(END)
        if not end:
            raise SystemExit(f"README.md: a table has no '{END}'")
        text += f"{BEGIN}\n\n{table}\n\n{END}{rest}"
    return text


def main() -> None:
    found = tables()
    if "--write" in sys.argv[1:]:
        path = ROOT / "README.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    else:
        print("\n\n".join(found))


if __name__ == "__main__":
    main()
