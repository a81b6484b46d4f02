"""How many other rows are used between two uses of a row, which is what LRU caches of all sizes hold; and LFU caches.

One pass over a table's batches in memory that does not grow with the table: of large ones the first rows, which are the
most frequent where ids are ranked, are followed one by one, and of the others one of each few neighbours stands for all
(rows sampled by place as in SHARDS, Waldspurger et al. 2015, but evenly over ranks, so that few are enough). A distance
is the rows that the followed ones in between stand for. Caches that count uses have no such shortcut: some sizes are
replayed, with the same rows.

Shapes: K followed rows, M cache sizes, L of them replayed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.reuse import cpu

Ints = NDArray[np.int64]


def _followed(rows: int, followed: int) -> tuple[cpu.Sample, int]:
    """Which rows of a table are followed, about so many, and how many these are."""
    # Half of the room for those that are followed one by one, the rest for those that stand for others.
    head = rows if rows <= followed else followed // 2
    stride = max(-(-(rows - head) // max(followed - head, 1)), 1)
    return cpu.Sample(rows, head, stride), head - (-(rows - head) // stride)


def _weights(sample: cpu.Sample, count: int) -> Ints:
    weights = np.ones(count, np.int64)
    weights[sample.head :] = sample.stride
    return weights


class DayTrace:
    """Uses of a table's rows by day, in any order; `rows` and `followed` as of `ReuseTrace`."""

    def __init__(self, rows: int, followed: int, days: int) -> None:
        self._sample, count = _followed(rows, followed)
        self._counts = np.zeros((count, days), np.int32)

    def add(self, ids: NDArray[np.int32], days: NDArray[np.int32]) -> None:
        """Take in lookups, each with its day, from 0 on."""
        cpu.count_days(self._sample, ids, days, self._counts)

    def unseen(self, days: Ints) -> NDArray[np.float64]:
        """``[len(days)]`` share of a day's lookups whose row the one before it in `days` did not use; NaN where there
        are none, and of the first."""
        counts, weights = self._counts[:, days], _weights(self._sample, len(self._counts))
        fresh = weights @ np.where(counts[:, :-1] == 0, counts[:, 1:], 0)
        lookups = weights @ counts
        found = np.full(len(days), np.nan)
        np.divide(fresh, lookups[1:], out=found[1:], where=lookups[1:] > 0)
        return found


class ReuseTrace:
    """Uses of a table's rows, batch after batch.

    Parameters
    ----------
    rows : int
        Of the table.
    followed : int
        About how many of them may be followed; all of them where there are no more.
    sizes : ndarray
        ``[M]`` int64, ascending, from 1 on: caches whose hits are counted.
    counted : ndarray
        ``[L]`` int64, sizes of the LFU caches.
    ahead : int
        Batches that a row stays for whatever else is kept, from 1 on.
    """

    def __init__(self, rows: int, followed: int, sizes: Ints, counted: Ints, ahead: int) -> None:
        self.sizes, self.counted, self._ahead, self._batch = sizes, counted, ahead, 0
        self._sample, count = _followed(rows, followed)
        self._uses = cpu.Uses(np.zeros(count, np.int32), np.full(count, -1, np.int64), *np.zeros((4, count), np.int64))
        moments = 2 * count + 1
        self._moments = cpu.Moments(np.zeros(moments + 1, np.int64), np.zeros(moments, np.int32), np.zeros(2, np.int64))
        levels = len(counted)
        self._counting = cpu.Counting(
            sizes=counted,
            counts=np.zeros((levels, count), np.int32),
            held=np.zeros((levels, count), np.int32),
            filled=np.zeros((levels, 2), np.int64),
            hits=np.zeros(levels, np.int64),
            draws=np.zeros(1, np.uint64),
        )
        self._fresh = np.empty(count, np.int32)
        # By the first size that holds the row; beside it those of rows that are there whatever the size.
        self._hits = np.zeros((2, len(sizes) + 1), np.int64)

    def add(self, ids: Ints) -> None:
        """Take in what one batch looks up, in any order; ids that the table lacks count nothing."""
        cpu.use(
            self._sample, self._uses, self._moments, self._counting, self.sizes, self._hits, ids, self._batch,
            self._ahead, self._fresh,
        )  # fmt: skip
        self._batch += 1

    @property
    def exact(self) -> bool:
        """Whether every row is followed."""
        return self._sample.stride == 1

    @property
    def near(self) -> Ints:
        """``[M]`` uses that found their row among the last `sizes` rows that were used, as a batch began."""
        return np.cumsum(self._hits[0])[:-1]

    @property
    def lru_hits(self) -> Ints:
        """``[M]`` these, and those that found it in a batch in flight: of LRU caches of `sizes`."""
        far: Ints = self._hits[1].sum() - np.cumsum(self._hits[1])[:-1]
        return self.near + far

    @property
    def lfu_hits(self) -> Ints:
        """``[L]`` uses that found their row in caches of which a row that was used in fewest batches goes."""
        return self._counting.hits

    @property
    def weights(self) -> Ints:
        """``[K]`` rows that each followed one stands for."""
        return _weights(self._sample, len(self._fresh))

    @property
    def lookups(self) -> Ints:
        """``[K]`` of each followed row, in order of id."""
        return self._uses.lookups

    @property
    def uses(self) -> Ints:
        """``[K]`` batches that each was used in."""
        return self._uses.batches

    @property
    def soon(self) -> Ints:
        """``[K]`` of these, those whose row was used at most `ahead` batches before."""
        return self._uses.soon

    @property
    def held(self) -> NDArray[np.float64]:
        """``[K]`` share of the time in which each was used in one of the last `ahead` batches, about."""
        return self._uses.span / max(self._batch, 1)
