"""Counter-based noise: a value is a function of (key, row, column), never of order or time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from stratarec.kernels.random import cpu


def table_key(seed: int, table: str) -> int:
    """The 64-bit key of a table's noise; differs between seeds and between table names."""
    # By name, not by place: a table keeps its initial rows when others are added or sorted otherwise.
    return xxhash.xxh3_64_intdigest(table.encode(), seed=seed & ((1 << 64) - 1))


class RowNoise(NamedTuple):
    """What the noise of each table's rows is a function of; arrays have one entry a table.

    Parameters
    ----------
    key : ndarray
        uint64, from `table_key`.
    first, stride : ndarray
        uint64: row r is row ``first + r * stride`` of the table that its noise is of.
    """

    key: NDArray[np.uint64]
    first: NDArray[np.uint64]
    stride: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[int], first: Sequence[int], stride: Sequence[int]) -> RowNoise:
        """From one number a table."""
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
