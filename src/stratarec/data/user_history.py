"""Events (positive rows) of users, and the history of a row at the time of that row.

There is one rule, `UserEvents`: the history of a row consists of the last values of a feature among
the user's events that are strictly earlier than the row, and not older than the `within` of the
history. Events with equal times keep the order of the log. `prepare` applies the rule to partitions
of a log, and `Events` to rows that are scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.column_names import TIME, USER
from stratarec.data.columns.text_values import series_of_lists
from stratarec.data.dataset.row_group import coverage
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import Schema, SparseFeature
from stratarec.io.atomic import reporting_damage


@dataclass(frozen=True, kw_only=True)
class EventWindows:
    """Histories of N rows: row i has ``events[start[i]:stop[i]]``."""

    events: pl.Series
    """``[E]`` values of the feature, in the order of user and time."""
    start: NDArray[np.int64]
    """``[N]``"""
    stop: NDArray[np.int64]
    """``[N]``"""

    def lookups(self, rows: NDArray[np.bool_]) -> tuple[pl.Series, pl.Series]:
        """Return the distinct values in the windows of the rows with a true flag, and the lookups
        of each value.
        """
        counts = coverage(self.start[rows], self.stop[rows], len(self.events))
        covered = pl.DataFrame({"value": self.events, "count": counts})
        summed = covered.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") > 0)
        return summed["value"], summed["count"]

    def lists(self, name: str) -> pl.Series:
        """Return a series `name` with the history of each row as a list."""
        length = self.stop - self.start
        before = length.cumsum() - length
        flat = self.events.gather(np.arange(length.sum()) + np.repeat(self.start - before, length))
        return series_of_lists(name, flat, length)


class UserEvents:
    """The events of users that have a value of one feature, in which histories are slices.

    Parameters
    ----------
    feature : SparseFeature
        Feature of kind history.
    schema : Schema
        Schema with the feature.
    values : Series
        ``[E]`` values of the feature `of`, by user, time and order of the log; null if an event has
        none.
    user : ndarray
        ``[E]`` numbers or hashes of the users, at least 0, ascending.
    time : ndarray
        ``[E]`` int64 in `Schema.time_unit`, ascending for each user.
    """

    def __init__(
        self,
        feature: SparseFeature,
        schema: Schema,
        values: pl.Series,
        user: NDArray[Any],
        time: NDArray[np.int64],
    ) -> None:
        present = values.is_not_null().to_numpy()
        self._values = values.drop_nulls()
        self.places = np.flatnonzero(present)
        """Ascending indices of the events that have a value; the log has E events."""
        self._length = feature.max_length
        self._within = schema.age_limit(feature)
        users, number = np.unique(user[present], return_inverse=True)
        # One more user, so that the number of a user behind all others is a valid index.
        self._users = np.append(users, users.dtype.type(0))
        self._times = np.unique(time[present])
        self._keys = self._key(number, np.searchsorted(self._times, time[present]))

    def _key(self, user: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Combine user and time into one number that ascends with both."""
        return user * (len(self._times) + 1) + rank

    def windows(self, user: NDArray[Any], time: NDArray[np.int64] | None = None) -> EventWindows:
        """Return the histories of N rows.

        Parameters
        ----------
        user : ndarray
            ``[N]`` users, as in `UserEvents`.
        time : ndarray, optional
            ``[N]`` int64 times of the rows. Without times, the rows follow all events, and events
            of any age count.
        """
        number = np.searchsorted(self._users[:-1], user)
        oldest = np.zeros(len(user), dtype=np.int64)
        newest = np.full(len(user), len(self._times))
        if time is not None:
            newest = np.searchsorted(self._times, time)
            if self._within is not None:
                limit = np.maximum(time, np.iinfo(np.int64).min + self._within) - self._within
                oldest = np.searchsorted(self._times, limit)
        first, stop = (np.searchsorted(self._keys, self._key(number, rank)) for rank in (oldest, newest))
        # A user without events has the number of the next user.
        stop = np.where(self._users[number] == user, stop, first)
        return EventWindows(events=self._values, start=np.maximum(first, stop - self._length), stop=stop)


def last_events(events: pl.DataFrame, user: NDArray[Any], schema: Schema) -> pl.DataFrame:
    """Keep only events that later histories may contain: the last ones of each user.

    Parameters
    ----------
    events : DataFrame
        Events with the columns `event_columns`, by user, time and order of the log.
    user : ndarray
        ``[N]`` users of the events, as in `UserEvents`.
    """
    needed, time = np.zeros(len(events), dtype=bool), events[schema.time].to_numpy()
    for feature in schema.histories:
        of_feature = UserEvents(feature, schema, events[feature.of], user, time)
        windows = of_feature.windows(np.unique(user))
        needed[of_feature.places[coverage(windows.start, windows.stop, len(windows.events)) > 0]] = True
    return events.filter(pl.Series(needed))


def event_columns(schema: Schema) -> list[str]:
    """Return the names of the columns of events: user, time and the features of histories."""
    return list(dict.fromkeys([schema.user, schema.time, *(feature.of for feature in schema.histories)]))


def read_events(path: Path, schema: Schema) -> pl.DataFrame:
    """Read the events in a Parquet file, and check them: the file is not trusted."""
    events = read_values(path)
    with reporting_damage(path):
        if events.columns != event_columns(schema):
            raise ValueError(f"its columns are {events.columns}, expected {event_columns(schema)}")
        user, time = events[schema.user], events[schema.time]
        if time.dtype != pl.Int64 or user.null_count() or time.null_count():
            raise ValueError("a user or a time is missing, or a time is not an integer")
    return events


def read_values(path: Path) -> pl.DataFrame:
    """Read a Parquet file that is not trusted, and check that it has only text and integers of 64
    bits.
    """
    with reporting_damage(path):
        table = pq.read_table(path, use_threads=False)
        for stored in table.columns:
            stored.validate(full=True)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        for name, kind in frame.schema.items():
            if kind not in (pl.String, pl.Int64, pl.UInt64):
                raise ValueError(f"column {name!r} is {kind}, expected text or integers of 64 bits")
    return frame


class Events:
    """The positive rows of some frames, from which the histories of other rows are computed.

    Parameters
    ----------
    frames : iterable of DataFrame
        Frames in the order of the log, with label, time, user and the features of histories, typed
        as by a `Source`. Their positive rows that have a user are kept in memory.
    """

    def __init__(self, frames: Iterable[pl.DataFrame], schema: Schema) -> None:
        self._schema = schema
        names = list(dict.fromkeys(feature.of for feature in schema.histories))
        parts = [self._positive(frame, names) for frame in frames]
        events = pl.concat(parts, how="vertical_relaxed").sort(USER, TIME, maintain_order=True)
        user, time = events[USER].to_numpy(), events[TIME].to_numpy()
        self._events = {f.name: UserEvents(f, schema, events[f.of], user, time) for f in schema.histories}

    def _positive(self, frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        schema = self._schema
        clicked = frame.filter(
            (frame[schema.label_column] == 1).fill_null(True) & frame[schema.user].is_not_null()
        )
        user, time = pl.Series(USER, _user_hash(clicked, schema)), clicked[schema.time].alias(TIME)
        return pl.DataFrame([user, time, *(clicked[name] for name in names)])

    def histories(self, frame: pl.DataFrame) -> dict[str, pl.Series]:
        """Return the list of each history feature for the rows of `frame`, which has time and user.

        A row without a user has empty histories.
        """
        user, time = _user_hash(frame, self._schema), frame[self._schema.time].to_numpy()
        return {name: events.windows(user, time).lists(name) for name, events in self._events.items()}


def _user_hash(frame: pl.DataFrame, schema: Schema) -> NDArray[np.uint64]:
    """Hash users as text, because one log may have integers and another the same numbers as
    text.
    """
    return stable_hash(frame[schema.user].cast(pl.String))
