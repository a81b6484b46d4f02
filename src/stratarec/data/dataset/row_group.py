"""One row group of a data set: samples, and the tables that their pointers point into.

A row group holds whole sessions and everything its samples need, so a reader takes row groups in any order. Its
tables are

    <group>                       the distinct values of the group's features
    <history>                     start and length of distinct windows
    @events/<history>             the ids that windows are slices of
    @pointers/<group or history>  in order of samples: how many neighbours have the same value, and its row in the table
    @sessions                     session, user (64-bit hashes) and number of samples of each session, in order

Values are distinct over the whole row group, not in each session alone, and numbered in order of first appearance.
Where a sample came from (``@row``) is stored as the difference to the sample before it in the row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import ROW, SESSION, SESSION_KEYS, SESSIONS, USER, events, pointer

FILE_BITS = 40
"""The low bits of a row's number are its row in the file, the others the file's index."""
SlateKey: TypeAlias = Literal["session", "user"]
"""What the samples of a slate have in common."""
# Lists that are cut at a time.
_PIECE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Samples and tables of one row group."""

    samples: pa.Table
    tables: Mapping[str, pa.Table]

    def pointers(self, name: str) -> NDArray[np.int32]:
        """Row of the table `name` of each sample."""
        runs = self.tables[pointer(name)]
        found: NDArray[np.int32] = np.repeat(runs["row"].to_numpy(), runs["samples"].to_numpy())
        return found

    def expand(self, groups: Mapping[str, Sequence[str]], histories: Sequence[str]) -> dict[str, pa.Array]:
        """Every column of the samples without deduplication, by name."""
        found = {name: _flat(self.samples[name]) for name in self.samples.column_names}
        if ROW in found:
            found[ROW] = pa.array(row_numbers(self.samples))
        for group, features in groups.items():
            rows = pa.array(self.pointers(group))
            found.update({name: _flat(self.tables[group][name].take(rows)) for name in features})
        for name in histories:
            rows = self.pointers(name)
            start, length = (self.tables[name][part].to_numpy()[rows] for part in ("start", "length"))
            found[name] = slices(start, length, self.tables[events(name)]["id"].to_numpy())
        return {**found, **(sample_keys(self.tables[SESSIONS]) if SESSIONS in self.tables else {})}


def slate_starts(row_group: RowGroup, by: SlateKey) -> NDArray[np.int64]:
    """Where sessions, or users, begin among the samples, of which those of one stand together."""
    if SESSIONS in row_group.tables:
        sessions = row_group.tables[SESSIONS]
        sizes = sessions["samples"].to_numpy()
        starts: NDArray[np.int64] = sizes.cumsum(dtype=np.int64) - sizes
        return starts if by == "session" else starts[_others(sessions["user"])]
    samples = row_group.samples
    others = _others(samples[USER])
    return np.flatnonzero(others if by == "user" else others | _others(samples[SESSION]))


def _others(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which values are not the one before them."""
    values = column.to_numpy()
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]


def sample_keys(sessions: pa.Table) -> dict[str, pa.Array]:
    """User and session of every sample, of what there is in a table of sessions."""
    samples = sessions["samples"].to_numpy()
    return {
        stored: pa.array(np.repeat(sessions[name].to_numpy(), samples))
        for name, stored in SESSION_KEYS.items()
        if name in sessions.column_names
    }


def slices(start: NDArray[Any], length: NDArray[Any], values: NDArray[np.int32]) -> pa.Array:
    """The lists ``values[start[i]:start[i] + length[i]]``."""
    offsets = np.concatenate([[0], length.cumsum(dtype=np.int64)])
    found = np.empty(offsets[-1], dtype=np.int32)
    # In pieces: long histories of all rows at once would take 24 bytes a value for places, many times the partition.
    for first in range(0, len(start), _PIECE):
        rows = slice(first, first + _PIECE)
        begin, end = offsets[first], offsets[min(first + _PIECE, len(start))]
        shift = np.repeat(start[rows] - offsets[:-1][rows], length[rows])
        found[begin:end] = values[np.arange(begin, end) + shift]
    return pa.ListArray.from_arrays(offsets.astype(np.int32), found)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    return whole


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """A group over N samples: sample i has row ``codes[i]`` of `table`."""

    codes: NDArray[np.int64]
    table: pa.Table


@dataclass(frozen=True, kw_only=True)
class WindowValues:
    """A history over N samples: sample i has ``events[start[i]:stop[i]]``."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    events: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Encoded samples of a shard, deduplicated over the whole of it; `row_groups` cuts it into row groups."""

    samples: pa.Table
    groups: Mapping[str, GroupValues] = field(default_factory=dict)
    windows: Mapping[str, WindowValues] = field(default_factory=dict)
    sessions: pa.Table | None = None

    def row_groups(self, most: int) -> Iterator[RowGroup]:
        """Row groups of up to `most` samples that end where a session ends.

        A session of more than `most` samples is cut; each part then counts as a session of its own.
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
            tables[pointer(name)], tables[name] = _runs(inverse), group.table.take(pa.array(used))
        for name, window in self.windows.items():
            start, stop = window.start[first:last], window.stop[first:last]
            used, inverse = first_appearances(start * (len(window.events) + 1) + stop)
            start, stop = (used // (len(window.events) + 1), used % (len(window.events) + 1))
            tables[pointer(name)] = _runs(inverse)
            tables[name], tables[events(name)] = _window_tables(start, stop, window.events)
        if sessions is not None:
            tables[SESSIONS] = sessions
        return RowGroup(samples=samples, tables=tables)


@dataclass(frozen=True, kw_only=True)
class SessionPiece:
    """The sessions of one row group: session `first` and those behind it, with their samples here."""

    first: int
    samples: NDArray[np.int32]


def cut_sessions(sizes: NDArray[Any], most: int) -> list[SessionPiece]:
    """Fill row groups with whole sessions up to `most` samples; a larger session is cut into parts of its own."""
    pieces: list[SessionPiece] = []
    begin, ends = 0, np.cumsum(sizes, dtype=np.int64)
    while begin < len(sizes):
        done = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, done + most, side="right"))
        if end > begin:
            pieces.append(SessionPiece(first=begin, samples=np.asarray(sizes[begin:end], dtype=np.int32)))
            begin = end
            continue
        left = int(sizes[begin])
        while left:
            part = min(left, most)
            pieces.append(SessionPiece(first=begin, samples=np.array([part], dtype=np.int32)))
            left -= part
        begin += 1
    return pieces


def first_appearances(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The distinct codes in order of first appearance, and the place of each code among them."""
    distinct, first, ranks = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return distinct[order], place[ranks]


def split_rows(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of the file and row in it, of numbers that `Spill` gave."""
    return numbers >> FILE_BITS, numbers & ((1 << FILE_BITS) - 1)


def row_numbers(samples: pa.Table) -> NDArray[np.int64]:
    """Where each sample of a row group came from, as `Spill` numbers rows."""
    found: NDArray[np.int64] = np.cumsum(samples[ROW].to_numpy())
    return found


def _row_steps(samples: pa.Table) -> pa.Table:
    """Samples with row numbers as differences: most follow the one before them, and repeats are what zstd finds."""
    if ROW not in samples.column_names:
        return samples
    rows = pa.array(np.diff(samples[ROW].to_numpy(), prepend=0))
    return samples.set_column(samples.column_names.index(ROW), ROW, rows)


def _runs(pointers: NDArray[np.int32]) -> pa.Table:
    """Pointers as lengths of runs and what they point at."""
    starts = np.flatnonzero(np.diff(pointers, prepend=-1))
    samples = np.diff(starts, append=len(pointers)).astype(np.int32)
    return pa.table({"samples": pa.array(samples), "row": pa.array(pointers[starts])})


def coverage(start: NDArray[np.int64], stop: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """``[size]`` how many of the windows from `start` to `stop` cover each place."""
    edges = np.zeros(size + 1, dtype=np.int64)
    np.add.at(edges, start, 1)
    np.add.at(edges, stop, -1)
    covered: NDArray[np.int64] = edges.cumsum()[:-1]
    return covered


def _window_tables(
    start: NDArray[np.int64], stop: NDArray[np.int64], values: NDArray[np.int32]
) -> tuple[pa.Table, pa.Table]:
    """Windows and the events that they cover, without the events between them."""
    covered = coverage(start, stop, len(values)) > 0
    place = np.concatenate([[0], covered.cumsum()])
    length = stop - start
    begin = np.where(length > 0, place[start], 0)
    windows = {"start": pa.array(begin.astype(np.int32)), "length": pa.array(length.astype(np.int32))}
    return pa.table(windows), pa.table({"id": pa.array(values[covered])})
