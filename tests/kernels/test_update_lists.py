"""Lookups are brought together by row, however many there are and however large the table is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreted import sized
from numba import njit

from stratarec.kernels.update import lists, workspace

U = np.uint64
MANY = sized(5000, 300)


@njit
def sort(ids: Any, lookups: Any, limit: Any, own: Any) -> Any:
    return lists.sort_by_row(ids, U(lookups), limit, own)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("lookups", "rows"), [(1, 1), (2, 9), (24, 10**6), (25, 2), (64, 10**6), (MANY, 100), (MANY, 10**9)]
)
def test_lookups_come_by_row_and_then_by_position(lookups: int, rows: int, kind: Any) -> None:
    draws = np.random.default_rng(lookups)
    arrays = workspace.Arrays()
    own = arrays.fit(2, lookups, 4, np.dtype(kind))
    for power in (1.0, 5.0):
        ids = (rows * draws.random(lookups) ** power).astype(kind)
        distinct = sort(ids, lookups, rows, type(own)(*(part[1] for part in own)))
        order = np.argsort(ids, kind="stable")
        np.testing.assert_array_equal(own.order[1, :lookups], order)
        expected, counts = np.unique(ids, return_counts=True)
        np.testing.assert_array_equal(own.row_of[1, :distinct], expected)
        np.testing.assert_array_equal(own.end_of[1, :distinct], counts.cumsum())
