"""Records of frequent rows in DRAM, in front of an SSD store.

Ids are ranked by frequency, so the frequent rows of a table are its first rows. A record that was
written since the last checkpoint is only here. A checkpoint copies such records into the segments,
so its format does not depend on the number of frequent rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.arrays import DramRecords, clear_bits, set_rows
from stratarec.kernels import bit_rows

Ints = NDArray[np.int64]
_CHUNK_ROWS = 1 << 16


class FrequentRecords(DramRecords):
    """Records of the frequent rows of several tables. A record has the number of its *place*.

    Parameters
    ----------
    tables : sequence of (int, int)
        For each table, its first row in the store and its number of frequent rows.
    record_bytes : int
        Bytes of one record.
    """

    def __init__(self, tables: Sequence[tuple[int, int]], record_bytes: int) -> None:
        # Without the last entry, which is behind all rows, rows before the first table would have
        # no table.
        self._first, self._count = np.array(
            [*(table for table in tables if table[1]), (1 << 62, 0)], np.int64
        ).T
        self._start = np.cumsum(self._count) - self._count
        super().__init__(rows=int(self._count.sum()), record_bytes=record_bytes)

    def places(self, rows: Ints) -> Ints:
        """Return the index of each of `rows` among the frequent rows, ``[n]`` int64, or -1."""
        table = np.searchsorted(self._first, rows, side="right") - 1
        inside = rows - self._first[table]
        return np.where((inside >= 0) & (inside < self._count[table]), self._start[table] + inside, -1)

    def locate(self, rows: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the places of `rows`, as `places` does, and ``[n]`` bool: whether their records
        are in DRAM.
        """
        places = self.places(rows)
        present = places >= 0
        present[present] = self.written(places[present])
        return places, present

    def copy(self, rows: Ints, out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the records that are in DRAM to `out`; return ``[n]`` bool, true for these."""
        places, present = self.locate(rows)
        if present.any():
            bit_rows.gather(self._array, np.maximum(places, 0), present, out)
        return present

    def changed(self) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the rows and records that were written since `mark_saved`, in pieces."""
        for places in set_rows(self._changed):
            for first in range(0, len(places), _CHUNK_ROWS):
                piece = places[first : first + _CHUNK_ROWS]
                table = np.searchsorted(self._start[:-1], piece, side="right") - 1
                yield self._first[table] + piece - self._start[table], self._array[piece]

    def mark_saved(self) -> None:
        """Mark every record as unchanged."""
        clear_bits(self._changed)
