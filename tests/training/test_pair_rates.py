"""Test which pairs of columns get click rates, and that no training sample's rate contains its own
label.
"""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.kernels.trees.pair_rates import look_up_pairs
from stratarec.training.steps.pair_rates import Labels, choose_pairs, fit_pairs

N = 4000


def log(seed: int, effect: float) -> tuple[np.ndarray, Labels]:
    """Return codes of users and items, their lengths of a list, and two dense features, one of them
    with few values.

    Whether a user clicks an item depends on the pair, and on nothing else.
    """
    draws = np.random.default_rng(seed)
    user, item, length = draws.integers(1, 60, N), draws.integers(1, 12, N), draws.integers(0, 3, N)
    few, many = draws.integers(0, 5, N) / 4 - 0.5, draws.normal(size=N)
    clicks = (user * 7 + item * 3) % 5 == 0
    label = draws.random(N) < 0.3 + effect * np.where(clicks, 0.6, -0.2)
    rows = np.stack([user, item, length, few, many], axis=1).astype(np.float32)
    return rows, Labels(label.astype(np.float32), draws.gamma(2.0, 0.5, N).astype(np.float32), seed)


CATEGORICAL = (True, True, False)


@pytest.mark.parametrize("seed", range(5))
def test_the_pair_that_matters_is_chosen_and_random_labels_have_none(seed: int) -> None:
    rows, labels = log(seed, 1.0)
    pairs = choose_pairs(rows, labels, CATEGORICAL)
    assert pairs.pairs[0, :2].tolist() == [0, 1]
    assert not len(choose_pairs(*log(seed, 0.0), CATEGORICAL).pairs)


def test_a_dense_feature_with_few_values_can_be_part_of_a_pair() -> None:
    rows, labels = log(1, 1.0)
    rows = rows[:, [0, 2, 1, 4]]  # items as numbers
    pairs = choose_pairs(rows, labels, (True, False))
    assert pairs.pairs[0, :2].tolist() == [0, 2]
    np.testing.assert_array_equal(pairs.edges[:, 1], np.arange(2, 12))
    fitted, own = fit_pairs(rows, labels, pairs, 2)
    assert fitted.is_valid(4, 2)
    assert np.corrcoef(own[:, 0], labels.label)[0, 1] > 0.15


def test_columns_that_determine_each_other_are_no_pair() -> None:
    rows, labels = log(2, 1.0)
    both = rows[:, 0] * 16 + rows[:, 1]
    for columns in ([both, rows[:, 1], both], [rows[:, 1], both]):
        seen = np.stack(columns, axis=1)
        assert not len(choose_pairs(seen, labels, (True,) * len(columns)).pairs)


def test_constant_labels_and_too_few_columns_give_no_pair() -> None:
    rows, labels = log(3, 1.0)
    assert not len(choose_pairs(rows[:, :1], labels, (True,)).pairs)
    assert not len(choose_pairs(rows, Labels(np.ones(N), labels.weight, 0), CATEGORICAL).pairs)


def test_rates_of_training_samples_are_those_of_other_parts() -> None:
    rows, labels = log(4, 1.0)
    fitted, own = fit_pairs(rows, labels, choose_pairs(rows, labels, CATEGORICAL), len(CATEGORICAL))
    first, second, mean = fitted.pairs[0]
    assert mean == pytest.approx(labels.mean)
    new = look_up_pairs(rows, fitted, fitted.keys(), len(CATEGORICAL))
    for row in range(0, N, 97):
        same = (rows[:, int(first)] == rows[row, int(first)]) & (
            rows[:, int(second)] == rows[row, int(second)]
        )
        for column, chosen in ((own, same & (labels.part != labels.part[row])), (new, same)):
            clicks, weight = (labels.label * labels.weight)[chosen].sum(), labels.weight[chosen].sum()
            assert column[row, 0] == pytest.approx((clicks + 3 * labels.mean) / (weight + 3), rel=1e-5)


def test_a_log_of_many_columns_and_samples_is_chosen_from_a_sample() -> None:
    rows, labels = log(5, 1.0)
    draws = np.random.default_rng(0)
    rows = np.repeat(np.concatenate([rows[:, :2], draws.integers(0, 3, (N, 40))], axis=1), 15, axis=0)
    many = Labels(np.repeat(labels.label, 15), np.ones(15 * N), 1)
    pairs = choose_pairs(rows.astype(np.float32), many, (True,) * 42)
    assert pairs.pairs[0, :2].tolist() == [0, 1]


def test_a_sample_without_weight_chooses_no_pair() -> None:
    """Few rows of a large log may have a weight, and the sample from which pairs are chosen none of
    them.
    """
    rows, labels = log(6, 1.0)
    rows, label = np.repeat(rows, 15, axis=0), np.repeat(labels.label, 15)
    weight = np.zeros(len(rows))
    chosen = np.random.default_rng(0).choice(len(rows), 50_000, replace=False)
    weight[np.setdiff1d(np.arange(len(rows)), chosen)[:40]] = 1
    assert not len(choose_pairs(rows, Labels(label, weight, 0), CATEGORICAL).pairs)
