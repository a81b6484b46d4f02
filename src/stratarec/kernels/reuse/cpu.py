"""Numba bodies of reuse distances, and of caches that count.

Distances are those of a Fenwick tree over moments, of which each holds the row that was last used then.

Shapes: K followed rows, C moments, M cache sizes, L of caches that count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.cpu import GOLDEN, mix

# Of a set, as caches have them by default.
WAYS = 32


class Sample(NamedTuple):
    """Which rows of a table are followed: the first `head`, and of the others one of each `stride`."""

    rows: int
    head: int
    stride: int


class Uses(NamedTuple):
    """What is known of the K rows."""

    moment: NDArray[np.int32]
    """``[K]`` of the last use, which the tree knows."""
    batch: NDArray[np.int64]
    """``[K]`` of the last use; -1 before the first."""
    lookups: NDArray[np.int64]
    batches: NDArray[np.int64]
    """``[K]`` batches that used the row."""
    soon: NDArray[np.int64]
    """``[K]`` of these, how many followed on another at most `ahead` batches before."""
    span: NDArray[np.int64]
    """``[K]`` batches since the last use, added up over all uses, of each `ahead` at most."""


class Moments(NamedTuple):
    """Who was last used when."""

    tree: NDArray[np.int64]
    """``[C + 1]`` Fenwick's sums of the rows that each moment stands for."""
    row: NDArray[np.int32]
    """``[C]``"""
    now: NDArray[np.int64]
    """``[2]``: the next moment, and the rows that all moments stand for."""


class Counting(NamedTuple):
    """Caches of L sizes that count the batches which used a row since it came in."""

    sizes: NDArray[np.int64]
    counts: NDArray[np.int32]
    """``[L, K]``; 0 of rows that are not there."""
    held: NDArray[np.int32]
    """``[L, K]``: the rows that are, in any order."""
    filled: NDArray[np.int64]
    """``[L, 2]``: how many these are, and the rows that they stand for."""
    hits: NDArray[np.int64]
    """``[L]``"""
    draws: NDArray[np.uint64]
    """``[1]``: random numbers drawn so far."""


@njit(nogil=True, cache=True, inline="always")
def place_of(sample, row):
    """Among the K, or -1."""
    if row < sample.head:
        return row
    block = (row - sample.head) // sample.stride
    # Neighbours in rank are used about alike: one of them, at a place of chance, stands for all.
    chosen = np.int64(mix(np.uint64(block) + GOLDEN) % np.uint64(sample.stride))
    if row - sample.head - block * sample.stride == chosen:
        return sample.head + block
    return np.int64(-1)


@njit(nogil=True, cache=True, inline="always")
def weight_of(sample, place):
    """Rows that a followed one stands for."""
    return sample.stride if place >= sample.head else 1


@njit(nogil=True, cache=True, inline="always")
def add(tree, moment, weight):
    place = moment + 1
    while place < len(tree):
        tree[place] += weight
        place += place & -place


@njit(nogil=True, cache=True, inline="always")
def up_to(tree, moment):
    """Rows whose last use was at `moment` or before."""
    place, total = moment + 1, np.int64(0)
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@njit(nogil=True, cache=True)
def shorten(sample, uses, moments):
    """Leave out the moments after which their rows were used again."""
    kept = 0
    for moment in range(moments.now[0]):
        row = moments.row[moment]
        if uses.moment[row] == moment:
            moments.row[kept] = row
            uses.moment[row] = kept
            kept += 1
    moments.tree[:] = 0
    for moment in range(kept):
        add(moments.tree, moment, weight_of(sample, moments.row[moment]))
    moments.now[0] = kept


@njit(nogil=True, cache=True, inline="always")
def victim(uses, counts, held, count, draws, horizon):
    """Where in `held` the row lies that was used least of a few drawn ones, as of the ways of a set; -1 where all are
    of batches in flight."""
    found = np.int64(-1)
    for _ in range(WAYS):
        draws[0] += np.uint64(1)
        at = np.int64((mix(draws[0] * GOLDEN) >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))
        row = held[at]
        if uses.batch[row] < horizon:
            best = held[found] if found >= 0 else row
            if found < 0 or (counts[row], uses.batch[row]) < (counts[best], uses.batch[best]):
                found = at
    return found


@njit(nogil=True, cache=True)
def count_uses(sample, uses, counting, level, fresh, horizon):
    """Stage the rows of a batch in the cache of a level; what was used at `horizon` or later stays."""
    counts, held, filled = counting.counts[level], counting.held[level], counting.filled[level]
    for place in fresh:
        if counts[place]:
            counts[place] += np.int32(1)
            counting.hits[level] += weight_of(sample, place)
    for place in fresh:
        if counts[place]:
            continue
        weight = weight_of(sample, place)
        while filled[0] and filled[1] + weight > counting.sizes[level]:
            at = victim(uses, counts, held, filled[0], counting.draws, horizon)
            if at < 0:
                break
            filled[1] -= weight_of(sample, held[at])
            counts[held[at]] = 0
            filled[0] -= 1
            held[at] = held[filled[0]]
        counts[place] = 1
        held[filled[0]] = place
        filled[0] += 1
        filled[1] += weight


@njit(nogil=True, cache=True)
def count_days(sample, ids, days, counts):
    for place in range(len(ids)):
        row = np.int64(ids[place])
        if 0 <= row < sample.rows:
            followed = place_of(sample, row)
            if followed >= 0:
                counts[followed, days[place]] += 1


# A batch is looked at whole before it changes anything, as a cache stages it.
@njit(nogil=True, cache=True)
def use(sample, uses, moments, counting, sizes, hits, ids, batch, ahead, fresh):
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
            distance = moments.now[1] - up_to(moments.tree, np.int64(uses.moment[place]))
            size = np.searchsorted(sizes, distance, side="right")
            hits[0, size] += weight
            gap = batch - uses.batch[place]
            if gap <= ahead:
                hits[1, size] += weight
                uses.soon[place] += 1
            uses.span[place] += min(gap, ahead)
        else:
            uses.moment[place] = -1
            uses.span[place] = ahead
        uses.batch[place] = batch
        uses.batches[place] += 1
        fresh[count] = place
        count += 1
    for level in range(len(counting.sizes)):
        count_uses(sample, uses, counting, level, fresh[:count], batch - ahead + 1)
    for place in fresh[:count]:
        if moments.now[0] == len(moments.row):
            shorten(sample, uses, moments)
        weight = weight_of(sample, place)
        if uses.moment[place] >= 0:
            add(moments.tree, np.int64(uses.moment[place]), -weight)
            moments.now[1] -= weight
        moment = moments.now[0]
        uses.moment[place], moments.row[moment] = moment, place
        add(moments.tree, moment, weight)
        moments.now[0] += 1
        moments.now[1] += weight
