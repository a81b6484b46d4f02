"""Bits of the rows that a batch looks up, and ids outside their tables."""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.kernels.bags import BagBatch, GroupLayout, first_outside, mark_rows


def layout(rows: list[int]) -> GroupLayout:
    """A pooled feature a table, tables one after another."""
    count, zeros = len(rows), np.zeros(len(rows), dtype=np.int64)
    return GroupLayout(
        width=4, base=np.cumsum([0, *rows[:-1]]), rows=np.array(rows), column=zeros, mean=zeros, sequence=zeros,
        table_start=np.arange(count + 1), table_features=np.arange(count),
    )  # fmt: skip


@pytest.mark.parametrize("singles", [False, True])
def test_rows_of_a_batch_are_marked(singles: bool) -> None:
    draws, rows, size = np.random.default_rng(3), [13, 1, 70], 25
    group, bits = layout(rows), np.zeros(11, dtype=np.uint8)

    lengths = np.ones((3, size), dtype=np.int64) if singles else draws.integers(0, 3, (3, size))
    values = np.concatenate([draws.integers(0, rows[table], lengths[table].sum()) for table in range(3)])
    offsets = None if singles else np.cumsum([0, *lengths.reshape(-1)])
    mark_rows(group, BagBatch(values=values, offsets=offsets, weights=None, batch=size, key=np.arange(3)), bits)
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert set(found) == set(values + np.repeat(group.base, lengths.sum(1)))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("singles", [False, True])
def test_the_first_id_outside_its_table_is_found(singles: bool, kind: type) -> None:
    rows, size = [13, 1, 70], 25
    group, values = layout(rows), np.repeat(np.array(rows) - 1, size).astype(kind)
    offsets = None if singles else np.arange(len(values) + 1)
    bags = BagBatch(values=values, offsets=offsets, weights=None, batch=size, key=np.arange(3))
    assert first_outside(group, bags) == -1
    for place, wrong in ((74, 70), (30, 1), (3, -1)):
        values[place] = wrong
        assert first_outside(group, bags) == place
    # Bags behind the filled ones are not looked up; in a jagged batch they are empty.
    few = BagBatch(
        values=values, offsets=offsets, weights=None, batch=size, key=np.arange(3), filled=np.array([3, 5, 24])
    )
    assert first_outside(group, few) == (-1 if singles else 3)
