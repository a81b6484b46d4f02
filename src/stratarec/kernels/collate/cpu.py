"""Numba bodies that make batches of stored columns: gather, number pointers, join windows and bags.

One thread each: the loader's own. What they read through comes from files whose pointers and windows were checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
# Rows between asking for a list and copying it.
AHEAD = 8


@njit(nogil=True, cache=True)
def spread_rows(words, width, rows, paired, ids, out):
    """Columns of some rows one after another, but for two at the front that stay side by side where `paired`.

    Returns whether one of the last `ids` columns has a negative number.
    """
    count, W, least = U(len(rows)), U(width), np.int32(0)
    front, last = U(2 if paired else 0), max(U(len(rows)), U(1)) - U(1)
    for i in range(count):
        prefetch(words, U(rows[min(i + U(2 * AHEAD), last)]) * W)
        # Sample by sample: its words lie in one line. A gather, a copy and a strided store took 2.36 ms a batch of
        # 8,192 where one pass takes 1.48.
        source = U(rows[i]) * W
        for j in range(front):
            out[U(2) * i + j] = words[source + j]
        for j in range(front, W):
            out[j * count + i] = words[source + j]
        for j in range(W - U(ids), W):
            least = min(least, words[source + j])
    return least < 0


@njit(nogil=True, cache=True)
def fill_runs(words, width, column, values, sizes):
    """Column `column` of words: values[0] in the first sizes[0] rows, then values[1] in sizes[1], and so on."""
    at = U(column)
    for run in range(len(sizes)):
        for _ in range(sizes[run]):
            words[at] = values[run]
            at += U(width)


@njit(nogil=True, cache=True)
def end_bags(values, count, missing, offsets):
    """Offsets of `count` bags of one id each; where some are `missing` (negative), their bags become empty.

    Returns how many ids are left.
    """
    offsets[0] = 0
    if not missing:
        for bag in range(U(count)):
            offsets[bag + U(1)] = bag + U(1)
        return count
    end = U(0)
    for bag in range(U(count)):
        one = values[bag]
        # Written in any case: what is behind the last id is overwritten, or cut off in the end.
        values[end] = one
        end += U(one >= 0)
        offsets[bag + U(1)] = end
    return np.int64(end)


@njit(nogil=True, cache=True)
def order_runs(starts, chosen, size, out):
    """The places of the runs `chosen`, one after another; run r begins at starts[r] and ends where the next begins."""
    at, last = U(0), len(starts) - 1
    for run in chosen:
        for place in range(starts[run], starts[run + 1] if run < last else size):
            out[at] = place
            at += U(1)


@njit(nogil=True, cache=True)
def number_pointers(pointers, place, used):
    """Pointers become numbers by first appearance, used[number] = pointer.

    `place` is full of -1 before and after. Returns how many there are.
    """
    count, number, last = 0, np.int32(-1), np.int32(-1)
    for i in range(len(pointers)):
        p = pointers[i]
        # Samples of a run follow one another.
        if p != last:
            last, number = p, place[U(p)]
            if number < 0:
                number = np.int32(count)
                place[U(p)] = number
                used[count] = p
                count += 1
        pointers[i] = number
    for i in range(count):
        place[U(used[i])] = -1
    return count


@njit(nogil=True, cache=True)
def scatter_rows(matrix, width, rows, out, stride, places):
    """out[i * stride + places[j]] = matrix[rows[i] * width + j]."""
    for i in range(len(rows)):
        source, target = U(rows[i]) * U(width), U(i) * U(stride)
        for j in range(U(width)):
            out[target + U(places[j])] = matrix[source + j]


@njit(nogil=True, cache=True)
def append_lists(start, length, source, rows, values, at, offsets, place):
    """Bags that are slices of `source`: ids from ``values[at]``, ends from ``offsets[place]`` on.

    Returns the end of the last one.
    """
    end, last = U(at), U(max(len(rows) - 1, 0))
    for i in range(len(rows)):
        far = U(rows[min(U(i) + U(2 * AHEAD), last)])
        prefetch(start, far)
        prefetch(length, far)
        prefetch(source, U(start[U(rows[min(U(i) + U(AHEAD), last)])]))
        row = U(rows[i])
        begin = U(start[row])
        for one in range(begin, begin + U(length[row])):
            values[end] = source[one]
            end += U(1)
        offsets[U(place) + U(i)] = end
    return np.int64(end)


@njit(nogil=True, cache=True)
def total_length(length, rows):
    """Sum of length[rows]."""
    found = 0
    for i in range(len(rows)):
        found += length[U(rows[i])]
    return found


@njit(nogil=True, cache=True)
def join_windows(start, length, order, values, moved, out):
    """Copy the values of windows to `out`, those that windows overlap in once, in ascending order.

    `order` sorts `start`. ``moved[u]`` is where window u starts in `out`. Returns how many values there are.
    """
    stop, total = -1, 0
    for u in order:
        if length[u] == 0:
            moved[u] = 0
            continue
        begin = max(start[u], stop)
        end = max(start[u] + length[u], stop)
        # Where the window lies before what it adds.
        moved[u] = total - (begin - start[u])
        for place in range(U(begin), U(end)):
            out[U(total)] = values[place]
            total += 1
        stop = end
    return total


class BagPlaces(NamedTuple):
    """Bag i of feature f is bag ``f * bags + i`` of what is given, or ``+ rows[i]`` where `chosen`."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    """A bag is ``values[start:stop]``; where bags are `single` it is one value, and these are empty."""
    single: bool
    rows: NDArray[Any]
    chosen: bool
    features: int
    bags: int


@njit(nogil=True, cache=True)
def count_ids(places):
    """Ids in the bags that `join_bags` copies."""
    start, stop, _, rows, chosen, features, bags = places
    total, count = 0, len(rows) if chosen else bags
    for f in range(features):
        for i in range(count):
            bag = U(f * bags + (rows[i] if chosen else i))
            total += stop[bag] - start[bag]
    return total


@njit(nogil=True, cache=True)
def join_bags(values, places, size, offsets, place, out, at):
    """Copy bags to ``out[at:]``, ends to ``offsets[place:]``; each feature is filled up with empty ones to `size`.

    Returns the end of the last one.
    """
    start, stop, single, rows, chosen, features, bags = places
    p, end, count = U(place), U(at), len(rows) if chosen else bags
    for f in range(features):
        for i in range(count):
            bag = U(f * bags + (rows[i] if chosen else i))
            first, last = (bag, bag + U(1)) if single else (U(start[bag]), U(stop[bag]))
            for one in range(first, last):
                out[end] = values[one]
                end += U(1)
            offsets[p] = end
            p += U(1)
        for _ in range(count, size):
            offsets[p] = end
            p += U(1)
    return np.int64(end)


# These are over sooner than the interpreter lock changes hands, so they keep it.


@njit(cache=True)
def outside(places, limit):
    """The first index i at which places[i] is not in [0, limit), or -1."""
    for i in range(len(places)):
        if U(places[i]) >= U(limit):
            return i
    return -1


@njit(cache=True)
def outside_windows(start, length, limit):
    """The first window that does not lie in [0, limit], or -1."""
    for u in range(len(start)):
        if start[u] < 0 or length[u] < 0 or length[u] > limit or start[u] > limit - length[u]:
            return u
    return -1


@njit(cache=True)
def least_and_total(sizes):
    """The least of some numbers, 1 where there is none, and their sum."""
    least, total = np.int64(sizes[0] if len(sizes) else 1), np.int64(0)
    for i in range(len(sizes)):
        least = min(least, np.int64(sizes[i]))
        total += sizes[i]
    return least, total
