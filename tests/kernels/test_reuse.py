"""Reuse distances against replayed caches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.kernels.reuse import ReuseTrace, reference_lru_hits


@settings(deadline=None, max_examples=40)
@given(batches=st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=40), ahead=st.integers(1, 3))
def test_where_every_row_is_followed_hits_are_those_of_caches(batches: list[list[int]], ahead: int) -> None:
    trace = ReuseTrace(31, 31, np.arange(1, 32), ahead)
    for batch in batches:
        trace.add(np.array(batch, dtype=np.int64))
    assert trace.exact
    assert trace.lru_hits.tolist() == [reference_lru_hits(batches, size, ahead) for size in range(1, 32)]
    assert trace.near.tolist() == [reference_lru_hits(batches, size, 0) for size in range(1, 32)]
    used = [[number for number, batch in enumerate(batches) if row in batch] for row in range(31)]
    assert trace.uses.tolist() == [len(places) for places in used]
    assert trace.lookups.tolist() == [sum(batch.count(row) for batch in batches) for row in range(31)]
    assert trace.soon.tolist() == [int((np.diff(places) <= ahead).sum()) for places in used]
    spans = [sum(np.minimum(np.diff(places), ahead)) + ahead * bool(places) for places in used]
    np.testing.assert_allclose(trace.residency * max(len(batches), 1), spans)


@pytest.mark.parametrize("exponent", [0.7, 1.1])
def test_few_followed_rows_represent_all(exponent: float) -> None:
    """A quarter of a table's rows: within 1 % of the replayed cache."""
    rows = 100_000
    followed = rows // 4
    weight = np.arange(1, rows + 1) ** -exponent
    draws = np.random.default_rng(3).choice(rows, size=(200, 500), p=weight / weight.sum())
    sizes = np.array([500, 3000, 20_000])
    trace = ReuseTrace(rows, followed, sizes, 1)
    for batch in draws:
        trace.add(batch)
    assert not trace.exact
    found = trace.lru_hits / (trace.weights @ trace.uses)
    total = sum(len(set(batch)) for batch in draws.tolist())
    expected = np.array([reference_lru_hits(draws.tolist(), size, 1) for size in sizes]) / total
    np.testing.assert_allclose(found, expected, atol=0.01)
    assert trace.weights @ trace.lookups == pytest.approx(draws.size, rel=0.02)


def test_ids_that_the_table_lacks_count_nothing() -> None:
    trace = ReuseTrace(5, 5, np.array([1, 5]), 1)
    trace.add(np.array([-1, 5, 4, 1 << 40]))
    trace.add(np.array([4, -1]))
    assert trace.lookups.tolist() == [0, 0, 0, 0, 2]
    assert trace.near.tolist() == [1, 1]
