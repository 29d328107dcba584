"""What several tests need: the folder with the real datasets."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores: one thread each

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

UNPACK = Path(__file__).resolve().parents[2] / "shared" / "datasets" / "unpack"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The data root with the real datasets: `$POLYPHILY_DATA`, else the archive, unpacked once.

    Tests only read from it.
    """
    given = os.environ.get("POLYPHILY_DATA")
    if given:
        return Path(given)
    if not UNPACK.is_file():
        pytest.skip("no real datasets: set POLYPHILY_DATA to a folder that has them")
    return _unpacked()


def _unpacked() -> Path:
    """One folder for all workers and later runs; it appears complete or not at all."""
    stamp = max(int(path.stat().st_mtime) for path in UNPACK.parent.iterdir())
    folder = Path(tempfile.gettempdir()) / f"polyphily-test-data-{os.getuid()}-{stamp}"
    if not folder.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        try:
            subprocess.run([str(UNPACK), str(fresh)], check=True, stdout=subprocess.DEVNULL)
            fresh.rename(folder)
        except OSError:  # another worker was faster
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than there are cores: many tests wait for processes."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else 2
