"""Whether a whole number is a name by what its values tell of the label."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

_BINS = 32
# A rate begins with so many rows of the mean.
_STRENGTH = 10.0
# Standard errors by which values must be better: the most that a number had which is none was 3.2, of some 60.
_ERRORS = 5.0
_LEAST = 20


def tells_by_value(column: pl.Series, positive: pl.Series) -> bool:
    """Whether shares of positives of single values predict other rows better than those of 32 quantiles.

    Parameters
    ----------
    column : Series
        Whole numbers.
    positive : Series
        Truth values, null where the label is not known.
    """
    known = positive.is_not_null() & column.is_not_null()
    numbers, label = column.filter(known).to_numpy(), positive.filter(known).cast(pl.Float64).to_numpy()
    if min(label.sum(), len(label) - label.sum()) < _LEAST:
        return False
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BINS + 1)))
    by_order = _losses(np.searchsorted(edges, numbers, side="right"), label)
    gain = by_order - _losses(np.unique(numbers, return_inverse=True)[1], label)
    return bool(gain.mean() > _ERRORS * gain.std() / np.sqrt(len(gain)))


def _losses(value: NDArray[np.int64], label: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[N]`` log losses of rows by the share of positives that their value has in the half that they are not in."""
    half = np.random.default_rng(0).integers(0, 2, len(label)) > 0
    values, rate, share = int(value.max()) + 1, label.mean(), np.empty(len(label))
    for own in (half, ~half):
        clicks, rows = (
            np.bincount(value[~own], label[~own], minlength=values),
            np.bincount(value[~own], minlength=values),
        )
        share[own] = ((clicks + _STRENGTH * rate) / (rows + _STRENGTH))[value[own]]
    losses: NDArray[np.float64] = -np.log(np.where(label > 0, share, 1 - share))
    return losses
