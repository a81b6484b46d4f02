"""Shuffle buffers: some row groups in memory, a permutation of their samples, and batches assembled
from them.

A *segment* is a unit of the permutation: adjacent samples of a session with equal values in every
group of ids and every history, such as a click and its negatives. Groups that would give segments
of fewer than two samples on average are ignored; if no group remains, single samples are shuffled.
With whole sessions as units, a batch would repeat more values but have few sessions, which cost
0.001 of AUC on Globo's log. All features of a sample are adjacent in memory, so that a sample
occupies one or two cache lines.

A deduplicated batch is assembled without hashing. For each group, an array with one entry for each
row of the group's table assigns numbers to the rows that the batch uses. Overlapping windows are
merged by sorting their starts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import LEAST_SEGMENT, InverseJagged, JaggedWindows, KeyedJagged
from stratarec.data.column_names import SESSIONS, USER, WEIGHT, events, label_names, pointer, weights_of
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import RowGroup, Unit, flat
from stratarec.data.schema import UNKNOWN, Schema
from stratarec.kernels.collate import (
    Lists,
    end_bags,
    fill_segments,
    join_windows,
    number_pointers,
    order_segments,
    scatter_rows,
    spread_rows,
    take_bags,
    take_weights,
)


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Features of N rows. The features of a row are adjacent in memory, so a row occupies one or
    two cache lines.
    """

    ids: NDArray[np.int32]
    """``[N, F]`` ids of the features with a single value; negative if missing."""
    lists: tuple[Lists, ...]
    """Features with several ids per row."""
    weights: tuple[Lists | None, ...]
    """Weights of the ids in each of `lists`, None for weights of 1; empty if no feature has
    weights.
    """
    sparse: tuple[str, ...]
    """Names of the columns of `ids`, then of `lists`."""
    dense: NDArray[np.float32]
    """``[N, F_dense]`` dense features."""
    dense_places: NDArray[np.int64]
    """Position of each dense feature in the schema."""

    @classmethod
    def of(
        cls, parts: Sequence[pa.Table], names: Container[str], schema: Schema, front: int = 0
    ) -> PackedRows:
        """Pack the features `names` of concatenated tables, with `front` free columns before the
        ids.
        """
        sparse = [feature.name for feature in schema.sparse if feature.name in names]
        lists = [name for name in sparse if pa.types.is_list(parts[0][name].type)]
        singles = [name for name in sparse if name not in lists]
        dense = [
            (place, feature.name) for place, feature in enumerate(schema.dense) if feature.name in names
        ]
        weighted = {name for name in lists if weights_of(name) in names}
        return cls(
            ids=_matrix(parts, singles, np.dtype(np.int32), front),
            lists=tuple(_lists(pa.concat_tables(parts)[name]) for name in lists),
            weights=tuple(
                _lists(pa.concat_tables(parts)[weights_of(name)]) if name in weighted else None
                for name in (lists if weighted else ())
            ),
            sparse=(*singles, *lists),
            dense=_matrix(parts, [name for _, name in dense], np.dtype(np.float32)),
            dense_places=np.array([place for place, _ in dense], dtype=np.int64),
        )

    @classmethod
    def of_lists(cls, name: str, lists: Lists) -> PackedRows:
        """Pack one feature with several ids per row."""
        size = len(lists.start)
        return cls(
            ids=np.empty((size, 0), dtype=np.int32),
            lists=(lists,),
            weights=(),
            sparse=(name,),
            dense=np.empty((size, 0), dtype=np.float32),
            dense_places=np.empty(0, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """Distinct values of a deduplication group in all row groups of a shuffle buffer."""

    segments: NDArray[np.int64]
    """First sample of each segment. There the pointer differs from the previous sample's, or a row
    group begins.
    """
    columns: PackedRows
    place: NDArray[np.int32]
    """Scratch array of `number_pointers`. Only one thread assembles batches, so it is not
    locked.
    """


@dataclass(frozen=True, kw_only=True)
class ShuffleBuffer:
    """Samples of some row groups, their tables, and the order of samples."""

    samples: PackedRows
    """Features that are in none of `tables`. Before their ids, a row has the user (two columns, if
    samples have users), each label and the weight (if any) as the bits of a float32, and the row in
    each of `tables`."""
    users: bool
    """Whether samples have a user."""
    tables: dict[str, GroupValues]
    """Groups, then histories: tables of one list column, whose rows may overlap."""
    order: NDArray[np.int32]

    @classmethod
    def of(
        cls, row_groups: Sequence[RowGroup], dataset: Dataset, draws: np.random.Generator | None, unit: Unit
    ) -> ShuffleBuffer:
        """Concatenate row groups, and permute their units unless `draws` is None."""
        parts, columns = [row_group.samples for row_group in row_groups], _tables(row_groups, dataset)
        users = SESSIONS in row_groups[0].tables or USER in parts[0].column_names
        marks = [
            *label_names(len(dataset.schema.label_columns)),
            *([WEIGHT] if dataset.schema.weight else []),
        ]
        front = 2 * users + len(marks) + len(columns)
        samples = PackedRows.of(parts, set(parts[0].column_names), dataset.schema, front)
        if users:
            _set_users(samples.ids, row_groups)
        for place, name in enumerate(marks, 2 * users):
            mark = np.concatenate([part[name].to_numpy() for part in parts])
            samples.ids[:, place] = _as_floats(mark).view(np.int32)
        tables = {
            name: _table(name, row_groups, packed, samples.ids, column)
            for column, (name, packed) in enumerate(columns.items(), 2 * users + len(marks))
        }
        size = len(samples.ids)
        sessions = _starts(_session_sizes(row_groups)) if SESSIONS in row_groups[0].tables else None
        segments = [table.segments for table in tables.values() if table.columns.sparse]
        return cls(
            samples=samples, users=users, tables=tables, order=_order(size, sessions, segments, draws, unit)
        )

    def only(self, ranges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> ShuffleBuffer:
        """Return a buffer with a range of samples of each row group. `ranges` has (first, end),
        `sizes` the samples.
        """
        if all(last - first == size for (first, last), size in zip(ranges, sizes, strict=True)):
            return self
        chosen = np.zeros(len(self.order), dtype=bool)
        for begin, (first, last) in zip(np.cumsum([0, *sizes]), ranges, strict=False):
            chosen[begin + first : begin + last] = True
        return replace(self, order=self.order[chosen[self.order]])


def _as_floats(mark: NDArray[Any]) -> NDArray[np.float32]:
    """Return weights or labels as float32; unknown labels become NaN."""
    values = mark.astype(np.float32)
    if mark.dtype == np.uint8:
        values[mark == UNKNOWN] = np.nan
    return values


def _tables(row_groups: Sequence[RowGroup], dataset: Dataset) -> dict[str, PackedRows]:
    """Return the tables of all groups and then of all histories."""
    groups = {
        name: PackedRows.of([row_group.tables[name] for row_group in row_groups], keys, dataset.schema)
        for name, keys in dataset.groups.items()
    }
    return {**groups, **{name: _histories(name, row_groups) for name in dataset.windows}}


def _set_users(words: NDArray[np.int32], row_groups: Sequence[RowGroup]) -> None:
    """Fill the first two columns with the user of each sample, or with the session if there are no
    users.
    """
    if SESSIONS in row_groups[0].tables:
        users = np.concatenate([row_group.tables[SESSIONS]["user"].to_numpy() for row_group in row_groups])
        for half in range(2):
            fill_segments(
                words, half, np.ascontiguousarray(users.view(np.int32)[half::2]), _session_sizes(row_groups)
            )
    else:
        users = np.concatenate([row_group.samples[USER].to_numpy() for row_group in row_groups])
        words[:, :2] = users.view(np.int32).reshape(-1, 2)


def _session_sizes(row_groups: Sequence[RowGroup]) -> NDArray[np.int32]:
    return np.concatenate([row_group.tables[SESSIONS]["samples"].to_numpy() for row_group in row_groups])


def _order(
    size: int,
    sessions: NDArray[np.int64] | None,
    segments: Sequence[NDArray[np.int64]],
    draws: np.random.Generator | None,
    unit: Unit,
) -> NDArray[np.int32]:
    """Return the samples in permuted order. `sessions` and `segments` (by table) list the first
    sample of each unit.
    """
    if draws is None:
        return np.arange(size, dtype=np.int32)
    if sessions is None or unit == "sample":
        return draws.permutation(size).astype(np.int32)
    starts = sessions if unit == "session" else _join_segments(size, sessions, segments)
    return order_segments(starts, draws.permutation(len(starts)), size)


def _join_segments(
    size: int, sessions: NDArray[np.int64], segments: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the first sample of each segment. A segment begins where the session, or the row in a
    table, changes.

    Tables for which segments would be shorter than `LEAST_SEGMENT` on average are ignored. If no
    table remains, each sample is a segment.
    """
    first: NDArray[np.bool_] | None = None
    for starts in sorted(segments, key=len):
        finer = np.zeros(size, dtype=bool) if first is None else first.copy()
        finer[sessions] = finer[starts] = True
        if np.count_nonzero(finer) * LEAST_SEGMENT > size:
            break
        first = finer
    return np.arange(size) if first is None else np.flatnonzero(first)


def _table(
    name: str, row_groups: Sequence[RowGroup], columns: PackedRows, words: NDArray[np.int32], place: int
) -> GroupValues:
    """Build the table `name`, and write each sample's row in this table to the column `place` of
    `words`.
    """
    segments = [row_group.tables[pointer(name)] for row_group in row_groups]
    sizes = np.concatenate([part["samples"].to_numpy() for part in segments])
    shift = np.cumsum([0, *(row_group.tables[name].num_rows for row_group in row_groups)])
    rows = [part["row"].to_numpy() + np.int32(first) for part, first in zip(segments, shift, strict=False)]
    fill_segments(words, place, np.concatenate(rows), sizes)
    return GroupValues(
        segments=_starts(sizes), columns=columns, place=np.full(shift[-1], -1, dtype=np.int32)
    )


def _starts(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the starts of consecutive parts of the given sizes."""
    starts: NDArray[np.int64] = sizes.cumsum(dtype=np.int64) - sizes
    return starts


def _histories(name: str, row_groups: Sequence[RowGroup]) -> PackedRows:
    start, shift = [], 0
    for row_group in row_groups:
        start.append(row_group.tables[name]["start"].to_numpy().astype(np.int64) + shift)
        shift += row_group.tables[events(name)].num_rows
    length = np.concatenate(
        [row_group.tables[name]["length"].to_numpy() for row_group in row_groups]
    ).astype(np.int64)
    values = np.concatenate([row_group.tables[events(name)]["id"].to_numpy() for row_group in row_groups])
    return PackedRows.of_lists(name, Lists(start=np.concatenate(start), length=length, values=values))


def _matrix(
    parts: Sequence[pa.Table], names: Sequence[str], kind: np.dtype[Any], front: int = 0
) -> NDArray[Any]:
    """Return columns as one array ``[N, front + len(names)]``, filled part by part: a part fits in
    the cache.
    """
    matrix = np.empty((sum(part.num_rows for part in parts), front + len(names)), dtype=kind)
    first = 0
    for part in parts:
        for place, name in enumerate(names, front):
            matrix[first : first + part.num_rows, place] = part[name].to_numpy()
        first += part.num_rows
    return matrix


def _lists(column: pa.ChunkedArray) -> Lists:
    array = flat(column)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return Lists(start=offsets[:-1], length=np.diff(offsets), values=array.values.to_numpy())


def assemble(buffered: Sequence[tuple[ShuffleBuffer, NDArray[np.int32]]], dataset: Dataset) -> Batch:
    """Assemble a batch from rows of one or several shuffle buffers."""
    parts = [_cut(buffer, rows, dataset) for buffer, rows in buffered]
    return parts[0] if len(parts) == 1 else Batch.concatenate(parts)


def empty(dataset: Dataset) -> Batch:
    """Return a batch without samples."""
    keys = tuple(feature.name for feature in dataset.schema.sparse)
    labels = len(dataset.schema.label_columns)
    return Batch(
        label=torch.empty((0, labels) if labels > 1 else 0),
        dense=torch.empty(0, len(dataset.schema.dense)),
        sparse=_keyed(
            keys,
            np.empty(0, dtype=np.int32),
            np.zeros(1, dtype=np.int64),
            0,
            np.empty(0, dtype=np.float32) if dataset.schema.weighted else None,
        ),
        weight=torch.empty(0) if dataset.schema.weight else None,
    )


def _cut(buffer: ShuffleBuffer, rows: NDArray[np.int32], dataset: Dataset) -> Batch:
    samples, size = buffer.samples, len(rows)
    singles, room = len(samples.sparse) - len(samples.lists), sum(part.ids(rows) for part in samples.lists)
    words, missing = spread_rows(samples.ids, rows, paired=buffer.users, ids=singles, room=room)
    labels, weighted = len(dataset.schema.label_columns), bool(dataset.schema.weight)
    front, marks = 2 * buffer.users * size, labels + weighted
    columns = words[front : front + (marks + len(buffer.tables)) * size].reshape(-1, size)
    tables = dict(zip(buffer.tables, columns[marks:], strict=True))
    values = words[front + columns.size :]
    dense = _dense(buffer, rows, tables, len(dataset.schema.dense))
    ids, offsets = end_bags(values, singles, missing, samples.lists, rows)
    weights = (
        take_weights(samples.weights, rows, offsets) if samples.weights and offsets is not None else None
    )
    # `_group` replaces the pointers in `tables` by numbers within the batch, so it runs after
    # `_dense`.
    shared = [name for name in dataset.groups if buffer.tables[name].columns.sparse]
    groups = [_group(buffer.tables[name], tables[name]) for name in shared]
    return Batch(
        label=_label(columns[:labels]),
        dense=dense,
        sparse=_in_order(_keyed(samples.sparse, ids, offsets, size, weights), dataset),
        groups=(*groups, *(_history(name, buffer.tables[name], tables[name]) for name in dataset.windows)),
        user=torch.from_numpy(words[:front].view(np.int64)) if buffer.users else None,
        weight=torch.from_numpy(columns[labels].view(np.float32)) if weighted else None,
    )


def _label(columns: NDArray[np.int32]) -> Tensor:
    """Return labels ``[B]``, or ``[B, T]`` for several labels."""
    bits = columns[0] if len(columns) == 1 else np.ascontiguousarray(columns.T)
    return torch.from_numpy(bits.view(np.float32))


def _dense(
    buffer: ShuffleBuffer, rows: NDArray[np.int32], pointers: Mapping[str, NDArray[np.int32]], features: int
) -> Tensor:
    """Return all dense features ``[B, features]``, including dense features in groups."""
    # Allocated by torch, which aligns to 64 bytes: in MKL's matrix products, the alignment can
    # change the order of sums (Intel, "Getting Reproducible Results with Intel MKL", 2011).
    dense = torch.empty(len(rows), features)
    values = dense.numpy()
    tables = ((buffer.tables[name].columns, chosen) for name, chosen in pointers.items())
    for columns, chosen in ((buffer.samples, rows), *tables):
        if len(columns.dense_places):
            scatter_rows(columns.dense, chosen, values, columns.dense_places)
    return dense


def _keyed(
    keys: tuple[str, ...],
    values: NDArray[np.int32],
    offsets: NDArray[np.int64] | None,
    size: int,
    weights: NDArray[np.float32] | None = None,
) -> KeyedJagged:
    return KeyedJagged(
        keys=keys,
        values=torch.from_numpy(values),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        batch_size=size,
        weights=None if weights is None else torch.from_numpy(weights),
    )


def _in_order(features: KeyedJagged, dataset: Dataset) -> KeyedJagged:
    """Sort features in the order of the schema. In packed rows, features with single ids come
    before lists.
    """
    order = tuple(feature.name for feature in dataset.schema.sparse if feature.name in features.keys)
    return features if features.keys == order else features.select(order)


def _group(table: GroupValues, pointers: NDArray[np.int32]) -> InverseJagged:
    """Return the deduplicated values of the samples that have these pointers. Overwrites the array
    `pointers`.
    """
    used = number_pointers(pointers, table.place)
    unique = _keyed(
        table.columns.sparse, *take_bags(table.columns.ids, table.columns.lists, used), len(used)
    )
    return InverseJagged(unique=unique, inverse=torch.from_numpy(pointers))


def _history(name: str, table: GroupValues, pointers: NDArray[np.int32]) -> InverseJagged:
    used = number_pointers(pointers, table.place)
    start, length, values = (torch.from_numpy(part) for part in join_windows(table.columns.lists[0], used))
    unique = JaggedWindows(key=name, values=values, start=start, length=length)
    return InverseJagged(unique=unique, inverse=torch.from_numpy(pointers))
