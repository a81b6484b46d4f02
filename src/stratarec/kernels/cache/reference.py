"""The row cache of one table in plain Python, one slot at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_PROBES = 16


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


@dataclass
class Slot:
    """One slot of level 0; `row` is -1 if the slot is free."""

    row: int = -1
    stamp: int = -1


@dataclass
class TableCache:
    """Cache of one table: `sets` cache sets and `overflow_sets` overflow sets of `ways` slots."""

    sets: int
    overflow_sets: int
    ways: int
    rank: Callable[[Slot], tuple[int, int]]
    """Rank of a slot: of those not in use, the slot with the smallest rank is evicted."""
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range((self.sets + self.overflow_sets) * self.ways)]

    def stage(self, ids: list[int], batch: int, horizon: int) -> tuple[list[int], list[int], list[int]]:
        """Return the slot of each of `ids` (-1: none is free), the rows fetched and the rows
        evicted, both in order.
        """
        rows_in, rows_out, missing = list[int](), list[int](), list[int]()
        for row in ids:
            place = self._find(row)
            if place < 0:
                missing.append(row)
            else:
                self.slots[place].stamp = batch
        for slot in self.slots[self.sets * self.ways :]:
            if slot.row >= 0 and slot.stamp < horizon:
                rows_out.append(slot.row)
                slot.row = -1
        for row in missing:
            if self._find(row) < 0:
                place = self._room(row, horizon)
                if place >= 0:
                    if self.slots[place].row >= 0:
                        rows_out.append(self.slots[place].row)
                    self.slots[place] = Slot(row, batch)
                    rows_in.append(row)
        return [self._find(row) for row in ids], rows_in, rows_out

    def _candidates(self, row: int) -> tuple[range, list[range]]:
        first = (((row * 0x9E3779B1) & _MASK32) * self.sets >> 32) * self.ways
        home = (_mix((row + _GOLDEN) & _MASK64) >> 32) * self.overflow_sets >> 32
        starts = [
            (self.sets + (home + probe) % self.overflow_sets) * self.ways
            for probe in range(min(self.overflow_sets, _PROBES))
        ]
        return range(first, first + self.ways), [range(start, start + self.ways) for start in starts]

    def _find(self, row: int) -> int:
        regular, overflow = self._candidates(row)
        for places in (regular, *overflow):
            for place in places:
                if self.slots[place].row == row:
                    return place
        return -1

    def _room(self, row: int, horizon: int) -> int:
        regular, overflow = self._candidates(row)
        for place in regular:
            if self.slots[place].row < 0:
                return place
        free = [place for place in regular if self.slots[place].stamp < horizon]
        if free:
            return min(free, key=lambda place: self.rank(self.slots[place]))
        for places in overflow:
            for place in places:
                if self.slots[place].row < 0:
                    return place
        return -1
