"""Recognise columns of times: numbers since 1970, digits such as 2023111422, and written dates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import polars as pl

from stratarec.data.columns.text_values import parse_times, read_times
from stratarec.data.durations import PER_SECOND
from stratarec.data.schema import TimeUnit
from stratarec.data.splits import Span

_UNITS: tuple[TimeUnit, ...] = ("s", "ms", "us", "ns")
_DIGITS = ("%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S", "%y%m%d%H")
# Formats with the day first are listed before formats with the month first: if both fit equally well, the day is first.
_DATES = (
    "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%y", "%m-%d-%y",
    "%d.%m.%y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m-%d", "%B %d, %Y", "%B %d %Y", "%d %B %Y", "%d-%B-%Y", "%d-%B-%y",
    "%d. %B %Y",
)  # fmt: skip
_CLOCKS = (
    "", " %H:%M", " %H:%M:%S", " %H:%M:%S%.f", ", %H:%M", ", %H:%M:%S", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p",
    ", %I:%M %p", ", %I:%M:%S %p", " %H",
)  # fmt: skip
_OTHERS = (
    "%Y-%m-%d %H:%M:%S UTC", "%Y-%m-%d %H:%M:%S%.f UTC", "%d/%b/%Y:%H:%M:%S %z",
    "%a %b %d %H:%M:%S %z %Y", "%a %b %d %H:%M:%S %Y", "%a, %d %b %Y %H:%M:%S %z", "%a, %d %b %Y %H:%M:%S GMT",
    "%Y-%m-%d %H:%M:%S %z",
)  # fmt: skip
_FIRST_ROWS = 100
_HOUR, _DAY = 3600, 86_400
# Minimum length of a log in seconds for a split by time. A shorter log is split at random.
_SHORTEST = 10 * _HOUR
_DIGITS_ALONE = r"^\s*\d+(\.\d+)?\s*$"
_LIKE_A_DATE = (
    r"^(\d{1,4}[-/. ]+(\d{1,2}|[A-Za-z]{3,9})[-/., ]+\d{2,4}|[A-Za-z]{3,9},? +([A-Za-z]{3} +)?\d{1,2})[^|;]{0,25}$"
)
_SWAPPED = str.maketrans("dm", "md")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times in a column."""

    unit: TimeUnit
    form: str
    """Value for `schema.time_format`; empty if no format is needed."""
    span: Span
    how: str
    """Description of the values for the user."""
    seconds: pl.Series = field(compare=False)
    """Distinct times in seconds, ascending."""

    def split_seconds(self, *, is_complete: bool) -> int:
        """Return the length in seconds of the test split by time and of the equally long validation split before it.

        The length is 0 for a log that is too short. `is_complete` says that the column has all rows of the log; the
        length is then chosen so that both splits get rows.
        """
        times = self.seconds.to_numpy()
        last, span = int(times[-1]), int(times[-1] - times[0])
        if span < _SHORTEST:
            return 0
        step = _DAY if span >= 10 * _DAY or ((times - last) % _DAY == 0).all() else _HOUR
        length = max(span // 10 // step, 1) * step
        while is_complete and 4 * length <= span and not ((times > last - 2 * length) & (times <= last - length)).any():
            length += step
        return length if 4 * length <= span else 0


def as_times(column: pl.Series) -> Times | None:
    """Return the times of a column. None unless all values are times from 1990 to 2099, and at least two differ."""
    kind = column.dtype
    if column.null_count() or not len(column):
        return None
    if not (kind.is_integer() or kind.is_float() or kind in (pl.String, pl.Date) or kind.base_type() == pl.Datetime):
        return None
    if kind == pl.String and not column.head(_FIRST_ROWS).str.contains(r"\d").all():
        return None
    if kind == pl.String and not column.str.contains(_DIGITS_ALONE).all():
        iso = _read(column, "", "dates as text")
        if iso:
            return iso
    for form, how in _forms(column):
        times = _read(column, form, how)
        if times:
            return times
    fractions = ", from floats" if kind.is_float() else ""
    return _read(column, "", "timestamps" if kind.is_temporal() else f"numbers in {{}} since 1970{fractions}")


def _read(column: pl.Series, form: str, how: str) -> Times | None:
    for unit in _UNITS:
        result = read_times(column, unit, form)
        if result is None or result[0].null_count():
            return None
        value, fault = result
        span = Span(first=int(value.min()), last=int(value.max()), unit=unit)  # type: ignore[arg-type]
        if not fault and "UTC" in str(span) and span.last > span.first:
            seconds = (value // PER_SECOND[unit]).unique().sort()
            return Times(unit=unit, form=form, span=span, how=how.format(unit), seconds=seconds)
    return None


def _forms(column: pl.Series) -> Iterator[tuple[str, str]]:
    """Yield time formats that fit the column, the most likely first, with a description for the user."""
    if column.dtype.is_temporal() or column.dtype.is_float():
        return
    text = column.cast(pl.String).str.strip_chars().unique()
    if text.str.contains(_DIGITS_ALONE).all():
        fitting = [form for form in _DIGITS if _fits(text, form)]
        others = {form: [other for other in fitting if other != form] for form in fitting}
    elif text.str.contains(_LIKE_A_DATE).all():
        fitting = [form for form in _text_forms() if _fits(text.head(_FIRST_ROWS), form) and _fits(text, form)]
        others = {form: [form.translate(_SWAPPED)] for form in fitting}
    else:
        return
    for form in sorted(fitting, key=lambda form: _unlikely(column, form)):
        other = next((other for other in others[form] if other != form and other in fitting), "")
        yield form, f"times as {form}" + (f" ({other} also fits: check which is right)" if other else "")


def _text_forms() -> Iterator[str]:
    yield from (f"{date}{clock}" for date in _DATES for clock in _CLOCKS)
    yield from _OTHERS


def _fits(text: pl.Series, form: str) -> bool:
    times = parse_times(text, form)
    return not times.null_count() and bool(times.dt.year().is_between(1990, 2099).all())


def _unlikely(column: pl.Series, form: str) -> tuple[float, int]:
    """Return two signs of a wrong format: how often times decrease from row to row, and their span in seconds.

    Most logs are in order of time. If day and month are swapped, the times of one month span a year.
    """
    epochs = parse_times(column.cast(pl.String).str.strip_chars(), form).dt.epoch("s")
    falls = float((epochs.diff().drop_nulls() < 0).mean() or 0)  # type: ignore[arg-type]
    return round(falls, 1), int(epochs.max()) - int(epochs.min())  # type: ignore[arg-type]
