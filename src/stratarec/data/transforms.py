"""Transforms of dense columns: log1p, then standardisation by the training split's moments, in float64 until the end.

Moments of partitions are added by partition number, so that their bits do not depend on the machine. A column is
constant if its least and largest values are equal. Results beyond the range of float32 become its largest number.
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
    """Mean and standard deviation for standardisation."""

    @property
    def mean(self) -> float: ...
    @property
    def deviation(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and spread of a transformed column, missing values left out; parts of a column can be added.

    The sum of squares is about the mean (Welford; merged as by Chan, Golub and LeVeque 1979), so a deviation that is
    tiny compared with the values, such as that of times within an hour, keeps its digits.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences to the mean."""
    least: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        present = values[~np.isnan(values)]
        if not len(present):
            return cls()
        # Relative to a value of the column first, so that the mean of equal values is that value.
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
        """Standard deviation; 1 without two different values."""
        if self.least == self.most:
            return 1.0
        # Squares of differences below 1e-162 are 0.
        return (self.squares / self.count) ** 0.5 or self.most - self.least


def squash(values: pl.Series, feature: DenseFeature) -> NDArray[np.float64]:
    """Apply the feature's transform without standardisation, in float64; NaN where missing."""
    raw = values.cast(pl.Float64).to_numpy()
    return np.sign(raw) * np.log1p(np.abs(raw)) if feature.transform == "log1p" else raw


def transform(values: pl.Series, feature: DenseFeature, moments: Spread) -> NDArray[np.float32]:
    """Transform and standardise a column: ``[N]`` float32; missing values are 0, the mean if standardised."""
    squashed = squash(values, feature)
    if feature.standardize:
        with np.errstate(over="ignore"):
            squashed = (squashed - moments.mean) / moments.deviation
    return _bounded(squashed)


def _bounded(squashed: NDArray[np.float64]) -> NDArray[np.float32]:
    """Replace missing values by 0, and clip values that float32 cannot hold: divided by a small deviation, a value far
    outside the training data may be that large."""
    return np.nan_to_num(squashed, nan=0.0).clip(-_LARGEST, _LARGEST).astype(np.float32)


class Standardizer:
    """`transform` of several columns at once, with the same bits."""

    def __init__(self, features: Sequence[DenseFeature], moments: Mapping[str, Spread]) -> None:
        self._log = np.array([[feature.transform == "log1p"] for feature in features], dtype=bool).reshape(-1, 1)
        # Subtracting 0 and dividing by 1 keeps the bits.
        used: list[Spread] = [moments[f.name] if f.standardize else Moments() for f in features]
        self._mean = np.array([part.mean for part in used]).reshape(-1, 1)
        self._deviation = np.array([part.deviation for part in used]).reshape(-1, 1)

    def transform(self, raw: NDArray[np.float64]) -> NDArray[np.float32]:
        """Transform ``[F, N]`` numbers, NaN where missing, to ``[N, F]``."""
        squashed = np.where(self._log, np.sign(raw) * np.log1p(np.abs(raw)), raw)
        with np.errstate(over="ignore"):
            squashed = (squashed - self._mean) / self._deviation
        return np.ascontiguousarray(_bounded(squashed).T)
