"""Rows of a table for Numba kernels: how far ahead of its use a row is asked for.

A row of D floats is handled in blocks of `lanes`, a constant of each compiled kernel; most widths are one block.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.team import BODY
from stratarec.kernels.vector import LANES

U = np.uint64
_LINE = U(LANES)


@njit(**BODY)
def ahead_of(width):
    """How many rows before its use a row is prefetched: about 256 cache lines, between 16 and 64 rows.

    With fewer lines under way a core does not reach its memory bandwidth: random rows of 16 floats took 14 ns each with
    16 rows ahead and 8 ns with 64, rows of 64 floats 12 and 10 ns.
    """
    return min(max(U(4096) // width, U(16)), U(64))


@njit(**BODY)
def prefetch_row(array, start, width):
    """Ask for ``array[start:start + width]``."""
    for element in range(U(0), width, _LINE):
        prefetch(array, start + element)
