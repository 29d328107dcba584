"""Values that the shell completes: names of methods, datasets and the like, words, run folders.

A shell waits for the answer, and registries import torch. Their names are therefore kept in a file
in the user's cache. It is made again when the library or the installed plug-ins change.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import shorten
from typing import Any

import typer

import polyphily
from polyphily.core.settings import CHOICES

Names = dict[str, str]  # names and what they are, in a few words
Complete = Callable[[str], list[tuple[str, str]]]
REGISTRIES = ("methods", "datasets", "partitions", "backbones", "metrics")
SOURCES = ("methods", "graphs", "nn", "core", "runs", "report")  # where names are registered
SETTINGS = {"backbone": "backbones", "metric": "metrics"}  # whose values are in a registry
DEVICES = ("cpu", "cuda")
NORMALIZE = ("none", "row", "standard")
ENCODING = ("agreed", "home")
LONGEST = 60  # of the explanation of a name
FOLDERS = ("runs", "sweeps")  # where runs are put unless --out is given


# The stored names ---------------------------------------------------------------------------------


def listing() -> dict[str, Any]:
    """Return all names, from the file in the cache if it is up to date.

    Returns:
        `Names` for each of `REGISTRIES`, `figures` and `trackers`; `hyperparameters` has those of
        each method, with the words that each takes.
    """
    file = _cache_folder() / f"names-{_fingerprint()}.json"
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stored
    except (OSError, ValueError):
        pass
    with warnings.catch_warnings():  # about plug-ins: other commands show them
        warnings.simplefilter("ignore")
        found = _collect()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("names-*.json"):
            old.unlink(missing_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(found), encoding="utf-8")
        new.replace(file)
    except OSError:
        pass  # the next call collects them again
    return found


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "polyphily-completion"


def _fingerprint() -> str:
    """Return a hash of the library's sources by time and size, and of the installed plug-ins."""
    digest = hashlib.sha256(polyphily.__version__.encode())
    root = Path(polyphily.__file__).parent
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            about = file.stat()
            digest.update(f"{file} {about.st_mtime_ns} {about.st_size}\n".encode())
    points = entry_points()
    for kind in REGISTRIES:
        for point in sorted(points.select(group=f"polyphily.{kind}"), key=lambda p: p.name):
            version = point.dist.version if point.dist else ""
            digest.update(f"{kind} {point.name} {point.value} {version}\n".encode())
    return digest.hexdigest()[:16]


def _collect() -> dict[str, Any]:
    from polyphily.cli.listings import method_summary, summary
    from polyphily.core.method import METHODS
    from polyphily.core.metrics import METRICS
    from polyphily.graphs.datasets import DATASETS
    from polyphily.graphs.partitions import PARTITIONS
    from polyphily.nn.backbones import BACKBONES
    from polyphily.report.figures import FIGURES, OF_DATA
    from polyphily.runs.tracking import SINKS

    return {
        "methods": {name: method_summary(cls) for name, cls in sorted(METHODS.items())},
        "datasets": {name: info.title for name, info in DATASETS.items()},
        "partitions": {name: entry.summary for name, entry in PARTITIONS.items()},
        "backbones": {name: summary(cls.__doc__) for name, cls in BACKBONES.items()},
        "metrics": {name: metric.title for name, metric in METRICS.items() if metric.selects},
        "figures": dict.fromkeys((*FIGURES, *OF_DATA), ""),
        "trackers": dict.fromkeys(SINKS, ""),
        "hyperparameters": {
            name: {
                field.name: {
                    "meaning": field.metadata.get("doc", ""),
                    "words": list(field.metadata.get("choices", ())),
                }
                for field in cls.hyperparameters().values()
            }
            for name, cls in METHODS.items()
        },
    }


# Completions --------------------------------------------------------------------------------------


def of(kind: str, *, several: bool = False) -> Complete:
    """Return the completion of names of a kind in `listing`.

    Args:
        kind: the kind, such as "methods".
        several: whether names can be given with commas between them.
    """

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return _matching(listing()[kind], incomplete, several)

    return complete


def words(values: Iterable[str], *, several: bool = False) -> Complete:
    """Return the completion of given words."""
    known = dict.fromkeys(values, "")

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return _matching(known, incomplete, several)

    return complete


def of_option(name: str, *, several: bool = False) -> Any:
    """Return the completion of a setting or an entry of the data options; None if it has none."""
    if name == "dataset":
        return datasets(several=several)
    if name == "partition":
        return of("partitions", several=several)
    if name in SETTINGS:
        return of(SETTINGS[name])
    known = {**CHOICES, "device": DEVICES, "normalize": NORMALIZE, "encoding": ENCODING}
    return words(known[name]) if name in known else None


def datasets(*, several: bool = False) -> Complete:
    """Return the completion of datasets; that of folders and files if a path is begun."""
    named = of("datasets", several=several)

    def complete(incomplete: str) -> list[tuple[str, str]]:
        if incomplete.startswith((".", "/", "~")) or "/" in incomplete:
            return [(path, "") for path in _paths(incomplete)]
        return named(incomplete)

    return complete


def hyperparameter(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete `name=` for --set and, after it, the words of that hyperparameter."""
    known = _hyperparameters(ctx)
    name, sign, begun = incomplete.partition("=")
    if sign:
        found = known.get(name, {"words": ()})["words"]
        return [(f"{name}={word}", "") for word in found if word.startswith(begun)]
    return _matching({f"{name}=": entry["meaning"] for name, entry in known.items()}, incomplete)


def varied(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete `name=` for --vary: hyperparameters, settings and data."""
    from polyphily.cli.options import DATA, attribute_docs
    from polyphily.core.settings import Settings

    names = {f"{name}=": text for name, (_, text) in DATA.items() if name != "seeds"}
    names |= {f"{name}=": text for name, text in attribute_docs(Settings).items()}
    names |= {f"{name}=": entry["meaning"] for name, entry in _hyperparameters(ctx).items()}
    return _matching(names, incomplete)


def run_folder(incomplete: str) -> list[tuple[str, str]]:
    """Complete run folders and folders with runs in them; others end in `/`, to go on there."""
    if incomplete:
        return [(path, "") for path in _paths(incomplete, folders=True)]
    found = [path for folder in FOLDERS for path in _paths(f"{folder}/", folders=True)]
    return [(path, "") for path in found or _paths("", folders=True)]


def _hyperparameters(ctx: typer.Context) -> dict[str, Any]:
    """Return the hyperparameters of the methods that were given before; else those of all."""
    known: Mapping[str, dict[str, Any]] = listing()["hyperparameters"]
    words = (word for value in ctx.params.values() for word in _as_words(value))
    given = [word.lower() for word in (*words, *ctx.args) if word.lower() in known]
    return {name: entry for method in given or known for name, entry in known[method].items()}


def _as_words(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [word for word in values if isinstance(word, str)]


def _matching(known: Names, incomplete: str, several: bool = False) -> list[tuple[str, str]]:
    """Return the names that begin with what was typed, with `several` after the last comma."""
    before, comma, begun = incomplete.rpartition(",") if several else ("", "", incomplete)
    return [
        (f"{before}{comma}{name}", shorten(text, LONGEST, placeholder="…"))
        for name, text in known.items()
        if name.startswith(begun)
    ]


def _paths(incomplete: str, *, folders: bool = False) -> Sequence[str]:
    """Return paths that begin with what was typed."""
    typed, slash, begun = incomplete.rpartition("/")
    above = Path(f"{typed}{slash}" or ".").expanduser()
    return [f"{typed}{slash}{name}" for name in _entries(above, begun, folders)]


def _entries(above: Path, begun: str, folders: bool) -> Iterator[str]:
    try:
        entries = sorted(above.iterdir())
    except OSError:
        return
    for path in entries:
        hidden = path.name.startswith(".") and not begun.startswith(".")
        if hidden or not path.name.startswith(begun):
            continue
        if path.is_dir():
            run = (path / "config.toml").is_file()
            yield path.name if run else f"{path.name}/"
        elif not folders:
            yield path.name
