"""Hits of LRU caches of all sizes, from reuse distances: the number of other rows used between two uses of a row.

One pass over a table's batches suffices, and memory does not grow with the table. In a large table, only a sample of
the rows is followed: each of the first rows, which are the most frequent if ids are ranked, and one of every `stride`
neighbours, which represents all of them. (SHARDS, Waldspurger et al. 2015, also samples rows by position. This sample
is even over ranks, so fewer rows suffice.) A distance counts the rows that the followed rows in between represent. It
is computed by a Fenwick tree over use times; each time refers to the row that was last used then.

Shapes: K followed rows, C times, M sizes of caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.cpu import GOLDEN, mix

Ints = NDArray[np.int64]


def _followed(rows: int, followed: int) -> tuple[Sample, int]:
    """Choose about `followed` rows of a table to follow; return the sample and its size."""
    # Half of the sample are the first rows; each row of the other half represents its neighbours.
    head = rows if rows <= followed else followed // 2
    stride = max(-(-(rows - head) // max(followed - head, 1)), 1)
    return Sample(rows, head, stride), head - (-(rows - head) // stride)


def _weights(sample: Sample, count: int) -> Ints:
    weights = np.ones(count, np.int64)
    weights[sample.head :] = sample.stride
    return weights


class ReuseTrace:
    """Trace of the uses of a table's rows, batch after batch.

    Parameters
    ----------
    rows : int
        Number of rows of the table.
    followed : int
        About how many rows to follow; all rows if the table has no more.
    sizes : ndarray
        ``[M]`` int64 sizes of the LRU caches, ascending, at least 1.
    ahead : int
        Number of batches for which a row stays in every cache after its use, at least 1.
    """

    def __init__(self, rows: int, followed: int, sizes: Ints, ahead: int) -> None:
        self.sizes, self._ahead, self._batch = sizes, ahead, 0
        self._sample, count = _followed(rows, followed)
        self._uses = Uses(np.zeros(count, np.int32), np.full(count, -1, np.int64), *np.zeros((4, count), np.int64))
        times = 2 * count + 1
        self._times = UseTimes(np.zeros(times + 1, np.int64), np.zeros(times, np.int32), np.zeros(2, np.int64))
        self._fresh = np.empty(count, np.int32)
        # Hits, counted by the smallest cache size that would hold the row: all hits, and hits of rows in flight, which
        # stay in caches of every size.
        self._hits = np.zeros((2, len(sizes) + 1), np.int64)

    def add(self, ids: Ints) -> None:
        """Add the lookups of one batch, in any order; ids outside the table do not count."""
        _use(
            self._sample, self._uses, self._times, self.sizes, self._hits, ids, self._batch, self._ahead,
            self._fresh,
        )  # fmt: skip
        self._batch += 1

    @property
    def exact(self) -> bool:
        """Whether every row is followed."""
        return self._sample.stride == 1

    @property
    def near(self) -> Ints:
        """Number of uses whose row was among the last `sizes` used rows when the batch began, ``[M]``."""
        return np.cumsum(self._hits[0])[:-1]

    @property
    def lru_hits(self) -> Ints:
        """Number of hits of LRU caches of `sizes`, ``[M]``: `near` plus uses of other rows of batches in flight."""
        far: Ints = self._hits[1].sum() - np.cumsum(self._hits[1])[:-1]
        return self.near + far

    @property
    def weights(self) -> Ints:
        """Number of rows that each followed row represents, ``[K]``."""
        return _weights(self._sample, len(self._fresh))

    @property
    def lookups(self) -> Ints:
        """Number of lookups of each followed row, ``[K]``, in the order of ids."""
        return self._uses.lookups

    @property
    def uses(self) -> Ints:
        """Number of batches that used each followed row, ``[K]``."""
        return self._uses.batches

    @property
    def soon(self) -> Ints:
        """Number of batches that used each followed row at most `ahead` batches after an earlier use, ``[K]``."""
        return self._uses.soon

    @property
    def residency(self) -> NDArray[np.float64]:
        """Approximate share of batches for which a row's last use is among the last `ahead` batches, ``[K]``."""
        return self._uses.span / max(self._batch, 1)


class Sample(NamedTuple):
    """Followed rows of a table: the first `head`, and one of every `stride` of the others."""

    rows: int
    head: int
    stride: int


class Uses(NamedTuple):
    """Statistics of the K followed rows, one entry per row.

    `time` (an index of `UseTimes`) and `batch` (-1 if there is none) belong to the last use. `batches` counts the
    batches that used the row, and `soon` the batches that used it at most `ahead` batches after an earlier use. `span`
    sums the distances between uses, in batches, each limited to `ahead`.
    """

    time: NDArray[np.int32]
    batch: NDArray[np.int64]
    lookups: NDArray[np.int64]
    batches: NDArray[np.int64]
    soon: NDArray[np.int64]
    span: NDArray[np.int64]


class UseTimes(NamedTuple):
    """Times of uses. Each time refers to the row that was last used then.

    `tree` is ``[C + 1]`` Fenwick sums of the number of rows that each time represents, `row` is ``[C]``, and `now` is
    ``[2]``: the next time, and the number of rows that all times represent.
    """

    tree: NDArray[np.int64]
    row: NDArray[np.int32]
    now: NDArray[np.int64]


@njit(nogil=True, cache=True, inline="always")
def place_of(sample, row):
    """Return the position of a row among the K followed rows, or -1 if it is not followed."""
    if row < sample.head:
        return row
    block = (row - sample.head) // sample.stride
    # Neighbours in rank are used about equally often, so a randomly chosen one represents all of them.
    chosen = np.int64(mix(np.uint64(block) + GOLDEN) % np.uint64(sample.stride))
    if row - sample.head - block * sample.stride == chosen:
        return sample.head + block
    return np.int64(-1)


@njit(nogil=True, cache=True, inline="always")
def weight_of(sample, place):
    """Return the number of rows that the followed row at `place` represents."""
    return sample.stride if place >= sample.head else 1


@njit(nogil=True, cache=True, inline="always")
def _add(tree, time, weight):
    place = time + 1
    while place < len(tree):
        tree[place] += weight
        place += place & -place


@njit(nogil=True, cache=True, inline="always")
def up_to(tree, time):
    """Return the number of rows whose last use was at `time` or before."""
    place, total = time + 1, np.int64(0)
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@njit(nogil=True, cache=True)
def shorten(sample, uses, times):
    """Remove the times of rows that were used again later, and renumber the other times."""
    count = 0
    for time in range(times.now[0]):
        row = times.row[time]
        if uses.time[row] == time:
            times.row[count] = row
            uses.time[row] = count
            count += 1
    times.tree[:] = 0
    for time in range(count):
        _add(times.tree, time, weight_of(sample, times.row[time]))
    times.now[0] = count


# All hits of a batch are counted before the batch changes anything, because a cache also stages a whole batch at once.
@njit(nogil=True, cache=True)
def _use(sample, uses, times, sizes, hits, ids, batch, ahead, fresh):
    count = 0
    for row in ids:
        if row < 0 or row >= sample.rows:
            continue
        place = place_of(sample, np.int64(row))
        if place < 0:
            continue
        uses.lookups[place] += 1
        if uses.batch[place] == batch:
            continue
        if uses.batch[place] >= 0:
            weight = weight_of(sample, place)
            distance = times.now[1] - up_to(times.tree, np.int64(uses.time[place]))
            size = np.searchsorted(sizes, distance, side="right")
            hits[0, size] += weight
            gap = batch - uses.batch[place]
            if gap <= ahead:
                hits[1, size] += weight
                uses.soon[place] += 1
            uses.span[place] += min(gap, ahead)
        else:
            uses.time[place] = -1
            uses.span[place] = ahead
        uses.batch[place] = batch
        uses.batches[place] += 1
        fresh[count] = place
        count += 1
    for place in fresh[:count]:
        if times.now[0] == len(times.row):
            shorten(sample, uses, times)
        weight = weight_of(sample, place)
        if uses.time[place] >= 0:
            _add(times.tree, np.int64(uses.time[place]), -weight)
            times.now[1] -= weight
        time = times.now[0]
        uses.time[place], times.row[time] = time, place
        _add(times.tree, time, weight)
        times.now[0] += 1
        times.now[1] += weight


def reference_lru_hits(batches: Iterable[list[int]], size: int, ahead: int) -> int:
    """Count the distinct rows of each batch that an LRU cache of `size` rows holds when the batch begins.

    Then the rows of the batch enter, and the least recently used rows leave, except rows of the last `ahead` batches.
    """
    cache: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for number, batch in enumerate(batches):
        distinct = list(dict.fromkeys(batch))
        hits += sum(row in cache for row in distinct)
        for row in distinct:
            cache[row] = number
            cache.move_to_end(row)
        while len(cache) > size and next(iter(cache.values())) <= number - ahead:
            cache.popitem(last=False)
    return hits
