"""Numba bodies for models on deduplicated batches: expand and fold runs, gather windows.

Every sum is over samples (or windows) in ascending order and every output element belongs to one thread, so the bits do
not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.runtime.team import BODY, run_team, take

U = np.uint64


@njit(nogil=True, cache=True)
def find_runs(inverse, starts, found):
    """`starts`, which end with the number of samples, and where neighbours differ; returns how many there are."""
    count = U(0)
    for run in range(U(len(starts) - 1)):
        for b in range(U(starts[run]), U(starts[run + U(1)])):
            # Neighbours alone: sessions lie together, so on Globo there are as many runs as distinct histories, and
            # finding them takes 0.05 ms.
            if b == U(starts[run]) or inverse[b] != inverse[b - U(1)]:
                found[count] = b
                count += U(1)
    found[count] = starts[-1]
    return np.int64(count + U(1))


@njit(**BODY)
def expand_spans(member, counter, pooled, stride, starts, first, width):
    """pooled[b] = pooled[r] in columns ``first[g]:first[g] + width[g]`` for the samples b of run r, in place.

    A run's number never exceeds the place of its first sample, so from the last run to the first no source is
    overwritten before it is read.
    """
    S, runs = U(stride), len(starts) - 1
    while True:
        g = take(counter)
        if g >= len(first):
            break
        begin, end = U(first[g]), U(first[g] + width[g])
        for back in range(runs):
            run = runs - 1 - back
            source = U(run) * S
            for b in range(starts[run + 1] - 1, starts[run] - 1, -1):
                target = U(b) * S
                for d in range(begin, end):
                    pooled[target + d] = pooled[source + d]


@njit(nogil=True, cache=True)
def expand(team, pooled, stride, starts, first, width):
    run_team(team, expand_spans, (np.zeros(1, np.int64), pooled, stride, starts, first, width))


@njit(**BODY)
def fold_runs(member, counter, gradient, stride, starts, first, width, out, tile):
    """The transpose of `expand`: out[r] = sum of gradient[b] over the run's samples in the spans, gradient[b] outside.

    The spans of rows beyond the number of runs are not written.
    """
    S, runs = U(stride), len(starts) - 1
    while True:
        low = take(counter) * tile
        if low >= runs:
            break
        for run in range(low, min(low + tile, runs)):
            done = U(0)
            for g in range(len(first)):
                begin, end = U(first[g]), U(first[g] + width[g])
                for b in range(U(starts[run]), U(starts[run + 1])):
                    for d in range(done, begin):
                        out[b * S + d] = gradient[b * S + d]
                target = U(run) * S
                for d in range(begin, end):
                    out[target + d] = gradient[U(starts[run]) * S + d]
                for b in range(U(starts[run] + 1), U(starts[run + 1])):
                    for d in range(begin, end):
                        out[target + d] += gradient[b * S + d]
                done = end
            for b in range(U(starts[run]), U(starts[run + 1])):
                for d in range(done, S):
                    out[b * S + d] = gradient[b * S + d]


@njit(nogil=True, cache=True)
def fold(team, gradient, stride, starts, first, width, out, tile):
    given = (np.zeros(1, np.int64), gradient, stride, starts, first, width, out, tile)
    run_team(team, fold_runs, given)


@njit(**BODY)
def sum_columns(member, counter, gradient, columns, inverse, out, rows, tile):
    """out[r] = sum of gradient[i] over i with ``inverse[i] == r``, ascending; `tile` columns at a time."""
    W = U(columns)
    while True:
        first = take(counter) * tile
        if first >= columns:
            break
        begin, end = U(first), U(min(first + tile, columns))
        # Columns are dealt out, not rows: `inverse` sends many inputs to one row, which then has one owner.
        for r in range(U(rows)):
            for d in range(begin, end):
                out[r * W + d] = np.float32(0.0)
        for i in range(U(len(inverse))):
            source, target = i * W, U(inverse[i]) * W
            for d in range(begin, end):
                out[target + d] += gradient[source + d]


@njit(nogil=True, cache=True)
def sum_rows(team, gradient, columns, inverse, out, rows, tile):
    run_team(team, sum_columns, (np.zeros(1, np.int64), gradient, columns, inverse, out, rows, tile))


@njit(**BODY)
def gather_tiles(member, counter, rows, width, start, length, longest, tile, out):
    """out[u, l] = rows[start[u] + l] for l < length[u], zeros behind; a window lies in one piece of `rows`."""
    D, count = U(width), len(start)
    while True:
        first = take(counter) * tile
        if first >= count:
            break
        for u in range(first, min(first + tile, count)):
            source, target = U(start[u]) * D, U(u) * U(longest) * D
            filled, end = U(length[u]) * D, U(longest) * D
            for d in range(filled):
                out[target + d] = rows[source + d]
            for d in range(filled, end):
                out[target + d] = np.float32(0.0)


@njit(nogil=True, cache=True)
def gather_windows(team, rows, width, start, length, longest, tile, out):
    run_team(team, gather_tiles, (np.zeros(1, np.int64), rows, width, start, length, longest, tile, out))


@njit(**BODY)
def scatter_tiles(member, counter, gradient, width, start, length, longest, tile, out, values):
    """The transpose of `gather_windows`: out[e] = sum of gradient[u, e - start[u]] over windows u, ascending."""
    D = U(width)
    while True:
        low = take(counter) * tile
        if low >= values:
            break
        high = min(low + tile, values)
        for d in range(U(low) * D, U(high) * D):
            out[d] = np.float32(0.0)
        for u in range(len(start)):
            begin, end = max(start[u], low), min(start[u] + length[u], high)
            if begin < end:
                source = (U(u) * U(longest) + U(begin - start[u])) * D
                target = U(begin) * D
                for d in range(U(end - begin) * D):
                    out[target + d] += gradient[source + d]


@njit(nogil=True, cache=True)
def scatter_windows(team, gradient, width, start, length, longest, tile, out, values):
    given = (np.zeros(1, np.int64), gradient, width, start, length, longest, tile, out, values)
    run_team(team, scatter_tiles, given)
