"""Values as text writes them: whole numbers, times and lists; and lists whose places belong together.

Timestamps finer than the unit of times, and integers that are dates between 1990 and 2100 in another unit only, are
faults that name the unit to set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from stratarec.data.durations import PER_SECOND
from stratarec.data.schema import TimeUnit
from stratarec.data.splits import FIRST_DATE, LAST_DATE, too_coarse, unlikely_unit
from stratarec.errors import ConfigError

_TEXT = (pl.String, pl.Categorical, pl.Enum)
# What a float holds without rounding.
_EXACT = float(1 << 53)
# A date, and after it a time of day, a fraction and an offset where there are some.
_FORM = r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?)?$"
# Digits of each part of a form that is digits alone.
_WIDTHS = {"%Y": 4, "%y": 2, "%m": 2, "%d": 2, "%H": 2, "%M": 2, "%S": 2}
_LEADING_ZEROS = r"^\s*[+-]?0\d"
_OFFSET = r"(Z|[+-]\d\d:?\d\d)$"
# Lists as JSON, Python and NumPy write them. Polars and Python must agree on blanks, so they are listed.
_BLANKS = " \t\r\n"
_NOTHING = ("null", "None", "nan", "NaN")
_QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_ITEM = rf"(?s:{_QUOTED}|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[tT]rue|[fF]alse|{'|'.join(_NOTHING)})"
_LIST = rf"^\s*\[\s*(?:{_ITEM}(?:(?:\s*,\s*|\s+){_ITEM})*\s*,?\s*)?\]\s*$"
# Brackets around all of a text that is to be split would stay at its first and last part.
_ENCLOSED = r"""(?s)^\s*(?:\[\s*["'\[({].*\]|\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\})\s*$"""
_BRACKETS = ("[", "(", "{")
_ESCAPE = re.compile(r"(?s)\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(00[0-9a-fA-F]{6})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", '"': '"', "'": "'", "\\": "\\", "/": "/"}


def read_times(raw: pl.Series, unit: TimeUnit, form: str = "") -> tuple[pl.Series, str] | None:
    """``Int64`` in `unit`, null where a value is no time, and what is wrong with the column as a whole.

    None for a column of another type.

    Parameters
    ----------
    form : str
        How text and integers are written; empty for ISO 8601, or digits alone that count from 1970.

    Raises
    ------
    ConfigError
        Where `form` is none.
    """
    if form and (raw.dtype in _TEXT or raw.dtype.is_integer()):
        return _epochs(as_written(raw.cast(pl.String).str.strip_chars(), form, _ticks(unit)), unit)
    if raw.dtype in _TEXT:
        text = raw.cast(pl.String).str.strip_chars()
        whole = text.cast(pl.Int64, strict=False)
        if whole.null_count() == text.null_count():
            return whole, unlikely_unit(whole, unit)
        numbers = text.cast(pl.Decimal(38, 9 if unit == "ns" else 6), strict=False)
        counted, odd = _counted(numbers, unit)
        if numbers.null_count() == text.null_count():
            return counted, odd
        value, fault = _epochs(_iso(text, unit), unit)
        return value.fill_null(counted).alias(raw.name), fault or odd
    if raw.dtype.is_integer() or raw.dtype == pl.Null:
        value = raw.cast(pl.Int64, strict=False)
        return value, unlikely_unit(value, unit)
    if raw.dtype.is_float() or raw.dtype.is_decimal():
        return _counted(raw, unit)
    if raw.dtype == pl.Date:
        return _epochs(raw.cast(pl.Datetime("us")), unit)
    return _epochs(raw, unit) if raw.dtype.base_type() == pl.Datetime else None


def _counted(numbers: pl.Series, unit: TimeUnit) -> tuple[pl.Series, str]:
    """Read times from numbers that may have fractions, as `read_times` does.

    Whole numbers count in `unit`. Where the column has fractions, or `unit` makes no dates of it, numbers that are
    dates in seconds or milliseconds are these.
    """
    whole = from_floats(numbers)
    fractions = numbers.fill_nan(None).null_count() if numbers.dtype.is_float() else numbers.null_count()
    fault = unlikely_unit(whole, unit)
    if whole.null_count() == fractions and not fault:
        return whole, ""
    ticks = "us" if numbers.dtype.is_float() else _ticks(unit)  # a float of seconds tells no more apart
    times: pl.Series = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(numbers))
    for scale in (PER_SECOND["s"], PER_SECOND["ms"]):
        dates = numbers.is_between(FIRST_DATE * scale, LAST_DATE * scale, closed="left")
        found = (numbers.set(~dates.fill_null(False), None) * (PER_SECOND[ticks] // scale)).round().cast(pl.Int64)
        times = times.fill_null(found)
    value, coarse = _epochs(times.cast(pl.Datetime(ticks)), unit)
    return value.fill_null(whole).alias(numbers.name), coarse or (fault if times.null_count() == len(times) else "")


def _epochs(times: pl.Series, unit: TimeUnit) -> tuple[pl.Series, str]:
    return times.dt.epoch(unit), too_coarse(times, unit)


def _ticks(unit: TimeUnit) -> Literal["us", "ns"]:
    """What text is read as: fine enough to see what `unit` would lose, for as many years as it has."""
    return "ns" if unit == "ns" else "us"


def as_written(text: pl.Series, form: str, ticks: Literal["us", "ns"] = "us") -> pl.Series:
    """``Datetime`` of text as `form` has it, null where a value is written otherwise.

    Polars takes less: 2023111 for ``%Y%m%d``, and the year 23 for ``%Y``.

    Raises
    ------
    ConfigError
        Where `form` is none.
    """
    full, behind = form, ""
    if re.search("%[HI]", form) and not re.search("%[MTRrcXs+]", form):  # Polars wants minutes where there are hours
        full, behind = f"{form} %M", " 00"
    try:
        found = (text + behind).str.to_datetime(full, strict=False, time_unit=ticks)
    except pl.exceptions.PolarsError as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"schema.time_format is {form!r}, expected one such as %d/%m/%Y ({said})") from error
    digits = [_WIDTHS.get(part) for part in re.findall("%?.", form)]
    fits = found.dt.year() > 999 if "%Y" in form else found.is_not_null()
    if None not in digits:
        fits &= text.str.len_bytes() == sum(filter(None, digits))
    return found.set(~fits.fill_null(False), None)


def _iso(text: pl.Series, unit: TimeUnit) -> pl.Series:
    kind = pa.timestamp(_ticks(unit))
    try:  # most columns are all of one kind, which Arrow reads fastest
        found = pl.from_arrow(pc.cast(text.to_arrow(), kind))
    except pa.ArrowInvalid:
        return _iso_by_row(text, unit)
    assert isinstance(found, pl.Series)
    return found


def _iso_by_row(text: pl.Series, unit: TimeUnit) -> pl.Series:
    """The same where values have offsets, or some of them are no times."""
    fits = text.str.contains(_FORM).fill_null(False)
    plain = text.set(~fits, None).str.replace(" ", "T", literal=True).str.replace(r"Z$", "+00:00")
    offset = plain.str.contains(_OFFSET).fill_null(False)
    form = "%Y-%m-%dT%H:%M:%S%.f"
    bare = plain.set(offset, None)
    day = bare.str.len_chars() == 10
    bare = bare.zip_with(~day.fill_null(False), bare + "T00:00:00")
    minute = (bare.str.len_chars() == 16).fill_null(False)
    bare = bare.zip_with(~minute, bare + ":00")
    zoned = plain.set(~offset, None).str.replace(r"T(\d\d:\d\d)([+-])", "T${1}:00${2}")
    ticks = _ticks(unit)
    own = bare.str.to_datetime(form, strict=False, time_unit=ticks)
    other = zoned.str.to_datetime(f"{form}%z", strict=False, time_unit=ticks).dt.replace_time_zone(None)
    return own.fill_null(other)


def from_floats(raw: pl.Series) -> pl.Series:
    """Return floats or decimals as ``Int64``; null for fractions, and for floats too large to be exact."""
    if raw.dtype.is_decimal():
        whole = raw.cast(pl.Int64, strict=False)
        return whole.set((whole.cast(raw.dtype, strict=False) != raw).fill_null(True), None)
    value = raw.cast(pl.Float64)
    return value.to_frame("").select(_rounded(pl.col(""))).to_series().alias(raw.name)


def from_text(raw: pl.Series) -> pl.Series:
    """Return text such as 12 and 12.0 as ``Int64``; null for all else, such as 012, which is another text than 12."""
    whole = raw.cast(pl.Int64, strict=False)
    if whole.null_count() > raw.null_count():
        bare = raw.str.strip_chars()
        whole = bare.cast(pl.Int64, strict=False).fill_null(from_floats(bare.cast(pl.Float64, strict=False)))
    padded = raw.str.contains(_LEADING_ZEROS).fill_null(False)
    return (whole.set(padded, None) if padded.any() else whole).alias(raw.name)


def cast_exactly(values: pl.Series, kind: pl.DataType) -> pl.Series:
    """Cast values; as Polars for text that is no number, raise `PolarsError` for text with leading zeros."""
    if values.dtype == pl.String and kind.is_integer():
        padded = values.filter(values.str.contains(_LEADING_ZEROS))
        if len(padded):
            raise pl.exceptions.InvalidOperationError(f"{padded[0]!r} has leading zeros")
    return values.cast(kind)


def _rounded(number: pl.Expr) -> pl.Expr:
    whole = (number.round() == number) & (number.abs() < _EXACT)
    return pl.when(whole).then(number).cast(pl.Int64, strict=False)


def lists_from_text(text: pl.Series, separator: str) -> tuple[pl.Series, pl.Series]:
    """Return the list that each text holds, and whether the text is one.

    With a separator, parts are stripped of blanks and empty parts are null; a text in brackets is not one to split.
    Without a separator, a text is a list such as ``[1, 2]``, ``["a", "b"]`` or ``['a', 'b']``. Blank text is null.
    """
    text = text.set((text.str.strip_chars(_BLANKS) == "").fill_null(False), None)
    if separator:
        whole = text.str.contains(r"^\s*[\[({]")
        if whole.any():
            several = text.str.contains(separator, literal=True)
            whole = text.str.contains(_LIST) | (text.str.contains(_ENCLOSED) & several)
        part = pl.element().str.strip_chars(_BLANKS)
        return text.str.split(separator).list.eval(pl.when(part != "").then(part)), ~whole
    fits = text.str.contains(_LIST)
    item = pl.element()
    inner = pl.when(item.str.contains("^[\"']")).then(item.str.slice(1, item.str.len_chars() - 2))
    lists = text.set(~fits.fill_null(False), None).str.extract_all(_ITEM)
    lists = lists.list.eval(inner.otherwise(pl.when(~item.is_in(_NOTHING)).then(item)))
    if text.str.contains("\\", literal=True).any():
        lists = map_values(lists, _unescaped)
    return lists, fits


def split_text(text: str, separator: str) -> list[str] | None:
    """Return the same parts of one text, without empty ones; None where `lists_from_text` must decide."""
    if not separator or text.lstrip().startswith(_BRACKETS):
        return None
    return [part for each in text.split(separator) if (part := each.strip(_BLANKS))]


def _unescaped(items: pl.Series) -> pl.Series:
    odd = items.filter(items.str.contains("\\", literal=True)).unique().to_list()
    return items.replace(odd, [_unescape(each) for each in odd])


def _unescape(text: str) -> str:
    """Decode the escapes of JSON and Python; a backslash before another character stays."""
    plain = _ESCAPE.sub(
        lambda found: _ESCAPED.get(found[4], found[0]) if found[4] else chr(int(found[1] or found[2] or found[3], 16)),
        text,
    )
    # JSON writes characters beyond 16 bits as two.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def map_values(lists: pl.Series, read: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Return the same lists of what `read` makes of their values.

    In `list.eval`, threads of Polars would wait for the interpreter, which another thread may hold that waits for them.
    """
    lengths = lists.list.len().fill_null(0).to_numpy()
    values = read(lists.drop_nulls().explode(empty_as_null=False))
    offsets, missing = np.concatenate([[0], lengths.cumsum()]).astype(np.int64), lists.is_null()
    kept = pa.LargeListArray.from_arrays(offsets, values.to_arrow(), mask=missing.to_arrow())
    return pl.Series(lists.name, kept)


def complete(lists: Sequence[pl.Series]) -> list[pl.Series]:
    """Lists that are as long as each other in every row, without the places at which one of them holds nothing."""
    flat = [column.drop_nulls().explode(empty_as_null=False) for column in lists]
    known = np.logical_and.reduce([column.is_not_null().to_numpy() for column in flat])
    if known.all():
        return list(lists)
    lengths = lists[0].list.len().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(lengths)), lengths)[known]
    offsets = np.concatenate([[0], np.bincount(rows, minlength=len(lengths)).cumsum()]).astype(np.int64)
    return [
        pl.Series(column.name, pa.LargeListArray.from_arrays(offsets, values.filter(pl.Series(known)).to_arrow()))
        for column, values in zip(lists, flat, strict=True)
    ]
