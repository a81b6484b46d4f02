"""An epoch's order cut into equal portions that are read side by side; every batch has samples of each.

Portions, not ranks, say what a batch consists of. A rank reads those that its share of a batch comes from, so N ranks
of N portions each read an N-th of the data, and any number of ranks has the batches of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratarec.data.loading.shuffle_buffer import ShuffleBuffer


def bounds(total: int, parts: int, place: int) -> tuple[int, int]:
    """First and last (not included) of part `place`, where `total` things are cut into parts that differ by one."""
    return total * place // parts, total * (place + 1) // parts


@dataclass(frozen=True, kw_only=True)
class BatchShare:
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
class RowGroupSlice:
    """Samples of a row group, in the order of storage."""

    shard: int
    row_group: int
    first: int
    last: int
    """Not included."""


def cut(row_groups: Sequence[tuple[int, int, int]], first: int, last: int) -> list[RowGroupSlice]:
    """Samples `first` to `last` (not included) of row groups ``(shard, row group, samples)`` one after another."""
    found, begin = [], 0
    for shard, row_group, samples in row_groups:
        low, high = max(first - begin, 0), min(last - begin, samples)
        if low < high:
            found.append(RowGroupSlice(shard=shard, row_group=row_group, first=low, last=high))
        begin += samples
    return found


def batches(samples: int, batch_size: int, portions: int) -> int:
    """How many an epoch has: until the last portion has given all of its samples."""

    def of(portion: int) -> int:
        (first, last), (low, high) = (bounds(total, portions, portion) for total in (samples, batch_size))
        return -(-(last - first) // (high - low))

    return max(of(portion) for portion in range(portions))


Rows: TypeAlias = list[tuple[ShuffleBuffer, NDArray[np.int32]]]


def parts(
    buffers: Sequence[Sequence[RowGroupSlice]],
    read: Callable[[int], ShuffleBuffer],
    thread: Executor,
    *,
    size: int,
    start: int,
) -> Iterator[Rows]:
    """`size` rows at a time, the last time what is left; parts before number `start` are left out. Slates are whole:
    one that goes beyond the last row is of the next part.

    Parameters
    ----------
    buffers : sequence of sequence of Piece
        What each shuffle buffer holds; those wholly before `start` are not read.
    read : callable
        Makes one of them by its number.
    thread : Executor
        Calls `read`.
    """
    ends = np.cumsum([sum(piece.last - piece.first for piece in buffer) for buffer in buffers])
    position = start * size
    first = int(np.searchsorted(ends, position, side="right"))
    ahead: Future[ShuffleBuffer] | None = None
    held: Rows = []
    for number in range(first, len(buffers)):
        buffer = (ahead or thread.submit(read, number)).result()
        ahead = thread.submit(read, number + 1) if number + 1 < len(buffers) else None
        begin = int(ends[number]) - len(buffer.order)
        done = buffer.cut(max(position - begin, 0))
        for bound in range(max(start, begin // size) * size + size, int(ends[number]) + 1, size):
            last = buffer.cut(bound - begin)
            yield [*held, *([(buffer, buffer.order[done:last])] if last > done else [])]
            held, done = [], last
        if done < len(buffer.order):
            held.append((buffer, buffer.order[done:]))
    if held:
        yield held


def count(held: Rows) -> int:
    """How many rows these are."""
    return sum(len(rows) for _, rows in held)


def between(held: Rows, first: int, last: int) -> Rows:
    """Rows `first` to `last` (not included) of `held`."""
    found, begin = [], 0
    for buffer, rows in held:
        found.append((buffer, rows[max(first - begin, 0) : max(last - begin, 0)]))
        begin += len(rows)
    return [(buffer, rows) for buffer, rows in found if len(rows)]


def take(held: Rows, size: int) -> Rows:
    """Take `size` rows off the front of `held`."""
    taken = []
    for place, (buffer, rows) in enumerate(held):
        found = min(size, len(rows))
        taken.append((buffer, rows[:found]))
        held[place] = (buffer, rows[found:])
        size -= found
    return [(buffer, rows) for buffer, rows in taken if len(rows)]
