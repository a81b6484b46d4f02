"""Reliability: what is predicted beside what happens, in bins of equal mass, and the calibration error of them.

    ECE = sum_b m_b |p_b - y_b|

over bins b of samples of neighbouring logits: m_b is a bin's share of all weight, p_b its mean prediction and y_b its
rate of positives (Naeini et al. 2015; bins of equal mass as in Nguyen and O'Connor 2015).

Samples are counted in cells of a 256th of a logit, whose sums are all that is kept: any number of samples takes the
same memory, and sums of batches or of ranks add up to those of the whole. A bin is whole cells, so samples of one
logit are never in two; means are exact, and only the ends of bins are rounded to cells.

*Bias.* Samples of a bin scatter around their probabilities, so a perfectly calibrated model has no ECE of 0 but, of
few samples, one of

    sum_b sqrt(2 / pi) sqrt(sum_i w_i^2 p_i (1 - p_i)) / sum_i w_i

(the mean of the absolute value of a normal variable), the i of the outer sum being the samples of a bin and the
denominator that of all. It is told beside the ECE, which says something where it is well above it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]

MOST_BINS = 20
"""As many bins as there are, unless there are too few samples for them."""
_LEAST_SAMPLES = 50
_CELLS_PER_LOGIT, _HIGHEST = 256, 16
_CELLS = 2 * _HIGHEST * _CELLS_PER_LOGIT
# Samples whose sums are taken at once: bounds memory.
_AT_ONCE = 1 << 18
# Quantile of the normal distribution that intervals of 95 % reach to.
_Z = 1.959964


class Bin(NamedTuple):
    """Samples of neighbouring logits."""

    samples: int
    share: float
    """Of all weight."""
    predicted: float
    """Mean probability."""
    observed: float
    """Rate of positives."""
    low: float
    """Interval of 95 % around it (Wilson 1927), for as many samples as the weights are worth (Kish 1965)."""
    high: float


class Reliability:
    """Sums over samples, in cells of their logits."""

    def __init__(self) -> None:
        # Of a cell: samples, weights, weights of positives, weighted probabilities, squares of weights, and variances
        # of what is observed were the probabilities right.
        self.sums = np.zeros((6, _CELLS))

    def add(self, label: Floats, logit: Floats, weight: Floats | None = None) -> Reliability:
        """Count ``[N]`` samples with labels of 0 and 1, each by its weight, by default 1; returns itself."""
        for first in range(0, len(label), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self._add(label[part], np.asarray(logit[part], np.float64), None if weight is None else weight[part])
        return self

    def _add(self, label: Floats, logit: NDArray[np.float64], weight: Floats | None) -> None:
        cell = np.clip(np.floor(logit * _CELLS_PER_LOGIT) + _CELLS // 2, 0, _CELLS - 1).astype(np.int64)
        probability = 1 / (1 + np.exp(-np.clip(logit, -80, 80)))
        scale = np.ones(len(logit)) if weight is None else np.asarray(weight, dtype=np.float64)
        squares = scale * scale
        variance = squares * probability * (1 - probability)
        columns = (scale > 0, scale, scale * label, scale * probability, squares, variance)
        for sums, column in zip(self.sums, columns, strict=True):
            sums += np.bincount(cell, weights=column, minlength=_CELLS)

    def __add__(self, other: Reliability) -> Reliability:
        """Of the samples of both."""
        found = Reliability()
        found.sums = self.sums + other.sums
        return found

    def bins(self, most: int = MOST_BINS) -> tuple[Bin, ...]:
        """Up to `most` bins of about equal weight, fewer where they would have less than 50 samples each; none of
        nothing."""
        return tuple(_bin(sums, self.sums[1].sum()) for sums in self._by_bin(most).T)

    def error(self) -> tuple[float, float]:
        """The ECE, and how much of it is to be expected of so many samples by chance; NaN of nothing."""
        found = self._by_bin(MOST_BINS)
        total = found[1].sum()
        if not total:
            return math.nan, math.nan
        chance = math.sqrt(2 / math.pi) * np.sqrt(found[5]).sum()
        return float(np.abs(found[3] - found[2]).sum() / total), float(chance / total)

    def _by_bin(self, most: int) -> NDArray[np.float64]:
        """``[6, bins]`` sums of the bins that have samples."""
        samples, mass = self.sums[:2]
        total = mass.sum()
        if not total:
            return np.zeros((6, 0))
        bins = max(min(int(samples.sum()) // _LEAST_SAMPLES, most), 1)
        # Each cell goes where its middle lies, so that one that holds more than a bin's share is a bin by itself.
        middle = (mass.cumsum() - mass / 2) / total
        place = np.minimum((middle * bins).astype(np.int64), bins - 1)
        found = np.stack([np.bincount(place, weights=sums, minlength=bins).astype(np.float64) for sums in self.sums])
        kept: NDArray[np.float64] = found[:, found[1] > 0]
        return kept


def _bin(sums: NDArray[np.float64], total: float) -> Bin:
    samples, mass, positive, probability, squares, _ = map(float, sums)
    rate = min(positive / mass, 1.0)
    worth = mass * mass / squares
    center = (rate + _Z**2 / (2 * worth)) / (1 + _Z**2 / worth)
    half = _Z / (1 + _Z**2 / worth) * math.sqrt(rate * (1 - rate) / worth + (_Z / (2 * worth)) ** 2)
    return Bin(
        samples=int(samples),
        share=mass / float(total),
        predicted=probability / mass,
        observed=rate,
        low=max(center - half, 0.0),
        high=min(center + half, 1.0),
    )
