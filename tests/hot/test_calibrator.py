"""Test that the selected hot rows fit the budget, have the predicted hit share, and are never worse
than the most looked-up rows.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hot.popular import ROW_BYTES, prepared

from stratarec.data.dataset.dataset import Dataset
from stratarec.hot.calibrator import HotProfile, calibrate, estimate, warn_little_skew
from stratarec.hot.hot_loader import are_hot, classify
from stratarec.hot.selection import RowRange, choose_by_inputs, choose_by_lookups, parts_of, used_bytes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a data set with groups and windows."""
    return prepared(tmp_path_factory.mktemp("hot"), "auto")


def make_part(counts: list[int], tail: int = 1, row_bytes: int = 1) -> RowRange:
    """Return a table with the given lookup counts."""
    return RowRange(table="t", rows=len(counts), row_bytes=row_bytes, tail=tail, counts=np.array(counts))


def bytes_of(dataset: Dataset) -> dict[str, int]:
    return dict.fromkeys(dataset.vocabularies, ROW_BYTES)


def rows_of(dataset: Dataset, profile: HotProfile) -> tuple[list[RowRange], np.ndarray]:
    """Return the parts and the number of hot rows in each."""
    parts = parts_of(dataset, bytes_of(dataset))
    return parts, profile.hot(parts)


def total(dataset: Dataset) -> int:
    return sum(dataset.table_rows().values()) * ROW_BYTES


def test_rows_chosen_by_lookups_have_the_most_lookups_per_byte() -> None:
    parts = [make_part([9, 5, 1]), make_part([16, 8, 4, 2], row_bytes=2), make_part([2, 4], tail=2)]
    assert choose_by_lookups(parts, 1).tolist() == [1, 0, 0]
    assert choose_by_lookups(parts, 3).tolist() == [1, 1, 0]
    assert choose_by_lookups(parts, 4).tolist() == [2, 1, 0]
    assert choose_by_lookups(parts, 8).tolist() == [2, 2, 2]
    assert choose_by_lookups(parts, 13).tolist() == [3, 4, 2]
    # Hot rows are a prefix of the table. In a table with a base a popular row can follow a rare
    # one, which is then hot too.
    assert choose_by_lookups([make_part([9, 0, 7, 0]), make_part([2])], 3).tolist() == [3, 0]


def test_thresholds_are_close_to_the_optimum() -> None:
    draws = np.random.default_rng(5)
    parts = [make_part([0] * 6) for _ in range(3)]
    worst = 1.0
    for _ in range(30):
        needs = np.minimum(draws.geometric(0.4, (400, 3)) - 1, 6).astype(np.int32)
        budget = int(draws.integers(3, 15))
        hot = choose_by_inputs(parts, budget, needs)
        assert used_bytes(parts, hot) <= budget
        best = max(
            are_hot(needs, np.array(each)).sum()
            for each in product(range(7), repeat=3)
            if sum(each) <= budget
        )
        worst = min(worst, are_hot(needs, hot).sum() / best)
    assert worst >= 0.9


def test_inputs_without_values_of_one_table_do_not_limit_the_others(dataset: Dataset) -> None:
    budget = total(dataset) // 5
    profile = calibrate(dataset, bytes_of(dataset), budget)
    parts = parts_of(dataset, bytes_of(dataset))
    hot = profile.hot(parts)
    assert used_bytes(parts, hot) <= budget
    assert profile.chosen.inputs.share >= profile.chosen.counted.share
    assert profile.chosen.accesses > 2 * profile.chosen.row_share
    assert not warn_little_skew(profile)
    samples = dataset.samples("train")
    exact = sum(map(sum, classify(dataset, *rows_of(dataset, profile), "train").values())) / samples
    assert profile.chosen.inputs.low <= exact <= profile.chosen.inputs.high


def test_the_interval_contains_the_true_share_in_at_least_95_of_100_cases() -> None:
    draws = np.random.default_rng(2)
    inside = 0
    for _ in range(100):
        shares = draws.binomial(200, 0.3, 16) / 200
        interval = estimate(shares)
        inside += interval.low <= 0.3 <= interval.high
    assert inside >= 95
    assert estimate(np.array([0.5])).low == 0
