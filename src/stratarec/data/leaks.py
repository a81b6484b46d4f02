"""Features that seem to know the label: filled for one class alone, or near to telling it by themselves.

`init` looks for them in what it reads of a log, `prepare` in a sample of the training rows, as the log has them: what
order numbers have and which are missing no longer shows in ids. What it finds stands in ``dataset.json``, for every
report of a run on those data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from stratarec.data.schema import UNKNOWN, Schema

SAMPLE_ROWS, _SAMPLE_VALUES, _FEWEST_ROWS = 50_000, 2_000_000, 2_000
"""Rows that are looked at, fewer where there are many features: half a second of a processor for forty."""
NAMED = 0.95
"""AUC from which one feature alone is named."""
_DETERMINES = 0.995
# Rows of the rarer class that say something.
_LEAST = 20
# How unlikely it must be that rows without a connection to the label are filled for one class alone.
_CHANCE = 1e-6
# A value more often than this is a name of something, for which the share of positives is asked.
_REPEATS = 2
# The last number of a name.
_NUMBER = r"(\d{1,18})\D*$"


@dataclass(frozen=True, kw_only=True)
class Leak:
    """What a feature tells of the label."""

    feature: str
    text: str
    certain: bool
    """Whether it is to be left out, and not only named."""


def sample_rows(schema: Schema) -> int:
    """How many rows `find_leaks` is to be given."""
    return max(min(SAMPLE_ROWS, _SAMPLE_VALUES // max(len(schema.names), 1)), _FEWEST_ROWS)


def looked_at(schema: Schema) -> list[str]:
    """The columns of a log that `find_leaks` looks at, labels first."""
    derived = {feature.name for feature in schema.sparse if feature.traits.derived}
    return [*schema.label_columns, *(name for name in schema.names if name not in derived)]


def find_leaks(sample: pl.DataFrame, schema: Schema) -> list[Leak]:
    """The features of a data set that seem to know one of its labels, the certain ones first.

    Parameters
    ----------
    sample : DataFrame
        Typed rows of the log with the columns `looked_at`.
    """
    found = []
    for label in schema.label_columns:
        known = (sample[label] != UNKNOWN).fill_null(False)
        positive = pl.DataFrame({"known": known, "label": sample[label]}).select(
            pl.when(pl.col("known")).then(pl.col("label") == 1)
        )
        names = looked_at(schema)[len(schema.label_columns) :]
        found += [leak for name in names if (leak := find_leak(sample[name], positive.to_series(), label)) is not None]
    return sorted(found, key=lambda leak: not leak.certain)


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
            return Leak(
                feature=column.name, text=f"{what} only where {label} is {only}: known only afterwards?", certain=True
            )
    found = alone(column, positive)
    if found < NAMED:
        return None
    certain = found >= _DETERMINES
    what = "tells the label by itself" if certain else "a leak, if it is not known before"
    return Leak(feature=column.name, text=f"AUC {found:.3f} against {label} alone: {what}", certain=certain)


def alone(column: pl.Series, positive: pl.Series) -> float:
    """AUC of one feature: of its order where it has one, and of the share of positives that a value has in the other
    half of the rows where values repeat; the better one, turned so that it is above one half."""
    found = [0.5]
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        found.append(_auc(column.cast(pl.Float64).fill_nan(None).fill_null(float("-inf")), positive))
    distinct = 0 if column.dtype.base_type() == pl.List else column.n_unique()
    if 0 < distinct * _REPEATS <= len(column):
        found.append(_auc(_rates(column, positive), positive))
    elif distinct and column.dtype == pl.String:  # what names a row may count it all the same: order-9, order-10
        found += [_auc(each, positive) for each in (column, column.str.extract(_NUMBER).cast(pl.Int64))]
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
    ranks, ones = score.rank("average").fill_null(0), int(positive.sum())
    zeros = len(positive) - ones
    return (float(ranks.filter(positive).sum()) - ones * (ones + 1) / 2) / (ones * zeros)
