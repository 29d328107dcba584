"""Limits on input files: what is too large is refused before memory is allocated for it."""

from __future__ import annotations

import gzip
import io
import os
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from polyphily.cli.options import read_config
from polyphily.errors import UserError
from polyphily.flower.deployment import Bundle, Deployment
from polyphily.flower.site_policy import read_policy
from polyphily.graphs.datasets.assembly import load_npz, read_table
from polyphily.graphs.files import read
from polyphily.graphs.files.schema import read_schema
from polyphily.graphs.limits import DATA, MODEL, PARTITION, TEXT, Limit, in_words, read_text
from polyphily.graphs.partitions import Partition
from polyphily.runs.models import ModelFile, SavedModel

HUGE = 10**12
LIE = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,8]}}'
EDGES = np.array([[0, 1], [1, 2]])


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Let an allocation of 100 GB fail, so that a check that comes too late fails the test."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (100 * 10**9, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def npz_of(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def header_of(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    stream = io.BytesIO()
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(stream, facts)
    return stream.getvalue()


def lying_npz(path: Path, shape: tuple[int, ...]) -> Path:
    """An archive whose array declares more numbers than there are."""
    npz_of(path, edge_index=EDGES, y=np.arange(3))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", header_of(shape) + bytes(64))
    return path


def bomb_npz(path: Path) -> Path:
    """A small archive whose array is large."""
    return npz_of(path, x=np.zeros((3, 10**6), np.float32), edge_index=EDGES, y=np.arange(3))


# Arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [read, load_npz, Partition.load])
def test_an_array_that_declares_a_terabyte(use: Callable[[Path], Any], tmp_path: Path) -> None:
    path = lying_npz(tmp_path / "graph.npz", (HUGE, 8))
    with pytest.raises(UserError, match=r"graph\.npz: its array 'x\.npy' declares 32 TB") as caught:
        use(path)
    assert "POLYPHILY_MAX_" in str(caught.value)


def test_an_array_that_declares_more_than_it_has(tmp_path: Path) -> None:
    path = lying_npz(tmp_path / "graph.npz", (10**9, 4))
    with pytest.raises(UserError, match="declares 16 GB and has"):
        read(path)
    with pytest.raises(ValueError, match="declares 16 GB and has"):
        load_npz(path)


@pytest.mark.parametrize(
    ("use", "limit"), [(read, DATA), (load_npz, DATA), (Partition.load, PARTITION)]
)
def test_an_archive_that_unpacks_to_too_much(
    use: Callable[[Path], Any], limit: Limit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bomb_npz(tmp_path / "graph.npz")
    assert path.stat().st_size < 10**5
    monkeypatch.setenv(limit.variable, "5MB")
    with pytest.raises(UserError, match=r"graph\.npz: unpacks to 12 MB, and 5 MB is the most"):
        use(path)


def test_a_limit_can_be_raised_as_the_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npz_of(tmp_path / "g.npz", x=np.eye(3, 9000), edge_index=EDGES, y=np.arange(3))
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "100KB")
    with pytest.raises(UserError) as caught:
        read(path)
    advice = str(caught.value).rsplit(" as in ", 1)[1]
    name, _, value = advice.partition("=")
    monkeypatch.setenv(name, value)
    assert read(path).graphs[0].num_nodes == 3


@pytest.mark.parametrize("text", ["5", "many", "5 MiB", "-1GB"])
def test_a_limit_that_is_no_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHILY_MAX_DATA", text)
    with pytest.raises(UserError, match=r"POLYPHILY_MAX_DATA: .* is no size"):
        DATA.bytes()


def test_a_tensor_that_repeats_itself(tmp_path: Path) -> None:
    """A few bytes of storage, seen as a terabyte."""
    endless = torch.zeros(1).expand(HUGE // 8).view(-1, 8)
    torch.save({"x": endless, "edge_index": torch.from_numpy(EDGES)}, tmp_path / "graph.pt")
    assert (tmp_path / "graph.pt").stat().st_size < 10_000
    with pytest.raises(UserError, match=r"graph\.pt: its tensor 'x' declares 500 GB"):
        read(tmp_path / "graph.pt")


def test_tensors_of_a_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stores tensors as they are, but somebody may pack the archive."""
    torch.save({"x": torch.zeros(10**6)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "graph.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "1MB")
    with pytest.raises(UserError, match=r"graph\.pt: unpacks to 4"):
        read(tmp_path / "graph.pt")


# Tables ----------------------------------------------------------------------------------------


def table(folder: Path, **columns: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "nodes.parquet", compression="zstd")
    (folder / "edges.csv").write_text("source,target\n0,1\n")
    return folder


def test_a_parquet_file_with_too_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are alike, so that the file is small."""
    pytest.importorskip("pyarrow")
    rows = 500_000
    ids = np.zeros(rows, dtype=np.int64)
    folder = table(tmp_path / "bank", id=ids, label=ids, amount=ids)
    assert (folder / "nodes.parquet").stat().st_size < 50_000
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "10MB")
    with pytest.raises(UserError, match=r"nodes\.parquet: unpacks to 12 MB"):
        read(folder)


@pytest.mark.parametrize("column", ["label", "town"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_parquet_file_with_a_long_text_in_every_row(
    column: str, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is stored once: 10 kB for 100 MB. The writer may have told readers so, or not."""
    pa = pytest.importorskip("pyarrow")
    rows, numbers = 10_000, np.arange(10_000)
    places = pa.array(np.zeros(rows, np.int32))
    words = pa.DictionaryArray.from_arrays(places, pa.array(["x" * 10_000]))
    texts = {column: words.cast(pa.string()) if plain else words}
    folder = table(tmp_path / "bank", **{"id": numbers, "label": numbers, "x": numbers, **texts})
    assert (folder / "nodes.parquet").stat().st_size < 10**6
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "50MB")
    with pytest.raises(UserError, match=r"nodes\.parquet: unpacks to 100"):
        read(folder)
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "200MB")
    assert read(folder).graphs[0].num_nodes == rows


def test_a_csv_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "nodes.csv").write_text("id,label,x\n" + "1,a,1\n" * 1000)
    (tmp_path / "edges.csv").write_text("source,target\n1,1\n")
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "2KB")
    with pytest.raises(UserError, match=r"nodes\.csv: has 6\.011 KB, and 2 KB is the most"):
        read(tmp_path)


def test_a_packed_table_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "edge.csv.gz"
    path.write_bytes(gzip.compress(b"1,2\n" * 10**6))
    assert len(read_table(path, header=None)) == 10**6
    monkeypatch.setenv("POLYPHILY_MAX_DATA", "1MB")
    with pytest.raises(UserError, match=r"edge\.csv\.gz: unpacks to more than .*POLYPHILY_MAX_DA"):
        read_table(path, header=None)


# Files from others -----------------------------------------------------------------------------


@pytest.mark.parametrize("use", [SavedModel.load, ModelFile.read])
def test_a_model_that_is_too_large(use: Callable[[Path], Any], tmp_path: Path) -> None:
    """The file has a hole, so that it takes no place on the disk."""
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    os.truncate(path, 5 * 10**9)
    with pytest.raises(UserError, match=rf"5 GB, and 4 GB is the most.*{MODEL.variable}"):
        use(path)


@pytest.mark.parametrize("use", [SavedModel.load, ModelFile.read])
@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 90)
        + b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,8]}}',
        b"",
    ],
)
def test_a_model_whose_header_lies(
    use: Callable[[Path], Any], content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not a model file"):
        use(tmp_path / "model.safetensors")


def _bundle(path: Path) -> Any:
    return Bundle(path.parent).name


def _server(path: Path) -> Any:
    return Deployment.open(path.parent)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("schema.toml", read_schema),
        ("policy.toml", read_policy),
        ("config.toml", read_config),
        ("config.toml", _server),
        ("site.toml", _bundle),
        ("text", read_text),
    ],
)
def test_a_text_that_is_too_large(name: str, use: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    os.truncate(path, 20 * 10**6)
    with pytest.raises(UserError, match=rf"20 MB, and 16 MB is the most.*{TEXT.variable}"):
        use(path)


def test_a_text_without_a_size_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEXT.variable, "1MB")
    with pytest.raises(UserError, match=r"/dev/zero: has 1 MB"):
        read_text(Path("/dev/zero"))


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (0, 999, 1500, 2 * 10**9, 10**16)] == [
        *("1 KB", "1 KB", "1.5 KB", "2 GB"),
        "1e+04 TB",
    ]
