"""Downloading the files of a dataset into the data root."""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from polyphily.errors import PolyphilyError, UserError, missing_package
from polyphily.graphs.datasets.info import DatasetInfo, Part
from polyphily.graphs.limits import DATA, check_zip

TIMEOUT_SECONDS = 30.0
NAMED_FILES = 4  # the number of missing files that a message names; the rest is counted


def missing(parts: Iterable[Part], root: Path) -> list[str]:
    """Return the files of the parts that are not under the root."""
    return [file for part in parts for file in part.files if not (root / file).is_file()]


def fetch(info: DatasetInfo, parts: Iterable[Part], root: Path) -> list[Path]:
    """Download the missing files of the parts and return the new files.

    Raises:
        UserError: if a file cannot be downloaded; it says which file belongs where.
    """
    incomplete = [part for part in parts if missing([part], root)]
    absent = missing(incomplete, root)
    if not all(part.getter for part in incomplete):
        raise UserError(f"{info.name} must be downloaded by hand: {_by_hand(info, absent, root)}")
    try:
        for part in incomplete:
            _download(info, part, root)
    except PolyphilyError:
        raise
    except Exception as error:  # whatever the downloading package raises, the remedy is the same
        reason = str(error).strip() or type(error).__name__
        raise UserError(
            f"{info.name} could not be downloaded ({reason}). Without a network: "
            f"{_by_hand(info, absent, root)}. Data that need no download: --dataset csbm"
        ) from error
    return [root / file for file in absent]


def _download(info: DatasetInfo, part: Part, root: Path) -> None:
    """Download a part into a temporary folder and move the files once all are complete.

    An interrupted download leaves no file that a later attempt would take for the data.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as folder, _time_limit():
        GETTERS.get(part.getter, _from_pyg)(info, part, Path(folder))
        for file in missing([part], root):
            _check_download(Path(folder) / file, part.sha256.get(file))
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder) / file, root / file)


def _check_download(file: Path, wanted: str | None) -> None:
    """Raise a `UserError` if a download is not the file that was published."""
    DATA.check_file(file)
    if wanted is not None and (found := _digest(file)) != wanted:
        raise UserError(
            f"the download of {file.name} is not the published file: its sha256 is {found}, "
            f"{wanted} is wanted. Try again, or take the file from another network"
        )


def check_intact(info: DatasetInfo, parts: Iterable[Part], root: Path) -> None:
    """Raise a `UserError` if a file under the root is too large, or not the one published."""
    for part in parts:
        for file in part.files:
            DATA.check_file(root / file)
            wanted = part.sha256.get(file)
            if wanted is not None and (found := _digest(root / file)) != wanted:
                again = "it is downloaded again" if part.getter else "put the published one there"
                raise UserError(
                    f"{root / file} is not the published file: its sha256 is {found}, {wanted} is "
                    f"wanted. Delete it, and {again}. Official source: {info.source}"
                )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _by_hand(info: DatasetInfo, absent: list[str], root: Path) -> str:
    named = ", ".join(absent[:NAMED_FILES])
    more = len(absent) - NAMED_FILES
    rest = f" and {more} more like these" if more > 0 else ""
    return f"put {named}{rest} into the folder {root}. Official source: {info.source}"


def _from_pyg(info: DatasetInfo, part: Part, folder: Path) -> None:
    """Download the raw files by the torch_geometric class, without its processing.

    Its `process` would make bag-of-words features dense and write pickled tensors.
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
    archive = url.download_url(_secure(info.source), str(folder))
    check_zip(Path(archive))
    url.extract_zip(archive, str(folder))
    (folder / "arxiv").rename(folder / "ogbn_arxiv")


def _from_https(info: DatasetInfo, part: Part, folder: Path) -> None:
    """Download one file from a fixed address."""
    (file,) = part.files
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(_secure(str(part.arguments["url"]))) as answer:
        _secure(answer.geturl())  # after redirections
        (folder / file).write_bytes(answer.read(DATA.bytes() + 1))


def _secure(url: str) -> str:
    """Return an address, unless it is not of https: then anybody on the way could change files."""
    if not url.startswith("https://"):
        raise UserError(f"refused to download from {url}: only https is safe")
    return url


def _from_linkx(info: DatasetInfo, part: Part, folder: Path) -> None:
    """Download each graph of LINKX by its torch_geometric class."""
    for file in part.files:
        name = Path(file).parents[1].name
        alone = replace(part, getter="LINKXDataset", arguments={"name": name})
        _from_pyg(info, alone, folder / name)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).rename(folder / file)


GETTERS: Mapping[str, Callable[[DatasetInfo, Part, Path], None]] = {
    "ogb": _from_ogb,
    "https": _from_https,
    "linkx": _from_linkx,
}


@contextmanager
def _time_limit() -> Iterator[None]:
    """Set a timeout on sockets inside the block; torch_geometric sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
