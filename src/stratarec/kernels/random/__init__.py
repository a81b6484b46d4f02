"""Counter-based noise: a value is a function of (key, row, column), never of order or time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from stratarec.kernels.random import cpu


def table_key(seed: int, table: str) -> int:
    """Return the 64-bit key of a table's noise; it differs between seeds and between table names."""
    # By name, not by place: a table keeps its initial rows when others are added or reordered.
    return xxhash.xxh3_64_intdigest(table.encode(), seed=seed & ((1 << 64) - 1))


class RowNoise(NamedTuple):
    """Keys of the noise of each table's rows; arrays have one entry a table.

    Parameters
    ----------
    key : ndarray
        uint64, from `table_key`.
    first, stride : ndarray
        uint64: row r has the noise of row ``first + r * stride``, its number in the complete table.
    """

    key: NDArray[np.uint64]
    first: NDArray[np.uint64]
    stride: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[int], first: Sequence[int], stride: Sequence[int]) -> RowNoise:
        """Build from one number a table."""
        return cls(*(np.array(numbers, dtype=np.uint64) for numbers in (keys, first, stride)))


def fill_uniform(
    out: NDArray[np.float32], *, key: int, first_row: int = 0, stride: int = 1, low: float, high: float
) -> None:
    """Fill ``out[r, d]`` with uniform noise in [low, high) of row ``first_row + r * stride``.

    Parameters
    ----------
    out : ndarray
        ``[R, D]`` float32, C-contiguous.
    key : int
        From `table_key`.
    """
    cpu.fill_uniform(out, first_row, stride, np.uint64(key), np.float32(low), np.float32(high))


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64, a bijection of 64 bits, to every element."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
