"""Compare the kernels that number, check and sort ids with their references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import sized
from numba import njit

from stratarec.kernels.bags import BagBatch, GroupLayout, first_outside, mark_rows
from stratarec.kernels.unique import number_distinct, reference_number_distinct
from stratarec.kernels.update import lists, workspace

DRAWS = np.random.default_rng(3)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [5] * 9,
        list(range(40, 0, -1)),
        (300 * DRAWS.random(500) ** 3).astype(int).tolist(),
        # Many ids share one slot of the hash table; then the ends of the range.
        [1 << 20, 0, 3 << 20, 1 << 20, 2**31 - 1, 0],
    ],
)
def test_numbers_match_the_reference(ids: list[int], dtype: torch.dtype) -> None:
    given = torch.tensor(ids, dtype=dtype)
    distinct, places = number_distinct(given)
    assert (distinct.tolist(), places.tolist()) == reference_number_distinct(given)


def test_large_ids_are_distinguished() -> None:
    given = torch.from_numpy(DRAWS.integers(0, 2**40, 3000).repeat(2))
    distinct, places = number_distinct(given)
    assert (distinct.tolist(), places.tolist()) == reference_number_distinct(given)


def layout(rows: list[int]) -> GroupLayout:
    """Return a layout with one pooled feature per table."""
    count, zeros = len(rows), np.zeros(len(rows), dtype=np.int64)
    return GroupLayout(
        width=4,
        base=np.cumsum([0, *rows[:-1]]),
        rows=np.array(rows),
        column=zeros,
        mean=zeros,
        sequence=zeros,
        table_start=np.arange(count + 1),
        table_features=np.arange(count),
    )


@pytest.mark.parametrize("singles", [False, True])
def test_rows_of_a_batch_are_marked(singles: bool) -> None:
    draws, rows, size = np.random.default_rng(3), [13, 1, 70], 25
    group, bits = layout(rows), np.zeros(11, dtype=np.uint8)

    lengths = np.ones((3, size), dtype=np.int64) if singles else draws.integers(0, 3, (3, size))
    values = np.concatenate([draws.integers(0, rows[table], lengths[table].sum()) for table in range(3)])
    offsets = None if singles else np.cumsum([0, *lengths.reshape(-1)])
    mark_rows(
        group, BagBatch(values=values, offsets=offsets, weights=None, batch=size, key=np.arange(3)), bits
    )
    actual = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert set(actual) == set(values + np.repeat(group.base, lengths.sum(1)))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("singles", [False, True])
def test_the_first_id_out_of_range_is_reported(singles: bool, kind: type) -> None:
    rows, size = [13, 1, 70], 25
    group, values = layout(rows), np.repeat(np.array(rows) - 1, size).astype(kind)
    offsets = None if singles else np.arange(len(values) + 1)
    bags = BagBatch(values=values, offsets=offsets, weights=None, batch=size, key=np.arange(3))
    assert first_outside(group, bags) == -1
    for place, wrong in ((74, 70), (30, 1), (3, -1)):
        values[place] = wrong
        assert first_outside(group, bags) == place
    # Bags behind the filled ones are not looked up. In a jagged batch they are empty.
    few = BagBatch(
        values=values,
        offsets=offsets,
        weights=None,
        batch=size,
        key=np.arange(3),
        filled=np.array([3, 5, 24]),
    )
    assert first_outside(group, few) == (-1 if singles else 3)


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
def test_lookups_are_sorted_by_row_and_then_by_position(lookups: int, rows: int, kind: Any) -> None:
    draws = np.random.default_rng(lookups)
    arrays = workspace.ScratchArrays()
    own = arrays.fit(2, lookups, 4, np.dtype(kind))
    for power in (1.0, 5.0):
        ids = (rows * draws.random(lookups) ** power).astype(kind)
        distinct = sort(ids, lookups, rows, type(own)(*(part[1] for part in own)))
        order = np.argsort(ids, kind="stable")
        np.testing.assert_array_equal(own.order[1, :lookups], order)
        expected, counts = np.unique(ids, return_counts=True)
        np.testing.assert_array_equal(own.row_of[1, :distinct], expected)
        np.testing.assert_array_equal(own.end_of[1, :distinct], counts.cumsum())
