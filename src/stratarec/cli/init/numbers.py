"""Recognize columns of numbers: numbers in text, and whole numbers that are amounts rather than
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.init.words import AMOUNTS, is_code, tokens
from stratarec.data.columns.text_values import numbers_from_text
from stratarec.data.schema import Decimal

MISSING_WORDS = {
    "", "na", "n/a", "#n/a", "<na>", "nan", "nil", "null", "none", "missing", "unknown", "\\n", "-", "--", "?", ".",
    "inf", "-inf", "+inf", "infinity", "-infinity",
}  # fmt: skip
"""Words that mean a missing value, in lower case."""
_MOST_SPELLINGS = 8
_WHOLE = r"^[+-]?\d+$"
# Signs that numbers have, and ids or lists do not: currencies, percent, brackets, and separators of
# thousands.
_SIGNS = r"[\p{Sc}%(\p{L}'’\x{a0}\x{202f}\x{2009}]"
# One or several groups of three digits; their first digits. Numbers from 1000 without a group.
_GROUPS, _SHORT, _UNGROUPED = r"\d[,. ]\d{3}(\D|$)", r"^[+-]?\d{1,2}[,. ]", r"\d{4}"
# Numbers whose comma must be a decimal comma, because they begin with 0 or a sign, or end with two
# digits. Lists of ids do not.
_DECIMAL, _CENTS = r"^([+-]?0|[+-]\d+),\d+$", r"^\d+,\d\d$"
# Sign or code of a currency.
_CURRENCY = r"(\p{Sc}|[A-Z]{3})"
# Minimum number of distinct values with a point that separates thousands.
_LEAST_GROUPED = 20
# A number and its unit, and abbreviations of powers of ten and of bytes.
_WITH_UNIT = r"^([+-]?\d[\d.,]*\s*)([A-Za-zµ°][A-Za-z²³/]{0,5}\+?)?$"
_SCALES = {"K", "k", "M", "m", "B", "b", "T", "G", "kB", "KB", "MB", "GB", "TB"}
# Codes such as TWA02200200002 begin like an amount of a currency.
_PADDED = rf"^{_CURRENCY}?[+-]?0\d"
_BINS = 32
# Smoothing: each value's positive rate includes this many made-up rows with the rate of its
# neighbours.
_PRIOR_ROWS = 10.0
# Number of standard errors by which single values must predict better. The maximum for some 60
# columns of amounts was 3.2.
_ERRORS = 5.0
_MIN_CLASS_ROWS = 20
# `is_ordered` uses values with at least _OFTEN rows. Fewer than _MANY values are too few to draw
# conclusions from.
_OFTEN, _MANY = 5, 20
# Minimum ratio of the largest number to the middle one for a long tail.
_TAIL = 20


def typed(text: pl.Series) -> tuple[pl.Series, tuple[str, ...]]:
    """Convert text to numbers or booleans if all values are such, and return the words that mean a
    missing value.

    Whole numbers beyond 64 bits, and numbers with leading zeros, stay text, as do
    ids such as 1e82 and numbers whose points separate thousands.
    """
    text = text.set((text == "").fill_null(False), None)
    bare = text.str.strip_chars()
    number = bare.cast(pl.Float64, strict=False)
    odd = text.filter((number.is_null() | ~number.is_finite()) & text.is_not_null()).unique()
    words = tuple(sorted(odd.head(_MOST_SPELLINGS + 1).to_list()))
    if len(words) <= _MOST_SPELLINGS and all(word.strip().lower() in MISSING_WORDS for word in words):
        numbers = bare.set(text.is_in(words).fill_null(False), None) if words else bare
        # Telephone numbers begin with a plus in every row.
        is_id = numbers.str.contains(_PADDED).any() or numbers.str.starts_with("+").all()
        if numbers.null_count() == len(numbers) or is_id:
            return text, ()
        integers = numbers.cast(pl.Int64, strict=False)
        if integers.null_count() == numbers.null_count():
            return integers, words
        present = numbers.drop_nulls()
        if present.str.contains(_WHOLE).all() or _are_codes(present) or groups_with_points(present):
            return text, ()
        return numbers.cast(pl.Float64), words
    lower = bare.str.to_lowercase()
    is_boolean = lower.drop_nulls().is_in(["true", "false"]).all()
    return ((lower == "true").alias(text.name) if is_boolean else text), ()


def _are_codes(text: pl.Series) -> bool:
    """Whether texts that Python reads as numbers with fractions are codes: versions, ids of two
    numbers, digests.

    Version 3.10 is not 3.1. Numbers with one or two digits behind the point, whose last one may be
    0, would also have 05 there. Prices of several shops, 2.5 and 2.50, need not. Floats cannot
    store 1234567890.1772323200, which is an id of a browser and the time of its first visit.
    """
    words = tokens(text.name)
    if words & {"version", "ver"}:
        return True
    has_zeros = text.str.contains(r"^\d+\.\d0$").any() and text.str.contains(r"^\d+\.[1-9]$").any()
    may_be_versions = has_zeros and not words & AMOUNTS
    are_versions = may_be_versions and text.str.contains(r"^\d{1,3}(\.(\d|[1-9]\d+))?$").all()
    is_pair = text.str.contains(r"^\d{6,}\.\d{6,}$").all() and 2 * text.n_unique() <= len(text)
    return bool(are_versions or is_pair) or _are_cut_digests(text)


def _are_cut_digests(text: pl.Series) -> bool:
    """Whether texts such as 4372 and 1e82 are ids: hexadecimal digits that happen to have no other
    letter than e.

    Programs write a number's exponent with a sign, or with a point before it, unless all numbers
    are such powers of 10.
    """
    is_power = text.str.contains(r"^\d+[eE]\d+$")
    return (
        bool(is_power.any() and (is_power | text.str.contains(r"^\d+$")).all())
        and not tokens(text.name) & AMOUNTS
    )


@dataclass(frozen=True, kw_only=True)
class WrittenNumbers:
    """A column of numbers that are text as people write them, such as 1,234.50, 1.234,50 or $7."""

    decimal: Decimal
    """Decimal mark."""
    example: str
    units: tuple[str, ...]
    """Signs or codes of currencies, in order; several mean that the numbers cannot be compared."""
    missing: tuple[str, ...]
    """Words that mean a missing value."""


def written_numbers(text: pl.Series, *, delimiter: str) -> WrittenNumbers | None:
    """Describe the numbers of a text column; None if it has other text, or if its texts may as well
    be ids or lists.

    Parameters
    ----------
    text : Series
        Texts of the column, null where missing.
    delimiter : str
        Delimiter of the file; empty if fields have types, as in JSON and Parquet.
    """
    present = text.drop_nulls().str.strip_chars()
    distinct = present.unique().sort()
    distinct = distinct.filter(distinct != "")
    if not distinct.head(_MOST_SPELLINGS + 1).str.contains(r"\d").any():
        return None
    marks: tuple[Decimal, ...] = (".", ",")
    failed = {mark: numbers_from_text(distinct, mark).is_null() for mark in marks}
    is_odd = failed["."] & failed[","]
    words = tuple(distinct.filter(is_odd).head(_MOST_SPELLINGS + 1).to_list())
    # Only text files have an option for words that mean a missing value.
    if len(words) > (_MOST_SPELLINGS if delimiter else 0) or any(
        word.lower() not in MISSING_WORDS for word in words
    ):
        return None
    written = distinct.filter(~is_odd)
    fitting = [mark for mark in marks if not (failed[mark] & ~is_odd).any()]
    if not fitting or len(written) < 2 or written.str.contains(_PADDED).any():
        return None
    if _are_codes(present.filter(present.is_in(written.implode()))):
        return None
    named = bool(tokens(text.name) & AMOUNTS) and not is_code(text.name)
    decimal = _decimal(written, fitting, delimiter, named=named)
    if not decimal:
        return None
    units = written.str.extract(_CURRENCY).drop_nulls().unique().sort()
    odd = written.filter(written.str.contains(r"[^\d.]"))
    example = max(odd.to_list() or written.to_list(), key=len)
    return WrittenNumbers(decimal=decimal, example=example, units=tuple(units), missing=words)


def number_fault(text: pl.Series) -> str:
    """Return what to write in the log if most values of a text column are numbers, but not all;
    empty if they are not.

    The other values have units, such as 1.2K and 3 km, or are words.
    """
    distinct = text.drop_nulls().str.strip_chars().unique().sort()
    parts = distinct.str.extract_groups(_WITH_UNIT).struct.unnest()
    units = parts["2"].drop_nulls().unique().sort()
    is_measured = bool(parts["1"].str.contains(r"[.,]\d|\s$").any()) or set(units) <= _SCALES
    if (
        not parts["1"].null_count()
        and 0 < len(units) <= len(_SCALES)
        and is_measured
        and len(distinct) > _MANY
    ):
        shown = ", ".join(map(repr, units.head(_MOST_SPELLINGS)))
        example = distinct.filter(parts["2"].is_not_null())[0]
        return f"numbers with units ({shown}), such as {example!r}; write plain numbers in one unit to use them"
    marks: tuple[Decimal, ...] = (".", ",")
    is_number = {mark: numbers_from_text(distinct, mark).is_not_null() for mark in marks}
    fits = max(is_number.values(), key=lambda flags: int(flags.sum()))
    words = distinct.filter(~fits)
    if fits.sum() <= _MANY or not 0 < len(words) <= _MOST_SPELLINGS or words.str.contains(r"\d").any():
        return ""
    if not distinct.filter(fits).str.contains(r"[.,]\d").any():
        return ""
    shown, rows = ", ".join(map(repr, words)), int(text.str.strip_chars().is_in(words.implode()).sum())
    return f"numbers, but {shown} in {rows:,} rows; leave these empty in the log to use the numbers"


def _decimal(written: pl.Series, fitting: Sequence[Decimal], delimiter: str, *, named: bool) -> Decimal:
    """Return the decimal mark of numbers in text; empty if they are as likely ids or lists of ids.

    Parameters
    ----------
    written : Series
        Distinct values that are numbers with every mark in `fitting`.
    named : bool
        Whether the name of the column suggests an amount.
    """
    plain = written.cast(pl.Float64, strict=False).is_not_null()
    has_signs = bool(written.str.contains(_SIGNS).any())
    grouped = written.str.contains(_GROUPS)
    ungrouped = bool((~grouped & written.str.contains(_UNGROUPED)).any())
    is_short = bool(written.filter(grouped).str.contains(_SHORT).any())
    if len(fitting) == 2:
        # Groups of three digits, such as 12,345. They could also be three decimals, or a list of
        # two ids.
        if not grouped.any():
            return "." if has_signs or (named and not delimiter) else ""
        comma, point = (bool(written.str.contains(mark, literal=True).any()) for mark in (",", "."))
        if ungrouped or (comma and point):
            return ""
        if point:
            return "," if has_signs or groups_with_points(written) else "."
        return "." if has_signs or is_short or named else ""
    if fitting[0] == ".":
        fractions = written.str.contains(r"\.\d")
        if plain.all():
            return "." if not delimiter and (fractions.any() or named) else ""
        return "." if has_signs or fractions.any() or named or (is_short and not ungrouped) else ""
    commas = written.str.contains(",", literal=True)
    if has_signs or named or written.str.contains(r"\d[. ]\d{3},\d").any():
        return ","
    if not commas.any():
        return "," if written.str.count_matches(r"\.").n_unique() > 1 else ""
    is_sure = delimiter in (";", "\t") or written.str.contains(_DECIMAL).any()
    return "," if is_sure or written.filter(commas).str.contains(_CENTS).all() else ""


def groups_with_points(text: pl.Series) -> bool:
    """Whether points in numbers separate thousands, as in 1.234 and 567, although Python reads them
    as decimal points.

    With three decimals in each number, no number is without a point. Without zeros at the end, no
    number ends with 0.
    """
    pointed = text.filter(text.str.contains(".", literal=True))
    others = text.filter(~text.str.contains(".", literal=True))
    return (
        pointed.n_unique() >= _LEAST_GROUPED
        and bool(pointed.str.contains(r"^-?[1-9]\d{0,2}\.\d{3}$").all())
        and bool(pointed.str.ends_with("0").any())
        and bool(len(others))
        and bool(others.str.contains(r"^-?\d{1,3}$").all())
    )


def predicts_by_value(column: pl.Series, positive: pl.Series) -> bool:
    """Whether the positive rate of a value predicts other rows better than the rates of larger and
    smaller values.

    Parameters
    ----------
    column : Series
        Whole numbers.
    positive : Series
        Booleans, null where the label is missing.
    """
    is_known = positive.is_not_null() & column.is_not_null()
    numbers, label = column.filter(is_known), positive.filter(is_known).cast(pl.Float64).to_numpy()
    if min(label.sum(), len(label) - label.sum()) < _MIN_CLASS_ROWS:
        return False
    ranks = numbers.rank("average").to_numpy() / (len(numbers) + 1)
    # The rates of a row come from the half of the rows that does not contain it. Made-up labels
    # often come from seed 0, and would be equal to the halves.
    half = np.random.default_rng(_BINS).integers(0, 2, len(label)) > 0
    by_order, by_value = np.empty(len(label)), np.empty(len(label))
    codes = np.unique(numbers.to_numpy(), return_inverse=True)[1]
    bins = (ranks * _BINS).astype(np.int64)
    for rows in (half, ~half):
        mean = np.full(_BINS, label[~rows].mean())
        rates = _rates(bins[~rows], label[~rows], mean)
        centers = np.bincount(bins, ranks, _BINS) / np.maximum(np.bincount(bins, minlength=_BINS), 1)
        used = centers > 0
        by_order[rows] = np.interp(ranks[rows], centers[used], rates[used])
        # A value that the other half lacks is predicted by its order alone, so it cannot make a
        # difference.
        first = np.full(int(codes.max()) + 1, label.mean())
        first[codes[rows]] = by_order[rows]
        by_value[rows] = _rates(codes[~rows], label[~rows], first)[codes[rows]]
    gain = _losses(by_order, label) - _losses(by_value, label)
    return bool(gain.mean() > _ERRORS * gain.std() / np.sqrt(len(gain)))


def _rates(
    codes: NDArray[np.int64], label: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the smoothed positive rate of each code. `prior` has the rate of a code without
    rows.
    """
    ones, rows = (np.bincount(codes, weights, len(prior)) for weights in (label, None))
    rates: NDArray[np.float64] = (ones + _PRIOR_ROWS * prior) / (rows + _PRIOR_ROWS)
    return rates


def _losses(rates: NDArray[np.float64], label: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log loss of each row for predicted rates."""
    losses: NDArray[np.float64] = -np.log(np.where(label > 0, rates, 1 - rates))
    return losses


def is_whole(column: pl.Series) -> bool:
    values = column.drop_nulls().drop_nans()
    return bool(((values.round() == values) & (values.abs() < float(1 << 53))).all())


def has_long_tail(column: pl.Series) -> bool:
    """Whether the largest number is many times the middle one, as of amounts, while ids fill their
    range evenly.
    """
    values = column.drop_nulls().unique().sort()
    return int(values[0]) >= 0 and int(values[-1]) >= _TAIL * max(int(values[len(values) // 2]), 1)


def is_spread(column: pl.Series, distinct: int) -> bool:
    """Whether numbers fill the range between minimum and maximum, as amounts do and ids do not."""
    values = column.drop_nulls()
    least, most = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return most - least < 20 * distinct and least > -1e9 and most < 1e6


def is_ordered(column: pl.Series) -> bool | None:
    """Whether frequent numbers have frequent neighbours, as amounts and counts do and ids do not;
    None if not known.

    Round numbers are frequent amounts without frequent neighbours. If most frequent numbers are
    round, they are amounts if there are many, else nothing is known.
    """
    counts = column.drop_nulls().cast(pl.Int64).alias("value").value_counts(sort=True, name="rows")
    half = int((counts["rows"].cum_sum() * 2 <= len(column)).sum())
    # Of equally frequent numbers, some have more rows by chance, and neighbours with fewer.
    mean = len(column) / max(counts.height, 1)
    often = max(_OFTEN, mean + 3 * mean**0.5)
    top = counts.head(max(half, _OFTEN)).filter(pl.col("rows") >= often)
    if top.height < _OFTEN:
        return None
    if (top["value"] % 10).is_in([0, 5, 9]).mean() > 0.6:  # type: ignore[operator]
        return True if top.height >= _MANY else None
    for step, name in ((-1, "before"), (1, "after")):
        near = counts.select(pl.col("value") - step, pl.col("rows").alias(name))
        top = top.join(near, on="value", how="left")
    near_rows = (top["before"].fill_null(0) + top["after"].fill_null(0)) / 2
    return float((near_rows / top["rows"]).median()) >= 0.5  # type: ignore[arg-type]
