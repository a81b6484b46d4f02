"""Numba functions for counter-based noise."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True, inline="always")
def mix(state):
    """Apply splitmix64's finalizer (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    state = uint64(state)
    state = (state ^ (state >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> uint64(27))) * uint64(0x94D049BB133111EB)
    return state ^ (state >> uint64(31))


@njit(nogil=True, cache=True, inline="always")
def row_key(key, row):
    """Return the key of the noise of one row."""
    # Mixed twice, so that rows that differ in one bit, and keys of neighbouring tables, have
    # unrelated streams.
    return mix(key ^ mix(uint64(row) * GOLDEN + uint64(1)))


@njit(nogil=True, cache=True, inline="always")
def key_of(noise, table, row):
    """Return the noise key of a row by a `RowNoise`, whose table may be part of a larger one."""
    return row_key(noise[0][table], noise[1][table] + noise[2][table] * uint64(row))


@njit(nogil=True, cache=True, inline="always")
def unit(key, column):
    """Return a float in [0, 1) with 24 random bits, a function of a row's key and a column."""
    # 24 bits: a float32 in [0, 1) holds them exactly, so the result is never 1.
    return np.float32(mix(key + uint64(column) * GOLDEN) >> uint64(40)) * np.float32(1.0 / (1 << 24))


@njit(nogil=True, cache=True)
def fill_uniform(out, first_row, stride, key, low, high):
    """Set out[r, d] = low + (high - low) * unit(key of row first_row + r * stride, d)."""
    rows, width = out.shape
    span = np.float32(high - low)
    for r in range(rows):
        noise = row_key(key, first_row + r * stride)
        for d in range(width):
            out[r, d] = np.float32(low) + span * unit(noise, d)


@njit(nogil=True, cache=True)
def fill_words(out, key):
    """Set out[i] to 64 random bits, a function of (key, i)."""
    for i in range(len(out)):
        out[i] = mix(key + uint64(i) * GOLDEN)
