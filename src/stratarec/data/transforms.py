"""Dense columns: log1p, then standardised by the training split's moments; float64 until all is done.

Moments of partitions are added by number of partition, so that their bits are those of any machine. A column is
constant where its least and most are equal, and what float32 cannot hold in the end is its largest number.
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
    """What standardising takes."""

    @property
    def mean(self) -> float: ...
    @property
    def deviation(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and spread of a transformed column, missing values left out; parts of a column can be added.

    The sum of squares is about the mean (Welford; merged as by Chan, Golub and LeVeque 1979), so a spread that is tiny
    beside the values, as that of times within an hour, keeps its digits.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences to the mean."""
    least: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        known = values[~np.isnan(values)]
        if not len(known):
            return cls()
        # About a value of the column first, so that the mean of equal values is that value.
        away = known - known[0]
        shift = float(away.mean())
        left = away - shift
        squares = float(np.square(left).sum()) - float(left.sum()) ** 2 / len(known)
        return cls(
            count=len(known),
            mean=float(known[0]) + shift,
            squares=max(squares, 0.0),
            least=float(known.min()),
            most=float(known.max()),
        )

    def __add__(self, other: Moments) -> Moments:
        if not (self.count and other.count):
            return self if self.count else other
        count, away = self.count + other.count, other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + away * (other.count / count),
            squares=self.squares + other.squares + away**2 * (self.count * other.count / count),
            least=min(self.least, other.least),
            most=max(self.most, other.most),
        )

    @property
    def deviation(self) -> float:
        """Standard deviation; 1 where there are not two values."""
        if self.least == self.most:
            return 1.0
        # Squares of differences below 1e-162 are 0.
        return (self.squares / self.count) ** 0.5 or self.most - self.least


def squash(values: pl.Series, feature: DenseFeature) -> NDArray[np.float64]:
    """The feature's transform in float64, NaN where missing."""
    raw = values.cast(pl.Float64).to_numpy()
    return np.sign(raw) * np.log1p(np.abs(raw)) if feature.transform == "log1p" else raw


def transform(values: pl.Series, feature: DenseFeature, moments: Spread) -> NDArray[np.float32]:
    """``[N]`` float32 as a model sees it; a missing value is 0, which is the mean where standardised."""
    squashed = squash(values, feature)
    if feature.standardize:
        with np.errstate(over="ignore"):
            squashed = (squashed - moments.mean) / moments.deviation
    return _bounded(squashed)


def _bounded(squashed: NDArray[np.float64]) -> NDArray[np.float32]:
    """Missing values as 0. One far outside the training data, divided by a small deviation, may be more than float32
    holds."""
    return np.nan_to_num(squashed, nan=0.0).clip(-_LARGEST, _LARGEST).astype(np.float32)


class Standard:
    """`transform` of several columns at once, to the bit."""

    def __init__(self, features: Sequence[DenseFeature], moments: Mapping[str, Spread]) -> None:
        self._log = np.array([[feature.transform == "log1p"] for feature in features], dtype=bool).reshape(-1, 1)
        # Less 0, over 1: the same bits.
        kept: list[Spread] = [moments[each.name] if each.standardize else Moments() for each in features]
        self._mean = np.array([each.mean for each in kept]).reshape(-1, 1)
        self._deviation = np.array([each.deviation for each in kept]).reshape(-1, 1)

    def of(self, raw: NDArray[np.float64]) -> NDArray[np.float32]:
        """``[F, N]`` numbers, NaN where missing -> ``[N, F]`` as a model sees them."""
        squashed = np.where(self._log, np.sign(raw) * np.log1p(np.abs(raw)), raw)
        with np.errstate(over="ignore"):
            squashed = (squashed - self._mean) / self._deviation
        return np.ascontiguousarray(_bounded(squashed).T)
