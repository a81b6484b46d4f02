"""Records in DRAM and in mapped files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from store_conformance import (
    RecordStoreMachine,
    RecordStoreTests,
    assert_same_contents,
    largest_file,
    new_directory,
    read_all,
)
from stratarec.embedding.stores.arrays import DramRecords, MappedRecords
from stratarec.embedding.stores.base import RecordStore
from stratarec.errors import StorageError


class ArrayRecordsTests(RecordStoreTests):
    """What homes that are memory must hold to beside that; logs meet full disks in `test_log_space`."""

    @pytest.mark.parametrize("size", [0, 200, 20_000])
    def test_a_checkpoint_without_room_changes_nothing(self, store: RecordStore, tmp_path: Path, size: int) -> None:
        self.fill(store, np.arange(self.rows), seed=1)
        store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(0, self.rows, 2), seed=2)
        contents = read_all(store)
        with largest_file(size), pytest.raises(StorageError):
            store.checkpoint(new_directory(tmp_path / "failed"), tmp_path / "first" if size else None)
        assert_same_contents(store, *contents)
        self.fill(store, np.arange(0, self.rows, 4), seed=3)
        contents = read_all(store)
        manifest = store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        self.assert_restores(tmp_path / "second", manifest, contents)


class TestDramRecords(ArrayRecordsTests):
    def make(self, directory: Path) -> RecordStore:
        return DramRecords(rows=self.rows, record_bytes=self.record_bytes)


class TestMappedRecords(ArrayRecordsTests):
    def make(self, directory: Path) -> RecordStore:
        return MappedRecords(directory, rows=self.rows, record_bytes=self.record_bytes)


class DramMachine(RecordStoreMachine):
    def make(self, directory: Path) -> RecordStore:
        return DramRecords(rows=self.rows, record_bytes=self.record_bytes)


TestDramMachine = DramMachine.TestCase
TestDramMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_untouched_rows_cost_nothing() -> None:
    store = DramRecords(rows=10_000_000, record_bytes=260)
    assert store.memory().dram_bytes == 0
    rows = np.array([0, 9_999_999])
    assert not store.read(rows, np.empty((2, 260), np.uint8)).any()
    store.write(rows, np.ones((2, 260), np.uint8))
    # Two rows at either end: at most two huge pages of records and of each bitmap.
    assert 0 < store.memory().dram_bytes <= 6 * (2 << 20)
    store.close()
