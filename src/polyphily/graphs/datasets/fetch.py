"""Files of a dataset in place: found under the data root, or downloaded into it."""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polyphily.errors import PolyphilyError, UserError, missing_package
from polyphily.graphs.datasets.info import DatasetInfo, Part

TIMEOUT_SECONDS = 30.0
NAMED_FILES = 4  # so many missing files are named in a message, the rest counted


def missing(parts: Iterable[Part], root: Path) -> list[str]:
    """The files of these parts that are not under the root."""
    return [file for part in parts for file in part.files if not (root / file).is_file()]


def fetch(info: DatasetInfo, parts: Iterable[Part], root: Path) -> list[Path]:
    """Brings what is missing of the parts into place and returns the files that are new.

    Raises:
        UserError: where the files cannot be had; it says what belongs where.
    """
    incomplete = [part for part in parts if missing([part], root)]
    absent = missing(incomplete, root)
    if not all(part.getter for part in incomplete):
        raise UserError(f"{info.name} has to be fetched by hand: {_by_hand(info, absent, root)}")
    try:
        for part in incomplete:
            _download(info, part, root)
    except PolyphilyError:
        raise
    except Exception as error:  # whatever the downloading package raises, the remedy is the same
        reason = str(error).strip() or type(error).__name__
        raise UserError(
            f"{info.name} could not be downloaded ({reason}). Without a network: "
            f"{_by_hand(info, absent, root)}"
        ) from error
    return [root / file for file in absent]


def _download(info: DatasetInfo, part: Part, root: Path) -> None:
    """Downloads into a folder of its own and moves the files once all of them are there.

    One that breaks off leaves nothing behind that a later attempt would take for the data.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as folder, _time_limit():
        GETTERS.get(part.getter, _from_pyg)(info, part, Path(folder))
        for file in missing([part], root):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder) / file, root / file)


def _by_hand(info: DatasetInfo, absent: list[str], root: Path) -> str:
    named = ", ".join(absent[:NAMED_FILES])
    more = len(absent) - NAMED_FILES
    rest = f" and {more} more like these" if more > 0 else ""
    return f"put {named}{rest} into the folder {root}. Official source: {info.source}"


def _from_pyg(info: DatasetInfo, part: Part, folder: Path) -> None:
    """Has torch_geometric's own class fetch the raw files, and nothing more.

    Its `process` would make bag-of-words features dense and leave pickled tensors behind.
    """
    datasets = importlib.import_module("torch_geometric.datasets")
    base = getattr(datasets, part.getter)
    idle = {"_process": lambda self: None, "load": lambda self, *args, **kwargs: None}
    type(part.getter, (base,), idle)(str(folder / part.getter), **part.arguments)


def _from_ogb(info: DatasetInfo, part: Part, folder: Path) -> None:
    try:
        url = importlib.import_module("ogb.utils.url")
    except ImportError:
        raise missing_package(
            "ogb",
            info.extra,
            f"downloading {info.name}",
            f"Or put the folder 'arxiv' of {info.source} into {folder.parent} as ogbn_arxiv.",
        ) from None
    archive = url.download_url(info.source, str(folder))
    url.extract_zip(archive, str(folder))
    (folder / "arxiv").rename(folder / "ogbn_arxiv")


GETTERS: Mapping[str, Callable[[DatasetInfo, Part, Path], None]] = {"ogb": _from_ogb}


@contextmanager
def _time_limit() -> Iterator[None]:
    """Lets a silent server fail after a while; torch_geometric sets no limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
