"""Test that a file is read once for its hash. After that its size, times and inode show whether it
changed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.errors import DatasetError
from stratarec.io import hashes
from stratarec.io.atomic import cache_directory, file_hash
from stratarec.io.hashes import file_hashes

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write two files that are old enough to be cached."""
    monkeypatch.setattr(hashes, "_SETTLE_NS", 20_000_000)
    (tmp_path / "data").mkdir()
    results = [tmp_path / "data" / name for name in ("one", "two")]
    for number, path in enumerate(results):
        path.write_bytes(bytes([number]) * SIZE)
    time.sleep(0.05)
    return results


def bytes_read(work: Callable[[], object]) -> int:
    """Count the bytes that this process reads by system calls within the context."""

    def total() -> int:
        return int(
            next(line for line in counters.read_text().splitlines() if line.startswith("rchar")).split()[1]
        )

    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("this system does not count what a process reads")
    before = total()
    work()
    return total() - before


def test_an_unchanged_file_is_read_once(files: list[Path]) -> None:
    expected = [file_hash(path) for path in files]
    assert bytes_read(lambda: file_hashes(files)) >= 2 * SIZE
    assert bytes_read(lambda: file_hashes(files)) < SIZE
    assert file_hashes(files) == expected
    assert bytes_read(lambda: file_hashes(files, fresh=True)) >= 2 * SIZE


CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda path: path.write_bytes(b"x" * SIZE),
    "other bytes, the time put back": lambda path: (
        (status := path.stat()),
        path.write_bytes(b"y" * SIZE),
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns)),
    ),
    "another file in its place, as old": lambda path: (
        path.with_name("three").write_bytes(b"z" * SIZE),
        shutil.copystat(path, path.with_name("three")),
        os.replace(path.with_name("three"), path),
    ),
    "fewer bytes": lambda path: path.write_bytes(b"x"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_file_is_read_again(files: list[Path], how: str) -> None:
    before = file_hashes(files)
    CHANGES[how](files[0])
    after = file_hashes(files)
    assert after == [file_hash(path) for path in files]
    assert after[0] != before[0]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"one": 3}', '{"one": [[1, 2], 3]}', '{"one": [["a", 1, 2, 3], ""]}']
)
def test_a_damaged_cache_is_written_again(files: list[Path], text: str) -> None:
    expected = file_hashes(files)
    (kept,) = cache_directory().rglob("*.json")
    content = kept.read_text()
    kept.write_text(text)
    assert file_hashes(files) == expected
    assert kept.read_text() == content


def test_a_data_set_is_hashed_once_and_damage_is_detected_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_SETTLE_NS", 20_000_000)
    source = SyntheticConfig(samples=20_000, scale=0.001)
    dataset = prepare(PrepareConfig(source=source, path=str(tmp_path / "d")))
    shards = sum(shard.bytes for shard in dataset.shards("train"))
    time.sleep(0.05)
    assert bytes_read(lambda: Dataset.open(dataset.path)) > shards
    assert bytes_read(lambda: Dataset.open(dataset.path)) < shards / 2
    assert bytes_read(lambda: Dataset.open(dataset.path, verify="full")) > shards
    path = dataset.path / dataset.shards("train")[0].path
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    status = path.stat()
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DatasetError, match=path.name):
        Dataset.open(dataset.path)
