"""Test rows in registers and teams: fixed orders of summation, streaming stores, and every task
done once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import literally, njit

from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.vector import add, blocks, load, multiply, store, store_totals, stream, total

U = np.uint64
# The disk cache imports a module by name, but test modules have none.
UNCACHED = {**BODY, "cache": False}


@njit(**UNCACHED)
def reduce(lanes, rows, out):
    literally(lanes)
    for i in range(U(4)):
        out[i] = total(load(rows, i * U(lanes), lanes))
    store_totals(
        out,
        U(4),
        load(rows, U(0), lanes),
        load(rows, U(lanes), lanes),
        load(rows, U(2 * lanes), lanes),
        load(rows, U(3 * lanes), lanes),
    )


def reducer(lanes: int) -> Any:
    return njit(lambda rows, out: reduce(lanes, rows, out))


def in_order(row: np.ndarray) -> np.float32:
    """Sum in 16 lanes, block by block (the last may be short), then by halves."""
    lanes = 16 if len(row) >= 16 else np.gcd(len(row), 16)
    result = row[:lanes].copy()
    for first in range(lanes, len(row), lanes):
        part = row[first : first + lanes]
        result[: len(part)] += part
    while len(result) > 1:
        result = result[: len(result) // 2] + result[len(result) // 2 :]
    return np.float32(result[0])


@pytest.mark.interpreted
@pytest.mark.parametrize("lanes", [1, 3, 4, 12, 15, 16, 20, 48, 100, 111, 127, 128])
def test_sums_of_a_row_have_a_fixed_order(lanes: int) -> None:
    rows = np.random.default_rng(lanes).standard_normal((4, lanes), dtype=np.float32)
    out = np.full(8, np.nan, dtype=np.float32)
    reducer(lanes)(rows.reshape(-1), out)
    expected = [in_order(row) for row in rows]
    np.testing.assert_array_equal(out, [*expected, *expected])


@pytest.mark.interpreted
def test_streaming_stores_store_the_same() -> None:
    @njit
    def double(source: Any, target: Any, streamed: Any) -> None:
        for start in range(U(0), U(len(source)), U(32)):
            row = load(source, start, 32)
            store(target, start, multiply(add(row, row), row))
            stream(streamed, start, multiply(add(row, row), row))

    source = np.random.default_rng(0).standard_normal(4096, dtype=np.float32)
    target, streamed = np.full(4096, np.nan, dtype=np.float32), allocate(4096)
    double(source, target, streamed)
    np.testing.assert_array_equal(target, (source + source) * source)
    np.testing.assert_array_equal(streamed, target)


@pytest.mark.interpreted
@pytest.mark.parametrize("width", [3, 16, 33])
def test_blocks_add_up_to_the_row(width: int) -> None:
    lanes, whole = blocks(width)
    assert width % lanes == 0
    assert lanes <= 128
    assert whole == (lanes == width) == (width <= 128)
