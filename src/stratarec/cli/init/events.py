"""Find the columns that say who did something and when: users, sessions and times.

A name only proposes a column. Its values decide, and the reason in the draft states what they show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from stratarec.cli.init.features import FEW, Guess
from stratarec.cli.init.numbers import is_whole
from stratarec.cli.init.times import Times, as_times, elapsed_times, resembles_times
from stratarec.cli.init.words import (
    ATTRIBUTES,
    BIRTHS,
    CALENDAR,
    ITEMS,
    SESSIONS,
    TIMES,
    USERS,
    is_code,
    names_a,
    tokens,
)

# Minimum share of rows in order of time that counts as evidence.
_ORDERED = 0.9
# A time is a property of the values of a column if at least _REPEATED of the rows have a value that
# repeats, and in _ONE_TIME of these rows the value has one time.
_REPEATED, _ONE_TIME = 0.3, 0.98
# A column has a daily rhythm if it has at least _RHYTHM_VALUES distinct times on _RHYTHM_DAYS days,
# and chi-squared of the hours of the day, in 8 bins, is at least _RHYTHM.
_RHYTHM_VALUES, _RHYTHM, _RHYTHM_DAYS = 300, 60.0, 3
# Minimum share of the later half's rows whose value is also in the earlier half, for a category.
_RETURNING = 0.3
_DAY = 86_400


class TimeColumn(NamedTuple):
    """A column whose values are times, and statistics of its values."""

    name: str
    times: Times
    owner: str
    """Column of which the times are a property, such as the date of registration of a user; empty
    for other times.
    """
    ordered: str
    """Text that says that rows are in order of time; empty if they are not."""


@dataclass(frozen=True, kw_only=True)
class TimeChoice:
    """The time of the rows, and why other times are left out."""

    name: str = ""
    """Column with the time of the rows; empty if there is none."""
    times: Times | None = None
    reason: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    """Other columns with times -> why they are left out."""

    @property
    def guess(self) -> Guess | None:
        """Guess for the column with the time of the rows."""
        return Guess(name=self.name, role="time", reason=self.reason) if self.name else None


def find_user(frame: pl.DataFrame, names: Sequence[str]) -> Guess | None:
    """Return the column of users: its name has a word for users, and it has many values that
    repeat.
    """
    for name in _named(names, USERS):
        if _has_keys(frame[name]) and not frame[name].null_count():
            rows = len(frame) / frame[name].n_unique()
            return Guess(name=name, role="user", reason=f"its name; {rows:.1f} rows each in the sample")
    return None


def find_session(frame: pl.DataFrame, names: Sequence[str], times: Times | None) -> Guess | None:
    """Return the column of sessions: its name has a word for sessions, and its values repeat, but
    do not return.
    """
    for name in _named(names, SESSIONS):
        if not _has_keys(frame[name]) or frame[name].null_count():
            continue
        rows = len(frame) / frame[name].n_unique()
        share = 0.0 if times is None else returning(frame, name, times)
        if share < _RETURNING:
            later = "" if times is None else f", {share:.0%} return in the later half"
            return Guess(
                name=name, role="session", reason=f"its name; {rows:.1f} rows each in the sample{later}"
            )
    return None


def _named(names: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield the names of ids that `words` denote, in the order of the words."""
    yield from (name for word in words for name in names if names_a(name, word))


def _has_keys(column: pl.Series) -> bool:
    """Whether a column has many values that repeat, and that can be ids."""
    is_id = (
        column.dtype.is_integer()
        or column.dtype == pl.String
        or (column.dtype.is_float() and is_whole(column))
    )
    return is_id and FEW < column.n_unique() - bool(column.null_count()) < len(column)


def advise_user(guesses: Mapping[str, Guess], frame: pl.DataFrame, item: str) -> dict[str, str]:
    """Return column -> advice for a log in which no column is the user: why it may be the user, and
    how to name it.
    """
    gaps = [
        name
        for name in _named(list(guesses), USERS)
        if guesses[name].role == "sparse" and _has_keys(frame[name])
    ]
    if gaps:
        missing = frame[gaps[0]].null_count() / len(frame)
        return {
            gaps[
                0
            ]: f"missing in {missing:.0%} of rows; to name it as `user`, fill it with an id of the visit"
        }
    ids = [guess for guess in guesses.values() if guess.role == "sparse" and guess.name != item]
    ids = [guess for guess in ids if not guess.ordered and _has_keys(frame[guess.name])]
    ids.sort(key=lambda guess: -guess.values)
    return {guess.name: "if these are the users, name it as `user`" for guess in ids[:2]}


def returning(frame: pl.DataFrame, name: str, times: Times | None) -> float:
    """Return the share of the later half's rows whose value of a column is also in the earlier
    half.
    """
    column = frame[name]
    if times is not None:
        column = column.gather(times.seconds.arg_sort())
    half = len(column) // 2
    earlier, later = column[:half].unique(), column[half:].drop_nulls()
    return float(later.is_in(earlier.implode()).mean() or 0)  # type: ignore[arg-type]


def returns(frame: pl.DataFrame, name: str, times: Times | None, held_out: pl.Series | None) -> bool:
    """Whether 30 % or more of the later half's rows have a value that is also in the earlier half.

    If `held_out` has the flags of the rows that are not for training: whether 30 % or more of these
    rows have a value that is also in the others.
    """
    if held_out is None:
        return returning(frame, name, times) >= _RETURNING
    returned = frame[name].filter(held_out).is_in(frame[name].filter(~held_out).unique().implode())
    return float(returned.mean() or 0) >= _RETURNING  # type: ignore[arg-type]


def does_not_return(guess: Guess, frame: pl.DataFrame, times: Times | None) -> str:
    """Return why a second id of users or visits is no category: its values do not return. Empty for
    other columns.
    """
    if guess.role not in ("sparse", "dense") or not any(
        names_a(guess.name, word) for word in (*SESSIONS, *USERS)
    ):
        return ""
    if not _has_keys(frame[guess.name]):
        return ""
    share = returning(frame, guess.name, times)
    if share >= _RETURNING:
        return ""
    return f"ids that do not return: {share:.0%} of the later half's rows have an id of the earlier half"


def find_time(frame: pl.DataFrame, names: Sequence[str], user: Guess | None) -> TimeChoice:
    """Choose the column with the times of the rows.

    Times that are a property of a user or item are left out, and so are text that looks like times
    and cannot be read. Numbers are times only if their name says so, if rows are in their order, or
    if they show the rhythm of days.

    Parameters
    ----------
    user : Guess, optional
        Column of users.
    """
    columns, others = [], dict[str, str]()
    for name in names:
        series = frame[name]
        times = as_times(series)
        if times is not None and _may_be_time(name):
            candidate = _examine(frame, name, times, user.name if user else "")
            if _is_time(candidate, series):
                columns.append(candidate)
            continue
        reason = "" if times is not None else other_times(series)
        if reason:
            others[name] = reason
    columns.sort(key=_rank)
    chosen = next((column for column in columns if not column.owner), None)
    if chosen is not None and not tokens(chosen.name) & TIMES:
        rivals = [column for column in columns if not column.owner and _rank(column) == _rank(chosen)]
        chosen = chosen if len(rivals) == 1 else None
    if chosen is not None:
        chosen = _finest(chosen, columns)
    for column in columns:
        if column is not chosen:
            others[column.name] = f"{column.times.how}; {_why_not(column, chosen)}"
    if chosen is None:
        return (
            _elapsed(frame, [name for name in names if name not in others], others)
            if not columns
            else TimeChoice(others=others)
        )
    reason = "; ".join(
        filter(None, (f"{chosen.times.how}, {chosen.times.span}", chosen.ordered, chosen.times.odd))
    )
    return TimeChoice(name=chosen.name, times=chosen.times, reason=reason, others=others)


def _may_be_time(name: str) -> bool:
    return bool(tokens(name) & TIMES) or not (tokens(name) & BIRTHS or is_code(name))


def _rank(column: TimeColumn) -> tuple[bool, bool, bool, bool]:
    """Return signs against a column: a property of something, not named like times, rows in another
    order.
    """
    words = tokens(column.name)
    return bool(words & BIRTHS), bool(words & ATTRIBUTES), not words & TIMES, not column.ordered


def _examine(frame: pl.DataFrame, name: str, times: Times, user: str) -> TimeColumn:
    keys = [key for key in frame.columns if key != name and (key == user or tokens(key) & {*ITEMS, *USERS})]
    ordered = _order(frame, times, user)
    owner = "" if ordered and not tokens(name) & ATTRIBUTES else _owner(frame, times, keys)
    return TimeColumn(name, times, owner, ordered)


def _order(frame: pl.DataFrame, times: Times, user: str) -> str:
    """Say that rows are in order of time, in the whole log or for each user; empty if they are
    not.
    """
    if times.values < 3:
        return ""
    if times.rises >= _ORDERED:
        return (
            "rows are in order of time"
            if times.rises == 1
            else f"{times.rises:.1%} of rows are in order of time"
        )
    if not user:
        return ""
    rows = pl.DataFrame({"key": frame[user], "time": times.seconds}).drop_nulls()
    moves = rows["time"].diff().filter((rows["key"] == rows["key"].shift()).fill_null(False))
    moves = moves.filter(moves != 0)
    if len(moves) < _REPEATED * len(rows) or float((moves > 0).mean() or 0) < _ORDERED:  # type: ignore[arg-type]
        return ""
    return f"rows of each {user} are in order of time"


def _owner(frame: pl.DataFrame, times: Times, keys: Sequence[str]) -> str:
    """Return the column of which the times are a property, because each of its values has one time;
    else empty.
    """
    for key in keys:
        if frame[key].dtype.base_type() == pl.List:
            continue
        rows = pl.DataFrame({"key": frame[key], "time": times.seconds}).drop_nulls()
        groups = rows.group_by("key").agg(pl.len().alias("rows"), pl.col("time").n_unique().alias("times"))
        repeated = groups.filter(pl.col("rows") > 1)
        count = int(repeated["rows"].sum())
        if repeated.height < 2 or count < _REPEATED * rows.height:
            continue
        if int(repeated.filter(pl.col("times") == 1)["rows"].sum()) >= _ONE_TIME * count:
            return key
    return ""


def _is_time(candidate: TimeColumn, column: pl.Series) -> bool:
    """Whether a column that can be read as times is one, by its form, its name, the order of rows
    or a rhythm.
    """
    times, words = candidate.times, tokens(candidate.name)
    is_named = bool(words & (TIMES | ATTRIBUTES | BIRTHS))
    is_written = column.dtype == pl.String or column.dtype.is_temporal() or "%Y" in times.form
    if is_written and "%y" not in times.form:
        return True
    return is_named or bool(candidate.ordered) or _has_rhythm(times)


def _has_rhythm(times: Times) -> bool:
    """Whether some hours of the day have more times than others, as people sleep. Numbers such as
    ids have none.
    """
    seconds = times.seconds.drop_nulls().unique().to_numpy()
    if len(seconds) < _RHYTHM_VALUES or int(seconds.max() - seconds.min()) < _RHYTHM_DAYS * _DAY:
        return False
    counts = np.bincount(seconds % _DAY * 8 // _DAY, minlength=8)
    expected = len(seconds) / 8
    return float(((counts - expected) ** 2 / expected).sum()) > _RHYTHM


def _finest(chosen: TimeColumn, columns: Sequence[TimeColumn]) -> TimeColumn:
    """Return the column with the same times as `chosen` and the most distinct ones: a date and a
    timestamp.
    """
    equal = [
        column
        for column in columns
        if not column.owner
        and column.times.values > 1.5 * chosen.times.values
        and float(((column.times.seconds - chosen.times.seconds).abs() <= _DAY).mean() or 0) > 0.99  # type: ignore[arg-type]
    ]
    return max(equal, key=lambda column: column.times.values, default=chosen)


def _why_not(column: TimeColumn, chosen: TimeColumn | None) -> str:
    if column.owner:
        return f"each {column.owner} has one: a property of {column.owner}, not the time of a row"
    if chosen is not None:
        return f"a recipe has one time column, and {chosen.name} is chosen"
    return "several columns are times, and neither names nor rows tell which is the time of a row; set it as `time`"


def date_parts(frame: pl.DataFrame, columns: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the columns that are the year, the month and the day of a date; None if there are
    none.
    """
    found = []
    for word, least, most in (("year", 1900, 2100), ("month", 1, 12), ("day", 1, 31)):
        names = [
            name
            for name in columns
            if names_a(name, word)
            and frame[name].dtype.is_integer()
            and frame[name].is_between(least, most).all()
        ]
        found += names[:1]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def other_times(column: pl.Series) -> str:
    """Return why a column with times, or with text that looks like times, is no feature; empty for
    other columns.
    """
    words = tokens(column.name)
    present = column.drop_nulls()
    if column.dtype == pl.String:
        present = present.filter(present.str.contains(r"\d"))
    if len(present) < 2 or not (column.dtype == pl.String or words & TIMES):
        return ""
    times = as_times(present) if _may_be_time(column.name) or column.dtype == pl.String else None
    if times is None:
        return resembles_times(column, named=bool(words & TIMES))
    if column.dtype != pl.String and not words & TIMES:
        return ""
    empty, words_there = column.null_count(), len(column) - column.null_count() - len(present)
    if words_there:
        odd: pl.Series = column.drop_nulls().filter(~column.drop_nulls().str.contains(r"\d"))
        return f"{times.how}; {words_there:,} rows have {odd[0]!r} and no time"
    return f"{times.how}; " + (f"missing in {empty:,} rows" if empty else "a recipe has one time column")


def _elapsed(frame: pl.DataFrame, names: Sequence[str], others: Mapping[str, str]) -> TimeChoice:
    """Choose numbers that are named like times and rise from row to row, if no column has dates."""
    for name in names:
        if tokens(name) & (TIMES - CALENDAR) and (times := elapsed_times(frame[name])) is not None:
            reason = f"{times.how}, {times.span}"
            return TimeChoice(name=name, times=times, reason=reason, others=others)
    return TimeChoice(others=others)
