"""Features that seem to know the label: filled for one class alone, or near to telling it by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

NAMED = 0.95
"""AUC from which one feature alone is named."""
_DETERMINES = 0.995
# Rows of the rarer class that say something.
_LEAST = 20
# How unlikely it must be that rows without a connection to the label are filled for one class alone.
_CHANCE = 1e-6
# A value more often than this is a name of something, for which the share of positives is asked.
_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Leak:
    """What a feature tells of the label."""

    text: str
    certain: bool
    """Whether it is to be left out, and not only named."""


def find_leak(column: pl.Series, positive: pl.Series, label: str) -> Leak | None:
    """What is suspicious of a feature; None where nothing is.

    Parameters
    ----------
    positive : Series
        Truth values, null where the label is not known.
    label : str
        Its column, for messages.
    """
    known = positive.is_not_null()
    column, positive = column.filter(known), positive.filter(known)
    positives = int(positive.sum())
    if min(positives, len(positive) - positives) < _LEAST:
        return None
    for what, there in _marks(column):
        rows, ones, rate = int(there.sum()), int((there & positive).sum()), positives / len(positive)
        only = 1 if ones == rows else 0
        # That a flag is never set for a positive row happens to honest ones.
        if ones in (0, rows) and (only or what == "filled") and (rate if only else 1 - rate) ** rows < _CHANCE:
            return Leak(text=f"{what} only where {label} is {only}: known only afterwards?", certain=True)
    found = alone(column, positive)
    if found < NAMED:
        return None
    certain = found >= _DETERMINES
    what = "tells the label by itself" if certain else "a leak, if it is not known before"
    return Leak(text=f"AUC {found:.3f} against {label} alone: {what}", certain=certain)


def alone(column: pl.Series, positive: pl.Series) -> float:
    """AUC of one feature: of its order where it has one, and of the share of positives that a value has in the other
    half of the rows where values repeat; the better one, turned so that it is above one half."""
    found = [0.5]
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        found.append(_auc(column.cast(pl.Float64).fill_nan(None).fill_null(float("-inf")), positive))
    if column.dtype.base_type() != pl.List and column.n_unique() * _REPEATS <= len(column):
        found.append(_auc(_rates(column, positive), positive))
    return max(max(auc, 1 - auc) for auc in found)


def _marks(column: pl.Series) -> Iterator[tuple[str, pl.Series]]:
    """Rows that a column sets apart, and how: those that are filled, and those of either of two values."""
    filled = _filled(column)
    if not filled.all():
        yield "filled", filled
    elif column.dtype.base_type() != pl.List and column.n_unique() == 2:
        yield from ((str(value), column == value) for value in column.unique().sort())


def _filled(column: pl.Series) -> pl.Series:
    if column.dtype.base_type() == pl.List:
        return column.list.len().fill_null(0) > 0
    if column.dtype == pl.String:
        return (column.str.strip_chars() != "").fill_null(False)
    return column.fill_nan(None).is_not_null() if column.dtype.is_float() else column.is_not_null()


def _rates(column: pl.Series, positive: pl.Series) -> pl.Series:
    """Share of positives of a row's value in the half of the rows that it is not in."""
    half = (pl.int_range(len(column), eager=True).hash(0) % 2).cast(pl.Int8)
    frame = pl.DataFrame({"value": column, "positive": positive.cast(pl.Float64), "half": half})
    sums = frame.group_by("value", "half").agg(pl.col("positive").sum().alias("ones"), pl.len().alias("rows"))
    other = sums.with_columns((1 - pl.col("half")).alias("half"))
    joined = frame.join(other, on=["value", "half"], how="left", nulls_equal=True, maintain_order="left")
    base = float(positive.mean())  # type: ignore[arg-type]
    return joined.select((pl.col("ones").fill_null(0) + base) / (pl.col("rows").fill_null(0) + 1)).to_series()


def _auc(score: pl.Series, positive: pl.Series) -> float:
    ranks, ones = score.rank("average"), int(positive.sum())
    zeros = len(positive) - ones
    return (float(ranks.filter(positive).sum()) - ones * (ones + 1) / 2) / (ones * zeros)
