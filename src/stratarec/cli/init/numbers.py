"""Recognise columns of numbers: numbers in text, and whole numbers that are amounts rather than ids."""

from __future__ import annotations

import re

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Texts are compared with these words in lower case, and without surrounding spaces.
_MISSING_WORDS = {
    "", "na", "n/a", "#n/a", "<na>", "nan", "nil", "null", "none", "missing", "unknown", "\\n", "-", "--", "?", ".",
    "inf", "-inf", "+inf", "infinity", "-infinity",
}  # fmt: skip
_MOST_SPELLINGS = 8
_WHOLE = r"^[+-]?\d+$"
_SIGNS = r"[$€£¥₹%]|\b(USD|EUR|GBP)\b"
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}([, ]\d{3})+(\.\d+)?$"
_PLAIN = r"^[+-]?(\d+(\.\d*)?|\.\d+)$"
_COMMA = r"^[+-]?\d{1,3}(([. ]\d{3})*|\d*),\d+$"
# Numbers whose comma must be a decimal comma, because they begin with 0 or a sign. Lists of ids do not.
_DECIMAL = r"^([+-]?0|[+-]\d+),\d+$"
_PADDED = r"^[+-]?0\d"
_BINS = 32
# Smoothing: each value's positive rate includes this many made-up rows with the mean rate.
_PRIOR_ROWS = 10.0
# Number of standard errors by which single values must predict better. The maximum for some 60 columns of amounts
# was 3.2.
_ERRORS = 5.0
_MIN_CLASS_ROWS = 20
# Minimum number of rows of a frequent value in `is_scattered`.
_OFTEN = 5


def typed(text: pl.Series) -> tuple[pl.Series, tuple[str, ...]]:
    """Convert text to numbers or booleans if all values are such, and return the words that mean a missing value.

    Whole numbers beyond 64 bits, and numbers with leading zeros, stay text.
    """
    text = text.set((text == "").fill_null(False), None)
    bare = text.str.strip_chars()
    number = bare.cast(pl.Float64, strict=False)
    odd = text.filter((number.is_null() | ~number.is_finite()) & text.is_not_null()).unique()
    words = tuple(sorted(odd.head(_MOST_SPELLINGS + 1).to_list()))
    if len(words) <= _MOST_SPELLINGS and all(word.strip().lower() in _MISSING_WORDS for word in words):
        numbers = bare.set(text.is_in(words).fill_null(False), None) if words else bare
        if numbers.null_count() == len(numbers) or numbers.str.contains(_PADDED).any():
            return text, ()
        integers = numbers.cast(pl.Int64, strict=False)
        if integers.null_count() == numbers.null_count():
            return integers, words
        if not numbers.drop_nulls().str.contains(_WHOLE).all():
            return numbers.cast(pl.Float64), words
        return text, ()
    lower = bare.str.to_lowercase()
    is_boolean = lower.drop_nulls().is_in(["true", "false"]).all()
    return ((lower == "true").alias(text.name) if is_boolean else text), ()


def amounts(text: pl.Series, delimiter: str) -> str:
    """Describe numbers that are text because of unit signs or commas; empty if the column has other text."""
    bare = text.drop_nulls().str.strip_chars()
    if not len(bare):
        return ""
    digits = bare.str.replace_all(_SIGNS, "").str.strip_chars().str.replace_all(r"[\s']", " ")
    signs = (digits != bare).any()
    plain, thousands = digits.str.contains(_PLAIN), digits.str.contains(_THOUSANDS)
    if (plain | thousands).all():
        # A list such as 123,456 looks like a number with thousands separators. If the digits before a comma are fewer
        # than three in some value, the values are not lists of three-digit numbers.
        short = digits.str.contains(r"^[+-]?\d{1,2}[, ]").any()
        if signs or (short and not (plain & (digits.str.len_chars() > 5)).any()):
            return _example(bare.filter(thousands | (digits != bare)), {",": ""})
        return ""
    comma = digits.str.contains(_COMMA)
    if (comma | plain).all() and (delimiter in (";", "\t") or digits.str.contains(_DECIMAL).any()):
        return _example(bare.filter(comma), {".": "", ",": "."})
    return ""


def _example(odd: pl.Series, marks: dict[str, str | int | None]) -> str:
    number = re.sub(r"[^\d.,+-]", "", str(odd[0])).translate(str.maketrans(marks))
    return f"numbers written as {str(odd[0])!r}; write {number} in the log to use them as a dense feature"


def predicts_by_value(column: pl.Series, positive: pl.Series) -> bool:
    """Whether positive rates of single values predict other rows better than positive rates of 32 quantiles.

    Parameters
    ----------
    column : Series
        Whole numbers.
    positive : Series
        Booleans, null where the label is missing.
    """
    is_known = positive.is_not_null() & column.is_not_null()
    numbers, label = column.filter(is_known).to_numpy(), positive.filter(is_known).cast(pl.Float64).to_numpy()
    if min(label.sum(), len(label) - label.sum()) < _MIN_CLASS_ROWS:
        return False
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BINS + 1)))
    by_order = _losses(np.searchsorted(edges, numbers, side="right"), label)
    gain = by_order - _losses(np.unique(numbers, return_inverse=True)[1], label)
    return bool(gain.mean() > _ERRORS * gain.std() / np.sqrt(len(gain)))


def _losses(value: NDArray[np.int64], label: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log loss of each row, ``[N]``.

    Rows are divided at random into two halves. The prediction for a row is the smoothed positive rate of its value in
    the half that does not contain the row."""
    half = np.random.default_rng(0).integers(0, 2, len(label)) > 0
    values, mean, rate = int(value.max()) + 1, label.mean(), np.empty(len(label))
    for rows in (half, ~half):
        ones = np.bincount(value[~rows], label[~rows], minlength=values)
        counts = np.bincount(value[~rows], minlength=values)
        rate[rows] = ((ones + _PRIOR_ROWS * mean) / (counts + _PRIOR_ROWS))[value[rows]]
    losses: NDArray[np.float64] = -np.log(np.where(label > 0, rate, 1 - rate))
    return losses


def is_whole(column: pl.Series) -> bool:
    values = column.drop_nulls().drop_nans()
    return bool(((values.round() == values) & (values.abs() < float(1 << 53))).all())


def is_spread(column: pl.Series, distinct: int) -> bool:
    """Whether numbers fill the range between minimum and maximum, as amounts do and ids do not."""
    values = column.drop_nulls()
    least, most = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return most - least < 20 * distinct and least > -1e9 and most < 1e6


def is_scattered(column: pl.Series) -> bool:
    """Whether the neighbours of frequent numbers are rare, as with ids; frequent amounts have frequent neighbours.

    Round numbers are frequent amounts without frequent neighbours, and do not count.
    """
    counts = column.drop_nulls().cast(pl.Int64).alias("value").value_counts(sort=True, name="rows")
    half = int((counts["rows"].cum_sum() * 2 <= len(column)).sum())
    top = counts.head(max(half, _OFTEN)).filter(pl.col("rows") >= _OFTEN)
    if top.height < _OFTEN or (top["value"] % 10).is_in([0, 5, 9]).mean() > 0.6:  # type: ignore[operator]
        return False
    for step, name in ((-1, "before"), (1, "after")):
        near = counts.select(pl.col("value") - step, pl.col("rows").alias(name))
        top = top.join(near, on="value", how="left")
    near_rows = (top["before"].fill_null(0) + top["after"].fill_null(0)) / 2
    return float((near_rows / top["rows"]).median()) < 0.5  # type: ignore[arg-type]
