"""Reading row groups, and the checks of every column's type and range.

Kernels index by these columns, so no value is used before its type and range have been checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.column_names import (
    LABEL,
    ROW,
    SESSION,
    SESSION_KEYS,
    SESSIONS,
    TIME,
    USER,
    WEIGHT,
    events,
    from_stored,
    label_names,
    pointer,
    stored_name,
    weights_of,
)
from stratarec.data.dataset.manifest import ADVICE, DatasetManifest, Shard
from stratarec.data.dataset.row_group import RowGroup, SlateKey, row_numbers, slate_starts, split_rows
from stratarec.data.schema import UNKNOWN
from stratarec.errors import DatasetError
from stratarec.io.atomic import reporting_damage
from stratarec.kernels.collate import least_and_total, outside, outside_windows

_IDS, _FLOATS, _PLACES = pa.int32(), pa.float32(), pa.int32()
# Of a row group; a crafted file of kilobytes can unfold to any size.
_MOST_BYTES = 1 << 31

# Of all samples of a row group: offsets of lists are int32, and windows of kilobytes can unfold to any size, too.
_MOST_EVENTS = (1 << 31) - 1

Columns = Mapping[str, pa.DataType]


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """What must be in a shard's two files."""

    samples: Columns
    """Column -> type, of the file of samples."""
    tables: Mapping[str, Columns]
    """Table -> column -> type."""
    labels: int
    """How many labels there are."""
    ids: Mapping[str, int]
    """Feature of ids -> rows of its table."""
    pointed: tuple[str, ...]
    """Groups and histories, which samples point at."""
    windows: tuple[str, ...]
    """Histories that are stored as windows."""
    aligned: tuple[tuple[str, ...], ...]
    """Columns whose lists are as long as each other: those of each sequence that has several, and a feature's values
    and weights."""
    weights: tuple[str, ...]
    """Columns of the weights of values."""
    files: int
    """Of the log, which rows are of; 0 where rows are counted in the order of the source."""

    @classmethod
    def of(cls, manifest: DatasetManifest) -> ShardLayout:
        schema, groups = manifest.columns, manifest.groups
        features = _features(manifest)
        histories = [feature.name for feature in schema.histories]
        grouped = {name for names in (groups or {}).values() for name in names}
        labels = dict.fromkeys(label_names(len(schema.label_columns)), pa.uint8())
        samples = {**labels, **({WEIGHT: _FLOATS} if schema.weight else {})}
        apart = grouped | set(histories if manifest.deduplicated else ())
        samples.update({name: kind for name, kind in features.items() if name not in apart})
        samples.update({weights_of(feature.name): pa.list_(_FLOATS) for feature in schema.weighted})
        samples.update({TIME: pa.int64()} if schema.time else {})
        samples.update({ROW: pa.int64()} if manifest.about.rows.kept else {})
        sessions = {"user": pa.int64(), **({"session": pa.int64()} if schema.session else {})}
        pointed = (*(groups or {}), *histories) if manifest.deduplicated else ()
        tables: dict[str, Columns] = {}
        if not manifest.deduplicated:
            samples.update({SESSION_KEYS[key]: kind for key, kind in sessions.items() if schema.session_keys})
        else:
            tables.update({name: {each: features[each] for each in names} for name, names in (groups or {}).items()})
            for name in histories:
                tables[name] = {"start": _PLACES, "length": _PLACES}
                tables[events(name)] = {"id": _IDS}
            tables.update({pointer(name): {"samples": _PLACES, "row": _PLACES} for name in pointed})
            tables.update({SESSIONS: {**sessions, "samples": _PLACES}} if schema.session_keys else {})
        return cls(
            samples=samples,
            tables=tables,
            labels=len(schema.label_columns),
            ids={feature.name: manifest.vocabularies[feature.vocabulary].rows for feature in schema.sparse},
            pointed=pointed,
            windows=tuple(histories) if manifest.deduplicated else (),
            aligned=(
                *(tuple(each.name for each in columns) for columns in schema.sequences.values() if len(columns) > 1),
                *((feature.name, weights_of(feature.name)) for feature in schema.weighted),
            ),
            weights=tuple(weights_of(feature.name) for feature in schema.weighted),
            files=len(manifest.about.rows.files),
        )

    @property
    def flat_tables(self) -> Columns:
        """Column -> type, of the file of tables: a list of each column's values."""
        return {
            stored_name(table, name): pa.list_(kind)
            for table, columns in self.tables.items()
            for name, kind in columns.items()
        }

    def faults(self, row_group: RowGroup) -> Iterator[str]:
        """What is wrong with the values of a row group, columns that were not read aside."""
        for name in label_names(self.labels):
            label, most = row_group.samples[name].to_numpy(), UNKNOWN if self.labels > 1 else 1
            if len(label) and label.max() > most:
                yield f"a label is {label.max()}, expected 0 or 1"
        if WEIGHT in self.samples and (row_group.samples[WEIGHT].to_numpy() < 0).any():
            yield "a weight is negative"
        for name in self.weights:
            if (pc.list_flatten(row_group.samples[name]).to_numpy() < 0).any():
                yield f"column {name!r} has a weight that is negative"
        for table in (
            row_group.samples,
            *(row_group.tables[name] for name in self.pointed if name not in self.windows),
        ):
            yield from self._values(table)
            yield from self._unequal(table)
        yield from self._pointers(row_group)

    def row_faults(self, rows: NDArray[np.int64]) -> Iterator[str]:
        """What is wrong with the rows of the log that samples came from."""
        if not len(rows):
            return
        if rows.min() < 0 or len(np.unique(rows)) != len(rows):
            yield "rows of the log that are negative or stand twice"
        last = int(split_rows(rows)[0].max())
        if self.files and last >= self.files:
            yield f"a row of file {last} of the log, expected 0 to {self.files - 1}"

    def _values(self, table: pa.Table) -> Iterator[str]:
        for name in table.column_names:
            rows = self.ids.get(name)
            for part in table[name].chunks:
                values = part.flatten() if pa.types.is_list(part.type) else part
                if values.null_count:
                    yield f"column {name!r} has missing values"
                elif rows is not None:
                    yield from _ids_outside(name, values.to_numpy(), rows)
                elif values.type == _FLOATS and not np.isfinite(values.to_numpy()).all():
                    yield f"column {name!r} has a value that is not finite"

    def _unequal(self, table: pa.Table) -> Iterator[str]:
        for main, *others in self.aligned:
            for name in others if main in table.column_names else ():
                if not pc.list_value_length(table[name]).equals(pc.list_value_length(table[main])):
                    yield f"columns {main!r} and {name!r} have lists of different lengths"

    def _pointers(self, row_group: RowGroup) -> Iterator[str]:
        for name in self.pointed:
            runs, rows = row_group.tables[pointer(name)], len(row_group.tables[name])
            places = runs["row"].to_numpy()
            wrong = outside(places, rows)
            if rows > row_group.samples.num_rows:
                yield f"{name} has {rows} rows for {row_group.samples.num_rows} samples"
            if wrong >= 0:
                yield f"{pointer(name)} points at {places[wrong]}, expected 0 to {rows - 1}"
            yield from _miscounted(runs, row_group.samples.num_rows, f"{pointer(name)} has")
        for name in self.windows:
            start, length = (row_group.tables[name][part].to_numpy() for part in ("start", "length"))
            ids = row_group.tables[events(name)]["id"].to_numpy()
            wrong = outside_windows(start, length, len(ids))
            if wrong >= 0:
                yield f"a window of {name} has {length[wrong]} events from {start[wrong]}, expected 0 to {len(ids)}"
            yield from _ids_outside(events(name), ids, self.ids[name])
            runs = row_group.tables[pointer(name)]
            total = int(length[runs["row"].to_numpy()].astype(np.int64) @ runs["samples"].to_numpy().astype(np.int64))
            if total > _MOST_EVENTS:
                yield f"windows of {name} have {total:,} events, expected at most {_MOST_EVENTS:,}"
        if SESSIONS in self.tables:
            yield from _miscounted(row_group.tables[SESSIONS], row_group.samples.num_rows, "its sessions have")


def _features(manifest: DatasetManifest) -> dict[str, pa.DataType]:
    """Type of each feature's column."""
    schema = manifest.columns
    found: dict[str, pa.DataType] = {feature.name: _FLOATS for feature in schema.dense}
    for feature in schema.sparse:
        found[feature.name] = pa.list_(_IDS) if feature.traits.lists else _IDS
    return {name: found[name] for name in schema.names}


def _ids_outside(name: str, ids: np.ndarray, rows: int) -> Iterator[str]:
    if not len(ids):
        return
    least, most = int(ids.min()), int(ids.max())
    if least < -1 or most >= rows:
        yield f"column {name!r} has ids of {least} to {most}, expected -1 to {rows - 1}"


def _miscounted(parts: pa.Table, samples: int, what: str) -> Iterator[str]:
    """Whether parts of a row group have other than its samples."""
    least, counted = least_and_total(parts["samples"].to_numpy())
    if counted != samples or least < 1:
        yield f"{what} {counted} samples in parts of {least} and more, expected {samples} in parts of 1 and more"


def file_faults(file: pq.ParquetFile, shard: Shard, columns: Columns, *, tables: bool) -> Iterator[str]:
    """What is wrong with a file of samples or of tables, by its footer."""
    found = {field.name: field.type for field in file.schema_arrow}
    if len(found) != len(file.schema_arrow):
        yield "a column stands twice"
    for name in sorted({*columns, *found}):
        if not _alike(found.get(name), columns.get(name)):
            yield f"column {name!r} is of {found.get(name, 'no')} type, expected {columns.get(name, 'no such column')}"
    metadata = file.metadata
    rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if rows != (tuple(1 for _ in shard.row_groups) if tables else shard.row_groups):
        yield f"row groups of {str(rows)[:60]} rows, expected {len(shard.row_groups)} with {shard.samples} samples"
    # Of columns alone the footer tells more, and pyarrow ends the process where their statistics are damaged.
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        if not 0 <= size <= _MOST_BYTES:
            yield f"row group {group} unfolds to {size:,} bytes, expected at most {_MOST_BYTES:,}"


def _alike(found: pa.DataType | None, expected: pa.DataType | None) -> bool:
    """Whether types agree; what a list calls its values does not matter."""
    if found is None or expected is None:
        return False
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return _alike(found.value_type, expected.value_type)
    return bool(found == expected)


# Columns that training has no use for.
_UNUSED = (TIME, SESSION, ROW, f"{SESSIONS}/session")
# Files that stay open: opening one and reading its footer takes as long as reading a column.
_OPEN = 64


class RowGroupReader:
    """Reads the row groups of some shards in any order, keeping files open; for one thread at a time.

    Parameters
    ----------
    root : Path
        Where the data set is.
    shards : sequence of Shard
    layout : Layout
        What their files must hold.
    unused : bool
        Read what training makes no use of too.
    """

    def __init__(self, root: Path, shards: Sequence[Shard], layout: ShardLayout, *, unused: bool) -> None:
        self._root, self._shards, self._layout = root, shards, layout
        self._without = () if unused else _UNUSED
        self._open: OrderedDict[str, tuple[pq.ParquetFile, list[str]]] = OrderedDict()

    def __enter__(self) -> RowGroupReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def read(self, shard: int, group: int) -> RowGroup:
        """One row group with its tables.

        Raises
        ------
        DatasetError
            Naming the file, when it cannot be read or holds what no data set of ours does.
        """
        whole = self._shards[shard]
        samples = self._table(shard, group)
        row = None if whole.tables is None else self._table(shard, group, tables=True)
        with reporting_damage(self._root / whole.path):
            row_group = RowGroup(samples=samples, tables={} if row is None else _split_row(row))
            for fault in self._layout.faults(row_group):
                raise self._damaged(whole.path, f", row group {group}", fault)
        return row_group

    def row_numbers(self, shard: int, group: int) -> NDArray[np.int64]:
        """Where the samples of one row group came from, without reading the rest of it."""
        found = row_numbers(self._table(shard, group, wanted=[ROW]))
        for fault in self._layout.row_faults(found):
            raise self._damaged(self._shards[shard].path, f", row group {group}", fault)
        return found

    def times(self, shard: int, group: int) -> NDArray[np.int64]:
        """Return the times of the samples of one row group, without reading the rest of it."""
        times: NDArray[np.int64] = self._table(shard, group, wanted=[TIME])[TIME].to_numpy()
        return times

    def sessions(self, shard: int, group: int) -> NDArray[np.int64]:
        """The session of each sample of one row group, likewise."""
        if self._shards[shard].tables is None:
            found: NDArray[np.int64] = self._table(shard, group, wanted=[SESSION])[SESSION].to_numpy()
            return found
        wanted = [stored_name(SESSIONS, name) for name in ("session", "samples")]
        sessions = _split_row(self._table(shard, group, tables=True, wanted=wanted))[SESSIONS]
        return np.repeat(sessions["session"].to_numpy(), sessions["samples"].to_numpy())

    def slates(self, shard: int, group: int, by: SlateKey) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The first label of each sample of one row group, and where its slates begin, likewise."""
        if self._shards[shard].tables is None:
            keys = [USER] if by == "user" else [USER, SESSION]
            row_group = RowGroup(samples=self._table(shard, group, wanted=[LABEL, *keys]), tables={})
        else:
            wanted = [stored_name(SESSIONS, name) for name in ("samples", "user")]
            row = self._table(shard, group, tables=True, wanted=wanted)
            row_group = RowGroup(samples=self._table(shard, group, wanted=[LABEL]), tables=_split_row(row))
        return row_group.samples[LABEL].to_numpy(), slate_starts(row_group, by)

    def _table(self, shard: int, group: int, *, tables: bool = False, wanted: list[str] | None = None) -> pa.Table:
        part = self._shards[shard].tables if tables else self._shards[shard]
        assert part is not None
        try:
            file, columns = self._file(shard, part.path, tables)
            # In one order for all shards, whatever that of a file is: row groups are joined.
            found = file.read_row_group(group, wanted or columns, use_threads=False).select(wanted or columns)
            for name, column in zip(found.column_names, found.columns, strict=True):
                if column.null_count:
                    raise self._damaged(part.path, f", row group {group}", f"column {name!r} has missing values")
            return found
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(part.path, f", row group {group}", " ".join(str(error).split())) from error

    def _file(self, shard: int, relative: str, tables: bool) -> tuple[pq.ParquetFile, list[str]]:
        """An open file, and the columns to read of it."""
        if relative not in self._open:
            if len(self._open) == _OPEN:
                self._open.popitem(last=False)[1][0].close()
            file = pq.ParquetFile(self._root / relative)
            columns = self._layout.flat_tables if tables else self._layout.samples
            for fault in file_faults(file, self._shards[shard], columns, tables=tables):
                file.close()
                raise self._damaged(relative, "", fault)
            self._open[relative] = (file, [name for name in columns if name not in self._without])
        self._open.move_to_end(relative)
        return self._open[relative]

    def _damaged(self, relative: str, place: str, fault: str) -> DatasetError:
        return DatasetError(f"{self._root / relative}{place}: damaged ({fault}); {ADVICE}")


def _split_row(row: pa.Table) -> dict[str, pa.Table]:
    """The tables whose columns lie in one row, a list each."""
    tables: dict[str, dict[str, pa.Array]] = {}
    for column in row.column_names:
        table, name = from_stored(column)
        # The one list is all that there is of its values.
        tables.setdefault(table, {})[name] = row[column].chunk(0).values
    return {name: pa.table(columns) for name, columns in tables.items()}
