"""A partition of a spilled log. Its rows are sorted, counted and encoded, and their histories are
computed.

The positive events of a partition are sorted by user and time. The history of a row is a slice of
them (a window): the events of its user that are strictly earlier than the row. The distinct values
of a group are determined from raw columns, so that vocabularies and transforms are applied only to
distinct values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import PLACE, ROW, SPLIT, TIME, WEIGHT, column, label_names, weights_of
from stratarec.data.dataset.row_group import Encoded, GroupValues, WindowValues, sample_keys, slices
from stratarec.data.dedup_groups import Repeats, as_before
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import UNKNOWN, DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SPLITS
from stratarec.data.threads import map_threads
from stratarec.data.transforms import Moments, squash, transform
from stratarec.data.user_history import EventWindows, UserEvents, event_columns, last_events
from stratarec.data.vocabulary import Vocabulary


class Partition:
    """Rows of a partition in their final order: by user, session and time if the schema has them,
    else as in the log.

    Parameters
    ----------
    frame : DataFrame
        Spilled rows, including the split of each.
    schema : Schema
        Columns of the data set.
    order : ndarray, optional
        ``[N]`` the final order, if it was computed before.
    """

    def __init__(
        self, frame: pl.DataFrame, schema: Schema, order: NDArray[np.uint32] | None = None
    ) -> None:
        self._schema = schema
        self.order = _order(frame, schema) if order is None else order
        self.frame = frame.rechunk() if self.order is None else frame[self.order]
        self.split = self.frame[SPLIT].to_numpy()
        if schema.histories:
            # A schema with histories has a user, so rows are sorted by user and equal users are
            # adjacent.
            self._user = self.frame[schema.user].rle_id().to_numpy()
            self._events = self._positive_rows()
        self.windows = {feature.name: self._histories(feature) for feature in schema.histories}

    def _positive_rows(self) -> NDArray[np.int64]:
        """Return the indices of the positive rows, by user, time and order of the log."""
        clicked = np.flatnonzero((self.frame[self._schema.label_column] == 1).fill_null(True).to_numpy())
        keys = (self.frame[ROW], self.frame[self._schema.time])
        return clicked[np.lexsort((*(key.to_numpy()[clicked] for key in keys), self._user[clicked]))]

    def _histories(self, feature: SparseFeature) -> EventWindows:
        rows, time = self._events, self.frame[self._schema.time].to_numpy()
        values = self.frame[feature.of][rows]
        return UserEvents(feature, self._schema, values, self._user[rows], time[rows]).windows(
            self._user, time
        )

    def labels(self, split: int) -> list[tuple[int, int]]:
        """Return, for each label, the number of rows in a split with a known label, and the number
        of positives.
        """
        chosen = self.split == split
        columns = (self.frame[name].to_numpy()[chosen] for name in self._schema.label_columns)
        return [(int((column != UNKNOWN).sum()), int((column == 1).sum())) for column in columns]

    def weight(self, split: int) -> float:
        """Return the total weight of the rows in a split."""
        if not self._schema.weight:
            return float(np.count_nonzero(self.split == split))
        return float(self.frame[self._schema.weight].to_numpy()[self.split == split].sum())

    def moments(self, feature: DenseFeature, training: int = 0) -> Moments:
        """Return the moments of a dense column over training rows."""
        return Moments.of(
            squash(self.frame[feature.name].filter(pl.Series(self.split == training)), feature)
        )

    def events(self) -> pl.DataFrame:
        """Return the last positive events of each user, as many as histories need."""
        events = self.frame.select(map(column, event_columns(self._schema)))[self._events]
        return last_events(events, self._user[self._events], self._schema)

    def sample(self, names: Sequence[str], rows: int, training: int = 0) -> pl.DataFrame:
        """Return the columns `names` of at most `rows` training rows.

        Rows are chosen at random: choosing every n-th row could follow a periodic pattern of the
        log.
        """
        chosen = np.flatnonzero(self.split == training)
        if len(chosen) > rows:
            chosen = np.sort(np.random.default_rng(len(chosen)).choice(chosen, rows, replace=False))
        # `select` would interpret a column with the name * as all columns.
        return pl.DataFrame([self.frame[name].gather(chosen) for name in names])

    def repeats(self) -> Repeats:
        """Measure how features repeat within sessions."""
        return Repeats.measure(self.frame, self._schema, as_before(self.frame, self._schema.session_keys))

    def encode(
        self,
        vocabularies: Mapping[str, Vocabulary],
        moments: Mapping[str, Moments],
        groups: Mapping[str, Sequence[str]] | None,
        *,
        keep_rows: bool,
    ) -> dict[str, Encoded]:
        """Encode the rows for a data set; return split -> its samples, without empty splits.

        If `groups` is None, nothing is deduplicated. With `keep_rows`, each sample stores the
        number of its log row.
        """
        encoder, schema = _Encoder(self._schema, vocabularies, moments), self._schema
        grouped = {name for names in (groups or {}).values() for name in names}
        names = [name for name in schema.names if name not in self.windows and name not in grouped]
        # Columns are encoded for all splits together: raw rows of each split would be a copy.
        arrays = map_threads(lambda name: encoder.column(name, self.frame[name]), names)
        columns = dict(zip(names, arrays, strict=True))
        for feature in schema.weighted:
            name = weights_of(feature.name)
            columns[name] = _encode_lists(self.frame[name], feature, pl.Series.to_numpy)
        events = {name: encoder.ids(name, window.events) for name, window in self.windows.items()}
        chosen = {name: np.flatnonzero(self.split == split) for split, name in enumerate(SPLITS)}
        return {
            name: self._encoded(rows, encoder, columns, events, groups, keep_rows=keep_rows)
            for name, rows in chosen.items()
            if len(rows)
        }

    def _encoded(
        self,
        chosen: NDArray[np.int64],
        encoder: _Encoder,
        encoded: Mapping[str, pa.Array],
        events: Mapping[str, NDArray[np.int32]],
        groups: Mapping[str, Sequence[str]] | None,
        *,
        keep_rows: bool,
    ) -> Encoded:
        """Return the samples of the rows `chosen`, given the encoded columns and events of all
        rows.
        """
        schema, frame, rows = self._schema, self.frame, pa.array(chosen)
        labels = schema.label_columns
        columns: dict[str, pa.Array] = {
            name: pa.array(frame[label][chosen].to_numpy(), pa.uint8())
            for name, label in zip(label_names(len(labels)), labels, strict=True)
        }
        if schema.weight:
            columns[WEIGHT] = pa.array(frame[schema.weight][chosen].to_numpy().astype(np.float32))
        taken = {name: column.take(rows) for name, column in encoded.items()}
        windows = {
            name: WindowValues(start=w.start[chosen], stop=w.stop[chosen], events=events[name])
            for name, w in self.windows.items()
        }
        if groups is None:
            taken |= {name: slices(w.start, w.stop - w.start, w.events) for name, w in windows.items()}
            weights = (weights_of(feature.name) for feature in schema.weighted)
            taken = {name: taken[name] for name in (*schema.names, *weights)}
        columns |= taken
        if schema.time:
            columns[TIME] = pa.array(frame[schema.time][chosen].to_numpy(), pa.int64())
        if keep_rows:
            columns[ROW] = pa.array(frame[ROW][chosen].to_numpy(), pa.int64())
        sessions = self._sessions(chosen)
        if groups is None:
            return Encoded(
                samples=pa.table(columns if sessions is None else {**columns, **sample_keys(sessions)})
            )
        # One after another, because numbering the rows of a group takes much memory.
        tables = [encoder.group(frame[list(names)][chosen]) for names in groups.values()]
        return Encoded(
            samples=pa.table(columns),
            groups=dict(zip(groups, tables, strict=True)),
            windows=windows,
            sessions=sessions,
        )

    def _sessions(self, chosen: NDArray[np.int64]) -> pa.Table | None:
        """Return the hashes and sizes of sessions, in order; None if there are no sessions."""
        schema = self._schema
        if not schema.session_keys:
            return None
        rows = self.frame[list(schema.session_keys)][chosen]
        first = np.flatnonzero(~as_before(rows, schema.session_keys))
        sizes = np.diff(np.append(first, len(rows))).astype(np.int32)
        columns = {}
        if schema.session:
            columns["session"] = pa.array(stable_hash(rows[schema.session][first]).view(np.int64))
        columns["user"] = pa.array(stable_hash(rows[schema.user or schema.session][first]).view(np.int64))
        return pa.table({**columns, "samples": pa.array(sizes)})


class _Encoder:
    """Converts raw columns to ids and transformed numbers."""

    def __init__(
        self, schema: Schema, vocabularies: Mapping[str, Vocabulary], moments: Mapping[str, Moments]
    ) -> None:
        self._dense = {feature.name: feature for feature in schema.dense}
        self._sparse = {feature.name: feature for feature in schema.sparse}
        self._vocabularies = vocabularies
        self._moments = moments

    def ids(self, name: str, values: pl.Series) -> NDArray[np.int32]:
        return self._vocabularies[self._sparse[name].vocabulary].encode(values)

    def column(self, name: str, values: pl.Series) -> pa.Array:
        if name in self._dense:
            return pa.array(transform(values, self._dense[name], self._moments[name]))
        if self._sparse[name].traits.lists:
            return _encode_lists(values, self._sparse[name], partial(self.ids, name))
        return pa.array(self.ids(name, values))

    def group(self, rows: pl.DataFrame) -> GroupValues:
        """Encode the distinct rows of a group. Rows that get equal ids, because rare values share
        ids, are merged.
        """
        codes, first = _distinct(rows)
        raw = rows[first]
        table = pa.table({name: self.column(name, raw[name]) for name in rows.columns})
        encoded = pl.from_arrow(table)
        assert isinstance(encoded, pl.DataFrame)
        merged, rows_left = _distinct(encoded)
        return GroupValues(codes=merged[codes], table=table.take(pa.array(rows_left)))


def _distinct(rows: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the distinct rows in order of first appearance.

    Return the number of each row, and for each number the index of the first row that has it.
    """
    bare = pl.DataFrame([column.alias(str(place)) for place, column in enumerate(rows.iter_columns())])
    query = (
        bare.lazy()
        .with_row_index(PLACE)
        .group_by(bare.columns, maintain_order=True)
        .agg(PLACE)
        .select(PLACE)
    )
    groups = query.collect().to_series().to_arrow()
    starts, places = groups.offsets.to_numpy(), groups.values.to_numpy()
    codes = np.empty(len(rows), dtype=np.int64)
    codes[places] = np.repeat(np.arange(len(groups)), np.diff(starts))
    return codes, places[starts[:-1]].astype(np.int64)


def _order(frame: pl.DataFrame, schema: Schema) -> NDArray[np.uint32] | None:
    keys: list[pl.Expr] = []
    if schema.shard_key:
        keys.append(column(schema.shard_key))
    if schema.session and schema.shard_key != schema.session:
        begin = column(schema.time or ROW)
        keys += [begin.min().over(column(schema.shard_key), column(schema.session)), column(schema.session)]
    if keys and schema.time:
        keys.append(column(schema.time))
    return frame.select(pl.arg_sort_by([*keys, column(ROW)])).to_series().to_numpy() if keys else None


def shortened(lists: pl.Series, feature: SparseFeature) -> pl.Series:
    """Return lists cut to the `max_length` of their feature."""
    most = feature.max_length
    return lists.list.tail(most) if feature.traits.last else lists.list.head(most)


def _encode_lists(
    lists: pl.Series, feature: SparseFeature, encode: Callable[[pl.Series], NDArray[Any]]
) -> pa.Array:
    """Cut lists to their maximum length, and encode the values of all lists together."""
    short = shortened(lists, feature)
    lengths = short.list.len().fill_null(0).to_numpy()
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, encode(short.drop_nulls().explode(empty_as_null=False)))
