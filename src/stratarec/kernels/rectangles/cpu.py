"""Numba body of copies between flat arrays."""

from __future__ import annotations

import numpy as np
from numba import njit

U = np.uint64


@njit(nogil=True, cache=True)
def copy_parts(source, target, parts):
    """``target[to + r * to_stride + d] = source[at + r * at_stride + d]`` for every rectangle."""
    for p in range(len(parts)):
        rows, width = U(parts[p, 0]), U(parts[p, 1])
        at, at_stride, to, to_stride = U(parts[p, 2]), U(parts[p, 3]), U(parts[p, 4]), U(parts[p, 5])
        if at_stride == width and to_stride == width:
            rows, width = U(1), rows * width
        for r in range(rows):
            for d in range(width):
                target[to + r * to_stride + d] = source[at + r * at_stride + d]
