"""Numba bodies of counter-based noise."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True, inline="always")
def mix(state):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64 bits."""
    state = uint64(state)
    state = (state ^ (state >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> uint64(27))) * uint64(0x94D049BB133111EB)
    return state ^ (state >> uint64(31))


@njit(nogil=True, cache=True)
def fill_uniform(out, first_row, key, low, high):
    """out[r, d] = low + (high - low) * u(key, first_row + r, d), u in [0, 1) with 24 bits."""
    rows, width = out.shape
    span = np.float32(high - low)
    for r in range(rows):
        row_key = mix(key ^ mix(uint64(first_row + r) * GOLDEN + uint64(1)))
        for d in range(width):
            bits = mix(row_key + uint64(d) * GOLDEN) >> uint64(40)
            out[r, d] = np.float32(low) + span * (np.float32(bits) * np.float32(1.0 / (1 << 24)))
