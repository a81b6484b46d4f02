"""Read memory and files at full speed, to measure their bandwidth."""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numpy.typing import NDArray

from stratarec.errors import ConfigError
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
_PARTS_PER_THREAD = 4
_AHEAD = 16
# Called by its symbol, not by a ctypes pointer, so that Numba can cache the compiled function.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))


def sum_parts(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sums of equal parts of flat `values`, four parts per thread, on all threads.

    A remainder shorter than a part is left out.
    """
    out = np.empty(use_torch_threads() * _PARTS_PER_THREAD, dtype=np.float32)
    _sum_parts(values, out)
    return out


def sum_rows(values: NDArray[np.float32], rows: NDArray[np.uint64], *, width: int) -> NDArray[np.float32]:
    """Return the sums of equal parts of `rows`, four parts per thread, on all threads.

    `values` is flat, and row r has the `width` numbers from ``r * width`` on.
    """
    if len(rows) and int(rows.max()) * width + width > len(values):
        raise ConfigError(f"row {rows.max()} of width {width} is outside {len(values)} values")
    out = np.empty(use_torch_threads() * _PARTS_PER_THREAD, dtype=np.float32)
    _sum_rows(values, rows, width, out)
    return out


def read_blocks(descriptor: int, buffer: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
    """Read ``len(buffer)`` bytes of the open file `descriptor` at each of `offsets` (bytes) into
    `buffer`.

    The interpreter's lock is not held. If the descriptor was opened for direct I/O, `buffer` and
    `offsets` must be aligned to the device's blocks.

    Returns
    -------
    int
        Number of complete reads before the first incomplete one.
    """
    return int(_read_blocks(descriptor, buffer.ctypes.data, len(buffer), offsets))


# The compiler may reorder additions. Otherwise each would wait for the one before, and memory would
# not be the limit.
@njit(nogil=True, cache=True, parallel=True, fastmath=True)
def _sum_parts(values, out):
    """Split `values` into len(out) equal parts and set ``out[c]`` to the sum of part c."""
    size = U(len(values)) // U(len(out))
    for c in prange(len(out)):
        total = np.float32(0)
        first = U(c) * size
        for i in range(size):
            total += values[first + U(i)]
        out[c] = total


@njit(nogil=True, cache=True, parallel=True, fastmath=True)
def _sum_rows(values, rows, width, out):
    """Split `rows` into len(out) equal parts; set ``out[c]`` to the sum of part c.

    Rows are prefetched as they are in pooling.
    """
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
def _read_blocks(descriptor, address, size, offsets):
    """Read `size` bytes at each offset to `address`; return how many reads were complete."""
    for i in range(len(offsets)):
        if _pread(descriptor, address, size, offsets[i]) != size:
            return i
    return len(offsets)


def reference_sum_parts(values: NDArray[np.float32], parts: int) -> NDArray[np.float32]:
    """Sum `parts` equal parts of `values` in NumPy."""
    sums: NDArray[np.float32] = values.reshape(parts, -1).sum(axis=1)
    return sums


def reference_sum_rows(
    values: NDArray[np.float32], rows: NDArray[np.uint64], width: int, parts: int
) -> NDArray[np.float32]:
    """Sum the given rows of `values` in `parts` equal parts, in NumPy."""
    sums: NDArray[np.float32] = (
        values.reshape(-1, width)[rows.astype(np.int64)].reshape(parts, -1).sum(axis=1)
    )
    return sums
