"""Federations of several seeds, and partitions in files for machines without partitioners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyphily.graphs.loading import Federation, load
from polyphily.graphs.partitions import NATURAL


def partition_file(
    folder: Path, *, dataset: str, partition: str, clients: int | None, split: str | None, seed: int
) -> Path:
    """Return the file that holds the partition and the split of a federation for one seed."""
    parts = [dataset, partition, str(clients or "own"), str(split or "usual"), str(seed)]
    safe = "".join(c if c.isalnum() or c in "-._=" else "_" for c in "-".join(parts))
    return folder / f"{safe}.npz"


def load_prepared(
    folder: Path | None,
    *,
    dataset: str,
    seed: int,
    partition: str | None = None,
    clients: int | None = None,
    split: str | None = None,
    **others: Any,
) -> Federation:
    """Load a federation; take partition and split from a file, which is written if missing.

    Args:
        folder: the folder of partition files; None loads without them.
        dataset: as for `load`.
        seed: as for `load`.
        partition: as for `load`.
        clients: as for `load`.
        split: as for `load`.
        **others: further arguments of `load`, which do not change who has which node.
    """
    where: dict[str, Any] = {"partition": partition, "clients": clients, "split": split}
    if folder is None or partition in (None, NATURAL):
        return load(dataset, **where, seed=seed, **others)
    file = partition_file(folder, dataset=dataset, **where, seed=seed)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        load(dataset, **where, seed=seed).partition.save(file)
    return load(dataset, partition=file, seed=seed, **others)


def load_seeds(
    data: Mapping[str, Any],
    seeds: Sequence[int],
    folder: Path | None = None,
    *,
    private: bool = False,
    on_disk: bool | None = None,
) -> list[Federation]:
    """Load a federation for every seed, all with the normalisation of the first.

    Args:
        data: arguments of `load`, without the seed.
        seeds: the seeds.
        folder: of partition files, as for `load_prepared`.
        private: whether clients exchange no statistics of their columns unless `data` says so: true
            under differential privacy and secure aggregation.
        on_disk: as for `load`.
    """
    request = {**({"encoding": "home"} if private else {}), **data, "on_disk": on_disk}
    found: list[Federation] = []
    for seed in seeds:
        found.append(load_prepared(folder, **request, seed=seed))
        request["normalize"] = found[0].request["normalize"]
    return found
