"""Copy vectors of a deduplicated batch from segments or distinct values to samples, and sum their
gradients back.

Shapes: B samples, R segments of samples, U distinct values, W columns of a pooled buffer, E values
under windows, D width. Every sum is over samples (or windows) in ascending order, and one thread
computes each output element, so the bits do not depend on the number of threads. On a device,
`row_index` does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.runtime.memory import RECYCLER, flat
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size

U = np.uint64
# Floats of a cache line; columns are cut into pieces of this width, so that threads share the work.
_LINE = 16
Spans = Sequence[tuple[int, int]]


def find_segments(inverse: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split the segments that begin at `starts`, wherever neighbouring samples differ in `inverse`.

    `inverse` is ``[B]`` and `starts` goes from 0 to B; returns the finer starts, ``[R + 1]``.
    Samples of a session are neighbours in a batch, so segments are nearly as few as distinct
    values. Unlike distinct values, segments need no index when rows are copied to their samples or
    summed over them.
    """
    finer = np.empty(len(inverse) + 1, dtype=np.int64)
    return finer[: _find_segments(inverse, starts, finer)]


class SegmentColumns:
    """Columns of a pooled buffer that have one row per segment of samples instead of one per
    sample.

    Parameters
    ----------
    columns : int
        W.
    spans : sequence
        Pairs of first column and width; they do not overlap.
    starts : Tensor
        ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``, at least one.
    """

    def __init__(self, columns: int, spans: Sequence[tuple[int, int]], starts: Tensor) -> None:
        self.columns = columns
        self.starts = starts.numpy()
        self.size = int(self.starts[-1])
        self._spans = _merged(sorted(spans))

    def expand(self, pooled: Tensor) -> Tensor:
        """Copy each segment's spans to all its samples, in place; return `pooled`, ``[B, W]``."""
        first, width = _pieces(self._spans)
        _expand(team_of(team_threads()), pooled.view(-1).numpy(), self.columns, self.starts, first, width)
        return pooled

    def fold(self, gradient: Tensor) -> Tensor:
        """Sum the spans of `gradient` ``[B, W]`` over the samples of each segment; copy the other
        columns.

        Returns ``[B, W]``; the spans of its rows from R on are undefined.
        """
        out = RECYCLER.empty(self.size, self.columns)
        first, width = (np.array(part, dtype=np.int64) for part in zip(*self._spans, strict=True))
        threads = team_threads()
        tile = tile_size(len(self.starts) - 1, threads)
        target = out.view(-1).numpy()
        _fold(team_of(threads), flat(gradient), self.columns, self.starts, first, width, target, tile)
        return out


def sum_rows(gradient: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """Return ``[rows, W]`` sums: row r is the sum of ``gradient[b]`` for all b with ``inverse[b] ==
    r``, ascending.

    Parameters
    ----------
    gradient : Tensor
        ``[B, W]`` float32.
    inverse : Tensor
        ``[B]`` int32 or int64 row of each sample.
    rows : int
        Number of rows.
    """
    out = RECYCLER.empty(rows, gradient.shape[1])
    _sum_rows(
        team_of(team_threads()),
        flat(gradient),
        gradient.shape[1],
        inverse.numpy(),
        out.view(-1).numpy(),
        rows,
        _LINE,
    )
    return out


def _merged(spans: Spans) -> list[tuple[int, int]]:
    """Join spans that are next to each other."""
    merged: list[tuple[int, int]] = []
    for first, width in spans:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + width)
        else:
            merged.append((first, width))
    return merged


def _pieces(spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pieces = [
        (first + done, min(_LINE, width - done))
        for first, width in spans
        for done in range(0, width, _LINE)
    ]
    table = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def gather_windows(rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
    """Copy windows of rows to ``[U, longest, D]``, with zeros after each window.

    Parameters
    ----------
    rows : Tensor
        ``[E, D]`` float32.
    start, length : Tensor
        ``[U]`` int64: window u is ``rows[start[u]:start[u] + length[u]]``.
    longest : int
        At least the largest length.
    """
    out, threads = RECYCLER.empty(start.numel(), longest, rows.shape[1]), team_threads()
    _gather_windows(
        team_of(threads),
        flat(rows),
        rows.shape[1],
        start.numpy(),
        length.numpy(),
        longest,
        tile_size(start.numel(), threads),
        out.view(-1).numpy(),
    )
    return out


def scatter_windows(gradient: Tensor, start: Tensor, length: Tensor, values: int) -> Tensor:
    """Return each value's sum of gradients, ``[E, D]``, over the windows that contain the value, in
    their order.

    Parameters
    ----------
    gradient : Tensor
        ``[U, longest, D]`` float32 gradient of the output of `gather_windows`.
    start, length : Tensor
        ``[U]`` int64 windows, as for `gather_windows`.
    values : int
        Number of values, E.
    """
    longest, width = gradient.shape[1:]
    out, threads = RECYCLER.empty(values, width), team_threads()
    _scatter_windows(
        team_of(threads),
        flat(gradient),
        width,
        start.numpy(),
        length.numpy(),
        longest,
        tile_size(values, threads),
        out.view(-1).numpy(),
        values,
    )
    return out


@njit(nogil=True, cache=True)
def _find_segments(inverse, starts, finer):
    """Write `starts`, and positions where neighbours differ, to `finer`; return their number."""
    count = U(0)
    for segment in range(U(len(starts) - 1)):
        for b in range(U(starts[segment]), U(starts[segment + U(1)])):
            # Only neighbours are compared. Sessions are contiguous, so on Globo there are as many
            # segments as distinct histories, and this takes 0.05 ms.
            if b == U(starts[segment]) or inverse[b] != inverse[b - U(1)]:
                finer[count] = b
                count += U(1)
    finer[count] = starts[-1]
    return np.int64(count + U(1))


@njit(**BODY)
def expand_spans(member, counter, pooled, stride, starts, first, width):
    """Set pooled[b] = pooled[r] in columns ``first[g]:first[g] + width[g]`` for the samples b of
    segment r, in place.

    The number of a segment never exceeds the number of its first sample. So, from the last segment
    to the first, no source is overwritten before it is read.
    """
    S, segments = U(stride), len(starts) - 1
    while True:
        g = take(counter)
        if g >= len(first):
            break
        begin, end = U(first[g]), U(first[g] + width[g])
        for back in range(segments):
            segment = segments - 1 - back
            source = U(segment) * S
            for b in range(starts[segment + 1] - 1, starts[segment] - 1, -1):
                target = U(b) * S
                for d in range(begin, end):
                    pooled[target + d] = pooled[source + d]


@njit(nogil=True, cache=True)
def _expand(team, pooled, stride, starts, first, width):
    run_team(team, expand_spans, (stack_array(1, np.int64), pooled, stride, starts, first, width))


@njit(**BODY)
def fold_segments(member, counter, gradient, stride, starts, first, width, out, tile):
    """In the spans, set out[r] to the sum of gradient[b] over the segment's samples; elsewhere, set
    out[b] to gradient[b].

    The spans of rows beyond the number of segments are not written.
    """
    S, segments = U(stride), len(starts) - 1
    while True:
        low = take(counter) * tile
        if low >= segments:
            break
        for segment in range(low, min(low + tile, segments)):
            done = U(0)
            for g in range(len(first)):
                begin, end = U(first[g]), U(first[g] + width[g])
                for b in range(U(starts[segment]), U(starts[segment + 1])):
                    for d in range(done, begin):
                        out[b * S + d] = gradient[b * S + d]
                target = U(segment) * S
                for d in range(begin, end):
                    out[target + d] = gradient[U(starts[segment]) * S + d]
                for b in range(U(starts[segment] + 1), U(starts[segment + 1])):
                    for d in range(begin, end):
                        out[target + d] += gradient[b * S + d]
                done = end
            for b in range(U(starts[segment]), U(starts[segment + 1])):
                for d in range(done, S):
                    out[b * S + d] = gradient[b * S + d]


@njit(nogil=True, cache=True)
def _fold(team, gradient, stride, starts, first, width, out, tile):
    run_team(
        team, fold_segments, (stack_array(1, np.int64), gradient, stride, starts, first, width, out, tile)
    )


@njit(**BODY)
def sum_columns(member, counter, gradient, columns, inverse, out, rows, tile):
    """Set out[r] to the sum of gradient[i] over all i with ``inverse[i] == r``, ascending; `tile`
    columns at a time.
    """
    W = U(columns)
    while True:
        first = take(counter) * tile
        if first >= columns:
            break
        begin, end = U(first), U(min(first + tile, columns))
        # Threads share columns, not rows: `inverse` sends many inputs to one row, which only one
        # thread may write.
        for r in range(U(rows)):
            for d in range(begin, end):
                out[r * W + d] = np.float32(0.0)
        for i in range(U(len(inverse))):
            source, target = i * W, U(inverse[i]) * W
            for d in range(begin, end):
                out[target + d] += gradient[source + d]


@njit(nogil=True, cache=True)
def _sum_rows(team, gradient, columns, inverse, out, rows, tile):
    run_team(team, sum_columns, (stack_array(1, np.int64), gradient, columns, inverse, out, rows, tile))


@njit(**BODY)
def gather_tiles(member, counter, rows, width, start, length, longest, tile, out):
    """Set out[u, l] = rows[start[u] + l] for l < length[u], and the rest of out[u] to zeros."""
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
def _gather_windows(team, rows, width, start, length, longest, tile, out):
    run_team(team, gather_tiles, (stack_array(1, np.int64), rows, width, start, length, longest, tile, out))


@njit(**BODY)
def scatter_tiles(member, counter, gradient, width, start, length, longest, tile, out, values):
    """Set out[e] to the sum of gradient[u, e - start[u]] over windows u with e, ascending."""
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
def _scatter_windows(team, gradient, width, start, length, longest, tile, out, values):
    args = (stack_array(1, np.int64), gradient, width, start, length, longest, tile, out, values)
    run_team(team, scatter_tiles, args)


def reference_expand(pooled: Tensor, spans: Spans, segment: Tensor) -> Tensor:
    """Set the spans of sample b to the spans of row ``segment[b]``, in place; return `pooled`."""
    for first, width in spans:
        part = pooled[:, first : first + width]
        part.copy_(part.index_select(0, segment))
    return pooled


def reference_fold(gradient: Tensor, spans: Spans, segment: Tensor, segments: int) -> Tensor:
    """Return ``[B, W]``: in the spans, the first `segments` rows are sums over segments, other rows
    are zeros.
    """
    out = gradient.clone()
    for first, width in spans:
        part = out[:, first : first + width]
        sums = reference_sum_rows(part, segment, segments)
        part.zero_()
        part[:segments].copy_(sums)
    return out


def reference_sum_rows(gradient: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """Sum gradients by row, ``[rows, W]``: row r sums the samples with ``inverse[b] == r``."""
    return gradient.new_zeros(rows, gradient.shape[1]).index_add(0, inverse, gradient)


def reference_window_places(start: Tensor, length: Tensor, longest: int, values: int) -> Tensor:
    """Return the index of the value at each position of each window, ``[U, longest]``; after the
    window, `values`.
    """
    steps = torch.arange(longest)
    return torch.where(steps < length.unsqueeze(1), start.unsqueeze(1) + steps, values)


def reference_gather_windows(rows: Tensor, places: Tensor) -> Tensor:
    """Copy the windows of `rows` to ``[U, longest, D]``, with zeros after each window."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[places]


def reference_scatter_windows(gradient: Tensor, places: Tensor, values: int) -> Tensor:
    """Return for each of `values` values the sum of its gradients over the windows that contain it,
    ``[values, D]``.
    """
    return reference_sum_rows(gradient.flatten(0, 1), places.flatten(), values + 1)[:values]
