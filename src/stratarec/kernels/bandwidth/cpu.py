"""Numba bodies that read memory and files as fast as they give, for measuring them."""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types

from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
_AHEAD = 16
# By symbol, not by ctypes: Numba can cache the compiled function.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))


# Any order of additions: in the given one their chain, not memory, would be what is measured.
@njit(nogil=True, cache=True, parallel=True, fastmath=True)
def sum_parts(values, out):
    """``out[c]`` = sum of part c of `values`, of len(out) equal parts."""
    size = U(len(values)) // U(len(out))
    for c in prange(len(out)):
        total = np.float32(0)
        first = U(c) * size
        for i in range(size):
            total += values[first + U(i)]
        out[c] = total


@njit(nogil=True, cache=True, parallel=True, fastmath=True)
def sum_rows(values, rows, width, out):
    """``out[c]`` = sum over the rows of part c of `rows`, each of `width` values, fetched ahead as pooling does."""
    size = U(len(rows)) // U(len(out))
    span = U(width)
    for c in prange(len(out)):
        total = np.float32(0)
        first = U(c) * size
        for i in range(size):
            ahead = rows[min(first + U(i) + U(_AHEAD), U(len(rows) - 1))] * span
            for d in range(U(0), span, U(16)):
                prefetch(values, np.int64(ahead + d))
            start = rows[first + U(i)] * span
            for d in range(span):
                total += values[start + U(d)]
        out[c] = total


@njit(nogil=True, cache=True)
def read_blocks(descriptor, address, size, offsets):
    """Read `size` bytes at each offset to `address`; how many reads were whole before one was not."""
    for i in range(len(offsets)):
        if _pread(descriptor, address, size, offsets[i]) != size:
            return i
    return len(offsets)
