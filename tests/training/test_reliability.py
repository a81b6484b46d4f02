"""Compare bins of predictions and the calibration error with expected values and with sums over
samples.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from stratarec.models.metrics import MOST_BINS, Reliability, evaluate_labels, evaluate_logits, figures

Floats = NDArray[np.float32]


def draw_logits(samples: int, shift: float = 0.0, seed: int = 0) -> tuple[Floats, Floats]:
    """Draw labels, and logits that exceed those of the labels' probabilities by `shift`."""
    draws = np.random.default_rng(seed)
    logit = draws.normal(-1.5, 1.0, samples)
    label = (draws.random(samples) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return label, (logit + shift).astype(np.float32)


def sigmoid(logit: Floats) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logit.astype(np.float64)))


def test_a_calibrated_model_has_the_expected_error_and_its_intervals_contain_the_rate() -> None:
    metrics = [evaluate_logits(*draw_logits(5_000, seed=seed)) for seed in range(100)]
    error, noise = (
        np.mean([each[f"calibration_{name}"] for each in metrics]) for name in ("error", "noise")
    )
    assert error == pytest.approx(noise, rel=0.06)
    assert noise * math.sqrt(5_000) == pytest.approx(1.25, rel=0.15)
    bins = [each for one in metrics for each in one.reliability]
    assert np.mean([each.low <= each.predicted <= each.high for each in bins]) == pytest.approx(
        0.95, abs=0.02
    )


@pytest.mark.parametrize("shift", [0.3, -0.5])
def test_a_shifted_model_has_the_shift_as_its_error(shift: float) -> None:
    label, logit = draw_logits(300_000, shift)
    metrics = evaluate_logits(label, logit)
    expected = np.abs(sigmoid(logit) - sigmoid(logit - np.float32(shift))).mean()
    assert metrics["calibration_error"] == pytest.approx(expected, rel=0.03)
    assert metrics["calibration_noise"] < 0.1 * expected
    assert all(
        (each.predicted > each.high) if shift > 0 else (each.predicted < each.low)
        for each in metrics.reliability
    )


def test_bins_have_equal_mass_and_the_means_of_their_samples() -> None:
    label, logit = draw_logits(50_000)
    bins = Reliability().add(label, logit).bins()
    assert len(bins) == MOST_BINS
    ends = np.cumsum([each.samples for each in bins])
    assert ends[-1] == len(label)
    for each, part in zip(bins, np.split(np.argsort(logit, kind="stable"), ends[:-1]), strict=True):
        assert each.share == pytest.approx(1 / MOST_BINS, rel=0.1)
        assert each.observed == pytest.approx(label[part].mean(dtype=float), rel=1e-9)
        assert each.predicted == pytest.approx(sigmoid(logit[part]).mean(), rel=1e-9)


@pytest.mark.parametrize(("samples", "bins"), [(0, 0), (1, 1), (99, 1), (100, 2), (5_000, MOST_BINS)])
def test_a_bin_has_at_least_50_samples(samples: int, bins: int) -> None:
    metrics = evaluate_logits(*draw_logits(samples))
    assert len(metrics.reliability) == bins
    assert (
        math.isnan(metrics["calibration_error"])
        == math.isnan(metrics["calibration_noise"])
        == (samples == 0)
    )


@pytest.mark.parametrize("logit", [0.0, -1e30, 1e30])
def test_samples_with_one_logit_are_one_bin(logit: float) -> None:
    (only,) = Reliability().add(np.ones(5_000, np.float32), np.full(5_000, logit, np.float32)).bins()
    assert (only.samples, only.observed, only.share) == (5_000, 1, 1)
    assert 0 <= only.low <= only.high <= 1


def test_weighted_samples_have_the_rates_of_repeated_ones_and_wider_intervals() -> None:
    label, logit = draw_logits(3_000)
    weight = np.random.default_rng(1).integers(0, 4, len(label))
    (weighted,) = Reliability().add(label, logit, weight.astype(np.float32)).bins(1)
    (repeated,) = Reliability().add(np.repeat(label, weight), np.repeat(logit, weight)).bins(1)
    assert weighted[2:4] == pytest.approx(repeated[2:4], rel=1e-9)
    assert weighted.samples == (weight > 0).sum()
    assert weighted.high - weighted.low > repeated.high - repeated.low


def test_each_label_has_bins_of_its_own_samples() -> None:
    label, logit = draw_logits(4_000)
    labels = np.stack([label, np.where(np.arange(4_000) % 2, label, np.nan)], axis=1)
    content = figures(evaluate_labels(["click", "like"], labels, np.stack([logit, logit + 0.4], axis=1)))[
        "labels"
    ]
    assert [
        sum(each["samples"] for each in content[name]["reliability"]) for name in ("click", "like")
    ] == [4000, 2000]
    assert content["like"]["calibration_error"] > 3 * content["click"]["calibration_error"]
