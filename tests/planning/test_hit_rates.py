"""Compare predicted distinct rows and misses with exact sums and simulated caches."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from planning.popular import zipf

from stratarec.planning.popularity import CacheDemand, Popularity, expected_misses


def misses(
    popularity: Popularity, *, lookups: float, slots: float, policy: str = "lru", lookahead: int = 1
) -> float:
    demand = CacheDemand(lookups=lookups, slots=slots, policy=policy, lookahead=lookahead)  # type: ignore[arg-type]
    return float(expected_misses(popularity, demand).sum())


def exact_distinct(counts: NDArray[np.int64], lookups: float) -> float:
    share = counts / counts.sum()
    return float((1 - (1 - np.minimum(share, 1 - 1e-15)) ** lookups).sum())


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=200).filter(any),
    lookups=st.floats(0, 1e5, allow_subnormal=False),
)
def test_bins_give_the_distinct_rows_of_the_exact_sum(counts: list[int], lookups: float) -> None:
    array = np.array(counts, dtype=np.int64)
    popularity = Popularity.from_counts(array)
    assert popularity.rows.sum() == len(counts)
    assert popularity.used_rows == np.count_nonzero(array)
    assert (popularity.rows * popularity.share).sum() == pytest.approx(1)
    assert popularity.distinct(lookups) == pytest.approx(exact_distinct(array, lookups), rel=5e-3, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 128, 129, 20_000])
def test_a_zipf_table_in_bins_matches_the_exact_one(rows: int) -> None:
    weight = np.arange(1, rows + 1) ** -1.1
    result = zipf(rows, 1.1)
    assert result.rows.sum() == pytest.approx(rows)
    for lookups in (1.0, 100.0, 10_000.0):
        share = np.minimum(weight / weight.sum(), 1 - 1e-15)
        exact = float((1 - (1 - share) ** lookups).sum())
        assert result.distinct(lookups) == pytest.approx(exact, rel=2e-3)


ROWS, LOOKUPS, BATCHES, WARM = 20_000, 400, 600, 300


def batches(exponent: float) -> list[NDArray[np.int64]]:
    weight = np.arange(1, ROWS + 1) ** -exponent
    draws = np.random.default_rng(7).choice(ROWS, size=(BATCHES, LOOKUPS), p=weight / weight.sum())
    return [np.unique(batch) for batch in draws]


def simulate_lru(trace: list[NDArray[np.int64]], sets: int, ways: int, first: int = 0) -> float:
    """Return the misses per batch of rows from `first` on.

    All rows of a batch are touched, and then each set evicts its oldest rows.
    """
    cache: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(sets)]
    misses = 0
    for number, batch in enumerate(trace):
        for row in batch.tolist():
            lines = cache[hash((row, 1)) % sets]
            misses += number >= WARM and row >= first and row not in lines
            lines[row] = None
            lines.move_to_end(row)
        for lines in cache:
            while len(lines) > ways:
                lines.popitem(last=False)
    return misses / (BATCHES - WARM)


def simulate_rank(trace: list[NDArray[np.int64]], slots: int, lookahead: int) -> float:
    """Return the misses per batch. The largest id that no batch in flight uses is evicted."""
    stamps: dict[int, int] = {}
    misses = 0
    for number, batch in enumerate(trace):
        rows = batch.tolist()
        misses += number >= WARM and sum(row not in stamps for row in rows)
        stamps.update(dict.fromkeys(rows, number))
        for row in sorted(
            (row for row, stamp in stamps.items() if stamp < number - lookahead), reverse=True
        ):
            if len(stamps) <= slots:
                break
            del stamps[row]
    return misses / (BATCHES - WARM)


@pytest.mark.parametrize("exponent", [0.8, 1.1])
@pytest.mark.parametrize("slots", [1_000, 3_000, 8_000])
def test_ches_approximation_is_within_three_percent_of_a_simulated_lru(exponent: float, slots: int) -> None:
    trace = batches(exponent)
    popularity = zipf(ROWS, exponent)
    predicted = misses(popularity, lookups=LOOKUPS, slots=slots, policy="lru")
    assert predicted == pytest.approx(simulate_lru(trace, 1, slots), rel=0.03)


@pytest.mark.parametrize("first", [500, 4_000, 15_000])
def test_misses_of_the_last_rows_are_within_four_percent_of_a_simulated_lru(first: int) -> None:
    demand = CacheDemand(lookups=LOOKUPS, slots=1_000, policy="lru", lookahead=1)
    popularity = zipf(ROWS, 0.8)
    predicted = expected_misses(popularity, demand) @ popularity.from_row(first)
    assert predicted == pytest.approx(simulate_lru(batches(0.8), 1, 1_000, first), rel=0.04)


def test_sets_of_32_ways_miss_a_few_percent_more_than_predicted() -> None:
    popularity = zipf(ROWS, 1.1)
    predicted = misses(popularity, lookups=LOOKUPS, slots=93 * 32, policy="lru")
    result = simulate_lru(batches(1.1), 93, 32)
    assert 0.98 < result / predicted < 1.05


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("slots", [2_000, 6_000])
def test_rank_is_within_three_percent_of_its_simulation(slots: int, lookahead: int) -> None:
    popularity = zipf(ROWS, 1.0)
    predicted = misses(popularity, lookups=LOOKUPS, slots=slots, policy="rank", lookahead=lookahead)
    assert predicted == pytest.approx(simulate_rank(batches(1.0), slots, lookahead), rel=0.03)


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(0, 3) | st.integers(0, 10**5), min_size=1, max_size=300))
def test_rows_without_lookups_may_be_left_out(counts: list[int]) -> None:
    dense = np.array(counts, dtype=np.int64)
    ids = np.flatnonzero(dense).astype(np.int32)
    full, sparse = Popularity.from_counts(dense), Popularity.from_counts(dense[ids], ids, len(dense))
    np.testing.assert_array_equal(sparse.rows, full.rows)
    np.testing.assert_array_equal(sparse.share, full.share)
    assert sparse.by_id == full.by_id


@given(
    counts=st.lists(st.integers(0, 10**5), min_size=2, max_size=300).filter(any),
    lookups=st.floats(0.5, 1e4),
    policy=st.sampled_from(["lru", "rank"]),
    lookahead=st.integers(0, 4),
)
def test_misses_fall_with_slots_from_at_most_all_to_none(
    counts: list[int], lookups: float, policy: str, lookahead: int
) -> None:
    popularity = Popularity.from_counts(np.array(counts, dtype=np.int64))
    least = min(popularity.distinct(lookups * (lookahead + 1)), popularity.used_rows)
    results = [
        misses(popularity, lookups=lookups, slots=slots, policy=policy, lookahead=lookahead)
        for slots in np.linspace(least, popularity.used_rows, 9)
    ]
    assert results[0] <= popularity.distinct(lookups) + 1e-6
    assert results[-1] == 0
    assert all(later <= sooner + 1e-6 for sooner, later in pairwise(results))
