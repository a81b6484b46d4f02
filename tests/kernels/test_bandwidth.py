"""Test that the kernels that measure memory bandwidth read the stated memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from errors import refuses
from stratarec.errors import ConfigError
from stratarec.kernels.bandwidth import (
    read_blocks,
    reference_sum_parts,
    reference_sum_rows,
    sum_parts,
    sum_rows,
)


def values(count: int) -> np.ndarray:
    # With small integers float32 sums are exact in any order.
    return np.random.default_rng(0).integers(-8, 8, count).astype(np.float32)


def test_sums_of_parts_match_the_reference() -> None:
    flat = values(16 * 1000)
    result = sum_parts(flat)
    np.testing.assert_array_equal(result, reference_sum_parts(flat, len(result)))


@pytest.mark.parametrize("width", [16, 33])
def test_sums_of_rows_match_the_reference(width: int) -> None:
    flat = values(500 * width)
    rows = np.random.default_rng(1).integers(0, 500, 16 * 64, dtype=np.uint64)
    result = sum_rows(flat, rows, width=width)
    np.testing.assert_array_equal(result, reference_sum_rows(flat, rows, width, len(result)))


def test_a_row_out_of_range_is_refused() -> None:
    with refuses(ConfigError, "row 4 width 3 12"):
        sum_rows(values(12), np.array([4], dtype=np.uint64), width=3)


def test_blocks_are_read_until_the_first_incomplete_one(tmp_path: Path) -> None:
    content = os.urandom(10_000)
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    buffer = np.zeros(4096, dtype=np.uint8)
    assert read_blocks(descriptor, buffer, np.array([0, 4096])) == 2
    assert buffer.tobytes() == content[4096:8192]
    assert read_blocks(descriptor, buffer, np.array([0, 8192, 0])) == 1
    os.close(descriptor)
    assert read_blocks(descriptor, buffer, np.array([0])) == 0
