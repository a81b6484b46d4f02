"""Parse integers, times and lists from text and numbers; remove incomplete events from lists of
equal length.

A time column is refused, with the unit to set, if its timestamps are finer than the unit of the
schema, or if its integers are dates between 1990 and 2100 only in another unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stratarec.data.durations import PER_SECOND, TimeUnit
from stratarec.data.schema import Decimal
from stratarec.data.splits import FIRST_DATE, LAST_DATE, too_coarse, unlikely_unit
from stratarec.errors import ConfigError

TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
# Every integer below this is exact as float64.
_EXACT = float(1 << 53)
# A date, optionally with a time of day, a fraction and an offset.
_ISO_TIME = r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?)?$"
_OFFSET = r"(Z|[+-]\d\d:?\d\d)$"
# Directive of a time format that consists of digits -> number of digits.
_WIDTHS = {"%Y": 4, "%y": 2, "%m": 2, "%d": 2, "%H": 2, "%M": 2, "%S": 2}
_LEADING_ZEROS = r"^\s*[+-]?0\d"
# Ids that are no integers although they can be read as floats: 007, and hexadecimal digits such as
# 1e82.
_IDS = rf"{_LEADING_ZEROS}|^\s*\d+[eE]\d+\s*$"
# Numbers as people write them: a sign of a currency or percent, and groups of three digits (in
# India also of two).
_UNIT = r"(?:%|(?:[A-Za-z]{1,2})?\p{Sc}|[A-Z]{3}|[KkRF][rs]\.?|zł|Kč|Ft)"
_GROUPED = r"[1-9]\d{0,2}(?:[ \x{a0}\x{202f}\x{2009}]\d{3})+|[1-9]\d{0,2}(?:['’]\d{3})+"
_GROUPS: Mapping[str, str] = {
    ".": rf"{_GROUPED}|[1-9]\d{{0,2}}(?:,\d{{2,3}})*,\d{{3}}",
    ",": rf"{_GROUPED}|[1-9]\d{{0,2}}(?:\.\d{{3}})+",
}
# Lists as JSON, Python and NumPy write them. White space is listed, because Polars and Python
# differ on what it is.
_BLANKS = " \t\r\n"
_NOTHING = ("null", "None", "nan", "NaN")
_QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_ITEM = rf"(?s:{_QUOTED}|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[tT]rue|[fF]alse|{'|'.join(_NOTHING)})"
_LIST = rf"^\s*\[\s*(?:{_ITEM}(?:(?:\s*,\s*|\s+){_ITEM})*\s*,?\s*)?\]\s*$"
# Text in brackets must not be split, because the brackets would become parts of the first and last
# value.
_ENCLOSED = r"""(?s)^\s*(?:\[\s*["'\[({].*\]|\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\})\s*$"""
_BRACKETS = ("[", "(", "{")
_ESCAPE = re.compile(
    r"(?s)\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))"
)
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
}


def read_times(
    raw: pl.Series, unit: TimeUnit, form: str = "", *, exact: bool = True
) -> tuple[pl.Series, str] | None:
    """Return times as ``Int64`` in `unit` (null for values that are not times), and an error text
    (empty if there is no error). If `exact` is false, times that are finer than `unit` are rounded
    down and are no error.

    Return None if the column has a type that cannot be a time. `form` is the format of text and
    integers, such as %d/%m/%Y; empty for ISO 8601 text and for numbers that count from 1970.
    `ConfigError` if it is not a valid format.
    """
    if form and (raw.dtype in TEXT_TYPES or raw.dtype.is_integer()):
        return _epochs(parse_times(raw.cast(pl.String).str.strip_chars(), form, _ticks(unit)), unit, exact)
    if raw.dtype in TEXT_TYPES:
        text = raw.cast(pl.String).str.strip_chars()
        integers = text.cast(pl.Int64, strict=False)
        if integers.null_count() == text.null_count():
            return integers, unlikely_unit(integers, unit)
        numbers = text.cast(pl.Decimal(38, 9 if unit == "ns" else 6), strict=False)
        counts, count_fault = _times_from_numbers(numbers, unit, exact)
        if numbers.null_count() == text.null_count():
            return counts, count_fault
        value, fault = _epochs(_iso_times(text, unit), unit, exact)
        return value.fill_null(counts).alias(raw.name), fault or count_fault
    if raw.dtype.is_integer() or raw.dtype == pl.Null:
        value = raw.cast(pl.Int64, strict=False)
        return value, unlikely_unit(value, unit)
    if raw.dtype.is_float() or raw.dtype.is_decimal():
        return _times_from_numbers(raw, unit, exact)
    if raw.dtype == pl.Date:
        return _epochs(raw.cast(pl.Datetime("us")), unit, exact)
    return _epochs(raw, unit, exact) if raw.dtype.base_type() == pl.Datetime else None


def _times_from_numbers(numbers: pl.Series, unit: TimeUnit, exact: bool) -> tuple[pl.Series, str]:
    """Read times from numbers, which may have fractions; returns the same as `read_times`.

    Integers count in `unit`. If the column has fractions, or its numbers are not dates in `unit`,
    the numbers are read as seconds or as milliseconds, if that makes them dates.
    """
    integers = integers_from_numbers(numbers)
    missing = numbers.fill_nan(None).null_count() if numbers.dtype.is_float() else numbers.null_count()
    fault = unlikely_unit(integers, unit)
    if integers.null_count() == missing and not fault:
        return integers, ""
    ticks = "us" if numbers.dtype.is_float() else _ticks(unit)  # a float of seconds has no nanoseconds
    times: pl.Series = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(numbers))
    for scale in (PER_SECOND["s"], PER_SECOND["ms"]):
        is_date = numbers.is_between(FIRST_DATE * scale, LAST_DATE * scale, closed="left")
        dates = numbers.set(~is_date.fill_null(False), None)
        times = times.fill_null((dates * (PER_SECOND[ticks] // scale)).round().cast(pl.Int64))
    value, coarse = _epochs(times.cast(pl.Datetime(ticks)), unit, exact)
    return value.fill_null(integers).alias(numbers.name), coarse or (
        fault if times.null_count() == len(times) else ""
    )


def _epochs(times: pl.Series, unit: TimeUnit, exact: bool) -> tuple[pl.Series, str]:
    return times.dt.epoch(unit), too_coarse(times, unit) if exact else ""


def _ticks(unit: TimeUnit) -> Literal["us", "ns"]:
    """Return the resolution at which text is parsed: microseconds, which show whether `unit` loses
    digits.

    Nanoseconds are used only if they are the `unit`, because their range of dates is small.
    """
    return "ns" if unit == "ns" else "us"


def _to_arrow(column: pl.Series) -> pa.Array:
    """Return a column without its name: Polars ends with a panic if the name has a zero
    character.
    """
    return column.alias("").to_arrow()


def parse_times(text: pl.Series, form: str, ticks: Literal["us", "ns"] = "us") -> pl.Series:
    """Parse text in the format `form` as ``Datetime``, null for other text. Raises `ConfigError`
    for an invalid format.

    This is stricter than Polars, which also parses 2023111 as ``%Y%m%d``, and 23 as ``%Y``.
    """
    full, suffix = form, ""
    # Polars requires minutes with hours
    if re.search("%[HI]", form) and not re.search("%[MTRrcXs+]", form):
        full, suffix = f"{form} %M", " 00"
    try:
        times = (text + suffix).str.to_datetime(full, strict=False, time_unit=ticks)
    except pl.exceptions.PolarsError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"schema.time_format is {form!r}, expected one such as %d/%m/%Y ({reason})"
        ) from error
    digits = [_WIDTHS.get(part) for part in re.findall("%?.", form)]
    fits = times.dt.year() > 999 if "%Y" in form else times.is_not_null()
    if None not in digits:
        fits &= text.str.len_bytes() == sum(filter(None, digits))
    return times.set(~fits.fill_null(False), None)


def _iso_times(text: pl.Series, unit: TimeUnit) -> pl.Series:
    try:  # Arrow is the fastest, and reads columns in which all times have the same form
        times = pl.from_arrow(pc.cast(_to_arrow(text), pa.timestamp(_ticks(unit))))
    except pa.ArrowInvalid:
        return _mixed_iso_times(text, unit)
    assert isinstance(times, pl.Series)
    return times


def _mixed_iso_times(text: pl.Series, unit: TimeUnit) -> pl.Series:
    """Parse ISO 8601 text in mixed forms: some values have offsets or no time of day, or are not
    times.
    """
    is_time = text.str.contains(_ISO_TIME).fill_null(False)
    plain = text.set(~is_time, None).str.replace(" ", "T", literal=True).str.replace(r"Z$", "+00:00")
    has_offset = plain.str.contains(_OFFSET).fill_null(False)
    local = plain.set(has_offset, None)
    is_day = (local.str.len_chars() == 10).fill_null(False)
    local = local.zip_with(~is_day, local + "T00:00:00")
    is_minute = (local.str.len_chars() == 16).fill_null(False)
    local = local.zip_with(~is_minute, local + ":00")
    zoned = plain.set(~has_offset, None).str.replace(r"T(\d\d:\d\d)([+-])", "T${1}:00${2}")
    form, ticks = "%Y-%m-%dT%H:%M:%S%.f", _ticks(unit)
    local_times = local.str.to_datetime(form, strict=False, time_unit=ticks)
    return local_times.fill_null(
        zoned.str.to_datetime(f"{form}%z", strict=False, time_unit=ticks).dt.replace_time_zone(None)
    )


def integers_from_numbers(raw: pl.Series) -> pl.Series:
    """Convert floats or decimals to ``Int64``; null for fractions, and for floats too large to be
    exact integers.
    """
    if raw.dtype.is_decimal():
        integers = raw.cast(pl.Int64, strict=False)
        return integers.set((integers.cast(raw.dtype, strict=False) != raw).fill_null(True), None)
    number = pl.col("")
    is_integer = (number.round() == number) & (number.abs() < _EXACT)
    integer = pl.when(is_integer).then(number).cast(pl.Int64, strict=False)
    return raw.cast(pl.Float64).to_frame("").select(integer).to_series().alias(raw.name)


def integers_from_text(raw: pl.Series) -> pl.Series:
    """Parse text such as 12 and 12.0 as ``Int64``; null for other text, such as 012, which is a
    different id than 12, and 1e82.
    """
    integers = raw.cast(pl.Int64, strict=False)
    if integers.null_count() > raw.null_count():
        bare = raw.str.strip_chars()
        floats = integers_from_numbers(bare.cast(pl.Float64, strict=False))
        integers = bare.cast(pl.Int64, strict=False).fill_null(floats)
    elif (raw.str.len_bytes() == _digits(integers)).all():  # 6 times as fast as the pattern
        return integers
    are_ids = raw.str.contains(_IDS).fill_null(False)
    return (integers.set(are_ids, None) if are_ids.any() else integers).alias(raw.name)


def _digits(integers: pl.Series) -> pl.Series:
    """Return how many characters each integer has in decimal notation."""
    present = integers.fill_null(0).to_numpy()
    digits = 1 + (present < 0).astype(np.uint32)
    largest = max(int(present.max(initial=0)), -int(present.min(initial=0)))
    for power in (10**exponent for exponent in range(1, len(str(largest)))):
        digits += (present >= power) | (present <= -power)
    return pl.Series(digits).set(integers.is_null(), None)


def numbers_from_text(text: pl.Series, decimal: Decimal) -> pl.Series:
    """Parse numbers as people write them, such as 1,234.50 or 1.234,50 €; null for other text.

    `decimal` is the decimal mark. Signs of a currency or percent, spaces and apostrophes are
    ignored, and groups of three digits may be separated by the other mark. Parentheses, or a minus
    at either end, mean a negative number.
    """
    mark = re.escape(decimal)
    number = rf"(?:(?:{_GROUPS[decimal]}|\d+)(?:{mark}\d*)?|{mark}\d+)"
    unit, minus = rf"(?:{_UNIT}\s*)?", r"[+\-−]?\s*"
    signed = rf"{minus}{unit}{minus}{number}\s*(?:{_UNIT})?\s*[-−]?"
    bare = text.str.strip_chars()
    fits = bare.str.contains(rf"^(?:{signed}|{unit}\({unit}{number}\s*(?:{_UNIT})?\))$").fill_null(False)
    # A point that is part of a unit, as in "kr.", is no decimal mark.
    digits = (
        bare.set(~fits, None)
        .str.replace_all(rf"\p{{L}}+\.?|[^\d{mark}]", "")
        .str.replace(decimal, ".", literal=True)
    )
    is_power = bare.str.contains(rf"^[+-]?\d+(?:{mark}\d*)?[eE][+-]?\d+$").fill_null(False)
    powers = (
        bare.set(~is_power, None).str.replace(decimal, ".", literal=True).cast(pl.Float64, strict=False)
    )
    value = digits.cast(pl.Float64, strict=False)
    is_negative = bare.str.contains(r"[-−(]").fill_null(False)
    return (
        pl.select(pl.coalesce(powers, pl.when(is_negative).then(-value).otherwise(value)))
        .to_series()
        .alias(text.name)
    )


def cast_exactly(values: pl.Series, kind: pl.DataType) -> pl.Series:
    """Cast values to `kind`; raise `PolarsError` for text that is not a number or has leading
    zeros.

    Booleans, which are texts, become 1 and 0.
    """
    if values.dtype == pl.String and kind.is_integer():
        values = values.replace({"true": "1", "false": "0"})
        padded = values.filter(values.str.contains(_LEADING_ZEROS))
        if len(padded):
            raise pl.exceptions.InvalidOperationError(f"{padded[0]!r} has leading zeros")
    return values.cast(kind)


def lists_from_text(text: pl.Series, separator: str) -> tuple[pl.Series, pl.Series]:
    """Parse each text as a list. Return the lists, and flags that say which texts are lists.

    With a separator, spaces around parts are removed, empty parts are null, and text in brackets is
    not a list. Without a separator, a text must be a list such as ``[1, 2]``, ``["a", "b"]`` or
    ``['a', 'b']``. Blank text is null.
    """
    text = text.set((text.str.strip_chars(_BLANKS) == "").fill_null(False), None)
    if separator:
        is_enclosed = text.str.contains(r"^\s*[\[({]")
        if is_enclosed.any():
            has_separator = text.str.contains(separator, literal=True)
            is_enclosed = text.str.contains(_LIST) | (text.str.contains(_ENCLOSED) & has_separator)
        part = pl.element().str.strip_chars(_BLANKS)
        return text.str.split(separator).list.eval(pl.when(part != "").then(part)), ~is_enclosed
    fits = text.str.contains(_LIST)
    item = pl.element()
    inner = pl.when(item.str.contains("^[\"']")).then(item.str.slice(1, item.str.len_chars() - 2))
    lists = text.set(~fits.fill_null(False), None).str.extract_all(_ITEM)
    lists = lists.list.eval(inner.otherwise(pl.when(~item.is_in(_NOTHING)).then(item)))
    if text.str.contains("\\", literal=True).any():
        lists = map_values(lists, _unescaped)
    return lists, fits


def split_text(text: str, separator: str) -> list[str] | None:
    """Return the non-empty parts of one text; None if the text needs the full rules of
    `lists_from_text`.
    """
    if not separator or text.lstrip().startswith(_BRACKETS):
        return None
    return [stripped for part in text.split(separator) if (stripped := part.strip(_BLANKS))]


def _unescaped(items: pl.Series) -> pl.Series:
    escaped = items.filter(items.str.contains("\\", literal=True)).unique().to_list()
    return items.replace(escaped, [_unescape(text) for text in escaped])


def _unescape(text: str) -> str:
    """Decode the escape sequences of JSON and Python; a backslash before any other character is
    kept.
    """
    plain = _ESCAPE.sub(
        lambda match: (
            _ESCAPED.get(match[4], match[0]) if match[4] else chr(int(match[1] or match[2] or match[3], 16))
        ),
        text,
    )
    # JSON writes a character beyond 16 bits as two escapes.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def series_of_lists(
    name: str, values: pl.Series, lengths: NDArray[np.int64], missing: pl.Series | None = None
) -> pl.Series:
    """Return a series of N lists that have consecutive values.

    Parameters
    ----------
    name : str
        Name of the series.
    values : Series
        The values of all lists, one list after the other.
    lengths : ndarray
        ``[N]`` number of values of each list.
    missing : Series, optional
        ``[N]`` flags of lists that are null. Their lengths must be 0.
    """
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    mask = None if missing is None else _to_arrow(missing)
    return pl.Series(name, pa.LargeListArray.from_arrays(offsets, _to_arrow(values), mask=mask))


def map_values(lists: pl.Series, read: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Apply `read` to the values of lists.

    `list.eval` could deadlock: its threads wait for the interpreter lock, held by a thread that
    waits for them.
    """
    lengths = lists.list.len().fill_null(0).to_numpy()
    values = read(lists.drop_nulls().explode(empty_as_null=False))
    return series_of_lists(lists.name, values, lengths, lists.is_null())


def drop_incomplete(lists: Sequence[pl.Series]) -> list[pl.Series]:
    """Remove incomplete events: if one of a row's lists is null at an index, remove the index from
    all of its lists.

    The lists of a row must have equal lengths.
    """
    flat = [column.drop_nulls().explode(empty_as_null=False) for column in lists]
    is_complete = np.logical_and.reduce([column.is_not_null().to_numpy() for column in flat])
    if is_complete.all():
        return list(lists)
    lengths = lists[0].list.len().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(lengths)), lengths)[is_complete]
    counts = np.bincount(rows, minlength=len(lengths))
    return [
        series_of_lists(column.name, values.filter(pl.Series(is_complete)), counts)
        for column, values in zip(lists, flat, strict=True)
    ]
