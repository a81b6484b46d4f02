"""One partition of staged rows: put in order, its histories found, counted and encoded.

History windows are found once over the partition's positive events, sorted by user and time: the history of a row is a
slice of the events of its user that are strictly earlier than the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.hashing import stable_hash
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.transforms import Moments, squash, transform
from stratarec.data.vocabulary import Vocabulary

# Rows whose histories are gathered at a time.
_BLOCK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Histories of N rows as slices of one event sequence."""

    events: pl.Series
    """``[E]`` values of the history's feature."""
    start: NDArray[np.int64]
    """``[N]``"""
    stop: NDArray[np.int64]
    """``[N]``"""


class Partition:
    """Rows in their final order: by user, session and time, where the schema has them; else as they came."""

    def __init__(self, frame: pl.DataFrame, schema: Schema, split: NDArray[np.int8]) -> None:
        frame = frame.with_columns(pl.Series("__split", split))
        self._schema = schema
        self.frame = _ordered(frame, schema)
        self.split = self.frame["__split"].to_numpy()
        self.windows = {feature.name: self._windows(feature) for feature in schema.histories}

    def _windows(self, feature: SparseFeature) -> Windows:
        schema, frame = self._schema, self.frame
        user = frame[schema.user].rank("dense").to_numpy().astype(np.int64) - 1
        moment = frame[schema.time].rank("dense").to_numpy().astype(np.int64)
        # (user, time) as one rising number; a user's own numbers begin at user * span.
        span = int(moment.max(initial=0)) + 1
        place = user * span + moment
        positive = np.flatnonzero((frame[schema.label] == 1).to_numpy() & frame[feature.of].is_not_null().to_numpy())
        positive = positive[np.lexsort((frame["__row"].to_numpy()[positive], place[positive]))]
        before = np.searchsorted(place[positive], place, side="left")
        first = np.searchsorted(place[positive], user * span, side="left")
        return Windows(
            events=frame[feature.of][positive],
            start=np.maximum(first, before - feature.max_length),
            stop=before,
        )

    def positives(self, split: int) -> int:
        """Rows of a split whose label is 1."""
        return int(self.frame.filter(pl.Series(self.split == split))[self._schema.label].sum())

    def count(self, vocabulary: str, training: int = 0) -> pl.DataFrame:
        """Columns `value` and `count`: how often training rows look each value up."""
        parts = []
        chosen = self.split == training
        for feature in self._schema.vocabularies()[vocabulary]:
            if feature.kind == "history":
                parts.append(_window_counts(self.windows[feature.name], chosen))
                continue
            values = self.frame[feature.name].filter(pl.Series(chosen))
            if feature.kind == "multi":
                values = values.list.head(feature.max_length).explode(empty_as_null=False)
            parts.append(values.drop_nulls().value_counts(name="count").rename({feature.name: "value"}))
        parts = [part.with_columns(pl.col("count").cast(pl.Int64)) for part in parts]
        return pl.concat(parts, how="vertical_relaxed").group_by("value").agg(pl.col("count").sum()).sort("value")

    def moments(self, name: str, training: int = 0) -> Moments:
        """Moments of a dense column over training rows."""
        feature = next(feature for feature in self._schema.dense if feature.name == name)
        return Moments.of(squash(self.frame[name].filter(pl.Series(self.split == training)), feature))

    def encode(self, split: int, vocabularies: Mapping[str, Vocabulary], moments: Mapping[str, Moments]) -> pa.Table:
        """The rows of a split as a data set stores them."""
        schema, chosen = self._schema, np.flatnonzero(self.split == split)
        rows = self.frame[chosen]
        columns: dict[str, pa.Array] = {"label": pa.array(rows[schema.label].to_numpy(), pa.uint8())}
        for dense in schema.dense:
            columns[dense.name] = pa.array(transform(rows[dense.name], dense, moments[dense.name]))
        for sparse in schema.sparse:
            vocabulary = vocabularies[sparse.vocabulary]
            if sparse.kind == "single":
                columns[sparse.name] = pa.array(vocabulary.encode(rows[sparse.name]))
            elif sparse.kind == "multi":
                columns[sparse.name] = _encode_lists(rows[sparse.name], sparse, vocabulary)
            else:
                columns[sparse.name] = _encode_windows(self.windows[sparse.name], chosen, vocabulary)
        if schema.time:
            columns["__time"] = pa.array(rows[schema.time].to_numpy(), pa.int64())
        group = schema.user or schema.session
        if group:
            columns["__group"] = pa.array(stable_hash(rows[group]).view(np.int64))
        if schema.session:
            columns["__session"] = pa.array(stable_hash(rows[schema.session]).view(np.int64))
        return pa.table(columns)


def _ordered(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    keys: list[pl.Expr] = []
    if schema.shard_key:
        keys.append(pl.col(schema.shard_key))
    if schema.session and schema.shard_key != schema.session:
        begin = pl.col(schema.time) if schema.time else pl.col("__row")
        keys += [begin.min().over(schema.shard_key, schema.session), pl.col(schema.session)]
    if keys and schema.time:
        keys.append(pl.col(schema.time))
    return frame.sort([*keys, pl.col("__row")]) if keys else frame


def _window_counts(windows: Windows, chosen: NDArray[np.bool_]) -> pl.DataFrame:
    """How many chosen rows' windows cover each event, summed by value."""
    edges = np.zeros(len(windows.events) + 1, dtype=np.int64)
    np.add.at(edges, windows.start[chosen], 1)
    np.add.at(edges, windows.stop[chosen], -1)
    covered = pl.DataFrame({"value": windows.events, "count": edges.cumsum()[:-1]})
    return covered.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") > 0)


def _encode_lists(values: pl.Series, feature: SparseFeature, vocabulary: Vocabulary) -> pa.Array:
    lists = values.list.head(feature.max_length)
    lengths = lists.list.len().fill_null(0).to_numpy()
    flat = lists.drop_nulls().explode(empty_as_null=False)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, vocabulary.encode(flat))


def _encode_windows(windows: Windows, chosen: NDArray[np.int64], vocabulary: Vocabulary) -> pa.Array:
    ids = vocabulary.encode(windows.events)
    start, stop = windows.start[chosen], windows.stop[chosen]
    offsets = np.concatenate([[0], (stop - start).cumsum()])
    values = np.empty(offsets[-1], dtype=np.int32)
    # In blocks: long histories of all rows at once would take 24 bytes a value for places, many times the partition.
    for first in range(0, len(start), _BLOCK):
        rows = slice(first, first + _BLOCK)
        begin, end = offsets[first], offsets[min(first + _BLOCK, len(start))]
        shift = np.repeat(start[rows] - offsets[:-1][rows], (stop - start)[rows])
        values[begin:end] = ids[np.arange(begin, end) + shift]
    return pa.ListArray.from_arrays(offsets.astype(np.int32), values)
