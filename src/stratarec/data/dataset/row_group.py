"""One row group of a data set: samples, and the tables to which they point.

A row group has complete sessions and everything that its samples need, so row groups can be read in
any order. Its tables are

    <group>                       the distinct values of the group's features
    <history>                     start and length of distinct windows
    @events/<history>             ids; a window is a slice of them
    @pointers/<group or history>  for each segment of adjacent samples with the same value: their
                                  number, and the row of the value in the table
    @sessions                     session, user (64-bit hashes) and number of samples of each
                                  session, in order

Values are distinct within the row group, and numbered in order of first appearance. The log row of
a sample (``@row``) is stored as the difference from the previous sample's log row in the row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import ROW, SESSION_KEYS, SESSIONS, events, pointer

FILE_BITS = 40
"""Number of low bits of a row number that hold the row in the file; the higher bits hold the index
of the file.
"""
Unit: TypeAlias = Literal["auto", "session", "run", "sample"]
"""Unit of samples that `data.loading` permutes."""
# Maximum number of lists that `slices` builds at a time.
_PIECE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Samples and tables of one row group."""

    samples: pa.Table
    tables: Mapping[str, pa.Table]

    def pointers(self, name: str) -> NDArray[np.int32]:
        """Return for each sample its row in the table `name`."""
        segments = self.tables[pointer(name)]
        rows: NDArray[np.int32] = np.repeat(segments["row"].to_numpy(), segments["samples"].to_numpy())
        return rows

    def expand(self, groups: Mapping[str, Sequence[str]], histories: Sequence[str]) -> dict[str, pa.Array]:
        """Return column name -> the column of every sample, without deduplication."""
        columns = {name: flat(self.samples[name]) for name in self.samples.column_names}
        if ROW in columns:
            columns[ROW] = pa.array(row_numbers(self.samples))
        for group, features in groups.items():
            rows = pa.array(self.pointers(group))
            columns.update({name: flat(self.tables[group][name].take(rows)) for name in features})
        for name in histories:
            rows = self.pointers(name)
            start, length = (self.tables[name][part].to_numpy()[rows] for part in ("start", "length"))
            columns[name] = slices(start, length, self.tables[events(name)]["id"].to_numpy())
        return {**columns, **(sample_keys(self.tables[SESSIONS]) if SESSIONS in self.tables else {})}


def sample_keys(sessions: pa.Table) -> dict[str, pa.Array]:
    """Return the user and the session of every sample, if the table of sessions has these
    columns.
    """
    samples = sessions["samples"].to_numpy()
    return {
        stored: pa.array(np.repeat(sessions[name].to_numpy(), samples))
        for name, stored in SESSION_KEYS.items()
        if name in sessions.column_names
    }


def slices(start: NDArray[Any], length: NDArray[Any], values: NDArray[np.int32]) -> pa.Array:
    """Return the lists ``values[start[i]:start[i] + length[i]]``."""
    offsets = np.concatenate([[0], length.cumsum(dtype=np.int64)])
    sliced = np.empty(offsets[-1], dtype=np.int32)
    # Slices are taken in pieces. The indexes of all values at once would take 24 bytes per value:
    # with long histories many times the size of the partition.
    for first in range(0, len(start), _PIECE):
        rows = slice(first, first + _PIECE)
        begin, end = offsets[first], offsets[min(first + _PIECE, len(start))]
        shift = np.repeat(start[rows] - offsets[:-1][rows], length[rows])
        sliced[begin:end] = values[np.arange(begin, end) + shift]
    return pa.ListArray.from_arrays(offsets.astype(np.int32), sliced)


def flat(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty column stays chunked
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """Values of a deduplication group for N samples: sample i has row ``codes[i]`` of `table`."""

    codes: NDArray[np.int64]
    table: pa.Table


@dataclass(frozen=True, kw_only=True)
class WindowValues:
    """Values of a history for N samples: sample i has ``events[start[i]:stop[i]]``."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    events: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Encoded samples of a shard, deduplicated over the whole shard. `row_groups` cuts them into
    row groups.
    """

    samples: pa.Table
    groups: Mapping[str, GroupValues] = field(default_factory=dict)
    windows: Mapping[str, WindowValues] = field(default_factory=dict)
    sessions: pa.Table | None = None

    def row_groups(self, most: int) -> Iterator[RowGroup]:
        """Yield row groups of at most `most` samples with complete sessions.

        A session of more than `most` samples is cut into parts, which become separate sessions.
        """
        if self.sessions is None:
            bounds = np.append(np.arange(0, self.samples.num_rows, most), self.samples.num_rows)
            parts = [None] * (len(bounds) - 1)
        else:
            pieces = cut_sessions(self.sessions["samples"].to_numpy(), most)
            bounds = np.cumsum([0, *(int(piece.samples.sum()) for piece in pieces)])
            parts = [self._sessions(piece) for piece in pieces]
        for first, last, sessions in zip(bounds[:-1], bounds[1:], parts, strict=True):
            yield self._row_group(int(first), int(last), sessions)

    def _sessions(self, piece: SessionPiece) -> pa.Table:
        assert self.sessions is not None
        rows = self.sessions.slice(piece.first, len(piece.samples))
        return rows.set_column(rows.column_names.index("samples"), "samples", pa.array(piece.samples))

    def _row_group(self, first: int, last: int, sessions: pa.Table | None) -> RowGroup:
        samples, tables = _row_steps(self.samples.slice(first, last - first)), {}
        for name, group in self.groups.items():
            used, inverse = first_appearances(group.codes[first:last])
            tables[pointer(name)], tables[name] = _segments(inverse), group.table.take(pa.array(used))
        for name, window in self.windows.items():
            start, stop = window.start[first:last], window.stop[first:last]
            used, inverse = first_appearances(start * (len(window.events) + 1) + stop)
            start, stop = (used // (len(window.events) + 1), used % (len(window.events) + 1))
            tables[pointer(name)] = _segments(inverse)
            tables[name], tables[events(name)] = _window_tables(start, stop, window.events)
        if sessions is not None:
            tables[SESSIONS] = sessions
        return RowGroup(samples=samples, tables=tables)


@dataclass(frozen=True, kw_only=True)
class SessionPiece:
    """Consecutive sessions of one row group, and the number of samples of each."""

    first: int
    samples: NDArray[np.int32]


def cut_sessions(sizes: NDArray[Any], most: int) -> list[SessionPiece]:
    """Divide sessions of the given sizes into row groups of at most `most` samples; larger sessions
    are cut into parts.
    """
    pieces: list[SessionPiece] = []
    begin, ends = 0, np.cumsum(sizes, dtype=np.int64)
    while begin < len(sizes):
        done = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, done + most, side="right"))
        if end > begin:
            pieces.append(SessionPiece(first=begin, samples=np.asarray(sizes[begin:end], dtype=np.int32)))
            begin = end
            continue
        remaining = int(sizes[begin])
        while remaining:
            part = min(remaining, most)
            pieces.append(SessionPiece(first=begin, samples=np.array([part], dtype=np.int32)))
            remaining -= part
        begin += 1
    return pieces


def first_appearances(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the distinct codes in order of first appearance, and the position of each code among
    them.
    """
    # Adjacent samples often have the same code, and only the first of them is sorted.
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1])[: len(codes)])
    distinct, first, ranks = np.unique(codes[starts], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return distinct[order], np.repeat(place[ranks], np.diff(starts, append=len(codes)))


def split_rows(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the file index and the row in that file for row numbers that `Spill` assigned."""
    return numbers >> FILE_BITS, numbers & ((1 << FILE_BITS) - 1)


def row_numbers(samples: pa.Table) -> NDArray[np.int64]:
    """Return the row number of each sample of a row group, as `Spill` assigned it."""
    numbers: NDArray[np.int64] = np.cumsum(samples[ROW].to_numpy())
    return numbers


def _row_steps(samples: pa.Table) -> pa.Table:
    """Convert row numbers to differences. Most differences are equal, so zstd compresses them
    well.
    """
    if ROW not in samples.column_names:
        return samples
    rows = pa.array(np.diff(samples[ROW].to_numpy(), prepend=0))
    return samples.set_column(samples.column_names.index(ROW), ROW, rows)


def _segments(pointers: NDArray[np.int32]) -> pa.Table:
    """Encode pointers as segments: return a table with the number of samples of each segment, and
    their row.
    """
    starts = np.flatnonzero(np.diff(pointers, prepend=-1))
    samples = np.diff(starts, append=len(pointers)).astype(np.int32)
    return pa.table({"samples": pa.array(samples), "row": pa.array(pointers[starts])})


def coverage(start: NDArray[np.int64], stop: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return ``[size]`` the number of windows ``start[i]:stop[i]`` that cover each position."""
    edges = np.zeros(size + 1, dtype=np.int64)
    np.add.at(edges, start, 1)
    np.add.at(edges, stop, -1)
    covered: NDArray[np.int64] = edges.cumsum()[:-1]
    return covered


def _window_tables(
    start: NDArray[np.int64], stop: NDArray[np.int64], values: NDArray[np.int32]
) -> tuple[pa.Table, pa.Table]:
    """Return a table of distinct windows and a table of events, which has only the events inside a
    window.
    """
    covered = coverage(start, stop, len(values)) > 0
    place = np.concatenate([[0], covered.cumsum()])
    length = stop - start
    begin = np.where(length > 0, place[start], 0)
    windows = {"start": pa.array(begin.astype(np.int32)), "length": pa.array(length.astype(np.int32))}
    return pa.table(windows), pa.table({"id": pa.array(values[covered])})
