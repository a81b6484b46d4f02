"""Transforms of dense columns: log1p, then standardization by the moments of the training split,
computed in float64.

Moments of partitions are added in the order of partitions, so that their bits do not depend on the
machine. A column is constant if its minimum and maximum are equal. Results beyond the range of
float32 become its largest number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.schema import DenseFeature

_LARGEST = float(np.finfo(np.float32).max)


class Spread(Protocol):
    """Mean and standard deviation that standardize a column."""

    @property
    def mean(self) -> float: ...
    @property
    def deviation(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and spread of a transformed column without missing values. Moments of parts can
    be added.

    Squares of differences from the mean are added (Welford's method; parts are merged as by Chan,
    Golub and LeVeque 1979). So the deviation is precise even if it is tiny compared with the
    values, as for times within an hour."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""
    least: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        present = values[~np.isnan(values)]
        if not len(present):
            return cls()
        # Computed relative to one value of the column, so that the mean of equal values is exactly
        # that value.
        offset = present - present[0]
        shift = float(offset.mean())
        residual = offset - shift
        squares = float(np.square(residual).sum()) - float(residual.sum()) ** 2 / len(present)
        return cls(
            count=len(present),
            mean=float(present[0]) + shift,
            squares=max(squares, 0.0),
            least=float(present.min()),
            most=float(present.max()),
        )

    def __add__(self, other: Moments) -> Moments:
        if not (self.count and other.count):
            return self if self.count else other
        count, difference = self.count + other.count, other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + difference * (other.count / count),
            squares=self.squares + other.squares + difference**2 * (self.count * other.count / count),
            least=min(self.least, other.least),
            most=max(self.most, other.most),
        )

    @property
    def deviation(self) -> float:
        """Standard deviation; 1 if all values are equal."""
        if self.least == self.most:
            return 1.0
        # Squares of differences below 1e-162 would be rounded to 0.
        return (self.squares / self.count) ** 0.5 or self.most - self.least


def squash(values: pl.Series, feature: DenseFeature) -> NDArray[np.float64]:
    """Apply the feature's transform without standardization; return float64, NaN for missing
    values.
    """
    raw = values.cast(pl.Float64).to_numpy()
    return np.sign(raw) * np.log1p(np.abs(raw)) if feature.transform == "log1p" else raw


def transform(values: pl.Series, feature: DenseFeature, moments: Spread) -> NDArray[np.float32]:
    """Transform and standardize a column: ``[N]`` float32. A missing value becomes 0, the mean if
    standardized.
    """
    squashed = squash(values, feature)
    if feature.standardize:
        with np.errstate(over="ignore"):
            squashed = (squashed - moments.mean) / moments.deviation
    return _bounded(squashed)


def _bounded(squashed: NDArray[np.float64]) -> NDArray[np.float32]:
    """Replace missing values by 0, and clip values to the range of float32.

    A value far outside the training data may exceed that range when it is divided by a small
    deviation.
    """
    return np.where(np.isnan(squashed), 0.0, squashed).clip(-_LARGEST, _LARGEST).astype(np.float32)


def transform_table(features: Sequence[DenseFeature], moments: Mapping[str, Spread]) -> NDArray[np.float64]:
    """Return, for each feature, whether its logarithm is used, its mean and its deviation, ``[F,
    3]``.
    """
    # Subtracting 0 and dividing by 1 does not change the bits of columns that are not standardized.
    used: list[Spread] = [moments[f.name] if f.standardize else Moments() for f in features]
    rows = [
        (f.transform == "log1p", part.mean, part.deviation) for f, part in zip(features, used, strict=True)
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)
