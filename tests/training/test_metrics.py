"""Metrics against scikit-learn and against counting by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from stratarec.models.metrics import auc, evaluate_logits, grouped_auc

SCORES = st.lists(st.tuples(st.integers(0, 1), st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=60)


@settings(deadline=None, max_examples=50)
@given(SCORES)
def test_auc_counts_pairs_with_ties_as_half(rows: list[tuple[int, int, int]]) -> None:
    label, score, _ = (np.array(column) for column in zip(*rows, strict=True))
    positive, negative = score[label == 1], score[label == 0]
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    expected = np.mean(pairs) if pairs else math.nan
    np.testing.assert_allclose(auc(label.astype(float), score.astype(float)), expected, rtol=1e-12)


@settings(deadline=None, max_examples=50)
@given(SCORES)
def test_grouped_auc_is_the_weighted_mean_of_groups_with_both_classes(rows: list[tuple[int, int, int]]) -> None:
    label, score, group = (np.array(column) for column in zip(*rows, strict=True))
    areas, sizes = [], []
    for number in np.unique(group):
        inside = group == number
        if 0 < label[inside].sum() < inside.sum():
            areas.append(roc_auc_score(label[inside], score[inside]))
            sizes.append(inside.sum())
    expected = np.average(areas, weights=sizes) if areas else math.nan
    np.testing.assert_allclose(grouped_auc(label.astype(float), score.astype(float), group), expected, rtol=1e-12)


def test_metrics_agree_with_scikit_learn() -> None:
    draws = np.random.default_rng(0)
    logit = draws.normal(size=5000).astype(np.float32)
    label = (draws.random(5000) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    found = evaluate_logits(label, logit)
    probability = 1 / (1 + np.exp(-logit.astype(np.float64)))
    assert found["auc"] == pytest.approx(roc_auc_score(label, logit), abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(label, probability), rel=1e-9)
    base = label.mean(dtype=np.float64)
    assert found["normalized_entropy"] == pytest.approx(
        found["log_loss"] / log_loss(label, np.full(5000, base)), rel=1e-6
    )
    assert found["calibration"] == pytest.approx(probability.mean() / base, rel=1e-9)


@pytest.mark.parametrize("label", [[], [1.0, 1.0], [0.0]])
def test_undefined_metrics_are_nan(label: list[float]) -> None:
    found = evaluate_logits(np.array(label), np.zeros(len(label)))
    assert math.isnan(found["auc"])
    assert math.isnan(found["normalized_entropy"])
    assert found.samples == len(label)


def test_extreme_logits_stay_finite() -> None:
    found = evaluate_logits(np.array([0.0, 1.0]), np.array([1e4, -1e4]))
    assert math.isfinite(found["log_loss"])
    assert math.isfinite(found["calibration"])
