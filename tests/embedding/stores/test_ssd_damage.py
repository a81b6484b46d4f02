"""Test that damage to any byte of a checkpointed SSD store is detected and named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from errors import refuses
from store_conformance import POISON, assert_same_contents, damage, new_directory, random_records, read_all
from stratarec.embedding.stores.base import Manifest
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.errors import CheckpointError, StorageError

ROWS, RECORD_BYTES = 300, 110
CONFIG = SsdConfig(segment_bytes=16384, buffer_bytes=16384, depth=2)


def open_store(directory: Path) -> SsdRecords:
    return SsdRecords(directory, rows=ROWS, record_bytes=RECORD_BYTES, config=CONFIG)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Manifest]:
    """Write two segments, the second one short, and a base and a delta of locations."""
    store = open_store(tmp_path / "first")
    store.write(np.arange(200), random_records(np.arange(200), RECORD_BYTES, 1))
    store.checkpoint(new_directory(tmp_path / "before"), None)
    store.write(np.arange(20), random_records(np.arange(20), RECORD_BYTES, 2))
    manifest = store.checkpoint(new_directory(tmp_path / "checkpoint"), tmp_path / "before")
    store.close()
    assert len(manifest["files"]) == 2
    assert len(manifest["segments"]) >= 2
    return tmp_path / "checkpoint", manifest


def regions(store: SsdRecords, blocks: int) -> list[int]:
    """Return offsets in every region of every block (checksum, tag, records, padding, unused tail)
    and some random ones.
    """
    shape = store.layout.shape
    cell, tail = shape.cell_words * 8, shape.per_block * shape.cell_words * 8
    inside = [0, 3, 4, 7, 8, cell - 3, cell - 1, cell, tail - cell, tail - 1, tail, 4095]
    inside += np.random.default_rng(0).integers(0, 4096, 8).tolist()
    assert tail < 4095, "this layout has no unused tail to damage"
    assert shape.record_bytes + 8 < cell, "this layout has no padding to damage"
    return [block * 4096 + offset for block in range(blocks) for offset in inside]


def rows_at(store: SsdRecords, slot: int, offset: int) -> np.ndarray:
    """Return the row whose record contains the offset of a segment, if any."""
    shape, (block, inside) = store.layout.shape, divmod(offset, 4096)
    k = inside // (shape.cell_words * 8)
    cell = (slot * shape.segment_blocks + block) * shape.per_block + k
    return np.flatnonzero((store._locations.of_row == cell + 1) & (k < shape.per_block))


def test_every_flipped_byte_of_a_segment_is_detected_by_check_and_those_of_records_by_reads(
    checkpoint: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = checkpoint
    store = open_store(tmp_path / "second")
    store.restore(directory, manifest)
    contents = read_all(store)
    for entry in manifest["segments"]:
        name = f"segment-{entry['sequence']:010d}.log"
        for offset in regions(store, entry["blocks"]):
            damage(directory / name, offset, flip=1 << offset % 8)
            block = offset // 4096
            where = rf"{re.escape(name)}: block {block} of segment {entry['sequence']} \(offset {block * 4096}\)"
            with pytest.raises(StorageError, match=where):
                store.check()
            rows = rows_at(store, entry["slot"], offset)
            for row in rows:
                with pytest.raises(StorageError, match=where):
                    store.read(np.array([row]), np.empty((1, RECORD_BYTES), np.uint8))
            others = np.setdiff1d(np.arange(ROWS), rows)
            out = np.full((len(others), RECORD_BYTES), POISON, np.uint8)
            np.testing.assert_array_equal(store.read(others, out), contents[0][others])
            np.testing.assert_array_equal(out, contents[1][others])
            damage(directory / name, offset, flip=1 << offset % 8)
    store.check()
    assert_same_contents(store, *contents)
    store.close()


def test_a_truncated_segment_is_named_when_restored_and_when_read(
    checkpoint: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = checkpoint
    store = open_store(tmp_path / "second")
    store.restore(directory, manifest)
    path = max(directory.glob("segment-*.log"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    block = size // 4096 - 1
    where = f"{path.name}: block {block} of segment .*truncated to {size - 4096} of {size}"
    with pytest.raises(StorageError, match=where):
        store.check()
    with pytest.raises(StorageError, match=where):
        read_all(store)
    with refuses(CheckpointError, f"{path} {size - 4096}"):
        store.restore(directory, manifest)
    path.unlink()
    with refuses(CheckpointError, f"{path}"):
        store.restore(directory, manifest)
    store.close()


def test_every_flipped_byte_of_a_location_file_is_detected(
    checkpoint: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = checkpoint
    store = open_store(tmp_path / "second")
    for entry in manifest["files"]:
        path = directory / entry["name"]
        for offset in range(0, path.stat().st_size, 13):
            damage(path, offset)
            with pytest.raises(CheckpointError, match=str(path)):
                store.restore(directory, manifest)
            damage(path, offset)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=str(path)):
            store.restore(directory, manifest)
        with path.open("ab") as file:
            file.write(b"\0")
    store.close()


def test_a_block_copied_over_another_block_is_damage(
    checkpoint: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = checkpoint
    path = max(directory.glob("segment-*.log"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[4096:8192] + content[:4096])
    store = open_store(tmp_path / "second")
    store.restore(directory, manifest)
    with refuses(StorageError, f"{path.name} block 0"):
        store.check()
    with refuses(StorageError, f"{path.name}"):
        read_all(store)
    store.close()


def test_a_damaged_block_stops_compaction_and_other_rows_stay_readable(
    checkpoint: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = checkpoint
    store = open_store(tmp_path / "second")
    store.restore(directory, manifest)
    store.write(np.arange(20, 120), random_records(np.arange(20, 120), RECORD_BYTES, 3))
    damaged = max(directory.glob("segment-*.log"), key=lambda path: path.stat().st_size)
    damage(damaged, damaged.stat().st_size - 4096)
    with pytest.raises(StorageError, match=damaged.name):
        store.compact()
    out = np.empty((100, RECORD_BYTES), np.uint8)
    assert store.read(np.arange(20, 120), out).all()
    np.testing.assert_array_equal(out, random_records(np.arange(20, 120), RECORD_BYTES, 3))
    store.close()
