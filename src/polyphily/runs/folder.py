"""The run folder: what a run leaves behind, written so that a kill at any moment loses little.

config.toml       what was asked; runs again as is
partition.npz     who holds which node, and the split (partition-seed-N.npz for further seeds)
metrics.jsonl     one object per round
summary.json      the outcome
start.json        what is known of the run before its first round, for `polyphily watch`
lock              locked while a process works on the run
models/           weights of the last round, and of the best validation round (…-best)
checkpoint/       where a killed run goes on
clients/          with --on-disk: the states of clients, as of the checkpoint and since
tuning.jsonl      with --tune: the request, then one object per trial
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from polyphily.core.messages import Message
from polyphily.errors import UserError
from polyphily.graphs.limits import DATA, Limit
from polyphily.graphs.loading import Federation
from polyphily.runs.lock import held, is_held

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
TUNING = "tuning.jsonl"
CLIENTS = "clients"
CURVES = "curves.json"
START = "start.json"
LOCK = "lock"
SHARE = 0.01  # at most this share of a run goes into writing checkpoints


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written, self._cost = 0.0, 0.0
        self._waiting: list[Mapping[str, Any]] = []  # records that are not written yet
        self._since = 0.0  # when the first of them came

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "checkpoint" / "state.safetensors"

    def create(self, config: Mapping[str, Any], federations: Sequence[Federation]) -> None:
        """Create the folder; refuse one that holds a run already."""
        self.refuse_another_run()
        try:
            for name in ("models", "checkpoint"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        for s, federation in enumerate(federations):
            federation.partition.save(self.partition_file(federation.seed, first=s == 0))
        write_text(self.path / CONFIG, to_toml(config))

    def refuse_another_run(self) -> None:
        """Raise a `UserError` if the folder holds a run already."""
        if (self.path / CONFIG).exists():
            raise UserError(
                f"{self.path} holds a run already: choose another --out, "
                f"or go on with it: polyphily run --resume {self.path}"
            )

    def amend_config(self, **entries: Any) -> None:
        """Change entries of `config.toml`."""
        file = self.path / CONFIG
        config = tomllib.loads(file.read_text(encoding="utf-8"))
        write_text(file, to_toml(config | entries))

    def partition_file(self, seed: int, *, first: bool) -> Path:
        return self.path / ("partition.npz" if first else f"partition-seed-{seed}.npz")

    # Whether it is going on ------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Show others that a process works on the run, inside the block."""
        with held(self.path / LOCK):
            try:
                yield
            finally:
                self.write_records()

    def is_at_work(self) -> bool | None:
        """Return whether a process works on the run; None if that cannot be known."""
        return is_held(self.path / LOCK)

    def write_start(self, facts: Mapping[str, Any]) -> None:
        """Write what is known before the first round, with the names that it has in the summary."""
        write_text(self.path / START, json.dumps(clean(facts), allow_nan=False) + "\n")

    def read_start(self) -> dict[str, Any]:
        """Return what `write_start` wrote; empty if the run has not begun."""
        return self._read_json(START) or {}

    # Rounds ----------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any], within: float = 0.0) -> None:
        """Add a round's record to `metrics.jsonl`.

        Args:
            record: of the round.
            within: how many seconds it may wait for others. To write several records at once takes
                half the time. A checkpoint writes all that wait, and so does the end of `at_work`.
        """
        now = time.perf_counter()
        self._since = self._since if self._waiting else now
        self._waiting.append(record)
        if now - self._since >= within:
            self.write_records()

    def write_records(self) -> None:
        """Write the records that wait to be written."""
        if self._waiting:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.writelines(map(_line, self._waiting))
            self._waiting.clear()

    def records(self, name: str = METRICS) -> list[dict[str, Any]]:
        """Return the objects in a file with one JSON object per line."""
        self.write_records()
        file = self.path / name
        if not file.exists():
            return []
        found = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:  # a line that a kill cut short
                break
        return found

    def truncate(self, rounds: int) -> list[dict[str, Any]]:
        """Drop records of rounds after the given one, which are run again; return the rest."""
        kept = [record for record in self.records() if record["round"] <= rounds]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_text(self.path / METRICS, lines)
        return kept

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write_records()
        text = json.dumps(clean(summary), indent=2, allow_nan=False)
        write_text(self.path / SUMMARY, text + "\n")

    def write_curves(self, curves: Mapping[str, Any]) -> None:
        """Write the precision-recall and reliability curves of the report, if there are any."""
        if curves:
            write_text(self.path / CURVES, json.dumps(clean(curves), allow_nan=False) + "\n")

    def read_curves(self) -> dict[str, Any]:
        """Return what `write_curves` wrote; empty if there is nothing."""
        return self._read_json(CURVES) or {}

    def read_summary(self) -> dict[str, Any] | None:
        return self._read_json(SUMMARY)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def tuning_facts(self) -> dict[str, Any]:
        """Return what the summary says about the search before the run; empty without one."""
        trials = self.records(TUNING)[1:]
        if not trials:
            return {}
        failed = sum("failed" in trial for trial in trials)
        return {"tuning": {"trials": len(trials), "failed": failed, "file": TUNING}}

    # Weights ---------------------------------------------------------------------------------

    def model_files(self, names: Iterable[str]) -> dict[str, Path]:
        """Return a file for each model, named after it; equal file names are numbered."""
        found: dict[str, Path] = {}
        taken: set[str] = set()
        for name in names:
            stem, number = safe_name(name), 1
            while stem in taken:
                number += 1
                stem = f"{safe_name(name)}-{number}"
            taken.add(stem)
            found[name] = self.path / "models" / f"{stem}.safetensors"
        return found

    def checkpoint_due(self, runs: int = 1) -> bool:
        """Return whether a checkpoint may be written within its share of the run's time.

        Args:
            runs: how many runs write one, if several train in one pass.
        """
        return time.perf_counter() - self._written >= runs * self._cost / SHARE

    def save_checkpoint(self, tensors: Message, progress: Mapping[str, Any]) -> None:
        self.write_records()
        began = time.perf_counter()
        save_tensors(self.checkpoint_file, tensors, {"progress": json.dumps(progress)})
        self._written = time.perf_counter()
        self._cost = self._written - began

    def load_checkpoint(self) -> tuple[Message, dict[str, Any]] | None:
        if not self.checkpoint_file.exists():
            return None
        tensors, facts = read_tensors(self.checkpoint_file)
        progress: dict[str, Any] = json.loads(facts["progress"])
        return tensors, progress

    def rounds_saved(self) -> int:
        """Return how many rounds the checkpoint covers; 0 without a checkpoint."""
        if not self.checkpoint_file.exists():
            return 0
        with safe_open(self.checkpoint_file, framework="pt") as stream:
            return int(json.loads(stream.metadata()["progress"])["round"])


def save_tensors(
    file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str], *, durable: bool = False
) -> None:
    """Write tensors with text metadata, atomically.

    Args:
        file: where to.
        tensors: by name.
        facts: the metadata.
        durable: whether to wait until the file is on the disk.
    """
    host = {
        n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(host, partial, metadata=dict(facts))
    _sort_facts(partial)
    if durable:
        sync(partial)
    os.replace(partial, file)
    if durable:
        sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_tensors(file: Path, limit: Limit = DATA) -> tuple[Message, dict[str, str]]:
    """Read what `save_tensors` wrote.

    Raises:
        UserError: if the file is too large. A file has all numbers that its header declares.
    """
    limit.check_file(file)
    with safe_open(file, framework="pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        facts: dict[str, str] = stream.metadata() or {}
    return tensors, facts


def _sort_facts(file: Path) -> None:
    """Sort the metadata in a file's header, so that equal weights give equal bytes.

    safetensors writes the metadata in random order.
    """
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        stream.seek(8)
        stream.write(text.encode().ljust(size))


def write_text(file: Path, text: str) -> None:
    """Write a file atomically."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def clean(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON; it is cleaned only if it must be."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(clean(record), allow_nan=False) + "\n"


def safe_name(name: str) -> str:
    """Turn a name into a file name of letters, digits, dots and dashes.

    >>> safe_name("bank north/1"), safe_name("fedsage+")
    ('bank-north-1', 'fedsage-plus')
    """
    return re.sub(r"[^\w.\-]+", "-", name.replace("+", "-plus")).strip(".-") or "model"


def to_toml(config: Mapping[str, Any]) -> str:
    """Write plain values and one level of tables as TOML.

    >>> print(to_toml({"method": "fedprox", "seeds": [0, 1], "set": {"mu": 0.1}}), end="")
    method = "fedprox"
    seeds = [0, 1]
    <BLANKLINE>
    [set]
    mu = 0.1
    """
    plain = {k: v for k, v in config.items() if not isinstance(v, Mapping)}
    tables = {k: v for k, v in config.items() if isinstance(v, Mapping) and v}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *[f"{k} = {_toml_value(v)}" for k, v in entries.items()]]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
