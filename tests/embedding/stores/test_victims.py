"""The victim cache: the conformance suite over a log, the state machine, eviction order, a store that refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import refuses
from store_conformance import RecordStoreMachine, RecordStoreTests, random_records, read_all
from stratarec.embedding.stores.arrays import DramRecords
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.log_layout import LogConfig
from stratarec.embedding.stores.victim_cache import VictimCache
from stratarec.errors import StorageError
from stratarec.kernels.lru_map import LruMap
from stratarec.kernels.lru_map.reference import LruMap as Plain


def over_log(directory: Path, rows: int, record_bytes: int, capacity: int) -> RecordStore:
    config = LogConfig(segment_bytes=16384, buffer_bytes=8192, depth=2)
    log = LogRecords(directory, rows=rows, record_bytes=record_bytes, config=config)
    return VictimCache(log, capacity_rows=capacity)


class TestCachedLogRecords(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        return over_log(directory, self.rows, self.record_bytes, 150)


class CachedMachine(RecordStoreMachine):
    def make(self, directory: Path) -> RecordStore:
        return over_log(directory, self.rows, self.record_bytes, 7)


TestCachedMachine = CachedMachine.TestCase
TestCachedMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


@settings(deadline=None, max_examples=30)
@given(batches=st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12), max_size=12))
def test_the_map_keeps_the_order_of_an_ordered_dict(batches: list[list[int]]) -> None:
    ours, plain = LruMap(16), Plain()
    for batch in batches:
        rows = np.array(batch, np.int64)
        slots = ours.find(rows)
        assert [int(row) in plain.order for row in rows] == (slots >= 0).tolist()
        ours.touch(slots[slots >= 0])
        for row in rows[slots >= 0].tolist():
            plain.write(row)
        absent = rows[slots < 0]
        excess = max(len(ours) + len(absent) - ours.capacity, 0)
        victims = ours.oldest(excess)
        assert ours.rows(victims).tolist() == plain.evict(excess)
        ours.remove(victims)
        ours.insert(absent)
        for row in absent.tolist():
            plain.write(row)
        assert ours.rows(ours.oldest(16)).tolist() == list(plain.order)
        everything = ours.find(np.arange(41))
        assert np.flatnonzero(everything >= 0).tolist() == sorted(plain.order)


def test_recently_written_rows_are_served_from_dram_and_reads_admit_nothing() -> None:
    inner = DramRecords(rows=100, record_bytes=8)
    store = VictimCache(inner, capacity_rows=10)
    first, second = np.arange(10), np.arange(10, 16)
    store.write(first, random_records(first, 8, 1))
    assert not inner.written(first).any()
    store.read(first[::-1].copy(), np.empty((10, 8), np.uint8))
    store.write(np.array([0]), random_records(np.array([0]), 8, 2))
    store.write(second, random_records(second, 8, 1))
    # Row 0 was written again, so rows 1 to 6 are the oldest.
    assert np.flatnonzero(inner.written(np.arange(100))).tolist() == [1, 2, 3, 4, 5, 6]


def test_clean_rows_are_not_written_twice(tmp_path: Path) -> None:
    inner = LogRecords(tmp_path, rows=100, record_bytes=500, config=LogConfig(buffer_bytes=4096, depth=1))
    store = VictimCache(inner, capacity_rows=20)
    store.write(np.arange(20), np.ones((20, 500), np.uint8))
    store.flush()
    before = inner.segments.bytes_written
    store.flush()
    store.write(np.arange(20, 28), np.ones((8, 500), np.uint8))
    inner.flush()
    assert inner.segments.bytes_written == before
    store.close()


def test_a_refused_eviction_loses_nothing(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=8192, buffer_bytes=4096, depth=1, budget_bytes=24576)
    store = VictimCache(LogRecords(tmp_path, rows=400, record_bytes=500, config=config), capacity_rows=16)
    done: list[int] = []

    def write_until_refused() -> None:
        for row in range(0, 400, 8):
            rows = np.arange(row, row + 8)
            store.write(rows, random_records(rows, 500, 1))
            done.extend(rows.tolist())

    with refuses(StorageError, "budget"):
        write_until_refused()
    assert 16 < len(done) < 400
    found, records = read_all(store)
    assert np.flatnonzero(found).tolist() == done
    np.testing.assert_array_equal(records[found], random_records(np.array(done), 500, 1))
    store.close()
