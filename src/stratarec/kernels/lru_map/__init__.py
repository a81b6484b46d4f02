"""Which rows are in which slots, and in what order they were last written.

An open-addressing map of rows to slots and a doubly linked list through the slots; exact, and 20 bytes a slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.lru_map import cpu

_Slots = NDArray[np.int32]


class LruMap:
    """At most `capacity` rows, each in a slot of its own in 0..capacity-1."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._table = np.zeros(1 << (2 * capacity - 1).bit_length(), np.int32)
        self._row_of = np.full(capacity, -1, np.int64)
        # The last place is the list's head: its `newer` is the oldest slot, its `older` the newest.
        self._older, self._newer = np.full(capacity + 1, capacity, np.int32), np.full(capacity + 1, capacity, np.int32)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._count = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return int(self._count[0])

    @property
    def nbytes(self) -> int:
        """Of the map and the list."""
        arrays = (self._table, self._row_of, self._older, self._newer, self._free)
        return sum(array.nbytes for array in arrays)

    def find(self, rows: NDArray[np.int64]) -> _Slots:
        """``[n]`` int32: the slot of each row, -1 where there is none."""
        slots = np.empty(len(rows), np.int32)
        cpu.find(self._table, self._row_of, rows, slots)
        return slots

    def rows(self, slots: _Slots) -> NDArray[np.int64]:
        """``[n]`` int64: the row in each slot, -1 where it is free."""
        return self._row_of[slots]

    def touch(self, slots: _Slots) -> None:
        """Make slots the newest, in the order given."""
        cpu.touch(self._older, self._newer, slots)

    def insert(self, rows: NDArray[np.int64]) -> _Slots:
        """Give slots to rows that have none, and make them the newest; there must be as many free ones."""
        assert len(self) + len(rows) <= self.capacity
        slots = np.empty(len(rows), np.int32)
        cpu.insert(self._table, self._row_of, self._older, self._newer, self._free, self._count, rows, slots)
        return slots

    def oldest(self, count: int) -> _Slots:
        """The `count` slots that were written least recently, oldest first."""
        slots = np.empty(min(count, len(self)), np.int32)
        cpu.oldest(self._newer, slots)
        return slots

    def remove(self, slots: _Slots) -> None:
        """Free slots."""
        cpu.remove(self._table, self._row_of, self._older, self._newer, self._free, self._count, slots)
