"""Calibration error and reliability against what they must be, by counting and by expectation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stratarec.models.metrics import evaluate_logits
from stratarec.models.reliability import Reliability


def drawn(samples: int, shift: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and logits that are `shift` above those of the labels' probabilities."""
    draws = np.random.default_rng(seed)
    logit = draws.normal(-1.5, 1.0, samples)
    label = (draws.random(samples) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return label, (logit + shift).astype(np.float32)


def sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit.astype(np.float64)))


@pytest.mark.parametrize("samples", [1_000, 20_000])
def test_a_calibrated_model_has_the_error_that_chance_gives_it(samples: int) -> None:
    found = [evaluate_logits(*drawn(samples, seed=seed)) for seed in range(30)]
    errors, noises = (np.array([each[name] for each in found]) for name in ("calibration_error", "calibration_noise"))
    assert errors.mean() == pytest.approx(noises.mean(), rel=0.08)
    # Falls as the square root of samples.
    assert noises.mean() * math.sqrt(samples) == pytest.approx(1.25, rel=0.15)


def test_intervals_hold_the_rate_of_a_calibrated_model_as_often_as_they_say() -> None:
    bins = [each for seed in range(40) for each in Reliability().add(*drawn(5_000, seed=seed)).bins()]
    assert np.mean([each.low <= each.predicted <= each.high for each in bins]) == pytest.approx(0.95, abs=0.02)


def test_a_weight_is_so_many_samples() -> None:
    label, logit = drawn(3_000)
    weight = np.random.default_rng(1).integers(0, 4, len(label))
    found = evaluate_logits(label, logit, weight=weight.astype(np.float32))
    repeated = evaluate_logits(*(np.repeat(column, weight) for column in (label, logit)))
    assert found["calibration_error"] == pytest.approx(repeated["calibration_error"], rel=0.2)
    # Fewer samples that count more are less sure.
    assert found["calibration_noise"] > 1.1 * repeated["calibration_noise"]
    (whole,), (more,) = (
        Reliability().add(*each).bins(1)
        for each in ((label, logit, weight), [np.repeat(c, weight) for c in (label, logit)])
    )
    assert (whole.observed, whole.predicted) == pytest.approx((more.observed, more.predicted), rel=1e-9)
    assert whole.samples == (weight > 0).sum()
    assert whole.high - whole.low > more.high - more.low


def test_sums_of_parts_are_those_of_the_whole() -> None:
    label, logit = drawn(700_000)
    parts = np.array_split(np.arange(len(label)), 7)
    streamed = Reliability()
    for part in parts:
        streamed.add(label[part], logit[part])
    ranks = sum(
        (Reliability().add(label[part], logit[part]) for part in parts[1:]),
        Reliability().add(*(c[parts[0]] for c in (label, logit))),
    )
    whole = Reliability().add(label, logit)
    for found in (streamed, ranks):
        assert np.array_equal(found.sums[0], whole.sums[0])
        np.testing.assert_allclose(found.sums, whole.sums, rtol=1e-12)
        assert found.error() == pytest.approx(whole.error(), rel=1e-12)
    assert whole.sums.nbytes < 1 << 20
