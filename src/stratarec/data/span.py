"""What times of a log say: how long it is, and whether they can be in the unit that its schema names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stratarec.data.durations import PER_SECOND, as_text, in_unit
from stratarec.data.schema import TimeUnit
from stratarec.data.splits import SplitConfig
from stratarec.errors import DataError

# 1990 to 2100 in seconds since 1970. Units are so far apart that a number is in these years by one unit at most.
_FROM, _TO = 631_152_000, 4_102_444_800


@dataclass(frozen=True, kw_only=True)
class Span:
    """From the first to the last time of a log."""

    first: int
    last: int
    unit: TimeUnit

    def __str__(self) -> str:
        length = as_text(self.last - self.first, self.unit)
        if not _in_these_years(self.last, self.unit):
            return f"{length} ({self.first} to {self.last} in {self.unit})"
        return f"{length} ({_date(self.first, self.unit)} to {_date(self.last, self.unit)} UTC)"

    def check_split(self, split: SplitConfig) -> None:
        """Refuse a split by time that leaves nothing to train on."""
        if split.by != "time":
            return
        asked = sum(in_unit(str(getattr(split, name)), self.unit, f"data.split.{name}") for name in ("valid", "test"))
        if asked > self.last - self.first:
            raise DataError(
                f"the training split has 0 samples: data.split.valid ({split.valid}) and data.split.test "
                f"({split.test}) take all of the log, which spans {self}; shorten them, or check time_unit"
            )


def unlikely_unit(times: pl.Series, unit: TimeUnit) -> str:
    """What is odd about integers as times in `unit`: all before 1990 or after 2100, but not so in another unit.

    Empty where nothing is; times that count from another beginning are before 1990 in every unit.
    """
    least, most = times.min(), times.max()
    if not (isinstance(least, int) and isinstance(most, int)):
        return ""
    scale = PER_SECOND[unit]
    if most >= _FROM * scale and least < _TO * scale:
        return ""
    for other in PER_SECOND:
        if _in_these_years(least, other) and _in_these_years(most, other):
            return (
                f"holds {least} to {most}, which are the years {_year(least, unit)} to {_year(most, unit)} if in "
                f"{unit}, and {_date(least, other)} to {_date(most, other)} if in {other}; set time_unit to {other}"
            )
    return ""


def too_coarse(times: pl.Series, unit: TimeUnit) -> str:
    """Where timestamps are finer than `unit`, so that different ones would become equal: what to do; else empty."""
    ticks, own = times.to_physical(), PER_SECOND[times.dtype.time_unit]  # type: ignore[attr-defined]
    fitting = [wanted for wanted, scale in PER_SECOND.items() if not _loses(ticks, own, scale).any()]
    if unit in fitting:
        return ""
    such = times.filter(_loses(ticks, own, PER_SECOND[unit]))[0]
    return f"has times finer than time_unit {unit}, such as {such}; set time_unit to {fitting[0]}"


def _loses(ticks: pl.Series, own: int, scale: int) -> pl.Series:
    """Where ticks, `own` of them a second, are no whole number of ticks of `scale` a second."""
    return (ticks % max(own // scale, 1)).fill_null(0) != 0


def _in_these_years(time: int, unit: TimeUnit) -> bool:
    return _FROM * PER_SECOND[unit] <= time < _TO * PER_SECOND[unit]


def _date(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s")).replace("T", " ")


def _year(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s").astype("datetime64[Y]"))
