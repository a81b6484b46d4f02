"""An epoch's order cut into equal portions that are read side by side; every batch has samples of each.

Portions, not ranks, say what a batch consists of. A rank reads those that its share of a batch comes from, so N ranks
of N portions each read an N-th of the data, and any number of ranks has the batches of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def bounds(total: int, parts: int, place: int) -> tuple[int, int]:
    """First and last (not included) of part `place`, where `total` things are cut into parts that differ by one."""
    return total * place // parts, total * (place + 1) // parts


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every batch a process reads: samples of rank r of N follow those of the ranks before it."""

    rank: int = 0
    ranks: int = 1

    def portions(self, portions: int) -> range:
        """Those that this rank's samples come from."""
        return range(portions * self.rank // self.ranks, -(-portions * (self.rank + 1) // self.ranks))

    def of(self, samples: int, portion: int = 0, portions: int = 1) -> tuple[int, int]:
        """First and last (not included) of a batch's `samples` of a portion: rank r of N begins at r / N of all."""
        first, last = (
            min(max(portions * rank - portion * self.ranks, 0), self.ranks) for rank in (self.rank, self.rank + 1)
        )
        return samples * first // self.ranks, samples * last // self.ranks


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Samples of a row group, in the order of storage."""

    shard: int
    row_group: int
    first: int
    last: int
    """Not included."""


def cut(row_groups: Sequence[tuple[int, int, int]], first: int, last: int) -> list[Piece]:
    """Samples `first` to `last` (not included) of row groups ``(shard, row group, samples)`` one after another."""
    found, begin = [], 0
    for shard, row_group, samples in row_groups:
        low, high = max(first - begin, 0), min(last - begin, samples)
        if low < high:
            found.append(Piece(shard=shard, row_group=row_group, first=low, last=high))
        begin += samples
    return found


def batches(samples: int, batch_size: int, portions: int) -> int:
    """How many an epoch has: until the last portion has given all of its samples."""

    def of(portion: int) -> int:
        (first, last), (low, high) = (bounds(total, portions, portion) for total in (samples, batch_size))
        return -(-(last - first) // (high - low))

    return max(of(portion) for portion in range(portions))
