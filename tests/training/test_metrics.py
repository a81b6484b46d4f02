"""Compare metrics with scikit-learn and with counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from stratarec.models.metrics import RankedGroups, Samples, estimates, evaluate_logits

SCORES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=50)
@given(SCORES)
def test_auc_counts_ties_as_half_pairs(rows: list[tuple[int, int, int]]) -> None:
    label, score, _ = (np.array(column) for column in zip(*rows, strict=True))
    positive, negative = score[label == 1], score[label == 0]
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    expected = np.mean(pairs) if pairs else math.nan
    np.testing.assert_allclose(Samples(label, score).auc, expected, rtol=1e-12)


@settings(deadline=None, max_examples=50)
@given(SCORES)
def test_grouped_auc_is_the_weighted_mean_of_groups_with_both_classes(
    rows: list[tuple[int, int, int]],
) -> None:
    label, score, group = (np.array(column) for column in zip(*rows, strict=True))
    areas, sizes = [], []
    for number in np.unique(group):
        inside = group == number
        if 0 < label[inside].sum() < inside.sum():
            areas.append(roc_auc_score(label[inside], score[inside]))
            sizes.append(inside.sum())
    expected = np.average(areas, weights=sizes) if areas else math.nan
    metrics = evaluate_logits(label.astype(float), score.astype(float), group)
    np.testing.assert_allclose(metrics["grouped_auc"], expected, rtol=1e-12)


def mean_over_orders(label: NDArray[np.int64], score: NDArray[np.int64], at: int) -> dict[str, float]:
    """Compute the metrics of one group as the mean over every order of samples that the scores
    allow.
    """
    ties = [np.flatnonzero(score == value) for value in sorted({*score.tolist()}, reverse=True)]
    results: dict[str, list[float]] = {
        f"NDCG@{at}": [],
        f"recall@{at}": [],
        f"hit rate@{at}": [],
        "MRR": [],
    }
    best = sum(1 / math.log2(place + 2) for place in range(min(at, label.sum())))
    for orders in itertools.product(*(itertools.permutations(tie.tolist()) for tie in ties)):
        places = [place for place, row in enumerate(itertools.chain(*orders)) if label[row]]
        results[f"NDCG@{at}"].append(sum(1 / math.log2(place + 2) for place in places if place < at) / best)
        results[f"recall@{at}"].append(sum(place < at for place in places) / len(places))
        results[f"hit rate@{at}"].append(float(places[0] < at))
        results["MRR"].append(1 / (places[0] + 1))
    return {name: float(np.mean(values)) for name, values in results.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=18),
    st.integers(1, 6),
)
def test_ranks_within_groups_are_means_over_all_orders_of_ties(
    rows: list[tuple[int, int, int]], at: int
) -> None:
    label, score, group = (np.array(column) for column in zip(*rows, strict=True))
    figures_at = RankedGroups(label.astype(float), score.astype(float), group).figures(at)
    for place, number in enumerate(np.unique(group)):
        inside = np.flatnonzero(group == number)[:6]
        if (group == number).sum() > len(inside):
            continue  # too many orders
        expected = mean_over_orders(label[inside], score[inside], at) if label[inside].any() else {}
        for name, (values, _) in figures_at.items():
            if name != "grouped AUC":
                np.testing.assert_allclose(
                    values[place], expected.get(name, math.nan), atol=1e-12, err_msg=name
                )


@pytest.mark.parametrize("at", [1, 3, 10, 500])
def test_ranks_within_groups_agree_with_scikit_learn(at: int) -> None:
    draws = np.random.default_rng(at)
    group = draws.integers(0, 80, 3000) ** 2
    score = draws.integers(0, 12, 3000).astype(np.float32) / 7
    label = (draws.random(3000) < 0.02 + 0.2 * (score > 1)).astype(np.float32)
    figures_at = RankedGroups(label, score, group).figures(at)
    for place, number in enumerate(np.unique(group)):
        truth, given = label[group == number], score[group == number]
        gain = (
            ndcg_score([truth], [given], k=at)
            if truth.any() and len(truth) > 1
            else truth.max() or math.nan
        )
        area = roc_auc_score(truth, given) if 0 < truth.sum() < len(truth) else math.nan
        np.testing.assert_allclose(figures_at[f"NDCG@{at}"][0][place], gain, atol=1e-9)
        np.testing.assert_allclose(figures_at["grouped AUC"][0][place], area, atol=1e-9)


def test_long_ties_keep_their_precision() -> None:
    """A hundred thousand samples have the same score, so ranks are uniform."""
    label = np.zeros(100_000)
    label[:1] = 1
    figures_at = RankedGroups(label, np.zeros(100_000), np.zeros(100_000, dtype=np.int64)).figures(10)
    harmonic = math.fsum(1 / place for place in range(1, 100_001))
    assert figures_at["MRR"][0][0] == pytest.approx(harmonic / 100_000, rel=1e-9)
    assert figures_at["hit rate@10"][0][0] == pytest.approx(1e-4, rel=1e-6)
    assert figures_at["recall@10"][0][0] == pytest.approx(1e-4, rel=1e-12)


def test_intervals_contain_the_truth_as_often_as_they_claim() -> None:
    hits, draws = 0, np.random.default_rng(1)
    for seed in range(60):
        values = draws.normal(size=150)
        values[::10] = np.nan
        weight = draws.random(150)
        one, other = (estimates({"x": (values, weight)}, seed=seed)["x"] for _ in range(2))
        assert one == other
        assert (one.groups, one.left_out) == (135, 15)
        hits += one.low < 0 < one.high
    assert 50 <= hits < 60
    alone = estimates({"x": (np.array([0.5, math.nan]), np.ones(2))})["x"]
    assert alone.value == 0.5
    assert math.isnan(alone.low)


def test_metrics_agree_with_scikit_learn() -> None:
    draws = np.random.default_rng(0)
    logit = draws.normal(size=5000).astype(np.float32)
    label = (draws.random(5000) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    metrics = evaluate_logits(label, logit)
    probability = 1 / (1 + np.exp(-logit.astype(np.float64)))
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, logit), abs=1e-12)
    assert metrics["log_loss"] == pytest.approx(log_loss(label, probability), rel=1e-9)
    base = label.mean(dtype=np.float64)
    assert metrics["normalized_entropy"] == pytest.approx(
        metrics["log_loss"] / log_loss(label, np.full(5000, base)), rel=1e-6
    )
    assert metrics["calibration"] == pytest.approx(probability.mean() / base, rel=1e-9)


def test_standard_errors_match_the_bootstrap() -> None:
    draws = np.random.default_rng(0)
    logit = draws.normal(size=1500)
    label = (draws.random(1500) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    weight = draws.integers(0, 3, 1500).astype(np.float64)
    metrics, values = evaluate_logits(label, logit, weight=weight), []
    for _ in range(400):
        rows = draws.integers(0, 1500, 1500)
        drawn = evaluate_logits(label[rows], logit[rows], weight=weight[rows])
        values.append([drawn["auc"], drawn["normalized_entropy"]])
    errors = np.std(values, axis=0)
    assert [metrics["auc_error"], metrics["entropy_error"]] == pytest.approx(errors, rel=0.12)


def test_standard_errors_with_users_match_the_bootstrap_of_users() -> None:
    draws, size = np.random.default_rng(0), 15
    user, taste = np.repeat(np.arange(100), size), np.repeat(draws.normal(0, 1.5, 100), size)
    logit = draws.normal(size=1500) + taste / 2
    label = (draws.random(1500) < 1 / (1 + np.exp(-logit - taste))).astype(np.float64)
    weight = draws.integers(0, 3, 1500).astype(np.float64)
    metrics, values = evaluate_logits(label, logit, 7 - 2 * user, weight), []
    for _ in range(400):
        rows = (draws.integers(0, 100, 100)[:, None] * size + np.arange(size)).ravel()
        drawn = evaluate_logits(label[rows], logit[rows], weight=weight[rows])
        values.append([drawn["auc"], drawn["normalized_entropy"]])
    errors = np.array([metrics["auc_error"], metrics["entropy_error"]])
    assert errors == pytest.approx(np.std(values, axis=0), rel=0.15)
    alone = evaluate_logits(label, logit, weight=weight)
    assert (errors > 1.05 * np.array([alone["auc_error"], alone["entropy_error"]])).all()
    assert math.isnan(evaluate_logits(label, logit, np.zeros(1500, np.int64), weight)["auc_error"])


@pytest.mark.parametrize("label", [[], [1.0, 1.0], [0.0]])
def test_undefined_metrics_are_nan(label: list[float]) -> None:
    metrics = evaluate_logits(np.array(label), np.zeros(len(label)))
    assert math.isnan(metrics["auc"])
    assert math.isnan(metrics["normalized_entropy"])
    assert metrics.samples == len(label)


def test_extreme_logits_stay_finite() -> None:
    metrics = evaluate_logits(np.array([0.0, 1.0]), np.array([1e4, -1e4]))
    assert math.isfinite(metrics["log_loss"])
    assert math.isfinite(metrics["calibration"])
