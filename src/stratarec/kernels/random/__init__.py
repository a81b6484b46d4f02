"""Counter-based noise: a value is a function of (key, row, column), never of order or time."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from stratarec.kernels.random import cpu


def table_key(seed: int, table: str) -> int:
    """The 64-bit key of a table's noise; differs between seeds and between table names."""
    return xxhash.xxh3_64_intdigest(table.encode(), seed=seed & ((1 << 64) - 1))


def fill_uniform(out: NDArray[np.float32], *, key: int, first_row: int = 0, low: float, high: float) -> None:
    """Fill ``out[r, d]`` with uniform noise in [low, high) of row ``first_row + r``.

    Parameters
    ----------
    out : ndarray
        ``[R, D]`` float32, C-contiguous.
    key : int
        From `table_key`.
    """
    cpu.fill_uniform(out, first_row, np.uint64(key), np.float32(low), np.float32(high))
