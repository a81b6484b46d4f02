"""Compare rows of bytes with plain NumPy."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from interpreted import sized

from stratarec.kernels import bit_rows
from stratarec.kernels.bit_rows import reference
from stratarec.kernels.runtime.threads import limit_threads


@pytest.mark.interpreted
@pytest.mark.parametrize("width", sized([1, 37, 260], [1, 37]))
@pytest.mark.parametrize("count", sized([0, 1, 5000, 20_000], [0, 1, 70]))
def test_gather_scatter_and_bits_match_the_reference(width: int, count: int) -> None:
    generator = np.random.default_rng(0)
    rows = generator.permutation(20_001)[:count]
    array = generator.integers(0, 256, (20_001, width), np.uint8)
    bits = generator.integers(0, 256, 2501, np.uint8)
    new = generator.integers(0, 256, (count, width), np.uint8)
    expected_array, expected_bits = array.copy(), bits.copy()

    bit_set = bit_rows.test_bits(bits, rows)
    np.testing.assert_array_equal(bit_set, reference.test_bits(bits, rows))
    actual, expected = np.full((count, width), 7, np.uint8), np.full((count, width), 7, np.uint8)
    bit_rows.gather(array, rows, bit_set, actual)
    reference.gather(array, rows, bit_set, expected)
    np.testing.assert_array_equal(actual, expected)

    bit_rows.scatter(array, rows, new)
    reference.scatter(expected_array, rows, new)
    np.testing.assert_array_equal(array, expected_array)
    bit_rows.set_bits(bits, rows)
    reference.set_bits(expected_bits, rows)
    np.testing.assert_array_equal(bits, expected_bits)


@pytest.mark.interpreted
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("width", "count"), sized([(70, 9000), (3, 5), (9, 0)], [(3, 5), (9, 0)]))
def test_an_exchange_matches_its_single_steps(width: int, count: int, idle: bool) -> None:
    generator = np.random.default_rng(count)
    total = 3 * count + 8
    rows = generator.permutation(total)
    outgoing, incoming = rows[:count], rows[count : 2 * count + 3]
    results = []
    for one in (bit_rows, reference):
        draws = np.random.default_rng(1)
        array = draws.integers(0, 256, (total, width), np.uint8)
        bits = tuple(draws.integers(0, 256, total // 8 + 1, np.uint8) for _ in range(2))
        records = draws.integers(0, 256, (count, width), np.uint8)
        into = np.full((count + 3, width), 7, np.uint8)
        limit_threads(2, idle_cores=idle)
        try:
            present = one.exchange(array, bits, outgoing, records, incoming, into)
        finally:
            limit_threads(numba.config.NUMBA_NUM_THREADS)
        results.append([array, *bits, into, present])
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, expected)
