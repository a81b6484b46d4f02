"""A victim cache in DRAM over any store.

The rows that a training cache above gives up are written here, and are often wanted back soon. Reads do not admit: what
is read goes up a level and comes back as a write.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.arrays import allocate_bytes, resident_bytes
from stratarec.embedding.stores.base import Manifest, RecordStore, StoreBytes, check_rows
from stratarec.errors import ConfigError
from stratarec.kernels import bit_rows as kernels
from stratarec.kernels.lru_map import LruMap

# The least that is evicted at once: large batches fill the store's blocks and its writes.
_BATCHES = 64
_FLUSH_ROWS = 1 << 16


class VictimCache:
    """A `RecordStore` that keeps the `capacity_rows` most recently written rows of `inner` in DRAM.

    A write goes to DRAM; the rows written longest ago are handed to `inner` in batches. `flush` and `checkpoint` hand
    over every row that `inner` does not have yet, and keep them here as well, so a checkpoint is one of `inner`.

    Parameters
    ----------
    inner : RecordStore
        The home; this store owns it and closes it.
    capacity_rows : int
        Rows in DRAM, at least 1.
    """

    def __init__(self, inner: RecordStore, *, capacity_rows: int) -> None:
        if capacity_rows < 1:
            raise ConfigError(f"capacity_rows is {capacity_rows}, expected at least 1")
        self.inner, self.capacity = inner, capacity_rows
        self.rows, self.record_bytes, self.kind = inner.rows, inner.record_bytes, inner.kind
        self.array: NDArray[np.uint8] | None = None
        self.bits: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
        self._records = allocate_bytes(capacity_rows * self.record_bytes).reshape(capacity_rows, self.record_bytes)
        self._map = LruMap(capacity_rows)
        self._dirty = np.zeros(capacity_rows, np.bool_)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        check_rows(self, rows, out)
        # Nothing is admitted, nor made younger: what is read goes up a level, and comes back as a write.
        slots = self._map.find(rows)
        found = slots >= 0
        kernels.gather(self._records, slots.astype(np.int64), found, out)
        missing = np.flatnonzero(~found)
        if len(missing):
            records = np.empty((len(missing), self.record_bytes), np.uint8)
            there = self.inner.read(rows[missing], records)
            kernels.scatter(out, missing, records, there)
            found[missing] = there
        return found

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        check_rows(self, rows, records)
        for first in range(0, len(rows), self.capacity):
            self._write(rows[first : first + self.capacity], records[first : first + self.capacity])

    def _write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        slots = self._map.find(rows)
        absent = slots < 0
        present = slots[~absent]
        self._store(slots, records, ~absent)
        self._map.touch(present)
        self._dirty[present] = True
        needed = len(rows) - len(present)
        # Rows that are here already are stored first: an eviction must not take one of this very batch.
        if needed:
            free = self.capacity - len(self._map)
            if needed > free:
                # Before anything is inserted: when the store refuses, each row has its old or its new record.
                self._evict(max(needed - free, self.capacity // _BATCHES))
            new = self._map.insert(rows[absent])
            slots[absent] = new
            self._store(slots, records, absent)
            self._dirty[new] = True

    def _store(self, slots: NDArray[np.int32], records: NDArray[np.uint8], wanted: NDArray[np.bool_]) -> None:
        kernels.scatter(self._records, slots.astype(np.int64), records, wanted)

    def _evict(self, count: int) -> None:
        """Free the `count` oldest slots; should `inner` refuse their rows, they stay."""
        slots = self._map.oldest(count)
        self._hand_over(slots)
        self._map.remove(slots)

    def _hand_over(self, slots: NDArray[np.int32]) -> None:
        dirty = slots[self._dirty[slots]]
        if len(dirty):
            # Still dirty if this raises, so they are written with the next ones.
            self.inner.write(self._map.rows(dirty), self._records[dirty])
            self._dirty[dirty] = False

    def _hand_over_all(self) -> None:
        for first in range(0, self.capacity, _FLUSH_ROWS):
            self._hand_over(np.arange(first, min(first + _FLUSH_ROWS, self.capacity), dtype=np.int32))

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.inner.written(rows) | (self._map.find(rows) >= 0)

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        raise ValueError("a cached store's records are not addressable memory: write them")

    def memory(self) -> StoreBytes:
        own = resident_bytes(self._records) + self._map.nbytes + self._dirty.nbytes
        return self.inner.memory() + StoreBytes(dram_bytes=own, block_bytes=0)

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        self._hand_over_all()
        return self.inner.checkpoint(directory, previous)

    def restore(self, directory: Path, manifest: Manifest) -> None:
        self.inner.restore(directory, manifest)
        self._map = LruMap(self.capacity)
        self._dirty[:] = False

    def check(self) -> None:
        self.inner.check()

    def flush(self) -> None:
        self._hand_over_all()
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
        self._records = np.empty((0, self.record_bytes), np.uint8)
