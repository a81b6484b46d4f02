"""The log store: the conformance suite, the state machine, space, damage and full disks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from store_conformance import RecordStoreMachine, RecordStoreTests, random_records
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.log_layout import LogConfig
from stratarec.kernels.blocks import aio

SMALL = LogConfig(segment_bytes=16384, buffer_bytes=8192, depth=4)


class TestLogRecords(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class TestLogRecordsOfManyBlocks(RecordStoreTests):
    record_bytes = 5000

    def make(self, directory: Path) -> RecordStore:
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class TestLogRecordsWithoutAsynchronousReads(RecordStoreTests):
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aio, "open_context", lambda depth: 0)

    def make(self, directory: Path) -> RecordStore:
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


@pytest.mark.parametrize("depth", [1, 3, 128])
def test_many_reads_of_every_order_and_depth_give_what_was_written(tmp_path: Path, depth: int) -> None:
    rows, generator = np.arange(20_000), np.random.default_rng(0)
    store = LogRecords(tmp_path, rows=len(rows), record_bytes=260, config=LogConfig(buffer_bytes=1 << 16, depth=depth))
    records = random_records(rows, 260, 1)
    store.write(rows, records)
    store.flush()
    for wanted in (rows, rows[::-1].copy(), generator.permutation(rows)[:5000], rows[::15].copy(), rows[:1]):
        out = np.empty((len(wanted), 260), np.uint8)
        assert store.read(wanted, out).all()
        np.testing.assert_array_equal(out, records[wanted])
    store.close()


class LogMachine(RecordStoreMachine):
    record_bytes = 700

    def make(self, directory: Path) -> RecordStore:
        config = LogConfig(segment_bytes=8192, buffer_bytes=4096, depth=2)
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=config)


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
