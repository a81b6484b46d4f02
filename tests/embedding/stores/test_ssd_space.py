"""Test the space of an SSD store: its bounds, a budget, a full disk, and file systems without links
or direct reads.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from errors import refuses
from store_conformance import assert_same_contents, new_directory, random_records, read_all
from stratarec.embedding.stores.arrays import MappedRecords
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.errors import CheckpointError, StorageError

ROWS, RECORD_BYTES = 4000, 260
SMALL = {"segment_bytes": 65536, "buffer_bytes": 16384, "depth": 2}


def open_store(directory: Path, **config: int) -> SsdRecords:
    return SsdRecords(
        directory, rows=ROWS, record_bytes=RECORD_BYTES, config=SsdConfig(**{**SMALL, **config})
    )


def write(store: SsdRecords, rows: np.ndarray, seed: int) -> None:
    store.write(rows, random_records(rows, RECORD_BYTES, seed))


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount a file system of the kind and with the options of the test's parameter."""
    kind, options = request.param
    path = new_directory(tmp_path / "mounted")
    done = subprocess.run(
        ["mount", "-t", kind, "-o", options, kind, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a {kind} needs root: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


small_disk = pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)


@pytest.mark.parametrize("part", [400, 3000])
def test_space_stays_within_the_bound_and_contents_survive_compaction(tmp_path: Path, part: int) -> None:
    store = open_store(tmp_path)
    generator, expected = np.random.default_rng(0), np.zeros((ROWS, RECORD_BYTES), np.uint8)
    write(store, np.arange(ROWS), 0)
    expected[:] = random_records(np.arange(ROWS), RECORD_BYTES, 0)
    live = -(-ROWS // store.layout.per_block) * 4096
    for seed in range(1, 60):
        rows = generator.permutation(part)[:300]
        write(store, rows, seed)
        expected[rows] = random_records(rows, RECORD_BYTES, seed)
        assert store.segments.file_bytes <= 1.5 * live + 5 * 65536
    assert store.segments.next_sequence > 40, "too little was written to need compaction"
    store.flush()
    assert_same_contents(store, np.ones(ROWS, np.bool_), expected)
    store.compact()
    # After compaction almost no space is dead, except in open segments and buffers.
    assert store.segments.file_bytes <= 1.06 * live + 2 * 65536
    assert_same_contents(store, np.ones(ROWS, np.bool_), expected)
    store.check()
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("segment-*.log"))
    assert store.memory().block_bytes == on_disk == store.segments.file_bytes
    store.close()
    assert not list(tmp_path.glob("segment-*"))


def test_short_segments_of_many_checkpoints_are_merged(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    previous = None
    for step in range(120):
        write(store, np.arange(step * 30, step * 30 + 30), 1)
        directory = new_directory(tmp_path / f"{step}")
        store.checkpoint(directory, previous)
        previous = directory
    # The writer never waits here, so the compaction thread may be a few segments behind.
    store.write(np.arange(ROWS), random_records(np.arange(ROWS), RECORD_BYTES, 2))
    assert len(store.segments.used) <= store.layout.slots
    assert_same_contents(store, np.ones(ROWS, np.bool_), random_records(np.arange(ROWS), RECORD_BYTES, 2))
    store.close()


def test_an_exceeded_budget_is_an_error_and_store_and_checkpoint_stay_intact(tmp_path: Path) -> None:
    budget = 12 * 65536
    store = open_store(tmp_path / "store", budget_bytes=budget)
    write(store, np.arange(1000), 1)
    manifest = store.checkpoint(new_directory(tmp_path / "checkpoint"), None)
    contents = read_all(store)
    with refuses(StorageError, f"{tmp_path}/store memory.block.budget {budget} 16384"):
        write(store, np.arange(500, ROWS), 2)
    assert store.segments.file_bytes <= budget
    written, records = read_all(store)
    old = random_records(np.arange(ROWS), RECORD_BYTES, 1)
    new = random_records(np.arange(ROWS), RECORD_BYTES, 2)
    fresh = (records == new).all(axis=1)
    assert ((records == old).all(axis=1) | fresh)[written].all()
    assert written[:1000].all()
    assert 1000 < written.sum() < ROWS
    store.check()
    store.restore(tmp_path / "checkpoint", manifest)
    assert_same_contents(store, *contents)
    store.close()


def test_a_budget_is_kept_while_dead_rows_can_be_reclaimed(tmp_path: Path) -> None:
    rows = np.arange(2000)
    store = open_store(tmp_path, budget_bytes=14 * 65536)
    for seed in range(20):
        write(store, rows, seed)
        assert store.segments.file_bytes <= 14 * 65536
    out = np.empty((2000, RECORD_BYTES), np.uint8)
    assert store.read(rows, out).all()
    np.testing.assert_array_equal(out, random_records(rows, RECORD_BYTES, 19))
    store.close()


@pytest.mark.parametrize(
    ("before", "after"), [(1 << 20, 4 << 20), (4 << 20, 1 << 20), (0, 1 << 20), (1 << 20, 0)]
)
def test_a_checkpoint_resumes_under_another_budget(tmp_path: Path, before: int, after: int) -> None:
    """The budget determines the length of segments. The error for an exceeded budget recommends a
    larger one.
    """

    def make_store(name: str, budget: int) -> SsdRecords:
        config = SsdConfig(buffer_bytes=4096, budget_bytes=budget)
        return SsdRecords(tmp_path / name, rows=400_000, record_bytes=20, config=config)

    rows = np.arange(12_000)
    store, other = make_store("one", before), make_store("other", after)
    assert store.layout.segment_blocks != other.layout.segment_blocks
    for seed in range(3):
        store.write(rows[:8000], random_records(rows[:8000], 20, seed))
    manifest = store.checkpoint(new_directory(tmp_path / "a"), None)
    contents = read_all(store)
    other.write(rows, random_records(rows, 20, 9))
    other.restore(tmp_path / "a", manifest)
    assert_same_contents(other, *contents)
    for seed in range(5):
        other.write(rows[4000:12_000], random_records(rows[4000:12_000], 20, 20 + seed))
    manifest = other.checkpoint(new_directory(tmp_path / "b"), tmp_path / "a")
    contents = read_all(other)
    store.restore(tmp_path / "b", manifest)
    assert_same_contents(store, *contents)
    store.check()
    for each in (store, other):
        each.close()


def test_a_budget_too_small_for_the_segments_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    rows = np.arange(4_000_000)
    large = SsdRecords(
        tmp_path / "one", rows=len(rows), record_bytes=20, config=SsdConfig(buffer_bytes=4096)
    )
    large.write(rows[:10], random_records(rows[:10], 20, 1))
    manifest = large.checkpoint(new_directory(tmp_path / "a"), None)
    config = SsdConfig(buffer_bytes=4096, budget_bytes=1 << 20)
    small = SsdRecords(tmp_path / "other", rows=len(rows), record_bytes=20, config=config)
    with refuses(CheckpointError, "memory.block.budget 1048576"):
        small.restore(tmp_path / "a", manifest)
    for each in (large, small):
        each.close()


@small_disk
def test_a_full_disk_is_an_error_and_the_store_stays_intact(mounted: Path) -> None:
    store = open_store(mounted / "store")
    write(store, np.arange(1000), 1)
    manifest = store.checkpoint(new_directory(mounted / "checkpoint"), None)
    contents = read_all(store)
    with refuses(StorageError, f"{mounted}/store"):
        write(store, np.arange(500, ROWS), 2)
    written, records = read_all(store)
    assert written[:1000].all()
    np.testing.assert_array_equal(records[:500], random_records(np.arange(500), RECORD_BYTES, 1))
    store.check()
    store.restore(mounted / "checkpoint", manifest)
    assert_same_contents(store, *contents)
    store.close()


@small_disk
@pytest.mark.filterwarnings("ignore:.*hard links")
def test_a_checkpoint_on_a_full_disk_is_an_error_and_the_previous_one_stays(
    mounted: Path, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    write(store, np.arange(1000), 1)
    manifest = store.checkpoint(new_directory(mounted / "first"), None)
    contents = read_all(store)
    write(store, np.arange(ROWS), 2)
    later = read_all(store)
    with refuses(StorageError, f"{mounted}/second"):
        store.checkpoint(new_directory(mounted / "second"), mounted / "first")
    assert_same_contents(store, *later)
    store.restore(mounted / "first", manifest)
    assert_same_contents(store, *contents)
    store.close()


@small_disk
def test_a_mapped_file_larger_than_the_disk_is_refused_on_creation(mounted: Path) -> None:
    with refuses(StorageError, f"{mounted}/records.map 2600000"):
        MappedRecords(mounted, rows=10_000, record_bytes=RECORD_BYTES)
    assert not list(mounted.iterdir())


@small_disk
def test_files_are_copied_once_if_links_are_refused(mounted: Path, tmp_path: Path) -> None:
    store = open_store(mounted / "store")
    write(store, np.arange(1000), 1)
    with pytest.warns(RuntimeWarning, match="hard links"):
        store.checkpoint(new_directory(tmp_path / "first"), None)
    first = {path.name: path.stat().st_ino for path in (tmp_path / "first").glob("segment-*")}
    write(store, np.arange(10), 2)
    with pytest.warns(RuntimeWarning, match="hard links") as warned:
        manifest = store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
    second = {path.name: path.stat().st_ino for path in (tmp_path / "second").glob("segment-*")}
    assert len(warned) == len(second) - len(first) == 1
    assert all(second[name] == inode for name, inode in first.items())
    contents = read_all(store)
    with pytest.warns(RuntimeWarning, match="hard links"):
        store.restore(tmp_path / "second", manifest)
    assert_same_contents(store, *contents)
    store.close()


def test_untouched_rows_take_no_space(tmp_path: Path) -> None:
    store = SsdRecords(tmp_path, rows=100_000_000, record_bytes=76)
    empty = store.memory()
    assert empty.block_bytes == 0
    assert empty.dram_bytes < 1 << 20
    rows = np.array([0, 99_999_999])
    assert not store.read(rows, np.empty((2, 76), np.uint8)).any()
    store.write(rows, np.ones((2, 76), np.uint8))
    assert store.memory().dram_bytes < 24 << 20
    store.close()
