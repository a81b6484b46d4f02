"""The partitions of a spilled log: each is read, sorted, given its histories, counted and encoded.

History windows are computed once over the partition's positive events, sorted by user and time: the history of a row is
a slice of its user's events that are strictly earlier than the row. Distinct values of a group are found on raw
columns, so that vocabularies and transforms run on distinct values only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import (
    FILE,
    PARTITION,
    PLACE,
    ROW,
    SPLIT,
    TIME,
    WEIGHT,
    column,
    label_names,
    weights_of,
)
from stratarec.data.data_quality import hash_rows
from stratarec.data.dataset.row_group import Encoded, GroupValues, WindowValues, coverage, sample_keys, slices
from stratarec.data.dedup_groups import Repeats, as_before
from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.workspace import Spill, SpilledChunk
from stratarec.data.schema import UNKNOWN, Schema, SparseFeature
from stratarec.data.splits import Span, Splitter
from stratarec.data.transforms import Moments, squash, transform
from stratarec.data.user_history import event_columns, last_events
from stratarec.data.vocabulary import Vocabulary, merge_counts
from stratarec.errors import DataError
from stratarec.io.atomic import write_json
from stratarec.progress import Progress

Lists = TypeVar("Lists", pl.Series, pl.Expr)


@dataclass(frozen=True, kw_only=True)
class EventWindows:
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
        # Events that are no samples are in no split; histories see them.
        split = np.where(frame[schema.label_column].is_null().to_numpy(), np.int8(-1), split)
        frame = frame.with_columns(pl.Series(SPLIT, split))
        self._schema = schema
        self.frame = _ordered(frame, schema)
        self.split = self.frame[SPLIT].to_numpy()
        self.windows = {feature.name: self._windows(feature) for feature in schema.histories}

    def _windows(self, feature: SparseFeature) -> EventWindows:
        schema, frame = self._schema, self.frame
        user = frame[schema.user].rank("dense").to_numpy().astype(np.int64) - 1
        moment = frame[schema.time].rank("dense").to_numpy().astype(np.int64)
        # (user, time) as one rising number; a user's own numbers begin at user * span.
        span = int(moment.max(initial=0)) + 1
        place = user * span + moment
        clicked = (frame[schema.label_column] == 1).fill_null(True)
        positive = np.flatnonzero((clicked & frame[feature.of].is_not_null()).to_numpy())
        positive = positive[np.lexsort((frame[ROW].to_numpy()[positive], place[positive]))]
        before = np.searchsorted(place[positive], place, side="left")
        first = np.searchsorted(place[positive], user * span, side="left")
        return EventWindows(
            events=frame[feature.of][positive],
            start=np.maximum(first, before - feature.max_length),
            stop=before,
        )

    def labels(self, split: int) -> list[tuple[int, int]]:
        """Of each label the rows of a split that have it, and those of which it is 1."""
        chosen = self.split == split
        columns = (self.frame[name].to_numpy()[chosen] for name in self._schema.label_columns)
        return [(int((column != UNKNOWN).sum()), int((column == 1).sum())) for column in columns]

    def weight(self, training: int = 0) -> float:
        """Of all training rows."""
        if not self._schema.weight:
            return float(np.count_nonzero(self.split == training))
        return float(self.frame[self._schema.weight].to_numpy()[self.split == training].sum())

    def count(self, vocabulary: str, training: int = 0) -> pl.DataFrame:
        """Columns `value`, `count` and `last`: how often training rows look each value up, and the time of the last row
        that has it, histories and lists aside where a feature of one value has it too."""
        parts, features = [], self._schema.vocabularies()[vocabulary]
        alone = any(feature.kind == "single" for feature in features)
        time = self.frame[self._schema.time] if self._schema.time else pl.repeat(0, len(self.frame), eager=True)
        none = pl.lit(None, pl.Int64).alias("last")
        chosen = self.split == training
        for feature in features:
            if feature.traits.derived:
                parts.append(_window_counts(self.windows[feature.name], chosen).with_columns(none))
                continue
            frame = pl.DataFrame([self.frame[feature.name].alias("value"), time.alias("last")])
            rows = frame.lazy().filter(pl.Series(chosen))
            if feature.traits.lists:
                rows = rows.with_columns(_shortened(pl.col("value"), feature)).explode("value")
            last = pl.col("last").max().cast(pl.Int64)
            found = rows.drop_nulls("value").group_by("value").agg(pl.len().alias("count"), last)
            parts.append((found.with_columns(none) if feature.traits.lists and alone else found).collect())
        return merge_counts(parts)

    def moments(self, name: str, training: int = 0) -> Moments:
        """Moments of a dense column over training rows."""
        feature = next(feature for feature in self._schema.dense if feature.name == name)
        return Moments.of(squash(self.frame[name].filter(pl.Series(self.split == training)), feature))

    def events(self) -> pl.DataFrame:
        """The last positive events of each user, as many as histories hold."""
        schema = self._schema
        clicked = self.frame.filter((self.frame[schema.label_column] == 1).fill_null(True))
        ordered = clicked.sort(column(schema.user), column(schema.time), column(ROW))
        return last_events(ordered.select(map(column, event_columns(schema))), schema)

    def sample(self, names: Sequence[str], rows: int, training: int = 0) -> pl.DataFrame:
        """Some columns of so many training rows, at random: logs have rhythms."""
        chosen = np.flatnonzero(self.split == training)
        if len(chosen) > rows:
            chosen = np.sort(np.random.default_rng(len(chosen)).choice(chosen, rows, replace=False))
        # Not by `select`, to which a column called * is all of them.
        return pl.DataFrame([self.frame[name].gather(chosen) for name in names])

    def row_hashes(self, share: int) -> pl.DataFrame:
        """Return the hashes by which `repeated_rows` compares samples."""
        return hash_rows(self.frame, self._schema, self.split, share)

    def repeats(self) -> Repeats:
        """How features repeat within sessions."""
        return Repeats.measure(self.frame, self._schema, as_before(self.frame, self._schema.session_keys))

    def encode(
        self,
        split: int,
        vocabularies: Mapping[str, Vocabulary],
        moments: Mapping[str, Moments],
        groups: Mapping[str, Sequence[str]] | None,
        *,
        keep_rows: bool,
    ) -> Encoded:
        """The rows of a split as a data set stores them; without `groups` every sample has its own copy of everything.

        With `keep_rows` each sample says which row of the log it came from.

        Returns
        -------
        Encoded
            Samples in order, the distinct values of each group, histories as windows, and the sessions.
        """
        encoder = _Encoder(self._schema, vocabularies, moments)
        chosen = np.flatnonzero(self.split == split)
        rows = self.frame[chosen]
        grouped = {name for names in (groups or {}).values() for name in names}
        labels = self._schema.label_columns
        columns: dict[str, pa.Array] = {
            name: pa.array(rows[label].to_numpy(), pa.uint8())
            for name, label in zip(label_names(len(labels)), labels, strict=True)
        }
        if self._schema.weight:
            columns[WEIGHT] = pa.array(rows[self._schema.weight].to_numpy().astype(np.float32))
        front, windows = tuple(columns), {}
        for name in self._schema.names:
            if name in self.windows:
                windows[name] = self._encode_windows(name, chosen, encoder)
            elif name not in grouped:
                columns[name] = encoder.column(name, rows[name])
        weights = {weights_of(feature.name): feature for feature in self._schema.weighted}
        columns |= {name: _encode_lists(rows[name], feature, pl.Series.to_numpy) for name, feature in weights.items()}
        if groups is None:
            columns.update({name: slices(w.start, w.stop - w.start, w.events) for name, w in windows.items()})
            columns = {name: columns[name] for name in (*front, *self._schema.names, *weights)}
        if self._schema.time:
            columns[TIME] = pa.array(rows[self._schema.time].to_numpy(), pa.int64())
        if keep_rows:
            columns[ROW] = pa.array(rows[ROW].to_numpy(), pa.int64())
        sessions = self._sessions(rows)
        if groups is None:
            return Encoded(samples=pa.table(columns if sessions is None else {**columns, **sample_keys(sessions)}))
        return Encoded(
            samples=pa.table(columns),
            groups={name: encoder.group(rows[list(features)]) for name, features in groups.items()},
            windows=windows,
            sessions=sessions,
        )

    def _encode_windows(self, name: str, chosen: NDArray[np.int64], encoder: _Encoder) -> WindowValues:
        windows = self.windows[name]
        return WindowValues(
            start=windows.start[chosen], stop=windows.stop[chosen], events=encoder.ids(name, windows.events)
        )

    def _sessions(self, rows: pl.DataFrame) -> pa.Table | None:
        """Hashes and sizes of the sessions, in order."""
        schema = self._schema
        if not schema.session_keys:
            return None
        first = np.flatnonzero(~as_before(rows, schema.session_keys))
        sizes = np.diff(np.append(first, len(rows))).astype(np.int32)
        columns = {}
        if schema.session:
            columns["session"] = pa.array(stable_hash(rows[schema.session][first]).view(np.int64))
        columns["user"] = pa.array(stable_hash(rows[schema.user or schema.session][first]).view(np.int64))
        return pa.table({**columns, "samples": pa.array(sizes)})


class _Encoder:
    """Raw columns -> ids and transformed numbers."""

    def __init__(self, schema: Schema, vocabularies: Mapping[str, Vocabulary], moments: Mapping[str, Moments]) -> None:
        self._dense = {feature.name: feature for feature in schema.dense}
        self._sparse = {feature.name: feature for feature in schema.sparse}
        self._vocabularies, self._moments = vocabularies, moments

    def ids(self, name: str, values: pl.Series) -> NDArray[np.int32]:
        return self._vocabularies[self._sparse[name].vocabulary].encode(values)

    def column(self, name: str, values: pl.Series) -> pa.Array:
        if name in self._dense:
            return pa.array(transform(values, self._dense[name], self._moments[name]))
        if self._sparse[name].traits.lists:
            return _encode_lists(values, self._sparse[name], partial(self.ids, name))
        return pa.array(self.ids(name, values))

    def group(self, rows: pl.DataFrame) -> GroupValues:
        """Encode the distinct rows alone, then join those that became equal (rare values share ids)."""
        codes, first = _distinct(rows)
        raw = rows[first]
        table = pa.table({name: self.column(name, raw[name]) for name in rows.columns})
        encoded = pl.from_arrow(table)
        assert isinstance(encoded, pl.DataFrame)
        again, kept = _distinct(encoded)
        return GroupValues(codes=again[codes], table=table.take(pa.array(kept)))


def _distinct(rows: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Code of each row, numbered by first appearance, and the first row of each code."""
    bare = pl.DataFrame([column.alias(str(place)) for place, column in enumerate(rows.iter_columns())])
    found = bare.lazy().with_row_index(PLACE).group_by(bare.columns, maintain_order=True).agg(PLACE).select(PLACE)
    groups = found.collect().to_series().to_arrow()
    starts, places = groups.offsets.to_numpy(), groups.values.to_numpy()
    codes = np.empty(len(rows), dtype=np.int64)
    codes[places] = np.repeat(np.arange(len(groups)), np.diff(starts))
    return codes, places[starts[:-1]].astype(np.int64)


def _ordered(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    keys: list[pl.Expr] = []
    if schema.shard_key:
        keys.append(column(schema.shard_key))
    if schema.session and schema.shard_key != schema.session:
        begin = column(schema.time or ROW)
        keys += [begin.min().over(column(schema.shard_key), column(schema.session)), column(schema.session)]
    if keys and schema.time:
        keys.append(column(schema.time))
    return frame.sort([*keys, column(ROW)]) if keys else frame


def _window_counts(windows: EventWindows, chosen: NDArray[np.bool_]) -> pl.DataFrame:
    """How many chosen rows' windows cover each event, summed by value."""
    counts = coverage(windows.start[chosen], windows.stop[chosen], len(windows.events))
    covered = pl.DataFrame({"value": windows.events, "count": counts})
    return covered.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") > 0)


def _shortened(lists: Lists, feature: SparseFeature) -> Lists:
    most = feature.max_length
    return lists.list.tail(most) if feature.traits.last else lists.list.head(most)


def _encode_lists(lists: pl.Series, feature: SparseFeature, encode: Callable[[pl.Series], NDArray[Any]]) -> pa.Array:
    """Lists as they are kept, of what `encode` makes of all their values together."""
    kept = _shortened(lists, feature)
    lengths = kept.list.len().fill_null(0).to_numpy()
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, encode(kept.drop_nulls().explode(empty_as_null=False)))


# Of a process without data, and of a partition's rows with the copies that sorting and encoding them makes.
_PROCESS_BYTES, _COPIES = 300 << 20, 6


class Partitions:
    """The partitions of a log, read one at a time.

    Parameters
    ----------
    spill : Spill
    chunks : sequence of SpilledChunk
        All of the log.
    schema : Schema
    splitter : Splitter
    shard_samples : int
        About how many samples a partition has where rows are not dealt by a key.
    events : DataFrame, optional
        What users did before the log, by user and time: it is in histories, and nowhere else.
    """

    def __init__(
        self,
        spill: Spill,
        chunks: Sequence[SpilledChunk],
        schema: Schema,
        splitter: Splitter,
        shard_samples: int,
        events: pl.DataFrame | None = None,
    ) -> None:
        self.chunks = chunks
        self._events = None if events is None else events.with_columns(spill.assign_partitions(events[schema.user]))
        self._spill, self._schema, self._splitter = spill, schema, splitter
        self._parts = spill.shards(chunks, shard_samples)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def span(self) -> Span | None:
        """From the first to the last time of the log; None where it has no times."""
        times = [chunk.times for chunk in self.chunks if chunk.times]
        if not times:
            return None
        first, last = min(time for time, _ in times), max(time for _, time in times)
        return Span(first=first, last=last, unit=self._schema.time_unit)

    def read(self, number: int) -> Partition:
        """A partition, split and in order."""
        frame, span = self._spill.read(self.chunks, self._parts[number]), self.span
        if self._events is not None:
            frame = self._with_events(frame, self._parts[number])
        split = self._splitter.assign(frame, span.last if span else 0)
        return Partition(frame, self._schema, self._splitter.thin(frame, split))

    def _with_events(self, frame: pl.DataFrame, parts: Sequence[int]) -> pl.DataFrame:
        """Earlier events as rows that are no samples, before those of the log."""
        assert self._events is not None
        mine = self._events.filter(self._events[PARTITION].is_in(parts)).drop(PARTITION)
        for name in mine.columns:
            if mine[name].dtype != frame[name].dtype:
                raise DataError(
                    f"column {name!r} has values of type {frame[name].dtype} in the log, and of {mine[name].dtype} in "
                    "the data set that it goes on from: set `type` of the feature, or the type of the column"
                )
        # Before every row of the log, in their order; of no file in particular.
        numbers = pl.Series(ROW, np.arange(-len(mine), 0, dtype=np.int64))
        files = pl.Series(FILE, np.zeros(len(mine), dtype=np.int32))
        return pl.concat([mine.with_columns(numbers, files), frame], how="diagonal").select(frame.columns)

    @property
    def other_events(self) -> pl.DataFrame | None:
        """Earlier events of users of whom the log may have no rows: those of partitions that there are not."""
        if self._events is None:
            return None
        there = [part for parts in self._parts for part in parts]
        return self._events.filter(~self._events[PARTITION].is_in(there)).drop(PARTITION)

    def memory(self, number: int) -> int:
        """About how many bytes it takes to work with a partition."""
        stored = sum(self._stored[part] for part in self._parts[number])
        return _PROCESS_BYTES + _COPIES * int(stored * self._growth)

    @cached_property
    def _growth(self) -> float:
        """Bytes of rows in memory over spilled ones."""
        return sum(chunk.frame_bytes for chunk in self.chunks) / max(self._stored.total(), 1)

    @cached_property
    def _stored(self) -> Counter[int]:
        """Spilled bytes of each partition of the log."""
        found: Counter[int] = Counter()
        for chunk in self.chunks:
            found.update({part: size for part, (_, size, _) in chunk.places.items()})
        return found


@dataclass(frozen=True, kw_only=True)
class PerPartitionStage:
    """A stage whose pieces are partitions."""

    partitions: Partitions
    notes: Path
    """Where the note of each partition is written when all else of it is."""
    make: Callable[[int, Partition], dict[str, Any]]
    """Does what is to be done with the partition of a number, and gives its note."""
    held: int = 0
    """Bytes that `make` holds itself."""

    def __call__(self, number: int) -> Iterator[int]:
        write_json(note_path(self.notes, number), self.make(number, self.partitions.read(number)))
        # Give Arrow's freed memory back, so that peaks of different partitions do not add up.
        pa.default_memory_pool().release_unused()
        yield 1

    def memory(self, number: int) -> int:
        return self.partitions.memory(number) + self.held

    def run(self, what: str, executor: Executor, progress: Progress) -> None:
        """Do those partitions that have no note yet."""
        left = [number for number in range(len(self.partitions)) if not note_path(self.notes, number).exists()]
        progress.start(what, len(self.partitions), "shards", len(self.partitions) - len(left))
        executor.run(self, left, progress)
        progress.finish()


def note_path(notes: Path, number: int) -> Path:
    """Where in `notes` the note of a partition lies."""
    return notes / f"{number:05d}.json"
