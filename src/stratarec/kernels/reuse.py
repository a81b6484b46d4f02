"""Hits of LRU caches of all sizes, from reuse distances: the number of other rows used between two uses of a row.

One pass over a table's batches, in memory that does not grow with the table. Of a large table the first rows, which are
the most frequent where ids are ranked, are followed one by one; of the others, one of several neighbours represents all
(rows sampled by place as in SHARDS, Waldspurger et al. 2015, but evenly over ranks, so that few are enough). A distance
counts the rows that the followed rows in between represent; it is computed by a Fenwick tree over use times, each of
which holds the row that was last used then. LFU caches have no such shortcut: some sizes are replayed with the followed
rows.

Shapes: K followed rows, C times, M cache sizes, L of them replayed.
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
    # Half of them are followed one by one, the others represent their neighbours.
    head = rows if rows <= followed else followed // 2
    stride = max(-(-(rows - head) // max(followed - head, 1)), 1)
    return Sample(rows, head, stride), head - (-(rows - head) // stride)


def _weights(sample: Sample, count: int) -> Ints:
    weights = np.ones(count, np.int64)
    weights[sample.head :] = sample.stride
    return weights


class DayTrace:
    """Counts of uses of a table's rows by day, in any order; `rows` and `followed` as in `ReuseTrace`."""

    def __init__(self, rows: int, followed: int, days: int) -> None:
        self._sample, count = _followed(rows, followed)
        self._counts = np.zeros((count, days), np.int32)

    def add(self, ids: NDArray[np.int32], days: NDArray[np.int32]) -> None:
        """Count lookups, each with its day, from 0 on."""
        _count_days(self._sample, ids, days, self._counts)

    def unseen(self, days: Ints) -> NDArray[np.float64]:
        """Return the share of each day's lookups whose row the previous day in `days` did not use, ``[len(days)]``.

        NaN for days without lookups and for the first one.
        """
        counts, weights = self._counts[:, days], _weights(self._sample, len(self._counts))
        fresh = weights @ np.where(counts[:, :-1] == 0, counts[:, 1:], 0)
        lookups = weights @ counts
        shares = np.full(len(days), np.nan)
        np.divide(fresh, lookups[1:], out=shares[1:], where=lookups[1:] > 0)
        return shares


class ReuseTrace:
    """Trace of the uses of a table's rows, batch after batch.

    Parameters
    ----------
    rows : int
        Rows of the table.
    followed : int
        About how many of them are followed; all where the table has no more.
    sizes : ndarray
        ``[M]`` int64, ascending, from 1 on: sizes of the LRU caches.
    counted : ndarray
        ``[L]`` int64, sizes of the LFU caches.
    ahead : int
        Batches for which a row stays in any cache after its use, from 1 on.
    """

    def __init__(self, rows: int, followed: int, sizes: Ints, counted: Ints, ahead: int) -> None:
        self.sizes, self.counted, self._ahead, self._batch = sizes, counted, ahead, 0
        self._sample, count = _followed(rows, followed)
        self._uses = Uses(np.zeros(count, np.int32), np.full(count, -1, np.int64), *np.zeros((4, count), np.int64))
        times = 2 * count + 1
        self._times = UseTimes(np.zeros(times + 1, np.int64), np.zeros(times, np.int32), np.zeros(2, np.int64))
        levels = len(counted)
        self._counting = Counting(
            sizes=counted,
            counts=np.zeros((levels, count), np.int32),
            resident=np.zeros((levels, count), np.int32),
            filled=np.zeros((levels, 2), np.int64),
            hits=np.zeros(levels, np.int64),
            draws=np.zeros(1, np.uint64),
        )
        self._fresh = np.empty(count, np.int32)
        # By the smallest size that holds the row: all hits, and those of rows that stay in caches of any size.
        self._hits = np.zeros((2, len(sizes) + 1), np.int64)

    def add(self, ids: Ints) -> None:
        """Add the lookups of one batch, in any order; ids outside the table do not count."""
        _use(
            self._sample, self._uses, self._times, self._counting, self.sizes, self._hits, ids, self._batch,
            self._ahead, self._fresh,
        )  # fmt: skip
        self._batch += 1

    @property
    def exact(self) -> bool:
        """Whether every row is followed."""
        return self._sample.stride == 1

    @property
    def near(self) -> Ints:
        """``[M]`` uses whose row was among the last `sizes` used rows as the batch began."""
        return np.cumsum(self._hits[0])[:-1]

    @property
    def lru_hits(self) -> Ints:
        """``[M]`` hits of LRU caches of `sizes`: `near`, and uses whose row was in a batch in flight."""
        far: Ints = self._hits[1].sum() - np.cumsum(self._hits[1])[:-1]
        return self.near + far

    @property
    def lfu_hits(self) -> Ints:
        """``[L]`` hits of LFU caches, which evict a row that was used in the fewest batches."""
        return self._counting.hits

    @property
    def weights(self) -> Ints:
        """``[K]`` rows that each followed row represents."""
        return _weights(self._sample, len(self._fresh))

    @property
    def lookups(self) -> Ints:
        """``[K]`` lookups of each followed row, in order of id."""
        return self._uses.lookups

    @property
    def uses(self) -> Ints:
        """``[K]`` batches that used each followed row."""
        return self._uses.batches

    @property
    def soon(self) -> Ints:
        """``[K]`` of these, batches whose row was also used at most `ahead` batches before."""
        return self._uses.soon

    @property
    def residency(self) -> NDArray[np.float64]:
        """``[K]`` approximate share of batches with a use of the row among the last `ahead` batches."""
        return self._uses.span / max(self._batch, 1)


# Ways of a set in caches by default.
WAYS = 32


class Sample(NamedTuple):
    """Followed rows of a table: the first `head`, and one of each `stride` of the others."""

    rows: int
    head: int
    stride: int


class Uses(NamedTuple):
    """Statistics of the K followed rows, an entry each.

    `time` (in the tree) and `batch` (-1 before the first) are of the last use, `batches` used the row, and `soon` of
    these used it at most `ahead` batches after another one. `span` sums the batches since the previous use, each up to
    `ahead`.
    """

    time: NDArray[np.int32]
    batch: NDArray[np.int64]
    lookups: NDArray[np.int64]
    batches: NDArray[np.int64]
    soon: NDArray[np.int64]
    span: NDArray[np.int64]


class UseTimes(NamedTuple):
    """Row that was last used at each time.

    `tree` is ``[C + 1]`` Fenwick sums of the rows that each time represents, `row` is ``[C]``, and `now` is ``[2]``:
    the next time, and the rows that all times represent.
    """

    tree: NDArray[np.int64]
    row: NDArray[np.int32]
    now: NDArray[np.int64]


class Counting(NamedTuple):
    """LFU caches of L sizes, which count the batches that used a row since it entered.

    `counts` is ``[L, K]``, 0 for absent rows; `resident` ``[L, K]`` lists the present rows in any order, and `filled`
    ``[L, 2]`` is their number and the rows that they represent. `hits` is ``[L]``, `draws` ``[1]`` the number of random
    draws so far.
    """

    sizes: NDArray[np.int64]
    counts: NDArray[np.int32]
    resident: NDArray[np.int32]
    filled: NDArray[np.int64]
    hits: NDArray[np.int64]
    draws: NDArray[np.uint64]


@njit(nogil=True, cache=True, inline="always")
def place_of(sample, row):
    """Return the place of a row among the K followed ones, or -1."""
    if row < sample.head:
        return row
    block = (row - sample.head) // sample.stride
    # Neighbours in rank are used about equally often: one of them, chosen at random, represents all.
    chosen = np.int64(mix(np.uint64(block) + GOLDEN) % np.uint64(sample.stride))
    if row - sample.head - block * sample.stride == chosen:
        return sample.head + block
    return np.int64(-1)


@njit(nogil=True, cache=True, inline="always")
def weight_of(sample, place):
    """Return the number of rows that a followed row represents."""
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
    """Remove the times after which their rows were used again."""
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


@njit(nogil=True, cache=True, inline="always")
def victim(uses, counts, resident, count, draws, horizon):
    """Return the place in `resident` of the least used of a few random rows, as many as the ways of a set.

    -1 where all of them are of batches in flight.
    """
    place = np.int64(-1)
    for _ in range(WAYS):
        draws[0] += np.uint64(1)
        at = np.int64((mix(draws[0] * GOLDEN) >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))
        row = resident[at]
        if uses.batch[row] < horizon:
            best = resident[place] if place >= 0 else row
            if place < 0 or (counts[row], uses.batch[row]) < (counts[best], uses.batch[best]):
                place = at
    return place


@njit(nogil=True, cache=True)
def count_uses(sample, uses, counting, level, fresh, horizon):
    """Stage the rows of a batch in the cache of a level; rows used at `horizon` or later stay."""
    counts, resident, filled = counting.counts[level], counting.resident[level], counting.filled[level]
    for place in fresh:
        if counts[place]:
            counts[place] += np.int32(1)
            counting.hits[level] += weight_of(sample, place)
    for place in fresh:
        if counts[place]:
            continue
        weight = weight_of(sample, place)
        while filled[0] and filled[1] + weight > counting.sizes[level]:
            at = victim(uses, counts, resident, filled[0], counting.draws, horizon)
            if at < 0:
                break
            filled[1] -= weight_of(sample, resident[at])
            counts[resident[at]] = 0
            filled[0] -= 1
            resident[at] = resident[filled[0]]
        counts[place] = 1
        resident[filled[0]] = place
        filled[0] += 1
        filled[1] += weight


@njit(nogil=True, cache=True)
def _count_days(sample, ids, days, counts):
    for place in range(len(ids)):
        row = np.int64(ids[place])
        if 0 <= row < sample.rows:
            followed = place_of(sample, row)
            if followed >= 0:
                counts[followed, days[place]] += 1


# Hits of the complete batch are counted before it changes anything, as a cache stages it.
@njit(nogil=True, cache=True)
def _use(sample, uses, times, counting, sizes, hits, ids, batch, ahead, fresh):
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
    for level in range(len(counting.sizes)):
        count_uses(sample, uses, counting, level, fresh[:count], batch - ahead + 1)
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
    """Count the distinct rows of each batch that an LRU cache of `size` rows holds as the batch begins.

    The rows of the batch then enter, and the least recently used ones leave, except those of the last `ahead` batches.
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
