"""Counter-based noise in plain NumPy, one row per call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """Apply the finalizer of splitmix64 to a 64-bit word."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform_row(key: int, row: int, width: int, low: float, high: float) -> NDArray[np.float32]:
    """Return ``[width]`` float32 noise that is uniform in [low, high), a function of (key, row) and
    the column.
    """
    row_key = mix(key ^ mix((row * _GOLDEN + 1) & _MASK))
    bits = [mix((row_key + d * _GOLDEN) & _MASK) >> 40 for d in range(width)]
    unit = np.array(bits, dtype=np.float32) * np.float32(1 / (1 << 24))
    return np.float32(low) + np.float32(high - low) * unit


def random_words(key: int, count: int) -> NDArray[np.uint64]:
    """Return `count` words of 64 random bits, a function of `key` and of their places."""
    return np.array([mix((key + place * _GOLDEN) & _MASK) for place in range(count)], dtype=np.uint64)
