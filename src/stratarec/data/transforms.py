"""Dense columns: log1p, then standardised by the training split's moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.schema import DenseFeature


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, sum and sum of squares of a transformed column, missing values left out."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        known = values[~np.isnan(values)]
        return cls(count=len(known), total=float(known.sum()), squares=float(np.square(known).sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            count=self.count + other.count, total=self.total + other.total, squares=self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation; 1 for a constant or empty column."""
        if not self.count:
            return 1.0
        variance = self.squares / self.count - self.mean**2
        return variance**0.5 if variance > 1e-12 * max(self.mean**2, 1e-12) else 1.0


def squash(values: pl.Series, feature: DenseFeature) -> NDArray[np.float64]:
    """The feature's transform in float64, NaN where missing."""
    raw = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
    return np.sign(raw) * np.log1p(np.abs(raw)) if feature.transform == "log1p" else raw


def transform(values: pl.Series, feature: DenseFeature, moments: Moments) -> NDArray[np.float32]:
    """``[N]`` float32 as a model sees it; a missing value is 0, which is the mean where standardised."""
    squashed = squash(values, feature)
    if feature.standardize:
        squashed = (squashed - moments.mean) / moments.deviation
    return np.nan_to_num(squashed, nan=0.0).astype(np.float32)
