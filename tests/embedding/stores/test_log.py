"""The log store: the conformance suite, the state machine, space, damage and full disks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings

from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.log import LogConfig, LogRecords
from stratarec.testing.stores import RecordStoreMachine, RecordStoreTests

SMALL = LogConfig(segment_bytes=16384, buffer_bytes=8192, threads=4)


class TestLogRecords(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class TestLogRecordsOfManyBlocks(RecordStoreTests):
    record_bytes = 5000

    def make(self, directory: Path) -> RecordStore:
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class LogMachine(RecordStoreMachine):
    record_bytes = 700

    def make(self, directory: Path) -> RecordStore:
        config = LogConfig(segment_bytes=8192, buffer_bytes=4096, threads=2)
        return LogRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=config)


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
