"""Numba bodies for deduplicated batches: renumber pointers, join windows, expand and fold columns, gather windows.

Every sum is over samples (or windows) in ascending order and every output element belongs to one thread, so the bits do
not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

U = np.uint64


@njit(nogil=True, cache=True)
def renumber(pointers, place, inverse, used):
    """inverse[i] = number of pointers[i] by first appearance, used[number] = pointer; `place` is -1 again after."""
    count = 0
    for i in range(len(pointers)):
        p = pointers[i]
        if place[p] < 0:
            place[p] = count
            used[count] = p
            count += 1
        inverse[i] = place[p]
    for i in range(count):
        place[used[i]] = -1
    return count


@njit(nogil=True, cache=True)
def join_windows(start, length, order, moved, begin, size):
    """Join windows that overlap or touch into ranges ``begin[r]:begin[r] + size[r]`` of their values.

    `order` sorts `start`. ``moved[u]`` is where window u starts once the ranges lie one after another. Returns the
    number of ranges.
    """
    ranges, stop, total = 0, -1, 0
    for u in order:
        if length[u] == 0:
            moved[u] = 0
            continue
        if start[u] > stop:
            begin[ranges] = start[u]
            size[ranges] = 0
            ranges += 1
            stop = start[u]
        grown = max(start[u] + length[u] - stop, 0)
        moved[u] = total - (stop - start[u])
        size[ranges - 1] += grown
        total += grown
        stop += grown
    return ranges


@njit(parallel=True, nogil=True, cache=True)
def expand(pooled, stride, inverse, first, width, size):
    """pooled[b] = pooled[inverse[g, b]] in columns ``first[g]:first[g] + width[g]``, in place.

    Numbers by first appearance never exceed their place, so from the last sample to the first no source is overwritten
    before it is read.
    """
    S = U(stride)
    for g in prange(len(first)):
        for back in range(U(size)):
            b = U(size) - U(1) - back
            source, target = U(inverse[g, b]) * S, b * S
            for d in range(U(first[g]), U(first[g] + width[g])):
                pooled[target + d] = pooled[source + d]


@njit(parallel=True, nogil=True, cache=True)
def fold(gradient, stride, inverse, first, width, out, size, rows):
    """The transpose of `expand` in its columns: out[r] = sum of gradient[b] over b with ``inverse[g, b] == r``."""
    S = U(stride)
    for g in prange(len(first)):
        begin, end = U(first[g]), U(first[g] + width[g])
        for r in range(U(rows)):
            for d in range(begin, end):
                out[r * S + d] = np.float32(0.0)
        for b in range(U(size)):
            source, target = b * S, U(inverse[g, b]) * S
            for d in range(begin, end):
                out[target + d] += gradient[source + d]


@njit(parallel=True, nogil=True, cache=True)
def gather_windows(rows, width, start, length, longest, chunks, out):
    """out[u, l] = rows[start[u] + l] for l < length[u], zeros behind; a window lies in one piece of `rows`."""
    D = U(width)
    count = len(start)
    for chunk in prange(chunks):
        for u in range(count * chunk // chunks, count * (chunk + 1) // chunks):
            source, target = U(start[u]) * D, U(u) * U(longest) * D
            filled, end = U(length[u]) * D, U(longest) * D
            for d in range(filled):
                out[target + d] = rows[source + d]
            for d in range(filled, end):
                out[target + d] = np.float32(0.0)


@njit(parallel=True, nogil=True, cache=True)
def scatter_windows(gradient, width, start, length, longest, chunks, out, values):
    """The transpose of `gather_windows`: out[e] = sum of gradient[u, e - start[u]] over windows u, ascending."""
    D = U(width)
    for chunk in prange(chunks):
        low, high = values * chunk // chunks, values * (chunk + 1) // chunks
        for d in range(U(low) * D, U(high) * D):
            out[d] = np.float32(0.0)
        for u in range(len(start)):
            begin, end = max(start[u], low), min(start[u] + length[u], high)
            if begin < end:
                source = (U(u) * U(longest) + U(begin - start[u])) * D
                target = U(begin) * D
                for d in range(U(end - begin) * D):
                    out[target + d] += gradient[source + d]
