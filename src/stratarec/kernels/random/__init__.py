"""Counter-based noise: each number depends only on (key, row, column), not on order or time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

HASH_SEED = 0x5DEECE66D
"""Number that is added to an integer before it is hashed."""


def table_key(seed: int, table: str) -> int:
    """Return the 64-bit key of the noise of a table, given the run's seed and the name of the
    table.

    Keys differ between seeds and between names.
    """
    # By name, not by position: a table keeps its initial rows when other tables are added or
    # reordered.
    return xxhash.xxh3_64_intdigest(table.encode(), seed=seed & ((1 << 64) - 1))


class RowNoise(NamedTuple):
    """Keys of the noise of the tables' rows; arrays have one entry per table.

    Parameters
    ----------
    key : ndarray
        uint64, from `table_key`.
    first, stride : ndarray
        uint64: row r has number ``first + r * stride`` in the complete table, and the noise of that
        number.
    """

    key: NDArray[np.uint64]
    first: NDArray[np.uint64]
    stride: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[int], first: Sequence[int], stride: Sequence[int]) -> RowNoise:
        """Build from sequences of `key`, `first` and `stride` with one number per table."""
        return cls(*(np.array(numbers, dtype=np.uint64) for numbers in (keys, first, stride)))


def fill_uniform(
    out: NDArray[np.float32], *, key: int, first_row: int = 0, stride: int = 1, low: float, high: float
) -> None:
    """Set ``out[r, d]`` to noise that is uniform in [low, high), a function of (key, first_row + r
    * stride, d).

    Parameters
    ----------
    out : ndarray
        ``[R, D]`` float32, C-contiguous.
    key : int
        Key from `table_key`.
    first_row, stride : int
        Row r of `out` is row ``first_row + r * stride`` of the complete table.
    low, high : float
        Limits of the noise.
    """
    # `prepare` only needs hashes, and Numba takes a second to load
    from stratarec.kernels.random import cpu

    cpu.fill_uniform(out, first_row, stride, np.uint64(key), np.float32(low), np.float32(high))


class RandomWords:
    """Words of 64 random bits: each array is a function of `key`, which is below 2^64, and of the
    arrays since then.
    """

    def __init__(self) -> None:
        self.key = 0

    def draw(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words."""
        from stratarec.kernels.random import cpu

        words = np.empty(count, np.uint64)
        cpu.fill_words(words, np.uint64(self.key))
        self.key = (self.key + 1) % (1 << 64)
        return words


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64, a bijection of 64-bit words, to every element."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
