"""Recognize columns of dates other than the time of the event. Dates may be missing, and may be in
any year.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

from stratarec.cli.init.numbers import MISSING_WORDS
from stratarec.cli.init.times import Times, as_times
from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.dates import Seconds
from stratarec.data.durations import TimeUnit
from stratarec.data.schema import DateColumn

# Minimum share of dates among the values of a column of dates. Other values must be words for a
# missing value, or the column is ignored.
_MOSTLY_DATES = 0.9
# Dates of years in which `as_times` recognizes a format, and dates of all years in the usual
# format.
_RECENT, _ISO = r"(199|20\d)\d", r"^\s*\d{4}-\d\d-\d\d"
# Maximum number of characters of a value in a reason.
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Dates:
    """Format of the dates in a column."""

    how: str
    """Description of the values for the user."""
    unit: TimeUnit = "s"
    form: str = ""
    zone: str = "UTC"
    words: tuple[str, ...] = ()
    """Words for a missing date."""

    def seconds(self, column: pl.Series) -> Seconds:
        """Return the seconds since 1970, `NO_DATE` where a date is missing."""
        text = column.set(column.is_in(self.words), None) if self.words else column
        date = DateColumn(name=column.name, time_unit=self.unit, time_format=self.form)
        converter = Converter("", np.arange(len(column), dtype=np.int64), BadRows("skip"))
        return converter.dates(text.to_frame(), [date], {})[column.name]


@dataclass(frozen=True, kw_only=True)
class DateChoice:
    """Features that a drafted recipe computes from one column of dates, and why."""

    column: DateColumn
    reason: str


def dates_of_time(column: pl.Series, times: Times) -> Dates:
    """Return the format of the column with the times of events."""
    return Dates(how=times.how, unit=times.unit, form=times.form, zone=_zone(column))


def find_dates(column: pl.Series) -> tuple[Dates | None, str]:
    """Return the dates of a column; None if the column cannot be used as dates, and the reason if
    it has some.
    """
    present = column.drop_nulls()
    if column.dtype.is_temporal():
        usable = column.dtype == pl.Date or column.dtype.base_type() == pl.Datetime
        return (Dates(how="timestamps", zone=_zone(column)), "") if usable and len(present) else (None, "")
    is_text = column.dtype == pl.String
    recent = present.filter(present.str.contains(_RECENT)) if is_text else present
    times = as_times(recent)
    if times is None and is_text:
        times = as_times(present.filter(present.str.contains(r"\d")))
    if times is not None:
        dates = Dates(how=times.how, unit=times.unit, form=times.form)
    elif is_text and present.str.contains(_ISO).any():
        dates = Dates(how="dates as text")
    else:
        return None, ""
    seconds = pl.Series(dates.seconds(present))
    odd = present.filter(seconds == seconds.lower_bound())
    if len(odd) > (1 - _MOSTLY_DATES) * len(present):
        return None, ""
    words = tuple(sorted(odd.unique().to_list())) if is_text else ()
    if len(odd) and not all(word.strip().lower() in MISSING_WORDS for word in words):
        example = f"{odd[0]}"[:_SHOWN]
        return (
            None,
            f"{dates.how}; {example!r} is not a date, as {len(odd) / len(present):.1%} of the values",
        )
    return replace(dates, words=words), ""


def _zone(column: pl.Series) -> str:
    """Return the time zone of a column of timestamps; UTC if it has none, or an offset that is no
    zone.
    """
    zone = getattr(column.dtype, "time_zone", None) or "UTC"
    try:
        return str(ZoneInfo(zone).key)
    except (KeyError, ValueError, OSError):
        return "UTC"
