"""Records in DRAM and in mapped files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import settings

from store_conformance import RecordStoreMachine, RecordStoreTests
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.dram import DramRecords
from stratarec.embedding.stores.mapped import MappedRecords


class TestDramRecords(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        return DramRecords(rows=self.rows, record_bytes=self.record_bytes)


class TestMappedRecords(RecordStoreTests):
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
