"""Read the values of a column as times, in the form that fits best.

The forms are built from the values: runs of digits, words and marks of a date are its fields, and
digits that touch are one field. Each order of day, month and year that the fields allow is a
candidate. A candidate must read almost all values as dates from 1990 to 2099. Among those, the
log's order decides, and then the shortest span: if day and month are swapped, the times of one
month span a year.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.init.words import tokens
from stratarec.data.columns.text_values import parse_times, read_times
from stratarec.data.durations import PER_SECOND, TimeUnit
from stratarec.data.splits import FIRST_DATE, LAST_DATE, Span

_UNITS: tuple[TimeUnit, ...] = ("s", "ms", "us", "ns")
_HOUR, _DAY = 3600, 86_400
# Minimum length of a log in seconds for a split by time. A shorter log is split at random.
_SHORTEST = 10 * _HOUR
# Maximum share of rows that are no times, or that are far from all others.
_ODD = 0.005
# Maximum share of the first texts that a form may not read before all are tried.
_UNREAD = 0.1
# A time is far from the others if its distance from them is longer than this many times their span,
# and than 30 days.
_FAR_SPANS, _FAR_SECONDS = 2, 30 * _DAY
_SINCE_1970 = "numbers in {} since 1970"
# Days from 1899-12-30 to 1970-01-01, and words for dates without a time of day.
_SPREADSHEET, _DATES = 25_569, {"date", "dt", "dat", "datum", "fecha"}
_FIRST_ROWS, _LAYOUTS, _SHOWN = 500, 60, 40
_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
           "november", "december")  # fmt: skip
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
# Layouts write `n` for one or two digits, `9` for each digit of a longer run, and `a` for a word.
_CLOCK = r"n:n(?::n(?:[.,](?:n|9+))?)?"
_ZONE = rf"({_CLOCK}) ?[+-](?:9999|n:n|n)(?!\d)"
_DATE_FIELDS = {
    ("9999", "n", "n"): ("%Y %m %d",),
    ("n", "n", "9999"): ("%d %m %Y", "%m %d %Y"),
    ("n", "n", "n"): ("%d %m %y", "%m %d %y", "%y %m %d"),
    ("9" * 8,): ("%Y %m %d",),
    ("9" * 6,): ("%y %m %d",),
}
"""Fields of a date without a word for the month -> orders of day, month and year, the most likely
first.
"""
_WORDED_FIELDS = {("n", "9999"): "%d %Y", ("9999", "n"): "%Y %d", ("n", "n"): "%d %y", ("n",): "%d"}
_CLOCK_FIELDS = {"n": "%H", "9999": "%H%M", "9" * 6: "%H%M%S"}
_DIGITS = {6: ("%y%m%d",), 8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 12: ("%Y%m%d%H%M",), 14: ("%Y%m%d%H%M%S",),
           17: ("%Y%m%d%H%M%S%3f",)}  # fmt: skip
"""Number of digits -> forms of times written as digits only."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Unit, format and range of a column of times."""

    unit: TimeUnit
    form: str
    """Value for `schema.time_format`; empty if no format is needed."""
    span: Span
    """First and last time, without times that are far from all others."""
    how: str
    """Description of the values for the user."""
    seconds: pl.Series = field(compare=False)
    """Time of each row in seconds since 1970; null for rows that are no times."""
    odd: str = ""
    """Text about rows that are no times, or far from all others; empty if there are none."""
    unread: int = 0
    """Number of rows that are no times."""
    ends_early: bool = False
    """Whether some rows are far later than `span`."""

    @property
    def rises(self) -> float:
        """Share of rows that are not earlier than the row before."""
        return _rises(self.seconds)

    @property
    def values(self) -> int:
        """Number of distinct times."""
        return self.seconds.n_unique()

    @property
    def end(self) -> str:
        """Last time of `span`, as text for `split.last`."""
        return str(np.datetime64(self.span.last // PER_SECOND[self.unit], "s")).replace("T", " ")

    def split_seconds(self, *, is_complete: bool) -> tuple[int, int]:
        """Return the lengths in seconds of the validation split by time and of the test split after
        it.

        Both are 0 for a log that is too short. `is_complete` says that the column has all rows of
        the log; each split then has about a tenth of the rows. Otherwise, each is a tenth of the
        time.
        """
        first, last = (time // PER_SECOND[self.unit] for time in (self.span.first, self.span.last))
        times = self.seconds.drop_nulls().sort().to_numpy()
        times = times[(times >= first) & (times <= last)]
        span = last - first
        # The last time of the log is not known if only its first rows were read and they are not in
        # order.
        if span < _SHORTEST or (self.ends_early and not is_complete and self.rises < 1 - 2 * _ODD):
            return 0, 0
        are_dates = bool(((times - last) % _DAY == 0).all())
        steps = (_DAY,) if are_dates else (_HOUR,) if span < 10 * _DAY else (_DAY, _HOUR)
        if not is_complete:
            tenth = max(span // 10 // steps[0], 1) * steps[0]
            return (tenth, tenth) if 4 * tenth <= span else (0, 0)
        # Boundaries are whole days. If most rows are in a few of the days, they are whole hours.
        return next(filter(all, (_lengths(times, last, span, step) for step in steps)), (0, 0))


def _lengths(times: NDArray[np.int64], last: int, span: int, step: int) -> tuple[int, int]:
    """Return the lengths of the validation and the test split, in multiples of `step` seconds.

    Each has about a tenth of the rows, because most rows of a log that grows, or shrinks, are in a
    small part of its time. The lengths are 0 if one of the splits would have no rows, or training
    less than half of them.
    """
    most, lengths, end = span // 4 // step * step, [], last
    for _ in range(2):
        before = times[times <= end]
        if not len(before) or most < step:
            return 0, 0
        first = before[-(len(times) // 10 + 1) :][0]
        length = min(max(round((end - first) / step), 1) * step, most)
        while length < most and before[-1] <= end - length:
            length += step
        if before[-1] <= end - length:
            return 0, 0
        lengths.append(length)
        end -= length
    return (lengths[1], lengths[0]) if (times <= end).sum() >= len(times) / 2 else (0, 0)


def as_times(column: pl.Series) -> Times | None:
    """Return the times of a column in the form that fits best. None unless almost all rows have
    times that differ.
    """
    kind = column.dtype
    if not len(column) or column.null_count() > _ODD * len(column):
        return None
    if kind == pl.String:
        fitting = [
            times for form, how in _text_forms(column) if (times := _read(column, form, how)) is not None
        ]
    elif kind.is_integer() or kind.is_float():
        fitting = [
            times for form, how in _number_forms(column) if (times := _read(column, form, how)) is not None
        ]
    elif kind == pl.Date or kind.base_type() == pl.Datetime:
        times = _read(column, "", "timestamps")
        return times
    else:
        return None
    # A form with a year of four digits needs no further evidence.
    full = [times for times in fitting if "%y" not in times.form] or fitting
    full.sort(
        key=lambda times: (not times.form, -round(times.rises, 1), times.span.last - times.span.first)
    )
    if len(full) > 1 and full[0].form and full[1].form:
        other = f" ({full[1].form} also fits: check which is right)"
        return replace(full[0], how=full[0].how + other)
    return full[0] if full else None


def elapsed_times(column: pl.Series) -> Times | None:
    """Return numbers that rise from row to row as seconds since an unknown date; None for other
    columns.
    """
    if not column.dtype.is_numeric() or column.null_count() or column.n_unique() < _FIRST_ROWS // 5:
        return None
    seconds = column.cast(pl.Float64).floor().cast(pl.Int64, strict=False)
    if seconds.null_count() or _rises(seconds) < 1 - _ODD or int(seconds.min()) < 0:  # type: ignore[arg-type]
        return None
    span = Span(first=int(seconds.min()), last=int(seconds.max()), unit="s")  # type: ignore[arg-type]
    if span.last >= FIRST_DATE:
        return None
    how = "numbers that rise from row to row; if they do not count seconds, set time_unit"
    return Times(unit="s", form="", span=span, how=how, seconds=seconds)


def resembles_times(column: pl.Series, *, named: bool) -> str:
    """Return a description of values that look like times but cannot be read as times; empty for
    other columns.

    Parameters
    ----------
    named : bool
        Whether the name of the column suggests times. Otherwise the values must have a date.
    """
    if column.dtype != pl.String:
        return _serial(column) if named else ""
    if fault := _out_of_range(column):
        return fault
    text = column.drop_nulls().str.strip_chars().head(_FIRST_ROWS)
    layouts = _layouts(text)
    words = text.str.extract(r"(\p{L}{3,})").n_unique()
    # A word between numbers may be a month in any language, unless it is always the same, or there
    # are too many words.
    is_month = named or 2 < words <= 2 * len(_MONTHS)
    if not layouts or sum(
        count for layout, count in layouts if _resembles(layout, named, is_month)
    ) < 0.95 * len(text):
        return ""
    has_date = any(
        "9999" in layout or "99-" in layout or "a" in re.split(_CLOCK, layout)[0] for layout, _ in layouts
    )
    missing = "" if has_date else " without a date"
    return f"looks like times{missing}, such as {text[0][:_SHOWN]!r}; write them as 2023-11-14 22:13:20 to use them"


def _resembles(layout: str, named: bool, is_month: bool) -> bool:
    """Whether a layout has a date with a year of four digits, or a clock if the column is named
    like times.
    """
    without_clock, clocks = re.subn(_CLOCK, "", layout)
    runs = re.findall(r"n|9+", without_clock)
    if len(layout) >= _SHOWN or len(runs) > 4:
        return False
    if "9999" in runs:
        return (
            named or clocks > 0 or len(runs) == 3 or (len(runs) == 2 and "a" in without_clock and is_month)
        )
    return named and clocks > 0


def _out_of_range(column: pl.Series) -> str:
    """Describe dates that can be read, but that are too early or too late for times; empty for
    other text.
    """
    # Digits alone are read as numbers of seconds.
    result = read_times(column, "s") if column.str.contains(r"^\d+-\d").all() else None
    if result is None or result[0].null_count() > _ODD * len(column) or not result[0].drop_nulls().len():
        return ""
    far = ~result[0].is_between(FIRST_DATE, LAST_DATE, closed="left").fill_null(True)
    years = " to ".join(str(np.datetime64(second, "s"))[:4] for second in (FIRST_DATE, LAST_DATE - 1))
    return (
        f"dates, but {far.sum():,} rows are not from {years}, such as {column.filter(far)[0]!r}; if it is "
        "the time of the rows, correct or remove these"
        if far.any()
        else ""
    )


def _serial(column: pl.Series) -> str:
    """Describe days since 1899-12-30, which spreadsheets store, or whole days since 1970."""
    is_whole = column.dtype.is_integer()
    if not (column.dtype.is_float() or (is_whole and tokens(column.name) & _DATES)):
        return ""
    days = column.drop_nulls().cast(pl.Float64)
    first, last = FIRST_DATE // _DAY + _SPREADSHEET, LAST_DATE // _DAY + _SPREADSHEET
    if not len(days) or days.n_unique() < 3:
        return ""
    if days.is_between(first, last).all():
        start, what = _SPREADSHEET, "1899-12-30 of a spreadsheet"
    elif is_whole and days.is_between(FIRST_DATE // _DAY, first - 1).all():
        start, what = 0, "1970-01-01"
    else:
        return ""
    date = str(np.datetime64(int((float(days[0]) - start) * _DAY), "s")).replace("T", " ")
    return f"looks like days since {what}; write {days[0]:{'.0f' if is_whole else ''}} as {date}"


def _read(column: pl.Series, form: str, how: str) -> Times | None:
    """Return the times that `form` reads, in the coarsest unit that loses nothing; None if many
    rows are no dates.
    """
    for unit in _UNITS:
        result = read_times(column, unit, form)
        if result is None:
            return None
        value, fault = result
        if value.null_count() > _ODD * len(column):
            return None
        if fault or value.null_count() == len(value):
            continue
        first, last = _usual(value, unit)
        scale = PER_SECOND[unit]
        is_date = value.is_between(FIRST_DATE * scale, LAST_DATE * scale, closed="left")
        if (~is_date).sum() > _ODD * len(value) or last <= first:
            continue
        span, seconds = Span(first=first, last=last, unit=unit), value // scale
        far = value.filter((value < first) | (value > last))
        odd = column.filter(value.is_null())
        parts = [f"{len(odd):,} rows are no times, such as {odd[0]!r}"] if len(odd) else []
        if len(far):
            parts.append(
                f"{len(far):,} rows are far from all others, such as {column.filter(value == far[0])[0]!r}"
            )
        return Times(
            unit=unit,
            form=form,
            span=span,
            how=how.format(unit),
            seconds=seconds,
            odd="; ".join(parts),
            unread=len(odd),
            ends_early=bool(len(far)) and int(far.max()) > last,  # type: ignore[arg-type]
        )
    return None


def _usual(value: pl.Series, unit: TimeUnit) -> tuple[int, int]:
    """Return the first and last time, without a few times that are far from all others."""
    times = value.drop_nulls().sort().to_numpy()
    cut = int(_ODD * len(times))
    core = times[cut : len(times) - cut]
    room = max(_FAR_SPANS * (int(core[-1]) - int(core[0])), _FAR_SECONDS * PER_SECOND[unit])
    limits = np.iinfo(np.int64)  # dates such as 9999-12-31 in nanoseconds would exceed them
    low, high = max(int(core[0]) - room, limits.min), min(int(core[-1]) + room, limits.max)
    in_range = times[(times >= low) & (times <= high)]
    return int(in_range[0]), int(in_range[-1])


def _rises(seconds: pl.Series) -> float:
    steps = seconds.drop_nulls().diff().drop_nulls()
    return float((steps >= 0).mean() or 0)  # type: ignore[arg-type]


def _number_forms(column: pl.Series) -> Iterator[tuple[str, str]]:
    """Yield forms of numbers: digits such as 2023111422, and counts since 1970."""
    if column.dtype.is_integer():
        text = column.drop_nulls().unique().cast(pl.String)
        lengths = text.str.len_bytes().unique()
        if len(lengths) == 1:
            yield from (
                (form, f"times as {form}")
                for form in _DIGITS.get(int(lengths[0]), ())
                if _reads(text, form)
            )
    yield "", _SINCE_1970 + (", from floats" if column.dtype.is_float() else "")


def _text_forms(column: pl.Series) -> Iterator[tuple[str, str]]:
    """Yield forms of text, built from the layouts of its values."""
    text = column.drop_nulls().str.strip_chars().head(_FIRST_ROWS)
    layouts = _layouts(text)
    if not any(re.search(r"9|n", layout) for layout, _ in layouts[:1]):
        return
    is_number = bool(text.str.contains(r"^[\d.]+$").all())
    if is_number and text.str.contains(r"\.\d{10}").any():
        return  # an id of two numbers
    if _reads(text, ""):
        yield "", _SINCE_1970 if is_number else "dates as text"
        if not is_number:
            return
    forms = dict.fromkeys(form for layout, _ in layouts[:3] for form in _forms(text, layout))
    yield from ((form, f"times as {form}") for form in forms if _reads(text, form))


def _reads(text: pl.Series, form: str) -> bool:
    """Whether a form reads most of the first texts; from 1990 to 2099, if it is not empty."""
    if not form:
        result = read_times(text, "ns")
        return result is not None and result[0].null_count() <= _UNREAD * len(text)
    years = parse_times(text, form).dt.year()
    return float(years.is_between(1990, 2099).fill_null(False).mean() or 0) >= 1 - _UNREAD  # type: ignore[arg-type]


def _layout(text: str) -> str:
    """Return a text with `n` for one or two digits, 9 for each digit of a longer run, and `a` for
    each word.
    """
    words = re.sub(r"[^\W\d_]+", "a", text)
    return re.sub(r"\d+", lambda run: "n" if len(run[0]) < 3 else "9" * len(run[0]), words)


def _layouts(text: pl.Series) -> list[tuple[str, int]]:
    """Return layouts of texts and their numbers of rows, the most frequent first; empty if there
    are too many.
    """
    counts: Counter[str] = Counter()
    for value in text:
        counts[_layout(value)] += 1
        if len(counts) > _LAYOUTS:
            return []
    # Of equally frequent layouts, a long one is first: it may have a fraction that others lack.
    return sorted(counts.items(), key=lambda item: (-item[1], -len(item[0])))


def _forms(text: pl.Series, layout: str) -> Iterator[str]:
    """Yield time formats for the texts that have a layout."""
    values = [value for value in text if _layout(value) == layout]
    words = _word_directives([re.findall(r"[^\W\d_]+", value) for value in values])
    zoned = re.sub(_ZONE, r"\1Z", layout)
    clocks = list(re.finditer(_CLOCK, zoned))
    clock = clocks[-1].span() if clocks else (len(zoned), len(zoned))
    before, after = _fields(zoned[: clock[0]]), _fields(zoned[clock[1] :])
    numbers = [part for part in (*before, *after) if part[0] in "n9"]
    numbers_before = sum(part[0] in "n9" for part in before)
    hour = "%I" if "%p" in words else "%H"
    for order in _orders(numbers, worded="%B" in words or "%b" in words, clock=bool(clocks)):
        directives, marks = iter(order), iter(words)
        if "%y" in order and not _has_two_digits(values, order.index("%y"), numbers_before):
            continue
        date = [_directive(part, directives, marks) for part in before]
        clock_form = [_directive(part, directives, marks) for part in after]
        written = _clock_form(zoned[slice(*clock)], hour) if clocks else ""
        form = "".join(date) + written + "".join(clock_form)
        # `Z` in the layout stands for an offset from UTC. A letter Z of the text is a word, and so
        # an `a`.
        zone = re.search(_ZONE, layout)
        if zone is not None:
            gap, minutes = " " if " " in zone[0] else "", not re.search(r"[+-]n$", zone[0])
            form = form.replace("\0", f"{gap}%z" if minutes else f"{gap}%#z")
        yield form


def _has_two_digits(values: Sequence[str], place: int, numbers_before: int) -> bool:
    """Whether the number at `place`, before the clock, has two digits in all texts, as a short year
    has.
    """
    return place >= numbers_before or all(len(re.findall(r"\d+", value)[place]) == 2 for value in values)


def _fields(layout: str) -> list[str]:
    return re.findall(r"n|9+|a|Z|.", layout)


def _directive(part: str, directives: Iterator[str], words: Iterator[str]) -> str:
    if part[0] in "n9":
        return next(directives)
    if part == "a":
        return next(words)
    return {"Z": "\0", "%": "%%"}.get(part, part)


def _word_directives(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return for each word of a layout its directive, or the word itself if it is the same in all
    rows.
    """
    result = []
    for column in zip(*rows, strict=True):
        words = {word.lower() for word in column}
        if words <= {*_MONTHS, *(month[:3] for month in _MONTHS)}:
            result.append("%b" if all(len(word) == 3 for word in words) else "%B")
        elif words <= {*_WEEKDAYS, *(day[:3] for day in _WEEKDAYS)}:
            result.append("%a" if all(len(word) == 3 for word in words) else "%A")
        elif words <= {"am", "pm"}:
            result.append("%p")
        else:
            # Rows with another word are not read.
            result.append(max(sorted(set(column)), key=column.count))
    return result


def _orders(numbers: Sequence[str], *, worded: bool, clock: bool) -> Iterator[list[str]]:
    """Yield the directives of the numbers outside the clock, for each order of day, month and year.

    Without a clock with colons, a number after the date can be the time of day: 2023-11-14 22,
    20231114T221320.
    """
    if len(numbers) == 1 and not clock and not worded:
        yield from ([form] for form in _DIGITS.get(len(numbers[0]), ()))
        return
    times = [""] if clock else ["", *_CLOCK_FIELDS]
    for time in times:
        fields = tuple(numbers)
        if time:
            if fields[-1:] != (time,) or fields[:-1] == ("n", "n", "n"):  # an address such as 10.1.2.3
                continue
            fields = fields[:-1]
        orders = (_WORDED_FIELDS[fields],) if worded and fields in _WORDED_FIELDS else ()
        for order in orders if worded else _DATE_FIELDS.get(fields, ()):
            directives = order.split()
            if len(fields) == 1 and not worded:
                directives = ["".join(directives)]
            yield [*directives, *([_CLOCK_FIELDS[time]] if time else [])]


def _clock_form(clock: str, hour: str) -> str:
    parts = [hour, "%M", "%S"][: clock.count("n") if "." not in clock and "," not in clock else 3]
    fraction = "%.f" if "." in clock else f",%{len(clock.rpartition(',')[2])}f" if "," in clock else ""
    return ":".join(parts) + fraction
