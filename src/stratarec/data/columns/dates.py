"""Numbers that are computed from columns of dates: parts of the calendar, and days between two
dates.

The same functions compute them for logs, frames and single rows. Dates are whole seconds since 1970
(fractions are rounded down), from the year 1 to 9999. Days follow the Gregorian calendar in all
years, as in Python's datetime.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import cached_property
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.durations import PER_SECOND, TimeUnit
from stratarec.data.schema import DateColumn, DatePart
from stratarec.data.splits import FIRST_DATE, LAST_DATE

_DAY, _EPOCH = 86_400, datetime(1970, 1, 1)
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""First and last second of the years 1 to 9999."""
# At the ends of these years, Python cannot convert all times to other zones.
_FIRST_OFFSET, _LAST_OFFSET = FIRST_SECOND + 2 * _DAY, LAST_SECOND - 2 * _DAY
# Up to this number of times, offsets are looked up for each time, which is faster than finding the
# distinct days.
_FEW = 16
Seconds: TypeAlias = NDArray[np.int64]
NO_DATE = np.iinfo(np.int64).min
"""Value for a missing date in arrays of seconds."""
# A date in ISO 8601 without a fraction of a second.
_ISO = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:?\d\d)?)?")
_FIRST_FORMATTED = 1000
_PLAIN_DIRECTIVES = {"%Y", "%m", "%d", "%H", "%M", "%S"}


@dataclass(frozen=True)
class LocalTimes:
    """Local times, in seconds from 1970-01-01 00:00 of the same clock."""

    seconds: Seconds

    @cached_property
    def days(self) -> Seconds:
        """Number of whole days from 1970-01-01 to each time, ``[N]``."""
        return self.seconds // _DAY

    @cached_property
    def months(self) -> NDArray[np.datetime64]:
        """Month of each time, ``[N]`` datetime64[M]."""
        return self.days.astype("datetime64[D]").astype("datetime64[M]")


PARTS: Mapping[DatePart, Callable[[LocalTimes], Seconds]] = {
    "hour": lambda local: local.seconds % _DAY // 3600,
    "weekday": lambda local: (local.days + 3) % 7 + 1,  # 1970-01-01 was a Thursday
    "day": lambda local: local.days - local.months.astype("datetime64[D]").astype(np.int64) + 1,
    "month": lambda local: local.months.astype(np.int64) % 12 + 1,
    "days": lambda local: local.days,
}


def compute_dates(
    dates: Sequence[DateColumn], seconds: Mapping[str, Seconds]
) -> dict[str, NDArray[np.float64]]:
    """Return the features of columns of dates, NaN where a date is missing.

    Parameters
    ----------
    seconds : mapping of str to ndarray
        ``[N]`` seconds since 1970 in UTC of each column of dates, `NO_DATE` where missing.
    """
    numbers = dict[str, NDArray[np.float64]]()
    for column in dates:
        times = seconds[column.name]
        missing = times == NO_DATE
        local = LocalTimes(local_seconds(np.where(missing, 0, times), column.zone))
        for part, name in column.part_features.items():
            numbers[name] = np.where(missing, np.nan, PARTS[part](local))
        for other, name in column.since_features.items():
            # The difference of whole seconds is exact, so that the quotient is the only rounding.
            days = (times - seconds[other]) / _DAY
            numbers[name] = np.where(missing | (seconds[other] == NO_DATE), np.nan, days)
    return numbers


def to_seconds(times: pl.Series, unit: TimeUnit) -> pl.Series:
    """Round integers in `unit` down to seconds."""
    scale = PER_SECOND[unit]
    return times if scale == 1 else times // scale


def read_plain_date(cell: Any, unit: TimeUnit, form: str) -> int | None:
    """Return the seconds since 1970 of a value as `Converter` reads it, but without Polars, which
    takes milliseconds.

    Return None for a value that only `Converter` can read or refuse. `unit` and `form` are those of
    the column.
    """
    kind = type(cell)
    if kind is int and not form:
        seconds = cell // PER_SECOND[unit]
        return seconds if FIRST_DATE <= seconds < LAST_DATE else None
    if kind is str:
        text = cell.strip(" ")
        try:
            if form:
                is_plain = set(re.findall("%.", form)) <= _PLAIN_DIRECTIVES and "%Y" in form
                time = datetime.strptime(text, form) if is_plain else None
            else:
                # Python 3.10 reads neither Z nor an offset without a colon.
                iso = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text.replace("Z", "+00:00"))
                time = datetime.fromisoformat(iso) if _ISO.fullmatch(text) else None
        except ValueError:
            return None
    else:
        time = cell if kind is datetime and not cell.microsecond else None
        if kind is date:
            time = datetime(cell.year, cell.month, cell.day)
    if time is None or time.year < _FIRST_FORMATTED:
        return None
    utc = time if time.tzinfo is None else time.astimezone(timezone.utc).replace(tzinfo=None)
    return (utc - _EPOCH) // timedelta(seconds=1)


def local_seconds(seconds: Seconds, zone: str) -> Seconds:
    """Return the local times in `zone` of UTC times, both in seconds from 1970-01-01 00:00 of their
    clock.

    For many times, the offset is looked up for each day, and for each time of a day on which it
    changes.
    """
    if zone == "UTC":
        return seconds
    place, within = ZoneInfo(zone), seconds.clip(_FIRST_OFFSET, _LAST_OFFSET)
    if len(seconds) <= _FEW:
        return seconds + _offsets(within, place)
    days, inverse = np.unique(within // _DAY, return_inverse=True)
    first, last = (
        _offsets((days * _DAY + part).clip(_FIRST_OFFSET, _LAST_OFFSET), place) for part in (0, _DAY)
    )
    offsets, changes = first[inverse], np.flatnonzero((first != last)[inverse])
    offsets[changes] = _offsets(within[changes], place)
    return seconds + offsets


def _offsets(seconds: Seconds, zone: ZoneInfo) -> Seconds:
    """Return the offset of a zone from UTC at each time, in seconds."""
    times = (
        zone.fromutc((_EPOCH + timedelta(seconds=second)).replace(tzinfo=zone))
        for second in seconds.tolist()
    )
    offsets = (time.utcoffset() or timedelta() for time in times)
    return np.array([offset // timedelta(seconds=1) for offset in offsets], dtype=np.int64)
