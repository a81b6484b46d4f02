"""Events (positive rows) of users, and the history of a row at the time of that row.

Histories follow the rule of `prepare`: the last values of a feature among the user's positive rows with a strictly
earlier time. Rows with equal times keep the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.column_names import TIME, USER, column
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import Schema, SparseFeature
from stratarec.io.atomic import reporting_damage


def last_events(events: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Keep only events that later histories may contain: the last ones of each user. Sorted by user and time."""
    recent = [
        column(feature.of).is_not_null()
        & (column(feature.of).is_not_null().cum_sum(reverse=True).over(column(schema.user)) <= feature.max_length)
        for feature in schema.histories
    ]
    return events.filter(pl.any_horizontal(recent))


def event_columns(schema: Schema) -> list[str]:
    """Return the names of the columns of events: user, time and the features of histories."""
    return list(dict.fromkeys([schema.user, schema.time, *(feature.of for feature in schema.histories)]))


def read_events(path: Path, schema: Schema) -> pl.DataFrame:
    """Read the events in a Parquet file, and check them: the file is not trusted."""
    with reporting_damage(path):
        table = pq.read_table(path, use_threads=False)
        if table.column_names != event_columns(schema):
            raise ValueError(f"its columns are {table.column_names}, expected {event_columns(schema)}")
        for stored in table.columns:
            stored.validate(full=True)
        events = pl.from_arrow(table)
        assert isinstance(events, pl.DataFrame)
        user, time = events[schema.user], events[schema.time]
        if time.dtype != pl.Int64 or user.null_count() or time.null_count():
            raise ValueError("a user or a time is missing, or a time is not an integer")
        for name, kind in events.schema.items():
            if kind not in (pl.String, pl.Int64, pl.UInt64):
                raise ValueError(f"column {name!r} is {kind}, expected text or integers of 64 bits")
    return events


class Events:
    """The positive rows of some frames, by user, from which histories are computed.

    Parameters
    ----------
    frames : iterable of DataFrame
        Frames in the order of the log, with label, time, user and the features of histories, typed as by a `Source`.
        Their positive rows that have a user are kept in memory.
    """

    def __init__(self, frames: Iterable[pl.DataFrame], schema: Schema) -> None:
        self._schema, self._features = schema, schema.histories
        names = list(dict.fromkeys(feature.of for feature in self._features))
        parts = [self._positive(frame, names) for frame in frames]
        self._events = pl.concat(parts, how="vertical_relaxed").sort(USER, TIME, maintain_order=True)
        self._times = self._events[TIME].unique().sort().to_numpy()
        self._users = self._events[USER].unique().sort().to_numpy()

    def _positive(self, frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        schema = self._schema
        clicked = frame.filter((frame[schema.label_column] == 1).fill_null(True) & frame[schema.user].is_not_null())
        user, time = pl.Series(USER, _user_hash(clicked, schema)), clicked[schema.time].alias(TIME)
        return pl.DataFrame([user, time, *(clicked[name] for name in names)])

    def histories(self, frame: pl.DataFrame) -> dict[str, pl.Series]:
        """Return the list of each history feature for the rows of `frame`, which has time and user.

        A row without a user has empty histories.
        """
        return {feature.name: self._history(feature, frame) for feature in self._features}

    def _history(self, feature: SparseFeature, frame: pl.DataFrame) -> pl.Series:
        events = self._events.filter(self._events[feature.of].is_not_null())
        places = self._places(events[USER].to_numpy(), events[TIME].to_numpy())
        user = _user_hash(frame, self._schema)
        stop = np.searchsorted(places, self._places(user, frame[self._schema.time].to_numpy()), side="left")
        first = np.searchsorted(places, self._places(user, None), side="left")
        has_events = np.isin(user, self._users) & frame[self._schema.user].is_not_null().to_numpy()
        start = np.maximum(first, stop - feature.max_length)
        length = np.where(has_events, np.maximum(stop - start, 0), 0)
        return _slices(feature.name, events[feature.of], start, length)

    def _places(self, user: NDArray[np.uint64], time: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Combine user and time into one number that ascends with both; without times, each user's least number."""
        number = np.searchsorted(self._users, user).astype(np.int64) * (len(self._times) + 1)
        return number if time is None else number + np.searchsorted(self._times, time, side="left")


def _user_hash(frame: pl.DataFrame, schema: Schema) -> NDArray[np.uint64]:
    """Hash users as text, because one log may have integers and another the same numbers as text."""
    return stable_hash(frame[schema.user].cast(pl.String))


def _slices(name: str, values: pl.Series, start: NDArray[np.int64], length: NDArray[np.int64]) -> pl.Series:
    """Return a series with the list ``values[start : start + length]`` of each row."""
    offsets = np.concatenate([[0], length.cumsum()]).astype(np.int64)
    flat = values.gather(np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], length))
    lists = pl.from_arrow(pa.LargeListArray.from_arrays(offsets, flat.to_arrow()))
    assert isinstance(lists, pl.Series)
    return lists.alias(name)
