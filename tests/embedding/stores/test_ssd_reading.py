"""Test conditions that are not damage: short reads and writes, refused direct I/O, too many open
files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_conformance import random_records
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.kernels.blocks import cpu

ROWS, RECORD_BYTES = 600, 110
CONFIG = SsdConfig(segment_bytes=16384, buffer_bytes=16384, depth=4)


@pytest.fixture
def store(tmp_path: Path):
    ssd_store = SsdRecords(tmp_path / "log", rows=ROWS, record_bytes=RECORD_BYTES, config=CONFIG)
    ssd_store.write(np.arange(ROWS), random_records(np.arange(ROWS), RECORD_BYTES, 1))
    ssd_store.flush()
    yield ssd_store
    ssd_store.close()


def assert_readable(store: SsdRecords) -> None:
    out = np.zeros((ROWS, RECORD_BYTES), np.uint8)
    assert store.read(np.arange(ROWS), out).all()
    np.testing.assert_array_equal(out, random_records(np.arange(ROWS), RECORD_BYTES, 1))


@pytest.mark.parametrize("got", [-errno.EINTR, -errno.EAGAIN, 0, 1000, 4096, 5000, 12_287])
def test_a_short_read_is_continued(tmp_path: Path, got: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 12_288, np.uint8)
    (tmp_path / "file").write_bytes(bytes(100) + content.tobytes())
    actual = np.zeros(12_288, np.uint8)
    actual[: max(got, 0)] = content[: max(got, 0)]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert cpu.read_on(descriptor, actual.ctypes.data, 12_288, 100, got) == 12_288
        np.testing.assert_array_equal(actual, content)
        assert cpu.read_on(descriptor, actual.ctypes.data, 12_288, 8292, 0) == 4096, (
            "a short file ends the read"
        )
    finally:
        os.close(descriptor)
    assert cpu.read_on(descriptor, actual.ctypes.data, 12_288, 100, -errno.EBADF) == 0, (
        "an error does not go on forever"
    )


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_direct_io_that_fails_on_first_access_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems let a file be opened with O_DIRECT and then fail the first access with
    EINVAL.
    """
    access = getattr(os, name)

    def refusing(descriptor: int, *given: Any) -> Any:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return access(descriptor, *given)

    monkeypatch.setattr(os, name, refusing)
    with pytest.warns(RuntimeWarning, match="direct I/O"):
        ssd_store = SsdRecords(tmp_path / "log", rows=ROWS, record_bytes=RECORD_BYTES, config=CONFIG)
    ssd_store.write(np.arange(ROWS), random_records(np.arange(ROWS), RECORD_BYTES, 1))
    ssd_store.flush()
    for slot in ssd_store.segments.used:
        assert not fcntl.fcntl(int(ssd_store.segments.descriptors[slot]), fcntl.F_GETFL) & os.O_DIRECT
    assert_readable(ssd_store)
    ssd_store.close()


FILES = """
import resource, sys
import numpy as np
from pathlib import Path
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.errors import StorageError
from store_conformance import random_records
soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
config = SsdConfig(segment_bytes=4096, buffer_bytes=4096, depth=1)
store = SsdRecords(Path(sys.argv[1]), rows=9000, record_bytes=110, config=config)
rows = np.arange(9000)
try:
    store.write(rows, random_records(rows, 110, 1))
except StorageError as error:
    print("refused:", error)
else:
    out = np.zeros((9000, 110), np.uint8)
    store.read(rows, out)
    assert (out == random_records(rows, 110, 1)).all()
    print("segments:", len(store.segments.used))
"""


@pytest.mark.slow
def test_more_segments_than_open_files_raise_the_limit_or_an_error_that_names_it(tmp_path: Path) -> None:
    def run(name: str, soft: int, hard: int) -> str:
        command = [sys.executable, "-W", "ignore", "-c", FILES, str(tmp_path / name), str(soft), str(hard)]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout

    assert int(run("raised", 128, 2048).split()[-1]) > 200
    refused = run("refused", 128, 128)
    assert "Too many open files" in refused
    assert "ulimit -n" in refused
